"""Sources -> problems: columns, ids, quarantine, and real data where it lies."""

from __future__ import annotations

import json
import re

import pytest

from grouper.config.schema import SourceConfig
from grouper.data import SOURCES, load_problems, loading
from grouper.data.generated import GENERATED
from grouper.errors import ConfigError, DataError


def load(source, **config):
    return load_problems(SourceConfig(source=source, **config), seed=0)


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_gsm8k_solution_loses_its_annotations_and_the_answer(tmp_path):
    row = {
        "question": "How many?",
        "answer": "She sold 48/2 = <<48/2=24>>24 clips.\n48+24 = <<48+24=72>>72.\n#### 72",
    }
    path = write_jsonl(tmp_path / "train.jsonl", [row])
    problem_set = load("gsm8k", path=path)
    (problem,) = problem_set.problems
    assert problem.answer == "72"
    assert problem.solution == "She sold 48/2 = 24 clips.\n48+24 = 72."
    assert problem.id == "gsm8k/train/0"
    assert problem.columns == row
    assert problem_set.name == "gsm8k/train"


def test_rows_that_cannot_be_used_are_listed_with_their_reason(tmp_path):
    rows = [
        {"question": "a?", "answer": "so #### 1"},
        {"question": "b?", "answer": "no marker"},
        {"question": " ", "answer": "so #### 1"},
        {"question": "c?", "answer": "so ####  "},
        {"question": "d?", "answer": {"so": "#### 1"}},
        {"question": "e?", "answer": "so #### 5"},
    ]
    problem_set = load("gsm8k", path=write_jsonl(tmp_path / "test.jsonl", rows))
    assert [p.id for p in problem_set.problems] == ["gsm8k/test/0", "gsm8k/test/5"]
    assert {q.row: q.reason for q in problem_set.quarantined} == {
        1: "the answer has no ####",
        2: "the question is empty",
        3: "the answer is empty",
        4: "column 'answer' holds a dict, not text or a number; name a part of it: `answer.so`",
    }
    assert (len(problem_set.quarantined), problem_set.rows_read) == (4, 6)


def test_a_reference_the_grader_cannot_read_is_quarantined(tmp_path):
    rows = [
        {"question": "a?", "answer": "12"},
        {"question": "b?", "answer": r"\frac{1}{"},
        {"question": "c?", "answer": "{" * 100},
    ]
    problem_set = load("file", path=write_jsonl(tmp_path / "a.jsonl", rows))
    assert [p.answer for p in problem_set.problems] == ["12"]
    quarantined, long = problem_set.quarantined
    assert quarantined.row == 1
    assert "cannot be graded" in quarantined.reason
    assert f"the reference '{'{' * 80}...' cannot be graded" in long.reason


UNREAD = r"\foo{1}{2}^^+"


def test_an_evaluation_keeps_what_cannot_be_read_and_says_so(tmp_path):
    rows = [{"question": f"q{i}", "answer": str(i)} for i in range(3)]
    path = write_jsonl(tmp_path / "a.jsonl", [*rows, {"question": "b?", "answer": UNREAD}])
    config = SourceConfig(source="file", path=path)
    kept = load_problems(config, seed=0, keep_unreadable=True)
    assert [p.answer for p in kept.problems] == ["0", "1", "2", UNREAD]
    assert kept.quarantined == ()
    (note,) = kept.notes
    assert note.startswith("1 of 4 references cannot be read as mathematics")
    assert load_problems(config, seed=0).notes == ()
    assert len(load_problems(config, seed=0)) == 3


@pytest.mark.parametrize("column", ["answer", "solution"])
def test_the_notation_of_gsm8k_is_known_in_any_file(tmp_path, column):
    rows = [
        {"question": "a?", column: "He has <<3*4=12>>12.\nThen 6.\n#### 6"},
        {"question": "b?", column: "Some.\n#### 1,234\n"},
    ]
    found = load("file", path=write_jsonl(tmp_path / "a.jsonl", rows)).problems
    assert [p.answer for p in found] == ["6", "1234"]
    assert [p.solution for p in found] == ["He has 12.\nThen 6.", "Some."]


def test_a_box_in_the_answer_column_is_the_answer(tmp_path):
    rows = [
        {"question": "a?", "answer": "Two and one, so there are \\boxed{3} ways."},
        {"question": "b?", "answer": "$\\boxed{4}$"},
        {"question": "c?", "answer": "Thus \\boxed{5}", "solution": "Count them."},
    ]
    found = load("file", path=write_jsonl(tmp_path / "a.jsonl", rows)).problems
    assert [p.answer for p in found] == ["3", "4", "5"]
    assert [p.solution for p in found] == [rows[0]["answer"], None, "Count them."]


