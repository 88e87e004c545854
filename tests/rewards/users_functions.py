"""Reward functions as users of published set-ups write them, for the tests to load by path."""

import asyncio
import re

from grouper import reward


def a_correctness(prompts, completions, answer, **kwargs):
    """A: chat messages, the answer alone."""
    replies = [completion[0]["content"] for completion in completions]
    given = [reply.split("<answer>")[-1].split("</answer>")[0].strip() for reply in replies]
    assert prompts[0][-1]["role"] == "user"
    return [2.0 if g == w else 0.0 for g, w in zip(given, answer, strict=True)]


class _Judge:
    """A function that keeps something, as a class."""

    def __call__(self, prompts, completions, answer, **kwargs):
        texts = [completion[0]["content"] for completion in completions]
        return [float(f">{a}<" in text) for a, text in zip(answer, texts, strict=True)]


Judge = _Judge()


def c_correctness(*, prompts, completions, reference_answer, reference_solution, **kwargs):
    """C: keyword-only, both reference columns, strings or messages."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    assert len(prompts) == len(reference_solution) == len(texts)
    return [float(f">{r}<" in t) for t, r in zip(texts, reference_answer, strict=True)]


def d_numbers(prompts, completions, answer, scale=1.0, **kwargs):
    """D: the first number of the solution tag, prints now and then, a parameter."""
    scores = []
    for completion, true in zip(completions, answer, strict=True):
        found = re.search(r"<answer>\D*([\d.]+)", completion[0]["content"])
        near = found is not None and abs(float(found[1]) / float(true.split()[-1]) - 1) < 0.1
        scores.append(scale * (3.5 if near else -1.5))
    return scores


def e_accuracy(completions, solution, **kwargs):
    """E: the worked solution with its box, None where there is none."""
    texts = [completion[0]["content"] for completion in completions]
    boxes = [re.search(r"boxed\{(.*?)\}", text) for text in solution]
    return [
        None if box is None else float(f">{box[1]}<" in text)
        for box, text in zip(boxes, texts, strict=True)
    ]


async def later(completions, **kwargs):
    await asyncio.sleep(0)
    return [float(len(c[0]["content"])) for c in completions]


@reward(-100.0, 0.0)
def brevity(done, *, most=100):
    """One completion at a time."""
    assert done.reference == "4"
    return 0.0 if done.grade.correct else -len(done.text) / most


@reward()
async def asks(done):
    """One at a time and async: they run together."""
    await asyncio.sleep(0)
    return 1.0 if done.columns["prompts"] else 0.0
