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
from grouper.models.device import DTYPES, bfloat16_slowdown, on_device
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

# Wherever PEFT imports it, it warns of a package that 4-bit products on a CPU would be faster with.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


# --- what transformers loads ---------------------------------------------------------------------


def _folder_to_load(path: str) -> Path:
    """Return what `from_pretrained` takes for a path: of a GGUF file, the folder made of it."""
    return folder_of_gguf(path) if is_gguf(path) else Path(path).expanduser()


def _load(loader: Any, path: str, **options: Any) -> Any:
    """Call `loader.from_pretrained`, with one paragraph where that fails.

    Raises:
        ModelError: there is nothing to load, it is damaged, or it may not be had.
    """
    folder = _folder_to_load(path)
    try:
        with quiet():
            # Left out, it is asked for in the terminal.
            options["trust_remote_code"] = False
            return loader.from_pretrained(str(folder), **options)
    except Exception as error:  # of any class where files do not belong together
        # torch has a RuntimeError for what happens on a device, which is for others to explain.
        if is_out_of_memory(error) or "CUDA error" in str(error):
            raise
        raise _unloadable(error, path) from error


def _unloadable(error: Exception, path: str) -> ModelError:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    what = f"{path!r} cannot be loaded: {lines[0]}"
    fix = (
        "One of its files is missing, damaged, or of a kind that this version of transformers does "
        "not know."
    )
    if not looks_local(path):
        what = f"there is no such folder here, and {what}"
        fix = (
            "Check the name; a gated model needs `hf auth login`, and without a network the model "
            "must be a local folder or in the Hub cache already."
        )
    if isinstance(error, RecursionError):
        what = f"{path!r} cannot be loaded: one of its JSON files is nested too deeply"
    elif isinstance(error, RuntimeError) and "mismatched" in str(error):
        what = (
            f"the weights in {path!r} do not have the shapes that its config.json says "
            "(vocab_size, hidden_size or the like)"
        )
        fix = "Put the config.json back that was saved with these weights."
    elif isinstance(error, UnpicklingError):
        what = (
            f"the weights in {path!r} are a pickle that holds more than tensors, which could run "
            "code when it is loaded"
        )
        fix = "Save the model with `save_pretrained` (safetensors) where you trust it."
    elif "custom code" in str(error):
        fix = "Grouper never runs it: name a model of an architecture that transformers has itself."
    elif "gated repo" in str(error):
        what = f"{path!r} is gated: its owner asks you to accept terms first"
        fix = "Accept them on its page on the Hub, then run `hf auth login`, or name another model."
    return ModelError(what, where="the model", fix=fix)


def load_tokenizer(path: str, *, revision: str | None = None) -> Any:
    """The tokenizer of a model folder or Hub name.

    Raises:
        ModelError: it cannot be loaded, or is not there.
    """
    require_model_folder(path)
    tokenizer = _load(transformers.AutoTokenizer, path, revision=revision)
    # Without its files transformers makes one that knows no word, and every text is empty to it.
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise ModelError(
            f"{path!r} holds no tokenizer",
            where="the model",
            fix="Copy tokenizer.json and tokenizer_config.json there from the model that it was "
            "made from.",
        )
    # How it was looked for here is nothing that others should do, and is saved with it otherwise.
    for name in ("local_files_only", "cache_dir", "token", "force_download"):
        tokenizer.init_kwargs.pop(name, None)
    if not isinstance(tokenizer.model_max_length, int | float):
        raise ModelError(
            f"model_max_length in the tokenizer_config.json of {path!r} is no number",
            where="the model",
            fix="Put the file back that came with the model.",
        )
    _require_template_that_ends(tokenizer, path)
    # Tokenizers of Llama 3 and others would drop spaces before `,` `.` `?` and `'s` in decoding.
    tokenizer.clean_up_tokenization_spaces = False
    # Read by transformers and not saved: spaces after `<s>` of Llama 2 would not be encoded alike.
    if hasattr(tokenizer, "legacy"):
        tokenizer.init_kwargs["legacy"] = tokenizer.legacy
    return tokenizer


# Seconds that a chat template may take to write a short question.
_TEMPLATE_SECONDS = 10.0


class _TooLongError(Exception):
    """Raised in the thread of a template that does not end."""


