"""The grader: deadlines, crashes, threads, event loops, forks, and input that means no good."""

from __future__ import annotations

import asyncio
import os
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest

from grouper.config.schema import GradingConfig
from grouper.errors import GradingError
from grouper.grading import Grader, grade, pool, require_symbolic
from grouper.types import AnswerContract, AnswerKind, Grade, Verdict

BOXED = AnswerContract(kind=AnswerKind.BOXED)
# The string of Math-Verify issue 65, which its own timeout cannot stop.
MATH_VERIFY_65 = r"\dfrac{5^{\left(5^{\left(5^{\left(5^5\right)}\right)} - 4\right)} - 5}{16}"
HANGS = r"\binom{1000000000}{500000000}"
SYMBOLIC = (r"\boxed{\sqrt{12}}", r"2\sqrt{3}")
ONE_PAIR = [SYMBOLIC[0]], [SYMBOLIC[1]]
BOXED_HANG = rf"\boxed{{{HANGS}}}"


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat").read_text()
    return stat.rpartition(")")[2].split()[0] != "Z"  # a zombie is dead


def _wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


def test_batch_verdicts_in_order() -> None:
    with Grader(BOXED, GradingConfig()) as grader:
        grades = grader.grade(
            [r"\boxed{4}", "4", r"\boxed{5}", SYMBOLIC[0]], ["4", "4", "4", SYMBOLIC[1]]
        )
        assert [g.verdict for g in grades] == [
            Verdict.CORRECT,
            Verdict.NO_ANSWER,
            Verdict.INCORRECT,
            Verdict.CORRECT,
        ]
        assert [g.stage for g in grades] == ["text", "extract", "number", "symbolic"]


def test_a_list_is_graded_without_futures(monkeypatch: pytest.MonkeyPatch) -> None:
    """To make one takes longer than to grade plain numbers."""
    made: list[Future[Grade]] = []

    class Counted(Future[Grade]):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    monkeypatch.setattr(pool, "Future", Counted)
    with Grader(BOXED, GradingConfig()) as grader:
        grades = grader.grade([r"\boxed{4}", "4", r"\boxed{5}"], ["4", "4", "4"])
        assert [one.correct for one in grades] == [True, False, False]
        assert made == []
        assert grader.submit(r"\boxed{4}", "4") in made


def test_lengths_must_agree() -> None:
    with Grader(BOXED, GradingConfig()) as grader, pytest.raises(ValueError, match="shorter"):
        grader.grade(["a", "b"], ["a"])


def test_exact_pairs_start_no_worker() -> None:
    with Grader(BOXED, GradingConfig()) as grader:
        assert grader.submit(r"\boxed{41}", "42").done()
        assert grader.worker_pids == ()


@pytest.mark.slow
def test_hang_is_killed_and_the_batch_completes() -> None:
    with Grader(BOXED, GradingConfig(timeout_seconds=0.5)) as grader:
        grader.grade(*[[item] for item in SYMBOLIC])
        (pid,) = grader.worker_pids
        started = time.monotonic()
        grades = grader.grade(
            [rf"\boxed{{{HANGS}}}", SYMBOLIC[0], r"\boxed{1+\sqrt2}"], ["5", SYMBOLIC[1], "3"]
        )
        assert [g.verdict for g in grades] == [
            Verdict.TIMEOUT,
            Verdict.CORRECT,
            Verdict.INCORRECT,
        ]
        assert time.monotonic() - started < 15
        assert not _alive(pid)
        # The same string again costs nothing.
        started = time.monotonic()
        assert grader.grade([rf"\boxed{{{HANGS}}}"], ["5"])[0].verdict is Verdict.TIMEOUT
        assert time.monotonic() - started < 0.2


