"""The probe for contamination: by hand, and on a model that has learned a set by heart."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import LetterTokenizer, tiny_model

from grouper.evaluation.contamination import (
    Completed,
    Probe,
    is_suspicious,
    probe_questions,
    rouge_l,
    split_question,
)
from grouper.models.policy import Policy
from grouper.sampling.native import NativeSampler
from grouper.sampling.weights import SamplingWeights

WORDS = st.lists(st.text("abc", min_size=1, max_size=3), max_size=12)


@given(words=WORDS, spaces=st.sampled_from([" ", "\n", "  "]))
def test_the_parts_are_the_question(words: list[str], spaces: str) -> None:
    question = spaces.join(words)
    split = split_question(question)
    if split is None:
        assert len(words) - int(0.6 * len(words)) < 6 or not words
        return
    assert split[0] + split[1] == question
    assert len(split[0].split()) == int(0.6 * len(words))
    assert split[1][0].isspace()


def longest_common(ours: list[str], theirs: list[str]) -> int:
    if not ours or not theirs:
        return 0
    if ours[0] == theirs[0]:
        return 1 + longest_common(ours[1:], theirs[1:])
    return max(longest_common(ours[1:], theirs), longest_common(ours, theirs[1:]))


@given(
    ours=st.lists(st.sampled_from("ab"), max_size=7),
    theirs=st.lists(st.sampled_from("ab"), max_size=7),
)
def test_rouge_is_the_recursive_definition(ours: list[str], theirs: list[str]) -> None:
    found = rouge_l(" ".join(ours), " ".join(theirs))
    if not ours or not theirs:
        assert found == 0
        return
    assert found == pytest.approx(2 * longest_common(ours, theirs) / (len(ours) + len(theirs)))


def probe_of(exact: int, count: int) -> Probe:
    completed = tuple(
        Completed(problem_id=str(n), shown="", ending=" a b", written="a b" if n < exact else "a")
        for n in range(count)
    )
    return Probe(name="set", completed=completed)


def test_what_can_be_guessed_is_no_evidence() -> None:
    assert probe_of(3, 40).exact == 0.075
    assert probe_of(3, 40).similarity == pytest.approx((3 + 37 * 2 / 3) / 40)
    assert not is_suspicious(probe_of(3, 40), probe_of(1, 40))
    assert is_suspicious(probe_of(30, 40), probe_of(1, 40))
    assert not is_suspicious(probe_of(30, 40), probe_of(28, 40))


def texts(seed: int) -> list[tuple[str, str]]:
    """Twenty questions of random words."""
    generator = torch.Generator().manual_seed(seed)
    letters = torch.randint(0, 26, (20, 20, 3), generator=generator) + ord("a")
    return [
        (f"{seed}/{n}", " ".join("".join(map(chr, word)) for word in question))
        for n, question in enumerate(letters.tolist())
    ]


def encode(text: str) -> list[int]:
    return [ord(letter) - 32 for letter in text]


@pytest.mark.slow
def test_a_set_learned_by_heart_is_told_from_one_that_was_never_seen() -> None:
    """Above 95 % against below 2 %."""
    model = tiny_model("qwen3")
    seen, fresh = texts(1), texts(2)
    rows = torch.tensor([encode(text) for _, text in seen])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(300):
        loss = model(rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    sampler = NativeSampler(
        SamplingWeights(Policy(model)), LetterTokenizer(), stop_token_ids=(2,), max_length=256
    )
    probes = [
        probe_questions(name, questions, sampler=sampler, encode=encode)
        for name, questions in (("seen", seen), ("fresh", fresh))
    ]
    assert probes[0].exact > 0.95
    assert probes[1].exact < 0.02
    assert is_suspicious(*probes)
    assert not is_suspicious(probes[1], probes[0])
