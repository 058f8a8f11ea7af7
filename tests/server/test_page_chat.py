"""The chat of the page in a real browser: by keyboard, streamed, stopped, with settings, on a phone's width.

Where no Chromium is installed, the test reads the page's files instead, and the run says so at its end."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import pytest

from tests.hostile.test_browser import CHROMIUM
from tests.server.browser import Browser
from tests.server.running import RunningServer, running_server
from tests.server.scripted_engine import write_model_directory
from tests.server.test_tools import TEMPLATES, stop_at_end

FACTORY = "build_slow"
REASONED = "say:<think>\nThe list has it.\n</think>\n\n7750"
ANSWERS = "[...document.querySelectorAll('#talk .answer')].map((one) => one.textContent)"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """With a template whose model reasons."""
    template = stop_at_end((TEMPLATES / "hermes_think.jinja").read_text())
    directory = write_model_directory(tmp_path_factory.mktemp("think"), template=template)
    with running_server(FACTORY, engine={"model": str(directory)}) as running:
        yield running


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
        _begins_with_the_chat(browser)
        _every_number_of_a_table_has_its_name(browser)
        browser.run(
            "document.querySelector('#ask-form details').open = true;"
            "document.getElementById('system').value = 'Be short.';"
            "document.getElementById('temperature').value = '0';"
            "document.getElementById('ask').focus()"
        )
        browser.type("say:hello")
        browser.press("Enter", 13)
        browser.wait_for(f"{ANSWERS}[0] === 'hello'")
        browser.wait_for("document.getElementById('stop').hidden")
        assert not browser.run("document.getElementById('welcome').checkVisibility()")
        assert browser.run("document.activeElement.id") == "ask"  # the next turn needs no mouse
        assert browser.run("document.querySelector('#talk button').textContent") == "Copy"
        browser.type("more")
        browser.press("Enter", 13)
        browser.wait_for(f"({ANSWERS}[1] ?? '').length > 2")
        browser.wait_for("document.getElementById('stop').hidden")
        browser.run("document.getElementById('forget').click()")
        browser.type("sing")
        browser.run("document.getElementById('max-tokens').value = '1000'")
        browser.press("Enter", 13)
        browser.wait_for(f"({ANSWERS}[0] ?? '').length > 5")
        assert not browser.run("document.getElementById('stop').hidden")
        browser.run("document.getElementById('stop').click()")
        browser.wait_for("document.getElementById('stop').hidden")
        assert browser.run("document.getElementById('talk').textContent.includes('stopped')")
        assert browser.run("document.documentElement.scrollWidth <= window.innerWidth")
        browser.run("document.getElementById('forget').click()")
        assert browser.run(f"{ANSWERS}.length") == 0
        assert browser.run("document.getElementById('welcome').checkVisibility()")
        _unfolds_and_copies(browser)
    finally:
        browser.close()


def _begins_with_the_chat(browser: Browser) -> None:
    """A first visit sees what to do, in one line, and the field to do it in."""
    assert browser.run("document.querySelector('main > section').contains(document.getElementById('ask'))")
    welcome = "document.getElementById('welcome')"
    assert "message" in browser.run(f"{welcome}.textContent")
    assert browser.run(f"{welcome}.clientHeight < 2 * parseFloat(getComputedStyle({welcome}).lineHeight)")
    assert browser.run("document.getElementById('send').getBoundingClientRect().bottom <= window.innerHeight")


def _every_number_of_a_table_has_its_name(browser: Browser) -> None:
    """No column is out of sight: the names stand over the columns, or, on a phone, before the numbers."""
    # One expression: the page draws its tables again every second, between two of them too.
    names, named, headed, shown, inside = browser.run(
        "(async () => { const draw = await import('./page/draw.js'); const row = draw.element('tr'); "
        "for (let place = 0; place < 9; place++) row.append(draw.element('td', 'number ' + place)); "
        "const body = document.getElementById('prefixes'); draw.fillRows(body, [row]); "
        "const cells = [...body.querySelectorAll('td')]; "
        "return [[...body.parentElement.tHead.rows[0].cells].map((one) => one.textContent), "
        "cells.map((one) => one.dataset.name), body.parentElement.tHead.checkVisibility(), "
        "cells.map((one) => getComputedStyle(one, '::before').content), "
        "cells.every((one) => one.getBoundingClientRect().right <= window.innerWidth)]; })()"
    )
    assert named == names
    assert headed or shown == [f'"{name}"' for name in names]
    assert inside


def _unfolds_and_copies(browser: Browser) -> None:
    """An answer with reasoning: folded until a click, and not in what the button copies. Copying works where
    the browser has no clipboard object, too."""
    browser.allow("clipboardReadWrite", "clipboardSanitizedWrite")
    browser.type(REASONED)
    browser.press("Enter", 13)
    browser.wait_for(f"{ANSWERS}[0] === '7750'")
    browser.wait_for("document.getElementById('stop').hidden")
    folded = "document.querySelector('#talk details').lastChild"
    assert not browser.run(f"{folded}.checkVisibility()")
    browser.click("#talk details summary")
    browser.wait_for(f"{folded}.checkVisibility()")
    assert browser.run(f"{folded}.textContent") == "The list has it."
    browser.click("#talk button")
    browser.wait_for("document.querySelector('#talk button').textContent === 'Copied'")
    assert browser.run("navigator.clipboard.readText()") == "7750"
    browser.run("window.realClipboard = navigator.clipboard; realClipboard.writeText('other')")
    browser.run(
        "Object.defineProperty(navigator, 'clipboard', {value: undefined, configurable: true});"
        "document.querySelector('#talk button').textContent = 'Copy'"
    )
    browser.click("#talk button")
    browser.wait_for("document.querySelector('#talk button').textContent === 'Copied'")
    assert browser.run("realClipboard.readText()") == "7750"
