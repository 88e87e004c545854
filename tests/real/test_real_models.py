"""The whole path on pretrained models: `make real-models` fetches them, `make test-real` runs this.

A random model forgives much: a wrong BOS token, a template that is not the model's, a lost stop
token. These models do not. Where a model is not on this machine its tests skip, and pytest counts
them with the reason.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gates import shared

from grouper.algorithms.batching import Rows, unweighted_rows
from grouper.certificate.certificate import certify
from grouper.cli import main
from grouper.config.schema import GRPOConfig, LoraConfig, ModelConfig
from grouper.errors import ModelError
from grouper.models.device import fastest_dtype
from grouper.models.gguf import read_header, token_bytes
from grouper.models.loading import load_policy, load_tokenizer, stop_ids_of
from grouper.models.policy import Policy
from grouper.prompts.formats import FORMATS
from grouper.prompts.rendering import render
from grouper.sampling.base import SampleRequest, draw_seed
from grouper.sampling.native import NativeSampler
from grouper.sampling.weights import SamplingWeights
from grouper.training.optimizers import LossScale
from grouper.training.parallel import ParallelPolicy
from grouper.training.update import accumulate_gradient, grpo_objective
from grouper.types import Completion, Problem, Prompt, SamplingParams

pytestmark = [pytest.mark.real, pytest.mark.timeout(1200)]

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("GROUPER_REAL_MODELS", ROOT / "real-models"))
NAMES = ("smollm2", "gemma270", "coder05")
CHAT = {"smollm2": True, "gemma270": False, "coder05": True}
"""Whether the model has a chat template."""
BOS = {"smollm2": False, "gemma270": True, "coder05": False}
"""Whether its tokenizer puts a BOS token in front of plain text."""
QUESTION = "A farmer has 3 boxes with 4 apples each and eats 2 apples. How many apples are left?"


@pytest.fixture(scope="module", params=NAMES)
def folder(request: pytest.FixtureRequest) -> Path:
    path = FOLDER / request.param
    if not (path / "config.json").exists():
        pytest.skip(f"{request.param} is not in {FOLDER}: make real-models fetches it")
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return load_tokenizer(str(folder))


@pytest.fixture(scope="module")
def policy(folder: Path) -> Policy:
    config = ModelConfig(path=str(folder), dtype=fastest_dtype())
    return load_policy(config, str(folder), seed=0)


def rows_of(*place: str) -> list[dict[str, Any]]:
    lines = shared(*place).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def prompts_of(tokenizer: Any, questions: tuple[str, ...] = (QUESTION,)) -> list[Prompt]:
    fmt = replace(FORMATS["boxed"], system="")
    return [
        render(Problem(id=str(n), question=text, answer="1", source="real"), fmt, tokenizer)
        for n, text in enumerate(questions)
    ]


def sampled(
    weights: SamplingWeights, tokenizer: Any, prompts: list[Prompt], stops: list[int], **params: Any
) -> list[Completion]:
    sampler = NativeSampler(weights, tokenizer, stop_token_ids=stops)
    requests = [
        SampleRequest(prompt=p, params=SamplingParams(**params), key=draw_seed(0, "real", n))
        for n, p in enumerate(prompts)
    ]
    completions = dict(sampler.sample(requests))
    sampler.release()
    return [completions[n] for n in range(len(requests))]


@torch.no_grad()
def gaps(policy: Policy, prompts: list[Prompt], completions: list[Completion]) -> torch.Tensor:
    """Differences of the sampler's log-probs from the trainer's, of all tokens, in nats."""
    batch = unweighted_rows(
        [prompt.token_ids for prompt in prompts],
        [completion.token_ids for completion in completions],
        range(len(prompts)),
    )
    trained = policy(batch).logprobs[batch.mask].double()
    drawn = [value for completion in completions for value in completion.logprobs]
    return (trained - torch.tensor(drawn, dtype=torch.float64)).abs()


def test_a_prompt_is_what_the_models_own_template_or_tokenizer_writes(
    folder: Path, tokenizer: Any
) -> None:
    (prompt,) = prompts_of(tokenizer)
    if CHAT[folder.name]:
        messages = [{"role": "user", "content": QUESTION}]
        expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert prompt.messages is not None
    else:
        expected = tokenizer(prompt.text)["input_ids"]
        assert prompt.messages is None
    assert list(prompt.token_ids) == list(expected)
    has_bos = prompt.token_ids[0] == tokenizer.bos_token_id
    assert not BOS[folder.name] or has_bos
    assert prompt.token_ids[:2].count(tokenizer.bos_token_id) <= 1


def test_greedy_text_is_that_of_generate(folder: Path, tokenizer: Any) -> None:
    """In float32: in bfloat16 two ways to compute the same may choose another of two near ties."""
    exact = load_policy(ModelConfig(path=str(folder)), str(folder), seed=0)
    stops = stop_ids_of(str(folder)) or [tokenizer.eos_token_id]
    (prompt,) = prompts_of(tokenizer)
    weights = SamplingWeights(exact)
    (ours,) = sampled(weights, tokenizer, [prompt], stops, temperature=0.0, max_new_tokens=40)
    theirs = exact.model.generate(
        torch.tensor([prompt.token_ids]),
        do_sample=False,
        max_new_tokens=40,
        eos_token_id=stops,
        pad_token_id=0,
        repetition_penalty=1.0,
    )
    expected = theirs[0, len(prompt.token_ids) :].tolist()
    assert list(ours.token_ids) == expected
    assert len(set(expected)) > 5, "a model that knows English does not repeat one word"
    (drawn,) = sampled(weights, tokenizer, [prompt], stops, max_new_tokens=40)
    # DESIGN, section 9: 1e-4 at most on models that are larger than the tiny one.
    assert float(gaps(exact, [prompt], [drawn]).max()) < 1e-4


QUESTIONS = tuple(f"What is {n} + {n + 3}? Explain." for n in range(8))


def test_an_adapter_adds_nothing_to_the_gap_between_sampler_and_trainer(
    folder: Path, tokenizer: Any
) -> None:
    """A small update of LoRA is below the distance of bfloat16 numbers: a merge would lose it."""
    prompts = prompts_of(tokenizer, QUESTIONS)
    budget = {"max_new_tokens": 24, "temperature": 1.0}
    stops = [tokenizer.eos_token_id]
    config = ModelConfig(path=str(folder), dtype="bfloat16")
    policy = load_policy(config, str(folder), seed=0)
    plain = sampled(SamplingWeights(policy, torch.bfloat16), tokenizer, prompts, stops, **budget)
    usual = float(gaps(policy, prompts, plain).mean())
    with_adapter = config.model_copy(update={"lora": LoraConfig(rank=16, alpha=64.0)})
    adapted = load_policy(with_adapter, str(folder), seed=0)
    with torch.no_grad():
        for name, parameter in adapted.trainable().items():
            if "lora_B" in name:
                # As after twenty steps of 5e-6 in directions that agree.
                parameter.normal_(std=1e-4)
    adapted.version += 1
    weights = SamplingWeights(adapted, torch.bfloat16)
    beside = gaps(adapted, prompts, sampled(weights, tokenizer, prompts, stops, **budget))
    assert float(beside.mean()) < 1.5 * usual + 1e-3


def call(*arguments: object, stdin: str = "") -> str:
    """Run a command in this process; returns what it prints."""
    out, err = io.StringIO(), io.StringIO()
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as end,
    ):
        main([str(argument) for argument in arguments])
    monkeypatch.undo()
    assert not end.value.code, err.getvalue()[-3000:]
    return out.getvalue()


def rows(count: int) -> str:
    """Problems with worked solutions in the format of the recipe."""
    lines = []
    for n in range(count):
        solution = f"Adding {n} and {n + 2} gives {2 * n + 2}."
        row = {"question": f"What is {n} + {n + 2}?", "answer": f"{2 * n + 2}"}
        lines.append(json.dumps(row | {"solution": solution}))
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def finished(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps of SFT and two of GRPO, stopped after the first of them and resumed."""
    place = tmp_path_factory.mktemp(folder.name)
    (place / "problems.jsonl").write_text(rows(24), encoding="utf-8")
    data = f"{{source: file, path: {place / 'problems.jsonl'}"
    recipe = {
        "name": "real",
        "output_dir": str(place),
        "threads": torch.get_num_threads(),
        "model": {"path": str(folder), "dtype": fastest_dtype()},
        "prompt": {"format": "xml", "max_prompt_tokens": 200},
        "sft": {"steps": 2, "batch_size": 4, "optimizer": {"learning_rate": 1e-5}},
        "grpo": {
            "steps": 2,
            "prompts_per_step": 2,
            "group_size": 2,
            "checkpoint_every": 1,
            "allow_truncation": True,
            "optimizer": {"learning_rate": 1e-6},
        },
        "sampling": {"max_new_tokens": 24},
        "evaluation": {"max_new_tokens": 24},
        "rewards": [{"name": "correctness", "weight": 1.0}, {"name": "tag_count", "weight": 0.1}],
    }
    file = place / "real.yaml"
    file.write_text(json.dumps(recipe), encoding="utf-8")  # JSON is YAML
    sets = [
        f"data.sft={data}, limit: 8}}",
        f"data.train={data}, offset: 8, limit: 8}}",
        f"data.test={data}, offset: 16, limit: 4}}",
    ]
    call("run", file, *sets)
    # What a kill after the first step leaves behind: its checkpoint, and nothing that came later.
    whole, run = place / "whole", place / "real"
    shutil.copytree(run, whole)
    checkpoints = sorted((run / "grpo").glob("checkpoint-*"))
    assert [path.name for path in checkpoints] == ["checkpoint-1", "checkpoint-2"]
    shutil.rmtree(checkpoints[1])
    shutil.rmtree(run / "grpo" / "final")
    for path in (run / "evaluations").glob("grpo*"):
        path.unlink()
    call("run", file, *sets, "--resume")
    return run


