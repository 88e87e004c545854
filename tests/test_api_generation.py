"""Answers from Python: asked as in training, the same each time, and kept line by line."""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from tiny_models import ScriptedSampler

from grouper import api
from grouper.api import Generator, append_jsonl, load_generator, solve, stream, synthesize
from grouper.config.loading import load_recipe
from grouper.config.schema import SourceConfig
from grouper.data import load_problems
from grouper.data.reading import source_named
from grouper.errors import ConfigError, DataError, ModelError, RunFolderError
from grouper.models.process_group import ProcessGroup
from grouper.prompts import make_format
from grouper.runs.folder import RunFolder
from grouper.sampling.factory import Samplers


@pytest.fixture(scope="module")
def generator(lora_run):
    with load_generator(lora_run) as opened:
        yield opened


def test_the_answer_is_what_the_evaluation_of_the_run_recorded(lora_run, generator):
    result = RunFolder(lora_run).read_evaluation("grpo")
    assert result is not None
    for item in result.items:
        question = item.prompt.removeprefix("<|user|>").removesuffix("<|assistant|>")
        solution = solve(question, generator)
        assert (solution.prompt, solution.response) == (item.prompt, item.completion)
        assert (solution.answer, solution.finish_reason) == (item.extracted, item.finish_reason)
        assert solution.tokens == item.tokens


@pytest.mark.slow
def test_an_adapter_finds_its_base_and_how_it_is_asked(lora_run, generator):
    """The folder of `save_path`: base + adapter give the answers of the run's own final folder."""
    handed = lora_run.parent / "handed-over"
    question = "Pick 305."
    expected = solve(question, generator)
    for path in (handed, lora_run / "grpo" / "final"):
        with load_generator(path) as opened:
            assert opened.recipe.device == generator.recipe.device
            assert solve(question, opened) == expected


