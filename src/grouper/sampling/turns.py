"""Sampling in turns: a block of code ends a turn, is run, and the model goes on after its output.

Any sampler can be inside: it is asked once a round for all completions that are not finished, with
the turns so far as their prompts. Tokens of tools count for `max_new_tokens`, and are marked
(`Completion.tool_spans`). Every turn has an address of its own for its random numbers, so that a
step that is sampled again is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from grouper.models.process_group import ProcessGroup
from grouper.programs.code_blocks import BLOCK_END, output_block
from grouper.sampling.base import ModelSampler, Sampler, SampleRequest, draw_seed
from grouper.sampling.native import NativeSampler
from grouper.sampling.tools import Toolbox
from grouper.types import Completion, FinishReason

# What stands for the rest of an output that is too long.
_CUT = "..."


@dataclass(slots=True)
class _Story:
    """A completion so far."""

    request: SampleRequest
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    text: str = ""
    """Of these ids, which end with a turn or with a tool's output."""
    calls: int = 0
    turns: int = 0
    output: Future[str] | None = None
    """Of the call that it waits for."""
    policy_version: int = 0

    @property
    def room(self) -> int:
        """Tokens that are left of the budget."""
        return self.request.params.max_new_tokens - len(self.token_ids)


class TurnSampler:
    """A sampler whose completions may call tools.

    Args:
        inner: draws the turns.
        toolbox: the tools.
        tokenizer: encodes what tools say.
        processes: all of them take part in every call of the sampler inside, if it asks for that
            (vLLM's weights are pushed together); they then have equally many rounds.
    """

    def __init__(
        self,
        inner: ModelSampler,
        toolbox: Toolbox,
        tokenizer: Any,
        processes: ProcessGroup | None = None,
    ) -> None:
        self.inner = inner
        self._toolbox = toolbox
        self._tokenizer = tokenizer
        self._processes = processes or ProcessGroup()
        self._before: list[int] = []
        """The tokens before this turn of the completion whose tokens are shown."""

    def sample(self, requests: Sequence[SampleRequest]) -> Iterator[tuple[int, Completion]]:
        """Yield (request index, completion) as each finishes.

        Raises:
            PromptError, ModelError: as the sampler inside.
            ConfigError: a program cannot be isolated.
        """
        stories = {index: _Story(request) for index, request in enumerate(requests)}
        current = list(stories)
        # Also without requests: processes that share weights gather them together.
        while True:
            turns = [self._turn(stories[index]) for index in current]
            # The first slot's: of the longest budget, and the first of several.
            first = max(current, key=lambda index: stories[index].room, default=None)
            self._before = [] if first is None else stories[first].token_ids.copy()
            waiting = []
            for place, turn in self.inner.sample(turns):
                index = current[place]
                finished = self._take(stories[index], turn)
                if finished is None:
                    waiting.append(index)
                else:
                    yield index, finished
            current = []
            for index in waiting:
                finished = self._read(stories[index])
                if finished is None:
                    current.append(index)
                else:
                    yield index, finished
            if not any(self._processes.gather(bool(current))):
                return

    def _may_call(self, story: _Story) -> bool:
        """Tell whether a block ends the next turn: not after the last call, nor forever.

        Each round waits for all completions, and blocks without a tool's name end a turn, too.
        """
        most = self._toolbox.settings.calls
        return story.calls < most and story.turns - story.calls < most

    def _turn(self, story: _Story) -> SampleRequest:
        """Return the request of a story's next turn."""
        request = story.request
        # What ended a turn is needed to tell why; the completion's own stop is cut off at its end.
        params = replace(request.params, include_stop=True)
        if self._may_call(story):
            params = replace(params, stop=(*params.stop, BLOCK_END))
        if story.turns == 0:
            return replace(request, params=params)
        least = max(0, params.min_new_tokens - len(story.token_ids))
        prompt = request.prompt
        return SampleRequest(
            prompt=replace(
                prompt,
                text=prompt.text + story.text,
                token_ids=(*prompt.token_ids, *story.token_ids),
            ),
            params=replace(params, max_new_tokens=story.room, min_new_tokens=least),
            key=draw_seed(request.key, "turn", story.turns),
        )

    def _take(self, story: _Story, turn: Completion) -> Completion | None:
        """Add a turn to its story; return the completion if that has ended."""
        params = story.request.params
        by_tool = (
            turn.finish_reason is FinishReason.STOP_STRING
            and self._may_call(story)
            and turn.text.endswith(BLOCK_END)
        )
        story.turns += 1
        story.policy_version = turn.policy_version
        story.token_ids += turn.token_ids
        story.logprobs += turn.logprobs
        story.entropies += turn.entropies
        if by_tool and story.room > 0:
            # What the last token holds after the fence was drawn, too.
            story.text += self._text(turn.token_ids)
            story.output = self._toolbox.call(turn.text)
            return None
        text = turn.text
        if turn.finish_reason is FinishReason.STOP_STRING and not params.include_stop:
            ends = [stop for stop in params.stop if text.endswith(stop)]
            text = text.removesuffix(max(ends, key=len, default=""))
        reason = FinishReason.LENGTH if by_tool else turn.finish_reason
        return self._finished(story, story.text + text, reason)

    def _read(self, story: _Story) -> Completion | None:
        """Add the output that a story waits for; return the completion if no room is left."""
        if story.output is None:
            return None
        ids = self._encode(story.output.result())
        story.output = None
        story.calls += 1
        if len(ids) >= story.room:
            # Not a part of it: the model would have read something else than what was said.
            return self._finished(story, story.text, FinishReason.LENGTH)
        start = len(story.token_ids)
        story.spans.append((start, start + len(ids)))
        story.token_ids += ids
        story.logprobs += [0.0] * len(ids)
        if story.entropies:
            story.entropies += [0.0] * len(ids)
        story.text += self._text(ids)
        return None

    def _encode(self, said: str) -> list[int]:
        """Encode what a tool said; names of special tokens in it are mere text."""
        most = self._toolbox.settings.output_tokens
        ids = self._plain(output_block(said))
        if len(ids) > most:
            said_ids = self._plain(said.strip())
            frame = len(self._plain(output_block(_CUT)))
            kept = self._text(said_ids[: max(0, most - frame)]).rstrip("\ufffd")
            ids = self._plain(output_block(kept + _CUT))
        return ids

    def _plain(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(
            text, add_special_tokens=False, split_special_tokens=True
        )
        return ids

    def _text(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def _finished(self, story: _Story, text: str, reason: FinishReason) -> Completion:
        return Completion(
            token_ids=tuple(story.token_ids),
            logprobs=tuple(story.logprobs),
            text=text,
            finish_reason=reason,
            policy_version=story.policy_version,
            entropies=tuple(story.entropies),
            tool_spans=tuple(story.spans),
        )

    def show(self, on_tokens: Callable[[Sequence[int]], None] | None) -> None:
        """Have the ids of a completion so far shown while it is drawn; None: no longer."""
        if isinstance(self.inner, NativeSampler):
            self.inner.on_tokens = None
            if on_tokens is not None:
                self.inner.on_tokens = lambda ids: on_tokens([*self._before, *ids])

    # --- the rest is the inner sampler's ---

    @property
    def seconds(self) -> dict[str, float]:
        return dict(self.inner.seconds)

    @property
    def gap(self) -> float | None:
        return self.inner.gap

    @property
    def update_share(self) -> float | None:
        return self.inner.update_share

    def pinned(self) -> TurnSampler:
        """Return a sampler that stays with the weights as they are now; vLLM alone has one."""
        inner: Any = self.inner
        return TurnSampler(inner.pinned(), self._toolbox, self._tokenizer)

    def rest(self) -> None:
        self.inner.rest()

    def release(self) -> None:
        self.inner.release()


def innermost(sampler: Sampler) -> Sampler:
    """Return the sampler that draws tokens: the one inside, where there are turns."""
    return sampler.inner if isinstance(sampler, TurnSampler) else sampler
