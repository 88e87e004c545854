r"""The rewards that come with Grouper.

Rewards for a correct answer, for the layout, the length and the style of a completion come first,
then the rewards of four published set-ups with their numbers. `format_holds` decides whether a
completion is in its prompt's format, for rewards, metrics and filters alike; a reward that demands
more says so. Reasoning may run over several lines, and a tag that the prompt has already opened
counts as written.

`variant: original` restores the faults of a published reward by its own pattern: reasoning on one
line only, a penalty subtracted twice, the first tag instead of the last, numbers as Python's
`float` reads them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import Field

from grouper.config.schema import Fraction, Positive, PositiveFloat
from grouper.errors import RewardError
from grouper.grading import extract
from grouper.rewards.core import Completed, Variant, reward
from grouper.types import AnswerContract, AnswerFormat, AnswerKind, Verdict

Tags = tuple[str, str, str, str]
Unit = Literal["tokens", "characters", "words"]
NonPositive = Annotated[float, Field(le=0, description="a positive one would pay for repetition")]


@reward(0.0, "value", "timeout")
def correctness(
    done: Completed, *, value: float = 1.0, timeout: float | None = 0.0
) -> float | None:
    """`value` for a correct answer, 0 for any other; None where the reference cannot be read.

    Range 0 to `value`. An answer that the grader could not judge in time, or that crashed its
    worker, earns `timeout`: like any wrong answer unless the recipe says otherwise, and
    `timeout: null` takes the rollout out of its group.

    Uses the grades from the stack. Without them (inside TRL) it grades by itself, against
    `reference_answer`, `answer` or `solution`, whichever is there first.
    """
    if done.grade.verdict in (Verdict.TIMEOUT, Verdict.CRASH):
        return timeout
    if done.correct is None:
        return None
    return value * done.correct


@reward(0.0, 1.0)
def accuracy(done: Completed, *, variant: Variant = "default") -> float | None:
    """1 for a correct answer, 0 for any other; None where the reference cannot be read.

    Range 0 to 1. `variant: original` pays 0.5 for every completion of an unreadable reference.
    Source: recipe `r1-zero-numina`.
    """
    if done.correct is not None:
        return float(done.correct)
    if variant == "original":
        return 0.5
    return None


# --- layout --------------------------------------------------------------------------------------


@cache
def with_tags(pattern: str, tags: Tags, flags: int = 0) -> re.Pattern[str]:
    """Compile a pattern in which `{0}` to `{3}` stand for the tags of a format."""
    escaped_tags = [re.escape(tag) for tag in tags]
    return re.compile(pattern.format(*escaped_tags), flags)


def format_holds(text: str, fmt: AnswerFormat) -> bool:
    """Tell whether a completion has an answer where its prompt's format wants it.

    The place is the one where the grader reads the answer, after the reasoning. With tags, both
    pairs must stand in order with only white space between them. A copy of the instruction's
    placeholder is no answer.

    Args:
        text: the completion, without what the prompt has already opened.
        fmt: the prompt format.
    """
    answer = extract(text, fmt.contract).answer
    if answer is None or is_echo(answer, fmt):
        return False
    if fmt.tags is None:
        return True
    return tags_are_in_order(fmt.prefix + text, fmt.tags)


# Placeholders of one word. Another single word may be the answer of a worked example.
_PLACEHOLDERS = {"answer", "result", "solution", "number", "value", "x"}


def is_echo(answer: str, fmt: AnswerFormat) -> bool:
    """Tell whether an answer is a copy of the placeholder in its format's instruction.

    Base models copy the layout in the prompt, its words included. The answer of a worked example
    in an instruction is no placeholder: a placeholder has no digit, and is several words or
    points, or one of a few words.

    >>> from grouper.prompts import FORMATS
    >>> [is_echo(a, FORMATS["xml"]) for a in ("The final result and nothing else", "42")]
    [True, False]
    """
    placeholder = _placeholder(fmt)
    if placeholder is None:
        return False
    return _as_words(answer) == placeholder


@cache
def _placeholder(fmt: AnswerFormat) -> str | None:
    """Return the placeholder of the answer in a format's instruction, if it has one."""
    answer = extract(fmt.system, fmt.contract).answer
    if answer is None or any(character.isdigit() for character in answer):
        return None
    words = _as_words(answer)
    if len(words.split()) > 1 or words in _PLACEHOLDERS:
        return words
    has_letters = any(character.isalpha() for character in words)
    # Points alone, as in `<answer>...</answer>`, are a placeholder; one other word is an answer.
    return None if has_letters else words