def test_every_grade_says_how_long_it_took_and_equal_grades_stay_equal() -> None:
    with Grader(BOXED, GradingConfig(timeout_seconds=0.5)) as grader:
        exact, symbolic, hung = grader.grade(
            [r"\boxed{4}", SYMBOLIC[0], rf"\boxed{{{HANGS}}}"], ["4", SYMBOLIC[1], "5"]
        )
        assert 0 < exact.seconds < 0.1
        assert 0 < symbolic.seconds < 0.5  # neither the worker's start nor the wait for it
        assert hung.seconds > 0.4  # the next test says how long at most
        (again,) = grader.grade([SYMBOLIC[0]], [SYMBOLIC[1]])
        assert again.seconds < 0.01  # remembered
        assert again == symbolic
        (none,) = grader.grade(["4"], ["4"])
        assert none.seconds > 0


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_a_hung_answer_takes_its_time_of_the_processor_and_no_more() -> None:
    """However busy the machine is; what a worker has used is known once it has ended."""

    def of_ended() -> float:
        return sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])

    with Grader(BOXED, GradingConfig(timeout_seconds=0.5)) as grader:
        grader.grade(*ONE_PAIR)
        (pid,) = grader.worker_pids
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        before = sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK") + of_ended()
        (hung,) = grader.grade([rf"\boxed{{{HANGS}}}"], ["5"])
        assert hung.verdict is Verdict.TIMEOUT
        assert of_ended() - before == pytest.approx(0.5, abs=0.15)


def test_memory_limit_is_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "MEMORY_MB", 400)
    with Grader(BOXED, GradingConfig(timeout_seconds=20)) as grader:
        (grade_,) = grader.grade([r"\boxed{\sum_{k=1}^{9} (x+y+z+w)^{999999}}"], ["5"])
        assert grade_.verdict in (
            Verdict.CRASH,
            Verdict.TIMEOUT,
            Verdict.UNPARSEABLE,
            Verdict.INCORRECT,
        )
        assert grader.grade([SYMBOLIC[0]], [SYMBOLIC[1]])[0].correct


def test_close_kills_workers_and_answers_what_waits() -> None:
    grader = Grader(BOXED, GradingConfig(timeout_seconds=60))
    grader.grade(*[[item] for item in SYMBOLIC])
    (pid,) = grader.worker_pids
    futures = [grader.submit(rf"\boxed{{{n}{HANGS}}}", "5") for n in range(2, 5)]
    time.sleep(0.1)
    grader.close()
    assert [f.result(timeout=10).verdict for f in futures] == [Verdict.CRASH] * 3
    assert not _alive(pid)


def test_what_waited_for_a_grader_that_was_closed_can_be_asked_again() -> None:
    with Grader(BOXED, GradingConfig(timeout_seconds=60), workers=1) as grader:
        grader.submit(BOXED_HANG, "5")
        waiting = grader.submit(*SYMBOLIC)
        grader.close()
        assert waiting.result(timeout=10).verdict is Verdict.CRASH
        assert grader.submit(*SYMBOLIC).result().correct


def test_identical_pairs_are_judged_once() -> None:
    with Grader(BOXED, GradingConfig(timeout_seconds=0.5)) as grader:
        started = time.monotonic()
        texts = [f"try {n}: \\boxed{{{HANGS}}}" for n in range(20)]
        grades = grader.grade(texts, ["5"] * 20)
        assert {g.verdict for g in grades} == {Verdict.TIMEOUT}
        assert time.monotonic() - started < 8


@pytest.mark.slow
def test_many_threads_and_the_first_one_ending() -> None:
    with Grader(BOXED, GradingConfig(), workers=2) as grader:
        first = threading.Thread(target=grader.grade, args=([SYMBOLIC[0]], [SYMBOLIC[1]]))
        first.start()
        first.join()
        pids = grader.worker_pids
        with ThreadPoolExecutor(8) as threads:
            futures = [
                threads.submit(
                    grader.grade, [rf"\boxed{{\sqrt{{{3 * n * n}}}}}"], [rf"{n}\sqrt{{3}}"]
                )
                for n in range(2, 18)
            ]
            assert all(future.result()[0].correct for future in futures)
        assert set(pids) <= set(grader.worker_pids)
        assert all(_alive(pid) for pid in pids)


