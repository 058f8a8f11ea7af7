"""``--record``: what is written, what never is, and that nothing waits for it."""

from __future__ import annotations

import json
import logging
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rpc.test_engine_loop import Loop
from tests.server.running import eventually
from tests.server.scripted_engine import build, write_model_directory
from weft.config import EngineConfig
from weft.engine.engine import EngineCore
from weft.errors import ConfigError
from weft.request import Request, SamplingParams
from weft.rpc import recorder as recorder_module
from weft.rpc.engine_process import start_recording
from weft.rpc.messages import Cancel, Launch, RecordingTarget
from weft.rpc.recorder import Recorder
from weft.rpc.recording import BLOCK_TOKENS, TOKEN_HASH_BYTES, Fingerprints
from weft.server.config import ServerConfig
from weft_tools.sim.recording import Recording, read_recording, read_trace

PROMPT = "The quick brown fox said:so what, and left. " * 3


@pytest.fixture
def core(tmp_path: Path) -> EngineCore:
    config = EngineConfig(model=str(write_model_directory(tmp_path)))
    return build(config, on_progress=lambda text: None).core


def make(
    core: EngineCore,
    file: Path,
    limit_bytes: int = 10**6,
    *,
    has_tokens: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> Recorder:
    return Recorder(
        file, core, model="scripted", snapshots="auto", limit_bytes=limit_bytes, clock=clock, has_tokens=has_tokens
    )


def ask(core: EngineCore, recorder: Recorder, name: str, prompt: str = PROMPT, **fields: object) -> None:
    request = Request(
        request_id=name,
        prompt_tokens=list(prompt.encode()),
        sampling=SamplingParams(temperature=0.0, max_tokens=6, n=int(fields.pop("n", 1))),
        **fields,
    )
    core.submit(request)
    recorder.accepted(request)


def finish(core: EngineCore, recorder: Recorder) -> None:
    while core.has_work:
        recorder.events(core.step())
    recorder.close()


def read(file: Path) -> Recording:
    return read_recording([json.loads(line) for line in file.read_text().splitlines()])


def test_each_sequence_that_ends_is_a_line_and_steps_have_times(core: EngineCore, tmp_path: Path) -> None:
    recorder = make(core, tmp_path / "r.jsonl")
    ask(core, recorder, "a", n=2)
    ask(core, recorder, "b", prompt="x" + PROMPT, cache_salt="tenant", priority=3, boundaries=[40])
    finish(core, recorder)
    recording = read(tmp_path / "r.jsonl")
    first, second, salted = recording.traffic.requests
    assert [one.prompt_tokens for one in recording.traffic.requests] == [len(PROMPT)] * 2 + [len(PROMPT) + 1]
    assert [one.output_tokens for one in recording.traffic.requests] == [6, 6, 6]
    assert first.blocks == second.blocks
    assert not set(salted.blocks) & set(first.blocks)
    assert (salted.priority, salted.boundaries) == (3, (40,))
    assert sum(work.prefill_tokens for work, _ in recording.steps) == 3 * len(PROMPT) + 1
    assert all(seconds > 0 for _, seconds in recording.steps)
    assert recording.arena.page_bytes == core.memory.plan.page_bytes


def test_a_line_says_whether_its_prompt_took_no_hit(core: EngineCore, tmp_path: Path) -> None:
    recorder = make(core, tmp_path / "r.jsonl")
    ask(core, recorder, "a")
    finish(core, recorder)
    scoring = make(core, tmp_path / "s.jsonl")
    sampling = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=0)
    request = Request(request_id="b", prompt_tokens=list(PROMPT.encode()), sampling=sampling)
    core.submit(request)
    scoring.accepted(request)
    finish(core, scoring)
    [plain], [scored] = (read(tmp_path / name).traffic.requests for name in ("r.jsonl", "s.jsonl"))
    assert (plain.prompt_logprobs, scored.prompt_logprobs) == (False, True)


def test_no_text_no_token_and_no_salt_is_in_the_file(core: EngineCore, tmp_path: Path) -> None:
    recorder = make(core, tmp_path / "r.jsonl")
    ask(core, recorder, "request-name", cache_salt="tenant-7")
    finish(core, recorder)
    text = (tmp_path / "r.jsonl").read_text()
    for secret in ("quick", "tenant-7", "request-name", "84,104,101", "84, 104, 101"):
        assert secret not in text
    again = make(core, tmp_path / "again.jsonl")
    ask(core, again, "request-name", cache_salt="tenant-7")
    finish(core, again)
    lines = [json.loads((tmp_path / name).read_text().splitlines()[1]) for name in ("r.jsonl", "again.jsonl")]
    assert lines[0]["blocks"] != lines[1]["blocks"], "the key is the same in two recordings"


