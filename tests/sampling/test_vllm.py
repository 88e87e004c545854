"""vLLM behind the sampler protocol: one contract for the real engine and for a fake of it.

The real one takes part where GROUPER_VLLM=1 is set, as `make test-vllm` does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_vllm import FakeVllm
from prompts.tokenizer_fixtures import no_template
from tiny_models import LengthTools

from grouper.algorithms.batching import unweighted_rows
from grouper.config.loading import load_recipe
from grouper.config.schema import LoraConfig, ModelConfig, SamplingConfig
from grouper.errors import ConfigError, ModelError, PromptError
from grouper.kernels.cpu.library import library
from grouper.models.loading import load_policy
from grouper.models.merging import whole_weights
from grouper.models.policy import Policy
from grouper.sampling import turns
from grouper.sampling.base import SampleRequest, draw_seed
from grouper.sampling.factory import Samplers
from grouper.sampling.native import NativeSampler
from grouper.sampling.turns import TurnSampler
from grouper.sampling.vllm.sampler import (
    TOLERANCE,
    Engine,
    LocalEngine,
    VllmSampler,
    engine_arguments,
    write_shape,
)
from grouper.sampling.weights import SamplingWeights
from grouper.types import Completion, FinishReason, Prompt, SamplingParams

REAL = os.environ.get("GROUPER_VLLM") == "1"
KINDS = ["fake", *(["real"] if REAL else [])]
TOKENIZER = no_template().tokenizer
STOP = TOKENIZER.convert_tokens_to_ids("<eos>")
LENGTH = 320


def make_model(folder: Path, *, tied: bool) -> Path:
    import transformers

    config = transformers.AutoConfig.for_model(
        "qwen2",
        vocab_size=len(TOKENIZER),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=128,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        eos_token_id=STOP,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    home = tmp_path_factory.mktemp("models")
    return {tied: make_model(home / f"tied-{tied}", tied=tied) for tied in (False, True)}


def load(folder: Path, *, lora: bool = False) -> Policy:
    adapter = LoraConfig(rank=4, alpha=8) if lora else None
    config = ModelConfig(path=str(folder), lora=adapter)
    return load_policy(config, str(folder), seed=0)


_REAL: dict[tuple[bool, bool], LocalEngine] = {}


def engine_for(kind: str, policy: Policy, folder: Path, *, adapter: bool = False) -> Engine:
    if kind == "fake":
        return FakeVllm(load(folder).model, TOKENIZER)
    which = (policy.model.config.tie_word_embeddings, adapter)
    if which not in _REAL:  # a start takes seconds, and one serves all tests
        shape = folder.parent / f"shape-{which}"
        shape.mkdir()
        _REAL[which] = LocalEngine(shape, served(policy, shape, adapter=adapter)[1])
    return _REAL[which]


def served(policy: Policy, folder: Path, *, adapter: bool) -> tuple[str, dict[str, Any]]:
    """The name and the arguments of an engine, as of a recipe."""
    lora = ["model.lora={rank: 4}", "sampling.dtype=same"] if adapter else []
    recipe = load_recipe("demo", ["sampling.max_slots=32", *lora])
    samplers = Samplers(recipe=recipe, tokenizer=TOKENIZER, stop_token_ids=[STOP], longest=8)
    name, arguments = samplers.served(
        policy, folder, computed="float32", device="cpu", own_card=False
    )
    return name, arguments | {"max_model_len": LENGTH}


@pytest.fixture(scope="module", autouse=True)
def _engines_end() -> Iterator[None]:
    yield
    for engine in _REAL.values():
        engine.close()


def over(policy: Policy, engine: Engine, **changes: Any) -> VllmSampler:
    settings = {"stop_token_ids": [STOP], "max_length": LENGTH, "tolerance": 1e-5} | changes
    return VllmSampler(policy, engine, TOKENIZER, **settings)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def made(
    request: pytest.FixtureRequest, kind: str, folders: dict[bool, Path]
) -> tuple[Policy, Engine]:
    """A policy, and an engine of its shape."""
    policy = load(folders[request.param])
    return policy, engine_for(kind, policy, folders[request.param])


def requests(count: int = 6, length: int = 9, **params: Any) -> list[SampleRequest]:
    settings = SamplingParams(**{"max_new_tokens": 24, **params})
    return [
        SampleRequest(
            prompt=Prompt(
                problem_id=f"p/{i}",
                text="",
                token_ids=tuple((i * 31 + j * 7) % 250 for j in range(length)),
            ),
            params=settings,
            key=draw_seed(0, "test", i),
        )
        for i in range(count)
    ]


def draw(sampler: VllmSampler, wanted: list[SampleRequest]) -> list[Completion]:
    found = dict(sampler.sample(wanted))
    assert sorted(found) == list(range(len(wanted)))
    return [found[i] for i in range(len(wanted))]


def gap(policy: Policy, wanted: list[SampleRequest], drawn: list[Completion]) -> float:
    """The largest difference to the trainer's log-probs."""
    rows = unweighted_rows(
        [r.prompt.token_ids for r in wanted], [c.token_ids for c in drawn], range(len(drawn))
    )
    rows = replace(rows, temperature=wanted[0].params.temperature or 1.0)
    ours = policy(rows).logprobs[rows.mask]
    theirs = torch.tensor([value for c in drawn for value in c.logprobs])
    return float((ours - theirs).abs().max())