def test_asyncio() -> None:
    async def both(grader: Grader) -> list[Grade]:
        futures = [grader.submit(*SYMBOLIC), grader.submit(r"\boxed{2}", "2")]
        return [await asyncio.wrap_future(future) for future in futures]

    with Grader(BOXED, GradingConfig()) as grader:
        assert all(g.correct for g in asyncio.run(both(grader)))


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_grades_with_its_own_workers() -> None:
    with Grader(BOXED, GradingConfig()) as grader:
        grader.grade(*[[item] for item in SYMBOLIC])
        pids = grader.worker_pids
        child = os.fork()
        if child == 0:
            code = 1
            try:
                fresh = grader.grade([r"\boxed{\sqrt{20}}"], [r"2\sqrt{5}"])[0].correct
                code = 0 if fresh and not set(pids) & set(grader.worker_pids) else 2
                grader.close()
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert all(_alive(pid) for pid in pids)
        assert grader.grade([r"\boxed{\sqrt{27}}"], [r"3\sqrt{3}"])[0].correct


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_while_another_thread_makes_a_grader_cannot_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    contract = AnswerContract(kind=AnswerKind.TAG, open="<only-here>", close="</only-here>")
    making, forked = threading.Event(), threading.Event()

    def slow(settings: GradingConfig) -> None:
        if threading.current_thread() is not threading.main_thread():
            making.set()
            forked.wait(20)

    monkeypatch.setattr(pool, "require_symbolic", slow)
    text = "<only-here>4</only-here>"
    other = threading.Thread(target=grade, args=(text, "4", contract))
    other.start()
    assert making.wait(20)
    child = os.fork()
    if child == 0:
        signal.alarm(5)
        code = 1
        try:
            code = 0 if grade(text, "4", contract).correct else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    forked.set()
    other.join()
    assert os.waitstatus_to_exitcode(status) == 0


SCRIPT = r"""
import sys, time
from grouper.config.schema import GradingConfig
from grouper.grading import Grader
from grouper.types import AnswerContract, AnswerKind
grader = Grader(AnswerContract(kind=AnswerKind.BOXED), GradingConfig(timeout_seconds=60))
assert grader.grade([r"\boxed{\sqrt{12}}"], [r"2\sqrt{3}"])[0].correct
print(*grader.worker_pids, flush=True)
if "wait" in sys.argv:
    grader.submit(r"\boxed{\binom{1000000000}{500000000}}", "5")
    time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="parent-death signal is Linux")
def test_worker_dies_with_a_killed_parent_even_when_stuck() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, "wait"], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    time.sleep(0.3)
    assert _alive(worker)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert _wait_until(lambda: not _alive(worker), 5)


def test_a_script_without_a_main_guard_ends_by_itself() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert _wait_until(lambda: not _alive(int(done.stdout)), 5)


RANKS = r"""
import os
from grouper.config.schema import GradingConfig
from grouper.grading import Grader
from grouper.types import AnswerContract, AnswerKind
with Grader(AnswerContract(kind=AnswerKind.BOXED), GradingConfig()) as grader:
    correct = grader.grade([r"\boxed{\sqrt{12}}"], [r"2\sqrt{3}"])[0].correct
    print(f"rank {os.environ['RANK']} {correct} {grader.worker_pids[0]}", flush=True)