def test_several_boxes_or_a_box_inside_an_expression_stay_the_answer(tmp_path):
    """Graded as they stand; the last box alone is half of an answer."""
    texts = [r"\boxed{2} and \boxed{3}", r"(\boxed{1},\boxed{2})", r"\frac{\boxed{5}}{2}"]
    rows = [{"question": f"{text}?", "answer": text} for text in texts]
    rows.append({"question": "x?", "answer": r"**Answer:** \boxed{5}"})
    found = load("file", path=write_jsonl(tmp_path / "a.jsonl", rows)).problems
    assert [(p.answer, p.solution) for p in found] == [*((t, None) for t in texts), ("5", None)]


def test_a_heading_after_a_box_is_not_the_notation_of_gsm8k(tmp_path):
    rows = [{"question": "a?", "solution": "So $\\boxed{5}$.\n\n#### Remark: done"}]
    (problem,) = load("file", path=write_jsonl(tmp_path / "a.jsonl", rows)).problems
    assert (problem.answer, problem.solution) == ("5", rows[0]["solution"])


def test_a_solution_beside_an_answer_in_the_notation_of_gsm8k_is_kept(tmp_path):
    rows = [{"question": "a?", "answer": "#### 6", "solution": "Half of 12 is 6."}]
    (problem,) = load("file", path=write_jsonl(tmp_path / "a.jsonl", rows)).problems
    assert (problem.answer, problem.solution) == ("6", "Half of 12 is 6.")


def test_real_gsm8k_as_a_file(shared_data):
    found = load("file", path=str(shared_data / "gsm8k/test.jsonl"))
    named = load("gsm8k", path=str(shared_data / "gsm8k/test.jsonl"))
    assert [(p.question, p.answer, p.solution) for p in found.problems] == [
        (p.question, p.answer, p.solution) for p in named.problems
    ]


def test_a_wrong_column_is_found_out_after_a_few_rows(tmp_path, monkeypatch):
    asked = []

    def check(answers):
        asked.extend(answers)
        return dict.fromkeys(answers, "it is an explanation, not an answer")

    monkeypatch.setattr(loading, "check_references", check)
    rows = [{"question": f"q{i}", "answer": f"Row {i} says a lot"} for i in range(500)]
    path = write_jsonl(tmp_path / "mine.jsonl", rows)
    with pytest.raises(DataError) as caught:
        load("file", path=path)
    assert len(asked) == loading.TRIED
    assert "none of the first 20" in str(caught.value)
    assert "Row 0 says a lot" in str(caught.value)
    assert "mine (source: file)" in str(caught.value)
    assert "columns: {answer: ...}" in str(caught.value)


def test_math_takes_the_answer_column_or_the_last_box(tmp_path):
    rows = [
        {
            "problem": "p",
            "solution": r"\boxed{1} or \boxed{\frac{1}{2}}",
            "subject": "Algebra",
            "level": 3,
            "unique_id": "test/algebra/1.json",
        },
        {
            "problem": "p",
            "answer": "7",
            "solution": "s",
            "subject": "Geometry",
            "level": "Level 2",
            "unique_id": "test/geometry/2.json",
        },
    ]
    first, second = load("math", path=write_jsonl(tmp_path / "test.jsonl", rows)).problems
    assert (first.answer, first.level, first.subject) == (r"\frac{1}{2}", "3", "Algebra")
    assert (second.answer, second.solution) == ("7", "s")
    assert first.id == "math/test/algebra/1.json"


@pytest.mark.parametrize(
    ("columns", "rows"),
    [
        (
            {"question": "task", "answer": "reward_model.ground_truth"},
            [{"task": "q", "reward_model": {"ground_truth": "34", "style": "rule"}}],
        ),
        # A conversation, whether or not it begins with an instruction
        (
            {"question": "messages.-2.content", "answer": "messages.2.content"},
            [
                {
                    "messages": [
                        {"role": "system", "content": "Be brief."},
                        {"role": "user", "content": "q"},
                        {"role": "assistant", "content": "34"},
                    ]
                }
            ],
        ),
        # DAPO-Math: the column called solution holds the answer
        ({"question": "prompt", "answer": "solution"}, [{"prompt": "q", "solution": "34"}]),
        # OpenMathReasoning-mini, by its own names
        ({}, [{"problem": "q", "expected_answer": "34", "generated_solution": "so 34"}]),
        # NuminaMath-TIR: the answer stands in the solution
        ({}, [{"problem": "q", "solution": r"so \boxed{34}", "messages": []}]),
        ({}, [{"question": "q", "answer": 34.0, "id": 7}]),
    ],
)
def test_any_file_by_named_or_usual_columns(tmp_path, columns, rows):
    path = write_jsonl(tmp_path / "my.jsonl", rows)
    (problem,) = load("file", path=path, columns=columns).problems
    assert (problem.question, problem.answer) == ("q", "34")
    assert problem.source == "my"
    assert problem.id == ("my/7" if "id" in rows[0] else "my/0")
    if columns.get("answer") == "solution":
        assert problem.solution is None


