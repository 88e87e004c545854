"""Sampling in turns: what is run, what is read, what is trained, and that it is the same again."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from gates import missing
from tiny_models import (
    LengthTools,
    LetterTokenizer,
    graded_rollouts,
    make_prompt,
    tiny_model,
)

from grouper.algorithms.batching import rollout_rows, step_batches
from grouper.algorithms.weighting import WEIGHTINGS, token_mean
from grouper.config.schema import GRPOConfig, ProgramsConfig, ToolsConfig
from grouper.models.policy import Policy
from grouper.models.process_group import ProcessGroup
from grouper.programs.runner import available_isolation
from grouper.sampling import turns
from grouper.sampling.base import SampleRequest, draw_seed
from grouper.sampling.native import NativeSampler
from grouper.sampling.tools import Toolbox
from grouper.sampling.turns import TurnSampler, innermost
from grouper.sampling.weights import SamplingWeights
from grouper.training.metrics import rollout_tallies
from grouper.training.update import grpo_objective
from grouper.types import (
    Completion,
    FinishReason,
    Problem,
    RolloutGroup,
    SamplingParams,
)

if available_isolation() != "seccomp":
    missing("this machine has no filter of system calls")


class CharacterTokenizer:
    """A token is a character's code point, but for one special token that has a name."""

    SPECIAL = "<|end|>"

    def encode(
        self, text: str, *, add_special_tokens: bool = True, split_special_tokens: bool = False
    ) -> list[int]:
        assert not add_special_tokens
        pieces = [text] if split_special_tokens else text.split(self.SPECIAL)
        ids: list[int] = []
        for number, piece in enumerate(pieces):
            ids += [0] * (number > 0) + [ord(character) for character in piece]
        return ids

    def decode(self, token_ids: Sequence[int], **_: bool) -> str:
        return "".join(chr(token) if token else self.SPECIAL for token in token_ids)


@dataclass
class Play:
    """A sampler that says its lines, one a turn, up to a stop string or the budget.

    Args:
        lines: of each problem.
    """

    lines: dict[str, list[str]]
    seconds: Any = None
    gap: float | None = None
    update_share: float | None = None

    def __post_init__(self) -> None:
        self.seconds = {"prefill": 0.0}
        self.said: dict[str, int] = {}
        self.asked: list[SampleRequest] = []

    def sample(self, requests: Sequence[SampleRequest]) -> Iterator[tuple[int, Completion]]:
        for index, request in reversed(list(enumerate(requests))):  # in any order
            self.asked.append(request)
            problem = request.prompt.problem_id
            turn = self.said.get(problem, 0)
            self.said[problem] = turn + 1
            text, reason = self.lines[problem][turn], FinishReason.STOP_TOKEN
            stops = [text.find(stop) + len(stop) for stop in request.params.stop if stop in text]
            if stops:
                text, reason = text[: min(stops)], FinishReason.STOP_STRING
            ids = [*map(ord, text)]
            if reason is FinishReason.STOP_TOKEN:
                ids.append(0)
            if len(ids) > request.params.max_new_tokens:
                ids = ids[: request.params.max_new_tokens]
                text, reason = text[: len(ids)], FinishReason.LENGTH
            yield (
                index,
                Completion(
                    token_ids=tuple(ids),
                    logprobs=(-1.0,) * len(ids),
                    entropies=(0.5,) * len(ids),
                    text=text,
                    finish_reason=reason,
                    policy_version=3,
                ),
            )

    def rest(self) -> None: ...

    def release(self) -> None: ...


@pytest.fixture(scope="module")
def toolbox() -> Iterator[Toolbox]:
    box = Toolbox(ToolsConfig(calls=2, output_tokens=100), ProgramsConfig())
    box.start()
    yield box
    box.close()


def play(
    toolbox: Any, *lines: str, problem: str = "a", **params: Any
) -> tuple[Completion, list[SampleRequest]]:
    """The completion of one problem whose model says these lines, and what was asked for."""
    inner = Play({problem: list(lines)})
    sampler = TurnSampler(inner, toolbox, CharacterTokenizer())  # type: ignore[arg-type]  # a fake
    prompt = replace(make_prompt(0, 3), problem_id=problem, text="Q", token_ids=(81,))
    settings = SamplingParams(**{"max_new_tokens": 500, **params})
    ((index, completion),) = sampler.sample([SampleRequest(prompt=prompt, params=settings, key=1)])
    assert index == 0
    return completion, inner.asked