def _as_words(text: str) -> str:
    """Put a text in the form in which answers and placeholders are compared."""
    return " ".join(text.split()).strip(" .[]()<>{}").lower()


def tags_are_in_order(text: str, tags: Tags) -> bool:
    """Tell whether both tag pairs occur, with only white space between the pairs."""
    _, opening_tag, body = text.partition(tags[0])
    if not opening_tag:
        return False
    inner_tags = with_tags(r"{1}\s*+{2}", tags).search(body)
    if inner_tags is None:
        return False
    return tags[3] in body[inner_tags.end() :]


def read_tagged(text: str, tags: Tags) -> tuple[str, str] | None:
    """Read reasoning and answer of a text that begins after its first tag and ends with its last.

    None where one of the other tags does not occur exactly once, or anything but white space
    stands between or after the pairs.
    """
    if tags[0] in text or any(text.count(tag) != 1 for tag in tags[1:]):
        return None
    match = with_tags(r"(.*){1}\s*+{2}(.*){3}\s*+", tags, re.DOTALL).fullmatch(text)
    if match is None:
        return None
    return match[1].strip(), match[2].strip()


def tags_are_exact(text: str, tags: Tags) -> bool:
    """Tell whether a text is reasoning then an answer, each tag once, nothing outside or empty."""
    leading_text, opening_tag, body = text.partition(tags[0])
    if not opening_tag or leading_text.strip():
        return False
    contents = read_tagged(body, tags)
    return contents is not None and all(contents)


@reward(0.0, "value", name="format", tags=True)
def strict_format(done: Completed, *, value: float = 1.0, variant: Variant = "default") -> float:
    """`value` where the format holds, each tag once, both filled, and nothing outside; else 0.

    Range 0 to `value`. `variant: original` allows tags that are empty or repeated, anything between
    them, and more lines after the closing answer tag, as the set-up behind r1-zero-numina does.
    """
    if variant == "original":
        # Atomic: the first place of the inner tags leaves most room, so no other is tried.
        published = r"{0}(?>.*?{1}\s*+{2}).*?{3}$"
        pattern = with_tags(published, done.tags, re.DOTALL | re.MULTILINE)
        return value if pattern.match(done.whole) else 0.0
    if not tags_are_exact(done.whole, done.tags):
        return 0.0
    return value if format_holds(done.text, done.format) else 0.0


@reward(0.0, "value", tags=True)
def soft_format(done: Completed, *, value: float = 1.0) -> float:
    """`value` where the format holds: both tag pairs in order, and an answer; else 0.

    Range 0 to `value`.
    """
    return value if format_holds(done.text, done.format) else 0.0


@reward(0.0, "value", tags=True)
def tag_count(done: Completed, *, value: float = 1.0) -> float:
    """`value` times the share of the four tags that occur exactly once. Range 0 to `value`.

    0 where they stand around the placeholder of the instruction, given back.
    """
    answer = extract(done.text, done.format.contract).answer
    if answer is not None and is_echo(answer, done.format):
        return 0.0
    tags_once = sum(done.whole.count(tag) == 1 for tag in done.tags)
    return value * tags_once / 4


_BOX = re.compile(r"\\f?box(?:ed)?(?![A-Za-z])")


