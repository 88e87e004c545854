"""Problem sets: filtered, split, mixed, written and read back."""

from __future__ import annotations

import json
import tracemalloc
from collections import Counter
from datetime import date
from pathlib import Path

import pytest

from grouper.config.schema import SourceConfig
from grouper.data import ProblemSet, find_overlap, hold_out, load_problems, without
from grouper.data.audit import audit
from grouper.data.problems import apply_filters, grade_shown, write_problems
from grouper.errors import ConfigError, DataError
from grouper.prompts.formats import FORMATS
from grouper.rewards import REWARDS
from grouper.rewards.builtin import format_holds
from grouper.types import Problem

LAYOUTS = Path(__file__).parent / "layouts"


def contents(problems):
    return [
        (p.question, p.answer, p.solution, p.response, p.prompt, p.subject, p.level)
        for p in problems.problems
    ]


ROWS = {
    "gsm8k": {"question": "1+1?", "answer": "It is <<1+1=2>>2.\n#### 2"},
    "svamp": {"Question": "How many?", "Body": "One and one", "Answer": 2.0, "ID": "chal-1"},
    "prompt-response": {
        "prompt": FORMATS["r1-zero"].plain_prompt("1+1?"),
        "response": " so </think> <answer> 2 </answer>",
    },
}


@pytest.mark.parametrize("source", ["openmath-mini", "numina-tir", *ROWS])
def test_the_same_problems_are_read_back(tmp_path, source):
    path, settings = LAYOUTS / source, {"numeric_only": True, "offset": 2}
    if source in ROWS:
        path, settings = tmp_path / "rows.jsonl", {}
        path.write_text(json.dumps(ROWS[source]))
    before = load(source, path, **settings)
    sources = write_problems(tmp_path / "ready", {"train": before})
    after = load_problems(SourceConfig(**sources["train"]), seed=0)
    assert contents(after) == contents(before)
    assert len({p.id for p in after.problems}) == len(before)


def test_equal_problems_give_equal_bytes_and_others_are_never_replaced_unasked(tmp_path):
    before = load("numina-tir", LAYOUTS / "numina-tir")
    write_problems(tmp_path, {"train": before})
    written = (tmp_path / "train.jsonl").read_bytes()
    write_problems(tmp_path, {"train": before, "test": before})
    assert (tmp_path / "train.jsonl").read_bytes() == (tmp_path / "test.jsonl").read_bytes()
    other = load("numina-tir", LAYOUTS / "numina-tir", limit=1)
    with pytest.raises(DataError, match=r"train.jsonl: a file with other content.*--overwrite"):
        write_problems(tmp_path, {"train": other})
    assert (tmp_path / "train.jsonl").read_bytes() == written
    write_problems(tmp_path, {"train": other}, overwrite=True)
    assert len(load("file", tmp_path)) == 1


def test_rows_that_cannot_be_used_are_listed(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"question": "q", "answer": "1"}\n{"question": "", "answer": "1"}\n')
    write_problems(tmp_path / "ready", {"train": load("file", path)})
    line = (tmp_path / "ready" / "train.invalid.jsonl").read_text()
    assert json.loads(line) == {"row": 1, "reason": "the question is empty"}


