"""The engine, however steps are repeated and attention is made, beside a plain, padded cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tiny_models import LetterTokenizer, make_prompt, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from grouper.algorithms.batching import unweighted_rows
from grouper.errors import ModelError
from grouper.kernels.cpu import graph, ops
from grouper.kernels.cpu.graph import PackedWeights, Step
from grouper.kernels.cpu.library import library
from grouper.kernels.triton import decode as triton_decode
from grouper.kernels.triton import draw as triton_draw
from grouper.kernels.triton import language
from grouper.kernels.triton.language import AVAILABLE
from grouper.models.policy import Policy
from grouper.sampling import decode_attention, draw, engine
from grouper.sampling.base import SampleRequest, draw_seed
from grouper.sampling.engine import (
    BaseEngine,
    CpuGraphs,
    Engine,
    OpByOp,
    PaddedEngine,
    choose_graphs,
    make_engine,
)
from grouper.sampling.kv_cache import CacheSize
from grouper.sampling.native import NativeSampler, release_engines
from grouper.sampling.weights import SamplingWeights
from grouper.types import Completion, SamplingParams

STOPS = (2, 5)
MODELS = [
    *("qwen2-sliding", "qwen3", "gemma2", "gpt2"),
    # What these have, one of those has, too.
    *(pytest.param(f, marks=pytest.mark.slow) for f in ("qwen2", "llama", "mistral", "gemma3")),
]
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
needs_library = pytest.mark.skipif(library() is None, reason="no C++ compiler, or kernels are off")

Made = Callable[[Policy, CacheSize, Sequence[int]], BaseEngine]


def op_by_op(policy: Policy, size: CacheSize, stop_ids: Sequence[int]) -> Engine:
    return Engine(policy, size, stop_ids, OpByOp())


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention in plain operations."""
    monkeypatch.setattr(decode_attention, "kernel_for", lambda store: None)


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rings that have to grow in the shortest of tests."""
    monkeypatch.setattr(engine, "KERNEL_WIDTH", 5)
    monkeypatch.setattr(engine, "PLAIN_WIDTH", 5)


def ask(number: int, sample: int, **params: Any) -> SampleRequest:
    return SampleRequest(
        prompt=make_prompt(number, 3 + 2 * number),
        params=SamplingParams(**{"max_new_tokens": 23, **params}),
        key=draw_seed(0, "static", number, sample),
    )


def mixed() -> list[SampleRequest]:
    letters = tuple(chr(32 + i) for i in range(10, 90, 4))
    kinds: list[dict[str, object]] = [
        {},
        {"max_new_tokens": 1},
        {"min_new_tokens": 23},
        {"stop": letters, "max_new_tokens": 9},
        {"temperature": 0.0, "min_new_tokens": 4},
        {"top_p": 0.8},
    ]
    return [ask(i % 4, i, **kind) for i, kind in enumerate(kinds * 3)]


def sampler_of(policy: Policy, make: Made, *, slots: int = 64, steps: int = 1) -> NativeSampler:
    return NativeSampler(
        SamplingWeights(policy),
        LetterTokenizer(),
        stop_token_ids=STOPS,
        max_slots=slots,
        steps_per_sync=steps,
        engine=make,
    )


def draw_all(
    policy: Policy, wanted: list[SampleRequest], make: Made, *, slots: int = 64, steps: int = 1
) -> list[Completion]:
    found = dict(sampler_of(policy, make, slots=slots, steps=steps).sample(wanted))
    return [found[i] for i in range(len(wanted))]


def assert_same(ours: list[Completion], theirs: list[Completion], tolerance: float = 2e-5) -> None:
    assert [c.token_ids for c in ours] == [c.token_ids for c in theirs]
    assert [c.finish_reason for c in ours] == [c.finish_reason for c in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=tolerance)


@pytest.mark.usefixtures("no_kernels", "narrow")
@pytest.mark.parametrize("family", MODELS)
def test_it_draws_what_a_padded_cache_draws(family: str) -> None:
    """Rings that grow, refills, rows that are moved together, groups of any size."""
    policy = Policy(tiny_model(family, scale=2.0))
    wanted = mixed()
    expected = draw_all(policy, wanted, PaddedEngine)
    for many, steps in ((64, 1), (64, 8), (5, 3)):
        assert_same(draw_all(policy, wanted, op_by_op, slots=many, steps=steps), expected)


@needs_library
@pytest.mark.parametrize("family", MODELS)
def test_what_is_compiled_draws_it_too(family: str) -> None:
    policy = Policy(tiny_model(family, scale=2.0))
    wanted = mixed()
    expected = draw_all(policy, wanted, PaddedEngine)
    assert_same(draw_all(policy, wanted, make_engine), expected)


@pytest.mark.usefixtures("narrow")
def test_rings_wrap_while_slots_are_refilled() -> None:
    policy = Policy(tiny_model())
    wanted = [ask(i % 3, i, min_new_tokens=6 + i % 3, max_new_tokens=8) for i in range(24)]
    expected = draw_all(policy, wanted, PaddedEngine)
    assert_same(draw_all(policy, wanted, op_by_op, slots=4, steps=4), expected)


@pytest.mark.slow
@pytest.mark.skipif(not AVAILABLE or torch.cuda.is_available(), reason="Triton's interpreter")
@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_the_kernel_for_gpus_draws_it_too(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy(tiny_model(family, scale=2.0))
    wanted = [ask(i % 2, i, max_new_tokens=4 + i) for i in range(4)]
    expected = draw_all(policy, wanted, PaddedEngine)
    monkeypatch.setattr(decode_attention, "kernel_for", lambda store: decode_attention.by_triton)
    assert_same(draw_all(policy, wanted, op_by_op, slots=3, steps=8), expected)
    assert not language._FAILURES


class NoHost(TorchDispatchMode):
    """Refuses what a captured step may not do: take a tensor from the host, or give one back."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = func(*args, **(kwargs or {}))
        seen = tree_leaves((args, kwargs, given))
        devices = {t.device.type for t in seen if isinstance(t, torch.Tensor)}
        assert "cpu" not in devices, f"{func} meets the host"
        return given


