"""The names and signatures of vLLM that Grouper uses, in one place.

They are looked up in the vLLM that is installed (GROUPER_VLLM=1, `make test-vllm`). Where a version
fails here, the row names what it has changed; the adapter is in `grouper/sampling/vllm/`.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from typing import Any

import pytest
from test_vllm import LENGTH, REAL

from grouper.config.schema import SamplingConfig
from grouper.errors import require_vllm
from grouper.sampling.vllm import sampler as vllm_sampler
from grouper.sampling.vllm import transfer
from grouper.sampling.vllm.sampler import Weights, engine_arguments

pytestmark = pytest.mark.skipif(not REAL, reason="the real engine: make test-vllm")

TRANSFER = "vllm.distributed.weight_transfer"

# Callable -> the names of the parameters that we pass.
CALLED: dict[str, tuple[str, ...]] = {
    "vllm.LLM.init_weight_transfer_engine": ("request",),
    "vllm.LLM.start_weight_update": (),
    "vllm.LLM.update_weights": ("request",),
    "vllm.LLM.finish_weight_update": ("weight_version",),
    "vllm.LLM.reset_prefix_cache": (),
    "vllm.LLM.sleep": ("level",),
    "vllm.LLM.wake_up": (),
    "vllm.v1.engine.llm_engine.LLMEngine.add_request": (
        "request_id",
        "prompt",
        "params",
        "lora_request",
    ),
    "vllm.v1.engine.llm_engine.LLMEngine.step": (),
    "vllm.v1.engine.llm_engine.LLMEngine.abort_request": ("request_ids",),
    "vllm.v1.engine.llm_engine.LLMEngine.add_lora": ("lora_request",),
    "vllm.v1.engine.core_client.InprocClient.shutdown": (),
    "vllm.lora.request.LoRARequest": ("lora_name", "lora_int_id", "lora_path", "load_inplace"),
    "vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm": ("layer", "remove_weight"),
    "vllm.config.weight_transfer.WeightTransferConfig": ("backend",),
    f"{TRANSFER}.ParamMeta": ("name", "dtype", "shape"),
    f"{TRANSFER}.base.WeightTransferEngine": ("config", "vllm_config", "device", "model"),
    f"{TRANSFER}.base.WeightTransferEngine.init_transfer_engine": ("init_info",),
    f"{TRANSFER}.base.WeightTransferEngine.start_weight_update": (),
    f"{TRANSFER}.base.WeightTransferEngine.finish_weight_update": (),
    f"{TRANSFER}.base.WeightTransferEngine.receive_weights": ("update_info",),
    f"{TRANSFER}.base.WeightTransferEngine.update_weights": ("update_info",),
    f"{TRANSFER}.base.WeightTransferEngine.parse_init_info": ("init_dict",),
    f"{TRANSFER}.base.WeightTransferEngine.parse_update_info": ("update_dict",),
    f"{TRANSFER}.base.WeightTransferEngine.shutdown": (),
    f"{TRANSFER}.factory.WeightTransferEngineFactory.register_engine": (
        "name",
        "module_path_or_cls",
    ),
    f"{TRANSFER}.factory.WeightTransferEngineFactory.create_engine": (
        "config",
        "vllm_config",
        "device",
        "model",
    ),
    f"{TRANSFER}.factory.WeightTransferTrainerFactory.trainer_init": (
        "init_info",
        "client",
        "source",
    ),
    f"{TRANSFER}.ipc_engine.IPCTrainerInitInfo": ("rank", "packed", "packed_buffer_size_bytes"),
    f"{TRANSFER}.nccl_engine.NCCLTrainerInitInfo": (
        "rank",
        "master_address",
        "master_port",
        "world_size",
        "packed",
        "packed_buffer_size_bytes",
    ),
    f"{TRANSFER}.ipc_engine.IPCTrainerWeightTransferEngine.send_weights": (),
    f"{TRANSFER}.nccl_engine.NCCLTrainerWeightTransferEngine.send_weights": (),
    f"{TRANSFER}.nccl_engine.NCCLTrainerWeightTransferEngine.shutdown": (),
    # Keys of what vLLM's trainer half has us send, where we change something in it.
    f"{TRANSFER}.nccl_common.NCCLWeightTransferInitInfo": ("rank_offset", "world_size"),
    f"{TRANSFER}.ipc_engine.IPCWeightTransferUpdateInfo": ("names", "shapes", "ipc_handles"),
}

# Class -> attributes and fields that we read, or methods that we call on what a field holds.
FIELDS: dict[str, tuple[str, ...]] = {
    "vllm.outputs.RequestOutput": ("finished", "request_id", "outputs"),
    "vllm.outputs.CompletionOutput": ("token_ids", "logprobs", "finish_reason"),
    "vllm.logprobs.Logprob": ("logprob",),
    "vllm.sampling_params.RequestOutputKind": ("FINAL_ONLY",),
    "vllm.model_executor.layers.logits_processor.LogitsProcessor": ("scale",),
}

# Route -> the fields of its body that we send. All but those of /v1 need VLLM_SERVER_DEV_MODE.
ROUTES: dict[str, tuple[str, ...]] = {
    "/init_weight_transfer_engine": ("init_info",),
    "/start_weight_update": (),
    "/update_weights": ("update_info",),
    "/finish_weight_update": (),
    "/update_weight_version": ("new_version",),
    "/weight_info": (),
    "/collective_rpc": ("method",),
    "/reset_prefix_cache": (),
    "/v1/load_lora_adapter": ("lora_name", "lora_path"),
    "/v1/unload_lora_adapter": ("lora_name",),
}
ROUTERS = {
    "/v1/": "vllm.entrypoints.serve.lora.api_router",
    "/collective_rpc": "vllm.entrypoints.serve.dev.rpc.api_router",
    "/reset_prefix_cache": "vllm.entrypoints.serve.dev.cache.api_router",
    "/": "vllm.entrypoints.rl.online.api_router",
}

# The variables that `server_command` and `LocalEngine` set.
VARIABLES = {
    *vllm_sampler.ENVIRONMENT_DEFAULTS,
    "VLLM_ENABLE_V1_MULTIPROCESSING",
    "VLLM_NO_USAGE_STATS",
    "VLLM_SERVER_DEV_MODE",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING",
}


def look_up(dotted: str) -> Any:
    """The object of a dotted name, from the longest part of it that is a module."""
    parts = dotted.split(".")
    for count in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError as error:
            if not dotted.startswith(str(error.name)):  # a dependency of vLLM is missing
                raise
            continue
        for name in parts[count:]:
            value = getattr(value, name)
        return value
    raise LookupError(dotted)


def names_of(taken: Any) -> set[str]:
    """The names of the fields of a class, or else of its attributes."""
    if dataclasses.is_dataclass(taken):
        return {field.name for field in dataclasses.fields(taken)}
    return set(getattr(taken, "__struct_fields__", ())) | set(dir(taken))


@pytest.mark.parametrize("dotted", CALLED)
def test_what_is_called_takes_what_we_pass(dotted: str) -> None:
    parameters = inspect.signature(look_up(dotted)).parameters
    absent = [name for name in CALLED[dotted] if name not in parameters]
    assert not absent, f"vLLM {require_vllm()} has no such parameters of {dotted}: {absent}"
    needed = set()
    for name, parameter in parameters.items():
        optional = parameter.kind in {parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL}
        if parameter.default is parameter.empty and name != "self" and not optional:
            needed.add(name)
    if "UpdateInfo" not in dotted:  # that one is built by vLLM itself
        assert needed <= set(CALLED[dotted]), "and nothing else is needed"


@pytest.mark.parametrize("dotted", FIELDS)
def test_what_is_read_is_there(dotted: str) -> None:
    taken = look_up(dotted)
    if dotted.endswith("LogitsProcessor"):
        assert "scale" in inspect.signature(taken).parameters
    elif dotted.endswith("RequestOutput"):  # a plain class: its attributes are its arguments
        assert set(FIELDS[dotted]) <= set(inspect.signature(taken).parameters)
    else:
        assert set(FIELDS[dotted]) <= names_of(taken)


@pytest.mark.parametrize("path", ROUTES)
def test_a_route_takes_what_we_send(path: str) -> None:
    prefix = next(prefix for prefix in ROUTERS if path.startswith(prefix))
    module = look_up(ROUTERS[prefix])
    if prefix == "/v1/":
        from vllm.entrypoints.serve.lora import protocol

        kind = "Load" if "/load" in path else "Unload"
        fields = look_up(f"{protocol.__name__}.{kind}LoRAAdapterRequest").model_fields
        assert set(ROUTES[path]) <= set(fields)
        assert f'"{path}"' in inspect.getsource(module)
        return
    route = next(route for route in module.router.routes if route.path == path)
    if path == "/collective_rpc":  # it reads its body by itself
        assert 'body.get("method")' in inspect.getsource(route.endpoint)
        return
    parameters = inspect.signature(route.endpoint).parameters
    assert set(ROUTES[path]) <= set(parameters)


def test_a_completion_takes_and_returns_token_ids() -> None:
    protocol = look_up("vllm.entrypoints.openai.completion.protocol")
    fields = set(protocol.CompletionRequest.model_fields)
    assert {*completion_params(), "model", "prompt", "return_token_ids"} <= fields
    choice = set(protocol.CompletionResponseChoice.model_fields)
    assert {"token_ids", "logprobs", "finish_reason"} <= choice
    assert "token_logprobs" in protocol.CompletionLogProbs.model_fields


def completion_params() -> set[str]:
    """The names that every request has, with the engine in this process and over HTTP."""
    from grouper.types import SamplingParams

    class Bare(vllm_sampler.VllmSampler):
        def __init__(self) -> None:
            self._temperature = 1.0
            self._stop_ids = []

    return set(Bare()._params(SamplingParams(), key=1))


def test_the_params_of_a_request_are_those_of_vllm() -> None:
    assert {*completion_params(), "output_kind"} <= set(
        look_up("vllm.SamplingParams").__struct_fields__
    )


def test_the_arguments_of_an_engine_are_those_of_vllm() -> None:
    fields = {field.name for field in dataclasses.fields(look_up("vllm.EngineArgs"))}
    for device in ("cpu", "cuda"):
        arguments = engine_arguments(
            SamplingConfig(), dtype="float32", device=device, max_length=LENGTH
        )
        assert {*arguments, "enable_lora", "max_loras", "max_lora_rank"} <= fields
    options = look_up("vllm.entrypoints.openai.api_server").__name__
    assert importlib.util.find_spec(options) is not None


def test_variables_are_those_of_vllm() -> None:
    assert look_up("vllm.envs").environment_variables.keys() >= VARIABLES


def test_the_workers_extension_has_names_of_its_own() -> None:
    """vLLM refuses an extension that has a name of its worker."""
    from grouper.sampling.vllm.worker import Extension

    worker = look_up("vllm.v1.worker.gpu_worker.Worker")
    names = {name for name in dir(Extension) if not name.startswith("__")}
    assert names == {"grouper_gpu", "grouper_missing_weights"}
    assert not [name for name in names if hasattr(worker, name)]
    source = inspect.getsource(worker)
    assert "self.weight_transfer_engine" in source
    assert "self.device" in source


def test_weights_to_send_have_the_form_that_vllm_reads() -> None:
    """The trainer half reads them by methods in 0.32, and by a property since 0.33."""
    import torch

    source = transfer._weight_source(torch.bfloat16)
    weights = {"a": torch.zeros(2, 3), "b": torch.ones(4)}
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    source.weights = Weights(shapes, weights.items())
    metadata = source.metadata
    if callable(metadata):
        metadata = metadata()
        pairs = list(source)
    else:
        pairs = list(source.iter_full())
        assert source.implements_iter_full()
        assert source.owned_names(0) == list(weights)
    assert [(m.name, m.dtype, m.shape) for m in metadata] == [
        ("a", torch.bfloat16, (2, 3)),
        ("b", torch.bfloat16, (4,)),
    ]
    assert [(name, value.dtype, tuple(value.shape)) for name, value in pairs] == [
        ("a", torch.bfloat16, (2, 3)),
        ("b", torch.bfloat16, (4,)),
    ]
