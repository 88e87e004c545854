"""The lenient reading: any notation, prose of many styles, and never less than the contract."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from completion_cases import LATER, TUNED, UNSEEN, Completion, completions

from grouper.config.schema import GradingConfig
from grouper.grading import Grader, extract, extract_lenient
from grouper.types import AnswerContract, AnswerKind, Grade, Verdict

TAG = AnswerContract(
    kind=AnswerKind.TAG, open="<answer>", close="</answer>", turn_markers=("\nUser:",)
)
BOXED = AnswerContract(kind=AnswerKind.BOXED, turn_markers=("Human:",))
HASHES = AnswerContract(kind=AnswerKind.HASHES)
LAST = AnswerContract(kind=AnswerKind.LAST_NUMBER)
TWO_MARKERS = replace(TAG, turn_markers=("\nUser:", "Human:"))


@pytest.mark.parametrize(
    ("text", "answer", "how"),
    [
        ("<answer>42</answer>", "42", "in the format"),
        ("<answer>1</answer> then 7", "1", "in the format"),
        ("<answer>42", "42", "not closed"),
        ("<answer>42</ans", "42", "not closed"),
        ("<Answer>42</ANSWER>", "42", "last <answer>"),
        ("<solution>42</solution> 7", "42", "last <solution>"),
        ("<result>41</result><result>42</result>", "42", "last <result>"),
        ("<think>41</think> it is 42", "42", "last number"),
        (r"so \boxed{\frac{1}{2}}, 7", r"\frac{1}{2}", "boxed"),
        ("9*8\n#### 72\nand 5", "72", "####"),
        ("The answer is 18. Check: 18/2 = 9", "18", "the answer is"),
        ("The final answer is: **18**", "18", "the answer is"),
        ("**Answer:** 18 dollars\n\nDone in 3 steps.", "18 dollars", "the answer is"),
        ("The answer to the question is 18, because 9+9=18 and 3", "18", "the answer is"),
        ("The answer is that he has 18 apples left. Bye 3", "18", "the answer is"),
        ("the answer is $2\\sqrt{3}$.", "$2\\sqrt{3}$", "the answer is"),
        ("the answer is 3.5. Good", "3.5", "the answer is"),
        ("it makes 42 apples", "42", "last number"),
        ("<answer>so he has 42 apples in all</answer>", "42", "last number of a sentence"),
        (r"<answer>we find that it is \boxed{7} of 9</answer>", "7", "of a sentence"),
        ("<answer>two parallel lines</answer>", "two parallel lines", "in the format"),
        (r"<answer>\text{two lines}</answer>", r"\text{two lines}", "in the format"),
        ("<solution>7</result> so 42", "42", "last number"),  # the tags do not match
        ("<result> of 7 times 6 is 42", "42", "last number"),  # only the format's may stay open
        ("<solution>so he has 42 apples in all</solution>", "42", "last number of a sentence"),
        ("The answer is " + "not easy to say " * 20 + "42", "42", "last number"),
        (r"<answer>\sin(x) + \cos(x) + \tan(x) + \log(x)</answer>", None, "in the format"),
    ],
)
def test_any_way_of_answering(text: str, answer: str | None, how: str) -> None:
    found = extract_lenient(text, TWO_MARKERS)
    assert found.answer == (answer if answer is not None else extract(text, TWO_MARKERS).answer)
    assert how in found.reason


def test_tags_of_ones_own_may_be_written_in_another_case() -> None:
    own = AnswerContract(kind=AnswerKind.TAG, open="<final>", close="</final>")
    assert extract_lenient("<FINAL>42</Final> 7", own) == (
        "42",
        "not in the format: last <final>",
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no <answer>, and no other answer either"),
        ("none", "no <answer>, and no other answer either"),
        ("<answer></answer>", "the answer is empty, and no other answer either"),
        ("\nUser: 42", "no <answer>, and no other answer either"),
        ("thinking Human: 42", "no <answer>, and no other answer either"),
    ],
)
def test_no_answer_at_all(text: str, reason: str) -> None:
    assert extract_lenient(text, TWO_MARKERS) == (None, reason)


@pytest.mark.parametrize("marker", ["\nProblem:", "\nQ:", "\nUser:"])
def test_another_problem_is_not_answered_for_this_one(marker: str) -> None:
    assert (
        extract_lenient(f"It makes 42.{marker} what is 3+4?\nThe answer is 7.", TWO_MARKERS).answer
        == "42"
    )
    assert extract_lenient("\n\nProblem: 3+4\nThe answer is 7.", TWO_MARKERS).answer == "7"


@pytest.mark.parametrize("contract", [TWO_MARKERS, BOXED, HASHES, LAST], ids=lambda c: c.kind.value)
def test_what_is_as_asked_is_taken_as_asked(contract: AnswerContract) -> None:
    text = {
        AnswerKind.TAG: r"\boxed{1} #### 2 <answer>7</answer> 3",
        AnswerKind.BOXED: r"<answer>1</answer> #### 2 \boxed{7} 3",
        AnswerKind.HASHES: "<answer>1</answer> \\boxed{2} 3\n#### 7\nbye 4",
        AnswerKind.LAST_NUMBER: r"<answer>1</answer> \boxed{2} 7",
    }[contract.kind]
    assert extract_lenient(text, contract).answer == "7"


@pytest.mark.parametrize("contract", [TWO_MARKERS, BOXED, HASHES, LAST], ids=lambda c: c.kind.value)
@pytest.mark.parametrize(
    "text",
    [
        "<answer>" * 120_000,
        "<answer>" + "word " * 200_000,
        "the answer is " * 70_000,
        "answer of " * 100_000,
        "a" * 1_000_000 + "(",
        "<" * 1_000_000,
        r"\boxed{" * 150_000,
        "\u202eÀ<Answer>\x00" * 80_000,
        r"\[ x " * 200_000,
        "$" * 1_000_001,
        "so it is 5, and 6 " * 55_000,
        "Therefore 5. " * 80_000,
        "(" * 1_000_000 + "5",
        "{2^" * 300_000,
        "answer: \n" * 110_000,
        r"\begin{align}" * 80_000,
        "9^9" * 300_000,
        "\n" * 1_000_000 + "5",
    ],
    ids=[
        *("tags", "words", "says", "of", "letters", "angles", "boxes", "binary", "displays"),
        *("dollars", "commas", "sentences", "brackets", "powers", "lines", "blocks", "nines"),
        "breaks",
    ],
)
def test_a_megabyte_is_read_leniently_fast(contract: AnswerContract, text: str) -> None:
    started = time.perf_counter()
    extract_lenient(text, contract)
    assert time.perf_counter() - started < 2.0


def test_lenient_grade_is_about_the_math_alone() -> None:
    with Grader(TWO_MARKERS, GradingConfig()) as grader:
        strict = grader.submit("The answer is 18.", "18").result()
        lenient = grader.submit("The answer is 18.", "18", lenient=True).result()
        assert (strict.verdict, lenient.verdict) == (Verdict.NO_ANSWER, Verdict.CORRECT)
        assert lenient.extracted == "18"
        assert "the answer is" in lenient.reason
        wrong = grader.submit("The answer is 17.", "18", lenient=True).result()
        assert wrong.verdict is Verdict.INCORRECT
        root = grader.submit(r"we get \boxed{\sqrt{12}}", r"2\sqrt{3}", lenient=True).result()
        assert (root.verdict, root.stage) == (Verdict.CORRECT, "symbolic")


# --- prose ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "answer", "how"),
    [
        # the four kinds of miss that two models showed
        (r"So the length is \(4t\).", r"\(4t\)", "last formula"),
        ("The answer is:\n\n\\[\n\\frac{1}{2}\n\\]", "\\[\n\\frac{1}{2}\n\\]", "the answer is"),
        ("The result is the same as 20 less.\n\nThus we get $35$.", "$35$", "last formula"),
        ("So, she eats 90 carrots in 6 days.", "90", "last number"),
        ("So she has 2\\sqrt3 left.", "2\\sqrt3", "last formula"),
        # the last side of an equation, and an equation that is the answer
        (r"\[ 48 + 24 = 72 \]", "72", "last formula"),
        (r"Hence $x = \frac{6}{4} = \frac{3}{2}$.", r"\frac{3}{2}", "last formula"),
        ("So he sold 48 + 24 = 72 clips.", "72", "last formula"),
        (r"Therefore, $x^2 + y^2 = 4y$.", r"$x^2 + y^2 = 4y$", "last formula"),
        ("So $x = 3$ or $x = 5$.", "$x = 3$ or $x = 5$", "last formula"),
        ("The solutions are 3, 5, and 7.", "3, 5, and 7", "last formula"),
        ("The domain is [2, 5).", "[2, 5)", "last formula"),
        # a conclusion counts more than an early answer, a check less
        ("The answer is 12. Wait, no. Therefore he has 15 left.", "15", "last number"),
        ("The answer is 12. He has 15 left.", "12", "the answer is"),
        ("So x = 5. Check: 2(5) + 3 = 13.", "5", "last formula"),
        ("At first the answer seems to be 12. But it is 15.", "15", "last number"),
        ("The answer is not 12. It is 15.", "15", "last number"),
        # units, money and scales
        ("The farm makes 5 million dollars.", "5 million dollars", "last number"),
        ("They walk 3 hours 20 minutes.", "3 hours 20 minutes", "last formula"),
        ("He pays $5 and gets $6 back.", "$6", "last number"),
        ("It will take 6 workers 3 hours.", "3 hours", "last number"),
        # words
        ("The answer is Evelyn.", "Evelyn", "the answer is"),
        ("So the winner is $\\text{Evelyn}$.", "$\\text{Evelyn}$", "last formula"),
        ("It took 3 tries. The answer is clear. No more.", "3", "last number"),
        # what is too large to write down is a formula like any other
        ("So it is $9^{9^9} = 9^{9^9}$.", "9^{9^9}", "last formula"),
    ],
)
def test_prose(text: str, answer: str, how: str) -> None:
    found = extract_lenient(text, BOXED)
    assert found.answer == answer
    assert how in found.reason


def _graded(drawn: list[Completion]) -> list[tuple[Completion, Grade]]:
    with Grader(BOXED, GradingConfig(timeout_seconds=20)) as grader:
        futures = [grader.submit(one.text, one.reference, lenient=True) for one in drawn]
        return [(one, future.result()) for one, future in zip(drawn, futures, strict=True)]


@pytest.mark.parametrize("templates", [TUNED, LATER, UNSEEN], ids=["tuned", "later", "unseen"])
@pytest.mark.parametrize(
    ("count", "seed"), [(600, 5), pytest.param(6000, 6, marks=pytest.mark.slow)]
)
def test_right_completions_are_found_and_spoiled_ones_are_not(
    shared_data: Path, templates: tuple[str, ...], count: int, seed: int
) -> None:
    """At least 98 % of the right ones, at most 0.2 % of the spoiled ones."""
    right = _graded(completions(shared_data, templates, count, seed, spoiled=False))
    missed = [(one.text, grade.extracted) for one, grade in right if not grade.correct]
    assert len(missed) <= 0.02 * count, missed[:10]
    by_template = Counter(one.template for one, grade in right if not grade.correct)
    per_template = count / len(templates)
    assert max(by_template.values(), default=0) < max(2, 0.2 * per_template), by_template
    wrong = _graded(completions(shared_data, templates, count, seed, spoiled=True))
    accepted = [(one.text, one.reference) for one, grade in wrong if grade.correct]
    assert len(accepted) <= 0.002 * count, accepted


def test_completions_are_the_same_every_time(shared_data: Path) -> None:
    drawn = completions(shared_data, TUNED, 200, 1, spoiled=True)
    assert drawn == completions(shared_data, TUNED, 200, 1, spoiled=True)
    assert len({one.template for one in drawn}) == len(TUNED)
