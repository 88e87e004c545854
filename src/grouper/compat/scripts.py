"""Read the settings of a training script from its syntax; it is never executed.

The arguments of its one GRPOConfig or SFTConfig are its settings. The model, data set, adapter,
rewards and system prompt are given to other calls of the same file; they come as the settings by
which TRL's own command line has them.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from grouper.errors import ConfigError

# PEFT's arguments by TRL's names, with PEFT's defaults, which are not TRL's.
_LORA = {
    "r": ("lora_r", 8),
    "lora_alpha": ("lora_alpha", 8),
    "lora_dropout": ("lora_dropout", 0.0),
    "target_modules": ("lora_target_modules", None),
}
# Arguments of an adapter that change nothing here.
_OF_NO_MATTER = {
    "task_type",
    "bias",
    "inference_mode",
    "random_state",
    "use_gradient_checkpointing",
}
_SYSTEM_PROMPT = re.compile(r"(?i)(reasoning_)?sys(tem)?_?(prompt|message)")
_MODEL_ARGUMENTS = ("model", "model_name", "model_id", "pretrained_model_name_or_path")
# Exceptions of `ast.literal_eval` for a node that is no literal.
_NO_LITERAL = (ValueError, TypeError, SyntaxError, RecursionError, MemoryError)

Settings = dict[str, Any]
"""TRL's name -> value."""


def read_script(text: str, where: str) -> tuple[Settings, dict[str, str]]:
    """Read the settings of a training script, and why some of them could not be read.

    Args:
        text: Python, or a notebook that was saved as Python.
        where: the file, for errors.

    Raises:
        ConfigError: it is not Python, or has not one GRPOConfig or SFTConfig.
    """
    try:
        # A notebook that was saved as a script has lines for the shell (`!pip`) and magics.
        tree = ast.parse(re.sub(r"(?m)^( *)(!(?!=)|%+\w).*", r"\1pass", text))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"this is not valid Python: {error}", where=where) from error
    configs = list(_calls(tree, "GRPOConfig", "SFTConfig"))
    if len(configs) != 1:
        problem = f"one GRPOConfig or SFTConfig must say what is trained; there are {len(configs)}"
        raise ConfigError(problem, where=where, fix="Give a copy of the file that has only one.")
    [config] = configs
    constants = _constants(tree)
    # TRL's rewards are given to the trainer; that there are any tells its phase.
    is_grpo = ast.unparse(config.func).endswith("GRPOConfig")
    settings: Settings = {"reward_funcs": None} if is_grpo else {}
    unread: dict[str, str] = {}
    named_output = [ast.keyword("output_dir", first) for first in config.args]
    for keyword in [*config.keywords, *named_output]:
        try:
            settings[str(keyword.arg)] = _value(keyword.value, constants)
        except _NO_LITERAL:
            source = ast.unparse(keyword.value)[:60]
            name = keyword.arg or f"**{source}"
            unread[name] = f"{source} is not a literal: set it in the recipe"
    of_other_calls = _model(tree, constants)
    of_other_calls |= _data(tree, constants, unread)
    of_other_calls |= _adapter(tree, constants, unread)
    of_other_calls |= _rewards(tree, unread)
    of_other_calls |= _system_prompt(constants)
    for name, value in of_other_calls.items():
        if settings.get(name) is None and name not in unread:
            settings[name] = value
    return settings, unread


