"""Whether llama.cpp answers as Grouper does, from an export that its own converter has read.

    pip install sentencepiece protobuf xllamacpp
    python -m benchmarks.sampling.llama_cpp outputs/demo LLAMA_CPP [--problems 512]

Exports the last model of a demonstration run, converts it with `convert_hf_to_gguf.py` of the
llama.cpp checkout LLAMA_CPP, and asks llama.cpp's server (in the package xllamacpp, in this
process) the test problems through the chat template of the file, at temperature 0.

The converter knows a tokenizer by a hash of what it makes of one text, so it cannot know that of a
new model; it is told the name that llama.cpp has for the same rule (digits one by one, then bytes):
`smollm`. Models of the Hub need no telling. Written to benchmarks/results/llama_cpp.json.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import grouper
from benchmarks.checkout import RESULTS
from benchmarks.machine import machine
from grouper.publish.export import export_model
from grouper.training.problem_sets import require_part

RULE = "smollm"


def convert(llama_cpp: Path, model: Path, target: Path, outtype: str) -> None:
    """Run the converter in this process, with the tokenizer's rule named."""
    sys.path[:0] = [str(llama_cpp), str(llama_cpp / "gguf-py")]
    base: Any = importlib.import_module("conversion.base")
    base.TextModel.get_vocab_base_pre = lambda *_: RULE
    converter: Any = importlib.import_module("convert_hf_to_gguf")
    sys.argv = ["convert", str(model), "--outfile", str(target), "--outtype", outtype]
    converter.main()


def ask(file: Path, questions: list[str], most: int) -> list[str]:
    """llama.cpp's answers to chats of one message."""
    library: Any = importlib.import_module("xllamacpp")
    params = library.CommonParams()
    params.model.path, params.use_jinja, params.n_ctx = str(file), True, 1024
    params.n_parallel, params.cpuparams.n_threads = 1, 1
    server = library.Server(params)
    found = []
    for question in questions:
        chat = {"messages": [{"role": "user", "content": question}]}
        answer = server.handle_chat_completions({**chat, "temperature": 0, "max_tokens": most})
        found.append(answer["choices"][0]["message"]["content"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="a finished run of the recipe `demo`")
    parser.add_argument("llama_cpp", type=Path)
    parser.add_argument("--problems", type=int, default=512)
    given = parser.parse_args()
    recipe = grouper.load_recipe(given.run / "recipe.yaml")
    problems = require_part(recipe, "test").problems[: given.problems]
    questions = [problem.question for problem in problems]
    record: dict[str, Any] = {"machine": machine(), "xllamacpp": version("xllamacpp")}
    record |= {"problems": len(questions), "same_text": {}}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        export_model(str(given.run / "grpo" / "final"), model)
        with grouper.load_generator(str(model)) as generator:
            ours = [answers[0].response for answers in generator.answers(questions, samples=1)]
            most = generator.params.max_new_tokens
        for outtype in ("f16", "q8_0"):
            file = Path(folder) / f"{outtype}.gguf"
            convert(given.llama_cpp.resolve(), model, file, outtype)
            theirs = ask(file, questions, most)
            same = sum(a == b for a, b in zip(ours, theirs, strict=True))
            record["same_text"][outtype] = same
    target = RESULTS / "llama_cpp.json"
    target.write_text(json.dumps(record, indent=2) + "\n")
    print(record)


if __name__ == "__main__":
    main()
