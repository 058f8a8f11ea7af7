"""The chat of the page in a real browser, as a person uses it: by keys and mouse, over reloads, on a phone's width.

All walks share one browser and one server. Where no Chromium is installed, they read the page's files instead, and the
run says so at its end; the rules of a conversation are tested in a JavaScript engine then, too."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from py_mini_racer import MiniRacer

from tests.hostile.test_browser import CHROMIUM
from tests.server.browser import Browser
from tests.server.running import RunningServer, eventually, running_server
from tests.server.scripted_engine import write_model_directory
from tests.server.test_tools import TEMPLATES, stop_at_end
from weft.cli.conversation import _read_saved
from weft.server.page import page_files

FACTORY = "build_slow"
REASONED = "say:<think>\nThe list has it.\n</think>\n\n7750"
ANSWERS = "[...document.querySelectorAll('#talk .answer')].map((one) => one.textContent)"
TURNS = "[...document.querySelectorAll('#turns > article')]"
LAST = f"{TURNS}.at(-1)"
TITLES = "[...document.querySelectorAll('#conversations .open')].map((one) => one.textContent)"
RECORDS = """
  window.bodies = []; window.realFetch ??= window.fetch;
  window.fetch = (path, options) => {
    if (options?.body) bodies.push(JSON.parse(options.body));
    return realFetch(path, options);
  };
