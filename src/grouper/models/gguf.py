"""GGUF files as a source of weights: read once, written as a model folder, used like any other.

A GGUF file holds weights for llama.cpp, most of them rounded to a few bits, with the tokenizer and
the chat template as metadata. transformers rebuilds a model from it, but omits some things without
a warning. They are checked here: every number of the file has a place in the model and every weight
of the model came from the file; the tokenizer writes and splits text as the file's own table says;
scaled positions are restored, or the file is rejected.

The folder is in the cache (`GROUPER_CACHE`) under the file's SHA-256, so that a file that was
moved or renamed is not read again. Deleting it loses nothing but the time to write it.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import random
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import torch
import transformers
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from grouper.errors import ModelError, RunFolderError, as_model_error, require_extra
from grouper.files import os_errors_as, whole_folder
from grouper.models.folders import (
    GGUF_RECORD,
    gguf_digest,
    gguf_folder,
    require_model_folder,
)
from grouper.models.quiet import quiet

log = logging.getLogger(__name__)

# Types that hold numbers as they are; all others are quantized.
_PLAIN_TYPES = ("F64", "F32", "F16", "BF16")
# Texts to check a tokenizer with.
_TEXTS_TO_TRY = 2000
# The advice for a file that cannot be rebuilt.
_OTHER_SOURCE = "Name the folder or the Hub name of the model that the file was made from."

# Values of `tokenizer.ggml.token_type`.
_NORMAL = 1
_CONTROL = 3
_USER_DEFINED = 4
_BYTE = 6


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The content of a GGUF file without the numbers."""

    file: Path
    metadata: Mapping[str, Any]
    """Values by llama.cpp's names, such as `general.architecture`."""
    tensors: Mapping[str, tuple[str, int]]
    """Name of a tensor -> its type, such as `Q4_K`, and its number of elements."""
    rope_factors: Mapping[str, tuple[float, ...]]
    """Name of a tensor -> the divisors of the frequencies of positions, one for each."""

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the architecture."""
        return str(self.metadata.get("general.architecture", ""))

    @property
    def elements(self) -> int:
        """Number of elements in all tensors that hold weights."""
        counts = [count for name, (_, count) in self.tensors.items() if not _is_rope(name)]
        return sum(counts)

    @property
    def types(self) -> Counter[str]:
        """Number of tensors of each type."""
        return Counter(tensor_type for tensor_type, _ in self.tensors.values())

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model folder: float32 if bfloat16 would round once more.

        The errors of quantized numbers are far larger than those of rounding to bfloat16.
        """
        # Norms are float32 in every file, so the largest tensor decides.
        largest_type = "F32"
        if self.tensors:
            largest_type, _ = max(self.tensors.values(), key=lambda entry: entry[1])
        if largest_type in ("F64", "F32", "F16"):
            return torch.float32
        return torch.bfloat16


def _is_rope(name: str) -> bool:
    """Tell whether a tensor scales positions and holds no weights."""
    return name.startswith(("rope_freqs.", "rope_factors_"))


