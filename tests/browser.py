"""A headless Chromium that tests drive over the DevTools protocol; no package is needed for it."""

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe")
QUIET = ("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync")


def executable() -> str | None:
    """The path of the browser, or None if there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """A browser with one page; `console` collects errors and warnings, `requests` the requested addresses."""

    def __init__(self, profile: Path):
        self.console: list[str] = []
        self.requests: list[str] = []
        self._count, self._waiting = 0, b""
        self._process, self._read, self._write = _start(profile)
        target = self._send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(RuntimeError):  # the browser may end before it answers
            self._send("Browser.close")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)
        os.close(self._write)

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The answer to a command of the DevTools protocol."""
        return self._send(method, self._session, **parameters)

    def open(self, address: str, width: int = 1280, height: int = 900, *, dark: bool = False) -> None:
        """Load an address in a window of this size, in CSS pixels, and wait until the page is complete."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Emulation.setScrollbarsHidden", hidden=True)
        self.send("Page.navigate", url=address)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def wait(self, condition: str, seconds: float = 20) -> None:
        """Wait until a JavaScript expression is true; raise TimeoutError after `seconds`."""
        deadline = time.monotonic() + seconds
        while not self.value(condition):
            if time.monotonic() > deadline:
                raise TimeoutError(condition)
            time.sleep(0.02)

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression, passed on as JSON."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"])
        return answer["result"].get("value")

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """Write a screenshot of the window, or of the whole page, as PNG."""
        size = self.send("Page.getLayoutMetrics")["cssContentSize"] if whole else None
        clip = {"clip": {**size, "scale": 1}} if size else {}
        data = self.send("Page.captureScreenshot", captureBeyondViewport=whole, **clip)["data"]
        path.write_bytes(base64.b64decode(data))

    def _send(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        self._count += 1
        number = self._count
        message = {"id": number, "method": method, "params": parameters} | ({"sessionId": session} if session else {})
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != number:
            self._heard(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._waiting:
            if not select.select([self._read], [], [], 30)[0]:
                raise TimeoutError("the browser does not answer")
            chunk = os.read(self._read, 1 << 16)
            if not chunk:
                raise RuntimeError("the browser has ended")
            self._waiting += chunk
        text, _, self._waiting = self._waiting.partition(b"\0")
        return json.loads(text)

    def _heard(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.console.append(json.dumps(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.console.append(json.dumps(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.console.append(json.dumps(params["entry"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])


# A Python process moves the pipes to the descriptors where the browser expects them, then becomes the browser.
MOVE = "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"


def _start(profile: Path) -> tuple[subprocess.Popen, int, int]:
    """The browser's process, and our ends of the two pipes to its descriptors 3 and 4: to read from, to write to."""
    pipes = os.pipe(), os.pipe()
    browser_ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 5) for end in (pipes[0][0], pipes[1][1])]  # above 3 and 4
    command = [executable() or NAMES[0], *FLAGS, *QUIET, f"--user-data-dir={profile}"]
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", MOVE, *map(str, browser_ends), *command],
        pass_fds=browser_ends, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    for end in (*browser_ends, pipes[0][0], pipes[1][1]):
        os.close(end)
    return process, pipes[1][0], pipes[0][1]
