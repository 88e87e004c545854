"""The problem sets of a recipe, and what they say of a run before it starts.

No torch: a dry run reads them, too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from grouper.config.schema import PhaseConfig, Recipe, SourceConfig
from grouper.data import ProblemSet, find_overlap, hold_out, load_problems, without
from grouper.data.audit import is_sentence
from grouper.data.overlap import question_words
from grouper.errors import ConfigError, DataError, counted
from grouper.prompts import make_format
from grouper.training.curriculum import total_steps
from grouper.types import Problem

log = logging.getLogger(__name__)

# Training refuses data of which more than this cannot be read.
MAX_QUARANTINED_SHARE = 0.05

# A set with fewer different questions than this share of its rows is mostly repetition.
MIN_DIFFERENT_SHARE = 0.5
# A set of which more references than this are sentences is a set of the wrong column.
MAX_SENTENCE_SHARE = 0.05

PARTS = ("sft", "train", "validation", "test")
# Parts of which nothing is learnt: a published set is measured whole, whatever it holds.
MEASURED = ("validation", "test")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemSets:
    """The problem sets of a recipe; the parts it does not use are None."""

    sft: ProblemSet | None = None
    train: ProblemSet | None = None
    validation: ProblemSet | None = None
    test: ProblemSet | None = None

    @property
    def parts(self) -> dict[str, ProblemSet]:
        """Those that are there, by name."""
        return {name: part for name in PARTS if (part := getattr(self, name)) is not None}

    @property
    def sources(self) -> dict[str, ProblemSet]:
        """Likewise, without SFT's where it has the training problems."""
        return {n: part for n, part in self.parts.items() if n != "sft" or part is not self.train}

    @property
    def fingerprints(self) -> dict[str, str]:
        return {name: part.fingerprint for name, part in self.parts.items()}

    @property
    def notes(self) -> list[str]:
        """What the filters of each part left out, a line each."""
        lines = [f"data.{name}: {note}" for name, s in self.sources.items() for note in s.notes]
        return list(dict.fromkeys(lines))

    @property
    def for_fitting(self) -> list[Problem]:
        """The problems a new tokenizer is fitted to: never those it is measured on."""
        return [p for part in (self.sft, self.train) if part is not None for p in part.problems]


def load_problem_sets(
    recipe: Recipe,
    parts: Collection[str] | None = None,
    read: Callable[[str, SourceConfig, Recipe], ProblemSet] | None = None,
) -> ProblemSets:
    """Load parts of a recipe's data as a run uses them.

    Args:
        recipe: names them.
        parts: some of `PARTS`; left out: those that the phases of the recipe need.
        read: loads one part; left out: as a run does, with a limit on unusable rows.

    Raises:
        DataError: missing or empty data, or too many rows that cannot be read.
    """
    data, needed = recipe.data, {*(parts or PARTS)}
    if parts is None and recipe.skip_sft and recipe.model.new is None:
        # A new model's tokenizer is fitted to the same texts whatever phases run.
        needed.discard("sft")
    wanted = tuple(needed)
    # SFT without data of its own has the training problems; validation may be taken out of them,
    # and then none of its questions is demonstrated.
    shared = "sft" in needed and data.sft is None
    held_out_of = (data.validation_share, "validation"), (data.test_share, "test")
    if shared or any(share and needed & {"sft", part} for share, part in held_out_of):
        needed.add("train")
    found: dict[str, ProblemSet] = {}
    for part in PARTS:
        source: SourceConfig | None = getattr(data, part)
        if part in needed and source is not None:
            found[part] = (read or _load)(part, source, recipe)
    if data.test_share and "train" in found:
        whole, share = found["train"], data.test_share
        # Whatever the seed of the run: runs of several seeds are compared on the same problems.
        found["train"], found["test"] = hold_out(whole, share, seed=0, part="test")
        if "sft" in found:
            found["sft"] = without(found["sft"], found["test"], part="test")
    if data.validation_share and "train" in found:
        share, seed = data.validation_share, recipe.seed
        found["train"], found["validation"] = hold_out(found["train"], share, seed=seed)
        if "sft" in found:
            found["sft"] = without(found["sft"], found["validation"])
    if shared:
        found["sft"] = found["train"]
    return ProblemSets(**{part: found[part] for part in wanted if part in found})


