"""Run the notebooks in examples/notebooks and save them with their outputs.

    pip install nbclient ipykernel
    python -m benchmarks.tools.notebooks [NAME...]

Each one runs from top to bottom in an empty folder, with a kernel of its own and one thread.
Progress (standard error), times, folders and the version of Python are left out of what is saved.
`colab_t4` is not run: it needs a GPU and the Hub.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.checkout import ROOT

NOTEBOOKS = ROOT / "examples" / "notebooks"
# Those whose outputs are saved.
EXECUTED = ("demo", "read_a_run", "your_data")
# Seconds that a cell may take.
TIMEOUT = 3600


def execute(path: Path) -> None:
    """Run a notebook and write it back with its outputs."""
    # They are installed for this alone.
    nbclient: Any = importlib.import_module("nbclient")
    nbformat: Any = importlib.import_module("nbformat")
    notebook = nbformat.read(path, as_version=4)
    # Kernels inherit these. They must import this checkout, and reach no network.
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "PYTHONPATH": str(ROOT / "src"),
    }
    with tempfile.TemporaryDirectory(prefix="notebook-") as folder:
        client = nbclient.NotebookClient(
            notebook,
            timeout=TIMEOUT,
            kernel_name="python3",
            resources={"metadata": {"path": folder}},
        )
        client.execute()
        for cell in code_cells(notebook):
            shown = [output for output in cell["outputs"] if output.get("name") != "stderr"]
            cell["outputs"] = [clean(output, folder) for output in shown]
            # Without the times at which it ran.
            cell["metadata"] = {}
    notebook["metadata"] = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    text = json.dumps(notebook, indent=1, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the cells of code, in order."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def clean(output: Any, folder: str) -> Any:
    """Return an output without this machine's folders, and without addresses in memory."""
    text = json.dumps(output)
    for place in (f"{Path(folder).resolve()}/", f"{folder}/", f"{ROOT}/", f"{Path.home()}/"):
        text = text.replace(place, "")
    return json.loads(re.sub(r" at 0x[0-9a-f]{6,}", "", text))


def main() -> None:
    """Run the notebooks of the command line, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(EXECUTED)}")
    for name in parser.parse_args().names or EXECUTED:
        if name not in EXECUTED:
            raise SystemExit(f"{name} is not one of {', '.join(EXECUTED)}")
        print(f"{name} ...", flush=True)
        execute(NOTEBOOKS / f"{name}.ipynb")


if __name__ == "__main__":
    main()
