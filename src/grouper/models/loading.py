"""Loading models, tokenizers and adapters from folders or by Hub name, and saving them."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from types import MethodType
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME

from grouper.config.schema import LoraConfig, ModelConfig
from grouper.errors import (
    ModelError,
    as_model_error,
    did_you_mean,
    is_out_of_memory,
    require_extra,
)
from grouper.models.attention_check import check_logits, check_native_attention
from grouper.models.device import (
    DTYPES,
    MUCH_FASTER,
    PRODUCT_DTYPES,
    bfloat16_slowdown,
    on_device,
    slow_products,
)
from grouper.models.folders import (
    base_of,
    is_gguf,
    looks_local,
    read_adapter,
    require_model_folder,
)
from grouper.models.gguf import folder_of_gguf
from grouper.models.merging import merged
from grouper.models.policy import ADAPTER, Policy, ropes_of
from grouper.models.quiet import quiet

log = logging.getLogger(__name__)

# PEFT imports it, and it then warns of a package that would make 4-bit products on a CPU faster.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


# --- loading with transformers -------------------------------------------------------------------


def _folder_to_load(path: str) -> Path:
    """Return the argument of `from_pretrained`: for a GGUF file, the folder made of it."""
    if is_gguf(path):
        return folder_of_gguf(path)
    return Path(path).expanduser()


def _load(loader: Any, path: str, **options: Any) -> Any:
    """Call `loader.from_pretrained`, and explain its errors in one paragraph.

    Raises:
        ModelError: there is nothing to load, it is damaged, or access is denied.
    """
    folder = _folder_to_load(path)
    try:
        with quiet():
            # Without this option, transformers asks for it in the terminal.
            options["trust_remote_code"] = False
            return loader.from_pretrained(str(folder), **options)
    except Exception as error:  # files that do not belong together raise errors of any class
        # Errors of a device are RuntimeErrors, too; the caller explains them.
        if is_out_of_memory(error) or "CUDA error" in str(error):
            raise
        raise _unloadable(error, path) from error


def _unloadable(error: Exception, path: str) -> ModelError:
    """Return an error that explains why `from_pretrained` has failed."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    problem = f"{path!r} cannot be loaded: {lines[0]}"
    fix = (
        "One of its files is missing, damaged, or of a kind that this version of transformers does "
        "not know."
    )
    if not looks_local(path):
        problem = f"there is no such folder here, and {problem}"
        fix = (
            "Check the name; a gated model needs `hf auth login`, and without a network the model "
            "must be a local folder or in the Hub cache already."
        )
    if isinstance(error, RecursionError):
        problem = f"{path!r} cannot be loaded: one of its JSON files is nested too deeply"
    elif isinstance(error, RuntimeError) and "mismatched" in str(error):
        problem = (
            f"the weights in {path!r} do not have the shapes that its config.json says "
            "(vocab_size, hidden_size or the like)"
        )
        fix = "Put the config.json back that was saved with these weights."
    elif isinstance(error, UnpicklingError):
        problem = (
            f"the weights in {path!r} are a pickle that holds more than tensors, which could run "
            "code when it is loaded"
        )
        fix = "Save the model with `save_pretrained` (safetensors) where you trust it."
    elif "custom code" in str(error):
        fix = "Grouper never runs it: name a model of an architecture that transformers has itself."
    elif "gated repo" in str(error):
        problem = f"{path!r} is gated: its owner asks you to accept terms first"
        fix = "Accept them on its page on the Hub, then run `hf auth login`, or name another model."
    return ModelError(problem, where="the model", fix=fix)


