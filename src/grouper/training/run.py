"""A run: its prepared data, its folder, its processes, and the models and rewards it holds."""

from __future__ import annotations

import logging
import os
import platform
from functools import cache
from pathlib import Path
from typing import Self

import torch
from rich.text import Text

from grouper.config.loading import recipe_hash
from grouper.config.schema import Recipe
from grouper.errors import (
    ConfigError,
    GrouperError,
    Interrupted,
    ModelError,
    installed,
    redact,
)
from grouper.kernels.cpu.library import kernels_in_use
from grouper.models.device import (
    MACHINE_DTYPES,
    describe_hardware,
    find_device,
    on_device,
    use_cpu_threads,
)
from grouper.models.folders import (
    STATE_FILE,
    on_this_machine,
    read_adapter,
    require_model_folder,
)
from grouper.models.loading import (
    check_adapter,
    check_lora_targets,
    computed_on,
    load_tokenizer,
    shape_of,
)
from grouper.models.new_model import new_model_config
from grouper.printable import printable
from grouper.prompts.formats import make_format
from grouper.rewards.user_code import code_fingerprints
from grouper.runs.folder import ANSWERS_FILE, RunFolder
from grouper.runs.progress import Progress, end_logging, setup_logging
from grouper.runs.recorder import Recorder
from grouper.runs.records import RunEnd, RunInfo, describe_changes, host, that_differ
from grouper.sampling.step_ahead import require_step_ahead
from grouper.sampling.weights import describe_dtypes
from grouper.training.background import Background
from grouper.training.models_in_memory import ModelsInMemory
from grouper.training.parallel import join_processes, leave_processes
from grouper.training.prepare import Prepared, make_base, named_base
from grouper.training.problem_sets import (
    ProblemSets,
    data_warnings,
    find_leaks,
    load_problem_sets,
    opening_lines,
    quarantine_lines,
)
from grouper.training.stop_signal import StopSignal
from grouper.training.teachers import check_teachers, teacher_marks, teacher_settings

log = logging.getLogger(__name__)