def tool_text(completion: Completion) -> list[str]:
    tokenizer = CharacterTokenizer()
    return [tokenizer.decode(completion.token_ids[a:b]) for a, b in completion.tool_spans]


CALL = "Let me see.\n```python\nprint(6 * 7)\n```\n"


def test_a_block_is_run_and_its_output_is_read(toolbox: Toolbox) -> None:
    completion, asked = play(toolbox, CALL, "So it is 42.")
    assert completion.text == f"{CALL}```output\n42\n```\nSo it is 42."
    assert tool_text(completion) == ["```output\n42\n```\n"]
    assert completion.finish_reason is FinishReason.STOP_TOKEN
    assert completion.policy_version == 3
    # The second turn's prompt is all that came before, and its budget what is left.
    assert asked[1].prompt.token_ids == (81, *completion.token_ids[: completion.tool_spans[0][1]])
    used = completion.tool_spans[0][1]
    assert asked[1].params.max_new_tokens == 500 - used
    assert asked[1].key == draw_seed(1, "turn", 1)
    for values in (completion.logprobs, completion.entropies):
        assert [value != 0 for value in values] == list(completion.sampled)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("```python\nprint(1 / 0)\n```\n", "line 1, ZeroDivisionError: division by zero"),
        ("```python\nprint(7)\nx\n```\n", "7\nline 2, NameError: name"),
        ("```python\nx = 1\n```\n", "(no output)"),
        # What is printed can neither close the block nor be a special token.
        ("```python\nprint('`' * 3)\n```\n", "'''"),
        ("```python\nprint('<|end|>')\n```\n", "<|end|>"),
        ("```python\nraise ValueError('\\ud83d')\n```\n", "line 1, ValueError: ?"),
    ],
)
def test_what_a_tool_says(toolbox: Toolbox, text: str, said: str) -> None:
    completion, _ = play(toolbox, text, "Done.")
    (block,) = tool_text(completion)
    assert block.startswith(f"```output\n{said}")
    assert block.endswith("\n```\n")
    assert block.count("```") == 2
    assert 0 not in completion.token_ids[:-1]


def test_a_long_output_is_cut_to_its_tokens(toolbox: Toolbox) -> None:
    completion, _ = play(toolbox, "```python\nprint('ab' * 100)\n```\n", "Done.")
    ((start, end),) = completion.tool_spans
    assert 80 < end - start <= 100
    assert tool_text(completion)[0].endswith("...\n```\n")


@pytest.mark.parametrize(
    "lines",
    [
        # Neither a block without a name, nor another language, nor an open one is a call.
        ("```\nprint(1)\n```\n", "Done."),
        ("```json\n{}\n```\n", "Done."),
        ("```python\nprint(1)",),
        ("Done.",),
    ],
)
def test_what_calls_nothing(toolbox: Toolbox, lines: tuple[str, ...]) -> None:
    completion, _ = play(toolbox, *lines)
    assert completion.tool_spans == ()
    assert completion.text == "".join(lines)


def test_calls_are_bounded(toolbox: Toolbox) -> None:
    """After the last one a block is text like any other."""
    completion, asked = play(toolbox, CALL, CALL, CALL + "And so on.")
    assert len(completion.tool_spans) == 2
    assert completion.text.endswith(CALL + "And so on.")
    assert turns.BLOCK_END not in asked[-1].params.stop


def test_the_budget_holds_what_tools_say(toolbox: Toolbox) -> None:
    room = len(CALL) + len("```output\n42\n```\n")
    completion, _ = play(toolbox, CALL, "So it is 42.", max_new_tokens=room + 2)
    assert completion.finish_reason is FinishReason.LENGTH
    assert len(completion.token_ids) == room + 2
    assert completion.text.endswith("\nSo")
    # An output that leaves no room is left out whole.
    for budget in (room, room - 1, len(CALL)):
        completion, _ = play(toolbox, CALL, "So it is 42.", max_new_tokens=budget)
        assert completion.finish_reason is FinishReason.LENGTH
        assert completion.text == CALL
        assert completion.tool_spans == ()
        assert completion.policy_version == 3


