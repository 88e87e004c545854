"""A model on problems and on their twins, which have other numbers: paired by problem."""

from __future__ import annotations

from dataclasses import dataclass, replace

from grouper.data.problems import ProblemSet
from grouper.data.twins import make_twin
from grouper.errors import DataError
from grouper.evaluation.result import EvaluationResult
from grouper.evaluation.statistics import PairedComparison, paired_comparison


def twins_of(problems: ProblemSet, key: int) -> ProblemSet:
    """Return the twins of those problems that have one, with the same ids.

    Args:
        problems: with worked solutions whose arithmetic is marked.
        key: which twins.

    Raises:
        DataError: no problem has a twin.
    """
    twins = []
    for problem in problems.problems:
        for text in problem.columns.values():
            if not isinstance(text, str) or "<<" not in text:
                continue
            twin = make_twin(problem.question, text, problem.answer, key)
            if twin is not None:
                changed = replace(
                    problem, question=twin.question, answer=twin.answer, solution=twin.solution
                )
                twins.append(changed)
                break
    if not twins:
        raise DataError(
            "no problem has a twin: a twin is computed by the steps that a worked solution marks "
            "(<<48/2=24>>), as GSM8K's do",
            where=problems.name,
            fix="Leave --twins out, or use problems whose solutions are marked.",
        )
    left_out = len(problems) - len(twins)
    name = f"{problems.name} (twins)"
    return replace(problems, name=name, problems=tuple(twins), left_out=left_out, quarantined=())


@dataclass(frozen=True, slots=True, kw_only=True)
class TwinComparison:
    """A model on the problems that have a twin, and on the twins."""

    model: str
    problems: str
    original: float
    """Accuracy on the originals of the twins."""
    paired: PairedComparison
    """From the originals to the twins."""

    @property
    def sentence(self) -> str:
        """The comparison in words."""
        paired = self.paired
        judgment = {
            "worse": "it knows these problems better than others of their kind",
            "better": "it does better with the other numbers",
            "no evidence": "no evidence of a difference",
        }[paired.verdict]
        return (
            f"{self.model}: of {paired.problems} problems with a twin, {100 * self.original:.1f} % "
            f"right as they are and {100 * paired.after:.1f} % with other numbers: "
            f"{paired.points}, {judgment}."
        )


def compare_twins(
    model: str, originals: EvaluationResult, twins: EvaluationResult
) -> TwinComparison:
    """Compare a model's answers to twins with those to their originals.

    Args:
        model: its name in the sentence.
        originals: on all problems.
        twins: on the twins, which have the ids of their originals.

    Raises:
        DataError: no problem was scored in both.
    """
    shared = [problem for problem in twins.scores if problem in originals.scores]
    if not shared:
        raise DataError(
            "no problem was scored both as it is and with other numbers",
            where=originals.split,
            fix="Measure both again: `grouper eval --twins`.",
        )
    before = [originals.scores[problem] for problem in shared]
    after = [twins.scores[problem] for problem in shared]
    samples = min(originals.samples, twins.samples)
    return TwinComparison(
        model=model,
        problems=originals.split,
        original=sum(before) / len(before),
        paired=paired_comparison(before, after, samples=samples),
    )
