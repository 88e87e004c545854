"""`grouper rewards`: list, show, try and probe."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from grouper.config.overrides import STACKS
from grouper.config.schema import stack
from grouper.rewards import REWARDS

GOOD = "<reasoning>a</reasoning><answer>{}</answer>"


def test_list_names_every_reward_and_stack(grouper) -> None:
    called = grouper("rewards", "list")
    assert called.code == 0
    for name in (*REWARDS, *(f"stack:{name}" for name in STACKS)):
        assert f" {name} " in called.out


@pytest.mark.parametrize("name", REWARDS)
def test_show_every_reward(grouper, name: str) -> None:
    called = grouper("rewards", "show", name)
    assert called.code == 0
    assert called.out.startswith(f"{name}: ")
    assert "Range" in called.out


def test_show_lists_parameters(grouper) -> None:
    out = grouper("rewards", "show", "soft_overlong").out
    assert re.search(r"max_tokens +\(Positive, required\)", out)
    assert "(Variant, default default)" in grouper("rewards", "show", "dapo_answer").out
    assert "(Variant, default default)" in grouper("rewards", "show", "r1_zero_format").out


@pytest.mark.parametrize("name", STACKS)
def test_show_a_stack_as_entries_to_copy(grouper, name: str) -> None:
    for spelling in (name, f"stack:{name}"):
        called = grouper("rewards", "show", spelling)
        assert called.code == 0
        entries = yaml.safe_load(called.out)["rewards"]
        assert [entry["name"] for entry in entries] == [r.name for r in stack(name)]
        assert [entry.get("weight", 1.0) for entry in entries] == [r.weight for r in stack(name)]
        for probe in STACKS[name].fails:
            assert probe in called.out


def test_try_shows_extraction_verdict_components_and_total(grouper) -> None:
    called = grouper("rewards", "try", "demo", GOOD.format(42), "--answer", "42.0")
    assert called.code == 0
    lines = called.out.splitlines()
    assert "answer      42" in lines
    assert any(line.startswith("verdict     correct by number") for line in lines)
    assert "reward      format = 1, weight 0.1" in lines
    assert "total       1.2" in lines


def test_try_a_wrong_an_empty_and_an_overridden_one(grouper) -> None:
    assert (
        "total       0.2"
        in grouper("rewards", "try", "demo", GOOD.format(41), "--answer", "42").out
    )
    empty = grouper("rewards", "try", "demo", "", "--answer", "42").out
    assert "answer      (none)" in empty
    assert "no_answer by extract: no <answer>" in empty
    weighted = grouper(
        "rewards", "try", "demo", GOOD.format(42), "rewards.0.weight=2", "--answer", "42"
    )
    assert "total       2.2" in weighted.out


def test_try_a_stack_and_line_breaks(grouper) -> None:
    text = "<reasoning>\na\nb\n</reasoning>\n<answer>\n42\n</answer>"
    called = grouper("rewards", "try", "stack:gsm8k-xml", text, "--answer", "42")
    assert "total       4" in called.out


@pytest.mark.slow
def test_probe_passes_our_own_and_fails_a_compatibility_stack(grouper) -> None:
    ours = grouper("rewards", "probe", "demo")
    assert ours.code == 0, ours.err
    assert "No attack pays: all 13 probes passed." in ours.out
    theirs = grouper("rewards", "probe", "stack:openmath-dapo", "--texts")
    assert theirs.code == 1
    assert "Cheating is rewarded in 4 of 13 probes." in theirs.out
    assert "--- answer_list: earned 5.500" in theirs.out
    for name in STACKS["openmath-dapo"].fails:
        assert any(name in line and "FAIL" in line for line in theirs.out.splitlines())


def test_probe_attacks_a_users_function(grouper, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from grouper import reward\n\n\n"
        "@reward(0, 1)\n"
        "def contains(done):\n"
        "    return float(done.reference in done.text)\n"
    )
    called = grouper("rewards", "probe", "demo", f"rewards=[{{name: '{file}:contains'}}]")
    assert called.code == 1
    assert "answer_list" in called.out


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (("show", "xml_tagcount"), ("Did you mean 'xml_tag_count'",)),
        (("probe", "stack:gsm8k-xlm"), ("Did you mean 'gsm8k-xml'",)),
        (("probe", "dmeo"), ("Did you mean 'demo'",)),
        (("probe", "stack:default", "seed=1"), ("no settings to override",)),
        (("try", "demo", "x", "rewards.0.name=nope", "--answer", "4"), ("no reward 'nope'",)),
    ],
)
def test_refusals(grouper, arguments: tuple[str, ...], texts: tuple[str, ...]) -> None:
    grouper("rewards", *arguments).refused(*texts)


def test_an_empty_reference_is_refused(grouper) -> None:
    called = grouper("rewards", "try", "demo", "x", "--answer", " ")
    assert called.code == 2
    assert called.err.endswith("Error: --answer is empty.\n")


def test_a_function_that_fails_on_the_text_is_told(grouper, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def breaks(completions, level, **kwargs):\n    return [0.0]\n")
    grouper(
        "rewards", "try", "demo", "x", f"rewards=[{{name: '{file}:breaks'}}]", "--answer", "4"
    ).refused("raised TypeError", "It was given the columns answer, ")


FLAKY = """
def flaky(completions, question, **kwargs):
    # Groups of a run have eight completions; the check before it has three.
    if len(completions) == 8 and len(question[0]) % 2:
        raise RuntimeError("an odd question")
    return [0.5] * len(completions)
"""


@pytest.mark.slow
def test_a_failing_function_is_reported_by_the_run_or_stops_it(
    grouper, small: tuple[str, ...], tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(FLAKY)

    def run(name: str, rate: float):
        entry = f"{{name: '{file}:flaky', max_failure_rate: {rate}}}"
        rewards = f"rewards=[{{name: correctness}}, {entry}]"
        asked = ("run", "demo", *small, rewards, f"output_dir={tmp_path}", f"name={name}", "-q")
        return grouper(*asked)

    tolerant = run("tolerant", 1.0)
    assert tolerant.code == 0, tolerant.err
    lines = (tmp_path / "tolerant" / "metrics.jsonl").read_text().splitlines()
    steps = [line for line in map(json.loads, lines) if line["phase"] == "grpo"]
    events = [event for step in steps for event in step["events"]]
    failed = [event for event in events if event.startswith("rewards/failed on arithmetic/train/")]
    assert failed
    assert "raised RuntimeError: an odd question" in failed[0]
    assert "rewards/failed" in json.dumps(steps[0])
    run("strict", 0.0).refused("an odd question", "It fails on this group", "max_failure_rate, 0,")


def test_a_latex_command_is_no_line_break(grouper) -> None:
    """U17: `\\n` of a text stays what it is; real line breaks come from standard input, too."""
    text = "<reasoning>\nx\\neq 3\n</reasoning>\n<answer>$x\\neq 3$</answer>"
    for typed, stdin in ((text, ""), ("-", text)):
        called = grouper("rewards", "try", "demo", typed, "--answer", r"x\neq 3", stdin=stdin)
        assert called.code == 0
        assert r"answer      $x\neq 3$" in called.out
