"""`grouper grade` of a text or a file: every stage is shown, and mistakes are told."""

from __future__ import annotations

import json
import re


def line(out: str, label: str) -> str:
    found = re.search(rf"^{label} +(.*)$", out, re.MULTILINE)
    assert found, out
    return found[1]


def test_every_stage_is_shown(grouper):
    called = grouper("grade", r"so \boxed{0.5}", "--answer", r"\frac12")
    assert called.code == 0, called.err
    assert line(called.out, "format").startswith("boxed  (by the look of the text")
    assert line(called.out, "reference") == r"\frac12  (readable, equals itself)"
    assert line(called.out, "strict") == r"0.5  (last \boxed{})"
    assert line(called.out, "lenient") == r"0.5  (in the format: last \boxed{})"
    assert re.fullmatch(
        r"correct  stage number, \d+\.\d\d ms: equal numbers", line(called.out, "verdict")
    )


def test_format_and_math_are_told_apart(grouper):
    called = grouper(
        "grade", "The answer is 18. Check: 18/2 = 9", "--answer", "18", "--format", "xml"
    )
    assert line(called.out, "strict") == "none  (no <answer>)"
    assert line(called.out, "verdict").startswith("no_answer  stage extract")
    assert line(called.out, "lenient") == '18  (not in the format: "the answer is")'
    assert line(called.out, "leniently").startswith("correct")


def test_formats_by_the_look_of_the_text(grouper):
    for text, name in [
        ("<answer>4</answer>", "xml"),
        ("<think>x</think> <answer>4</answer>", "think"),
        ("<SOLUTION>4</SOLUTION>", "tags"),
        ("#### 4", "hashes"),
        (r"#### \boxed{4}", "boxed"),
    ]:
        called = grouper("grade", text, "--answer", "4")
        assert line(called.out, "format").split()[0] == name
        assert line(called.out, "verdict").startswith("correct"), called.out


def test_text_from_standard_input_with_control_characters(grouper):
    called = grouper("grade", "-", "--answer", "4", stdin="\\boxed{4\x1b[31m}")
    assert called.code == 0
    assert "\x1b" not in line(called.out, "strict")
    assert r"\x1b" in line(called.out, "strict")


def test_nothing_is_a_text_and_not_the_folder_it_is_called_in(grouper):
    called = grouper("grade", "", "--answer", "4")
    assert called.code == 0, called.err
    assert line(called.out, "verdict").startswith("no_answer")


def test_a_reference_nobody_can_read_is_said(grouper):
    called = grouper("grade", r"\boxed{4}", "--answer", r"\frac{1")
    assert "unbalanced braces" in line(called.out, "reference")
    assert line(called.out, "verdict").startswith("not_scored")


def test_an_unknown_format_names_the_nearest(grouper):
    grouper("grade", "x", "--answer", "4", "--format", "boxd").refused("Did you mean 'boxed'?")


def test_a_text_without_a_reference_is_neither_a_file_nor_a_run(grouper, tmp_path):
    grouper("grade", "so 4").refused("'so 4' is not a file or a run folder", "--answer")
    called = grouper("grade", "x" * 5000, "--answer", "4")
    assert line(called.out, "verdict").startswith("no_answer")


def test_settings_of_the_grader(grouper):
    pair = (r"\boxed{2\sqrt{3}}", "--answer", r"\sqrt{12}")
    assert line(grouper("grade", *pair).out, "verdict").startswith("correct")
    without = grouper("grade", *pair, "grading.symbolic=false").out
    assert not line(without, "verdict").startswith("correct")


def test_a_file_is_graded_row_by_row(grouper, tmp_path):
    rows = [
        {"response": r"\boxed{42}", "ground_truth": "42"},
        {"response": r"\boxed{7}", "ground_truth": 8},
        {"response": "nothing", "ground_truth": "1"},
    ]
    file, output = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    called = grouper("grade", file, "--output", output)
    assert called.code == 0, called.err
    assert ", by format boxed: 3 rows, 1 correct, 2 not" in called.out
    assert "now    incorrect: 7 (" in called.out
    listed = [json.loads(text) for text in output.read_text().splitlines()]
    assert [(row["problem_id"], row["answer"]) for row in listed] == [(1, "8"), (2, "1")]
    grouper("grade", file, "--text", "txt").refused("no column txt", "ground_truth")
    grouper("grade", file, "--output", output).refused("exists already")
    assert "3 rows, 0 correct" in grouper("grade", file, "--format", "hashes").out
    named = grouper("grade", file, "--text", "response", "--answer", "ground_truth", "--show", "0")
    assert "reference" not in named.out
    file.write_text("")
    grouper("grade", file).refused("there are no rows")


def test_a_stored_file_of_a_run_is_graded_again(grouper, finished_run):
    (file, *_) = sorted((finished_run / "rollouts").glob("*.gz"))
    called = grouper("grade", file, "--format", "compact")
    assert called.code == 0, called.err
    assert "correct before, 0 now; 0 differ" in called.out
