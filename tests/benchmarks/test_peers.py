"""What the comparison with other engines decides by itself: orders, ratios, promises, requirements."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from benchmarks.peers import real, serve
from benchmarks.peers.engines import LLAMA, SETTINGS, Bench, Setting, as_gguf, last_error
from benchmarks.peers.environment import Absent, Environment, clean_variables
from benchmarks.peers.lines import SHARED, Failed, Line, Promise, Side, Talk, conversations, goodput, lines, single
from benchmarks.peers.make_env import wanted
from benchmarks.peers.scheduler import in_turn
from benchmarks.serve.checkpoints import Checkpoint
from benchmarks.serve.load import LoadPlan, Summary, run_load, summarise
from weft_tools.bench.serve import Timing


class Clockwork:
    """A side that answers the k-th request of a plan after so many seconds, without waiting for them."""

    def __init__(self, first_token_s: float = 1.0, between_s: float = 0.1, error: str | None = None) -> None:
        self.first_token_s, self.between_s, self.error = first_token_s, between_s, error
        self.plans: list[LoadPlan] = []

    def answer(self, sent: float, output_tokens: int) -> Timing:
        times = [sent + self.first_token_s + number * self.between_s for number in range(output_tokens)]
        return Timing(sent, [(when, 1) for when in times], [7] * output_tokens, error=self.error)

    def load(self, plan: LoadPlan) -> tuple[Summary, list[Timing]]:
        self.plans.append(plan)
        timings = [self.answer(arrival, plan.output_tokens) for arrival in plan.arrivals()]
        return summarise(timings, max(timing.chunks[-1][0] for timing in timings)), timings

    def talk(self, talk: Talk) -> list[list[Timing]]:
        return [
            [self.answer(10.0 * turn, talk.output_tokens) for turn in range(talk.turns)]
            for _ in range(talk.conversations)
        ]


def bench(tmp_path: Path) -> Bench:
    checkpoint = Checkpoint("lfm2", "tiny", "float32", tmp_path, vocab_size=500, parameters=1)
    return Bench(checkpoint, Environment(tmp_path / "none"), threads=1, limit_s=1.0)


def test_the_order_of_engines_turns_round_with_each_round() -> None:
    orders = [serve.order_of(["weft", "vllm", "llama"], number) for number in range(3)]
    assert orders == [["weft", "vllm", "llama"], ["llama", "vllm", "weft"], ["weft", "vllm", "llama"]]


def test_a_ratio_above_one_means_weft_is_better_and_nothing_is_not_compared() -> None:
    assert serve.ratio(30.0, 10.0, True) == 3.0
    assert serve.ratio(2.0, 10.0, False) == 5.0
    assert serve.ratio(0.0, 10.0, True) is None
    assert serve.ratio(3.0, 0.0, True) is None


def test_the_second_turn_of_a_released_model_is_timed_to_its_first_token() -> None:
    assert real.second_turn(Clockwork(first_token_s=0.25), 500, 1) == {"second_turn_ms": pytest.approx(250.0)}
    with pytest.raises(Failed, match="the conversation broke off: no slot"):
        real.second_turn(Clockwork(error="no slot"), 500, 1)


def test_all_engines_of_a_released_model_answer_the_same_lines_of_tokens_that_fit_their_slots() -> None:
    assert list(real.LINES) == ["a", "b", "f"]
    assert real.ENGINES["weft"].lines == real.ENGINES["llama"].lines == "abf"
    assert real.SECOND.tokens_max < SHARED.prompt_tokens


def test_a_gguf_file_is_read_by_all_engines_as_it_is(tmp_path: Path) -> None:
    file, server = tmp_path / "model.gguf", tmp_path / "bin" / "llama-server"
    server.parent.mkdir()
    server.touch()
    file.touch()
    checkpoint = Checkpoint("smollm2", "135m", "bfloat16", file, vocab_size=500, parameters=1)
    assert as_gguf(Bench(checkpoint, Environment(tmp_path), threads=1, limit_s=1.0), "bf16") == file


def test_no_two_lines_of_any_rounds_send_the_same_tokens() -> None:
    seeds = [serve.seed_of(line, number) for line in "abcdef" for number in range(20)]
    assert len(set(seeds)) == len(seeds)
    assert min(abs(a - b) for a in seeds for b in seeds if a != b) >= 1000


def test_the_wheels_requirements_come_without_torchs_family_and_extras() -> None:
    asked = [
        "regex",
        "torch==2.13.0+cpu; platform_machine == 'x86_64'",
        "torchvision",
        "torchaudio; os == 'x'",
        "torchcodec>=0.14",
        'av; extra == "audio"',
        "transformers<5.20.0,>=5.16.1",
        "torch-like>=1",
    ]
    assert wanted(asked) == ["regex", "transformers<5.20.0,>=5.16.1", "torch-like>=1"]


def test_an_engine_that_is_not_installed_says_how_to_install_it(tmp_path: Path) -> None:
    with pytest.raises(Absent, match=r"make it with: python -m benchmarks.peers.make_env"):
        Environment(tmp_path).python()
    with pytest.raises(Absent, match="--llama"):
        Environment(tmp_path).llama_server()


def test_children_do_not_inherit_what_steers_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("WEFT_MEMORY", "1GiB")
    monkeypatch.setenv("PLAIN", "stays")
    found = clean_variables()
    assert found["PLAIN"] == "stays"
    assert not {"OMP_NUM_THREADS", "WEFT_MEMORY"} & set(found)


def test_decode_speed_leaves_the_prompt_out_and_prefill_is_the_first_token() -> None:
    found = single(Clockwork(first_token_s=2.0, between_s=0.05), 500, 0)
    assert found["decode_tokens_per_s"] == pytest.approx(20.0)
    assert found["prefill_tokens_per_s"] == pytest.approx(256.0)


def test_a_conversations_later_turns_are_told_from_its_first() -> None:
    class SlowOpening(Clockwork):
        def talk(self, talk: Talk) -> list[list[Timing]]:
            talks = super().talk(talk)
            for one in talks:
                one[0].chunks = [(when + 5.0, count) for when, count in one[0].chunks]
            return talks

    found = conversations(SlowOpening(first_token_s=0.5), 500, 0)
    assert found["later_first_token_s"] == pytest.approx(0.5)
    assert found["seconds"] == pytest.approx(50.0 + 0.5 + 31 * 0.1)


def test_a_conversation_that_broke_off_is_no_figure() -> None:
    with pytest.raises(Failed, match="too busy"):
        conversations(Clockwork(error="too busy"), 500, 0)


def test_a_talk_is_a_function_of_its_seed_and_turns_differ() -> None:
    said = [Talk(vocab_size=800).said(number, turn) for number in range(3) for turn in range(4)]
    assert said == [Talk(vocab_size=800).said(number, turn) for number in range(3) for turn in range(4)]
    assert len({tuple(one) for one in said}) == 12
    assert [len(one) for one in said[:4]] == [320, 64, 64, 64]


def test_a_promise_is_kept_by_the_first_token_and_by_the_mean_gap() -> None:
    promise = Promise(first_token_s=1.0, between_tokens_s=0.2)
    assert promise.kept(Timing(0.0, [(1.0, 1), (1.2, 1)]))
    assert not promise.kept(Timing(0.0, [(1.1, 1), (1.2, 1)]))
    assert not promise.kept(Timing(0.0, [(0.5, 1), (0.9, 1)]))
    assert promise.kept(Timing(0.0, [(0.5, 1)]))
    assert not promise.kept(Timing(0.0, [(0.5, 1)], error="gone"))


def test_goodput_is_the_best_rate_and_the_sweep_ends_when_promises_break() -> None:
    quick, slow = Clockwork(first_token_s=0.5, between_s=0.01), Clockwork(first_token_s=9.0)
    rates = (1.0, 2.0, 4.0)
    found = goodput(quick, 500, 0, rates=rates, promise=Promise())
    assert [plan.request_rate for plan in quick.plans] == [1.0, 2.0, 4.0]
    assert found["goodput_per_s"] > 2.0
    assert goodput(slow, 500, 0, rates=rates, promise=Promise()) == {"goodput_per_s": 0.0}
    assert [plan.request_rate for plan in slow.plans] == [1.0]


def test_short_answers_are_a_failure_not_a_fast_engine() -> None:
    class Short(Clockwork):
        def answer(self, sent: float, output_tokens: int) -> Timing:
            return super().answer(sent, output_tokens - 1)

    with pytest.raises(Failed, match="do not have 64 tokens"):
        lines((1.0,), Promise())["a"].run(Short(), 500, 0)


def test_an_engine_that_breaks_off_does_not_end_the_run(tmp_path: Path) -> None:
    """The absent one is a reason, the broken line too; the others have their figures."""
    started: list[str] = []

    def starting(name: str, side: Side | None) -> Setting:
        @contextmanager
        def start(bench: Bench) -> Iterator[Side]:
            started.append(name)
            if side is None:
                raise Absent("not here")
            yield side

        return Setting(name, start, lines="ab")

    def breaks(side: Side, vocab_size: int, seed: int) -> dict[str, float]:
        raise Failed("took too long")

    settings = {"weft": starting("weft", Clockwork()), "absent": starting("absent", None)}
    asked = {
        "a": Line("one", breaks, {"x": True}),
        "b": Line("two", single, {"decode_tokens_per_s": True}),
        "c": Line("not its line", breaks, {"x": True}),
    }
    results = serve.measure(bench(tmp_path), settings, asked, rounds=3, say=lambda line: None)
    assert results.trouble == {"weft": {"a": "took too long"}, "absent": {"a": "not here", "b": "not here"}}
    found = results.medians("weft", "b")
    assert found is not None
    assert found["decode_tokens_per_s"] == pytest.approx(10.0)
    assert results.medians("weft", "a") is None
    assert started == ["weft", "absent", "weft", "weft"], "who is not here is not started again"
    rows = "\n".join(serve.table(results, settings, asked, "weft"))
    assert "absent (a,b): not here" in rows
    assert "failed" in rows


def test_both_schedulers_are_asked_in_turn_and_who_is_first_alternates() -> None:
    calls: list[str] = []

    def answering(name: str) -> float:
        calls.append(name)
        return 1.0

    rows = in_turn(
        {"decode": {"weft": lambda: answering("weft"), "vllm": lambda: answering("vllm")}}, 2, lambda line: None
    )
    assert calls == ["weft", "vllm", "vllm", "weft"]
    assert rows == {"decode": {"weft": [1.0, 1.0], "vllm": [1.0, 1.0]}}


def test_the_cause_of_a_failed_start_is_the_first_error_and_not_a_warning() -> None:
    log = io.StringIO(
        "loading\nWARNING may cause OSError: many files\nRuntimeError: no such layer\n"
        "RuntimeError: initialization failed\n"
    )
    assert last_error(log) == "RuntimeError: no such layer"
    assert last_error(io.StringIO("")) == "it said nothing"


def test_tokens_of_llamas_own_endpoint_are_counted() -> None:
    bodies = []

    def answer(request: httpx.Request) -> httpx.Response:
        bodies.append((request.url.path, json.loads(request.content)))
        chunks = [
            {"content": " a", "tokens": [5], "stop": False},
            {"content": " b", "tokens": [6], "stop": False},
            {"content": "", "tokens": [], "stop": True},
        ]
        return httpx.Response(200, text="".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks))

    plan = LoadPlan(requests=1, prompt_tokens=3, output_tokens=2, concurrency=1, vocab_size=500)
    summary, [timing] = asyncio.run(
        run_load("http://x", plan, model="m", endpoint_format=LLAMA, transport=httpx.MockTransport(answer))
    )
    assert timing.tokens == [5, 6]
    assert summary.failed == 0
    [(path, body)] = bodies
    assert path == "/completion"
    assert (body["prompt"], body["n_predict"], body["temperature"]) == (plan.prompts()[0], 2, 0.0)


def test_every_setting_answers_to_a_line_that_there_is() -> None:
    assert set("".join(setting.lines for setting in SETTINGS.values())) == set(lines((1.0,), Promise()))
