"""Log-probs and entropies from hidden states: values, gradients, and what is never held."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from grouper.kernels.switch import planned
from grouper.models import token_scores
from grouper.models.token_scores import LinearHead, LogitScaling, plain_token_scores

TOKENS, HIDDEN, VOCABULARY = 23, 8, 31

SCALINGS = {
    "plain": LogitScaling(),
    "granite": LogitScaling(factor=1 / 3),
    "cohere": LogitScaling(factor=0.3),
    "gemma": LogitScaling(cap=2.5),
    "all": LogitScaling(factor=1.7 / 3, cap=1.5),
}


def parts(bias: bool = True, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    random = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64).to(dtype).requires_grad_()

    return {
        "hidden": draw(TOKENS, HIDDEN),
        "weight": draw(VOCABULARY, HIDDEN),
        "bias": draw(VOCABULARY) if bias else None,
        "targets": torch.randint(VOCABULARY, (TOKENS,), generator=random),
    }


def naive(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    scaling: LogitScaling = SCALINGS["plain"],
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """All logits at once, through torch's own log-softmax; no line is shared with the module."""
    logits = hidden @ weight.T + (0 if bias is None else bias)
    logits = logits * scaling.factor
    if scaling.cap:
        logits = scaling.cap * (logits / scaling.cap).tanh()
    logprobs = (logits / temperature).log_softmax(-1)
    entropies = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs[torch.arange(len(targets)), targets], entropies


def fused(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    scaling: LogitScaling = SCALINGS["plain"],
    temperature: float = 1.0,
    dtype: torch.dtype = torch.float64,
    entropy_gradient: bool = True,
) -> tuple[Tensor, Tensor]:
    head = LinearHead(
        scaling=scaling, temperature=temperature, dtype=dtype, entropy_gradient=entropy_gradient
    )
    return head.scores(hidden, weight, bias, targets)


def plain(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    scaling: LogitScaling = SCALINGS["plain"],
    temperature: float = 1.0,
    entropy_gradient: bool = True,
) -> tuple[Tensor, Tensor]:
    return plain_token_scores(
        lambda part: scaling(torch.nn.functional.linear(part, weight, bias)),
        hidden,
        targets,
        vocabulary=VOCABULARY,
        temperature=temperature,
        entropy_gradient=entropy_gradient,
    )


def loss_of(scores: tuple[Tensor, Tensor]) -> Tensor:
    """Every token with a weight of its own on either output."""
    weights = torch.linspace(-1, 2, TOKENS, dtype=scores[0].dtype)
    return (scores[0] * weights).sum() + (scores[1] * weights.flip(0)).sum()


def gradients(scores: tuple[Tensor, Tensor], given: dict[str, Any]) -> list[Tensor]:
    inputs = [given[name] for name in ("hidden", "weight", "bias") if given[name] is not None]
    return list(torch.autograd.grad(loss_of(scores), inputs))


@pytest.fixture(params=[1, 7, TOKENS], autouse=True)
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """One token a chunk, several uneven chunks, or all in one."""
    monkeypatch.setattr(token_scores, "CHUNK_ELEMENTS", request.param * VOCABULARY)
    monkeypatch.setattr(token_scores, "CPU_ROWS", 1)
    return int(request.param)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("ours", [fused, plain])
