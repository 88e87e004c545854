"""Files about the project: they parse, they agree with each other, and what they name exists."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from grouper.data.sources import SOURCES
from grouper.evaluation.suites import SUITES

ROOT = Path(__file__).resolve().parents[2]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = [GITHUB / "ISSUE_TEMPLATE" / name for name in ("bug.yml", "question.yml")]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
HOME = PROJECT["urls"]["Repository"]


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


# --- the address of the repository ---------------------------------------------------------------

# Folders of recorded results, where any address may have been printed.
ELSEWHERE = ("benchmarks/results/", "tests/frozen/", "docs/images/")


def committed_texts() -> dict[str, str]:
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    texts = {}
    for name in names.stdout.splitlines():
        if name.startswith(ELSEWHERE) or not (ROOT / name).is_file():
            continue
        try:
            texts[name] = (ROOT / name).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
    return texts


def test_all_files_name_the_same_repository() -> None:
    addresses = re.compile(r"(?:https://|git@)github\.com[/:]([\w-]+/grouper(?:-rl)?)\b")
    named = {}
    for name, text in committed_texts().items():
        for owner_and_name in addresses.findall(text):
            named.setdefault(f"https://github.com/{owner_and_name}", []).append(name)
    assert list(named) == [HOME], named
    assert {"pyproject.toml", "CITATION.cff"} <= set(named[HOME])
    for url in PROJECT["urls"].values():
        assert url == HOME or url.startswith(f"{HOME}/")


# --- pyproject and the citation ------------------------------------------------------------------


def test_classifiers_are_known_and_name_the_tested_versions() -> None:
    trove = pytest.importorskip("trove_classifiers")
    unknown = set(PROJECT["classifiers"]) - trove.classifiers
    assert unknown == set()
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    versions = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if ":: 3." in c]
    assert versions == ["3.11", "3.12", "3.13"]
    assert f"Python {versions[0]} to {versions[-1]}" in text
    assert PROJECT["requires-python"] == f">={versions[0]}"


def test_the_citation_is_valid_and_agrees_with_the_package() -> None:
    citation = load(ROOT / "CITATION.cff")
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= citation.keys()
    assert set(citation) <= {
        *("abstract", "authors", "cff-version", "date-released", "doi", "keywords", "license"),
        *("message", "repository-code", "title", "type", "url", "version"),
    }
    assert citation["type"] == "software"
    assert citation["version"] == PROJECT["version"]
    assert citation["license"] == PROJECT["license"]
    assert citation["repository-code"] == HOME
    names = [author["name"] for author in citation["authors"]]
    assert names == [author["name"] for author in PROJECT["authors"]]


# --- issue forms, workflows and updates ----------------------------------------------------------

KINDS = {"textarea", "input", "dropdown", "checkboxes", "markdown"}


@pytest.mark.parametrize("file", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_has_the_keys_of_the_schema(file: Path) -> None:
    form = load(file)
    assert set(form) <= {"name", "description", "labels", "title", "body"}
    fields = form["body"]
    identifiers = [field["id"] for field in fields]
    assert len(set(identifiers)) == len(identifiers)
    for field in fields:
        assert set(field) <= {"type", "id", "attributes", "validations"}
        assert field["type"] in KINDS
        assert field["attributes"]["label"]
        assert bool(field["attributes"].get("options")) is (field["type"] == "dropdown")
    assert any(field.get("validations", {}).get("required") for field in fields)


def test_forms_cannot_be_passed_by() -> None:
    config = load(GITHUB / "ISSUE_TEMPLATE" / "config.yml")
    assert config["blank_issues_enabled"] is False
    assert {file.name for file in (GITHUB / "ISSUE_TEMPLATE").iterdir()} == {
        "config.yml",
        *(file.name for file in FORMS),
    }


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_to_a_commit(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    used = re.findall(r"uses: (.+)$", text, re.MULTILINE)
    assert used
    loose = [
        use for use in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", use)
    ]
    assert loose == []


def test_one_action_has_one_version() -> None:
    used = set()
    for file in WORKFLOWS:
        used |= set(re.findall(r"uses: (\S+)", file.read_text(encoding="utf-8")))
    names = [use.partition("@")[0] for use in used]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_only_read(file: Path) -> None:
    workflow = load(file)
    assert workflow["permissions"] == {"contents": "read"}
    extra = {
        name: job["permissions"] for name, job in workflow["jobs"].items() if "permissions" in job
    }
    assert extra in ({}, {"publish": {"id-token": "write"}})
    assert "pull_request_target" not in file.read_text(encoding="utf-8")


def targets_of(words: str) -> set[str]:
    """The make targets among the words of a command."""
    targets = set(re.findall(r"^([a-z][a-z-]*):", MAKEFILE, re.MULTILINE))
    return targets & set(words.split())


def test_public_ci_makes_what_ci_makes() -> None:
    own: set[str] = set()
    for line in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines():
        if re.match(r"\s*(stage|if make) ", line):
            own |= targets_of(line)
    public: set[str] = set()
    fast_versions: list[str] = []
    for job in load(GITHUB / "workflows" / "ci.yml")["jobs"].values():
        matrix = job.get("strategy", {}).get("matrix", {})
        for step in job["steps"]:
            command = step.get("run", "")
            for target in matrix.get("target", ["?"]):
                words = command.replace("${{ matrix.target }}", target)
                public |= targets_of(words)
            if command == "make test":
                fast_versions = matrix["python"]
    # vLLM's build for the CPU is not made by its project; the contract tests run in .ci/run.
    assert public == own - {"test-vllm"}
    assert len(fast_versions) == 2
    assert fast_versions[0] == "3.11"


def test_the_updates_are_of_what_is_here() -> None:
    config = load(GITHUB / "dependabot.yml")
    assert config["version"] == 2
    files = {"github-actions": ".github/workflows", "pip": "pyproject.toml", "docker": "Dockerfile"}
    assert {update["package-ecosystem"] for update in config["updates"]} == set(files)
    for update in config["updates"]:
        assert update["schedule"]["interval"] == "monthly"
        assert (ROOT / files[update["package-ecosystem"]]).exists()


# --- the release ---------------------------------------------------------------------------------

problems_of = runpy.run_path(str(ROOT / ".ci" / "check_release.py"))["problems_of"]


@pytest.fixture
def release(tmp_path: Path) -> Path:
    """The files that the check reads, with a changelog that is ready."""
    for name in ("pyproject.toml", "CITATION.cff"):
        shutil.copy(ROOT / name, tmp_path)
    write_changelog(tmp_path, f"{PROJECT['version']} - 2026-12-01")
    return tmp_path


def write_changelog(folder: Path, heading: str, entry: str = "- An entry.") -> None:
    (folder / "CHANGELOG.md").write_text(
        f"# Changelog\n\n## {heading}\n\n{entry}\n\n## 0.0.1 - 2025-01-01\n"
    )


def test_a_release_that_is_ready(release: Path) -> None:
    assert problems_of(f"v{PROJECT['version']}", release) == []


@pytest.mark.parametrize("tag", ["0.1.0", "v1", "v1.2", "vnext", "v0.1.0-dirty"])
def test_other_tags_are_not_released(release: Path, tag: str) -> None:
    (problem,) = problems_of(tag, release)
    assert "is not a tag like v1.2.3" in problem


def test_a_tag_of_another_version(release: Path) -> None:
    problems = " ".join(problems_of("v9.9.9", release))
    for part in ("pyproject.toml has version", "CITATION.cff does not have", "CHANGELOG.md is"):
        assert part in problems


@pytest.mark.parametrize(
    ("heading", "entry", "words"),
    [
        ("0.1.0 (not released yet)", "- An entry.", "newest heading"),
        ("0.1.0 - soon", "- An entry.", "no date"),
        ("0.1.0 - 2026-12-01", "Nothing.", "says nothing of 0.1.0"),
    ],
)
def test_a_changelog_that_is_not_ready(release: Path, heading: str, entry: str, words: str) -> None:
    write_changelog(release, heading, entry)
    (problem,) = problems_of("v0.1.0", release)
    assert words in problem


def test_the_changelog_of_this_checkout_lacks_at_most_its_date() -> None:
    problems = problems_of(f"v{PROJECT['version']}")
    assert all("newest heading" in problem for problem in problems)


def test_the_release_runs_the_check_before_it_builds() -> None:
    steps = load(GITHUB / "workflows" / "release.yml")["jobs"]["build"]["steps"]
    commands = [step.get("run", "") for step in steps]
    check = commands.index('python .ci/check_release.py "$GITHUB_REF_NAME"')
    assert check < next(i for i, command in enumerate(commands) if "hatchling build" in command)
    done = subprocess.run(
        [sys.executable, ROOT / ".ci" / "check_release.py", "v9.9.9"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "9.9.9" in done.stderr


# --- the Dockerfile ------------------------------------------------------------------------------


def instructions() -> list[tuple[str, str]]:
    """(instruction, arguments) of each line; continued lines joined, comments left out."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    parts = [line.partition(" ") for line in joined.splitlines() if line.strip()]
    return [(name, arguments) for name, _, arguments in parts]


