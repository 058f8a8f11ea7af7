"""Sessions of the Python API: saved, killed, restored by another process, forked, expired, and refused with one line.

Bits: a request that continues a session has the logprobs of the same tokens computed cold. Counts: it computes its own
tokens and no others.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.checkpoints import checkpoint
from tests.oracle.test_replaced_weights import change_one_element
from weft import Engine
from weft.errors import WeftError

PROMPT = [3 + 7 * number % 251 for number in range(203)]
MORE = [11 + 5 * number % 199 for number in range(9)]
SAID = [
    {"role": "system", "content": "You are brief. " * 20},
    {"role": "user", "content": "say:one"},
    {"role": "assistant", "content": "one"},
]
ASKED = [{"role": "user", "content": "say:two"}]


def settings_in(folder: Path, model: Path) -> dict[str, Any]:
    return {
        "model": str(model),
        "sessions": str(folder / "objects.sqlite"),
        "memory": "24MB",
        "threads": 1,
        "max_model_len": 1024,
        "dtype": "float32",
        "store": str(folder / "store"),
        "store_size": "1GB",
        "store_reserve": "1MB",
    }


def engine(folder: Path, family: str = "qwen3_5", *, model: Path | None = None, **more: Any) -> Engine:
    return Engine(**settings_in(folder, model or checkpoint(family)) | more)


def complete(one: Engine, prompt: list[int], **more: Any) -> tuple[list[int], list[float], int]:
    """(tokens, logprobs, computed prompt tokens)."""
    [answer] = one.generate(prompt, max_tokens=6, temperature=0, logprobs=0, ignore_eos=True, **more)
    computed = len(answer.prompt_tokens) - answer.cached_tokens
    return answer.tokens, [step.logprob for step in answer.logprobs], computed


SAVED_AND_KILLED = """
import json, os, signal, sys
from weft.api import Engine
if __name__ == "__main__":
    settings, prompt, said = json.loads(sys.argv[1])
    one = Engine(**settings)
    saved = one.sessions.save("trip", prompt=prompt)
    assert (saved.tokens, saved.computed_tokens, saved.in_memory, saved.stored) == (203, 203, 203, True), saved
    assert one.sessions.save("talk", said).stored
    os.kill(os.getpid(), signal.SIGKILL)
