"""Run folders with the whole record of a run, made in a second: nothing in them was trained.

`MadeRun` has a field for everything that a fraud changes; by default it is the record of an honest
run that learned.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from grouper.config.loading import load_recipe, recipe_hash, resolved_yaml
from grouper.config.schema import Recipe
from grouper.evaluation.contamination import Completed, Probe
from grouper.evaluation.result import EvaluationItem, EvaluationResult
from grouper.grading import Grader
from grouper.models.folders import identity_of
from grouper.prompts import make_format
from grouper.runs.folder import RunFolder
from grouper.runs.probes import RecordedProbe, write_probe
from grouper.runs.records import RunInfo
from grouper.training.problem_sets import ProblemSets, load_problem_sets
from grouper.types import FinishReason, Grade, Problem, StepReport, Tally, Verdict

# Steps of GRPO in the recipe.
STEPS = 6
GROUPS = 8
GROUP_SIZE = 8
TEST = 250
SETTINGS = (
    "skip_sft=true",
    f"grpo.steps={STEPS}",
    "data.train.options.count=300",
    f"data.test.options.count={TEST}",
    "data.validation=null",
    "sft.evaluate_every=0",
    "grpo.evaluate_every=0",
)
# Tokens of a completion, above and below their mean.
SPREAD = (0, 4, -4, 8, -8)
RIGHT = "<reasoning>so</reasoning><answer>{answer}</answer>"
BARE = "it is {answer}"
RAMBLING = "and so on"


@cache
def _recipe(settings: tuple[str, ...]) -> Recipe:
    return load_recipe("demo", [*SETTINGS, *settings])


@cache
def _sets(settings: tuple[str, ...], seed: int) -> ProblemSets:
    return load_problem_sets(_recipe(settings).model_copy(update={"seed": seed}))


@dataclass(frozen=True, kw_only=True)
class MadeRun:
    """What a record is to say; a default is what an honest run says."""

    seed: int = 0
    settings: tuple[str, ...] = ()
    base: float = 0.2
    """Accuracy of the model before training."""
    last: float = 0.5
    """Accuracy after GRPO."""
    lenient_base: float = 0.0
    """Share of the base's completions that are right in another format."""
    tokens: tuple[int, int] = (20, 20)
    """Tokens of a completion of base and last."""
    limits: tuple[int, int] = (48, 48)
    """The limits that both were measured with."""
    prompts: tuple[str, str] = ("compact", "compact")
    measured_step: int = STEPS
    """The step whose model was measured."""
    wrong_as_right: float = 0.0
    """Share of the last model's wrong completions that the record calls right."""
    trained: str = "train"
    """The part of the data whose problems the rollouts are of."""
    pays_wrong: float = 0.0
    """Share of the wrong rollouts that earned more than the right ones."""
    replaced: int = 0
    """Groups of each step that dynamic sampling has replaced: all wrong, and recorded."""

    @property
    def recipe(self) -> Recipe:
        return _recipe(self.settings).model_copy(update={"seed": self.seed})

    @property
    def sets(self) -> ProblemSets:
        return _sets(self.settings, self.seed)

    def write(self, path: Path, name: str | None = None) -> Path:
        """Write the record into a new folder."""
        recipe = self.recipe.model_copy(
            update={"name": name or path.name, "output_dir": str(path.parent)}
        )
        info = RunInfo(
            recipe_hash=recipe_hash(recipe),
            versions={"python": "3.11"},
            fingerprints=self.sets.fingerprints,
        )
        folder = RunFolder.create(path, info, recipe_yaml=resolved_yaml(recipe))
        (path / "training.log").write_text("done\n")
        _write_model(path / "base", {}, self.seed)
        state = {"phase": "grpo", "step": STEPS, "total": STEPS}
        _write_model(path / "grpo" / "final", state, self.seed + 1)
        self._write_steps(folder)
        hashed = {"recipe_hash": recipe_hash(recipe)}
        for which, (phase, step) in enumerate((("base", 0), ("grpo", self.measured_step))):
            folder.write_evaluation(self._result(which, phase, step, hashed))
        return path

    # --- evaluations

    def _result(
        self, which: int, phase: str, step: int, card: Mapping[str, Any]
    ) -> EvaluationResult:
        share = (self.base, self.last)[which]
        items = [*self._items(which, share, self.sets.parts["test"].problems)]
        return EvaluationResult(
            name=phase,
            phase=phase,
            step=step,
            split="test",
            items=tuple(items),
            samples=1,
            card={
                **card,
                "sampling": {"temperature": 0.0, "max_new_tokens": self.limits[which]},
                "n": len(items),
                "k": 1,
                "seed": self.seed,
                "prompt": self.prompts[which],
            },
        )

    def _items(
        self, which: int, share: float, problems: Sequence[Problem]
    ) -> Iterator[EvaluationItem]:
        # Hard problems are hard for both: most draws are the same.
        both = random.Random(f"{self.seed}/both")
        chance = random.Random(f"{self.seed}/{which}")
        texts = []
        for problem in problems:
            drawn = both.random()
            if chance.random() < 0.2:
                drawn = chance.random()
            if drawn < share:
                texts.append(RIGHT.format(answer=problem.answer))
            elif which == 0 and drawn < share + self.lenient_base:
                texts.append(BARE.format(answer=problem.answer))
            else:
                texts.append(RIGHT.format(answer=int(problem.answer) + 1))
        fmt = make_format(self.recipe.prompt)
        grades = _graded(texts, [problem.answer for problem in problems], fmt.name)
        for number, (problem, text, grade) in enumerate(zip(problems, texts, grades, strict=True)):
            verdict = grade.verdict
            if which == 1 and not grade.correct and chance.random() < self.wrong_as_right:
                verdict = Verdict.CORRECT
            lenient = verdict is Verdict.CORRECT or text == BARE.format(answer=problem.answer)
            yield EvaluationItem(
                problem_id=problem.id,
                subject=None,
                level=None,
                sample=0,
                prompt=f"{self.prompts[which]}: {problem.question}",
                completion=text,
                answer=problem.answer,
                extracted=grade.extracted,
                verdict=verdict,
                reason=grade.reason,
                stage=grade.stage,
                finish_reason=FinishReason.STOP_TOKEN,
                tokens=self.tokens[which] + SPREAD[number % len(SPREAD)],
                lenient=lenient,
                lenient_verdict=Verdict.CORRECT if lenient else Verdict.INCORRECT,
            )

    # --- steps

    def _write_steps(self, folder: RunFolder) -> None:
        chance = random.Random(f"{self.seed}/steps")
        problems = self.sets.parts[self.trained].problems
        for step in range(1, STEPS + 1):
            rows = []
            for group in range(GROUPS):
                problem = chance.choice(problems)
                for sample in range(GROUP_SIZE):
                    is_right = chance.random() < (self.base + self.last) / 2
                    rows.append(self._rollout(step, group, sample, problem, is_right, chance))
            kept = len(rows)
            for group in range(GROUPS, GROUPS + self.replaced):
                problem = chance.choice(problems)
                for sample in range(GROUP_SIZE):
                    row = self._rollout(step, group, sample, problem, False, chance)
                    rows.append({**row, "advantage": None})
            folder.write_rollouts("grpo", step, rows)
            rows = rows[:kept]
            tallies = {"reward/total": Tally.of([row["reward"] for row in rows])}
            report = StepReport(
                phase="grpo", step=step, status="learning", events=(), tallies=tallies
            )
            folder.append_metrics(report)
        folder.flush_metrics()

    def _rollout(
        self,
        step: int,
        group: int,
        sample: int,
        problem: Problem,
        is_right: bool,
        chance: random.Random,
    ) -> dict[str, Any]:
        answer = problem.answer if is_right else str(int(problem.answer) + 1)
        reward = 1.0 if is_right else 0.0
        if not is_right and chance.random() < self.pays_wrong:
            reward = 1.5
        return {
            "phase": "grpo",
            "step": step,
            "group": group,
            "sample": sample,
            "problem_id": problem.id,
            "prompt": f"compact: {problem.question}",
            "completion": RIGHT.format(answer=answer),
            "answer": problem.answer,
            "extracted": answer,
            "verdict": "correct" if is_right else "incorrect",
            "stage": "text",
            "reason": "",
            "finish_reason": "stop_token",
            "tokens": 20,
            "policy_version": step - 1,
            "rewards": {"correctness": reward},
            "reward": reward,
            "advantage": 0.0,
        }


