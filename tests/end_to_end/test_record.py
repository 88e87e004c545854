"""What a run leaves behind: models that load with transformers and PEFT, and the whole record."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from grouper.advice import live_checks
from grouper.api import train
from grouper.config.loading import load_recipe
from grouper.config.overrides import PRESETS
from grouper.errors import ConfigError, ModelError, PreflightError, RunFolderError
from grouper.runs.folder import RunFolder
from grouper.runs.progress import Progress
from grouper.training import pipeline
from grouper.training.run import Run
from grouper.training.saved_state import read_state

SMALL = [
    "model.new.hidden_size=32",
    "model.new.intermediate_size=64",
    "data.sft.options.count=40",
    "data.train.options.count=12",
    "data.validation=null",
    "data.test.options.count=6",
    "sft.steps=3",
    "grpo.steps=2",
    "grpo.prompts_per_step=3",
    "grpo.allow_truncation=true",
    "grpo.require_correct_in_group=false",
    "sampling.max_new_tokens=12",
    "tracking.token_groups=all",
    "grading.symbolic=false",
]


def run(tmp_path: Path, *overrides: str, resume: bool = False) -> Path:
    recipe = load_recipe("demo", [*SMALL, f"output_dir={tmp_path}", *overrides])
    with Run(recipe, Progress(quiet=True), resume=resume) as open_run:
        return train(open_run).path


def odd_reward(folder: Path) -> str:
    """A reward that even a random model meets now and then, so that there is a gradient."""
    body = "return [float(sum(ids) % 2) for ids in completion_ids]"
    (folder / "odd.py").write_text(f"def odd(*, completion_ids, **kwargs):\n    {body}\n")
    return f"rewards=[{{name: '{folder}/odd.py:odd'}}]"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run. Tests read it and write nothing into it."""
    return run(tmp_path_factory.mktemp("whole"))


@pytest.mark.slow
def test_finals_load_with_transformers(whole: Path) -> None:
    for phase in ("base", "sft/final", "grpo/final"):
        model = AutoModelForCausalLM.from_pretrained(whole / phase)
        tokenizer = AutoTokenizer.from_pretrained(whole / phase)
        assert tokenizer.chat_template
        assert GenerationConfig.from_pretrained(whole / phase).eos_token_id is not None
        ids = tokenizer("What is 2 plus 3?", return_tensors="pt").input_ids
        with torch.no_grad():
            assert torch.isfinite(model(ids).logits).all()
        # Our attention's name must not end up in a saved config.
        assert "grouper" not in (whole / phase / "config.json").read_text()


@pytest.mark.slow
def test_adapters_load_with_peft_on_their_base(tmp_path: Path) -> None:
    path = run(tmp_path, "model.lora={rank: 4}")
    ids = torch.tensor([[7, 8, 9]])
    base = AutoModelForCausalLM.from_pretrained(path / "base")
    plain = base(ids).logits.detach()
    for phase in ("sft", "grpo"):
        final = path / phase / "final"
        assert not (final / "model.safetensors").exists()
        fresh = AutoModelForCausalLM.from_pretrained(path / "base")
        model = PeftModel.from_pretrained(fresh, final)
        assert not torch.equal(model(ids).logits.detach(), plain)


@pytest.mark.slow
def test_an_adapter_loads_from_anywhere_and_after_the_run_has_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from grouper.config.schema import LoraConfig, ModelConfig
    from grouper.models.loading import load_policy

    monkeypatch.chdir(tmp_path)
    run(Path("here"), "model.lora={rank: 4}", "skip_grpo=true")
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "there")
    (tmp_path / "here" / "demo").rename(tmp_path / "there" / "moved")
    final = str(tmp_path / "there" / "moved" / "sft" / "final")
    policy = load_policy(ModelConfig(path=final, lora=LoraConfig(rank=4)), final, seed=0)
    assert policy.adapter is not None


@pytest.mark.slow
def test_files_are_readable_by_whom_the_user_lets_read(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "ordinary").write_text("")
    expected = (tmp_path / "ordinary").stat().st_mode & 0o666
    for file in whole.rglob("*"):
        if file.is_file() and file.suffix != ".log":
            assert file.stat().st_mode & 0o666 == expected, file