def step_without_a_host(family: str, minimum: int = 0, **changes: Any) -> None:
    """One step on the `meta` device, where whoever wants to know a value raises."""
    policy = Policy(tiny_model(family, **changes).to("meta"))
    wanted = [ask(0, 0, min_new_tokens=minimum), ask(0, 1, temperature=0.0, top_p=0.9)]
    made = op_by_op(policy, CacheSize(2, 1, 5, 23), STOPS)
    made.begin(wanted)
    made._prompts, made._owners, made._bucket = {wanted[0].prompt.token_ids: 0}, [0, 0], 2
    made._cache.make_places(1)
    made.rows.fill([0, 1], wanted)
    made._settle()
    made._block = (made.rows.tokens[None], *torch.zeros(2, 1, 2, device="meta"))
    with NoHost():
        made._step()


@pytest.mark.parametrize("family", [family for family in MODELS if family != "gpt2"])
@pytest.mark.parametrize("minimum", [0, 3])
@torch.no_grad()
def test_no_op_of_a_step_waits_for_the_device_or_copies_to_it(family: str, minimum: int) -> None:
    step_without_a_host(family, minimum)


@torch.no_grad()
def test_rotary_embeddings_sized_by_the_longest_position_are_not_recorded() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    policy = Policy(tiny_model("llama", rope_parameters=rope))
    assert type(choose_graphs(policy, completion=20)) is OpByOp
    with pytest.raises(RuntimeError, match="meta tensors"):
        step_without_a_host("llama", rope_parameters=rope)


# Shapes of models that keep a state in place of keys and values, alone or beside attention.
RECURRENT: dict[str, dict[str, Any]] = {
    "mamba": {"state_size": 8, "time_step_rank": 4},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts": 1,
        "num_experts_per_tok": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "minimax": {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4},
    "rwkv": {"attention_hidden_size": 32, "intermediate_size": 64},
}


