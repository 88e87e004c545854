"""`grouper grade` and `grade-agreement`: every stage is shown, and mistakes are told."""

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
    assert line(called.out, "lenient") == r"0.5  (as asked: last \boxed{})"
    assert re.fullmatch(
        r"correct  rung number, \d+\.\d\d ms: equal numbers", line(called.out, "verdict")
    )


def test_format_and_maths_are_told_apart(grouper):
    called = grouper(
        "grade", "The answer is 18. Check: 18/2 = 9", "--answer", "18", "--format", "xml"
    )
    assert line(called.out, "strict") == "none  (no <answer>)"
    assert line(called.out, "verdict").startswith("no_answer  rung extract")
    assert line(called.out, "lenient") == '18  (not as asked: "the answer is")'
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


def test_a_reference_nobody_can_read_is_said(grouper):
    called = grouper("grade", r"\boxed{4}", "--answer", r"\frac{1")
    assert "unbalanced braces" in line(called.out, "reference")
    assert line(called.out, "verdict").startswith("not_scored")


def test_an_unknown_format_names_the_nearest(grouper):
    grouper("grade", "x", "--answer", "4", "--format", "boxd").refused("Did you mean 'boxed'?")


def test_agreement_lists_where_they_differ(grouper, tmp_path):
    rows = [
        {"response": r"\boxed{42}", "ground_truth": "42"},
        {"response": r"\boxed{\frac{1}{2^{99}}}", "ground_truth": r"\frac{1}{2^{98}}"},
        {"response": "nothing", "ground_truth": "1"},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    called = grouper("grade-agreement", file)
    assert called.code == 0, called.err
    assert "2 answers compared, by format boxed; 1 had no answer" in called.out
    assert "1 disagreements, on 1 different pairs" in called.out
    assert r"\frac{1}{2^{99}}  against  \frac{1}{2^{98}}" in called.out
    grouper("grade-agreement", file, "--text", "txt").refused("no column txt", "ground_truth")


def test_agreement_reads_numbers_and_says_when_there_is_no_answer(grouper, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "#### 0", "answer": 0}\n{"text": "#### 5", "answer": 0}\n')
    called = grouper("grade-agreement", file)
    assert "2 answers compared, by format hashes" in called.out
    assert "1  ours correct, Math-Verify correct" in called.out
    called = grouper("grade-agreement", file, "--format", "boxed")
    assert "0 answers compared" in called.out
    assert "with --format" in called.out


def test_agreement_reads_stored_rollouts(grouper, finished_run):
    (file, *_) = sorted((finished_run / "rollouts").glob("*.gz"))
    called = grouper("grade-agreement", file, "--format", "compact")
    assert called.code == 0, called.err
    assert "0 disagreements" in called.out
