"""vLLM behind the sampler protocol: requests and answers, and a proof that its weights are fresh.

`VllmSampler` is the adapter. It pushes the policy's weights whenever those of the engine are of
another version, has the engine acknowledge the push, and then compares log-probs with the
trainer's on fixed prompts; if they differ by more than the tolerance, nothing is sampled.

An `Engine` is vLLM in this process (`LocalEngine`) or behind HTTP (`server.py`). Engines start
with random weights, so that a push that was skipped cannot look like an old policy.
"""

from __future__ import annotations

import collections
import copy
import functools
import hashlib
import importlib
import itertools
import json
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from grouper.algorithms.batching import TrainBatch, unweighted_rows
from grouper.errors import ConfigError, ModelError, as_model_error
from grouper.models.merging import Rounding, merged_copy, weight_shapes, whole_weights
from grouper.models.policy import Policy
from grouper.models.process_group import ProcessGroup
from grouper.sampling.base import SampleRequest, StopStrings, check_lengths
from grouper.sampling.vllm.worker import BACKEND, EXTENSION, HANDED
from grouper.sampling.weights import adapter_saver
from grouper.types import Completion, FinishReason, SamplingParams

if TYPE_CHECKING:
    from grouper.config.schema import SamplingConfig

# Tokens of the fixed prompts. The prefix cache keeps whole blocks (128 tokens on a CPU, 16 on a
# GPU). The short prompt is shorter than any block. The long one fills blocks, which a stale
# cache would still have from the push before, so that its log-probs show it.
_CANARIES = (12, 200)
_CANARY_TOKENS = 8

# Allowed mean difference of log-probs, by whether both sides compute in float32.
TOLERANCE = {True: 1e-5, False: 0.02}

# In bfloat16 two correct ways to compute the same log-probs differ through rounding, by an amount
# that depends on the model: 0.01 to 0.02 nats in Qwen2.5-Coder-0.5B, 0.04 to 0.07 in SmolLM2-135M
# (both on the fixed prompts). So the trainer's two layouts are compared as well, and this many
# times their difference is allowed.
NOISE_FACTOR = 3.0

# vLLM reads these when it is imported.
_ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
# Defaults that the user may override in the environment.
ENVIRONMENT_DEFAULTS = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


class Ask(NamedTuple):
    """One completion to sample, in vLLM's terms."""

    prompt: tuple[int, ...]
    params: dict[str, Any]
    """Arguments of `vllm.SamplingParams`, which are also fields of a request over HTTP."""
    replica: int | None = None
    """The number of the replica that has to sample it; None: any."""
    adapter: bool = False
    """Whether to apply the adapter that was pushed last to the weights."""


@dataclass(frozen=True)
class Weights:
    """The weights of one push, to be gone through once: each is gathered when it is its turn."""

    shapes: dict[str, tuple[int, ...]]
    """The shape of each weight by its name, in the order of the values."""
    values: Iterable[tuple[str, Tensor]]
    """Name and value of each weight."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.values)


Save = Callable[[str], None]
"""A function that writes an adapter to a folder."""


class Answer(NamedTuple):
    """The sampled completion of an `Ask`."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    stopped: bool
    """False: truncated at the maximum length."""


class Engine(Protocol):
    """vLLM, wherever it runs."""

    replicas: int

    def answers(self, asks: Sequence[Ask]) -> Iterator[tuple[int, Answer]]:
        """Yield (index, answer) as each finishes."""

    def push(
        self, weights: Weights | None, tag: str, temperature: float, adapter: Save | None = None
    ) -> None:
        """Give every replica these weights, and clear its prefix cache.

        Args:
            weights: None: keep weights and temperature of the last push.
            tag: names weights and adapter together.
            temperature: logits are divided by it from then on, before all else.
            adapter: writes LoRA that is not merged to a folder, as PEFT does.
        """

    def tag(self) -> str | None:
        """Return the tag that every replica reports; None if they differ, or have no weights."""

    def rest(self) -> None:
        """Free the device's memory, weights included, until the next push."""

    def close(self) -> None:
        """End the engine."""


