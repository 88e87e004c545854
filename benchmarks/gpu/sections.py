"""The parts of a first session on a card: each a function of a device that fills an `Outcome`."""

# ruff: noqa: SLF001 - a profiler looks inside

from __future__ import annotations

import gc
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd import DeviceType  # type: ignore[attr-defined]  # torch does not list it

from benchmarks.checkout import ROOT, importing_from
from benchmarks.gpu.limits import copy_rate, matrix_rate
from benchmarks.gpu.trl_step import installed, trl_seconds
from benchmarks.gpu.workload import (
    QWEN3_FOUR_BILLION,
    QWEN_HALF_BILLION,
    QWEN_ONE_AND_A_HALF_BILLION,
    Ours,
    Theirs,
    Work,
    medians,
    seconds_of,
    synchronize,
    work_on,
)
from benchmarks.planning.model_flops import shape_of, update_flops
from grouper.models import token_scores
from grouper.models.policy import Policy

__all__ = ["FIRST", "PARTS", "Outcome", "Part"]

GIB = 2**30
SHAPES = {"0.5B": QWEN_HALF_BILLION, "1.5B": QWEN_ONE_AND_A_HALF_BILLION}


class Outcome:
    """What a part finds, written as it is found: what comes before a crash is kept.

    Args:
        path: the JSON file.
        device: where; speeds of a toy on the CPU have no marks.
    """

    def __init__(self, path: Path, device: torch.device) -> None:
        self.path = path
        self._on_cuda = device.type == "cuda"
        self._content: dict[str, Any] = {"figures": {}, "marks": [], "not_measured": []}

    def figure(self, name: str, value: Any) -> None:
        self._content["figures"][name] = value
        self._write()

    def mark(self, what: str, value: Any, wanted: str, *, passed: bool) -> None:
        """A figure with its pass mark."""
        mark = {"what": what, "value": value, "wanted": wanted, "passed": bool(passed)}
        self._content["marks"].append(mark)
        self._write()

    def speed(self, what: str, value: float, least: float, hoped: float | None = None) -> None:
        """A figure that should be large, on a card."""
        if self._on_cuda:
            wanted = f"{least:g}" if hoped is None else f"{least:g} ({hoped:g})"
            self.mark(what, round(value, 3), wanted, passed=value >= least)
        else:
            self.figure(what, round(value, 3))

    def not_measured(self, why: str) -> None:
        self._content["not_measured"].append(why)
        self._write()

    def _write(self) -> None:
        # A part is killed at its limit, wherever it is: what it has written before must be whole.
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self._content, indent=1), encoding="utf-8")
        part.replace(self.path)


@dataclass(frozen=True)
class Part:
    """What is looked at, and for how long."""

    run: Callable[[torch.device, Outcome], None]
    seconds: int
    """It is ended after so many."""


