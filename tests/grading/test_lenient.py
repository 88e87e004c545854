"""Lenient extraction: the maths of a completion whatever its format, and never less than strict."""

from __future__ import annotations

import time

import pytest

from grouper.config.schema import GradingConfig
from grouper.grading import Grader, extract, extract_lenient
from grouper.types import AnswerContract, AnswerKind, Verdict

TAG = AnswerContract(
    kind=AnswerKind.TAG, open="<answer>", close="</answer>", turn_markers=("\nUser:", "Human:")
)
BOXED = AnswerContract(kind=AnswerKind.BOXED, turn_markers=("Human:",))
HASHES = AnswerContract(kind=AnswerKind.HASHES)
LAST = AnswerContract(kind=AnswerKind.LAST_NUMBER)


@pytest.mark.parametrize(
    ("text", "answer", "how"),
    [
        ("<answer>42</answer>", "42", "as asked"),
        ("<answer>1</answer> then 7", "1", "as asked"),
        ("<answer>42", "42", "not closed"),
        ("<answer>42</ans", "42", "not closed"),
        ("<Answer>42</ANSWER>", "42", "in other letters"),
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
        ("<answer>two parallel lines</answer>", "two parallel lines", "as asked"),
        (r"<answer>\text{two lines}</answer>", r"\text{two lines}", "as asked"),
        (r"<answer>\sin(x) + \cos(x) + \tan(x) + \log(x)</answer>", None, "as asked"),
    ],
)
def test_any_way_of_answering(text: str, answer: str | None, how: str) -> None:
    found = extract_lenient(text, TAG)
    assert found.answer == (answer if answer is not None else extract(text, TAG).answer)
    assert how in found.reason


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
    assert extract_lenient(text, TAG) == (None, reason)


@pytest.mark.parametrize("marker", ["\nProblem:", "\nQ:", "\nUser:"])
def test_another_problem_is_not_answered_for_this_one(marker: str) -> None:
    assert (
        extract_lenient(f"It makes 42.{marker} what is 3+4?\nThe answer is 7.", TAG).answer == "42"
    )
    assert extract_lenient("\n\nProblem: 3+4\nThe answer is 7.", TAG).answer == "7"


@pytest.mark.parametrize("contract", [TAG, BOXED, HASHES, LAST], ids=lambda c: c.kind.value)
def test_what_is_as_asked_is_taken_as_asked(contract: AnswerContract) -> None:
    text = {
        AnswerKind.TAG: r"\boxed{1} #### 2 <answer>7</answer> 3",
        AnswerKind.BOXED: r"<answer>1</answer> #### 2 \boxed{7} 3",
        AnswerKind.HASHES: "<answer>1</answer> \\boxed{2} 3\n#### 7\nbye 4",
        AnswerKind.LAST_NUMBER: r"<answer>1</answer> \boxed{2} 7",
    }[contract.kind]
    assert extract_lenient(text, contract).answer == "7"


@pytest.mark.parametrize("contract", [TAG, BOXED, HASHES, LAST], ids=lambda c: c.kind.value)
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
    ],
    ids=["tags", "words", "says", "of", "letters", "angles", "boxes", "binary"],
)
def test_a_megabyte_is_fast(contract: AnswerContract, text: str) -> None:
    started = time.perf_counter()
    extract_lenient(text, contract)
    assert time.perf_counter() - started < 2.0


def test_lenient_grade_is_about_the_maths_alone() -> None:
    with Grader(TAG, GradingConfig()) as grader:
        strict = grader.submit("The answer is 18.", "18").result()
        lenient = grader.submit_lenient("The answer is 18.", "18").result()
        assert (strict.verdict, lenient.verdict) == (Verdict.NO_ANSWER, Verdict.CORRECT)
        assert lenient.extracted == "18"
        assert "the answer is" in lenient.reason
        wrong = grader.submit_lenient("The answer is 17.", "18").result()
        assert wrong.verdict is Verdict.INCORRECT
        root = grader.submit_lenient(r"we get \boxed{\sqrt{12}}", r"2\sqrt{3}").result()
        assert (root.verdict, root.rung) == (Verdict.CORRECT, "symbolic")
        # Only what was strictly graded is counted.
        assert grader.counts == {Verdict.NO_ANSWER: 1}
