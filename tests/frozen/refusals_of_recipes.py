"""What can be wrong with a command line, a recipe, its rewards, or a file of TRL's."""

from __future__ import annotations

import json

from frozen_calls import Row

from grouper import load_recipe, prepare

SMALL = """
name: small
description: a test
model:
  new: {layers: 1}
data:
  train: {source: arithmetic, split: train, options: {count: 10}}
  test: {source: arithmetic, split: test, options: {count: 5}}
rewards:
  - {name: correctness, weight: 1}
"""
FUNCTIONS = """
def one(completions, **kwargs):
    return [1.0]

def words(completions, **kwargs):
    return ["much"] * len(completions)

def large(completions, **kwargs):
    return [1e10] * len(completions)

def huge(completions, **kwargs):
    return [1e300] * len(completions)

def outside(completions, **kwargs):
    return [2.0] * len(completions)
outside.bounds = (0.0, 1.0)

def raises(completions, **kwargs):
    raise KeyError("solution")

def closed(completions):
    return [0.0] * len(completions)

count = 0
def varies(completions, **kwargs):
    global count
    count += 1
    return [float(count)] * len(completions)

def silent(completions, **kwargs):
    return [None] * len(completions)

async def waits(completions, **kwargs):
    import asyncio
    await asyncio.sleep(60)
"""


def usage(name: str, command: str, **more: str) -> Row:
    return Row(name=f"usage/{name}", command=command, **more)  # type: ignore[arg-type]  # texts


USAGE = (
    usage("unknown-command", "trian demo"),
    usage("recipe-as-command", "demo"),
    usage("file-as-command", "mine.yaml"),
    usage("train", "train demo"),
    usage("unknown-subcommand-of-data", "data adit"),
    usage("unknown-subcommand-of-recipes", "recipes fomats"),
    usage("unknown-subcommand-of-rewards", "rewards tyr"),
    usage("no-recipe", "run"),
    usage("no-model", "generate"),
    usage("resume-and-overwrite", "run demo --resume --overwrite"),
    usage("allow-changes-alone", "run demo --allow-changes"),
    usage("two-recipes", "run --config demo other"),
    usage("trackers-and-none", "run demo --tracker none --tracker wandb"),
    usage("project-without-tracker", "run demo --project mine --online"),
    usage("unique-examples", "sft demo --unique-examples few"),
    usage("eval-steps", "grpo demo --eval-steps sometimes"),
    usage("steps", "grpo demo --steps 0"),
    usage("learning-rate", "grpo demo --learning-rate 0"),
    usage("attention", "run demo --attention flash"),
    usage("plan-device", "plan demo --device tpu"),
    usage("trl-option-with-key", "grpo demo --lora-r 8"),
    usage("trl-option-without-key", "grpo demo --hub-token x"),
    usage("preview-samples", "preview demo --samples 1"),
    usage(
        "question-and-input", "generate ./tiny -Q 2+2? --input rows.jsonl", files={"rows.jsonl": ""}
    ),
    usage("output-without-input", "generate ./tiny --output rows.jsonl"),
    usage("empty-question", "generate ./tiny --question ' '"),
    usage("grade-without-answer", "grade 4"),
    usage("command-of-another-program", "train demo"),
)


def recipe(name: str, *overrides: str, **more: object) -> Row:
    """The small recipe of `SMALL`, changed."""
    command = " ".join(["run small.yaml --dry-run", *(f'"{text}"' for text in overrides)])
    return Row(
        name=f"recipe/{name}",
        command=command,
        **{"files": {"small.yaml": SMALL}, **more},  # type: ignore[arg-type]  # of a row
    )


