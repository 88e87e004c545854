"""Every command that README, docs, --help and files for agents print is run as it stands there.

The recipe `demo` is a smaller one here, so that a run takes seconds; the files and runs that a
command names are put where it looks for them. A command that needs the Hub gets as far as the Hub:
its options are understood, and what is missing is the model or the data.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import click
import pytest
import yaml
from cli.conftest import SMALL, Called, Grouper, call
from gates import SHARED_DATA, missing

from grouper.cli.main import cli
from grouper.config import loading as recipes
from grouper.config.overrides import as_json

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
# What stands for something else in a line that shows how a command is written.
PLACEHOLDER = re.compile(r"\b(RECIPE|COMMAND|TEXT|ANSWER|FORMAT|FILE|SOURCE|RUN)\b")
TINY = ("data.validation.options.count=4", "sft.evaluate_every=0", "grpo.evaluate_every=0")


def commands_in(text: str) -> Iterator[str]:
    """The commands of a text: continued lines joined, what explains them left out."""
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        command = re.split(r"\s+#\s|(?<!\s)\s{3,}(?=[^-\"])", line.strip())[0]
        if command.startswith("grouper ") and not PLACEHOLDER.search(command):
            yield command


def helps(command: click.Command, name: str) -> Iterator[str]:
    """The examples of a command and of those inside it."""
    yield from commands_in(command.epilog or "")
    if isinstance(command, click.Group):
        context = click.Context(command)
        for inner in command.list_commands(context):
            found = command.get_command(context, inner)
            assert found is not None
            yield from helps(found, f"{name} {inner}")


def printed() -> list[str]:
    """Every command, each once."""
    found = dict.fromkeys(helps(cli, "grouper"))
    pages = [ROOT / "README.md", ROOT / "AGENTS.md", ROOT / "src" / "grouper" / "cli" / "SKILL.md"]
    for page in (*pages, *sorted((ROOT / "docs").rglob("*.md"))):
        text = page.read_text(encoding="utf-8")
        for block in re.findall(r"```(?:bash|console)\n(.*?)```", text, re.DOTALL):
            found |= dict.fromkeys(commands_in(block))
    return list(found)


SHIPPED = {name for name, _ in recipes.list_recipes()}


def needs_hub(command: str) -> bool:
    """Whether a command's model or data come from the Hub, or its samples from vLLM."""
    if "vllm" in command or "serve-rollouts" in command:  # which is not installed here, either
        return True
    words = shlex.split(command)
    if words[1] == "push":
        return True
    named = set(words) & SHIPPED - {"demo"}
    kinds = {"run", "sft", "grpo", "eval", "preview", "plan", "bench", "generate"}
    hub = {"openmath-mini", "gsm8k", "numina-tir", "hub"}
    from_source = words[1:3] == ["data", "prepare"] and words[3] in hub
    suites = "--on" in words and words[1] in {"eval", "probe"}
    on_hub = suites and not any(word.endswith(".jsonl") for word in words)
    return (
        bool(named and words[1] in kinds) or from_source or "./qwen-gsm8k.yaml" in words or on_hub
    )


COMMANDS = printed()
LOCAL = [command for command in COMMANDS if not needs_hub(command)]


ROWS = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(40)]


