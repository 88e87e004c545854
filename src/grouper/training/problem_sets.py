"""The problem sets of a recipe, and the lines that a run prints about them before it starts.

This module does not import torch: a dry run loads problem sets as well.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from grouper.config.schema import PhaseConfig, ProgramsConfig, Recipe, SourceConfig
from grouper.data import ProblemSet, find_overlap, hold_out, load_problems, without
from grouper.data.audit import is_sentence
from grouper.data.overlap import question_words
from grouper.errors import ConfigError, DataError, plural
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
# Parts that are measured, not trained on. All of a published set is used, whatever it holds.
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
        """The parts that the recipe uses, by name."""
        used = {}
        for name in PARTS:
            problem_set: ProblemSet | None = getattr(self, name)
            if problem_set is not None:
                used[name] = problem_set
        return used

    @property
    def sources(self) -> dict[str, ProblemSet]:
        """The parts by name, without `sft` if it is the same set as `train`."""
        sources = self.parts
        if self.sft is not None and self.sft is self.train:
            del sources["sft"]
        return sources

    @property
    def fingerprints(self) -> dict[str, str]:
        return {name: problem_set.fingerprint for name, problem_set in self.parts.items()}

    @property
    def notes(self) -> list[str]:
        """One line for each filter of a part that left problems out."""
        lines = []
        for name, problem_set in self.sources.items():
            lines += [f"data.{name}: {note}" for note in problem_set.notes]
        return list(dict.fromkeys(lines))

    @property
    def for_fitting(self) -> list[Problem]:
        """The problems a new tokenizer is fitted to: never those it is measured on."""
        problems: list[Problem] = []
        if self.sft is not None:
            problems += self.sft.problems
        if self.train is not None:
            problems += self.train.problems
        return problems


def load_problem_sets(
    recipe: Recipe,
    parts: Collection[str] | None = None,
    read: Callable[[str, SourceConfig, Recipe], ProblemSet] | None = None,
) -> ProblemSets:
    """Load parts of a recipe's data as a run uses them.

    Args:
        recipe: names the data.
        parts: some of `PARTS`; default: those that the phases of the recipe need.
        read: loads one part; default: as a run does, with a limit on unusable rows.

    Raises:
        DataError: missing or empty data, or too many rows that cannot be read.
    """
    data = recipe.data
    requested = set(parts or PARTS)
    if parts is None and recipe.skip_sft and recipe.model.new is None:
        # A new model's tokenizer is fitted to the same texts whatever phases run.
        requested.discard("sft")
    # SFT without data of its own uses the training problems.
    sft_is_train = "sft" in requested and data.sft is None
    needed = _with_source_parts(recipe, requested)
    if read is None:
        read = _load
    loaded: dict[str, ProblemSet] = {}
    for name in PARTS:
        source: SourceConfig | None = getattr(data, name)
        if name in needed and source is not None:
            loaded[name] = read(name, source, recipe)
    _hold_out_parts(recipe, loaded)
    if sft_is_train:
        loaded["sft"] = loaded["train"]
    return ProblemSets(**{name: loaded[name] for name in requested if name in loaded})


def _with_source_parts(recipe: Recipe, requested: set[str]) -> set[str]:
    """Add `train` to the requested parts where one of them is taken out of it."""
    data = recipe.data
    train_is_needed = "sft" in requested and data.sft is None
    # If validation or test problems are held out of the training problems, none of their questions
    # is demonstrated, so SFT needs them as well.
    if data.validation_share and requested & {"sft", "validation"}:
        train_is_needed = True
    if data.test_share and requested & {"sft", "test"}:
        train_is_needed = True
    return requested | {"train"} if train_is_needed else requested


def _hold_out_parts(recipe: Recipe, loaded: dict[str, ProblemSet]) -> None:
    """Take test and validation problems out of the loaded training problems, if the recipe does."""
    data = recipe.data
    if data.test_share and "train" in loaded:
        # The seed is not that of the run: runs of several seeds are compared on the same problems.
        loaded["train"], loaded["test"] = hold_out(
            loaded["train"], data.test_share, seed=0, part="test"
        )
        if "sft" in loaded:
            loaded["sft"] = without(loaded["sft"], loaded["test"], part="test")
    if data.validation_share and "train" in loaded:
        loaded["train"], loaded["validation"] = hold_out(
            loaded["train"], data.validation_share, seed=recipe.seed
        )
        if "sft" in loaded:
            loaded["sft"] = without(loaded["sft"], loaded["validation"])


def load_part(recipe: Recipe, name: str) -> ProblemSet | None:
    """Load one of `PARTS` as a run would use it; None if the recipe has no such part."""
    return load_problem_sets(recipe, [name]).parts.get(name)


def require_part(recipe: Recipe, name: str) -> ProblemSet:
    """Load one of `PARTS` as a run would use it.

    Raises:
        ConfigError: the recipe has no such part.
    """
    problems = load_part(recipe, name)
    if problems is None:
        raise ConfigError(
            f"the recipe has no {name} problems",
            where=f"data.{name}",
            fix="Name some in the recipe, or choose the other --split.",
        )
    return problems


def _load(name: str, source: SourceConfig, recipe: Recipe) -> ProblemSet:
    """Load one part and report which of its rows are left out.

    Parts that are only measured keep the problems whose reference answer cannot be read.
    """
    problems = load_problems(
        source,
        seed=recipe.seed,
        fmt=make_format(recipe.prompt),
        keep_unreadable=name in MEASURED,
    )
    if not problems.quarantined:
        return problems
    first = problems.quarantined[0]
    summary = (
        f"{len(problems.quarantined)} of {problems.rows_read} rows of {problems.name} cannot be "
        f"used; the first is row {first.row}: {first.reason}"
    )
    share = len(problems.quarantined) / problems.rows_read
    if name not in MEASURED and share > MAX_QUARANTINED_SHARE:
        raise DataError(
            summary,
            where=f"data.{name}",
            fix=f"At most {MAX_QUARANTINED_SHARE:.0%} may be unusable; check data.{name}.columns. "
            "`grouper data prepare` writes a copy that holds only the others.",
        )
    log.warning("data.%s: %s. They are left out.", name, summary)
    return problems


def quarantine_lines(sets: ProblemSets) -> Iterator[str]:
    """Yield one line for every source row that is left out."""
    for name, problem_set in sets.sources.items():
        for row in problem_set.quarantined:
            yield f"data.{name}: row {row.row} of {problem_set.name} is left out: {row.reason}"


# --- the lines that a run prints before it starts ------------------------------------------------


def phase_lines(
    recipe: Recipe, sets: ProblemSets, fitting: Mapping[str, int] | None = None
) -> list[str]:
    """Return one line per phase and measurement.

    Args:
        recipe: of the run.
        sets: the problem sets of the recipe.
        fitting: number of problems of each part that fit the model; default: all of them.
    """
    lines = sets.notes
    sizes = fitting
    if not sizes:
        sizes = {name: len(problem_set) for name, problem_set in sets.parts.items()}
    if sets.sft is not None and not recipe.skip_sft:
        batch = recipe.sft.batch_size
        amount = f"{batch} demonstrations per step, {sizes['sft']:,} in all"
        lines.append(f"SFT: {amount}, {_steps(recipe.sft, sizes['sft'], batch)}")
    if not recipe.skip_grpo:
        prompts = recipe.grpo.prompts_per_step
        group = recipe.grpo.group_size
        longest = f"{recipe.sampling.max_new_tokens} tokens per completion"
        if recipe.sampling.max_total_tokens is not None:
            longest = f"{recipe.sampling.max_total_tokens} tokens with the prompt"
        lines.append(
            f"GRPO: {prompts} prompts x {group} samples = {prompts * group} completions per step, "
            f"{_steps(recipe.grpo, sizes['train'], prompts)}, at most {longest}"
        )
    samples = recipe.evaluation.samples
    for name in MEASURED:
        if name in sets.parts:
            size = sizes[name]
            lines.append(
                f"Evaluation on {name}: {size:,} problems x {samples} = {samples * size:,} "
                "completions"
            )
    return lines


def _steps(config: PhaseConfig, size: int, per_step: int) -> str:
    """Describe the steps of an epoch and of a phase, in words."""
    steps = total_steps(config, size=size, per_step=per_step)
    epoch = -(-size // per_step)
    return f"{epoch:,} {_steps_noun(epoch)} per epoch; {steps:,} {_steps_noun(steps)}"


def _steps_noun(count: int) -> str:
    return "steps" if count > 1 else "step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Leak:
    """Held-out problems that are also used for training, or for the choice of settings."""

    count: str
    """`data.test: 3 problems are in the training data`."""
    warning: str


def find_leaks(recipe: Recipe, sets: ProblemSets) -> list[Leak]:
    """Find the held-out parts that share problems with the data of a phase, or with each other.

    Returns:
        One leak for each pair of parts that share problems.
    """
    trained = trained_problems(recipe, sets)
    leaks = []
    for name, problem_set in sets.parts.items():
        if name not in MEASURED:
            continue
        overlaps = find_overlap(trained, problem_set.problems)
        if not overlaps:
            continue
        same = sum(overlap.same_question for overlap in overlaps)
        count = f"data.{name}: {len(overlaps)} problems are in the training data"
        warning = (
            f"{count}, too ({same} with the same question, the others share a run of words); "
            f"the first is {overlaps[0].held_out_id}, as {overlaps[0].trained_id}. What is "
            "measured on them says nothing about new problems."
        )
        leaks.append(Leak(count=count, warning=warning))
    if sets.validation is not None and sets.test is not None:
        overlaps = find_overlap(sets.validation.problems, sets.test.problems)
        same = sum(overlap.same_question for overlap in overlaps)
        if same:
            count = f"data.test: {same} problems are in data.validation"
            warning = (
                f"{count}, too, which settings are chosen on. Parts of one file need the same "
                "`shuffle`, and offset and limit that keep them apart."
            )
            leaks.append(Leak(count=count, warning=warning))
    return leaks


def trained_problems(recipe: Recipe, sets: ProblemSets) -> list[Problem]:
    """Return the problems of all phases that run; those of a set that both share only once."""
    problems: list[Problem] = []
    if sets.sft is not None and not recipe.skip_sft:
        problems += sets.sft.problems
    if sets.train is not None and not recipe.skip_grpo:
        is_counted = sets.train is sets.sft and not recipe.skip_sft
        if not is_counted:
            problems += sets.train.problems
    return problems


def data_warnings(recipe: Recipe, sets: ProblemSets) -> Iterator[str]:
    """Warn of parts that are mostly repetition, and of references that are sentences."""
    for name, problem_set in sets.sources.items():
        source: SourceConfig | None = getattr(recipe.data, name)
        is_demonstrated = name == "sft" or (name == "train" and recipe.skip_grpo)
        # `unique` limits the number of questions: training on one problem is an experiment of its
        # own.
        if source is None or source.unique == "all":
            yield from _repetition(name, problem_set, demonstrated=is_demonstrated)
        # Demonstrations show their own text; nothing is graded against the reference.
        if not is_demonstrated:
            yield from _sentences(name, problem_set)


def _repetition(name: str, problem_set: ProblemSet, *, demonstrated: bool) -> Iterator[str]:
    """Warn if most problems of a set repeat others."""
    problems = problem_set.problems
    if demonstrated:  # several solutions of a question are several demonstrations
        different = len({(p.question, p.answer, *p.demonstration) for p in problems})
        noun = "different demonstration"
    else:
        different = len({question_words(p.question) for p in problems})
        noun = "different question"
    if different < MIN_DIFFERENT_SHARE * len(problems):
        yield (
            f"data.{name}: {len(problems):,} problems are only {plural(different, noun)}. The "
            "others are repetitions, which teach and measure nothing new. Use data with more, or "
            f"set data.{name}.unique to the number that you want; `grouper data audit` names the "
            "repeated ones."
        )


def _sentences(name: str, problem_set: ProblemSet) -> Iterator[str]:
    """Warn if many reference answers of a set are sentences."""
    prose = [problem for problem in problem_set.problems if is_sentence(problem.answer)]
    if len(prose) > MAX_SENTENCE_SHARE * len(problem_set):
        yield (
            f"data.{name}: {len(prose):,} of {len(problem_set):,} reference answers are prose and "
            f"not an answer, the first: {prose[0].id} ({prose[0].answer[:80]!r}). A completion is "
            "right only if it repeats the sentence. Name the column that holds the value alone in "
            f"data.{name}.columns.answer."
        )


# Values of the settings that truncate the distribution, with which they do not.
_OFF = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}


def opening_lines(recipe: Recipe, sets: ProblemSets, fitting: Mapping[str, int]) -> Iterator[str]:
    """Yield the lines printed at the start of a run; the arguments are those of `phase_lines`."""
    yield from phase_lines(recipe, sets, fitting)
    if make_format(recipe.prompt).runs_programs:
        yield _isolation_line(recipe.grading.programs)
    if recipe.skip_grpo:
        return
    sampling = recipe.sampling
    truncating = [name for name, off in _OFF.items() if getattr(sampling, name) != off]
    if truncating:
        yield (
            f"Bias accepted (sampling.allow_truncated): {', '.join(truncating)} cut the "
            "distribution that samples are drawn from, while the gradient assumes the whole one."
        )
    if sampling.min_new_tokens:
        yield (
            f"Bias accepted: stop tokens are not sampled in the first {sampling.min_new_tokens} "
            "tokens (sampling.min_new_tokens), while the gradient assumes they could be."
        )
    if recipe.grpo.shuffle_rewards:
        yield "Control run (grpo.shuffle_rewards): rewards are dealt out at random."
    if recipe.grpo.group_size < 4:
        yield f"grpo.group_size={recipe.grpo.group_size}: below 4 most groups carry no signal."


def _isolation_line(programs: ProgramsConfig) -> str:
    """Say how the model's programs are run."""
    limits = f"{programs.seconds:g} s and {programs.memory_mb:,} MB each"
    if programs.isolation == "seccomp":
        return f"Programs of the model run isolated (seccomp), {limits}."
    return (
        f"Programs of the model run with your rights, {limits}: they are not isolated "
        "(grading.programs.isolation: limits)."
    )
