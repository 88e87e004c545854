"""`grouper env`: the facts about this machine for a bug report."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import requires, version

import click

from grouper.cli import options
from grouper.cli.commands import Command
from grouper.cli.text import definitions, show_json
from grouper.errors import installed
from grouper.files import processors

EXAMPLES = """
grouper env
grouper env --json
"""


@click.command("env", cls=Command, examples=EXAMPLES)
@options.as_json
def env(*, as_json: bool) -> None:
    """Show versions, devices, extras and kernels.

    Shows what Grouper finds on this machine: versions of the packages that its numbers depend on,
    processors and GPUs with their memory, the optional extras, the kernels, and what isolates
    programs that a model writes. Include it in bug reports.
    """
    facts = _environment()
    if as_json:
        show_json(facts)
        return
    for title, rows in facts.items():
        definitions(rows.items(), title.capitalize())


def _environment() -> dict[str, dict[str, str]]:
    import torch

    from grouper.kernels.cpu.library import kernels_in_use
    from grouper.models.device import machine_memory

    versions = {"grouper-rl": version("grouper-rl"), "python": platform.python_version()}
    extras: dict[str, str] = {}
    for requirement in requires("grouper-rl") or ():
        package = re.findall(r"^[\w-]+", requirement)[0]
        package_version = installed(package)
        extra_match = re.search(r"extra == \W(\w+)", requirement)
        if extra_match is None:
            versions[package] = package_version
            continue
        extra = extra_match[1]
        if extra == "dev":
            continue
        text = f"{package} {package_version}"
        extras[extra] = f"{extras[extra]}, {text}" if extra in extras else text
    devices = {
        "system": platform.platform(),
        "cpu": f"{processors()} of {os.cpu_count()} processors, {torch.get_num_threads()} threads",
        "bfloat16 on cpu": _bfloat16_speed(),
        "memory": f"{machine_memory() / 2**30:.1f} GiB",
    }
    for number in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(number)
        devices[f"cuda:{number}"] = f"{gpu.name}, {gpu.total_memory / 2**30:.1f} GiB"
    if torch.backends.mps.is_available():
        devices["mps"] = "shares the memory"
    return {
        "versions": versions,
        "devices": devices,
        "extras": extras,
        "kernels": {"cpu": kernels_in_use()},
        "programs of a model": {"isolation": _isolation()},
    }


def _isolation() -> str:
    """Say what isolates the programs of a model on this machine."""
    from grouper.programs.runner import available_isolation

    if available_isolation() == "seccomp":
        return "seccomp: memory and clocks alone, no files, network or processes"
    return "limits of time and memory alone: no filter of system calls (seccomp) here"


def _bfloat16_speed() -> str:
    """Say how the CPU's products in bfloat16 compare with those in float32."""
    from grouper.models.device import bfloat16_slowdown

    slowdown = bfloat16_slowdown()
    if slowdown > 1:
        return f"a product takes {slowdown:.1f} times as long as in float32"
    return f"a product takes {slowdown:.2f} of the time in float32"
