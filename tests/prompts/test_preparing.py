"""What does not fit, or would train nothing, is listed and left out; nothing is cut (P16-P18)."""

from __future__ import annotations

import pytest
import tokenizer_fixtures as fixtures

from grouper.errors import PromptError
from grouper.prompts import FORMATS
from grouper.prompts.preparing import prepare_demonstrations, prepare_prompts
from grouper.prompts.rendering import demonstrate
from grouper.types import Problem

COMPACT = FORMATS["compact"]


def problem(name, question="2+2?", solution="2+2=4."):
    return Problem(id=name, question=question, answer="4", source="a", solution=solution)


@pytest.fixture
def fixture():
    return fixtures.drops_system()


def test_prompts_that_do_not_fit_are_listed_and_the_others_are_whole(fixture):
    problems = [problem("a/0"), problem("a/1", question="x" * 50), problem("a/2")]
    # <|user|> 2+2? <|end|> <|assistant|> is 7 tokens
    prepared = prepare_prompts(problems, COMPACT, fixture.tokenizer, max_prompt_tokens=7)
    assert [p.id for p, _ in prepared.items] == ["a/0", "a/2"]
    assert {len(prompt.token_ids) for _, prompt in prepared.items} == {7}
    (dropped,) = prepared.dropped
    assert (dropped.problem_id, dropped.reason) == ("a/1", "the prompt has 53 tokens, above 7")


def test_demonstrations_that_would_train_nothing_or_do_not_fit_are_listed(fixture):
    stop = fixture.id("<|end|>")
    problems = [
        problem("fits"),
        problem("no-solution", solution=None),
        problem("long-prompt", question="x" * 50),
        problem("long-completion", solution="x" * 99),
        problem("holds-the-stop-token", solution="2+2=4.<|end|>"),
    ]
    prepared = prepare_demonstrations(
        problems,
        COMPACT,
        fixture.tokenizer,
        stop,
        max_prompt_tokens=20,
        max_completion_tokens=60,
    )
    ((kept, demonstration),) = prepared.items
    assert kept.id == "fits"
    assert demonstration.token_ids[-1] == stop
    reasons = {d.problem_id: d.reason for d in prepared.dropped}
    assert set(reasons) == {p.id for p in problems[1:]}
    assert "no worked solution" in reasons["no-solution"]
    assert "prompt has 53 tokens" in reasons["long-prompt"]
    assert "completion has" in reasons["long-completion"]
    assert "stop token" in reasons["holds-the-stop-token"]


def test_the_length_limit_counts_the_stop_token(fixture):
    stop = fixture.id("<|end|>")
    exact = len(demonstrate(problem("a/0"), COMPACT, fixture.tokenizer, stop).token_ids)

    def prepare(limit):
        return prepare_demonstrations(
            [problem("a/0")],
            COMPACT,
            fixture.tokenizer,
            stop,
            max_prompt_tokens=20,
            max_completion_tokens=limit,
        )

    assert len(prepare(exact).items) == 1
    with pytest.raises(PromptError, match="no demonstration is left of 1"):
        prepare(exact - 1)


def test_nothing_left_is_an_error_that_shows_the_first_reason(fixture):
    with pytest.raises(PromptError, match=r"a/0: the prompt has 7 tokens, above 3"):
        prepare_prompts([problem("a/0")], COMPACT, fixture.tokenizer, max_prompt_tokens=3)


def test_a_template_that_fails_everywhere_is_told(fixture):
    fixture.tokenizer.chat_template = "{{ raise_exception('broken') }}"
    with pytest.raises(PromptError, match="broken"):
        prepare_demonstrations(
            [problem("a/0")], COMPACT, fixture.tokenizer, 0, max_prompt_tokens=20
        )


@pytest.mark.parametrize(
    ("percentile", "kept"), [(None, 10), (100, 10), (90, 9), (50, 5), (0.1, 1)]
)
def test_prompts_above_a_percentile_of_the_lengths_are_dropped(fixture, percentile, kept):
    problems = [problem(f"a/{i}", question="x" * (i + 1)) for i in range(10)]
    prepared = prepare_prompts(
        problems, COMPACT, fixture.tokenizer, max_prompt_tokens=99, max_percentile=percentile
    )
    assert [p.id for p, _ in prepared.items] == [f"a/{i}" for i in range(kept)]
    assert len(prepared.dropped) == 10 - kept
    if percentile == 90:
        assert (
            prepared.dropped[0].reason == "the prompt has 13 tokens, above 12.1, the percentile 90"
        )


def test_prompts_that_do_not_fit_play_no_part_in_the_percentile(fixture):
    problems = [problem(f"a/{i}", question="x" * (i + 1)) for i in range(10)]
    prepared = prepare_prompts(
        problems, COMPACT, fixture.tokenizer, max_prompt_tokens=8, max_percentile=50
    )
    assert [len(prompt.token_ids) for _, prompt in prepared.items] == [4, 5, 6]


def test_demonstrations_longer_than_allowed_in_all_are_listed(fixture):
    stop = fixture.id("<|end|>")
    problems = [problem("short"), problem("long", solution="x" * 30)]
    whole = prepare_demonstrations(
        problems, COMPACT, fixture.tokenizer, stop, max_prompt_tokens=99
    ).items
    sizes = [len(d.prompt.token_ids) + len(d.token_ids) for _, d in whole]
    prepared = prepare_demonstrations(
        problems, COMPACT, fixture.tokenizer, stop, max_prompt_tokens=99, max_tokens=sizes[0]
    )
    assert [p.id for p, _ in prepared.items] == ["short"]
    (dropped,) = prepared.dropped
    assert dropped.reason == f"the demonstration has {sizes[1]} tokens, above {sizes[0]}"