@reward(0.0, "value")
def boxed_format(done: Completed, *, value: float = 1.0, partial: Fraction = 0.0) -> float:
    r"""`value` where there is exactly one closed, filled `\boxed{}` before any next turn; else 0.

    `partial` of `value` where there is a box, but not closed, empty, or several: all-or-nothing
    rewards teach nothing until one completion has everything right. Range 0 to `value`. For formats
    without tags.
    """
    markers = done.format.contract.turn_markers
    boxed = AnswerContract(kind=AnswerKind.BOXED, turn_markers=markers)
    boxes = len(_BOX.findall(done.whole))
    if boxes == 1 and extract(done.whole, boxed).answer is not None:
        return value
    return partial * value if boxes else 0.0


@reward(0.0, "value")
def think_format(done: Completed, *, value: float = 1.0) -> float:
    """`value` where the text is `<think>`, thoughts, `</think>` and then the answer; else 0.

    For models that answer freely after their thoughts: no answer tag is needed, and both tags
    occur once, the first at the start (written by the model or opened by the prompt). Range 0 to
    `value`.
    """
    if done.whole.count("<think>") != 1 or done.whole.count("</think>") != 1:
        return 0.0
    leading_text, _, body = done.whole.partition("<think>")
    thoughts, _, answer = body.partition("</think>")
    if leading_text.strip():
        return 0.0
    return value if thoughts.strip() and answer.strip() else 0.0


# --- length and style ----------------------------------------------------------------------------


def units_of(done: Completed, unit: Unit) -> Sequence[Any]:
    """Split a completion into its tokens, characters or words.

    >>> from grouper.prompts import FORMATS
    >>> units_of(Completed(text="So 4", format=FORMATS["xml"]), "words")
    ['So', '4']
    """
    if unit == "tokens":
        if done.columns.get("completion_ids") is None:
            raise ValueError("it counts tokens and needs completion_ids; or set another unit")
        ids: Sequence[int] = done.columns["completion_ids"]
        return ids
    if unit == "characters":
        return done.text
    return done.text.split()


@reward("min_correct", "max_correct", "min_wrong", "max_wrong")
def cosine(
    done: Completed,
    *,
    min_correct: float = 0.8,
    max_correct: float = 1.0,
    min_wrong: float = -0.5,
    max_wrong: float = -0.1,
    scale: PositiveFloat = 1000.0,
    unit: Unit = "characters",
    variant: Variant = "default",
) -> float | None:
    """Accuracy scaled by length: right and short is best, wrong and short is worst.

    With p = min(1, length / `scale`), the length counted in `unit` (tokens, characters, words), and
    c = (1 + cos(pi p)) / 2, a correct completion earns `min_correct` + (`max_correct` -
    `min_correct`) c, a wrong one `max_wrong` - (`max_wrong` - `min_wrong`) c. Range `min_wrong` to
    `max_correct`: -0.5 to 1. None where the reference cannot be read. `variant: original` does not
    clamp p, so that values rise again beyond `scale`, and takes an unreadable reference for a wrong
    answer.
    Source: arXiv 2502.03373 in the form of recipe `r1-zero-numina`.
    """
    progress = len(units_of(done, unit)) / scale
    if variant == "default":
        if done.correct is None:
            return None
        progress = min(1.0, progress)
    shortness = (1 + math.cos(math.pi * progress)) / 2
    if done.correct:
        return min_correct + (max_correct - min_correct) * shortness
    return max_wrong - (max_wrong - min_wrong) * shortness


