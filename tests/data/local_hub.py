"""A Hub on this machine with one small set, as far as the `datasets` library asks for it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

SET, GATED = "school/sums", "school/closed"
FILES = {
    "README.md": b"---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n"
    b"    path: main/train.jsonl\n---\n",
    "main/train.jsonl": "".join(
        json.dumps({"question": f"{i}+{i}?", "answer": str(2 * i)}) + "\n" for i in range(5)
    ).encode(),
}
COMMIT = "a" * 40


def _entry(name: str) -> dict[str, object]:
    content = FILES[name]
    oid = hashlib.sha1(content).hexdigest()
    return {"type": "file", "path": name, "oid": oid, "size": len(content)}


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        """Quietly."""

    def _send(self, body: bytes, code: int = 200, **headers: str) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if GATED in path and "/resolve/" in path:
            self._send(b"{}", 403, X_Error_Code="GatedRepo", X_Error_Message="gated")
        elif re.fullmatch(rf"/api/datasets/({SET}|{GATED})(/revision/[^/]+)?", path):
            name = SET if SET in path else GATED
            files = [{"rfilename": file} for file in FILES]
            info = {"id": name, "sha": COMMIT, "siblings": files, "private": False, "tags": []}
            self._send(json.dumps(info).encode())
        elif match := re.fullmatch(rf"/api/datasets/{SET}/tree/[^/]+(?:/(.*))?", path):
            inside = [_entry(f) for f in FILES if f.startswith(match[1] or "")]
            self._send(json.dumps(inside).encode())
        elif (match := re.fullmatch(rf"/datasets/{SET}/resolve/[^/]+/(.*)", path)) and (
            match[1] in FILES
        ):
            oid = str(_entry(match[1])["oid"])
            self._send(FILES[match[1]], ETag=f'"{oid}"', X_Repo_Commit=COMMIT)
        else:
            known = SET in path
            self._send(b"{}", 404, X_Error_Code="EntryNotFound" if known else "RepoNotFound")

    do_HEAD = do_GET  # noqa: N815 - the name that the server looks for

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        asked = json.loads(body)["paths"] if body.startswith("{") else parse_qs(body)["paths"]
        self._send(json.dumps([_entry(name) for name in asked if name in FILES]).encode())


@contextlib.contextmanager
def local_hub() -> Iterator[str]:
    """The address of a Hub that lives as long as the block."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()
