"""Problems -> prompts as token ids, in a format that says where the answer will stand.

Layer 1: takes any tokenizer that meets the `Tokenizer` protocol and never loads one.
`formats.py` is the table of `AnswerFormat`, `rendering.py` turns a problem into token ids,
`preparing.py` does whole problem sets.
"""

from grouper.prompts.formats import FORMATS, make_format, warn_about_system
from grouper.prompts.preparing import (
    Dropped,
    PreparedItems,
    prepare_demonstrations,
    prepare_prompts,
)
from grouper.prompts.rendering import (
    StopTokens,
    Tokenizer,
    completion_text,
    demonstrate,
    find_stop_tokens,
    install_template,
    render,
    right_completion,
)

__all__ = [
    "FORMATS",
    "Dropped",
    "PreparedItems",
    "StopTokens",
    "Tokenizer",
    "completion_text",
    "demonstrate",
    "find_stop_tokens",
    "install_template",
    "make_format",
    "prepare_demonstrations",
    "prepare_prompts",
    "render",
    "right_completion",
    "warn_about_system",
]