@torch.no_grad()
def train(policy: Policy, scale: float = 0.1) -> None:
    """What an optimizer step does: other weights, and the next version."""
    torch.manual_seed(policy.version)
    for parameter in policy.trainable().values():
        parameter.add_(torch.randn_like(parameter) * scale * parameter.std())
    policy.version += 1


# --- the contract --------------------------------------------------------------------------------


@pytest.mark.slow
@torch.no_grad()
def test_logprobs_are_the_trainers_after_every_update(made: tuple[Policy, Engine]) -> None:
    policy, engine = made
    sampler = over(policy, engine)
    texts = []
    for version in range(3):
        for wanted in (requests(), requests(length=200), requests(temperature=0.0)):
            drawn = draw(sampler, wanted)
            assert gap(policy, wanted, drawn) < 2e-5
            assert {c.policy_version for c in drawn} == {version}
        texts.append([c.token_ids for c in drawn])
        assert sampler.gap is not None
        assert sampler.gap < 1e-5
        train(policy)
    assert texts[0] != texts[1] != texts[2], "greedy answers follow the weights"


@pytest.mark.slow
@torch.no_grad()
def test_a_cut_distribution_at_another_temperature(made: tuple[Policy, Engine]) -> None:
    """System D's: log-probs are at the temperature, and of all tokens."""
    policy, engine = made
    hot = {"temperature": 1.2, "min_p": 0.05, "min_new_tokens": 3}
    wanted = requests(12, **hot)
    sampler = over(policy, engine, temperature=1.2)
    for _ in range(2):
        drawn = draw(sampler, wanted)
        assert gap(policy, wanted, drawn) < 2e-5
        for request, completion in zip(wanted, drawn, strict=True):
            ids = torch.tensor([[*request.prompt.token_ids, *completion.token_ids]])
            places = slice(len(request.prompt.token_ids) - 1, -1)
            shares = (policy.model(ids).logits[0, places] / 1.2).softmax(-1)
            taken = shares.gather(1, ids[0, places.start + 1 :, None])
            cut = 0.04 * shares.max(1, keepdim=True).values
            assert (taken > cut).all(), "what min_p cuts off is not drawn"
        train(policy)
    greedy = requests(temperature=0.0)
    cold = draw(over(policy, engine), greedy)
    assert [c.token_ids for c in draw(sampler, greedy)] == [c.token_ids for c in cold]
    assert gap(policy, greedy, cold) < 2e-5, "another sampler, another temperature"


