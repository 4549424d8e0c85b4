"""A headless Chromium, controlled through a pipe: no driver, no port, no package besides the browser."""

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

__all__ = ["Chromium", "found_browser"]

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_SECONDS = 60.0


def found_browser() -> str | None:
    """Return the browser that PENSTOCK_BROWSER names, or one on the path; None where there is none."""
    given = os.environ.get("PENSTOCK_BROWSER")
    if given:
        return given
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


class Chromium:
    """A browser with one page. Messages of the DevTools protocol, ended by a zero byte, go through two pipes."""

    def __init__(self, browser: str, profile: Path) -> None:
        to_read, self._to = os.pipe()
        self._from, to_write = os.pipe()
        options = [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-extensions", "--disable-background-networking", "--disable-sync", "--mute-audio",
            "--hide-scrollbars", "--remote-debugging-pipe", f"--user-data-dir={profile}",
        ]  # fmt: skip
        # The protocol is on the handles 3 and 4; the shell moves the pipes there.
        moved = f'exec "$0" "$@" 3<&{to_read} 4>&{to_write}'
        self.process = subprocess.Popen(
            ["bash", "-c", moved, browser, *options, "about:blank"],
            pass_fds=(to_read, to_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_read)
        os.close(to_write)
        self._numbers, self._rest, self._session = itertools.count(1), b"", ""
        self.events: list[dict[str, Any]] = []
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target for target in targets if target["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result; events that come before are kept."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            got = self._next()
            if got.get("id") != number:
                self.events.append(got)
                continue
            if "error" in got:
                raise RuntimeError(f"{method}: {got['error']}")
            result: dict[str, Any] = got["result"]
            return result

    def open(self, path: Path, *, width: int, height: int, scheme: str) -> None:
        """Load a file in a window of this size, for those who like it light or dark, and wait until it is there."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
                  mobile=width < 600)  # fmt: skip
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.events.clear()
        self.call("Page.navigate", url=path.absolute().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def value(self, expression: str) -> Any:
        """Return what a JavaScript expression is in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def screenshot(self, path: Path) -> bytes:
        """Write a picture of the whole page, and return it."""
        taken = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        png = base64.b64decode(taken["data"])
        path.write_bytes(png)
        return png

    def complaints(self) -> list[str]:
        """Return errors and warnings of the console, exceptions and failed requests since the page was opened."""
        self.call("Runtime.evaluate", expression="1")  # whatever was on its way is here now
        found = []
        for event in self.events:
            method, told = event.get("method"), event.get("params", {})
            bad = (
                method in ("Runtime.exceptionThrown", "Network.loadingFailed")
                or (method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"))
                or (method == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"))
            )
            if bad:
                found.append(f"{method}: {json.dumps(told)[:400]}")
        return found

    def requests(self) -> list[str]:
        """Return what the page asked for since it was opened, without what is in the page itself."""
        asked = [event["params"]["request"]["url"] for event in self.events
                 if event.get("method") == "Network.requestWillBeSent"]  # fmt: skip
        return [url for url in asked if not url.startswith("data:")]

    def close(self) -> None:
        """End the browser, and wait for it."""
        os.close(self._to)  # its end of the pipe tells it to go
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
        os.close(self._from)

    def _next(self) -> dict[str, Any]:
        until = time.monotonic() + _SECONDS
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], max(0.0, until - time.monotonic()))
            piece = os.read(self._from, 1 << 20) if ready else b""
            if not piece:
                ended = self.process.poll()
                raise RuntimeError(f"The browser {'is silent' if ended is None else f'ended with {ended}'}.")
            self._rest += piece
        message, _, self._rest = self._rest.partition(b"\0")
        got: dict[str, Any] = json.loads(message)
        return got