def test_rounds_are_bounded(toolbox: Toolbox) -> None:
    """A block without a tool's name ends a turn, too, and each round waits for all completions."""
    completion, asked = play(toolbox, *["```\nx\n```\n"] * 4, "```\nx\n```\n" * 50)
    assert len(asked) <= 5
    assert completion.tool_spans == ()


def test_processes_have_as_many_rounds_as_each_other(toolbox: Toolbox) -> None:
    """vLLM's weights are pushed together: one that has finished still takes part."""
    others = iter([True, True, False])

    class Two(ProcessGroup):
        def gather(self, value: Any) -> list[Any]:
            return [value, next(others)]

    inner = Play({"a": ["Done."]})
    sampler = TurnSampler(inner, toolbox, CharacterTokenizer(), Two())  # type: ignore[arg-type]  # a fake
    calls: list[int] = []
    plain = inner.sample
    inner.sample = lambda requests: (calls.append(len(requests)), plain(requests))[1]  # type: ignore[method-assign]  # counted
    prompt = replace(make_prompt(0, 3), problem_id="a", text="Q", token_ids=(81,))
    request = SampleRequest(prompt=prompt, params=SamplingParams(max_new_tokens=50), key=1)
    assert len(list(sampler.sample([request]))) == 1
    assert calls == [1, 0, 0]


def test_what_is_shown_while_it_is_drawn_begins_with_the_turns_before(letters: Policy) -> None:
    inner = NativeSampler(SamplingWeights(letters), Letters(), stop_token_ids=(2,))
    sampler = TurnSampler(inner, LengthTools(), Letters())  # type: ignore[arg-type]  # a fake
    shown: list[tuple[int, ...]] = []
    sampler.show(lambda ids: shown.append(tuple(ids)))
    request = SampleRequest(
        prompt=make_prompt(0, 3), params=SamplingParams(max_new_tokens=60), key=draw_seed(0, 3)
    )
    ((_, completion),) = sampler.sample([request])
    assert completion.tool_spans
    assert all(completion.token_ids[: len(ids)] == ids for ids in shown)
    assert any(len(ids) > completion.tool_spans[0][1] for ids in shown)


@pytest.mark.parametrize("include_stop", [True, False])
def test_a_stop_string_of_the_format_still_ends_it(toolbox: Toolbox, include_stop: bool) -> None:
    completion, _ = play(
        toolbox, CALL, "So 42.\nUser: more", stop=("\nUser:",), include_stop=include_stop
    )
    assert completion.finish_reason is FinishReason.STOP_STRING
    assert completion.text.endswith("So 42." + "\nUser:" * include_stop)


def test_tokens_must_not_be_fewer_than_asked_for(toolbox: Toolbox) -> None:
    _, asked = play(toolbox, CALL, "So it is 42.", min_new_tokens=100)
    used = len(CALL) + len("```output\n42\n```\n")
    assert [request.params.min_new_tokens for request in asked] == [100, 100 - used]


# --- functions of the user -----------------------------------------------------------------------

FUNCTIONS = '''
import time

def double(number: int) -> int:
    """Twice a number."""
    return 2 * number

def add(a, b):
    return a + b

def echo(text):
    return text

def fail(text):
    raise KeyError(text)

def strange(text):
    return {1: object}

def python(text):
    return text

def leave(text):
    raise SystemExit(3)

async def later(text):
    return text

named = lambda text: text.upper()

def sleep(text):
    time.sleep(60)
'''


@pytest.fixture
def file(tmp_path: Any) -> Any:
    path = tmp_path / "tools.py"
    path.write_text(FUNCTIONS)
    return path


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ('```double\n{"number": 21}\n```\n', "42"),
        ('```add\n{"a": 40, "b": 2}\n```\n', "42"),
        ("```add\n40 and 2\n```\n", "error: ValueError: the arguments have to be a JSON object"),
        ("```echo\nas it is\n```\n", "as it is"),
        ("```fail\nx\n```\n", "error: KeyError"),
        ("```leave\nx\n```\n", "error: SystemExit"),
        ("```named\nx\n```\n", "X"),
        ("```strange\nx\n```\n", "{"),
        ("```python\nprint(42)\n```\n", "42"),
    ],
)
def test_functions_of_the_user_are_tools_by_their_names(file: Any, block: str, said: str) -> None:
    names = ("double", "add", "echo", "fail", "strange", "leave", "named")
    box = Toolbox(
        ToolsConfig(functions=tuple(f"{file}:{name}" for name in names)), ProgramsConfig()
    )
    completion, _ = play(box, block, "Done.")
    assert tool_text(completion)[0].startswith(f"```output\n{said}")
    box.close()


