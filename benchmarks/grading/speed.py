"""Grading beside Math-Verify, in the same run, on the same strings.

    python -m benchmarks.grading.speed           # about five minutes; needs ../shared/data for MATH

    python -m benchmarks.grading.speed --kinds   # symbolic pairs by kind of answer; writes nothing

Each measurement is repeated with the two graders taking turns, so that other work on the machine
slows both alike:

    numbers    plain numbers, all strings distinct, half of them wrong, one thread
    symbolic   pairs that reach the symbolic stage, with one process and with two, and by kind of
               answer (surds, surd fractions, intervals, ...) with one
    mixture    the MATH answers of ../shared/data/math/sft.jsonl, with one process and with two

Grouper's time includes extraction, every stage and the grade's record.
Math-Verify's includes its own extraction; its time-outs are off, which is its fastest setting.
Processes are fresh each time and warmed on one pair; starting them is not counted.
Writes benchmarks/results/grading.json and the table of docs/grading.md.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.checkout import RESULTS, ROOT, importing_from
from grouper.config.schema import GradingConfig
from grouper.grading import Grader
from grouper.grading.equivalence import exact
from grouper.types import AnswerContract, AnswerKind

DATA = ROOT.parent / "shared" / "data" / "math"
RESULT = RESULTS / "grading.json"
PAGE = ROOT / "docs" / "grading.md"
REPEATS = 5
NUMBERS = 20_000
NUMBERS_MATH_VERIFY = 1_000
BOXED = AnswerContract(kind=AnswerKind.BOXED)
TAG = AnswerContract(kind=AnswerKind.TAG, open="<answer>", close="</answer>")
WARM_UP = (r"\boxed{<answer>\sqrt{12}</answer>}", r"2\sqrt{3}")
Rows = list[tuple[str, str]]
"""(completion, reference)."""


# --- rows --------------------------------------------------------------------------------------


def number_rows(count: int, seed: int) -> Rows:
    rng = random.Random(seed)
    rows = []
    for index in range(count):
        value = rng.randint(-(10**7), 10**7)
        said = value if index % 2 else value + rng.randint(1, 99)
        shown = f"{said:,}" if index % 5 == 0 else f"{said}.00" if index % 7 == 0 else f"{said}"
        text = f"Step {index} of run {seed} leaves that, so the answer is \\boxed{{{shown}}}."
        rows.append((text, str(value)))
    return rows


def math_references() -> list[str]:
    files = [(DATA / f"{name}.jsonl").open() for name in ("train", "validation")]
    return sorted({json.loads(line)["answer"] for file in files for line in file} - {""})


_SURD = re.compile(r"(\d+) ?\\sqrt\{(\d+)\}")
_SUM = re.compile(r"([^-+(){}\\,=]+(?:\\sqrt\{?\d+\}?)?) ?\+ ?([^-+(){}\\,=]+(?:\\sqrt\{?\d+\}?)?)")


def rewritten(reference: str) -> str:
    r"""The same value in other words: `2\sqrt{3}` as `\sqrt{12}`, `a + b` as `b + a`."""
    if match := _SURD.fullmatch(reference):
        return rf"\sqrt{{{int(match[1]) ** 2 * int(match[2])}}}"
    if match := _SUM.fullmatch(reference):
        return f"{match[2]} + {match[1]}"
    return reference


KINDS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (name, re.compile(pattern))
    for name, pattern in (
        ("matrices", r"\\begin"),
        ("regions", r"\\infty|\\cup|[<>]|\\(?:le|ge|in)(?![a-z])|^[\[(].*\]$|^\[.*\)$"),
        ("equations", r"="),
        ("tuples and lists", r","),
        ("trigonometry and logarithms", r"\\(?:sin|cos|tan|cot|sec|csc|log|ln)(?![a-z])"),
        ("surd fractions", r"(?=.*\\[dt]?frac)(?=.*\\sqrt)"),
        ("surds", r"\\sqrt"),
        ("fractions of expressions", r"\\[dt]?frac"),
        ("powers and polynomials", r"[a-zA-Z].*[-+^]|[-+^].*[a-zA-Z]"),
    )
)
ROWS_PER_KIND = 120


def kind_of(reference: str) -> str:
    return next((name for name, pattern in KINDS if pattern.search(reference)), "others")


def rows_by_kind() -> dict[str, Rows]:
    found: dict[str, Rows] = {}
    for text, reference in symbolic_rows(20_000):
        rows = found.setdefault(kind_of(reference), [])
        if len(rows) < ROWS_PER_KIND:
            rows.append((text, reference))
    return {name: rows for name, rows in sorted(found.items()) if len(rows) >= ROWS_PER_KIND // 4}


def symbolic_rows(count: int = 600) -> Rows:
    """MATH references against rewritten ones and against others; only what needs a worker."""
    references = math_references()
    others = references[:]
    random.Random(0).shuffle(others)
    pairs = [(rewritten(r), r) for r in references]
    pairs += [(a, b) for a, b in zip(references, others, strict=True) if a != b]
    pairs = [(a, b) for a, b in pairs if exact(a, b) is None]
    random.Random(1).shuffle(pairs)
    return [(rf"so \boxed{{{a}}}", b) for a, b in pairs[:count]]


def mixture_rows() -> Rows:
    rows = (json.loads(line) for line in (DATA / "sft.jsonl").open())
    return [(row["response"], row["ground_truth"]) for row in rows]


# --- the two graders -----------------------------------------------------------------------------


def grouper_seconds(
    rows: Rows, contract: AnswerContract, workers: int
) -> tuple[float, Counter[str]]:
    """Wall time in a fresh grader, and how many rows each stage decided."""
    with Grader(contract, GradingConfig(timeout_seconds=20), workers=workers) as grader:
        _start_all(grader, workers)
        columns = _columns(rows)
        started = time.perf_counter()
        grades = grader.grade(*columns)
        seconds = time.perf_counter() - started
    return seconds, Counter(grade.stage for grade in grades)


def _start_all(grader: Grader, workers: int) -> None:
    """Every worker started and warm: as many requests at once as it takes."""
    grader.grade(*_columns([WARM_UP]))
    turn = 0
    while len(grader.worker_pids) < workers:
        turn += 1
        surds = [rf"\sqrt{{{97 * turn + i}}}" for i in range(40)]
        grader.grade(
            *_columns([(f"<answer>{s}</answer>\\boxed{{{s}}}", r"7\sqrt{3}") for s in surds])
        )


def _columns(rows: Sequence[tuple[str, str]]) -> tuple[list[str], list[str]]:
    return [text for text, _ in rows], [reference for _, reference in rows]


def math_verify_seconds(rows: Rows, processes: int) -> float:
    """Wall time of the slowest of `processes` fresh processes that share the rows."""
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.grading.speed", "--math-verify"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**importing_from(ROOT), "OMP_NUM_THREADS": "1"},
        )
        for _ in range(processes)
    ]
    for number, process in enumerate(running):
        assert process.stdin is not None
        process.stdin.write(json.dumps(rows[number::processes]) + "\n")
        process.stdin.flush()
    for process in running:  # all are warm before any begins
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in running:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    return max(float(process.communicate()[0]) for process in running)


def math_verify_process() -> None:
    """What each of those processes does."""
    logging.disable(logging.CRITICAL)
    from math_verify import parse, verify

    def judge(text: str, reference: str) -> bool:
        gold = parse(f"${reference}$", parsing_timeout=None)
        return bool(verify(gold, parse(text, parsing_timeout=None), timeout_seconds=None))

    rows = json.loads(sys.stdin.readline())
    judge(*WARM_UP)
    print("ready", flush=True)
    sys.stdin.readline()
    started = time.perf_counter()
    for text, reference in rows:
        judge(text, reference)
    print(time.perf_counter() - started)


# --- measuring -----------------------------------------------------------------------------------


def taking_turns(
    ours: Callable[[int], float], theirs: Callable[[int], float]
) -> dict[str, dict[str, float]]:
    times: dict[str, list[float]] = {"grouper": [], "math_verify": []}
    for turn in range(REPEATS):
        times["grouper"].append(ours(turn))
        times["math_verify"].append(theirs(turn))
    return {
        name: {"min": min(seen), "median": statistics.median(seen), "max": max(seen)}
        for name, seen in times.items()
    }


def compared(
    name: str, rows: int, theirs: int, processes: int, seconds: dict[str, Any]
) -> dict[str, Any]:
    rate = {
        "grouper": {k: rows / v for k, v in seconds["grouper"].items()},
        "math_verify": {k: theirs / v for k, v in seconds["math_verify"].items()},
    }
    result = {
        "name": name,
        "processes": processes,
        "rows": rows,
        "rows_math_verify": theirs,
        "seconds": seconds,
        "per_second": {who: round(r["median"], 1) for who, r in rate.items()},
        "times_as_fast": {
            key: round(rate["grouper"][key] / rate["math_verify"][key], 3)
            for key in ("min", "median")
        },
    }
    print(json.dumps(result), flush=True)
    return result


def numbers() -> dict[str, Any]:
    def ours(turn: int) -> float:
        return grouper_seconds(number_rows(NUMBERS, turn), BOXED, 1)[0]

    def theirs(turn: int) -> float:
        return math_verify_seconds(number_rows(NUMBERS_MATH_VERIFY, turn), 1)

    seconds = taking_turns(ours, theirs)
    return compared("numbers", NUMBERS, NUMBERS_MATH_VERIFY, 1, seconds)


def pairs(name: str, rows: Rows, contract: AnswerContract, processes: int) -> dict[str, Any]:
    stages: Counter[str] = Counter()

    def ours(turn: int) -> float:  # noqa: ARG001 - every turn grades the same rows afresh
        seconds, found = grouper_seconds(rows, contract, processes)
        stages.clear()
        stages.update(found)
        return seconds

    seconds = taking_turns(ours, lambda _: math_verify_seconds(rows, processes))
    result = compared(name, len(rows), len(rows), processes, seconds)
    result["share_by_stage"] = {stage: n / len(rows) for stage, n in sorted(stages.items())}
    return result


def kinds() -> list[dict[str, Any]]:
    return [pairs(f"symbolic: {name}", rows, BOXED, 1) for name, rows in rows_by_kind().items()]


def machine() -> dict[str, Any]:
    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    dirty = git("status", "--porcelain", "src/grouper/grading")
    return {
        "commit": git("rev-parse", "HEAD") + (" with changes" if dirty else ""),
        "cpu": cpu,
        "cores": os.cpu_count(),
        "load_at_start": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "math_verify": version("math-verify"),
        "sympy": version("sympy"),
    }


def table(record: dict[str, Any]) -> str:
    lines = [
        "| rows | processes | Grouper /s | Math-Verify /s | times as fast (median) | (best) |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['name']} ({r['rows']:,}) | {r['processes']} | {r['per_second']['grouper']:,.0f} "
        f"| {r['per_second']['math_verify']:,.0f} | {r['times_as_fast']['median']:.2f} "
        f"| {r['times_as_fast']['min']:.2f} |"
        for r in record["results"]
    ]
    mixture = next(r for r in record["results"] if r["name"] == "mixture")
    shares = ", ".join(f"{k} {100 * v:.1f} %" for k, v in mixture["share_by_stage"].items())
    where = record["machine"]
    lines += [
        "",
        f"Decided by stage in the mixture: {shares}.",
        "",
        f"Commit {where['commit'][:12]}, {where['cpu']}, {where['cores']} cores, Python",
        f"{where['python']}, Math-Verify {where['math_verify']}, sympy {where['sympy']}.",
        f"{REPEATS} turns of each, taken alternately. Other work shared the machine (load",
        f"{where['load_at_start']} at the start), so ratios say more than rates.",
    ]
    return "\n".join(lines)


def main() -> None:
    record: dict[str, Any] = {"machine": machine(), "results": [numbers()]}
    symbolic, mixture = symbolic_rows(), mixture_rows()
    for processes in (1, 2):
        record["results"].append(pairs("symbolic", symbolic, BOXED, processes))
        record["results"].append(pairs("mixture", mixture, TAG, processes))
    record["results"] += kinds()
    RESULT.write_text(json.dumps(record, indent=2) + "\n")
    page = PAGE.read_text(encoding="utf-8")
    marks = "<!-- written by benchmarks/grading/speed.py -->", "<!-- end -->"
    head, _, rest = page.partition(marks[0])
    tail = rest.partition(marks[1])[2]
    PAGE.write_text(f"{head}{marks[0]}\n\n{table(record)}\n\n{marks[1]}{tail}", encoding="utf-8")


if __name__ == "__main__":
    if "--math-verify" in sys.argv:
        math_verify_process()
    elif "--kinds" in sys.argv:
        kinds()
    else:
        main()
