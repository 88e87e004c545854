"""Several processes for one test: `python gang.py` reads one order a line and answers each in JSON.

One process imports everything and forks the others, which is much quicker than starting each. An
order is {"job", "size", "arguments", "folder"}: what is printed goes to `gang.log` in that folder,
and the answer is what each process has found, by rank. Runs draw no pictures.
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import socket
import sys
import traceback
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))
from tiny_models import (
    LetterTokenizer,
    ScriptedSampler,
    make_group,
    make_prompt,
    one_step,
    taught_step,
    tiny_model,
    tiny_teachers,
    with_exact_norms,
)

from grouper import api
from grouper.advice.tracing import Live
from grouper.algorithms.batching import Rows, TrainBatch
from grouper.algorithms.weighting import sequence_mean
from grouper.cli.main import main
from grouper.config.schema import GradingConfig, GRPOConfig, ModelConfig, OptimizerConfig
from grouper.errors import ModelError, RunFolderError
from grouper.evaluation.evaluate import Measurement, measure
from grouper.grading import Grader
from grouper.models.device import DTYPES, on_device
from grouper.models.loading import _as_policy, _new_adapter
from grouper.models.policy import Policy, TokenOutputs
from grouper.models.process_group import ProcessGroup
from grouper.sampling.base import SampleRequest, draw_seed
from grouper.sampling.native import NativeSampler
from grouper.sampling.sample_and_grade import draw_and_grade
from grouper.sampling.weights import SamplingWeights
from grouper.training.assemble import advantages_of
from grouper.training.checkpoint import load_optimizer, save_checkpoint, save_optimizer
from grouper.training.curriculum import ProblemStream
from grouper.training.metrics import StepClock
from grouper.training.optimizers import Optimizer, make_optimizer
from grouper.training.parallel import (
    ParallelPolicy,
    join_processes,
    leave_processes,
    make_parallel,
    unsharded,
)
from grouper.training.saved_state import find_damage
from grouper.training.state import TrainState
from grouper.training.update import (
    Objective,
    Scorer,
    UpdateResult,
    accumulate_gradient,
    grpo_objective,
    sft_objective,
    update,
)
from grouper.types import AnswerContract, AnswerKind, Problem, SamplingParams

PATIENCE = 100.0
"""Seconds for one job of one process; the longest takes a tenth of it on an idle machine."""
CONFIG = GRPOConfig(beta=0.1, require_correct_in_group=False)


def fork_all(size: int, job: Callable[[], Any]) -> list[Any]:
    """Run `job` in `size` processes that can meet; what each returns, by rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = []
    for rank in range(size):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.environ |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            code = 1
            # Where a process crashes or waits for ever, its stack says why.
            faulthandler.enable()
            faulthandler.dump_traceback_later(PATIENCE, exit=True)
            try:
                with os.fdopen(writing, "w") as pipe:
                    json.dump(job(), pipe)
                code = 0
            except SystemExit as end:
                code = int(end.code or 0)
            except BaseException:  # noqa: BLE001 - a child must not go on into the parent's code
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(writing)
        children.append((child, reading))
    found = []
    for child, reading in children:
        with os.fdopen(reading) as pipe:
            text = pipe.read()
        _, status = os.waitpid(child, 0)
        found.append(json.loads(text) if text else {"exit": os.waitstatus_to_exitcode(status)})
    return found