def folder_of_gguf(path: str, *, where: str = "model.path") -> Path:
    """Return the model folder that a GGUF file was written to; the first call writes it.

    Args:
        path: of the file.
        where: the setting or argument that names it.

    Raises:
        ConfigError: the package `gguf` is not installed.
        ModelError: the file cannot be used as a model that is trained.
        RunFolderError: there is no space for the folder, or the cache cannot be written.
    """
    require_model_folder(path, where=where)
    target = gguf_folder(path)
    if (target / GGUF_RECORD).is_file():
        return target
    require_extra("gguf", "gguf", where=where)
    header = read_header(Path(path).expanduser())
    require_usable(header, where=where)
    _require_room(header, target)
    with os_errors_as(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
    # Processes of one run start together: one writes, the others wait and find it.
    with os_errors_as(target.parent), filelock.FileLock(f"{target}.lock"):
        if not (target / GGUF_RECORD).is_file():
            log.warning("%s is read once, and kept as a model folder in %s.", path, target)
            with whole_folder(target) as folder:
                losses = write_folder(header, folder, digest=gguf_digest(path), where=where)
            for loss in losses:
                log.warning("%s: %s", path, loss)
    return target


def _require_room(header: GgufHeader, target: Path) -> None:
    """Raise `RunFolderError` if the disk has no space for the model folder."""
    needed = header.elements * header.dtype.itemsize
    existing = next(folder for folder in target.parents if folder.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise RunFolderError(
            f"the weights of {header.file.name} take {needed / 1e9:.1f} GB as a model folder, and "
            f"{free / 1e9:.1f} GB are free here",
            where=str(existing),
            fix="Free some, or set GROUPER_CACHE to a folder on another disk.",
        )


# --- the header ----------------------------------------------------------------------------------


def read_header(file: Path) -> GgufHeader:
    """Read metadata and the list of tensors.

    Raises:
        ModelError: it is not a GGUF file, or damaged.
    """
    with file.open("rb") as opened:
        if opened.read(4) != b"GGUF":
            raise ModelError(
                f"{str(file)!r} is not a GGUF file: it does not begin with GGUF",
                where="the model",
                fix="Download it again, or name a model folder.",
            )
    with as_model_error(
        f"{str(file)!r} ends too early, or is damaged",
        where="the model",
        fix="Download it again.",
    ):
        reader = _make_reader(file)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
        tensors = {
            tensor.name: (tensor.tensor_type.name, int(tensor.n_elements))
            for tensor in reader.tensors
        }
        rope_factors = {
            tensor.name: tuple(map(float, tensor.data))
            for tensor in reader.tensors
            if _is_rope(tensor.name)
        }
    return GgufHeader(file=file, metadata=metadata, tensors=tensors, rope_factors=rope_factors)


def _make_reader(file: Path) -> Any:
    """Open a file with the reader of the library `gguf`, made faster."""
    import gguf

    class Reader(gguf.GGUFReader):
        """The reader of the library, five times as fast.

        It cuts a vocabulary into a million slices of a memory map, and a slice of an array takes a
        fifth of the time.
        """

        @property
        def data(self) -> Any:
            return self._array

        @data.setter
        def data(self, mapped: Any) -> None:
            self._array = mapped.view(np.ndarray)

    return Reader(file)


def require_usable(header: GgufHeader, *, where: str = "model.path") -> None:
    """Check that a file holds a whole language model that transformers can rebuild.

    Raises:
        ModelError: it does not.
    """
    name = header.file.name
    content = header.metadata.get("general.type", "model")
    files = int(header.metadata.get("split.count", 0))
    if header.architecture == "clip" or content == "mmproj":
        raise ModelError(
            f"{name} holds the part of a model that reads images, not a language model",
            where=where,
            fix="Name the file of the language model that it belongs to.",
        )
    if content == "adapter":
        raise ModelError(
            f"{name} holds a LoRA adapter for llama.cpp, not a model",
            where=where,
            fix="Name the model, or the folder of the adapter as PEFT saved it.",
        )
    if files > 1:
        raise ModelError(
            f"{name} is one of {files} parts of a model",
            where=where,
            fix="Join them with llama.cpp's `llama-gguf-split --merge`, and name the result.",
        )
    if not _is_known(header.architecture):
        raise ModelError(
            f"{name} holds a model of the architecture {header.architecture!r}, which transformers "
            f"{transformers.__version__} cannot read from a GGUF file",
            where=where,
            fix=_OTHER_SOURCE,
        )
    if not header.metadata.get("tokenizer.ggml.tokens"):
        raise ModelError(
            f"{name} holds no tokenizer",
            where=where,
            fix="Name a file that was made with the model's own vocabulary.",
        )


def _is_known(architecture: str) -> bool:
    """Tell whether transformers reads this architecture from GGUF files."""
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    if architecture in GGUF_SUPPORTED_ARCHITECTURES:
        return True
    try:
        # Newer versions read some architectures in another way, and list them elsewhere.
        from transformers.integrations.gguf import is_gguf_arch_supported
    except ImportError:
        return False
    return bool(is_gguf_arch_supported(architecture))


# --- the folder ----------------------------------------------------------------------------------


def write_folder(
    header: GgufHeader, folder: Path, *, digest: str, where: str = "model.path"
) -> list[str]:
    """Write weights, tokenizer, template and stop tokens of a GGUF file as a model folder.

    Args:
        header: of the file.
        folder: exists, and is empty.
        digest: SHA-256 of the file, for the record.
        where: the setting or argument that names the file.

    Returns:
        A sentence for each thing that the original model has and the folder lacks.

    Raises:
        ModelError: it cannot be rebuilt as it is.
    """
    name = header.file.name
    losses = _losses_of_weights(header)
    # Damaged metadata raise errors of any class.
    with as_model_error(
        f"the tokenizer in {name} cannot be rebuilt", where=where, fix=_OTHER_SOURCE
    ):
        tokenizer = _load_tokenizer(header)
        losses += _set_pre_tokenizer(header, tokenizer)
        check_tokenizer(header, tokenizer)
    with as_model_error(f"the model in {name} cannot be rebuilt", where=where, fix=_OTHER_SOURCE):
        model = _load_model(header, where)
    with quiet():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    if tokenizer.chat_template is None:
        losses.append("it has no chat template, so that prompts are written as plain text.")
    record = {
        "file": name,
        "sha256": digest,
        "name": header.metadata.get("general.name"),
        "license": header.metadata.get("general.license"),
        "types": dict(header.types),
        "transformers": transformers.__version__,
        "losses": losses,
    }
    text = json.dumps(record, indent=2, ensure_ascii=False)
    (folder / GGUF_RECORD).write_text(f"{text}\n", encoding="utf-8")
    return losses


def _losses_of_weights(header: GgufHeader) -> list[str]:
    """Return a sentence about quantization if there are quantized weights."""
    quantized = []
    for tensor_type, count in header.types.most_common():
        if tensor_type not in _PLAIN_TYPES:
            quantized.append(f"{count} {tensor_type}")
    if not quantized:
        return []
    bits = 8 * header.file.stat().st_size / max(1, header.elements)
    sentence = (
        f"its weights are quantized ({', '.join(quantized)} of {header.types.total()} tensors, "
        f"{bits:.1f} bits a number): training starts from the rounded values."
    )
    return [sentence]


def _options(header: GgufHeader) -> dict[str, Any]:
    """Return the arguments that let transformers read the file."""
    return {"gguf_file": header.file.name, "local_files_only": True}


def _load_model(header: GgufHeader, where: str) -> PreTrainedModel:
    """Load the weights as plain numbers, with the positions and the head of the model.

    Raises:
        ModelError: something of the file has no place in the model, or the other way round.
    """
    options = {**_options(header), "dtype": header.dtype}
    if hasattr(transformers, "GgufConfig"):
        # Without this, newer versions keep the weights quantized if they have kernels for them.
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    config = AutoConfig.from_pretrained(header.file.parent, **_options(header))
    _set_head_size(header, config)
    # There is no other way to switch off its progress bar for the tensors.
    with quiet(), contextlib.redirect_stderr(io.StringIO()):
        model, loading = AutoModelForCausalLM.from_pretrained(
            header.file.parent, config=config, output_loading_info=True, **options
        )
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    if getattr(model, "hf_quantizer", None) is not None:
        # It would refuse to save weights that are no longer quantized.
        model.hf_quantizer = None
    missing = sorted(loading["missing_keys"])
    misshapen = sorted(name for name, *_ in loading["mismatched_keys"])
    if missing or misshapen:
        # transformers has initialized them at random.
        verb = "lacks" if missing else "has other sizes for"
        names = missing or misshapen
        raise ModelError(
            f"{header.file.name} {verb} {len(names)} of the weights of its model, such as "
            f"{names[0]}",
            where=where,
            fix="Download it again, or name the model that it was made from.",
        )
    stored = sum(parameter.numel() for parameter in model.parameters())
    if stored != header.elements:
        raise ModelError(
            f"{header.file.name} holds {header.elements:,} numbers, and transformers "
            f"{transformers.__version__} finds a place for {stored:,}",
            where=where,
            fix=_OTHER_SOURCE,
        )
    _restore_positions(header, config, where)
    config.architectures = [type(model).__name__]
    model.generation_config = transformers.GenerationConfig(**_special_ids(header))
    return _tied(model)


def _set_head_size(header: GgufHeader, config: PretrainedConfig) -> None:
    """Take the size of a head from the file; transformers would compute it from other sizes."""
    size = header.metadata.get(f"{header.architecture}.attention.key_length")
    if size is not None and hasattr(config, "head_dim"):
        config.head_dim = int(size)


def _tied(model: PreTrainedModel) -> PreTrainedModel:
    """Tie embedding and head again if a file holds one matrix quantized twice."""
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings().weight
    if head is embedding:
        return model
    distance = (head.float() - embedding.float()).norm()
    if distance > 0.1 * embedding.float().norm():
        return model
    # The head's copy is quantized with more bits.
    embedding.data.copy_(head.data)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    return model


def _special_ids(header: GgufHeader) -> dict[str, Any]:
    """Return the ids of tokens that begin, end and pad a text, as a generation config names them.

    A message of a chat ends with `eot` where a text ends with `eos`; a model may use both.
    """
    prefix = "tokenizer.ggml."
    stop_ids: list[int] = []
    for name in ("eos_token_id", "eot_token_id", "eom_token_id"):
        token_id = header.metadata.get(prefix + name)
        if token_id is not None and int(token_id) not in stop_ids:
            stop_ids.append(int(token_id))
    ids = {
        "bos_token_id": header.metadata.get(f"{prefix}bos_token_id"),
        "eos_token_id": stop_ids if len(stop_ids) > 1 else next(iter(stop_ids), None),
        "pad_token_id": header.metadata.get(f"{prefix}padding_token_id"),
    }
    return {name: value for name, value in ids.items() if value is not None}


# --- positions -----------------------------------------------------------------------------------

# The scaling of positions in Llama 3.1 and later; the factor differs between sizes. A GGUF file
# holds only the resulting divisors.
_LOW_FREQUENCY = 1.0
_HIGH_FREQUENCY = 4.0
_LLAMA3_CONTEXT = 8192


def llama3_factors(frequencies: Sequence[float], factor: float) -> list[float]:
    """Compute the divisors of the frequencies of Llama 3.1's positions.

    Source: "The Llama 3 Herd of Models" (arXiv 2407.21783), in the form of its reference code: long
    waves are stretched by `factor`, short ones not, and those between are interpolated.

    Args:
        frequencies: radians per position, one for each pair of dimensions.
        factor: the scale of the longest waves.
    """
    factors = []
    for frequency in frequencies:
        waves = _LLAMA3_CONTEXT * frequency / (2 * math.pi)
        between = (waves - _LOW_FREQUENCY) / (_HIGH_FREQUENCY - _LOW_FREQUENCY)
        smooth = min(1.0, max(0.0, between))
        factors.append(1.0 / ((1.0 - smooth) / factor + smooth))
    return factors


def _are_llama3(factors: Sequence[float], *, base: float) -> bool:
    """Tell whether factors are those of Llama 3 for some scale of the longest waves.

    Args:
        factors: one for each pair of dimensions.
        base: of the frequencies (theta); 0 if there is no single one.
    """
    if not factors or base == 0:
        return False
    pairs = len(factors)
    frequencies = [base ** (-pair / pairs) for pair in range(pairs)]
    expected = llama3_factors(frequencies, max(factors))
    return all(
        math.isclose(ours, theirs, rel_tol=1e-3)
        for ours, theirs in zip(expected, factors, strict=True)
    )


def _restore_positions(header: GgufHeader, config: PretrainedConfig, where: str) -> None:
    """Write the scaling of positions into a config, which transformers leaves out.

    Raises:
        ModelError: the file has a scaling that cannot be restored.
    """
    prefix = f"{header.architecture}.rope.scaling."
    scaling_type = header.metadata.get(f"{prefix}type", "none")
    rope = dict(config.rope_parameters or {})
    if header.rope_factors:
        # Llama 3 has only this table; LongRoPE has two with other names.
        factors = header.rope_factors.get("rope_freqs.weight", ())
        if _are_llama3(factors, base=float(rope.get("rope_theta", 0.0))):
            config.rope_parameters = {
                **rope,
                "rope_type": "llama3",
                "factor": max(factors),
                "low_freq_factor": _LOW_FREQUENCY,
                "high_freq_factor": _HIGH_FREQUENCY,
                "original_max_position_embeddings": _LLAMA3_CONTEXT,
            }
            return
        scaling_type = "by a table of its own"
    elif scaling_type == "none" or rope.get("rope_type", "default") != "default":
        return
    elif scaling_type == "linear":
        scaling = {"rope_type": "linear", "factor": float(header.metadata[f"{prefix}factor"])}
        if "full_attention" in rope:
            # Gemma 3 scales the layers that see the whole context.
            rope["full_attention"] = {**rope["full_attention"], **scaling}
            config.rope_parameters = rope
        else:
            config.rope_parameters = {**rope, **scaling}
        return
    raise ModelError(
        f"the positions of {header.file.name} are scaled ({scaling_type}), which cannot be read "
        "from it",
        where=where,
        fix=_OTHER_SOURCE,
    )


# --- the tokenizer -------------------------------------------------------------------------------

# The rules that split text before byte pairs are merged: `tokenizer.ggml.pre` -> a normalizer and
# regular expressions, each applied to the pieces that the one before it has left. The names are
# llama.cpp's, the expressions those that the models were published with.
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_TEXT = _QWEN2.replace(r"\p{N}| ?", r"\p{N}{1,3}| ?")
_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SPLITS: Mapping[str, tuple[Any, tuple[str, ...]]] = {
    "default": (None, (_GPT2,)),
    "gpt-2": (None, (_GPT2,)),
    "smollm": (None, (r"\p{N}", _GPT2)),
    "qwen2": (normalizers.NFC(), (_QWEN2,)),
    "llama-bpe": (None, (_LLAMA3_TEXT,)),
}


def _load_tokenizer(header: GgufHeader) -> Any:
    """Let transformers rebuild the tokenizer."""
    with quiet():
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            header.file.parent, **_options(header)
        )
    for name in ("gguf_file", "local_files_only"):
        tokenizer.init_kwargs.pop(name, None)
    return _without_added_tokens(header, tokenizer)


# Special tokens by the names of transformers -> the names of their ids in a GGUF file.
_SPECIAL_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "pad_token": "padding_token_id",
    "unk_token": "unknown_token_id",
}


