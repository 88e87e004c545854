"""Exporting: one folder that any program can load and prompt, checked against what it came from.

config.json, *.safetensors     whole weights, or adapter_config.json and the adapter alone
tokenizer*, chat_template      a user message alone gives the prompt that the model was trained on
generation_config.json         stop tokens and sampling, as the model was measured
grouper.json                   recipe, prompt, stop strings, evaluation results
README.md, curves.png          the model card, and the curves of the run
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grouper.config.schema import LoraConfig, ModelConfig, Recipe
from grouper.errors import ConfigError, ModelError
from grouper.files import whole_folder
from grouper.models.device import DTYPES
from grouper.models.folders import (
    ADAPTER_FILE,
    EXPORT_FILE,
    base_of,
    looks_local,
    read_adapter,
    recipe_for,
    require_model_folder,
    run_of,
)
from grouper.models.loading import load_policy, load_tokenizer, save_policy, shape_of
from grouper.models.merging import can_be_added, keeps_adapter, merged_copy
from grouper.models.policy import Policy
from grouper.prompts.rendering import (
    OPENED_THINKING,
    install_template,
    own_chat_template,
    render,
    uses_chat,
)
from grouper.publish.card import CURVES_FILE, model_card, results_of
from grouper.publish.portable import without_folders
from grouper.report.curves import draw_curves
from grouper.runs.folder import RunFolder
from grouper.runs.records import evaluation_summary
from grouper.training.prepare import Prepared
from grouper.training.problem_sets import ProblemSets
from grouper.training.saved_state import require_intact
from grouper.types import Problem

log = logging.getLogger(__name__)

# How far log-probs may be from the source's: merging adds two products in another order, and
# bfloat16 rounds every weight to 8 bits.
BOUNDS = {"float32": 1e-3, "bfloat16": 0.5}
# Of one file of weights.
SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written, and how well it agrees with what it was made from."""

    gap: float
    """The largest difference between log-probs of source and export on the probe, in nats; 0 for
    an adapter alone, which is copied."""
    dtype: str
    """Of the saved weights."""
    larger: bool
    """Whether they take twice what those of the base take, in bfloat16."""
    prompts_alone: bool
    """Whether a user message alone, through the chat template, gives the prompt of training."""


def export_model(
    source: str,
    target: Path,
    *,
    dtype: str = "auto",
    adapter: bool = False,
    place: str | None = None,
    license_id: str | None = None,
) -> Exported:
    """Write `source` as one folder that other programs load and prompt as it was trained.

    Whole weights are loaded again and compared with the source, base and adapter side by side.

    Args:
        source: a model or adapter folder, or a Hub name.
        target: must not exist yet.
        dtype: of the saved weights, `float32` or `bfloat16`; `auto` is that of the source, and
            float32 where an adapter is merged, whose small changes bfloat16 rounds away.
        adapter: write the adapter alone instead of merging it into its base.
        place: where others will load it from, for the card; left out: the name of `target`.
        license_id: on the card; left out: that of the base model's card, if it can be read.

    Raises:
        ModelError: nothing loadable there, the target exists, or the two disagree; then nothing
            is left behind.
    """
    require_model_folder(source, where="SOURCE")
    if target.exists():
        raise ModelError(
            f"{target} exists already", where="export", fix="Name a folder that does not exist."
        )
    require_intact(source)
    settings = read_adapter(source)
    stored = shape_of(source).dtype
    if dtype == "auto":
        dtype = "bfloat16" if settings is None and stored is torch.bfloat16 else "float32"
    if adapter:
        _require_portable_adapter(source, settings)
    lora = None if settings is None else LoraConfig(rank=settings["r"])
    original = _load(source, lora)
    expected = _probe(original)
    saved = original if adapter else _merged(source, original, DTYPES[dtype])
    del original
    tokenizer, gap, alone, record = load_tokenizer(source), 0.0, False, None
    run, recipe = run_of(source), recipe_of(source)
    if recipe is not None:
        with Prepared(recipe, ProblemSets(), model=source, quiet=True) as prepared:
            alone = _make_portable(prepared, tokenizer)
            _set_generation(prepared, saved)
            record = _record(prepared, source, in_template=alone)
    with whole_folder(target) as folder:
        save_policy(saved, tokenizer, folder, shard_bytes=SHARD_BYTES)
        del saved
        if record is not None:
            text = json.dumps(record, indent=2, ensure_ascii=False, default=dict) + "\n"
            (folder / EXPORT_FILE).write_text(text, encoding="utf-8")
        if run is not None:
            for loss in RunFolder(run).losses(recipe):
                log.warning("%s has lost %s: the card says nothing of it.", run, loss)
            draw_curves(RunFolder(run), folder / CURVES_FILE)
        base = recipe.model.path if recipe is not None and recipe.model.path else base_of(source)
        card = model_card(
            source,
            record,
            place or f"./{target.name}",
            run=run,
            base=base,
            adapter=adapter,
            license_id=license_id,
        )
        (folder / "README.md").write_text(card, encoding="utf-8")
        if not adapter:
            gap = float((_probe(_load(str(folder))) - expected).abs().max())
        if not gap <= BOUNDS[dtype]:
            raise ModelError(
                f"the exported model disagrees with {source}: log-probs differ by {gap:.3g}, "
                f"allowed {BOUNDS[dtype]:g}",
                where="export",
                fix="Export as float32; if it disagrees there, too, please report it.",
            )
    larger = dtype == "float32" and not adapter and stored is torch.bfloat16
    return Exported(gap=gap, dtype=dtype, larger=larger, prompts_alone=alone)