def test_equal_keys_draw_equal_tokens(made: tuple[Policy, Engine]) -> None:
    sampler, wanted = over(*made), requests()
    assert draw(sampler, wanted) == draw(sampler, wanted)
    other = [replace(r, key=draw_seed(1, i)) for i, r in enumerate(wanted)]
    assert draw(sampler, wanted) != draw(sampler, other)


def test_ends_are_those_of_the_native_sampler(made: tuple[Policy, Engine]) -> None:
    sampler = over(*made)
    plain = draw(sampler, requests(24))
    assert {c.finish_reason for c in plain} >= {FinishReason.LENGTH}
    for completion in plain:
        stopped = completion.token_ids[-1] == STOP
        assert stopped == (completion.finish_reason is FinishReason.STOP_TOKEN)
        assert STOP not in completion.token_ids[:-1]
        shown = completion.token_ids[: -1 if stopped else None]
        assert completion.text == TOKENIZER.decode(shown)


@pytest.mark.parametrize("least", [0, 12])
def test_a_stop_string_ends_at_its_first_token(made: tuple[Policy, Engine], least: int) -> None:
    """Also before `min_new_tokens`, where vLLM itself does not look."""
    sampler = over(*made)
    plain = draw(sampler, requests(12, min_new_tokens=least))
    # A character that some completions have early.
    stop = next(c.text[2] for c in plain if len(c.text) > 3 and c.text[2].isascii())
    for include in (False, True):
        cut = draw(sampler, requests(12, min_new_tokens=least, stop=(stop,), include_stop=include))
        assert FinishReason.STOP_STRING in [c.finish_reason for c in cut]
        for before, after in zip(plain, cut, strict=True):
            assert before.token_ids[: len(after.token_ids)] == after.token_ids
            if after.finish_reason is FinishReason.STOP_STRING:
                assert stop in TOKENIZER.decode([after.token_ids[-1]])
                assert stop not in TOKENIZER.decode(after.token_ids[:-1])
                assert after.text.endswith(stop) == include
            else:
                assert stop not in after.text