def _without_added_tokens(header: GgufHeader, tokenizer: Any) -> Any:
    """Drop tokens that the class of a tokenizer adds to those of its file.

    transformers uses GPT-2's class for all byte-level tokenizers. It adds a token for the end of a
    text; if the file has none of that name, the model has no embedding for its id.
    """
    tokens = header.metadata["tokenizer.ggml.tokens"]
    size = len(tokens)
    if len(tokenizer) <= size:
        return tokenizer
    settings = json.loads(tokenizer.backend_tokenizer.to_str())
    settings["added_tokens"] = [token for token in settings["added_tokens"] if token["id"] < size]
    vocabulary = settings["model"]["vocab"]
    if isinstance(vocabulary, dict):
        settings["model"]["vocab"] = {
            token: token_id for token, token_id in vocabulary.items() if token_id < size
        }
    special = {}
    for name, key in _SPECIAL_TOKENS.items():
        metadata_key = f"tokenizer.ggml.{key}"
        if metadata_key in header.metadata:
            special[name] = tokens[header.metadata[metadata_key]]
    backend = Tokenizer.from_str(json.dumps(settings))
    rebuilt = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    rebuilt.chat_template = tokenizer.chat_template
    return rebuilt


def _set_pre_tokenizer(header: GgufHeader, tokenizer: Any) -> list[str]:
    """Let a byte-level tokenizer split text by the rule that its file names.

    transformers falls back to the rule of GPT-2, by which the digits of a number stay together.

    Returns:
        A sentence if the rule is not known.
    """
    if header.metadata.get("tokenizer.ggml.model") != "gpt2":
        return []
    rule = str(header.metadata.get("tokenizer.ggml.pre", "default"))
    if rule in _SPLITS:
        normalizer, expressions = _SPLITS[rule]
        steps: list[Any] = []
        for expression in expressions:
            split = pre_tokenizers.Split(Regex(expression), behavior="isolated")
            steps.append(split)
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
        if normalizer is not None:
            tokenizer.backend_tokenizer.normalizer = normalizer
        return []
    if rule in _rules_of_transformers():
        return []
    sentence = (
        f"its tokenizer splits text by a rule that is not known here ({rule!r}); GPT-2's is used, "
        "which may split numbers differently than in training."
    )
    return [sentence]