@cache
def _grader(format_name: str) -> Grader:
    recipe = _recipe(())
    assert recipe.prompt.format == format_name
    return Grader(make_format(recipe.prompt).contract, recipe.grading)


def _graded(texts: Sequence[str], answers: Sequence[str], format_name: str) -> list[Grade]:
    return list(_grader(format_name).grade(texts, answers))


def _write_model(folder: Path, state: Mapping[str, Any], seed: int) -> None:
    """Write a folder that looks like a model; its weights are a few bytes."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(f"weights {seed}".encode())
    if state:
        (folder / "trainer_state.json").write_text(json.dumps(state))


def write_probe_of(run: Path, exact: float, *, stale: bool = False) -> None:
    """Record a probe of the test problems that found this share of exact endings."""
    model = run / "grpo" / "final"

    def probe(name: str, share: float) -> Probe:
        completed = tuple(
            Completed(
                problem_id=f"arithmetic/test/{number}",
                shown="Ann has",
                ending=" two pens and a lot of books",
                written="two pens and a lot of books" if number < 100 * share else "no",
            )
            for number in range(100)
        )
        return Probe(name=name, completed=completed)

    write_probe(
        run,
        RecordedProbe(
            model=str(model),
            model_hash="another" if stale else identity_of(str(model)),
            probe=probe("test", exact),
            control=probe("control", 0.0),
        ),
    )


def write_later(
    run: Path,
    made: MadeRun,
    *,
    share: float,
    which: int,
    card: Mapping[str, Any],
    name: str,
    split: str = "test",
) -> None:
    """Record what `grouper eval` would have measured afterwards."""
    phase = ("base", "grpo")[which]
    folder = RunFolder(run / "eval_runs" / phase)
    folder.path.mkdir(parents=True, exist_ok=True)
    changed = replace(made, **{("base", "last")[which]: share})
    result = changed._result(which, phase, (0, STEPS)[which], {})
    model = (run / "base", run / "grpo" / "final")[which]
    cards = {**result.card, "model_hash": identity_of(str(model)), **card}
    folder.write_evaluation(replace(result, name=name, split=split, card=cards))


def edit_items(
    run: Path, name: str, change: Callable[[EvaluationItem], EvaluationItem | None]
) -> None:
    """Write an evaluation again with other items, and a summary that follows from them."""
    folder = RunFolder(run)
    result = folder.read_evaluation(name)
    assert result is not None
    changed = [change(item) for item in result.items]
    items = tuple(item for item in changed if item is not None)
    card = {**result.card, "n": len(items)}
    folder.write_evaluation(replace(result, items=items, card=card))
