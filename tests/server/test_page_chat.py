"""The chat of the page in a real browser: by keyboard, streamed, stopped, with settings, on a phone's width.

Where no Chromium is installed, the test reads the page's files instead, and the run says so at its end."""

from __future__ import annotations

import warnings
from importlib import resources
from pathlib import Path

import pytest

from tests.hostile.test_browser import CHROMIUM
from tests.server.browser import Browser
from tests.server.running import RunningServer

FACTORY = "build_slow"
ANSWERS = "[...document.querySelectorAll('#talk .answer')].map((one) => one.textContent)"


@pytest.mark.parametrize("width", [1100, 360])
def test_a_conversation_in_a_browser(server: RunningServer, tmp_path: Path, width: int) -> None:
    if CHROMIUM is None:
        warnings.warn("no Chromium: the chat of the page was not tried in a browser", stacklevel=1)
        files = resources.files("weft.server") / "page_files"
        assert "systemPrompt()" in (files / "ask.js").read_text("utf-8")
        return
    browser = Browser(CHROMIUM, tmp_path, width=width)
    try:
        browser.open(server.url)
        browser.wait_for("document.getElementById('model').textContent !== ''")
        assert browser.run("document.documentElement.scrollWidth <= window.innerWidth")
        browser.run("document.querySelector('#ask-form details').open = true;"
                    "document.getElementById('system').value = 'Be short.';"
                    "document.getElementById('temperature').value = '0';"
                    "document.getElementById('ask').focus()")
        browser.type("say:hello")
        browser.press("Enter", 13)
        browser.wait_for(f"{ANSWERS}[0] === 'hello'")
        browser.wait_for("document.getElementById('stop').hidden")
        assert browser.run("document.activeElement.id") == "ask"  # the next turn needs no mouse
        assert browser.run("document.querySelector('#talk button').textContent") == "Copy"
        browser.type("sing")
        browser.run("document.getElementById('max-tokens').value = '1000'")
        browser.press("Enter", 13)
        browser.wait_for(f"({ANSWERS}[1] ?? '').length > 5")
        assert not browser.run("document.getElementById('stop').hidden")
        browser.run("document.getElementById('stop').click()")
        browser.wait_for("document.getElementById('stop').hidden")
        assert browser.run("document.getElementById('talk').textContent.includes('stopped')")
        assert browser.run("document.documentElement.scrollWidth <= window.innerWidth")
        browser.run("document.getElementById('forget').click()")
        assert browser.run(f"{ANSWERS}.length") == 0
    finally:
        browser.close()
