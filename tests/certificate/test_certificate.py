"""Certificates: honest runs pass, frauds are named, and what is missing is said."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from made_runs import STEPS, MadeRun, edit_items, write_later, write_probe_of

from grouper.certificate.certificate import (
    REPLAY,
    Certificate,
    certify,
    check,
    read_certificate,
    write_certificate,
)
from grouper.certificate.items import ITEMS
from grouper.certificate.record_items import judge_replay
from grouper.certificate.replay import Replay
from grouper.errors import ConfigError, RunFolderError
from grouper.evaluation.result import EvaluationItem
from grouper.evaluation.sequential import sequential_interval
from grouper.grading import TEXT_ALONE
from grouper.runs.folder import RunFolder
from grouper.types import Verdict

HONEST = MadeRun()
CONTROL = ("grpo.shuffle_rewards=true",)
# What `--seeds 3` and a control leave, with all that may be measured afterwards.
SEEDS = (0, 1, 2)


def honest_runs(folder: Path, made: MadeRun = HONEST, first: int = 0) -> tuple[list[Path], Path]:
    """Three seeds and a control, each with its probe, twins and the base in another prompt."""
    runs = []
    for seed in SEEDS:
        one = replace(made, seed=first + seed)
        run = one.write(folder / f"run-seed{first + seed}")
        write_probe_of(run, exact=0.01)
        write_twins(run, one, one.last, one.last - 0.02)
        write_later(run, one, share=one.base, which=0, card={"prompt": "xml"}, name="test-greedy")
        runs.append(run)
    control = replace(made, seed=first, settings=CONTROL, last=made.base)
    return runs, control.write(folder / "control")


def write_twins(run: Path, made: MadeRun, original: float, twins: float) -> None:
    write_later(run, made, share=original, which=1, card={}, name="test-original")
    write_later(
        run,
        replace(made, seed=made.seed + 1000),
        share=twins,
        which=1,
        card={"twins_of": "test", "seed": made.seed},
        name="test-twins",
        split="test-twins",
    )


def certificate_of(
    runs: Sequence[Path], controls: Sequence[Path] = (), *, folder: Path | None = None
) -> Certificate:
    return certify(runs, controls, folder=folder or runs[0])


def failed_items(certificate: Certificate) -> dict[str, str]:
    return {item.name: item.sentence for item in certificate.items if item.status == "fail"}


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], Path]:
    """Tests write nothing into it."""
    return honest_runs(tmp_path_factory.mktemp("honest"))


@pytest.fixture
def own(honest, tmp_path) -> tuple[list[Path], Path]:
    """A copy that a test may change."""
    runs, control = honest
    shutil.copytree(runs[0].parent, tmp_path / "own")
    return [tmp_path / "own" / run.name for run in runs], tmp_path / "own" / control.name


# --- honest runs ---------------------------------------------------------------------------------

HONEST_RUNS = {
    "usual": MadeRun(),
    "small gain": MadeRun(base=0.3, last=0.44),
    "from nothing": MadeRun(base=0.0, last=0.4),
    "nearly solved": MadeRun(base=0.7, last=0.97),
    "format and math": MadeRun(base=0.1, last=0.6, lenient_base=0.3),
    "shorter": MadeRun(tokens=(40, 12)),
    "other limit for both": MadeRun(limits=(200, 200), tokens=(150, 100)),
    "slightly longer": MadeRun(limits=(2048, 2048), tokens=(100, 102)),
    "other seeds": MadeRun(seed=40),
    "dynamic sampling": MadeRun(replaced=2),
    "noisy reward": MadeRun(pays_wrong=0.02),
    "other prompt for both": MadeRun(prompts=("boxed-like", "boxed-like")),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HONEST_RUNS)
def test_an_honest_run_raises_no_alarm(name: str, tmp_path: Path) -> None:
    made = HONEST_RUNS[name]
    runs, control = honest_runs(tmp_path, made, first=made.seed)
    certificate = certificate_of(runs, [control])
    assert failed_items(certificate) == {}
    missing = {item.name for item in certificate.items if item.status == "missing"}
    assert missing == {REPLAY}


# --- frauds --------------------------------------------------------------------------------------


def leaked_test_set(folder: Path) -> Certificate:
    """It trained on the test problems."""
    return certificate_of([replace(HONEST, trained="test").write(folder / "run")])


def read_before(folder: Path) -> Certificate:
    """Its base has read the test set: it completes the questions, and twins are harder for it."""
    run = HONEST.write(folder / "run")
    write_probe_of(run, exact=0.6)
    write_twins(run, HONEST, HONEST.last, 0.3)
    return certificate_of([run])


def format_only(folder: Path) -> Certificate:
    """It knew the answers before, and has learned to write them in the format."""
    return certificate_of([replace(HONEST, base=0.1, lenient_base=0.4).write(folder / "run")])


def larger_budget(folder: Path) -> Certificate:
    """The trained model had four times the tokens."""
    return certificate_of([replace(HONEST, limits=(48, 192), tokens=(30, 150)).write(folder / "r")])


def lucky_seed(folder: Path) -> Certificate:
    """The best of three seeds is shown alone."""
    runs = [
        replace(HONEST, seed=seed, last=last).write(folder / f"run-seed{seed}")
        for seed, last in ((0, 0.2), (1, 0.5), (2, 0.19))
    ]
    return certificate_of(runs[1:2])


def weak_grader(folder: Path) -> Certificate:
    """The record calls wrong answers right."""
    return certificate_of([replace(HONEST, last=0.2, wrong_as_right=0.5).write(folder / "run")])


def wrong_base_prompt(folder: Path) -> Certificate:
    """The base was measured in another prompt than the trained model."""
    return certificate_of([replace(HONEST, prompts=("strange", "compact")).write(folder / "run")])


def weak_base_prompt(folder: Path) -> Certificate:
    """In a prompt that suits it, the base is as good as the trained model."""
    run = HONEST.write(folder / "run")
    write_later(run, HONEST, share=0.52, which=0, card={"prompt": "few-shot"}, name="test-few")
    return certificate_of([run])


def chosen_checkpoint(folder: Path) -> Certificate:
    """An earlier step was measured than the one where it ended."""
    return certificate_of([replace(HONEST, measured_step=4).write(folder / "run")])


def cheated_reward(folder: Path) -> Certificate:
    """Wrong completions earned more than right ones, by a reward that can be cheated."""
    rewards = 'rewards=[{name: correctness, weight: 0.2}, {name: "tag_count", weight: 1.0}]'
    made = replace(HONEST, pays_wrong=0.5, settings=(rewards,))
    return certificate_of([made.write(folder / "run")])


def edited_record(folder: Path) -> Certificate:
    """The accuracy in the summary is not that of the items."""
    run = HONEST.write(folder / "run")
    file = run / "evaluations" / "grpo.json"
    content = json.loads(file.read_text())
    content["accuracy"] += 0.1
    file.write_text(json.dumps(content))
    return certificate_of([run])


def helpful_control(folder: Path) -> Certificate:
    """Shuffled rewards help as much as the true ones."""
    run = HONEST.write(folder / "run")
    control = replace(HONEST, settings=CONTROL, last=0.48).write(folder / "control")
    return certificate_of([run], [control])


def edited(
    folder: Path, name: str, change: Callable[[EvaluationItem], EvaluationItem | None]
) -> Certificate:
    """Items were edited, and their summary with them."""
    run = HONEST.write(folder / "run")
    edit_items(run, name, change)
    return certificate_of([run])


def wrong_answers_called_unreadable(folder: Path) -> Certificate:
    """Wrong completions do not count: their references are said to be unreadable."""
    return edited(
        folder,
        "grpo",
        lambda item: item if item.correct else replace(item, verdict=Verdict.NOT_SCORED),
    )


def right_by_another_stage(folder: Path) -> Certificate:
    """Wrong completions are right, by a stage that is not repeated."""
    return edited(
        folder,
        "grpo",
        lambda item: replace(item, verdict=Verdict.CORRECT, stage=TEXT_ALONE, lenient=True),
    )


def base_out_of_time(folder: Path) -> Certificate:
    """The base's right completions are said to have run out of time."""
    return edited(
        folder,
        "base",
        lambda item: replace(item, verdict=Verdict.TIMEOUT) if item.correct else item,
    )