def load_tokenizer(path: str, *, revision: str | None = None) -> Any:
    """Load the tokenizer of a model folder or Hub name.

    Raises:
        ModelError: there is none, or it cannot be loaded.
    """
    require_model_folder(path)
    tokenizer = _load(transformers.AutoTokenizer, path, revision=revision)
    # Without the tokenizer's files, transformers makes one with special tokens only, which encodes
    # every text as nothing.
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise ModelError(
            f"{path!r} holds no tokenizer",
            where="the model",
            fix="Copy tokenizer.json and tokenizer_config.json there from the model that it was "
            "made from.",
        )
    # These options of loading would be saved with the tokenizer, and apply wherever it is loaded.
    for name in ("local_files_only", "cache_dir", "token", "force_download"):
        tokenizer.init_kwargs.pop(name, None)
    if not isinstance(tokenizer.model_max_length, int | float):
        raise ModelError(
            f"model_max_length in the tokenizer_config.json of {path!r} is not a number",
            where="the model",
            fix="Put the file back that came with the model.",
        )
    _require_template_that_ends(tokenizer, path)
    # Otherwise, tokenizers of Llama 3 and others drop spaces before `,` `.` `?` `'s` in decoding.
    tokenizer.clean_up_tokenization_spaces = False
    # transformers reads it and does not save it: a saved tokenizer of Llama 2 would encode spaces
    # after `<s>` differently.
    if hasattr(tokenizer, "legacy"):
        tokenizer.init_kwargs["legacy"] = tokenizer.legacy
    return tokenizer


# Seconds that a chat template may take to write a short question.
_TEMPLATE_SECONDS = 10.0


class _TooLongError(Exception):
    """An error raised in the thread of a template that does not end."""


def _require_template_that_ends(tokenizer: Any, path: str) -> None:
    """Raise `ModelError` if a chat template, which is a program, does not end.

    Other errors of a template are not reported here: they depend on the messages, and are reported
    when it is used.
    """
    if not tokenizer.chat_template:
        return

    def write() -> None:
        question = [{"role": "user", "content": "What is 3 + 4?"}]
        with contextlib.suppress(Exception):  # reported when the template is used
            tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    thread.join(_TEMPLATE_SECONDS)
    if thread.is_alive():
        # A template runs in Python, so an exception raised in its thread ends it at the next step.
        # A process could be killed instead, but takes seconds to start.
        thread_id = ctypes.c_ulong(thread.ident or 0)
        error_class = ctypes.py_object(_TooLongError)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(thread_id, error_class)
        thread.join(1.0)
        raise ModelError(
            f"the chat template of {path!r} does not end: after {_TEMPLATE_SECONDS:.0f} seconds it "
            "was still writing the prompt of a short question",
            where="the model",
            fix="Put the chat_template.jinja or tokenizer_config.json back that came with it.",
        )


def shape_of(path: str, revision: str | None = None, *, cached: bool = False) -> PretrainedConfig:
    """Load the configuration of a model, or of the base model of an adapter, without weights.

    Args:
        path: a model or adapter folder, or a Hub name.
        revision: of a Hub name.
        cached: look only in the Hub cache on this machine, not on the Hub.

    Raises:
        ModelError: there is no such model.
    """
    return _load(transformers.AutoConfig, base_of(path), revision=revision, local_files_only=cached)


def context_length(shape: PretrainedConfig) -> int | None:
    """Return the longest sequence that a model was made for; None if its configuration has none.

    LongRoPE has two lengths, of which the shorter counts. A longer sequence changes the rotation
    of all sequences in its batch, and keys that are already in a cache keep the old one.
    """
    lengths = [getattr(shape.get_text_config(), "max_position_embeddings", None)]
    longropes = [rope for rope in ropes_of(shape) if rope.get("rope_type") == "longrope"]
    lengths += [rope.get("original_max_position_embeddings") for rope in longropes]
    return min((int(length) for length in lengths if length is not None), default=None)


def stop_ids_of(path: str, revision: str | None = None) -> list[int]:
    """Return the stop ids in a model's generation config; nothing else of it is ever used.

    PEFT saves no generation config with an adapter: that of the base model is used then.

    Raises:
        ModelError: the generation config is damaged.
    """
    for model in dict.fromkeys((path, base_of(path))):
        config = _generation_config(model, revision if model == path else None)
        if config is None:
            continue
        stop_ids = config.eos_token_id
        if not isinstance(stop_ids, list):
            stop_ids = [stop_ids]
        stop_ids = [token for token in stop_ids if token is not None]
        for token in stop_ids:
            if type(token) is not int or not 0 <= token < 2**31:
                raise ModelError(
                    f"eos_token_id in the {GENERATION_CONFIG_NAME} of {model!r} is {stop_ids}: no "
                    "token ids",
                    where="the model",
                    fix="Put the file back that came with the model.",
                )
        return stop_ids
    return []


