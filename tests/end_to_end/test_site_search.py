"""The search of the site: questions lead to the page that answers them.

The browser searches with lunr; `Index` below repeats how lunr, as Material for MkDocs sets it up, weighs
titles and texts.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import grouper

pytestmark = [pytest.mark.slow, pytest.mark.needs_package("mkdocs", extra="docs")]

ROOT = Path(__file__).resolve().parents[2]
# What is typed -> pages, one of which has to be the first result.
QUERIES = {
    "own data": ("how-do-i/", "your-own-model/"),
    "lora": ("how-do-i/",),
    "qlora": ("how-do-i/",),
    "group_size": ("how-do-i/", "reference/settings/"),
    "grpo.group_size": ("how-do-i/", "reference/settings/"),
    "batch size": ("how-do-i/",),
    "resume": ("resume/",),
    "resume a run": ("how-do-i/", "resume/"),
    "add reward": ("how-do-i/", "rewards/"),
    "evaluate gsm8k": ("how-do-i/", "evaluation/"),
    "several gpus": ("how-do-i/", "multi-gpu/"),
    "multi-node": ("multi-gpu/",),
    "vllm": ("vllm/",),
    "out of memory": ("how-do-i/", "memory/"),
    "oom": ("how-do-i/",),
    "reward does not rise": ("how-do-i/",),
    "prompt format": ("how-do-i/", "concepts/"),
    "export model": ("how-do-i/", "publishing/"),
    "push hub": ("how-do-i/", "publishing/"),
    "wandb": ("how-do-i/", "migrating/"),
    "migrate trl": ("migrating/", "how-do-i/"),
    "sft checkpoint": ("how-do-i/",),
    "compare runs": ("how-do-i/", "evaluation/"),
    "install": ("install/",),
    "max_new_tokens": ("how-do-i/", "reference/settings/"),
}
# In a result's title these say where it is, not which setting.
TITLE_BOOST, K1 = 1000.0, 1.2


class Index:
    """A search index as lunr scores it: BM25 over titles and texts, without the length of a text."""

    def __init__(self, index: dict[str, Any]) -> None:
        self.separator = re.compile(index["config"]["separator"])
        self.docs = index["docs"]
        self.counts = [
            {field: Counter(self.words(doc[field])) for field in ("title", "text")}
            for doc in self.docs
        ]
        self.frequency: Counter[str] = Counter()
        for counts in self.counts:
            for field in counts.values():
                self.frequency.update(field.keys())

    def words(self, text: str) -> list[str]:
        """Split a text, tags removed, at the separator of the index."""
        plain = re.sub(r"<[^>]+>", " ", text)
        return [word for word in self.separator.split(plain.lower()) if word]

    def first(self, query: str) -> str:
        """Return the address of the best page for a query."""
        best = max(range(len(self.docs)), key=lambda number: self._score(number, query))
        return self.docs[best]["location"].partition("#")[0]

    def _score(self, number: int, query: str) -> float:
        doc = self.docs[number]
        terms = self.words(query)
        total = 0.0
        for term in terms:
            for word in self._expand(term):
                total += self._weight(number, word)
        matched = sum(self._has(number, term) for term in terms) / len(terms)
        is_page = "#" not in doc["location"]
        return total * doc.get("boost", 1.0) * (1 + (is_page + matched) ** 2)

    def _expand(self, term: str) -> Iterator[str]:
        """Yield the indexed words that begin with a term, as a search while typing does."""
        return (word for word in self.frequency if word.startswith(term))

    def _has(self, number: int, term: str) -> bool:
        return any(
            word.startswith(term) for counts in self.counts[number].values() for word in counts
        )

    def _weight(self, number: int, word: str) -> float:
        frequency = self.frequency[word]
        rarity = math.log(1 + abs((len(self.docs) - frequency + 0.5) / (frequency + 0.5)))
        weight = 0.0
        for field, boost in (("title", TITLE_BOOST), ("text", 1.0)):
            count = self.counts[number][field][word]
            weight += boost * rarity * (K1 + 1) * count / (K1 + count)
        return weight


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    """The index of the whole site, built without --strict: links are test_site's and the build's."""
    target = tmp_path_factory.mktemp("site")
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(target)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        check=True,
    )
    return Index(json.loads((target / "search" / "search_index.json").read_text("utf-8")))


@pytest.mark.parametrize(("query", "pages"), QUERIES.items())
def test_a_question_leads_to_its_answer(index: Index, query: str, pages: tuple[str, ...]) -> None:
    assert index.first(query) in pages


def test_names_of_settings_are_divided(index: Index) -> None:
    assert index.words("`grpo.group_size` = 8") == ["grpo", "group", "size", "8"]


def test_the_python_reference_has_one_result_per_public_name(index: Index) -> None:
    found = [
        doc["location"].partition("#")[2].rpartition(".")[2]
        for doc in index.docs
        if doc["location"].startswith("reference/python/#grouper")
    ]
    assert sorted(found) == sorted(set(grouper.__all__) - {"__version__"})
    assert len(found) < len(index.docs) / 4


def test_a_signature_has_its_types(index: Index) -> None:
    (text,) = [
        doc["text"] for doc in index.docs if doc["location"].endswith("#grouper.api.evaluate")
    ]
    assert "-> EvaluationResult" in re.sub(r"<[^>]+>|&gt;", lambda m: ">" if m[0] == "&gt;" else "", text)
