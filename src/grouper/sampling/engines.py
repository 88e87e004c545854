"""The samplers that a recipe can name in `sampling.engine`: each a function and a row."""

from __future__ import annotations

import logging
import secrets
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from grouper.config.schema import EngineName, Recipe
from grouper.errors import require_vllm
from grouper.models.device import DTYPES
from grouper.models.loading import context_length
from grouper.models.merging import can_be_added, keeps_adapter
from grouper.models.policy import ADAPTER, Policy
from grouper.models.process_group import ProcessGroup
from grouper.sampling.base import ModelSampler
from grouper.sampling.native import NativeSampler
from grouper.sampling.vllm import (
    TOLERANCE,
    Engine,
    LocalEngine,
    VllmSampler,
    engine_arguments,
    write_shape,
)
from grouper.sampling.vllm_server import ServerEngine, ServerProcess, shared_secret
from grouper.sampling.weights import SamplingWeights, copy_dtype

log = logging.getLogger(__name__)

# The pre-flight samples completions of up to this many times the budget.
STRETCH = 4


@dataclass(slots=True, kw_only=True)
class Samplers:
    """Makes the samplers of a recipe; an engine that was started serves all of them.

    Args:
        recipe: names the engine.
        tokenizer: of all its models.
        stop_token_ids: ids that end a completion.
        longest: tokens of the longest completion.
        processes: those that train; the first starts the engine.
    """

    recipe: Recipe
    tokenizer: Any
    stop_token_ids: Sequence[int]
    longest: int
    processes: ProcessGroup = field(default_factory=ProcessGroup)
    ends: ExitStack = field(default_factory=ExitStack)
    """What `close` has to end."""
    _started: Engine | None = None

    def over(self, policy: Policy, *, copy_now: bool = False) -> ModelSampler:
        """A sampler over a policy's weights.

        Args:
            policy: whose weights.
            copy_now: copy the weights while they are still in one piece, if there is to be a copy.
        """
        return SAMPLERS[self.recipe.sampling.engine](self, policy, copy_now)

    def max_length(self, config: Any) -> int | None:
        """The longest sequence that an engine has to have room for."""
        most = self.recipe.prompt.max_prompt_tokens + STRETCH * self.longest
        return min(most, context_length(config) or most)

    def dtype(self, computed: str) -> str:
        """What vLLM computes in: what the recipe wants of a copy, else what the trainer does."""
        wanted = self.recipe.sampling.dtype
        return wanted if wanted in DTYPES else computed

    def pushes_adapter(self, policy: Policy, computed: str) -> bool:
        """Whether vLLM is given the adapter beside the weights, and not weights with it merged.

        So it is wherever a merge would round a small update away, unless the recipe names a dtype
        for merged weights or the adapter is of a kind that vLLM does not take.
        """
        if policy.adapter is None or self.recipe.sampling.dtype in DTYPES:
            return False
        if self.recipe.sampling.dtype == "same":
            return True
        return keeps_adapter(DTYPES[self.dtype(computed)]) and vllm_takes_adapter(policy)

    def served(
        self, policy: Policy, folder: Path, *, computed: str, device: str
    ) -> tuple[str, dict[str, Any]]:
        """The name of a model that vLLM is to serve, and the arguments of its engine.

        Args:
            policy: its configuration is written to `folder` with the tokenizer.
            folder: exists.
            computed: the dtype that the trainer computes in.
            device: the type of vLLM's.
        """
        name = write_shape(folder, policy.model.config, self.tokenizer)
        sampling, length = self.recipe.sampling, self.max_length(policy.model.config)
        dtype = self.dtype(computed)
        arguments = engine_arguments(sampling, dtype=dtype, device=device, max_length=length)
        if self.pushes_adapter(policy, computed):
            made = policy.adapter.peft_config[ADAPTER]  # a loaded one keeps its own rank
            rank = max(8, made.r, *made.rank_pattern.values())
            room = 1 << (rank - 1).bit_length()  # a power of two
            arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": room}
        return name, arguments

    def engine_of_vllm(self, policy: Policy) -> Engine:
        """The engine for models of this shape, started with the first one."""
        if self._started is None:
            folder = tempfile.TemporaryDirectory(prefix="grouper-vllm-")
            self._started = _start_vllm(self, policy, Path(self.ends.enter_context(folder)))
            self.ends.callback(self._started.close)
        return self._started

    def for_validation(self) -> Samplers:
        """Samplers on the servers that only validation uses."""
        sampling, servers = self.recipe.sampling, self.recipe.evaluation.servers
        vllm = sampling.vllm.model_copy(update={"mode": "server", "servers": servers})
        sampling = sampling.model_copy(update={"engine": "vllm", "vllm": vllm})
        recipe = self.recipe.model_copy(update={"sampling": sampling})
        made = replace(self, recipe=recipe, ends=ExitStack(), _started=None)
        self.ends.callback(made.close)
        return made

    def close(self) -> None:
        """End what was started."""
        self.ends.close()
        self._started = None