def test_an_adapter_without_its_base_says_so(lora_run, tmp_path):
    alone = shutil.copytree(lora_run.parent / "handed-over", tmp_path / "alone")
    config = json.loads((alone / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(tmp_path / "gone")
    (alone / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"base model of the adapter .* there is no folder"):
        load_generator(alone)


@pytest.mark.slow
def test_settings_that_are_given_win(lora_run):
    with load_generator(lora_run / "sft" / "final", max_new_tokens=2, seed=5) as opened:
        assert opened.params.max_new_tokens == 2
        assert opened.recipe.seed == 5
        assert solve("Pick 1.", opened).tokens <= 2
    recipe = load_recipe(lora_run / "recipe.yaml").override("sampling.max_new_tokens=3")
    with load_generator(lora_run / "base", recipe=recipe, temperature=1.0) as opened:
        assert (opened.params.max_new_tokens, opened.params.temperature) == (3, 1.0)


@pytest.mark.slow
def test_as_many_samples_as_the_recipe_evaluates(lora_run):
    """T8: unless the answers are greedy, and all would be the same."""
    recipe = load_recipe(lora_run / "recipe.yaml").override(
        "evaluation={samples: 3, temperature: 0.8}"
    )
    with load_generator(lora_run / "base", recipe=recipe, max_new_tokens=2) as opened:
        ((*solutions,),) = opened.answers(["Pick 1."])
        assert len(solutions) == 3
    with load_generator(lora_run / "base", recipe=recipe, temperature=0) as opened:
        assert opened.recipe.evaluation.samples == 1


@pytest.mark.slow
def test_questions_need_neither_training_data_nor_their_budget(lora_run):
    """With `max_total_tokens` completions in training have what the longest prompt leaves."""
    recipe = load_recipe(lora_run / "recipe.yaml").override(
        f"data.train={{source: file, path: {lora_run / 'gone.jsonl'}}}"
    )
    final = lora_run / "sft" / "final"
    for sampling in ("{max_total_tokens: 40}", "{max_new_tokens: 100000}"):
        given = recipe.override(f"sampling={sampling}")
        with load_generator(final, recipe=given, max_new_tokens=3) as opened:
            assert 1 <= solve("Pick 1.", opened).tokens <= 3


def test_what_cannot_be_loaded_or_asked(lora_run, generator, tmp_path):
    with pytest.raises(ModelError, match="no folder"):
        load_generator(tmp_path / "none", format="xml")
    with pytest.raises(ConfigError, match="prompt format of this model is not known"):
        load_generator("someone/a-model")
    with pytest.raises(ConfigError, match="no prompt format 'xlm'"):
        load_generator(lora_run, format="xlm")
    with pytest.raises(DataError, match="empty"):
        solve("  ", generator)
    with pytest.raises(DataError, match="is not UTF-8"):  # Latin-1 on standard input
        solve("caf\udce9 3 + 4?", generator)
    with pytest.raises(DataError, match="leaves room for"):
        solve("word " * 33_000, generator)


def test_lines_are_added_whole_and_nothing_is_overwritten(generator, tmp_path):
    file = tmp_path / "answers.jsonl"
    for question in ("Pick 1.", "Pick é 2."):
        append_jsonl(file, solve(question, generator))
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert [row["question"] for row in rows] == ["Pick 1.", "Pick é 2."]
    assert all(row["prompt"].startswith("<|user|>Pick") and "response" in row for row in rows)
    assert all("extracted" in row and "answer" not in row for row in rows)
    append_jsonl(file, solve("Pick 3.", generator), answer="3", source="mine")
    last = json.loads(file.read_text(encoding="utf-8").splitlines()[-1])
    assert (last["answer"], last["source"]) == ("3", "mine")
    with pytest.raises(RunFolderError):
        append_jsonl(tmp_path / "no" / "answers.jsonl", solve("Pick 1.", generator))


def test_settings_of_one_question(lora_run, generator):
    """S12: another temperature or seed for one call, several answers, a model by its folder."""
    question = "Pick 7."
    greedy = solve(question, generator)
    assert solve(question, lora_run) == greedy
    drawn = solve(question, generator, temperature=5.0, samples=6)
    assert len(drawn) == 6
    assert len({one.response for one in drawn}) > 1
    assert solve(question, generator, temperature=5.0, samples=6) == drawn
    assert solve(question, generator, temperature=5.0, samples=6, seed=1) != drawn
    assert solve(question, generator, max_new_tokens=1).tokens == 1
    assert solve(question, generator) == greedy


@pytest.mark.slow
def test_a_question_has_the_room_that_the_call_leaves(generator):
    """The message said to lower max_new_tokens, and doing so changed nothing."""
    context = generator.prepared.context
    free = context - len(generator.prompt("1").token_ids)
    question = "1" * (free - 1)  # a digit is a token; one is left for the answer, and one over
    with pytest.raises(DataError, match="leaves room for"):
        solve(question, generator)
    with pytest.raises(DataError, match="leaves room for 0"):
        solve("Pick 1.", generator, max_new_tokens=2 * context)
    assert generator.answers([question], max_new_tokens=1) != [[]]
    assert generator.answers(["Pick 1."], max_new_tokens=2 * context) == [[]]


def test_a_stream_is_the_answer_in_pieces(generator):
    pieces = list(stream("Pick 12.", generator))
    assert "".join(pieces) == solve("Pick 12.", generator).response
    assert len([piece for piece in pieces if piece]) > 1
    with pytest.raises(DataError, match="empty"):
        list(stream(" ", generator))


def test_a_stream_waits_for_the_last_byte_of_a_character(generator, monkeypatch):
    response = "Größe: 5 €"
    ids = generator.prepared.tokenizer.encode(response, add_special_tokens=False)
    solution = solve("Pick 12.", generator)

    def drawn(*_, on_tokens, **__):
        for end in range(1, len(ids) + 1):
            on_tokens(ids[:end])
        return [[dataclasses.replace(solution, response=response)]]

    monkeypatch.setattr(generator, "answers", drawn)
    pieces = list(stream("Pick 12.", generator))
    assert len(ids) > len(response)  # some characters have several tokens
    assert "".join(pieces) == response
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.slow
def test_the_rest_of_a_stream_that_is_left_is_not_drawn(generator, monkeypatch):
    """`break`, or a client that has gone, waited for the whole answer."""
    finished = []
    monkeypatch.setattr(Generator, "_solution", lambda *_: finished.append(1))
    pieces = stream("Pick 12.", generator, min_new_tokens=9_000, max_new_tokens=9_000)
    next(pieces)
    pieces.close()
    assert finished == []
    monkeypatch.undo()
    assert "".join(stream("Pick 12.", generator)) == solve("Pick 12.", generator).response


def test_threads_are_answered_one_after_another(generator, monkeypatch):
    """Passes of one model that overlap switch its attention off in each other's middle.

    And so do a tokenizer's with what it makes of special tokens.
    """
    inside, most = 0, 0

    @contextmanager
    def counted():
        nonlocal inside, most
        inside += 1
        for _ in range(100):
            time.sleep(0)  # lets another thread go on
            most = max(most, inside)
        yield
        inside -= 1

    def sample(requests, honest=generator.sampler.sample):
        with counted():
            yield from honest(requests)

    questions = [f"Pick {number}." for number in range(8)]
    expected = [solve(question, generator) for question in questions]
    monkeypatch.setattr(generator.sampler, "sample", sample)
    monkeypatch.setattr(api, "render", counted()(api.render))
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda one: solve(one, generator), questions)) == expected
    assert most == 1


