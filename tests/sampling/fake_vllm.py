"""An engine with vLLM's manners and faults, in a few lines of torch; `test_vllm.py` runs both.

It has weights of its own, keeps the keys and values of whole blocks of 128 prompt tokens from call
to call, masks stop tokens until `min_tokens`, and looks for stop strings only after that.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from grouper.sampling.vllm import Answer, Ask

BLOCK = 128


class FakeVllm:
    replicas = 1

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = copy.deepcopy(model), tokenizer
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.normal_(std=0.2)
        self._tag: str | None = None
        self._blocks: dict[tuple[int, ...], Any] = {}
        self.resting = True
        self.asked: list[Ask] = []

    def push(self, weights: Iterable[tuple[str, Tensor]], tag: str, temperature: float) -> None:
        self._temperature = temperature
        held = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, value in weights:
                held.pop(name).copy_(value)
        assert not held, f"weights did not arrive: {held.keys()}"
        self.reset_prefix_cache()
        self._tag = tag

    def reset_prefix_cache(self) -> bool:
        self._blocks.clear()
        return True

    def tag(self) -> str | None:
        return self._tag

    def rest(self) -> None:
        self.resting = True

    def close(self) -> None:
        self.model = None

    def answers(self, asks: Sequence[Ask]) -> Iterator[tuple[int, Answer]]:
        self.resting = False
        self.asked += asks
        # What finishes first comes first; here the last one.
        for number in reversed(range(len(asks))):
            yield number, self._answer(asks[number])

    @torch.no_grad()
    def _answer(self, ask: Ask) -> Answer:
        p, ids, logprobs = ask.params, list[int](), list[float]()
        generator = torch.Generator().manual_seed(p["seed"])
        past, fed = self._cached(ask.prompt)
        stopped = False
        while not stopped and len(ids) < p["max_tokens"]:
            rows = torch.tensor([[*ask.prompt, *ids][fed:]])
            output = self.model(rows, past_key_values=past, use_cache=True)
            past, fed = output.past_key_values, fed + rows.shape[1]
            logits = output.logits[0, -1].float() / self._temperature
            raw = logits.log_softmax(-1)
            if len(ids) < p["min_tokens"]:
                logits[p["stop_token_ids"]] = -torch.inf
            if p["temperature"] == 0:
                token = int(logits.argmax())
            else:
                shares = (logits / p["temperature"]).softmax(-1)
                shares = shares.masked_fill(shares < p["min_p"] * shares.max(), 0)
                token = int(torch.multinomial(shares, 1, generator=generator))
            ids.append(token)
            logprobs.append(float(raw[token]))
            text = self.tokenizer.decode(ids[p["min_tokens"] :])
            stopped = token in p["stop_token_ids"] or (
                len(ids) > p["min_tokens"] and any(stop in text for stop in p["stop"])
            )
        return Answer(tuple(ids), tuple(logprobs), stopped)

    def _cached(self, prompt: tuple[int, ...]) -> tuple[Any, int]:
        """Keys and values of the whole blocks of a prompt, and their tokens."""
        length = (len(prompt) - 1) // BLOCK * BLOCK
        if not length:
            return None, 0
        block = prompt[:length]
        if block not in self._blocks:
            output = self.model(torch.tensor([block]), use_cache=True)
            self._blocks[block] = output.past_key_values
        return copy.deepcopy(self._blocks[block]), length