def test_tokens_are_in_the_file_where_the_operator_asked_for_them(core: EngineCore, tmp_path: Path) -> None:
    recorder = make(core, tmp_path / "r.jsonl", has_tokens=True)
    ask(core, recorder, "a", cache_salt="tenant-7")
    finish(core, recorder)
    recording = read(tmp_path / "r.jsonl")
    [tokens], [one] = recording.texts, recording.traffic.requests
    assert tokens is not None
    assert tokens[: one.prompt_tokens].tolist() == list(PROMPT.encode())
    assert tokens.size == one.prompt_tokens + 6
    assert "tenant-7" not in (tmp_path / "r.jsonl").read_text()
    with pytest.raises(ConfigError, match=r"server\.record_tokens needs --record"):
        ServerConfig(record_tokens=True).recording()


def test_a_client_that_left_before_the_first_token_is_a_line_with_the_time(core: EngineCore, tmp_path: Path) -> None:
    recorder = make(core, tmp_path / "r.jsonl")
    ask(core, recorder, "a")
    recorder.cancelled("a", None)
    core.cancel("a")
    finish(core, recorder)
    [one] = read(tmp_path / "r.jsonl").traffic.requests
    assert one.output_tokens == 0
    assert one.cancelled_at_s is not None
    assert one.cancelled_at_s >= one.at_s


def test_the_time_of_a_cancel_is_that_of_its_call_and_of_its_answer_alone(core: EngineCore, tmp_path: Path) -> None:
    times = [10.0]
    recorder = make(core, tmp_path / "r.jsonl", clock=lambda: times[0])
    ask(core, recorder, "a", n=2)
    ask(core, recorder, "b")
    times[0] = 11.5
    recorder.cancelled("a", 1)
    times[0] = 14.0
    core.cancel("a", 1)
    finish(core, recorder)
    cancelled = [one.cancelled_at_s for one in read(tmp_path / "r.jsonl").traffic.requests]
    assert cancelled == [None, 1.5, None]


def test_an_answer_that_ends_without_a_call_has_the_time_of_its_end(core: EngineCore, tmp_path: Path) -> None:
    times = [10.0]
    recorder = make(core, tmp_path / "r.jsonl", clock=lambda: times[0])
    ask(core, recorder, "a")
    times[0] = 14.0
    core.cancel("a")  # as all are when an engine stops
    finish(core, recorder)
    [one] = read(tmp_path / "r.jsonl").traffic.requests
    assert (one.output_tokens, one.cancelled_at_s) == (0, 4.0)


