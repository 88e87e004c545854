"""The step that can be replayed draws what the engine over plain slots draws, op by op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import LetterTokenizer, make_prompt, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from grouper.kernels.cpu import tape
from grouper.kernels.cpu.library import library
from grouper.kernels.triton.language import AVAILABLE
from grouper.models.policy import Policy
from grouper.sampling import compiled_decode, graphs, slots
from grouper.sampling.base import SampleRequest, draw_seed
from grouper.sampling.decode_kernel import kernel_decode, plain_decode
from grouper.sampling.engines import Engine, SlotEngine
from grouper.sampling.graphs import StaticEngine
from grouper.sampling.native import NativeSampler, choose_engine
from grouper.sampling.replay import OpByOp, Tapes, allows_replay
from grouper.sampling.weights import SamplingWeights
from grouper.sampling.writing import Rows
from grouper.types import Completion, SamplingParams

STOPS = (2, 5)
MODELS = ["qwen2", "qwen2-sliding", "qwen3", "llama", "mistral", "gemma2", "gemma3", "gpt2"]
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

Made = Callable[[Policy, int, int, int], Engine]


def plain_slots(policy: Policy, slots: int, prompt: int, completion: int) -> SlotEngine:
    return SlotEngine(policy, slots=slots, prompt=prompt, completion=completion)


def static(policy: Policy, slots: int, prompt: int, completion: int) -> StaticEngine:
    return StaticEngine(
        policy,
        slots=slots,
        prompt=prompt,
        completion=completion,
        attend=plain_decode,
        replay=OpByOp(),
    )


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


def draw_all(
    policy: Policy, wanted: list[SampleRequest], make: Made, *, slots: int, stretch: int
) -> list[Completion]:
    sampler = NativeSampler(
        SamplingWeights(policy),
        LetterTokenizer(),
        stop_token_ids=STOPS,
        max_slots=slots,
        stretch=stretch,
        engine=make,
    )
    found = dict(sampler.sample(wanted))
    return [found[i] for i in range(len(wanted))]


def assert_same(ours: list[Completion], theirs: list[Completion], tolerance: float = 2e-5) -> None:
    assert [c.token_ids for c in ours] == [c.token_ids for c in theirs]
    assert [c.finish_reason for c in ours] == [c.finish_reason for c in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=tolerance)


@pytest.mark.parametrize("family", MODELS)
def test_it_draws_what_plain_slots_draw(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rings that grow, refills, rows that are moved together, groups of any size."""
    monkeypatch.setattr(graphs, "FIRST_WIDTH", 5)
    policy = Policy(tiny_model(family, scale=2.0))
    wanted = mixed()
    expected = draw_all(policy, wanted, plain_slots, slots=64, stretch=1)
    for many, stretch in ((64, 1), (64, 8), (5, 3)):
        assert_same(draw_all(policy, wanted, static, slots=many, stretch=stretch), expected)


def test_rings_wrap_while_slots_are_refilled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "FIRST_WIDTH", 8)
    policy = Policy(tiny_model())
    wanted = [ask(i % 3, i, min_new_tokens=6 + i % 3, max_new_tokens=8) for i in range(24)]
    expected = draw_all(policy, wanted, plain_slots, slots=64, stretch=1)
    assert_same(draw_all(policy, wanted, static, slots=4, stretch=4), expected)


@pytest.mark.slow
@pytest.mark.skipif(not AVAILABLE or torch.cuda.is_available(), reason="Triton's interpreter")
@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_the_kernel_draws_it_too(family: str) -> None:
    policy = Policy(tiny_model(family, scale=2.0))
    wanted = [ask(i % 2, i, max_new_tokens=4 + i) for i in range(4)]

    def with_kernel(policy: Policy, slots: int, prompt: int, completion: int) -> StaticEngine:
        sizes = {"slots": slots, "prompt": prompt, "completion": completion}
        return StaticEngine(policy, **sizes, attend=kernel_decode, replay=OpByOp())

    expected = draw_all(policy, wanted, plain_slots, slots=64, stretch=1)
    assert_same(draw_all(policy, wanted, with_kernel, slots=3, stretch=8), expected)


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


def step_without_a_host(family: str, early: bool, **changes: Any) -> None:
    """One step on the `meta` device, where whoever wants to know a value raises."""
    policy = Policy(tiny_model(family, **changes).to("meta"))
    wanted = [ask(0, 0), ask(0, 1, temperature=0.0, top_p=0.9)]
    engine = static(policy, 2, 5, 23)
    engine._prompts, engine._owners, engine._lengths = [wanted[0].prompt.token_ids], [0, 0], [1, 1]
    engine._cache.make_room(1)
    rows = Rows(wanted, 2, 97, STOPS, policy.device)
    rows.fill([0, 1], wanted)
    engine._settle()
    engine._block_of(1)
    with NoHost():
        engine._step(rows, early)


