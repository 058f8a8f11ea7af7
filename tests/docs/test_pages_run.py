"""What the pages show happens: each command and program runs, and prints what stands under it.

``tests/docs/reader.py`` runs them against one server on the embedded model. ``tests/docs/not_run.py`` lists
the lines that need a GPU, a download or minutes.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.arch.rules import ROOT
from tests.cli.test_simulate import write_recording
from tests.docs.blocks import RUNNABLE, Block, blocks_of, blocks_of_pages, complaint
from tests.docs.commands import ShellLine, shell_lines
from tests.docs.comparison import complaint as output_complaint
from tests.docs.not_run import NOT_RUN, reason
from tests.docs.preludes import PRELUDES
from tests.docs.reader import EMBEDDED, MEMORY, Reader
from tests.fixtures.checkpoints import checkpoint
from tests.server.running import running_server

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = blocks_of_pages(PAGES, ROOT)
TO_RUN = [block for block in BLOCKS if block.language in RUNNABLE]


def lines_of(block: Block) -> list[str]:
    """What ``not_run`` goes by: shell lines, or the first line of a program."""
    if block.language in ("bash", "sh"):
        return [line.text for line in shell_lines(block)]
    return [block.text.split("\n", 1)[0]]


def is_run(block: Block) -> bool:
    return any(reason(block.page, line) is None for line in lines_of(block))


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weft")


@pytest.fixture(scope="module")
def url(state: Path) -> Iterator[str]:
    """A server of everything that the pages ask for."""
    with running_server(
        "",
        engine={"memory": MEMORY},
        server={
            "file_store": str(state / "files"),
            "name_store": str(state / "names.json"),
            "response_store": str(state / "responses.sqlite"),
        },
    ) as server:
        yield server.url


@pytest.fixture(scope="module")
def store(state: Path) -> Path:
    """A store with a prefix of the embedded model."""
    from weft import Engine

    directory = state / "store"
    with Engine(memory=MEMORY, store=str(directory)) as engine:
        engine.generate("Once upon a time " * 40, max_tokens=2, temperature=0)
    return directory


@pytest.fixture
def reader(url: str, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reader:
    """In a directory with the files that pages presuppose."""
    write_recording(tmp_path / "traffic.jsonl", steps=20)
    shutil.copy(checkpoint("lfm2") / "config.json", tmp_path)
    (tmp_path / "story.txt").write_text("Once upon a time")
    return Reader(tmp_path, url, store, monkeypatch)


def run(block: Block, reader: Reader) -> str:
    """Empty, or what is wrong with ``block``."""

    def skipped(line: ShellLine) -> bool:
        return reason(block.page, line.text) is not None

    try:
        printed = reader.read(block, skipped, PRELUDES.get(block.page, ""))
    except Exception as error:
        return f"{block}: {type(error).__name__}: {error}"
    if block.shown and (wrong := output_complaint(block.shown, block.shown_as, printed)):
        return f"{block}: {wrong}"
    return ""


@pytest.mark.parametrize("page", sorted({block.page for block in TO_RUN if is_run(block)}))
def test_a_page_shows_what_happens(page: str, reader: Reader) -> None:
    complaints = [run(block, reader) for block in TO_RUN if block.page == page and is_run(block)]
    assert "\n".join(filter(None, complaints)) == ""


def test_output_is_shown_only_where_all_of_a_block_is_run_or_none() -> None:
    mixed = [
        str(block)
        for block in TO_RUN
        if block.shown and len({reason(block.page, line) is None for line in lines_of(block)}) == 2
    ]
    assert mixed == []


def test_each_reason_not_to_run_a_line_still_has_its_line() -> None:
    lines = [(block.page, line) for block in TO_RUN for line in lines_of(block)]
    assert [key for key in NOT_RUN if not any(page == key[0] and line.startswith(key[1]) for page, line in lines)] == []


def test_every_block_has_the_language_of_what_it_is() -> None:
    assert [wrong for block in BLOCKS if (wrong := complaint(block))] == []
    assert len(TO_RUN) > 60
    assert sum(bool(block.shown) for block in TO_RUN) > 20


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("```\nweft serve --port 1\n```\n", "without a language"),
        ("```\n$ curl a\n```\n", "without a language"),
        ("```text\nabc\n```\n", "follows no command"),
        ("```ruby\nputs\n```\n", "in ruby"),
    ],
)
def test_a_block_that_would_escape_is_noticed(text: str, words: str) -> None:
    [block] = blocks_of("page.md", text)
    assert words in complaint(block)


@pytest.mark.parametrize(
    "text",
    [
        "```bash\nweft plan --no-such-flag\n```\n",
        "```bash\nrm -r x\n```\n",
        "```python\nnowhere()\n```\n",
        "```bash\necho a\n```\n\n```text\nb\n```\n",
        "```bash\ncurl http://127.0.0.1:8000/nowhere\n```\n",
        "```bash\nweft serve --kv-dtype int9\n```\n",
        '```toml\nkv_dtype = "int9"\n```\n',
        "```python\nprint({'a': 1})\n```\n```text\n{'a': 2}\n```\n",
        "```bash\nweft serve --snapshots no\n```\n",
    ],
)
def test_a_block_that_fails_or_prints_something_else_is_noticed(text: str, reader: Reader) -> None:
    [block] = blocks_of("page.md", text)
    assert run(block, reader)


def test_a_reader_types_pipes_files_and_programs(reader: Reader) -> None:
    text = (
        "```bash\ncat > a.txt <<'END'\nOnce\nEND\ncat a.txt | cat > b.txt\ncat b.txt\n```\n"
        "```text\nOnce\n```\n"
        "```python\nx = 1\n```\n```python\nprint(x, 8000)\n```\n\n```text\n1 8000\n```\n"
    )
    blocks = blocks_of("page.md", text)
    assert [run(block, reader) for block in blocks] == ["", "", ""]
    assert [block.line for block in blocks] == [2, 12, 15]
    assert EMBEDDED.is_dir()
