"""What a run would do, worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grouper.advice import dry_run
from grouper.advice.dry_run import make_plan
from grouper.config.loading import load_recipe
from grouper.config.schema import NewModelConfig
from grouper.data import load_problems
from grouper.errors import GrouperError
from grouper.models import device
from grouper.models.new_model import make_new_model, save_new_model
from grouper.prompts.formats import FORMATS

FUNCTIONS = Path(__file__).parents[1] / "rewards" / "reference_functions.py"


def test_the_sizes_are_those_worked_out_by_hand(tmp_path):
    recipe = load_recipe(
        "demo",
        [
            f"output_dir={tmp_path}",
            "data.sft.options.count=70",
            "data.train.options.count=50",
            "sft.steps=null",
            "sft.epochs=2",
            "sft.batch_size=32",
            "grpo.prompts_per_step=16",
            "grpo.group_size=8",
        ],
    )
    plan = make_plan(recipe)
    # 70 / 32 rounds up to 3 steps per epoch; two epochs of 70 are 140 / 32, rounded up: 5 steps.
    assert "32 demonstrations per step, 70 in all, 3 steps per epoch; 5 steps" in plan.sizes[0]
    assert "16 prompts x 8 samples = 128 completions per step, 4 steps per epoch" in plan.sizes[1]
    assert plan.sizes[-1] == f"Output: {tmp_path}/demo (new)"
    assert plan.warnings == ()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_phase_that_is_skipped_is_not_planned(tmp_path):
    recipe = load_recipe("demo", [f"output_dir={tmp_path}", "skip_sft=true"])
    assert not any("demonstrations" in line for line in make_plan(recipe).sizes)
    recipe = load_recipe("demo", [f"output_dir={tmp_path}", "skip_grpo=true"])
    assert not any("GRPO" in line for line in make_plan(recipe).sizes)


@pytest.mark.parametrize(
    ("target", "why"),
    [("/", "is part of the run, or holds it"), ("RUN/grpo", "is part of the run, or holds it")],
)
def test_a_save_path_that_would_replace_the_run_is_refused_before_it(tmp_path, target, why):
    """The run was refused by it at its start, after a dry run that had approved."""
    run = tmp_path / "demo"
    target = target.replace("RUN", str(run))
    recipe = load_recipe("demo", [f"output_dir={tmp_path}", f"save_path={target}"])
    with pytest.raises(GrouperError, match=why):
        make_plan(recipe)


def test_everything_that_is_wrong_is_told_at_once(tmp_path):
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "notes.txt").write_text("mine")
    (tmp_path / "rewards.py").write_text("def bad(**kwargs):\n    raise KeyError('x')\n")
    recipe = load_recipe(
        "demo",
        [f"output_dir={tmp_path}", f"rewards=[{{name: '{tmp_path}/rewards.py:bad'}}]"],
    )
    with pytest.raises(GrouperError) as caught:
        make_plan(recipe)
    assert "notes.txt" in str(caught.value)
    assert "'bad' raised KeyError" in str(caught.value)
    assert len(caught.value.others) == 1


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["grading.programs.packages=[no_such_package]"], "no_such_package is not installed"),
        (["sampling.tools.functions=[no_such.py:solve]"], "there is no file no_such.py"),
        (
            ["sampling.tools.functions=[no_such.py:solve]", "prompt.format=boxed"],
            "the format boxed has no turns",
        ),
        (["grpo.max_staleness=1"], "cannot begin the rollouts of the next step"),
    ],
)
def test_programs_and_tools_are_tried(tmp_path, overrides, why):
    start = [f"output_dir={tmp_path}", "prompt.format=python-tool", "skip_sft=true"]
    with pytest.raises(GrouperError, match=why):
        make_plan(load_recipe("demo", [*start, *overrides]))


def test_a_machine_that_cannot_isolate_programs_is_refused_before_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr("grouper.programs.runner.available_isolation", lambda: "limits")
    start = [f"output_dir={tmp_path}", "prompt.format=program", "skip_sft=true"]
    with pytest.raises(GrouperError, match=r"no filter of system calls \(seccomp\)"):
        make_plan(load_recipe("demo", start))


def test_rewards_are_tried_on_a_row_of_the_data(tmp_path):
    """They see its columns, which a made-up problem does not have."""
    rows = [{"question": f"What is {n} + 1?", "answer": str(n + 1), "unit": "m"} for n in range(3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rewards.py").write_text(
        "def unit(completions, unit, **kwargs):\n"
        "    assert set(unit) == {'m'}\n"
        "    return [0.0 for _ in completions]\n"
    )
    recipe = load_recipe(
        "demo",
        [
            f"output_dir={tmp_path}",
            "skip_sft=true",
            "data.sft=null",
            f"data.train={{source: file, path: '{tmp_path}/rows.jsonl'}}",
            f"rewards=[{{name: '{tmp_path}/rewards.py:unit'}}]",
        ],
    )
    assert any("3 steps" in line or "prompts x" in line for line in make_plan(recipe).sizes)


SYSTEMS = {
    "gsm8k-xml": ("xml_correctness", "xml_integer", "xml_tag_count"),
    "gsm8k-lite": ("lite_correctness", "lite_numeric", "lite_tags"),
    "openmath-dapo": ("tags_approximate", "tags_answer", "tags_number"),
}
"""Recipe -> functions of its users, each of which pays the reference completion the most."""


@pytest.mark.parametrize("system", SYSTEMS)
def test_functions_of_users_are_tried_as_the_run_calls_them(system, shared_data, tmp_path):
    """With chat messages, on a row of GSM8K, whose raw answer column is the worked solution."""
    recipe = load_recipe(
        system,
        [
            f"output_dir={tmp_path}",
            "skip_sft=true",
            "data.sft=null",
            "data.test=null",
            f"data.train={{source: gsm8k, path: {shared_data / 'gsm8k'}, split: test, limit: 300}}",
            f"rewards={json.dumps([{'name': f'{FUNCTIONS}:{n}'} for n in SYSTEMS[system]])}",
            "grpo.optimizer.name=adamw",  # that of openmath-dapo takes bitsandbytes
        ],
    )
    assert make_plan(recipe).warnings == ()


def test_a_reward_that_pays_the_reference_completion_least_is_warned_of(shared_data, tmp_path):
    """Its pattern stops at a newline, and worked solutions have several lines."""
    recipe = load_recipe(
        "gsm8k-xml",
        [
            f"output_dir={tmp_path}",
            "data.test=null",
            f"data.train={{source: gsm8k, path: {shared_data / 'gsm8k'}, split: test, limit: 3}}",
            f"rewards=[{{name: '{FUNCTIONS}:xml_soft_format'}}]",
        ],
    )
    (warning,) = make_plan(recipe).warnings
    assert "'xml_soft_format' pays 0 for a right completion of gsm8k/test/0" in warning


@pytest.mark.slow
def test_rewards_are_tried_with_plain_text_where_the_run_has_plain_text(tmp_path):
    (tmp_path / "rewards.py").write_text(
        "def plain(prompts, completions, **kwargs):\n"
        "    assert all(isinstance(text, str) for text in (*prompts, *completions))\n"
        "    return [float(len(text)) for text in completions]\n"
    )
    rewards = f"rewards=[{{name: '{tmp_path}/rewards.py:plain'}}]"
    common = [f"output_dir={tmp_path}", rewards]
    make_plan(load_recipe("demo", [*common, "prompt.template=plain"]))
    make_plan(load_recipe("demo", [*common, "prompt.format=r1-zero"]))
    # A model folder on this machine says by its tokenizer what `auto` means.
    folder = tmp_path / "model"
    recipe = load_recipe("demo", ["data.train.options.count=60"])
    model, tokenizer = make_new_model(
        NewModelConfig(hidden_size=32, intermediate_size=64, layers=1),
        load_problems(recipe.data.train, seed=0).problems,
        FORMATS["compact"],
        seed=0,
    )
    tokenizer.chat_template = None
    save_new_model(folder, model, tokenizer)
    chosen = [*common, "model.new=null", f"model.path={folder}", "skip_sft=true"]
    make_plan(load_recipe("demo", chosen))


def test_a_device_that_is_not_there_is_named_with_everything_else(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    recipe = load_recipe("demo", [f"output_dir={tmp_path}", "device=cuda"])
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "notes.txt").write_text("mine")
    with pytest.raises(GrouperError, match="finds no cuda device") as caught:
        make_plan(recipe)
    assert len(caught.value.others) == 1


@pytest.mark.slow
def test_models_that_are_not_here_and_what_takes_their_tokenizer_are_named_as_unchecked(tmp_path):
    demo = load_recipe("demo", [f"output_dir={tmp_path}"])
    lengths = "the lengths of the prompts, which take the model's tokenizer"
    assert make_plan(demo).unchecked == (lengths,)
    away = demo.override(
        "model.new=null", "model.path=nobody/no-such-model", "grpo.start_from=gone"
    )
    absent = [
        f"the model '{n}', which is not on this machine" for n in ("nobody/no-such-model", "gone")
    ]
    assert make_plan(away).unchecked == (*absent, lengths)


@pytest.mark.slow
@pytest.mark.parametrize("local", [False, True])
def test_lora_on_layers_that_the_model_lacks_is_refused_from_its_configuration(tmp_path, local):
    """PEFT refuses only where no name at all is found."""
    new = NewModelConfig(hidden_size=32, intermediate_size=64, layers=1)
    recipe = load_recipe(
        "demo",
        [f"output_dir={tmp_path}", "model.lora={target_modules: [k_proj, q_prj]}", "skip_sft=true"],
    )
    if local:
        folder = tmp_path / "model"
        problems = load_problems(recipe.data.train, seed=0).problems
        save_new_model(folder, *make_new_model(new, problems, FORMATS["compact"], seed=0))
        (folder / "model.safetensors").unlink()  # no weights are needed to tell
        recipe = recipe.override("model.new=null", f"model.path={folder}")
    with pytest.raises(GrouperError, match=r"no layer 'q_prj'. Did you mean 'q_proj'") as caught:
        make_plan(recipe)
    assert caught.value.where == "model.lora.target_modules"
    make_plan(recipe.override("model.lora.target_modules=[k_proj, mlp.up_proj]"))


def test_a_missing_start_and_what_is_wrong_with_the_data_are_told_together(tmp_path):
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "notes.txt").write_text("mine")
    recipe = load_recipe("demo", [f"output_dir={tmp_path}", f"grpo.start_from={tmp_path}/gone"])
    with pytest.raises(GrouperError, match="there is no folder") as caught:
        make_plan(recipe)
    assert "notes.txt" in str(caught.value)


def test_a_model_folder_without_weights_is_a_warning(tmp_path):
    """A dry run had nothing to say of it, and the run was refused when it loaded the model."""
    problems = load_problems(load_recipe("demo").data.train, seed=0).problems
    made = make_new_model(NewModelConfig(), problems, FORMATS["xml"], seed=0)
    save_new_model(tmp_path / "m", *made)
    recipe = load_recipe(
        "demo", [f"output_dir={tmp_path}", "model.new=null", f"model.path={tmp_path}/m"]
    )
    lacking = [text for text in make_plan(recipe).warnings if "holds no weights" in text]
    assert lacking == []
    for file in (tmp_path / "m").glob("*.safetensors"):
        file.unlink()
    lacking = [text for text in make_plan(recipe).warnings if "holds no weights" in text]
    assert lacking == [
        f"model.path: {tmp_path}/m holds no weights (*.safetensors): a run cannot load it."
    ]


def test_a_dtype_that_the_cpu_is_slow_in_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Only the run itself said so, and its first step took minutes."""
    problems = load_problems(load_recipe("demo").data.train, seed=0).problems
    save_new_model(
        tmp_path / "m", *make_new_model(NewModelConfig(), problems, FORMATS["xml"], seed=0)
    )
    monkeypatch.setattr(device, "bfloat16_slowdown", lambda: 80.0)
    monkeypatch.setattr(dry_run, "_LARGE", 0)
    model = ("model.new=null", f"model.path={tmp_path}/m", f"output_dir={tmp_path}", "device=cpu")
    warned = [
        [text for text in make_plan(load_recipe("demo", [*model, *more])).warnings if "CPU" in text]
        for more in ([], ["model.dtype=bfloat16"], ["model.compute_dtype=bfloat16"])
    ]
    assert [len(texts) for texts in warned] == [0, 1, 1]
    assert "80.0 times as long as in float32. model.dtype=float32 is faster" in warned[1][0]