def base_not_lenient(folder: Path) -> Certificate:
    """The base knew the answers in another format, and the record denies it."""
    run = replace(HONEST, base=0.1, lenient_base=0.4).write(folder / "run")
    edit_items(run, "base", lambda item: replace(item, lenient=item.correct))
    return certificate_of([run])


def chosen_problems(folder: Path) -> Certificate:
    """Only the problems that the trained model solves were kept, in both evaluations."""
    run = HONEST.write(folder / "run")
    result = RunFolder(run).read_evaluation("grpo")
    assert result is not None
    solved = {item.problem_id for item in result.items if item.correct}
    for name in ("base", "grpo"):
        edit_items(run, name, lambda item: item if item.problem_id in solved else None)
    return certificate_of([run])


def other_references(folder: Path) -> Certificate:
    """What the trained model wrote is the reference, in both evaluations."""
    run = HONEST.write(folder / "run")
    result = RunFolder(run).read_evaluation("grpo")
    assert result is not None
    written = {item.problem_id: item.extracted or "" for item in result.items}
    for name in ("base", "grpo"):

        def to_written(item: EvaluationItem) -> EvaluationItem:
            is_right = item.extracted == written[item.problem_id]
            verdict = Verdict.CORRECT if is_right else Verdict.INCORRECT
            lenient = is_right
            answer = written[item.problem_id]
            return replace(item, answer=answer, verdict=verdict, lenient=lenient)

        edit_items(run, name, to_written)
    return certificate_of([run])


