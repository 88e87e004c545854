"""From reward names to functions: built-ins by table, users' by file or import name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from types import MappingProxyType
from typing import Any

from grouper.config.credentials import expanded
from grouper.config.schema import RewardConfig
from grouper.errors import RewardError, did_you_mean
from grouper.rewards.base import RewardBuilder, RewardFunction
from grouper.rewards.calling import one_by_one
from grouper.rewards.correctness import CORRECTNESS
from grouper.rewards.format import FORMAT
from grouper.rewards.gsm8k_lite import GSM8K_LITE
from grouper.rewards.gsm8k_xml import GSM8K_XML
from grouper.rewards.length import LENGTH
from grouper.rewards.openmath_dapo import OPENMATH_DAPO
from grouper.rewards.r1_zero import R1_ZERO
from grouper.rewards.style import STYLE
from grouper.rewards.user_code import load_user_object
from grouper.types import AnswerFormat

REWARDS: dict[str, RewardBuilder] = {
    **CORRECTNESS,
    **FORMAT,
    **LENGTH,
    **STYLE,
    **GSM8K_XML,
    **R1_ZERO,
    **GSM8K_LITE,
    **OPENMATH_DAPO,
}
"""Built-in rewards by name; a builder's keyword parameters are the recipe's `params`."""


def reward_label(name: str) -> str:
    """The short name under which a reward is recorded.

    >>> reward_label("rewards/mine.py:brevity"), reward_label("format")
    ('brevity', 'format')
    """
    return name.rpartition(":")[2]


def find_reward(config: RewardConfig, layout: AnswerFormat) -> RewardFunction:
    """The function a recipe names, with its parameters set.

    Raises:
        RewardError: no such name, file, module or function, or a parameter it does not have or that
            refers to a variable of the environment which is not set.
    """
    params = expanded(config.params, where=f"rewards.{config.name}.params", error=RewardError)
    config = config.model_copy(update={"params": params})
    if ":" in config.name:
        return _users_function(config)
    if config.name not in REWARDS:
        raise RewardError(
            f"there is no reward {config.name!r}",
            where="rewards",
            fix=did_you_mean(config.name, REWARDS)
            + " Your own function is named `path/to/file.py:function`.",
        )
    builder = REWARDS[config.name]
    valid = [p for p in inspect.signature(builder).parameters if p != "layout"]
    _check_params(config, valid)
    return builder(layout, **config.params)


def _check_params(config: RewardConfig, valid: list[str]) -> None:
    for name in config.params:
        if name not in valid:
            known = f"Its parameters: {', '.join(valid)}." if valid else "It has no parameters."
            near = did_you_mean(name, valid)
            raise RewardError(
                f"the reward {config.name!r} has no parameter {name!r}",
                where=f"rewards.{config.name}.params",
                fix=f"{known} {near}" if near.startswith("Did") else known,
            )


def _users_function(config: RewardConfig) -> RewardFunction:
    """A user's function; parameters are passed to it as further keywords.

    One that names `completion` and not `completions` is called once a completion.
    """
    function: Callable[..., Any] = load_user_object(
        config.name, kind="reward", where="rewards", error=RewardError
    )
    named = _checked_parameters(function, config)
    single = "completion" in named and "completions" not in named
    if config.params:
        function = _with_params(function, config.params)
    return one_by_one(function) if single else function


def _with_params(function: Callable[..., Any], params: Mapping[str, Any]) -> Callable[..., Any]:
    """The function with its parameters set, which win over a column of the same name."""

    @wraps(function)  # the function's own attributes come along: `bounds` is one
    def given(**columns: Any) -> Any:
        moved = {f"source_{name}": columns[name] for name in params if name in columns}
        return function(**{**moved, **columns, **params})

    return given


def _checked_parameters(
    function: Callable[..., Any], config: RewardConfig
) -> Mapping[str, inspect.Parameter]:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some functions written in C have no signature
        parameters = MappingProxyType({})
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return parameters
    raise RewardError(
        f"the reward function {config.name!r} takes no **kwargs",
        where="rewards",
        fix="Every column of the data is passed by name: declare those you use and add **kwargs, "
        "as in `def f(prompts, completions, answer, **kwargs)`.",
    )