def _rules_of_transformers() -> Mapping[str, str]:
    """Return the rules that transformers applies itself; older versions have none."""
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    except ImportError:
        return {}
    return dict(GGUF_PRE_TOKENIZER_SPLITS)


def token_bytes(header: GgufHeader) -> list[bytes]:
    """Return the text of every token, as UTF-8, by the table of the file."""
    metadata = header.metadata
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types: list[int] = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    table = []
    if metadata.get("tokenizer.ggml.model") == "gpt2":
        byte_of = {spelling: byte for byte, spelling in _byte_spellings().items()}
        for token in tokens:
            if byte_of.keys() >= set(token):
                table.append(bytes(byte_of[character] for character in token))
            else:
                # A special token, which is written as it is.
                table.append(token.encode())
        return table
    for token, token_type in zip(tokens, types, strict=True):
        if token_type == _BYTE:
            # Written as <0x0A>.
            table.append(bytes([int(token[1:-1], 16)]))
        else:
            table.append(token.replace("▁", " ").encode())
    return table


def _byte_spellings() -> dict[int, str]:
    """Return the character that byte-level tokenizers write for each byte (GPT-2).

    Printable bytes are written as themselves, all others as characters from 256 on.
    """
    spellings = {}
    for first, last in (("!", "~"), ("¡", "¬"), ("®", "ÿ")):
        for byte in range(ord(first), ord(last) + 1):
            spellings[byte] = chr(byte)
    unprintable = [byte for byte in range(256) if byte not in spellings]
    for index, byte in enumerate(unprintable):
        spellings[byte] = chr(256 + index)
    return spellings