"""


@pytest.mark.slow
def test_under_torchrun_each_rank_has_its_own_worker(tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(script)], check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    # Not by lines: two processes write to one pipe, and a line's end may come after the other's.
    told = sorted(re.findall(r"rank (\d) (\w+) (\d+)", done.stdout))
    assert [line[:2] for line in told] == [("0", "True"), ("1", "True")]
    workers = {int(line[2]) for line in told}
    assert len(workers) == 2
    assert _wait_until(lambda: not any(map(_alive, workers)), 5)


NASTY = [
    "",
    "\x00",
    "\\",
    "{" * 5000,
    "}" * 5000,
    "(" * 1500,
    "^" * 900,
    "1" * 1_000_000,
    "-" * 1000 + "1",
    "\\frac" * 300,
    "\\sqrt{" * 200 + "}" * 200,
    "9**9**9**9",
    "9^9^9^9^9",
    "99999999!",
    "1e999999999",
    "0." + "1" * 1900,
    "\u202eيساوي ٤٢\u202c",
    "\ud800",
    "__import__('os').system('true')",
    "lambda: 0",
    "x" * 1999,
    "1," * 900,
    "{1," * 30,
    "=" * 50,
    "=5",
    "\\pm" * 20,
    r"\begin{pmatrix} 1 & 2 \\ 3 \end{pmatrix}",
    "$" * 100,
    "%",
    "1/0",
    "0^{-1}",
    "(-1)^{0.5}",
    r"\int_0^1 x dx",
    "٣",
    "²",
    ":" * 20,
    "_8",
    "5_99",
    MATH_VERIFY_65,
    "x+" + MATH_VERIFY_65,
]


@pytest.mark.parametrize("text", NASTY, ids=range(len(NASTY)))
def test_exact_rungs_never_raise(text: str) -> None:
    with Grader(BOXED, GradingConfig(symbolic=False)) as grader:
        for reference in ("42", r"2\sqrt{3}", "(1, 2)", text):
            started = time.monotonic()
            assert isinstance(grader.submit(rf"\boxed{{{text}}}", reference).result(), Grade)
            assert isinstance(grader.submit(text, reference).result(), Grade)
            assert time.monotonic() - started < 2


@pytest.mark.slow
def test_nasty_input_through_all_rungs() -> None:
    with Grader(BOXED, GradingConfig(timeout_seconds=1)) as grader:
        grades = grader.grade([rf"\boxed{{{text}}}" for text in NASTY], [r"2\sqrt{3}"] * len(NASTY))
        assert not any(g.correct for g in grades)


def _fuzz(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    pieces = [*r"0123456789xyzeiABC+-*/^_=(){}[],.!%$|<> \&²½"]
    pieces += [r"\frac", r"\sqrt", r"\pi", r"\text", r"\cup", r"\infty", r"\left", r"\{", r"\}"]
    pieces += [r"\pm", r"\\", " and ", "\u202e"]
    return ["".join(rng.choices(pieces, k=rng.randint(0, 25))) for _ in range(count)]


def test_fuzzed_answers_never_raise_on_the_exact_rungs() -> None:
    with Grader(BOXED, GradingConfig(symbolic=False)) as grader:
        texts = _fuzz(3000, seed=0)
        for text, reference in pairwise(texts):
            grader.submit(rf"\boxed{{{text}}}", reference).result()
            grader.submit(rf"\boxed{{{text}}}", text).result()


@pytest.mark.slow
def test_fuzzed_answers_never_pass_the_deadline() -> None:
    with Grader(BOXED, GradingConfig(timeout_seconds=2), workers=2) as grader:
        texts = _fuzz(10_000, seed=1)
        grades = grader.grade([rf"\boxed{{{t}}}" for t in texts], [r"2\sqrt{3}"] * len(texts))
        assert len(grades) == len(texts)
        assert sum(g.correct for g in grades) == 0


def test_a_shared_grader_grades() -> None:
    assert grade(*SYMBOLIC, BOXED).correct


@pytest.mark.slow
def test_reading_a_reference_does_not_depend_on_the_deadline() -> None:
    reference = "x^{" * 8 + "2" + "}" * 8  # a tenth of a second and more to parse
    with Grader(BOXED, GradingConfig(timeout_seconds=0.01)) as grader:
        assert grader.read_reference(reference) is None
        assert grader.read_reference(r"\foo{1}{2}^^+") is not None


def test_unreadable_reference_is_not_scored() -> None:
    with Grader(BOXED, GradingConfig()) as grader:
        grades = grader.grade([r"\boxed{1}", r"\boxed{x}"], [r"\frac{1}{2", r"\foo{1}{2}^^+"])
        assert [g.verdict for g in grades] == [Verdict.NOT_SCORED] * 2


def test_symbolic_stage_is_never_off_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(GradingError, match=r"grading.symbolic: false"):
        require_symbolic(GradingConfig())
    require_symbolic(GradingConfig(symbolic=False))
    with Grader(BOXED, GradingConfig(symbolic=False)) as grader:
        (off,) = grader.grade([SYMBOLIC[0]], [SYMBOLIC[1]])
        assert off.verdict is Verdict.INCORRECT
        assert "off" in off.reason


@pytest.mark.slow
def test_parent_imports_no_sympy_and_no_torch() -> None:
    code = (
        "import sys; from grouper.config.schema import GradingConfig;"
        "from grouper.grading import Grader;"
        "from grouper.types import *; import grouper.rewards;"
        "g = Grader(AnswerContract(kind=AnswerKind.BOXED), GradingConfig());"
        r"assert g.grade([r'\boxed{\sqrt{12}}'], [r'2\sqrt{3}'])[0].correct;"
        "sys.exit(bool({'sympy', 'math_verify', 'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


# --- workers that are killed; and grading where there is no script, as in a notebook's kernel ----

# Code from standard input, statement by statement, with an event loop in the main thread.
CELLS = r"""
import asyncio, threading
from pathlib import Path
from grouper.config.schema import GradingConfig, RewardConfig
from grouper.grading import Grader, grade
from grouper.rewards.call import begin
from grouper.types import AnswerContract, AnswerKind
BOXED = AnswerContract(kind=AnswerKind.BOXED)
SYMBOLIC = r"\boxed{\sqrt{12}}", r"2\sqrt{3}"
assert __name__ == "__main__" and globals().pop("__file__", "<stdin>") == "<stdin>"
async def judge(completions, **kwargs):
    return [await asyncio.sleep(0, 1.0) for _ in completions]

