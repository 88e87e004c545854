"""`grouper export`, `push`, `serve`, `chat` and `synthesize` as they are typed."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from types import SimpleNamespace

import pytest

from grouper.config.loading import load_recipe
from grouper.config.schema import LoraConfig, ModelConfig
from grouper.errors import VLLM
from grouper.models.folders import EXPORT_FILE
from grouper.models.loading import load_policy, load_tokenizer, save_policy
from grouper.sampling.vllm.sampler import write_shape


def test_an_exported_model_is_asked_without_its_run(grouper, exported):
    question = "Eva has 7 eggs and drops 3. How many?"
    called = grouper("generate", exported, "--question", question, "--quiet")
    assert called.code == 0, called.err
    assert "license: mit" in (exported / "README.md").read_text()


@pytest.fixture
def unfinished(finished_run, tmp_path):
    """The run as a kill has left it after its last checkpoint of GRPO."""
    run = tmp_path / "demo"
    shutil.copytree(finished_run, run)
    shutil.rmtree(run / "grpo" / "final")
    return run


ASKED = ("--question", "What is 3 + 4?", "--max-new-tokens", "4")


def test_an_unfinished_run_means_its_newest_checkpoint_and_says_so(grouper, unfinished, tmp_path):
    """Its untrained base was exported, and the card said that it was trained."""
    newest, target = unfinished / "grpo" / "checkpoint-2", tmp_path / "out"
    warned = f"the grpo of {unfinished} is not finished: this is its newest checkpoint, step 2 of 2"
    called = grouper("export", unfinished, target)
    assert called.code == 0, called.err
    assert f"warning: {warned} ({newest})." in called.err
    assert called.out.startswith(f"{newest} -> ")
    for name in ("model.safetensors", "tokenizer.json"):
        assert (target / name).read_bytes() == (newest / name).read_bytes()
    card = (target / "README.md").read_text()
    line = "This is checkpoint 2 of the 2 steps of GRPO, in a run that has not been finished."
    assert line in card.splitlines()
    for command in ("generate", "eval"):
        how = ASKED if command == "generate" else ("--no-base", "--max-new-tokens", "4", "-q")
        called = grouper(command, unfinished, *how)
        assert called.code == 0, called.err
        assert warned in called.err
    assert (unfinished / "eval_runs" / "demo-grpo-checkpoint-2").is_dir()


def test_a_checkpoint_is_named(grouper, finished_run, tmp_path):
    called = grouper("export", finished_run, tmp_path / "out", "--checkpoint", "2")
    assert called.code == 0, called.err
    assert "warning" not in called.err
    called = grouper("export", finished_run / "sft" / "checkpoint-2", tmp_path / "sft")
    assert called.code == 0, called.err
    line = "This is checkpoint 2 of the 2 steps of SFT, not the result of its run."
    assert line in (tmp_path / "sft" / "README.md").read_text().splitlines()


@pytest.mark.parametrize(
    "words",
    [
        ("export", "RUN", "TARGET"),
        ("push", "RUN", "me/model"),
        ("serve", "RUN", "--dry-run"),
        ("chat", "RUN"),
        ("generate", "RUN", *ASKED),
        ("eval", "RUN", "--dry-run"),
    ],
)
def test_of_a_run_that_trained_nothing_there_is_no_model(grouper, unfinished, tmp_path, words):
    places = {"RUN": unfinished, "TARGET": tmp_path / "out"}
    command = [places.get(word, word) for word in words]
    named = grouper(*command, "--checkpoint", "77")
    named.refused("there is no checkpoint '77'", "2 (grpo), 2 (sft)")
    for phase in ("sft", "grpo"):
        shutil.rmtree(unfinished / phase)
    for more in ((), ("--checkpoint", "best")):
        grouper(*command, *more).refused("this run has trained nothing yet", str(unfinished))
    assert not (tmp_path / "out").exists()


def test_what_would_be_served(grouper, exported, finished_run, monkeypatch):
    called = grouper("serve", exported, "--engine", "transformers", "--dry-run", "--port", "8123")
    assert called.code == 0, called.err
    command, request = called.out.splitlines()
    assert str(exported) in shlex.split(command)
    assert "http://127.0.0.1:8123/v1/chat/completions" in request
    body = json.loads(shlex.split(request)[-1])
    record = json.loads((exported / EXPORT_FILE).read_text())
    assert body["max_tokens"] == record["sampling"]["max_new_tokens"]
    # A run is exported first: the command for that is printed, and no weights are loaded.
    monkeypatch.setattr("grouper.publish.export.export_model", lambda *_: pytest.fail("loaded"))
    called = grouper("serve", finished_run, "--engine", "transformers", "--dry-run")
    assert called.code == 0, called.err
    export, command, asked = called.out.splitlines()
    model = str(finished_run / "grpo" / "final")
    assert shlex.split(export) == ["grouper", "export", model, "demo-export"]
    assert "demo-export" in shlex.split(command)
    own = {**body, "model": "demo-export"}
    assert json.loads(shlex.split(asked)[-1]) == own


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.7", "::", "gpu-7"])
def test_other_machines_are_admitted_with_a_key(grouper, exported, monkeypatch, host):
    """Anyone who reached the port could use the model."""
    started = []

    def run(words, *, check, env):
        started.append((words, env.get("VLLM_API_KEY")))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr("grouper.cli.serve.find_spec", lambda name: name)
    monkeypatch.setattr("grouper.cli.serve.subprocess", SimpleNamespace(run=run))
    monkeypatch.delenv("GROUPER_API_KEY", raising=False)
    asked = ("serve", exported, "--host", host)
    grouper(*asked).refused("--host", host, "no key", "GROUPER_API_KEY")
    grouper(*asked, "--engine", "transformers").refused("transformers knows no keys")
    assert grouper(*asked, "--unprotected").code == 0
    monkeypatch.setenv("GROUPER_API_KEY", "abcdef-0123456789")
    called = grouper(*asked)
    assert called.code == 0, called.err
    assert '-H "Authorization: Bearer $GROUPER_API_KEY"' in called.out
    grouper(*asked, "--engine", "transformers").refused("transformers knows no keys")
    assert [key for _, key in started] == [None, "abcdef-0123456789"]
    assert "abcdef" not in called.out + called.err + str(started[-1][0])
    for here in ("127.0.0.1", "localhost", "::1"):
        monkeypatch.delenv("GROUPER_API_KEY", raising=False)
        assert grouper("serve", exported, "--host", here, "--dry-run").code == 0


def test_a_model_of_unknown_origin_is_served(grouper, finished_run, tmp_path):
    shutil.copytree(finished_run / "base", tmp_path / "strange")
    called = grouper("serve", tmp_path / "strange", "--engine", "vllm", "--dry-run")
    assert called.code == 0, called.err
    assert '"messages"' in called.out
    assert '"max_tokens"' not in called.out


@pytest.mark.parametrize("target", ["q_proj", "lm_head"])
def test_rollouts_are_served_of_the_shape_that_is_trained(
    grouper, finished_run, monkeypatch, tmp_path, target
):
    """LoRA on one of two tied ends parts them, and the run refused the server as another's."""
    monkeypatch.setattr("grouper.errors.version", lambda _: f"{VLLM}.0")
    monkeypatch.setenv("GROUPER_ROLLOUT_SECRET", "s" * 16)
    monkeypatch.setenv("GROUPER_CACHE", str(tmp_path))
    base = finished_run / "base"
    asked = ["serve-rollouts", finished_run / "recipe.yaml", "--model", base, "--dry-run"]
    called = grouper(*asked, f"model.lora.target_modules=[{target}]", "model.lora.rank=2")
    assert called.code == 0, called.err
    recipe = load_recipe(finished_run / "recipe.yaml")
    lora = LoraConfig(rank=2, target_modules=(target,))
    model = recipe.model.model_copy(update={"path": str(base), "new": None, "lora": lora})
    trained = load_policy(model, str(base), seed=0).model.config
    assert f" {write_shape(tmp_path, trained, load_tokenizer(str(base)))} " in called.err
    (config,) = (tmp_path / "rollouts").glob("*/config.json")
    assert json.loads(config.read_text())["tie_word_embeddings"] == (target == "q_proj")