@reward(-0.5, 0.5)
def length(done: Completed, *, unit: Unit = "tokens") -> float | None:
    """Short among the completions of one prompt pays; a wrong one gains nothing by it.

    With l = 0.5 - (length - shortest) / (longest - shortest), counted in `unit` (tokens,
    characters, words), a correct completion earns l and a wrong one min(0, l); all 0 where all are
    of one length. Range -0.5 to 0.5; None where the reference cannot be read.
    Source: Kimi k1.5, arXiv 2501.12599, section 2.3.3.
    """
    size = len(units_of(done, unit))
    sizes = [len(units_of(other, unit)) for other in done.group]
    if done.correct is None:
        return None
    shortest = min(sizes)
    longest = max(sizes)
    if shortest == longest:
        return 0.0
    value = 0.5 - (size - shortest) / (longest - shortest)
    return value if done.correct else min(0.0, value)


@reward(-1.0, 0.0)
def soft_overlong(done: Completed, *, max_tokens: Positive, buffer_tokens: Positive) -> float:
    """0 up to `max_tokens` - `buffer_tokens`, falling in a line to -1 at `max_tokens` and beyond.

    Range -1 to 0. `max_tokens` is usually sampling.max_new_tokens.
    Source: DAPO, arXiv 2503.14476, equation 13.
    """
    if buffer_tokens > max_tokens:
        raise RewardError(
            f"buffer_tokens is {buffer_tokens} with max_tokens {max_tokens}",
            where="rewards.soft_overlong.params",
            fix="Use 0 < buffer_tokens <= max_tokens.",
        )
    buffer_start = max_tokens - buffer_tokens
    tokens_over = len(units_of(done, "tokens")) - buffer_start
    return max(-1.0, min(0.0, -tokens_over / buffer_tokens))


_STEP = re.compile(
    r"\bStep \d+:|^[ \t]*\d+[.)][ \t]|^[ \t]*[-*•][ \t]|\b(?:First|Second|Next|Finally)\b",
    re.MULTILINE | re.ASCII,
)
_STEP_ORIGINAL = re.compile(r"Step \d+:|^\d+\.|\n[-*]|(?:First|Second|Next|Finally),", re.MULTILINE)


@reward(0.0, 1.0)
def reasoning_steps(
    done: Completed, *, enough: Positive = 3, variant: Variant = "default"
) -> float:
    """min(1, markers / `enough`).

    A marker is `Step 2:`, a numbered line, a bullet, or one of First, Second, Next, Finally.
    Range 0 to 1. `variant: original` wants no space after a number or bullet, so that the answers
    `45.` and `-45` on lines of their own count, and a comma after the words.
    Source: recipe `r1-zero-numina`.
    """
    marker = _STEP_ORIGINAL if variant == "original" else _STEP
    return min(1.0, len(marker.findall(done.whole)) / enough)


@reward("max_penalty", 0.0)
def repetition_penalty(
    done: Completed,
    *,
    n: Positive = 3,
    max_penalty: NonPositive = -0.1,
    unit: Unit = "words",
    variant: Variant = "default",
) -> float:
    """`max_penalty` (1 - different n-grams / n-grams); 0 for a text that is shorter than n.

    The n-grams are of `unit`: tokens, or lower-case characters or words. Range `max_penalty` to 0.
    `variant: original` is the same.
    Source: arXiv 2502.03373 in the form of recipe `r1-zero-numina`.
    """
    del variant
    units = units_of(done, unit)
    if unit != "tokens":
        units = [text.lower() for text in units]
    ngrams = [tuple(units[i : i + n]) for i in range(len(units) - n + 1)]
    distinct_share = 1.0
    if ngrams:
        distinct_share = len(set(ngrams)) / len(ngrams)
    return max_penalty * (1 - distinct_share) + 0.0  # never -0.0


# --- numbers in published rewards ---------------------------------------------------------------

# Characters that a published pattern looks at which backtracks: quadratic in a hostile text.
LONGEST = 20_000

_HASHES = AnswerContract(kind=AnswerKind.HASHES)
# Commas stand between thousands: `1,2` is a list.
_NUMBER = re.compile(
    r"[-+]?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?", re.ASCII
)