def load_part(recipe: Recipe, part: str) -> ProblemSet | None:
    """Load one of `PARTS` as a run would use it; None where the recipe has no such part."""
    return load_problem_sets(recipe, [part]).parts.get(part)


def require_part(recipe: Recipe, part: str) -> ProblemSet:
    """The problems of a part of the recipe's data.

    Raises:
        ConfigError: the recipe has none.
    """
    problems = load_part(recipe, part)
    if problems is None:
        raise ConfigError(
            f"the recipe has no {part} problems",
            where=f"data.{part}",
            fix="Name some in the recipe, or choose the other --split.",
        )
    return problems


def _load(part: str, source: SourceConfig, recipe: Recipe) -> ProblemSet:
    """Load one part and report which of its rows are left out.

    What is only measured on keeps the problems whose reference cannot be read.
    """
    problems = load_problems(
        source,
        seed=recipe.seed,
        fmt=make_format(recipe.prompt),
        keep_unreadable=part in MEASURED,
    )
    if not problems.quarantined:
        return problems
    first = problems.quarantined[0]
    summary = (
        f"{len(problems.quarantined)} of {problems.rows_read} rows of {problems.name} cannot be "
        f"used; the first is row {first.row}: {first.reason}"
    )
    share = len(problems.quarantined) / problems.rows_read
    if part not in MEASURED and share > MAX_QUARANTINED_SHARE:
        raise DataError(
            summary,
            where=f"data.{part}",
            fix=f"At most {MAX_QUARANTINED_SHARE:.0%} may be unusable; check data.{part}.columns. "
            "`grouper data prepare` writes a copy that holds only the others.",
        )
    log.warning("data.%s: %s. They are left out.", part, summary)
    return problems


def quarantine_lines(sets: ProblemSets) -> Iterator[str]:
    """One line for every source row that is left out."""
    for name, part in sets.sources.items():
        for row in part.quarantined:
            yield f"data.{name}: row {row.row} of {part.name} is left out: {row.reason}"


# --- what a run says before it starts ------------------------------------------------------------


def phase_lines(
    recipe: Recipe, sets: ProblemSets, fitting: Mapping[str, int] | None = None
) -> list[str]:
    """One line per phase and measurement.

    Args:
        recipe: of the run.
        sets: its problems.
        fitting: problems of each part that fit the model; left out: it is not known which do.
    """
    lines, parts = sets.notes, sets.parts
    size = fitting or {name: len(part) for name, part in parts.items()}
    if sets.sft is not None and not recipe.skip_sft:
        batch = recipe.sft.batch_size
        amount = f"{batch} demonstrations per step, {size['sft']:,} in all"
        lines.append(f"SFT: {amount}, {_steps(recipe.sft, size['sft'], batch)}")
    if not recipe.skip_grpo:
        prompts, group = recipe.grpo.prompts_per_step, recipe.grpo.group_size
        longest = f"{recipe.sampling.max_new_tokens} tokens per completion"
        if recipe.sampling.max_total_tokens is not None:
            longest = f"{recipe.sampling.max_total_tokens} tokens with the prompt"
        lines.append(
            f"GRPO: {prompts} prompts x {group} samples = {prompts * group} completions per step, "
            f"{_steps(recipe.grpo, size['train'], prompts)}, at most {longest}"
        )
    k = recipe.evaluation.samples
    lines += [
        f"Evaluation on {name}: {size[name]:,} problems x {k} = {k * size[name]:,} completions"
        for name in MEASURED
        if name in parts
    ]
    return lines