def _generation_config(path: str, revision: str | None) -> Any:
    """Load the generation config of a model; None if it has none.

    Raises:
        ModelError: it is damaged.
    """
    folder = _folder_to_load(path)
    try:
        return transformers.GenerationConfig.from_pretrained(str(folder), revision=revision)
    except OSError as error:
        if os.path.lexists(folder / GENERATION_CONFIG_NAME):
            raise _unloadable(error, path) from error
        return None
    except Exception as error:  # a damaged file raises errors of any class
        raise _unloadable(error, path) from error


# --- policies ------------------------------------------------------------------------------------


def load_policy(
    config: ModelConfig,
    path: str,
    *,
    seed: int,
    device: str | torch.device = "cpu",
) -> Policy:
    """Load a model folder, Hub name or adapter folder as the policy to train.

    If `path` is an adapter, a recipe with LoRA continues it, and a recipe without LoRA merges it
    and trains all weights.

    Args:
        config: dtype, attention, quantization and LoRA settings.
        path: the model to load: `config.path`, a phase's `final/`, or a checkpoint.
        seed: of a new adapter's random half.
        device: where to put it.

    Raises:
        ModelError: there is no model, or it cannot be run with these settings.
        ConfigError: a library that a setting needs is not installed.
    """
    require_model_folder(path)
    check_adapter(config, path)
    recipe_dtype = config.compute_dtype
    config = on_device(config, torch.device(device).type)
    base = base_of(path)
    saved = read_adapter(path)
    adapter = None
    model = _load_model(base, config, device)
    computed = _safe_products(config, model.config, recipe_dtype)
    if computed.compute_dtype != config.compute_dtype:
        family = model.config.model_type
        log.info("Products of %s are in float32: it cannot be computed in float16.", family)
    config = computed
    if saved is not None:
        adapter = _attach(model, path, "model.path", keep=config.lora is not None)
        if config.lora is None:
            log.info("The adapter %s is merged; all weights are trained.", path)
            with as_model_error(
                f"the adapter {path!r} cannot be merged",
                fix="Set model.lora to continue training it.",
            ):
                # PEFT has frozen the base weights; now they are trained.
                model = merged(adapter, model).requires_grad_(True)
                adapter = None
        else:
            log.info("The adapter %s is continued.", path)
            if saved.get("r") != config.lora.rank:
                text = "The adapter %s has rank %s and keeps it; model.lora.rank=%d is not used."
                log.warning(text, path, saved.get("r"), config.lora.rank)
    elif config.lora is not None:
        adapter = _new_adapter(model, config.lora, base, seed)
    policy = _as_policy(model, adapter, config).to(device)
    _compare_products(policy, config, recipe_dtype, torch.device(device))
    with as_model_error(
        f"{path!r} was loaded, and cannot be run",
        where="the model",
        fix="Put the config.json back that was saved with these weights.",
    ):
        check_logits(policy)
        check_native_attention(policy)
    return policy


# Number of weights from which on products take most of the time of a step.
_LARGE = 20_000_000


def _compare_products(
    policy: Policy, config: ModelConfig, recipe_dtype: str, device: torch.device
) -> None:
    """Warn if a CPU computes much faster in the other dtype than in that of the products.

    Args:
        policy: small ones get no warning.
        config: with the dtype of the products.
        recipe_dtype: `compute_dtype` in the recipe. With `float32` there is no warning, since the
            user has decided.
        device: of the policy.
    """
    weights = sum(parameter.numel() for parameter in policy.model.parameters())
    if device.type != "cpu" or weights < _LARGE:
        return
    is_faster = bfloat16_slowdown() * MUCH_FASTER < 1
    slow = slow_products(config)
    if slow is not None:
        log.warning("%s", slow)
    elif recipe_dtype == "auto" and config.dtype == "float32" and is_faster:
        log.warning(
            "This CPU multiplies %.1f times as fast in bfloat16 as in float32. "
            "model.compute_dtype=fastest uses it, with float32 weights as they are.",
            1 / bfloat16_slowdown(),
        )


