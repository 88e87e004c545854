"""The sentence of a completion that states its result, and the value in it.

That is the last "the answer is", unless a later "therefore" or "so" holds a value; else the last
sentence that holds one, but no check and no remark.
"""

from __future__ import annotations

import re
from collections import deque

from grouper.grading.extract import Extraction
from grouper.grading.sentence_values import SentenceValue, choose_value, values_in, written
from grouper.grading.sentences import Prose, Span, read_prose, sentence_spans

# Characters from the end in which prose still states the result.
_CONCLUSION = 20_000
_SAYS = re.compile(
    r"\banswers?(?: (?:to|of|for) [^.\n:=]{1,60}?)?[ \t]{0,6}"
    r"(?:(?:is|are|was|equals)\b[ \t]*:?|=|:|(?<=answer)[ \t]*(?=\n))\s*"
    r"(?:(?:therefore|thus|simply|equal to)\s+)?",
    re.IGNORECASE,
)
_CONCLUDES = re.compile(
    r"\W*(?:therefore|thus|hence|so|consequently|in conclusion|in total|finally|altogether"
    r"|this (?:means|gives)|we conclude)\b",
    re.IGNORECASE,
)
_LET_US = r"\W*(?:(?:let(?:'|’)?s|let us|to|we can|now we|double)[ -])?"
_CHECKS = re.compile(rf"{_LET_US}(?:check|verif|note)\w*", re.IGNORECASE)
# Of a result, rather than of candidates: `Check each number: ...` is work.
_CHECKS_RESULT = re.compile(
    rf"{_LET_US}(?:check(?:ing)?|verif\w*|note)"
    r"[ \t]*(?:[:,]|\*|\n|by|with|at|in|back|our|the (?:answer|result|solution)|[a-z] ?=)",
    re.IGNORECASE,
)
_ASIDE = re.compile(
    r"(?:\s*\([A-Za-z]{2}|\W*(?:i hope|let me know|feel free|please|thank|if you (?:have|need|want)"
    r"|this (?:confirms|matches|checks|includes|is because|agrees)|explanation|confidence)\b)",
    re.IGNORECASE,
)
# Words of a clause that can still be an answer of words: `no solution`, `Evelyn`.
_FEW_WORDS = 3
_MAX_CLAUSE = 200


def find_conclusion(text: str) -> Extraction:
    """Find what the last "the answer is" says, or the last sentence that holds a value.

    A later "therefore" or "so" that holds a value counts more than an earlier "the answer is".
    """
    prose = read_prose(text[-_CONCLUSION:])
    sentences = sentence_spans(prose)
    answer: SentenceValue | None = None
    answer_at = -1
    phrases = deque(_SAYS.finditer(prose.masked), maxlen=1)
    if phrases:
        phrase = phrases[0]
        answer_at, answer = _clause(prose, sentences, phrase.end())
        if _is_guess(prose.masked, phrase.start()):
            answer = None
    results, checks = _results_and_checks(prose.masked, sentences, answer_at)
    if answer is None:
        last = _last_value(prose, [*checks, *results])
    else:
        # Only a conclusion after it can replace it.
        later = [span for span in results if span > sentences[answer_at]]
        last = None
        if any(_concludes(prose, span) for span in later):
            last = _last_value(prose, later)
    if last is not None:
        how = "last number" if last.is_number else "last formula"
        return Extraction(written(prose, last), how)
    if answer is None:
        return Extraction(None, "")
    return Extraction(written(prose, answer), '"the answer is"')


_GUESS = re.compile(
    r"\b(?:at first|might|may|seems?|looks like|guess|suppose|assume|if|would be|not)\b[^.!?\n]*\Z",
    re.IGNORECASE,
)


def _is_guess(masked: str, start: int) -> bool:
    """Whether what comes before "the answer is" makes it a guess: `one might think that`."""
    return _GUESS.search(masked, max(0, start - 80), start) is not None


def _clause(prose: Prose, sentences: list[Span], start: int) -> tuple[int, SentenceValue | None]:
    """Return which sentence says the answer from `start` on, and its value or few words."""
    for at, (first, end) in enumerate(sentences):
        if end <= start:
            continue
        begin = max(first, start)
        stated = prose.masked[begin:end].strip(" *_:\n")
        if not stated:
            continue  # the clause is on the next line
        if _NEGATED.match(stated) or _VAGUE.match(stated):
            return at, None
        values = values_in(prose, begin, end)
        if values and _begins(prose.masked, begin, values[0]):
            return at, values[0]
        if len(stated) > _MAX_CLAUSE:
            return at, None
        value = choose_value(prose, begin, end, values)
        if value is None and len(stated.split()) <= _FEW_WORDS:
            offset = begin + prose.masked[begin:end].index(stated)
            value = SentenceValue(offset, offset + len(stated.rstrip(".!?;: ")))
        return at, value
    return -1, None


def _begins(masked: str, begin: int, value: SentenceValue) -> bool:
    """Whether a clause begins with a value, and not with arithmetic in words: `5 times 3`."""
    before = masked[begin : value.start].strip(" *_:\n(\"'")
    return not before and _OPERATION.match(masked, value.end) is None


_NEGATED = re.compile(r"(?:not|no longer|never|wrong)\b", re.IGNORECASE)
_OPERATION = re.compile(r"\s*(?:times|plus|minus|divided|multiplied)\b", re.IGNORECASE)
_VAGUE = re.compile(
    r"(?:un(?:clear|known)|as follows|as|clear\w*|obvious|simple|correct|wrong|right|given|found"
    r"|(?:the )?same|easy|hard|different)\b(?!:)",
    re.IGNORECASE,
)


def _results_and_checks(
    masked: str, sentences: list[Span], answer_at: int
) -> tuple[list[Span], list[Span]]:
    """Sort sentences into those that work toward a result and those that check one.

    Remarks are in neither list. A check goes on until the next conclusion, or until sentence
    `answer_at`, which says the answer.
    """
    results: list[Span] = []
    checks: list[Span] = []
    has_concluded = False
    is_checking = False
    for at, (start, end) in enumerate(sentences):
        sentence = masked[start:end]
        if _CONCLUDES.match(sentence) or at == answer_at:
            has_concluded = True
            is_checking = False
        elif _CHECKS.match(sentence):
            is_checking = has_concluded or bool(results and _CHECKS_RESULT.match(sentence))
        if _ASIDE.match(sentence):
            continue
        if is_checking:
            checks.append((start, end))
        else:
            results.append((start, end))
    return results, checks


def _last_value(prose: Prose, spans: list[Span]) -> SentenceValue | None:
    """Return the value of the last sentence that has one."""
    for span in reversed(spans):
        value = choose_value(prose, *span, values_in(prose, *span))
        if value is not None:
            return value
    return None


def _concludes(prose: Prose, span: Span) -> bool:
    """Whether a sentence begins with "therefore" or the like, and holds a value."""
    start, end = span
    if not _CONCLUDES.match(prose.masked[start:end]):
        return False
    return choose_value(prose, start, end, values_in(prose, start, end)) is not None