def test_columns_that_json_does_not_know_are_written_as_text(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet

    rows = [{"question": "q", "answer": "1", "when": date(2020, 1, 2), "raw": b"\x00"}]
    pa.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    write_problems(tmp_path / "ready", {"train": load("file", tmp_path / "a.parquet")})
    (row,) = (json.loads(line) for line in (tmp_path / "ready/train.jsonl").open())
    assert row["when"] == "datetime.date(2020, 1, 2)"


def test_a_folder_that_cannot_be_written_is_a_sentence(tmp_path):
    (tmp_path / "ready").write_text("a file")
    before = load("numina-tir", LAYOUTS / "numina-tir")
    with pytest.raises(DataError, match=r"ready: cannot write here"):
        write_problems(tmp_path / "ready", {"train": before})


def load(source: str, path: Path | str | None = None, **config: object) -> ProblemSet:
    where = None if path is None else str(path)
    return load_problems(SourceConfig(source=source, path=where, **config), seed=0)


def written(path: Path, answers: list[str]) -> Path:
    path.write_text("".join(json.dumps({"question": f"q{a}", "answer": a}) + "\n" for a in answers))
    return path


def test_numeric_only_asks_for_plain_numbers(tmp_path):
    answers = ["3", "-1,000", "2.5", r"\frac{1}{3}", "x", "5 cm", "40%", "0,1", "12+7"]
    path = written(tmp_path / "a.jsonl", answers)
    found = load("file", path, numeric_only=True)
    assert [p.answer for p in found.problems] == answers[:3]
    assert found.notes == ("numeric_only: 3 of 9 answers are plain numbers.",)
    assert found.left_out == 6


def test_numeric_only_keeps_what_rewards_of_numbers_can_read(shared_data):
    """No fractions, units or LaTeX: the right text in the answer tag would earn no number."""
    found = load("math", shared_data / "math", split="validation", numeric_only=True)
    number = REWARDS["dapo_number"](FORMATS["tags"])
    texts = [f"a<end_working_out><SOLUTION>{p.answer}</SOLUTION>" for p in found.problems]
    paid = number(
        prompts=["q"] * len(texts),
        completions=texts,
        reference_answer=[problem.answer for problem in found.problems],
    )
    assert len(found) > 2_000
    assert set(paid) == {3.0}


def test_only_correct_grades_what_is_shown():
    found = load("openmath-mini", LAYOUTS / "openmath-mini", only_correct=True)
    assert found.notes == ("only_correct: 13 of 14 demonstrations are correct.",)
    assert "openmath-mini/cot/5" not in {p.id for p in found.problems}


def test_only_correct_of_generated_problems_drops_the_rushed():
    options = {"count": 40, "rushed": {"add2": 1.0}, "kinds": ["add2", "sum3"]}
    whole = load("arithmetic", options=options)
    wrong = {p.id for p in whole.problems if p.columns["demonstrated_answer"] != p.answer}
    right = load("arithmetic", options=options, only_correct=True)
    assert wrong
    assert {p.id for p in whole.problems} - {p.id for p in right.problems} == wrong


def test_solutions_that_state_no_answer_show_the_reference(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"question": "q", "answer": "so it is\n#### 3"}))
    found = load("gsm8k", path, only_correct=True)
    (note,) = found.notes
    assert note.endswith("correct, 1 more state no answer of their own and show the reference.")


@pytest.mark.parametrize(
    ("fields", "right"),
    [
        ({"response": " a </think> <answer> 4/2 </answer>"}, True),
        ({"response": " a </think> <answer> 3 </answer>"}, False),
        ({"response": " a </think>\n<answer> 2 </answer>"}, False),  # which the rewards do not pay
        ({"response": r"so \boxed{2}"}, True),
        ({"response": "no answer"}, False),
        ({"solution": r"so \boxed{2.0}"}, True),
        ({"solution": "so"}, None),
        ({}, False),
    ],
)
def test_what_a_demonstration_shows(fields, right):
    problem = Problem(id="a", question="q", answer="2", source="a", **fields)
    assert grade_shown(problem) is right


@pytest.mark.slow
def test_the_ready_variants_of_system_b(shared_data):
    """1,767 rows, of which 1,710 differ, over 128 problems."""
    path = shared_data / "math" / "sft.jsonl"
    sizes = {
        (count, by): len(load("prompt-response", path, unique=count, unique_by=by))
        for count, by in [(128, "row"), (256, "row"), ("all", "row"), (128, "problem")]
    }
    assert sizes == {(128, "row"): 128, (256, "row"): 256, ("all", "row"): 1767,
                     (128, "problem"): 1767}  # fmt: skip
    few = load("prompt-response", path, unique=2, unique_by="problem")
    assert len({p.question for p in few.problems}) == 2
    assert len(few) > 2
    correct = load("prompt-response", path, only_correct=True)
    told = "only_correct: 1,421 of 1,767 demonstrations are correct and in"
    assert correct.notes == (f"{told} their format.",)
    of_a_recipe = load_problems(
        SourceConfig(source="prompt-response", path=str(path), only_correct=True),
        seed=0,
        fmt=FORMATS["r1-zero"],
    )
    assert of_a_recipe.notes == (f"{told} the format r1-zero.",)
    assert of_a_recipe.problems == correct.problems


def test_telling_questions_apart_takes_little_memory():
    """Words by themselves take ten times as much: a gigabyte of 200,000 questions."""
    words = " ".join(f"w{n}" for n in range(80))
    many = tuple(
        Problem(id=str(n), question=f"{words} {n}", answer="1", source="a") for n in range(200)
    )
    whole = ProblemSet(name="a", problems=many)
    config = SourceConfig(source="file", path="a.jsonl", unique=100, unique_by="problem")
    for find in (lambda: apply_filters(whole, config), lambda: audit(whole)):
        tracemalloc.start()
        try:
            find()
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 200 * 1000  # a question has 315 bytes