def _is_hopper(device: torch.device) -> bool:
    """Whether marks in seconds and rates are meant for this card: an H100 or H200."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def _has(*packages: str) -> bool:
    try:
        return all(importlib.util.find_spec(name) is not None for name in packages)
    except ModuleNotFoundError:  # one that is there without what it needs itself
        return False


def _empty(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


# --- what the card can do


def rates(device: torch.device, outcome: Outcome) -> None:
    """Device, bytes a second of a copy and FLOPs a second of products."""
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        outcome.figure("capability", f"sm_{card.major}{card.minor}")
        outcome.figure("gib", round(card.total_memory / GIB, 1))
        outcome.figure("cards", torch.cuda.device_count())
    else:
        outcome.not_measured("this machine has no CUDA device: what follows runs on toys")
    copied = copy_rate(device) / 1e12
    outcome.figure("copy_gb_per_second", round(1000 * copied, 1))
    multiplied = {}
    for name, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32)):
        multiplied[name] = matrix_rate(device, dtype) / 1e12
        outcome.figure(f"{name}_tflops", round(multiplied[name], 3))
    if _is_hopper(device):
        outcome.speed("terabytes a second of a copy", copied, 2.8)
        outcome.speed("bfloat16 products, TFLOP/s", multiplied["bfloat16"], 700)
    outcome.figure("triton", version("triton") if _has("triton") else None)


# --- tests


TEST_FILES = (
    "tests/kernels/triton/test_triton_draw.py",
    "tests/kernels/triton/test_triton_head.py",
    "tests/kernels/triton/test_triton_layers.py",
    "tests/sampling/test_decode_attention.py",
    "tests/sampling/test_engine.py",
    "tests/models/test_attention_varlen.py",
)
"""The files whose tests run on a card where there is one."""


def test_command(workers: int) -> list[str]:
    """Pytest over these files; float32 at 256 dimensions is left out: it compiles for minutes."""
    return [
        *(sys.executable, "-m", "pytest", "-q", "-rfEs", "-p", "no:cacheprovider"),
        *("-m", "not slow and not real", "-k", "not (float32 and 256)"),
        *("-n", str(workers), "--timeout", "60"),
        *TEST_FILES,
    ]


def tests(device: torch.device, outcome: Outcome) -> None:
    """Every test that has something to say of CUDA; none may be skipped for want of a card."""
    if not _has("pytest", "xdist", "pytest_timeout"):
        outcome.not_measured("the tests (pytest, pytest-xdist or pytest-timeout is not installed)")
        return
    if device.type != "cuda":
        outcome.not_measured("the tests of CUDA kernels (no CUDA device)")
        return
    log = outcome.path.with_suffix(".pytest.log")
    with log.open("w", encoding="utf-8") as file:
        done = subprocess.run(
            test_command(workers=10),
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            stdout=file,
            stderr=subprocess.STDOUT,
            check=False,
        )
    lines = log.read_text(encoding="utf-8").splitlines()
    wanting = [line for line in lines if line.startswith("SKIPPED") and "cuda" in line.lower()]
    outcome.figure("failed", [line for line in lines if line.startswith(("FAILED", "ERROR"))][:40])
    outcome.figure("skipped_for_want_of_cuda", wanting[:40])
    last = lines[-1] if lines else "nothing was printed"
    outcome.mark("tests on this card", last, "none failed", passed=done.returncode == 0)
    outcome.mark("skipped for want of CUDA", len(wanting), "0", passed=not wanting)


# --- kernels at the sizes of real models


def kernels(device: torch.device, outcome: Outcome) -> None:
    """Decode attention in bfloat16 beside float64, and the sampler's log-probs by the trainer's."""
    from grouper.models.attention import AttentionSpec
    from grouper.sampling import decode_attention as attention
    from grouper.sampling.kv_cache import LayerCache

    on_cuda = device.type == "cuda"
    dtype = torch.bfloat16 if on_cuda else torch.float32
    chance = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=chance).to(device, dtype)

    for dim in (64, 128, 256):
        for size, share in ((8, 7), (64, 2)):
            heads, places, width, columns = 2, 3, 300, 200
            rows = places * size
            members = torch.arange(rows, device=device).view(places, size)
            state = attention.DecodeState(
                column=torch.tensor([17], device=device),
                lengths=torch.randint(1, width, (rows,), generator=chance).to(device),
                owners=torch.arange(places, device=device).repeat_interleave(size),
                prompt_lengths=torch.tensor([columns, 3, 120], device=device),
                members=members,
            )
            query, new = normal(rows, heads * share, dim), (normal(rows, heads, dim),) * 2
            prompts = (normal(places, heads, columns, dim), normal(places, heads, columns, dim))
            own = (normal(rows, heads, width, dim), normal(rows, heads, width, dim))
            for window in (None, 64):
                spec = AttentionSpec(layer=0, scaling=dim**-0.5, window=window, softcap=None)
                cache = LayerCache(prompts, own)
                exact = LayerCache(_doubled(prompts), _doubled(own))
                expected = attention.plain(query.double(), _doubled(new), exact, state, spec)
                found = attention.decode_attention(query, new, cache, state, spec)
                gap = float((found.double() - expected).abs().max())
                bound = 2e-2 if on_cuda else 1e-4
                what = f"decode attention, D {dim}, group {size}, {share} heads, window {window}"
                outcome.mark(what, f"{gap:.1e}", f"at most {bound:g}", passed=gap <= bound)
    _sampler_and_trainer_agree(device, outcome)


def _doubled(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return pair[0].double(), pair[1].double()


def _sampler_and_trainer_agree(device: torch.device, outcome: Outcome) -> None:
    work = work_on(device, QWEN_HALF_BILLION, prompts=4, group=7, new_tokens=64, ragged=True)
    ours = Ours(work, device)
    drawn = ours.sample()
    with torch.no_grad():
        scored = ours.policy(ours.batch(drawn).to(device)).logprobs
    own = [row[: len(one.logprobs)] for row, one in zip(scored, drawn, strict=True)]
    sampled = torch.tensor([value for one in drawn for value in one.logprobs])
    gap = (torch.cat(own).float().cpu() - sampled).abs()
    bound = 0.05  # of bfloat16, on a toy, too
    mean = float(gap.mean())
    outcome.mark(
        "log-probs of sampler and trainer, mean gap",
        f"{mean:.1e}",
        f"at most {bound:g}",
        passed=mean <= bound,
    )


# --- the sampler


def step_bytes(work: Work, policy: Policy) -> float:
    """Bytes that a decoding step reads at least, on average over all steps.

    All weights once; keys and values of every live token once, a prompt's once for its group.
    """
    weights = sum(p.numel() * p.element_size() for p in policy.parameters())
    config = policy.model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim
    token *= next(policy.parameters()).element_size()
    own = work.rows * (work.new_tokens + 1) / 2
    return float(weights + token * (work.prompts * work.prompt_tokens + own))


def sampler(device: torch.device, outcome: Outcome) -> None:
    """Sampling beside `generate` and the bandwidth bound; captures; memory over ten calls."""
    rate = copy_rate(device)
    for name, shape in SHAPES.items():
        work = work_on(device, shape)
        ours, theirs = Ours(work, device), Theirs(work, device, checkpointing=False)
        runs = {"grouper": ours.sample, "generate": theirs.sample}
        middle, seconds = medians(runs, work.tries, device)
        del theirs, runs
        earlier = ours.sampler.seconds["prefill"]
        whole = seconds_of(ours.sample, device)
        prefill = ours.sampler.seconds["prefill"] - earlier
        decode = (whole - prefill) / max(1, work.new_tokens - 1)
        share = step_bytes(work, ours.policy) / rate / decode
        outcome.figure(f"{name} seconds", seconds)
        outcome.figure(f"{name} tokens per second", round(sum(work.lengths()) / middle["grouper"]))
        outcome.speed(f"{name}: share of the bandwidth bound", share, 0.25, 0.5)
        ratio = middle["generate"] / middle["grouper"]
        outcome.speed(f"{name}: times as fast as generate", ratio, 2.0)
        _captures_and_memory(f"{name}, fixed lengths", ours, device, outcome)
        del ours
        _empty(device)
        ragged = Ours(work_on(device, shape, ragged=True), device)
        ragged.sample()
        taken = seconds_of(ragged.sample, device)
        outcome.figure(f"{name} ragged seconds", round(taken, 4))
        outcome.figure(
            f"{name} ragged tokens per second", round(sum(ragged.work.lengths()) / taken)
        )
        _captures_and_memory(f"{name}, ragged lengths", ragged, device, outcome)
        del ragged
        _empty(device)


def _captures_and_memory(
    name: str, ours: Ours, device: torch.device, outcome: Outcome, calls: int = 10
) -> None:
    before, seconds = len(ours.sampler.captured), sum(ours.sampler.captured)
    outcome.figure(f"{name}: captures of the first calls", [before, round(seconds, 3)])
    reserved = []
    for _ in range(calls if device.type == "cuda" else 2):
        ours.sample()
        if device.type == "cuda":
            reserved.append(torch.cuda.memory_reserved(device))
    if device.type == "cuda":
        again = len(ours.sampler.captured) - before
        outcome.mark(f"{name}: captures in ten more calls", again, "0", passed=again == 0)
        growth = (reserved[-1] - reserved[0]) / reserved[0]
        outcome.mark(
            f"{name}: growth of reserved memory over ten calls",
            f"{growth:.2%}",
            "at most 1 %",
            passed=growth <= 0.01,
        )


# --- a whole step


@contextmanager
def _markers(labels: list[str]) -> Iterator[Callable[[str], None]]:
    """Lets the host put a mark into the stream; each is a kernel that does nothing else."""

    def mark(label: str) -> None:
        labels.append(label)
        torch.cuda._sleep(1)  # type: ignore[no-untyped-call]  # torch leaves it untyped

    head = token_scores._TokenScores
    forward, backward = head.forward, head.backward

    def marked(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            mark("head begins")
            made = function(*arguments)
            mark("head ends")
            return made

        return call

    with (
        patch.object(head, "forward", staticmethod(marked(forward))),
        patch.object(head, "backward", staticmethod(marked(backward))),
    ):
        yield mark


def _kind(kernel: str) -> str:
    name = kernel.lower()
    if any(part in name for part in ("gemm", "cutlass", "nvjet", "cublas", "xmma", "splitk")):
        return "products"
    return "attention" if "flash" in name or "fmha" in name else "elementwise"


def update_split(ours: Ours, device: torch.device) -> dict[str, float]:
    """Seconds of an update's kernels: head, optimizer; products, attention and others of the body.

    The borders are kernels of their own (`torch.cuda._sleep`) in the one stream.
    """
    batch = ours.batch(ours.sample())
    labels: list[str] = []
    step = ours.optimizer.step
    with _markers(labels) as mark:

        def stepped(scale: float) -> None:
            mark("optimizer begins")
            step(scale)
            mark("optimizer ends")

        ours.optimizer.step = stepped  # type: ignore[method-assign]
        ours.update(batch)
        labels.clear()
        synchronize(device)
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            ours.update(batch)
            synchronize(device)
        ours.optimizer.step = step  # type: ignore[method-assign]
    found = [e for e in profile.events() if e.device_type == DeviceType.CUDA]
    found.sort(key=lambda event: event.time_range.start)
    seconds: dict[str, float] = {}
    order, where = iter(labels), "body"
    for event in found:
        if "spin" in event.name or "sleep" in event.name:
            label = next(order)
            where = label.split()[0] if label.endswith("begins") else "body"
            continue
        if "annotation" in event.name.lower():
            continue
        kind = _kind(event.name) if where == "body" else where
        seconds[kind] = seconds.get(kind, 0.0) + event.time_range.elapsed_us() / 1e6
    return {name: round(value, 4) for name, value in seconds.items()}


# Seconds on an H100 or H200, by shape; another card has no such marks.
SAMPLING_SECONDS = {"0.5B": 1.6, "1.5B": 2.5}
STEP_SECONDS = {"0.5B": 2.6, "1.5B": 4.8}
MICRO_TOKENS = 8192
"""Of a micro-batch: 65,536 tokens of the shape of 1.5B take 138 GiB."""


def step(device: torch.device, outcome: Outcome) -> None:
    """Sampling and a whole step in every mode, and where the time goes; the smaller shape first."""
    rate = matrix_rate(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    for name, shape in SHAPES.items():
        _sampling_of(name, shape, device, outcome)
        full = _step_of(name, shape, "full", rate, device, outcome)
        _step_of(name, shape, "float32", rate, device, outcome)
        if not _has("peft"):
            outcome.not_measured(f"{name}, lora (PEFT is not installed)")
            continue
        adapted = _step_of(name, shape, "lora", rate, device, outcome)
        if device.type == "cuda":
            what = f"{name}: LoRA beside full weights"
            ratio = adapted / full
            outcome.mark(what, round(ratio, 2), "at most 1.3 times", passed=ratio <= 1.3)


def _sampling_of(name: str, shape: dict[str, Any], device: torch.device, outcome: Outcome) -> None:
    """Seconds of three samples at fixed and at ragged lengths; captures after the first call."""
    for ragged in (False, True):
        kind = f"{name}, ragged" if ragged else name
        work = work_on(device, shape, ragged=ragged)
        ours = Ours(work, device, micro_tokens=MICRO_TOKENS)
        ours.sample()
        captured = len(ours.sampler.captured)
        taken = [seconds_of(ours.sample, device) for _ in range(work.tries)]
        middle = statistics.median(taken)
        outcome.figure(f"{kind}: seconds of a sample", [round(value, 4) for value in taken])
        outcome.figure(f"{kind}: tokens per second", round(sum(work.lengths()) / middle))
        again = len(ours.sampler.captured) - captured
        if device.type == "cuda":
            what = f"{kind}: captures after the first call"
            outcome.mark(what, again, "0", passed=again == 0)
        if _is_hopper(device) and not ragged:
            wanted = SAMPLING_SECONDS[name]
            what = f"{name}: seconds of a sample"
            outcome.mark(what, round(middle, 3), f"at most {wanted}", passed=middle <= wanted)
        del ours
        _empty(device)


def _step_of(  # noqa: PLR0917 - a row of a table
    name: str,
    shape: dict[str, Any],
    mode: str,
    rate: float,
    device: torch.device,
    outcome: Outcome,
) -> float:
    """Median seconds of three steps in a mode."""
    work = work_on(device, shape, mode=mode)
    ours = Ours(work, device, micro_tokens=MICRO_TOKENS)
    ours.step()
    taken = [seconds_of(ours.step, device) for _ in range(work.tries)]
    middle = statistics.median(taken)
    outcome.figure(f"{name}, {mode}: seconds of a step", [round(value, 4) for value in taken])
    _split(f"{name}, {mode}", ours, rate, device, outcome)
    # A limit is set where memory has run out once: what is measured then is the degraded mode.
    limit = ours.policy.token_limit
    what = f"{name}, {mode}: memory ran out in an update"
    outcome.mark(what, limit, "never", passed=limit is None)
    if device.type == "cuda":
        reserved = torch.cuda.max_memory_reserved(device) / GIB
        outcome.figure(f"{name}, {mode}: reserved GiB", round(reserved, 2))
        torch.cuda.reset_peak_memory_stats(device)
    if _is_hopper(device) and mode == "full":
        wanted = STEP_SECONDS[name]
        what = f"{name}: seconds of a step"
        outcome.mark(what, round(middle, 3), f"at most {wanted}", passed=middle <= wanted)
    del ours
    _empty(device)
    return middle


def _split(name: str, ours: Ours, rate: float, device: torch.device, outcome: Outcome) -> None:
    """Where the seconds of one step go."""
    work = ours.work
    earlier = ours.sampler.seconds["prefill"]
    sampling = seconds_of(ours.sample, device)
    prefill = ours.sampler.seconds["prefill"] - earlier
    batch = ours.batch(ours.sample())
    ours.update(batch)
    updating = seconds_of(lambda: ours.update(batch), device)
    outcome.figure(
        f"{name}: split",
        {
            "prefill": round(prefill, 4),
            "decode": round(sampling - prefill, 4),
            "update": round(updating, 4),
            "of the update": update_split(ours, device) if device.type == "cuda" else None,
        },
    )
    rows = [(work.prompt_tokens, [work.new_tokens] * work.group)] * work.prompts
    share = update_flops(shape_of(ours.policy), rows) / updating / rate
    what = f"{name}: the update's share of the matrix rate"
    if work.mode == "full":
        outcome.speed(what, share, 0.3, 0.45)
    else:
        outcome.figure(what, round(share, 3))


def trl(device: torch.device, outcome: Outcome) -> None:
    """TRL's default step from its parts beside ours; TRL itself where it is installed."""
    for name, shape in SHAPES.items():
        work = work_on(device, shape)
        ours = Ours(work, device, micro_tokens=MICRO_TOKENS)
        ours.step()
        middle = statistics.median(seconds_of(ours.step, device) for _ in range(work.tries))
        del ours
        _empty(device)
        theirs = Theirs(work, device)
        theirs.step()
        taken = seconds_of(theirs.step, device)
        del theirs
        _empty(device)
        outcome.speed(f"{name}: TRL's parts over ours", taken / middle, 5, 10)
        if not installed():
            outcome.not_measured(f"{name}, TRL itself (it is not installed)")
        elif device.type == "cuda":
            real = statistics.median(trl_seconds(work, device))
            outcome.speed(f"{name}: TRL over ours", real / middle, 5, 10)


