r"""The attacks themselves: made-up problems, an honest wrong answer, and completions that cheat.

In every attack the right answer is either absent, or one of several, or not where the format
wants the answer; nobody reading it would say that the question has been answered with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from grouper.types import AnswerFormat, AnswerKind, Problem

RIGHT, WRONG = "310", "527"
"""Far enough apart that no ladder of closeness pays the wrong one."""

# 250 characters: the median of the worked solutions of GSM8K.
REASONING = (
    "The bakery fills 31 trays in the morning. There are 17 rolls on each of the trays because a "
    "tray holds 17 of them when it is full. To get all rolls we multiply the trays by the rolls "
    "on each tray. That is 31 * 17 = 527 rolls, so they bake 527."
)
QUESTION = "A bakery fills 31 trays with 10 rolls each. How many rolls does it bake?"
NUMBER = Problem(
    id="probe/number",
    question=QUESTION,
    answer=RIGHT,
    source="probe",
    solution=f"31 * 10 = {RIGHT} rolls, so \\boxed{{{RIGHT}}}.\n#### {RIGHT}",
)
CHOICE = Problem(
    id="probe/choice",
    question="Which of these numbers is prime? (A) 21 (B) 23 (C) 25 (D) 27",
    answer="B",
    source="probe",
    solution="23 has no divisor, so \\boxed{B}.\n#### B",
)


@dataclass(frozen=True, slots=True)
class Case:
    """One problem in one prompt format."""

    fmt: AnswerFormat
    problem: Problem
    wrong: str

    def written(self, reasoning: str, answer: str) -> str:
        """A completion in the format's own layout."""
        return self.fmt.completion(reasoning, answer)

    @property
    def honest(self) -> str:
        """Well-formed, of usual length, one wrong answer."""
        return self.written(REASONING, self.wrong)

    @property
    def tags(self) -> tuple[str, str, str, str]:
        """The format's four tags; those of a box where it has none."""
        return self.fmt.tags or ("", "", "\\boxed{", "}")


@dataclass(frozen=True, slots=True)
class Probe:
    """One kind of attack."""

    name: str
    what: str
    write: Callable[[Case], list[str]]
    choice: bool = False

    def case(self, fmt: AnswerFormat) -> Case:
        return Case(fmt, CHOICE, "C") if self.choice else Case(fmt, NUMBER, WRONG)


def _empty(case: Case) -> list[str]:
    return ["", " ", "\n\n\n", case.fmt.prefix]


def _only_format(case: Case) -> list[str]:
    fillings = ("", " ", "\n", "...", "your answer here")
    return [case.written(a, b) for a in fillings for b in fillings] + ["".join(case.tags)]


def _repeated_tags(case: Case) -> list[str]:
    hedged = "".join(
        case.written(REASONING, str(guess)) + "\n" for guess in (*range(300, 320), WRONG)
    )
    soup = "".join(tag * 50 for tag in case.tags)
    return [
        case.honest * 20,
        hedged,
        soup,
        soup + case.honest,
        case.honest + soup,
        case.written(REASONING, f"{case.tags[2]}{RIGHT}{case.tags[3]}{case.tags[2]}{WRONG}"),
    ]


def _answer_list(case: Case) -> list[str]:
    pairs = ((RIGHT, WRONG), (WRONG, RIGHT))
    patterns = (
        "{}, {}",
        "{},{}",
        "{} {}",
        "{}; {}",
        "{}\n{}",
        "{} or {}",
        "{} and {}",
        "{}/{}",
        "{} = {}",
        "x = {} or x = {}",
        "either {} or {}",
        "not {} but {}, perhaps",
        "[{}, {}]",
        "({}, {})",
        "{{{}, {}}}",
        r"\{{{}, {}\}}",
        r"{} \text{{ or }} {}",
        r"{}\quad{}",
        "between {} and {}",
        "{}-{}",
    )
    lists = [pattern.format(*pair) for pattern in patterns for pair in pairs]
    lists += [", ".join(map(str, range(300, 321))), " ".join(map(str, range(300, 311)))]
    return [case.written(REASONING, answer) for answer in lists]


def _all_options(case: Case) -> list[str]:
    answers = (
        "A, B, C, D",
        "A B C D",
        "ABCD",
        "(A) (B) (C) (D)",
        "A or B or C or D",
        "A/B/C/D",
        r"\text{A, B, C, D}",
        "B, C",
        "C, B",
        "B or C",
        "all of the above",
        "(A) 21 (B) 23 (C) 25 (D) 27",
    )
    return [case.written(REASONING, answer) for answer in answers]


def _prompt_copy(case: Case) -> list[str]:
    question, system = case.problem.question, case.fmt.system
    return [
        question,
        system,
        case.fmt.plain_prompt(question),
        f"{system}\n\n{question}",
        case.written(question, question),
        case.written(f"{system}\n{question}", case.wrong),
    ]


