"""The samplers that a recipe can name in `sampling.engine`: a function and a row for each."""

from __future__ import annotations

import logging
import secrets
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from grouper.config.schema import EngineName, Recipe
from grouper.errors import require_vllm
from grouper.models.device import DTYPES, PRODUCT_DTYPES
from grouper.models.loading import context_length
from grouper.models.merging import can_be_added, keeps_adapter
from grouper.models.policy import ADAPTER, Policy
from grouper.models.process_group import ProcessGroup
from grouper.sampling.base import ModelSampler
from grouper.sampling.native import NativeSampler
from grouper.sampling.tools import Toolbox
from grouper.sampling.turns import TurnSampler
from grouper.sampling.vllm.sampler import (
    TOLERANCE,
    Engine,
    LocalEngine,
    VllmSampler,
    engine_arguments,
    write_shape,
)
from grouper.sampling.vllm.server import ServerEngine, ServerProcess, shared_secret
from grouper.sampling.vllm.transfer import require_gpu
from grouper.sampling.weights import SamplingWeights, copy_dtype

log = logging.getLogger(__name__)

# The pre-flight samples completions of up to this many times the budget.
STRETCH = 4


@dataclass(slots=True, kw_only=True)
class Samplers:
    """A factory for the samplers of a recipe, which share one engine.

    Args:
        recipe: names the engine.
        tokenizer: of all models of the recipe.
        stop_token_ids: ids that end a completion.
        longest: tokens of the longest completion.
        processes: the processes that train; the first starts the engine.
    """

    recipe: Recipe
    tokenizer: Any
    stop_token_ids: Sequence[int]
    longest: int
    toolbox: Toolbox | None = None
    """What completions may call; None: they have no turns."""
    processes: ProcessGroup = field(default_factory=ProcessGroup)
    ends: ExitStack = field(default_factory=ExitStack)
    """The processes and folders that `close` ends and deletes."""
    _started: Engine | None = None

    def over(self, policy: Policy, *, copy_now: bool = False) -> ModelSampler:
        """Return a sampler over a policy's weights.

        Args:
            policy: the policy to sample from.
            copy_now: copy the weights before they are split over processes, if the sampler needs
                a copy.
        """
        sampler = SAMPLERS[self.recipe.sampling.engine](self, policy, copy_now)
        if self.toolbox is None:
            return sampler
        together = self.processes if isinstance(sampler, VllmSampler) else None
        return TurnSampler(sampler, self.toolbox, self.tokenizer, together)

    def max_length(self, config: Any) -> int | None:
        """Return the tokens of the longest sequence that an engine needs memory for."""
        longest = self.recipe.prompt.max_prompt_tokens + STRETCH * self.longest
        context = context_length(config)
        if not context:
            return longest
        return min(longest, context)

    def dtype(self, computed: str) -> str:
        """Return vLLM's dtype: the one that the recipe names for sampling, else the trainer's.

        Args:
            computed: the dtype that the trainer computes in.
        """
        named = self.recipe.sampling.dtype
        return named if named in DTYPES else computed

    def pushes_adapter(self, policy: Policy, computed: str) -> bool:
        """Tell whether vLLM gets the adapter and the weights separately, not merged.

        It does if a merge would round a small update away, unless the recipe names a dtype for
        merged weights or vLLM does not support the adapter.
        """
        if policy.adapter is None or self.recipe.sampling.dtype in DTYPES:
            return False
        if self.recipe.sampling.dtype == "same":
            return True
        dtype = PRODUCT_DTYPES[self.dtype(computed)]
        return keeps_adapter(dtype) and vllm_takes_adapter(policy)

    def served(
        self, policy: Policy, folder: Path, *, computed: str, device: str, own_card: bool
    ) -> tuple[str, dict[str, Any]]:
        """Return the name of a model that vLLM is to serve, and the arguments of its engine.

        Args:
            policy: its configuration is written to `folder` with the tokenizer.
            folder: exists.
            computed: the dtype that the trainer computes in.
            device: the type of vLLM's device.
            own_card: nothing else runs on that device.
        """
        name = write_shape(folder, policy.model.config, self.tokenizer)
        arguments = engine_arguments(
            self.recipe.sampling,
            dtype=self.dtype(computed),
            device=device,
            max_length=self.max_length(policy.model.config),
            own_card=own_card,
        )
        if self.pushes_adapter(policy, computed):
            # Not the rank of the recipe: an adapter that was loaded keeps its own.
            config = policy.adapter.peft_config[ADAPTER]
            layer_ranks = config.rank_pattern.values()
            rank = max(8, config.r, *layer_ranks)
            # vLLM takes only certain ranks, among them the powers of two from 8 on.
            arguments["enable_lora"] = True
            arguments["max_loras"] = 1
            arguments["max_lora_rank"] = 1 << (rank - 1).bit_length()
        return name, arguments

    def engine_of_vllm(self, policy: Policy) -> Engine:
        """Return the engine for models of this shape, started at the first call."""
        if self._started is None:
            temporary = tempfile.TemporaryDirectory(prefix="grouper-vllm-")
            folder = Path(self.ends.enter_context(temporary))
            self._started = _start_vllm(self, policy, folder)
            self.ends.callback(self._started.close)
        return self._started

    def for_validation(self) -> Samplers:
        """Return samplers on the servers that only validation uses."""
        sampling = self.recipe.sampling
        servers = self.recipe.evaluation.servers
        vllm = sampling.vllm.model_copy(update={"mode": "server", "servers": servers})
        sampling = sampling.model_copy(update={"engine": "vllm", "vllm": vllm})
        recipe = self.recipe.model_copy(update={"sampling": sampling})
        samplers = replace(self, recipe=recipe, ends=ExitStack(), _started=None)
        self.ends.callback(samplers.close)
        return samplers

    def close(self) -> None:
        """End the engine that was started, with its processes and folders, and the tools."""
        self.ends.close()
        if self.toolbox is not None:
            self.toolbox.close()
        self._started = None


