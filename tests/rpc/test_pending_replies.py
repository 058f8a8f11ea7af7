"""Questions to an engine: each gets its reply, or the error of an engine that is gone."""

from __future__ import annotations

import signal

import msgspec
import pytest

from weft.errors import EngineUnavailableError
from weft.host import exit_reason
from weft.rpc.client import PendingReplies
from weft.rpc.messages import Reply


async def test_an_engine_that_is_gone_fails_the_questions_that_have_no_reply() -> None:
    pending = PendingReplies()
    with pending.expect() as (first, answered), pending.expect() as (second, open_one):
        assert first != second
        pending.resolve(Reply(number=first, value=msgspec.Raw(b"7")))
        pending.fail_all(EngineUnavailableError("it is gone"))
        pending.resolve(Reply(number=second, value=msgspec.Raw(b"8")))
        assert bytes(await answered) == b"7"
        with pytest.raises(EngineUnavailableError, match="it is gone"):
            await open_one
    pending.resolve(Reply(number=first, value=msgspec.Raw(b"9")))  # a reply that comes late is dropped


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (0, "ended with code 0"),
        (3, "ended with code 3"),
        (-signal.SIGHUP, "was ended by SIGHUP"),
        (-signal.SIGSEGV, "was ended by SIGSEGV"),
        (-signal.SIGKILL, "was ended by SIGKILL; the system may have run out of memory"),
        (-99, "was ended by 99"),
    ],
)
def test_the_end_of_a_process_is_said_with_its_signal_and_what_it_may_mean(code: int, said: str) -> None:
    assert exit_reason(code) == said
