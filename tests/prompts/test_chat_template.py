"""The chat template that a recipe can install: the same prompt in any program that loads it."""

from __future__ import annotations

import pytest
import tokenizer_fixtures as fixtures

from grouper.config.schema import PromptConfig, TagsConfig
from grouper.errors import PromptError
from grouper.prompts import find_stop_tokens, make_format
from grouper.types import Problem

PROBLEM = Problem(id="a/0", question="2+2?", answer="4", source="a", solution="2+2=4.")
TAGS = TagsConfig(reasoning_open="<work>", reasoning_close="</work>")


@pytest.mark.parametrize("make", [fixtures.no_template, fixtures.qwen25, fixtures.llama3])
@pytest.mark.parametrize("tags", [None, TAGS])
def test_the_generation_prompt_opens_the_tag(make, tags):
    tokenizer = make().tokenizer
    fmt = make_format(PromptConfig(format="tags", tags=tags, template="install"))
    fmt.install(tokenizer)
    prompt = fmt.render(PROBLEM, tokenizer)
    assert prompt.text == f"{fmt.system}\n\n2+2?\n{fmt.prefix}"
    assert fmt.prefix == (tags or TagsConfig()).reasoning_open
    # Whoever loads the tokenizer elsewhere need not know the instruction.
    elsewhere = tokenizer.apply_chat_template(
        [{"role": "user", "content": "2+2?"}], tokenize=False, add_generation_prompt=True
    )
    assert elsewhere == prompt.text


def test_the_stop_token_is_what_the_template_writes():
    tokenizer = fixtures.qwen25().tokenizer
    fmt = make_format(PromptConfig(format="tags", template="install"))
    fmt.install(tokenizer)
    assert find_stop_tokens(tokenizer, (), fmt).trained == tokenizer.eos_token_id
    turns = [
        {"role": "system", "content": 'Say "{{ yes }}".'},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a"},
    ]
    text = tokenizer.apply_chat_template(turns, tokenize=False)
    assert text == f'Say "{{{{ yes }}}}".\n\nq\na{tokenizer.eos_token}\n'


def test_an_instruction_of_any_text_survives_quoting():
    tokenizer = fixtures.no_template().tokenizer
    system = 'Löse "dies" {{ nicht }} {% so %}\n\\boxed{} – ‘…’ 数'
    fmt = make_format(PromptConfig(format="boxed", system=system, template="install"))
    fmt.install(tokenizer)
    assert fmt.render(PROBLEM, tokenizer).text == f"{system}\n\n2+2?\n"


def test_rendering_before_installing_is_refused():
    fmt = make_format(PromptConfig(format="tags", template="install"))
    with pytest.raises(PromptError, match=r"not installed.*install\(tokenizer\)"):
        fmt.render(PROBLEM, fixtures.qwen25().tokenizer)


def test_only_a_format_that_wants_it_installs():
    tokenizer = fixtures.no_template().tokenizer
    fmt = make_format(PromptConfig(format="tags"))
    fmt.install(tokenizer)
    assert not tokenizer.chat_template
    assert fmt.falls_back(tokenizer)
    assert not make_format(PromptConfig(format="r1-zero")).falls_back(tokenizer)
    assert not make_format(PromptConfig(template="plain")).falls_back(tokenizer)