"""
STORED = """new Promise((done) => {
  const request = indexedDB.open("weft");
  request.onsuccess = () => {
    const step = request.result.transaction(["conversations", "heads"], "readwrite");
    step.oncomplete = () => { request.result.close(); done(true); };
    step.objectStore("heads").count();
  };
})"""
"""True once the writes that the page has begun are complete: transactions of one store come one after the other."""
HOSTILE = """say:**bold** and `code`
<script>window.hacked = 1</script><img src=x onerror="window.hacked = 2"><b>no HTML</b>
[a](https://example.com) [b](javascript:hacked=3) ![c](https://example.com/c.png)

```python
if a < b:
    print("<i>")
```

| a | b |
|---|---|
| 1 | 2 |
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """With a template whose model reasons."""
    template = stop_at_end((TEMPLATES / "hermes_think.jinja").read_text())
    directory = write_model_directory(tmp_path_factory.mktemp("think"), template=template)
    with running_server(FACTORY, engine={"model": str(directory)}) as running:
        yield running


@pytest.fixture(scope="module")
def browser(server: RunningServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser | None]:
    if CHROMIUM is None:
        warnings.warn("no Chromium: the chat of the page was not tried in a browser", stacklevel=1)
        yield None
        return
    opened = Browser(CHROMIUM, tmp_path_factory.mktemp("profile"))
    try:
        opened.open(server.url)
        opened.wait_for("document.getElementById('model').textContent !== ''")
        yield opened
    finally:
        opened.close()


@pytest.fixture
def page(browser: Browser | None, server: RunningServer) -> Browser | None:
    """At a new conversation, 1100 pixels wide, with what it sends written down in ``bodies``."""
    if browser is not None:
        browser.resize(1100)
        browser.open(f"{server.url}/?{id(object())}")
        browser.wait_for("document.getElementById('turns').hasAttribute('aria-busy')")
        browser.run(RECORDS)
        browser.run("document.querySelectorAll('[data-setting]').forEach((one) => { one.value = ''; })")
        browser.run("document.getElementById('new').click()")
    return browser


def say(browser: Browser, text: str) -> None:
    browser.run("document.getElementById('ask').focus()")
    browser.type(text)
    browser.press("Enter", 13)


def wait_for_end(browser: Browser) -> None:
    browser.wait_for("document.getElementById('stop').hidden && !document.querySelector('.growing')")


def set_field(browser: Browser, name: str, value: str) -> None:
    browser.run(
        f"document.getElementById({name!r}).value = {value!r};"
        f"document.getElementById({name!r}).dispatchEvent(new Event('change'))"
    )


@pytest.mark.parametrize("width", [1100, 400])
def test_a_conversation_in_a_browser(page: Browser | None, width: int) -> None:
    if page is None:
        assert "settings.system" in page_files()["chat.js"].read_text("utf-8")
        return
    page.resize(width)
    assert page.run("document.documentElement.scrollWidth <= window.innerWidth")
    assert page.run("document.getElementById('welcome').checkVisibility()")
    _keeps_the_field_in_view(page)
    page.run("document.querySelector('#settings').open = true")
    assert page.run("document.documentElement.scrollWidth <= window.innerWidth")
    set_field(page, "system", "Be short.")
    set_field(page, "temperature", "0")
    page.run("document.querySelector('#settings').open = false")
    say(page, "say:hello")
    page.wait_for(f"{ANSWERS}[0] === 'hello'")
    wait_for_end(page)
    assert not page.run("document.getElementById('welcome').checkVisibility()")
    assert page.run("document.activeElement.id") == "ask"  # the next turn needs no mouse
    sent = page.run("bodies.at(-1)")
    assert [message["role"] for message in sent["messages"]] == ["system", "user"]
    assert (sent["temperature"], sent["max_tokens"]) == (0, 1024), "half of the context"
    said = page.run(f"{LAST}.textContent")
    assert said.startswith("scripted"), "the name of the model is beside its answer"
    assert "prompt tokens from cache" in said
    page.press_alt("KeyN")
    set_field(page, "max-tokens", "40")
    say(page, "sing")
    page.wait_for(f"{LAST}.textContent.includes('tokens/s')")
    wait_for_end(page)
    for _ in range(3):
        say(page, "sing again")
        wait_for_end(page)
    _keeps_the_field_in_view(page)
    assert page.run(
        "(({scrollTop, clientHeight, scrollHeight}) => scrollHeight > clientHeight && "
        "scrollTop + clientHeight > scrollHeight - 2)(document.getElementById('talk'))"
    )
    assert page.run("document.documentElement.scrollWidth <= window.innerWidth")
    page.run("location.hash = '#server'")
    page.wait_for("document.getElementById('prefixes').checkVisibility()")
    _every_number_of_a_table_has_its_name(page)
    assert page.run("document.documentElement.scrollWidth <= window.innerWidth")
    page.run("location.hash = '#chat'")
    page.wait_for("document.getElementById('ask').checkVisibility()")


def _keeps_the_field_in_view(page: Browser) -> None:
    box = page.run("(({top, bottom}) => [top, bottom])(document.getElementById('send').getBoundingClientRect())")
    assert 0 <= box[0] < box[1] <= page.run("window.innerHeight")


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


def test_an_answer_is_markdown_and_nothing_in_it_runs(page: Browser | None) -> None:
    if page is None:
        assert "RETURN_DOM_FRAGMENT: true" in page_files()["markdown.js"].read_text("utf-8")
        return
    say(page, HOSTILE.strip())
    page.wait_for("document.querySelector('.answer td') !== null")
    wait_for_end(page)
    one = "document.querySelector('.answer')"
    assert page.run(f"[...{one}.querySelectorAll('strong, p > code')].map((part) => part.textContent)") == [
        "bold",
        "code",
    ]
    assert page.run(f"{one}.querySelector('pre').textContent") == 'if a < b:\n    print("<i>")\n'
    assert page.run(f"getComputedStyle({one}.querySelector('pre code')).fontFamily").startswith("ui-monospace")
    assert page.run(f"{one}.querySelector('.code-head').textContent") == "pythonCopy"
    assert "<b>no HTML</b>" in page.run(f"{one}.textContent")
    assert page.run(f"{one}.querySelectorAll('script, img, b, [onerror]').length") == 0
    assert page.run(
        f"[...{one}.querySelectorAll('a')].map((link) => [link.textContent, link.getAttribute('href'), link.rel])"
    ) == [
        ["a", "https://example.com", "noopener noreferrer"],
        ["b", None, "noopener noreferrer"],
        ["c", "https://example.com/c.png", "noopener noreferrer"],
    ]
    # Behind the parser: what it lets through is taken out, and HTML of a text is made by the sanitiser alone.
    assert page.run("DOMPurify.sanitize('<p onclick=a()>x</p><script>1</script><svg onload=b()>')") in (
        "<p>x</p><svg></svg>",
        "<p>x</p>",
    )
    refused = page.run(
        "(() => { try { document.createElement('p').innerHTML = '<i>x</i>'; return ''; } "
        "catch (error) { return error.name; } })()"
    )
    assert refused == "TypeError"
    assert page.run("window.hacked") is None


CODE = """say:```python
if a < b:  # <b>not</b>
    print("<i>")
```

```nosuch
if a
```"""
CONTRASTS = """(() => {
  const channel = (part) => part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  const light = (colour) => { const [r, g, b] = colour.match(/[\\d.]+/g).map((one) => channel(one / 255));
                              return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  return [...document.querySelectorAll('.answer pre span')].map((one) => {
    const [low, high] = [one, one.closest('pre')].map((part, at) =>
      light(getComputedStyle(part)[at ? 'backgroundColor' : 'color'])).sort();
    return (high + 0.05) / (low + 0.05); });
})()"""


def test_code_has_colours_that_can_be_read_and_stays_a_text(page: Browser | None) -> None:
    if page is None:
        assert "DOMPurify.sanitize(value, SPANS)" in page_files()["colours.js"].read_text("utf-8")
        return
    page.run("addEventListener('securitypolicyviolation', (event) => { window.refused = event.blockedURI; })")
    say(page, CODE)
    wait_for_end(page)
    page.wait_for("document.querySelector('.answer .hljs-keyword') !== null")
    first = "document.querySelector('.answer pre')"
    assert page.run(f"{first}.textContent") == 'if a < b:  # <b>not</b>\n    print("<i>")\n'
    kinds = page.run(f"[...{first}.querySelectorAll('span')].map((one) => [one.className, one.textContent])")
    assert ["hljs-keyword", "if"] in kinds
    assert ["hljs-comment", "# <b>not</b>"] in kinds
    assert ["hljs-string", '"<i>"'] in kinds
    assert page.run("document.querySelectorAll('.answer pre')[1].querySelectorAll('span').length") == 0
    assert page.run("window.refused") is None
    try:
        for scheme in ("light", "dark"):
            page.prefer_colours(scheme)
            assert min(page.run(CONTRASTS)) > 4.5, scheme
    finally:
        page.prefer_colours("light")


def test_a_growing_answer_keeps_the_blocks_that_are_whole(page: Browser | None) -> None:
    """A selection in them stays, and a long answer is not laid out again for each token."""
    if page is None:
        assert "chat.js" in page_files()
        return
    kept, text = page.run(
        "(async () => { const {markdownIn} = await import('./page/markdown.js'); "
        "const box = document.createElement('div'), show = markdownIn(box); show('one\\n\\ntwo'); "
        "const first = box.firstChild, second = box.lastChild; "
        "show('one\\n\\ntwo and **more**'); "
        "return [[first === box.firstChild, second === box.lastChild], box.textContent]; })()"
    )
    assert kept == [True, False]
    assert text.replace("\n", "") == "onetwo and more"


def test_stopped_cut_repeated_and_edited_turns_stay(page: Browser | None, server: RunningServer) -> None:
    if page is None:
        assert "chat.js" in page_files()
        return
    set_field(page, "max-tokens", "1000")
    say(page, "sing")
    page.wait_for(f"({ANSWERS}[0] ?? '').length > 5")
    assert page.run("document.getElementById('stop').checkVisibility()")
    page.press("Escape", 27)
    wait_for_end(page)
    assert page.run(f"{LAST}.textContent.includes('Stopped here.')")
    assert eventually(lambda: server.running() == 0)
    page.press_alt("KeyG")
    page.wait_for("document.getElementById('stop').checkVisibility()")
    page.wait_for(f"{LAST}.textContent.includes('tokens/s')")
    page.open(f"{page.run('location.origin')}/?in-the-middle")  # as when a tab is closed
    page.wait_for(f"{TURNS}.length === 2 && {LAST}.textContent.includes('Stopped here.')")
    page.run(RECORDS)
    partial = page.run(f"{ANSWERS}[0]")

    set_field(page, "max-tokens", "8")
    say(page, "and more")
    wait_for_end(page)
    sent = [(one["role"], one["content"]) for one in page.run("bodies.at(-1).messages")]
    assert [role for role, _ in sent] == ["user", "assistant", "user"], (
        "question and partial answer are in the conversation"
    )
    assert sent[1][1].strip() == partial.strip()
    assert page.run(f"{LAST}.textContent.includes('Cut here by the limit of 8 tokens.')")
    cut = page.run(f"{ANSWERS}[1]")
    page.press_alt("KeyG")
    page.wait_for(f"{ANSWERS}[1].length > {len(cut)}")
    wait_for_end(page)
    assert page.run("bodies.at(-1).continue_final_message")
    assert page.run("bodies.at(-1).messages.at(-1).content").strip() == cut.strip()
    assert page.run(f"{ANSWERS}.length") == 2, "the answer went on, no other was begun"

    page.press_alt("KeyR")
    page.wait_for(f"{LAST}.querySelector('.siblings')?.textContent.includes('2 of 2')")
    wait_for_end(page)
    assert page.run("bodies.at(-1).messages.at(-1).content") == "and more"
    page.press_alt("Comma")
    page.wait_for(f"{LAST}.querySelector('.siblings')?.textContent.includes('1 of 2')")
    assert len(page.run(f"{ANSWERS}[1]")) > len(cut)

    page.press_alt("KeyE")  # the last message
    page.wait_for(f"{TURNS}[2].querySelector('textarea') === document.activeElement")
    page.run("document.activeElement.value = 'say:another'")
    page.click("#turns article:nth-child(3) form button")
    page.wait_for(f"{ANSWERS}[1] === 'another'")
    wait_for_end(page)
    page.wait_for(f"{TURNS}[2]?.querySelector('.siblings')?.textContent === '‹2 of 2›'")
    page.click("#turns article:nth-child(3) .siblings button")
    page.wait_for(f"{ANSWERS}[1].length > {len(cut)}")
    assert page.run(STORED)

    page.open(f"{page.run('location.origin')}/?reloaded")
    page.wait_for(f"{TURNS}.length === 4")
    assert page.run(f"{ANSWERS}[0]") == partial
    page.wait_for(f"{LAST}.querySelector('.siblings')?.textContent === '‹1 of 2›'")
    assert page.run("document.getElementById('max-tokens').value") == "8", "its settings stay with it"


def test_a_message_without_an_answer_goes_back_into_the_field(page: Browser | None) -> None:
    if page is None:
        assert "chat.js" in page_files()
        return
    say(page, "say:hello")
    page.wait_for(f"{ANSWERS}[0] === 'hello'")
    wait_for_end(page)
    set_field(page, "temperature", "-1")
    say(page, "more")
    page.wait_for("document.getElementById('notice').checkVisibility()")
    assert "temperature" in page.run("document.getElementById('notice').textContent")
    assert page.run("document.getElementById('ask').value") == "more"
    assert page.run(f"{TURNS}.length") == 2
    set_field(page, "temperature", "")


def test_conversations_are_listed_renamed_saved_loaded_and_deleted(page: Browser | None, tmp_path: Path) -> None:
    if page is None:
        assert "chat.js" in page_files()
        return
    page.save_downloads_in(tmp_path)
    page.run("document.getElementById('find').value = ''")
    for text in ("say:one", "say:two"):
        page.press_alt("KeyN")
        say(page, text)
        wait_for_end(page)
    page.wait_for(f"{TITLES}.slice(0, 2).join() === 'say:two,say:one'")
    page.press_alt("PageDown")
    page.wait_for(f"{ANSWERS}[0] === 'one'")
    page.press_alt("KeyL")
    assert page.run("document.activeElement.textContent") == "say:one"
    page.press("F2", 113)
    page.wait_for("document.activeElement.value === 'say:one'")
    page.type("A title")
    page.press("Enter", 13)
    page.wait_for(f"{TITLES}.includes('A title')")

    page.click("#conversations [aria-label=Export]")
    assert eventually(lambda: (tmp_path / "A-title.json").exists())
    _, _, turns = _read_saved(tmp_path / "A-title.json")
    assert [(turn.content, turn.answer) for turn in turns] == [("say:one", "one")], "`weft chat` loads it"
    page.click("#export-all")
    assert eventually(lambda: (tmp_path / "weft-conversations.json").exists())
    count = page.run(f"{TITLES}.length")

    page.press_alt("KeyL")
    page.press("Delete", 46)
    page.wait_for("document.getElementById('sure').open")
    page.click("#sure button[value=yes]")
    page.wait_for(f"!{TITLES}.includes('A title')")
    page.click("#delete-all")
    page.click("#sure button[value=no]")
    assert page.run(f"{TITLES}.length") == count - 1
    page.click("#delete-all")
    page.click("#sure button[value=yes]")
    page.wait_for(f"{TITLES}.length === 0")
    page.open(f"{page.run('location.origin')}/?emptied")
    assert page.run(f"{TURNS}.length") == 0

    page.choose_file("#import-file", tmp_path / "weft-conversations.json")
    page.wait_for(f"{TITLES}.length === {count}")
    (tmp_path / "other.json").write_text('{"messages": []}')
    page.choose_file("#import-file", tmp_path / "other.json")
    page.wait_for("document.getElementById('notice').textContent.includes('other.json was not imported')")
    page.choose_file("#import-file", tmp_path / "A-title.json")
    page.wait_for(f"{ANSWERS}[0] === 'one' && {TITLES}.includes('A title')")


def test_reasoning_is_folded_and_not_copied(page: Browser | None) -> None:
    """Copying works where the browser has no clipboard object, too."""
    if page is None:
        assert "chat.js" in page_files()
        return
    page.allow("clipboardReadWrite", "clipboardSanitizedWrite")
    say(page, REASONED)
    page.wait_for(f"{ANSWERS}[0] === '7750'")
    wait_for_end(page)
    folded = "document.querySelector('#talk details').lastChild"
    assert not page.run(f"{folded}.checkVisibility()")
    page.click("#talk details summary")
    page.wait_for(f"{folded}.checkVisibility()")
    assert page.run(f"{folded}.textContent") == "The list has it."
    button = "document.querySelector('#talk .assistant .copy')"
    page.click("#talk .assistant .copy")
    page.wait_for(f"{button}.textContent === 'Copied'")
    assert page.run("navigator.clipboard.readText()") == "7750"
    page.run("window.realClipboard = navigator.clipboard; realClipboard.writeText('other')")
    page.run(
        "Object.defineProperty(navigator, 'clipboard', {value: undefined, configurable: true});"
        f"{button}.textContent = 'Copy'"
    )
    page.click("#talk .assistant .copy")
    page.wait_for(f"{button}.textContent === 'Copied'")
    assert page.run("realClipboard.readText()") == "7750"


DROPS = """((name, type, text) => {
  const data = new DataTransfer();
  data.items.add(new File([text], name, {type}));
  document.getElementById('talk').dispatchEvent(
    new DragEvent('drop', {dataTransfer: data, bubbles: true, cancelable: true}));
})"""
TOOLS = '[{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]'


def test_files_of_text_go_with_the_message_and_others_are_named(page: Browser | None) -> None:
    if page is None:
        assert "chat.js" in page_files()
        return
    page.run(f"{DROPS}('a.py', 'text/x-python', 'x = 1')")
    page.wait_for("document.querySelector('#files .file')?.textContent === 'a.py, 5 characters'")
    page.run(f"{DROPS}('b.bin', '', new Uint8Array([0, 255, 254]))")
    page.wait_for("document.getElementById('notice').textContent.startsWith('b.bin is neither a picture')")
    page.run(f"{DROPS}('c.txt', 'text/plain', 'unwanted')")
    page.wait_for("document.querySelectorAll('#files button').length === 2")
    page.click("#files button:last-child")
    say(page, "say:what?")
    wait_for_end(page)
    [message] = page.run("bodies.at(-1).messages")
    assert message["content"] == "a.py:\n```\nx = 1\n```\n\nsay:what?"
    assert page.run(f"{TURNS}[0].querySelector('.file').textContent") == "a.py, 5 characters"
    assert page.run("document.querySelectorAll('#files button').length") == 0


def test_calls_of_tools_are_shown_and_answered_by_hand(page: Browser | None) -> None:
    if page is None:
        assert "chat.js" in page_files()
        return
    set_field(page, "tools", TOOLS)
    say(page, 'say:<tool_call>\n{"name": "look", "arguments": {"place": 7}}\n</tool_call>')
    page.wait_for("document.querySelector('.calls textarea') !== null")
    wait_for_end(page)
    assert page.run(
        "document.querySelector('.calls').textContent.includes('look') && "
        "document.querySelector('.calls pre').textContent.includes('\"place\": 7')"
    )
    page.run("document.querySelector('.calls textarea').focus()")
    page.type("a list")
    page.click(".calls form button")
    page.wait_for(f"{TURNS}.length === 4")
    wait_for_end(page)
    sent = page.run("bodies.at(-1).messages")
    assert [message["role"] for message in sent] == ["user", "assistant", "tool"]
    assert sent[2]["content"] == "a list"
    assert sent[1]["tool_calls"][0]["id"] == sent[2]["tool_call_id"]
    set_field(page, "tools", "no")
    page.press_alt("KeyN")
    say(page, "hello")
    page.wait_for("document.getElementById('notice').textContent.startsWith('Settings, tools:')")
    assert page.run("document.getElementById('ask').value") == "hello"


def test_a_screen_reader_finds_a_name_for_each_field_and_hears_the_answer(page: Browser | None) -> None:
    if page is None:
        assert "chat.js" in page_files()
        return
    say(page, "say:hello")
    wait_for_end(page)
    assert page.run("document.querySelector('[role=status]').textContent") == "Answer: hello"
    for opens in ("", "document.getElementById('settings').open = true", "location.hash = '#server'"):
        page.run(opens or "0")
        names = page.names_for_readers()
        fields = {"button", "textbox", "combobox", "spinbutton", "searchbox", "link", "navigation", "dialog"}
        assert [pair for pair in names if pair[0] in fields and not pair[1].strip()] == []
        if not opens:
            assert {("article", "You"), ("article", "Answer of scripted"), ("navigation", "Conversations")} <= set(
                names
            )
    page.run("location.hash = '#chat'")
    page.wait_for("document.getElementById('ask').checkVisibility()")
    page.press_alt("ArrowUp")
    page.press_alt("ArrowUp")
    assert page.run("document.activeElement.ariaLabel") == "You", "turns are reached by keys"
    page.press("?", 191)
    page.wait_for("document.getElementById('keys').open")
    page.press("Escape", 27)
    page.wait_for("!document.getElementById('keys').open")


# -------------------------------------------------------------------- the rules of a conversation


@pytest.fixture(scope="module")
def rules() -> MiniRacer:
    engine = MiniRacer()
    engine.eval(page_files()["conversation.js"].read_text("utf-8").replace("export ", ""))
    return engine


def call(engine: MiniRacer, script: str) -> Any:
    return json.loads(str(engine.eval(f"JSON.stringify((() => {{ {script} }})())")))


def test_a_full_context_drops_the_oldest_turns_by_halves(rules: MiniRacer) -> None:
    turns = [
        {
            "role": role,
            "text": "x" * 100,
            **({"usage": {"prompt_tokens": 50 * (at + 1), "completion_tokens": 50}} if role == "assistant" else {}),
        }
        for at, role in enumerate(["user", "assistant"] * 4)
    ]
    given = json.dumps([*turns, {"role": "user", "text": "y"}])
    assert [call(rules, f"return leftOut({given}, {context})") for context in (0, 1000, 500, 200)] == [0, 0, 4, 8]
    turns[-1]["left"] = 4
    given = json.dumps([*turns, {"role": "user", "text": "y"}])
    assert call(rules, f"return leftOut({given}, 1000)") == 4, "the beginning of the prompt stays until the next drop"


def test_messages_alternate_and_files_come_before_the_words_about_them(rules: MiniRacer) -> None:
    said = call(
        rules,
        """return messagesOf([
          {role: "user", text: "what?", files: [{name: "a.py", kind: "text", text: "x = ```"}]},
          {role: "assistant", text: "", calls: []},
          {role: "user", text: "this", files: [{name: "b.png", kind: "image", url: "data:image/png;base64,AA"}]},
          {role: "assistant", text: "", calls: [{id: "1", name: "look", arguments: "{}"}]},
          {role: "tool", results: [{id: "1", name: "look", text: "seen"}]}], "S")""",
    )
    assert said == [
        {"role": "system", "content": "S"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "a.py:\n````\nx = ```\n````\n\nwhat?"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}},
                {"type": "text", "text": "this"},
            ],
        },
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "seen"},
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("no", "it is no JSON"),
        ("{}", "it has no weft_chat"),
        ('{"weft_chat": 2}', "it is of version 2; this page reads 1"),
        ('{"weft_chat": 1}', "its messages are no list"),
        ('{"weft_chat": 1, "conversation": {"turns": {"1": {"role": "other"}}}}', 'its turn "1" is none'),
        ('{"weft_chat": 1, "conversation": {"turns": {"2": {"role": "user", "parent": "3"}}}}', "turn 2 follows one"),
    ],
)
def test_a_file_that_is_no_conversation_is_refused_in_words(rules: MiniRacer, text: str, words: str) -> None:
    said = call(
        rules, f"try {{ return imported({json.dumps(text)}, 1).length; }} catch (error) {{ return error.message; }}"
    )
    assert words in str(said)


def test_a_file_brings_in_no_address_and_no_field_of_its_own(rules: MiniRacer) -> None:
    turn = {
        "role": "user",
        "parent": None,
        "text": "a",
        "evil": 1,
        "files": [{"name": "x", "kind": "image", "url": "https://x"}],
    }
    tree = {"turns": {"1": turn}, "chosen": {"": "1", "__proto__": "1"}, "settings": {"temperature": 1, "system": {}}}
    [made] = call(rules, f"return imported({json.dumps(json.dumps({'weft_chat': 1, 'conversation': tree}))}, 1)")
    assert made["turns"]["1"] == {
        "id": "1", "parent": None, "role": "user", "text": "a", "files": [{"name": "x", "kind": "text", "text": ""}]
    }  # fmt: skip
    assert (made["settings"], made["chosen"]) == ({"temperature": 1}, {"": "1"})
