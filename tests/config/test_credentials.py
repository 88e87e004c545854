"""Secrets are refused in plain text, read from the environment, and written nowhere (R7)."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from grouper import errors
from grouper.config.credentials import expanded, refuse_literal_secrets
from grouper.config.loading import load_recipe, resolved_yaml
from grouper.errors import ConfigError, RewardError, redact
from grouper.grading.pool import _environment
from grouper.prompts import make_format
from grouper.rewards import build_rewards
from grouper.runs.progress import end_logging, setup_logging
from grouper.runs.trackers import check_trackers, find_trackers

SECRET = "sk-live-0123456789"
HEX = "0123456789abcdef" * 2 + "01234567"
VALUES = (
    "hf_" + "aB3" * 11,
    "ghp_" + "aB3" * 12,
    "github_pat_" + "aB3_" * 12,
    "glpat-" + "aB3-" * 5,
    "sk-proj-" + "aB3" * 12,
    "xoxb-" + "123-" * 6,
    "AKIA" + "ABCD" * 4,
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abcdefghijkl",
    "https://me:hunter2@host.example/v1",
)


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "_SECRETS", {})


@pytest.mark.parametrize(
    ("params", "key", "variable"),
    [
        ({"token": SECRET}, "token", "TOKEN"),
        ({"API_KEY": SECRET}, "API_KEY", "API_KEY"),
        ({"apiKey": SECRET}, "apiKey", "API_KEY"),
        ({"x-api-key": SECRET}, "x-api-key", "X_API_KEY"),
        (
            {"judge": {"headers": {"Authorization": f"Bearer {SECRET}"}}},
            "judge.headers.Authorization",
            "AUTHORIZATION",
        ),
        ({"passwords": "", "password": [SECRET]}, "password", "PASSWORD"),
        ({"password": ("", SECRET)}, "password", "PASSWORD"),
        ({"client_secret": {"value": SECRET}}, "client_secret.value", "VALUE"),
        ({1: {"token": SECRET}}, "1.token", "TOKEN"),
        ({"hf_token": SECRET}, "hf_token", "HF_TOKEN"),
        ({"auth": SECRET}, "auth", "AUTH"),
        ({"bearer": SECRET}, "bearer", "BEARER"),
        ({"db_pwd": SECRET}, "db_pwd", "DB_PWD"),
        ({"github-pat": SECRET}, "github-pat", "GITHUB_PAT"),
        ({"headers": {"Cookie": SECRET}}, "headers.Cookie", "COOKIE"),
        *(({"judge": value}, "judge", "JUDGE") for value in VALUES),
        ({"wandb": {"login": HEX}}, "wandb.login", "LOGIN"),
    ],
)
def test_a_secret_in_plain_text_is_refused_and_not_repeated(
    params: dict[str, Any], key: str, variable: str
) -> None:
    with pytest.raises(ValueError, match="looks like a secret") as caught:
        refuse_literal_secrets(params)
    told = str(caught.value)
    assert told.startswith(f"{key} looks like a secret, and recipes are shared: ")
    assert told.endswith(f"write ${{{variable}}} instead and set {variable} in the environment")
    assert not any(secret in told for secret in (SECRET, HEX, *VALUES))


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize(
    "override",
    [
        "note=%s",
        "sampling={engine: vllm, vllm: {mode: server, servers: ['%s']}}",
        "data.train.options={mirror: '%s'}",
        "hooks=['%s']",
        "push_to=%s",
    ],
)
def test_a_secret_that_can_be_recognized_is_stored_under_no_name(override: str, value: str) -> None:
    if "servers" in override and not value.startswith("https"):
        value = f"http://host/{value}"
    with pytest.raises(ConfigError) as caught:
        load_recipe("demo", [override % value])
    assert "looks like a secret" in str(caught.value)
    assert value not in str(caught.value)


@pytest.mark.parametrize(
    "params",
    [
        {"pattern": "x", "author": "y", "path": "z", "keyword": "hf_model", "revision": HEX},
        {
            "base_url": "https://host:8080/v1",
            "user": "https://me@host",
            "why": "risk-averse-prompt-x",
        },
        {"base_url": "https://me:${JUDGE_PASSWORD}@host/v1"},
        {"tokenizer": "gpt2", "max_tokens": 12, "monkey": "x", "keyword": "y"},
        {"token": "${JUDGE_TOKEN}", "headers": {"authorization": "Bearer ${JUDGE_TOKEN}"}},
        {"key": "", "secret": None, "max_token": 12},
    ],
)
def test_what_is_none_is_left_alone(params: dict[str, Any]) -> None:
    assert refuse_literal_secrets(params) == params


@pytest.mark.parametrize(
    "override",
    [
        "rewards=[{name: 'mine.py:f', params: {judge: {api_key: %s}}}]",
        "tracking.trackers=[{name: wandb, params: {settings: {api_key: %s}}}]",
    ],
)
def test_a_recipe_with_one_is_refused_in_one_paragraph(override: str) -> None:
    with pytest.raises(ConfigError, match="looks like a secret") as caught:
        load_recipe("demo", [override % SECRET])
    assert SECRET not in str(caught.value)


def test_a_reference_is_stored_as_it_is_and_filled_in_where_a_function_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def f(completions, token, **_):\n    return [float(len(token))] * len(completions)\n"
        "def tell(record, token):\n    return token\n"
    )
    recipe = load_recipe(
        "demo",
        [
            f"rewards=[{{name: '{file}:f', params: {{token: '${{JUDGE_TOKEN}}'}}}}]",
            f"tracking.trackers=[{{name: '{file}:tell', params: {{token: '${{JUDGE_TOKEN}}'}}}}]",
        ],
    )
    layout = make_format(recipe.prompt)
    for where, build in (
        (r"rewards\..*:f\.params", lambda: build_rewards(recipe.rewards, layout)),
        (r"tracking\.trackers", lambda: check_trackers(recipe.tracking)),
    ):
        monkeypatch.delenv("JUDGE_TOKEN", raising=False)
        told = rf"^{where}: the environment has no variable JUDGE_TOKEN\. Set it \(export JUDGE_"
        with pytest.raises((RewardError, ConfigError), match=told):
            build()
        monkeypatch.setenv("JUDGE_TOKEN", SECRET)
        build()
    stack = build_rewards(recipe.rewards, layout)
    assert stack._functions["f"][1](completions=["a"]) == [len(SECRET)]
    (make_tracker,) = find_trackers(recipe, tmp_path, started="").values()
    assert make_tracker.keywords["params"] == {"token": SECRET}  # type: ignore[attr-defined]
    assert SECRET not in str(make_tracker.args[0].recipe)  # type: ignore[attr-defined]
    assert SECRET not in resolved_yaml(recipe)


def test_what_a_function_says_of_it_is_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_TOKEN", SECRET)
    expanded({"token": "${JUDGE_TOKEN}"}, where="", error=ConfigError)
    assert redact(f"401 for {SECRET}") == "401 for ${JUDGE_TOKEN}"
    error = RewardError(f"the reward raised: 401 for {SECRET}")
    assert SECRET not in f"{error}{error.what}"
    handlers = setup_logging(tmp_path)
    logging.getLogger("grouper.runs").warning("The tracker failed: %s", SECRET)
    end_logging(handlers)
    assert "failed: ${JUDGE_TOKEN}" in (tmp_path / "training.log").read_text()


def test_grading_workers_get_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    given = _environment()
    assert SECRET not in given.values()
    assert given["LC_ALL"] == "C.UTF-8"
    assert {"PATH", "PYTHONPATH"} <= given.keys()
