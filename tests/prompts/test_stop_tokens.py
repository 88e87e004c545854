"""The stop token is what the template writes behind the answer (P16, T6)."""

from __future__ import annotations

import pytest
import tokenizer_fixtures as fixtures

from grouper.config.schema import PromptConfig
from grouper.errors import PromptError
from grouper.prompts import FORMATS, find_stop_tokens, make_format

XML = FORMATS["xml"]


@pytest.mark.parametrize(
    ("name", "trained", "others"),
    [
        ("qwen25", "<|im_end|>", ["<|endoftext|>"]),
        ("llama3", "<|eot_id|>", ["<|end_of_text|>", "<|eom_id|>"]),
        ("gemma", "<end_of_turn>", ["<eos>"]),
        ("mistral", "</s>", []),
        ("strips_thinking", "<|im_end|>", []),
        ("drops_system", "<|end|>", []),
        ("no_template", "<eos>", []),
    ],
)
def test_the_trained_stop_token_and_all_that_end_a_completion(name, trained, others):
    fixture = getattr(fixtures, name)()
    stop = find_stop_tokens(fixture.tokenizer, fixture.generation_eos, XML)
    assert stop.trained == fixture.id(trained)
    assert stop.all == (stop.trained, *(fixture.id(token) for token in others))


def test_plain_text_ends_in_eos_although_there_is_a_template():
    fixture = fixtures.qwen25()
    plain = make_format(PromptConfig(format="xml", template="plain"))
    stop = find_stop_tokens(fixture.tokenizer, fixture.generation_eos, plain)
    assert stop.trained == fixture.id("<|endoftext|>")
    assert set(stop.all) == set(fixture.generation_eos)


def test_a_template_without_a_token_behind_the_answer_falls_back_to_eos():
    fixture = fixtures.qwen25()
    fixture.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}\n\n{% endfor %}"
    stop = find_stop_tokens(fixture.tokenizer, (), XML)
    assert stop.trained == fixture.tokenizer.eos_token_id


def test_a_stop_token_known_only_to_the_generation_config_is_used():
    fixture = fixtures.no_template(eos=None)
    assert find_stop_tokens(fixture.tokenizer, (7,), XML).all == (7,)


def test_no_stop_token_is_refused_with_what_to_do():
    fixture = fixtures.no_template(eos=None)
    with pytest.raises(PromptError, match=r"no stop token.*generation_config\.json"):
        find_stop_tokens(fixture.tokenizer, (), XML)