def weightless_policy(
    config: ModelConfig, shape: PretrainedConfig, device: str = "cpu", *, path: str = ""
) -> Policy:
    """Return the policy that `load_policy` would make of a model of this shape, without weights.

    It is on the meta device.

    Every tensor has its shape and dtype but no data; a 4-bit base has its compute dtype.

    Args:
        config: as in `load_policy`.
        shape: of the whole model.
        device: the device whose defaults are used.
        path: the model that would be loaded; a saved adapter is attached, never merged.

    Raises:
        ModelError: as in `load_policy`.
    """
    config = computed_on(config, shape, device)
    model = _weightless_model(config, shape)
    adapter = None
    if path and read_adapter(path):
        adapter = _attach(model, path, "model.path", keep=True)
    with torch.device("meta"), quiet():
        if config.quantization is not None:
            head = model.get_output_embeddings()
            for module in model.modules():
                if isinstance(module, torch.nn.Linear) and module is not head:
                    module.to(PRODUCT_DTYPES[config.compute_dtype])
        if adapter is None and config.lora is not None:
            adapter = _new_adapter(model, config.lora, "", seed=0)
        return _as_policy(model, adapter, config)


def computed_on(config: ModelConfig, shape: PretrainedConfig, device: str) -> ModelConfig:
    """Return the settings with the dtype in which a device multiplies a model of this shape.

    Args:
        config: as in the recipe.
        shape: of the model.
        device: `cpu`, `cuda` or `mps`.

    Raises:
        ModelError: the recipe asks for float16, which cannot hold a model of this family.
    """
    return _safe_products(on_device(config, device), shape, config.compute_dtype)


def _safe_products(config: ModelConfig, shape: PretrainedConfig, recipe_dtype: str) -> ModelConfig:
    """Return the settings, with products in float32 where float16 was chosen and cannot hold them.

    Gemma's hidden states grow beyond 65,504, the largest number of float16; they were trained in
    bfloat16.

    Args:
        config: with the dtype of the products.
        shape: of the model.
        recipe_dtype: `compute_dtype` in the recipe.

    Raises:
        ModelError: the recipe asks for float16.
    """
    family = shape.model_type
    if config.compute_dtype != "float16" or not family.startswith(("gemma", "recurrent_gemma")):
        return config
    if recipe_dtype == "float16":
        raise ModelError(
            f"{family} cannot be computed in float16: its hidden states grow too large",
            where="model.compute_dtype",
            fix="Use float32, bfloat16 on a device that has it, or another model.",
        )
    return config.model_copy(update={"compute_dtype": "float32"})


def _as_policy(model: PreTrainedModel, adapter: Any, config: ModelConfig) -> Policy:
    """Wrap a model with its adapter, with autocast if its weights are not in the compute dtype."""
    compute = PRODUCT_DTYPES[config.compute_dtype]
    # Adapters are float32 whatever the dtype of the base is, so a bfloat16 base is mixed, too.
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    mixed = bool(dtypes - {compute})
    if mixed and adapter is not None:
        _lean_adapters(model)
    return Policy(
        model,
        adapter=adapter,
        native=config.attention == "native",
        compute_dtype=compute if mixed else None,
        gradient_checkpointing=config.gradient_checkpointing,
        activation_offload=config.activation_offload,
    )


