"""Problems -> prompts as token ids, and the contract of where the answer will stand.

Layer 1: takes any tokenizer that meets the `Tokenizer` protocol and never loads one.
`formats.py` is the table and the one renderer, `rendering.py` deals with chat templates,
`stop_tokens.py` finds what ends an answer, `preparing.py` does whole problem sets.
"""

from grouper.prompts.formats import FORMATS, PromptFormat, make_format, warn_about_system
from grouper.prompts.preparing import (
    Dropped,
    PreparedDemonstrations,
    PreparedPrompts,
    prepare_demonstrations,
    prepare_prompts,
)
from grouper.prompts.stop_tokens import StopTokens, find_stop_tokens
from grouper.prompts.tokenizer import Tokenizer

__all__ = [
    "FORMATS",
    "Dropped",
    "PreparedDemonstrations",
    "PreparedPrompts",
    "PromptFormat",
    "StopTokens",
    "Tokenizer",
    "find_stop_tokens",
    "make_format",
    "prepare_demonstrations",
    "prepare_prompts",
    "warn_about_system",
]
