"""What a model folder is, which one a name means, and how its model is asked; without torch."""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

from grouper.config.checks import validate_json
from grouper.config.loading import load_recipe
from grouper.config.schema import DataConfig, ModelConfig, PromptConfig, Recipe, SourceConfig
from grouper.errors import ConfigError, ModelError, counted, nearest, require_known
from grouper.files import cache_folder, read_json
from grouper.prompts import FORMATS

# What a run folder, and a model exported by it, keep the resolved recipe in, so that the model is
# asked as it was trained.
RECIPE_FILE = "recipe.yaml"
ADAPTER_FILE = "adapter_config.json"
# What an exported model says about itself: its recipe, its prompt, how it was measured.
EXPORT_FILE = "grouper.json"
# Written last into the checkpoints and final folders of a run: it marks a complete one.
STATE_FILE = "trainer_state.json"
# In the best checkpoint of a phase so far; names the evaluation that made it the best.
BEST_FILE = "best.json"
# Files of llama.cpp, which `models/gguf.py` reads.
GGUF_SUFFIX = ".gguf"
# In a folder made of such a file: where it came from, and what it lost.
GGUF_RECORD = "gguf.json"
# Counted up when the same file would be written differently, so that older folders are not used.
GGUF_VERSION = 1
# Digits of a hash that tell models apart.
_SHOWN_DIGITS = 16
# Where people keep models, below the folder that the command runs in.
MODEL_FOLDERS = ("models", ".models", "real-models")


def is_gguf(path: str) -> bool:
    """Whether a path names a GGUF file; there may be none."""
    return path.lower().endswith(GGUF_SUFFIX)


def gguf_cache() -> Path:
    """The folder of model folders that were made from GGUF files; it may not exist yet."""
    return cache_folder() / "gguf"


def gguf_folder(path: str) -> Path:
    """The model folder that is made of a GGUF file when it is first loaded.

    Args:
        path: of a file that exists.
    """
    file = Path(path).expanduser()
    digest = gguf_digest(path)[:_SHOWN_DIGITS]
    return gguf_cache() / f"{file.stem}-{digest}-{GGUF_VERSION}"


def gguf_digest(path: str) -> str:
    """The SHA-256 of a GGUF file, read once in a process unless the file changes."""
    file = Path(path).expanduser()
    status = file.stat()
    return _sha256(file, status.st_size, status.st_mtime_ns)


@functools.lru_cache
def _sha256(file: Path, *content: int) -> str:
    """Hash a file; `content`, its size and time of change, tells one content from another."""
    del content
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def is_model(folder: Path) -> bool:
    """Whether a folder holds a model or an adapter itself, as an exported one does."""
    return any((folder / name).is_file() for name in ("config.json", ADAPTER_FILE))


def looks_local(path: str) -> bool:
    """Whether a path is meant as a folder or file and not as a Hub name (owner/model)."""
    if path.startswith((".", "/", "~")) or path.count("/") > 1 or is_gguf(path):
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
                f"{path!r} is no model folder; it holds {counted(len(files), 'GGUF file')}",
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
    """Whether a path is there, or is a Hub name whose configuration is in the Hub cache."""
    if looks_local(path):
        return Path(path).expanduser().exists()
    return _cached(path, revision) is not None


def require_on_this_machine(model: str) -> None:
    """Raise `ModelError` for a single word that is neither a folder nor in the Hub cache.

    Hub names with an owner pass: they can be downloaded.
    """
    if model.count("/") != 1 and not on_this_machine(model):
        near = nearest(model, [entry.name for entry in Path().iterdir() if entry.is_dir()])
        hint = f"Did you mean ./{near}? " if near else ""
        raise ModelError(
            f"there is no folder {model!r} here, and no model of that name on this machine",
            where="MODEL",
            fix=f"{hint}Give the folder of a run or of a model, or a Hub name (owner/model).",
        )