def test_the_file_ends_at_its_limit_and_serving_goes_on(
    core: EngineCore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = make(core, tmp_path / "r.jsonl", limit_bytes=2500)
    with caplog.at_level(logging.WARNING, "weft.server"):
        for at in range(20):
            ask(core, recorder, f"r{at}")
        finish(core, recorder)
    assert (tmp_path / "r.jsonl").stat().st_size <= 2500
    assert 0 < len(read(tmp_path / "r.jsonl").traffic) < 20
    assert sum("limits.record_limit" in record.message for record in caplog.records) == 1
    assert core.stats().finished["length"] == 20


def test_a_thread_that_falls_behind_drops_lines_and_counts_them(
    core: EngineCore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "_QUEUE_MAX", 2)
    go_on = threading.Event()
    write = recorder_module._Writer.write

    def slowly(writer: recorder_module._Writer, line: dict[str, object]) -> None:
        if "blocks" in line:
            go_on.wait(30)
        write(writer, line)

    monkeypatch.setattr(recorder_module._Writer, "write", slowly)
    recorder = make(core, tmp_path / "r.jsonl")
    for at in range(12):
        ask(core, recorder, f"r{at}")
    while core.has_work:
        recorder.events(core.step())
    go_on.set()
    recorder.close()
    recording = read(tmp_path / "r.jsonl")
    assert 0 < len(recording.traffic) < 12
    assert recording.dropped >= 12 - len(recording.traffic)


def test_steps_are_thinned_the_longer_it_runs(
    core: EngineCore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "_STEPS_A_LINE", 4)
    monkeypatch.setattr(recorder_module, "_STEPS_BEFORE_THINNING", 16)
    recorder = make(core, tmp_path / "r.jsonl")
    for at in range(40):
        ask(core, recorder, f"r{at}")
        while core.has_work:
            recorder.events(core.step())
    steps = core.stats().steps
    recorder.close()
    written = len(read(tmp_path / "r.jsonl").steps)
    assert steps > 200
    assert 16 <= written < steps / 3


def test_a_file_that_is_there_is_not_overwritten(core: EngineCore, tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text("precious")
    with pytest.raises(ConfigError, match=r"--record .*there already"):
        make(core, tmp_path / "r.jsonl")
    assert (tmp_path / "r.jsonl").read_text() == "precious"
    with pytest.raises(ConfigError, match="No such file"):
        make(core, tmp_path / "no" / "r.jsonl")


def test_the_flags_are_checked(tmp_path: Path) -> None:
    assert ServerConfig().recording() is None
    target = RecordingTarget(str(Path("a.jsonl").absolute()), 2_000_000)
    assert ServerConfig(record="a.jsonl", record_limit="2MB").recording() == target
    with pytest.raises(ConfigError, match=r"limits\.record_limit"):
        ServerConfig(record="a.jsonl", record_limit="much").recording()
    (tmp_path / "r.jsonl").write_text("precious")
    with pytest.raises(ConfigError, match="there already"):
        ServerConfig(record=str(tmp_path / "r.jsonl")).recording()
    with pytest.raises(ConfigError, match="--record is empty"):
        ServerConfig(record=" ").recording()


def test_the_engine_s_loop_records_what_it_serves(tmp_path: Path) -> None:
    config = EngineConfig(model=str(write_model_directory(tmp_path)))
    made = build(config, on_progress=lambda text: None)
    file = tmp_path / "r.jsonl"
    target = RecordingTarget(str(file), 10**6)
    recorder = start_recording(Launch(factory="", config={}, folder="", record=target), made)
    assert recorder is not None
    loop = Loop(made.core, recorder)
    loop.submit("a", list(PROMPT.encode()), 5)
    loop.reports(until="a")
    loop.submit("b", list(PROMPT.encode()), 500)
    loop.tell(Cancel("b", None))
    loop.reports(until="b")
    loop.close()
    recorder.close()
    recording = read(file)
    assert recording.traffic.requests[0].output_tokens == 5
    assert len(recording.traffic) == 2
    assert start_recording(Launch(factory="", config={}, folder=""), made) is None


def test_a_full_disk_is_said_once_and_later_lines_are_tried(
    core: EngineCore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The limit on file sizes fails as a full disk does: after half a line."""
    file = tmp_path / "r.jsonl"
    recorder = make(core, file)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with caplog.at_level(logging.WARNING, "weft.server"):
        ask(core, recorder, "first")
        while core.has_work:
            recorder.events(core.step())
        assert eventually(lambda: file.read_text().count("\n") == 2)
        resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 100, hard))
        try:
            for at in range(3):
                ask(core, recorder, f"full{at}")
            while core.has_work:
                recorder.events(core.step())
            assert eventually(lambda: recorder._lines.empty())
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        ask(core, recorder, "last")
        finish(core, recorder)
    assert sum("cannot be written" in record.message for record in caplog.records) == 1
    assert file.read_text().endswith("\n")
    assert 2 <= len(read(file).traffic) < 5
    assert json.loads(file.read_text().splitlines()[-1])["dropped"] >= 1


def test_a_torn_last_line_is_left_out(core: EngineCore, tmp_path: Path) -> None:
    recorder = make(core, tmp_path / "r.jsonl")
    for name in ("a", "b"):
        ask(core, recorder, name)
    finish(core, recorder)
    lines = (tmp_path / "r.jsonl").read_text().splitlines(keepends=True)
    torn = tmp_path / "torn.jsonl"
    torn.write_text("".join(lines[:-1]) + lines[-1][:5])
    assert len(read_trace(str(torn))[0]) == 2
    torn.write_text("".join(lines[:1]) + lines[1][:20] + "\n" + "".join(lines[2:]))
    with pytest.raises(ConfigError, match="line 2"):
        read_trace(str(torn))


def test_a_recording_is_for_its_owner_alone(core: EngineCore, tmp_path: Path) -> None:
    make(core, tmp_path / "r.jsonl").close()
    assert (tmp_path / "r.jsonl").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(("size", "is_taken"), [(15, False), (16, True), (64, True), (65, False)])
def test_a_key_of_fingerprints_has_16_to_64_bytes(size: int, is_taken: bool) -> None:
    if is_taken:
        assert Fingerprints(bytes(size)).salt("a") != "a"
    else:
        with pytest.raises(AssertionError):
            Fingerprints(bytes(size))


def test_a_sequence_has_the_hashes_of_what_it_shares_with_one_that_ended_inside_a_block() -> None:
    """Else a replay would not know how much of the kept state a later request reuses."""
    fingerprints = Fingerprints(bytes(16))
    first = fingerprints.of(list(range(100)), "", computed=BLOCK_TOKENS + 10)
    [(index, hashes)] = first.fronts
    assert (index, len(hashes)) == (1, 10 * TOKEN_HASH_BYTES), "its own end, 10 tokens into the second block"
    for shared, expected in ((7, 7), (10, 10), (15, 10)):
        tokens = [*range(BLOCK_TOKENS + shared), *range(500, 540)]
        other = fingerprints.of(tokens, "", computed=2 * BLOCK_TOKENS)
        [(index, common)] = other.fronts
        assert (index, common) == (1, hashes[: expected * TOKEN_HASH_BYTES])
    assert fingerprints.of([*range(BLOCK_TOKENS), *range(500, 540)], "", computed=2 * BLOCK_TOKENS).fronts == ()
    assert fingerprints.of(list(range(100)), "other", computed=2 * BLOCK_TOKENS).fronts == ()