OVERRIDES = (
    recipe("unknown-key", "grpo.stesp=3"),
    recipe("wrong-types", "grpo.steps='3'", "grpo.beta=2.5x", "skip_sft=1"),
    recipe("several-at-once", "grpo.stesp=3", "sft.batch_size=-1", "data.train.nope=1", "sead=2"),
    recipe("union", "sft.evaluate_every=sometimes"),
    recipe("choice", "grpo.advantage=best"),
    recipe("hook-no-file", "hooks=['nowhere.py:f']"),
    recipe("hook-no-colon", "hooks=[stop_early]"),
    recipe("infinite", "grpo.beta=.inf"),
    recipe("no-override", "grpo.steps"),
    recipe("position", "rewards.1.weight=3"),
    recipe("position-of-empty", "rewards=[]", "rewards.0.weight=3"),
    recipe("nothing-inside", "name.first=3"),
    recipe("nothing-inside-list", "hooks=[mine.py:f]", "hooks.0.weight=2"),
    recipe("override-not-yaml", "grpo.steps=[1"),
    recipe("group-of-one", "grpo.group_size=1"),
    recipe("truncated-sampling", "sampling.top_p=0.9"),
    recipe("two-models", "model.path=x"),
    recipe("no-model", "model.new=null"),
    recipe("width", "model.new.hidden_size=12"),
    recipe("bfloat16-in-float32", "model.dtype=bfloat16", "model.compute_dtype=float32"),
    recipe("quantized-without-lora", "model.quantization=4bit"),
    recipe("two-lengths", "sampling.max_total_tokens=99", "sampling.max_new_tokens=9"),
    recipe("min-new-tokens", "sampling.min_new_tokens=900"),
    recipe("samples-without-temperature", "evaluation.samples=4"),
    recipe("rewards-empty", "rewards=[]"),
    recipe("reward-twice", "rewards=[{name: format}, {name: format}]"),
    recipe("warmup-twice", "grpo.optimizer.warmup_steps=3", "grpo.optimizer.warmup_ratio=0.1"),
    recipe("constant", "sft.weighting=constant"),
    recipe("constant-without", "sft.weighting_constant=3"),
    recipe("band", "grpo.difficulty={band: [0.9, 0.1]}"),
    recipe("streaming", "data.train={source: gsm8k, streaming: true}"),
    recipe("mixture-and-source", "data.train.mixture=[{source: gsm8k}]"),
    recipe(
        "mixture-of-mixtures", "data.train={mixture: [{source: mixture}, {source: arithmetic}]}"
    ),
    recipe("mixture-settings", "data.train={mixture: [{source: gsm8k}], path: x}"),
    recipe("two-validations", "data.validation={source: gsm8k}", "data.validation_share=0.1"),
    recipe("tracker-twice", "tracking.trackers=[{name: wandb}, {name: wandb}]"),
    recipe("algorithm", "grpo.algorithm=ppo"),
    recipe("secret", "rewards=[{name: 'a.py:f', params: {api_key: 'sk-1234567'}}]"),
    recipe("secret-not-set", "rewards=[{name: format, params: {api_key: '${NO_SUCH_KEY}'}}]"),
    recipe("tracker-unknown", "tracking.trackers=[{name: wandbb}]"),
    recipe("tracker-without-file", "tracking.trackers=[{name: 'mine.py:Tracker'}]"),
    recipe("tracker-secret", "tracking.trackers=[{name: wandb, params: {key: '${NO_SUCH_KEY}'}}]"),
)
TABLES = (
    recipe("source", "data.train.source=arithmetics"),
    recipe("option", "data.train.options.cuont=3"),
    recipe("kind", "data.test.options={kinds: [nope]}"),
    recipe("steps-of-calculation", "data.test={source: calculation, options: {steps: [0, 3]}}"),
    recipe("limits-of-calculation",
           "data.test={source: calculation, options: {steps: [200], operations: '+'}}"),
    recipe("options-of-a-source", "data.test={source: gsm8k, options: {count: 3}}"),
    recipe("no-path", "data.test={source: file}", "data.train={source: hub}"),
    recipe("field", "data.test={source: gsm8k, columns: {qestion: a}}"),
    recipe("member", "data.test={mixture: [{source: gms8k}, {source: file}]}"),
    recipe("format", "prompt.format=xlm"),
    recipe("own-tags", "prompt={format: xml, tags: {answer_open: '<a>'}}"),
    recipe("data-path", "data.test={source: gsm8k, path: ./no/such}"),
    recipe("data-path-near", "data.test={source: file, path: smal.yaml}"),
    recipe("model-path", "model={path: ./no/such}"),
    recipe("start-from", "grpo.start_from=./no/such"),
    recipe("no-solutions", "data.train={source: svamp}"),
    recipe("quantized-copy", "model={path: a/b, quantization: 4bit, lora: {}}",
           "sampling.dtype=float32"),
    recipe("stop-closes", "prompt.format=r1-zero", "sampling.include_stop=false"),
    recipe("together", "prompt.format=xlm", "data.train.source=nope",
           "data.test.options={cuont: 3, hihg: 4}"),
    recipe("few-questions", "data.train.options={count: 400, low: 2, high: 2, kinds: [add2]}"),
    recipe("arithmetic-split", "data.train.split=trian"),
)  # fmt: skip


def prepared(name: str, *overrides: str, **more: object) -> Row:
    """As `recipe`, with what a run looks at before it begins, but for a dry run."""
    return recipe(
        name, **{"python": lambda: prepare(load_recipe("small.yaml", overrides)).close(), **more}
    )


PREPARED = (
    prepared("total-tokens", "sampling.max_total_tokens=60", "sampling.min_new_tokens=50"),
    prepared("long-prompts", "prompt.max_prompt_tokens=3"),
    prepared("long-solutions", "sft.max_tokens=3"),
    prepared("vocabulary", "model.new.vocab_size=100"),
)


def text(name: str, content: str | bytes, command: str = "recipes show a.yaml") -> Row:
    return Row(name=f"recipe-file/{name}", command=command, files={"a.yaml": content})