class VllmSampler:
    """Samples completions with vLLM from the weights of a policy.

    Args:
        policy: the policy being trained, or measured.
        engine: runs a model of the policy's shape.
        tokenizer: for decoding and stop strings.
        stop_token_ids: ids that end a completion.
        max_length: the longest sequence the engine takes, or None.
        tolerance: mean difference in nats that is allowed between the engine's log-probs and the
            policy's. The default for bfloat16 is raised if the trainer's own two layouts differ.
        temperature: at which log-probs are taken, whatever a completion is sampled at.
        adapter: do not merge LoRA; after the first push, only the adapter is pushed again.
        rounded: the dtype that merged adapters are rounded to; None: nothing is merged, or float32.
        processes: the processes that train the policy. The first pushes the weights and compares
            log-probs; each samples the requests that it is given.
    """

    def __init__(
        self,
        policy: Policy,
        engine: Engine,
        tokenizer: Any,
        *,
        stop_token_ids: Sequence[int],
        max_length: int | None,
        tolerance: float,
        temperature: float = 1.0,
        adapter: bool = False,
        rounded: torch.dtype | None = None,
        processes: ProcessGroup | None = None,
    ) -> None:
        self._policy = policy
        self._engine = engine
        self._processes = processes or ProcessGroup()
        self._stop_ids = sorted(set(stop_token_ids))
        self._max_length = max_length
        self._tolerance = tolerance
        self._temperature = temperature
        self._adapter = adapter and policy.adapter is not None
        merges = policy.adapter is not None and not self._adapter
        self._rounded = rounded if merges else None
        self.update_share: float | None = None
        """Share of the adapter's change that is left in the pushed weights after rounding; None:
        nothing was merged into coarser weights."""
        make_watcher = functools.partial(StopStrings, tokenizer)
        self._watcher = functools.cache(make_watcher)
        # A random name, so that the tags of another sampler over the same engine differ from ours.
        self._name = self._processes.on_rank0(lambda: secrets.token_hex(4))
        self._proved: str | None = None
        """The tag of the weights whose log-probs have been compared."""
        self._held: tuple[str, int] | None = None
        """Tag and version of the weights to use whatever the policy has become; see `held`."""
        self.gap: float | None = None
        self.seconds = {"prefill": 0.0, "push": 0.0}

    def sample(self, requests: Sequence[SampleRequest]) -> Iterator[tuple[int, Completion]]:
        """Yield (request index, completion) as each finishes.

        Every process has to call it, also with zero requests.

        Raises:
            PromptError: a prompt and its completion do not fit.
            ModelError: the engine is gone, or does not have the policy's weights.
        """
        check_lengths(requests, self._max_length)
        if self._held is not None:
            tag, version = self._held
        else:
            tag = self._freshen()
            version = self._policy.version
        asks = []
        for request in requests:
            params = self._params(request.params, request.key)
            asks.append(Ask(request.prompt.token_ids, params, adapter=self._adapter))
        for index, answer in self._engine.answers(asks):
            yield index, self._completion(answer, requests[index].params, version)
        self._require(tag, "lost its weights while it sampled (has a server started again?)")

    def pinned(self) -> VllmSampler:
        """Return a sampler that stays with the weights as they are now.

        Another thread of one process may sample with it, as long as nothing else uses the engine.

        Raises:
            ModelError: the engine is gone, or does not have the policy's weights.
        """
        sampler = copy.copy(self)
        tag = self._freshen()
        sampler._held = (tag, self._policy.version)  # noqa: SLF001 - a copy of this object
        return sampler

    def rest(self) -> None:
        """Let the engine rest; it is ended with the run, not here."""
        self._engine.rest()

    release = rest

    def _freshen(self) -> str:
        """Push the policy's weights unless the engine has them, and compare log-probs.

        Returns:
            The tag of the weights.
        """
        tag = f"{self._name}-{self._policy.version}"
        on_rank0 = self._processes.on_rank0
        engine_tag = on_rank0(self._engine.tag)
        if engine_tag == self._proved == tag:
            return tag
        # If the engine still has our last push, its weights below the adapter are good.
        has_last_push = engine_tag is not None and engine_tag == self._proved
        started = time.perf_counter()
        self._proved = None
        weights: Weights | None = None
        rounding: Rounding | None = None
        adapter = adapter_saver(self._policy) if self._adapter else None
        if adapter is None or not has_last_push:
            if self._rounded is not None:
                rounding = Rounding(self._rounded, seed=self._policy.version)
                values = rounding.weights(self._policy)
            else:
                values = whole_weights(self._policy, merged=not self._adapter)
            weights = Weights(weight_shapes(self._policy), values)
            if self._processes.rank > 0:
                # Run through the weights: each of them is gathered from all processes.
                collections.deque(weights, maxlen=0)

        def push() -> None:
            with _as_model_error("vLLM does not take the weights"):
                self._engine.push(weights, tag, self._temperature, adapter)
            self._require(tag, "did not acknowledge its weights")

        on_rank0(push)
        if rounding is not None:
            self.update_share = rounding.share
        self._prove()
        self._proved = tag
        self.seconds["push"] += time.perf_counter() - started
        return tag

    def _require(self, tag: str, otherwise: str) -> None:
        """Raise `ModelError` if the engine reports other weights; `otherwise` says why it might."""
        engine_tag = self._engine.tag()
        if engine_tag != tag:
            raise ModelError(
                f"vLLM {otherwise}: it has {engine_tag or 'none'}, not {tag}",
                where="sampling.engine",
                fix="Nothing of this step was kept: continue with --resume.",
            )

    @torch.no_grad()
    def _prove(self) -> None:
        """Compare log-probs on the fixed prompts, on every replica.

        Every process computes them, since the weights may be split over all; the first compares.

        Raises:
            ModelError: they differ by more than the tolerance.
        """
        on_rank0 = self._processes.on_rank0
        prompts = self._canary_prompts()
        greedy = SamplingParams(temperature=0.0, max_new_tokens=_CANARY_TOKENS)
        # Nothing ends early, and no token is masked.
        no_stops = {"stop_token_ids": [], "min_tokens": 0}
        asks = []
        for replica in range(self._engine.replicas):
            for prompt in prompts:
                params = self._params(greedy, key=0) | no_stops
                asks.append(Ask(prompt, params, replica, self._adapter))
        answers = on_rank0(lambda: dict(self._engine.answers(asks)))
        in_order = [answers[index] for index in range(len(asks))]
        batch = unweighted_rows(
            [ask.prompt for ask in asks],
            [answer.token_ids for answer in in_order],
            range(len(asks)),
        )
        batch = replace(batch, temperature=self._temperature)
        rows = batch.to(self._policy.device)
        # Rounded weights are compared with the same rounded weights: the effect of rounding is
        # reported as `update_share`, and does not mean that the engine's weights are wrong.
        policy = self._policy
        if self._rounded is not None and not self._is_split():
            policy = self._as_pushed()
        ours = self._logprobs(policy, rows)
        theirs = torch.tensor([answer.logprobs for answer in in_order], dtype=torch.float64)
        # One mean per replica and prompt, the prompts of a replica together.
        gaps = on_rank0(lambda: (ours - theirs).abs().mean(1))
        self.gap = float(gaps.max())
        # A policy that is not finite is reported by the update, with a better message.
        if self.gap <= self._tolerance or not bool(ours.isfinite().all()):
            return
        tolerance = max(self._tolerance, NOISE_FACTOR * self._noise(rows))
        if self.gap > tolerance:
            # With good log-probs on the short prompts, the weights are right: only the long ones
            # fill whole blocks of the cache.
            stale = float(gaps[:: len(prompts)].max()) <= tolerance
            raise ModelError(
                f"after the push of version {self._policy.version} vLLM's log-probs differ from "
                f"the trainer's by {self.gap:.3g} nats per token, allowed {tolerance:.3g}: "
                + ("its prefix cache is stale" if stale else "its weights are different"),
                where="sampling.engine",
                fix="Nothing was sampled. A difference of precision: raise sampling.vllm.tolerance "
                "or set sampling.dtype. Else use sampling.engine=native, and please report it.",
            )

    def _canary_prompts(self) -> list[tuple[int, ...]]:
        """Return the fixed prompts, which differ from each other only in length."""
        longest = max(_CANARIES)
        if self._max_length:
            longest = self._max_length - _CANARY_TOKENS
        prompts = []
        for length in _CANARIES:
            numbers = torch.arange(min(length, longest))
            token_ids = (numbers * 7919 + 11) % self._policy.vocabulary
            prompts.append(tuple(token_ids.tolist()))
        return prompts

    def _logprobs(self, policy: Policy, rows: TrainBatch) -> Tensor:
        """Compute log-probs [R, T] in float64 on the CPU."""
        logprobs: Tensor = policy(rows).logprobs.double().cpu()
        # Weights that are split stay gathered until a backward, and there is none here.
        getattr(policy, "reshard", lambda: None)()
        return logprobs

    def _noise(self, rows: TrainBatch) -> float:
        """Measure how far rounding alone moves log-probs: by the trainer's two layouts.

        Returns:
            Their mean difference in nats. Zero if the tolerance is not the default for bfloat16,
            and for a model that has one layout only.
        """
        policy = self._policy
        if self._tolerance != TOLERANCE[False] or not policy.native:
            return 0.0
        shared = self._logprobs(policy, rows)
        policy.native = False
        try:
            padded = self._logprobs(policy, rows)
        finally:
            policy.native = True
        return float((shared - padded).abs().mean(1).max())

    def _is_split(self) -> bool:
        """Tell whether the weights are split over processes, so that they cannot be copied."""
        return any(isinstance(parameter, DTensor) for parameter in self._policy.parameters())

    def _as_pushed(self) -> Policy:
        """Return the policy with its adapter merged and rounded as it was pushed."""
        assert self._rounded is not None
        policy, _ = merged_copy(self._policy, self._rounded, seed=self._policy.version)
        return policy

    def _params(self, params: SamplingParams, key: int) -> dict[str, Any]:
        """Return the arguments of a request.

        All that could change a token are named, so that none comes from vLLM's defaults.
        """
        return {
            "n": 1,
            "temperature": params.temperature / self._temperature,  # the logits have it already
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": params.min_p,
            "min_tokens": params.min_new_tokens,
            "max_tokens": params.max_new_tokens,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "seed": key >> 1,  # 63 bits: vLLM's seeds are signed
            "stop": list(params.stop),
            "stop_token_ids": self._stop_ids,
            "ignore_eos": True,  # the model's own; ours are in stop_token_ids
            "logprobs": 0,  # of the sampled token alone
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "include_stop_str_in_output": True,
        }

    def _completion(self, answer: Answer, params: SamplingParams, version: int) -> Completion:
        length, reason = self._end(answer, params)
        return self._watcher(params.stop).completion(
            answer.token_ids[:length],
            answer.logprobs[:length],
            reason,
            include_stop=params.include_stop,
            policy_version=version,
        )

    def _end(self, answer: Answer, params: SamplingParams) -> tuple[int, FinishReason]:
        """Return the length of a completion and why it ends, by the rules of the native sampler.

        vLLM looks for stop strings only after `min_tokens`, so it may have sampled too much.
        """
        token_ids = answer.token_ids
        watcher = self._watcher(params.stop)
        if params.stop:
            candidates = watcher.candidates
            for length, token in enumerate(token_ids, start=1):
                if token in self._stop_ids:
                    continue
                may_complete = token >= len(candidates) or candidates[token]
                if may_complete and watcher.completed(token_ids[:length]):
                    return length, FinishReason.STOP_STRING
        if answer.stopped and token_ids[-1] in self._stop_ids:
            return len(token_ids), FinishReason.STOP_TOKEN
        # Also if vLLM saw a stop string that is not in the text as we decode it: truncated there.
        return len(token_ids), FinishReason.LENGTH


