"""The final table: the same items, honest verdicts, and gains that are only format."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from evaluation.plain import plain

from grouper.errors import DataError
from grouper.evaluation.compare import changed_problems, compare, pool
from grouper.evaluation.result import EvaluationItem, EvaluationResult
from grouper.evaluation.result_tables import answers_table, comparison_blocks, part_tables
from grouper.tables import table
from grouper.types import FinishReason, Verdict

VERDICTS = {
    "+": Verdict.CORRECT,
    "-": Verdict.INCORRECT,
    ".": Verdict.NO_ANSWER,
    "/": Verdict.NO_ANSWER,  # and cut off
    "?": Verdict.NOT_SCORED,
    "t": Verdict.TIMEOUT,
}


def make_result(name: str, outcomes: str, *, subject: str | None = None) -> EvaluationResult:
    items = tuple(
        EvaluationItem(
            problem_id=f"p/{i}",
            subject=subject,
            level=None,
            sample=0,
            prompt="",
            completion="",
            answer="1",
            extracted=None,
            verdict=VERDICTS[mark],
            reason="",
            stage="",
            finish_reason=FinishReason.LENGTH if mark == "/" else FinishReason.STOP_TOKEN,
            tokens=10,
        )
        for i, mark in enumerate(outcomes)
    )
    return EvaluationResult(name=name, phase=name, step=0, split="test", items=items, samples=1)


BASE = make_result("base", "." * 60 + "/" * 40)
SFT = make_result("sft", "+" * 40 + "-" * 58 + "/" * 2)
GRPO = make_result("grpo", "+" * 90 + "-" * 10)


def test_each_is_compared_with_the_one_before_and_the_last_with_the_first():
    comparison = compare([BASE, SFT, GRPO])
    assert [(d.before, d.after) for d in comparison.differences] == [
        ("base", "sft"),
        ("sft", "grpo"),
        ("base", "grpo"),
    ]
    second = comparison.differences[1]
    assert second.paired.difference == pytest.approx(0.5)
    assert (second.paired.higher, second.paired.lower) == (50, 0)
    assert second.paired.verdict == "better"


def test_two_results_have_one_difference_and_one_has_none():
    assert len(compare([SFT, GRPO]).differences) == 1
    assert compare([SFT]).differences == ()
    assert "SFT" in plain(comparison_blocks(compare([SFT])))
    assert "Nothing" in plain(comparison_blocks(compare([])))


def test_the_table_says_what_a_gain_is_made_of():
    text = " ".join(plain(comparison_blocks(compare([BASE, SFT, GRPO]))).split())
    parts = "in points: format {}, extraction +0.0, truncation +0.0, reasoning {}."
    assert f"Causes of SFT - base, {parts.format('+40.0', '+0.0')}" in text
    assert f"Causes of GRPO - SFT, {parts.format('+0.0', '+50.0')}" in text


def test_the_table_shows_lenient_accuracy_beside_strict():
    lenient = tuple(replace(item, lenient=i < 70) for i, item in enumerate(SFT.items))
    table = plain(comparison_blocks(compare([BASE, replace(SFT, items=lenient)])), width=80)
    header, base, sft, *_ = table.splitlines()
    assert header.split()[4:6] == ["%]", "lenient"]
    assert base.split()[4] == "-"
    assert sft.split()[4] == "70.0"
    assert "in any format" in table
    assert max(map(len, table.splitlines())) <= 80
    assert "lenient" not in plain(comparison_blocks(compare([BASE, SFT]))).lower()


def test_the_table_says_better_worse_and_no_evidence():
    up = plain(comparison_blocks(compare([SFT, GRPO])))
    assert "GRPO is better than SFT" in up
    down = plain(comparison_blocks(compare([GRPO, SFT])))
    assert "SFT is worse than GRPO" in down
    near = make_result("grpo", "+" * 42 + "-" * 58)
    same = plain(comparison_blocks(compare([SFT, near])))
    assert "no evidence" in same
    assert "better" not in same
    assert "Format" not in same


@pytest.mark.parametrize("width", [80, 100])
def test_the_table_fits_and_no_row_wraps(width):
    lines = plain(comparison_blocks(compare([BASE, SFT, GRPO])), width=width).splitlines()
    assert max(len(line) for line in lines) <= width
    rows = [line for line in lines if line.startswith(("base ", "SFT ", "GRPO "))]
    assert len(rows) == 6
    assert rows[2] == rows[2].rstrip()
    assert "90.0 [82.6, 94.5]" in rows[2]
    assert rows[2].split()[-5:] == ["90", "10", "0", "0", "10"]


def test_an_unreadable_reference_leaves_every_difference_and_is_told():
    # The base gives no answer, so only the better model meets the unreadable reference.
    comparison = compare([make_result("base", ".-"), make_result("sft", "?+")])
    assert comparison.differences[0].paired.problems == 1
    assert "cannot be read, excluded: base 0, SFT 1" in plain(comparison_blocks(comparison))


def test_problems_that_were_graded_by_text_alone_are_counted_apart():
    def by_text(result):
        first, *rest = result.items
        return replace(result, items=(replace(first, stage="text alone"), *rest))

    shown = plain(
        comparison_blocks(
            compare([by_text(make_result("base", "-+")), by_text(make_result("sft", "++"))])
        )
    )
    assert "graded by text alone: base 1 (0 right), SFT 1 (1 right)." in shown
    assert "text alone" not in plain(comparison_blocks(compare([BASE, SFT])))


def test_grader_timeouts_are_told():
    text = plain(comparison_blocks(compare([SFT, make_result("grpo", "t" * 100)])))
    assert "timeouts, counted as not correct: SFT 0, GRPO 100" in text


def test_only_shared_problems_are_compared():
    comparison = compare([make_result("base", "-+-+"), make_result("sft", "++-")])
    assert comparison.left_out == 1
    assert [len(result.items) for result in comparison.results] == [3, 3]
    assert comparison.differences[0].paired.problems == 3
    assert "Left out: 1 problem, which not all of them have" in plain(comparison_blocks(comparison))
    changed = replace(SFT, items=(replace(SFT.items[0], answer="2"), *SFT.items[1:]))
    assert compare([BASE, changed]).left_out == 1
    other = tuple(replace(item, problem_id=f"q/{item.problem_id}") for item in SFT.items)
    with pytest.raises(DataError, match="'base' and 'sft' share no problem"):
        compare([BASE, replace(SFT, items=other)])
    assert compare([BASE]).left_out == 0


def graded(result: EvaluationResult, lenient: str) -> EvaluationResult:
    """With the verdicts on the answers found in any format."""
    verdicts = [VERDICTS[mark] for mark in lenient]
    items = tuple(
        replace(item, lenient_verdict=verdict, lenient=verdict is Verdict.CORRECT)
        for item, verdict in zip(result.items, verdicts, strict=True)
    )
    return replace(result, items=items)


@pytest.mark.parametrize(
    ("before", "lenient", "cause"),
    [
        (".", "+", "format"),  # right, in another layout
        (".", ".", "format"),  # no answer at all
        (".", "-", "reasoning"),  # wrong, in another layout
        ("-", "-", "reasoning"),
        ("-", "+", "extraction"),  # in the layout, and not found in it
        ("t", "t", "extraction"),  # not read in time
        ("/", ".", "truncation"),
    ],
)
def test_a_gain_is_split_by_what_was_wrong_before(before, lenient, cause):
    old = graded(make_result("base", before + "++"), lenient + "++")
    new = graded(make_result("sft", "+++"), "+++")
    (gain,) = compare([old, new]).differences
    assert gain.causes == {
        name: pytest.approx(1 / 3 if name == cause else 0.0)
        for name in ("format", "extraction", "truncation", "reasoning")
    }
    (loss,) = compare([new, old]).differences
    assert loss.causes[cause] == pytest.approx(-1 / 3)


def test_the_parts_add_up_to_the_difference_whatever_the_samples():
    rng = random.Random(0)

    def several(name: str, samples: int) -> EvaluationResult:
        parts = [make_result(name, "".join(rng.choices("+-./t", k=12))) for _ in range(samples)]
        return pool(name, parts)

    for _ in range(20):
        (difference,) = compare([several("base", 3), several("sft", 5)]).differences
        total = difference.paired.difference
        assert sum(difference.causes.values()) == pytest.approx(total, abs=1e-12)


def test_a_gain_over_all_stages_has_the_causes_of_each():
    """`GRPO - base: truncation +98.4, reasoning +0.0` stood beside stages of 47.5 and 51.0."""
    base = make_result("base", "/" * 100)
    sft = make_result("sft", "+" * 47 + "-" * 53)
    grpo = make_result("grpo", "+" * 98 + "-" * 2)
    first, second, whole = compare([base, sft, grpo]).differences
    assert first.causes["truncation"] == pytest.approx(0.47)
    assert second.causes["reasoning"] == pytest.approx(0.51)
    assert (whole.before, whole.after) == ("base", "grpo")
    assert whole.causes == {
        "format": 0.0,
        "extraction": 0.0,
        "truncation": pytest.approx(0.47),
        "reasoning": pytest.approx(0.51),
    }
    assert sum(whole.causes.values()) == pytest.approx(whole.paired.difference)


def test_arms_that_are_no_stages_of_a_run_are_compared_directly():
    arms = [make_result(name, marks) for name, marks in (("a", "//"), ("b", "--"), ("c", "++"))]
    arms = [replace(arm, phase="grpo") for arm in arms]
    *_, whole = compare(arms).differences
    assert whole.causes["truncation"] == pytest.approx(1.0)


def test_problems_won_and_lost_stand_side_by_side():
    rows = changed_problems(make_result("base", "-+.+"), make_result("sft", "++-/"))
    found = [(change, old.problem_id, old.outcome, new.outcome) for change, old, new in rows]
    assert found == [(1.0, "p/0", "wrong", "correct"), (-1.0, "p/3", "correct", "truncated")]


def seeds_of(name: str, *outcomes: str) -> list[EvaluationResult]:
    return [make_result(name, marks) for marks in outcomes]


def test_seeds_of_one_recipe_are_one_arm_with_an_interval_over_them():
    before = seeds_of("base", "+" * 20 + "-" * 80, "+" * 24 + "-" * 76, "+" * 22 + "-" * 78)
    after = seeds_of("grpo", "+" * 60 + "-" * 40, "+" * 66 + "-" * 34, "+" * 63 + "-" * 37)
    arms = {"base": before, "grpo": after}
    comparison = compare([pool(name, arm) for name, arm in arms.items()], seeds=arms)
    (difference,) = comparison.differences
    assert comparison.results[1].accuracy == pytest.approx(0.63)
    assert comparison.results[1].overall.problems == 100
    # By hand: 40, 42 and 41 points; 41 -+ 4.3027 / sqrt(3).
    assert difference.seeds.low == pytest.approx(0.41 - 0.043027 / 3**0.5, abs=1e-6)
    assert difference.verdict == "better"
    assert "Over 3 seeds GRPO - base: [+38.5, +43.5]." in plain(comparison_blocks(comparison))
    assert "100 problems, 1 completion each from every seed" in plain(comparison_blocks(comparison))
    assert comparison.numbers["accuracies_of_seeds"]["grpo"] == [0.6, 0.66, 0.63]
    # Seeds that do not agree leave it open, whatever the problems say.
    arms["grpo"] = seeds_of("grpo", "+" * 100, "+" * 95 + "-" * 5, "-" * 80 + "+" * 20)
    comparison = compare([pool(name, arm) for name, arm in arms.items()], seeds=arms)
    assert comparison.differences[0].paired.verdict == "better"
    assert comparison.differences[0].verdict == "no evidence"
    # No difference of accuracies is beyond 100 points.
    assert comparison.differences[0].seeds.high == 1.0


def test_seeds_that_agree_exactly_have_an_interval_with_a_width() -> None:
    """Two seeds with one problem more out of ten each: that is no proof."""
    arms = {
        "base": seeds_of("base", *["-" * 10] * 2),
        "grpo": seeds_of("grpo", *["-" * 9 + "+"] * 2),
    }
    comparison = compare([pool(name, arm) for name, arm in arms.items()], seeds=arms)
    # By hand: as changes of 0.1 and 0.2, whose squares about the mean add up to 0.1^2 / 2.
    low = 0.1 - 12.7062 * (0.005 / 2) ** 0.5
    assert comparison.differences[0].seeds.low == pytest.approx(low, abs=1e-4)


def test_other_problems_under_the_same_ids_are_not_the_same_by_chance() -> None:
    """Row numbers are ids in every file, and some of their answers agree."""

    def answering(name: str, answers: str) -> EvaluationResult:
        made = make_result(name, "+" * len(answers))
        items = (replace(i, answer=a) for i, a in zip(made.items, answers, strict=True))
        return replace(made, items=tuple(items))

    first, second = answering("a", "1234567890"), answering("b", "1298765430")
    with pytest.raises(DataError, match=r"share no problem.* for 4 of the 10 ids in common"):
        compare([first, second])
    arms = {"a": [first, second], "b": [second, first]}
    with pytest.raises(DataError, match="name the same ones in each arm, in the same order"):
        compare([pool(name, arm) for name, arm in arms.items()], seeds=arms)


def test_numbers_of_samples_that_differ_are_both_named() -> None:
    one = make_result("base", "+-")
    items = tuple(replace(item, sample=n) for item in one.items for n in range(4))
    both = plain(comparison_blocks(compare([replace(one, items=items, samples=4), one])))
    assert "2 problems, 1 or 4 completions each" in both


def test_seeds_with_problems_of_their_own_have_all_of_them():
    other = make_result("base", "+-")
    other = replace(other, items=tuple(replace(i, answer="9") for i in other.items))
    pooled = pool("base", [make_result("base", "++"), other])
    assert pooled.overall.problems == 4
    assert [item.problem_id for item in pooled.items][2:] == ["p/0 (seed 1)", "p/1 (seed 1)"]


def test_the_interval_over_seeds_is_over_the_problems_that_all_have():
    # Of the last 40 problems, which only the later arm has, all are right.
    before = seeds_of("base", "+" * 2 + "-" * 8, "+" * 4 + "-" * 6)
    after = seeds_of("grpo", "+" * 3 + "-" * 7 + "+" * 40, "+" * 5 + "-" * 5 + "+" * 40)
    arms = {"base": before, "grpo": after}
    comparison = compare([pool(name, arm) for name, arm in arms.items()], seeds=arms)
    (difference,) = comparison.differences
    assert comparison.left_out == 40
    assert (difference.seeds.low + difference.seeds.high) / 2 == pytest.approx(0.1)
    assert comparison.numbers["accuracies_of_seeds"]["grpo"] == [0.3, 0.5]
    # Also where each seed has problems of its own, which pooling renames.
    for arm in arms.values():
        others = tuple(replace(item, answer="2") for item in arm[1].items)
        arm[1] = replace(arm[1], items=others)
    comparison = compare([pool(name, arm) for name, arm in arms.items()], seeds=arms)
    assert comparison.left_out == 80
    assert comparison.numbers["accuracies_of_seeds"]["grpo"] == [0.3, 0.5]


def test_arms_of_different_sizes_have_no_interval_over_seeds_and_say_so():
    arms = {"base": seeds_of("base", "+-", "+-"), "grpo": seeds_of("grpo", "++", "++", "+-")}
    comparison = compare([pool(name, arm) for name, arm in arms.items()], seeds=arms)
    assert comparison.differences[0].seeds is None
    said = "No interval over seeds of GRPO - base, which have 3 and 2: the verdict is that over"
    assert said in plain(comparison_blocks(comparison)).replace("\n", " ")


def several_samples(name: str, *marks: str) -> EvaluationResult:
    """Samples of one problem, each with an answer of its mark."""
    samples = [replace(make_result(name, mark).items[0], extracted=mark) for mark in marks]
    items = tuple(replace(item, sample=number) for number, item in enumerate(samples))
    return replace(make_result(name, "+"), items=items, samples=len(items))


def test_seeds_with_other_numbers_of_samples_are_pooled():
    pooled = pool("grpo", [several_samples("grpo", *"+--+"), several_samples("grpo", *"++")])
    assert len(pooled.items) == 6
    assert pooled.accuracy == pytest.approx(4 / 6)


def test_each_of_pooled_seeds_votes_by_itself():
    seeds = [several_samples("grpo", *"++-"), several_samples("grpo", *"---")]
    pooled = pool("grpo", seeds)
    assert pooled.majority == 0.5
    assert pooled.majority == sum(seed.majority or 0 for seed in seeds) / 2


def test_a_majority_of_equal_numbers_is_right_as_often_as_they_are():
    """Units are no part of a vote, and of a verdict they may be."""
    first = several_samples("grpo", *"+--")
    named = [replace(i, extracted=a) for i, a in zip(first.items, ("7", "7 kg", "8"), strict=True)]
    turned = [replace(item, sample=1 - item.sample) for item in named[1::-1]]
    for items in (named, [*turned, named[2]]):
        assert replace(first, items=tuple(items)).majority == 0.5


def test_what_is_left_out_of_a_long_table_is_counted():
    many = make_result("grpo", "+" * 43)
    items = tuple(replace(item, subject=f"part {n}") for n, item in enumerate(many.items))
    (by, (table, *_)), *_ = part_tables([replace(many, items=items)])
    assert by == "subject"
    assert "and 3 more" in plain(table)


def test_levels_are_in_the_order_of_their_numbers():
    levels = ["10 steps", "2 steps", "algebra", "Level 3", "Level 12", "1 step"]
    result = make_result("grpo", "+" * len(levels))
    items = [replace(item, level=lv) for item, lv in zip(result.items, levels, strict=True)]
    by_level = replace(result, items=tuple(items)).by_level
    assert list(by_level) == ["1 step", "2 steps", "10 steps", "Level 3", "Level 12", "algebra"]


def test_by_subject_or_nothing():
    assert [by for by, _ in part_tables([SFT])] == ["length"]
    both = [
        make_result(name, right, subject="algebra")
        for name, right in (("sft", "+-"), ("grpo", "++"))
    ]
    ((table,), _) = (tables for _, tables in part_tables(both))
    assert "algebra         2  50.0 [9, 91]  100.0 [34, 100]" in plain(table)


def carded(name: str, seed: int, **sampling: object) -> EvaluationResult:
    card = {"seed": seed, "sampling": {"temperature": 1.0, "max_new_tokens": 8, **sampling}}
    return replace(make_result(name, "+-" * 10), card=card)


@pytest.mark.parametrize(
    ("results", "note"),
    [
        ([carded("base", 0)], "20 problems, 1 completion each."),
        ([carded("base", 0), carded("sft", 0)], "same problems and random seeds for every model."),
        ([carded("base", 0), carded("sft", 1)], "same problems, sampled with different seeds."),
        (
            [carded("base", 0, temperature=0.0), carded("sft", 1, temperature=0.0)],
            "same problems and random seeds for every model.",
        ),
        (
            [carded("base", 0), carded("sft", 0, max_new_tokens=9)],
            "same problems, sampled in different ways.",
        ),
        ([BASE, SFT], "each; the same problems."),
    ],
)
def test_only_what_was_shared_is_called_shared(results, note):
    """U9."""
    text = plain(comparison_blocks(compare(results)), width=120)
    assert note in text


def test_any_number_of_samples_has_a_legible_table():
    one = make_result("base", "+-")
    items = [replace(item, sample=n) for item in one.items for n in range(64)]
    text = plain(answers_table([replace(one, items=items, samples=64)] * 2), width=80)
    assert all(f"pass@{k} %" in text for k in (2, 4, 8, 16, 32, 64))
    assert "…" not in text


def test_no_text_of_a_table_is_markup():
    """An interval as an answer, or a subject in brackets, was left out; `[/b]` was an error."""
    rows = [["[/b]", "[a, b]"], ["[red]x", "1"]]
    lines = plain(table(["[x]", "answer"], rows)).splitlines()
    assert [line.split(maxsplit=1) for line in lines] == [["[x]", "answer"], *rows]


def test_majority_lengths_and_the_lenient_split_have_a_table():
    def answering(name: str, answers: str) -> EvaluationResult:
        """A problem per word, a sample per letter; `7` is right."""
        items = [
            replace(
                make_result(name, "+" if letter == "7" else "-").items[0],
                problem_id=f"p/{n}",
                sample=sample,
                extracted=None if letter == "." else letter,
                tokens=10 if letter == "7" else 40,
                lenient_verdict=Verdict.CORRECT if letter == "7" else Verdict.INCORRECT,
            )
            for n, word in enumerate(answers.split())
            for sample, letter in enumerate(word)
        ]
        return replace(make_result(name, ""), items=tuple(items), samples=4)

    # The most frequent answer: right, wrong, half right, none.
    result = answering("base", "7712 1172 7711 ....")
    assert result.majority == pytest.approx((1 + 0 + 0.5 + 0) / 4)
    assert (result.tokens_right, result.tokens_wrong) == (10, 40)
    assert list(result.by_length) == ["8-15", "32-63"]
    assert [part.mean for part in result.by_length.values()] == [1.0, 0.0]
    assert result.lenient_counts["wrong"] == 11
    rows = [line.rsplit(maxsplit=1) for line in plain(answers_table([result])).splitlines()]
    shown = dict(row for row in rows if row)
    assert (shown["tokens, right"], shown["tokens, others"]) == ("10", "40")
    assert shown["maj@k %"] == "37.5"
    assert shown["leniently wrong"] == "11"
    assert result.numbers["maj_at_k"] == {"4": 0.375}
    assert make_result("base", "+").majority is None


def test_results_without_a_scored_problem_are_refused():
    results = [make_result("base", "??"), make_result("sft", "??")]
    with pytest.raises(DataError, match="no problem could be scored in every result"):
        compare(results)


def test_one_result_without_a_scored_problem_is_shown():
    unscored = make_result("base", "??")
    assert compare([unscored]).differences == ()
    assert "base" in plain(comparison_blocks(compare([unscored])))