def test_questions_of_any_kind_stand_beside_their_own_answers(generator):
    """A Series that was shuffled had each answer beside another question."""
    texts = ["Pick 1.", "Pick 2.", "Pick 3."]
    expected = generator.answers(texts, max_new_tokens=2)
    for questions in (pd.Series(texts, index=[2, 0, 1]), np.array(texts), (t for t in texts)):
        assert generator.answers(questions, max_new_tokens=2) == expected
    assert generator.answers([]) == []
    with pytest.raises(DataError, match="empty"):
        generator.answers(["Pick 1.", " "])


def test_a_seed_of_numpy_is_that_number(generator):
    how = {"temperature": 5.0, "max_new_tokens": 8}
    (seed,) = np.arange(3, 4)
    assert solve("Pick 1.", generator, seed=seed, **how) == solve(
        "Pick 1.", generator, seed=3, **how
    )


def test_of_several_processes_one_writes(lora_run, tmp_path, monkeypatch):
    """Each of them added its own copy of every row."""

    class Second(ProcessGroup):
        rank, size = 1, 2

        def on_rank0(self, work):
            return (0, 0)

    monkeypatch.setattr(api, "evaluate", lambda *_, **__: SimpleNamespace(items=(), slim=()))
    monkeypatch.setattr(api, "join_processes", Second)
    recipe = load_recipe(lora_run / "recipe.yaml")
    synthesize(recipe, str(lora_run / "base"), tmp_path / "right.jsonl")
    assert list(tmp_path.iterdir()) == []


def test_right_answers_become_demonstrations(lora_run, tmp_path, monkeypatch):
    recipe = load_recipe(lora_run / "recipe.yaml").override("sampling.max_new_tokens=200")
    texts = [
        "<reasoning>0</reasoning><answer>0</answer>",
        "<reasoning>1</reasoning><answer>1</answer>",
        "<reasoning>" + "1" * 300,
    ]
    scripted = ScriptedSampler(lambda request, index: texts[index % 3])
    monkeypatch.setattr(Samplers, "over", lambda self, policy: scripted)
    file, model = tmp_path / "right.jsonl", str(lora_run / "grpo" / "final")
    written, drawn = synthesize(recipe, model, file, samples=3)
    before = file.read_bytes()
    assert synthesize(recipe, model, file, samples=3) == (0, drawn)
    assert file.read_bytes() == before
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    # Of each problem one answer is right, one wrong, and one is cut off.
    assert drawn == 3 * len(rows) == 3 * written > 0
    assert {"id", "question", "answer", "response", "model", "seed", "sample"} <= rows[0].keys()
    assert all(row["response"] == texts[int(row["answer"])] for row in rows)
    columns = "columns: {response: response}"
    trained = recipe.override(f"data.sft={{source: file, path: {file}, {columns}}}")
    again = load_problems(trained.data.sft, seed=0, fmt=make_format(recipe.prompt))
    assert not again.quarantined
    assert [p.response for p in again.problems] == [row["response"] for row in rows]
    # What was drawn with other settings, and interrupted, is still there to go on with.
    assert [path.name for path in tmp_path.iterdir()] == ["right.jsonl"]
    unfinished = tmp_path / "right.jsonl.drawn" / "evaluations" / ".drawn-2.part"
    unfinished.mkdir(parents=True)
    synthesize(recipe, model, file, samples=3)
    assert unfinished.exists()


def test_prompts_that_are_used_word_for_word_stay_so(lora_run, tmp_path, monkeypatch):
    row = {"prompt": "### Task\nNought?\n", "response": r"\boxed{0}"}
    data, file = tmp_path / "own.jsonl", tmp_path / "right.jsonl"
    data.write_text(json.dumps(row), encoding="utf-8")
    recipe = load_recipe(lora_run / "recipe.yaml").override(
        f"data.train={{source: prompt-response, path: {data}}}", "sampling.max_new_tokens=200"
    )
    scripted = ScriptedSampler(lambda *_: "<reasoning>0</reasoning><answer>0</answer>")
    monkeypatch.setattr(Samplers, "over", lambda self, policy: scripted)
    assert synthesize(recipe, lora_run / "grpo" / "final", file, samples=1) == (1, 1)
    assert source_named(str(file)) == {"source": "prompt-response", "path": str(file)}
    trained = load_problems(SourceConfig(**source_named(str(file))), seed=0)
    (problem,) = trained.problems
    assert problem.prompt == row["prompt"]
    assert (problem.response or "").endswith("<answer>0</answer>")
