"""From names to functions: built-ins, files, modules, and helpful refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from grouper.config.schema import RewardConfig
from grouper.errors import RewardError
from grouper.rewards import REWARDS, build_rewards
from grouper.types import AnswerContract, AnswerFormat, AnswerKind

LAYOUT = AnswerFormat(
    name="t",
    template="{reasoning}{answer}",
    contract=AnswerContract(kind=AnswerKind.TAG, open="<a>", close="</a>"),
    tags=("<t>", "</t>", "<a>", "</a>"),
)
FILE = """
def brevity(prompts, completions, scale=1.0, **kwargs):
    return [scale / (1 + len(c)) for c in completions]

def closed(completions):
    return [0.0 for _ in completions]
"""


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(FILE)
    return file


def build(*configs: RewardConfig) -> object:
    return build_rewards(configs, LAYOUT)


def test_built_in_names() -> None:
    assert set(REWARDS) >= {"correctness", "format", "soft_format", "tag_count", "boxed_format"}


def test_unknown_name_is_told_the_nearest() -> None:
    with pytest.raises(RewardError, match="Did you mean 'correctness'"):
        build(RewardConfig(name="corectness"))


def test_all_problems_at_once() -> None:
    with pytest.raises(RewardError) as caught:
        build(RewardConfig(name="nope"), RewardConfig(name="missing.py:f"))
    assert "'nope'" in str(caught.value)
    assert "missing.py" in str(caught.value)


def test_unknown_parameter_lists_the_valid_ones() -> None:
    with pytest.raises(RewardError, match=r"no parameter 'vlaue'. Its parameters: value."):
        build(RewardConfig(name="correctness", params={"vlaue": 2.0}))


def test_parameters_reach_the_function() -> None:
    function = REWARDS["format"](LAYOUT, value=0.5)
    assert function(prompts=["q"], completions=["<t>x</t><a>4</a>"]) == [0.5]


def test_file_and_its_parameters(user_file: Path) -> None:
    stack = build_rewards(
        [RewardConfig(name=f"{user_file}:brevity", params={"scale": 2.0})], LAYOUT
    )
    assert stack.names == ("brevity",)
    stack.check()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("{file}:brevty", "Did you mean 'brevity'"),
        ("{file}:closed", r"takes no \*\*kwargs"),
        ("{folder}/none.py:f", "there is no file"),
        ("no_such_module_here:f", "cannot be imported"),
        ("math:nothing", "has no function 'nothing'"),
    ],
)
def test_refusals(user_file: Path, name: str, message: str) -> None:
    name = name.format(file=user_file, folder=user_file.parent)
    with pytest.raises(RewardError, match=message):
        build(RewardConfig(name=name))


@pytest.mark.parametrize("raised", ["RuntimeError('boom')", "SystemExit('boom')"])
def test_a_broken_module_is_told_as_such(
    raised: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_rewards.py").write_text(f"raise {raised}\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("broken_rewards", f"{tmp_path}/broken_rewards.py"):
        with pytest.raises(RewardError, match=r"cannot be (imported|loaded): \w+: boom"):
            build(RewardConfig(name=f"{name}:f"))


@pytest.mark.parametrize("name", [":f", "..rewards:f", "a..b:f"])
def test_no_name_of_a_module_is_a_traceback(name: str) -> None:
    with pytest.raises(RewardError, match="cannot be imported"):
        build(RewardConfig(name=name))


def test_a_function_without_a_signature_is_refused() -> None:
    with pytest.raises(RewardError, match=r"'builtins:dir'.*\*\*kwargs"):
        build(RewardConfig(name="builtins:dir"))


def test_a_broken_file_is_told_as_such(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise RuntimeError('boom')\n")
    with pytest.raises(RewardError, match="cannot be loaded: RuntimeError: boom"):
        build(RewardConfig(name=f"{tmp_path}/broken.py:f"))


def test_tag_rewards_need_tags() -> None:
    plain = AnswerFormat(
        name="t",
        template="{reasoning}{answer}",
        contract=AnswerContract(kind=AnswerKind.BOXED),
        tags=None,
    )
    for name in ("format", "soft_format", "tag_count"):
        with pytest.raises(RewardError, match="needs a prompt format with tags"):
            build_rewards([RewardConfig(name=name)], plain)
    build_rewards([RewardConfig(name="boxed_format")], plain).check()
