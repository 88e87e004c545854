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
from grouper.types import AnswerKind

# Learning rates below which they were most likely chosen for training all weights: an adapter needs
# about ten times as much (Schulman et al., "LoRA without regret", 2025).
ADAPTER_RATES = {"sft": 5e-5, "grpo": 5e-6}
# Learning rate below which AdamW changes less than a sixth of the weights of a usual layer in
# bfloat16.
BFLOAT16_RATE = 1e-5
# Largest plausible learning rate; tiny, random models are trained with up to a fifth of it.
LARGEST_RATE = 0.1


@contextmanager
def collected(problems: list[GrouperError]) -> Iterator[None]:
    """Add an error of a `with` block to `problems`, and continue after the block."""
    try:
        yield
    except GrouperError as error:
        problems.append(error)


def check_recipe(
    recipe: Recipe, *, runs_here: bool = True, packages: bool = True, trains: bool = True
) -> list[str]:
    """Check everything about a recipe that needs no data and no model.

    Args:
        recipe: of the run.
        runs_here: the run is on this machine; otherwise missing files and libraries are only
            warnings.
        packages: refuse missing libraries even if nothing else is wrong; otherwise the caller calls
            `missing_packages` together with its own checks.
        trains: warn of the settings of training, too.

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
        if path is not None:
            with collected(problems):
                require_model_folder(path, where=name)
    problems += _contradictions(recipe)
    with collected(problems):
        _check_push_to(recipe)
    missing = list(_missing_files(recipe))
    missing += _unusable_paths(recipe)
    # Missing libraries are reported together with other problems.
    if packages or problems or missing:
        missing += missing_packages(recipe)
    if runs_here:
        problems += missing
    raise_all(problems)
    absent = [f"not on this machine: {error.paragraph()}" for error in missing]
    return [*absent, *map(str, warnings(recipe, trains=trains))]


def _unusable_paths(recipe: Recipe) -> list[GrouperError]:
    """Check that `save_path` can be written and pass rates can be read on this machine."""
    problems: list[GrouperError] = []
    if recipe.save_path is not None:
        with collected(problems):
            require_writable(
                Path(recipe.save_path).expanduser(), "Set save_path to another folder."
            )
    difficulty = recipe.grpo.difficulty
    if difficulty is not None and difficulty.path and not recipe.skip_grpo:
        from grouper.training.curriculum import read_pass_rates

        with collected(problems):
            read_pass_rates(Path(difficulty.path).expanduser())
    return problems


def _check_push_to(recipe: Recipe) -> None:
    """Raise `ConfigError` if checkpoints are to be pushed to a name that the Hub cannot have."""
    if recipe.push_to is None:
        return
    # Imported here, because few recipes need it, and it would slow down every command.
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


def warnings(recipe: Recipe, *, trains: bool = True) -> Iterator[Finding]:
    """Find settings that work but are rarely meant; the sources of the recipe must exist.

    Args:
        recipe: of a run, or of models that are measured.
        trains: look at the settings of training, too.
    """
    # With SFT an empty instruction is fine: the model learns from SFT how to answer.
    if recipe.prompt.system != "" or recipe.skip_sft:
        for warning in warn_about_system(recipe.prompt):
            yield found("system", warning=warning.removesuffix("."))
    if not trains:
        return
    if recipe.data.test is None and not recipe.data.test_share:
        yield found("no-test")
    has_adapter = recipe.model.lora is not None
    for phase in recipe.phases:
        optimizer = getattr(recipe, phase).optimizer
        rate = optimizer.learning_rate
        rounded = recipe.model.dtype == "bfloat16" and not optimizer.master_weights
        if rate > LARGEST_RATE:
            yield found("rate-too-large", phase=phase, rate=rate)
        if has_adapter and rate < ADAPTER_RATES[phase]:
            yield found("adapter-rate", phase=phase, rate=rate, more=10 * rate)
        if not has_adapter and rounded and rate < BFLOAT16_RATE:
            yield found("rounded-away", phase=phase, rate=rate)


def _sources(recipe: Recipe) -> Iterator[tuple[str, SourceConfig]]:
    """Yield (setting, source) of the sources of a recipe."""
    for name in ("sft", "train", "validation", "test"):
        source = getattr(recipe.data, name)
        if source:
            yield f"data.{name}", source


# --- refusals -------------------------------------------------------------------------------------


def _check_format(recipe: Recipe) -> None:
    """Check the format and its rewards.

    A stop string that closes the answer must stay in the text.
    """
    fmt = make_format(recipe.prompt)
    build_rewards(recipe.rewards, fmt)
    close = fmt.contract.close.strip()
    if fmt.contract.kind is AnswerKind.PROGRAM:
        close = "```"
    stops = fmt.stop if recipe.sampling.stop is None else recipe.sampling.stop
    if close and not recipe.sampling.include_stop and any(close in stop for stop in stops):
        raise refusal("stop-closes-answer", "sampling.include_stop", close=close)


def _contradictions(recipe: Recipe) -> Iterator[GrouperError]:
    """Find settings that cannot work together."""
    source = recipe.data.sft or recipe.data.train
    components = source.mixture or (source,)
    if not recipe.skip_sft and not any(map(_can_have_solutions, components)):
        names = ", ".join(component.source for component in components)
        yield refusal("no-solutions", "data.sft", sources=names)
    if recipe.model.quantization is not None and recipe.sampling.dtype not in {"auto", "same"}:
        yield refusal("quantized-copy", "sampling.dtype")


def _can_have_solutions(source: RowsConfig) -> bool:
    """Return whether the rows of a source may have worked solutions."""
    published = SOURCES.get(source.source)
    named = {"solution", "program"} & source.columns.keys()
    return published is None or published.has_solutions or bool(named)


def _missing_files(recipe: Recipe) -> Iterator[GrouperError]:
    """Find files and folders of data that are not on this machine."""
    sources: list[tuple[str, RowsConfig]] = list(_sources(recipe))
    for name, mixture in _sources(recipe):
        for number, component in enumerate(mixture.mixture):
            sources.append((f"{name}.mixture.{number}", component))
    for where, source in sources:
        path = Path(source.path or ".").expanduser()
        if source.source != "hub" and not path.exists():
            hint = did_you_mean(source.path or "", map(str, path.parent.glob("[!.]*")))
            if not hint:
                hint = f"Put it there (seen from {Path.cwd()}), or set {where}.path."
            yield refusal("no-file", f"{where}.path", path=source.path, near=hint)


def missing_packages(recipe: Recipe) -> list[GrouperError]:
    """Find libraries that settings of the recipe need and that are not installed."""
    missing: list[GrouperError] = []
    # Setting that needs bitsandbytes -> what to set instead.
    alternatives: dict[str, str] = {}
    if recipe.model.quantization is not None:
        alternatives["model.quantization"] = "it to null"
    for phase in recipe.phases:
        teacher = getattr(recipe, phase).teacher
        if teacher is not None and teacher.quantization is not None:
            alternatives[f"{phase}.teacher.quantization"] = "it to null"
        if getattr(recipe, phase).optimizer.name == "adamw_8bit":
            where = f"{phase}.optimizer.name"
            alternatives[where] = f"{where}=adamw (the same update, more memory)"
    for where, instead in alternatives.items():
        with collected(missing):
            require_extra("bitsandbytes", "quantized", where=where, instead=instead)
    servers = list(recipe.evaluation.servers)
    if recipe.sampling.engine == "vllm":
        servers += recipe.sampling.vllm.servers or ("auto",)
    if any("://" not in server for server in servers):  # a server to be started here
        with collected(missing):
            require_vllm()
    if recipe.model.attention == "flash_attention_2":
        # transformers can use either package.
        packages = ("flash_attn", "kernels")
        if all(find_spec(package) is None for package in packages):
            missing.append(refusal("no-flash-attention", "model.attention"))
    return missing
