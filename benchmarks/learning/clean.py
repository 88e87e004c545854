"""Do the tools against contaminated results work on real models, and are published numbers reached?

    python -m benchmarks.learning.clean by-heart MODEL ../shared/data/gsm8k   a quarter of an hour
    python -m benchmarks.learning.clean twins MODEL ../shared/data/gsm8k
    python -m benchmarks.learning.clean parity MODELS ../shared/data/gsm8k [NAME ...]
    python -m benchmarks.learning.clean --page

`by-heart` has a pretrained model learn some GSM8K test problems by heart, question and solution,
and then probes it and measures it on these, on as many that it has not seen, and on the twins of
both. `twins` measures a model as it is on every test problem that has a twin. `parity` measures
models in the prompt that a published number was measured in, as far as that is known.

Results are kept in benchmarks/results/clean.json, and docs/results/clean.md is written from them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.checkout import RESULTS, ROOT
from benchmarks.learning.result_records import Record, keep_record, read_records, source_lines
from benchmarks.machine import where
from grouper import load_generator
from grouper.data.twins import make_twin
from grouper.evaluation.statistics import wilson_interval

RESULT = RESULTS / "clean.json"
PAGE = ROOT / "docs" / "results" / "clean.md"

# Folder of a model in real-models/ -> its name.
NAMES = {
    "smollm2": "SmolLM2-135M-Instruct",
    "gemma270": "Gemma 3 270M",
    "coder05": "Qwen2.5-Coder-0.5B-Instruct",
}
# Problems that are learned by heart, and as many that are not.
LEARNED = 40
MOST_EPOCHS = 40
# Mean loss in nats a token at which texts count as known by heart. The first words of a question
# cannot be known: which of 40 it is takes 3.7 nats, about 0.05 a token of question and solution.
KNOWN = 0.08
LEARNING_RATE = 2e-4
BATCH = 8
TOKENS = 256


@dataclass(frozen=True, kw_only=True)
class Published:
    """A published accuracy, and our protocol that is nearest to its own."""

    model: str
    """The folder of the model."""
    accuracy: float
    source: str
    protocol: str
    """As far as the source says."""
    words: str
    """Of `grouper eval`."""
    lenient: bool
    """Whether the published number reads answers in any format."""
    differences: str
    """What is not the same here."""


PUBLISHED = {
    "model card": Published(
        model="smollm2",
        accuracy=0.014,
        source="its model card (lighteval)",
        protocol="5 examples, greedy, the first `#### N`",
        words="--prompt gsm8k-5-shot --max-new-tokens 256",
        lenient=False,
        differences="other examples, plain text instead of turns of a chat, weights of 4 bits",
    ),
    "MobileLLM-R1, SmolLM2": Published(
        model="smollm2",
        accuracy=0.024,
        source="arXiv 2509.24945, table 7",
        protocol="no examples, chat, temperature 0.6, top-p 0.95, any answer in the text",
        words="--prompt compact --temperature 0.6 --top-p 0.95 --max-new-tokens 512",
        lenient=True,
        differences="512 tokens instead of 30,000, another order in the search for an answer, "
        "weights of 4 bits",
    ),
    "merged model": Published(
        model="smollm2",
        accuracy=0.0038,
        source="the baseline in the card of lldois/SmolLM2-135M-Reasoning-SLERP-Champion",
        protocol="no examples, lm-evaluation-harness, the last number; its template is not named",
        words="--prompt gsm8k-0-shot --max-new-tokens 256",
        lenient=True,
        # Counted again from the completions by the harness's own rule: the same 24.
        differences="weights of 4 bits; the source may have used a chat template",
    ),
    "MobileLLM-R1, Gemma 3": Published(
        model="gemma270",
        accuracy=0.011,
        source="arXiv 2509.24945, table 6",
        protocol="8 examples, exact match; the prompt is not published",
        words="--prompt gsm8k-5-shot --max-new-tokens 256",
        lenient=False,
        differences="5 other examples, weights of 4 bits",
    ),
}


# --- a model that knows problems by heart --------------------------------------------------------


def problems_with_twins(gsm8k: Path) -> list[dict[str, str]]:
    """Return the rows of GSM8K's test problems that have a twin."""
    rows = []
    for line in (gsm8k / "test.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        solution, _, answer = row["answer"].rpartition("####")
        if make_twin(row["question"], solution, answer.strip().replace(",", ""), 0):
            rows.append(row)
    return rows


def write_rows(file: Path, rows: list[dict[str, str]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def learn_by_heart(path: str, rows: list[dict[str, str]], target: Path) -> Record:
    """Train a model on questions and solutions until it knows them, and save it.

    Returns:
        Epochs, and the mean loss of the last one in nats a token.
    """
    torch.manual_seed(0)
    texts = []
    with load_generator(path, format="boxed") as generator:
        for row in rows:
            solution, _, answer = row["answer"].rpartition("####")
            completion = f"{solution.strip()}\n\\boxed{{{answer.strip()}}}"
            prompt = [*generator.prompt(row["question"]).token_ids]
            encode = generator.prepared.tokenizer.encode
            end = generator.prepared.stop_tokens[0]
            texts += [
                [*encode(row["question"]), end],
                [*prompt, *encode(completion, add_special_tokens=False), end],
            ]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    epochs = 0
    loss = float("inf")
    while loss > KNOWN and epochs < MOST_EPOCHS:
        losses = []
        order = torch.randperm(len(texts)).tolist()
        for start in range(0, len(texts), BATCH):
            part = order[start : start + BATCH]
            batch = pad_sequence([torch.tensor(texts[index]) for index in part], batch_first=True)
            is_text = pad_sequence([torch.ones(len(texts[index])) for index in part], True).bool()
            labels = batch.masked_fill(~is_text, -100)
            with torch.autocast("cpu", torch.bfloat16):
                step_loss = model(batch, attention_mask=is_text.long(), labels=labels).loss
            step_loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(step_loss.detach()))
        loss = sum(losses) / len(losses)
        epochs += 1
        print(f"epoch {epochs}: {loss:.3f} nats a token", flush=True)
    model.to(torch.bfloat16).save_pretrained(target)
    AutoTokenizer.from_pretrained(path).save_pretrained(target)
    return {"epochs": epochs, "loss": round(loss, 4)}


def grouper(words: list[str]) -> Any:
    """Run `grouper ... --json`, and return what it printed."""
    command = [sys.executable, "-m", "grouper", *words, "--json", "--quiet"]
    called = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(called.stdout)


def measured(model: str, files: list[Path], place: Path) -> Record:
    """Measure a model on files of problems and on their twins."""
    words = ["eval", model, "model.compute_dtype=fastest", "--no-base", "--twins"]
    words += ["--on", ",".join(map(str, files)), "--prompt", "boxed"]
    words += ["--max-new-tokens", str(TOKENS), "--output-dir", str(place)]
    return {row["problems"]: row for row in grouper(words)["twins"]}


def by_heart(model: str, gsm8k: Path) -> Record:
    """Have a model learn problems by heart, and see who notices."""
    rows = problems_with_twins(gsm8k)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        files = [folder / "seen.jsonl", folder / "unseen.jsonl"]
        write_rows(files[0], rows[:LEARNED])
        write_rows(files[1], rows[LEARNED : 2 * LEARNED])
        learned = learn_by_heart(model, rows[:LEARNED], folder / "model")
        on = ",".join(map(str, files))
        probes = {}
        for name, path in (("before", model), ("after", str(folder / "model"))):
            probes[name] = grouper(["probe", path, "--on", on])["probes"]
        twins = measured(str(folder / "model"), files, folder / "evaluations")
    return {
        "machine": where(),
        "model": Path(model).name,
        "problems": LEARNED,
        "training": learned,
        "probes": probes,
        "twins": twins,
    }


def twins_of_all(model: str, gsm8k: Path) -> Record:
    """Measure a model as it is on all problems that have a twin."""
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "gsm8k-with-twins.jsonl"
        write_rows(file, problems_with_twins(gsm8k))
        (found,) = measured(model, [file], Path(place) / "evaluations").values()
    return {"machine": where(), "model": Path(model).name, "twins": found}


def parity(name: str, models: Path, gsm8k: Path) -> Record:
    """Measure a model in the protocol of a published number."""
    published = PUBLISHED[name]
    words = ["eval", str(models / published.model), "model.compute_dtype=fastest", "--no-base"]
    words += ["--on", f"gsm8k={gsm8k / 'test.jsonl'}", *published.words.split()]
    with tempfile.TemporaryDirectory() as place:
        found = grouper([*words, "--output-dir", place])
    (result,) = found["evaluations"][0]["results"]
    return {
        "machine": where(),
        "strict": {key: result[key] for key in ("accuracy", "low", "high", "problems")},
        "lenient": result["lenient"],
    }


# --- the page ------------------------------------------------------------------------------------


def share(accuracy: float, low: float, high: float) -> str:
    return f"{100 * accuracy:.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def twin_cells(row: Record) -> list[str]:
    paired = row["paired"]
    low, high = 100 * paired["interval"]["low"], 100 * paired["interval"]["high"]
    change = f"{100 * paired['difference']:+.1f} [{low:+.1f}, {high:+.1f}], {paired['verdict']}"
    cells = [str(paired["problems"]), f"{100 * row['original']:.1f}"]
    return [*cells, f"{100 * paired['after']:.1f}", change]


def line_of(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def by_heart_lines(record: Record) -> list[str]:
    training = record["training"]
    rows = []
    for when, probes in record["probes"].items():
        for number, probe in enumerate(probes):
            name = probe["name"] if number < len(probes) - 1 else "control"
            exact = share(probe["exact"], probe["low"], probe["high"])
            similarity = f"{100 * probe['rouge_l']:.0f}"
            rows.append(line_of([when, name, str(probe["questions"]), exact, similarity]))
    twins = [line_of([name, *twin_cells(row)]) for name, row in record["twins"].items()]
    return [
        "## A model that knows problems by heart",
        "",
        f"{NAMES[record['model']]} was trained on the questions and solutions of",
        f"{record['problems']} GSM8K test problems until the loss was {training['loss']:.3f} nats",
        f"a token ({training['epochs']} epochs). Completed word for word from 60 % of the",
        "question:",
        "",
        "| training | problems | questions | completed % | ROUGE-L % |",
        "|---|---|---|---|---|",
        *rows,
        "",
        "Right with the numbers of the test set, and with others (greedy, `boxed`, at most",
        f"{TOKENS} tokens):",
        "",
        "| problems | with a twin | as they are % | twins % | difference |",
        "|---|---|---|---|---|",
        *twins,
        "",
    ]


def twin_lines(records: dict[str, Record]) -> list[str]:
    rows = [
        line_of([NAMES[record["model"]], *twin_cells(record["twins"])])
        for name, record in records.items()
        if name.startswith("twins ")
    ]
    if not rows:
        return []
    return [
        "## Twins of GSM8K's test problems",
        "",
        "Models as they are, all problems that have a twin, greedy, `boxed`, at most",
        f"{TOKENS} tokens:",
        "",
        "| model | with a twin | as they are % | twins % | difference |",
        "|---|---|---|---|---|",
        *rows,
        "",
    ]


def parity_lines(records: dict[str, Record]) -> list[str]:
    rows = []
    for name, published in PUBLISHED.items():
        record = records.get(f"parity {name}")
        if record is None:
            continue
        ours = record["lenient" if published.lenient else "strict"]
        problems = record["strict"]["problems"]
        theirs = wilson_interval(published.accuracy * problems, problems)
        is_within = ours["low"] <= published.accuracy <= ours["high"]
        overlaps = ours["low"] <= theirs.high and theirs.low <= ours["high"]
        verdict = "within" if is_within else "intervals overlap" if overlaps else "not reached"
        rows.append(
            line_of(
                [
                    f"{NAMES[published.model]}: {published.source}",
                    published.protocol,
                    share(published.accuracy, theirs.low, theirs.high),
                    share(ours["accuracy"], ours["low"], ours["high"]),
                    verdict,
                    published.differences,
                ]
            )
        )
    if not rows:
        return []
    return [
        "## Published numbers",
        "",
        "GSM8K, all 1,319 test problems, in the protocol of the source as far as it is known. The",
        "weights at hand are those of GGUF files, rounded to 4 bits; the published ones were not.",
        "",
        "| model and source | protocol | published % | here % | published number | differences |",
        "|---|---|---|---|---|---|",
        *rows,
        "",
    ]


def page(records: dict[str, Record]) -> str:
    """Write docs/results/clean.md."""
    heart = records.get("by-heart")
    lines = [
        "# Contamination, twins and published numbers on real models",
        "",
        "Written by `python -m benchmarks.learning.clean`. 95 % intervals throughout; what the",
        "tools do is in [Evaluation](../evaluation.md#contamination).",
        "",
        *(by_heart_lines(heart) if heart else []),
        *twin_lines(records),
        *parity_lines(records),
        *source_lines(list(records.values())),
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="?", choices=["by-heart", "twins", "parity"])
    parser.add_argument("paths", nargs="*", help="model or folder of models, GSM8K, names")
    parser.add_argument("--page", action="store_true", help="measure nothing, write the page")
    options = parser.parse_args()
    if not options.page:
        model, gsm8k, *names = options.paths
        if options.what == "by-heart":
            keep_record(RESULT, "by-heart", by_heart(model, Path(gsm8k)))
        elif options.what == "twins":
            name = f"twins {Path(model).name}"
            keep_record(RESULT, name, twins_of_all(model, Path(gsm8k)))
        else:
            for name in names or PUBLISHED:
                record = parity(name, Path(model), Path(gsm8k))
                keep_record(RESULT, f"parity {name}", record)
    PAGE.write_text(page(read_records(RESULT)))


if __name__ == "__main__":
    main()
