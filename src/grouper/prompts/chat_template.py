"""A chat template of our own, for tokenizers that have none or one of another format."""

from __future__ import annotations

import json


def own_chat_template(system: str, prefix: str) -> str:
    """A Jinja chat template: instruction, turns, and the opened tag as the generation prompt.

    Conversations without a system message get `system`. A saved tokenizer thereby asks for the
    same layout in any program that loads it.

    Args:
        system: the instruction; may be empty.
        prefix: what the generation prompt opens of the assistant's turn; may be empty.
    """
    # A JSON string is a Jinja string: the same quotes and escapes.
    instruction, opened = json.dumps(system), json.dumps(prefix)
    return (
        "{%- if messages[0]['role'] == 'system' -%}"
        "{%- set instruction = messages[0]['content'] -%}{%- set turns = messages[1:] -%}"
        "{%- else -%}"
        f"{{%- set instruction = {instruction} -%}}{{%- set turns = messages -%}}"
        "{%- endif -%}"
        "{%- if instruction -%}{{- instruction + '\n\n' -}}{%- endif -%}"
        "{%- for turn in turns -%}"
        "{{- turn['content'] -}}"
        "{%- if turn['role'] == 'assistant' -%}{{- eos_token -}}{%- endif -%}"
        "{{- '\n' -}}"
        "{%- endfor -%}"
        f"{{%- if add_generation_prompt -%}}{{{{- {opened} -}}}}{{%- endif -%}}"
    )
