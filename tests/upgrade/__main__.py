"""An earlier version and this one, side by side, in both directions: ``make upgrade FROM=commit``.

    store        one version writes prefixes, the other reads them or starts anew; nothing of the first is lost
    responses    a stored response of one is read and continued by the other
    config       config files of one version's pages are read by the other, or refused in one line
    wire         a machine of one version is refused by a server of the other, by name, on both sides
    restart      requests go on while the server of one version takes over from that of the other

Prints a row for each, and ends with code 1 where a promise of docs/stability.md is broken.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from tests.docs.blocks import blocks_of
from tests.upgrade.versions import ROOT, RefusedError, Serving, Version, checked_out, named, serving

PROMPT = "Once upon a time there was a cat, and it told the others what it had seen. " * 24
STREAMS = 4
ONE_LINE_MAX = 400
"""Most characters of a refusal."""


def completed(server: Serving, prompt: str = PROMPT) -> tuple[str, int]:
    """Return a greedy answer and how many tokens of its prompt were found."""
    answer = server.post("/v1/completions", {"model": "default", "prompt": prompt, "max_tokens": 8, "temperature": 0})
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def is_kept(before: Path, after: Path) -> bool:
    """Whether each file of ``before`` is still in ``after``, and begins as it did."""
    for file in before.rglob("*"):
        other = after / file.relative_to(before)
        if not file.is_file() or file.name in ("lock", "survey"):
            continue
        if not other.is_file() or (file.suffix == ".json" and not filecmp.cmp(file, other, shallow=False)):
            return False
    return True


def walk_store(first: Version, second: Version, state: Path) -> str:
    """``first`` writes, ``second`` opens it for writing, then ``first`` must still find all of its own."""
    flags = ("--store", str(state / "store"), "--store-size", "256MiB")
    with serving(first, state, *flags) as server:
        text, _ = completed(server)
        server.stop()
    with serving(first, state, *flags) as server:
        again, own = completed(server)
        assert (again, own > 0) == (text, True), f"the first version finds {own} tokens of its own"
        server.stop()
    shutil.copytree(state / "store", state / "copy")
    try:
        with serving(second, state, *flags) as server:
            other, found = completed(server)
            assert other == text, f"another answer: {other!r} after {text!r}"
            server.stop()
        said = f"reads {found} tokens" if found else "starts anew"
    except RefusedError as refused:
        said = refusal(refused.line)
    assert is_kept(state / "copy", state / "store"), "files of the first version are gone"
    with serving(first, state, *flags) as server:
        last, back = completed(server)
        assert (last, back) == (text, own), f"the first version then finds {back} of {own} tokens"
    return said


def refusal(line: str) -> str:
    """Return what is said of a refusal. Raises AssertionError where it is no line for a reader."""
    assert "Traceback" not in line, line
    assert len(line) <= ONE_LINE_MAX, line
    return f"refused: {line.removeprefix('error:').strip().removeprefix('refused:').strip()}"


def walk_responses(first: Version, second: Version, state: Path) -> str:
    """``first`` stores a response, ``second`` reads it and goes on, ``first`` reads both."""
    body = {"model": "default", "input": "Remember this list.\nOshan: 7750", "max_output_tokens": 16, "temperature": 0}
    with serving(first, state) as server:
        stored = server.post("/v1/responses", body)
        server.stop()
    try:
        with serving(second, state) as server:
            seen = server.client.get(f"{server.url}/v1/responses/{stored['id']}").json()
            assert seen.get("output") == stored["output"], f"another output: {seen}"
            more = {**body, "input": "What is the number of Oshan?", "previous_response_id": stored["id"]}
            next_id = server.post("/v1/responses", more)["id"]
            server.stop()
    except RefusedError as refused:
        return refusal(refused.line)
    try:
        with serving(first, state) as server:
            codes = [
                server.client.get(f"{server.url}/v1/responses/{one}").status_code for one in (stored["id"], next_id)
            ]
            assert codes == [200, 200], f"back at the first version: {codes}"
            return "reads, continues; the first reads both"
    except RefusedError as refused:
        return f"reads, continues; the first then {refusal(refused.line)}"


def walk_config(first: Version, second: Version, state: Path) -> str:
    """Every config file of the pages of ``first`` is shown by ``second``."""
    pages = [first.root / "README.md", *sorted((first.root / "docs").glob("*.md"))]
    files = [
        block.text for page in pages for block in blocks_of(page.name, page.read_text()) if block.language == "toml"
    ]
    if second.run(state, "config", "--help").returncode:
        return "has no `weft config`"
    refused = []
    for text in files:
        (state / "weft.toml").write_text(text)
        said = second.run(state, "config", "--config", str(state / "weft.toml"))
        if said.returncode:
            refused.append(refusal(said.stdout.strip()))
    return f"reads {len(files) - len(refused)} of {len(files)} files" + "".join(
        f"; {line}" for line in sorted(set(refused))
    )


def walk_wire(first: Version, second: Version, state: Path) -> str:
    """A machine of ``second`` joins a server of ``first``."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    token = state / "token"
    token.write_text("0123456789abcdef" * 4 + "\n")
    token.chmod(0o600)
    with serving(first, state, "--listen-engines", f"127.0.0.1:{port}", "--token", str(token)) as server:
        said = second.run(state, "join", f"127.0.0.1:{port}", "--token", str(token))
        assert said.returncode == 2, said.stdout
        line = next(
            (line for line in said.stdout.splitlines() if "versions" in line or "one version" in line), said.stdout
        )
        for name in (first.name, second.name):
            assert name in line, f"{name} is not named: {line}"
        text, _ = completed(server, "Once upon")
        assert text
        assert "Traceback" not in server.output + said.stdout
        return refusal(line)