def _require_template_that_ends(tokenizer: Any, path: str) -> None:
    """Raise `ModelError` if a chat template, which is a program, does not come to its end.

    What else may be wrong with it is found when it is used, and depends on what it is given.
    """
    if not tokenizer.chat_template:
        return

    def write() -> None:
        question = [{"role": "user", "content": "What is 3 + 4?"}]
        with contextlib.suppress(Exception):  # see above
            tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    thread.join(_TEMPLATE_SECONDS)
    if thread.is_alive():
        # It is Python, and ends at its next step; a process could be killed, and takes seconds.
        number, kind = ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_TooLongError)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(number, kind)
        thread.join(1.0)
        raise ModelError(
            f"the chat template of {path!r} does not end: after {_TEMPLATE_SECONDS:.0f} seconds it "
            "was still writing the prompt of a short question",
            where="the model",
            fix="Put the chat_template.jinja or tokenizer_config.json back that came with it.",
        )


def shape_of(path: str, revision: str | None = None, *, cached: bool = False) -> PretrainedConfig:
    """The configuration of a model, or of the base model of an adapter; no weights are loaded.

    Args:
        path: a model or adapter folder, or a Hub name.
        revision: of a Hub name.
        cached: of the Hub, look in the cache on this machine alone.

    Raises:
        ModelError: it is not there.
    """
    return _load(transformers.AutoConfig, base_of(path), revision=revision, local_files_only=cached)


def context_length(shape: PretrainedConfig) -> int | None:
    """The longest sequence that a model was made for; None where its configuration is silent.

    Of LongRoPE the shorter of its two: one longer sequence turns the positions of all that run
    beside it, and those in the cache stay as they were.
    """
    length = getattr(shape.get_text_config(), "max_position_embeddings", None)
    long = (rope for rope in ropes_of(shape) if rope.get("rope_type") == "longrope")
    lengths = [length, *(rope.get("original_max_position_embeddings") for rope in long)]
    return min((int(n) for n in lengths if n is not None), default=None)


def stop_ids_of(path: str, revision: str | None = None) -> list[int]:
    """The end ids of a model's generation config; nothing else of it is ever used.

    PEFT saves none beside an adapter: there it is that of the base model.

    Raises:
        ModelError: there is one, and it is damaged.
    """
    read = transformers.GenerationConfig.from_pretrained
    for place in dict.fromkeys((path, base_of(path))):
        folder = _folder_to_load(place)
        try:
            found = read(str(folder), revision=revision if place == path else None)
        except OSError as error:
            if os.path.lexists(folder / GENERATION_CONFIG_NAME):
                raise _unloadable(error, place) from error
            continue  # there is none
        except Exception as error:  # whatever its content leads to
            raise _unloadable(error, place) from error
        ids = found.eos_token_id
        ids = [i for i in (ids if isinstance(ids, list) else [ids]) if i is not None]
        if not all(type(i) is int and 0 <= i < 2**31 for i in ids):
            raise ModelError(
                f"eos_token_id in the {GENERATION_CONFIG_NAME} of {place!r} is {ids}: no token ids",
                where="the model",
                fix="Put the file back that came with the model.",
            )
        return ids
    return []


# --- policies ------------------------------------------------------------------------------------


