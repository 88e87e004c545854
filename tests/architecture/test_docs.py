"""What the documents name exists, and what exists is documented."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from codebase import ROOT, SOURCE, modules

from grouper.advice.recipe_checks import check_recipe
from grouper.algorithms.advantages import ADVANTAGES
from grouper.algorithms.losses import SURROGATES
from grouper.algorithms.weighting import WEIGHTINGS
from grouper.cli import generate
from grouper.config.loading import load_recipe
from grouper.training.optimizers import SCHEDULES
from grouper.training.problem_sets import load_problem_sets

BENCHMARKS = ROOT / "benchmarks"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), BENCHMARKS / "README.md"])
EQUATIONS = (ROOT / "docs" / "equations.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_where_things_go_names_what_is_there() -> None:
    """Each file of the table, and each name of a class or a table, whatever lies beside it."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.partition("## Where things go")[2].partition("## Rules")[0]
    code = "\n".join(path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py"))
    names = re.findall(r"`([A-Z][A-Za-z]+)`", table)
    assert len(names) > 10
    assert [name for name in names if not re.search(rf"(?m)^(class )?{name}\b", code)] == []
    files = re.findall(r"`([a-z_/]+\.(?:py|json|yaml))`", table)
    assert [name for name in files if not (SOURCE / "grouper" / name).is_file()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        # Pages under reference/ are written when the site is built, which checks these links.
        if target.startswith(("https://", "reference/")):
            continue
        name, _, anchor = target.partition("#")
        linked = page.parent / name if name else page
        assert linked.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(linked), f"{page.name} links to {target}"


# Written by a run on a card.
TO_BE_MEASURED = "benchmarks/results/gpu.json"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_files_that_are_named_exist(page: Path) -> None:
    named = re.findall(
        r"`((?:src|tests|docs|examples|benchmarks)/[\w/.-]+\.\w+)", page.read_text("utf-8")
    )
    missing = [name for name in named if not (ROOT / name).exists()]
    assert {*missing} <= {TO_BE_MEASURED}


def test_every_benchmark_has_its_line() -> None:
    """Each script is named in the section of its folder."""
    text = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    sections = dict(part.split("\n", 1) for part in text.split("\n## ")[1:])
    missing = []
    for script in sorted(BENCHMARKS.rglob("*.py")):
        room = "Shared" if script.parent == BENCHMARKS else script.parent.name
        if script.stem != "__init__" and f"`{script.stem}`" not in sections[room]:
            missing.append(script)
    assert missing == []


def test_benchmarks_that_are_named_can_be_started() -> None:
    """`python -m benchmarks.ROOM.SCRIPT`, in the pages and in the scripts themselves."""
    texts = [path.read_text(encoding="utf-8") for path in (*PAGES, *BENCHMARKS.rglob("*.py"))]
    named = set(re.findall(r"-m (benchmarks(?:\.[a-z]\w*)+)", "\n".join(texts)))
    assert len(named) > 20
    files = {name: ROOT / (name.replace(".", "/") + ".py") for name in named}
    assert [name for name, file in sorted(files.items()) if not file.is_file()] == []


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def named_tests() -> Iterator[tuple[Path, str]]:
    """(file, test) of every test that equations.md names; a bare `::test` is in the last file."""
    file = Path()
    for path, test in re.findall(r"`(tests/[\w/]+\.py)?(?:::)?(test_\w+)?`", EQUATIONS):
        file = ROOT / path if path else file
        if test:
            yield file, test


def test_equations_name_tests_that_exist() -> None:
    named = list(named_tests())
    assert len(named) > 30
    missing = [
        f"{file.name}::{test}"
        for file, test in named
        if f"def {test}(" not in file.read_text(encoding="utf-8")
    ]
    assert not missing


def test_every_algorithm_has_its_equation() -> None:
    tables = (ADVANTAGES, SURROGATES, WEIGHTINGS, SCHEDULES)
    missing = [name for table in tables for name in table if f"`{name}`" not in EQUATIONS]
    public = {
        name
        for module in modules()
        if module.inner in ("algorithms.losses", "evaluation.statistics")
        for name in re.findall(r"^def ([a-z]\w+)\(", module.text, re.MULTILINE)
    }
    missing += [name for name in public if name not in EQUATIONS]
    assert not missing


def test_every_status_word_is_explained() -> None:
    source = (SOURCE / "grouper" / "training" / "metrics.py").read_text(encoding="utf-8")
    words = set(re.findall(r'"((?:no-signal|skipped):[a-z-]+|learning)":', source))
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    assert len(words) >= 7
    assert words == set(re.findall(r"^\| `([a-z:-]+)` \|", page, re.MULTILINE))


def test_the_readme_is_short() -> None:
    assert len(README.split()) <= 700


def test_the_recipe_that_is_shown_is_valid(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "your-own-model.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    file = tmp_path / "qwen-gsm8k.yaml"
    file.write_text(text, encoding="utf-8")
    recipe = load_recipe(file)
    assert recipe.model.path == "Qwen/Qwen2.5-0.5B-Instruct"
    assert check_recipe(recipe) == []


def test_the_grading_example_prints_what_it_says() -> None:
    page = (ROOT / "docs" / "grading.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "grading.md", "exec"), {})
    assert printed.getvalue().strip() == code.rpartition("# ")[2].strip()


def test_the_question_that_is_asked_was_not_trained_on() -> None:
    """U12: the show-case of README, Python page and help is a test problem of the demonstration."""
    sets = load_problem_sets(load_recipe("demo"))
    pages = [
        README,
        (ROOT / "docs" / "python.md").read_text(encoding="utf-8"),
        generate.EXAMPLES,
    ]
    asked = {text for page in pages for text in re.findall(r'"(\w+ has \d[^"]*\?)"', page)}
    assert asked
    assert sets.test is not None
    assert asked <= {problem.question for problem in sets.test.problems}
    trained = (sets.train, sets.sft, sets.validation)
    assert not asked & {p.question for part in trained if part for p in part.problems}
