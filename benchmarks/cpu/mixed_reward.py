"""The reward of the step comparison, in both trainers: cheap, and different within every group."""

from __future__ import annotations

from typing import Any

SEEN: list[tuple[list[Any], list[list[int]]]] = []
"""(prompts, token ids of their completions) of every call since it was last emptied."""


def even_share(
    prompts: list[Any], completions: list[Any], completion_ids: list[list[int]], **_: Any
) -> list[float]:
    """The share of even token ids, and a little for small ones, so that no two are alike."""
    SEEN.append((list(prompts), [list(ids) for ids in completion_ids]))
    assert len(completions) == len(completion_ids)
    return [
        sum(i % 2 == 0 for i in ids) / len(ids) - 1e-4 * sum(ids) / len(ids)
        for ids in completion_ids
    ]