def arguments_of(name: str) -> list[str]:
    return [arguments for instruction, arguments in instructions() if instruction == name]


def test_the_image_has_a_pinned_base() -> None:
    (base,) = arguments_of("FROM")
    assert re.fullmatch(
        r"nvidia/cuda:\d+\.\d+\.\d+-base-ubuntu\d\d\.\d\d(@sha256:[0-9a-f]{64})?", base
    )
    assert instructions()[0][0] == "FROM"


def test_the_image_does_not_run_as_root() -> None:
    names = [name for name, _ in instructions()]
    assert arguments_of("USER") == ["grouper"]
    # What follows cannot need more rights.
    assert not {"RUN", "COPY", "ADD"} & set(names[names.index("USER") :])
    assert "ADD" not in names
    commands = " ".join(arguments_of("RUN"))
    for word in ("sudo", "curl", "wget", "chmod 777", "--break-system-packages"):
        assert word not in commands
    assert re.search(r"useradd --uid \d{5}", commands)


def test_what_the_image_copies_is_here_and_in_its_context() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert "*" in ignored
    allowed = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    copied = set()
    for arguments in arguments_of("COPY"):
        *sources, target = arguments.split()
        assert target.startswith("/")
        copied |= set(sources)
    assert [name for name in copied if not (ROOT / name).exists()] == []
    assert copied == allowed
    # The build reads these as well.
    assert {PROJECT["readme"], *PROJECT["license-files"], "src"} <= copied


