"""Model folders: what they hold, which one a name means, and their recipes; without torch."""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

from grouper.config.checks import validate_json
from grouper.config.loading import load_recipe
from grouper.config.schema import DataConfig, ModelConfig, PromptConfig, Recipe, SourceConfig
from grouper.errors import ConfigError, ModelError, nearest, plural, require_known
from grouper.files import cache_folder, read_json
from grouper.prompts import FORMATS

# The resolved recipe in a run folder and in a model exported by it, so that the model is prompted
# as it was trained.
RECIPE_FILE = "recipe.yaml"
ADAPTER_FILE = "adapter_config.json"
# The record in an exported model: its recipe, its prompt, its evaluation.
EXPORT_FILE = "grouper.json"
# Written last into the checkpoints and final folders of a run: it marks a complete one.
STATE_FILE = "trainer_state.json"
# The mark in the best checkpoint of a phase so far; it holds the evaluation.
BEST_FILE = "best.json"
# Files of llama.cpp, which `models/gguf.py` reads.
GGUF_SUFFIX = ".gguf"
# The record in a folder made of such a file: its source, and what was lost.
GGUF_RECORD = "gguf.json"
# Increased when the same file would be written differently, so that older folders are not used.
GGUF_VERSION = 1
# Digits of a hash that names a model.
_SHOWN_DIGITS = 16
# Folders where people keep models, relative to the current one.
MODEL_FOLDERS = ("models", ".models", "real-models")


def is_gguf(path: str) -> bool:
    """Tell whether a path names a GGUF file, which need not exist."""
    return path.lower().endswith(GGUF_SUFFIX)


def gguf_cache() -> Path:
    """Return the folder of model folders made from GGUF files; it may not exist yet."""
    return cache_folder() / "gguf"


def gguf_folder(path: str) -> Path:
    """Return the model folder that is made of a GGUF file when it is first loaded.

    Args:
        path: of a file that exists.
    """
    file = Path(path).expanduser()
    digest = gguf_digest(path)[:_SHOWN_DIGITS]
    return gguf_cache() / f"{file.stem}-{digest}-{GGUF_VERSION}"


def gguf_digest(path: str) -> str:
    """Return the SHA-256 of a GGUF file, read once in a process unless the file changes."""
    file = Path(path).expanduser()
    status = file.stat()
    return _sha256(file, status.st_size, status.st_mtime_ns)


@functools.lru_cache
def _sha256(file: Path, *status: int) -> str:
    """Hash a file; its status, size and time of change, is part of the cache's key."""
    del status
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def is_model(folder: Path) -> bool:
    """Tell whether a folder holds a model or an adapter itself, as an exported one does."""
    return any((folder / name).is_file() for name in ("config.json", ADAPTER_FILE))


def looks_local(path: str) -> bool:
    """Tell whether a path means a folder or file and not a Hub name (owner/model)."""
    if path.startswith((".", "/", "~")):
        return True
    if path.count("/") > 1 or is_gguf(path):
        return True
    return Path(path).exists()


def require_model_folder(path: str, *, where: str = "model.path") -> None:
    """Check without loading anything that a local `path` is a model or adapter folder.

    Raises:
        ModelError: the folder is missing or holds no model. Hub names pass.
    """
    folder = Path(path).expanduser()
    if is_gguf(path):
        if folder.is_file():
            return
        raise ModelError(
            f"there is no file {path!r}",
            where=where,
            fix="Give the path of a GGUF file, a model folder or a Hub name (owner/model).",
        )
    if folder.is_file():
        raise ModelError(
            f"{path!r} is a file, and a model is a folder",
            where=where,
            fix="Name the folder that it lies in.",
        )
    if not looks_local(path) or is_model(folder):
        return
    if folder.is_dir():
        files = sorted(str(file) for file in folder.glob(f"*{GGUF_SUFFIX}"))
        if files:
            raise ModelError(
                f"{path!r} is not a model folder; it holds {plural(len(files), 'GGUF file')}",
                where=where,
                fix=f"Name the file: {' or '.join(files[:3])}.",
            )
        raise ModelError(
            f"{path!r} holds neither a model (config.json) nor an adapter ({ADAPTER_FILE})",
            where=where,
            fix="Give the folder that `save_pretrained` wrote, for example <run>/sft/final.",
        )
    if folder.parent == gguf_cache():
        raise ModelError(
            f"{path!r}, which was made from a GGUF file, has been deleted from the cache",
            where=where,
            fix="Run any command with that file as the model: the folder is written again.",
        )
    beside = folder.parent.iterdir() if folder.parent.is_dir() else ()
    folders = {entry.name: str(entry) for entry in beside if entry.is_dir()}
    near = nearest(folder.name, folders)
    hint = f"Did you mean {folders[near]!r}? " if near else ""
    raise ModelError(
        f"there is no folder {path!r}",
        where=where,
        fix=f"{hint}Give a local folder or a Hub name (owner/model).",
    )


