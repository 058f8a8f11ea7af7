"""The last lines of a measurement: what limits it and what to change, by its figures."""

from __future__ import annotations

from typing import Any

import pytest

from weft_tools.bench.diagnosis import EngineRun, LeastSeconds, ServerRun, of_engine, of_server

READS = LeastSeconds(0.1, 5.0, 1.0)
PROMPTS = LeastSeconds(5.0, 1.0, 0.5)
PRODUCTS = LeastSeconds(1.0, 2.0, 5.0)


@pytest.mark.parametrize(
    ("least", "facts", "limit", "faster"),
    [
        (READS, {"rows": 1}, "one request at a time", "--quantize int8; more requests at once, up to about 5"),
        (READS, {"rows": 8}, "memory bandwidth", "--quantize int8; more requests at once, up to about 40"),
        (
            READS,
            {"rows": 8, "quantize": "int8", "speculates": False},
            "memory bandwidth",
            "--quantize int4; more requests at once, up to about 40; --speculate auto",
        ),
        (
            LeastSeconds(0.1, 5.0, 5.0),
            {"rows": 8, "quantize": "int4"},
            "memory bandwidth",
            "a faster device, or a smaller model",
        ),
        (
            READS,
            {"rows": 8, "quantize": "int4", "threads": 2, "cores": 8},
            "memory bandwidth",
            "--threads 8; more requests at once, up to about 40",
        ),
        (PROMPTS, {"rows": 8}, "arithmetic, in the products of prompts", "prompts that begin alike"),
        (
            PROMPTS,
            {"rows": 8, "byte_gain": 2.0},
            "arithmetic, in the products of prompts",
            "--quantize w8a8; prompts that begin alike, with --prefix-cache",
        ),
        (PRODUCTS, {"rows": 64, "byte_gain": 2.0}, "arithmetic, in the products of decode", "--quantize w8a8"),
        (
            PRODUCTS,
            {"rows": 64, "byte_gain": 2.0, "quantize": "w8a8"},
            "arithmetic, in the products of decode",
            "a faster device, or a smaller model",
        ),
        (LeastSeconds(0.1, 0.5, 0.1), {"rows": 1}, "work other than weights and products", "more requests at once"),
        (LeastSeconds(0.1, 0.5, 0.1), {"rows": 1, "cpp_kernels": False}, "kernels of torch", "a C++ compiler"),
    ],
)
def test_a_run_of_the_engine_is_judged_by_its_longest_part(
    least: LeastSeconds, facts: dict[str, Any], limit: str, faster: str
) -> None:
    diagnosis = of_engine(EngineRun(10.0, least, **facts))
    assert diagnosis.limit.startswith(limit)
    assert diagnosis.faster.startswith(faster)
    share = f"{10 * least.total:.0f} % of this machine's: at least {least.total:.3g} of 10 s"
    assert diagnosis.ceilings.startswith(share)


def test_more_than_the_ceilings_is_explained() -> None:
    assert "several tokens" in of_engine(EngineRun(4.0, READS, 1)).ceilings
    assert "several tokens" not in of_engine(EngineRun(6.0, READS, 1)).ceilings


@pytest.mark.parametrize(
    ("run", "limit", "faster"),
    [
        (
            ServerRun(ttft=3.0, e2el=4.0, at_once=64, here=True, queued=2.5),
            "waiting in the queue, 2,500 of 4,000 ms a request",
            "more --max-num-seqs",
        ),
        (
            ServerRun(ttft=3.0, e2el=4.0, at_once=64, here=True, queued=0.5),
            "the time to the first token, 2,500 of 4,000 ms",
            "prompts that begin alike",
        ),
        (
            ServerRun(ttft=3.0, e2el=4.0, at_once=64, here=True),
            "the time to the first token, 3,000 of 4,000 ms a request; the server does not tell its queue",
            "prompts that begin alike",
        ),
        (
            ServerRun(ttft=1.0, e2el=4.0, at_once=1, here=True, queued=0.0),
            "one request at a time: 3,000 of 4,000 ms",
            "more requests at once",
        ),
        (
            ServerRun(ttft=1.0, e2el=4.0, at_once=16, here=True, queued=0.0),
            "decode steps of 16 requests at once, 3,000 of 4,000 ms",
            "--quantize int8",
        ),
        (
            ServerRun(ttft=3.0, e2el=4.0, at_once=64, here=True, queued=2.5, client_share=0.97),
            "this client: it had work for 97 % of the time",
            "several clients at once",
        ),
        (
            ServerRun(ttft=1.0, e2el=4.0, at_once=64, here=True, queued=0.0, client_share=0.4),
            "decode steps of 64 requests",
            "--quantize int8",
        ),
    ],
)
def test_a_load_on_a_server_is_judged_by_where_a_request_spends_its_time(
    run: ServerRun, limit: str, faster: str
) -> None:
    diagnosis = of_server(run)
    assert diagnosis.limit.startswith(limit)
    assert diagnosis.faster.startswith(faster)
    assert "--speculate" not in diagnosis.faster, "it is the default"


def test_ceilings_of_a_server_are_not_made_up() -> None:
    assert "`weft bench throughput`" in of_server(ServerRun(1.0, 2.0, 1, here=True)).ceilings
    assert of_server(ServerRun(1.0, 2.0, 1, here=False)).ceilings.endswith("machine is unknown")