def walk_restart(first: Version, second: Version, state: Path) -> str:
    """Clients stream without a pause, as behind a proxy, while ``second`` takes over."""
    with serving(first, state) as old, serving(second, state) as new:
        places, ended, failed = [old.url], {old.url: 0, new.url: 0}, []
        stop = threading.Event()
        lock = threading.Lock()

        def client() -> None:
            while not stop.is_set():
                url = places[0]
                try:
                    whole = streamed(url)
                except (httpx.HTTPError, AssertionError) as error:
                    failed.append(f"{type(error).__name__}: {error}")
                    return
                with lock:
                    ended[url] += whole

        threads = [threading.Thread(target=client) for _ in range(STREAMS)]
        for thread in threads:
            thread.start()
        wait_for(lambda: ended[old.url] >= STREAMS or bool(failed))
        places[0] = new.url
        time.sleep(0.2)  # a client that has read the old place has connected
        code = old.stop()
        wait_for(lambda: ended[new.url] >= 2 * STREAMS or bool(failed))
        stop.set()
        for thread in threads:
            thread.join()
        assert not failed, failed
        assert code == 0, f"the first version ended with code {code}"
        return f"{ended[old.url]} streams at the first, {ended[new.url]} at the second, none cut"


def streamed(url: str) -> int:
    """Return 1 for a stream that came to its end."""
    body = {"model": "default", "prompt": "Once upon a time", "max_tokens": 48, "stream": True}
    reason = None
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as answer:
        assert answer.status_code == 200, answer.status_code
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                reason = json.loads(line[6:])["choices"][0]["finish_reason"] or reason
    assert reason is not None, "a stream without its end"
    return 1


def wait_for(holds: Callable[[], bool], limit_s: float = 240.0) -> None:
    """Wait until ``holds``. Raises AssertionError when it takes too long."""
    end_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end_s, "it did not come to pass in time"
        time.sleep(0.05)


WALKS = {
    "store": walk_store,
    "responses": walk_responses,
    "config": walk_config,
    "wire": walk_wire,
    "restart": walk_restart,
}


def main() -> int:
    """Return 1 where a promise is broken."""
    reader = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    reader.add_argument("--from", dest="commit", required=True, help="commit or tag of the earlier version")
    reader.add_argument("--walks", nargs="*", choices=WALKS, default=list(WALKS))
    given = reader.parse_args()
    old, new = checked_out(given.commit), named(ROOT)
    print(f"| what | {old.name} first | {new.name} first |\n|---|---|---|", flush=True)
    broken = 0
    for name in given.walks:
        cells = []
        for first, second in ((old, new), (new, old)):
            with tempfile.TemporaryDirectory(prefix="weft-upgrade-") as state:
                try:
                    cells.append(WALKS[name](first, second, Path(state)))
                except (AssertionError, RefusedError) as error:
                    cells.append(f"BROKEN: {str(error)[-400:]}")
                    broken = 1
        print("| " + " | ".join([name, *(cell.replace("\n", " ") for cell in cells)]) + " |", flush=True)
    return broken


if __name__ == "__main__":
    sys.exit(main())
