"""A probe for contamination: can a model complete questions that it should not have seen?

The first part of a question is continued greedily, as plain text. A model that has read the
question completes it word for word, and one that has not does so only where the ending can be
guessed; how often that is, fresh problems of the same kind tell (Wu et al. 2025, arXiv 2507.10532:
Qwen2.5-Math-7B completes 54.6 % of MATH-500 from 60 % of the question, and 0.0 % of a set that was
made afterwards).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from grouper.evaluation.result import mean_of
from grouper.evaluation.statistics import Interval, wilson_interval
from grouper.sampling.base import Sampler, SampleRequest, draw_seed
from grouper.types import Prompt, SamplingParams

# Share of a question's words that the model is given, as in the paper.
SHOWN = 0.6
# An ending of fewer words is easily guessed.
_FEWEST_WORDS = 6
# Tokens more than the ending has: another tokenization of it may be longer.
_MORE_TOKENS = 8


def split_question(question: str, shown: float = SHOWN) -> tuple[str, str] | None:
    """Split a question into the part that is shown and the ending; None: it is too short.

    The space between the two belongs to the ending, as tokenizers have it.

    >>> split_question("a b c d e f g h i j k l m n o p q")
    ('a b c d e f g h i j', ' k l m n o p q')

    Args:
        question: the text.
        shown: share of its words.
    """
    words = [match.end() for match in re.finditer(r"\S+", question)]
    count = int(len(words) * shown)
    if count < 1 or len(words) - count < _FEWEST_WORDS:
        return None
    end = words[count - 1]
    return question[:end], question[end:]


def rouge_l(text: str, reference: str) -> float:
    """Compute ROUGE-L: the F-measure of the longest common subsequence of words (Lin 2004).

    By hand: of "a b c" and "a x c d" it is "a c": 2 / 3 of the one, 2 / 4 of the other, so 4 / 7.

    >>> round(rouge_l("a b c", "a x c d"), 4)
    0.5714
    """
    ours = text.split()
    theirs = reference.split()
    if not ours or not theirs:
        return 0.0
    lengths = [0] * (len(theirs) + 1)
    for word in ours:
        diagonal = 0
        for column, other in enumerate(theirs, start=1):
            above = lengths[column]
            if word == other:
                lengths[column] = diagonal + 1
            else:
                lengths[column] = max(above, lengths[column - 1])
            diagonal = above
    return 2 * lengths[-1] / (len(ours) + len(theirs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """A question that a model was to complete."""

    problem_id: str
    shown: str
    ending: str
    written: str
    """What the model wrote, which may go on after the ending."""

    @property
    def exact(self) -> bool:
        """Whether it wrote the ending, but for the spaces between words."""
        written = " ".join(self.written.split())
        return written.startswith(" ".join(self.ending.split()))

    @property
    def similarity(self) -> float:
        """ROUGE-L of the ending and as many words of what it wrote."""
        words = self.written.split()[: len(self.ending.split())]
        return rouge_l(" ".join(words), self.ending)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """How many questions of a set a model has completed."""

    name: str
    completed: tuple[Completed, ...]
    too_short: int = 0
    """Questions with too few words, which were left out."""

    @property
    def exact(self) -> float:
        """Share of the questions that were completed word for word."""
        return mean_of(one.exact for one in self.completed)

    @property
    def interval(self) -> Interval:
        """The interval of that share."""
        return wilson_interval(sum(one.exact for one in self.completed), len(self.completed))

    @property
    def similarity(self) -> float:
        """Mean ROUGE-L."""
        return mean_of(one.similarity for one in self.completed)

    @property
    def rows(self) -> Iterator[dict[str, Any]]:
        """Each question as a row of a file."""
        for one in self.completed:
            yield {"set": self.name, **asdict(one), "exact": one.exact, "rouge_l": one.similarity}

    @property
    def numbers(self) -> dict[str, Any]:
        """All numbers by name, for JSON."""
        return {
            "name": self.name,
            "questions": len(self.completed),
            "too_short": self.too_short,
            "exact": self.exact,
            "low": self.interval.low,
            "high": self.interval.high,
            "rouge_l": self.similarity,
        }


def is_suspicious(probe: Probe, control: Probe) -> bool:
    """Tell whether a model completes more of a set than can be explained by guessing.

    It does if even the lower end of the interval is above the upper end of fresh problems'.

    Args:
        probe: of the set.
        control: of problems that were made afterwards.
    """
    return probe.interval.low > control.interval.high


def probe_questions(
    name: str,
    questions: Sequence[tuple[str, str]],
    *,
    sampler: Sampler,
    encode: Callable[[str], Sequence[int]],
    shown: float = SHOWN,
    progress: Callable[[int, int], None] | None = None,
) -> Probe:
    """Have a model complete questions.

    Args:
        name: of the set.
        questions: id and text of each.
        sampler: over the model.
        encode: turns text into token ids, as at the start of a document.
        shown: share of the words that the model is given.
        progress: called with (completions so far, completions in all).
    """
    parts: list[tuple[str, str, str]] = []
    for problem_id, question in questions:
        split = split_question(question.strip(), shown)
        if split is not None:
            parts.append((problem_id, *split))
    requests = []
    for problem_id, start, ending in parts:
        token_ids = tuple(encode(start))
        length = len(encode(start + ending)) - len(token_ids)
        params = SamplingParams(temperature=0.0, max_new_tokens=max(1, length) + _MORE_TOKENS)
        prompt = Prompt(problem_id=problem_id, text=start, token_ids=token_ids)
        key = draw_seed(0, "probe", problem_id)
        requests.append(SampleRequest(prompt=prompt, params=params, key=key))
    completed: dict[int, Completed] = {}
    for index, completion in sampler.sample(requests):
        problem_id, start, ending = parts[index]
        completed[index] = Completed(
            problem_id=problem_id, shown=start, ending=ending, written=completion.text
        )
        if progress is not None:
            progress(len(completed), len(parts))
    in_order = tuple(completed[index] for index in range(len(parts)))
    return Probe(name=name, completed=in_order, too_short=len(questions) - len(parts))
