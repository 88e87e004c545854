"""The system calls that a model's program may make: a seccomp filter for the calling process.

Only calls on what the process already holds are allowed: memory, clocks, and reading and writing
open files. No call that names a path, a process, a socket or a new thread is. Whatever is not
listed fails with EPERM, so that Python raises an exception. Standard library only: the worker runs
without site-packages.

Source of the numbers: the system call tables of Linux (`asm/unistd.h`) for each processor.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
import sys

# Of `linux/seccomp.h`, `linux/prctl.h` and `linux/filter.h`.
_PR_SET_NO_NEW_PRIVS = 38
_PR_SET_SECCOMP = 22
_SECCOMP_MODE_FILTER = 2
_RETURN_ALLOW = 0x7FFF0000
_RETURN_ERRNO = 0x00050000
_RETURN_KILL_PROCESS = 0x80000000
# Load a word of the call's description; jump if it equals; return.
_LOAD_WORD = 0x20
_JUMP_IF_EQUAL = 0x15
_JUMP_IF_AT_LEAST = 0x35
_RETURN = 0x06
_NUMBER_AT = 0
_ARCHITECTURE_AT = 4
# Of x86-64: calls of its 32-bit variant have this bit.
_X32 = 0x40000000

# Machine -> its name in `linux/audit.h`, and the numbers of the allowed calls.
_CALLS: dict[str, tuple[int, dict[str, int]]] = {
    "x86_64": (
        0xC000003E,
        {
            "read": 0,
            "write": 1,
            "close": 3,
            "fstat": 5,
            "lseek": 8,
            "mmap": 9,
            "mprotect": 10,
            "munmap": 11,
            "brk": 12,
            "rt_sigaction": 13,
            "rt_sigprocmask": 14,
            "rt_sigreturn": 15,
            "writev": 20,
            "sched_yield": 24,
            "mremap": 25,
            "madvise": 28,
            "nanosleep": 35,
            "getpid": 39,
            "exit": 60,
            "sigaltstack": 131,
            "gettid": 186,
            "time": 201,
            "futex": 202,
            "restart_syscall": 219,
            "clock_gettime": 228,
            "clock_nanosleep": 230,
            "exit_group": 231,
            "getrandom": 318,
        },
    ),
    "aarch64": (
        0xC00000B7,
        {
            "close": 57,
            "lseek": 62,
            "read": 63,
            "write": 64,
            "writev": 66,
            "fstat": 80,
            "exit": 93,
            "exit_group": 94,
            "futex": 98,
            "nanosleep": 101,
            "clock_gettime": 113,
            "clock_nanosleep": 115,
            "sched_yield": 124,
            "restart_syscall": 128,
            "sigaltstack": 132,
            "rt_sigaction": 134,
            "rt_sigprocmask": 135,
            "rt_sigreturn": 139,
            "getpid": 172,
            "gettid": 178,
            "brk": 214,
            "munmap": 215,
            "mremap": 216,
            "mmap": 222,
            "mprotect": 226,
            "madvise": 233,
            "getrandom": 278,
        },
    ),
}


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Return a `struct sock_filter`: operation, jumps (instructions to skip), and its constant."""
    return struct.pack("=HBBI", code, if_true, if_false, value)


def filter_program(machine: str) -> bytes:
    """Return the filter for a machine as the kernel takes it.

    Raises:
        KeyError: the numbers of its calls are not known.
    """
    architecture, calls = _CALLS[machine]
    program = [
        _instruction(_LOAD_WORD, _ARCHITECTURE_AT),
        _instruction(_JUMP_IF_EQUAL, architecture, if_true=1),
        _instruction(_RETURN, _RETURN_KILL_PROCESS),
        _instruction(_LOAD_WORD, _NUMBER_AT),
    ]
    if machine == "x86_64":
        program.append(_instruction(_JUMP_IF_AT_LEAST, _X32, if_false=1))
        program.append(_instruction(_RETURN, _RETURN_KILL_PROCESS))
    for number in calls.values():
        program.append(_instruction(_JUMP_IF_EQUAL, number, if_false=1))
        program.append(_instruction(_RETURN, _RETURN_ALLOW))
    program.append(_instruction(_RETURN, _RETURN_ERRNO | errno.EPERM))
    return b"".join(program)


class _FilterProgram(ctypes.Structure):
    """`struct sock_fprog`."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def is_known() -> bool:
    """Tell whether this machine's system calls are known here."""
    return sys.platform == "linux" and platform.machine() in _CALLS


def restrict() -> None:
    """Apply the filter to the calling process, for good; its children inherit it.

    Raises:
        OSError: the kernel refuses, or the machine is not known.
    """
    if not is_known():
        raise OSError(errno.ENOSYS, "no filter of system calls for this machine")
    program = filter_program(platform.machine())
    # 8 bytes each.
    described = _FilterProgram(len(program) // 8, program)
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl.argtypes = (ctypes.c_int, *(4 * (ctypes.c_ulong,)))
    address = ctypes.addressof(described)
    for call in (
        (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, address, 0, 0),
    ):
        if prctl(*call):
            number = ctypes.get_errno()
            raise OSError(number, f"prctl: {errno.errorcode.get(number, number)}")