def recurrent(kind: str, **changes: Any) -> Policy:
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 97}
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind, **{**shape, **RECURRENT[kind], "eos_token_id": 2, **changes}
    )
    return Policy(AutoModelForCausalLM.from_config(config), native=False)


@pytest.mark.parametrize("kind", ["mamba", "jamba"])
@torch.no_grad()
def test_recurrent_models_go_on_from_their_own_state(kind: str) -> None:
    """It was a traceback; and a cache that a model does not know is ignored without a word."""
    policy, wanted = recurrent(kind), [ask(i % 4, i) for i in range(10)]
    for request, one in zip(wanted, draw_all(policy, wanted, make_engine, slots=6), strict=True):
        row = unweighted_rows([request.prompt.token_ids], [one.token_ids], [0])
        assert one.logprobs == pytest.approx(policy(row).logprobs[0].tolist(), abs=2e-5)


@pytest.mark.parametrize(
    ("kind", "why"),
    [("rwkv", "it takes no cache of transformers' usual kind"), ("minimax", ".*of its own")],
)
def test_a_model_that_takes_no_usual_cache_is_refused(kind: str, why: str) -> None:
    """With its own, a MiniMax that begins linear draws other tokens than it says of whole texts."""
    with pytest.raises(ModelError, match=f"cannot be sampled from in padded rows: {why}"):
        draw_all(recurrent(kind), [ask(0, 0)], make_engine)


def test_what_padded_rows_cannot_do_is_refused() -> None:
    """Windows of one, and those that only the cache knows, were sampled wrongly."""
    refusal = "ForCausalLM cannot be sampled from in padded rows: "
    with pytest.raises(ModelError, match=refusal + "`get_seq_length` can only"):
        draw_all(
            recurrent("jamba", attn_layer_offset=3, attn_layer_period=4), [ask(0, 0)], make_engine
        )
    one = Policy(tiny_model("mistral", sliding_window=1), native=False)
    with pytest.raises(ModelError, match=refusal + "logits differ by"):
        draw_all(one, [ask(0, 0)], make_engine)
    short = Policy(tiny_model("llama", sliding_window=20), native=False)
    draw_all(short, [ask(0, 0, max_new_tokens=17)], make_engine)
    with pytest.raises(ModelError, match=refusal + "logits differ by"):
        draw_all(short, [ask(0, 0, max_new_tokens=18)], make_engine)


def test_padded_rows_that_are_no_numbers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    feed = PaddedEngine._feed
    monkeypatch.setattr(PaddedEngine, "_feed", lambda *given: feed(*given) * torch.nan)
    with pytest.raises(ModelError, match="logits differ by nan"):
        draw_all(Policy(tiny_model(), native=False), [ask(0, 0)], make_engine)


@torch.no_grad()
def test_nothing_that_a_step_touches_moves() -> None:
    wanted = [ask(i % 2, i) for i in range(8)]
    made = op_by_op(Policy(tiny_model()), CacheSize(8, 2, 5, 23), STOPS)
    rows = made.rows

    def places() -> list[int]:
        pairs = [p for layer in made._cache.layers.values() for p in (layer.prompts, layer.own)]
        state = made._state
        tensors = [made._cache.column, state.column, state.lengths, state.owners, state.members]
        tensors += [state.prompt_lengths, made._cursor, *(made._block or ()), rows.tokens]
        return [t.data_ptr() for t in (*tensors, *(t for pair in pairs for t in pair))]

    made.begin(wanted)
    made.admit(wanted, range(8))
    made.advance(3, 1)
    before = places()
    made.free([3])
    made.admit(wanted[1:2], [3])
    made.advance(3, 4)
    made.compact([2, 5])
    assert made._bucket == 2
    made.advance(2, 7)
    assert places() == before
    # Nor does what a call leaves behind, where the next one needs no more.
    made.begin(wanted[:4])
    made.admit(wanted[:4], range(4))
    made.advance(3, 1)
    assert places() == before