@pytest.mark.slow
def test_only_correct_keeps_what_the_rewards_pay(shared_data):
    """326 right answers after `</think>` and a newline earn nothing in the recipe's rewards."""
    path = shared_data / "math" / "sft.jsonl"
    layout = FORMATS["r1-zero"]
    pays = REWARDS["r1_zero_answer"](layout)
    holds = REWARDS["r1_zero_format"](layout)
    whole = load("prompt-response", path)
    texts = [problem.response for problem in whole.problems]
    columns = {
        "prompts": ["q"] * len(texts),
        "completions": texts,
        "reference_answer": [problem.answer for problem in whole.problems],
    }
    paid = [p.id for p, r in zip(whole.problems, pays(**columns), strict=True) if r == 1]
    kept = load("prompt-response", path, only_correct=True)
    assert [problem.id for problem in kept.problems] == paid
    # The rewards and the metric of evaluations have one notion of the format.
    assert holds(**columns) == [float(format_holds(text, layout)) for text in texts]
    assert sum(holds(**columns)) == 1_439


def test_more_asked_for_than_there_are_is_said(tmp_path):
    found = load("file", written(tmp_path / "a.jsonl", ["1", "2", "2", "1"]), unique=9)
    assert [p.id for p in found.problems] == ["a/0", "a/1"]
    assert found.notes == (
        "unique: 2 different rows of the 2 there are in 4 rows, 2 rows used; 9 were requested.",
    )


def test_filters_follow_each_other(tmp_path):
    path = written(tmp_path / "a.jsonl", ["x", "1", "2", "3"])
    found = load("file", path, numeric_only=True, unique=2)
    assert [p.answer for p in found.problems] == ["1", "2"]
    assert len(found.notes) == 2


@pytest.mark.parametrize(
    ("answers", "config", "message"),
    [
        (["x", "y"], {"numeric_only": True}, "numeric_only: true leaves none of 2 problems"),
        (["1"], {"only_correct": True}, "only_correct: true leaves none of 1 problems.*0 of 1"),
    ],
)
def test_a_filter_that_leaves_nothing(tmp_path, answers, config, message):
    with pytest.raises(DataError, match=message):
        load("file", written(tmp_path / "a.jsonl", answers), **config)


def test_what_filters_leave_out_is_not_unusable(tmp_path):
    """One bad row in a hundred stays one in a hundred, however few are used."""
    path = written(tmp_path / "a.jsonl", [*map(str, range(99)), r"\frac{1}{"])
    found = load("file", path, unique=3)
    assert (len(found), found.rows_read, len(found.quarantined)) == (3, 100, 1)


def test_numeric_only_asks_no_worker_about_the_rest(tmp_path, monkeypatch):
    from grouper.data import loading

    asked = []
    real = loading.check_references
    monkeypatch.setattr(
        loading, "check_references", lambda answers: asked.extend(answers) or real(answers)
    )
    load("file", written(tmp_path / "a.jsonl", [r"\sqrt{2}", "5"]), numeric_only=True)
    assert asked == ["5"]


def problem_set(*questions: str) -> ProblemSet:
    problems = tuple(
        Problem(id=f"a/{i}", question=question, answer="1", source="a")
        for i, question in enumerate(questions)
    )
    return ProblemSet(name="a", problems=problems)


WHOLE = problem_set(*(f"What is {i} + {i}?" for i in range(200)))


def test_every_problem_is_on_one_side():
    train, held_out = hold_out(WHOLE, 0.1, seed=0)
    assert (len(train), len(held_out)) == (180, 20)
    assert find_overlap(train.problems, held_out.problems) == ()
    assert {p.id for p in (*train.problems, *held_out.problems)} == {p.id for p in WHOLE.problems}
    assert train.name == "a"
    assert held_out.name == "a (held out)"
    assert len({train.fingerprint, held_out.fingerprint, WHOLE.fingerprint}) == 3


def test_the_seed_decides_and_the_order_does_not():
    _, first = hold_out(WHOLE, 0.1, seed=0)
    _, other = hold_out(WHOLE, 0.1, seed=1)
    backwards = problem_set(*(p.question for p in reversed(WHOLE.problems)))
    _, reordered = hold_out(backwards, 0.1, seed=0)
    questions = [{p.question for p in part.problems} for part in (first, other, reordered)]
    assert questions[0] == questions[2]
    assert questions[0] != questions[1]


