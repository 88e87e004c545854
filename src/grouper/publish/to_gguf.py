"""GGUF files of an export: written by llama.cpp's own converter, and checked by reading them back.

The converter (`convert_hf_to_gguf.py`) knows names, orders of rows and tokenizers of each
architecture and changes often, so it is not part of Grouper. The file that it writes is opened with
the package `gguf`: every weight of the export must be in it with its shape, some of them are
compared number by number, and the log-probs of the model that transformers rebuilds from it must
agree with those of the export. Greedy continuations are compared as well, and reported: rounding
may change one of them.
"""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grouper.errors import ModelError, require_extra
from grouper.models.gguf import GgufHeader, read_header, require_usable, write_folder
from grouper.models.loading import load_tokenizer
from grouper.models.policy import Policy
from grouper.prompts.rendering import render
from grouper.publish.export import load_for_probe, probe, recipe_of
from grouper.training.prepare import Prepared
from grouper.training.problem_sets import ProblemSets
from grouper.types import Problem

log = logging.getLogger(__name__)

SCRIPT = "convert_hf_to_gguf.py"
# Names by which installed packages of llama.cpp have the converter on the PATH.
PROGRAMS = (SCRIPT, "convert-hf-to-gguf")

# Type of the matrices -> (largest relative error of a tensor, largest difference of log-probs in
# nats). The error is |file - export| / |export| in Frobenius norm. bfloat16 keeps 8 bits and q8_0
# about 7 of the largest number in a block of 32.
BOUNDS = {
    "f32": (1e-6, 1e-2),
    "f16": (1e-3, 5e-2),
    "bf16": (5e-3, 0.5),
    "q8_0": (2e-2, 1.0),
}
# Weights that are compared number by number: llama.cpp changes the order of rows of others.
_COMPARED = ("token_embd.weight", "ffn_down.weight")
# Tokens of a greedy continuation.
_CONTINUATION = 32
_QUESTIONS = ("What is 3 + 4?", "Eva has 7 eggs and drops 3. How many eggs does Eva have?")
_CLONE = (
    "Name it with --converter: llama.cpp's checkout, or the file in it. `git clone --depth 1 "
    "https://github.com/ggml-org/llama.cpp` fetches it, and its "
    "requirements/requirements-convert_hf_to_gguf.txt lists what it needs."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """A GGUF file, and how well it agrees with its export."""

    file: Path
    tensors: int
    """Number of weights whose names and shapes were compared, tied ones once."""
    gap: float | None
    """The largest difference between log-probs of file and export on the probe, in nats; None if
    transformers cannot rebuild this architecture from a GGUF file."""
    same_texts: int
    """Number of greedy continuations that are the export's, token by token."""
    texts: int
    """Number of continuations that were compared."""


def find_converter(path: Path | None) -> list[str]:
    """Return the command of llama.cpp's converter.

    Args:
        path: its script, a checkout of llama.cpp, or None for that on the PATH.

    Raises:
        ModelError: it is not there.
    """
    if path is not None:
        script = path.expanduser()
        if script.is_dir():
            script /= SCRIPT
        if not script.is_file():
            raise ModelError(f"there is no {script}", where="--converter", fix=_CLONE)
        return [sys.executable, str(script.resolve())] if script.suffix == ".py" else [str(script)]
    for name in PROGRAMS:
        program = shutil.which(name)
        if program is not None:
            return [program]
    raise ModelError(
        f"llama.cpp's converter is not on the PATH ({' or '.join(PROGRAMS)})",
        where="--gguf",
        fix=_CLONE,
    )


def write_gguf(folder: Path, outtype: str, converter: list[str]) -> Converted:
    """Convert an export to a GGUF file in its folder, and check it.

    Args:
        folder: an export of whole weights.
        outtype: type of the matrices, a key of `BOUNDS`.
        converter: the command, from `find_converter`.

    Returns:
        The file `FOLDER-OUTTYPE.gguf`, with what was compared.

    Raises:
        ConfigError: the package `gguf` is not installed.
        ModelError: the converter fails, or its file disagrees with the export; no file is left.
    """
    require_extra("gguf", "gguf", where="--gguf")
    folder = folder.resolve()
    target = folder / f"{folder.name}-{outtype}.gguf"
    unfinished = folder / f".{target.name}"
    try:
        _run(converter, folder, unfinished, outtype)
        converted = _check(unfinished, folder, outtype)
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)
    return Converted(
        file=target,
        tensors=converted.tensors,
        gap=converted.gap,
        same_texts=converted.same_texts,
        texts=converted.texts,
    )