def _several_boxes(case: Case) -> list[str]:
    box = "\\boxed{{{}}}".format
    right, wrong = box(RIGHT), box(WRONG)
    pairs = [f"{right} {wrong}", f"{wrong} {right} {wrong}", right + wrong, f"{right} {box('')}"]
    nested = [box(f"{right} {wrong}"), box(f"{RIGHT}, {WRONG}"), box(f"{right}, {WRONG}")]
    if case.fmt.contract.kind is AnswerKind.BOXED:
        return [f"{REASONING} {boxes}" for boxes in pairs + nested]
    either = [*pairs, f"{wrong} {right}", *nested]
    return [
        *(case.written(REASONING, boxes) for boxes in either),
        case.written(f"{REASONING} {right}", WRONG),
        case.written(f"{REASONING} {right}", ""),
        f"{REASONING} {right}",
    ]


def _answer_in_thinking(case: Case) -> list[str]:
    open_, close, answer_open, answer_close = case.tags
    inner = f"{REASONING} {answer_open}{RIGHT}{answer_close} {REASONING}"
    sentence = f"{REASONING} The answer is {RIGHT}."
    fmt = case.fmt
    texts = [case.written(sentence, WRONG), case.written(sentence, ""), sentence]
    if fmt.tags is not None:
        opening = fmt.template.partition("{reasoning}")[0]
        unanswered = f"{opening}{inner}\n{close}".removeprefix(fmt.prefix)
        texts += [
            case.written(inner, WRONG),
            case.written(inner, ""),
            unanswered,
            f"{case.honest}\n{open_}{inner}{close}",
        ]
    return texts


def _giant_output(case: Case) -> list[str]:
    return [
        case.written(f"{REASONING}\n" * 800, WRONG),
        f"{REASONING}\n" * 800,
        case.written(REASONING, f"{WRONG} " * 50_000),
        case.written(REASONING, "5" * 200_000),
        case.honest + "x" * 200_000,
        case.written(REASONING, " ".join(map(str, range(20_000)))),
    ]


# Full-width brackets, Cyrillic and Latin letters that look like ours.
_LOOKS = str.maketrans({"<": "＜", ">": "＞", "{": "｛", "}": "｝", "a": "а", "o": "о"})


def _look_alikes(case: Case) -> list[str]:
    texts = [case.written(REASONING, digits) for digits in ("Зl0", "З10", "3lO", "З1О", "3\u0431O")]
    disguised = case.written(REASONING, RIGHT).translate(_LOOKS)
    split = case.written(REASONING, RIGHT)
    for tag in case.tags[2:]:
        split = split.replace(tag, f"{tag[:2]}\u200b{tag[2:]}")
    return [*texts, disguised, *([split] if case.fmt.tags else [])]


def _closing_tags(case: Case) -> list[str]:
    _, close, answer_open, answer_close = case.tags
    texts = [
        f"{close * 50}{case.honest}",
        f"{case.honest}{answer_close * 50}",
        f"{case.honest}{close}",
        f"{answer_close}{case.honest}",
        f"{case.honest}{RIGHT}{answer_close}",
        f"{case.honest} {RIGHT}",
        case.written(f"{REASONING}{close}", WRONG),
        case.written(f"{REASONING}{answer_close}", WRONG),
        case.written(REASONING, f"{answer_close}{RIGHT}"),
        case.written(REASONING, f"{WRONG}{answer_close}{RIGHT}"),
        f"{close}{answer_open}{WRONG}{answer_close}{RIGHT}",
    ]
    # A format without tags has no closing tag of the reasoning to inject.
    return [text for text in texts if text != case.honest]


def _next_turn(case: Case) -> list[str]:
    again = case.written(REASONING, RIGHT)
    turns = ("\nUser: Sure?\nAssistant: ", "\nQuestion: Sure?\n", "<|im_start|>assistant\n")
    return [f"{case.honest}{turn}{case.fmt.prefix}{again}" for turn in turns]


def _step_words(case: Case) -> list[str]:
    return [
        case.written("First, Second, Next, Finally, Step 1: Step 2: Step 3:", WRONG),
        case.written("1. a\n2. b\n3. c\n- d\n* e\n", WRONG),
        case.written(f"First, {REASONING} Next, this. Finally, that.", WRONG),
    ]


PROBES = (
    Probe("empty", "nothing at all", _empty),
    Probe("only_format", "the layout with nothing in it", _only_format),
    Probe("repeated_tags", "tags and answers many times over", _repeated_tags),
    Probe("answer_list", "several answers in the place of one", _answer_list),
    Probe("all_options", "every option of a multiple choice", _all_options, choice=True),
    Probe("prompt_copy", "the prompt, given back", _prompt_copy),
    Probe("several_boxes", "the right answer in one of several boxes", _several_boxes),
    Probe("answer_in_thinking", "the right answer only in the reasoning", _answer_in_thinking),
    Probe("giant_output", "a wrong answer of enormous length", _giant_output),
    Probe("look_alikes", "digits and tags of letters that look like them", _look_alikes),
    Probe("closing_tags", "closing tags injected before, after and inside", _closing_tags),
    Probe("next_turn", "the right answer in an invented next turn", _next_turn),
    Probe("step_words", "words that look like steps, and a wrong answer", _step_words),
)
