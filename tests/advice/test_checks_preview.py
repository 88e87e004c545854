"""The cause of equal rewards is named, each from samples that show it and nothing else."""

from __future__ import annotations

import itertools
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
from tiny_models import ScriptedSampler

from grouper import api
from grouper.advice.checks import Samples, find, tags_in, tokenization
from grouper.config.schema import DifficultyConfig, GRPOConfig, RewardConfig
from grouper.grading import grade
from grouper.prompts import FORMATS
from grouper.rewards import build_rewards
from grouper.training.prepare import Prepared
from grouper.types import Problem, Prompt, Reward, SamplingParams


class FakePrepared(SimpleNamespace):
    """As much of what is prepared as a test gives."""

    text = Prepared.text


TAGS = FORMATS["tags"]  # the prompt opens <start_working_out>
STOP = (0,)


class Codes:
    """Every character is its code point; what stands in `lost` is written as a question mark."""

    bos_token_id = None
    eos_token_id = 0
    chat_template = None

    def __init__(self, lost: str = "") -> None:
        self.lost = lost

    def encode(self, text, *, add_special_tokens=True):
        return [ord("?") if c in self.lost else ord(c) for c in text]

    def decode(self, token_ids, *, skip_special_tokens=False):
        return "".join(map(chr, token_ids))

    def get_added_vocab(self):
        return {}


class RealGrader:
    def submit(self, text, reference):
        future: Future = Future()
        future.set_result(grade(text, reference, TAGS.contract))
        return future


def answer(value, working="w"):
    return f"{working}<end_working_out><SOLUTION>{value}</SOLUTION>"


def looked_at(
    texts,
    *,
    config=None,
    tokenizer=None,
    rewards=("correctness",),
    skip_sft=False,
    problems=1,
    **params,
):
    tokenizer = tokenizer or Codes()
    problem = Problem(id="p/0", question="2+2?", answer="4", source="p")
    text = TAGS.plain_prompt(problem.question)
    prompt = Prompt(
        problem_id="p/0", text=text, token_ids=tuple(map(ord, text)), prefix=TAGS.prefix
    )
    given = itertools.cycle(texts)
    recipe = SimpleNamespace(seed=0, grpo=config or GRPOConfig(), skip_sft=skip_sft)
    train = tuple(
        (replace(problem, id=f"p/{n}"), replace(prompt, problem_id=f"p/{n}"))
        for n in range(problems)
    )
    prepared = FakePrepared(
        recipe=recipe,
        context=None,
        train=train,
        rewards=build_rewards([RewardConfig(name=name) for name in rewards], TAGS),
        format=TAGS,
        prompt=prompt,
        tokenizer=tokenizer,
        stop_tokens=STOP,
        vocabulary=2000,
        grader=RealGrader(),
        samplers=SimpleNamespace(
            over=lambda policy: ScriptedSampler(lambda request, index: next(given))
        ),
        training_params=lambda: SamplingParams(**{"temperature": 1.0, **params}),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "_loaded", lambda *_, **__: nullcontext((prepared, None)))
        patch.setattr(api, "load_part", lambda *_: None)
        samples = len(texts) // problems
        return api.preview(recipe, "model", samples=samples, problems=problems)


def named(seen):
    return [cause.name for cause in find(seen)]


def test_nothing_stands_in_the_way():
    seen = looked_at([answer(4), answer(5), answer(4, "x"), answer(4)])
    assert named(seen) == []
    assert seen.signal == (True,)
    assert seen.reward_variance == pytest.approx(3 / 16)
    assert seen.diversity == pytest.approx(2 / 3)
    assert seen.certainty == pytest.approx(0.3679, abs=1e-4)
    # A problem without any reward has no part in the mean.
    (group,) = seen.groups
    unscored = Reward(components={"judge": None}, weights={"judge": 1.0})
    alone = replace(group, rollouts=tuple(replace(r, reward=unscored) for r in group.rollouts))
    assert replace(seen, groups=(group, alone)).reward_variance == seen.reward_variance


SAME = [answer(5)] * 3
SHORT = {"max_new_tokens": 4}


@pytest.mark.parametrize(
    ("texts", "params", "name", "told"),
    [
        (SAME, {"temperature": 0.1}, "temperature", "too low"),
        (SAME, {"temperature": 1.0}, "certain", "mean probability of 0.368"),
        (SAME, {"temperature": 1.0, "top_k": 1}, "temperature", "leave no choice"),
        (["I say 4", "I say 5", "4!"], {}, "tags", "<end_working_out>, <SOLUTION>, </SOLUTION>"),
        ([answer(4), answer(4, "x")], {}, "equal rewards", "all 2 are right"),
        ([answer(5), answer(6)], {}, "equal rewards", "all 2 are wrong"),
        (
            [answer(5, "abcd"), answer(6, "efgh")],
            SHORT,
            "truncated",
            "all 2 samples are truncated at 4 tokens",
        ),
    ],
)
def test_the_cause_of_equal_rewards_is_named(texts, params, name, told):
    seen = looked_at(texts, **params)
    assert named(seen) == [name]
    assert told in find(seen)[0].what
    assert find(seen)[0].fix
    assert seen.signal == (False,)
    assert seen.reward_variance == 0