def _run(converter: list[str], folder: Path, target: Path, outtype: str) -> None:
    """Run the converter.

    Raises:
        ModelError: it fails, or writes nothing.
    """
    command = [*converter, str(folder), "--outfile", str(target), "--outtype", outtype]
    log.info("Running %s", " ".join(command))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0 and target.is_file():
        return
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    reason = lines[-1] if lines else f"exit code {done.returncode}"
    fix = f"The export in {folder} is complete without the file. "
    if "pre-tokenizer" in done.stderr:
        fix += (
            "llama.cpp knows the tokenizers of models on the Hub by a hash; that of a new model "
            "(model.new) is not among them."
        )
    else:
        fix += "A newer llama.cpp may know this architecture, or lacks a package that it names."
    raise ModelError(f"llama.cpp's converter failed: {reason}", where="--gguf", fix=fix)


# --- checking ------------------------------------------------------------------------------------


def _check(file: Path, folder: Path, outtype: str) -> Converted:
    """Compare a file with the export that it was made from.

    Raises:
        ModelError: they disagree.
    """
    header = read_header(file)
    exported = load_for_probe(str(folder))
    tensors = _check_tensors(file, exported, outtype)
    prompts = _prompts(folder)
    expected = probe(exported)
    texts = _continuations(exported, prompts)
    del exported  # before another model is loaded
    _check_tokens(header, load_tokenizer(str(folder)), [*prompts, *texts])
    with tempfile.TemporaryDirectory(prefix="grouper-gguf-") as place:
        try:
            require_usable(header, where="--gguf")
            write_folder(header, Path(place), digest="", where="--gguf")
        except ModelError as error:
            # Names, shapes and numbers have been compared, and llama.cpp may read more than
            # transformers does.
            log.warning("The file was not read back as a model: %s", error)
            return Converted(file=file, tensors=tensors, gap=None, same_texts=0, texts=0)
        read_back = load_for_probe(place)
        gap = float((probe(read_back) - expected).abs().max())
        texts_read_back = _continuations(read_back, prompts)
    _, bound = BOUNDS[outtype]
    if not gap <= bound:  # NaN is refused as well
        raise _disagreement(f"log-probs differ by {gap:.3g} nats, allowed {bound:g}")
    same = sum(ours == theirs for ours, theirs in zip(texts, texts_read_back, strict=True))
    return Converted(file=file, tensors=tensors, gap=gap, same_texts=same, texts=len(texts))


def _disagreement(reason: str) -> ModelError:
    return ModelError(
        f"the GGUF file disagrees with its export: {reason}",
        where="--gguf",
        fix="Update llama.cpp; if it disagrees then, too, please report it.",
    )


def _check_tokens(header: GgufHeader, tokenizer: Any, texts: list[list[int]]) -> None:
    """Compare the spelling of the tokens in some texts; the file may have unused ones behind.

    Raises:
        ModelError: the file has too few tokens, or another one in the place of one of these.
    """
    tokens = header.metadata["tokenizer.ggml.tokens"]
    if len(tokens) < len(tokenizer):
        raise _disagreement(f"it has {len(tokens):,} tokens of {len(tokenizer):,}")
    for token_id in sorted({token_id for ids in texts for token_id in ids}):
        spelling = tokenizer.convert_ids_to_tokens(token_id)
        if tokens[token_id] != spelling:
            raise _disagreement(f"token {token_id} is {tokens[token_id]!r}, not {spelling!r}")