@pytest.mark.slow
def test_the_record_is_complete(whole: Path) -> None:
    for name in ("recipe.yaml", "run.json", "metrics.jsonl", "training.log"):
        assert (whole / name).stat().st_size > 0
    folder = RunFolder(whole)
    assert [(r.phase, r.step) for r in folder.read_metrics()] == [
        ("sft", 1),
        ("sft", 2),
        ("sft", 3),
        ("grpo", 1),
        ("grpo", 2),
    ]
    for report in folder.read_metrics():
        seconds = {
            n.removeprefix("time."): t.mean for n, t in report.tallies.items() if "time." in n
        }
        assert min(seconds.values()) >= 0, report.step
        parts = [seconds.get(n, 0) for n in ("prefill", "decode", "grade", "update", "other")]
        assert sum(parts) == pytest.approx(seconds["step"])
        if report.phase == "grpo":
            assert seconds["sample"] == pytest.approx(seconds["prefill"] + seconds["decode"])
            assert min(seconds["prefill"], seconds["decode"], seconds["update"]) > 0
    rollouts = list(folder.read_rollouts())
    assert len(rollouts) == 2 * 3 * 8
    first = rollouts[0]
    for key in ("prompt", "completion", "finish_reason", "verdict", "reason", "advantage"):
        assert key in first, key
    assert {e.name for e in folder.read_evaluations()} == {"base", "sft", "grpo"}


@pytest.mark.slow
@pytest.mark.parametrize("lora", [(), ("model.lora={rank: 4}",)], ids=["full", "lora"])
def test_kl_is_exactly_zero_at_the_first_step(tmp_path: Path, lora: tuple[str, ...]) -> None:
    """T23, P31: the reference is the SFT policy, adapter continued or all weights."""
    reward = odd_reward(tmp_path)
    path = run(tmp_path, reward, "grpo.beta=0.1", "grpo.optimizer.learning_rate=1e-2", *lora)
    reports = [r for r in RunFolder(path).read_metrics() if r.phase == "grpo"]
    assert reports[0].tallies["policy/kl"].max == 0.0
    assert reports[1].tallies["policy/kl"].max > 0.0


@pytest.mark.slow
@pytest.mark.parametrize("settings", [("grpo.beta=0.1",), ("grpo.beta=0.1", "grpo.kl=k1")])
def test_a_step_without_signal_is_not_learning_whatever_the_kl(
    tmp_path: Path, settings: tuple[str, ...]
) -> None:
    """Reward 0 and only the KL's gradient: step line, `diagnose` and report said all is well."""
    needed = "grpo.require_correct_in_group=true"
    path = run(tmp_path, "skip_sft=true", needed, *settings)
    reports = [r for r in RunFolder(path).read_metrics() if r.phase == "grpo"]
    assert all(report.mean("solve_rate") == 0 for report in reports)
    assert all(report.status.startswith("no-signal:") for report in reports)
    assert reports[0].tallies["policy/kl"].count > 0


@pytest.mark.slow
def test_grpo_goes_on_from_sft_or_says_that_it_starts_from_the_base(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = load_recipe("demo", [*SMALL, f"output_dir={tmp_path}", "skip_sft=true"])
    with Run(recipe, Progress()) as open_run:
        train(open_run)
    assert "GRPO starts from the base model" in " ".join(capsys.readouterr().err.split())

    other = tmp_path / "other"
    run(other, "skip_grpo=true")
    # What the recipe says of SFT's length does not matter where SFT is skipped.
    longer = [f"output_dir={other}", "skip_sft=true", "sft.steps=50"]
    recipe = load_recipe("demo", [*SMALL, *longer])
    with Run(recipe, Progress(), resume=True) as open_run:
        train(open_run)
    shown = "".join(capsys.readouterr().err.split())
    assert "".join(f"GRPO starts from {other / 'demo' / 'sft' / 'final'}".split()) in shown

    third = tmp_path / "third"
    start = other / "demo" / "sft" / "final"
    recipe = load_recipe(
        "demo", [*SMALL, f"output_dir={third}", "skip_sft=true", f"grpo.start_from={start}"]
    )
    with Run(recipe, Progress(), resume=True) as open_run:
        train(open_run)
    assert "".join(f"GRPO starts from {start}".split()) in "".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_a_start_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    """Its tokens would mean other things; nothing but a low score would tell."""
    one = run(tmp_path / "one", "skip_grpo=true")
    two = run(tmp_path / "two", "skip_grpo=true", "data.sft.options.count=30")
    with pytest.raises(ModelError, match="would read other tokens"):
        run(
            tmp_path / "three",
            "skip_sft=true",
            "model.new=null",
            f"model.path={one / 'base'}",
            f"grpo.start_from={two / 'sft' / 'final'}",
        )


@pytest.mark.slow
def test_a_missing_sft_final_is_named_as_missing(tmp_path: Path) -> None:
    """R10: it was told that SFT had not been run."""
    path = run(tmp_path)
    shutil.rmtree(path / "sft" / "final")
    with pytest.raises(RunFolderError, match=r"sft/final, which .* began from, is missing"):
        run(tmp_path, resume=True)


@pytest.mark.slow
def test_sft_is_not_put_behind_a_grpo_that_went_without_it(tmp_path: Path) -> None:
    path = run(tmp_path, "skip_sft=true")
    before = sorted(p for p in path.rglob("*") if p.is_file())
    with pytest.raises(RunFolderError, match="did not start from its SFT"):
        run(tmp_path, resume=True)
    assert sorted(p for p in path.rglob("*") if p.is_file()) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        ("model.compute_dtype=bfloat16",),
        ("model.compute_dtype=bfloat16", "model.attention=eager"),
        ("model.dtype=bfloat16",),
        ("sampling.dtype=bfloat16", "sampling.max_slots=5"),
    ],
    ids=",".join,
)
def test_every_dtype_goes_through_the_whole_run(tmp_path: Path, changes: tuple[str, ...]) -> None:
    path = run(tmp_path, *changes)
    assert {e.name for e in RunFolder(path).read_evaluations()} == {"base", "sft", "grpo"}


