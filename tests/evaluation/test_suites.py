"""The suites and their protocols: what is asked, word for word, and what counts as right."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from gates import shared
from prompts.tokenizer_fixtures import qwen25

from grouper.config.loading import load_recipe
from grouper.config.schema import GradingConfig, SourceConfig
from grouper.data import load_problems
from grouper.data.loading import check_source
from grouper.errors import ConfigError
from grouper.evaluation.suites import SUITES, recipe_on, suite_named
from grouper.grading import Grader, extract, extract_lenient
from grouper.prompts import FORMATS
from grouper.prompts.rendering import render
from grouper.types import Problem, Verdict

HERE = Path(__file__).parent
RECORDED = [json.loads(row) for row in (HERE / "protocol_completions.jsonl").open()]
PROTOCOLS = ("gsm8k-5-shot", "minerva-4-shot")


@pytest.mark.parametrize("name", SUITES)
def test_every_suite_has_a_place_on_the_hub_and_formats_that_exist(name):
    suite = suite_named(name)
    check_source(suite.data, where=name)
    assert suite.card["path"].count("/") == 1
    assert suite.answer in ("number", "expression", "list")
    assert {*suite.prompts} <= FORMATS.keys()
    changed = recipe_on(load_recipe("demo"), suite, prompt=None, tokens=suite.tokens)
    assert changed.data.test == suite.data
    assert changed.evaluation.samples == suite.sampling.get("samples", 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "count", "levels"),
    [
        ("gsm8k=gsm8k", 1319, 0),
        ("math=math/validation.jsonl", 5000, 5),
        ("svamp=svamp.jsonl", 1000, 0),
        ("aime24=aime24.jsonl", 30, 0),
        ("amc23=amc23.jsonl", 40, 0),
        ("aime24.jsonl", 30, 0),
    ],
)
def test_local_copies_hold_what_the_field_counts(text, count, levels):
    name, equals, path = text.rpartition("=")
    suite = suite_named(f"{name}{equals}{shared(*path.split('/'))}")
    problems = load_problems(suite.data, seed=0, keep_unreadable=True)
    assert len(problems) == count
    assert problems.revision is None
    assert len({p.level for p in problems.problems} - {None}) == levels


def test_lists_of_answers_and_units_are_read(tmp_path):
    olympiad = tmp_path / "olympiad.jsonl"
    row = {"question": "Which n?", "final_answer": ["$6$"], "solution": ["so", "or so"], "id": 7}
    several = {**row, "final_answer": ["$1$", "$2$"], "id": 8, "subfield": "Algebra"}
    olympiad.write_text("".join(json.dumps(r) + "\n" for r in (row, several)))
    found = load_problems(suite_named(f"olympiad={olympiad}").data, seed=0, keep_unreadable=True)
    assert [(p.answer, p.subject) for p in found.problems] == [
        ("$6$", None),
        ("$1$, $2$", "Algebra"),
    ]
    asdiv = tmp_path / "asdiv.jsonl"
    row = {"body": "7 red and 2 green.", "question": "How many?", "answer": "9 (apples)"}
    asdiv.write_text(json.dumps({**row, "solution_type": "Addition"}) + "\n")
    (problem,) = load_problems(suite_named(f"asdiv={asdiv}").data, seed=0).problems
    assert (problem.question, problem.answer) == ("7 red and 2 green. How many?", "9 (apples)")
    assert problem.subject == "Addition"


def test_what_is_not_a_suite_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"no suite 'gsm8'.*gsm8k"):
        suite_named("gsm8")
    with pytest.raises(ConfigError, match=r"no prompt format 'boxd'.*boxed"):
        recipe_on(load_recipe("demo"), suite_named("gsm8k"), prompt="boxd", tokens=9)


def test_a_file_is_a_suite_of_its_name(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"question": "1+1?", "answer": "2"}\n')
    suite = suite_named(str(path))
    assert (suite.name, suite.data) == ("mine", SourceConfig(source="file", path=str(path)))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_protocols_ask_word_for_word(protocol):
    problem = Problem(id="a", question="What is 2+2?", answer="4", source="a")
    prompt = render(problem, FORMATS[protocol], qwen25().tokenizer)
    golden = HERE / f"{protocol}.txt"
    assert prompt.text == golden.read_text(encoding="utf-8")
    assert prompt.messages is None


def test_the_recorded_completions_are_two_hundred():
    assert [sum(row["protocol"] == name for row in RECORDED) for name in PROTOCOLS] == [100, 100]


def test_the_strict_and_the_flexible_score_are_those_of_the_protocols():
    wrong = []
    for protocol in PROTOCOLS:
        rows = [row for row in RECORDED if row["protocol"] == protocol]
        with Grader(FORMATS[protocol].contract, GradingConfig()) as grader:
            for row in rows:
                text, reference = row["completion"], row["reference"]
                found = {"strict": grader.submit(text, reference).result().correct}
                if "flexible" in row:
                    found["flexible"] = (
                        grader.submit(text, reference, lenient=True).result().correct
                    )
                wrong += [(row, key) for key in found if found[key] != row[key]]
    assert wrong == []


def test_what_is_extracted_is_what_the_protocols_extract():
    """Their rules, written down once more: first match, last match, end marker added."""
    for row in RECORDED:
        contract, text = FORMATS[row["protocol"]].contract, row["completion"]
        for stop in FORMATS[row["protocol"]].stop:
            text = text.split(stop)[0]
        if row["protocol"] == "gsm8k-5-shot":
            strict = re.findall(r"#### (\-?[0-9\.\,]+)", text)[:1]
            flexible = re.findall(r"(-?[$0-9.,]{2,})|(-?[0-9]+)", text)[-1:]
            last = next(filter(None, flexible[0]), None) if flexible else None
            assert extract_lenient(row["completion"], contract).answer == last
        else:
            end = "I hope it is correct."
            pattern = r"Final Answer: The final answer is(.*?). I hope it is correct."
            strict = [found.strip() for found in re.findall(pattern, text + end)[:1]]
        assert extract(row["completion"], contract).answer == (strict[0] if strict else None)


def test_a_protocol_never_rewards_what_it_cannot_read():
    with Grader(FORMATS["gsm8k-5-shot"].contract, GradingConfig()) as grader:
        assert grader.submit("no", "7").result().verdict is Verdict.NO_ANSWER
        assert grader.submit("no", "7", lenient=True).result().verdict is Verdict.NO_ANSWER
        assert grader.submit("#### 1,007.", "1007").result().correct
