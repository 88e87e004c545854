"""What the site has beside the pages in docs/: the front page, the reference and llms.txt.

The front page is README.md; settings, commands and the Python API are written from the schema, the
command line and the docstrings each time the site is built, so that they cannot be out of date.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import click
from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

from grouper.cli.main import cli
from grouper.config.checks import settings
from grouper.config.schema import Recipe

ROOT = Path(__file__).resolve().parents[1]
# Formulas: the browser draws MathML by itself, without a script.
FORMULA = re.compile(r"\$\$(.+?)\$\$|(?<![\\$\w])\$([^$\n]+?)\$(?!\w)", re.DOTALL)
FENCE = re.compile(r"(^```.*?^```|`[^`\n]+`)", re.DOTALL | re.MULTILINE)
# A Markdown link to something in the repository that is no page.
OUTSIDE = re.compile(r"(!?)\[([^\]]+)\]\((\.\./[^)#]+)(#[^)]*)?\)")
PYTHON_PAGE = "reference/python.md"
# Headings of the members of a class; a public name itself has level 3.
MEMBER_HEADING = re.compile(
    r'<h([4-6])( id="[^"]+")? class="doc doc-heading">(.*?)</h\1>', re.DOTALL
)
# The sections of the Python reference, and the modules whose names each holds.
SECTIONS = {
    "Train, evaluate and sample": ("grouper.api", "grouper.training"),
    "Recipes and data": ("grouper.config", "grouper.data", "grouper.prompts"),
    "Rewards and grading": ("grouper.rewards", "grouper.grading"),
    "Results and runs": ("grouper.evaluation", "grouper.runs"),
    "Records and errors": ("grouper.types", "grouper.errors"),
}


def on_config(config: Any) -> None:
    """Show the version of the package in the header and the footer."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    config.extra["release"] = project["version"]
    config.copyright = f"Grouper {project['version']}, {config.copyright}"


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made here."""
    pages = {
        "index.md": _front_page(),
        "reference/settings.md": _settings_page(),
        "reference/commands.md": _commands_page(),
        PYTHON_PAGE: _python_page(),
    }
    pages["llms.txt"] = _llms_text(config, pages)
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Convert formulas to MathML, and point links to tests and code at the repository."""
    here = (ROOT / "docs" / page.file.src_uri).parent

    def link(match: re.Match[str]) -> str:
        picture, words, target, _ = match.groups()
        place = (here / target).resolve()
        in_repository = place.exists() and place.is_relative_to(ROOT)
        if picture or not in_repository or place.is_relative_to(ROOT / "docs"):
            return match[0]
        kind = "tree" if place.is_dir() else "blob"
        return f"[{words}]({config.repo_url}/{kind}/main/{place.relative_to(ROOT).as_posix()})"

    def formula(match: re.Match[str]) -> str:
        block, inline = match.groups()
        return convert(block or inline, display="block" if block else "inline")

    parts = FENCE.split(OUTSIDE.sub(link, markdown))
    # Every other part is code, which stays as it is.
    parts[::2] = [FORMULA.sub(formula, part) for part in parts[::2]]
    return "".join(parts)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Make the members of classes part of their class, in the search and in the table of contents.

    A search result is a heading with the text below it. With a heading for each member, nearly
    half of the results would be attributes of records.
    """
    if page.file.src_uri != PYTHON_PAGE:
        return html
    for section in page.toc:
        for group in section.children:
            for name in group.children:
                name.children = []
    return MEMBER_HEADING.sub(r'<div\2 class="doc doc-heading doc-member">\3</div>', html)


def _front_page() -> str:
    """README.md, with its links as docs/ has them."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"\]\((?!docs/|https?:|#)", "](../", text)
    return re.sub(r"\]\(docs/", "](", text)


def _settings_page() -> str:
    sections: dict[str, list[str]] = {}
    for key, field in settings(Recipe):
        head = key.rpartition(".")[0].replace("[]", "") or "top level"
        default = "required"
        if not field.is_required():
            default = f"`{json.dumps(field.get_default(), default=lambda _: {})}`"
        meaning = " ".join((field.description or "").split()).replace("|", "\\|")
        sections.setdefault(head, []).append(f"| `{key}` | {default} | {meaning} |")
    text = "# Settings\n\nEvery setting of a recipe, with its default as YAML has it. "
    text += "`grouper recipes fields WORD` searches them.\n"
    for head, rows in sections.items():
        table = "\n".join(["| setting | default | meaning |", "|---|---|---|", *rows])
        text += f"\n## {head}\n\n{table}\n"
    return text


def _commands_page() -> str:
    return "# Commands\n\n" + "".join(_command(cli, "grouper"))


def _command(command: click.Command, path: str) -> list[str]:
    context = click.Context(command, info_name=path, max_content_width=80)
    found = [f"## {path}\n\n```\n{command.get_help(context)}\n```\n\n"]
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            if inner is not None:
                found += _command(inner, f"{path} {name}")
    return found


def _python_page() -> str:
    """Write every public name once, in the section of the module that it comes from."""
    text = (ROOT / "src/grouper/__init__.pyi").read_text(encoding="utf-8")
    names = re.findall(r"from (\S+) import (\w+) as", text)
    page = "# Python\n\nThe public API. All of these names are in `grouper`: `import grouper`.\n\n"
    for title, modules in SECTIONS.items():
        page += f"## {title}\n\n"
        for module, name in names:
            if ".".join(module.split(".")[:2]) in modules:
                page += f"::: {module}.{name}\n\n"
    return page


# --- llms.txt: the pages as a list for language models -------------------------------------------

# A Markdown link, of which only the words are kept.
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")


def _llms_text(config: Any, made: dict[str, str]) -> str:
    """Write the list of all pages of the navigation, each with its first sentence.

    Args:
        config: of the site.
        made: path of a page that is no file -> its Markdown.
    """
    lines = [f"# {config['site_name']}", "", f"> {config['site_description']}", ""]
    lines += [
        "Once it is installed, `grouper skill` prints instructions for coding agents: how to",
        "train, evaluate and explain a run.",
    ]
    for section, paths in _sections(config["nav"] or []):
        lines += ["", f"## {section}", ""]
        for path in paths:
            text = made.get(path)
            if text is None:
                text = (Path(config["docs_dir"]) / path).read_text(encoding="utf-8")
            title, sentence = _summary(text)
            folder = path.removesuffix("README.md").removesuffix("index.md")
            address = f"{folder.removesuffix('.md')}/" if folder.endswith(".md") else folder
            lines.append(f"- [{title}]({config['site_url'] or './'}{address}): {sentence}")
    return "\n".join(lines) + "\n"


def _sections(nav: list[Any]) -> list[tuple[str, list[str]]]:
    """Return the sections of a navigation with the paths of their pages, in order.

    Pages outside a section are in the section Pages.
    """
    sections: dict[str, list[str]] = {}
    for entry in nav:
        if isinstance(entry, dict):
            for title, inner in entry.items():
                if isinstance(inner, list):
                    sections.setdefault(title, []).extend(_paths(inner))
                else:
                    sections.setdefault("Pages", []).append(inner)
        else:
            sections.setdefault("Pages", []).append(entry)
    return list(sections.items())


def _paths(entries: list[Any]) -> list[str]:
    """Return the pages of a part of the navigation, in order."""
    paths: list[str] = []
    for entry in entries:
        if isinstance(entry, str):
            paths.append(entry)
            continue
        for inner in entry.values():
            paths += _paths(inner if isinstance(inner, list) else [inner])
    return paths


def _summary(text: str) -> tuple[str, str]:
    """Return the title of a page and the first sentence of its first paragraph, without markup."""
    match = re.search(r"^# (.+)$", text, re.MULTILINE)
    title = match[1] if match else "Page"
    without_code = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    for block in re.split(r"\n\s*\n", without_code):
        words = " ".join(LINK.sub(r"\1", block).split())
        if words and words[0] not in "#|>-<!:" and not words.startswith("```"):
            sentence = re.match(r".+?[.?!:](?= [A-Z`]|$)", words)
            return LINK.sub(r"\1", title), (sentence[0] if sentence else words).rstrip(":")
    return LINK.sub(r"\1", title), title
