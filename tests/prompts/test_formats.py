"""Each format renders what it should, and its completion holds its own contract."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import tokenizer_fixtures as fixtures

from grouper.algorithms.batching import demonstration_batch
from grouper.algorithms.weighting import token_mean
from grouper.config.schema import PromptConfig, TagsConfig
from grouper.errors import PromptError
from grouper.grading import grade
from grouper.prompts import FORMATS, make_format
from grouper.prompts.formats import warn_about_system, with_plain_stops
from grouper.prompts.rendering import completion_text, demonstrate, render, uses_chat
from grouper.types import AnswerKind, Problem

PROBLEM = Problem(
    id="a/0",
    question="2+2?",
    answer="4",
    source="a",
    solution="2+2=4.",
    program="print(2 + 2)",
)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("xml", "<reasoning>\n2+2=4.\n</reasoning>\n<answer>\n4\n</answer>"),
        ("compact", "<reasoning>2+2=4.</reasoning><answer>4</answer>"),
        ("think", "<think>\n2+2=4.\n</think>\n\n<answer>\n4\n</answer>"),
        ("r1-zero", " 2+2=4. </think> <answer> 4 </answer>"),
        ("tags", "2+2=4.<end_working_out><SOLUTION>4</SOLUTION>"),
        ("boxed", "2+2=4.\n\nThe final answer is \\boxed{4}."),
        ("question-only", "\n2+2=4.\n\nThe final answer is \\boxed{4}."),
        ("gsm8k-0-shot", " 2+2=4.\n#### 4"),
        ("gsm8k-5-shot", " 2+2=4.\n#### 4"),
        (
            "minerva-4-shot",
            " 2+2=4.\nFinal Answer: The final answer is $4$. I hope it is correct.",
        ),
        ("python-tool", "2+2=4.\n\nThe final answer is \\boxed{4}."),
        ("program", "```python\nprint(2 + 2)\n```"),
        ("program-3-shot", "```python\nprint(2 + 2)\n```"),
    ],
)
def test_completion_text(name, text):
    assert completion_text(PROBLEM, FORMATS[name]) == text


def test_every_format_is_tested_above():
    assert set(FORMATS) == {
        *("xml", "compact", "think", "r1-zero", "tags", "boxed", "question-only"),
        *("gsm8k-0-shot", "gsm8k-5-shot", "minerva-4-shot"),
        *("program", "program-3-shot", "python-tool"),
    }


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=list(FORMATS))
def test_prefix_and_completion_together_hold_each_tag_once_and_in_order(fmt):
    whole = fmt.prefix + completion_text(PROBLEM, fmt)
    tags = fmt.tags or ()
    assert [whole.count(tag) for tag in tags] == [1] * len(tags)
    assert sorted(tags, key=whole.index) == list(tags)
    if fmt.contract.kind is AnswerKind.TAG:
        assert fmt.contract.open.endswith(fmt.tags[2])
        assert fmt.contract.close == fmt.tags[3]
        assert fmt.contract.open in whole
        assert whole.split(fmt.contract.open)[1].split(fmt.contract.close)[0].strip() == "4"


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=list(FORMATS))
def test_the_grader_finds_the_answer_of_every_demonstration(fmt):
    """Both halves of a format agree: what SFT teaches, the contract reads."""
    assert grade(completion_text(PROBLEM, fmt), "4", fmt.contract).correct
    assert not grade(completion_text(PROBLEM, fmt), "5", fmt.contract).correct


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=list(FORMATS))
def test_every_shipped_instruction_names_its_tags(fmt):
    if fmt.system:
        assert all(tag in fmt.system for tag in fmt.tags or ())


def test_a_boxed_solution_is_shown_as_it_is():
    problem = Problem(
        id="a/0", question="q", answer="4", source="a", solution=r"So it is $\boxed{4}$."
    )
    assert completion_text(problem, FORMATS["boxed"]) == r"So it is $\boxed{4}$."


@pytest.mark.parametrize("name", ["xml", "r1-zero", "boxed", "tags"])
def test_a_prompt_and_response_of_another_layout_are_trained_word_for_word(name):
    tokenizer = fixtures.qwen25().tokenizer
    prompt, response = "### Task\n1+1?\n\n### Solution\n", " So\n\nthe answer is 2.\n"
    problem = Problem(
        id="a", question=prompt, answer="2", source="a", prompt=prompt, response=response
    )
    stop = tokenizer.eos_token_id
    shown = demonstrate(problem, FORMATS[name], tokenizer, stop)
    assert shown.prompt.text == prompt
    assert tokenizer.decode(list(shown.prompt.token_ids)) == prompt
    assert tokenizer.decode(list(shown.token_ids[:-1])) == response
    assert shown.token_ids[-1] == stop
    # After a prompt of the format's own a response in another layout is still refused.
    if FORMATS[name].tags:
        with pytest.raises(PromptError, match="lacks"):
            demonstrate(replace(problem, prompt=None), FORMATS[name], tokenizer, stop)


def test_a_demonstrated_answer_is_shown_instead_of_the_reference():
    problem = Problem(
        id="a/0",
        question="q",
        answer="7",
        source="a",
        solution="2+2=4.",
        columns={"demonstrated_answer": "4"},
    )
    assert completion_text(problem, FORMATS["compact"]).endswith("<answer>4</answer>")


def test_braces_in_a_solution_are_text():
    problem = Problem(id="a/0", question="q{x}", answer="{4}", source="a", solution="{reasoning}")
    text = completion_text(problem, FORMATS["compact"])
    assert text == "<reasoning>{reasoning}</reasoning><answer>{4}</answer>"
    assert "q{x}" in FORMATS["r1-zero"].plain_prompt(problem.question)


def test_no_solution_is_an_error():
    problem = Problem(id="a/0", question="q", answer="4", source="a", solution="  ")
    with pytest.raises(PromptError, match="no worked solution"):
        completion_text(problem, FORMATS["xml"])


def test_r1_zero_prompts_equal_the_published_ones_but_for_one_blank_line(shared_data):
    """Rows made with the published prompt must be what rollouts and evaluation see."""
    tokenizer = fixtures.qwen25().tokenizer
    lines = (shared_data / "math" / "sft.jsonl").read_text().split("\n")
    published = {json.loads(line)["prompt"] for line in lines if line}
    assert len(published) == 128
    for text in published:
        head, _, rest = text.partition("\n\nUser: ")
        question = rest.removesuffix("\nAssistant: <think>")
        assert question != rest
        problem = Problem(id="m/0", question=question, answer="1", source="m")
        prompt = render(problem, FORMATS["r1-zero"], tokenizer)
        assert prompt.text == f"{head}\nUser: {rest}"
        assert prompt.messages is None


def test_r1_zero_stops_at_the_closing_answer_tag_and_opens_the_thinking():
    fmt = FORMATS["r1-zero"]
    assert (fmt.stop, fmt.prefix) == (("</answer>",), "<think>")


@pytest.mark.parametrize(
    ("name", "stop"),
    [
        ("xml", ("</answer>", "\nUser:")),
        ("think", ("</answer>", "\nUser:")),
        ("tags", ("</SOLUTION>", "\nUser:")),
        ("boxed", ("\nUser:",)),
        # Its own, and those that SFT alone teaches.
        ("r1-zero", ("</answer>",)),
        ("compact", ()),
        ("question-only", ()),
    ],
)
def test_in_plain_text_completions_end_before_the_next_turn(name, stop):
    fmt = FORMATS[name]
    plain = with_plain_stops(fmt)
    assert plain.stop == stop
    assert not any(text in fmt.completion("So it is.", "4").removesuffix(text) for text in stop)
    # What would be cut off its text cannot close the answer.
    assert set(with_plain_stops(fmt, include_stop=False).stop) <= {*fmt.stop, "\nUser:"}


def test_own_tags_reach_instruction_contract_prefix_and_completion():
    tags = TagsConfig(
        reasoning_open="<work>", reasoning_close="</work>", answer_open="[[", answer_close="]]"
    )
    fmt = make_format(PromptConfig(format="tags", tags=tags))
    assert completion_text(PROBLEM, fmt) == "2+2=4.</work>[[4]]"
    assert (fmt.contract.open, fmt.contract.close) == ("[[", "]]")
    assert all(tag in fmt.system for tag in fmt.tags or ())
    prompt = render(PROBLEM, fmt, fixtures.qwen25().tokenizer)
    assert prompt.text.endswith("<|im_start|>assistant\n<work>")
    assert prompt.prefix == "<work>"
    assert warn_about_system(PromptConfig(format="tags", tags=tags)) == []


def test_the_template_setting_decides_between_chat_and_plain_text():
    qwen, base = fixtures.qwen25().tokenizer, fixtures.no_template().tokenizer
    auto, plain, chat = (
        make_format(PromptConfig(format="xml", template=t)) for t in ("auto", "plain", "chat")
    )
    assert uses_chat(auto, qwen)
    assert not uses_chat(auto, base)
    assert not uses_chat(plain, qwen)
    assert uses_chat(chat, qwen)
    assert not uses_chat(FORMATS["r1-zero"], qwen)
    with pytest.raises(PromptError, match="no chat template"):
        render(PROBLEM, chat, base)


def test_question_only_is_the_question_and_nothing_else():
    prompt = render(PROBLEM, FORMATS["question-only"], fixtures.qwen25().tokenizer)
    assert prompt.text == "2+2?"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"format": "xlm"}, "Did you mean 'xml'"),
        ({"format": "xml", "tags": {}}, "has its own tags"),
        (
            {"format": "question-only", "system": "Box it."},
            "question-only has no place",
        ),
        ({"format": "gsm8k-5-shot", "system": "Be brief."}, "gsm8k-5-shot has no place"),
        ({"format": "gsm8k-5-shot", "template": "chat"}, "examples of the format gsm8k-5-shot"),
        ({"format": "minerva-4-shot", "template": "install"}, "are plain text"),
    ],
)
def test_bad_settings_are_prompt_errors(config, message):
    with pytest.raises(PromptError, match=message):
        make_format(PromptConfig(**config))


@pytest.mark.parametrize(
    ("config", "missing"),
    [
        ({"format": "xml", "system": "Use <reasoning> and </reasoning>."}, "<answer>, </answer>"),
        ({"format": "boxed", "system": "Just answer."}, "boxed"),
        ({"format": "xml", "system": ""}, "<reasoning>"),
    ],
)
def test_an_instruction_that_never_names_its_tags_is_a_warning(config, missing):
    (warning,) = warn_about_system(PromptConfig(**config))
    assert missing in warning


@pytest.mark.parametrize("name", FORMATS)
def test_shipped_instructions_give_no_warning(name):
    assert warn_about_system(PromptConfig(format=name)) == []


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=list(FORMATS))
@pytest.mark.parametrize(
    "turn",
    ["\nUser: 3+3?", " Human: 3+3?", "\nQuestion: 3+3?", "<|im_start|>user\n3+3?", "\nuser\n3+3?"],
)
def test_an_invented_next_turn_does_not_count(fmt, turn):
    answered = completion_text(PROBLEM, fmt)
    wrong = answered.replace("4", "6")
    assert grade(f"{answered}{turn}\nAssistant: {wrong}", "4", fmt.contract).correct


def test_a_whole_response_is_trained_word_for_word():
    response = "So 2.\n</think>  <answer>2</answer>"
    problem = Problem(id="a", question="q", answer="2", source="a", solution="s", response=response)
    assert completion_text(problem, FORMATS["r1-zero"]) == response


@pytest.mark.parametrize("before", ["", "\n "])
@pytest.mark.parametrize("name", ["r1-zero", "tags", "xml"])
def test_what_the_prompt_opens_is_not_trained_again(name, before):
    """A response from elsewhere begins with the tag, and the model learned to open it twice."""
    fmt = FORMATS[name]
    rest = fmt.completion("so", "2")
    response = before + fmt.prefix + rest
    problem = Problem(id="a", question="q", answer="2", source="a", response=response)
    assert completion_text(problem, fmt) == (rest if fmt.prefix else response)
    # A prompt that is used word for word has opened nothing.
    assert completion_text(replace(problem, prompt="Q: q"), fmt) == response


def test_a_response_in_another_layout_is_refused():
    """Trained, it would unteach the tags or the box that the rewards look for."""
    problem = Problem(id="a", question="q", answer="2", source="a", response="</think> 2")
    with pytest.raises(PromptError, match="a lacks <answer>, </answer> of the format r1-zero"):
        completion_text(problem, FORMATS["r1-zero"])
    with pytest.raises(PromptError, match="lacks <reasoning>"):
        completion_text(problem, FORMATS["xml"])
    with pytest.raises(PromptError, match=r"lacks \\boxed of the format boxed"):
        completion_text(problem, FORMATS["boxed"])
    boxed = replace(problem, response=r"</think> \boxed2")
    assert completion_text(boxed, FORMATS["boxed"]) == boxed.response


def test_outputs_of_tools_are_read_and_encoded_apart():
    """Each as sampling in turns has them: the same ids, and nothing printed is a special token."""
    tokenizer = fixtures.qwen25().tokenizer
    said = "```output\n4 <|im_end|>\n```\n"
    solution = f"So:\n```python\nprint(2+2)\n```\n{said}It is \\boxed{{4}}."
    problem = replace(PROBLEM, solution=solution)
    fmt = make_format(PromptConfig(format="python-tool"))
    shown = demonstrate(problem, fmt, tokenizer, tokenizer.eos_token_id)
    ((start, end),) = shown.tool_spans
    assert tokenizer.decode(shown.token_ids[start:end]) == said
    assert tokenizer.decode(shown.token_ids[:-1]) == solution
    assert shown.token_ids.count(tokenizer.eos_token_id) == 1
    batch = demonstration_batch([shown], token_mean)
    assert not batch.mask[0, start:end].any()
    assert int(batch.mask.sum()) == len(shown.token_ids) - (end - start)


def test_an_output_without_a_line_ends_where_it_ends():
    """The model's words up to the next block were taken for a tool's."""
    tokenizer = fixtures.qwen25().tokenizer
    said = "```output\n```\n"
    solution = f"```python\nx = 1\n```\n{said}Nothing, so:\n```python\nprint(4)\n```\n\\boxed{{4}}"
    fmt = make_format(PromptConfig(format="python-tool"))
    problem = replace(PROBLEM, solution=solution)
    shown = demonstrate(problem, fmt, tokenizer, tokenizer.eos_token_id)
    ((start, end),) = shown.tool_spans
    assert tokenizer.decode(shown.token_ids[start:end]) == said