# --- weights to a server of vLLM

# As settings of the demonstration, whose vocabulary is small. The 7B is without its embeddings.
PUSHED = {
    "1.5B": "{hidden_size: 1536, layers: 28, intermediate_size: 8960}",
    "7B": "{hidden_size: 3584, layers: 28, intermediate_size: 18944}",
}
PUSHES = 3
Way = Literal["file", "ipc", "nccl"]


def push(device: torch.device, outcome: Outcome) -> None:
    """A push of all weights to a server: as a file, by vLLM's ipc, and by its nccl.

    A server on the trainer's card takes files and ipc, one on the next card files and nccl. After
    each the sampler compares log-probs, and raises where they differ.
    """
    if not _has("vllm", "pydantic"):
        outcome.not_measured("pushes to a server (vLLM is not installed)")
        return
    cards = torch.cuda.device_count() if device.type == "cuda" else 0
    servers: dict[str, Way] = {"cuda:0": "ipc", "cuda:1": "nccl"}
    for number, (server, backend) in enumerate(servers.items(), start=1):
        if cards < number:
            outcome.not_measured(f"pushes by {backend} ({cards} CUDA devices, it needs {number})")
            continue
        for name, shape in PUSHED.items():
            seconds = {}
            pushes = _push_seconds(shape, device, server, ("file", backend))
            for way, (taken, gap) in pushes.items():
                seconds[way] = taken
                outcome.figure(f"{name}, server on {server}: push by {way}, s", round(taken, 3))
                outcome.figure(f"{name}, server on {server}: gap after {way}, nats", gap)
            ratio = seconds["file"] / seconds[backend]
            outcome.speed(f"{name}: a push by file over one by {backend}", ratio, 3, 14)
            _empty(device)


