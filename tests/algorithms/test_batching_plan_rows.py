"""Rows fill a budget exactly as micro-batches are cut."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from grouper.algorithms.batching import Rows, micro_batches, worst_rows


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 30), st.integers(1, 30), st.integers(1, 5), st.integers(1, 300), st.booleans()
)
def test_filled_rows_are_one_slice_and_one_more_would_not_be(
    prompt: int, completion: int, group: int, budget: int, shared: bool
) -> None:
    rows = Rows(prompt=prompt, completion=completion, count=1, per_prompt=group)
    filled = rows.filling(budget, most=1000, shared=shared)
    more = Rows(
        prompt=prompt,
        completion=completion,
        count=filled.count + 1,
        per_prompt=filled.per_prompt,
    )
    assert len(micro_batches(filled.batch(97), budget, shared_prompts=shared)) == 1
    assert len(micro_batches(more.batch(97), budget, shared_prompts=shared)) == 2


def test_tokens_are_counted_as_micro_batches_count_them() -> None:
    rows = Rows(prompt=10, completion=3, count=5, per_prompt=2)
    batch = rows.batch(97)
    assert rows.tokens == 3 * 10 + 5 * 3
    assert int(batch.prompt_lengths.sum() + batch.completion_lengths.sum()) == rows.tokens
    assert float(batch.weights.sum()) == 1.0


def test_short_rows_are_only_worse_where_prompts_are_shared() -> None:
    assert len(worst_rows(10, 80, 1)) == 1
    long, short = worst_rows(10, 80, 4)
    assert (long.completion, short.completion) == (80, 10)
