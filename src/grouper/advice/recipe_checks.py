"""Checks of a recipe before any data or model is loaded.

Their texts are in `findings.yaml`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from grouper.advice.checks import Finding, found, refusal
from grouper.config.schema import Recipe, RowsConfig, SourceConfig
from grouper.data import SOURCES, check_source
from grouper.errors import (
    ConfigError,
    GrouperError,
    did_you_mean,
    raise_all,
    require_extra,
    require_vllm,
)
from grouper.files import require_writable
from grouper.models.folders import require_model_folder
from grouper.prompts import make_format
from grouper.prompts.formats import warn_about_system
from grouper.rewards import build_rewards

# Below these, a learning rate was most likely chosen for training all weights: an adapter needs
# about ten times as much (Schulman et al., "LoRA without regret", 2025).
ADAPTER_RATES = {"sft": 5e-5, "grpo": 5e-6}
# Below it, AdamW moves less than a sixth of the weights of a usual layer if they are bfloat16.
BFLOAT16_RATE = 1e-5


@contextmanager
def collected(problems: list[GrouperError]) -> Iterator[None]:
    """Add what the block raises to `problems`, and go on after it."""
    try:
        yield
    except GrouperError as error:
        problems.append(error)


# Tiny models that begin at random are taught with up to a fifth of it.
LARGEST_RATE = 0.1


def check_recipe(recipe: Recipe, *, runs_here: bool = True, packages: bool = True) -> list[str]:
    """Check everything about a recipe that takes no data and no model.

    Args:
        recipe: what is to be run.
        runs_here: on this machine; otherwise missing files and libraries are only warnings.
        packages: refuse missing libraries even where nothing else is wrong; else the caller asks
            for `missing_packages` together with what it checks itself.

    Returns:
        Warnings: settings that work but rarely do what was meant.

    Raises:
        ConfigError: (or a `PromptError`, `RewardError`) all problems at once: unknown source,
            format, reward or option; a path that does not exist; settings that cannot work
            together.
    """
    problems: list[GrouperError] = []
    with collected(problems):
        _check_format(recipe)
    for name, source in _sources(recipe):
        with collected(problems):
            check_source(source, where=name)
    models = {"model.path": recipe.model.path, "grpo.start_from": recipe.grpo.start_from}
    for name, path in models.items():
        with collected(problems):
            if path is not None:
                require_model_folder(path, where=name)
    problems += _contradictions(recipe)
    with collected(problems):
        _check_push_to(recipe)
    missing = list(_missing_places(recipe))
    with collected(missing):
        if recipe.save_path is not None:
            require_writable(
                Path(recipe.save_path).expanduser(), "Set save_path to another folder."
            )
    rates = recipe.grpo.difficulty and recipe.grpo.difficulty.path
    if rates and not recipe.skip_grpo:
        from grouper.training.curriculum import read_pass_rates

        with collected(missing):
            read_pass_rates(Path(rates).expanduser())
    # Where something else is refused already, a missing library is told along with it.
    if packages or problems or missing:
        missing += missing_packages(recipe)
    if runs_here:
        problems += missing
    raise_all(problems)
    absent = [f"not on this machine: {error.paragraph()}" for error in missing]
    return [*absent, *map(str, warnings(recipe))]


def _check_push_to(recipe: Recipe) -> None:
    """Raise `ConfigError` if checkpoints are to be pushed to a name that the Hub cannot have."""
    if recipe.push_to is None:
        return
    # Here, because few recipes need it and the command line has no time to import it.
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # no __all__

    try:
        validate_repo_id(recipe.push_to)
    except HFValidationError as error:
        raise ConfigError(
            f"{recipe.push_to!r} is not a name that the Hub has",
            where="push_to",
            fix="Write OWNER/NAME, of letters, digits, -, _ and dots.",
        ) from error


def warnings(recipe: Recipe) -> Iterator[Finding]:
    """Settings that work but are rarely meant; the sources of the recipe must exist."""
    # Without any instruction, the model learns from SFT how to answer.
    if recipe.prompt.system != "" or recipe.skip_sft:
        for warning in warn_about_system(recipe.prompt):
            yield found("system", warning=warning.removesuffix("."))
    if recipe.data.test is None and not recipe.data.test_share:
        yield found("no-test")
    for phase in recipe.phases:
        rate, lora = getattr(recipe, phase).optimizer.learning_rate, recipe.model.lora
        if rate > LARGEST_RATE:
            yield found("rate-too-large", phase=phase, rate=rate)
        if lora is not None and rate < ADAPTER_RATES[phase]:
            yield found("adapter-rate", phase=phase, rate=rate, more=10 * rate)
        if lora is None and recipe.model.dtype == "bfloat16" and rate < BFLOAT16_RATE:
            yield found("rounded-away", phase=phase, rate=rate)


def _sources(recipe: Recipe) -> Iterator[tuple[str, SourceConfig]]:
    """The sources of a recipe by the settings that name them."""
    for name in ("sft", "train", "validation", "test"):
        if source := getattr(recipe.data, name):
            yield f"data.{name}", source


# --- refusals -------------------------------------------------------------------------------------


def _check_format(recipe: Recipe) -> None:
    """The format and its rewards; a stop string that closes the answer must stay in the text."""
    fmt = make_format(recipe.prompt)
    build_rewards(recipe.rewards, fmt)
    close = fmt.contract.close.strip()
    stops = fmt.stop if recipe.sampling.stop is None else recipe.sampling.stop
    if close and not recipe.sampling.include_stop and any(close in stop for stop in stops):
        raise refusal("stop-closes-answer", "sampling.include_stop", close=close)


def _contradictions(recipe: Recipe) -> Iterator[GrouperError]:
    """Settings that cannot work together."""
    source = recipe.data.sft or recipe.data.train
    parts = source.mixture or (source,)
    if not recipe.skip_sft and not any(map(_can_have_solutions, parts)):
        yield refusal("no-solutions", "data.sft", sources=", ".join(p.source for p in parts))
    if recipe.model.quantization is not None and recipe.sampling.dtype not in {"auto", "same"}:
        yield refusal("quantised-copy", "sampling.dtype")


def _can_have_solutions(source: RowsConfig) -> bool:
    known = SOURCES.get(source.source)
    return known is None or known.has_solutions or "solution" in source.columns


def _missing_places(recipe: Recipe) -> Iterator[GrouperError]:
    """Files and folders of data that are not on this machine."""
    named = list(_sources(recipe))
    mixed = [(f"{n}.mixture.{i}", row) for n, s in named for i, row in enumerate(s.mixture)]
    for where, source in (*named, *mixed):
        path = Path(source.path or ".").expanduser()
        if source.source != "hub" and not path.exists():
            near = did_you_mean(source.path or "", map(str, path.parent.glob("[!.]*")))
            there = f"Put it there (seen from {Path.cwd()}), or set {where}.path."
            yield refusal("no-file", f"{where}.path", path=source.path, near=near or there)


def missing_packages(recipe: Recipe) -> list[GrouperError]:
    """Libraries that settings of the recipe need and this machine lacks."""
    missing: list[GrouperError] = []
    needs = {} if recipe.model.quantization is None else {"model.quantization": "it to null"}
    for name, skipped in (("sft", recipe.skip_sft), ("grpo", recipe.skip_grpo)):
        if not skipped and getattr(recipe, name).optimizer.name == "adamw_8bit":
            where = f"{name}.optimizer.name"
            needs[where] = f"{where}=adamw (the same update, more memory)"
    for where, instead in needs.items():
        with collected(missing):
            require_extra("bitsandbytes", "quantized", where=where, instead=instead)
    places = list(recipe.evaluation.servers)
    if recipe.sampling.engine == "vllm":
        places += recipe.sampling.vllm.servers or ("auto",)
    if any("://" not in place for place in places):
        with collected(missing):
            require_vllm()
    # transformers takes it from either.
    flash = any(find_spec(name) is not None for name in ("flash_attn", "kernels"))
    if recipe.model.attention == "flash_attention_2" and not flash:
        missing.append(refusal("no-flash-attention", "model.attention"))
    return missing