def _steps(config: PhaseConfig, size: int, per_step: int) -> str:
    steps = total_steps(config, size=size, per_step=per_step)
    epoch = -(-size // per_step)
    return f"{epoch:,} step{'s' * (epoch > 1)} per epoch; {steps:,} step{'s' * (steps > 1)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Leak:
    """Held-out problems that training, or the choice of settings, has seen."""

    count: str
    """`data.test: 3 problems are in the training data`."""
    warning: str


def find_leaks(recipe: Recipe, sets: ProblemSets) -> list[Leak]:
    """One per held-out part and the part that it shares problems with, if a phase trains on it."""
    leaks = []
    phases = ((sets.sft, recipe.skip_sft), (sets.train, recipe.skip_grpo))
    # Both phases may have the very same set.
    parts = {id(part): part for part, skipped in phases if part is not None and not skipped}
    trained = [problem for part in parts.values() for problem in part.problems]
    for name, part in sets.parts.items():
        if name in MEASURED and (found := find_overlap(trained, part.problems)):
            same = sum(overlap.same_question for overlap in found)
            count = f"data.{name}: {len(found)} problems are in the training data"
            warning = (
                f"{count}, too ({same} with the same question, the others share a run of words); "
                f"the first is {found[0].held_out_id}, as {found[0].trained_id}. What is measured "
                "on them says nothing about new problems."
            )
            leaks.append(Leak(count=count, warning=warning))
    if sets.validation is not None and sets.test is not None:
        overlaps = find_overlap(sets.validation.problems, sets.test.problems)
        if both := sum(overlap.same_question for overlap in overlaps):
            count = f"data.test: {both} problems are in data.validation"
            warning = (
                f"{count}, too, which settings are chosen on. Parts of one file need the same "
                "`shuffle`, and offset and limit that keep them apart."
            )
            leaks.append(Leak(count=count, warning=warning))
    return leaks


def data_warnings(recipe: Recipe, sets: ProblemSets) -> Iterator[str]:
    """Warn of parts that are mostly repetition, and of references that are sentences."""
    for name, part in sets.sources.items():
        source: SourceConfig | None = getattr(recipe.data, name)
        shown = name == "sft" or (name == "train" and recipe.skip_grpo)
        # `unique` says how many are wanted: training on one problem is an experiment of its own.
        if source is None or source.unique == "all":
            yield from _repetition(name, part, shown=shown)
        # Demonstrations show their own text; nothing is graded against the reference.
        if not shown:
            yield from _sentences(name, part)


def _repetition(name: str, part: ProblemSet, *, shown: bool) -> Iterator[str]:
    problems = part.problems
    if shown:  # several solutions of a question are several demonstrations
        different = len({(p.question, p.answer, p.solution, p.response) for p in problems})
        noun = "different demonstration"
    else:
        different = len({question_words(p.question) for p in problems})
        noun = "different question"
    if different < MIN_DIFFERENT_SHARE * len(problems):
        yield (
            f"data.{name}: {len(problems):,} problems are only {counted(different, noun)}. The "
            "others are repetitions, which teach and measure nothing new. Use data with more, or "
            f"set data.{name}.unique to the number that you want; `grouper data audit` names the "
            "repeated ones."
        )


def _sentences(name: str, part: ProblemSet) -> Iterator[str]:
    prose = [problem for problem in part.problems if is_sentence(problem.answer)]
    if len(prose) > MAX_SENTENCE_SHARE * len(part):
        yield (
            f"data.{name}: {len(prose):,} of {len(part):,} reference answers are prose and not "
            f"an answer, the first: {prose[0].id} ({prose[0].answer[:80]!r}). A completion is "
            "right only if it repeats the sentence. Name the column that holds the value alone in "
            f"data.{name}.columns.answer."
        )


_OFF = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}


def opening_lines(recipe: Recipe, sets: ProblemSets, fitting: Mapping[str, int]) -> Iterator[str]:
    """The lines printed at the start of a run; the arguments are those of `phase_lines`."""
    yield from phase_lines(recipe, sets, fitting)
    s, g = recipe.sampling, recipe.grpo
    if recipe.skip_grpo:
        return
    if cut := [name for name, off in _OFF.items() if getattr(s, name) != off]:
        yield (
            f"Bias accepted (sampling.allow_truncated): {', '.join(cut)} cut the distribution that "
            "samples are drawn from, while the gradient assumes the whole one."
        )
    if s.min_new_tokens:
        yield (
            f"Bias accepted: stop tokens are not drawn in the first {s.min_new_tokens} tokens "
            "(sampling.min_new_tokens), while the gradient assumes they could be."
        )
    if g.shuffle_rewards:
        yield "Control run (grpo.shuffle_rewards): rewards are dealt out at random."
    if g.group_size < 4:
        yield f"grpo.group_size={g.group_size}: below 4 most groups carry no signal."
