# ruff: noqa: B905 - as their users bring them
"""Reward functions of three published set-ups, as their users bring them: nothing here is adapted.

`xml_*`: chat completions, positional arguments, the columns `answer`. `lite_*`: keyword-only, the
column `reference_answer`. `tags_*`: patterns over chat completions, the column `answer`. Tests load
them by path, as a recipe does.
"""

import re


def extract_xml_answer(text):
    return text.split("<answer>")[-1].split("</answer>")[0].strip()


def xml_correctness(prompts, completions, answer, **kwargs):
    assert prompts[0][-1]["role"] == "user"
    responses = [completion[0]["content"] for completion in completions]
    extracted = [extract_xml_answer(response) for response in responses]
    return [2.0 if given == wanted else 0.0 for given, wanted in zip(extracted, answer)]


def xml_integer(completions, **kwargs):
    responses = [completion[0]["content"] for completion in completions]
    return [0.5 if extract_xml_answer(response).isdigit() else 0.0 for response in responses]


def xml_strict_format(completions, **kwargs):
    pattern = r"^<reasoning>\n.*?\n</reasoning>\n<answer>\n.*?\n</answer>\n$"
    responses = [completion[0]["content"] for completion in completions]
    return [0.5 if re.match(pattern, response) else 0.0 for response in responses]


def xml_soft_format(completions, **kwargs):
    pattern = r"<reasoning>.*?</reasoning>\s*<answer>.*?</answer>"
    responses = [completion[0]["content"] for completion in completions]
    return [0.5 if re.match(pattern, response) else 0.0 for response in responses]


def count_xml(text):
    count = 0.0
    if text.count("<reasoning>\n") == 1:
        count += 0.125
    if text.count("\n</reasoning>\n") == 1:
        count += 0.125
    if text.count("\n<answer>\n") == 1:
        count += 0.125
        count -= len(text.split("\n</answer>\n")[-1]) * 0.001
    if text.count("\n</answer>") == 1:
        count += 0.125
        count -= (len(text.split("\n</answer>")[-1]) - 1) * 0.001
    return count


def xml_tag_count(completions, **kwargs):
    return [count_xml(completion[0]["content"]) for completion in completions]


def _text(completion):
    return completion if isinstance(completion, str) else completion[0]["content"]


def _lite_answer(text):
    tagged = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    if tagged:
        return tagged[-1].strip()
    return text.split("####")[-1].strip()


def _number(text):
    try:
        return float(text.replace(",", "").replace("$", ""))
    except ValueError:
        return None


def lite_correctness(*, prompts, completions, reference_answer, **kwargs):
    scores = []
    for completion, reference in zip(completions, reference_answer):
        answer = _lite_answer(_text(completion))
        given, wanted = _number(answer), _number(reference)
        close = given is not None and wanted is not None and abs(given - wanted) < 1e-6
        scores.append(1.0 if answer == reference or close else 0.0)
    return scores


def lite_numeric(*, prompts, completions, **kwargs):
    answers = [_lite_answer(_text(completion)) for completion in completions]
    return [0.0 if _number(answer) is None else 0.1 for answer in answers]


def lite_tags(*, prompts, completions, **kwargs):
    tags = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")
    return [0.1 * sum(tag in _text(c) for tag in tags) / len(tags) for c in completions]


WHOLE = re.compile(
    r"^\s*<start_working_out>.+?<end_working_out>.*?<SOLUTION>(.+?)</SOLUTION>\s*$", re.DOTALL
)
SOLUTION = re.compile(r"<SOLUTION>(.+?)</SOLUTION>", re.DOTALL)
NUMBER = re.compile(r"<SOLUTION>.*?([-+]?[\d.,]*\d)", re.DOTALL)


def tags_exact(completions, **kwargs):
    return [3.0 if WHOLE.match(completion[0]["content"]) else 0.0 for completion in completions]


def tags_approximate(completions, **kwargs):
    scores = []
    for completion in completions:
        text = completion[0]["content"]
        wanted = ("<end_working_out>", "<SOLUTION>", "</SOLUTION>")
        scores.append(sum(0.5 if text.count(tag) == 1 else -1.0 for tag in wanted))
    return scores


def tags_answer(prompts, completions, answer, **kwargs):
    scores = []
    for completion, true in zip(completions, answer):
        found = SOLUTION.search(completion[0]["content"])
        if found is None:
            scores.append(-2.0)
        elif found[1].strip() == true.strip():
            scores.append(5.0)
        else:
            scores.append(-2.5)
    return scores


def tags_number(prompts, completions, answer, **kwargs):
    scores = []
    for completion, true in zip(completions, answer):
        found = NUMBER.search(completion[0]["content"])
        if found is None:
            scores.append(-1.5)
        else:
            near = abs(float(found[1].replace(",", "")) - float(true.replace(",", ""))) < 1e-6
            scores.append(4.0 if near else -2.0)
    return scores