def test_the_engine_follows_the_model() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    recorded = OpByOp if library() is None else CpuGraphs
    kinds: dict[Any, list[Any]] = {
        recorded: [tiny_model(), tiny_model("gpt2"), tiny_model().bfloat16()],
        OpByOp: [tiny_model().double(), tiny_model("llama", rope_parameters=rope)],
    }
    for kind, models in kinds.items():
        for model in models:
            made = make_engine(Policy(model), CacheSize(2, 1, 3, 20), STOPS)
            assert isinstance(made, Engine)
            assert type(made._graphs) is kind
    padded = make_engine(Policy(tiny_model(), native=False), CacheSize(2, 1, 3, 20), STOPS)
    assert type(padded) is PaddedEngine


def test_a_ring_is_wide_at_once_only_where_a_kernel_reads_what_is_live() -> None:
    size = CacheSize(2, 1, 3, 1000)
    for model, kernel in ((tiny_model(), library() is not None), (tiny_model().double(), False)):
        made = make_engine(Policy(model), size, STOPS)
        assert isinstance(made, Engine)
        assert made._cache.width == (engine.KERNEL_WIDTH if kernel else engine.PLAIN_WIDTH)


@needs_library
def test_short_completions_are_not_worth_a_recording() -> None:
    kinds = []
    for length in (CpuGraphs.fewest - 1, CpuGraphs.fewest):
        made = make_engine(Policy(tiny_model()), CacheSize(2, 1, 3, length), STOPS)
        assert isinstance(made, Engine)
        kinds.append(type(made._graphs))
    assert kinds == [OpByOp, CpuGraphs]


