"""An engine with vLLM's manners and faults, in a few lines of torch; `test_vllm.py` runs both.

It has weights of its own, keeps the keys and values of whole blocks of 128 prompt tokens from call
to call, masks stop tokens until `min_tokens`, and looks for stop strings only after that.

`python fake_vllm.py FOLDER NAME PORT` serves one, with vLLM's routes.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors.torch import load_file
from torch import Tensor

from grouper.sampling.vllm.sampler import Answer, Ask, Save
from grouper.sampling.vllm.worker import SECRET

BLOCK = 128
PASSWORD = "a secret of the tests"


class FakeVllm:
    replicas = 1

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = copy.deepcopy(model), tokenizer
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.normal_(std=0.2)
        self._tag: str | None = None
        self._blocks: dict[tuple[int, ...], Any] = {}
        self.resting, self.pushes = False, 0
        self.asked: list[Ask] = []

    @torch.no_grad()
    def push(
        self,
        weights: Iterable[tuple[str, Tensor]] | None,
        tag: str,
        temperature: float,
        adapter: Save | None = None,
    ) -> None:
        held = dict(self.model.named_parameters())
        if weights is not None:
            self._temperature, self._plain = temperature, {}
            for name, value in weights:
                self._plain[name] = value.clone()
                held[name].copy_(value)
            assert self._plain.keys() == held.keys(), "weights did not arrive"
        if adapter is not None:
            with tempfile.TemporaryDirectory() as folder:
                adapter(folder)
                settings = LoraConfig.from_pretrained(folder)
                found = load_file(Path(folder) / "adapter_model.safetensors")
            scale = settings.lora_alpha / settings.r
            for name in found:
                if ".lora_A" in name:
                    plain = name.removeprefix("base_model.model.").replace(".lora_A", "")
                    delta = found[name.replace(".lora_A", ".lora_B")] @ found[name]
                    held[plain].copy_(self._plain[plain] + scale * delta)
        self.reset_prefix_cache()
        self._tag, self.resting = tag, False
        self.pushes += 1

    def reset_prefix_cache(self) -> bool:
        self._blocks.clear()
        return True

    def tag(self) -> str | None:
        return self._tag

    def rest(self) -> None:
        """As one that sleeps on a GPU: the weights are lost."""
        self._tag, self.resting = None, True

    def close(self) -> None:
        self.model = None

    def answers(self, asks: Sequence[Ask]) -> Iterator[tuple[int, Answer]]:
        assert not self.resting, "it sleeps"
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


class FakeServer:
    """vLLM's routes over a `FakeVllm`."""

    def __init__(
        self, engine: FakeVllm, name: str, *, port: int = 0, secret: str = PASSWORD
    ) -> None:
        self.engine, self.name = engine, name
        self.calls: Counter[str] = Counter()
        self.files: list[Path] = []
        self.adapters: list[str] = []
        self.broken = 0
        """How many more requests are answered with 503."""
        outer, lock = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None: ...

            def do_GET(self) -> None:
                self._handle({})

            def do_POST(self) -> None:
                size = int(self.headers["Content-Length"])
                self._handle(json.loads(self.rfile.read(size)))

            def _handle(self, body: dict[str, Any]) -> None:
                with lock:
                    outer.calls[self.path] += 1
                    if self.headers["Authorization"] != f"Bearer {secret}":
                        self._send(401, {})
                    elif outer.broken:
                        outer.broken -= 1
                        self._send(503, {})
                    else:
                        try:
                            self._send(200, outer.answer(self.path, body))
                        except LookupError:
                            self._send(404, {})

            def _send(self, status: int, body: dict[str, Any]) -> None:
                data = json.dumps(body).encode() if body else b"Success: it is done"
                self.send_response(status)
                self.send_header("Content-Type", "application/json" if body else "text/plain")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/v1/models":
            return {"data": [{"id": self.name}]}
        if path == "/weight_info":
            return {"weight_version": self.engine.tag()}
        if path == "/update_weights":
            update = body["update_info"]
            self.files.append(Path(update["path"]))
            weights = load_file(update["path"]).items()
            self.engine.push(weights, "loaded", update["temperature"])
        if path == "/v1/unload_lora_adapter":
            assert body["lora_name"] == self.adapters.pop()
        if path == "/v1/load_lora_adapter":
            if body["lora_name"] in self.adapters:
                raise LookupError("loaded already")
            copy_to = partial(shutil.copytree, body["lora_path"], dirs_exist_ok=True)
            self.engine.push(None, "loaded", 0.0, copy_to)
            self.adapters.append(body["lora_name"])
        if path == "/update_weight_version":
            self.engine._tag = body["new_version"]
        if path == "/v1/completions":
            if body["model"] not in (self.name, *self.adapters):
                raise LookupError(body["model"])
            ((_, found),) = self.engine.answers([Ask(tuple(body["prompt"]), body)])
            choice = {
                "token_ids": found.token_ids,
                "logprobs": {"token_logprobs": found.logprobs},
                "finish_reason": "stop" if found.stopped else "length",
            }
            return {"choices": [choice]}
        return {}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


if __name__ == "__main__":
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    # As a server that torchrun's variables reach would wait for the trainer's processes.
    assert not [name for name in os.environ if name.startswith("TORCHELASTIC_")]
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} & os.environ.keys()
    torch.set_num_threads(1)
    _folder, _name, _port = sys.argv[1:]
    _model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(_folder))
    FakeServer(
        FakeVllm(_model, AutoTokenizer.from_pretrained(_folder)),
        _name,
        port=int(_port),
        secret=os.environ[SECRET],
    )
    threading.Event().wait()