def _merged(source: str, original: Policy, dtype: torch.dtype) -> Policy:
    """The whole model in this dtype, an adapter merged into it.

    In bfloat16 it is rounded at random: to the nearest number most of a small update would be gone.
    """
    if original.adapter is not None and keeps_adapter(dtype) and can_be_added(original):
        merged, _ = merged_copy(original, dtype, seed=0)
        return merged
    whole = _load(source)
    whole.model.to(dtype)
    return whole


def recipe_of(source: str) -> Recipe | None:
    """How a model is prompted; None where nothing is known of it.

    Raises:
        ConfigError: it lies in a run whose recipe is damaged.
    """
    try:
        return recipe_for(source)
    except ConfigError as error:
        if run_of(source) is not None:
            raise
        log.info("Nothing is said of how to prompt %s: %s", source, error)
        return None


def _require_portable_adapter(source: str, settings: dict[str, Any] | None) -> None:
    """Raise `ModelError` if there is no adapter, or its base exists on this machine alone."""
    if settings is None:
        raise ModelError(
            f"{source} is a whole model, and has no adapter",
            where="--adapter",
            fix="Leave the option out.",
        )
    base = str(settings["base_model_name_or_path"])
    if looks_local(base):
        raise ModelError(
            f"the adapter's base is a folder of this machine ({base}), which nobody else has",
            where="--adapter",
            fix=f"Leave the option out, which merges the two; or write the base's Hub name into "
            f"{ADAPTER_FILE}.",
        )


def _load(path: str, lora: LoraConfig | None = None) -> Policy:
    # Nothing is trained or sampled: any attention will do, whatever the run had to use.
    config = ModelConfig(path=path, dtype="float32", attention="sdpa", lora=lora)
    return load_policy(config, path, seed=0)


@torch.no_grad()
def _probe(policy: Policy) -> Tensor:
    """Log-probs [rows, tokens, V] in float32 on token ids spread over the vocabulary."""
    ids = (torch.arange(128).view(4, 32) * 7919 + 11) % policy.vocabulary
    logprobs: Tensor = policy.model(ids, use_cache=False).logits.float().log_softmax(-1)
    return logprobs


# --- how the model is prompted -------------------------------------------------------------------

_QUESTIONS = ("What is 3 + 4?", 'Let $x^2 = 9$.\nFind the "larger" x, in {x}.')


