"""Teachers in a run: what is loaded, let go, refused, known to resume, and learned."""

from __future__ import annotations

import gc
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import taught_step, tiny_teachers
from tiny_runs import TINY_RUN, data_from, write_problems

from grouper.api import train
from grouper.config.loading import load_recipe, recipe_hash
from grouper.config.schema import GRPOConfig, Recipe, SFTConfig, TeacherConfig
from grouper.errors import ConfigError, DataError, ModelError, RunFolderError
from grouper.models import device
from grouper.models.policy import Policy
from grouper.runs.folder import RunFolder
from grouper.training import pipeline
from grouper.training.observe import take_step
from grouper.training.teachers import number_of, paths_of, teacher_marks, teacher_model

RATE = "grpo.optimizer={learning_rate: 2e-2}"


def recipe_in(folder: Path, *overrides: str) -> Recipe:
    write_problems(folder)
    start = [*TINY_RUN, *data_from(str(folder)), f"output_dir={folder}", "name=run"]
    return load_recipe("demo", [*start, *overrides])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `teacher`, which SFT has taught, `other` of other weights, and `student`.

    All have the tokenizer of the same problems; the student is smaller.
    """
    folder = tmp_path_factory.mktemp("models")
    for name, changes in {
        "teacher": [],
        "other": ["seed=5"],
        "student": ["sft.steps=1", "model.new.intermediate_size=32"],
    }.items():
        recipe = recipe_in(
            folder, "skip_grpo=true", *changes, f"save_path={folder / name}", f"name=made-{name}"
        )
        train(recipe)
    return folder


def student_recipe(models: Path, folder: Path, *overrides: str) -> Recipe:
    """GRPO of the student, taught by the teacher alone."""
    return recipe_in(
        folder,
        f"model={{path: {models / 'student'}}}",
        "skip_sft=true",
        "grpo.algorithm=distillation",
        "grpo.steps=3",
        "grpo.evaluate_every=0",
        RATE,
        f"grpo.teacher={{path: {models / 'teacher'}}}",
        *overrides,
    )


def divergences(run: Path) -> list[float]:
    rows = RunFolder(run).metrics_rows()
    return [float(row["teacher/divergence"]) for row in rows]


@pytest.mark.parametrize(
    "changes",
    [
        (),
        ("grpo.teacher.kl=sampled", "grpo.steps=40"),
        ("grpo.teacher.kl=forward",),
        ("grpo.teacher.top_k=8",),
        ("grpo.teacher.dtype=bfloat16",),
    ],
    ids=["reverse", "sampled", "forward", "top-k", "bfloat16"],
)
def test_a_student_comes_nearer_to_its_teacher(
    changes: tuple[str, ...], models: Path, tmp_path: Path
) -> None:
    """No reward counts: every step has a gradient all the same."""
    recipe = student_recipe(models, tmp_path, "grpo.steps=12", *changes)
    folder = train(recipe).path
    found = divergences(folder)
    assert len(found) == recipe.grpo.steps
    assert sum(found[-3:]) < 0.7 * sum(found[:3])
    statuses = {row["status"] for row in RunFolder(folder).metrics_rows()}
    assert statuses == {"learning"}


def test_rewards_and_a_teacher_together(models: Path, tmp_path: Path) -> None:
    recipe = student_recipe(models, tmp_path, "grpo.advantage=mean", "grpo.teacher.weight=0.5")
    folder = train(recipe).path
    assert len(divergences(folder)) == 3


def test_a_teacher_with_the_worked_solution_in_its_prompt(models: Path, tmp_path: Path) -> None:
    """The model that is trained may teach itself so."""
    recipe = student_recipe(
        models,
        tmp_path,
        f"grpo.teacher={{path: {models / 'student'}, prompt: solution}}",
        "prompt.max_prompt_tokens=200",
    )
    folder = train(recipe).path
    assert min(divergences(folder)) > 0  # equal weights, other prompts


def test_teachers_by_data_source() -> None:
    config = TeacherConfig(path="a", sources={"gsm8k": "b", "math": "a", "svamp": "b"})
    assert paths_of(config) == ("a", "b")
    assert [number_of(config, name) for name in ("gsm8k", "math", "aime")] == [1, 0, 0]


def test_two_teachers_are_loaded_and_let_go(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[int] = []

    def counted(open_run: Any, state: Any) -> Any:
        alive.append(sum(type(thing) is Policy for thing in gc.get_objects()))
        return take_step(open_run, state)

    monkeypatch.setattr(pipeline, "take_step", counted)
    recipe = student_recipe(models, tmp_path, f"grpo.teacher.sources={{file: {models / 'other'}}}")
    train(recipe)
    assert alive == [3, 3, 3]
    gc.collect()
    assert not any(type(thing) is Policy for thing in gc.get_objects())


def test_sft_with_a_teacher(models: Path, tmp_path: Path) -> None:
    """Forward KL on demonstrated texts beside their likelihood: a warm-up."""
    recipe = recipe_in(
        tmp_path,
        f"model={{path: {models / 'student'}}}",
        "skip_grpo=true",
        "sft.steps=8",
        f"sft.teacher={{path: {models / 'teacher'}, kl: forward}}",
    )
    folder = train(recipe).path
    found = divergences(folder)
    assert len(found) == 8
    assert found[-1] < found[0]


# --- what a run keeps ----------------------------------------------------------------------------


def test_a_resumed_run_is_the_uninterrupted_one(models: Path, tmp_path: Path) -> None:
    whole = student_recipe(models, tmp_path, "name=whole", "grpo.steps=4")
    train(whole)
    parts = student_recipe(
        models, tmp_path, "name=parts", "grpo.steps=2", "grpo.checkpoint_every=2"
    )
    train(parts)
    longer = parts.override("grpo.steps=4")
    train(longer, resume=True, allow_changes=True)
    weights = [
        (tmp_path / name / "grpo" / "final" / "model.safetensors").read_bytes()
        for name in ("whole", "parts")
    ]
    assert weights[0] == weights[1]
    size = sum(file.stat().st_size for file in (tmp_path / "parts").rglob("*.safetensors"))
    of_teacher = (models / "teacher" / "model.safetensors").stat().st_size
    of_student = (models / "student" / "model.safetensors").stat().st_size
    assert of_teacher > of_student
    # Checkpoints hold the student and its optimizer's two moments, and no teacher.
    assert size < 3 * 4 * of_student


def test_another_teacher_is_another_run(models: Path, tmp_path: Path) -> None:
    """Weights that were replaced in their folder are noticed when a run goes on."""
    teacher = tmp_path / "teacher"
    shutil.copytree(models / "teacher", teacher)
    recipe = student_recipe(
        models, tmp_path, f"grpo.teacher={{path: {teacher}}}", "grpo.checkpoint_every=1"
    )
    train(recipe)
    shutil.copy(models / "other" / "model.safetensors", teacher / "model.safetensors")
    with pytest.raises(RunFolderError, match=r"grpo\.teacher\.path"):
        train(recipe.override("grpo.steps=5"), resume=True)


def test_a_teacher_of_the_hub_is_marked_by_its_revision() -> None:
    data = ["grpo.algorithm=distillation", "grpo.teacher={path: owner/model, revision: v2}"]
    recipe = load_recipe("demo", data)
    assert teacher_marks(recipe) == {"grpo.teacher.path": "owner/model@v2"}
    assert teacher_marks(recipe.override("skip_grpo=true")) == {}


def test_recipes_without_a_teacher_keep_their_hash() -> None:
    recipe = load_recipe("demo")
    assert recipe_hash(recipe) == recipe_hash(recipe.override("grpo.teacher=null"))
    taught = recipe.override("grpo.teacher={path: teacher}")
    assert recipe_hash(taught) != recipe_hash(recipe)


# --- what is refused -----------------------------------------------------------------------------


def test_a_teacher_that_is_missing(models: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        train(student_recipe(models, tmp_path, "grpo.teacher.path=./nowhere"))
    assert caught.value.where == "grpo.teacher.path"


def test_a_teacher_that_reads_other_tokens(models: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(models / "teacher", other)
    file = other / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, last = min(vocabulary, key=vocabulary.get), max(vocabulary, key=vocabulary.get)
    vocabulary[first], vocabulary[last] = vocabulary[last], vocabulary[first]
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(ModelError, match="would read other tokens than the policy writes"):
        train(student_recipe(models, tmp_path, f"grpo.teacher.path={other}"))


@pytest.mark.parametrize("spelling", ["{}", "{}/", "{}/../student"])
def test_the_model_itself_has_nothing_to_teach(spelling: str, models: Path, tmp_path: Path) -> None:
    itself = spelling.format(models / "student")
    with pytest.raises(ConfigError, match="it has nothing to teach"):
        train(student_recipe(models, tmp_path, f"grpo.teacher.path={itself}"))


def test_no_worked_solutions_to_show(models: Path, tmp_path: Path) -> None:
    for setting in ("grpo.teacher.prompt=solution", "grpo.solution_weight=0.1"):
        recipe = student_recipe(models, tmp_path, setting)
        lines = (tmp_path / "train.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        bare = "".join(
            json.dumps({"question": row["question"], "answer": row["answer"]}) + "\n"
            for row in rows
        )
        (tmp_path / "train.jsonl").write_text(bare)
        with pytest.raises(DataError, match="no training problem has a worked solution"):
            train(recipe)


@pytest.mark.parametrize(
    ("section", "settings", "message"),
    [
        (GRPOConfig, {"advantage": "zero"}, "name a teacher"),
        (GRPOConfig, {"teacher": {"path": "a", "kl": "sampled", "top_k": 4}}, "leave top_k out"),
        (SFTConfig, {"teacher": {"path": "a", "kl": "sampled"}}, "use forward in SFT"),
        (SFTConfig, {"teacher": {"path": "a", "prompt": "solution"}}, "solutions already"),
        (SFTConfig, {"teacher": {"path": "a", "sources": {"b": "c"}}}, "SFT has one teacher"),
        (GRPOConfig, {"teacher": {"path": "a", "weight": 0.0}}, "greater than 0"),
        (GRPOConfig, {"teacher": {"path": "a", "device": "tpu"}}, "pattern"),
        (GRPOConfig, {"advantage": "pass_at_k", "advantage_k": 9}, "at most 8"),
    ],
)
def test_settings_that_contradict_each_other(
    section: Any, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        section(**settings)


# --- a slice -------------------------------------------------------------------------------------


def test_a_slice_is_read_by_the_teachers_of_its_rows() -> None:
    """Hidden states are those of each teacher on its own rows, with its own prompts."""
    batch = taught_step()
    teachers = tiny_teachers()
    assert batch.teacher is not None
    guidance = teachers.guide(batch)
    assert [len(lecture.tokens) for lecture in guidance.lectures] == [
        int(batch.completion_lengths[batch.is_rollout & (batch.teacher == number)].sum())
        for number in (0, 1)
    ]
    tokens = torch.cat([lecture.tokens for lecture in guidance.lectures])
    of_rollouts = batch.is_rollout[:, None].expand(batch.mask.shape)[batch.is_completion]
    assert sorted(tokens.tolist()) == of_rollouts.nonzero().flatten().tolist()
    for number, lecture in enumerate(guidance.lectures):
        rows = (batch.is_rollout & (batch.teacher == number)).nonzero().flatten()
        one = batch.select(rows[:1]).as_the_teacher_reads()
        expected = teachers.policies[number].completion_states(one)
        torch.testing.assert_close(lecture.hidden[: len(expected)], expected)


def test_a_slice_without_a_weight_has_no_lecture() -> None:
    """As a stand-in of a process with fewer slices has none."""
    guidance = tiny_teachers().guide(taught_step().without_weight())
    assert guidance.lectures == ()
    assert replace(guidance, kl="forward").lectures == ()


def test_the_teacher_of_a_gpu_without_bfloat16_has_float32_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device, "has_bfloat16", lambda: False)
    recipe = load_recipe("demo", ["grpo.teacher={path: x}"])
    assert recipe.grpo.teacher is not None
    config = teacher_model(recipe, recipe.grpo.teacher, "x", "cuda")
    assert (config.dtype, config.compute_dtype) == ("float32", "auto")