def test_offset_and_limit_choose_rows_and_keep_their_numbers(tmp_path):
    rows = [{"question": f"q{i}", "answer": "1"} for i in range(10)]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    part = load("file", path=path, offset=3, limit=2)
    assert [p.id for p in part.problems] == ["a/3", "a/4"]
    whole = load("file", path=path)
    assert part.problems == whole.problems[3:5]
    assert part.fingerprint != whole.fingerprint


def test_the_fingerprint_is_of_the_contents(tmp_path):
    rows = [{"question": "q", "answer": "1", "extra": "x"}]
    before = load("file", path=write_jsonl(tmp_path / "a.jsonl", rows)).fingerprint
    assert load("file", path=str(tmp_path / "a.jsonl")).fingerprint == before
    rows[0]["extra"] = "y"
    assert load("file", path=write_jsonl(tmp_path / "a.jsonl", rows)).fingerprint != before


def test_folders_choose_the_file_by_split(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", [{"question": "a", "answer": "#### 1"}])
    write_jsonl(tmp_path / "test.jsonl", [{"question": "b", "answer": "#### 2"}])
    assert load("gsm8k", path=str(tmp_path)).problems[0].answer == "1"
    assert load("gsm8k", path=str(tmp_path), split="test").problems[0].answer == "2"


def test_repeated_ids_are_an_error(tmp_path):
    rows = [{"question": "a", "answer": "1", "id": 5}, {"question": "b", "answer": "1", "id": 5}]
    with pytest.raises(DataError, match=r"1 ids are used by more than one row.*a/5"):
        load("file", path=write_jsonl(tmp_path / "a.jsonl", rows))


@pytest.mark.parametrize(
    ("rows", "config", "message"),
    [
        ([], {}, "no rows"),
        ([{"question": "a", "answer": ""}], {}, r"no problem is left.*Row 0: the answer is empty"),
        ([{"question": "a", "answer": "1"}], {"offset": 5}, "no problem is left"),
        ([{"q": "a", "answer": "1"}], {}, r"no column holds the question.*Columns: answer, q"),
        ([{"question": "a", "x": "1"}], {}, "no column holds the answer"),
        (
            [{"question": "a", "answr": "1"}],
            {"columns": {"answer": "answer"}},
            "no column 'answer' for `answer`. Did you mean 'answr'",
        ),
    ],
)
def test_sets_that_give_no_problem(tmp_path, rows, config, message):
    with pytest.raises(DataError, match=message):
        load("file", path=write_jsonl(tmp_path / "a.jsonl", rows), **config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"source": "gsm9k"}, "Did you mean 'gsm8k'"),
        ({"source": "file", "path": ""}, "path is missing: give a file or folder"),
        ({"source": "file"}, "path is missing: give a file or folder"),
        ({"source": "hub"}, "path is missing: give a Hub name"),
        ({"source": "gsm8k", "columns": {"qestion": "x"}}, "Did you mean 'question'"),
        ({"source": "gsm8k", "options": {"count": 3}}, "has no options"),
        ({"source": "arithmetic", "options": {"cuont": 3}}, "Did you mean count=3"),
        ({"source": "arithmetic", "path": "mine.jsonl"}, "data.path: .* reads no file.* file"),
        ({"source": "calculation", "options": {"cuont": 3}}, "Did you mean count=3"),
        (
            {"source": "calculation", "path": "mine.jsonl"},
            "data.path: calculation .* no file",
        ),
        ({"source": "stories", "options": {"cuont": 3}}, "Did you mean count=3"),
        ({"source": "stories", "path": "mine.jsonl"}, "data.path: stories .* reads no file"),
    ],
)
def test_settings_that_cannot_be_right(config, message):
    with pytest.raises(ConfigError, match=message):
        load_problems(SourceConfig(**config), seed=0)


@pytest.mark.parametrize("source", GENERATED)
def test_generated_problems_through_the_same_door(source):
    problem_set = load(source, split="validation", options={"count": 30}, offset=10, limit=5)
    assert [p.id for p in problem_set.problems] == [
        f"{source}/validation/{i}" for i in range(10, 15)
    ]
    other_seed = load_problems(SourceConfig(source=source), seed=1)
    assert other_seed.fingerprint != load(source).fingerprint