def test_repeated_questions_stay_together():
    twice = problem_set(*(f"What is {i // 4}?{' ' * (i % 4)}" for i in range(200)))
    train, held_out = hold_out(twice, 0.2, seed=0)
    assert find_overlap(train.problems, held_out.problems) == ()
    assert len(held_out) == 40


def test_a_share_that_leaves_nothing():
    for share, size in ((0.01, 10), (0.99, 10)):
        with pytest.raises(DataError, match="leaves one side empty"):
            hold_out(problem_set(*map(str, range(size))), share, seed=0)


def test_demonstrations_lose_what_is_held_out():
    sft = problem_set("what is 2+2", "Something else?")
    kept = without(sft, problem_set("What is 2 + 2?"))
    assert [p.question for p in kept.problems] == ["Something else?"]
    assert kept.notes == ("validation_share: 1 held-out rows left out.",)
    assert without(sft, problem_set("unknown")) is sft
    with pytest.raises(DataError, match="every problem of it is held out"):
        without(sft, sft)


@pytest.fixture
def files(tmp_path):
    def make(name: str, count: int) -> str:
        path = tmp_path / name / "train.jsonl"
        path.parent.mkdir()
        rows = ({"question": f"{name} {i}?", "answer": str(i)} for i in range(count))
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return {"a": make("a", 30), "b": make("b", 40)}


def mixture(files, weights, **config):
    members = [
        {"source": "file", "path": files[name], "weight": weight}
        for name, weight in weights.items()
    ]
    return SourceConfig.model_validate_json(json.dumps({"mixture": members, **config}))


def shares(problems):
    return Counter(problem.question[0] for problem in problems.problems)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ({"a": 1, "b": 1}, {"a": 30, "b": 30}),
        ({"a": 3, "b": 1}, {"a": 30, "b": 10}),
        ({"a": 0.5, "b": 1}, {"a": 20, "b": 40}),
    ],
)
def test_weights_are_shares_and_no_problem_comes_twice(files, weights, expected):
    mixed = load_problems(mixture(files, weights), seed=0)
    assert shares(mixed) == expected
    assert len({p.question for p in mixed.problems}) == len(mixed)
    assert len({p.id for p in mixed.problems}) == len(mixed)
    said = ", ".join(
        f"{expected[name]} of the {size} in train" for name, size in (("a", 30), ("b", 40))
    )
    assert mixed.notes == (f"mixture: {said}.",)


def test_the_seed_decides_which_and_in_what_order(files):
    config = mixture(files, {"a": 1, "b": 1})
    first, again, other = (load_problems(config, seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert first.fingerprint != other.fingerprint
    assert [p.id for p in first.problems] != sorted(p.id for p in first.problems)
    # Both sources all along, so that the first of an epoch are a mixture as well.
    assert min(shares_of_half(first).values()) > 5
    # The recipe's own shuffle takes the place of the run's seed.
    shuffled = mixture(files, {"a": 1, "b": 1}, shuffle=1)
    assert load_problems(shuffled, seed=0) == other


def shares_of_half(mixed):
    return Counter(p.question[0] for p in mixed.problems[: len(mixed) // 2])


def test_limit_and_filters_are_of_the_mixture(files):
    whole = load_problems(mixture(files, {"a": 1, "b": 1}), seed=0)
    part = load_problems(mixture(files, {"a": 1, "b": 1}, offset=3, limit=8), seed=0)
    assert part.problems == whole.problems[3:11]
    with pytest.raises(DataError, match="none after offset"):
        load_problems(mixture(files, {"a": 1, "b": 1}, offset=99), seed=0)


def test_the_fingerprint_is_of_all(files, tmp_path):
    before = load_problems(mixture(files, {"a": 1, "b": 1}), seed=0).fingerprint
    path = tmp_path / "b" / "train.jsonl"
    path.write_text(path.read_text().replace('"answer": "7"', '"answer": "8"'))
    everything = mixture(files, {"a": 3, "b": 4})
    assert load_problems(everything, seed=0).fingerprint != before


def test_a_member_that_would_give_nothing(files):
    with pytest.raises(DataError, match="would give no problem"):
        load_problems(mixture(files, {"a": 1000, "b": 1}), seed=0)


def test_members_are_checked_where_they_stand():
    config = SourceConfig.model_validate_json(
        json.dumps({"mixture": [{"source": "gsm9k"}, {"source": "file"}]})
    )
    with pytest.raises(ConfigError) as refused:
        load_problems(config, seed=0)
    text = str(refused.value)
    assert "data.mixture.0.source: there is no data source 'gsm9k'" in text
    assert "data.mixture.1.path: path is missing" in text