def test_values_and_gradients_are_those_of_the_naive_formula(
    ours: Callable[..., Any], name: str, temperature: float, bias: bool
) -> None:
    settings = {"scaling": SCALINGS[name], "temperature": temperature}
    given = parts(bias)
    expected, found = naive(**given, **settings), ours(**given, **settings)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(gradients(found, given), gradients(expected, given), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("ours", [fused, plain])
def test_without_an_entropy_gradient_only_log_probs_pull(ours: Callable[..., Any]) -> None:
    given = parts()
    logprobs, entropies = ours(**given, entropy_gradient=False)
    assert not entropies.requires_grad
    torch.testing.assert_close(entropies, naive(**given)[1], rtol=1e-12, atol=1e-12)
    (found,) = torch.autograd.grad(logprobs.sum(), given["hidden"])
    (expected,) = torch.autograd.grad(naive(**given)[0].sum(), given["hidden"])
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_finite_differences(chunk: int) -> None:
    given = parts()
    few = {**given, "targets": given["targets"][:4]}
    inputs = (given["hidden"][:4].detach().requires_grad_(), given["weight"], given["bias"])
    assert torch.autograd.gradcheck(
        lambda h, w, b: fused(h, w, b, few["targets"], scaling=SCALINGS["all"], temperature=0.8),
        inputs,
    )


def test_a_frozen_head_gets_no_gradient() -> None:
    given = parts()
    given["weight"].requires_grad_(False)
    given["bias"].requires_grad_(False)
    loss_of(fused(**given)).backward()
    assert given["hidden"].grad is not None
    assert given["weight"].grad is None


def as_float64(given: dict[str, Any], rounding: torch.dtype) -> dict[str, Any]:
    """The same inputs, rounded once and then exact."""
    return {
        name: value.detach().to(rounding).double().requires_grad_()
        if value is not None and value.is_floating_point()
        else value
        for name, value in given.items()
    }


def test_bfloat16_products_give_float32_log_probs() -> None:
    """As under autocast: float32 weights and hidden states, of which only the products round."""
    given = parts(dtype=torch.float32)
    scores = fused(**given, dtype=torch.bfloat16)
    assert scores[0].dtype == scores[1].dtype == torch.float32
    exact = as_float64(given, torch.bfloat16)
    torch.testing.assert_close(scores[0].double(), naive(**exact)[0], rtol=0, atol=0.05)
    found = gradients(scores, given)
    assert all(g.dtype == torch.float32 for g in found)
    for mine, theirs in zip(found, gradients(naive(**exact), exact), strict=True):
        assert float((mine - theirs).norm() / theirs.norm()) < 0.02


def test_bfloat16_weights_sum_their_gradient_in_float32() -> None:
    """One token a chunk adds 23 times; in bfloat16 that would lose more than rounding once."""
    given = parts(bias=False, dtype=torch.bfloat16)
    found = torch.autograd.grad(loss_of(fused(**given, dtype=torch.bfloat16)), given["weight"])[0]
    assert found.dtype == torch.bfloat16
    exact = as_float64(given, torch.bfloat16)
    expected = torch.autograd.grad(loss_of(naive(**exact)), exact["weight"])[0]
    assert float((found - expected).norm() / expected.norm()) < 0.02


class Largest(TorchDispatchMode):
    """The largest tensor that any operation gave back."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [t.numel() for t in tree_leaves(out) if isinstance(t, Tensor)]
        self.elements = max([self.elements, *sizes])
        return out


@pytest.mark.parametrize("ours", [fused, plain])
def test_nothing_of_tokens_times_vocabulary_is_ever_made(
    ours: Callable[..., Any], chunk: int
) -> None:
    given = parts()
    with Largest() as largest:
        loss_of(ours(**given)).backward()
    # The naive formula shows that the measure sees what it should.
    with Largest() as everything:
        loss_of(naive(**parts())).backward()
    assert everything.elements >= TOKENS * VOCABULARY
    if chunk < TOKENS:
        assert largest.elements <= max(chunk * VOCABULARY, VOCABULARY * HIDDEN)
        assert largest.elements < TOKENS * VOCABULARY / 2


@pytest.mark.parametrize("ours", [fused, plain])
def test_nothing_of_tokens_times_vocabulary_is_kept_for_the_backward(
    ours: Callable[..., Any],
) -> None:
    """Whatever the chunk: below one chunk, too."""
    given = parts()
    kept = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        scores = ours(**given)
    loss_of(scores).backward()
    assert max(kept) <= VOCABULARY * HIDDEN < TOKENS * VOCABULARY / 2


def test_chunks_on_cuda_grow_with_the_memory_that_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """G4: 220 tokens at a time read the head's matrix 300 times in an update."""
    monkeypatch.undo()
    vocabulary = 151_936
    rows = token_scores.chunk_rows
    assert rows(vocabulary, "mps") == 220
    assert rows(vocabulary, "cuda") == rows(vocabulary, "cuda", 80 * 10**9) == 1766
    # A quarter of 4 GB, 12 bytes for each logit: 548 tokens.
    assert rows(vocabulary, "cuda", 4 * 10**9) == 512
    assert rows(vocabulary, "cuda", 10**6) == 220
    assert rows(2**40) == rows(2**40, "cuda", 0) == 1


@pytest.mark.parametrize(
    ("vocabulary", "gigabytes", "rows"),
    [
        (512, 24, 65_536),
        (49_152, 24, 682),
        (151_936, 24, 512),
        (262_144, 24, 512),
        (262_144, 16, 256),
        (262_144, 8, 128),
        (262_144, 1, 128),
    ],
)
def test_chunks_on_a_cpu_have_tokens_enough_for_a_large_head(
    monkeypatch: pytest.MonkeyPatch, vocabulary: int, gigabytes: int, rows: int
) -> None:
    """Gemma's head was read and its gradient written for 128 tokens at a time."""
    monkeypatch.undo()
    monkeypatch.setattr(token_scores, "machine_memory", lambda: gigabytes * 10**9)
    assert token_scores.chunk_rows(vocabulary) == rows


def test_a_device_that_cannot_widen_products_rounds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU is one: asked as if it were a CUDA device, it says no, and once."""
    monkeypatch.setattr(token_scores, "device_type", lambda _: "cuda")
    token_scores._widens.cache_clear()
    hidden, weight = torch.randn(3, 8).bfloat16(), torch.randn(5, 8).bfloat16()
    with torch.no_grad():
        for _ in range(2):
            found = token_scores.head_product(hidden, weight, None)
            assert torch.equal(found, hidden @ weight.T)
    assert token_scores._widens.cache_info().misses == 1
    token_scores._widens.cache_clear()


def test_a_plan_widens_products_on_cuda_alone() -> None:
    hidden, weight = (torch.empty(n, 8, dtype=torch.bfloat16, device="meta") for n in (3, 5))
    with torch.no_grad():
        assert token_scores.head_product(hidden, weight, None).dtype == torch.bfloat16
        with planned("cuda"):
            assert token_scores.head_product(hidden, weight, None).dtype == torch.float32
            assert token_scores.head_product(hidden.float(), weight.float(), None).dtype == (
                torch.float32
            )
            assert token_scores.head_product(hidden, weight, weight[:, 0]).dtype == torch.bfloat16