def test_a_missing_library_is_reported_with_what_else_is_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """M16: a missing vLLM ended the checks before data and model were looked at."""
    from grouper.advice.recipe_checks import check_recipe, missing_packages

    monkeypatch.setattr("grouper.errors.find_spec", lambda name: None if name == "vllm" else name)
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{}\n")
    data = f"data.train={{source: file, path: {bad}}}"
    recipe = load_recipe("demo", ["sampling.engine=vllm", data, f"output_dir={tmp_path}"])
    assert len(missing_packages(recipe)) == 1
    check_recipe(recipe, packages=False)
    with pytest.raises(GrouperError) as caught:
        make_plan(recipe)
    text = " ".join(map(str, (caught.value, *caught.value.others)))
    assert "vLLM" in text
    assert "no column holds" in text


def _plan_of(rows, tmp_path, *settings):
    """Plan GRPO on these rows as training data."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = f"data.train={{source: file, path: '{path}'}}"
    skipped = ["skip_sft=true", "data.sft=null"]
    return make_plan(load_recipe("demo", [f"output_dir={tmp_path}", *skipped, data, *settings]))


def _sums(different, count):
    pairs = [(n % different, 2) for n in range(count)]
    return [{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in pairs]


def test_one_problem_thirty_times_is_a_warning(tmp_path):
    """The plan said thirty problems, and every step would have had the same one."""
    (warning,) = _plan_of(_sums(1, 30), tmp_path).warnings
    assert "data.train: 30 problems are only 1 different question." in warning
    assert "data.train.unique" in warning


def test_repetition_is_no_warning_where_it_is_little_or_asked_for(tmp_path):
    assert _plan_of(_sums(15, 30), tmp_path).warnings == ()
    asked = ["data.train.unique=1", "data.train.unique_by=problem"]
    assert _plan_of(_sums(1, 30), tmp_path, *asked).warnings == ()


def test_references_that_are_sentences_are_said_to_be_prose(tmp_path):
    """They passed as lists of two members, which no completion with the numbers equals."""
    rows = [
        {
            "question": f"He has {n} apples and she has 2 less. How many has each?",
            "answer": f"He has {n} apples, and she has {n - 2}",
        }
        for n in range(10, 40)
    ]
    (warning,) = _plan_of(rows, tmp_path).warnings
    assert "30 of 30 reference answers are prose and not an answer" in warning
    assert "He has 10 apples, and she has 8" in warning
    assert "data.train.columns.answer" in warning
    lists = [{**row, "answer": f"{n}, {n - 2}"} for n, row in enumerate(rows)]
    assert _plan_of(lists, tmp_path).warnings == ()