def _make_portable(prepared: Prepared, tokenizer: Any) -> bool:
    """Give the tokenizer a chat template that writes the whole prompt of training.

    Returns:
        Whether it does, token by token; where it does not, the template stays as it was.
    """
    fmt, before = prepared.format, tokenizer.chat_template
    problems = [Problem(id="q", question=q, answer="?", source="export") for q in _QUESTIONS]
    prompts = [render(problem, fmt, prepared.tokenizer) for problem in problems]
    install_template(fmt, tokenizer)
    chat = tokenizer.chat_template
    if not uses_chat(fmt, prepared.tokenizer):
        tokenizer.chat_template = own_chat_template(fmt, tokenizer, fmt.plain)
    elif fmt.chat == "install" or not isinstance(chat, str):
        tokenizer.chat_template = prepared.tokenizer.chat_template
    else:
        first = f"[{{'role': 'system', 'content': {json.dumps(fmt.system, ensure_ascii=False)}}}]"
        instructed = (
            "{%- if messages[0]['role'] != 'system' -%}"
            f"{{%- set messages = {first} + messages -%}}{{%- endif -%}}"
        )
        messages = prompts[0].messages or ()
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        if [message["role"] for message in messages] == ["user"]:
            # An instruction that is given, by us as well, goes where that of training went.
            joined = "messages[0]['content'] + '\n\n' + messages[1]['content']"
            first = f"[{{'role': 'user', 'content': {joined}}}]"
            instructed += f"{{%- set messages = {first} + messages[2:] -%}}"
        template = instructed + chat if fmt.system else chat
        opened = OPENED_THINKING.search(text)
        if opened and not fmt.template_kwargs:  # which training leaves out
            shut = f"written.removesuffix({json.dumps(opened[0])}) if add_generation_prompt"
            template = f"{{% set written %}}{template}{{% endset %}}{{{{- {shut} else written -}}}}"
        if fmt.prefix:
            prefix = f"{{{{- {json.dumps(fmt.prefix, ensure_ascii=False)} -}}}}"
            template += f"{{%- if add_generation_prompt -%}}{prefix}{{%- endif -%}}"
        tokenizer.chat_template = template
    for problem, prompt in zip(problems, prompts, strict=True):
        turn = [{"role": "user", "content": problem.question}]
        ids = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)
        if tuple(ids) != prompt.token_ids:
            tokenizer.chat_template = before
            return False
    return True


def _set_generation(prepared: Prepared, policy: Policy) -> None:
    """Stop tokens and sampling, for programs that read them; nothing else that the base had."""
    params, drawn = prepared.evaluation_params(), {}
    if params.temperature > 0:  # what is not set would be transformers' own, a cut at 50 tokens
        drawn = {name: getattr(params, name) for name in ("temperature", "top_p", "top_k", "min_p")}
    settings = {"max_new_tokens": params.max_new_tokens, "do_sample": bool(drawn), **drawn}
    prepared.set_generation(policy, **settings)


def recipe_record(recipe: Recipe) -> dict[str, Any]:
    """What `grouper.json` has of every pushed model, without the folders of this machine."""
    excluded = {"output_dir", "save_path"}
    settings = recipe.model_dump(mode="json", exclude=excluded)
    return {"format": 1, "recipe": without_folders(settings)}


def _record(prepared: Prepared, source: str, *, in_template: bool) -> dict[str, Any]:
    """The content of `grouper.json`."""
    run, fmt, recipe = run_of(source), prepared.format, prepared.recipe
    if recipe.prompt.template == "auto":  # the export has a chat template in any case
        chat = uses_chat(fmt, prepared.tokenizer)
        recipe = recipe.override(f"prompt.template={'chat' if chat else 'plain'}")
    return {
        **recipe_record(recipe),
        "prompt": {
            "format": fmt.name,
            "system": fmt.system,
            "prefix": fmt.prefix,
            "stop": list(fmt.stop),
            "stop_token_ids": list(prepared.stop_tokens),
            "in_chat_template": in_template,
        },
        "sampling": asdict(prepared.evaluation_params()),
        "evaluations": [
            without_folders(evaluation_summary(result)) for result in results_of(source, run)
        ],
    }
