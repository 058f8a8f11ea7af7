"""Grammars that crash, stall or fill the compiler, beside a client that is well-behaved."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.hostile.bystander import bystander, rss_of, rss_returns
from tests.server.running import RunningServer
from tests.unit.text.test_grammar_sandbox import reference_chain, rule_chain, slow_schema
from weft.text.grammar_limits import CHOICES_MAX

ENGINE = {"grammar_seconds": 2}  # what is allowed takes 0.15 on a fast CPU, and up to 1 on a busy Zen 3
GBNF_CHAIN = "root ::= r0\n" + "".join(f"r{at} ::= r{at + 1}\n" for at in range(5000)) + 'r5000 ::= "x"\n'
REFERENCES = {"type": "json_schema", "json_schema": {"name": "a", "schema": reference_chain(2600)}}
HI = [{"role": "user", "content": "say:x"}]
ATTACKS: dict[str, dict[str, Any]] = {
    "references": {"prompt": "say:x", "guided_json": reference_chain(2600)},
    "references in a chat": {"messages": HI, "response_format": REFERENCES},
    "rules": {"prompt": "say:x", "guided_grammar": rule_chain(3000)},
    "GBNF": {"prompt": "say:x", "guided_grammar": GBNF_CHAIN},
    "choices": {"prompt": "say:x", "guided_choice": [f"choice number {at}" for at in range(100_000)]},
    "time": {"prompt": "say:x", "guided_json": slow_schema()},
}


def post(server: RunningServer, body: dict[str, Any]) -> httpx.Response:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    return httpx.post(server.url + path, json=body, timeout=60)


@pytest.mark.parametrize("name", ATTACKS)
def test_a_hostile_grammar_is_a_400_and_disturbs_no_other_client(server: RunningServer, name: str) -> None:
    engine, before_bytes = server.engine_pid(), 0
    post(server, {"prompt": "say:x", "guided_choice": ["x"], "max_tokens": 2})
    before_bytes = rss_of(engine)
    with bystander(server) as other:
        answers = [post(server, ATTACKS[name]) for _ in range(2)]
    for answer in answers:
        assert answer.status_code == 400, answer.text[:300]
        error = answer.json()["error"]
        assert error["code"] == "invalid_grammar"
        assert not any(word in error["message"] for word in ("panic", "backtrace", ".rs", "/src"))
    other.check()
    assert rss_returns(engine, before_bytes)


def test_choices_of_another_client_do_not_wait_for_slow_grammars(server: RunningServer) -> None:
    slow: dict[str, Any] = {"prompt": "say:x", "guided_json": slow_schema(8001), "max_tokens": 2}
    with ThreadPoolExecutor(2) as threads:
        attacks = [threads.submit(post, server, slow) for _ in range(2)]
        small = {"prompt": "say:b", "guided_choice": ["a", "b"], "max_tokens": 3}
        with bystander(server, body=small) as other:
            threading.Event().wait(1.0)
        assert [attack.result().status_code for attack in attacks] == [400, 400]
    other.check()


def test_as_many_choices_as_are_allowed_are_compiled(server: RunningServer) -> None:
    choices = [f"choice number {at}" for at in range(CHOICES_MAX)]
    answer = post(server, {"prompt": "say:choice number 7", "guided_choice": choices, "max_tokens": 3})
    assert answer.status_code == 200, answer.text[:300]
