"""The plan of a whole run: no weights, no network, numbers that can be checked."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny_model

from grouper.advice.plan import Prepared, RunPlan, _Planner, plan_run
from grouper.advice.tracing import Tracer
from grouper.algorithms.batching import Rows
from grouper.config.loading import load_recipe
from grouper.errors import ConfigError, ModelError
from grouper.models.divergences import HEAD_TENSORS, TENSORS
from grouper.models.new_model import make_new_model
from grouper.models.token_scores import chunk_rows
from grouper.prompts import make_format
from grouper.sampling.kv_cache import CacheSize, slots_that_fit
from grouper.training.problem_sets import load_problem_sets

SMALL = ["data.sft.options.count=50", "data.train.options.count=50", "data.test.options.count=8"]


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a plan needs no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def plan(*overrides: str, **settings: Any) -> RunPlan:
    return plan_run(load_recipe("demo", [*SMALL, *overrides]), device="cpu", **settings)


@pytest.fixture(scope="module")
def demo() -> RunPlan:
    return plan()


def test_a_new_model_is_counted_exactly(demo: RunPlan) -> None:
    recipe = load_recipe("demo", SMALL)
    sets = load_problem_sets(recipe)
    assert recipe.model.new is not None
    model, _ = make_new_model(
        recipe.model.new, sets.for_fitting, make_format(recipe.prompt), seed=0
    )
    found = demo
    assert found.parameters == found.trainable == sum(p.numel() for p in model.parameters())
    assert [part.name for part in found.memory] == [
        "sft update",
        "grpo update",
        "grpo sample",
        "evaluation",
    ]
    assert found.peak == max(part.peak for part in found.memory)
    assert all(card.fits for card in found.cards)


def test_a_new_model_is_planned_without_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare, files = Prepared, set[str]()

    def watched(*args: Any, model: str, quiet: bool) -> Any:
        files.update(path.name for path in Path(model).iterdir())
        return prepare(*args, model=model, quiet=quiet)

    monkeypatch.setattr("grouper.advice.plan.Prepared", watched)
    assert plan("skip_sft=true").notes == ()
    assert {"config.json", "tokenizer.json"} <= files
    assert not any(name.endswith((".safetensors", ".bin")) for name in files)


@pytest.mark.slow
def test_steps_tokens_and_time_by_hand() -> None:
    found = plan(
        "sft.steps=null",
        "sft.epochs=2",
        "sft.batch_size=32",
        "grpo.prompts_per_step=4",
        "grpo.group_size=8",
        "sampling.max_new_tokens=20",
        tokens_per_second=100.0,
    )
    sft, grpo = found.phases
    assert sft.steps == 4  # 100 demonstrations, 32 a step
    assert sft.seconds == pytest.approx(4 * sft.tokens_per_step / 100)
    assert grpo.steps == load_recipe("demo").grpo.steps
    prompts = grpo.tokens_per_step - 4 * 8 * 20
    assert 4 <= prompts <= 4 * 60
    assert grpo.seconds == pytest.approx(grpo.steps * grpo.tokens_per_step / 100)
    assert grpo.tokens == grpo.steps * grpo.tokens_per_step


@pytest.mark.slow
def test_a_folder_with_nothing_but_a_configuration_is_enough(tmp_path: Path) -> None:
    shape = tiny_model().config
    shape.save_pretrained(tmp_path)
    found = plan("model.new=null", f"model.path={tmp_path}", "skip_sft=true")
    assert found.parameters == sum(p.numel() for p in tiny_model().parameters())
    (note,) = found.notes
    assert "as long as the recipe allows" in note
    assert "holds no tokenizer" in note
    grpo = next(part for part in found.memory if part.name == "grpo sample")
    assert grpo.cache > 0


@pytest.mark.slow
def test_grpo_alone_is_planned_with_the_model_that_it_starts_from(tmp_path: Path) -> None:
    """The recipe's new model, which is never made then, was planned in its place."""
    tiny_model().config.save_pretrained(tmp_path)
    found = plan("skip_sft=true", f"grpo.start_from={tmp_path}")
    assert found.parameters == sum(p.numel() for p in tiny_model().parameters())