def plain_number(text: str, *, first: bool = False) -> float | None:
    """Read the decimal number that a text is, or the first in it; no units, no LaTeX.

    >>> [plain_number(text) for text in (" $1,200.50 ", "7.", "1e3", "12 apples", "")]
    [1200.5, 7.0, 1000.0, None, None]
    >>> plain_number("x = -3.5, or 7", first=True)
    -3.5
    """
    match = _NUMBER.search(text) if first else _NUMBER.fullmatch(text.strip().removeprefix("$"))
    if match is None or len(match[0]) > 300:  # a longer literal is no answer
        return None
    value = float(match[0].replace(",", ""))
    return value if math.isfinite(value) else None


def python_number(text: str) -> float | None:
    """Read a text as Python's `float` does, infinite numbers included; None where it refuses.

    >>> [python_number(text) for text in ("7.", "1e3", "-inf", "1,200", "$5")]
    [7.0, 1000.0, -inf, None, None]
    """
    try:
        return float(text)
    except ValueError:
        return None


def _reader(variant: Variant) -> Callable[[str], float | None]:
    """Choose how numbers are read."""
    return python_number if variant == "original" else plain_number


# --- A: GRPO on GSM8K with granular rewards, tags on lines of their own --------------------------


def _xml_answer(done: Completed, variant: Variant) -> str | None:
    if variant == "default":
        return done.answer
    _, _, answer_open, answer_close = done.tags
    after_last_opening = done.text.split(answer_open)[-1]
    return after_last_opening.split(answer_close)[0].strip()


@reward(0.0, "value")
def xml_correctness(done: Completed, *, value: float = 2.0, variant: Variant = "default") -> float:
    """`value` where the text in the last answer tag equals the reference without its commas.

    Range 0 to `value`. `variant: original` takes what follows the last opening answer tag, whether
    it is closed or not, and the whole text where there is none. Source: recipe `gsm8k-xml`.
    """
    reference = done.reference.strip().replace(",", "")
    return value if _xml_answer(done, variant) == reference else 0.0


@reward(0.0, "value")
def xml_integer(done: Completed, *, value: float = 0.5, variant: Variant = "default") -> float:
    """`value` where the answer is all digits, 0 to 9; else 0.

    Range 0 to `value`. `variant: original` finds the answer as in `xml_correctness`, and takes
    digits of any script. Source: recipe `gsm8k-xml`.
    """
    answer = _xml_answer(done, variant) or ""
    if variant == "default" and not answer.isascii():
        return 0.0
    return value if answer.isdigit() else 0.0


@reward(0.0, "value", tags=True)
def xml_strict_format(
    done: Completed, *, value: float = 0.5, variant: Variant = "default"
) -> float:
    """`value` where the whole completion is the tagged layout, every tag on a line of its own.

    Range 0 to `value`. A newline at the very end is free. `variant: original` wants that newline
    (its `$` lets a second one follow), and one line each of reasoning and answer.
    Source: recipe `gsm8k-xml`.
    """
    open_, close, answer_open, answer_close = done.tags
    if variant == "original":
        pattern = with_tags(r"{0}\n.*?\n{1}\n{2}\n.*?\n{3}\n$", done.tags)
        return value if pattern.match(done.whole) else 0.0
    tags_on_lines = (
        done.whole.startswith(f"{open_}\n")
        and f"\n{close}\n{answer_open}\n" in done.whole
        and done.whole.endswith((f"\n{answer_close}", f"\n{answer_close}\n"))
    )
    if not tags_on_lines:
        return 0.0
    return value if tags_are_exact(done.whole, done.tags) else 0.0