def on_this_machine(path: str, revision: str | None = None) -> bool:
    """Tell whether a path exists, or is a Hub name whose configuration is in the Hub cache."""
    if looks_local(path):
        return Path(path).expanduser().exists()
    return _cached(path, revision) is not None


def require_on_this_machine(model: str) -> None:
    """Raise `ModelError` for a single word that is neither a folder nor in the Hub cache.

    Hub names with an owner pass: they can be downloaded.
    """
    if model.count("/") != 1 and not on_this_machine(model):
        folders = [entry.name for entry in Path().iterdir() if entry.is_dir()]
        near = nearest(model, folders)
        hint = f"Did you mean ./{near}? " if near else ""
        raise ModelError(
            f"there is no folder {model!r} here, and no model of that name on this machine",
            where="MODEL",
            fix=f"{hint}Give the folder of a run or of a model, or a Hub name (owner/model).",
        )


def _cached(name: str, revision: str | None) -> Path | None:
    """Return the configuration file of a model in the Hub cache."""
    # Imported here, so that the command line starts fast.
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(name, "config.json", revision=revision)
    except HFValidationError:  # not a name that the Hub could have
        return None
    # Not a string: it is not in the cache, or the cache knows that the Hub has none.
    return Path(config) if isinstance(config, str) else None


def folder_of(path: str, revision: str | None = None) -> Path | None:
    """Return the folder that holds a model on this machine, Hub cache included; else None."""
    if looks_local(path):
        folder = Path(path).expanduser()
        if is_gguf(path) and folder.is_file():
            folder = gguf_folder(path)
        return folder if folder.is_dir() else None
    config = _cached(path, revision)
    return None if config is None else config.parent


def weight_files(path: str) -> list[Path]:
    """List the files that hold the weights of a model or an adapter, judged by their names.

    Args:
        path: a folder, or a Hub name. The list is empty if the model is not on this machine.
    """
    folder = folder_of(path)
    if folder is None:
        return []
    # If a folder has both, transformers reads the first.
    for pattern in ("*.safetensors", "*.bin"):
        files = sorted(folder.glob(pattern))
        if files:
            return files
    return []