def test_torch_goes_first_into_the_image() -> None:
    (torch,) = re.findall(r"^TORCH \?= (\S+)$", MAKEFILE, re.MULTILINE)
    assert f"TORCH={torch}" in arguments_of("ARG")
    installs = [command for command in arguments_of("RUN") if "pip install" in command]
    assert ['"$TORCH"' in command for command in installs] == [True, False]
    assert '"/src[$EXTRAS]"' in installs[1]
    (extras,) = [arg.partition("=")[2] for arg in arguments_of("ARG") if arg.startswith("EXTRAS")]
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    assert arguments_of("ENTRYPOINT") == ['["grouper"]']


# --- licenses of data ----------------------------------------------------------------------------


def test_every_data_set_that_can_be_read_has_its_row() -> None:
    text = (ROOT / "DATA_LICENSES.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.+?) \| (.+?) \| (.+?) \|$", text, re.MULTILINE)
    by_name = {}
    for names, hub, license_text in rows:
        for name in re.findall(r"`([\w-]+)`", names):
            by_name[name] = (hub, license_text)
    for name, source in SOURCES.items():
        hub, license_text = by_name[name]
        if source.hub is not None:
            assert hub == source.hub
        # The license that `grouper data list` names is the one here.
        for known in ("MIT", "CC BY-NC"):
            assert license_text.startswith(known) is (f"({known})" in source.description)
    for name, suite in SUITES.items():
        if suite["data"]["source"] == "hub":
            assert by_name[name][0] == suite["data"]["path"]