@pytest.mark.slow
def test_a_recipe_whose_rows_cannot_be_made_says_why() -> None:
    """It said that the data or the tokenizer were not on this machine."""
    (note,) = plan("sft.max_tokens=5").notes
    assert "as long as the recipe allows" in note
    assert "sft.max_tokens" in note


def test_a_model_that_does_not_continue_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(ModelError, match="t5 is not an architecture of a causal language model"):
        plan("model.new=null", f"model.path={tmp_path}")


def test_a_model_that_is_not_here_is_refused() -> None:
    with pytest.raises(ModelError, match="cannot be loaded"):
        plan("model.new=null", "model.path=nobody/has-this-model")


def test_cards_say_what_would_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """On cards of a size that matters to a tiny model: larger ones take more."""
    monkeypatch.setattr("grouper.advice.plan.RESERVE", 0.0)
    monkeypatch.setattr("grouper.advice.plan.CARDS", (0.001, 0.05, 0.2, 24))
    nothing, small, middle, large = plan("skip_sft=true").cards
    assert not nothing.fits
    assert nothing.tokens_per_micro_batch == {"grpo": None}
    assert nothing.max_slots is None
    found = [c.tokens_per_micro_batch["grpo"] for c in (small, middle, large)]
    numbers = [number for number in found if number is not None]
    assert len(numbers) == 3
    assert numbers == sorted(numbers)
    assert numbers[0] < numbers[-1]
    assert large.fits


@pytest.mark.slow
def test_long_test_prompts_are_evaluated_and_not_trained_on(tmp_path: Path) -> None:
    rows = [{"question": f"Ann has {n} apples. " * 5, "answer": "3"} for n in range(8)]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = f"data.test={{source: file, path: {tmp_path / 'long.jsonl'}}}"
    usual, long = (plan("skip_sft=true", *more) for more in ([], [shown]))
    assert long.phases == usual.phases
    updates, drawn, evaluations = zip(usual.memory, long.memory, strict=True)
    assert updates[0] == updates[1]
    assert drawn[0] == drawn[1]
    assert evaluations[0].cache < evaluations[1].cache


def test_a_card_says_the_slots_that_the_run_takes() -> None:
    """G6: a plan said 26 slots where the run took 32."""
    recipe, room = load_recipe("demo", [*SMALL, "skip_sft=true"]), 9 * 2**20
    planner = _Planner(recipe, "cuda")
    part = planner.sampling("grpo sample", recipe.sampling.max_slots)
    kept = part.weights + part.optimizer + part.reference + part.sampling_copy
    prompts = recipe.grpo.prompts_per_step
    rows = prompts * recipe.grpo.group_size
    size = CacheSize(rows, prompts, max(planner.prompts), planner.completion)
    taken = slots_that_fit(planner.model.sampler, size, room - kept)
    assert 1 < taken < rows, "memory is what bounds them here"
    assert planner.slots("grpo sample", 256, room) == taken
    assert planner.slots("grpo sample", 256, 10 * room) == 256, "more than there are rows"
    assert planner.slots("grpo sample", 256, kept) == 0


def test_later_turns_are_counted_as_prompts_of_their_own() -> None:
    """They hold all turns before them, and no two completions share one."""
    one_turn = _Planner(load_recipe("demo", [*SMALL, "skip_sft=true"]), "cpu")
    turns = _Planner(
        load_recipe(
            "demo",
            [*SMALL, "skip_sft=true", "prompt={format: python-tool, max_prompt_tokens: 512}"],
        ),
        "cpu",
    )
    _, plain = one_turn._native_sizes("grpo sample", 256)
    _, size = turns._native_sizes("grpo sample", 256)
    assert plain.prompts < plain.slots
    longest = max(turns.prompts)
    assert size == CacheSize(plain.slots, plain.slots, longest + 48, 48)
    assert turns.slots("grpo sample", 256, 2**30) > 1