class Run:
    """Opens a recipe: prepares it and its folder; models are loaded as phases need them.

    Args:
        recipe: what to run.
        display: where progress goes; standard error by default.
        resume: continue the run in the folder.
        overwrite: delete the run in the folder first.
        allow_changes: continue it even if its recipe, data or code changed.

    Raises:
        GrouperError: anything the user can correct, before any model is loaded.
    """

    def __init__(
        self,
        recipe: Recipe,
        display: Progress | None = None,
        *,
        resume: bool = False,
        overwrite: bool = False,
        allow_changes: bool = False,
    ) -> None:
        self.recipe = recipe
        self.display = display = display or Progress(log_every=recipe.tracking.log_every)
        self._group_is_callers = torch.distributed.is_initialized()
        self.processes = join_processes()
        self.hash = recipe_hash(recipe)
        find_device(recipe.device)
        require_step_ahead(recipe, self.processes.size)
        if self.processes.size > 1:
            require_shareable(recipe, self.processes.size)
        check_models(recipe, recipe.run_folder, resume=resume)
        with display.track("reading the data"):
            sets = load_problem_sets(recipe)
        # The rewards, trackers and hooks, the user's own among them.
        reward_names = [reward.name for reward in recipe.rewards]
        tracker_names = [tracker.name for tracker in recipe.tracking.trackers]
        code = code_fingerprints(
            [*reward_names, *tracker_names, *recipe.hooks, *recipe.sampling.tools.functions]
        )
        self._require_same_inputs(sets, code)
        info = RunInfo(
            recipe_hash=self.hash,
            versions=describe_versions(recipe),
            fingerprints={**sets.fingerprints, **teacher_marks(recipe)},
            code=code,
            host=host(
                use_cpu_threads(recipe.threads),
                self.processes.size,
                describe_hardware(find_device(recipe.device)),
            ),
        )
        self.folder = Recorder(
            recipe,
            self.processes,
            {"resume": resume, "overwrite": overwrite, "allow_changes": allow_changes},
            info,
        )
        self.path = self.folder.path
        self._logging: list[logging.Handler] = []
        try:
            # Listed: what a network file system remembers of a single name may be old.
            if not all(self.processes.gather(self.path in self.path.parent.glob("*"))):
                raise ConfigError(
                    f"not every process sees {self.path.absolute()}, the run folder of the first",
                    where="output_dir",
                    fix="With several machines it must be on a file system that all of them share.",
                )
            self._prepare(recipe, sets)
        except BaseException:  # Ctrl-C, too, must leave no process, lock or unfinished folder
            if hasattr(self, "prepared"):
                self.prepared.close()
            self.folder.close()
            end_logging(self._logging)
            self.folder.discard()
            raise

    def has_begun(self) -> bool:
        """Return whether anything has been measured or trained in the run folder."""
        return bool(self.folder.read_evaluations() or self.folder.read_metrics())

    def _require_same_inputs(self, sets: ProblemSets, code: dict[str, str]) -> None:
        """Check that every process has the same recipe, data and code. Raises `ConfigError`.

        Several machines may have different files, and would sample for different problems.
        """
        inputs = {
            "recipe": self.hash,
            "parallel": self.recipe.parallel,
            **sets.fingerprints,
            **code,
        }
        inputs_by_rank = self.processes.gather(inputs)
        for other_inputs in inputs_by_rank:
            changes = that_differ(inputs_by_rank[0], other_inputs)
            if changes:
                raise ConfigError(
                    f"processes differ from the first one: {describe_changes(changes)}",
                    where="torchrun",
                    fix="Start the same recipe with the same data and code on every machine.",
                )

    def _prepare(self, recipe: Recipe, sets: ProblemSets) -> None:
        """Prepare everything a run needs; any of it may still refuse the run."""
        # The other processes would print the same.
        is_rank0 = self.processes.rank == 0
        if is_rank0:
            self._logging = setup_logging(self.path, console=self.display.console)
        for text in quarantine_lines(sets):
            log.info(text)
        self.base_path = self._base(recipe, sets)
        if find_device(recipe.device).type == "cuda":  # other devices compute in model.dtype
            shape = shape_of(self.base_path, recipe.model.revision_of(self.base_path))
            computed = computed_on(recipe.model, shape, "cuda")
            self.display.say(describe_dtypes(recipe.sampling, computed))
        with self.display.within("preparing the problems"):  # takes a minute for a large set
            _warn_of_data(recipe, sets)
            if _needs_start(recipe, self.path):
                self._check_start(str(recipe.grpo.start_from))
            check_teachers(recipe, self.base_path)
            self.prepared = Prepared(recipe, sets, model=self.base_path)
        for line in opening_lines(recipe, sets, self.prepared.sizes):
            self.display.say(line)
        self.prepared.samplers.processes = self.processes
        self.prepared.start_workers()
        if self.prepared.budget_note is not None:
            self.display.say(self.prepared.budget_note)
            self.folder.record_resolved({"sampling.max_new_tokens": self.prepared.max_new_tokens})
        if self.prepared.demonstrations:
            self.display.say(_as_trained(self.prepared))
        if is_rank0:  # the process that scores
            self.prepared.rewards.remember(self.path / ANSWERS_FILE)
        self.params = self.prepared.training_params()
        """Sampling parameters of GRPO's rollouts."""
        self.token_text = cache(lambda token: self.prepared.text([token]))
        """The text of a token id, special ones included."""
        for text in self.processes.on_rank0(self.prepared.check_rewards):
            log.warning(text)
        self.stop = StopSignal(self.processes, self.display, self.path, self.folder.resume_command)
        """Requests to stop, and when they are obeyed."""
        self.background = Background(self.processes)
        """Work that is done while a phase trains."""
        self.models = ModelsInMemory(
            recipe, self.prepared, self.processes, self.display, self.stop.raise_if_requested
        )
        """The policy in memory, with its replica and its sampler."""

    def _base(self, recipe: Recipe, sets: ProblemSets) -> str:
        """Return the path of the base model, whose tokenizer the run uses; create a new one once.

        Returns:
            A folder or a Hub name.
        """
        named = named_base(recipe)
        if named is not None:
            return named
        folder = self.path / "base"
        description = self.processes.on_rank0(
            lambda: None if folder.exists() else make_base(recipe, sets, folder)
        )
        if description is not None:
            self.display.say(description)
        return str(folder)

    def _check_start(self, path: str) -> None:
        """Check that the model GRPO starts from has this run's tokenizer. Raises `ModelError`."""
        revision = self.recipe.model.revision_of(self.base_path)
        tokenizer = load_tokenizer(self.base_path, revision=revision)
        if load_tokenizer(path).get_vocab() != tokenizer.get_vocab():
            raise ModelError(
                f"the tokenizer of {path} is not that of {self.base_path}: the model would read "
                "other tokens than it was trained on",
                where="grpo.start_from",
                fix="Start from a model that was trained from this recipe's model.path.",
            )

    def __enter__(self) -> Self:
        self.stop.begin()
        return self

    def __exit__(self, *raised: object) -> None:
        self.stop.end()
        self.prepared.close()
        self.background.close()  # its work ends with the servers
        # Rank 0 alone writes it.
        end = self._describe_end(raised[1]) if self.processes.rank == 0 else None
        self.folder.close(end)
        end_logging(self._logging)  # later messages of the process do not belong to this run
        # An empty folder would only stand in the way of the corrected recipe.
        stopped = isinstance(raised[1], GrouperError | KeyboardInterrupt)
        if stopped and self.folder.is_untrained() and self.folder.is_unmeasured():
            self.folder.discard()
        if not any(raised) and not self._group_is_callers:
            # After an error the other processes may never get here, and must not be waited for.
            leave_processes(self.models.held_replica())

    def _describe_end(self, error: object) -> RunEnd:
        """Return how the run ends.

        Args:
            error: the exception that ends it, if any.
        """
        if isinstance(error, Interrupted | KeyboardInterrupt):
            return RunEnd(state="stopped", reason=self.stop.signal_name or "Ctrl-C")
        if isinstance(error, GrouperError):
            return RunEnd(state="failed", reason=redact(error.what))
        if error is not None:
            first_line = str(error).partition("\n")[0]
            return RunEnd(state="failed", reason=redact(f"{type(error).__name__}: {first_line}"))
        try:
            # Not `self.folder`, which asks all processes: the others may have ended.
            has_finished = RunFolder(self.path).has_finished(self.recipe.phases)
        except GrouperError as damage:
            return RunEnd(state="failed", reason=redact(damage.what))
        return RunEnd(state="finished" if has_finished else "stopped")