def _lean_adapters(model: PreTrainedModel) -> None:
    """Let adapters read and write less memory than in PEFT; autocast has to be on from now on.

    PEFT writes each adapter's input in float32 first, and its result twice before it adds it.
    """
    from peft.tuners.lora import Linear, LoraLayer

    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.cast_input_dtype_enabled = False
        # Subclasses, variants such as DoRA and adapters with a bias do more.
        plain = type(module) is Linear and not module.lora_variant
        if plain and all(second.bias is None for second in module.lora_B.values()):
            module.forward = MethodType(_adapted, module)


def _adapted(module: Any, x: Tensor) -> Tensor:
    """Compute PEFT's own forward, with the adapter's second product added to the layer's result.

    Args:
        module: PEFT's layer.
        x: [..., in].

    Returns:
        [..., out].
    """
    out: Tensor = module.base_layer(x)
    dropped = module.lora_dropout[ADAPTER](x)
    inner = module.lora_A[ADAPTER](dropped)
    second = module.lora_B[ADAPTER].weight.T
    scaling = module.scaling[ADAPTER]
    total = torch.addmm(out.flatten(0, -2), inner.flatten(0, -2), second, alpha=scaling)
    return total.view(out.shape)


def _load_model(path: str, config: ModelConfig, device: str | torch.device) -> PreTrainedModel:
    """Load a whole model.

    Raises:
        ModelError: it cannot be loaded, or a weight is missing.
    """
    revision = config.revision if path == config.path else None
    options: dict[str, Any] = {
        "revision": revision,
        "dtype": DTYPES[config.dtype],
        "attn_implementation": _attention(config.attention, shape_of(path, revision)),
    }
    if config.quantization is not None:
        require_extra("bitsandbytes", "quantized", where="model.quantization")
        # NF4 with quantized scales (arXiv 2305.14314), in linear layers only: embeddings, norms and
        # the LM head stay in `config.dtype`.
        options["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=PRODUCT_DTYPES[config.compute_dtype],
        )
        # Quantized on the way to the device, which never holds the whole model unquantized.
        options["device_map"] = {"": str(device)}
    model, loading_info = _load(AutoModelForCausalLM, path, output_loading_info=True, **options)
    missing = sorted(loading_info["missing_keys"])
    if missing:
        raise ModelError(
            f"{path!r} lacks {len(missing)} of the weights of its model, such as {missing[0]}",
            where="the model",
            fix="Save the model itself, not in a wrapper that gives weights other names "
            "(`module.`).",
        )
    for module in model.modules():
        # On some CPUs bitsandbytes packs 4-bit weights again at the first forward without a
        # gradient, for inference only: they round differently from then on, and the backward
        # cannot read them.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model


def _weightless_model(config: ModelConfig, shape: PretrainedConfig) -> PreTrainedModel:
    """Create a model of this shape on the meta device."""
    options = {"dtype": DTYPES[config.dtype], "attn_implementation": _attention("native", shape)}
    problem = "no model of the shape that its config.json says can be made"
    fix = "Put the config.json back that was saved with the weights."
    with (
        as_model_error(problem, where="the model", fix=fix, memory=True),
        torch.device("meta"),
        quiet(),
    ):
        return AutoModelForCausalLM.from_config(shape, **options)


def _attention(name: str, shape: PretrainedConfig) -> str:
    """Return the name of an attention implementation in transformers.

    `native` starts from SDPA. Eager replaces SDPA in models with soft-capping, which SDPA ignores,
    and in models without SDPA.

    Args:
        name: `model.attention` of a recipe.
        shape: of the model.

    Raises:
        ModelError: the model is no causal language model.
    """
    models = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if type(shape) not in models or shape.is_encoder_decoder:
        raise ModelError(
            f"{shape.model_type} is not an architecture of a causal language model",
            where="the model",
            fix="Name a model that continues text.",
        )
    if name not in ("native", "sdpa"):
        return name
    capped = getattr(shape.get_text_config(), "attn_logit_softcapping", None)
    if capped or not models[type(shape)]._supports_sdpa:  # noqa: SLF001 - transformers reads it, too
        return "eager"
    return "sdpa"