@pytest.mark.slow
def test_sampler_and_trainer_agree_under_autocast(tmp_path: Path) -> None:
    reward = odd_reward(tmp_path)
    path = run(tmp_path, reward, "model.compute_dtype=bfloat16")
    gaps = [
        r.tallies["sampler_logprob_diff"]
        for r in RunFolder(path).read_metrics()
        if r.phase == "grpo"
    ]
    # bfloat16 has 8 bits: log-probs near -6 are exact to about 0.02.
    assert all(gap.mean < 0.02 for gap in gaps)


@pytest.mark.slow
def test_an_answer_budget_beyond_the_context_is_refused_before_training(tmp_path: Path) -> None:
    path = run(tmp_path / "made", "skip_grpo=true")
    config = path / "base" / "config.json"
    config.write_text(config.read_text().replace("32768", "200"))
    with pytest.raises(ConfigError, match="leave no room for a prompt"):
        run(
            tmp_path / "used",
            "model.new=null",
            f"model.path={path / 'base'}",
            "sampling.max_new_tokens=200",
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_damaged_model_file_is_one_paragraph(tmp_path: Path, name: str) -> None:
    """What Grouper cannot make again; a damaged final folder of a run it can."""
    path = run(tmp_path / "made", "skip_grpo=true")
    shutil.rmtree(path / "sft")
    file = path / "base" / name
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ModelError, match="cannot be loaded"):
        run(tmp_path / "made", resume=True)


@pytest.mark.slow
def test_a_budget_that_cuts_off_most_answers_is_refused(tmp_path: Path) -> None:
    """P1: never flat rewards for hours without a word."""
    with pytest.raises(
        PreflightError, match=r"are truncated at sampling\.max_new_tokens=12"
    ) as caught:
        run(tmp_path, "grpo.allow_truncation=false")
    assert "grpo.allow_truncation=true" in str(caught.value)