def load_policy(
    config: ModelConfig,
    path: str,
    *,
    seed: int,
    device: str | torch.device = "cpu",
) -> Policy:
    """Load a model folder, Hub name or adapter folder as the policy to train.

    One rule for adapters: a recipe with LoRA continues the adapter it starts from; a recipe
    without LoRA merges it and trains all weights.

    Args:
        config: dtype, attention, quantisation and LoRA settings.
        path: what to load; `config.path`, a phase's `final/`, or a checkpoint.
        seed: of a new adapter's random half.
        device: where to put it.

    Raises:
        ModelError: nothing loadable there, or the model cannot be run as asked.
        ConfigError: a library that a setting needs is not installed.
    """
    require_model_folder(path)
    check_adapter(config, path)
    asked = config.compute_dtype
    config = on_device(config, torch.device(device).type)
    base, saved, adapter = base_of(path), read_adapter(path), None
    model = _load_model(base, config, device)
    if saved is not None:
        adapter = _attach(model, path, "model.path", keep=config.lora is not None)
        if config.lora is None:
            log.info("The adapter %s is merged; all weights are trained.", path)
            # PEFT froze the base weights; merged, they are what is trained.
            with as_model_error(
                f"the adapter {path!r} cannot be merged", fix="Set model.lora to go on training it."
            ):
                model, adapter = merged(adapter, model).requires_grad_(True), None
        else:
            log.info("The adapter %s is continued.", path)
            if saved.get("r") != config.lora.rank:
                text = "The adapter %s has rank %s and keeps it; model.lora.rank=%d is not used."
                log.warning(text, path, saved.get("r"), config.lora.rank)
    elif config.lora is not None:
        adapter = _new_adapter(model, config.lora, base, seed)
    policy = _as_policy(model, adapter, config).to(device)
    _compare_products(policy, config, asked, torch.device(device))
    with as_model_error(
        f"{path!r} was loaded, and cannot be run",
        where="the model",
        fix="Put the config.json back that was saved with these weights.",
    ):
        check_logits(policy)
        check_native_attention(policy)
    return policy


# Weights from which on the speed of products is what a step takes; and how many times as fast one
# dtype has to be before it is worth mentioning.
_LARGE = 20_000_000
_MUCH_FASTER = 1.5


def _compare_products(
    policy: Policy, config: ModelConfig, asked: str, device: torch.device
) -> None:
    """Warn where a CPU computes much faster in the other dtype than in that of the products.

    Args:
        policy: of which small ones do not matter.
        config: with the dtype that the products have.
        asked: `compute_dtype` as it was in the recipe; `float32` is somebody's decision.
        device: of the policy.
    """
    weights = sum(parameter.numel() for parameter in policy.model.parameters())
    if device.type != "cpu" or weights < _LARGE:
        return
    slowdown = bfloat16_slowdown()
    if config.compute_dtype == "bfloat16" and slowdown > _MUCH_FASTER:
        setting = "model.dtype" if config.dtype == "bfloat16" else "model.compute_dtype"
        log.warning(
            "This CPU has no fast products in bfloat16: they take %.1f times as long as in "
            "float32. %s=float32 is faster.",
            slowdown,
            setting,
        )
    elif asked == "auto" and config.dtype == "float32" and slowdown * _MUCH_FASTER < 1:
        log.warning(
            "This CPU multiplies %.1f times as fast in bfloat16 as in float32. "
            "model.compute_dtype=fastest uses it, with float32 weights as they are.",
            1 / slowdown,
        )


def weightless_policy(
    config: ModelConfig, shape: PretrainedConfig, device: str = "cpu", *, path: str = ""
) -> Policy:
    """The policy `load_policy` would make of a model of this shape, on the meta device.

    Every tensor has its shape and dtype but no data; a 4-bit base has its compute dtype.

    Args:
        config: as in `load_policy`.
        shape: of the whole model.
        device: whose defaults count.
        path: what would be loaded; a saved adapter stays beside the weights, never merged.

    Raises:
        ModelError: as in `load_policy`.
    """
    config = on_device(config, device)
    model = _weightless_model(config, shape)
    saved = path and read_adapter(path)
    adapter = _attach(model, path, "model.path", keep=True) if saved else None
    with torch.device("meta"), quiet():
        if config.quantization is not None:
            head = model.get_output_embeddings()
            for module in model.modules():
                if isinstance(module, torch.nn.Linear) and module is not head:
                    module.to(DTYPES[config.compute_dtype])
        if adapter is None and config.lora is not None:
            adapter = _new_adapter(model, config.lora, "", seed=0)
        return _as_policy(model, adapter, config)


def _as_policy(model: PreTrainedModel, adapter: Any, config: ModelConfig) -> Policy:
    compute = DTYPES[config.compute_dtype]
    # Adapters are float32 whatever the base is; autocast rounds them for its products, and theirs.
    mixed = any(p.is_floating_point() and p.dtype != compute for p in model.parameters())
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
    """Let adapters pass over memory less often than in PEFT; autocast has to be on from now on.

    PEFT writes the input of each in float32 first, and what it adds twice before it adds it.
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
    """What PEFT's own forward gives, the adapter's second product adding to the layer's."""
    out: Tensor = module.base_layer(x)
    inner = module.lora_A[ADAPTER](module.lora_dropout[ADAPTER](x))
    tensors = (out.flatten(0, -2), inner.flatten(0, -2), module.lora_B[ADAPTER].weight.T)
    return torch.addmm(*tensors, alpha=module.scaling[ADAPTER]).view(out.shape)