def save_policy(
    policy: Policy,
    tokenizer: Any,
    folder: Path,
    weights: Mapping[str, Tensor] | None = None,
    *,
    shard_bytes: int | None = None,
) -> None:
    """Write weights (or the adapter alone), tokenizer, template and generation config.

    The folder loads with `from_pretrained`. Not atomic: `checkpoint.py` wraps it.

    Args:
        policy: the policy to save.
        tokenizer: saved with it.
        folder: exists, and is empty.
        weights: the values by the names of `policy.model`, if the policy's own are split over
            processes; tied weights once.
        shard_bytes: maximum bytes of one file of whole weights; None: transformers' default.
    """
    target: Any = policy.model
    options = {}
    if policy.adapter is None:
        if shard_bytes is not None:
            options["max_shard_size"] = shard_bytes
    else:
        target = policy.adapter
        if weights is not None:
            # PEFT wraps the model in two layers, which its names begin with.
            weights = {f"base_model.model.{name}": value for name, value in weights.items()}
        # PEFT writes sets in an arbitrary order. Sorted, equal runs write equal files.
        settings = vars(target.peft_config[ADAPTER])
        for name, value in settings.items():
            if isinstance(value, set):
                settings[name] = sorted(value)
        if policy.model.generation_config is not None:
            policy.model.generation_config.save_pretrained(folder)
    with quiet():
        target.save_pretrained(folder, state_dict=weights, **options)
    tokenizer.save_pretrained(folder)
    # PEFT writes a model card without content, whose base model is a path on this machine.
    (folder / "README.md").unlink(missing_ok=True)


# --- adapters ------------------------------------------------------------------------------------

# The settings that two models must have in common for an adapter of one to fit the other.
_SHAPE = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)


def check_adapter(config: ModelConfig, path: str, *, where: str = "model.path") -> None:
    """Check an adapter before its base model is loaded: raise if `load_policy` would.

    An adapter names its own base model, which must be the recipe's or one of its shape, and its
    tensors must be those that PEFT puts into that model. Whole models pass, as do names on the
    Hub.

    Args:
        config: the recipe's model.
        path: the model to be loaded.
        where: the setting that names it.

    Raises:
        ModelError: its base model does not exist, is another model, or has other layers.
    """
    if read_adapter(path) is None:
        return
    base = base_of(path)
    recipe_base = base if config.path is None else base_of(config.path)
    revision = config.revision if base == config.path else None
    shape = shape_of(base, revision)
    if Path(recipe_base).expanduser().resolve() != Path(base).expanduser().resolve():
        theirs = shape.get_text_config()
        ours = shape_of(recipe_base).get_text_config()
        differences = [
            name for name in _SHAPE if getattr(theirs, name, None) != getattr(ours, name, None)
        ]
        if differences:
            raise ModelError(
                f"the adapter {path!r} was trained on {base!r}, which is another model than "
                f"{recipe_base!r} ({', '.join(differences)} differ)",
                where=where,
                fix=f"Set model.path={base}, or start from an adapter of {recipe_base!r}.",
            )
        log.warning(
            "The adapter %s was trained on %s, which is used in place of %s.",
            path,
            base,
            recipe_base,
        )
    _attach(_weightless_model(config, shape), path, where, keep=False)


