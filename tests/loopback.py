"""A small HTTP server on this machine, for tests of what talks to the Hub."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Handler(BaseHTTPRequestHandler):
    """Answers in JSON, or in bytes as they are, and says nothing on the console."""

    def log_message(self, *args: object) -> None:
        """Quietly."""

    def reply(self, content: Any = None, code: int = 200, **headers: str) -> None:
        body = content
        if not isinstance(content, bytes):
            body = json.dumps({} if content is None else content).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextlib.contextmanager
def serving(handler: type[Handler]) -> Iterator[str]:
    """The address of a server that lives as long as the block."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
