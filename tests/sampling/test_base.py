"""The shipped fake meets the protocol and its length limit; which tokens may end a completion."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tiny_models import ScriptedSampler, make_prompt

from grouper.sampling.base import Sampler, SampleRequest, StopStrings
from grouper.types import FinishReason, SamplingParams


def test_answers_are_cut_at_the_limit() -> None:
    sampler = ScriptedSampler(lambda request, index: "abcdef" if index else "ab")
    assert isinstance(sampler, Sampler)
    params = SamplingParams(max_new_tokens=4)
    wanted = [SampleRequest(prompt=make_prompt(0), params=params, key=0)] * 2
    short, long = (completion for _, completion in sampler.sample(wanted))
    assert (short.text, short.finish_reason) == ("ab", FinishReason.STOP_TOKEN)
    assert (long.text, long.finish_reason) == ("abcd", FinishReason.LENGTH)
    assert len(long.token_ids) == 4


class Words:
    """Leaves out a space that a text begins with, as SentencePiece does."""

    def decode(self, token_ids: Sequence[int], **_: bool) -> str:
        return "".join(("a", ":", " ", " b")[i] for i in token_ids).removeprefix(" ")

    def __len__(self) -> int:
        return 4


def test_the_space_that_a_token_begins_with_may_end_a_stop_string() -> None:
    watcher = StopStrings(Words(), (": ",))
    assert watcher.candidates == [False, False, True, True]
    assert watcher.completed([0, 1, 3])


@pytest.mark.parametrize(
    ("stops", "text", "with_stop", "without"),
    [
        (("</b>", "\n\n"), "2 + 2\n\n4", "2 + 2\n\n", "2 + 2"),  # one of several
        (("abcd", "bc"), "xabcde", "xabc", "xa"),  # the first to be complete
        (("bc", "abc"), "xabcde", "xabc", "x"),  # of two complete at once, the longer
    ],
)
def test_a_text_ends_with_the_stop_string_that_is_complete_first(
    stops: tuple[str, ...], text: str, with_stop: str, without: str
) -> None:
    watcher = StopStrings(Words(), stops)
    assert watcher.cut(text, include_stop=True) == with_stop
    assert watcher.cut(text, include_stop=False) == without