def test_a_hub_name_goes_through_datasets(monkeypatch):
    import datasets

    asked = []

    def load_dataset(name, subset, *, split, streaming):
        asked.append((name, subset, split))
        answer = "#### 1" if name == "openai/gsm8k" else "1"
        return [{"question": "a", "answer": answer}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load("gsm8k", split="test").problems[0].id == "gsm8k/test/0"
    (problem,) = load("hub", path="someone/school", subset="easy", columns={}).problems
    assert problem.source == "school"
    assert asked == [("openai/gsm8k", "main", "test"), ("someone/school", "easy", "train")]


def test_every_source_names_fields_that_exist():
    for name, source in SOURCES.items():
        assert source.description
        assert source.splits, name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "path", "rows", "solutions", "answer"),
    [
        ("gsm8k", "gsm8k", 7473, True, "72"),
        ("math", "math", 7500, False, "16"),
        ("svamp", "svamp.jsonl", 1000, False, "145"),
        ("file", "aime24.jsonl", 30, True, "204"),
        ("file", "amc23.jsonl", 40, False, "27"),
    ],
)
def test_real_sets(shared_data, source, path, rows, solutions, answer):
    split = "train" if source == "math" else None
    problem_set = load(source, path=str(shared_data / path), split=split, limit=400)
    rows = min(rows, 400)
    assert len(problem_set) + len(problem_set.quarantined) == rows
    assert len(problem_set.quarantined) <= 0.01 * problem_set.rows_read
    first = problem_set.problems[0]
    assert first.answer == answer
    assert (first.solution is not None) == solutions
    assert all("<<" not in (p.solution or "") for p in problem_set.problems)
    if source == "math":
        assert (first.subject, first.level) == ("Prealgebra", "Level 2")
    if source == "svamp":
        assert first.question.endswith("groups. How big is each group of bananas?")


def test_a_split_that_the_local_copy_lacks(shared_data):
    with pytest.raises(DataError, match=r"no split 'test'.*sft, train, validation"):
        load("math", path=str(shared_data / "math"), split="test")


def test_a_solution_without_a_box_is_quarantined(tmp_path):
    rows = [{"problem": "p", "solution": "s"}, {"problem": "p", "solution": r"\boxed{1"}]
    with pytest.raises(DataError, match="no answer, and in the solution"):
        load("math", path=write_jsonl(tmp_path / "test.jsonl", rows))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "path", "split", "unusable"),
    [
        ("gsm8k", "gsm8k", "train", 0),
        ("gsm8k", "gsm8k", "test", 0),
        ("svamp", "svamp.jsonl", None, 0),
        ("math", "math", "train", 8),
        ("math", "math", "validation", 8),
    ],
)
def test_whole_sets_are_nearly_all_usable(shared_data, source, path, split, unusable):
    problem_set = load(source, path=str(shared_data / path), split=split)
    assert len(problem_set.quarantined) <= unusable, problem_set.quarantined


GOOD = [{"question": f"{n}+1?", "answer": str(n + 1)} for n in range(40)]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"question": "no end', "line 4 is not JSON: Invalid control"),
        ("[" * 100_000, "line 4 is not JSON: it is nested too deeply"),
        (
            '{"question": "q", "answer": ' + "9" * 5000 + "}",
            "line 4 is not JSON: Exceeds the limit",
        ),
        ("[1, 2]", "line 4 is a list, not an object"),
        (r'{"question": "\ud83d?", "answer": "1"}', r"'question' holds '\\ud83d', half of a char"),
        (r'{"question": "q", "answer": "\udc00"}', r"'answer' holds '\\udc00', half of a char"),
        ('{"question": "q", "answer": NaN}', "the answer is empty"),
        ('{"question": "q", "answer": Infinity}', "the answer is empty"),
        ('{"question": "q", "answer": "nan"}', "the answer is empty"),
        ('{"question": NaN, "answer": 1}', "the question is empty"),
        ('{"question": "q", "answer": true}', "'answer' holds a bool"),
        ('{"question": "q", "answer": {"a": 1}}', "'answer' holds a dict"),
    ],
)
def test_one_bad_row_is_set_aside_and_listed(tmp_path, line, reason):
    """R3, R5: whatever it holds; the rows beside it are read."""
    lines = [json.dumps(row) for row in GOOD]
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join([*lines[:3], line, *lines[3:]]) + "\n")
    problem_set = load("file", path=str(path))
    assert len(problem_set) == len(GOOD)
    (row,) = problem_set.quarantined
    assert row.row == 3
    assert re.search(reason, row.reason), row.reason


def test_a_file_without_a_readable_row_is_one_paragraph(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text("<html>\n</html>\n")
    with pytest.raises(DataError, match="none of the first 2 rows can be read: line 1 is not JSON"):
        load("file", path=str(path))


def test_what_pandas_writes_for_nothing_is_nothing(tmp_path):
    row = {"question": "q", "answer": 7.0, "level": float("nan"), "subject": "nan"}
    (problem,) = load("file", path=write_jsonl(tmp_path / "a.jsonl", [row])).problems
    assert (problem.answer, problem.level, problem.subject) == ("7", None, None)
