"""Exporting: one folder that any program can load and prompt, checked against its source.

config.json, *.safetensors     merged weights, or adapter_config.json and the adapter alone
tokenizer*, chat_template      a user message alone gives the prompt that the model was trained on
generation_config.json         stop tokens and sampling, as the model was measured
grouper.json                   recipe, prompt, stop strings, evaluation results
README.md, curves.png          the model card, and the curves of the run
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
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
from grouper.types import AnswerFormat, Message, Problem

log = logging.getLogger(__name__)

# Largest difference of log-probs, in nats, from those of the source: merging adds two products in
# another order, and bfloat16 rounds every weight to 8 bits.
BOUNDS = {"float32": 1e-3, "bfloat16": 0.5}
# Largest size of a file of weights.
SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """Properties of an export, and how well it agrees with its source."""

    gap: float
    """The largest difference between log-probs of source and export on the probe, in nats; 0 for
    an adapter alone, which is copied."""
    dtype: str
    """Dtype of the saved weights."""
    larger: bool
    """Whether they take twice the memory of the base's, which are in bfloat16."""
    prompts_alone: bool
    """Whether a user message alone, through the chat template, gives the prompt of training."""
    calls_tools: bool
    """Whether its completions have turns with tools, which most servers do not run."""


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

    Merged weights are loaded again and compared with the source, which keeps its adapter separate.

    Args:
        source: a model or adapter folder, or a Hub name.
        target: must not exist yet.
        dtype: of the saved weights, `float32` or `bfloat16`; `auto` is that of the source, and
            float32 if an adapter is merged, whose small changes bfloat16 rounds away.
        adapter: write the adapter alone instead of merging it into its base.
        place: where others will load it from, for the card; default: the name of `target`.
        license_id: on the card; default: that of the base model's card, if it can be read.

    Raises:
        ModelError: `source` cannot be loaded, the target exists, or the two disagree; then nothing
            is left behind.
    """
    require_model_folder(source, where="SOURCE")
    if target.exists():
        raise ModelError(
            f"{target} exists already", where="export", fix="Name a folder that does not exist."
        )
    require_intact(source)
    adapter_settings = read_adapter(source)
    source_dtype = shape_of(source).dtype
    if dtype == "auto":
        is_bfloat16 = adapter_settings is None and source_dtype is torch.bfloat16
        dtype = "bfloat16" if is_bfloat16 else "float32"
    if adapter:
        _require_portable_adapter(source, adapter_settings)
    lora = None
    if adapter_settings is not None:
        lora = LoraConfig(rank=adapter_settings["r"])
    original = load_for_probe(source, lora)
    expected = probe(original)
    exported = original if adapter else _merged(source, original, DTYPES[dtype])
    del original  # frees its memory where it has been merged
    tokenizer = load_tokenizer(source)
    run = run_of(source)
    recipe = recipe_of(source)
    record = None
    prompts_alone = False
    calls_tools = False
    if recipe is not None:
        with Prepared(recipe, ProblemSets(), model=source, quiet=True) as prepared:
            prompts_alone = _make_portable(prepared, tokenizer)
            _set_generation(prepared, exported)
            record = _record(prepared, source, in_template=prompts_alone)
            calls_tools = prepared.format.tools
    with whole_folder(target) as folder:
        save_policy(exported, tokenizer, folder, shard_bytes=SHARD_BYTES)
        del exported  # before it is loaded again
        if record is not None:
            text = json.dumps(record, indent=2, ensure_ascii=False, default=dict) + "\n"
            (folder / EXPORT_FILE).write_text(text, encoding="utf-8")
        if run is not None:
            for loss in RunFolder(run).losses(recipe):
                log.warning("%s has lost %s: the card does not mention it.", run, loss)
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
        gap = 0.0
        if not adapter:
            gap = float((probe(load_for_probe(str(folder))) - expected).abs().max())
        _require_agreement(source, gap, dtype)
    larger = dtype == "float32" and not adapter and source_dtype is torch.bfloat16
    return Exported(
        gap=gap,
        dtype=dtype,
        larger=larger,
        prompts_alone=prompts_alone,
        calls_tools=calls_tools,
    )


def _require_agreement(source: str, gap: float, dtype: str) -> None:
    """Raise `ModelError` if log-probs of export and source differ by more than rounding."""
    if not gap <= BOUNDS[dtype]:  # NaN is refused as well
        raise ModelError(
            f"the exported model disagrees with {source}: log-probs differ by {gap:.3g}, "
            f"allowed {BOUNDS[dtype]:g}",
            where="export",
            fix="Export as float32; if it disagrees there, too, please report it.",
        )


def _merged(source: str, original: Policy, dtype: torch.dtype) -> Policy:
    """Return the model in a dtype, with an adapter merged into it.

    In bfloat16 it is rounded at random: with rounding to the nearest number most of a small update
    would be lost.
    """
    if original.adapter is not None and keeps_adapter(dtype) and can_be_added(original):
        merged, _ = merged_copy(original, dtype, seed=0)
        return merged
    policy = load_for_probe(source)
    policy.model.to(dtype)
    return policy


def recipe_of(source: str) -> Recipe | None:
    """Return the recipe of a model, which tells how to prompt it; None if it is not known.

    Raises:
        ConfigError: it is in a run whose recipe is damaged.
    """
    try:
        return recipe_for(source)
    except ConfigError as error:
        if run_of(source) is not None:
            raise
        log.info("The card does not say how to prompt %s: %s", source, error)
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


def load_for_probe(path: str, lora: LoraConfig | None = None) -> Policy:
    """Load a model in float32, for a probe and for saving."""
    # Nothing is trained or sampled, so the attention of the run is not needed.
    config = ModelConfig(path=path, dtype="float32", attention="sdpa", lora=lora)
    return load_policy(config, path, seed=0)


@torch.no_grad()
def probe(policy: Policy) -> Tensor:
    """Compute log-probs [rows, tokens, V] in float32 on token ids spread over the vocabulary."""
    ids = (torch.arange(128).view(4, 32) * 7919 + 11) % policy.vocabulary
    logprobs: Tensor = policy.model(ids, use_cache=False).logits.float().log_softmax(-1)
    return logprobs


# --- chat template, generation config and record -------------------------------------------------

# Questions on which the chat template is checked.
_QUESTIONS = ("What is 3 + 4?", 'Let $x^2 = 9$.\nFind the "larger" x, in {x}.')


def _make_portable(prepared: Prepared, tokenizer: Any) -> bool:
    """Give the tokenizer a chat template that writes the whole prompt of training.

    Returns:
        Whether it does, token by token; if it does not, the template is not changed.
    """
    fmt = prepared.format
    original_template = tokenizer.chat_template
    problems = [
        Problem(id="q", question=question, answer="?", source="export") for question in _QUESTIONS
    ]
    prompts = [render(problem, fmt, prepared.tokenizer) for problem in problems]
    install_template(fmt, tokenizer)
    if not uses_chat(fmt, prepared.tokenizer):
        tokenizer.chat_template = own_chat_template(fmt, tokenizer, fmt.plain)
    elif fmt.chat == "install" or not isinstance(tokenizer.chat_template, str):
        tokenizer.chat_template = prepared.tokenizer.chat_template
    else:
        messages = prompts[0].messages or ()
        tokenizer.chat_template = _extended_template(fmt, tokenizer, messages)
    for problem, prompt in zip(problems, prompts, strict=True):
        turn = [{"role": "user", "content": problem.question}]
        ids = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)
        if tuple(ids) != prompt.token_ids:
            tokenizer.chat_template = original_template
            return False
    return True


def _extended_template(fmt: AnswerFormat, tokenizer: Any, messages: Sequence[Message]) -> str:
    """Add system message and prefix of a format to the tokenizer's chat template.

    Args:
        fmt: the format of training.
        tokenizer: has the chat template to extend.
        messages: those of a prompt of training.
    """
    template = str(tokenizer.chat_template)
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    if fmt.system:
        system = json.dumps(fmt.system, ensure_ascii=False)
        first = f"[{{'role': 'system', 'content': {system}}}]"
        instruction = (
            "{%- if messages[0]['role'] != 'system' -%}"
            f"{{%- set messages = {first} + messages -%}}{{%- endif -%}}"
        )
        if [message["role"] for message in messages] == ["user"]:
            # Training put the instruction into the user message, so a system message, given or
            # added here, is put there as well.
            joined = "messages[0]['content'] + '\n\n' + messages[1]['content']"
            first = f"[{{'role': 'user', 'content': {joined}}}]"
            instruction += f"{{%- set messages = {first} + messages[2:] -%}}"
        template = instruction + template
    thinking = OPENED_THINKING.search(text)
    if thinking and not fmt.template_kwargs:
        # The template opens a block of thinking, which training leaves out.
        shortened = f"written.removesuffix({json.dumps(thinking[0])}) if add_generation_prompt"
        template = (
            f"{{% set written %}}{template}{{% endset %}}{{{{- {shortened} else written -}}}}"
        )
    if fmt.prefix:
        prefix = f"{{{{- {json.dumps(fmt.prefix, ensure_ascii=False)} -}}}}"
        template += f"{{%- if add_generation_prompt -%}}{prefix}{{%- endif -%}}"
    return template


def _set_generation(prepared: Prepared, policy: Policy) -> None:
    """Set stop tokens and sampling for programs that read them; drop other settings of the base."""
    params = prepared.evaluation_params()
    settings: dict[str, Any] = {
        "max_new_tokens": params.max_new_tokens,
        "do_sample": params.temperature > 0,
    }
    if params.temperature > 0:
        # All are set: the default top_k of transformers is 50.
        for name in ("temperature", "top_p", "top_k", "min_p"):
            settings[name] = getattr(params, name)
    prepared.set_generation(policy, **settings)


def recipe_record(recipe: Recipe) -> dict[str, Any]:
    """Return the entries that every `grouper.json` has, without the folders of this machine."""
    excluded = {"output_dir", "save_path"}
    settings = recipe.model_dump(mode="json", exclude=excluded)
    return {"format": 1, "recipe": without_folders(settings)}


def _record(prepared: Prepared, source: str, *, in_template: bool) -> dict[str, Any]:
    """Return the content of `grouper.json`."""
    run = run_of(source)
    fmt = prepared.format
    recipe = prepared.recipe
    if recipe.prompt.template == "auto":  # the export has a chat template in any case
        template = "chat" if uses_chat(fmt, prepared.tokenizer) else "plain"
        recipe = recipe.override(f"prompt.template={template}")
    return {
        **recipe_record(recipe),
        "prompt": {
            "format": fmt.name,
            "system": fmt.system,
            "prefix": fmt.prefix,
            "stop": list(fmt.stop),
            "stop_token_ids": list(prepared.stop_tokens),
            "in_chat_template": in_template,
            "tools": fmt.tools,
        },
        "sampling": asdict(prepared.evaluation_params()),
        "evaluations": [
            without_folders(evaluation_summary(result)) for result in results_of(source, run)
        ],
    }