@torch.no_grad()
def test_turns_are_those_of_the_native_sampler(
    made: tuple[Policy, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy: what ends a turn, what is read, and what comes after it are the same."""
    policy, engine = made
    native = NativeSampler(SamplingWeights(policy), TOKENIZER, stop_token_ids=[STOP])
    wanted = requests(temperature=0.0, max_new_tokens=40)
    plain = dict(native.sample(wanted))
    # vLLM shows a part of a character otherwise than we do.
    end = next(c.text[2] for c in plain.values() if len(c.text) > 3 and c.text[2].isascii())
    monkeypatch.setattr(turns, "BLOCK_END", end)
    monkeypatch.setattr(turns, "output_block", lambda said: f" {said} ")
    drawn = []
    for inner in (native, over(policy, engine)):
        sampler = TurnSampler(inner, LengthTools(), TOKENIZER)  # type: ignore[arg-type]  # a fake
        found = dict(sampler.sample(wanted))
        drawn.append([found[index] for index in range(len(wanted))])
    ours, theirs = drawn
    assert any(completion.tool_spans for completion in ours)
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.token_ids, mine.text) == (other.token_ids, other.text)
        assert (mine.tool_spans, mine.finish_reason) == (other.tool_spans, other.finish_reason)


def test_no_stop_token_before_the_least_length(made: tuple[Policy, Engine]) -> None:
    drawn = draw(over(*made), requests(24, min_new_tokens=10))
    assert min(len(c.token_ids) for c in drawn) >= 10


def test_what_is_left_unread_is_given_up(made: tuple[Policy, Engine]) -> None:
    sampler = over(*made)
    running = sampler.sample(requests())
    next(running)
    running.close()  # type: ignore[attr-defined]  # a generator
    assert len(draw(sampler, requests(3))) == 3


@pytest.fixture(params=["merged", "beside"])
def with_lora(
    request: pytest.FixtureRequest, kind: str, folders: dict[bool, Path]
) -> tuple[Policy, Engine, VllmSampler]:
    """Adapters that are merged, or stay beside the weights."""
    policy, adapter = load(folders[True], lora=True), request.param == "beside"
    engine = engine_for(kind, policy, folders[True], adapter=adapter)
    return policy, engine, over(policy, engine, tolerance=2e-5, adapter=adapter)


@torch.no_grad()
def train_lora(policy: Policy) -> None:
    for parameter in policy.trainable().values():
        parameter.normal_(std=0.1)
    policy.version += 1


@torch.no_grad()
def test_adapters_arrive(
    with_lora: tuple[Policy, Engine, VllmSampler],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy, engine, sampler = with_lora
    push, whole = engine.push, []
    monkeypatch.setattr(
        engine, "push", lambda sent, *how: (whole.append(sent is not None), push(sent, *how))
    )
    for _ in range(3):
        for wanted in (requests(), requests(length=200)):
            assert gap(policy, wanted, draw(sampler, wanted)) < 5e-5
        train_lora(policy)
    beside = "beside" in request.node.name
    assert whole == [True, not beside, not beside], "the adapter alone is pushed again"
    if isinstance(engine, FakeVllm):
        engine._tag = None  # as after a start
        draw(sampler, requests(1))
        assert whole[-1], "its weights are gone, too"


def test_stale_adapters_end_the_run(
    with_lora: tuple[Policy, Engine, VllmSampler], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, engine, sampler = with_lora
    train_lora(policy)
    draw(sampler, requests(2))
    with monkeypatch.context() as patch:
        skip_everything(engine, patch)
        train_lora(policy)
        with pytest.raises(ModelError, match="its weights are different"):
            draw(sampler, requests(2))
    wanted = requests(4)
    assert gap(policy, wanted, draw(sampler, wanted)) < 5e-5, "repaired"


@pytest.mark.skipif(not REAL, reason="the real engine: make test-vllm")
def test_the_threads_of_the_trainer_stay_its_own(folders: dict[bool, Path]) -> None:
    engine_for("real", load(folders[True]), folders[True])
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    assert torch.get_num_threads() == before + 1
    torch.set_num_threads(before)


@pytest.mark.skipif(not REAL, reason="the real engine: make test-vllm")
def test_what_does_not_start_is_one_paragraph(folders: dict[bool, Path], tmp_path: Path) -> None:
    write_shape(tmp_path, load(folders[True]).model.config, TOKENIZER)
    plain = SamplingConfig()
    arguments = engine_arguments(plain, dtype="float32", device="cpu", max_length=10**6)
    with pytest.raises(ModelError, match=r"vLLM does not start: .*VLLM_CPU_KVCACHE"):
        LocalEngine(tmp_path, arguments)


@torch.no_grad()
def small_update(policy: Policy) -> None:
    """As after some steps of 5e-6: far below the distance of two bfloat16 weights."""
    generator = torch.Generator().manual_seed(policy.version)
    for name, parameter in policy.trainable().items():
        if "lora_B" in name:
            parameter.copy_(2e-4 * torch.randn(parameter.shape, generator=generator))
    policy.version += 1


@torch.no_grad()
def test_merged_adapters_are_compared_with_what_was_pushed(folders: dict[bool, Path]) -> None:
    """M10: a right push of rounded weights was called "its weights are different"."""
    policy = load(folders[True], lora=True)
    engine = FakeVllm(load(folders[True]).model.to(torch.bfloat16), TOKENIZER)
    sampler = over(policy, engine, tolerance=TOLERANCE[False], rounded=torch.bfloat16)
    for _ in range(2):
        small_update(policy)
        draw(sampler, requests(2))
        assert sampler.update_share == pytest.approx(1.0, abs=0.2)
        compared = dict(sampler._as_pushed().model.named_parameters())
        for name, value in engine.model.named_parameters():
            assert torch.equal(value, compared[name])
        plain = whole_weights(policy, merged=False)
        moved = [n for n, value in plain if not torch.equal(value.bfloat16(), compared[n])]
        assert moved, "an update was pushed"
    assert over(policy, engine, adapter=True, rounded=torch.bfloat16).update_share is None


def test_the_models_own_rounding_is_allowed_for(
    folders: dict[bool, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """M10: of SmolLM2's log-probs bfloat16 alone moves 0.04 nats, and 0.02 were allowed."""
    policy = load(folders[True])
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
    policy.model.to(torch.bfloat16)
    engine = FakeVllm(policy.model.float(), TOKENIZER)
    policy.model.to(torch.bfloat16)
    sampler = over(policy, engine, tolerance=TOLERANCE[False])
    rows = unweighted_rows([range(24), range(60)], [[5] * 8, [7] * 8], range(2))
    with torch.no_grad():
        # Plain operations may round both layouts alike; compiled kernels do not.
        assert sampler._noise(rows) > 0 or library() is None
        assert over(policy, engine, tolerance=0.019)._noise(rows) == 0, "the user's own tolerance"
    # How much the two layouts differ depends on the kernels: here it is what rounding makes.
    monkeypatch.setattr(VllmSampler, "_noise", lambda *_: 0.03)
    draw(sampler, requests(2))
    assert sampler.gap is not None
    assert TOLERANCE[False] < sampler.gap < 0.09, "rounding alone"
    monkeypatch.setattr(VllmSampler, "_noise", lambda *_: 0.001)
    with pytest.raises(ModelError, match=r"allowed 0\.02: its "):
        draw(over(policy, engine, tolerance=TOLERANCE[False]), requests(2))
    monkeypatch.setattr(VllmSampler, "_noise", lambda *_: 0.03)
    with monkeypatch.context() as patch:
        skip_everything(engine, patch)
        train(policy)
        with pytest.raises(ModelError, match="its weights are different"):
            draw(sampler, requests(2))


PUSHES: list[tuple[list[str], str, bool]] = [
    ([], "bfloat16", False),
    (["model.lora={rank: 4}"], "float32", False),
    (["model.lora={rank: 4}"], "bfloat16", True),
    (["model.lora={rank: 4}", "sampling.dtype=same"], "float32", True),
    (["model.lora={rank: 4}", "sampling.dtype=bfloat16"], "bfloat16", False),
    (["model.lora={rank: 4, target_modules: [q_proj, lm_head]}"], "bfloat16", False),
]


@pytest.mark.parametrize(("settings", "computed", "beside"), PUSHES)
def test_an_adapter_is_pushed_beside_weights_that_would_round_it_away(
    folders: dict[bool, Path], settings: list[str], computed: str, beside: bool
) -> None:
    recipe = load_recipe("demo", ["sampling.engine=vllm", *settings])
    config = ModelConfig(path=str(folders[False]), lora=recipe.model.lora)
    policy = load_policy(config, str(folders[False]), seed=0)
    samplers = Samplers(recipe=recipe, tokenizer=TOKENIZER, stop_token_ids=[STOP], longest=8)
    assert samplers.pushes_adapter(policy, computed) is beside


# --- weights that are not fresh ------------------------------------------------------------------


def skip_everything(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def push(weights: Any, tag: str, *_: Any) -> None:
        list(weights or ())
        engine._tag = tag

    monkeypatch.setattr(engine, "push", push)


def skip_the_cache(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    holder = engine if isinstance(engine, FakeVllm) else engine._llm
    monkeypatch.setattr(holder, "reset_prefix_cache", lambda: True)


def keep_the_head(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As stock vLLM does on a CPU where embeddings are tied: a packed copy of the head stays."""
    model = engine.model if isinstance(engine, FakeVllm) else _served_model(engine)
    module = model.lm_head
    old = model.model.embed_tokens.weight if hasattr(module, "weight") else module.weight
    old = old.detach().clone()
    if isinstance(engine, FakeVllm):
        hook = module.register_forward_hook(lambda _, given, __: given[0] @ old.T)
        monkeypatch.setattr(engine, "close", hook.remove)
    else:
        monkeypatch.setattr(
            module, "cpu_linear", lambda x, _, bias: torch.nn.functional.linear(x, old, bias)
        )


def _served_model(engine: LocalEngine) -> Any:
    return engine._llm.llm_engine.model_executor.driver_worker.model_runner.model


FAULTS = {
    "a push is skipped": (skip_everything, "its weights are different"),
    "a prefix is stale": (skip_the_cache, "its prefix cache is stale"),
    "a tied head is stale": (keep_the_head, "its weights are different"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_stale_weights_end_the_run(
    made: tuple[Policy, Engine], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, engine = made
    break_it, told = FAULTS[fault]
    if fault == "a tied head is stale" and not policy.model.config.tie_word_embeddings:
        return
    sampler = over(policy, engine)
    draw(sampler, requests(2))
    with monkeypatch.context() as patch:
        break_it(engine, patch)
        train(policy, 0.02)
        with pytest.raises(ModelError, match=told):
            draw(sampler, requests(2))
        # It is tried again with the next call, and refused again.
        with pytest.raises(ModelError, match="nats per token"):
            draw(sampler, requests(2))
    if isinstance(engine, FakeVllm):
        engine.close()
    else:
        assert draw(sampler, requests(2)), "repaired"


def test_two_samplers_never_take_each_others_weights(made: tuple[Policy, Engine]) -> None:
    policy, engine = made
    other = Policy(load(Path(policy.model.config._name_or_path)).model)
    train(other, 0.5)
    other.version = policy.version
    wanted = requests(temperature=0.0)
    first, second = over(policy, engine), over(other, engine)
    before = draw(first, wanted)
    assert draw(second, wanted) != before
    assert draw(first, wanted) == before


# --- the adapter alone ---------------------------------------------------------------------------


@pytest.fixture
def fake(folders: dict[bool, Path]) -> tuple[Policy, FakeVllm]:
    policy = load(folders[False])
    return policy, FakeVllm(policy.model, TOKENIZER)


def test_every_parameter_is_ours(fake: tuple[Policy, FakeVllm]) -> None:
    """Nothing that changes a draw is left to the engine or to a generation config."""
    policy, engine = fake
    wanted = requests(1, temperature=0.7, top_k=0, max_new_tokens=5, stop=("x",))
    draw(over(policy, engine), wanted)
    params = engine.asked[-1].params
    assert params["seed"] == wanted[0].key >> 1
    assert params["ignore_eos"] is True
    assert params["stop_token_ids"] == [STOP]
    neutral = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    assert params.items() >= {**neutral, "temperature": 0.7, "top_p": 1.0, "top_k": 0}.items()


def test_weights_are_pushed_once_a_version(fake: tuple[Policy, FakeVllm]) -> None:
    policy, engine = fake
    sampler = over(policy, engine)
    assert list(sampler.sample([])) == []
    for count in (1, 2):
        draw(sampler, requests(1))
        draw(sampler, requests(1))
        assert engine.pushes == count
        train(policy)
    assert not engine.resting
    assert sampler.seconds["push"] > 0


@pytest.mark.parametrize("way", ["rest", "release"])
def test_its_memory_is_for_the_update(fake: tuple[Policy, FakeVllm], way: str) -> None:
    policy, engine = fake
    sampler = over(policy, engine)
    before = draw(sampler, requests(1))
    getattr(sampler, way)()
    assert engine.resting
    assert draw(sampler, requests(1)) == before
    assert engine.pushes == 2


def test_an_engine_that_forgets_is_given_its_weights_again(fake: tuple[Policy, FakeVllm]) -> None:
    policy, engine = fake
    sampler = over(policy, engine)
    draw(sampler, requests(1))
    engine._tag = None  # as after a sleep, or a start
    assert len(draw(sampler, requests(1))) == 1
    running = sampler.sample(requests(2))
    next(running)
    engine._tag = "another run's"
    with pytest.raises(ModelError, match="lost its weights"):
        list(running)


def test_a_push_without_an_acknowledgement_ends_the_run(fake: tuple[Policy, FakeVllm]) -> None:
    policy, engine = fake
    engine.tag = lambda: None  # type: ignore[method-assign]
    with pytest.raises(ModelError, match="did not acknowledge"):
        draw(over(policy, engine), requests(1))


def test_too_long_a_prompt_is_refused(fake: tuple[Policy, FakeVllm]) -> None:
    policy, engine = fake
    with pytest.raises(PromptError, match="do not fit the model's context of 320"):
        draw(over(policy, engine), requests(1, length=310))


def test_what_the_update_held_is_given_back_before_it_wakes(
    folders: dict[bool, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM asks the driver for memory, which PyTorch keeps after tensors are freed."""
    calls: list[str] = []

    class Recorded:
        llm_engine = None

        def __init__(self, **_: Any) -> None: ...

        def __getattr__(self, name: str) -> Any:
            return lambda *_, **__: calls.append(name) or True

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=Recorded))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty_cache"))
    engine = LocalEngine(folders[True], {"enable_sleep_mode": True})
    weights = load(folders[True]).model.named_parameters
    engine.push(weights(), "first", 1.0)
    engine.rest()
    assert engine.tag() is None
    calls.clear()
    engine.push(weights(), "second", 1.0)
    assert calls[:3] == ["empty_cache", "wake_up", "start_weight_update"]
    assert engine.tag() == "second"


def test_what_an_engine_is_started_with() -> None:
    hot = SamplingConfig.model_validate(
        {"engine": "vllm", "vllm": {"params": {"tensor_parallel_size": 2}}}
    )
    found = engine_arguments(hot, dtype="bfloat16", device="cuda", max_length=None)
    assert found["load_format"] == "dummy"
    assert found["enable_sleep_mode"] is True
    assert found["tensor_parallel_size"] == 2
    # Beside a trainer it has a part of the memory, on a card of its own nearly all (V4).
    assert found["gpu_memory_utilization"] == 0.3
    alone = engine_arguments(hot, dtype="bfloat16", device="cuda", max_length=None, own_card=True)
    assert alone["gpu_memory_utilization"] == 0.9
    named = SamplingConfig.model_validate({"vllm": {"gpu_memory_utilization": 0.5}})
    for own_card in (False, True):
        chosen = engine_arguments(
            named, dtype="bfloat16", device="cuda", max_length=None, own_card=own_card
        )
        assert chosen["gpu_memory_utilization"] == 0.5
    plain = engine_arguments(SamplingConfig(), dtype="float32", device="cpu", max_length=64)
    assert plain["enforce_eager"] is True
    assert "gpu_memory_utilization" not in plain
    taken = SamplingConfig.model_validate({"vllm": {"params": {"dtype": "half", "model": "x"}}})
    with pytest.raises(ConfigError, match="dtype, model: this follows from the rest"):
        engine_arguments(taken, dtype="float32", device="cpu", max_length=64)


@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [([], 1e-5), (["dtype=bfloat16"], 0.02), (["vllm.tolerance=0.1"], 0.1)],
)
def test_tolerances(fake: tuple[Policy, FakeVllm], settings: list[str], tolerance: float) -> None:
    recipe = load_recipe("demo", ["sampling.engine=vllm", *(f"sampling.{s}" for s in settings)])
    samplers = Samplers(recipe=recipe, tokenizer=TOKENIZER, stop_token_ids=[STOP], longest=8)
    samplers._started = fake[1]
    sampler = samplers.over(fake[0])
    assert isinstance(sampler, VllmSampler)
    assert sampler._tolerance == tolerance