"""
"""A process that imports weft and no test: those would import transformers and write the checkpoint again."""


@pytest.mark.parametrize("family", ["qwen3_5", "granite", "lfm2"])
def test_a_session_outlives_kill_9_and_computes_new_tokens_only(family: str, tmp_path: Path) -> None:
    arguments = json.dumps([settings_in(tmp_path, checkpoint(family)), PROMPT, SAID])
    first = subprocess.run([sys.executable, "-c", SAVED_AND_KILLED, arguments], capture_output=True)
    assert first.returncode == -9, first.stderr.decode()
    with engine(tmp_path, family) as second:
        assert [one.name for one in second.sessions.list()] == ["trip", "talk"]
        restored = second.sessions.restore("trip")
        assert (restored.computed_tokens, restored.in_memory) == (0, len(PROMPT))
        tokens, logprobs, computed = complete(second, MORE, session="trip")
        assert computed == len(MORE)
        talk = second.sessions.get("talk")
        assert talk.messages == SAID
        reply = second.chat(ASKED, session="talk", max_tokens=6, temperature=0, logprobs=0)
        assert len(reply.prompt_tokens) - reply.cached_tokens == len(reply.prompt_tokens) - talk.tokens
        second.sessions.delete("trip")
        second.sessions.delete("talk")
        second.flush_cache()
        assert complete(second, PROMPT + MORE) == (tokens, logprobs, len(PROMPT) + len(MORE))
        second.flush_cache()
        cold = second.chat(SAID + ASKED, max_tokens=6, temperature=0, logprobs=0)
        assert (cold.cached_tokens, cold.logprobs, cold.text) == (0, reply.logprobs, reply.text)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with engine(tmp_path_factory.mktemp("sessions")) as running:
        yield running


def test_a_fork_computes_nothing_and_its_answers_are_those_of_its_parent(one: Engine) -> None:
    one.sessions.save("root", prompt=PROMPT)
    before = one.stats().memory
    forked = one.sessions.fork("root", "branch", expires_after=60)
    assert (forked.parent, forked.computed_tokens, forked.tokens) == ("root", 0, len(PROMPT))
    assert forked.expires_at - forked.created_at == pytest.approx(60)
    after = one.stats().memory
    assert (after.pages_held, after.slots_held) == (before.pages_held, before.slots_held)
    assert complete(one, MORE, session="branch")[2] == len(MORE)
    assert complete(one, MORE, session="branch")[:2] == complete(one, MORE, session="root")[:2]


def test_streams_and_text_continue_a_session_too(one: Engine) -> None:
    one.sessions.save("told", prompt="say:one")
    whole = one.generate(
        one.sessions.get("told").token_ids + one.tokenizer.encode(" more", add_special_tokens=False), max_tokens=4
    )
    streamed = "".join(piece.text for piece in one.stream(" more", session="told", max_tokens=4, temperature=0))
    assert one.generate(" more", session="told", max_tokens=4, temperature=0)[0].text == streamed
    assert len(whole[0].prompt_tokens) == len(one.generate(" more", session="told", max_tokens=1)[0].prompt_tokens)
    one.sessions.save("chat", SAID)
    pieces = list(one.stream_chat(ASKED, session="chat", max_tokens=4, temperature=0))
    assert "".join(piece.text for piece in pieces) == one.chat(SAID + ASKED, max_tokens=4, temperature=0).text


def test_a_longer_conversation_is_saved_in_its_place(one: Engine) -> None:
    said = [{"role": "user", "content": "grow"}, {"role": "assistant", "content": "taller " * 30}]
    first = one.sessions.save("growing", said)
    longer = one.sessions.save("growing", [*said, *ASKED, {"role": "assistant", "content": "two"}])
    assert first.computed_tokens == first.tokens
    assert longer.computed_tokens == longer.tokens - first.tokens
    assert [session.name for session in one.sessions.list()].count("growing") == 1


def test_a_session_ends_with_its_time(tmp_path: Path) -> None:
    with engine(tmp_path) as running:
        running.sessions.save("short", prompt=PROMPT, expires_after=0.2)
        assert len(running._core.memory.pins) == 1
        time.sleep(0.3)
        with pytest.raises(WeftError, match="there is no session 'short'"):
            running.sessions.restore("short")
        assert running.sessions.list() == []
        assert len(running._core.memory.pins) == 0


BAD = {
    "no source": (lambda one: one.sessions.save("a"), "none of messages and prompt given"),
    "two sources": (lambda one: one.sessions.save("a", SAID, prompt="x"), "messages and prompt given"),
    "a name": (lambda one: one.sessions.save("../a", prompt="x"), "letters, digits"),
    "a time": (lambda one: one.sessions.save("a", prompt="x", expires_after=-1), "limits.session_days"),
    "nothing": (lambda one: one.sessions.save("a", prompt=[]), "empty"),
    "a token": (lambda one: one.sessions.save("a", prompt=[1 << 30]), "1073741824"),
    "an adapter": (lambda one: one.sessions.save("a", prompt="x", lora="none"), "the adapters of this engine"),
    "none": (lambda one: one.generate("x", session="none"), "there is no session 'none'"),
    "a fork of none": (lambda one: one.sessions.fork("none", "a"), "there is no session 'none'"),
    "a deleted one": (lambda one: one.sessions.delete("none"), "there is no session 'none'"),
    "chat on tokens": (lambda one: one.chat(ASKED, session="kept"), "has no messages"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_one_line_and_nothing_is_lost(one: Engine, case: str) -> None:
    call, words = BAD[case]
    one.sessions.save("kept", prompt=PROMPT)
    before = one.sessions.list()
    pins = len(one._core.memory.pins)
    with pytest.raises(WeftError) as caught:
        call(one)
    assert words in caught.value.message
    assert "\n" not in caught.value.message
    assert one.sessions.list() == before
    assert len(one._core.memory.pins) == pins


def test_a_session_of_other_weights_is_a_conflict(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(checkpoint("lfm2"), model)
    other = tmp_path / "other"
    shutil.copytree(model, other)
    change_one_element(other)
    with engine(tmp_path, model=model) as running:
        running.sessions.save("old", prompt=PROMPT)
        running.update_weights(other)
        with pytest.raises(WeftError, match="'old' was saved with other weights") as caught:
            running.generate(MORE, session="old")
        assert caught.value.status == 409
        assert running.sessions.save("old", prompt=PROMPT).computed_tokens == len(PROMPT)
        assert complete(running, MORE, session="old")[2] == len(MORE)


def test_a_file_of_another_program_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "objects.sqlite").write_text("words")
    with pytest.raises(WeftError, match=r"sessions .*objects\.sqlite"):
        engine(tmp_path)


def test_another_key_is_a_conflict(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).write_text(name[0] * 40)
        (tmp_path / name).chmod(0o600)
    with engine(tmp_path, session_key=str(tmp_path / "first")) as running:
        running.sessions.save("trip", prompt=PROMPT)
    with engine(tmp_path, session_key=str(tmp_path / "second")) as running:
        with pytest.raises(WeftError, match="encrypted with another key"):
            running.sessions.get("trip")
        assert running.sessions.list() == []
