"""Chromium without a window, driven over the DevTools protocol through a pair of pipes."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
OPTIONS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",  # root in a container has none
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    # A mouse, which a machine without a screen lacks.
    "--blink-settings=primaryHoverType=2,availableHoverTypes=2,"
    "primaryPointerType=4,availablePointerTypes=4",
)
KEYS = {"Enter": 13, "Escape": 27, "ArrowUp": 38, "Tab": 9, "k": 75}
SHIFT, CTRL = 8, 2


def executable() -> str | None:
    """Path of a Chromium, None where there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """A browser process. Tabs of one context share storage; another context has its own."""

    def __init__(self, profile: Path) -> None:
        path = executable()
        assert path is not None
        to_child, self._write = os.pipe()
        self._read, from_child = os.pipe()
        ends = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (to_child, from_child)]

        def connect() -> None:  # the protocol's places: 3 is read, 4 is written
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        self._process = subprocess.Popen(
            [path, *OPTIONS, f"--user-data-dir={profile}"],
            preexec_fn=connect,
            pass_fds=(3, 4),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for fd in (to_child, from_child, *ends):
            os.close(fd)
        self._rest = b""
        self._number = 0
        self._answers: dict[int, dict[str, Any]] = {}
        self._tabs: dict[str, Tab] = {}

    def close(self) -> None:
        """Ends the process."""
        try:
            self.call("Browser.close")
            self._process.wait(10)
        except (OSError, TimeoutError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        os.close(self._read)

    def call(self, method: str, session: str | None = None, /, **params: Any) -> dict[str, Any]:
        """Calls a method of the protocol; AssertionError if it answers with an error."""
        self._number += 1
        number = self._number
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        self.pump(lambda: number in self._answers, f"an answer to {method}")
        answer = self._answers.pop(number)
        assert "error" not in answer, f"{method}: {answer['error']}"
        result: dict[str, Any] = answer["result"]
        return result

    def pump(self, done: Callable[[], bool], what: str, seconds: float = 20) -> None:
        """Takes messages until `done()`."""
        deadline = time.monotonic() + seconds
        while not done():
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._read], [], [], left)[0]:
                raise TimeoutError(f"no {what} in {seconds} s")
            data = os.read(self._read, 1 << 20)
            if not data:
                raise OSError("Chromium ended")
            *whole, self._rest = (self._rest + data).split(b"\0")
            for message in map(json.loads, whole):
                self._take(message)

    def _take(self, message: dict[str, Any]) -> None:
        if "id" in message:
            self._answers[message["id"]] = message
        elif message.get("sessionId") in self._tabs:
            self._tabs[message["sessionId"]].note(message["method"], message["params"])

    def context(self) -> str:
        """A new place for storage, as a new user would have."""
        return str(self.call("Target.createBrowserContext")["browserContextId"])

    def open(self, url: str, context: str, width: int = 1200, height: int = 800) -> Tab:
        """A new tab, in the front."""
        made = self.call("Target.createTarget", url="about:blank", browserContextId=context)
        target = made["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = self._tabs[session] = Tab(self, session, target)
        for domain in ("Page", "Runtime", "Network", "Log"):
            tab.call(f"{domain}.enable")
        tab.resize(width, height)
        tab.go(url)
        return tab


class Tab:
    """A page. requests: URLs it asked for; complaints: errors of scripts and of the console."""

    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self._browser, self._session, self.target = browser, session, target
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self._loads = 0

    def note(self, method: str, params: dict[str, Any]) -> None:
        """Takes an event of the protocol."""
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            told = details.get("exception", {}).get("description")
            self.complaints.append(told or details["text"])
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(params["entry"]["text"])
        elif method == "Page.loadEventFired":
            self._loads += 1

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A method of the protocol, for this page."""
        return self._browser.call(method, self._session, **params)

    def go(self, url: str) -> None:
        """Opens an address, and waits until it is loaded."""
        loads = self._loads
        self.call("Page.navigate", url=url)
        self._browser.pump(lambda: self._loads > loads, "load")

    def reload(self) -> None:
        """Loads the page again."""
        loads = self._loads
        self.call("Page.reload")
        self._browser.pump(lambda: self._loads > loads, "load")

    def close(self) -> None:
        """Closes the tab, as a user does."""
        self._browser.call("Target.closeTarget", targetId=self.target)

    def resize(self, width: int, height: int, scale: float = 1, mobile: bool = False) -> None:
        """Pixels of the window."""
        sizes = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": mobile}
        self.call("Emulation.setDeviceMetricsOverride", **sizes)

    def evaluate(self, code: str) -> Any:
        """The value of a JavaScript expression, awaited."""
        options = {"expression": code, "awaitPromise": True, "returnByValue": True}
        answer = self.call("Runtime.evaluate", **options)
        if "exceptionDetails" in answer:
            raise AssertionError(
                f"{code}: {answer['exceptionDetails']['exception']['description']}"
            )
        return answer["result"].get("value")

    def wait(self, code: str, seconds: float = 15) -> None:
        """Waits until an expression is true."""
        deadline = time.monotonic() + seconds
        while not self.evaluate(f"Boolean({code})"):
            if time.monotonic() > deadline:
                text = self.evaluate("document.body.innerText")
                raise AssertionError(f"not in {seconds} s: {code}\n{text}\n{self.complaints}")
            time.sleep(0.02)

    def text(self, selector: str) -> str:
        """The visible text of the first element that matches."""
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))

    def count(self, selector: str) -> int:
        """How many elements match."""
        return int(self.evaluate(f"document.querySelectorAll({json.dumps(selector)}).length"))

    def click(self, selector: str) -> None:
        """Clicks the first element that matches, once it is there and enabled."""
        found = f"document.querySelector({json.dumps(selector)})"
        self.wait(f"{found} && !{found}.disabled")
        self.evaluate(f"{found}.click()")

    def type(self, text: str) -> None:
        """Text for the element that has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, modifiers: int = 0) -> None:
        """A key of KEYS."""
        made = {"key": key, "code": key, "modifiers": modifiers, "windowsVirtualKeyCode": KEYS[key]}
        if key == "Enter":
            made["text"] = "\r"
        self.call("Input.dispatchKeyEvent", type="keyDown", **made)
        self.call("Input.dispatchKeyEvent", type="keyUp", **made)

    def prefer(self, scheme: str) -> None:
        """The system's colours: light or dark."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def screenshot(self, path: Path) -> None:
        """A PNG of the window."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


# The page

DONE = "document.querySelector('.message:last-child[aria-busy=false]')"


def send(tab: Tab, text: str) -> None:
    """Asks as a user does; the answer has not ended yet."""
    n = tab.count(".message")
    tab.evaluate("document.querySelector('#question').focus()")
    tab.type(text)
    tab.press("Enter")
    tab.wait(f"document.querySelectorAll('.message').length === {n + 2}")