def _push_seconds(
    shape: str, device: torch.device, server: str, ways: Sequence[Way]
) -> dict[str, tuple[float, float | None]]:
    """The median seconds of a push to one server by each way in turn, and the gap after it."""
    from grouper.config.loading import load_recipe
    from grouper.models.merging import weight_shapes, whole_weights
    from grouper.sampling.base import SampleRequest
    from grouper.sampling.vllm.sampler import VllmSampler, Weights
    from grouper.sampling.vllm.server import ServerEngine
    from grouper.training.prepare import Prepared
    from grouper.training.problem_sets import load_problem_sets

    # A quarter of the card for a server, so that a trainer is beside it as in a run.
    vllm = f"{{mode: server, servers: [{server}], transfer: file, gpu_memory_utilization: 0.25}}"
    settings = [f"model.new={shape}", "model.dtype=bfloat16", f"device={device.type}"]
    settings += ["sampling.engine=vllm", f"sampling.vllm={vllm}", "sampling.vllm.tolerance=0.1"]
    recipe = load_recipe("demo", settings)
    found: dict[str, tuple[float, float | None]] = {}
    with Prepared(recipe, load_problem_sets(recipe), quiet=True) as prepared:
        policy = prepared.model
        sampler = prepared.samplers.over(policy)
        assert isinstance(sampler, VllmSampler)
        engine = prepared.samplers.engine_of_vllm(policy)
        assert isinstance(engine, ServerEngine)
        params = prepared.training_params(max_new_tokens=4)
        request = SampleRequest(prompt=prepared.prompt, params=params, key=1)
        for way in ways:
            engine._transfer = way
            engine.choose_transfer(policy.device)
            # The first one connects.
            policy.version += 1
            list(sampler.sample([request]))
            tries: list[float] = []
            for _ in range(PUSHES):
                weights = Weights(weight_shapes(policy), whole_weights(policy))
                synchronize(policy.device)
                started = time.perf_counter()
                engine.push(weights, f"push-{len(tries)}", 1.0)
                tries.append(time.perf_counter() - started)
            found[way] = (statistics.median(tries), sampler.gap)
    return found