# --- arguments of an engine ----------------------------------------------------------------------


# The share of a GPU's memory, by whether vLLM has the GPU for itself. The larger one is its own
# default; beside a trainer, most of the memory is the trainer's.
_MEMORY_SHARE = {True: 0.9, False: 0.3}


def engine_arguments(
    sampling: SamplingConfig,
    *,
    dtype: str,
    device: str,
    max_length: int | None,
    own_card: bool = False,
) -> dict[str, Any]:
    """Return the arguments of vLLM's engine that follow from a recipe.

    Args:
        sampling: the recipe's settings for sampling.
        dtype: of weights and products.
        device: `cpu`, `cuda` or `mps`.
        max_length: the longest sequence, or None.
        own_card: nothing else runs on its device.

    Raises:
        ConfigError: `sampling.vllm.params` sets one of them.
    """
    chosen: dict[str, Any] = {
        "dtype": dtype,
        "load_format": "dummy",  # random: the first push brings the weights
        "generation_config": "vllm",  # nothing is taken from the model's
        "max_num_seqs": sampling.max_slots,
        "logprobs_mode": "raw_logprobs",  # before any truncation
        "weight_transfer_config": {"backend": BACKEND},
        "worker_extension_cls": EXTENSION,
        "trust_remote_code": False,
        "seed": 0,  # of draws without a seed, of which there are none
    }
    if max_length is not None:
        chosen["max_model_len"] = max_length
    if device == "cpu":
        chosen["enforce_eager"] = True
        # With it, the worker crashes when it takes half a prompt of a request with a seed: no
        # generator of the CPU can be rewound.
        chosen["enable_chunked_prefill"] = False
    else:
        share = sampling.vllm.gpu_memory_utilization
        chosen["gpu_memory_utilization"] = share or _MEMORY_SHARE[own_card]
        chosen["enable_sleep_mode"] = sampling.vllm.mode == "colocate"
    user_params = sampling.vllm.params
    reserved = {*chosen, "model", "tokenizer", "quantization"}
    conflicts = sorted(user_params.keys() & reserved)
    if conflicts:
        raise ConfigError(
            f"{', '.join(conflicts)}: this follows from the rest of the recipe",
            where="sampling.vllm.params",
            fix="Leave it out.",
        )
    return chosen | user_params