def _warn_of_data(recipe: Recipe, sets: ProblemSets) -> None:
    """Log what is suspicious about the problems."""
    leaks = find_leaks(recipe, sets)  # before the first warning: the search takes long
    for warning in data_warnings(recipe, sets):
        log.warning(warning)
    for leak in leaks:
        log.warning(leak.warning)


def require_shareable(recipe: Recipe, size: int) -> None:
    """Refuse settings that several processes cannot share.

    Args:
        recipe: of the run.
        size: processes, two or more.

    Raises:
        ConfigError: each would start a vLLM of its own, or cannot reach the other's; or weights are
            to be split that are quantized, or whose optimizer cannot step a part of them.
    """
    vllm = recipe.sampling.vllm
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    if recipe.sampling.engine == "vllm" and vllm.mode == "colocate":
        raise ConfigError(
            f"mode colocate is for one training process, and there are {size}: each of them "
            "would need a vLLM of its own",
            where="sampling.vllm.mode",
            fix="Use sampling.vllm.mode=server, or leave --nproc out.",
        )
    reachable = all("://" in server for server in vllm.servers or ("auto",))
    if recipe.sampling.engine == "vllm" and local_size < size and not reachable:
        raise ConfigError(
            "the run is on several machines, and a server that it starts is seen by one alone",
            where="sampling.vllm.servers",
            fix="Start servers with grouper serve-rollouts, and give their addresses.",
        )
    unsplittable = [
        f"{phase}.optimizer.name"
        for phase in recipe.phases
        if getattr(recipe, phase).optimizer.name == "adamw_8bit"
    ]
    if recipe.model.quantization is not None:
        unsplittable.append("model.quantization")
    if recipe.parallel == "fsdp" and unsplittable:
        raise ConfigError(
            "weights in 4 bits and the state of adamw_8bit cannot be split over processes",
            where=unsplittable[0],
            fix="Leave it out, or set parallel to ddp.",
        )