def _cached(name: str, revision: str | None) -> Path | None:
    """The configuration of a model in the Hub cache."""
    # Here, because the command line has no time to import it.
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json", revision=revision)
    except HFValidationError:  # not a name that the Hub could have
        return None
    return Path(found) if isinstance(found, str) else None


def folder_of(path: str, revision: str | None = None) -> Path | None:
    """The folder that holds a model on this machine, that of the Hub cache included; else None."""
    if looks_local(path):
        folder = Path(path).expanduser()
        if is_gguf(path) and folder.is_file():
            folder = gguf_folder(path)
        return folder if folder.is_dir() else None
    config = _cached(path, revision)
    return None if config is None else config.parent


def weight_files(path: str) -> list[Path]:
    """List the files that hold the weights of a model or an adapter, as far as names say.

    Args:
        path: a folder, or a Hub name; of one that is not on this machine there are none.
    """
    folder = folder_of(path)
    if folder is None:
        return []
    # Where both are there, the first are read.
    for pattern in ("*.safetensors", "*.bin"):
        files = sorted(folder.glob(pattern))
        if files:
            return files
    return []


def identity_of(path: str, revision: str | None = None) -> str | None:
    """What tells the weights of a model from others: a hash of samples of its files, or a commit.

    None for a Hub name of which nothing is on this machine.
    """
    folder = Path(path).expanduser()
    if is_gguf(path) and folder.is_file():
        return gguf_digest(path)[:_SHOWN_DIGITS]
    if not folder.is_dir():
        found = _cached(path, revision)
        return None if found is None else found.parent.name
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if file.suffix in _OF_A_MODEL and file.is_file():
            size = file.stat().st_size
            digest.update(f"{file.name} {size}\n".encode())
            with file.open("rb") as opened:
                for part in range(_SAMPLED):
                    opened.seek(max(0, size - _SAMPLE) * part // (_SAMPLED - 1))
                    digest.update(opened.read(_SAMPLE))
    base = base_of(path)
    own = digest.hexdigest()[:_SHOWN_DIGITS]
    return own if base == path else f"{own}+{identity_of(base)}"


# Files that change what a model answers, and how much of a large one is read: training changes
# weights everywhere.
_OF_A_MODEL = (".safetensors", ".json", ".jinja", ".model", ".bin")
_SAMPLED, _SAMPLE = 64, 1 << 16


# Beginnings of PEFT's `init_lora_weights` that change the base model along with the adapter.
_CHANGES_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


def read_adapter(path: str) -> dict[str, Any] | None:
    """The adapter configuration of a local folder, or None for a whole model.

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
    kind = "ALORA" if config.get("alora_invocation_tokens") else config.get("peft_type")
    if kind != "LORA":
        raise ModelError(
            f"{str(file)!r} is of an adapter of the kind {kind}, not LoRA",
            where="the adapter",
            fix="Use a LoRA adapter, or merge this one with PEFT where its kind can be merged.",
        )
    begun = str(config.get("init_lora_weights"))
    if begun.lower().startswith(_CHANGES_THE_BASE):
        raise ModelError(
            f"{str(file)!r} is of an adapter initialised with {begun}, which changes the weights "
            "of the base model as well; together with the base model as it is, it means nothing",
            where="the adapter",
            fix="Where it was trained, save it with `path_initial_model_for_weight_conversion` of "
            "PEFT's `save_pretrained`, or merge it and name the folder of that.",
        )
    return config


def base_of(path: str) -> str:
    """The whole model below an adapter, or `path` itself where it is no adapter folder.

    That is the base model as the adapter names it; in a run, `base` means that of the run itself,
    which may have been moved, or copied before another one took its place.

    Raises:
        ModelError: the adapter cannot be read, or its base model is not there.
        ConfigError: it lies in a run whose recipe cannot be read.
    """
    adapter = read_adapter(path)
    if adapter is None:
        return path
    base, run = str(adapter["base_model_name_or_path"]), run_of(path)
    if run is not None and is_model(run / "base"):
        name = load_recipe(run / RECIPE_FILE).name
        base = str(run / "base") if Path(base).parts[-2:] == (name, "base") else base
    require_model_folder(base, where=f"the base model of the adapter {path}")
    return base


def local_model(name: str) -> str:
    """The local folder of a model, or its name unchanged where there is none.

    Args:
        name: a path or Hub name (`Qwen/Qwen2.5-0.5B`). What looks like a path is left as it is;
            otherwise a folder of the whole name or its last part is looked for, in any case,
            in `MODEL_FOLDERS` below the current folder.
    """
    if looks_local(name):
        return name
    for places in MODEL_FOLDERS:
        here = Path(places)
        folders = sorted(f for depth in ("*", "*/*") for f in here.glob(depth) if is_model(f))
        found = [folder.relative_to(here).as_posix() for folder in folders]
        for wanted in (name, name.rpartition("/")[2]):
            matching = [model for model in found if model.casefold() == wanted.casefold()]
            if matching:
                return f"./{places}/{wanted if wanted in matching else matching[0]}"
    return name


def run_of(model: str) -> Path | None:
    """The run folder of `<run>`, `<run>/base` or `<run>/grpo/final`; None for any other folder."""
    folder = Path(model).expanduser().resolve()
    places = [folder, *folder.parents][:3] if folder.is_dir() else []
    return next((place for place in places if (place / RECIPE_FILE).is_file()), None)


def export_record(model: str) -> dict[str, Any] | None:
    """The content of `grouper.json` of an exported model, or None if it has none.

    Args:
        model: a folder, or a Hub name, of which only that file is downloaded.

    Raises:
        RunFolderError: the file is damaged.
    """
    file = Path(model).expanduser() / EXPORT_FILE
    if not looks_local(model):
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError

        try:
            file = Path(hf_hub_download(model, EXPORT_FILE))
        except (OSError, HfHubHTTPError, HFValidationError):  # no such file, no right, no network
            return None
    return read_json(file, "the record of the export cannot be read") if file.is_file() else None


def recipe_for(model: str, recipe: Recipe | None = None, format_name: str | None = None) -> Recipe:
    """The recipe given, else that `model` was trained by; with another format if given.

    Raises:
        ConfigError: neither is there and no format was given, or there is no such format.
    """
    if recipe is None:
        if run := run_of(model):
            recipe = load_recipe(run / RECIPE_FILE)
        elif record := export_record(model):
            where = f"{EXPORT_FILE} of {model}"
            recipe = validate_json(Recipe, json.dumps(record.get("recipe")), where=where)
            if recipe.model.path is not None and "/" not in recipe.model.path:
                # Of a folder on another machine the record has the name alone.
                recipe = recipe.override(model={"path": model, "revision": None})
        elif format_name is not None:
            data = DataConfig(train=SourceConfig(source="arithmetic"))
            recipe = Recipe(name="generate", model=ModelConfig(path=model), data=data)
        else:
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
    return recipe.model_copy(update={"prompt": PromptConfig(format=format_name)})


def with_sampling(
    recipe: Recipe,
    *,
    temperature: float | None = None,
    max_new_tokens: int | None = None,
    samples: int | None = None,
    seed: int | None = None,
) -> Recipe:
    """The recipe with another evaluation section; what is None stays as it is.

    At temperature 0, where all samples would be the same, one is drawn unless more are asked for.

    Raises:
        ConfigError: values that a recipe cannot have, several samples at temperature 0 among them.
    """
    total = recipe.sampling.max_total_tokens
    if max_new_tokens is None and recipe.evaluation.max_new_tokens is None and total is not None:
        # What the longest prompt allowed leaves; the training data, which say more, are not read.
        max_new_tokens = max(1, total - recipe.prompt.max_prompt_tokens)
    if samples is None and temperature == 0:
        samples = 1
    given = {"temperature": temperature, "max_new_tokens": max_new_tokens, "samples": samples}
    changed = {name: value for name, value in given.items() if value is not None}
    return recipe.override(evaluation=changed, seed=recipe.seed if seed is None else seed)