@pytest.fixture
def no_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch has no autocast to be asked about on `meta`."""
    monkeypatch.setattr(slots, "_matrix_dtype", lambda key: key.dtype)


@pytest.mark.usefixtures("no_autocast")
@pytest.mark.parametrize("family", [family for family in MODELS if family != "gpt2"])
@pytest.mark.parametrize("early", [True, False])
@torch.no_grad()
def test_no_op_of_a_step_waits_for_the_device_or_copies_to_it(family: str, early: bool) -> None:
    step_without_a_host(family, early)


@pytest.mark.usefixtures("no_autocast")
@torch.no_grad()
def test_rotary_embeddings_sized_by_the_longest_position_are_not_captured() -> None:
    assert allows_replay(tiny_model("llama").config)
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    assert not allows_replay(tiny_model("llama", rope_parameters=rope).config)
    with pytest.raises(RuntimeError, match="meta tensors"):
        step_without_a_host("llama", False, rope_parameters=rope)


@torch.no_grad()
def test_nothing_that_a_step_touches_moves() -> None:
    policy = Policy(tiny_model())
    wanted = [ask(i % 2, i) for i in range(8)]
    engine = static(policy, 8, 5, 23)
    rows = Rows(wanted, 8, 97, STOPS, policy.device)

    def places() -> list[int]:
        stores = [
            s for layer in engine._cache.layers.values() for s in (*layer.prompts, *layer.own)
        ]
        tensors = [engine._column, engine._cursor, engine._places, engine._members]
        tensors += [engine._prompt_lengths, *(engine._block or ()), rows.tokens, rows.drawn]
        return [t.data_ptr() for t in (*tensors, *(store.data for store in stores))]

    prompts = list(dict.fromkeys(r.prompt.token_ids for r in wanted))
    engine.prefill(prompts, range(8), [i % 2 for i in range(8)])
    rows.fill(range(8), wanted)
    engine.advance(rows, 3, early=False)
    before = places()
    engine.close(3)
    rows.close([3])
    engine.prefill(prompts[1:], [3], [0])
    rows.fill([3], wanted[1:2])
    engine.advance(rows, 3, early=False)
    engine.keep([2, 5])
    rows.keep([2, 5])
    assert engine._bucket == 2
    engine.advance(rows, 2, early=False)
    assert places() == before


needs_library = pytest.mark.skipif(library() is None, reason="no C++ compiler, or kernels are off")


def test_without_compiled_kernels_slots_run_op_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_decode, "library", lambda: None)
    assert type(choose_engine(Policy(tiny_model()), 2, 3, 4)) is SlotEngine


@needs_library
def test_the_engine_follows_the_model() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    kinds = {
        StaticEngine: [tiny_model(), tiny_model("gpt2"), tiny_model().bfloat16()],
        SlotEngine: [tiny_model().double(), tiny_model("llama", rope_parameters=rope)],
    }
    for kind, models in kinds.items():
        for model in models:
            assert type(choose_engine(Policy(model), 2, 3, 4)) is kind


@needs_library
def test_short_completions_are_not_worth_a_recording() -> None:
    kinds = {
        length: type(choose_engine(Policy(tiny_model()), 2, 3, length)._replay)  # type: ignore[attr-defined]  # a static engine has it
        for length in (Tapes.fewest - 1, Tapes.fewest)
    }
    assert list(kinds.values()) == [OpByOp, Tapes]


def with_tapes(policy: Policy, slots: int, prompt: int, completion: int) -> Engine:
    engine = choose_engine(policy, slots, prompt, completion)
    assert isinstance(engine, StaticEngine)
    return engine


def without_tapes(policy: Policy, slots: int, prompt: int, completion: int) -> Engine:
    engine = with_tapes(policy, slots, prompt, completion)
    engine._replay = OpByOp()  # type: ignore[attr-defined]  # a static engine has it
    return engine


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", MODELS)
def test_a_tape_changes_nothing(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit, while rings grow, slots are refilled and rows are moved together."""
    monkeypatch.setattr(graphs, "FIRST_WIDTH", 5)
    played = []
    original = tape.record

    def record(step: Callable[[], None]) -> Callable[[], None] | None:
        played.append(original(step))
        return played[-1]

    monkeypatch.setattr(tape, "record", record)
    policy = Policy(tiny_model(family, scale=2.0).to(dtype))
    wanted = mixed()
    # All at once, rows are moved together; in few slots, they are refilled.
    runs = [(64, 1), (5, 3)] if dtype == torch.float32 else [(64, 1)]
    for many, stretch in runs:
        ours = draw_all(policy, wanted, with_tapes, slots=many, stretch=stretch)
        assert ours == draw_all(policy, wanted, without_tapes, slots=many, stretch=stretch)
    # GPT-2's code asks whether positions begin anew, and is told by the host.
    assert (None in played) == (family == "gpt2")
    assert len(played) > 4 or family == "gpt2"


@needs_library
@pytest.mark.parametrize("family", MODELS)
def test_what_is_compiled_draws_what_plain_slots_draw(family: str) -> None:
    policy = Policy(tiny_model(family, scale=2.0))
    wanted = mixed()
    expected = draw_all(policy, wanted, plain_slots, slots=64, stretch=1)
    assert_same(draw_all(policy, wanted, with_tapes, slots=64, stretch=1), expected)


@needs_library
def test_a_step_that_cannot_be_recorded_runs_op_by_op(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    asks = torch.ops.aten.embedding.default
    monkeypatch.setattr(tape, "_depends_on_contents", lambda call, args: call is asks)
    policy = Policy(tiny_model())
    wanted = mixed()
    found = draw_all(policy, wanted, with_tapes, slots=64, stretch=1)
    assert found == draw_all(policy, wanted, without_tapes, slots=64, stretch=1)
    assert caplog.text.count("cannot be recorded") == 1


@CUDA
@pytest.mark.parametrize("family", MODELS)
def test_a_captured_step_draws_the_same(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "FIRST_WIDTH", 5)
    policy = Policy(tiny_model(family, scale=2.0).cuda())
    wanted = mixed()
    expected = draw_all(policy, wanted, plain_slots, slots=64, stretch=1)
    for many in (64, 5):
        assert_same(draw_all(policy, wanted, choose_engine, slots=many, stretch=8), expected, 1e-3)