@reward(0.0, "value", tags=True)
def xml_soft_format(done: Completed, *, value: float = 0.5, variant: Variant = "default") -> float:
    """`value` where both tag pairs occur in order with only white space between the pairs.

    Range 0 to `value`. `variant: original` wants them at the start, and one line each of
    reasoning and answer. Source: recipe `gsm8k-xml`.
    """
    if variant == "original":
        pattern = with_tags(r"{0}.*?{1}\s*+{2}.*?{3}", done.tags)
        return value if pattern.match(done.whole[:LONGEST]) else 0.0
    return value if tags_are_in_order(done.whole, done.tags) else 0.0


@reward(-math.inf, "value", times=4, tags=True)
def xml_tag_count(
    done: Completed, *, value: float = 0.125, penalty: float = 0.001, variant: Variant = "default"
) -> float:
    r"""`value` for each tag on a line of its own exactly once, less `penalty` a trailing character.

    The four are `<reasoning>\n`, `\n</reasoning>\n`, `\n<answer>\n` and `\n</answer>`. Trailing
    is what follows the first closing answer tag, one newline apart.

    Range: no lower end (the penalty grows with the text) to 4 `value`. `variant: original`
    subtracts twice: what follows the last `\n</answer>\n` (all of the text, where there is none),
    and what follows the last `\n</answer>` less one character. Source: recipe `gsm8k-xml`.
    """
    open_, close, answer_open, answer_close = done.tags
    text = done.whole
    opening_line = f"\n{answer_open}\n"
    closing_line = f"\n{answer_close}"
    tags_on_lines = (f"{open_}\n", f"\n{close}\n", opening_line, closing_line)
    tags_once = sum(text.count(tag) == 1 for tag in tags_on_lines)
    if variant == "default":
        _, _, trailing_text = text.partition(answer_close)
        trailing = len(trailing_text.removeprefix("\n"))
        return value * tags_once - penalty * trailing

    trailing = 0
    if text.count(opening_line) == 1:
        trailing += len(text.split(f"{closing_line}\n")[-1])
    if text.count(closing_line) == 1:
        trailing += len(text.split(closing_line)[-1]) - 1
    return value * tags_once - penalty * trailing


# --- B: the r1-zero prompt on MATH. The total is the answer where the format holds ---------------


def _r1_zero_format_holds(done: Completed, variant: Variant) -> bool:
    _, close, answer_open, answer_close = done.tags
    if variant == "original":
        return f"{close} {answer_open}" in done.text and answer_close in done.text
    return format_holds(done.text, done.format)


@reward(0.0, 1.0, tags=True)
def r1_zero_format(done: Completed, *, variant: Variant = "default") -> float:
    """1 where the format holds: `</think> <answer>` with one space, an answer, `</answer>`; else 0.

    Range 0 to 1. `variant: original` wants those two strings anywhere.
    Source: recipe `math-r1-zero`.
    """
    return float(_r1_zero_format_holds(done, variant))


@reward(0.0, 1.0, tags=True)
def r1_zero_answer(done: Completed, *, variant: Variant = "default") -> float | None:
    """1 for a correct answer in a text whose format holds (as in `r1_zero_format`); else 0.

    Range 0 to 1; None where the reference cannot be read. Source: recipe `math-r1-zero`.
    """
    in_format = _r1_zero_format_holds(done, variant)
    if done.correct is None:
        return None
    return float(done.correct and in_format)


# --- C: correctness, a numeric answer, and the share of tags that are present --------------------


def _lite_answer(done: Completed, variant: Variant) -> str:
    """Return the answer, else the text that follows `####`, else the whole text."""
    if variant == "original":
        # Atomic: no other opening tag than the first is tried.
        pattern = with_tags("(?>.*?{2})(.*?){3}", done.tags, re.DOTALL | re.IGNORECASE)
        match = pattern.match(done.text)
        if match is None:
            match = re.search(r"####\s*(.*)", done.text)
        answer_text = match[1] if match else done.text
        return answer_text.strip()
    answer = done.answer
    if answer is None:
        answer = extract(done.text, _HASHES).answer
    if answer is None:
        answer = done.text.strip()
    return answer


