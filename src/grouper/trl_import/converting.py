"""TRL's settings -> a recipe: what needs arithmetic or more than one name."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from grouper.config.checks import validate_json
from grouper.config.overrides import as_json
from grouper.config.schema import TRACKERS, Recipe
from grouper.data.naming import source_named
from grouper.rewards import REWARDS
from grouper.trl_import.settings import Phase, Settings, phase_of, read_file

MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
DATA = "gsm8k"
"""Where the file names none: TRL takes both from the script."""

LOSSES: dict[str, dict[str, Any]] = {
    "dapo": {"weighting": "token_mean"},
    "bnpo": {"weighting": "token_mean"},
    "grpo": {"weighting": "sequence_mean"},
    "dr_grpo": {"weighting": "constant"},
    "cispo": {"weighting": "token_mean", "surrogate": "cispo"},
}
"""TRL's `loss_type` -> parts of `grpo`."""

SFT_LOSSES = ("nll", "chunked_nll")

REWARD_NAMES: dict[str, dict[str, Any]] = {
    "accuracy_reward": {"name": "accuracy"},
    "reasoning_accuracy_reward": {"name": "accuracy"},
    "think_format_reward": {"name": "format"},
    "get_soft_overlong_punishment": {
        "name": "soft_overlong",
        "params": {"max_tokens": 1280, "buffer_tokens": 256},
    },
}
"""The names of TRL's own script. Names of ours, and import paths, are taken as they are."""

