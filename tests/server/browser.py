"""A headless Chromium, driven over a pipe (``--remote-debugging-pipe``): it opens a page and runs scripts."""

from __future__ import annotations

import base64
import itertools
import json
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Browser:
    """``width`` in CSS pixels; ``flags``: further ones of the program. Raises AssertionError where a script of ours
    fails."""

    def __init__(self, program: str, profile: Path, *, width: int = 1100, flags: Sequence[str] = ()) -> None:
        read_end, self._commands = os.pipe()
        self._answers, write_end = os.pipe()
        self._process = subprocess.Popen(
            [
                "bash",
                "-c",
                f'exec "$0" "$@" 3<&{read_end} 4>&{write_end}',
                program,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--no-first-run",
                "--disable-background-networking",
                "--disable-sync",
                "--disable-component-update",
                f"--window-size={width},800",
                f"--user-data-dir={profile}",
                "--remote-debugging-pipe",
                *flags,
                "about:blank",
            ],
            pass_fds=(read_end, write_end),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_end)
        os.close(write_end)
        self._numbers = itertools.count(1)
        self._rest = b""
        target = next(one for one in self._ask("Target.getTargets")["targetInfos"] if one["type"] == "page")
        attached = self._ask("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        self.resize(width)

    def resize(self, width: int, height: int = 800) -> None:
        self._ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def prefer_colours(self, scheme: str) -> None:
        """Set what the user prefers: light or dark."""
        self._ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def open(self, url: str) -> None:
        self._ask("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self._ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, script: str, limit_s: float = 60.0) -> None:
        end_s = time.monotonic() + limit_s
        while not self.run(script):
            assert time.monotonic() < end_s, f"{script} is not true after {limit_s:g} s"
            time.sleep(0.05)

    def type(self, text: str) -> None:
        self._ask("Input.insertText", text=text)

    def allow(self, *permissions: str) -> None:
        self._ask("Browser.grantPermissions", permissions=list(permissions))

    def screenshot(self, path: Path) -> None:
        """The whole page."""
        answer = self._ask("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    def click(self, selector: str) -> None:
        """With the mouse, so the page may do what needs a user."""
        x, y = self.run(
            f"(() => {{ const one = document.querySelector({selector!r}); one.scrollIntoView(); "
            "const box = one.getBoundingClientRect(); "
            "return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self._ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str, code: int) -> None:
        for kind in ("rawKeyDown", "keyUp"):
            self._ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def press_alt(self, name: str) -> None:
        """Press Alt and the key with this name of a place on the keyboard, such as KeyN."""
        for kind in ("rawKeyDown", "keyUp"):
            self._ask("Input.dispatchKeyEvent", type=kind, key=name.removeprefix("Key").lower(), code=name, modifiers=1)

    def choose_file(self, selector: str, file: Path) -> None:
        field = self._ask("Runtime.evaluate", expression=f"document.querySelector({selector!r})")["result"]
        self._ask("DOM.setFileInputFiles", files=[str(file)], objectId=field["objectId"])

    def save_downloads_in(self, folder: Path) -> None:
        self._ask("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))

    def names_for_readers(self) -> list[tuple[str, str]]:
        """Return role and name of what a screen reader finds, in order."""
        nodes = self._ask("Accessibility.getFullAXTree")["nodes"]
        return [
            (node["role"]["value"], node.get("name", {}).get("value", ""))
            for node in nodes
            if not node["ignored"] and "role" in node
        ]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._commands)
        os.close(self._answers)

    def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        command: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if hasattr(self, "_session"):
            command["sessionId"] = self._session
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, answer["error"]
                return dict(answer["result"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._answers, 1 << 16)
            assert part, "the browser ended"
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(line))
