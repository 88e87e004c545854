"""The search of the site: questions lead to the page that answers them.

The browser searches with lunr; `Index` below weighs titles and texts as lunr does with the settings
of Material for MkDocs.
"""

from __future__ import annotations

import html
import json
import math
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import grouper

pytestmark = [pytest.mark.slow, pytest.mark.needs_package("mkdocs", extra="docs")]

ROOT = Path(__file__).resolve().parents[2]
# What is typed -> pages, one of which has to be the first result.
QUERIES = {
    "own data": ("how-do-i/", "your-own-model/", "data/"),
    "lora": ("how-do-i/",),
    "qlora": ("how-do-i/",),
    "group_size": ("how-do-i/", "reference/settings/"),
    "grpo.group_size": ("how-do-i/", "reference/settings/"),
    "batch size": ("how-do-i/",),
    "resume": ("how-do-i/", "resume/"),
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
# The weight of a title relative to a text (Material's default), and the saturation of repeated
# words (lunr's).
TITLE_BOOST, K1 = 1000.0, 1.2


class Index:
    """A search index as lunr scores it: BM25 over titles and texts, regardless of lengths."""

    def __init__(self, index: dict[str, Any], stop_words: set[str]) -> None:
        self.stop_words = stop_words
        self.separator = re.compile(index["config"]["separator"])
        self.docs = index["docs"]
        self.counts = [
            {
                field: Counter(word for word in self.words(doc[field]) if word not in stop_words)
                for field in ("title", "text")
            }
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
        # A term finds every word that begins with it, as a search while typing does.
        found = {
            term: [word for word in self.frequency if word.startswith(term)]
            for term in self.words(query)
        }
        best = max(range(len(self.docs)), key=lambda number: self._score(number, found))
        return str(self.docs[best]["location"].partition("#")[0])

    def _score(self, number: int, found: dict[str, list[str]]) -> float:
        weights = {
            term: sum(self._weight(number, word) for word in words if self._has(number, word))
            for term, words in found.items()
        }
        # A stop word that nothing begins with does not count as missing.
        terms = [term for term in found if weights[term] > 0 or term not in self.stop_words]
        matched = sum(weights[term] > 0 for term in terms) / max(len(terms), 1)
        doc = self.docs[number]
        is_page = "#" not in doc["location"]
        return sum(weights.values()) * float(doc.get("boost", 1.0)) * (1 + (is_page + matched) ** 2)

    def _has(self, number: int, word: str) -> bool:
        counts = self.counts[number]
        return word in counts["title"] or word in counts["text"]

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
    """The index of the whole site, built without --strict: links are checked elsewhere."""
    target = tmp_path_factory.mktemp("site")
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(target)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        check=True,
    )
    (worker,) = (target / "assets" / "javascripts" / "workers").glob("search.*.js")
    listed = re.search(r'generateStopWordFilter\(\[("a",[^\]]*)\]', worker.read_text("utf-8"))
    assert listed is not None
    built = json.loads((target / "search" / "search_index.json").read_text("utf-8"))
    return Index(built, set(json.loads(f"[{listed[1]}]")))


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
    plain = html.unescape(re.sub(r"<[^>]+>", "", text))
    assert "-> EvaluationResult" in plain
