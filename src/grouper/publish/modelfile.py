"""Ollama's Modelfile of an export: the prompt of training, its stops and its sampling.

Ollama does not run the chat template of a model, so the prompt is written out as a template of
Ollama's own language (Go's text/template), with the question as its only variable.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grouper.errors import ModelError
from grouper.models.folders import EXPORT_FILE
from grouper.prompts.rendering import render
from grouper.publish.export import recipe_of
from grouper.training.prepare import Prepared
from grouper.training.problem_sets import ProblemSets
from grouper.types import Problem

MODELFILE = "Modelfile"

# Questions whose prompts must agree in everything around them.
_QUESTIONS = ("What is 3 + 4?", "Let x = 9.\nFind y.")


def write_modelfile(folder: Path, weights: str = ".") -> Path:
    """Write `Modelfile` into the folder of an export.

    Args:
        folder: an export of whole weights, with `grouper.json`.
        weights: what Ollama reads the weights from, relative to `folder`: a GGUF file, or `.` for
            the safetensors.

    Raises:
        ModelError: the prompt of the model is not known, or differs by question in more than the
            question.
    """
    record_file = folder / EXPORT_FILE
    recipe = recipe_of(str(folder))
    if recipe is None or not record_file.is_file():
        raise ModelError(
            f"nothing says how {folder} is prompted, and a Modelfile has to",
            where="--modelfile",
            fix="Export a run or a model of a run.",
        )
    record = json.loads(record_file.read_text(encoding="utf-8"))
    with Prepared(recipe, ProblemSets(), model=str(folder), quiet=True) as prepared:
        before, after = _text_around_question(prepared)
        stops = [prepared.tokenizer.decode([token_id]) for token_id in prepared.stop_tokens]
        context = recipe.prompt.max_prompt_tokens + record["sampling"]["max_new_tokens"]
    target = folder / MODELFILE
    text = modelfile(
        weights=weights if weights == "." else f"./{weights}",
        before=before,
        after=after,
        stops=[*dict.fromkeys([*stops, *record["prompt"]["stop"]])],
        sampling=record["sampling"],
        context=context,
    )
    target.write_text(text, encoding="utf-8")
    return target


def _text_around_question(prepared: Prepared) -> tuple[str, str]:
    """Return the text of a prompt before its question and after it.

    Raises:
        ModelError: it depends on the question.
    """
    surroundings = set()
    for question in _QUESTIONS:
        problem = Problem(id="q", question=question, answer="?", source="export")
        text = render(problem, prepared.format, prepared.tokenizer).text
        before, _, after = text.rpartition(question)
        surroundings.add((_without_first_token(before, prepared.tokenizer), after))
    if len(surroundings) > 1:
        raise ModelError(
            "the prompt of this model depends on the question in more than the question, which a "
            "Modelfile cannot express",
            where="--modelfile",
            fix="Serve it with `grouper serve` or with llama.cpp, which run the chat template.",
        )
    return surroundings.pop()


def _without_first_token(text: str, tokenizer: Any) -> str:
    """Remove the token that begins every text, if the tokenizer adds it by itself.

    Ollama adds it, too, and a prompt that begins with it twice is another prompt.
    """
    first = tokenizer.bos_token
    if first is None or tokenizer.bos_token_id not in tokenizer.encode("a"):
        return text
    return text.removeprefix(first)


def modelfile(
    *,
    weights: str,
    before: str,
    after: str,
    stops: list[str],
    sampling: Mapping[str, Any],
    context: int,
) -> str:
    """Return the text of a Modelfile.

    Args:
        weights: the path that it is built from.
        before: the prompt up to the question, in Ollama without the token that begins every text.
        after: the prompt after the question.
        stops: texts that end an answer.
        sampling: fields of `SamplingParams`, with which the model was evaluated.
        context: tokens of prompt and answer together.
    """
    template = f"{_literal(before)}{{{{ .Prompt }}}}{_literal(after)}"
    if template.endswith('"'):
        # Four quotes in a row would end the template one too early.
        template = template[:-1] + r'{{ "\"" }}'
    lines = [
        "# In this folder: `ollama create NAME -f Modelfile`, then `ollama run NAME`.",
        "# One question, one answer: the model was trained on that, not on conversations.",
        f"FROM {weights}",
        f'TEMPLATE """{template}"""',
    ]
    lines.extend(f"PARAMETER stop {_quoted(stop)}" for stop in stops)
    # All are named, because Ollama has defaults of its own, such as top_k 40.
    names = ("temperature", "top_p", "top_k", "min_p")
    lines.extend(f"PARAMETER {name} {sampling[name]:g}" for name in names)
    lines.append("PARAMETER repeat_penalty 1")
    lines.append(f"PARAMETER num_predict {sampling['max_new_tokens']}")
    lines.append(f"PARAMETER num_ctx {context}")
    return "\n".join(lines) + "\n"


def _literal(text: str) -> str:
    r"""Write a text so that Go's template prints it, and three quotes end nothing.

    >>> _literal("so {{x}}")
    'so {{ "{{" }}x}}'
    """
    literal = text.replace("{{", '{{ "{{" }}')
    return literal.replace('"""', r'{{ "\"\"\"" }}')


def _quoted(text: str) -> str:
    r"""Quote a parameter; one with a quote or a line break takes three quotes.

    >>> print(_quoted("</answer>"))
    "</answer>"
    """
    if '"' in text or "\n" in text:
        return f'"""{text}"""'
    return f'"{text}"'
