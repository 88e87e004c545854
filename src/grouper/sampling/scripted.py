"""The shipped fake: canned answers behind the real interface, for tests, dry runs and demos."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from grouper.sampling.base import SampleRequest
from grouper.types import Completion, FinishReason


def _code_points(text: str) -> list[int]:
    return [ord(character) for character in text]


class ScriptedSampler:
    """Answers every request from a function of the request and its index.

    Args:
        script: (request, index) -> the completion's text. Deterministic scripts make
            deterministic runs.
        encode: text -> token ids; each character's code point by default.
        stop_token_id: appended to every completion unless the length is used up.
        logprob: the log-probability reported for every token.

    >>> from grouper.types import Prompt, SamplingParams
    >>> prompt = Prompt(problem_id="a/0", text="2+2=", token_ids=(1,))
    >>> sampler = ScriptedSampler(lambda request, index: "4")
    >>> [(i, c.text) for i, c in sampler.sample(
    ...     [SampleRequest(prompt=prompt, params=SamplingParams(), key=0)])]
    [(0, '4')]
    """

    def __init__(
        self,
        script: Callable[[SampleRequest, int], str],
        *,
        encode: Callable[[str], Sequence[int]] = _code_points,
        stop_token_id: int = 0,
        logprob: float = -1.0,
    ) -> None:
        self._script = script
        self._encode = encode
        self._stop = stop_token_id
        self._logprob = logprob

    def sample(self, requests: Sequence[SampleRequest]) -> Iterator[tuple[int, Completion]]:
        for index, request in enumerate(requests):
            text = self._script(request, index)
            ids = [*self._encode(text), self._stop]
            limit = request.params.max_new_tokens
            truncated = len(ids) > limit
            yield (
                index,
                Completion(
                    token_ids=tuple(ids[:limit]),
                    logprobs=(self._logprob,) * min(len(ids), limit),
                    text=text[: limit if truncated else None],
                    finish_reason=FinishReason.LENGTH if truncated else FinishReason.STOP_TOKEN,
                    policy_version=0,
                ),
            )
