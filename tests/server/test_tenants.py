"""API keys as tenants: salts of their own, quotas, and cached_tokens that are hidden."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fixtures.checkpoints import checkpoint
from tests.server.running import RunningServer, running_server
from weft.errors import ConfigError
from weft.server.config import ServerConfig
from weft.server.tenants import Keys, Quotas, Tenant

ENGINE = {"model": str(checkpoint("qwen3_5")), "memory": "32MB", "threads": 1, "max_model_len": 1024}
MESSAGES = [
    {"role": "system", "content": "What one tenant sends, another must not see. " * 20},
    {"role": "user", "content": "say:ok"},
]


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("# clients\nfirst\n\n second \nthird\nbusy\nidle\n")
    return file


@pytest.fixture(scope="module")
def tenants(key_file: Path) -> Iterator[RunningServer]:
    settings = {
        "api_key_file": str(key_file),
        "tenant_by_key": True,
        "operator_key": ["boss"],
        "key_requests_per_minute": 12,
    }
    with running_server("", engine=ENGINE, server=settings) as running:
        yield running


def ask(server: RunningServer, key: str, **fields: Any) -> httpx.Response:
    return server.post(
        "/v1/chat/completions",
        {"messages": MESSAGES, "max_tokens": 4, **fields},
        headers={"Authorization": f"Bearer {key}"},
    )


def cached(response: httpx.Response) -> int:
    return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_two_keys_share_no_prefix_and_a_salt_stays_within_its_key(tenants: RunningServer) -> None:
    assert cached(ask(tenants, "first")) == 0
    assert cached(ask(tenants, "first")) > 0
    assert cached(ask(tenants, "second")) == 0
    assert cached(ask(tenants, "first", cache_salt="a")) == 0
    assert cached(ask(tenants, "first", cache_salt="a")) > 0
    assert cached(ask(tenants, "second", cache_salt="a")) == 0


def test_a_key_in_the_header_of_the_messages_api_is_the_same_tenant(tenants: RunningServer) -> None:
    assert cached(ask(tenants, "third")) == 0
    answer = tenants.post(
        "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 4}, headers={"x-api-key": "third"}
    )
    assert cached(answer) > 0
    assert tenants.get("/v1/models", headers={"x-api-key": "nope"}).status_code == 401


def test_a_spent_quota_is_a_429_for_its_key_alone(tenants: RunningServer) -> None:
    began_s, answered = time.monotonic(), 0
    while (answer := ask(tenants, "busy")).status_code == 200:
        answered += 1
        assert answered < 200
    refilled = (time.monotonic() - began_s) * 12 / 60
    assert 12 <= answered <= 12 + refilled, answer.text
    assert answer.status_code == 429, answer.text
    assert answer.json()["error"]["code"] == "rate_limit_exceeded"
    assert answer.json()["error"]["type"] == "rate_limit_error"
    assert 1 <= int(answer.headers["retry-after"]) <= 5
    assert ask(tenants, "idle").status_code == 200
    assert {ask(tenants, "boss").status_code for _ in range(15)} == {200}


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize("name", ["requests_per_minute", "tokens_per_minute", "bytes_in_flight"])
def test_each_quota_alone_is_one(name: str) -> None:
    assert Quotas(**{name: 1}).any
    assert not Quotas().any


def test_a_bucket_refills() -> None:
    clock = Clock()
    tenant = Tenant(b"a", Quotas(requests_per_minute=2), salts_its_own=False, clock=clock)
    assert [tenant.admit(0) is None for _ in range(3)] == [True, True, False]
    clock.now_s = 31.0
    assert [tenant.admit(0) is None for _ in range(2)] == [True, False]


def test_a_quota_of_a_minute_is_one_sixtieth_each_second() -> None:
    clock = Clock()
    tenant = Tenant(b"a", Quotas(requests_per_minute=60), salts_its_own=False, clock=clock)
    assert all(tenant.admit(0) is None for _ in range(60))
    clock.now_s = 1.0
    assert [tenant.admit(0) is None for _ in range(2)] == [True, False]


def test_a_new_key_has_its_whole_quota() -> None:
    tenant = Tenant(b"a", Quotas(requests_per_minute=1, tokens_per_minute=1), salts_its_own=False, clock=Clock())
    assert tenant.admit(0) is None


def test_a_request_that_another_process_admits_is_given_back() -> None:
    tenant = Tenant(b"a", Quotas(requests_per_minute=2, bytes_in_flight=100), salts_its_own=False, clock=Clock())
    assert tenant.admit(80) is None
    tenant.withdraw(80)
    assert [tenant.admit(80) is None, tenant.release(80), tenant.admit(80) is None] == [True, None, True]
    tenant.release(80)
    assert tenant.admit(0) is not None


def test_tokens_are_paid_for_afterwards() -> None:
    clock = Clock()
    tenant = Tenant(b"a", Quotas(tokens_per_minute=60), salts_its_own=False, clock=clock)
    assert tenant.admit(0) is None
    tenant.spend(90)
    refusal = tenant.admit(0)
    assert refusal is not None
    assert refusal.retry_after_s == 31
    clock.now_s = 31.5
    assert tenant.admit(0) is None


def test_bytes_in_flight_are_given_back() -> None:
    tenant = Tenant(b"a", Quotas(bytes_in_flight=100), salts_its_own=False)
    assert tenant.admit(80) is None
    assert tenant.admit(80) is not None
    tenant.release(80)
    tenant.release(80)
    assert tenant.admit(100) is None


def test_without_the_flag_a_salt_is_left_alone() -> None:
    tenant, is_operator = Keys(["a"], ["b"]).match("a")
    assert tenant is not None
    assert (tenant.salt("salt"), tenant.salt(None), is_operator) == ("salt", None, False)
    assert Keys(["a"], ["b"]).match("c") == (None, False)


@pytest.mark.parametrize(
    "settings", [{"tenant_by_key": True}, {"key_requests_per_minute": 5}, {"api_key_file": "/nowhere/keys"}]
)
def test_flags_that_need_keys_say_so(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--api-key"):
        ServerConfig(**settings).check()


def test_cached_tokens_can_be_hidden() -> None:
    with running_server("", engine=ENGINE, server={"hide_cached_tokens": True}) as own:
        assert cached(ask(own, "none")) == cached(ask(own, "none")) == 0
        assert "prompt_tokens_cached_total" in own.get("/metrics").text