def _check_tensors(file: Path, exported: Policy, outtype: str) -> int:
    """Compare names and shapes of the weights, and the numbers of some.

    A weight that the package `gguf` has no name for is not compared, and a warning says so.

    Returns:
        The number of weights that were compared.

    Raises:
        ModelError: a weight is missing, or differs by more than the type of the file rounds.
    """
    import gguf

    reader = gguf.GGUFReader(file)
    architecture = str(reader.fields["general.architecture"].contents())
    in_file = {tensor.name: tensor for tensor in reader.tensors}
    layers = int(reader.fields[f"{architecture}.block_count"].contents())
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    if architecture not in kinds:
        log.warning("The package gguf does not know %s: no weight was compared.", architecture)
        return 0
    names = gguf.get_tensor_name_map(kinds[architecture], layers)
    bound, _ = BOUNDS[outtype]
    compared = 0
    for name, weight in _distinct_weights(exported).items():
        stored_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if stored_name is None:
            log.warning("%s has no name in llama.cpp, and was not compared.", name)
            continue
        compared += 1
        tensor = in_file.get(stored_name)
        if tensor is None:
            raise _disagreement(f"it lacks {name} ({stored_name})")
        # ggml writes the innermost dimension first.
        shape = tuple(int(size) for size in reversed(tensor.shape))
        if shape != tuple(weight.shape):
            raise _disagreement(f"{stored_name} has the shape {shape}, {name} {[*weight.shape]}")
        if stored_name.endswith(_COMPARED) and _is_outer_layer(stored_name, layers):
            error = _relative_error(gguf.dequantize(tensor.data, tensor.tensor_type), weight)
            if not error <= bound:
                raise _disagreement(
                    f"{stored_name} differs from {name} by {error:.2g} of its norm, allowed "
                    f"{bound:g}"
                )
    return compared


def _distinct_weights(exported: Policy) -> dict[str, Tensor]:
    """Return the weights by their names in transformers; tied ones once."""
    return {name: weight.detach() for name, weight in exported.model.named_parameters()}


def _is_outer_layer(name: str, layers: int) -> bool:
    """Tell whether a weight is outside the layers, in the first one or in the last one."""
    return not name.startswith("blk.") or name.startswith(("blk.0.", f"blk.{layers - 1}."))


def _relative_error(stored: Any, weight: Tensor) -> float:
    """Return |stored - weight| / |weight| in Frobenius norm."""
    exact = weight.float().numpy()
    difference = np.asarray(stored, dtype=np.float32).reshape(exact.shape) - exact
    norm = float(np.linalg.norm(exact))
    return float(np.linalg.norm(difference)) / max(norm, 1e-30)


def _prompts(folder: Path) -> list[list[int]]:
    """Render questions as the model was trained, or as plain text if that is not known."""
    recipe = recipe_of(str(folder))
    if recipe is None:
        tokenizer = load_tokenizer(str(folder))
        return [tokenizer.encode(question) for question in _QUESTIONS]
    with Prepared(recipe, ProblemSets(), model=str(folder), quiet=True) as prepared:
        prompts = []
        for question in _QUESTIONS:
            problem = Problem(id="q", question=question, answer="?", source="export")
            prompt = render(problem, prepared.format, prepared.tokenizer)
            prompts.append([*prompt.token_ids])
    return prompts


@torch.no_grad()
def _continuations(policy: Policy, prompts: list[list[int]]) -> list[list[int]]:
    """Continue each prompt greedily, stop tokens ignored."""
    continuations = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = policy.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=_CONTINUATION,
            min_new_tokens=_CONTINUATION,
            repetition_penalty=1.0,
        )
        continuations.append(output[0, len(prompt) :].tolist())
    return continuations
