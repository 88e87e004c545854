"""What is clearly off in a measurement, and what to try: one look at it after the other."""

from __future__ import annotations

from collections.abc import Callable

from grouper.benching.measuring import Bench

__all__ = ["suggestions"]

WAITING_SHARE = 0.1
"""Of the seconds, spent waiting for grades: more than that is worth a second worker."""
OTHER_SHARE = 0.2
UNSTEADY = 1.5
"""Longest over shortest step."""
FASTER = 2.0
"""bfloat16 over the rate in use, from which on changing over is worth a try."""
SMALL_MODEL = 20_000_000
"""Parameters below which calls and not products are what a CPU is busy with."""
FREE_MEMORY = 0.5
"""Share of a GPU's memory, at the peak, that could hold larger slices or more slots."""
SMALL_SLICE = 8192
"""Tokens in a slice, below which a GPU is rarely kept busy."""


def suggestions(seen: Bench) -> tuple[str, ...]:
    """What to try, the most important first; empty where nothing is clearly off."""
    return tuple(text for look in _LOOKS if (text := look(seen)) is not None)


def _crowded(seen: Bench) -> str | None:
    others = seen.other_cores
    if others is None or others + seen.threads <= seen.cores + 0.1:
        return None
    return (
        f"Other processes kept {others:.1f} of {seen.cores} cores busy beside this measurement "
        f"with threads={seen.threads}: all of it is slower than it could be. Stop them and measure "
        "again."
    )


def _unsteady(seen: Bench) -> str | None:
    step = seen.spread("time.step")
    if step is None or step.max <= UNSTEADY * step.min:
        return None
    forced = seen.completion_tokens is not None
    return (
        f"The longest step took {step.max / step.min:.1f} times as long as the shortest. Measure "
        + ("more steps (--steps)." if forced else "with --completion-tokens, or more --steps.")
    )


def _split_for_memory(seen: Bench) -> str | None:
    if seen.token_limit is None:
        return None
    return (
        f"Memory ran out and slices were cut to {seen.token_limit} tokens. Set "
        f"grpo.tokens_per_micro_batch={seen.token_limit} to begin there; "
        "model.gradient_checkpointing=true makes room for more."
    )


def _waiting(seen: Bench) -> str | None:
    share, workers = seen.share("grade"), seen.recipe.grading.workers
    if share <= WAITING_SHARE:
        return None
    return (
        f"{share:.0%} of the time went into waiting for grades and rewards, after all completions "
        f"were in. Try grading.workers={2 * workers} (now {workers}), and look for a slow reward "
        "function of your own."
    )


def _other(seen: Bench) -> str | None:
    share = seen.share("other")
    if share <= OTHER_SHARE:
        return None
    return (
        f"{share:.0%} of the time is neither sampling, grading nor update: drawing problems and "
        "writing rollouts. Larger steps (grpo.prompts_per_step) or a faster disk help."
    )


def _slow_dtype(seen: Bench) -> str | None:
    if seen.dtype != "float32" or seen.bfloat16_rate < FASTER * seen.matrix_rate:
        return None
    if seen.device == "cpu" and seen.parameters < SMALL_MODEL:
        return None
    return (
        f"This machine multiplies bfloat16 matrices {seen.bfloat16_rate / seen.matrix_rate:.1f} "
        "times as fast as float32 ones. Try model.compute_dtype=bfloat16 (weights stay in "
        "float32) and sampling.dtype=bfloat16."
    )


def _few_threads(seen: Bench) -> str | None:
    if seen.device != "cpu" or seen.threads >= seen.cores or seen.parameters < SMALL_MODEL:
        return None
    return f"{seen.threads} of {seen.cores} cores are used. Measure with threads={seen.cores}, too."


def _small_slices(seen: Bench) -> str | None:
    budget = seen.recipe.grpo.tokens_per_micro_batch
    if seen.memory_bytes is None or seen.token_limit is not None or budget >= SMALL_SLICE:
        return None
    if seen.peak_bytes > FREE_MEMORY * seen.memory_bytes:
        return None
    return (
        f"The update runs in slices of {budget:,} tokens while {_free(seen):.0%} of the GPU's "
        f"memory was never used. Try grpo.tokens_per_micro_batch={4 * budget}."
    )


def _few_slots(seen: Bench) -> str | None:
    grpo, slots = seen.recipe.grpo, seen.recipe.sampling.max_slots
    wanted = grpo.prompts_per_step * grpo.group_size
    if seen.memory_bytes is None or slots >= wanted:
        return None
    if seen.peak_bytes > FREE_MEMORY * seen.memory_bytes:
        return None
    return (
        f"{slots} sequences are decoded at a time and a step has {wanted}, while {_free(seen):.0%} "
        f"of the GPU's memory was never used. Try sampling.max_slots={wanted}."
    )


def _free(seen: Bench) -> float:
    assert seen.memory_bytes is not None, "asked of a GPU alone"
    return 1 - seen.peak_bytes / seen.memory_bytes


_LOOKS: tuple[Callable[[Bench], str | None], ...] = (
    _crowded,
    _unsteady,
    _split_for_memory,
    _waiting,
    _other,
    _slow_dtype,
    _few_threads,
    _small_slices,
    _few_slots,
)
