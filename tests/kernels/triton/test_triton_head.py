"""The head's kernels against float64: scores and gradients, one read of the logits each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from grouper.kernels.switch import planned
from grouper.kernels.triton import head
from grouper.kernels.triton.language import Refused, launches
from grouper.models import token_scores
from grouper.models.token_scores import LinearHead, LogitScaling

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
needs_triton = pytest.mark.needs_package("triton", extra="triton")

SCALINGS = {
    "plain": LogitScaling(),
    "divided": LogitScaling(factor=1.7 / 3),
    "capped": LogitScaling(cap=2.5),
    "all": LogitScaling(factor=1.7 / 3, cap=1.5),
}
# Of float32 sums of a few thousand terms, and of one rounding to bfloat16.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8}
ROWS = 5


def exact(
    products: Tensor, targets: Tensor, scaling: LogitScaling, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, normalizers and entropies in float64, by torch's own operations."""
    logits = products.double() * scaling.factor
    if scaling.cap:
        logits = scaling.cap * (logits / scaling.cap).tanh()
    logits = logits / temperature
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(1, targets[:, None])[:, 0]
    return chosen, logits.logsumexp(-1), -(logprobs.exp() * logprobs).sum(-1)


def close(ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=tolerance)


def given(vocabulary: int, dtype: torch.dtype, scale: float = 4.0) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(vocabulary)
    products = (scale * torch.randn(ROWS, vocabulary, generator=random)).to(DEVICE, dtype)
    targets = torch.randint(vocabulary, (ROWS,), generator=random)
    targets[0], targets[1] = 0, vocabulary - 1
    return products, targets.to(DEVICE)