# --- memory


def plan(device: torch.device, outcome: Outcome) -> None:
    """The most that tensors take in sampling and in the update, beside what `plan` says."""
    for mode in ("full", "float32", "lora"):
        if mode == "lora" and not _has("peft"):
            outcome.not_measured("memory with LoRA (PEFT is not installed)")
            continue
        work = work_on(device, QWEN_HALF_BILLION, mode=mode)
        planned = _planned(work)
        if planned is None:
            outcome.not_measured(f"{mode}, beside the plan (pydantic is not installed)")
            continue
        outcome.figure(f"{mode}: planned GiB", round(planned / GIB, 3))
        if device.type != "cuda":
            outcome.not_measured(f"{mode}: peak memory (no CUDA device)")
            continue
        measured = _peak(work, device)
        ratio = measured / planned
        outcome.figure(f"{mode}: peak GiB", round(measured / GIB, 2))
        what = f"{mode}: measured over planned peak"
        outcome.mark(what, round(ratio, 3), "0.8 to 1.05", passed=0.8 <= ratio <= 1.05)
    if device.type == "cuda":
        _after_a_failed_capture(device, outcome)
    else:
        outcome.not_measured("memory after a capture that fails (no CUDA device)")


def _peak(work: Work, device: torch.device) -> int:
    """Bytes that tensors take at most in a step after the first."""
    ours = Ours(work, device, micro_tokens=MICRO_TOKENS)
    ours.step()
    synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    ours.step()
    synchronize(device)
    measured = torch.cuda.max_memory_allocated(device)
    del ours
    _empty(device)
    return measured


