"""Teachers: frozen models that say, token by token, what they would have written.

A teacher is loaded when its phase begins and let go when it ends. Every process holds it whole; it
is part of no checkpoint. Its files are marked in the run's record, so that a run is not continued
with another one unnoticed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from grouper.algorithms.batching import TrainBatch
from grouper.config.schema import ModelConfig, Recipe, TeacherConfig
from grouper.errors import ConfigError, ModelError
from grouper.files import checksum
from grouper.models.device import find_device, on_device
from grouper.models.divergences import Guidance, Lecture
from grouper.models.folders import gguf_digest, is_gguf, looks_local, weight_files
from grouper.models.loading import check_adapter, load_policy, load_tokenizer
from grouper.models.policy import Policy


def teachers_of_phases(recipe: Recipe) -> dict[str, TeacherConfig]:
    """Return the teacher of each phase that is run and has one, by the phase's name."""
    teachers = {}
    for phase in recipe.phases:
        teacher = getattr(recipe, phase).teacher
        if teacher is not None:
            teachers[phase] = teacher
    return teachers


def paths_of(config: TeacherConfig) -> tuple[str, ...]:
    """Return the models of a setting, each once: that of most problems first.

    A row's teacher is a number in this order.
    """
    return tuple(dict.fromkeys((config.path, *config.sources.values())))


def number_of(config: TeacherConfig, source: str) -> int:
    """Return the number of the teacher of a data source's problems."""
    return paths_of(config).index(config.sources.get(source, config.path))


def teacher_settings(recipe: Recipe) -> Iterator[tuple[str, str, TeacherConfig]]:
    """Yield (setting, path, configuration) of every teacher of a recipe."""
    for phase, config in teachers_of_phases(recipe).items():
        yield f"{phase}.teacher.path", config.path, config
        for source, path in config.sources.items():
            yield f"{phase}.teacher.sources.{source}", path, config


# --- before anything is loaded -------------------------------------------------------------------


def check_teachers(recipe: Recipe, base_path: str) -> None:
    """Refuse teachers that cannot teach the model of a run. They exist: see `check_models`.

    Args:
        recipe: names them.
        base_path: the model whose tokenizer the run uses.

    Raises:
        ModelError: one reads other tokens.
        ConfigError: one is the model that the phase begins with.
    """
    settings = list(teacher_settings(recipe))
    if not settings:
        return
    revision = recipe.model.revision_of(base_path)
    vocabulary = load_tokenizer(base_path, revision=revision).get_vocab()
    for where, path, config in settings:
        _refuse_itself(recipe, base_path, where, path, config)
        check_adapter(teacher_model(recipe, config, path, "cpu"), path, where=where)
        if load_tokenizer(path, revision=config.revision).get_vocab() != vocabulary:
            raise ModelError(
                f"the tokenizer of {path} is not that of {base_path}: the teacher would read other "
                "tokens than the policy writes",
                where=where,
                fix="Take a teacher of the same family. A model with another tokenizer can teach "
                "by its texts: write some with `grouper generate`, and train on them as data.sft.",
            )


def _refuse_itself(
    recipe: Recipe, base_path: str, where: str, path: str, config: TeacherConfig
) -> None:
    """Raise `ConfigError` where a teacher is the model that training begins with."""
    if config.prompt == "solution":
        return
    starts = {base_path}
    if where.startswith("grpo."):
        if recipe.grpo.start_from is not None:
            starts = {recipe.grpo.start_from}
        elif not recipe.skip_sft:
            return
    if _place(path) in {_place(start) for start in starts}:
        raise ConfigError(
            f"the teacher {path} is the model that is trained: it has nothing to teach",
            where=where,
            fix="Name another model; or prompt: solution, with which it reads the worked solution; "
            "or grpo.beta instead of a teacher, to stay near the start of GRPO.",
        )


def _place(path: str) -> str:
    """Return a folder's absolute path, or a Hub name as it is."""
    return str(Path(path).expanduser().resolve()) if looks_local(path) else path