def _attach(model: PreTrainedModel, path: str, where: str, *, keep: bool) -> Any:
    """Return the model wrapped in the adapter of a folder.

    PEFT only warns of tensors that the adapter lacks, and drops those that the model has no place
    for. Here both are errors.

    Args:
        model: changed in place; one without weights stays without.
        path: the adapter's folder.
        where: the setting that names it.
        keep: whether the adapter is to be trained.

    Raises:
        ModelError: it cannot be read, or one of its tensors has no place in the model or is
            missing.
    """
    import peft

    folder = str(Path(path).expanduser())
    problem = f"the adapter {path!r} does not fit its base model {base_of(path)!r}"
    fix = "Check `base_model_name_or_path` in its adapter_config.json."
    with as_model_error(problem, where=where, fix=fix), quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the cases it warns of are errors below
        try:
            # Read on the CPU: a check must not be the first to use a GPU.
            adapter = peft.PeftModel.from_pretrained(
                model, folder, is_trainable=keep, ignore_mismatched_sizes=True, torch_device="cpu"
            )
            stored = peft.utils.load_peft_weights(folder, device="cpu")
        except SafetensorError as error:
            raise ModelError(
                f"{f'{folder}/adapter_model.safetensors'!r} cannot be read: {error}",
                where="the adapter",
                fix="It was damaged after it was written, or is not all there: copy it again.",
            ) from error
        expected = peft.get_peft_model_state_dict(adapter, save_embedding_layers=False)
        stored_names = {name for name in stored if "lora_" in name}
        for name in sorted(stored_names | expected.keys()):
            stored_size = _size(stored.get(name))
            expected_size = _size(expected.get(name))
            if stored_size != expected_size:
                raise ValueError(
                    f"{name} {stored_size} in the adapter, {expected_size} for this base"
                )
    _untie(model)
    return adapter


def _untie(model: PreTrainedModel) -> None:
    """Give embedding and head a matrix each if an adapter changes one of them.

    PEFT leaves them tied, so that merging the adapter would change the other one as well.
    """
    embedding_layer = model.get_input_embeddings()
    head_layer = model.get_output_embeddings()
    # Inside PEFT's layers, if they have adapters.
    embedding = getattr(embedding_layer, "base_layer", embedding_layer)
    head = getattr(head_layer, "base_layer", head_layer)
    adapted = embedding is not embedding_layer or head is not head_layer
    if embedding.weight is head.weight and adapted:
        head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        model.config.tie_word_embeddings = False


def _size(tensor: Tensor | None) -> str:
    """Describe the size of a tensor as the second half of a sentence."""
    if tensor is None:
        return "is not there"
    return f"is {' x '.join(map(str, tensor.shape))}"


def check_lora_targets(config: ModelConfig, shape: PretrainedConfig) -> None:
    """Check that a model of this shape has all of `model.lora.target_modules`.

    Raises:
        ModelError: a name that is no layer of the model.
    """
    if config.lora is not None and not isinstance(config.lora.target_modules, str):
        weightless_policy(config, shape)


def _new_adapter(model: PreTrainedModel, lora: LoraConfig, base: str, seed: int) -> Any:
    """Add a new LoRA adapter to a model, which is changed in place.

    Args:
        model: the whole model.
        lora: its settings.
        base: the path of the model, for the adapter's configuration.
        seed: of the random half; the global random generator is left as it was.

    Raises:
        ModelError: a target module does not exist.
    """
    import peft

    targets = lora.target_modules
    if isinstance(targets, tuple):
        _require_targets(model, targets)
    settings = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=list(targets) if isinstance(targets, tuple) else targets,
        task_type="CAUSAL_LM",
    )
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with as_model_error(
            "LoRA cannot be added",
            where="model.lora.target_modules",
            fix="Use all-linear, or names of linear layers of this model.",
        ):
            adapter = peft.get_peft_model(model, settings)
    # Absolute, so that the adapter loads whatever the current folder is.
    local = _folder_to_load(base)
    name = str(local.resolve()) if local.is_dir() else base
    adapter.peft_config[ADAPTER].base_model_name_or_path = name
    _untie(model)
    return adapter


def _require_targets(model: PreTrainedModel, targets: tuple[str, ...]) -> None:
    """Raise `ModelError` if a name has no layer; PEFT ignores such names as long as one has."""
    layers = []
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if getattr(weight, "ndim", 0) == 2:
            layers.append(name)

    def exists(target: str) -> bool:
        return any(f".{layer}".endswith(f".{target}") for layer in layers)

    missing = [target for target in targets if not exists(target)]
    if missing:
        names = {layer.rpartition(".")[2] for layer in layers}
        hint = did_you_mean(missing[0], names)
        raise ModelError(
            f"LoRA cannot be added: the model has no layer {' and no '.join(map(repr, missing))}",
            where="model.lora.target_modules",
            fix=f"{hint} all-linear takes every linear layer.",
        )