def _after_a_failed_capture(device: torch.device, outcome: Outcome) -> None:
    """Whether PyTorch's allocator gives memory back after a capture that failed (finding V6)."""
    from grouper.sampling.engine import CudaGraphs

    number = torch.zeros(1, device=device)

    def waits() -> None:
        number.add_(1)
        number.tolist()  # the host waits for the device, which no capture allows

    recorded = CudaGraphs(device, "a toy").record(waits)
    outcome.mark("a capture that must fail", recorded is None, "True", passed=recorded is None)
    _empty(device)
    before = torch.cuda.memory_reserved(device)
    block = torch.empty(GIB, dtype=torch.uint8, device=device)
    del block
    _empty(device)
    left = torch.cuda.memory_reserved(device) - before
    what = "reserved bytes that stay after a failed capture"
    outcome.mark(what, left, "0", passed=left <= 0)


def _planned(work: Work) -> int | None:
    """Bytes that `plan` says the run of this work takes at most."""
    if not _has("pydantic"):
        return None
    from transformers import Qwen2Config

    from grouper.advice.plan import plan_run
    from grouper.config.loading import load_recipe

    with tempfile.TemporaryDirectory() as folder:
        Qwen2Config(**work.shape, architectures=["Qwen2ForCausalLM"]).save_pretrained(folder)
        recipe: dict[str, Any] = {
            "name": "memory",
            "skip_sft": True,
            "model": {
                "path": folder,
                "dtype": "float32" if work.mode == "float32" else "bfloat16",
                "lora": {"rank": 16, "alpha": 32} if work.mode == "lora" else None,
            },
            "prompt": {"max_prompt_tokens": work.prompt_tokens},
            "data": {"train": {"source": "file", "path": f"{folder}/none.jsonl"}},
            "rewards": [{"name": "correctness"}],
            "sampling": {"max_new_tokens": work.new_tokens, "max_slots": work.rows},
            "grpo": {
                "steps": 1,
                "prompts_per_step": work.prompts,
                "group_size": work.group,
                "tokens_per_micro_batch": MICRO_TOKENS,
            },
        }
        file = Path(folder) / "memory.yaml"
        file.write_text(json.dumps(recipe))  # JSON is YAML
        return plan_run(load_recipe(file), device="cuda").peak