@pytest.mark.slow
def test_what_would_fit_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe with the setting that is proposed for a card fits that card."""
    monkeypatch.setattr("grouper.advice.plan.RESERVE", 0.0)
    monkeypatch.setattr("grouper.advice.plan.CARDS", (0.1,))
    (card,) = plan().cards
    tokens = card.tokens_per_micro_batch["grpo"]
    again = plan(f"grpo.tokens_per_micro_batch={tokens}")
    part = next(part for part in again.memory if part.name == "grpo update")
    assert part.peak <= 0.1 * 2**30 * 1.05


@pytest.mark.slow
def test_a_plan_for_cuda_says_what_auto_means_and_counts_the_copy() -> None:
    """G3, G7."""
    found = plan_run(load_recipe("demo", [*SMALL, "skip_sft=true"]), device="cuda")
    assert found.notes[0].startswith("On CUDA: float32 weights, products in bfloat16, samples from")
    # GRPO's update holds it, too: the sampler keeps it for the next step.
    parts = {part.name: part.sampling_copy for part in found.memory}
    assert parts == dict.fromkeys(
        ("grpo sample", "grpo update", "evaluation"), 2 * found.parameters
    )
    here = plan("skip_sft=true")
    assert all(part.sampling_copy == 0 for part in here.memory)
    assert not any("auto" in note or "cpu:" in note for note in here.notes)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "products"), [("qwen3", "float16"), ("gemma3", "float32")])
def test_a_plan_for_a_gpu_without_bfloat16_knows_the_family(
    family: str, products: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a run on a T4: the hidden states of Gemma grow beyond the numbers of float16."""
    for module in ("models.device", "sampling.weights"):
        monkeypatch.setattr(f"grouper.{module}.has_bfloat16", lambda: False)
    tiny_model(family).save_pretrained(tmp_path)
    recipe = load_recipe("demo", [*SMALL, f"model={{path: {tmp_path}}}", "skip_sft=true"])
    found = plan_run(recipe, device="cuda", with_cards=False)
    assert found.notes[0].startswith(f"On CUDA: float32 weights, products in {products}, ")
    copies = {part.sampling_copy for part in found.memory if part.name == "grpo sample"}
    assert copies == {2 * found.parameters if products == "float16" else 0}