def test_a_resumed_run_is_the_uninterrupted_one(finished: Path) -> None:
    whole = finished.parent / "whole"
    for name in ("model.safetensors",):
        resumed = (finished / "grpo" / "final" / name).read_bytes()
        assert resumed == (whole / "grpo" / "final" / name).read_bytes()
    metrics = [
        json.loads(line) for line in (finished / "metrics.jsonl").read_text("utf-8").splitlines()
    ]
    phases = [row["phase"] for row in metrics if "phase" in row]
    assert phases.count("sft") == 2
    assert phases.count("grpo") >= 2


def test_an_export_is_loaded_by_transformers_alone(finished: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    call("export", finished, tmp_path / "exported", "--dtype", "bfloat16")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.bfloat16)
    own = AutoTokenizer.from_pretrained(tmp_path / "exported")
    messages = [{"role": "user", "content": QUESTION}]
    text = own.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    written = model.generate(**text, do_sample=False, max_new_tokens=8)
    assert written.shape[1] > text["input_ids"].shape[1]


def test_eval_generate_and_chat_take_the_run(finished: Path) -> None:
    answered = call("generate", finished, "--question", "What is 2 + 3?")
    assert "nswer" in answered
    problems = finished.parent / "problems.jsonl"
    table = call("eval", finished, "--on", problems, "--limit", 3)
    assert "%" in table
    conversation = call("chat", finished, "--max-new-tokens", 8, stdin="What is 2 + 3?\n")
    assert conversation.strip()