LIMIT_SHARE = 0.29
"""Of the card's memory: 23 of the 80 GB of an H100."""


def limit(device: torch.device, outcome: Outcome) -> None:
    """Two steps of LoRA at the shape of Qwen3-4B where the card pretends to be a smaller one."""
    if not _has("peft"):
        outcome.not_measured("LoRA at the shape of 4B (PEFT is not installed)")
        return
    allowed = 0.0
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        share = min(LIMIT_SHARE, 24e9 / total)
        allowed = share * total / 1e9
        torch.cuda.set_per_process_memory_fraction(share, device)
    work = work_on(device, QWEN3_FOUR_BILLION, mode="lora")
    ours = Ours(work, device, micro_tokens=MICRO_TOKENS)
    taken = [round(seconds_of(ours.step, device), 2) for _ in range(2)]
    outcome.figure("seconds", taken)
    if device.type != "cuda":
        outcome.not_measured("what it reserves of a card's memory (no CUDA device)")
        return
    peak = torch.cuda.max_memory_reserved(device) / 1e9
    what = "reserved GB of two steps of LoRA at the shape of Qwen3-4B"
    wanted = f"at most {allowed:.1f}, survived"
    outcome.mark(what, round(peak, 1), wanted, passed=peak <= allowed)


# --- the demonstration

TOY_DEMONSTRATION = (
    "sft.steps=2",
    "grpo.steps=3",
    "grpo.prompts_per_step=4",
    "grpo.allow_truncation=true",
    "data.sft.options.count=60",
    "data.train.options.count=60",
    "data.validation.options.count=4",
    "data.test.options.count=8",
    "model.new.hidden_size=64",
    "model.new.intermediate_size=128",
)


def demonstration(device: torch.device, outcome: Outcome) -> None:
    """`grouper run demo`, killed in GRPO and resumed; without a card a toy of it."""
    if not _has("pydantic", "rich"):
        outcome.not_measured("the demonstration (this package's dependencies are not installed)")
        return
    from grouper.runs.folder import RunFolder

    on_cuda = device.type == "cuda"
    settings = ["grpo.checkpoint_every=10"]
    if not on_cuda:
        settings = [*TOY_DEMONSTRATION, "grpo.checkpoint_every=1"]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "demo"
        command = [
            *(sys.executable, "-m", "grouper", "run", "demo", *settings),
            *(f"device={device.type}", f"output_dir={folder}", "--quiet"),
        ]
        outcome.figure("killed in GRPO", _kill_in_grpo(command, run))
        done = subprocess.run([*command, "--resume"], capture_output=True, text=True, check=False)
        result = RunFolder(run).read_evaluation("grpo")
        accuracy = None if result is None else round(result.accuracy, 4)
        outcome.figure("accuracy", accuracy)
        what = "demonstration, killed and resumed"
        if on_cuda:
            passed = done.returncode == 0 and accuracy is not None and accuracy >= 0.94
            outcome.mark(what, accuracy or done.stderr[-300:], "0.94 or more", passed=passed)
        else:
            passed = done.returncode == 0 and accuracy is not None
            outcome.mark(what, done.returncode, "0", passed=passed)