def flipped_control(folder: Path) -> Certificate:
    """The control gained as well, and its items say otherwise."""
    run = HONEST.write(folder / "run")
    control = replace(HONEST, settings=CONTROL, last=0.48).write(folder / "control")
    before = RunFolder(control).read_evaluation("base")
    assert before is not None
    right = {item.problem_id for item in before.items if item.correct}
    edit_items(
        control,
        "grpo",
        lambda item: item if item.problem_id in right else replace(item, verdict=Verdict.INCORRECT),
    )
    return certificate_of([run], [control])


def changed_on_the_way(folder: Path) -> Certificate:
    """It was continued with other data, of which the recipe at the end says nothing."""
    run = HONEST.write(folder / "run")
    file = run / "run.json"
    content = json.loads(file.read_text())
    change = {"data.train": ["0123456789abcdef", content["fingerprints"]["train"]]}
    content["changes"] = [
        {
            "phase": "grpo",
            "step": 3,
            "hash_before": content["recipe_hash"],
            "hash": content["recipe_hash"],
            "changes": change,
        }
    ]
    file.write_text(json.dumps(content))
    return certificate_of([run])


def record_cut_short(folder: Path) -> Certificate:
    """It was stopped at the step where it was best."""
    run = replace(HONEST, measured_step=4).write(folder / "run")
    RunFolder(run).truncate_to("grpo", 4)
    state = {"phase": "grpo", "step": 4, "total": STEPS}
    (run / "grpo" / "final" / "trainer_state.json").write_text(json.dumps(state))
    return certificate_of([run])


def record_deleted(folder: Path) -> Certificate:
    """What it was trained on can no longer be seen."""
    run = replace(HONEST, trained="test").write(folder / "run")
    shutil.rmtree(run / "rollouts")
    shutil.rmtree(run / "grpo")
    (run / "metrics.jsonl").unlink()
    return certificate_of([run])


FRAUDS: dict[Callable[[Path], Certificate], set[str]] = {
    leaked_test_set: {"leaks"},
    read_before: {"probe", "twins"},
    format_only: {"reasoning"},
    larger_budget: {"conditions", "tokens"},
    lucky_seed: {"seeds"},
    weak_grader: {"grades"},
    wrong_base_prompt: {"conditions"},
    weak_base_prompt: {"base prompt"},
    chosen_checkpoint: {"checkpoint"},
    cheated_reward: {"payment"},
    edited_record: {"records"},
    helpful_control: {"control"},
    wrong_answers_called_unreadable: {"grades"},
    right_by_another_stage: {"grades"},
    base_out_of_time: {"grades"},
    base_not_lenient: {"grades"},
    chosen_problems: {"test set"},
    other_references: {"test set"},
    flipped_control: {"grades"},
    changed_on_the_way: {"records"},
    record_cut_short: {"checkpoint"},
    record_deleted: {"records", "checkpoint"},
}


@pytest.mark.parametrize("fraud", FRAUDS, ids=lambda fraud: fraud.__name__)
def test_a_fraud_is_named(fraud: Callable[[Path], Certificate], tmp_path: Path) -> None:
    """By its own item, and by no other that it has nothing to do with."""
    assert failed_items(fraud(tmp_path)).keys() == FRAUDS[fraud]


def test_seeds_that_disagree_are_no_gain(tmp_path: Path) -> None:
    runs = [
        replace(HONEST, seed=seed, last=last).write(tmp_path / f"run-seed{seed}")
        for seed, last in ((0, 0.2), (1, 0.75), (2, 0.21))
    ]
    assert failed_items(certificate_of(runs)).keys() == {"gain", "seeds"}


