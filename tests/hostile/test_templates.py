"""A chat template that is endless or huge for some messages, beside a client that is well-behaved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.hostile.bystander import bystander, rss_of, rss_returns
from tests.server.running import RunningServer, running_server
from tests.server.scripted_engine import write_model_directory
from tests.unit.text.test_template_sandbox import PLAIN, SWITCH

HELLO = {"messages": [{"role": "user", "content": "say:x"}], "max_tokens": 2}
SERVER = {"template_seconds": 1.0, "template_memory": "128MiB", "template_chars": 1_000_000}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = write_model_directory(tmp_path_factory.mktemp("hostile"), template=SWITCH)
    with running_server("build", engine={"model": str(directory)}, server=SERVER) as running:
        yield running


@pytest.mark.parametrize("word", ["loop", "many", "huge"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_a_hostile_template_disturbs_no_completion_and_no_health_check(
    server: RunningServer, word: str, path: str
) -> None:
    before_bytes = rss_of(server.process.pid)
    with bystander(server) as other:
        attack = {"messages": [{"role": "user", "content": word}]}
        answer = httpx.post(server.url + path, json=attack, timeout=30)
        assert server.get("/health").status_code == 200
    assert answer.status_code == 400, answer.text[:300]
    assert answer.json()["error"]["param"] == "messages"
    other.check()
    assert rss_returns(server.process.pid, before_bytes)
    hello = httpx.post(server.url + path, json=HELLO, timeout=30)
    assert hello.status_code == 200


def test_endless_loops_of_short_operations_disturb_no_completion(tmp_path: Path) -> None:
    loops = "{% for a in messages %}" * 8 + "x" + "{% endfor %}" * 8
    directory = write_model_directory(
        tmp_path, template="{% if messages[0].content == 'loop' %}" + loops + "{% endif %}" + PLAIN
    )
    roles = ("user", "assistant") * 100  # messages of one role in a row would be one message
    attack = {"messages": [{"role": role, "content": "loop"} for role in roles] + [{"role": "user", "content": "go"}]}
    with running_server("build", engine={"model": str(directory)}, server=SERVER) as running:
        with bystander(running) as other:
            for _ in range(2):
                answer = httpx.post(running.url + "/tokenize", json=attack, timeout=30)
                assert answer.status_code == 400, answer.text[:300]
        other.check()
        assert httpx.post(running.url + "/tokenize", json=HELLO, timeout=30).status_code == 200


def test_a_large_conversation_does_not_delay_small_ones(server: RunningServer) -> None:
    large = {"messages": [{"role": "user", "content": "loop"}, {"role": "user", "content": "y" * 1_000_000}]}
    with bystander(server, path="/v1/chat/completions", body=HELLO) as other:
        answer = httpx.post(server.url + "/v1/chat/completions", json=large, timeout=30)
    assert answer.status_code == 400
    other.check()


def test_a_template_that_folds_a_huge_constant_ends_the_start_with_a_clear_line(tmp_path: Path) -> None:
    directory = write_model_directory(tmp_path, template="{{ 10 ** (10 ** 9) }}" + SWITCH)
    # It would compute for as long as it may: a second, and ten for the start, which are a half here.
    (tmp_path / "sitecustomize.py").write_text(
        "import weft.text.template_sandbox\nweft.text.template_sandbox._START_WITHIN_S = 0.5\n"
    )
    with running_server(
        "build", engine={"model": str(directory)}, server=SERVER, path=(tmp_path,), wait_for="listening"
    ) as running:
        code = running.exit_code(30)
        output = running.rest_of_output()
    assert code == 2, output
    assert "Traceback" not in output
    assert "error: the chat template takes more than 1.5 s to compile" in output