def _needs_start(recipe: Recipe, run: Path) -> bool:
    """Return whether the run will load `grpo.start_from`.

    It does if GRPO has not started, or measures the KL to the model that it started from.
    """
    if recipe.grpo.start_from is None or recipe.skip_grpo:
        return False
    has_started = any((run / "grpo").glob(f"*/{STATE_FILE}"))
    return not has_started or recipe.grpo.beta > 0


def check_models(recipe: Recipe, run: Path, *, resume: bool) -> list[str]:
    """Check, before training or measuring, the models that a run will load.

    Args:
        recipe: names them.
        run: the run folder.
        resume: an existing run is continued.

    Returns:
        Hub names that are not on this machine yet, which cannot be checked.

    Raises:
        ModelError: one does not exist, is an adapter of another base model, or lacks the layers
            that LoRA is to be applied to.
    """
    paths: dict[str, str] = {}
    if recipe.model.path is not None:
        paths["model.path"] = recipe.model.path
    start_is_loaded = not resume or _needs_start(recipe, run)
    if start_is_loaded and not recipe.skip_grpo and recipe.grpo.start_from is not None:
        paths["grpo.start_from"] = recipe.grpo.start_from
    missing = []
    for where, path, config in teacher_settings(recipe):
        require_model_folder(path, where=where)
        if not on_this_machine(path, config.revision):
            missing.append(path)
    for where, path in paths.items():
        require_model_folder(path, where=where)
        revision = recipe.model.revision_of(path)
        if not on_this_machine(path, revision):
            missing.append(path)
            continue
        check_adapter(recipe.model, path, where=where)
        if read_adapter(path) is None:  # an adapter is continued with the layers that it has
            check_lora_targets(recipe.model, shape_of(path, revision, cached=True))
    new = recipe.model.new
    if new is not None:
        check_lora_targets(recipe.model, new_model_config(new, vocabulary=new.vocab_size))
    return missing


def _as_trained(prepared: Prepared) -> Text:
    """Render one demonstration: prompt dim, trained tokens green, stop token underlined.

    The brackets mark the border where there are no colors.
    """
    demonstration = prepared.demonstrations[0]
    prompt = printable(prepared.text(demonstration.prompt.token_ids))
    completion = printable(prepared.text(demonstration.token_ids[:-1]))
    stop_token = printable(prepared.text(demonstration.token_ids[-1:]))
    return Text.assemble(
        ("One demonstration; SFT trains what stands between >>> and <<<:\n", "bold"),
        (prompt, "dim"),
        (">>>", "bold"),
        (completion, "green"),
        (stop_token, "green underline"),
        ("<<<", "bold"),
    )


def describe_versions(recipe: Recipe) -> dict[str, str]:
    """Return the versions of everything that a run's numbers on this device depend on."""
    device = find_device(recipe.device)
    versions = {"python": platform.python_version()}
    for package in ("grouper-rl", "torch", "transformers", "tokenizers", "peft", "math-verify"):
        versions[package] = installed(package)
    if recipe.model.compute_dtype in MACHINE_DTYPES:
        versions["compute dtype"] = on_device(recipe.model, device.type).compute_dtype
    if device.type == "cpu":
        versions["kernels"] = kernels_in_use()
    if make_format(recipe.prompt).runs_programs:
        versions["isolation of programs"] = recipe.grading.programs.isolation
    return versions
