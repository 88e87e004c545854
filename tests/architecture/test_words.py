"""Texts are American English of the field: words and phrases that must not come back."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# What a reader sees: documentation, code with its comments and messages, templates.
FOLDERS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile", "docs", "examples", "src")
KINDS = {".md", ".py", ".yaml", ".yml", ".html", ".js", ".ipynb", ""}
# Words of English problems and names of data sets are not ours.
LEFT_ALONE = {"src/grouper/data/stories.yaml", "src/grouper/evaluation/suites.yaml"}

# Pattern -> an example of it. `standardised` is missing: it is a value of `grpo.advantage`, and
# the hashes of recorded runs depend on it.
BRITISH = {
    r"\bmaths\b": "maths problems",
    r"(?:behavi|col|fav|neighb)our": "behaviour",
    r"(?:normal|quant|token|util|initial|serial|minim|maxim)is(?:e|i|a)": "normalise",
    r"(?:recogn|organ|general|summar)is(?:e|i|a)": "recognise",
    r"\boptimis(?!m)": "optimise",
    r"\b(?:labell|cancell|modell|travell)(?:ed|ing)\b": "labelled",
    r"\blicence": "licence",
    r"\b(?:learnt|spelt|whilst|towards)\b": "learnt",
    r"\bcent(?:re|res|red)\b": "a centre",
}
# Pattern -> the text it was found in, which house style replaced.
TRANSLATED = {
    r"at the worst moment": "GiB at the worst moment",
    r"Nothing that Grouper knows of": "Nothing that Grouper knows of went wrong.",
    r"says with statistics": "says with statistics whether it got better",
    r"raises the right ones": "raises the right ones",
    r"what can be checked without weights": "--dry-run  # what can be checked without weights",
    r"brings back the faults": "`variant: original` brings back the faults of the source.",
    r"server that is away": "A server that is away is waited for",
    r", and become it": "Start vLLM's server, and become it.",
    r"the newest ones, to go on from": "the newest ones, to go on from",
    r"Why to believe it": "Why to believe it",
    r"Coming from another system": "Coming from another system",
    r"\bis no (?:source|model folder|whole number|architecture)\b": "is no source",
    r"\bwas asked for\b|\bwere asked for\b": "8 processes were asked for",
    r"\bthe same command goes on\b": "What was drawn is kept, and the same command goes on.",
    r"\bcut[- ]off completions?\b": "cut-off completions give no gradient",
}
BANNED = {**BRITISH, **TRANSLATED}


def _texts() -> dict[str, str]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", *FOLDERS], cwd=ROOT, capture_output=True, text=True, check=True
    )
    names = [name for name in listed.stdout.split("\0") if name and name not in LEFT_ALONE]
    files = {name: ROOT / name for name in names if Path(name).suffix in KINDS}
    return {
        name: file.read_text(encoding="utf-8") for name, file in files.items() if file.is_file()
    }


@pytest.mark.parametrize(("pattern", "example"), BANNED.items())
def test_a_pattern_finds_its_example(pattern: str, example: str) -> None:
    assert re.search(pattern, example)


def test_no_banned_word_is_in_what_a_reader_sees() -> None:
    texts = _texts()
    assert len(texts) > 200
    found = []
    for name, text in texts.items():
        for number, line in enumerate(text.splitlines(), 1):
            found += [f"{name}:{number}: {word}" for word in BANNED if re.search(word, line)]
    assert found == []