async def cell():
    assert threading.current_thread() is threading.main_thread()
    asyncio.get_running_loop()
    assert grade(*SYMBOLIC, BOXED).correct
    begin(RewardConfig(name="judge"), judge, {"completions": ["a"]})[0]()
    with Grader(BOXED, GradingConfig()) as grader:
        waiting = grader.submit(r"\boxed{\sqrt{27}}", r"3\sqrt{3}")
        assert (await asyncio.wrap_future(waiting)).correct
        print("worker", *grader.worker_pids)

asyncio.new_event_loop().run_until_complete(cell())
assert grade(*SYMBOLIC, BOXED).correct
print("graded")
"""


@pytest.mark.parametrize("how", [("-",), pytest.param(("-i", "-q"), marks=pytest.mark.slow)])
def test_cells_are_graded_and_nothing_is_left(how: tuple[str, ...], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, *how],
        input=CELLS,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr  # `-i` goes on after one
    lines = done.stdout.splitlines()
    assert lines[-1] == "graded"
    worker = next(line.split()[1] for line in lines if line.startswith("worker"))
    assert not Path(f"/proc/{worker}").exists()


def _kill_one(grader: Grader, before: tuple[int, ...] = ()) -> int:
    """Kill the worker that is not one of `before`, once it is there."""
    deadline = time.monotonic() + 20
    while not set(grader.worker_pids) - set(before) and time.monotonic() < deadline:
        time.sleep(0.02)
    (pid,) = set(grader.worker_pids) - set(before)
    time.sleep(0.2)
    os.kill(pid, signal.SIGKILL)
    return pid


@pytest.mark.slow
def test_a_worker_killed_from_outside_is_replaced_and_asked_again() -> None:
    with Grader(BOXED, GradingConfig(timeout_seconds=30)) as grader:
        grader.grade(*ONE_PAIR)
        (pid,) = grader.worker_pids
        os.kill(pid, signal.SIGSTOP)  # the request is under way when the worker dies
        future = grader.submit(r"\boxed{\sqrt{20}}", r"2\sqrt{5}")
        time.sleep(0.2)
        assert not future.done()
        os.kill(pid, signal.SIGKILL)
        assert future.result(timeout=20).correct


def _processor_seconds(pid: int) -> float:
    """What a process has used; its start takes two or three seconds of it."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux")