def check_tokenizer(header: GgufHeader, tokenizer: Any) -> None:
    """Encode texts, and read the ids back by the table of the file.

    Raises:
        ModelError: the tokenizer has other tokens than the file, or changes a text.
    """
    table = token_bytes(header)
    subject = f"the tokenizer that transformers makes of {header.file.name}"
    if len(tokenizer) != len(table):
        raise ModelError(
            f"{subject} has {len(tokenizer):,} tokens, and the file {len(table):,}",
            where="the model",
            fix=_OTHER_SOURCE,
        )
    adds_space = bool(header.metadata.get("tokenizer.ggml.add_space_prefix", False))
    for text in _texts_of(header, table):
        ids = tokenizer.encode(text, add_special_tokens=False)
        read_back = b"".join(table[token_id] for token_id in ids)
        if adds_space:
            read_back = read_back.removeprefix(b" ")
        if read_back != text.encode():
            raise ModelError(
                f"{subject} writes {text!r} with tokens that the file reads as "
                f"{read_back.decode(errors='replace')!r}",
                where="the model",
                fix=_OTHER_SOURCE,
            )


def _texts_of(header: GgufHeader, table: Sequence[bytes]) -> list[str]:
    """Make texts of random tokens, the same ones each time."""
    types = header.metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(table)
    words = []
    for token, token_type in zip(table, types, strict=True):
        text = token.decode(errors="replace")
        # Other tokens are pieces of a character, or text that no tokenizer would give back.
        if token_type == _NORMAL and text and "\ufffd" not in text and _is_composed(text):
            words.append(text)
    generator = random.Random(0)
    texts = []
    for _ in range(_TEXTS_TO_TRY):
        count = 1 + int(generator.random() * 8)
        chosen = [words[int(generator.random() * len(words))] for _ in range(count)]
        text = "".join(chosen)
        if _is_composed(text):
            texts.append(text)
    return texts


def _is_composed(text: str) -> bool:
    """Tell whether a tokenizer that composes characters (NFC) leaves a text as it is."""
    return str(normalizers.NFC().normalize_str(text)) == text
