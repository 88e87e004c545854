"""A Hub on this machine with one small set, as far as the `datasets` library asks for it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from urllib.parse import parse_qs, urlsplit

from loopback import Handler, serving

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


class _Handler(Handler):
    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if GATED in path and "/resolve/" in path:
            self.reply(b"{}", 403, X_Error_Code="GatedRepo", X_Error_Message="gated")
        elif re.fullmatch(rf"/api/datasets/({SET}|{GATED})(/revision/[^/]+)?", path):
            name = SET if SET in path else GATED
            files = [{"rfilename": file} for file in FILES]
            info = {"id": name, "sha": COMMIT, "siblings": files, "private": False, "tags": []}
            self.reply(info)
        elif match := re.fullmatch(rf"/api/datasets/{SET}/tree/[^/]+(?:/(.*))?", path):
            inside = [_entry(f) for f in FILES if f.startswith(match[1] or "")]
            self.reply(inside)
        elif (match := re.fullmatch(rf"/datasets/{SET}/resolve/[^/]+/(.*)", path)) and (
            match[1] in FILES
        ):
            oid = str(_entry(match[1])["oid"])
            self.reply(FILES[match[1]], ETag=f'"{oid}"', X_Repo_Commit=COMMIT)
        else:
            known = SET in path
            self.reply(b"{}", 404, X_Error_Code="EntryNotFound" if known else "RepoNotFound")

    do_HEAD = do_GET  # noqa: N815 - the name that the server looks for

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        asked = json.loads(body)["paths"] if body.startswith("{") else parse_qs(body)["paths"]
        self.reply([_entry(name) for name in asked if name in FILES])


def local_hub() -> contextlib.AbstractContextManager[str]:
    """The address of a Hub that lives as long as the block."""
    return serving(_Handler)