# The largest rank that vLLM has kernels for.
VLLM_MAX_RANK = 512


def vllm_takes_adapter(policy: Policy) -> bool:
    """Tell whether every adapted layer is a plain LoRA of a linear layer, which vLLM supports."""
    from peft.tuners.lora import Linear, LoraLayer

    embeddings = {policy.model.get_input_embeddings(), policy.model.get_output_embeddings()}
    for module in policy.model.modules():
        if not isinstance(module, LoraLayer):
            continue
        if type(module) is not Linear or module.lora_variant:
            return False
        if module in embeddings:
            return False
        if max(module.r.values()) > VLLM_MAX_RANK:
            return False
    return True


def _native(samplers: Samplers, policy: Policy, copy_now: bool) -> ModelSampler:
    sampling = samplers.recipe.sampling
    # As it was loaded: a model that float16 cannot hold is not copied to it either.
    loaded = samplers.recipe.model.model_copy(update={"compute_dtype": _dtype_name(policy)})
    dtype = copy_dtype(sampling, loaded, policy.device.type)
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
    sampling = samplers.recipe.sampling
    computed = _dtype_name(policy)
    dtype = samplers.dtype(computed)
    # If both compute in float32, the log-probs have to agree more closely.
    exact = dtype == computed == "float32"
    rounded = PRODUCT_DTYPES[dtype] if keeps_adapter(PRODUCT_DTYPES[dtype]) else None
    return VllmSampler(
        policy,
        samplers.engine_of_vllm(policy),
        samplers.tokenizer,
        stop_token_ids=samplers.stop_token_ids,
        max_length=samplers.max_length(policy.model.config),
        tolerance=sampling.vllm.tolerance or TOLERANCE[exact],
        temperature=sampling.temperature,
        adapter=samplers.pushes_adapter(policy, computed),
        rounded=rounded,
        processes=samplers.processes,
    )


SAMPLERS: dict[EngineName, Callable[[Samplers, Policy, bool], ModelSampler]] = {
    "native": _native,
    "vllm": _vllm,
}


def _dtype_name(policy: Policy) -> str:
    """Return the name of the dtype that a policy computes its products in."""
    return str(policy.products_dtype).removeprefix("torch.")


def _start_vllm(samplers: Samplers, policy: Policy, folder: Path) -> Engine:
    """Start vLLM, or connect to its servers, as the recipe says.

    Raises:
        ConfigError: vLLM is missing or of another version, or weights cannot be sent as named.
        ModelError: it does not start, or serves another model.
    """
    recipe = samplers.recipe
    settings = recipe.sampling.vllm
    started = time.perf_counter()
    # Each is the address of a server elsewhere, or a device to start a server on.
    servers = settings.servers or ("auto",)
    urls = [server for server in servers if "://" in server]
    devices = [server for server in servers if "://" not in server]
    if settings.mode == "server":
        require_gpu(settings.transfer, policy.device)
    if devices:
        log.info("Starting vLLM %s (%s); this takes a minute.", require_vllm(), settings.mode)
    config = policy.model.config
    computed = _dtype_name(policy)
    config.architectures = config.architectures or [type(policy.model).__name__]
    # "auto" may be the GPU of a trainer, too: vLLM takes the first one.
    shared = {"auto", *samplers.processes.gather(str(policy.device))}
    name, arguments = samplers.served(
        policy,
        folder,
        computed=computed,
        device=policy.device.type,
        own_card=settings.mode == "server" and shared.isdisjoint(devices),
    )
    engine: LocalEngine | ServerEngine
    if settings.mode == "colocate":
        engine = LocalEngine(folder, arguments)
    else:
        server_processes: list[ServerProcess] = []

        def start() -> tuple[list[str], str]:
            """Start our servers; return the addresses of all servers, and the shared secret."""
            # Servers elsewhere have a secret already; among our own, a new one will do.
            secret = shared_secret() if urls else secrets.token_hex(32)
            for device in devices:
                process = ServerProcess(folder, name, arguments, secret=secret, device=device)
                samplers.ends.callback(process.close)
                server_processes.append(process)
            started_urls = [process.url for process in server_processes]
            return urls + started_urls, secret

        all_urls, secret = samplers.processes.on_rank0(start)
        engine = ServerEngine(
            all_urls,
            secret,
            name=name,
            dtype=PRODUCT_DTYPES[samplers.dtype(computed)],
            settings=settings,
            concurrency=recipe.sampling.max_slots,
            processes=server_processes,
        )
        samplers.processes.on_rank0(engine.require_model)
        choose = partial(engine.choose_transfer, policy.device, processes=samplers.processes.size)
        samplers.processes.on_rank0(choose)
    log.info("vLLM was ready after %.0f seconds.", time.perf_counter() - started)
    return engine