def test_looks_after_each_seed_widen_the_interval(honest, own) -> None:
    (item,) = [i for i in certificate_of(own[0]).items if i.name == "seeds"]
    for run in own[0]:
        RunFolder(run).record_planned_seeds(8)
    (wider,) = [i for i in certificate_of(own[0]).items if i.name == "seeds"]
    assert wider.numbers["low"] < item.numbers["low"]
    assert "up to 8" in wider.sentence
    results = [RunFolder(run).read_evaluations() for run in own[0]]
    changes = [last.accuracy - base.accuracy for base, last in results]
    expected = sequential_interval(changes, 8, least=0, furthest=1.0)
    assert wider.numbers["low"] == pytest.approx(expected.low, abs=0.01)


# --- what is missing, and mistakes ---------------------------------------------------------------


def test_what_was_not_measured_is_missing_and_says_how(tmp_path: Path) -> None:
    run = HONEST.write(tmp_path / "run")
    certificate = certificate_of([run])
    missing = {item.name: item.sentence for item in certificate.items if item.status == "missing"}
    assert missing.keys() == {"seeds", "base prompt", "probe", "twins", "control", REPLAY}
    assert all("`grouper " in sentence for sentence in missing.values())
    assert certificate.verdict == "nothing failed, 6 items missing"
    write_probe_of(run, exact=0.0, stale=True)
    sentences = {item.name: item.sentence for item in certificate_of([run]).items}
    assert "another model or set was probed" in sentences["probe"]


def test_a_run_without_evaluations_certifies_nothing(tmp_path: Path) -> None:
    run = HONEST.write(tmp_path / "run")
    for file in (run / "evaluations").iterdir():
        file.unlink()
    certificate = certificate_of([run])
    statuses = {item.name: item.status for item in certificate.items}
    assert statuses["gain"] == statuses["tokens"] == statuses["reasoning"] == "missing"
    assert statuses["records"] == "fail"


def test_a_damaged_record_fails_and_does_not_stop(own) -> None:
    (run, *_), _ = own
    (run / "rollouts" / "grpo-000003.jsonl.gz").write_bytes(b"nonsense")
    failures = failed_items(certificate_of([run]))
    assert "grpo-000003" in failures["records"]
    items = run / "evaluations" / "grpo.jsonl.gz"
    items.write_bytes((run / "evaluations" / "base.jsonl.gz").read_bytes())
    failures = failed_items(certificate_of([run]))
    assert "other items" in failures["records"]


def test_lost_completions_are_named(own) -> None:
    (run, *_), _ = own
    (run / "evaluations" / "grpo.jsonl.gz").unlink()
    certificate = certificate_of([run])
    assert "the items of this evaluation are lost" in failed_items(certificate)["records"]
    statuses = {item.name: item.status for item in certificate.items}
    assert statuses["gain"] == statuses["grades"] == "missing"