def test_rollouts_are_served_of_the_shape_of_a_saved_adapter(
    grouper, finished_run, monkeypatch, tmp_path
):
    """Its layers and its rank are its own, whatever the recipe says."""
    monkeypatch.setattr("grouper.errors.version", lambda _: f"{VLLM}.0")
    monkeypatch.setenv("GROUPER_ROLLOUT_SECRET", "s" * 16)
    monkeypatch.setenv("GROUPER_CACHE", str(tmp_path))
    base, lora = finished_run / "base", LoraConfig(rank=20, target_modules=("lm_head",))
    model = ModelConfig(path=str(base), lora=lora)
    policy, tokenizer = load_policy(model, str(base), seed=0), load_tokenizer(str(base))
    save_policy(policy, tokenizer, tmp_path / "saved")
    asked = ["serve-rollouts", finished_run / "recipe.yaml", "--model", tmp_path / "saved"]
    settings = ["model.lora={rank: 2, target_modules: [q_proj]}", "sampling.dtype=same"]
    called = grouper(*asked, "--dry-run", *settings)
    assert called.code == 0, called.err
    assert f" {write_shape(tmp_path, policy.model.config, tokenizer)} " in called.err
    assert "--max-lora-rank 32" in called.out


@pytest.mark.parametrize("command", ["serve", "chat", "generate"])
def test_what_is_not_there_is_not_served(grouper, tmp_path, monkeypatch, command):
    """`serve nowhere` printed a command, and `chat` asked for a prompt format."""
    monkeypatch.chdir(tmp_path)
    more = ("--engine", "vllm", "--dry-run") if command == "serve" else ()
    grouper(command, "nowhere", *more).refused("there is no folder 'nowhere' here")


