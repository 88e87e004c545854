"""The shipped fake: canned answers behind the real interface, for tests, dry runs and demos."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from grouper.sampling.base import SampleRequest
from grouper.types import Completion, FinishReason


class ScriptedSampler:
    """Answers every request from a function of the request and its index.

    A token is a character's code point; 0 ends a completion that does not use up its length.

    Args:
        script: (request, index) -> the completion's text. Deterministic scripts make
            deterministic runs.

    >>> from grouper.types import Prompt, SamplingParams
    >>> prompt = Prompt(problem_id="a/0", text="2+2=", token_ids=(1,))
    >>> sampler = ScriptedSampler(lambda request, index: "4")
    >>> [(i, c.text) for i, c in sampler.sample(
    ...     [SampleRequest(prompt=prompt, params=SamplingParams(), key=0)])]
    [(0, '4')]
    """

    def __init__(self, script: Callable[[SampleRequest, int], str]) -> None:
        self._script = script

    def sample(self, requests: Sequence[SampleRequest]) -> Iterator[tuple[int, Completion]]:
        for index, request in enumerate(requests):
            text = self._script(request, index)
            ids = [*map(ord, text), 0]
            limit = request.params.max_new_tokens
            truncated = len(ids) > limit
            completion = Completion(
                token_ids=tuple(ids[:limit]),
                logprobs=(-1.0,) * min(len(ids), limit),
                text=text[: limit if truncated else None],
                finish_reason=FinishReason.LENGTH if truncated else FinishReason.STOP_TOKEN,
                policy_version=0,
            )
            yield index, completion