def test_a_function_that_hangs_is_left_behind(file: Any, caplog: pytest.LogCaptureFixture) -> None:
    """And the next one is called."""
    names = tuple(f"{file}:{name}" for name in ("sleep", "echo"))
    box = Toolbox(ToolsConfig(functions=names, function_seconds=0.1), ProgramsConfig())
    completion, _ = play(box, "```sleep\nx\n```\n", "```echo\nhere\n```\n", "Done.")
    first, second = tool_text(completion)
    assert first.startswith("```output\nerror: no answer within 0.1 s")
    assert second.startswith("```output\nhere")
    assert "The tool sleep gave no answer" in caplog.text
    box.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork")
def test_a_forked_process_calls_tools_of_its_own(file: Any) -> None:
    """Its copies of our threads do not run, and our processes of programs are not its own."""
    box = Toolbox(ToolsConfig(functions=(f"{file}:echo",)), ProgramsConfig())
    blocks = ("```echo\nhere\n```\n", "```python\nprint(6 * 7)\n```\n")
    for block in blocks:
        assert box.call(block).result(timeout=30)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        said = [box.call(block).result(timeout=30).strip() for block in blocks]
        os.write(write, " ".join(said).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answers:
        assert answers.read() == "here 42"
    os.waitpid(child, 0)
    box.close()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("python", "two tools with the name python"),
        ("missing", "has no function 'missing'"),
        ("later", "is a coroutine"),
    ],
)
def test_a_function_that_cannot_be_a_tool_is_refused(file: Any, name: str, reason: str) -> None:
    with pytest.raises(Exception, match=reason):
        Toolbox(ToolsConfig(functions=(f"{file}:{name}",)), ProgramsConfig())


# --- with a model --------------------------------------------------------------------------------


class Letters(LetterTokenizer):
    def encode(self, text: str, **_: bool) -> list[int]:
        return [ord(character) - 32 for character in text]


@pytest.fixture
def letters(monkeypatch: pytest.MonkeyPatch) -> Policy:
    """A model of single letters, where A ends a block."""
    monkeypatch.setattr(turns, "BLOCK_END", "A")
    monkeypatch.setattr(turns, "output_block", lambda said: f"<{said}>")
    # A flatter model: every letter comes up.
    return Policy(tiny_model(scale=1.0))


def draw(policy: Policy, slots: int = 64, **params: Any) -> list[Completion]:
    inner = NativeSampler(SamplingWeights(policy), Letters(), stop_token_ids=(2,), max_slots=slots)
    sampler = TurnSampler(inner, LengthTools(), Letters())  # type: ignore[arg-type]  # a fake
    settings = SamplingParams(**{"max_new_tokens": 60, **params})
    requests = [
        SampleRequest(prompt=make_prompt(i % 3, 3 + i % 3), params=settings, key=draw_seed(0, i))
        for i in range(12)
    ]
    found = dict(sampler.sample(requests))
    return [found[index] for index in range(len(requests))]


def groups_of(completions: Sequence[Completion]) -> list[RolloutGroup]:
    groups = []
    for number in range(3):
        rollouts = graded_rollouts(completions[number::3])
        prompt = make_prompt(number, 3 + number)
        problem = Problem(id=prompt.problem_id, question="q", answer="a", source="s")
        groups.append(
            RolloutGroup(problem=problem, prompt=prompt, params=SamplingParams(), rollouts=rollouts)
        )
    return groups


def test_the_same_request_is_the_same_completion_whatever_runs_beside_it(letters: Policy) -> None:
    drawn = draw(letters)
    assert sum(len(completion.tool_spans) for completion in drawn) > 5
    again = draw(letters, slots=3)
    assert [c.token_ids for c in again] == [c.token_ids for c in drawn]
    assert [c.text for c in again] == [c.text for c in drawn]


