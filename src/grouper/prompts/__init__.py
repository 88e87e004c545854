"""Problems -> prompts as token ids, in a format that says where the answer will stand.

Layer 1: takes any tokenizer that meets the `Tokenizer` protocol and never loads one.
`formats.py` is the table of `AnswerFormat`, `rendering.py` turns a problem into token ids,
`preparing.py` does whole problem sets.
"""

from grouper.prompts.formats import FORMATS as FORMATS
from grouper.prompts.formats import make_format as make_format
