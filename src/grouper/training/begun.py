"""Groups of a step that have begun in the step before, in slots that would have been free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grouper.sampling.base import PartialCompletion, SampleRequest
from grouper.types import Completion, Problem, Prompt, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class BegunSample:
    """A sample of a group, as far as it has been drawn."""

    key: int
    """Its address, as of a `SampleRequest`."""
    completion: Completion | None = None
    partial: PartialCompletion | None = None
    """Without a completion: the tokens so far, if there are any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BegunGroup:
    """The samples of a problem that the next step goes on with."""

    index: int
    """Of the problem, among those of the run."""
    position: int
    """In the problem stream, after it."""
    samples: tuple[BegunSample, ...]


def requests_of_begun(
    items: Sequence[tuple[Problem, Prompt]], groups: Sequence[BegunGroup], params: SamplingParams
) -> tuple[list[SampleRequest], list[str]]:
    """Return the requests of all samples, and the reference answer of each.

    Args:
        items: the problem and the prompt of each group.
        groups: have begun.
        params: how to draw.
    """
    requests = []
    references = []
    for (problem, prompt), group in zip(items, groups, strict=True):
        for sample in group.samples:
            request = SampleRequest(
                prompt=prompt, params=params, key=sample.key, partial=sample.partial
            )
            requests.append(request)
            references.append(problem.answer)
    return requests, references