def named_files(small: str) -> dict[str, str]:
    """File -> content, for every file that a command names; `small` is the recipe `demo`."""
    published = SHARED_DATA / "math" / "sft.jsonl"
    demonstrations = published.read_text("utf-8") if published.is_file() else ""
    page = (ROOT / "docs" / "your-own-model.md").read_text(encoding="utf-8")
    (recipe_of_the_page,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    return {
        "mine.yaml": small,
        "other.yaml": small,
        "sft.yaml": small,
        "qwen-gsm8k.yaml": recipe_of_the_page,
        "grpo.yaml": "num_generations: 8\nepsilon: 0.2\n",
        "four-stages.yaml": "{name: chain, recipe: demo, stages: [{name: a}], tables: {}}",
        "trl.yaml": "num_generations: 8\nepsilon: 0.2\n",
        "sft.json": '{"learning_rate": 1e-5}',
        "train.py": "from trl import GRPOConfig\n\nargs = GRPOConfig(num_generations=8)\n",
        "unique_256.yaml": "sft_data_path: sft.jsonl\nunique_train_examples: 256\n",
        "my_config.yaml": "sft_training: {learning_rate: 1e-4}\ngrpo_training: {max_steps: 9}\n",
        "in.jsonl": _lines(ROWS[:2]),
        "mine.jsonl": _lines(ROWS),
        "train.jsonl": _lines(ROWS),
        "sft.jsonl": demonstrations,
        "completions.jsonl": _lines([{"completion": "so \\boxed{4}", "answer": "4"}]),
        "ready/cot.jsonl": _lines(ROWS),
        "right.jsonl": _lines(
            [
                row | {"response": f"<reasoning>?</reasoning><answer>{row['answer']}</answer>"}
                for row in ROWS
            ]
        ),
    }


def put(command: str, *, texts: dict[str, str], finished_run: Path) -> None:
    """Put the files, runs and models that a command names into the working directory."""
    targets = set(re.findall(r"(?:-o|--output|>|grouper init) (\S+)", command))
    for name, text in texts.items():
        if name in targets:
            continue
        if name in command or (name.startswith("ready/") and "path: ready" in command):
            # A model of a few steps does not stop before the limit of a suite.
            few = command.startswith("grouper eval") and name == "mine.jsonl"
            Path(name).parent.mkdir(exist_ok=True)
            Path(name).write_text("".join(text.splitlines(keepends=True)[:4]) if few else text)
    # The recipe of `mine.yaml` is that of the finished run.
    needed = ("grouper runs", "grouper data difficulty demo", "grouper preview ./mine.yaml")
    runs = {"outputs/demo"} if command.startswith(needed) else set()
    for run in runs | set(re.findall(r"outputs/[\w-]+", command)):
        shutil.copytree(finished_run, run)
    made_here = command.startswith(("grouper new-model", "grouper export"))
    for file in set(re.findall(r"[\w.-]+\.gguf", command)):
        # Here, because it needs the package `gguf`.
        from gguf_files import TinyGguf

        TinyGguf().write(Path(file))
    for model in set(re.findall(r"\./(my-model|wider|teacher|models/mine)", command)):
        if not made_here:
            shutil.copytree(finished_run / "grpo" / "final", model)
    if by_name := re.search(r"run --resume ([\w-]+)$", command):
        call("run", "demo", f"name={by_name[1]}", "--quiet")
    put_certified(command, finished_run)
    if "pass_rates.jsonl" in command:
        call("data", "difficulty", "demo")


def put_certified(command: str, finished_run: Path) -> None:
    """Make copies of a run seeds, the control of a certificate one, or the certificate itself."""
    for run, seed in re.findall(r"(outputs/\w+-seed(\d+))", command):
        recipe = Path(run, "recipe.yaml")
        text = recipe.read_text("utf-8")
        recipe.write_text(re.sub(r"^seed: \d+$", f"seed: {seed}", text, flags=re.MULTILINE))
    if control := re.search(r"--control (\S+)", command):
        recipe = Path(control[1], "recipe.yaml")
        text = recipe.read_text("utf-8")
        recipe.write_text(text.replace("shuffle_rewards: false", "shuffle_rewards: true"))
    if "--check certificate.json" in command:
        shutil.copytree(finished_run, "outputs/demo")
        call("certify", "outputs/demo", "--output", "certificate.json")


@pytest.fixture
def place(
    tmp_path: Path, finished_run: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], None]:
    """Puts what a command names where it looks for it."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    if SHARED_DATA.is_dir():
        (tmp_path / "shared").symlink_to(SHARED_DATA.parent)
    demo = yaml.safe_load(recipes._read("demo")[0])
    as_json(demo, [*SMALL, *TINY], where="demo")
    small = yaml.safe_dump(demo)
    honest = recipes._read
    monkeypatch.setattr(
        recipes, "_read", lambda name: (small, "demo") if str(name) == "demo" else honest(name)
    )
    texts = named_files(small)

    return partial(put, texts=texts, finished_run=finished_run)


def _lines(rows: list[dict[str, str]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def shell(grouper: Grouper, line: str) -> Called:
    """A line as a shell runs it, as far as printed commands go: `&&`, `> FILE` and `| jq`."""
    called = Called(0, "", "")
    for part in line.split(" && "):
        command, _, target = part.partition(" > ")
        command, pipe, _ = command.partition(" | ")
        _, *words = shlex.split(command)
        # A server would go on until it is stopped.
        called = grouper(
            *words, *(["--dry-run"] if words[0] == "serve" and "--dry-run" not in words else [])
        )
        if called.code != 0:
            return called
        if target:
            Path(target).write_text(called.out)
        if pipe:
            json.loads(called.out)
    return called


@pytest.mark.parametrize("command", LOCAL)
def test_a_printed_command_does_what_is_said(
    grouper: Grouper, place: Callable[[str], None], command: str
) -> None:
    named = re.search(r"\./(gsm8k|math)[ /]|sft\.jsonl", command)
    if named and not SHARED_DATA.is_dir():
        missing("the shared problem sets are not beside this checkout")
    place(command)
    for folder in re.findall(r"\./(gsm8k|math)[ /]", command):
        Path(folder).symlink_to(SHARED_DATA / folder)
    called = shell(grouper, command)
    # These answer with 1 where they have found something, which tiny runs give them to find.
    finds = command.startswith(
        ("grouper preview", "grouper diagnose", "grouper rewards probe", "grouper certify")
    )
    assert called.code in ((0, 1) if finds else (0,)), called.err
    assert "Traceback" not in called.err
    assert called.out or called.err or "--nproc" in command, "it says nothing"


# Several processes would each say the same of the Hub.
HUB = [c for c in COMMANDS if needs_hub(c) and "--nproc" not in c]


@pytest.mark.parametrize("command", HUB)
def test_a_printed_command_gets_as_far_as_the_hub(
    grouper: Grouper, place: Callable[[str], None], command: str
) -> None:
    place(command)
    called = shell(grouper, command)
    assert "Traceback" not in called.err
    if called.code != 0:
        called.refused("error: ")
        assert "No such option" not in called.err
        assert "Usage" not in called.err


def test_all_of_it_is_found() -> None:
    assert len(LOCAL) > 50
    assert len(HUB) > 20
    assert "grouper grade 'so \\boxed{0.5}' --answer '\\frac12'" in COMMANDS