def _calls(tree: ast.AST, *names: str) -> Iterator[ast.Call]:
    """Yield the calls of functions or classes with these names, from whatever module."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        function = ast.unparse(node.func)
        if function.rpartition(".")[2] in names:
            yield node


def _argument(call: ast.Call, *names: str, position: int | None = None) -> ast.expr | None:
    """Return an argument of a call by any of its names, or by its position."""
    for keyword in call.keywords:
        if keyword.arg in names:
            return keyword.value
    if position is not None and position < len(call.args):
        return call.args[position]
    return None


def _text(node: ast.expr | None, constants: Mapping[str, ast.expr]) -> str | None:
    """Return the text of a node, or None if it is no literal text."""
    if node is None:
        return None
    try:
        value = _value(node, constants)
    except _NO_LITERAL:
        return None
    return value if isinstance(value, str) else None


def _model(tree: ast.AST, constants: Mapping[str, ast.expr]) -> Settings:
    """Find the model that the trainer is given by name, or that is loaded for it."""
    for trainer in _calls(tree, "GRPOTrainer", "SFTTrainer"):
        argument = _argument(trainer, "model", position=0)
        if name := _text(argument, constants):
            return {"model_name_or_path": name}
    for call in _calls(tree, "from_pretrained"):
        owner = ast.unparse(call.func)
        if "Tokenizer" in owner or "Processor" in owner:
            continue
        argument = _argument(call, *_MODEL_ARGUMENTS, position=0)
        if name := _text(argument, constants):
            return {"model_name_or_path": name}
    return {}


def _data(tree: ast.AST, constants: Mapping[str, ast.expr], unread: dict[str, str]) -> Settings:
    """Find the data set that the script loads, where it loads only one."""
    calls: dict[tuple[str, str | None], ast.Call] = {}
    for call in _calls(tree, "load_dataset"):
        name = _text(_argument(call, "path", position=0), constants)
        subset = _text(_argument(call, "name", position=1), constants)
        if name is not None:
            calls.setdefault((name, subset), call)
    if len(calls) > 1:
        names = ", ".join(name for name, _ in calls)
        unread["load_dataset"] = f"the script loads several sets ({names}): set data.train"
    if len(calls) != 1:
        return {}
    [((name, subset), call)] = calls.items()
    data: Settings = {"dataset_name": name}
    if subset is not None:
        data["dataset_config"] = subset
    split = _text(_argument(call, "split"), constants)
    if split is not None and re.fullmatch(r"\w+", split):
        data["dataset_train_split"] = split
    elif split is not None:
        unread["load_dataset.split"] = f"{split!r} is a part of a split: set data.train.limit"
    return data


def _adapter(tree: ast.AST, constants: Mapping[str, ast.expr], unread: dict[str, str]) -> Settings:
    """Read LoRA, by PEFT's own configuration or by Unsloth's function."""
    trainers = [*_calls(tree, "GRPOTrainer", "SFTTrainer")]
    wrapped = [*_calls(tree, "get_peft_model")]
    calls = [call for call in wrapped if _argument(call, "r") is not None]
    # A configuration that is passed to nothing is unused: some have one for other machines.
    if wrapped or any(_argument(trainer, "peft_config") for trainer in trainers):
        calls += _calls(tree, "LoraConfig")
    if not calls:
        return {}
    adapter: Settings = {"use_peft": True} | dict(_LORA.values())
    for keyword in calls[0].keywords:
        name = str(keyword.arg)
        if name in _OF_NO_MATTER or name == "model":
            continue
        try:
            value = _value(keyword.value, constants)
        except _NO_LITERAL:
            source = ast.unparse(keyword.value)[:60]
            reason = f"{source} is not a literal: set model.lora in the recipe"
            unread[f"LoraConfig.{name}"] = reason
            continue
        if name in _LORA:
            trl_name, _ = _LORA[name]
            adapter[trl_name] = value
        elif value:
            unread[f"LoraConfig.{name}"] = "no counterpart: adapters are plain LoRA"
    return {name: value for name, value in adapter.items() if value is not None}


def _rewards(tree: ast.AST, unread: dict[str, str]) -> Settings:
    """List the trainer's reward functions that are imported; the script's own are left out."""
    local_names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for trainer in _calls(tree, "GRPOTrainer"):
        node = _argument(trainer, "reward_funcs", position=1)
        functions: list[ast.expr] = []
        if isinstance(node, ast.List | ast.Tuple):
            functions = node.elts
        elif node is not None:
            functions = [node]
        imported = []
        for function in functions:
            name = ast.unparse(function).rpartition(".")[2]
            if name in local_names:
                unread[f"reward_funcs: {name}"] = (
                    "a function of the script, which would run with it: put it into a file of its "
                    f"own and add {{name: FILE.py:{name}}} to rewards"
                )
            elif name.isidentifier():
                imported.append(name)
        return {"reward_funcs": imported} if imported else {}
    return {}


def _system_prompt(constants: Mapping[str, ast.expr]) -> Settings:
    """Find the text of a constant that is named as one, where there is only one."""
    texts = []
    for name, node in constants.items():
        text = _text(node, constants)
        if text is not None and _SYSTEM_PROMPT.fullmatch(name):
            texts.append(text)
    if len(texts) != 1:
        return {}
    return {"system_prompt": texts[0]}


def _value(node: ast.expr, constants: Mapping[str, ast.expr]) -> Any:
    """Read a literal, a constant, or a difference of such (`max_seq_length - max_prompt_length`).

    Raises:
        ValueError: it is none of these; or any other of `_NO_LITERAL`.
    """
    if isinstance(node, ast.Name) and node.id in constants:
        return _value(constants[node.id], constants)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
        minuend = _value(node.left, constants)
        subtrahend = _value(node.right, constants)
        return minuend - subtrahend
    return ast.literal_eval(node)


def _constants(tree: ast.Module) -> dict[str, ast.expr]:
    """Map names to their values: those that a script sets once, not in a block, to one value.

    A list or mapping may be changed in place, and is not among them.
    """
    bindings = Counter[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            bindings[node.id] += 1
        elif not isinstance(node, ast.keyword):
            # Parameters, imports, functions, classes and patterns bind names, too.
            for attribute in ("arg", "name", "asname", "rest"):
                name = getattr(node, attribute, "")
                bindings[str(name)] += 1
    constants: dict[str, ast.expr] = {}
    for node in tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        if isinstance(node.value, ast.List | ast.Dict | ast.Set):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            if isinstance(target, ast.Name) and bindings[target.id] == 1:
                constants[target.id] = node.value
    return constants