@pytest.mark.slow
def test_the_look_before_grpo_is_first_and_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It came after the base had been measured, and drew 32 answers of four times the budget."""
    looks: list[tuple[int, int]] = []
    sampled = live_checks._sample

    def counted(*arguments: Any, **others: Any) -> dict[int, tuple[int, bool]]:
        answers = sampled(*arguments, **others)
        looks.append((len(answers), arguments[3]))
        return answers

    monkeypatch.setattr(live_checks, "_sample", counted)
    monkeypatch.setattr(pipeline, "measure_policy", None)  # the base is not measured before
    with pytest.raises(PreflightError, match=r"max_new_tokens=12") as caught:
        run(tmp_path / "refused", "grpo.allow_truncation=false", "skip_sft=true")
    assert "--resume" not in caught.value.fix  # nothing was done that could be kept
    (first, budget), (again, longer) = looks
    assert (first <= 16, budget) == (True, 12)
    assert (again <= first, longer) == (True, 4 * 12)
    monkeypatch.undo()
    monkeypatch.setattr(live_checks, "_sample", counted)
    looks.clear()
    # Where truncation is allowed there is nothing to decide.
    path = run(tmp_path / "anyway", "grpo.allow_truncation=true", "skip_sft=true")
    assert looks == []
    # A teacher judges each token, of a truncated answer, too.
    teacher = f"grpo.teacher={{path: {path / 'base'}}}"
    alone = ("grpo.algorithm=distillation", teacher, "grpo.allow_truncation=false")
    run(tmp_path / "taught", "skip_sft=true", *alone)
    assert looks == []


@pytest.mark.slow
@pytest.mark.parametrize("begun", [False, True])
def test_what_a_refused_preflight_proposes_works(tmp_path: Path, begun: bool) -> None:
    """U5: both ways on, whether SFT has been trained before or nothing at all."""
    alone = () if begun else ("skip_sft=true", "data.test=null")
    for name in ("anyway", "longer"):
        with pytest.raises(PreflightError) as caught:
            run(tmp_path / name, "grpo.allow_truncation=false", *alone)
        assert ("--resume" in caught.value.fix) == begun
    path = run(tmp_path / "anyway", "grpo.allow_truncation=true", *alone, resume=begun)
    assert (path / "grpo" / "final").is_dir()
    if not begun:
        # A model that knows no stop token is refused again, not as another recipe.
        with pytest.raises(PreflightError):
            run(
                tmp_path / "longer",
                "sampling.max_new_tokens=14",
                "grpo.allow_truncation=false",
                *alone,
            )


@pytest.mark.slow
def test_the_loss_of_the_validation_problems_is_measured(tmp_path: Path) -> None:
    path = run(
        tmp_path,
        "data.validation={source: arithmetic, split: validation, options: {count: 4}}",
        "sft.evaluate_every=2",
    )
    measured = RunFolder(path).read_evaluation("validation-sft-000000")
    assert measured is not None
    # An untrained model of 400 tokens is near the loss of guessing, log(400) = 6.
    assert 5 < measured.card["loss"] < 7
    assert measured.card["loss_tokens"] > 20


@pytest.mark.slow
def test_several_updates_resampling_and_the_band_are_in_the_record(tmp_path: Path) -> None:
    path = run(
        tmp_path,
        odd_reward(tmp_path),
        "grpo.updates_per_batch=3",
        "grpo.num_iterations=2",
        "grpo.dynamic_sampling_rounds=1",
        "grpo.difficulty={band: [0.1, 0.9]}",
        "grpo.steps=3",
    )
    reports = [r for r in RunFolder(path).read_metrics() if r.phase == "grpo"]
    for report in reports:
        # A random model solves nothing: every group is replaced once, and the budget is spent.
        assert report.mean("groups/replaced") == 3
        assert report.mean("resample_rounds") == 1
        assert report.tallies["updates"].sum <= 6
    assert max(r.tallies["updates"].sum for r in reports) > 1
    assert reports[-1].tallies["problems/left_out"].sum == 12
    seen = read_state(path / "grpo" / "final")["difficulty"]
    assert {(correct, epoch) for correct, _, epoch in seen.values()} <= {(0, n) for n in range(3)}
    assert all(isinstance(epoch, int) for _, _, epoch in seen.values())
    first = list(RunFolder(path).read_rollouts("grpo", 1))
    assert len(first) == 2 * 3 * 8
    assert [row["advantage"] is None for row in first] == [False] * 24 + [True] * 24


@pytest.mark.slow
# `distillation` needs a teacher: see tests/training/test_teachers.py.
@pytest.mark.parametrize("algorithm", sorted(set(PRESETS) - {"distillation"}))
def test_every_preset_runs(algorithm: str, tmp_path: Path) -> None:
    """Two steps of each: it learns something, and its log-probs are those of the sampler."""
    path = run(
        tmp_path,
        odd_reward(tmp_path),
        f"grpo.algorithm={algorithm}",
        "grpo.prompts_per_step=4",
        "grpo.dynamic_sampling_rounds=0",
        "sft.steps=1",
    )
    reports = [r for r in RunFolder(path).read_metrics() if r.phase == "grpo"]
    assert [r.status for r in reports] == ["learning", "learning"]
    for report in reports:
        assert report.tallies["sampler_logprob_diff"].max < 1e-4
        assert report.mean("grad_norm") > 0
    if PRESETS[algorithm].get("beta"):
        assert reports[0].tallies["policy/kl"].max < 1e-6
        assert reports[1].tallies["policy/kl"].count > 0


@pytest.mark.slow
def test_a_new_adapter_on_a_trained_model_starts_at_a_kl_of_exactly_zero(tmp_path: Path) -> None:
    """T23: all weights in SFT, a fresh adapter in GRPO: the reference is the SFT model."""
    trained = run(tmp_path / "full", "skip_grpo=true")
    path = run(
        tmp_path / "lora",
        odd_reward(tmp_path),
        "model.lora={rank: 4}",
        "skip_sft=true",
        "grpo.beta=0.1",
        "grpo.optimizer.learning_rate=1e-2",
        f"grpo.start_from={trained / 'sft' / 'final'}",
    )
    reports = [r for r in RunFolder(path).read_metrics() if r.phase == "grpo"]
    assert reports[0].tallies["policy/kl"].max == 0.0
    assert reports[0].tallies["policy/kl"].min == 0.0
    assert reports[1].tallies["policy/kl"].max > 0.0
    assert (path / "grpo" / "final" / "adapter_model.safetensors").exists()