@needs_triton
@pytest.mark.parametrize("vocabulary", [31, 4096, 4097, 10_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("name", SCALINGS)
def test_scores(name: str, temperature: float, dtype: torch.dtype, vocabulary: int) -> None:
    products, targets = given(vocabulary, dtype)
    scaling = SCALINGS[name]
    found = head.scores(products, targets, scaling.curve(temperature))
    for ours, theirs in zip(found, exact(products, targets, scaling, temperature), strict=True):
        assert ours.dtype == torch.float32
        close(ours, theirs, 1e-5)


@needs_triton
@pytest.mark.parametrize("vocabulary", [31, 4097])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("entropies", [True, False])
@pytest.mark.parametrize(("name", "temperature"), [("plain", 1.0), ("divided", 0.6), ("all", 0.6)])
def test_gradients(
    name: str, temperature: float, entropies: bool, dtype: torch.dtype, vocabulary: int
) -> None:
    products, targets = given(vocabulary, dtype)
    scaling = SCALINGS[name]
    weights = torch.linspace(-1, 2, ROWS, device=DEVICE), torch.linspace(2, -1, ROWS, device=DEVICE)
    leaf = products.double().requires_grad_()
    logprobs, normalizers, of_entropies = exact(leaf, targets, scaling, temperature)
    loss = (logprobs * weights[0]).sum() + (of_entropies * weights[1]).sum() * entropies
    (expected,) = torch.autograd.grad(loss, leaf)
    of_tokens = (
        *(targets, normalizers.detach().float(), of_entropies.detach().float()),
        *weights,
    )
    pointer, curve = products.data_ptr(), scaling.curve(temperature)
    found = head.gradient(products, of_tokens, curve, dtype, entropies=entropies)
    assert found.data_ptr() == pointer, "in the memory of the products"
    assert found.dtype == dtype
    scale = float(expected.abs().max())
    close(found / scale, expected / scale, TOLERANCE[dtype])


@needs_triton
def test_a_gradient_of_another_type_leaves_the_products_alone() -> None:
    products, targets = given(97, torch.float32)
    before = products.clone()
    scores = head.scores(products, targets, LogitScaling().curve(1.0))
    of_tokens = (targets, *scores[1:], torch.ones(ROWS, device=DEVICE), scores[0])
    found = head.gradient(
        products, of_tokens, LogitScaling().curve(1.0), torch.bfloat16, entropies=False
    )
    assert found.dtype == torch.bfloat16
    assert torch.equal(products, before)


@needs_triton
def test_logits_far_apart_and_far_from_zero() -> None:
    products = torch.full((2, 5000), -300.0, device=DEVICE)
    products[0, 4999], products[1] = 90.0, 1000.0
    targets = torch.tensor([4999, 3], device=DEVICE)
    found = head.scores(products, targets, LogitScaling().curve(1.0))
    for ours, theirs in zip(found, exact(products, targets, LogitScaling(), 1.0), strict=True):
        close(ours, theirs, 1e-5)


@needs_triton
@pytest.mark.parametrize("name", ["plain", "all"])
@pytest.mark.parametrize("bias", [True, False])
def test_a_head_runs_on_them(name: str, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden states in, gradients of every input out, several chunks: as in float64."""
    random = torch.Generator().manual_seed(0)
    shapes = {"hidden": (23, 8), "weight": (31, 8), "bias": (31,)}
    inputs = {
        n: torch.randn(*s, generator=random).to(DEVICE).requires_grad_() for n, s in shapes.items()
    }
    if not bias:
        del inputs["bias"]
    targets = torch.randint(31, (23,), generator=random).to(DEVICE)
    monkeypatch.setattr(token_scores, "CHUNK_ELEMENTS", 7 * 31)
    monkeypatch.setattr(token_scores, "CPU_ROWS", 1)
    monkeypatch.setattr(token_scores, "serves", lambda *tensors: tensors[0].dtype != torch.float64)
    used: list[str] = []

    def run(dtype: torch.dtype) -> list[Tensor]:
        settings = LinearHead(
            scaling=SCALINGS[name], temperature=0.7, dtype=dtype, entropy_gradient=True
        )
        values = {n: t.detach().to(dtype).requires_grad_() for n, t in inputs.items()}
        with launches(lambda kernel, _: used.append(kernel)):
            scores = settings.scores(
                values["hidden"], values["weight"], values.get("bias"), targets
            )
            weights = torch.linspace(-1, 2, 23, dtype=dtype, device=DEVICE)
            loss = (scores[0] * weights).sum() + (scores[1] * weights.flip(0)).sum()
            return [*scores, *torch.autograd.grad(loss, list(values.values()))]

    expected = run(torch.float64)
    assert not used
    for ours, theirs in zip(run(torch.float32), expected, strict=True):
        close(ours, theirs, 2e-5)
    assert used == ["_scores"] * 4 + ["_gradient"] * 4


def test_what_the_head_moves_is_counted_without_memory() -> None:
    """One read of a chunk's logits for the scores; one read and one write for their gradient."""
    heard: list[tuple[str, list[Any]]] = []

    def listen(kernel: str, tensors: tuple[Tensor, ...]) -> None:
        heard.append((kernel, [(t.shape, t.dtype) for t in tensors if t.dim() == 2]))

    settings = LinearHead(
        scaling=LogitScaling(), temperature=1.0, dtype=torch.bfloat16, entropy_gradient=False
    )
    hidden, weight = (
        torch.empty(n, 8, dtype=torch.bfloat16, device="meta", requires_grad=True) for n in (6, 97)
    )
    targets = torch.empty(6, dtype=torch.int64, device="meta")
    with planned("cuda"), launches(listen):
        logprobs, _ = settings.scores(hidden, weight, None, targets)
        logprobs.sum().backward()
    logits = (torch.Size([6, 97]), torch.float32)
    gradient = (torch.Size([6, 97]), torch.bfloat16)
    held = (torch.Size([3, 6]), torch.float32)
    assert heard == [("_scores", [logits, held]), ("_gradient", [logits, gradient])]


def test_where_no_kernel_can_be_built_plain_operations_give_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = LinearHead(
        scaling=SCALINGS["all"], temperature=0.7, dtype=torch.float32, entropy_gradient=True
    )
    hidden, weight = torch.randn(5, 8), torch.randn(31, 8)
    targets = torch.arange(5)

    def run() -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in (hidden, weight)]
        scores = settings.scores(*leaves, None, targets)
        return [*scores, *torch.autograd.grad(scores[0].sum() + scores[1].sum(), leaves)]

    expected = run()
    asked: list[str] = []

    def refuse(kernel: Any, *_: Any, **__: Any) -> None:
        asked.append(kernel.__name__)
        raise Refused(kernel.__name__)

    monkeypatch.setattr(head, "launch", refuse)
    monkeypatch.setattr(token_scores, "serves", lambda _: True)
    for mine, right in zip(run(), expected, strict=True):
        assert torch.equal(mine, right)
    assert asked == ["_scores", "_gradient"]