# The settings that two models of one shape have in common.
_SHAPE_SETTINGS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "vocab_size",
    "tie_word_embeddings",
)


def write_shape(folder: Path, config: Any, tokenizer: Any) -> str:
    """Write the configuration and tokenizer that vLLM needs before it has weights.

    Args:
        folder: exists.
        config: of the model, from transformers.
        tokenizer: from transformers.

    Returns:
        A name that only models of this shape and tokenizer have.
    """
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    text_config = config.get_text_config()
    shape = [getattr(text_config, name, None) for name in _SHAPE_SETTINGS]
    vocabulary = sorted(tokenizer.get_vocab().items())
    text = json.dumps([shape, vocabulary])
    digest = hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
    return f"grouper-{digest}"


# --- in this process -----------------------------------------------------------------------------


class LocalEngine:
    """vLLM in this process, on its device.

    Args:
        folder: configuration and tokenizer.
        arguments: from `engine_arguments`.
    """

    replicas = 1

    def __init__(self, folder: Path, arguments: dict[str, Any]) -> None:
        os.environ |= ENVIRONMENT_DEFAULTS | dict(os.environ) | _ENVIRONMENT
        threads = torch.get_num_threads()
        set_threads = torch.set_num_threads
        importlib.import_module(EXTENSION.rpartition(".")[0])  # before the model is made
        self._vllm = importlib.import_module("vllm")
        with _as_model_error("vLLM does not start"):
            self._llm: Any = self._vllm.LLM(model=str(folder), **arguments)
        torch.set_num_threads = set_threads  # on a CPU vLLM disables this function
        set_threads(threads)
        self._llm.init_weight_transfer_engine({"init_info": {}})
        self._sleeps = bool(arguments.get("enable_sleep_mode"))
        self._asleep = False
        self._tag: str | None = None
        self._lora: Any = None
        self._names = map(str, itertools.count())

    def answers(self, asks: Sequence[Ask]) -> Iterator[tuple[int, Answer]]:
        engine = self._llm.llm_engine
        final_only = self._vllm.sampling_params.RequestOutputKind.FINAL_ONLY
        waiting: dict[str, int] = {}
        try:
            for number, ask in enumerate(asks):
                params = self._vllm.SamplingParams(**ask.params, output_kind=final_only)
                name = next(self._names)
                prompt = {"prompt_token_ids": list(ask.prompt)}
                lora = self._lora if ask.adapter else None
                engine.add_request(name, prompt, params, lora_request=lora)
                waiting[name] = number
            while waiting:
                for output in engine.step():
                    if output.finished:
                        number = waiting.pop(output.request_id)
                        yield number, _answer(output.outputs[0])
        finally:
            if waiting:  # Ctrl-C, or an error elsewhere
                engine.abort_request(list(waiting))

    def push(
        self, weights: Weights | None, tag: str, temperature: float, adapter: Save | None = None
    ) -> None:
        if self._asleep:
            # Until then, PyTorch keeps the memory that the update has freed.
            torch.cuda.empty_cache()
            self._llm.wake_up()
            self._asleep = False
        self._tag = None
        if weights is not None:
            HANDED[tag] = weights
            self._llm.start_weight_update()
            update = {"version": tag, "temperature": temperature}
            self._llm.update_weights({"update_info": update})
            self._llm.finish_weight_update(tag)
        if adapter is not None:
            with tempfile.TemporaryDirectory(prefix="grouper-") as folder:
                adapter(folder)
                request = functools.partial(self._vllm.lora.request.LoRARequest, tag, 1, folder)
                self._llm.llm_engine.add_lora(request(load_inplace=True))
                self._lora = request()
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("its prefix cache could not be cleared")
        self._tag = tag

    def tag(self) -> str | None:
        return self._tag

    def rest(self) -> None:
        if self._sleeps and not self._asleep:
            self._llm.sleep(level=2)  # the weights are pushed again when it wakes
            self._asleep = True
            self._tag = None

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()
        self._llm = None


_as_model_error = functools.partial(
    as_model_error,
    where="sampling.engine",
    fix="Where it lacks memory: sampling.vllm.gpu_memory_utilization (on a CPU "
    "VLLM_CPU_KVCACHE_SPACE), sampling.max_slots, sampling.max_new_tokens. Where a folder is full: "
    "GROUPER_WEIGHTS_DIR names another one, which the servers must see as well. Where ipc or nccl "
    "fails: sampling.vllm.transfer=file.",
    memory=True,
)


def _answer(output: Any) -> Answer:
    """Convert vLLM's output of one completion."""
    token_ids = tuple(output.token_ids)
    logprobs = []
    for token, entry in zip(token_ids, output.logprobs, strict=True):
        logprobs.append(float(entry[token].logprob))
    stopped = output.finish_reason == "stop"
    return Answer(token_ids, tuple(logprobs), stopped)