def test_without_cards_only_the_recipes_own_slices_are_traced(
    demo: RunPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`grouper init` asks for one number, up to three times, and each trace takes seconds."""
    traced, update = [], Tracer.update

    def listed(tracer: Tracer, rows: Rows, *, accumulated: bool) -> tuple[int, int]:
        traced.append(rows)
        return update(tracer, rows, accumulated=accumulated)

    monkeypatch.setattr(Tracer, "update", listed)
    found = plan(with_cards=False)
    assert found == replace(demo, cards=())
    assert len(traced) == 3, "one kind of rows in SFT, two in GRPO"


def test_a_plan_can_be_written_as_json(demo: RunPlan) -> None:
    told = json.loads(json.dumps(demo.as_dict()))
    assert told["peak"] == max(part["peak"] for part in told["memory"])
    assert [phase["name"] for phase in told["phases"]] == ["sft", "grpo"]
    assert told["phases"][0]["tokens"] > 0


@pytest.mark.slow
def test_the_share_of_vllm_is_proposed(demo: RunPlan) -> None:
    (note,) = (n for n in plan("sampling.engine=vllm").notes if "vLLM" in n)
    assert "sampling.vllm.gpu_memory_utilization would be 0.10 on 24 GB" in note
    assert not any("vLLM" in n for n in demo.notes)


def test_a_teacher_is_counted_where_it_is(tmp_path: Path) -> None:
    """Its weights stay while GRPO samples and trains; comparing distributions takes chunks."""
    teacher = tiny_model(vocab_size=20_000, hidden_size=64)
    teacher.save_pretrained(tmp_path)
    size = 4 * sum(parameter.numel() for parameter in teacher.parameters())

    def parts(*overrides: str) -> dict[str, Any]:
        recipe = load_recipe("demo", [*SMALL, "skip_sft=true", *overrides])
        found = plan_run(recipe, device="cpu", with_cards=False)
        return {part.name: part for part in found.memory}

    setting = f"grpo.teacher={{path: {tmp_path}}}"
    plain, taught = parts(), parts(setting)
    for name in ("grpo update", "grpo sample"):
        assert plain[name].teacher == 0
        assert size <= taught[name].teacher < 1.01 * size
    chunk = 4 * TENSORS * 20_000 * chunk_rows(20_000 * TENSORS // HEAD_TENSORS)
    added = taught["grpo update"].activations - chunk
    assert 0 <= added <= plain["grpo update"].activations
    sampled = parts(setting, "grpo.teacher.kl=sampled")
    assert sampled["grpo update"].activations == plain["grpo update"].activations
    # A teacher whose activations are larger than the student's update is read first.
    wide = tmp_path / "wide"
    tiny_model(vocab_size=1000, hidden_size=32, intermediate_size=40_000).save_pretrained(wide)
    read = parts(f"grpo.teacher={{path: {wide}, kl: sampled}}")["grpo update"]
    tokens = load_recipe("demo").grpo.tokens_per_micro_batch
    assert read.activations > 4 * 40_000 * min(tokens, 128 * 48) > plain["grpo update"].activations
    elsewhere = parts(setting, "grpo.teacher.device=cuda")
    assert elsewhere["grpo update"].teacher == 0
    assert parts(setting, "grpo.teacher.quantization=4bit")["grpo update"].teacher < size


def test_processes_share_rows_and_completions() -> None:
    """DDP: weights, gradients and optimizer states are whole; what a process computes is a part."""
    alone = {part.name: part for part in plan("skip_sft=true", with_cards=False).memory}
    shared = plan("skip_sft=true", with_cards=False, processes=4)
    (note,) = shared.notes
    assert "each of 4 processes (ddp)" in note
    assert [part.name for part in shared.memory] == list(alone)
    for part in shared.memory:
        one = alone[part.name]
        assert (part.weights, part.gradients, part.optimizer, part.sampling_copy) == (
            one.weights,
            one.gradients,
            one.optimizer,
            0,
        )
        assert part.cache <= one.cache / 3
        assert part.activations < 0.4 * one.activations


def test_split_weights_are_planned_as_shards() -> None:
    found = plan("skip_sft=true", "parallel=fsdp", with_cards=False, processes=4)
    (note,) = found.notes
    assert "each of 4 processes (fsdp)" in note
    whole = 4 * found.parameters
    load, update, *sampled = found.memory
    assert load.name == "load"
    buffers = load.weights - whole
    assert 0 < buffers < 1000, "frequencies of rotary embeddings"
    assert load.sampling_copy == whole
    assert update.name == "grpo update"
    for part in (update, *sampled):
        # A little more than a quarter: rows of a weight are not always a multiple of 4.
        assert whole / 4 < part.weights - buffers < 1.02 * whole / 4
        assert part.optimizer == pytest.approx(2 * part.weights, rel=0.02)
        assert part.sampling_copy == whole
    assert update.gradients == pytest.approx(whole / 4, rel=0.02)


def test_a_plan_of_one_process_says_that_nothing_is_split(demo: RunPlan) -> None:
    (note,) = plan("parallel=fsdp", with_cards=False).notes
    assert "--nproc N" in note
    assert demo.notes == ()


def test_more_processes_than_rows_are_refused() -> None:
    with pytest.raises(ConfigError, match="a step of grpo has 8 rows") as refused:
        plan("skip_sft=true", "grpo.prompts_per_step=1", "grpo.group_size=8", processes=9)
    assert "Use --nproc 8 or fewer" in str(refused.value)
    with pytest.raises(ConfigError, match="a step of sft has 2 rows"):
        plan("sft.batch_size=2", processes=3)


def test_what_several_processes_cannot_share_is_refused() -> None:
    """By the rule of a run, before anything is traced."""
    with pytest.raises(ConfigError, match="cannot be split over processes"):
        plan("parallel=fsdp", "grpo.optimizer.name=adamw_8bit", processes=2)
    with pytest.raises(ConfigError, match="mode colocate is for one training process"):
        plan("sampling.engine=vllm", "sampling.vllm.mode=colocate", processes=2)


@pytest.mark.slow
def test_the_largest_setting_is_all_rows_of_a_process() -> None:
    """Larger ones change nothing: a step is cut so that it reaches every process."""
    (one, *_), (several, *_) = (plan("skip_sft=true", processes=size).cards for size in (1, 4))
    whole = one.tokens_per_micro_batch["grpo"]
    part = several.tokens_per_micro_batch["grpo"]
    assert whole is not None
    assert part == -(-whole // 4)