def test_a_run_in_progress_is_refused(honest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grouper.certificate.evidence.is_running", lambda _: True)
    with pytest.raises(ConfigError, match="still in progress"):
        certificate_of(honest[0][:1])


def test_runs_of_other_recipes_are_refused(tmp_path: Path) -> None:
    run = HONEST.write(tmp_path / "run")
    other = replace(HONEST, settings=("grpo.clip_low=0.3",)).write(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"not seeds of one recipe: grpo.clip_low is 0.2"):
        certificate_of([run, other])
    with pytest.raises(ConfigError, match="were not shuffled"):
        certificate_of([run], [replace(HONEST, seed=1).write(tmp_path / "second")])
    with pytest.raises(ConfigError, match="named twice"):
        certificate_of([run, run])
    with pytest.raises(ConfigError, match="the same seed: 0, 0"):
        certificate_of([run, HONEST.write(tmp_path / "copy")])
    control = replace(HONEST, settings=CONTROL).write(tmp_path / "control")
    with pytest.raises(ConfigError, match="a control run"):
        certificate_of([control])


def test_too_little_is_no_evidence(tmp_path: Path) -> None:
    """A control that was not trained to the end, and a base that was cut off after one token."""
    run = HONEST.write(tmp_path / "run")
    control = replace(HONEST, settings=CONTROL, last=HONEST.base, measured_step=2)
    write_later(
        run,
        HONEST,
        share=0.0,
        which=0,
        card={"prompt": "xml", "sampling": {"temperature": 0.0, "max_new_tokens": 1}},
        name="test-short",
    )
    certificate = certificate_of([run], [control.write(tmp_path / "control")])
    statuses = {item.name: item.status for item in certificate.items}
    assert statuses["control"] == statuses["base prompt"] == "missing"


def test_a_control_that_was_not_measured(tmp_path: Path) -> None:
    run = HONEST.write(tmp_path / "run")
    control = replace(HONEST, settings=CONTROL).write(tmp_path / "control")
    for file in (control / "evaluations").iterdir():
        file.unlink()
    certificate = certificate_of([run], [control])
    statuses = {item.name: item.status for item in certificate.items}
    assert statuses["control"] == "missing"
    assert statuses["checkpoint"] == statuses["records"] == "fail"


def test_more_seeds_than_were_planned(own) -> None:
    for run in own[0]:
        RunFolder(run).record_planned_seeds(2)
    (item,) = [i for i in certificate_of(own[0]).items if i.name == "seeds"]
    assert item.status == "pass"
    assert "up to 3" in item.sentence


def test_a_copy_beside_a_run_is_no_seed_that_was_left_out(own) -> None:
    runs, control = own
    shutil.copytree(runs[0], runs[0].parent / "backup")
    assert failed_items(certificate_of(runs, [control])) == {}


# --- checking ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_certificate_is_computed_again(own, tmp_path: Path) -> None:
    runs, control = own
    file = tmp_path / "own" / "certificate.json"
    certificate = certificate_of(runs, [control], folder=file.parent)
    write_certificate(certificate, file)
    assert read_certificate(file) == certificate
    assert [item.name for item in certificate.items] == [*ITEMS, REPLAY]
    assert check(file).differences == ()
    moved = tmp_path / "moved"
    shutil.move(file.parent, moved)
    assert check(moved / file.name).differences == ()


@pytest.mark.slow
def test_what_was_changed_afterwards_is_found(own, tmp_path: Path) -> None:
    runs, control = own
    file = tmp_path / "own" / "certificate.json"
    write_certificate(certificate_of(runs, [control], folder=file.parent), file)
    content = json.loads(file.read_text())
    gain = content["items"][0]
    gain["numbers"]["after"] += 0.01
    file.write_text(json.dumps(content))
    assert check(file).differences[0].startswith("gain: it states other numbers")
    gain["numbers"]["after"] -= 0.01
    gain["sentence"] = "It solves everything."
    file.write_text(json.dumps(content))
    assert "'It solves everything.'" in check(file).differences[0]
    del content["items"][0]
    file.write_text(json.dumps(content))
    assert check(file).differences == ("gain: the certificate leaves this item out.",)
    weights = runs[0] / "grpo" / "final" / "model.safetensors"
    weights.write_bytes(b"others")
    assert "run-seed0: grpo/final/model.safetensors has other content." in check(file).differences


def test_a_file_that_is_no_certificate_is_refused(own, tmp_path: Path) -> None:
    file = tmp_path / "own" / "certificate.json"
    file.write_text("{}")
    with pytest.raises(RunFolderError, match="damaged"):
        check(file)
    empty = {"grouper": "", "made": "", "runs": [], "controls": [], "items": []}
    file.write_text(json.dumps(empty))
    with pytest.raises(RunFolderError, match="runs"):
        check(file)
    write_certificate(certificate_of(own[0], folder=file.parent), file)
    shutil.rmtree(own[0][1])
    with pytest.raises(RunFolderError, match="is not in run-seed1"):
        check(file)


SAME = Replay(first=3, last=3)
OTHER = Replay(first=2, last=3, different=("model.safetensors",))
LOST = Replay(first=0, last=0, reason="It has no checkpoint.")


@pytest.mark.parametrize(
    ("replays", "status", "words"),
    [
        ([SAME], "pass", "Trained again, step 3 of the last phase: the same weights"),
        ([SAME] * 3, "pass", "step 3 of the last phase in 3 runs: the same weights"),
        ([SAME, OTHER], "fail", "step 3, steps 2 to 3 of the last phase in 2 runs: other"),
        ([LOST, OTHER], "fail", "steps 2 to 3 of the last phase: other content in 1 file"),
        ([SAME, LOST], "missing", "It has no checkpoint."),
    ],
)
def test_replays_of_several_runs_are_one_finding(
    replays: Sequence[Replay], status: str, words: str
) -> None:
    """A difference in one of them is never hidden by another that could not be trained again."""
    finding = judge_replay(replays)
    assert finding.status == status
    assert words in finding.sentence