def test_samples_that_never_end_are_named_even_where_rewards_differ():
    """U17: they may differ by accident."""
    room = len(answer(4)) + 2
    seen = looked_at([answer(4) + " and so on", answer(5) + " and so on"], max_new_tokens=room)
    assert seen.signal == (True,)
    assert named(seen) == ["truncated"]


def test_a_low_temperature_is_named_where_all_samples_are_cut_off_too():
    """More room alone would not make them differ."""
    seen = looked_at(SAME, temperature=0.1, **SHORT)
    assert named(seen) == ["truncated", "temperature"]


def test_every_cause_is_named_with_its_count():
    """Five of six samples were truncated, and only `equal rewards` was told."""
    long = [answer(5, working="abcdefghijkl"[:n] * 9) for n in range(7, 12)]
    seen = looked_at([*long, answer(6)], max_new_tokens=len(answer(6)) + 2)
    causes = {cause.name: str(cause) for cause in find(seen)}
    assert "5 of 6 samples are truncated at" in causes["truncated"]
    assert "all 6 are wrong" in causes["equal rewards"]
    # Two of three samples that end have no tags.
    seen = looked_at(["I say 4", "So 5", answer(6)])
    causes = {cause.name: str(cause) for cause in find(seen)}
    assert "</SOLUTION> in 2" in causes["tags"]
    assert "all 3 are wrong" in causes["equal rewards"]
    # The samples of one problem are alike, and those of the other are not.
    seen = looked_at([answer(5), answer(5), answer(6), answer(7)], problems=2)
    causes = {cause.name: str(cause) for cause in find(seen)}
    assert "on 1 of 2 problems the samples are all the same text" in causes["certain"]
    assert "all 4 are wrong" in causes["equal rewards"]


@pytest.mark.parametrize(
    ("texts", "settings", "proposed", "left_out"),
    [
        ([answer(5), answer(6)], {"skip_sft": True}, "skip_sft: false", "SFT longer"),
        ([answer(5), answer(6)], {"skip_sft": False}, "train SFT longer", "skip_sft: false"),
        ([answer(5), answer(6)] * 16, {"problems": 16}, "choose easier", "--problems 16"),
        ([answer(4), answer(4, "x")], {}, "grpo.difficulty", "easier"),
        (
            [answer(4), answer(4, "x")],
            {"config": GRPOConfig(difficulty=DifficultyConfig())},
            "harder",
            "grpo.difficulty",
        ),
        (["I say 4", "I say 5"], {"skip_sft": True}, "skip_sft: false", "prompt.system"),
        (SAME, {"temperature": 1.0, "skip_sft": True}, "temperature", "SFT"),
    ],
)
def test_no_remedy_is_proposed_that_is_in_force(texts, settings, proposed, left_out):
    fixes = " ".join(cause.fix for cause in find(looked_at(texts, **settings)))
    assert proposed.lower() in fixes.lower()
    assert left_out not in fixes


def test_a_difference_that_teaches_nothing_is_none():
    """Rewards for the format differ, but no sample is right and only then they count."""
    texts = [answer(5), "no tags", answer(6) + "?"]
    seen = looked_at(texts, rewards=("correctness", "format"))
    assert seen.reward_variance > 0
    assert named(seen) == ["tags", "equal rewards"]
    assert "require_correct_in_group" in find(seen)[1].what
    assert "grpo.require_correct_in_group: false" in find(seen)[1].fix
    free = GRPOConfig(require_correct_in_group=False)
    assert named(looked_at(texts, rewards=("correctness", "format"), config=free)) == []


def test_right_and_wrong_paid_alike_points_at_the_rewards():
    seen = looked_at([answer(4), answer(5)], rewards=("format",))
    told = find(seen)[0].what
    assert "1 of 2 are right, but within no problem do the rewards differ" in told


def test_a_broken_tokenizer_is_told_even_where_rewards_differ():
    seen = looked_at([answer(4), answer(5)], tokenizer=Codes(lost="_"))
    assert named(seen) == ["tokenization"]
    assert "does not survive" in find(seen)[0].what


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"stop_tokens": (ord("S"),)}, "holds a stop token"),
        ({"stop_tokens": (5000,)}, "outside the model's 2000"),
        ({"prompt": Prompt(problem_id="p", text="q", token_ids=(81,), prefix=TAGS.prefix)}, "ends"),
        ({"tokenizer": Codes(lost="<")}, "'<start_working_out>' does not survive"),
    ],
)
def test_what_a_tokenizer_cannot_do(changes, told):
    text = TAGS.plain_prompt("q")
    usual = {
        "format": TAGS,
        "tokenizer": Codes(),
        "stop_tokens": STOP,
        "vocabulary": 2000,
        "prompt": Prompt(
            problem_id="p", text=text, token_ids=tuple(map(ord, text)), prefix=TAGS.prefix
        ),
    }

    def found(parts):
        samples = Samples(groups=(), signal=(), prepared=FakePrepared(**parts))
        return list(tokenization(samples))

    assert found(usual) == []
    (cause,) = found(usual | changes)
    assert told in cause.what


def test_tags_that_the_prompt_opens_count_and_boxes_are_looked_for():
    assert tags_in("x</SOLUTION>", TAGS) == {
        "<start_working_out>": True,
        "<end_working_out>": False,
        "<SOLUTION>": False,
        "</SOLUTION>": True,
    }
    assert tags_in(r"\boxed{4}", FORMATS["boxed"]) == {"\\boxed": True}
    assert not any(tags_in("", replace(TAGS, prefix="")).values())
