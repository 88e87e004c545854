"""A few answers of a tiny model, and what it is by its files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from grouper.advice import first_answers
from grouper.advice.first_answers import ask, look_at_model, stored_bytes
from grouper.config.loading import load_recipe
from grouper.training.prepare import make_base
from grouper.training.problem_sets import load_problem_sets

pytestmark = pytest.mark.slow  # 10 s together


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    recipe = load_recipe("demo", ["data.train.options.count=40", "data.sft.options.count=40"])
    make_base(recipe, load_problem_sets(recipe), folder)
    return folder


@pytest.fixture(scope="module")
def problems():
    recipe = load_recipe("demo", ["data.train.options.count=40"])
    return load_problem_sets(recipe, ["train"]).train


def test_each_format_is_asked_until_one_is_known(
    model: Path, problems, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, int, int]] = []
    answers = ask(
        str(model), problems, ["boxed", "xml"], seconds=60, progress=lambda *done: seen.append(done)
    )
    assert [one.observation.format for one in answers] == ["boxed", "xml"]
    for one in answers:
        observation = one.observation
        assert observation.answers == first_answers.PROBLEMS == len(one.examples)
        # A random model has no format, and is never right.
        assert (observation.held, observation.right) == (0, 0)
        assert 0 < observation.tokens <= first_answers.TOKENS
    assert seen[-1] == ("xml", first_answers.PROBLEMS, first_answers.PROBLEMS)
    # The answers are addressed: the same every time.
    again = ask(str(model), problems, ["boxed"], seconds=60)
    assert again[0] == answers[0]
    monkeypatch.setattr(first_answers, "format_holds", lambda *_: True)
    (only,) = ask(str(model), problems, ["boxed", "xml"], seconds=60)
    assert only.observation.is_known


def test_a_slow_machine_asks_nothing(
    model: Path, problems, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_answers, "FEWEST_TOKENS", 10**9)
    assert ask(str(model), problems, ["boxed", "xml"], seconds=60) == []


def test_what_a_model_is_by_its_files(model: Path, tmp_path: Path) -> None:
    plain = look_at_model(str(model))
    # Two bytes a parameter are assumed, and the tiny one is in float32.
    assert plain.parameters == stored_bytes(str(model)) // 2
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    (copy / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"
    )
    kind = look_at_model(str(copy))
    assert (kind.kind, kind.plain) == ("instruct", False)
    (copy / "chat_template.jinja").unlink()
    settings = json.loads((copy / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (copy / "tokenizer_config.json").write_text(json.dumps(settings))
    kind = look_at_model(str(copy))
    assert (kind.kind, kind.plain) == ("base", True)
    (copy / "model.safetensors").unlink()
    assert stored_bytes(str(copy)) is None
    assert look_at_model(str(copy)).parameters is None