@needs_library
@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", MODELS)
def test_a_recorded_step_changes_nothing(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit, while rings grow, slots are refilled and rows are moved together.

    But for packed weights, with which sums may be rounded in another order.
    """
    played = []
    original = graph.record

    def record(step: Step, weights: PackedWeights) -> Step | None:
        del weights
        played.append(original(step))
        return played[-1]

    monkeypatch.setattr(graph, "record", record)
    policy = Policy(tiny_model(family, scale=2.0).to(dtype))
    wanted = mixed()
    # All at once, rows are moved together; in few slots, they are refilled.
    runs = [(64, 1), (5, 3)] if dtype == torch.float32 else [(64, 1)]
    for many, steps in runs:
        ours = draw_all(policy, wanted, make_engine, slots=many, steps=steps)
        assert ours == draw_all(policy, wanted, op_by_op_moved_alike, slots=many, steps=steps)
    # GPT-2's code asks whether positions begin anew, and is told by the host.
    assert (None in played) == (family == "gpt2")
    assert len(played) > 4 or family == "gpt2"


def op_by_op_moved_alike(policy: Policy, size: CacheSize, stop_ids: Sequence[int]) -> Engine:
    """Rows are moved together when a recorded step's are, since sums depend on their number."""
    graphs = OpByOp()
    graphs.share = CpuGraphs.share
    return Engine(policy, size, stop_ids, graphs)


@needs_library
def test_a_step_that_cannot_be_recorded_runs_op_by_op(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    asks = torch.ops.aten.embedding.default
    monkeypatch.setattr(graph, "_depends_on_contents", lambda call, args: call is asks)
    policy = Policy(tiny_model())
    wanted = mixed()
    assert_same(draw_all(policy, wanted, make_engine), draw_all(policy, wanted, op_by_op))
    assert caplog.text.count("cannot be recorded") == 1


def test_fewer_slots_than_are_wanted_draw_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU whose memory is short; and such an engine serves the next call as well."""
    policy, wanted = Policy(tiny_model(scale=2.0)), mixed()
    expected = draw_all(policy, wanted, make_engine)
    monkeypatch.setattr(engine, "fitting_size", lambda policy, size: size._replace(slots=3))
    size = CacheSize(64, 4, 9, 23)
    made = make_engine(policy, size, STOPS)
    assert (made.slots, made.rows.tokens.shape[0]) == (3, 3)
    assert made.serves(policy, size)
    assert not made.serves(policy, size._replace(slots=65))
    assert_same(draw_all(policy, wanted, make_engine), expected)


# --- a kernel that fails -------------------------------------------------------------------------


class Broken:
    """A Triton kernel that cannot be started on this card."""

    __name__ = "own_part"

    def __init__(self) -> None:
        self.asked = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def start(*_: Any, **__: Any) -> None:
            self.asked += 1
            raise LookupError("out of resource: shared memory, Required: 102400")

        return start


@pytest.mark.parametrize("first", ["decode", "draw"])
def test_sampling_goes_on_without_a_kernel_that_fails(
    first: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """G1: whatever it raises at its first use, with one warning that names the reason."""
    policy = Policy(tiny_model(scale=2.0))
    wanted = mixed()
    expected = draw_all(policy, wanted, PaddedEngine)
    broken = Broken()
    # This processor as a card that Triton knows, and its first kernel does not fit; a suite without
    # kernels runs this, too.
    monkeypatch.delenv("GROUPER_KERNELS", raising=False)
    monkeypatch.setattr(language, "device_type", lambda _: "cuda")
    monkeypatch.setattr(language, "AVAILABLE", True)
    monkeypatch.setattr(language, "_FAILURES", [])
    monkeypatch.setattr(triton_decode, "own_part", broken)
    monkeypatch.setattr(triton_draw, "_sums", broken)
    monkeypatch.setattr(ops, "draw_serves", lambda _: False)
    if first == "decode":
        monkeypatch.setattr(draw, "draws_here", lambda _: False)
    for make in (op_by_op, make_engine):
        assert_same(draw_all(policy, wanted, make, slots=5), expected)
    assert broken.asked == 1
    told = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(told) == 1
    assert "LookupError: out of resource: shared memory, Required: 102400" in told[0]
    assert "plain operations" in told[0]


# --- from call to call ---------------------------------------------------------------------------


class Recorder(OpByOp):
    """As CUDA graphs are: steps are worth keeping, for buckets of rows."""

    share = 0.25
    keeps = True

    def __init__(self) -> None:
        self.records = 0

    def bucket(self, live: int) -> int:
        return 1 << (live - 1).bit_length()

    def record(self, step: Step) -> Step:
        self.records += 1
        step()
        return step


class Keeping:
    """Makes engines that are kept, and knows them all."""

    def __init__(self) -> None:
        self.made: list[Engine] = []

    def __call__(self, policy: Policy, size: CacheSize, stop_ids: Sequence[int]) -> Engine:
        self.made.append(Engine(policy, size, stop_ids, Recorder()))
        return self.made[-1]


def fixed(count: int = 8, new: int = 11, **params: Any) -> list[SampleRequest]:
    lengths = {"max_new_tokens": new, "min_new_tokens": new}
    return [ask(i % 2, i, **(lengths | params)) for i in range(count)]


def test_nothing_is_recorded_after_the_first_call_at_the_same_shapes() -> None:
    """G5: while slots, lengths, and the storage of the weights stay."""
    policy, makes = Policy(tiny_model(scale=2.0)), Keeping()
    sampler = sampler_of(policy, makes, steps=4)
    sets = [fixed(), fixed()[::-1], fixed(4), fixed(8, 5), fixed(8, temperature=0.5)]
    drawn = [dict(sampler.sample(wanted)) for wanted in sets]
    first = makes.made[0]
    captures = len(sampler.captured)
    assert captures > 0
    assert min(sampler.captured) > 0
    again = []
    for wanted in sets:
        with torch.no_grad():  # trained meanwhile, in place
            policy.model.get_output_embeddings().weight.mul_(1.0)
        policy.version += 1
        again.append(dict(sampler.sample(wanted)))
    assert len(sampler.captured) == captures
    assert makes.made == [first]
    for wanted, one, other in zip(sets, drawn, again, strict=True):
        expected = draw_all(policy, wanted, PaddedEngine)
        for found in (one, other):
            assert_same([found[i] for i in range(len(wanted))], expected)


def test_new_weights_in_the_old_place_are_sampled_from() -> None:
    policy, makes = Policy(tiny_model(scale=2.0)), Keeping()
    sampler = sampler_of(policy, makes)
    before = dict(sampler.sample(fixed()))
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    policy.version += 1
    after = dict(sampler.sample(fixed()))
    assert len(makes.made) == 1
    expected = draw_all(policy, fixed(), PaddedEngine)
    assert_same([after[i] for i in range(8)], expected)
    assert after[0].token_ids != before[0].token_ids


def test_what_is_drawn_with_is_part_of_a_recorded_step() -> None:
    policy, makes = Policy(tiny_model(scale=2.0)), Keeping()
    sampler = sampler_of(policy, makes)
    kinds: list[dict[str, Any]] = [
        {"min_new_tokens": 0},
        {"temperature": 0.0},
        {"top_p": 0.5},
        {"min_new_tokens": 0},
    ]
    counts = []
    for kind in kinds:
        found = dict(sampler.sample(fixed(**kind)))
        expected = draw_all(policy, fixed(**kind), PaddedEngine)
        assert_same([found[i] for i in range(8)], expected)
        counts.append(len(sampler.captured))
    assert counts[0] < counts[1] < counts[2] == counts[3]


@pytest.mark.parametrize("change", ["storage", "longer", "more", "released", "short"])
def test_an_engine_is_made_anew_where_the_old_one_does_not_serve(change: str) -> None:
    policy, makes = Policy(tiny_model(scale=2.0)), Keeping()
    sampler = sampler_of(policy, makes)
    list(sampler.sample(fixed()))
    wanted = fixed()
    if change == "storage":
        head = policy.model.get_output_embeddings()
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
    elif change == "longer":
        wanted = fixed(new=12)
    elif change == "more":
        wanted = fixed(count=9)
    elif change == "released":
        sampler.release()
    else:
        assert release_engines()
        assert not release_engines()
    found = dict(sampler.sample(wanted))
    assert len(makes.made) == 2
    assert makes.made[0]._recorded == {}, "what it held is given back"
    assert makes.made[0]._cache.layers == {}
    assert sampler.holds_engine
    expected = draw_all(policy, wanted, PaddedEngine)
    assert_same([found[i] for i in range(len(wanted))], expected)


def test_a_call_that_is_left_or_runs_beside_another_spoils_no_engine() -> None:
    policy, makes = Policy(tiny_model(scale=2.0)), Keeping()
    sampler = sampler_of(policy, makes)
    wanted = [ask(i % 2, i, max_new_tokens=3 + i, min_new_tokens=3 + i) for i in range(8)]
    expected = draw_all(policy, wanted, PaddedEngine)
    left = sampler.sample(wanted)
    next(left)
    left.close()  # type: ignore[attr-defined]  # a generator
    one, other = sampler.sample(wanted), sampler.sample(wanted)
    pairs = list(zip(one, other, strict=True))
    for side in range(2):
        found = dict(pair[side] for pair in pairs)
        assert_same([found[i] for i in range(8)], expected)
    found = dict(sampler.sample(wanted))
    assert_same([found[i] for i in range(8)], expected)


def test_on_the_cpu_nothing_is_kept() -> None:
    sampler = sampler_of(Policy(tiny_model()), make_engine)
    list(sampler.sample(fixed(new=20)))
    assert sampler._kept is None


@CUDA
@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("family", MODELS)
def test_a_captured_step_draws_the_same(family: str) -> None:
    policy = Policy(tiny_model(family, scale=2.0).cuda())
    wanted = mixed()
    expected = draw_all(policy, wanted, PaddedEngine)
    for many in (64, 5):
        assert_same(draw_all(policy, wanted, make_engine, slots=many, steps=8), expected, 1e-3)