def teacher_marks(recipe: Recipe) -> dict[str, str]:
    """Return a mark of each teacher, another one for other weights; of a Hub name, its revision."""
    marks = {}
    for where, path, config in teacher_settings(recipe):
        if is_gguf(path):
            marks[where] = gguf_digest(path)[:16]
        elif looks_local(path):
            checksums = [f"{file.name} {checksum(file)}" for file in sorted(weight_files(path))]
            marks[where] = hashlib.sha256("\n".join(checksums).encode()).hexdigest()[:16]
        else:
            marks[where] = f"{path}@{config.revision or 'main'}"
    return marks


# --- in memory -----------------------------------------------------------------------------------


def teacher_model(recipe: Recipe, config: TeacherConfig, path: str, device: str) -> ModelConfig:
    """Return the settings with which a teacher is loaded."""
    products: str = on_device(recipe.model, device).compute_dtype
    dtype: str = config.dtype
    if dtype == "auto":
        # Float16 is for products alone.
        dtype = "float32" if products == "float16" else products
    if products == "float16":
        # Chosen anew for the teacher, which may be of a family that float16 cannot hold.
        products = recipe.model.compute_dtype
    changes: dict[str, Any] = {
        "path": path,
        "revision": config.revision,
        "new": None,
        "dtype": dtype,
        # Products of bfloat16 weights in float32 are refused.
        "compute_dtype": dtype if dtype == "bfloat16" else products,
        "quantization": config.quantization,
        "lora": None,
        "gradient_checkpointing": False,
        "activation_offload": False,
    }
    # A copy is not validated: weights in 4 bits without an adapter are refused for a policy alone.
    return recipe.model.model_copy(update=changes)


def load_teachers(recipe: Recipe, config: TeacherConfig, device: torch.device) -> Teachers:
    """Load the teachers of a phase, frozen.

    Args:
        recipe: dtype of the products, attention, and the device of the run.
        config: names them.
        device: of the policy.

    Raises:
        ModelError: one cannot be loaded.
    """
    if config.device != "same":
        device = torch.device(config.device)
    policies = []
    for path in paths_of(config):
        model = teacher_model(recipe, config, path, device.type)
        policy = load_policy(model, path, seed=recipe.seed, device=device)
        policies.append(policy.requires_grad_(False))
    return Teachers(policies, config)


def describe(recipe: Recipe, config: TeacherConfig) -> str:
    """Return a line about the teachers of a phase."""
    names = ", ".join(paths_of(config))
    device = find_device(recipe.device).type if config.device == "same" else config.device
    bits = "4 bits" if config.quantization else teacher_model(recipe, config, "", device).dtype
    divergence = f"{config.kl} KL"
    if config.top_k:
        divergence += f" over its {config.top_k} most likely tokens"
    return f"Teacher: {names} ({bits}); {divergence}, weight {config.weight:g}."


@dataclass(frozen=True, slots=True)
class Teachers:
    """The teachers of a phase in memory."""

    policies: Sequence[Policy]
    """In the order of `paths_of`."""
    config: TeacherConfig

    @torch.no_grad()
    def guide(self, rows: TrainBatch) -> Guidance:
        """Run each teacher on its rows of a slice.

        Rows without a weight in the teacher's stream are left out.

        Args:
            rows: on the policy's device.
        """
        assert rows.teacher_weights is not None, "no weights for a teacher"
        is_taught = (rows.teacher_weights > 0).any(dim=1)
        teacher = rows.teacher
        if teacher is None:
            teacher = torch.zeros_like(rows.sequence_ids)
        starts = rows.completion_lengths.cumsum(0) - rows.completion_lengths
        lectures = []
        for number, policy in enumerate(self.policies):
            index = (is_taught & (teacher == number)).nonzero().flatten()
            if not index.numel():
                continue
            part = rows.select(index).as_the_teacher_reads()
            columns = torch.arange(part.mask.shape[1], device=starts.device)
            tokens = (starts[index, None] + columns)[part.is_completion]
            hidden = policy.completion_states(part.to(policy.device))
            lectures.append(Lecture(teacher=policy, hidden=hidden, tokens=tokens))
        return Guidance(lectures=tuple(lectures), kl=self.config.kl, top_k=self.config.top_k)