def test_the_run_is_certified_and_its_last_step_trained_again(finished: Path) -> None:
    """The resumed one: its last step follows a checkpoint of the first start."""
    call("probe", finished, "--on", "test", "--quiet")
    certificate = certify([finished], folder=finished, with_replay=True)
    statuses = {item.name: item.status for item in certificate.items}
    passed = ("conditions", "checkpoint", "records", "grades", "test set", "leaks", "replay")
    assert {name: statuses[name] for name in passed} == dict.fromkeys(passed, "pass")
    (replay,) = [item for item in certificate.items if item.name == "replay"]
    assert replay.sentence.startswith("Trained again, step 2 of the last phase: the same weights")


# --- GGUF files ----------------------------------------------------------------------------------

# The mean log-prob of the text below when it was first measured, in nats a token.
LOG_PROBS = {"smollm2": -2.936, "gemma270": -3.074, "coder05": -2.415}


@pytest.fixture(scope="module")
def gguf_file(folder: Path) -> Path:
    file = folder.with_suffix(".gguf")
    if not file.is_file():
        pytest.skip(f"{file.name} is not beside its folder: make real-models fetches it")
    return file


def test_the_folder_is_what_the_gguf_file_holds(folder: Path, gguf_file: Path) -> None:
    """Two thousand strings of real problems read back by the table of the file itself."""
    header = read_header(gguf_file)
    tokenizer = load_tokenizer(str(folder))
    table = token_bytes(header)
    texts = [row["question"] for row in rows_of("gsm8k", "train.jsonl")[:1500]]
    texts += [row["problem"] for row in rows_of("math", "train.jsonl")[:500]]
    assert len(texts) == 2000
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(table[token_id] for token_id in ids).decode() == text
    assert stop_ids_of(str(folder)) == stop_ids_of(str(gguf_file))


def test_log_probs_of_a_text_are_stable(folder: Path, policy: Policy, tokenizer: Any) -> None:
    text = "If Ann has 3 boxes of 12 pens and gives away 7 pens, she has 36 - 7 = 29 pens left."
    ids = tokenizer.encode(text, return_tensors="pt")
    with torch.inference_mode():
        logits = policy.model(ids).logits.float().log_softmax(-1)
    scores = logits[0, :-1].gather(-1, ids[0, 1:, None])
    assert scores.mean().item() == pytest.approx(LOG_PROBS[folder.name], abs=0.02)


def test_a_loss_scale_keeps_the_gradients_of_float16(folder: Path) -> None:
    """Without one, a quarter of SmolLM2's gradient is too small for float16."""
    if folder.name == "gemma270":
        with pytest.raises(ModelError, match="cannot be computed in float16"):
            load_policy(ModelConfig(compute_dtype="float16", path="x"), str(folder), seed=0)
        return
    if folder.name != "smollm2":
        pytest.skip("the smallest model says it")
    gradients = {}
    for name, dtype, scale in (
        ("exact", "float32", 1.0),
        ("unscaled", "float16", 1.0),
        ("scaled", "float16", LossScale.FIRST),
    ):
        config = ModelConfig(compute_dtype=dtype, path="x")
        policy = load_policy(config, str(folder), seed=0)
        batch = Rows(prompt=20, completion=20, count=4, per_prompt=4).batch(policy.vocabulary)
        mean = replace(batch, weights=batch.weights / batch.mask.sum())
        accumulate_gradient(
            ParallelPolicy(policy),
            mean,
            grpo_objective(GRPOConfig()),
            token_budget=2048,
            loss_scale=scale,
        )
        gradients[name] = torch.cat([p.grad.flatten() for p in policy.parameters()])
    size = gradients["exact"].norm()
    distances = {
        name: float((g - gradients["exact"]).norm() / size) for name, g in gradients.items()
    }
    assert distances["unscaled"] > 0.1
    assert distances["scaled"] < 0.01