@reward(0.0, "value")
def lite_correctness(
    done: Completed, *, value: float = 1.0, tolerance: float = 1e-6, variant: Variant = "default"
) -> float:
    """`value` where answer and reference are the same text, or numbers within `tolerance`.

    The answer is what the format's contract finds, else what follows `####`, else the whole text.
    Range 0 to `value`. `variant: original` takes the first answer tag, in capitals, too, and reads
    numbers as Python's `float` does: no commas, no dollar sign. Source: recipe `gsm8k-lite`.
    """
    answer = _lite_answer(done, variant)
    read_number = _reader(variant)
    number = read_number(answer)
    reference_number = read_number(done.reference)
    matches = answer == done.reference.strip()
    if number is not None and reference_number is not None:
        matches = matches or abs(number - reference_number) <= tolerance
    return value if matches else 0.0


@reward(0.0, "value")
def lite_numeric(done: Completed, *, value: float = 0.1, variant: Variant = "default") -> float:
    """`value` where the answer (found and read as in `lite_correctness`) is a number; else 0.

    Range 0 to `value`. Source: recipe `gsm8k-lite`.
    """
    read_number = _reader(variant)
    answer = _lite_answer(done, variant)
    return 0.0 if read_number(answer) is None else value


@reward(0.0, "value", tags=True)
def lite_tags_present(
    done: Completed, *, value: float = 0.1, variant: Variant = "default"
) -> float:
    """`value` times the share of the four tags that occur, however often.

    Range 0 to `value`. `variant: original` counts tags in capitals, too.
    Source: recipe `gsm8k-lite`.
    """
    flags = re.IGNORECASE if variant == "original" else 0
    tags_present = 0
    for tag in done.tags:
        if re.search(re.escape(tag), done.whole, flags):
            tags_present += 1
    return value * tags_present / len(done.tags)


# --- D: two formats, and two ladders for how close the answer is ---------------------------------
#
# Closeness pays here, also for wrong answers: see the probes that this stack fails.

# Rounding must not move a number out of the 10 % or 20 % around the reference.
_RATIO_SLACK = 1e-12


@reward(0.0, "value", tags=True)
def dapo_exact_format(
    done: Completed, *, value: float = 3.0, variant: Variant = "default"
) -> float:
    """`value` where the text is reasoning, its closing tag, and a filled solution tag; else 0.

    The opening tag counts as given by the prompt: it may stand at the start or be missing. White
    space between the tags is allowed, text is not. Range 0 to `value`. `variant: original` wants
    the opening tag in the completion, and allows anything between the tags and tags repeated.
    Source: recipe `openmath-dapo`.
    """
    if variant == "original":
        # Atomic: the earliest place of a tag leaves most room for the others.
        published = r"\s*+{0}(?>.+?{1})(?>.*?{2}).+?{3}\s*$"
        pattern = with_tags(published, done.tags, re.DOTALL)
        return value if pattern.match(done.text) else 0.0
    body = done.text.lstrip().removeprefix(done.tags[0])
    contents = read_tagged(body, done.tags)
    if contents is None:
        return 0.0
    _, solution = contents
    return value if solution else 0.0


@reward("once", "otherwise", times=3, tags=True)
def dapo_approximate_format(
    done: Completed, *, once: float = 0.5, otherwise: float = -1.0, variant: Variant = "default"
) -> float:
    """For each tag but the opening one: `once` where it occurs exactly once, else `otherwise`.

    Range 3 `otherwise` to 3 `once`: -3 to 1.5. `variant: original` is the same.
    Source: recipe `openmath-dapo`.
    """
    del variant
    return sum(once if done.text.count(tag) == 1 else otherwise for tag in done.tags[1:])