REWARD_PARAMS = {
    "cosine": {
        "cosine_min_value_wrong": "min_wrong",
        "cosine_max_value_wrong": "max_wrong",
        "cosine_min_value_correct": "min_correct",
        "cosine_max_value_correct": "max_correct",
        "cosine_max_len": "scale",
    },
    "repetition_penalty": {"repetition_n_grams": "n", "repetition_max_penalty": "max_penalty"},
}
"""Reward -> a script's argument -> our parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedRecipe:
    """What a TRL file became."""

    recipe: Recipe
    text: str
    """The recipe as YAML, with notes and what was left out as comments."""
    left_out: dict[str, str]
    """Name in the file -> why it has no counterpart."""


def import_trl(path: str | Path, *, phase: Phase | None = None, nproc: int = 1) -> ImportedRecipe:
    """A recipe from a YAML or JSON file with the names of TRL's GRPOConfig or SFTConfig.

    Names of ModelConfig and ScriptArguments may stand in it, too. What the file leaves out has
    TRL's default in the recipe, so that the run is the same one.

    Args:
        path: the file.
        phase: whose settings they are; found out by their names where left out.
        nproc: processes the file was written for: TRL's batch sizes are those of one.

    Raises:
        ConfigError: it cannot be read, or says what cannot be trained.
    """
    path = Path(path).expanduser()
    file = read_file(path)
    given = file.settings
    s = Settings(given, phase or phase_of(given) or "grpo", str(path))
    if file.groups:
        s.notes.append(f"Headings of the file were left away: {', '.join(file.groups)}.")
    if phase is None and phase_of(given) is None:
        s.notes.append("Nothing in the file tells GRPO from SFT: it was read as GRPO (--as sft).")
    _name(s, path)
    s.put("skip_sft" if s.phase == "grpo" else "skip_grpo", value=True)
    _model(s)
    s.move_rows()
    _data(s)
    _optimizer(s)
    updates = _grpo(s, nproc) if s.phase == "grpo" else _sft(s, nproc)
    _times(s, updates)
    _tracking(s)
    recipe = validate_json(Recipe, as_json(s.recipe, (), where=s.where), where=s.where)
    return ImportedRecipe(recipe=recipe, text=_text(s, path, recipe), left_out=s.left_out)


def _name(s: Settings, path: Path) -> None:
    output = Path(str(s.get("output_dir") or path.stem))
    s.put("name", re.sub(r"[^A-Za-z0-9._-]+", "-", output.name).strip("-.") or "imported")
    s.put("description", f"From {path.name}, a file for TRL")
    s.put("output_dir", str(output.parent) if "output_dir" in s.given else "outputs")
    if any(s.get(name) for name in ("deepspeed", "fsdp", "fsdp_config")):
        s.put("parallel", "fsdp")
        s.notes.append("DeepSpeed and FSDP settings became parallel: fsdp; start with --nproc.")


def _model(s: Settings) -> None:
    if s.get("model_name_or_path") is None:
        s.notes.append(f"The file names no model: model.path is {MODEL} until you change it.")
    s.put("model.path", s.get("model_name_or_path") or MODEL)
    dtype = str(s.get("dtype")).removeprefix("torch.")
    s.put("model.dtype", "float32" if dtype == "float32" else "bfloat16")
    if dtype not in ("float32", "bfloat16"):
        s.leave_out("dtype", f"{dtype} has no counterpart; model.dtype is bfloat16")
    if s.get("bf16") is not False and not s.get("fp16"):  # TRL: on where nothing is said
        s.put("model.compute_dtype", "bfloat16")
    if not s.get("use_peft"):
        for name in ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules"):
            s.leave_out(name, "use_peft is not set, so TRL trains all weights")
        return
    targets = s.get("lora_target_modules")
    if targets is None:
        targets = ["q_proj", "v_proj"]
        s.notes.append("lora_target_modules is not set: these are what PEFT takes for most models.")
    if targets in (["all-linear"], "all-linear"):
        targets = "all-linear"
    elif isinstance(targets, str):
        targets = [targets]
    s.put("model.lora", {"rank": s.get("lora_r"), "alpha": s.get("lora_alpha")})
    s.put("model.lora.dropout", s.get("lora_dropout"))
    s.put("model.lora.target_modules", targets)
    if s.get("load_in_4bit"):
        s.put("model.quantization", "4bit")


def _data(s: Settings) -> None:
    name = s.get("dataset_name")
    if name is None:
        s.notes.append(f"The file names no data set: data.train is {DATA} until you change it.")
        s.put("data.train", {"source": DATA})
        return
    source = source_named(str(name))
    if s.get("dataset_config") is not None:
        source["subset"] = s.get("dataset_config")
    if "dataset_prompt_column" in s.given:
        source["columns"] = {"question": s.get("dataset_prompt_column")}
    # A source of ours knows which split is for training, where the file does not say.
    named = source["source"] in ("hub", "file") or "dataset_train_split" in s.given
    s.put("data.train", {**source, **({"split": s.get("dataset_train_split")} if named else {})})
    if s.get("eval_strategy") in ("steps", "epoch"):
        s.put("data.validation", {**source, "split": s.get("dataset_test_split")})
    else:
        s.leave_out("dataset_test_split", "eval_strategy is no: nothing is evaluated on it")


def _optimizer(s: Settings) -> None:
    s.put("{phase}.optimizer.betas", [s.get("adam_beta1"), s.get("adam_beta2")])
    extra = s.get("lr_scheduler_kwargs") or {}
    if isinstance(extra, dict) and extra.keys() == {"min_lr_rate"}:
        s.put("{phase}.optimizer.final_ratio", extra["min_lr_rate"])
    elif isinstance(extra, dict) and extra.keys() == {"min_lr"}:
        s.put("{phase}.optimizer.final_ratio", extra["min_lr"] / s.number("learning_rate"))
    elif extra:
        s.leave_out("lr_scheduler_kwargs", "only min_lr_rate and min_lr have a counterpart")


def _sft(s: Settings, nproc: int) -> int:
    size = nproc * s.whole("per_device_train_batch_size") * s.whole("gradient_accumulation_steps")
    s.put("sft.batch_size", size)
    if s.get("loss_type") not in SFT_LOSSES:
        s.leave_out("loss_type", "the loss is the mean negative log-likelihood of the tokens")
    s.notes.append("max_length cuts in TRL; sft.max_tokens leaves longer demonstrations out.")
    return 1


def _grpo(s: Settings, nproc: int) -> int:
    """Everything about rollouts; returns the optimizer steps of one rollout batch."""
    updates = _batch(s, nproc)
    loss = s.get("loss_type")
    for key, value in LOSSES.get(str(loss), LOSSES["dapo"]).items():
        s.put(f"grpo.{key}", value)
    if loss not in LOSSES:
        s.leave_out("loss_type", f"there is no {loss}; the token mean of dapo is used")
    if loss == "bnpo":
        s.notes.append("bnpo: TRL's mean is over one device's tokens, ours over the whole step's.")
    low, high = s.number("epsilon"), s.get("epsilon_high")
    if loss == "cispo":  # TRL bounds the ratio itself, above only
        low, high = 1.0, (s.number("epsilon") if high is None else s.number("epsilon_high")) - 1.0
        if high < 0:
            raise s.refused(
                f"cispo with epsilon_high {high + 1:g} bounds every ratio below 1",
                "It is the bound itself, not its distance from 1: 5 is usual.",
            )
    s.put("grpo.clip_low", low)
    s.put("grpo.clip_high", low if high is None else high)
    s.put("grpo.require_correct_in_group", value=False)
    s.put("grpo.allow_truncation", value=True)
    _truncation(s)
    _rewards(s)
    return updates


def _batch(s: Settings, nproc: int) -> int:
    group, device = s.whole("num_generations"), s.whole("per_device_train_batch_size") * nproc
    if group == 1:
        raise s.refused(
            "num_generations is 1: a completion is compared with the others of its group, and "
            "there is none, so that nothing would be learned",
            "Use 2 or more; 8 is usual.",
        )
    a_step = device * s.whole("gradient_accumulation_steps")
    if s.get("generation_batch_size") and s.get("steps_per_generation"):
        raise s.refused(
            "generation_batch_size and steps_per_generation say the same", "Give only one."
        )
    sampled = a_step
    if s.get("steps_per_generation"):
        sampled = device * s.whole("steps_per_generation")
    elif s.get("generation_batch_size"):
        sampled = s.whole("generation_batch_size")
    # Sampling several times before one optimizer step is sampling once: the policy is the same.
    batch = max(sampled, a_step)
    if batch % group or batch % a_step or batch % sampled:
        raise s.refused(
            f"{batch} completions at a time for {nproc} process(es) cannot be cut into groups of "
            f"num_generations {group} and optimizer steps of {a_step}",
            "TRL refuses it, too. Was the file written for more processes? Say so with --nproc.",
        )
    s.put("grpo.group_size", group)
    s.put("grpo.prompts_per_step", batch // group)
    s.put("grpo.updates_per_batch", batch // a_step)
    s.notes.append(
        f"For {nproc} process(es): {batch // group} prompts x {group} = {batch} completions per "
        f"step, cut into {batch // a_step} optimizer step(s)."
    )
    return batch // a_step * s.whole("num_iterations")


def _truncation(s: Settings) -> None:
    off = {"top_p": (None, 1, 1.0), "top_k": (None, 0, -1), "min_p": (None, 0, 0.0)}
    cut = {name: s.get(name) for name, values in off.items() if s.get(name) not in values}
    for name, value in cut.items():
        s.put(f"sampling.{name}", value)
    if cut:
        s.put("sampling.allow_truncated", value=True)
        s.notes.append(
            f"{', '.join(cut)} cut the distribution that GRPO's gradient assumes; TRL does not say."
        )


def _rewards(s: Settings) -> None:
    asked = s.get("reward_funcs") or []
    asked = [asked] if isinstance(asked, str) else list(asked)
    weights = s.get("reward_weights") or [1.0] * len(asked)
    if not isinstance(weights, list) or len(weights) != len(asked):
        raise s.refused(f"reward_weights has not one weight for each of {len(asked)} reward_funcs")
    found = [(_reward(str(name)), name, w) for name, w in zip(asked, weights, strict=True)]
    rows = [{**row, "weight": weight} for row, _, weight in found if row is not None]
    unknown = ", ".join(str(name) for row, name, _ in found if row is None)
    if unknown:
        s.leave_out("reward_funcs", f"no reward here (`grouper rewards` lists them): {unknown}")
    for row in rows:
        known = REWARD_PARAMS.get(row["name"], {})
        params = {ours: s.given[theirs] for theirs, ours in known.items() if theirs in s.given}
        if params:
            row["params"] = {**row.get("params", {}), **params}
    if not rows:
        s.notes.append("No reward_funcs: the reward is correctness. TRL's are given in the script.")
    s.put("rewards", rows or [{"name": "correctness"}])
    if any(row["name"] == "format" for row in rows):
        s.put("prompt.format", "think")
    else:
        s.put("prompt.format", "boxed")
        s.notes.append("Answers are read from \\boxed{} (prompt.format), as TRL's accuracy_reward.")


def _reward(name: str) -> dict[str, Any] | None:
    if name in REWARD_NAMES:
        return dict(REWARD_NAMES[name])
    if name in REWARDS or ":" in name:
        return {"name": name}
    module, dot, function = name.rpartition(".")
    return {"name": f"{module}:{function}"} if dot and "/" not in name else None


def _times(s: Settings, updates: int) -> None:
    """What TRL counts in optimizer steps; a step of ours is a rollout batch."""
    if isinstance(s.get("max_steps"), int) and s.get("max_steps") > 0:
        s.put("{phase}.steps", _steps(s, "max_steps", updates))
        s.recipe[s.phase].pop("epochs", None)
    warmup = s.get("warmup_steps")
    if isinstance(warmup, float) and 0 < warmup < 1:
        s.put("{phase}.optimizer.warmup_ratio", warmup)
    elif warmup:
        s.put("{phase}.optimizer.warmup_steps", _steps(s, "warmup_steps", updates))
    s.put("tracking.log_every", _steps(s, "logging_steps", updates) or 1)
    if s.get("save_strategy") == "steps":
        s.put("{phase}.checkpoint_every", _steps(s, "save_steps", updates) or 0)
    elif s.get("save_strategy") != "no":
        s.leave_out("save_strategy", f"give steps: {s.phase}.checkpoint_every")
    if s.get("eval_strategy") == "steps":
        name = "eval_steps" if s.get("eval_steps") else "logging_steps"
        s.put("{phase}.evaluate_every", _steps(s, name, updates) or 0)
    elif s.get("eval_strategy") == "epoch":
        s.put("{phase}.evaluate_every", "epoch")
    elif s.get("eval_strategy") != "no":
        s.leave_out("eval_strategy", f"steps, epoch or no: {s.phase}.evaluate_every")


def _steps(s: Settings, name: str, updates: int) -> int | None:
    value = s.number(name)
    if value < 1:
        s.leave_out(name, "a share of the steps has no counterpart: give their number")
        return None
    return math.ceil(value / updates)


def _tracking(s: Settings) -> None:
    asked = s.get("report_to") or []
    asked = [asked] if isinstance(asked, str) else list(asked)
    rows: list[dict[str, Any]] = []
    for name in asked:
        if name in TRACKERS:
            rows.append({"name": name})
        elif name != "none":
            s.leave_out("report_to", f"there is no {name!r}: {', '.join(TRACKERS)}")
    about = {"project": "project", "run_name": "run_name", "wandb_entity": "entity"}
    for row in rows:
        row |= {ours: s.given[theirs] for theirs, ours in about.items() if s.given.get(theirs)}
        if row["name"] == "trackio" and s.get("trackio_space_id"):
            row |= {"mode": "online", "params": {"space_id": s.get("trackio_space_id")}}
    if rows:
        s.put("tracking.trackers", rows)
        s.notes.append("Trackers stay offline unless their mode is online (--online).")
    else:
        for name in about:
            s.leave_out(name, "no tracker is asked for in report_to")


def _text(s: Settings, path: Path, recipe: Recipe) -> str:
    kind = "GRPOConfig" if s.phase == "grpo" else "SFTConfig"
    lines = [f"# From {path.name}, read with the names of TRL 1.16's {kind}. What the file does"]
    lines += [
        "# not set has TRL's default here, so that the run is the one that TRL would do.",
        "#",
    ]
    lines += [f"# - {note}" for note in s.notes]
    if s.left_out:
        lines += ["#", "# Without a counterpart:"]
        lines += [f"#   {name}: {s.given[name]!r} - {why}" for name, why in s.left_out.items()]
    settings = recipe.model_dump(mode="json", exclude_unset=True)
    body = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True, width=100)
    return "\n".join(lines) + "\n\n" + body