def _load_model(path: str, config: ModelConfig, device: str | torch.device) -> PreTrainedModel:
    revision = config.revision if path == config.path else None
    options: dict[str, Any] = {
        "revision": revision,
        "dtype": DTYPES[config.dtype],
        "attn_implementation": _attention(config.attention, shape_of(path, revision)),
    }
    if config.quantization is not None:
        require_extra("bitsandbytes", "quantized", where="model.quantization")
        # NF4, the scales quantised too (arXiv 2305.14314), in linear layers alone: embeddings,
        # norms and the LM head stay in `config.dtype`.
        options["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=DTYPES[config.compute_dtype],
        )
        # Quantised on the way to the device, which never holds the whole model unquantised.
        options["device_map"] = {"": str(device)}
    model, found = _load(AutoModelForCausalLM, path, output_loading_info=True, **options)
    if missing := sorted(found["missing_keys"]):
        what = f"{path!r} lacks {len(missing)} of the weights of its model, such as {missing[0]}"
        fix = "Save the model itself, not in a wrapper that gives weights other names (`module.`)."
        raise ModelError(what, where="the model", fix=fix)
    for module in model.modules():
        # On some CPUs bitsandbytes re-packs 4-bit weights at the first forward without a gradient,
        # for inference only: they round differently from then on, and no backward reads them.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model


def _weightless_model(config: ModelConfig, shape: PretrainedConfig) -> PreTrainedModel:
    options = {"dtype": DTYPES[config.dtype], "attn_implementation": _attention("native", shape)}
    what = "no model of the shape that its config.json says can be made"
    fix = "Put the config.json back that was saved with the weights."
    with (
        as_model_error(what, where="the model", fix=fix, memory=True),
        torch.device("meta"),
        quiet(),
    ):
        return AutoModelForCausalLM.from_config(shape, **options)