def _solution(done: Completed, variant: Variant) -> str | None:
    """Return the content of the last solution tag, of the first in the original.

    None where it is not closed.
    """
    _, _, solution_open, solution_close = done.tags
    if variant == "original":
        _, opening_tag, body = done.text.partition(solution_open)
    else:
        _, opening_tag, body = done.text.rpartition(solution_open)
    solution, closing_tag, _ = body.partition(solution_close)
    if not opening_tag or not closing_tag:
        return None
    return solution


def _by_closeness(
    number: float | None,
    reference: float | None,
    values: tuple[float, float, float, float],
    slack: float,
) -> float:
    """Return one of `values`: zero for zero, a number within 10 %, within 20 %, anything else."""
    zero, near, far, otherwise = values
    if number is None or reference is None:
        return otherwise
    if reference == 0:
        return zero if number == 0 else otherwise
    ratio = number / reference
    if 0.9 - slack <= ratio <= 1.1 + slack:
        return near
    if 0.8 - slack <= ratio <= 1.2 + slack:
        return far
    return otherwise


@reward(
    "equal",
    "equal_but_for_space",
    "within_10",
    "within_20",
    "wrong",
    "missing",
    tags=True,
    original={"wrong": -2.5, "missing": -2.0},
)
def dapo_answer(
    done: Completed,
    *,
    equal: float = 5.0,
    equal_but_for_space: float = 3.5,
    within_10: float = 2.0,
    within_20: float = 1.5,
    wrong: float = -2.0,
    missing: float | None = None,
    variant: Variant = "default",
) -> float:
    """The first of: equal text, equal but for space inside, a number within 10 %, 20 %; `wrong`.

    White space around the answer is free. `missing` is paid without a solution tag; left out: as
    `wrong`. Range `wrong` to `equal`: -2 to 5. `variant: original` pays -2.5 for a wrong answer, -2
    without a solution tag, and `equal` for any zero where the reference is one.
    Source: recipe `openmath-dapo`.
    """
    solution = _solution(done, variant)
    if solution is None:
        return wrong if missing is None else missing
    answer = solution.strip()
    reference = done.reference.strip()
    if answer == reference:
        return equal
    # The published code removes plain spaces only, and pays any zero like an equal text.
    spaces = None
    zero = within_10
    slack = _RATIO_SLACK
    if variant == "original":
        spaces = " "
        zero = equal
        slack = 0.0
    if "".join(answer.split(spaces)) == "".join(reference.split(spaces)):
        return equal_but_for_space
    read_number = _reader(variant)
    values = (zero, within_10, within_20, wrong)
    return _by_closeness(read_number(answer), read_number(reference), values, slack)


@reward(
    "equal",
    "within_10",
    "within_20",
    "wrong",
    "missing",
    tags=True,
    original={"equal": 4.0, "wrong": -2.0, "missing": -1.5},
)
def dapo_number(
    done: Completed,
    *,
    equal: float = 3.0,
    within_10: float = 2.5,
    within_20: float = 1.5,
    wrong: float = -1.5,
    missing: float | None = None,
    variant: Variant = "default",
) -> float:
    """The first number in the solution tag: equal within 1e-6, within 10 %, 20 %; else `wrong`.

    `missing` is paid where there is no tag or no number; left out: as `wrong`. Range `wrong` to
    `equal`: -1.5 to 3. `variant: original` pays 4 for an equal number, -2 for a wrong one, and -1.5
    where there is no tag or no number. Source: recipe `openmath-dapo`.
    """
    solution = _solution(done, variant) or ""
    number = plain_number(solution, first=True)
    slack = _RATIO_SLACK
    if variant == "original":
        match = re.search(r"[-+]?\d*\.?\d+", solution)
        number = python_number(match[0]) if match else None
        slack = 0.0
    read_number = _reader(variant)
    reference_number = read_number(done.reference)
    if number is None or reference_number is None:
        return wrong if missing is None else missing
    if abs(number - reference_number) <= 1e-6:
        return equal
    values = (wrong, within_10, within_20, wrong)
    return _by_closeness(number, reference_number, values, slack)
