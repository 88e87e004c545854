"""A Hub on this machine, as far as `huggingface_hub` needs it to make, fill and read models."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

from loopback import Handler, serving

OWNER, TOKEN = "me", "hf_aSecretOfSomeLength"
PART = 1 << 16
"""Larger files are uploaded in parts of this size."""


@dataclass
class Repo:
    private: bool
    branches: dict[str, dict[str, bytes]] = field(
        default_factory=lambda: {"main": {".gitattributes": b""}}
    )
    tags: dict[str, dict[str, bytes]] = field(default_factory=dict)
    commits: list[tuple[str, str]] = field(default_factory=list)
    """(branch, message)."""


@dataclass
class FakeHub:
    """What the server holds, and what it has been asked."""

    url: str = ""
    repos: dict[str, Repo] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    """sha256 -> content, of large files."""
    parts: dict[str, dict[int, bytes]] = field(default_factory=dict)
    uploads: list[str] = field(default_factory=list)
    """Names of everything put."""
    cut_after: int | None = None
    """So many more uploads succeed; then the connection is closed in the middle of one."""

    def files(self, repo: str, revision: str = "main") -> dict[str, bytes]:
        found = self.repos[repo]
        return {**found.branches, **found.tags}[revision]


class _Handler(Handler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def body(self) -> bytes:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            pieces = []
            while size := int(self.rfile.readline(), 16):
                pieces.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(pieces)
        return self.rfile.read(int(self.headers.get("Content-Length", "0")))

    def may(self, repo: str) -> bool:
        """Whether the request may write there; answers it if not."""
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.reply({"error": "no token"}, 401)
        elif not repo.startswith(f"{OWNER}/"):
            self.reply({"error": "no right"}, 403)
        else:
            return True
        return False

    def do_POST(self) -> None:  # noqa: C901 - a table of addresses
        path, body = unquote(urlsplit(self.path).path), self.body()
        if path == "/api/repos/create":
            asked = json.loads(body)
            repo = f"{asked['organization'] or OWNER}/{asked['name']}"
            if self.may(repo):
                exists = repo in self.hub.repos
                # Older clients say `private`, newer ones `visibility`.
                private = asked.get("private") or asked.get("visibility") == "private"
                self.hub.repos.setdefault(repo, Repo(private))
                self.reply({"url": f"{self.hub.url}/{repo}"}, 409 if exists else 200)
        elif path == "/api/validate-yaml":
            self.reply({"errors": [], "warnings": []})
        elif match := re.fullmatch(r"/api/models/(.+)/preupload/(.+)", path):
            modes = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith("safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(body)["files"]
            ]
            self.reply({"files": modes})
        elif match := re.fullmatch(r"/(.+)\.git/info/lfs/objects/batch", path):
            objects = [self.instructions(one) for one in json.loads(body)["objects"]]
            self.reply({"objects": objects})
        elif match := re.fullmatch(r"/complete/(.+)", path):
            pieces = self.hub.parts.pop(match[1])
            self.hub.objects[match[1]] = b"".join(pieces[n] for n in sorted(pieces))
            self.reply()
        elif match := re.fullmatch(r"/api/models/(.+)/commit/(.+)", path):
            if self.may(match[1]):
                self.commit(match[1], match[2], body)
        elif match := re.fullmatch(r"/api/models/(.+)/branch/(.+)", path):
            branches = self.hub.repos[match[1]].branches
            exists = match[2] in branches
            branches.setdefault(match[2], dict(branches["main"]))
            self.reply({}, 409 if exists else 200)
        elif match := re.fullmatch(r"/api/models/(.+)/tag/(.+)", path):
            repo, tag = self.hub.repos[match[1]], json.loads(body)["tag"]
            exists = tag in repo.tags
            repo.tags.setdefault(tag, dict(repo.branches["main"]))
            self.reply({}, 409 if exists else 200)
        else:
            self.reply({"error": path}, 404)

    def do_DELETE(self) -> None:
        match = re.fullmatch(r"/api/models/(.+)/tag/(.+)", unquote(urlsplit(self.path).path))
        assert match is not None
        if self.hub.repos[match[1]].tags.pop(match[2], None) is None:
            self.reply({}, 404, X_Error_Code="RevisionNotFound")
        else:
            self.reply()

    def instructions(self, asked: dict[str, Any]) -> dict[str, Any]:
        """How an object is uploaded: not at all, in one piece, or in parts."""
        oid, size = asked["oid"], asked["size"]
        if oid in self.hub.objects:
            return {"oid": oid, "size": size}
        upload: dict[str, Any] = {"href": f"{self.hub.url}/upload/{oid}"}
        if size > PART:
            urls = {str(n + 1): f"{self.hub.url}/part/{oid}/{n}" for n in range(-(-size // PART))}
            upload = {
                "href": f"{self.hub.url}/complete/{oid}",
                "header": {"chunk_size": str(PART), **urls},
            }
        return {"oid": oid, "size": size, "actions": {"upload": upload}}

    def do_PUT(self) -> None:
        if self.hub.cut_after is not None:
            if self.hub.cut_after == 0:
                self.rfile.read(10)
                self.close_connection = True
                self.connection.close()
                return
            self.hub.cut_after -= 1
        content, parts = self.body(), self.path.split("/")
        self.hub.uploads.append(self.path)
        if parts[1] == "upload":
            assert hashlib.sha256(content).hexdigest() == parts[2]
            self.hub.objects[parts[2]] = content
        else:
            self.hub.parts.setdefault(parts[2], {})[int(parts[3])] = content
        self.reply({}, ETag=f'"{len(content)}"')

    def commit(self, name: str, branch: str, body: bytes) -> None:
        repo, lines = self.hub.repos[name], [json.loads(line) for line in body.splitlines()]
        files = repo.branches[branch]
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        repo.commits.append((branch, lines[0]["value"]["summary"]))
        oid = f"{len(repo.commits):040x}"
        self.reply({"commitUrl": f"{self.hub.url}/{name}/commit/{oid}", "commitOid": oid})

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        named = re.match(r"(?:/api/models)?/([^/]+/[^/]+)", path)
        if named is None or named[1] not in self.hub.repos:
            self.reply({}, 404, X_Error_Code="RepoNotFound")
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)", path):
            rows = [
                {"type": "file", "path": n, "size": len(c), "oid": hashlib.sha1(c).hexdigest()}
                for n, c in self.hub.files(match[1], match[2]).items()
            ]
            self.reply(rows)
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            rows = [{"rfilename": n} for n in self.hub.files(match[1], match[2] or "main")]
            self.reply({"id": match[1], "sha": "a" * 40, "siblings": rows, "tags": []})
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            files = self.hub.files(match[1], match[2] if match[2] != "a" * 40 else "main")
            if match[3] not in files:
                self.reply({}, 404, X_Error_Code="EntryNotFound")
                return
            content = files[match[3]]
            tag = hashlib.sha256(content).hexdigest()
            self.reply(content, ETag=f'"{tag}"', X_Repo_Commit="a" * 40)
        else:
            self.reply({"error": path}, 404)

    def do_HEAD(self) -> None:
        self.do_GET()


@contextlib.contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """A server on loopback for the time of the block."""
    hub = FakeHub()
    with serving(type("_OfHub", (_Handler,), {"hub": hub})) as hub.url:
        yield hub
