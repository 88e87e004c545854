"""A page in headless Chromium, driven through pipes: what it does, asks for and complains about.

Also what benchmarks/tools/screenshots.py takes the pictures of README and docs/ with.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome")
SWITCHES = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--force-color-profile=srgb",
    "--remote-debugging-pipe",
)
WIDTHS = {
    "desktop": (1280, 900, 1.0),
    "phone": (390, 844, 2.0),
    "print": (794, 1123, 1.5),  # A4 at 96 dots per inch
}
SECONDS = 60.0


def program() -> str | None:
    """The path of a Chromium on this machine."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One page; use it with `with`. `asked` has every request, `said` what the console got."""

    def __init__(self) -> None:
        path = program()
        assert path is not None, "there is no Chromium"
        ours, theirs = os.pipe(), os.pipe()  # what it reads, what it writes
        # It speaks on descriptors 3 and 4; these are moved there by the shell.
        read, write = (fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in (ours[0], theirs[1]))
        self._home = tempfile.TemporaryDirectory(prefix="grouper-chromium-")
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$0" "$@" 3<&{read} 4>&{write}', path, *SWITCHES,
             f"--user-data-dir={self._home.name}", "about:blank"],
            pass_fds=(read, write),
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        for fd in (ours[0], theirs[1], read, write):
            os.close(fd)
        self._write, self._read = ours[1], theirs[0]
        os.set_blocking(self._read, False)
        self._rest, self._number, self._session = b"", 0, None
        self.asked: list[str] = []
        self.said: list[str] = []
        self.loaded = 0
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and wait for its answer; events on the way are kept."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer)
                return dict(answer["result"])

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + SECONDS
        while b"\0" not in self._rest:
            assert time.monotonic() < deadline, "Chromium does not answer"
            assert self._process.poll() is None, "Chromium has ended"
            try:
                self._rest += os.read(self._read, 1 << 20)
            except BlockingIOError:
                time.sleep(0.01)
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        params = message.get("params", {})
        if message.get("method") == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])
        elif message.get("method") == "Page.loadEventFired":
            self.loaded += 1
        elif message.get("method") in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown"):
            self.said.append(json.dumps(params))
        elif message.get("method") == "Log.entryAdded":
            self.said.append(params["entry"]["text"])
        return message

    def open(self, file: Path, *, dark: bool = False, size: str = "desktop") -> None:
        """Load a file from disk as it looks in a theme and on a screen."""
        width, height, scale = WIDTHS[size]
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=scale, mobile=size == "phone",
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        media = "print" if size == "print" else ""
        self.call("Emulation.setEmulatedMedia", media=media, features=[scheme])
        before = self.loaded
        self.call("Page.navigate", url=file.resolve().as_uri())
        while self.loaded == before:
            self._next()

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        done = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def press(self, key: str, code: int = 0) -> None:
        """One key, as a person presses it."""
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        common = {"key": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", **common, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def point(self, x: float, y: float) -> None:
        """Move the pointer to a place of the screen."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def picture(self, target: Path, *, whole: bool = False) -> Path:
        """A PNG of what is to be seen, or of the whole page."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        target.write_bytes(base64.b64decode(shot["data"]))
        return target

    def close(self) -> None:
        """End the browser."""
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)
        shutil.rmtree(self._home.name, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