def test_logprobs_are_those_of_a_forward_over_the_whole_text(letters: Policy) -> None:
    """Float32: 1e-5, as without tools; what a tool wrote is a target of nothing."""
    drawn = draw(letters)
    rows = rollout_rows(groups_of(drawn))
    assert rows is not None
    with torch.no_grad():
        logprobs = letters(rows).logprobs
    assert rows.sampler_logprobs is not None
    assert (logprobs - rows.sampler_logprobs)[rows.mask].abs().max() < 1e-5
    flat = [
        completion
        for group in groups_of(drawn)
        for completion in (rollout.completion for rollout in group.rollouts)
    ]
    for row, completion in enumerate(flat):
        count = len(completion.token_ids)
        assert rows.mask[row, :count].tolist() == list(completion.sampled)
        assert not rows.mask[row, count:].any()
    # A tool's tokens are read all the same.
    assert bool((rows.is_completion & ~rows.mask).any())


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_what_a_tool_wrote_has_no_gradient_and_counts_in_no_denominator(
    letters: Policy, weighting: str, ratio: str
) -> None:
    rows = rollout_rows(groups_of(draw(letters)))
    assert rows is not None
    torch.manual_seed(0)
    rows = replace(rows, advantages=torch.randn(rows.rows))
    (batch,) = step_batches(rows, WEIGHTINGS[weighting], weighting_constant=60.0)
    assert not batch.weights[~batch.mask].any()
    if weighting != "constant":
        assert float(batch.weights.sum()) == pytest.approx(1.0)
    objective = grpo_objective(GRPOConfig.model_validate({"ratio": ratio}))
    outputs = letters(batch)
    outputs.logprobs.retain_grad()
    loss, _ = objective.loss(outputs, batch)
    loss.sum().backward()
    gradient = outputs.logprobs.grad
    assert gradient is not None
    assert not gradient[~batch.mask].any()
    assert gradient[batch.mask].any()


def test_the_loss_does_not_depend_on_what_the_sampler_said_of_a_tools_tokens(
    letters: Policy,
) -> None:
    rows = rollout_rows(groups_of(draw(letters)))
    assert rows is not None
    assert rows.sampler_logprobs is not None
    (batch,) = step_batches(replace(rows, advantages=torch.ones(rows.rows)), token_mean)
    noise = torch.where(batch.mask, batch.sampler_logprobs, torch.nan)
    objective = grpo_objective(GRPOConfig())
    losses = [
        objective.loss(letters(changed), changed)[0].sum()
        for changed in (batch, replace(batch, sampler_logprobs=noise))
    ]
    assert losses[0] == losses[1]


def test_metrics_count_tools_apart(letters: Policy) -> None:
    drawn = draw(letters)
    tallies = rollout_tallies(groups_of(drawn), [[0.0] * 4] * 3)
    calls = sum(len(completion.tool_spans) for completion in drawn)
    said = sum(end - start for completion in drawn for start, end in completion.tool_spans)
    everything = sum(len(completion.token_ids) for completion in drawn)
    assert tallies["tools/calls"].sum == calls
    assert tallies["tools/tokens"].sum == said
    assert tallies["completion/tokens"].sum == everything - said
    assert tallies["policy/logprob"].count == everything - said


def test_the_sampler_inside_is_found(letters: Policy) -> None:
    inner = NativeSampler(SamplingWeights(letters), Letters(), stop_token_ids=(2,))
    sampler = TurnSampler(inner, LengthTools(), Letters())  # type: ignore[arg-type]  # a fake
    assert innermost(sampler) is inner
    assert innermost(inner) is inner
    assert (sampler.seconds, sampler.gap, sampler.update_share) == ({"prefill": 0.0}, None, None)
    sampler.rest()
    sampler.release()


def test_without_requests_the_weights_are_gathered_all_the_same(letters: Policy) -> None:
    weights = SamplingWeights(letters, torch.float32, copy_now=True)
    letters.version += 1
    inner = NativeSampler(weights, Letters(), stop_token_ids=(2,))
    assert list(TurnSampler(inner, LengthTools(), Letters()).sample([])) == []  # type: ignore[arg-type]  # a fake
    assert weights._copy is not None
    assert weights._copy.version == letters.version