FILES = (
    text("list", "- a\n"),
    text("empty", "# nothing yet\n"),
    text("not-yaml", "name: [x\n"),
    text("twice", "name: x\nname: y\n"),
    text("required", "seed: 1\n"),
    text("python", "name: !!python/object/apply:os.system ['true']\n"),
    text("deep", "a: " + "[" * 600),
    text("aliases", "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
        f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n"
        for old, new in zip("abcde", "bcdef", strict=True)
    )),
    text("long-number", f"seed: {'1' * 5000}\n"),
    text("not-utf8", b"name: \xff\n"),
    text("unknown-name", "", "recipes show dmeo"),
    text("unknown-file", "", "recipes show ./b.yaml"),
    text("unknown-section", "", "recipes fields grop"),
    text("folder-without-recipe", "", "eval ./"),
)  # fmt: skip


def reward(name: str, entries: str, command: str = "run demo --dry-run", **more: object) -> Row:
    sizes = "data.train.options.count=12 data.sft.options.count=12"
    few = f"{sizes} data.test=null data.validation=null" if "run demo" in command else ""
    return Row(
        name=f"reward/{name}",
        command=f'{command} {few} "rewards={entries}"' if entries else command,
        **{"files": {"mine.py": FUNCTIONS}, **more},  # type: ignore[arg-type]  # of a row
    )


def users(name: str, more: str = "") -> Row:
    return reward(f"users-{name}", f"[{{name: 'mine.py:{name}'{more}}}]")


REWARDS = (
    *map(users, ("one", "words", "huge", "outside", "raises", "closed", "varies", "none")),
    users("waits", ", timeout_seconds: 0.05"),
    users("large", ", weight: 1e10"),
    reward("weight-too-large", "[{name: correctness, weight: 1e300}]"),
    reward("unknown", "[{name: corectness}]"),
    reward("parameter", "[{name: format, params: {weigth: 3}}, {name: cosine, params: {scal: 3}}]"),
    reward("no-file", "[{name: 'nowhere.py:f'}]"),
    reward("broken-file", "[{name: 'mine.py:f'}]", files={"mine.py": "def f(:\n"}),
    reward("raising-file", "[{name: 'mine.py:f'}]", files={"mine.py": "1 / 0\n"}),
    reward("no-module", "[{name: 'no_such_module_here:f'}]"),
    reward("same-label", "[{name: 'mine.py:one'}, {name: 'other.py:one'}]",
           files={"mine.py": FUNCTIONS, "other.py": FUNCTIONS}),
    reward("stack", "[{name: 'stack:gsm8k-xlm'}]"),
    reward("stack-settings", "[{name: 'stack:gsm8k-xml', params: {}}]"),
    reward("tags", "[{name: format}] prompt.format=boxed".replace("] ", ']" "')),
    reward("variant", "[{name: cosine, params: {variant: other}}]"),
    reward("unit", "[{name: cosine, params: {unit: lines}}]"),
    reward("scale", "[{name: cosine, params: {scale: 0}}]"),
    reward("buffer", "[{name: soft_overlong, params: {max_tokens: 5, buffer_tokens: 9}}]"),
    reward("enough", "[{name: reasoning_steps, params: {enough: 0}}]"),
    reward("penalty", "[{name: repetition_penalty, params: {max_penalty: 1}}]"),
    reward("show", "", "rewards show corectness"),
    reward("try-stack", "", "rewards try stack:nothing x --answer 3"),
    reward("try-overridden-stack", "", "rewards try stack:gsm8k-xml x seed=3 --answer 3"),
    reward("try-fails", "[{name: 'mine.py:raises'}]", "rewards try demo x --answer 3"),
    reward("probe-not-scored", "[{name: 'mine.py:silent'}]", "rewards probe demo"),
)  # fmt: skip


def trl(name: str, content: object, options: str = "", file: str = "grpo.yaml") -> Row:
    written = content if isinstance(content, str | bytes) else json.dumps(content)
    return Row(name=f"trl/{name}", command=f"recipes from {file} {options}", files={file: written})


TRL = (
    Row(name="trl/missing", command="recipes from nowhere.yaml"),
    trl("not-utf8", b"beta: \xff\n"),
    trl("no-names", "- 3\n"),
    trl("not-json", '{"beta": }', file="grpo.json"),
    trl("none-of-trl", {"micro_batch": 3, "rate": 1e-5}),
    trl("set-twice", {"num-generations": 8, "num_generations": 4}),
    trl("group-of-one", {"num_generations": 1}),
    trl("not-whole", {"num_generations": 8.5}),
    trl("not-a-number", {"num_generations": 8, "epsilon": "small"}),
    trl("not-cut", {"num_generations": 7, "per_device_train_batch_size": 8}),
    trl("weights", {"num_generations": 8, "reward_funcs": ["accuracy_reward"],
                    "reward_weights": [1.0, 2.0]}),
    trl("cispo", {"num_generations": 8, "loss_type": "cispo", "epsilon_high": -0.5}),
    trl("output-exists", {"num_generations": 8}, "-o grpo.yaml"),
)  # fmt: skip

ROWS = (*USAGE, *OVERRIDES, *TABLES, *PREPARED, *FILES, *REWARDS, *TRL)