def _attention(name: str, shape: PretrainedConfig) -> str:
    """The name in transformers; eager replaces SDPA, which ignores soft-capping, where it must.

    Raises:
        ModelError: it is the shape of no model that continues text.
    """
    models = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if type(shape) not in models or shape.is_encoder_decoder:
        raise ModelError(
            f"{shape.model_type} is no architecture of a causal language model",
            where="the model",
            fix="Name a model that continues text.",
        )
    capped = getattr(shape.get_text_config(), "attn_logit_softcapping", None)
    plain = capped or not models[type(shape)]._supports_sdpa  # noqa: SLF001 - as transformers asks
    return name if name not in ("native", "sdpa") else "eager" if plain else "sdpa"


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
        policy: what to save.
        tokenizer: saved beside it.
        folder: exists, and is empty.
        weights: the values by the names of `policy.model`, where the policy does not hold them in
            one piece; tied weights once.
        shard_bytes: most bytes in one file of whole weights; left out: transformers' own.
    """
    target, options = policy.model, {} if shard_bytes is None else {"max_shard_size": shard_bytes}
    if policy.adapter is not None:
        target, options = policy.adapter, {}
        if weights is not None:
            # The adapter's own names: it wraps the model in two layers.
            weights = {f"base_model.model.{name}": value for name, value in weights.items()}
        # PEFT writes sets as they happen to be ordered, and equal runs leave equal files.
        settings = vars(target.peft_config[ADAPTER])
        settings |= {name: sorted(v) for name, v in settings.items() if isinstance(v, set)}
        if policy.model.generation_config is not None:
            policy.model.generation_config.save_pretrained(folder)
    with quiet():
        target.save_pretrained(folder, state_dict=weights, **options)
    tokenizer.save_pretrained(folder)
    # PEFT writes a model card whose base model is a path on this machine; it says nothing.
    (folder / "README.md").unlink(missing_ok=True)


# --- adapters ------------------------------------------------------------------------------------

# What two models must share for an adapter of one to say anything about the other.
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
    """Refuse an adapter that `load_policy` would refuse, before its base model is loaded.

    An adapter brings its own base model, which must be the recipe's or one of its shape, and its
    tensors must be those that PEFT puts into that model. Whole models pass, as do names on the
    Hub.

    Args:
        config: the recipe's model.
        path: what is to be loaded.
        where: the setting that names it.

    Raises:
        ModelError: its base is not there, is another model, or has other layers.
    """
    if read_adapter(path) is None:
        return
    base = base_of(path)
    wanted = base if config.path is None else base_of(config.path)
    revision = config.revision if base == config.path else None
    shape = shape_of(base, revision)
    if Path(wanted).expanduser().resolve() != Path(base).expanduser().resolve():
        theirs = shape.get_text_config()
        ours = shape_of(wanted).get_text_config()
        differ = [n for n in _SHAPE if getattr(theirs, n, None) != getattr(ours, n, None)]
        if differ:
            raise ModelError(
                f"the adapter {path!r} was trained on {base!r}, which is another model than "
                f"{wanted!r} ({', '.join(differ)} differ)",
                where=where,
                fix=f"Set model.path={base}, or start from an adapter of {wanted!r}.",
            )
        log.warning(
            "The adapter %s was trained on %s, which is used in place of %s.", path, base, wanted
        )
    _attach(_weightless_model(config, shape), path, where, keep=False)


def _attach(model: PreTrainedModel, path: str, where: str, *, keep: bool) -> Any:
    """The model wrapped in the adapter of a folder.

    PEFT only warns of a tensor that the adapter lacks, and drops one that it has too many.

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
    what = f"the adapter {path!r} does not fit its base model {base_of(path)!r}"
    fix = "Check `base_model_name_or_path` in its adapter_config.json."
    with as_model_error(what, where=where, fix=fix), quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # what it warns of is refused below
        try:
            # By way of the CPU: a check must not be the first to touch a GPU.
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
        wanted = peft.get_peft_model_state_dict(adapter, save_embedding_layers=False)
        for name in sorted({n for n in stored if "lora_" in n} | wanted.keys()):
            found, fitting = (_size(tensors.get(name)) for tensors in (stored, wanted))
            if found != fitting:
                raise ValueError(f"{name} {found} in the adapter, {fitting} for this base")
    _untie(model)
    return adapter


def _untie(model: PreTrainedModel) -> None:
    """Give embedding and head a matrix each where an adapter changes one of them.

    PEFT leaves them tied, so that merging it would change the other one as well.
    """
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    embedding, head = (getattr(end, "base_layer", end) for end in ends)
    if embedding.weight is head.weight and ends != (embedding, head):
        head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        model.config.tie_word_embeddings = False


def _size(tensor: Tensor | None) -> str:
    return "is not there" if tensor is None else f"is {' x '.join(map(str, tensor.shape))}"


def check_lora_targets(config: ModelConfig, shape: PretrainedConfig) -> None:
    """Refuse `model.lora.target_modules` that a model of this shape does not have.

    Raises:
        ModelError: a name that is no layer of the model.
    """
    if config.lora is not None and not isinstance(config.lora.target_modules, str):
        weightless_policy(config, shape)


def _new_adapter(model: PreTrainedModel, lora: LoraConfig, base: str, seed: int) -> Any:
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
    # Absolute, so that the adapter loads from whatever folder a command is run in.
    local = _folder_to_load(base)
    name = str(local.resolve()) if local.is_dir() else base
    adapter.peft_config[ADAPTER].base_model_name_or_path = name
    _untie(model)
    return adapter


def _require_targets(model: PreTrainedModel, targets: tuple[str, ...]) -> None:
    """Each name has a layer: PEFT ignores a name without one as long as another has some."""
    layers = [
        name
        for name, module in model.named_modules()
        if getattr(getattr(module, "weight", None), "ndim", 0) == 2
    ]
    missing = [t for t in targets if not any(f".{layer}".endswith(f".{t}") for layer in layers)]
    if missing:
        hint = did_you_mean(missing[0], {layer.rpartition(".")[2] for layer in layers})
        raise ModelError(
            f"LoRA cannot be added: the model has no layer {' and no '.join(map(repr, missing))}",
            where="model.lora.target_modules",
            fix=f"{hint} all-linear takes every linear layer.",
        )