def test_two_workers_killed_over_one_answer_are_a_crash() -> None:
    with Grader(BOXED, GradingConfig(timeout_seconds=30)) as grader:
        grader.grade(*ONE_PAIR)
        future = grader.submit(BOXED_HANG, "5")
        first = _kill_one(grader)
        # At work, and not still starting: one that is killed then is started once more.
        assert _wait_until(lambda: bool(set(grader.worker_pids) - {first}), 20)
        (second,) = set(grader.worker_pids) - {first}
        assert _wait_until(lambda: _processor_seconds(second) > 6, 120)
        _kill_one(grader, (first,))
        assert future.result(timeout=20).verdict is Verdict.CRASH
        assert grader.grade([r"\boxed{\sqrt{18}}"], [r"3\sqrt{2}"])[0].correct


@pytest.mark.parametrize("kills", [1, 2, 3])
def test_a_worker_killed_while_it_starts_is_started_again(kills: int) -> None:
    """Three times at most: a run refused to start because one had been killed."""
    with Grader(BOXED, GradingConfig(timeout_seconds=30)) as grader:
        future = grader.submit(*SYMBOLIC)
        killed: set[int] = set()
        while len(killed) < kills:
            assert _wait_until(lambda: bool(set(grader.worker_pids) - killed), 20)
            (pid,) = set(grader.worker_pids) - killed
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
        verdict = future.result(timeout=60).verdict
        assert verdict is (Verdict.CORRECT if kills < pool._STARTS else Verdict.CRASH)
        assert grader.submit(*SYMBOLIC).result(timeout=60).correct


def test_a_worker_that_waits_for_a_processor_misses_no_deadline() -> None:
    with Grader(BOXED, GradingConfig(timeout_seconds=0.5)) as grader:
        grader.grade(*ONE_PAIR)
        (pid,) = grader.worker_pids
        os.kill(pid, signal.SIGSTOP)
        future = grader.submit(r"\boxed{\sqrt{20}}", r"2\sqrt{5}")
        time.sleep(0.8)
        os.kill(pid, signal.SIGCONT)
        grade_ = future.result(timeout=20)
        assert grade_.correct
        assert 0 < grade_.seconds < 0.5  # of the processor, as the deadline is


def test_a_hard_limit_of_processor_time_leaves_the_grader_working() -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_CPU, (100, 100));"
        "from grouper.grading import Grader; from grouper.config.schema import GradingConfig;"
        "from grouper.types import *;"
        "Grader(AnswerContract(kind=AnswerKind.BOXED), GradingConfig()).start()"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


@pytest.mark.slow
def test_a_missed_deadline_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bytes] = []
    exchange = pool._exchange
    monkeypatch.setattr(
        pool, "_exchange", lambda *given: asked.append(given[1]) or exchange(*given)
    )
    with Grader(BOXED, GradingConfig(timeout_seconds=1)) as grader:
        assert grader.grade([BOXED_HANG], ["5"])[0].verdict is Verdict.TIMEOUT
    assert sum(map(bool, asked)) == 1  # beside the empty one, for the start


def test_processes_that_train_together_share_the_workers_of_a_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool, "processors", lambda: 96)
    counts = []
    for processes in ("1", "8", "64"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
        counts.append(Grader(BOXED, GradingConfig())._count)
    assert counts == [24, 3, 1]
