"""Where the answer stands: each contract, the last one before the next turn, reasons for none."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from grouper.config.schema import GradingConfig
from grouper.grading import Grader, extract, extract_lenient
from grouper.types import AnswerContract, AnswerKind, Verdict

TAG = AnswerContract(
    kind=AnswerKind.TAG, open="<answer>", close="</answer>", turn_markers=("\nUser:",)
)
BOXED = AnswerContract(kind=AnswerKind.BOXED, turn_markers=("Human:",))
HASHES = AnswerContract(kind=AnswerKind.HASHES)
LAST = AnswerContract(kind=AnswerKind.LAST_NUMBER)
TWO_MARKERS = replace(TAG, turn_markers=("\nUser:", "Human:"))


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>42</answer>", "42"),
        ("<answer>\n 42 \n</answer> bye", "42"),
        ("<answer>1</answer><answer>2</answer>", "2"),
        ("<answer>5</answer>7</answer>", "5"),
        ("<answer><answer>5</answer></answer>", "5"),
        ("<answer>5</answer>\nUser: more\n<answer>6</answer>", "5"),
        ("<answer>a\nb</answer>", "a\nb"),
        ("He is\nUser: Bob. <answer>42</answer>", "42"),
        ("\nUser: <answer>5</answer>\nUser: more <answer>6</answer>", "5"),
    ],
)
def test_tag(text: str, answer: str) -> None:
    assert extract(text, TAG).answer == answer


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no <answer>"),
        ("42", "no <answer>"),
        ("</answer>42<answer>", "not closed"),
        ("<answer>42", "not closed"),
        ("<answer> \n </answer>", "empty"),
        ("\nUser: 42", "no <answer>"),
    ],
)
def test_tag_without_answer(text: str, reason: str) -> None:
    found = extract(text, TAG)
    assert found.answer is None
    assert reason in found.reason


THINK = AnswerContract(
    kind=AnswerKind.TAG,
    open="<answer>",
    close="</answer>",
    reasoning=("<think>", "</think>"),
    turn_markers=("Human:", "\nQuestion:"),
)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Human: is a word here. </think> <answer>5</answer>", "5"),
        ("<think>a\nQuestion: what? </think> <answer>5</answer>", "5"),
        ("<think> <answer>3</answer> Human: </think> <answer>5</answer>", "5"),
        ("x </think> <answer>5</answer> Human: y <think> z </think> <answer>6</answer>", "5"),
        ("<answer>5</answer> Human: y <think> z </think> <answer>6</answer>", "5"),
        ("x </think> <answer>5</answer> or <answer>7</answer> Human: <answer>6</answer>", "7"),
    ],
)
def test_turn_markers_count_after_a_complete_answer(text: str, answer: str) -> None:
    assert extract(text, THINK).answer == answer


def test_an_answer_before_other_reasoning_is_not_inside_it() -> None:
    assert extract("<answer>5</answer> <think> or so </think>", THINK).answer == "5"
    assert extract("<answer>5</answer> or so </think>", THINK).answer is None


def test_an_answer_that_the_end_of_the_reasoning_opens_ends_the_turn_too() -> None:
    contract = replace(THINK, open="</think> <answer>")
    text = "a Human: b </think> <answer>1</answer>\nHuman: c </think> <answer>2</answer>"
    assert extract(text, contract).answer == "1"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"<think> \boxed{42} </think> Some text.", None),
        (r"<think> \boxed{42} </think> \boxed{43}", "43"),
        (r"\boxed{42} </think> \boxed{43} and \boxed{44}", "44"),
        (r"<think> \boxed{42}", None),
        (r"\boxed{41} <think> \boxed{42}", None),
        (r"<think> a </think> \boxed{41} <think> \boxed{42}", None),
        (r"<think> a </think> <think> b </think> \boxed{41}", "41"),
        (r"<think> Human: a </think> \boxed{41} Human: b \boxed{42}", "41"),
        (r"\boxed{41} Human: b <think> c </think> \boxed{42}", "41"),
        (r"<think> a </think> \boxed{41} Human: b <think> c </think> \boxed{42}", "41"),
    ],
)
def test_what_is_boxed_while_thinking_is_no_answer(text: str, answer: str | None) -> None:
    assert extract(text, BOXED).answer == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{42}", "42"),
        (r"$\boxed{\frac{1}{2}}$", r"\frac{1}{2}"),
        (r"\boxed{\text{a {b} c}}", r"\text{a {b} c}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\fbox{3}", "3"),
        (r"\boxed 2$", "2"),
        (r"\boxed {7}", "7"),
        (r"\boxed{17} or \boxed{18}", "18"),
        (r"\boxed{18} Human: what? \boxed{5}", "18"),
        (r"\boxed{18}. Check: 18/2 = 9", "18"),
        ("\\boxed\n{7}", "7"),
        (r"\boxed{\boxed{310}, 527}", r"\boxed{310}, 527"),
        (r"\boxed{\boxed{1} or \boxed{2}} done", r"\boxed{1} or \boxed{2}"),
        (r"\boxed{1} and {a \boxed{2}}", "2"),
        (r"\boxed{3 so \boxed{5}", "5"),
        (r"\boxed{1} \boxed{2, \fbox{3}}", r"2, \fbox{3}"),
        (r"x &= 5 \\\boxed{5}", "5"),  # after a line break of LaTeX
        (r"so \\boxed{\frac{1}{2}}", r"\frac{1}{2}"),  # doubled, as in JSON
        (r"\\boxed{1} and \boxed{2}", "2"),
    ],
)
def test_boxed(text: str, answer: str) -> None:
    assert extract(text, BOXED).answer == answer


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("42", "no \\boxed"),
        (r"\mbox{42}", "no \\boxed"),
        (r"\boxed{42", "not closed"),
        (r"\boxed{1} then \boxed{2", "not closed"),
        (r"\boxed{}", "empty"),
        (r"\boxed", "nothing after"),
        ("the box", "no \\boxed"),
    ],
)
def test_boxed_without_answer(text: str, reason: str) -> None:
    found = extract(text, BOXED)
    assert found.answer is None
    assert reason in found.reason


def test_hashes() -> None:
    assert extract("9*8=72\n#### 72\nmore", HASHES).answer == "72"
    assert extract("#### 1\n#### -2", HASHES).answer == "-2"
    assert extract("72", HASHES).reason == "no ####"
    assert extract("####\n72", HASHES).reason == "the answer is empty"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("7-5", "5"),
        ("it is -3.5.", "-3.5"),
        ("$1,234.50 in total", "$1,234.50"),
        ("3/4 of it", "3/4"),
        ("50% of 12,13", "13"),
        ("18. Good.", "18"),
        ("x=-2", "-2"),
        ("about .5", ".5"),
        (r"it is 2\times10^3.", r"2\times10^3"),
        ("2 × 10³ in all", "2 × 10³"),
        (r"so $\frac{1}{2}$.", r"\frac{1}{2}"),
        (r"so $-\dfrac{1}{2}$.", r"-\dfrac{1}{2}"),
        (r"3\frac{1}{2} cups", r"3\frac{1}{2}"),
        ("needs 3 1/2 cups", "3 1/2"),
        ("needs 3½ cups", "3½"),
        ("1 234 567 people", "1 234 567"),
        (r"1{,}234 people", r"1{,}234"),
        ("2^{10} ways", "2^{10}"),
        ("18 cm^2", "18"),
        ("5, then 12 345", "345"),
        ("2 of 3 1/x", "1"),
    ],
)
def test_last_number(text: str, answer: str) -> None:
    assert extract(text, LAST).answer == answer


def test_no_number() -> None:
    assert extract("none", LAST).reason == "no number"
    assert extract("only x^2", LAST).reason == "no number"


@pytest.mark.parametrize("contract", [TAG, BOXED, HASHES, LAST], ids=lambda c: c.kind.value)
@pytest.mark.parametrize(
    "text",
    [
        "<answer>" * 120_000,
        r"\boxed{" * 150_000,
        "#" * 1_000_000,
        "1" * 1_000_000,
        "{}\x00\u202e" * 250_000,
        r"\boxed{1} " * 100_000,
        r"\boxed{" * 70_000 + "1" + "}" * 70_000,
        r"\boxed{" * 100_000 + r"\boxed{1}",
        r"\frac{" * 150_000 + "1",
    ],
    ids=["tags", "boxes", "hashes", "digits", "binary", "closed", "nested", "open", "fractions"],
)
def test_a_megabyte_is_fast(contract: AnswerContract, text: str) -> None:
    started = time.perf_counter()
    extract(text, contract)
    assert time.perf_counter() - started < 1.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so x = −5", "−5"),
        ("it is –5", "–5"),
        ("pages 3–5", "5"),
        ("about 1.5e3", "1.5e3"),
        ("5e", "5"),
    ],
)
def test_signs_and_exponents_belong_to_the_last_number(text: str, answer: str) -> None:
    assert extract(text, AnswerContract(kind=AnswerKind.LAST_NUMBER)).answer == answer


# --- lenient: the maths of a completion whatever its format, and never less than strict ---------


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
    ],
    ids=["tags", "words", "says", "of", "letters", "angles", "boxes", "binary"],
)
def test_a_megabyte_is_read_leniently_fast(contract: AnswerContract, text: str) -> None:
    started = time.perf_counter()
    extract_lenient(text, contract)
    assert time.perf_counter() - started < 2.0


def test_lenient_grade_is_about_the_maths_alone() -> None:
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