def test_a_program_that_is_not_installed(grouper, exported, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setattr("grouper.cli.serve.find_spec", lambda name: None)
    grouper("serve", exported, "--engine", "vllm").refused("vllm is not installed", "pip install")
    called = grouper("serve", exported, "--engine", "transformers")
    called.refused("uvicorn is not installed", "transformers[serving]")


def test_a_push_without_a_token(grouper, exported, monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    grouper("push", exported, "me/model").refused("there is no token for the Hub", "hf auth login")


def test_an_export_replaces_nothing(grouper, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    (tmp_path / "thesis.tex").write_text("years of work")
    for target in ("model", "thesis.tex"):
        called = grouper("export", tmp_path / "model", tmp_path / target)
        called.refused(f"TARGET: {tmp_path / target} exists already")


@pytest.mark.parametrize(
    ("flags", "private"), [((), True), (("--private",), True), (("--public",), False)]
)
def test_what_is_pushed_is_private_unless_asked_otherwise(
    grouper, tmp_path, monkeypatch, flags, private
):
    pushed = []

    def push(model, repo, **how):
        pushed.append((model, repo, how))
        return "https://the.hub/me/model"

    monkeypatch.setattr("grouper.publish.hub.export_and_push", push)
    (tmp_path / "config.json").touch()
    called = grouper("push", tmp_path, "me/model", "--revision", "v1", *flags)
    assert called.code == 0, called.err
    assert called.out == f"{tmp_path} -> https://the.hub/me/model\n"
    how = {"private": private, "revision": "v1", "adapter": False, "license_id": None}
    assert pushed == [(str(tmp_path), "me/model", how)]


def test_a_conversation(grouper, finished_run, monkeypatch):
    lines = iter(["/stats", "What is 3 + 4?", "", "And 2 more?", "/new", "What is 1 + 1?"])

    def typed(prompt: str = "") -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", typed)
    called = grouper("chat", finished_run, "--max-new-tokens", "12")
    assert called.code == 0, called.err
    assert called.err.count(" per second), ended by ") == 3


def test_right_answers_as_data(grouper, finished_run, tmp_path):
    target = tmp_path / "right.jsonl"
    words = ("synthesize", finished_run, "--samples", "2", "--output", target)
    called = grouper(*words, "data.train.limit=4", "-q")
    assert called.code == 0, called.err
    assert "right answers of 8 completions" in called.out
    assert target.exists()
    grouper(*words).refused("--output")