def _kill_in_grpo(command: list[str], run: Path) -> bool:
    """Start a run and kill it once GRPO has a checkpoint; returns whether it was still running."""
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while child.poll() is None and not any((run / "grpo").glob("checkpoint-*/trainer_state.json")):
        time.sleep(0.05)
    running = child.poll() is None
    child.send_signal(signal.SIGKILL)
    child.wait()
    return running


# --- several cards


def processes(device: torch.device, outcome: Outcome) -> None:
    """Two processes on two cards give the gradient of one, by DDP and FSDP2, with LoRA and without.

    torchrun starts this module again (`_worker`).
    """
    cards = torch.cuda.device_count() if device.type == "cuda" else 0
    if cards < 2:
        outcome.not_measured(f"gradients of several processes ({cards} CUDA devices)")
        return
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "gaps.json"
        done = subprocess.run(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                *("--nproc-per-node", "2", "--module", "benchmarks.gpu.sections", str(found)),
            ],
            env=importing_from(ROOT),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(done.stderr[-1500:])
        for name, gap in json.loads(found.read_text()).items():
            what = f"{name}: gradient of two processes beside one, relative"
            outcome.mark(what, f"{gap:.1e}", "at most 2e-2", passed=gap <= 2e-2)


def _worker(found: Path) -> None:
    """One of two processes: the gradient of a batch alone, then shared."""
    from benchmarks.gpu.workload import ON_POLICY
    from grouper.models.merging import unsharded
    from grouper.training.parallel import (
        ParallelPolicy,
        join_processes,
        leave_processes,
        make_parallel,
    )
    from grouper.training.update import accumulate_gradient

    def gradient_of(parameter: Tensor) -> Tensor:
        assert parameter.grad is not None
        return unsharded(parameter.grad).float().cpu()

    group = join_processes()
    device = torch.device("cuda", group.rank)
    gaps: dict[str, float] = {}
    for mode in ("full", "lora") if _has("peft") else ("full",):
        work = work_on(device, QWEN_HALF_BILLION, mode=mode, prompts=4, group=4, new_tokens=64)
        ours = Ours(work, device)
        drawn = group.on_rank0(ours.sample)
        batch = ours.batch(drawn)
        accumulate_gradient(ParallelPolicy(ours.policy), batch, ON_POLICY, token_budget=4096)
        alone = {n: gradient_of(p) for n, p in ours.policy.trainable().items()}
        for kind in ("ddp", "fsdp"):
            policy = Ours(work, device).policy
            replica = make_parallel(policy, group, kind)
            accumulate_gradient(replica, batch, ON_POLICY, token_budget=2048, together=True)
            gap = scale = 0.0
            for name, parameter in policy.trainable().items():
                shared = gradient_of(parameter)
                gap += float((shared - alone[name]).square().sum())
                scale += float(alone[name].square().sum())
            gaps[f"{kind}, {mode}"] = (gap / scale) ** 0.5
    if group.rank == 0:
        found.write_text(json.dumps(gaps))
    leave_processes()


PARTS = {
    "rates": Part(rates, 30),
    "tests": Part(tests, 120),
    "kernels": Part(kernels, 60),
    "step": Part(step, 150),
    "demonstration": Part(demonstration, 60),
    "plan": Part(plan, 60),
    "limit": Part(limit, 60),
    "sampler": Part(sampler, 300),
    "trl": Part(trl, 300),
    "processes": Part(processes, 180),
    "push": Part(push, 400),
}
FIRST = ("rates", "tests", "kernels", "step", "demonstration", "plan", "limit")
"""Those of the first quarter of an hour, in this order; together within nine minutes."""


if __name__ == "__main__":
    _worker(Path(sys.argv[1]))
