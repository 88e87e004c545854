"""The runner of programs: what they print, why they fail, and that they cannot get out."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from gates import missing
from programs.hostile import ESCAPES, GLUTTONS

from grouper.errors import ConfigError
from grouper.programs import runner as runner_module
from grouper.programs import seccomp
from grouper.programs.runner import (
    MODULES,
    Limits,
    ProgramResult,
    ProgramRunner,
    available_isolation,
    require_isolation,
)

if available_isolation() != "seccomp":
    missing("this machine has no filter of system calls")

# Memory and time small enough that what takes everything ends soon.
TIGHT = Limits(seconds=0.5, clock_seconds=1.0, memory_bytes=128 * 2**20, output_bytes=2000)


@pytest.fixture(scope="module")
def runner() -> Iterator[ProgramRunner]:
    with ProgramRunner(Limits(seconds=10.0), workers=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def tight() -> Iterator[ProgramRunner]:
    with ProgramRunner(TIGHT, workers=1) as opened:
        yield opened


# --- what a program says -------------------------------------------------------------------------


def test_a_program_is_what_it_prints(runner: ProgramRunner) -> None:
    result = runner.run(
        "from fractions import Fraction\nprint(sum(Fraction(1, n) for n in (2, 3)))"
    )
    assert (result.status, result.output, result.reason) == ("finished", "5/6\n", "")


@pytest.mark.parametrize("module", MODULES)
def test_modules_of_the_list_are_there(module: str, runner: ProgramRunner) -> None:
    assert runner.run(f"import {module}\nprint({module}.__name__)").output == f"{module}\n"


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("x = 1\n1 / 0", "program failed: line 2, ZeroDivisionError: division by zero"),
        ("def f():\n  return y\nf()", "program failed: line 2, NameError: name 'y' is not defined"),
        ("def f(:", "program failed: line 1, SyntaxError: invalid syntax (<program>, line 1)"),
        ("import numpy", "program failed: line 1, ModuleNotFoundError: No module named 'numpy'"),
        (
            "import math\nmath.sqrt('a')",
            "program failed: line 2, TypeError: must be real number, not str",
        ),
        ("import os\nos._exit(3)", "program ended early: exit code 3"),
        ("raise SystemExit('no')", "program failed: line 1, SystemExit: no"),
    ],
)
def test_an_error_is_told_with_its_line(program: str, reason: str, runner: ProgramRunner) -> None:
    assert runner.run(program).reason == reason


@pytest.mark.parametrize("program", ["print(1); exit()", "import sys; print(1); sys.exit(0)"])
def test_a_program_may_end_itself(program: str, runner: ProgramRunner) -> None:
    assert runner.run(program) == ProgramResult(
        status="finished", output="1\n", seconds=pytest.approx(0, abs=10)
    )


def test_what_was_printed_before_an_error_is_kept(runner: ProgramRunner) -> None:
    result = runner.run("print('before')\nraise KeyError('k')")
    assert (result.status, result.output, result.error) == ("failed", "before\n", "KeyError")


def test_programs_know_nothing_of_each_other(runner: ProgramRunner) -> None:
    assert runner.run("import math\nmath.pi = 3\nkept = 1").status == "finished"
    assert runner.run("import math\nprint(math.pi == 3, 'kept' in globals())").output == (
        "False False\n"
    )


def test_any_text_is_a_program_or_an_error(runner: ProgramRunner) -> None:
    for text in ("", "\n", "\x00", "\ud800", "print('ä€😀')", "é = 1\nprint(é)", "#" * 10**6):
        assert runner.run(text).status in ("finished", "failed")
    assert runner.run("print('ä€😀')").output == "ä€😀\n"


def test_a_forged_report_is_an_error_at_most(runner: ProgramRunner) -> None:
    for forgery in ("b'{'", "b'[]'", "b'{\"error\": 1}'", "b'[' * 4000"):
        result = runner.run(f"import os; os.write(3, {forgery}); print(4)")
        assert (result.status, result.output) == ("failed", "4\n")


@pytest.mark.parametrize("code", [*range(1, 5), 70, 255])
def test_no_exit_code_of_a_program_ends_the_run(code: int, runner: ProgramRunner) -> None:
    """A program that was isolated cannot say that it was not."""
    result = runner.run(f"import os; os._exit({code})")
    assert (result.status, result.text) == ("died", f"exit code {code}")


def test_a_forged_report_does_not_hide_a_timeout(tight: ProgramRunner) -> None:
    forged = '{"error": "E", "text": "", "line": 1}'
    result = tight.run(f"import os; os.write(3, {forged.encode()!r})\nwhile True: pass")
    assert result.status == "timeout"


# --- what it cannot do ---------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "there").write_text("kept")
    return tmp_path


@pytest.mark.parametrize("kind", ESCAPES)
def test_a_program_cannot_get_out(kind: str, folder: Path, tight: ProgramRunner) -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    try:
        program = (
            ESCAPES[kind].replace("{folder}", str(folder)).replace("{pid}", str(bystander.pid))
        )
        result = tight.run(program)
        assert "ESCAPED" not in result.output
        assert result.seconds < 5
        assert [path.name for path in folder.iterdir()] == ["there"]
        assert (folder / "there").read_text() == "kept"
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
    assert tight.run("print(1)").output == "1\n"


@pytest.mark.parametrize("kind", GLUTTONS)
def test_a_program_cannot_take_everything(kind: str, tight: ProgramRunner) -> None:
    started = time.monotonic()
    result = tight.run(GLUTTONS[kind])
    assert time.monotonic() - started < 5
    assert len(result.output) <= TIGHT.output_bytes
    assert len(result.text) <= 300
    assert tight.run("print(1)").output == "1\n"


def test_nothing_is_left_running(tight: ProgramRunner) -> None:
    """Programs are children of the worker, which has none when it is idle."""
    for program in ("while True: pass", "import os; os.close(1); os.close(3)\nwhile True: pass"):
        tight.run(program)
    workers = _children(os.getpid(), "worker.py")
    assert workers
    assert [_children(worker, "") for worker in workers] == [[]] * len(workers)


def _children(parent: int, name: str) -> list[int]:
    """Processes of a parent whose command line has `name`."""
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            lines = dict(
                line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line
            )
            command = (status.parent / "cmdline").read_text()
        except OSError:
            continue
        if int(lines["PPid"]) == parent and name in command and not lines["State"].startswith("Z"):
            found.append(int(status.parent.name))
    return found


def test_a_program_that_computes_is_stopped_by_the_processor_and_one_that_waits_by_the_clock() -> (
    None
):
    limits = Limits(seconds=0.3, clock_seconds=60.0)
    with ProgramRunner(limits, workers=1) as runner:
        result = runner.run("while True: pass")
        assert result.status == "timeout"
        assert result.seconds < 30
    limits = Limits(seconds=60.0, clock_seconds=0.3)
    with ProgramRunner(limits, workers=1) as runner:
        assert runner.run("import time; time.sleep(100)").status == "timeout"


@pytest.mark.parametrize(
    "program",
    [
        "import _signal; _signal.signal(_signal.SIGPROF, _signal.SIG_IGN)",
        "import os; os.close(3)",
        "import os; os.write(3, b'done')",
        "import os; os.close(1); os.close(3)",
    ],
)
def test_a_program_cannot_hide_that_it_took_too_long(program: str) -> None:
    """It printed an answer, and was taken for one that had finished."""
    with ProgramRunner(Limits(seconds=0.3, clock_seconds=20.0), workers=1) as runner:
        result = runner.run(f"print(42, flush=True)\n{program}\nwhile True: pass")
    assert result.status == "timeout"


def test_texts_of_errors_can_be_encoded() -> None:
    """A model writes halves of characters; tokenizers and files take none."""
    with ProgramRunner(workers=1) as runner:
        result = runner.run(r"raise ValueError('\ud83d')")
        assert result.text == "?"
        assert runner.run(r"print('\ud83d')").output.encode("utf-8")


def test_programs_that_wait_are_given_up_where_the_runner_closes() -> None:
    with ProgramRunner(Limits(seconds=60.0, clock_seconds=60.0), workers=1) as runner:
        futures = [runner.submit(f"while True: pass  # {number}") for number in range(3)]
        time.sleep(0.5)
        started = time.monotonic()
    assert time.monotonic() - started < 10
    assert all(future.cancelled() or future.exception() is not None for future in futures)


def test_a_program_prints_the_same_in_every_worker() -> None:
    """Random numbers and the order of sets come from a seed that is always the same."""
    program = "import random\nprint(random.random(), {str(n) for n in range(50)})"
    outputs = set()
    for _ in range(2):
        with ProgramRunner(workers=1) as runner:
            outputs |= {runner.run(program).output for _ in range(2)}
    assert len(outputs) == 1


def test_a_worker_that_is_killed_is_replaced(runner: ProgramRunner) -> None:
    assert runner.run("print(1)").output == "1\n"
    for worker in _children(os.getpid(), "worker.py"):
        os.kill(worker, 9)
    assert runner.run("print(2)").output == "2\n"


@pytest.mark.slow
@pytest.mark.long  # some minutes
@pytest.mark.timeout(1800)
def test_ten_thousand_hostile_programs(folder: Path) -> None:
    """Over 60 kinds; no escape, no hang, nothing left."""
    kinds = {**ESCAPES, **GLUTTONS}
    assert len(kinds) >= 60
    programs = []
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3000)"])
    for number in range(10_000):
        text = list(kinds.values())[number % len(kinds)]
        programs.append(text.replace("{folder}", str(folder)).replace("{pid}", str(bystander.pid)))
    limits = Limits(seconds=0.2, clock_seconds=0.5, memory_bytes=64 * 2**20, output_bytes=2000)
    try:
        with ProgramRunner(limits, workers=2) as runner:
            results = list(runner.map(programs))
        assert not [result for result in results if "ESCAPED" in result.output]
        assert max(result.seconds for result in results) < 5
        assert [path.name for path in folder.iterdir()] == ["there"]
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


@pytest.mark.slow
@pytest.mark.long  # a rate, of an idle machine
def test_a_warm_call_takes_ten_milliseconds(runner: ProgramRunner) -> None:
    seconds = []
    for _ in range(100):
        started = time.perf_counter()
        runner.run("print(6 * 7)")
        seconds.append(time.perf_counter() - started)
    assert statistics.median(seconds) < 0.010


# --- machines without a filter -------------------------------------------------------------------


def test_weaker_isolation_than_asked_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seccomp, "is_known", lambda: False)
    with pytest.raises(ConfigError, match="has no filter of system calls"):
        require_isolation("seccomp", where="tools.isolation")
    require_isolation("limits", where="tools.isolation")


def test_a_program_that_cannot_be_isolated_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker's filter fails: the program's first line is never reached."""
    folder = tmp_path / "programs"
    folder.mkdir()
    here = Path(runner_module.__file__).parent
    (folder / "worker.py").write_text((here / "worker.py").read_text())
    (folder / "seccomp.py").write_text("def restrict():\n    raise OSError('refused')\n")
    monkeypatch.setattr(runner_module, "__file__", str(folder / "runner.py"))
    with ProgramRunner(workers=1) as broken, pytest.raises(ConfigError, match="not run"):
        broken.run(f"open({str(tmp_path / 'x')!r}, 'w')")
    assert not (tmp_path / "x").exists()


