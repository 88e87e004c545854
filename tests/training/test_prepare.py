"""A completion budget that follows from the prompts: one number, the same wherever it is asked."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoTokenizer, GenerationConfig

from grouper.advice import plan
from grouper.api import prepare
from grouper.config.loading import load_recipe
from grouper.data import ProblemSet
from grouper.errors import ConfigError, ModelError, PromptError
from grouper.models.loading import save_policy, stop_ids_of
from grouper.runs.progress import Progress
from grouper.training.prepare import Prepared
from grouper.training.problem_sets import ProblemSets, load_problem_sets
from grouper.training.run import Run

SMALL = [
    "model.new.hidden_size=32",
    "model.new.intermediate_size=64",
    "data.sft.options.count=40",
    "data.train.options.count=40",
    "data.validation.options.count=4",
    "data.test.options.count=8",
    "grading.symbolic=false",
    "sampling={max_total_tokens: 100}",
    "prompt.max_percentile=75",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    outputs = tmp_path_factory.mktemp("outputs")
    recipe = load_recipe("demo", [*SMALL, f"output_dir={outputs}", "sft.max_tokens=60"])
    with Run(recipe, Progress(quiet=True)) as run:
        yield run


def longest(run: Run) -> int:
    return max(len(prompt.token_ids) for _, prompt in run.prepared.train)


def test_the_budget_is_what_the_longest_kept_prompt_leaves(run):
    budget = 100 - longest(run)
    assert run.prepared.max_new_tokens == budget
    assert run.prepared.training_params().max_new_tokens == budget
    assert run.prepared.evaluation_params().max_new_tokens == budget
    assert run.prepared.budget_note == (
        f"Completions have up to {budget} tokens: 100 in all, less {longest(run)} of the "
        f"longest of {len(run.prepared.train)} prompts."
    )
    assert 30 <= len(run.prepared.train) < 40
    # What is measured on is not chosen by length.
    assert len(run.prepared.test) == 8


def test_the_recipe_stays_as_it_was_loaded(run):
    """T3: a resolved recipe can be changed, written and read again."""
    assert run.recipe.override("grpo.steps=3").grpo.steps == 3
    assert load_recipe(run.path / "recipe.yaml") == run.recipe


def test_run_json_records_it(run):
    info = json.loads((Path(run.path) / "run.json").read_text())
    assert info["resolved"] == {"sampling.max_new_tokens": run.prepared.max_new_tokens}
    # What names the experiment is what was asked for.
    assert run.hash == info["recipe_hash"]


@pytest.mark.slow
def test_a_measurement_elsewhere_finds_the_same_budget(run):
    recipe = load_recipe(run.path / "recipe.yaml")
    assert recipe.sampling.max_total_tokens == 100
    sets = load_problem_sets(recipe)
    for some in (ProblemSets(train=sets.train), ProblemSets(test=sets.test), ProblemSets()):
        with Prepared(recipe, some, model=run.base_path) as prepared:
            assert prepared.evaluation_params() == run.prepared.evaluation_params()
            assert prepared.prompt_limit() == run.prepared.prompt_limit()


def test_demonstrations_have_at_most_so_many_tokens(run):
    sizes = [len(d.prompt.token_ids) + len(d.token_ids) for d in run.prepared.demonstrations]
    assert max(sizes) <= 60
    assert len(sizes) < 40


def test_a_completion_budget_that_leaves_prompts_no_room_is_named(run):
    """Raising prompt.max_prompt_tokens would do nothing."""
    recipe = run.recipe.override(sampling={"max_total_tokens": None, "max_new_tokens": 32_766})
    assert run.prepared.context == 32_768
    sets = ProblemSets(train=load_problem_sets(recipe).train)
    with pytest.raises(PromptError, match=r"Lower sampling.max_new_tokens: .* leaves prompts 2"):
        Prepared(recipe, sets, model=run.base_path)


def test_a_longer_budget_of_evaluation_has_its_own_limit(run):
    """It was refused in the middle of the first evaluation, with advice about sampling."""
    long = {"evaluation": {"max_new_tokens": 32_766}}
    recipe = run.recipe.override(sampling={"max_total_tokens": None, "max_new_tokens": 8}, **long)
    sets = load_problem_sets(recipe)
    with Prepared(recipe, ProblemSets(train=sets.train), model=run.base_path) as prepared:
        assert prepared.prompt_limit() > 2 == prepared.prompt_limit("test")
    with pytest.raises(PromptError, match=r"Lower evaluation.max_new_tokens: .* prompts 2"):
        Prepared(recipe, ProblemSets(test=sets.test), model=run.base_path)
    more = recipe.override("evaluation.max_new_tokens=40000")
    with pytest.raises(ConfigError, match=r"evaluation.max_new_tokens: 40000 .* no room"):
        Prepared(more, ProblemSets(test=sets.test), model=run.base_path)


def test_a_plan_counts_on_it(run):
    recipe = load_recipe(run.path / "recipe.yaml")
    planner = plan._Planner(recipe, "cpu")
    assert planner.completion == run.prepared.max_new_tokens
    assert planner.prompts == [len(prompt.token_ids) for _, prompt in run.prepared.train]
    measured = (*run.prepared.validation, *run.prepared.test)
    _, size = planner._sizes("evaluation", 1)
    assert size.prompt == max(len(prompt.token_ids) for _, prompt in measured)
    assert max(map(sum, planner.demonstrations)) <= 60
    elsewhere = plan._Planner(recipe.override("data.test={source: file, path: /gone}"), "cpu")
    assert (elsewhere.prompts, elsewhere.completion) == ([99], 99)
    assert elsewhere.demonstrations == [(1, 59)]


@pytest.mark.parametrize(("more", "refused"), [("many", True), ("never-written", False)])
def test_a_tokenizer_that_knows_more_than_the_model(run, tmp_path, more, refused):
    """R5: as long as nobody writes what the embedding has no row for, all is well."""
    shutil.copytree(run.base_path, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.add_tokens([*(f"<{n}>" for n in range(500)), more])
    tokenizer.save_pretrained(tmp_path / "model")
    recipe = load_recipe("demo", [*SMALL[3:], f"model={{path: {tmp_path}/model}}"]).override(
        output_dir=str(tmp_path)
    )
    with contextlib.ExitStack() as stack:
        if refused:
            stack.enter_context(pytest.raises(ModelError, match=r"'many'.*the model knows \d+"))
        stack.enter_context(Run(recipe, Progress(quiet=True)))


def test_the_setting_that_leaves_prompts_no_room_is_named_before_sft(run):
    """The advice was to raise `prompt.max_prompt_tokens`, which would not have helped."""
    budget = run.prepared.context - 3
    recipe = load_recipe("demo", [*SMALL[:7], f"sampling={{max_new_tokens: {budget}}}"])
    with pytest.raises(PromptError, match="no prompt is left") as refused:
        Prepared(recipe, load_problem_sets(recipe), model=str(run.base_path), quiet=True)
    assert refused.value.fix.startswith("Lower sampling.max_new_tokens: of the model's")


def test_other_programs_stop_where_sft_ends_its_completions(run, tmp_path):
    """A base model ends a text with one token, and its chat template a turn with another."""
    base, trained = tmp_path / "base", tmp_path / "trained"
    shutil.copytree(run.base_path, base)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<|user|>{% endfor %}"
    tokenizer.save_pretrained(base)
    recipe = load_recipe("demo", [*SMALL[3:6], f"model={{path: {base}}}", "grading.symbolic=false"])
    with Prepared(recipe, ProblemSets(), quiet=True) as prepared:
        save_policy(prepared.model, prepared.tokenizer, trained)
    ends = tokenizer.convert_tokens_to_ids(["<|user|>", tokenizer.eos_token])
    assert stop_ids_of(str(base)) == ends[1:]
    assert stop_ids_of(str(trained)) == ends


def test_what_a_model_came_with_keeps_it_from_being_saved_nowhere(run, tmp_path):
    """SFT of a model like Llama 2 ended in a traceback, where its first weights were to be saved:
    transformers saves no changed `temperature` without `do_sample`."""
    base, trained = tmp_path / "base", tmp_path / "trained"
    shutil.copytree(run.base_path, base)
    file = base / "generation_config.json"
    odd = {"temperature": 0.6, "top_p": 0.9, "length_penalty": 2.0, "pad_token_id": 3}
    file.write_text(json.dumps(json.loads(file.read_text()) | odd))
    recipe = load_recipe("demo", [*SMALL[3:6], f"model={{path: {base}}}", "grading.symbolic=false"])
    with Prepared(recipe, ProblemSets(), quiet=True) as prepared:
        save_policy(prepared.model, prepared.tokenizer, trained)
    saved = GenerationConfig.from_pretrained(trained)
    assert (saved.eos_token_id, saved.pad_token_id) == (list(prepared.stop_tokens), 3)
    assert (saved.temperature, saved.top_p, saved.length_penalty) == (None, None, None)


def test_prompts_that_leave_nothing(tmp_path):
    recipe = load_recipe(
        "demo",
        [*SMALL, f"output_dir={tmp_path}", "sampling={max_total_tokens: 60, min_new_tokens: 55}"],
    )
    with pytest.raises(ConfigError, match=r"max_total_tokens: prompts of up to \d+ tokens leave"):
        Run(recipe, Progress(quiet=True))


def test_validation_problems_need_no_solution_that_can_be_shown(run, caplog):
    problem = replace(run.prepared.train[0][0], solution="<reasoning>2</reasoning>")
    held_out = ProblemSet(name="v", problems=(problem,))
    sets = replace(load_problem_sets(run.recipe), validation=held_out)
    with Prepared(run.recipe, sets, model=run.prepared.model_path) as prepared:
        assert len(prepared.validation) == 1
        assert prepared.demonstrations
        assert not prepared.validation_demonstrations
    assert "no validation loss in SFT: no demonstration is left of 1 problems" in caplog.text


@pytest.mark.slow
def test_sft_and_rollouts_start_from_identical_prompts(shared_data, tmp_path):
    """`math-r1-zero`, with its published files: equal text and equal ids, question by question."""
    folder = shared_data / "math"
    recipe = load_recipe(
        "demo",
        [
            *SMALL[:3],
            f"output_dir={tmp_path}",
            "grading.symbolic=false",
            "prompt={format: r1-zero, max_prompt_tokens: 1000}",
            "sampling={max_new_tokens: 64}",
            f"data.sft={{source: prompt-response, path: {folder / 'sft.jsonl'}, limit: 60}}",
            f"data.train={{source: math, path: {folder}, split: train, limit: 40}}",
            "data.validation=null",
            "data.test=null",
        ],
    )
    with Run(recipe, Progress(quiet=True)) as run:
        sampled = {prompt.text: prompt.token_ids for _, prompt in run.prepared.train}
        trained = run.prepared.demonstrations
        shared = [d for d in trained if d.prompt.text in sampled]
        assert len(trained) == 60
        assert len(shared) >= 30
        assert all(d.prompt.token_ids == sampled[d.prompt.text] for d in shared)
        # The response word for word, then the stop token.
        texts = [run.prepared.tokenizer.decode(list(d.token_ids[:-1])) for d in trained]
        rows = (folder / "sft.jsonl").read_text().splitlines()
        assert texts == [json.loads(row)["response"] for row in rows[:60]]


@pytest.mark.parametrize(
    ("settings", "stop"),
    [
        (["prompt.format=xml", "prompt.template=plain"], ("</answer>", "\nUser:")),
        (["prompt.format=boxed", "prompt.template=plain"], ("\nUser:",)),
        # The recipe's own come first, and what would be cut off cannot close the answer.
        (["prompt.format=xml", "prompt.template=plain", "sampling.stop=[X]"], ("X",)),
        (
            ["prompt.format=xml", "prompt.template=plain", "sampling.include_stop=false"],
            ("\nUser:",),
        ),
        # In a chat a token ends the turn.
        (["prompt.format=xml", "prompt.template=install"], ()),
    ],
)
def test_only_plain_text_has_strings_that_end_it(settings, stop):
    """Base models wrote invented turns to the limit, and every answer was truncated."""
    recipe = load_recipe("demo", [*SMALL[:6], "prompt.max_prompt_tokens=900", *settings])
    recipe = recipe.override("sampling.max_new_tokens=99", skip_sft=True)
    sets = load_problem_sets(recipe, ["train"])
    with Prepared(recipe, sets, quiet=True) as prepared:
        assert prepared.sampling.stop == stop
        assert prepared.evaluation_params().stop == stop


@pytest.mark.slow
def test_what_is_left_open_goes_with_its_name(tmp_path):
    """A notebook's `prepared = prepare(recipe)`, run again, left a grading process each time."""
    file = tmp_path / "roots.jsonl"
    file.write_text(json.dumps({"question": "Half of root 2?", "answer": r"\frac{\sqrt{2}}{2}"}))
    data = f"data={{train: {{source: file, path: {file}}}}}"
    prepared = prepare(load_recipe("demo", [data, "skip_sft=true", *SMALL[:2]]))
    answer = r"<answer>\frac{1}{\sqrt{2}}</answer>"
    assert prepared.reward(f"<reasoning>...</reasoning>{answer}").components["correctness"] == 1
    (worker,) = prepared.grader.worker_pids
    del prepared
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)


def test_solutions_that_contradict_their_reference_are_counted(tmp_path, caplog):
    r"""M14: a solution whose \boxed{} is not the answer column was trained without a word."""
    rows = [
        {"question": f"{n}+1?", "answer": str(n + 1), "solution": rf"So \boxed{{{n + 1 + n % 2}}}."}
        for n in range(8)
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = f"{{source: file, path: {file}}}"
    settings = [
        *SMALL[:2],
        "model.new.vocab_size=300",
        "prompt={format: boxed, max_prompt_tokens: 400}",
        f"output_dir={tmp_path}",
        *(f"data.{part}={source}" for part in ("sft", "train")),
        "data.test=null",
        "data.validation=null",
        "rewards=[{name: correctness}]",
    ]
    with prepare(load_recipe("demo", settings)):
        pass
    text = "4 worked solutions state another answer than their reference, the first: rows/1"
    assert text in caplog.text
    caplog.clear()
    with prepare(load_recipe("demo", [*settings, "data.sft.only_correct=true"])) as prepared:
        assert len(prepared.demonstrations) == 4
    assert "another answer" not in caplog.text
