"""Controls: a bystander sees a server that stands still, and one that refuses."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.hostile.bystander import bystander, rss_of, rss_returns
from tests.server.running import RunningServer


def test_an_idle_server_does_not_disturb_a_bystander(server: RunningServer) -> None:
    with bystander(server) as other:
        time.sleep(0.5)
    other.check()
    assert 0 < other.undisturbed_ms < 250


def test_a_server_that_stands_still_is_seen(server: RunningServer) -> None:
    with bystander(server) as other:
        time.sleep(0.2)
        os.kill(server.process.pid, signal.SIGSTOP)
        time.sleep(0.6)
        os.kill(server.process.pid, signal.SIGCONT)
        time.sleep(0.2)
    assert other.slowest_ms > 500
    other.stall_ms = other.undisturbed_ms = 0.0  # allow for nothing
    with pytest.raises(AssertionError):
        other.check()


def test_a_refusal_is_a_failure(server: RunningServer) -> None:
    with bystander(server, path="/nowhere") as other:
        time.sleep(0.2)
    with pytest.raises(AssertionError):
        other.check()


def test_memory_of_a_process_is_read() -> None:
    before = rss_of(os.getpid())
    assert before > 1_000_000
    assert rss_returns(os.getpid(), before)
    assert not rss_returns(os.getpid(), before // 2, limit_s=0)