# The largest rank that vLLM has kernels for.
VLLM_MAX_RANK = 512


def vllm_takes_adapter(policy: Policy) -> bool:
    """Whether every adapted layer is a plain LoRA of a linear layer that vLLM can run beside."""
    from peft.tuners.lora import Linear, LoraLayer

    ends = {policy.model.get_input_embeddings(), policy.model.get_output_embeddings()}
    for module in policy.model.modules():
        if not isinstance(module, LoraLayer):
            continue
        plain = type(module) is Linear and not module.lora_variant and module not in ends
        if not plain or max(module.r.values()) > VLLM_MAX_RANK:
            return False
    return True


def _native(samplers: Samplers, policy: Policy, copy_now: bool) -> ModelSampler:
    sampling = samplers.recipe.sampling
    dtype = copy_dtype(sampling, samplers.recipe.model, policy.device.type)
    if sampling.dtype == "auto" and not can_be_added(policy):
        dtype = None
    return NativeSampler(
        SamplingWeights(policy, dtype, copy_now=copy_now),
        samplers.tokenizer,
        stop_token_ids=samplers.stop_token_ids,
        max_slots=sampling.max_slots,
        max_length=context_length(policy.model.config),
    )


def _vllm(samplers: Samplers, policy: Policy, _copy_now: bool) -> ModelSampler:
    # No copy: the weights are gathered at every push.
    sampling, computed = samplers.recipe.sampling, _name(policy)
    dtype = samplers.dtype(computed)
    exact = dtype == computed == "float32"
    return VllmSampler(
        policy,
        samplers.engine_of_vllm(policy),
        samplers.tokenizer,
        stop_token_ids=samplers.stop_token_ids,
        max_length=samplers.max_length(policy.model.config),
        tolerance=sampling.vllm.tolerance or TOLERANCE[exact],
        temperature=sampling.temperature,
        adapter=samplers.pushes_adapter(policy, computed),
        rounded=DTYPES[dtype] if keeps_adapter(DTYPES[dtype]) else None,
        processes=samplers.processes,
    )


SAMPLERS: dict[EngineName, Callable[[Samplers, Policy, bool], ModelSampler]] = {
    "native": _native,
    "vllm": _vllm,
}


def _name(policy: Policy) -> str:
    return str(policy.products_dtype).removeprefix("torch.")


def _start_vllm(samplers: Samplers, policy: Policy, folder: Path) -> Engine:
    """Start vLLM, or connect to its servers, as the recipe says.

    Raises:
        ConfigError: vLLM is missing or of another version.
        ModelError: it does not start, or serves another model.
    """
    recipe, settings = samplers.recipe, samplers.recipe.sampling.vllm
    started = time.perf_counter()
    places = settings.servers or ("auto",)
    urls = [place for place in places if "://" in place]
    if len(urls) < len(places):
        log.info("Starting vLLM %s (%s); this takes a minute.", require_vllm(), settings.mode)
    config, computed = policy.model.config, _name(policy)
    config.architectures = config.architectures or [type(policy.model).__name__]
    name, arguments = samplers.served(policy, folder, computed=computed, device=policy.device.type)
    engine: LocalEngine | ServerEngine
    if settings.mode == "colocate":
        engine = LocalEngine(folder, arguments)
    else:
        own: list[ServerProcess] = []

        def start() -> tuple[list[str], str]:
            secret = shared_secret() if urls else secrets.token_hex(32)
            for place in places:
                if place not in urls:
                    process = ServerProcess(folder, name, arguments, secret=secret, device=place)
                    samplers.ends.callback(process.close)
                    own.append(process)
            return [*urls, *(process.url for process in own)], secret

        reached, secret = samplers.processes.on_rank0(start)
        engine = ServerEngine(
            reached,
            secret,
            name=name,
            dtype=DTYPES[samplers.dtype(computed)],
            settings=settings,
            concurrency=recipe.sampling.max_slots,
            processes=own,
        )
        samplers.processes.on_rank0(engine.require_model)
    log.info("vLLM was ready after %.0f seconds.", time.perf_counter() - started)
    return engine