def identity_of(path: str, revision: str | None = None) -> str | None:
    """Return an identity of a model's weights: a hash of samples of its files, or a commit.

    None for a Hub name of which nothing is on this machine.
    """
    folder = Path(path).expanduser()
    if is_gguf(path) and folder.is_file():
        return gguf_digest(path)[:_SHOWN_DIGITS]
    if not folder.is_dir():
        config = _cached(path, revision)
        # The Hub cache names the folder of a snapshot by its commit.
        return None if config is None else config.parent.name
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if file.suffix not in _OF_A_MODEL or not file.is_file():
            continue
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        last_start = max(0, size - _SAMPLE_BYTES)
        with file.open("rb") as opened:
            for sample in range(_SAMPLES):
                opened.seek(last_start * sample // (_SAMPLES - 1))
                digest.update(opened.read(_SAMPLE_BYTES))
    base = base_of(path)
    identity = digest.hexdigest()[:_SHOWN_DIGITS]
    if base == path:
        return identity
    return f"{identity}+{identity_of(base)}"


# Suffixes of files that change a model's answers.
_OF_A_MODEL = (".safetensors", ".json", ".jinja", ".model", ".bin")
# Samples of a large file, spread over all of it, and their size. They are enough, since training
# changes weights everywhere.
_SAMPLES = 64
_SAMPLE_BYTES = 1 << 16


# Beginnings of PEFT's `init_lora_weights` that change the base model along with the adapter.
_CHANGES_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


def read_adapter(path: str) -> dict[str, Any] | None:
    """Return the adapter configuration of a local folder, or None if it is no adapter.

    Raises:
        ModelError: it cannot be read, names no base model, is not LoRA, or needs a changed base
            model.
    """
    file = Path(path).expanduser() / ADAPTER_FILE
    if not file.is_file():
        return None
    try:
        config: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{str(file)!r} cannot be read ({error})", where="the adapter") from error
    if not isinstance(config, dict) or not config.get("base_model_name_or_path"):
        raise ModelError(
            f"{str(file)!r} does not say which base model the adapter belongs to",
            where="the adapter",
            fix="Write its folder or Hub name there as `base_model_name_or_path`.",
        )
    peft_type = config.get("peft_type")
    if config.get("alora_invocation_tokens"):
        peft_type = "ALORA"
    if peft_type != "LORA":
        raise ModelError(
            f"{str(file)!r} is of an adapter of the kind {peft_type}, not LoRA",
            where="the adapter",
            fix="Use a LoRA adapter, or merge this one with PEFT where its kind can be merged.",
        )
    method = str(config.get("init_lora_weights"))
    if method.lower().startswith(_CHANGES_THE_BASE):
        raise ModelError(
            f"{str(file)!r} is of an adapter initialized with {method}, which changes the weights "
            "of the base model as well; together with the base model as it is, it means nothing",
            where="the adapter",
            fix="Where it was trained, save it with `path_initial_model_for_weight_conversion` of "
            "PEFT's `save_pretrained`, or merge it and name the folder of that.",
        )
    return config


def base_of(path: str) -> str:
    """Return the base model of an adapter folder; any other path is returned as it is.

    That is the base model as the adapter names it. If the adapter is in a run and names the base
    of a run of that name, it is the one of this run: the run may have been moved, or copied before
    another one took its place.

    Raises:
        ModelError: the adapter cannot be read, or its base model does not exist.
        ConfigError: it is in a run whose recipe cannot be read.
    """
    adapter = read_adapter(path)
    if adapter is None:
        return path
    base = str(adapter["base_model_name_or_path"])
    run = run_of(path)
    if run is not None and is_model(run / "base"):
        name = load_recipe(run / RECIPE_FILE).name
        if Path(base).parts[-2:] == (name, "base"):
            base = str(run / "base")
    require_model_folder(base, where=f"the base model of the adapter {path}")
    return base


def local_model(name: str) -> str:
    """Return the local folder of a model, or its name unchanged if there is none.

    Args:
        name: a path or Hub name (`Qwen/Qwen2.5-0.5B`). A path is returned as it is. For a Hub name,
            `MODEL_FOLDERS` below the current folder are searched for a folder of the full name or
            of its last component, in upper or lower case.
    """
    if looks_local(name):
        return name
    for models_folder in MODEL_FOLDERS:
        models = _models_below(Path(models_folder))
        last_component = name.rpartition("/")[2]
        for candidate in (name, last_component):
            matching = [model for model in models if model.casefold() == candidate.casefold()]
            if matching:
                model = candidate if candidate in matching else matching[0]
                return f"./{models_folder}/{model}"
    return name


def _models_below(folder: Path) -> list[str]:
    """List the model folders one or two levels below a folder, relative to it."""
    candidates = [*folder.glob("*"), *folder.glob("*/*")]
    models = sorted(candidate for candidate in candidates if is_model(candidate))
    return [model.relative_to(folder).as_posix() for model in models]


def run_of(model: str) -> Path | None:
    """Return the run folder of `<run>`, `<run>/base` or `<run>/grpo/final`; else None."""
    folder = Path(model).expanduser().resolve()
    if not folder.is_dir():
        return None
    candidates = [folder, *folder.parents]
    for candidate in candidates[:3]:
        if (candidate / RECIPE_FILE).is_file():
            return candidate
    return None


def export_record(model: str) -> dict[str, Any] | None:
    """Return the content of `grouper.json` of an exported model, or None if it has none.

    Args:
        model: a folder, or a Hub name; only that file is downloaded.

    Raises:
        RunFolderError: the file is damaged.
    """
    file = Path(model).expanduser() / EXPORT_FILE
    if not looks_local(model):
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError

        try:
            file = Path(hf_hub_download(model, EXPORT_FILE))
        except (OSError, HfHubHTTPError, HFValidationError):
            # There is no such file, no permission, or no network.
            return None
    if not file.is_file():
        return None
    return read_json(file, "the record of the export cannot be read")


def recipe_for(model: str, recipe: Recipe | None = None, format_name: str | None = None) -> Recipe:
    """Return the recipe to prompt a model with.

    Args:
        model: a folder or Hub name.
        recipe: None: the recipe that the model was trained by.
        format_name: a prompt format in place of the recipe's; with it, a model needs no recipe.

    Raises:
        ConfigError: there is neither a recipe nor a format, or there is no such format.
    """
    if recipe is None:
        recipe = _recipe_of(model)
    if recipe is None and format_name is not None:
        data = DataConfig(train=SourceConfig(source="arithmetic"))
        recipe = Recipe(name="generate", model=ModelConfig(path=model), data=data)
    if recipe is None:
        require_on_this_machine(model)
        raise ConfigError(
            f"the prompt format of this model is not known: it is not in a run folder, and has "
            f"no {EXPORT_FILE}",
            where=model,
            fix="Give --recipe, or --format with one of " + ", ".join(FORMATS) + ".",
        )
    if format_name is None:
        return recipe
    require_known("prompt format", format_name, FORMATS, where="--format")
    prompt = PromptConfig(format=format_name)
    return recipe.model_copy(update={"prompt": prompt})


def _recipe_of(model: str) -> Recipe | None:
    """Return the recipe that a model was trained by, from its run or its export; else None."""
    run = run_of(model)
    if run is not None:
        return load_recipe(run / RECIPE_FILE)
    record = export_record(model)
    if not record:
        return None
    content = json.dumps(record.get("recipe"))
    recipe = validate_json(Recipe, content, where=f"{EXPORT_FILE} of {model}")
    if recipe.model.path is not None and "/" not in recipe.model.path:
        # The export keeps only the name of a folder, which means nothing on another machine.
        recipe = recipe.override(model={"path": model, "revision": None})
    return recipe


def with_sampling(
    recipe: Recipe,
    *,
    temperature: float | None = None,
    max_new_tokens: int | None = None,
    samples: int | None = None,
    seed: int | None = None,
) -> Recipe:
    """Return the recipe with other settings of its evaluation; those that are None stay.

    At temperature 0, where all samples would be the same, `samples` is 1 unless it is set.

    Raises:
        ConfigError: values that a recipe cannot have, several samples at temperature 0 among them.
    """
    total = recipe.sampling.max_total_tokens
    if max_new_tokens is None and recipe.evaluation.max_new_tokens is None and total is not None:
        # The tokens that the longest allowed prompt leaves. Actual prompts may leave more, but the
        # data are not read here.
        max_new_tokens = max(1, total - recipe.prompt.max_prompt_tokens)
    if samples is None and temperature == 0:
        samples = 1
    settings = {"temperature": temperature, "max_new_tokens": max_new_tokens, "samples": samples}
    changes = {name: value for name, value in settings.items() if value is not None}
    if seed is None:
        seed = recipe.seed
    return recipe.override(evaluation=changes, seed=seed)