def test_limits_alone_still_end_a_program() -> None:
    with ProgramRunner(TIGHT, workers=1, isolation="limits") as runner:
        assert runner.run("while True: pass").status == "timeout"
        assert runner.run("x = bytearray(10**10)").error == "MemoryError"
        assert runner.run("import os\nprint(os.listdir('/') != [])").output == "True\n"


SYMPY = {
    "solve(x**2 - 5*x + 6, x)": "[2, 3]",
    "solve([x + y - 3, x - y - 1], [x, y])": "{x: 2, y: 1}",
    "integrate(sin(x), (x, 0, pi))": "2",
    "limit(sin(x) / x, x, 0)": "1",
    "summation(x, (x, 1, 10))": "55",
    "Matrix([[1, 2], [3, 4]]).det()": "-2",
    "simplify((x**2 - 1) / (x - 1))": "x + 1",
    "factor(x**2 - 1)": "(x - 1)*(x + 1)",
    "Point(0, 0).distance(Point(3, 4))": "5",
}


def test_a_package_may_be_allowed() -> None:
    limits = Limits(seconds=20, clock_seconds=60, memory_bytes=2**30)
    with ProgramRunner(limits, workers=1, packages=["sympy"]) as runner:
        result = runner.run("import sympy\nprint(sympy.factorint(360))")
        assert result.output == "{2: 3, 3: 2, 5: 1}\n"
        assert runner.run("import torch").error == "ModuleNotFoundError"
        # It imports parts of itself when they are first used, where there are no files.
        for line, printed in SYMPY.items():
            result = runner.run(f"from sympy import *\nx, y = symbols('x y')\nprint({line})")
            assert (result.output, result.reason) == (f"{printed}\n", "")
    with pytest.raises(ConfigError, match="nowhere_to_be_found is not installed"):
        ProgramRunner(packages=["nowhere_to_be_found"])


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_has_one_verdict_for_each_call(machine: str) -> None:
    """Instructions are 8 bytes; jumps skip one instruction, and the last one refuses."""
    program = seccomp.filter_program(machine)
    assert len(program) % 8 == 0
    assert program[-8:-4] == b"\x06\x00\x00\x00"
    numbers = list(seccomp._CALLS[machine][1].values())
    assert len(set(numbers)) == len(numbers)