def policy_of(family: str, *, lora: bool) -> Policy:
    model = with_exact_norms(tiny_model(family, dtype=torch.float64))
    if not lora:
        return Policy(model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        adapter = get_peft_model(
            model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        ).double()
    return Policy(adapter.get_base_model(), adapter=adapter)


def step_batch() -> TrainBatch:
    """Five groups of very different lengths, one flat, in float64."""
    groups = [
        make_group(
            g,
            [float((g + i) % 3 == 0 and g != 2) for i in range(4)],
            [1 + (g * 5 + i * 7) % 13 for i in range(4)],
            prompt_length=2 + 2 * g,
        )
        for g in range(5)
    ]
    batch = one_step(groups, advantages_of(groups, CONFIG), sequence_mean, keep_flat=True)
    return batch.to("cpu", torch.float64)


def gradient(replica: ParallelPolicy, budget: int) -> tuple[dict[str, torch.Tensor], float]:
    """Of one step with a KL term; every trainable weight, in one piece."""
    batch = step_batch()
    reference = {
        name: unsharded(p.detach()).clone() + 0.01 for name, p in replica.policy.trainable().items()
    }
    held = replica.shard(reference)
    scores = Scorer(replica, budget, held)
    batch = replace(batch, reference_logprobs=scores.reference(batch))
    loss, _ = accumulate_gradient(replica, batch, grpo_objective(CONFIG), token_budget=budget)
    found = {}
    for name, parameter in replica.policy.trainable().items():
        assert parameter.grad is not None, name
        found[name] = unsharded(parameter.grad)
    return found, loss


def gradients() -> dict[str, float]:
    """The largest relative difference to one process, for every engine, family and LoRA."""
    processes = join_processes()
    worst = {}
    for family in ("qwen3", "llama"):
        for lora in (False, True):
            alone, loss = gradient(
                ParallelPolicy(policy_of(family, lora=lora), ProcessGroup()), 10_000
            )
            for engine in ("ddp", "fsdp"):
                # One budget for everything in one slice, one for more slices than processes.
                for budget in (10_000, 40):
                    replica = make_parallel(policy_of(family, lora=lora), processes, engine)
                    split = any(isinstance(p, DTensor) for p in replica.policy.parameters())
                    assert split == (engine == "fsdp")
                    together, total = gradient(replica, budget)
                    gaps = [
                        float((together[n] - g).norm() / g.norm().clamp(min=1e-300))
                        for n, g in alone.items()
                    ]
                    gaps.append(abs(total - loss) / abs(loss))
                    worst[f"{engine} {family} lora={lora} budget={budget}"] = max(gaps)
    leave_processes()
    return worst


def taught_gradients() -> dict[str, float]:
    """The largest relative difference to one process of a step of all three streams."""
    processes = join_processes()
    objective = grpo_objective(GRPOConfig(), guide=tiny_teachers().guide)
    batch = taught_step()
    worst = {}
    for lora in (False, True):
        alone = ParallelPolicy(policy_of("qwen3", lora=lora), ProcessGroup())
        accumulate_gradient(alone, batch, objective, token_budget=10_000)
        for engine in ("ddp", "fsdp"):
            for budget in (10_000, 25):
                replica = make_parallel(policy_of("qwen3", lora=lora), processes, engine)
                accumulate_gradient(replica, batch, objective, token_budget=budget)
                found = replica.policy.trainable()
                gaps = []
                for name, parameter in alone.policy.trainable().items():
                    assert parameter.grad is not None, name
                    norm = parameter.grad.norm().clamp(min=1e-300)
                    difference = unsharded(found[name].grad) - parameter.grad
                    gaps.append(float(difference.norm() / norm))
                worst[f"{engine} lora={lora} budget={budget}"] = max(gaps)
    leave_processes()
    return worst


def rounded_policy(family: str, products: torch.dtype, *, lora: bool, checkpointed: bool) -> Policy:
    """A policy with products in half precision; with LoRA over a bfloat16 base."""
    if not lora:
        model = tiny_model(family)
        return Policy(model, compute_dtype=products, gradient_checkpointing=checkpointed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        adapter = get_peft_model(
            tiny_model(family, dtype=torch.bfloat16),
            LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False),
            autocast_adapter_dtype=True,
        )
    model = adapter.get_base_model()
    dtypes = {parameter.dtype for parameter in model.parameters()}
    assert dtypes == {torch.float32, torch.bfloat16}
    return Policy(
        model, adapter=adapter, compute_dtype=products, gradient_checkpointing=checkpointed
    )


class Collectives(TorchDispatchMode):
    """Notes the dtypes of what FSDP gathers and sums, and their bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.gathered: Counter[str] = Counter()
        self.summed: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in {"_allgather_base_", "_reduce_scatter_base_"}:
            counts = self.gathered if name == "_allgather_base_" else self.summed
            counts[str(args[1].dtype).removeprefix("torch.")] += args[1].nbytes
        return func(*args, **(kwargs or {}))


def rounded_gradients() -> dict[str, Any]:
    """The largest relative difference to one process with autocast, and what is sent."""
    processes = join_processes()
    batch = step_batch().to("cpu", torch.float32)
    objective = grpo_objective(GRPOConfig())
    cases = [
        ("qwen3", False, False),
        ("qwen3", False, True),
        ("gemma2", False, True),  # a layer ends with a norm
        ("gpt2", False, False),  # its norms take no weights in half precision
        ("qwen3", True, False),
    ]
    answers = {}
    for family, lora, checkpointed in cases:
        for products in (torch.bfloat16, torch.float16):
            if (family == "gemma2" or lora) and products is torch.float16:
                continue
            make = partial(rounded_policy, family, products, lora=lora, checkpointed=checkpointed)
            for budget in (10_000, 40):
                replica = make_parallel(make(), processes, "fsdp")
                slices = [part.batch for part in replica.slices(batch, budget)]
                with Collectives() as collectives:
                    accumulate_gradient(replica, batch, objective, token_budget=budget)
                # In the same slices, since products of other sizes are rounded differently.
                alone = ParallelPolicy(make(), ProcessGroup())
                tokens = int(batch.prompt_lengths.sum() + batch.completion_lengths.sum())
                largest = min(budget, -(-tokens // processes.size))
                accumulate_gradient(alone, batch, objective, token_budget=largest)
                gradients = replica.policy.trainable()
                gaps = []
                for name, parameter in alone.policy.trainable().items():
                    assert parameter.grad is not None, name
                    whole = unsharded(gradients[name].grad)
                    assert whole.dtype == torch.float32
                    gap = (whole - parameter.grad).norm() / parameter.grad.norm()
                    gaps.append(float(gap))
                key = f"{family} lora={lora} checkpointed={checkpointed} {products} {budget}"
                answers[key] = {
                    "gap": max(gaps),
                    "slices": len(slices),
                    "gathered": collectives.gathered,
                    "summed": collectives.summed,
                }
    leave_processes()
    return answers


def sharded_gradients() -> list[dict[str, Any]]:
    """The gradients that a process holds after each slice of a step, and at its end."""
    processes = join_processes()
    replica = make_parallel(policy_of("qwen3", lora=False), processes, "fsdp")
    notes: list[dict[str, Any]] = []

    def note(*_: Any) -> None:
        whole = 0  # gradients that are not, or not only, a shard
        for module in replica.policy.modules():
            if not isinstance(module, FSDPModule):
                continue
            group = module._get_fsdp_state()._fsdp_param_group
            for parameter in () if group is None else group.fsdp_params:
                whole += parameter.unsharded_accumulated_grad is not None
                unsharded_parameter = getattr(parameter, "_unsharded_param", None)
                whole += getattr(unsharded_parameter, "grad", None) is not None
        held = [p.grad for p in replica.policy.parameters() if p.grad is not None]
        local = [g.to_local().numel() for g in held if isinstance(g, DTensor)]
        notes.append(
            {
                "gradients": len(held),
                "sharded": len(local),
                "whole": whole,
                "elements": sum(local),
                "of": sum(p.numel() for p in replica.policy.parameters()),
            }
        )

    # Before a slice is after the one before it. FSDP's own hook would gather the root's weights.
    replica.policy.register_forward_pre_hook(note, prepend=True)
    accumulate_gradient(replica, step_batch(), grpo_objective(GRPOConfig()), token_budget=40)
    note()
    leave_processes()
    return notes


def overflow(engine: str) -> dict[str, Any]:
    """A step in float16 whose gradient overflows once, on the last process."""
    processes = join_processes()
    batch = step_batch().to("cpu", torch.float32)
    objective = grpo_objective(GRPOConfig())
    attempts = []

    def loss(outputs: TokenOutputs, rows: TrainBatch) -> Any:
        attempts.append(rows)
        if len(attempts) == 1 and processes.rank == processes.size - 1:
            outputs.logprobs.register_hook(lambda gradient: gradient * 1e30)
        return objective.loss(outputs, rows)

    def step(replica: ParallelPolicy, objective: Objective) -> tuple[UpdateResult, Optimizer]:
        optimizer = make_optimizer(replica.policy, OptimizerConfig(learning_rate=1e-3, eps=1e-3))
        settings: dict[str, Any] = {"scale": 1.0, "max_grad_norm": 1.0, "token_budget": 40}
        return update(replica, batch, objective, optimizer, **settings), optimizer

    make = partial(rounded_policy, "qwen3", torch.float16, lora=False, checkpointed=False)
    alone = ParallelPolicy(make(), ProcessGroup())
    step(alone, objective)
    replica = make_parallel(make(), processes, engine)
    result, optimizer = step(replica, replace(objective, loss=loss))
    gaps = []
    pairs = zip(replica.policy.parameters(), alone.policy.parameters(), strict=True)
    for ours, expected in pairs:
        gaps.append(float((unsharded(ours) - expected).detach().abs().max()))
    leave_processes()
    assert optimizer.loss_scale is not None
    return {
        "applied": result.applied,
        "events": result.events,
        "scale": optimizer.loss_scale.value,
        "gap": max(gaps),
    }


def master_weights(folder: str) -> dict[str, Any]:
    """Two steps of bfloat16 weights with float32 masters, compared with those of one process."""
    processes = join_processes()
    batch = step_batch().to("cpu", torch.float32)
    config = OptimizerConfig(learning_rate=1e-3, eps=1e-3, master_weights=True)
    objective = grpo_objective(GRPOConfig())
    optimizers = []
    for members in (ProcessGroup(), processes):
        policy = Policy(tiny_model("qwen3", dtype=torch.bfloat16))
        replica = make_parallel(policy, members, "fsdp")
        optimizer = make_optimizer(policy, config)
        for _ in range(2):
            result = update(
                replica, batch, objective, optimizer, scale=1.0, max_grad_norm=None, token_budget=40
            )
            assert result.applied
        optimizers.append(optimizer)
    expected = dict(optimizers[0].state_dict())
    state = optimizers[1].state_dict()
    gaps = []
    for key, value in state.items():
        if key.endswith(".master"):
            assert isinstance(value, DTensor)
            gaps.append(float((unsharded(value) - expected[key]).abs().max()))
    # Read by an optimizer that has stepped nothing.
    save_optimizer(optimizers[1], Path(folder), processes, named=Path(folder))
    reader = make_optimizer(replica.policy, config)
    load_optimizer(reader, Path(folder))
    read = reader.state_dict()
    same = [bool((unsharded(value) == unsharded(read[key])).all()) for key, value in state.items()]
    rounded = []
    for weight, master in optimizers[1]._masters:
        difference = unsharded(weight.detach()) - unsharded(master.detach()).bfloat16()
        rounded.append(float(difference.abs().max()))
    leave_processes()
    return {
        "masters": len(gaps),
        "weights": len(list(replica.policy.parameters())),
        "gap": max(gaps),
        "rounded": max(rounded),
        "read again": all(same) and state.keys() == read.keys(),
    }


def held(engine: str, case: dict[str, Any]) -> dict[str, int]:
    """Bytes of all tensors of a process: when its model is loaded, in an update, and after it.

    Args:
        engine: `ddp` or `fsdp`.
        case: the model's settings and shape, the rows of a slice, and the slices of a process.
    """
    processes = join_processes()
    settings = ModelConfig(path="x", **case["model"])
    shape = AutoConfig.for_model(**case["shape"])
    dtype = DTYPES[settings.dtype]
    model = AutoModelForCausalLM.from_config(shape, dtype=dtype, attn_implementation="sdpa")
    adapter = None
    if settings.lora is not None:
        adapter = _new_adapter(model, settings.lora, "", seed=0)
    policy = _as_policy(model, adapter, on_device(settings, "cpu"))
    copied = None if case["copy"] is None else DTYPES[case["copy"]]
    rows = Rows(**case["rows"])
    budget = rows.tokens
    batch = replace(rows, count=rows.count * case["slices"] * processes.size).batch(
        shape.vocab_size
    )
    with Live() as live:
        for tensor in (*policy.parameters(), *policy.buffers()):
            live.count(tensor)
        weights = SamplingWeights(policy, copied, copy_now=engine == "fsdp")
        weights.current()
        loaded = live.peak
        replica = make_parallel(policy, processes, engine)
        optimizer = make_optimizer(policy, OptimizerConfig())
        arguments: dict[str, Any] = {"scale": 1.0, "max_grad_norm": 1.0, "token_budget": budget}
        update(replica, batch, sft_objective, optimizer, **arguments)
        live.peak = live.bytes
        assert update(replica, batch, sft_objective, optimizer, **arguments).applied
        updated = live.peak
        between = live.bytes
        live.peak = between
        weights.current()
        answer = {"load": loaded, "update": updated, "between": between, "refresh": live.peak}
    leave_processes()
    return answer


def on_the_cpu() -> list[str]:
    """Where the weights are that are split on a machine with a GPU, which the run does not use."""
    processes = join_processes()
    torch._C._get_accelerator = lambda: torch.device("cuda")
    replica = make_parallel(policy_of("qwen3", lora=False), processes, "fsdp")
    found = sorted({parameter.device.type for parameter in replica.policy.parameters()})
    leave_processes(replica)
    return found


def run_short_of_memory(policy: Policy, *, at: int) -> list[int]:
    """Let forward number `at` fail; the rows of every forward are noted."""
    rows: list[int] = []

    def before(module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        rows.append(arguments[0].rows)
        if len(rows) - 1 == at:
            raise torch.OutOfMemoryError("injected")

    policy.register_forward_pre_hook(before)
    return rows


def shortage(engine: str, at: int, budget: int, *, together: bool) -> dict[str, Any]:
    """One step of which the last process runs out of memory in its forward number `at`."""
    processes = join_processes()
    alone = ParallelPolicy(policy_of("qwen3", lora=False), ProcessGroup())
    batch, objective = step_batch(), grpo_objective(GRPOConfig())
    accumulate_gradient(alone, batch, objective, token_budget=10_000)
    replica = make_parallel(policy_of("qwen3", lora=False), processes, engine)
    rows = run_short_of_memory(
        replica.policy, at=at if processes.rank == processes.size - 1 else -1
    )
    try:
        accumulate_gradient(
            replica,
            batch,
            objective,
            token_budget=budget,
            together=together,
        )
    except ModelError as error:
        return {"told": str(error)}
    gaps = [
        float((unsharded(p.grad) - q.grad).norm() / q.grad.norm().clamp(min=1e-300))
        for p, q in zip(replica.policy.parameters(), alone.policy.parameters(), strict=True)
        if q.grad is not None and p.grad is not None
    ]
    leave_processes()
    return {"gap": max(gaps), "limit": replica.policy.token_limit, "forwards": len(rows)}


def short_sampling() -> dict[str, Any]:
    """What all draw together, the last process out of memory with more than two rows."""
    processes = join_processes()
    requests = [
        SampleRequest(
            prompt=make_prompt(i % 3),
            params=SamplingParams(max_new_tokens=3 + i),
            key=draw_seed(0, "short", i),
        )
        for i in range(13)
    ]
    policy = policy_of("qwen3", lora=False)
    sampler = NativeSampler(SamplingWeights(policy), LetterTokenizer(), stop_token_ids=[2])
    alone = dict(sampler.sample(requests))
    plain = policy.logits

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        if len(hidden) > 2:
            raise torch.OutOfMemoryError("injected")
        return plain(hidden)

    if processes.rank == processes.size - 1:
        policy.logits = logits  # type: ignore[method-assign]
    drawn, _ = draw_and_grade(
        requests, ["1"] * 13, sampler=sampler, grader=CountingGrader(), processes=processes
    )
    leave_processes()
    tokens = [one.completion.token_ids for one in drawn]
    return {"same": tokens == [alone[i].token_ids for i in range(13)], "slots": sampler.max_slots}


class CountingGrader:
    """Counts what it is asked to grade."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        contract = AnswerContract(kind=AnswerKind.TAG, open="<answer>", close="</answer>")
        self._grader = Grader(contract, GradingConfig(symbolic=False))

    def submit(self, text: str, reference: str, *, lenient: bool = False) -> Any:
        self.asked.append(text)
        return self._grader.submit(text, reference, lenient=lenient)


def sharing(count: int) -> dict[str, Any]:
    """How `count` requests are drawn and graded."""
    processes = join_processes()
    sampler, grader = (
        ScriptedSampler(lambda request, _: f"<answer>{request.key}</answer>"),
        CountingGrader(),
    )
    requests = [
        SampleRequest(
            prompt=make_prompt(i),
            params=SamplingParams(max_new_tokens=64),
            key=draw_seed(0, "eval", str(i), 0),
        )
        for i in range(count)
    ]
    drawn, _ = draw_and_grade(
        requests, ["1"] * count, sampler=sampler, grader=grader, processes=processes
    )
    texts = [one.completion.text for one in drawn]
    measured = measure(
        Measurement(
            name="base",
            phase="base",
            step=0,
            split="test",
            items=[
                (Problem(id=r.prompt.problem_id, question="?", answer="1", source="p"), r.prompt)
                for r in requests
            ],
            params=requests[0].params,
            samples=1,
            seed=0,
        ),
        sampler,
        CountingGrader(),
        processes=processes,
    )
    expected = [
        f"<answer>{draw_seed(0, 'eval', r.prompt.problem_id, 0)}</answer>" for r in requests
    ]
    leave_processes()
    return {
        "right": texts == [f"<answer>{r.key}</answer>" for r in requests]
        and [item.completion for item in measured.items] == expected,
        "graded": len(grader.asked),
        "total": count,
    }


def optimizer_over(processes: ProcessGroup) -> tuple[ParallelPolicy, Optimizer]:
    """Two kinds of moments, numbers, and weights of eight rows, which five processes cannot
    share evenly: the last one has none of them."""
    replica = make_parallel(policy_of("qwen3", lora=False), processes, "fsdp")
    return replica, make_optimizer(replica.policy, OptimizerConfig(name="muon"))


def whole_state(replica: ParallelPolicy, optimizer: Optimizer) -> dict[str, str]:
    """Type, shape and checksum of everything in it, in one piece."""
    found = {}
    for key, value in sorted(optimizer.state_dict().items()):
        tensor = unsharded(value).contiguous()
        mark = zlib.crc32(tensor.numpy().tobytes())
        found[key] = f"{tensor.dtype} {tuple(tensor.shape)} {mark:08x}"
    return found


def save_state(folder: str) -> dict[str, str]:
    """Save what two steps leave, whose gradients are the same for any number of processes."""
    processes = join_processes()
    replica, optimizer = optimizer_over(processes)
    for _ in range(2):
        for parameter in replica.policy.parameters():
            parameter.grad = parameter.detach().clone()
        optimizer.step(0.0)
    save_optimizer(optimizer, Path(folder), processes, named=Path(folder))
    found = whole_state(replica, optimizer)
    leave_processes()
    return found


def load_state(folder: str) -> dict[str, Any]:
    processes = join_processes()
    replica, optimizer = optimizer_over(processes)
    load_optimizer(optimizer, Path(folder))
    state = optimizer.state_dict()
    rows = {  # of a moment and of its weight
        key: (len(value.to_local()), len(optimizer.parameter(key).to_local()))  # type: ignore[attr-defined]  # split
        for key, value in state.items()
        if isinstance(value, DTensor)
    }
    found = {"rows": rows, "moments": sum(value.numel() > 1 for value in state.values())}
    found["state"] = whole_state(replica, optimizer)
    leave_processes()
    return found


def states(folder: str, pairs: list[tuple[int, int]]) -> dict[str, Any]:
    """What so many processes save, and what so many others read of it."""
    saved, loaded = {}, {}
    for size in dict(pairs):
        saved[size] = fork_all(size, partial(save_state, f"{folder}/{size}"))
    for size, readers in pairs:
        loaded[f"{size} by {readers}"] = fork_all(readers, partial(load_state, f"{folder}/{size}"))
    return {"saved": saved, "loaded": loaded}


class NoTokenizer:
    def save_pretrained(self, folder: Path) -> None:
        del folder


def full_disk(run: str, rank: int) -> dict[str, Any]:
    """A save for which the disk of one process is full, and the next one, for which it is not."""
    processes = join_processes()
    replica, optimizer = optimizer_over(processes)
    for parameter in replica.policy.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step(0.0)
    state = TrainState(
        phase="grpo",
        step=1,
        replica=replica,
        optimizer=optimizer,
        total=6,
        stream=ProblemStream(size=10, seed=0, phase="grpo"),
        clock=StepClock(replica.policy, processes.size),
    )
    save = partial(save_checkpoint, Path(run), state, NoTokenizer(), recipe_hash="0")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if processes.rank == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    found: dict[str, Any] = {}
    try:
        save()
    except RunFolderError as error:
        found["refused"] = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    found["left"] = processes.on_rank0(lambda: [path.name for path in Path(run, "grpo").iterdir()])
    found["damage"] = find_damage(save())
    leave_processes()
    return found


JOBS: dict[str, Callable[..., Any]] = {
    "gradients": lambda size: fork_all(size, gradients),
    "taught_gradients": lambda size: fork_all(size, taught_gradients),
    "rounded_gradients": lambda size: fork_all(size, rounded_gradients),
    "sharded_gradients": lambda size: fork_all(size, sharded_gradients),
    "overflow": lambda size, engine: fork_all(size, lambda: overflow(engine)),
    "master_weights": lambda size, folder: fork_all(size, lambda: master_weights(folder)),
    "held": lambda size, engine, case: fork_all(size, lambda: held(engine, json.loads(case))),
    "on_the_cpu": lambda size: fork_all(size, on_the_cpu),
    "sharing": lambda size: {
        str(count): fork_all(size, lambda count=count: sharing(count)) for count in (1, 3, 8)
    },
    "shortage": lambda size, engine, at, budget, *apart: fork_all(
        size, lambda: shortage(engine, int(at), int(budget), together=not apart)
    ),
    "short_sampling": lambda size: fork_all(size, short_sampling),
    "full_disk": lambda size, run, rank: fork_all(size, lambda: full_disk(run, int(rank))),
    "states": lambda _, folder, pairs: states(folder, json.loads(pairs)),
    "runs": lambda _, plan: [
        fork_all(size, lambda arguments=arguments: main(arguments))
        for size, arguments in json.loads(plan)
    ],
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    api.draw_pictures = lambda folder: None
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        order = json.loads(line)
        os.chdir(order["folder"])
        log = os.open("gang.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        found = JOBS[order["job"]](order["size"], *order["arguments"])
        print(json.dumps(found), file=answers, flush=True)
