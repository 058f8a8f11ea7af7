"""Token files, addresses, and what a server says to a machine of another version."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from weft.errors import ConfigError
from weft.rpc.link import LINK_VERSION, Hello, LinkKeys, new_token, read_or_create_token, read_token, tcp_address
from weft.rpc.listener import LinkListener, refusal_of
from weft.server.config import ServerConfig


def test_a_token_is_created_once_and_private(tmp_path: Path) -> None:
    file = tmp_path / "token"
    token, is_new = read_or_create_token(str(file))
    assert is_new
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert read_or_create_token(str(file)) == (token, False)
    assert read_token(str(file)) == token


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        ("x" * 43, 0o640, "mode 0640"),
        ("x" * 43, 0o604, "chmod 600"),
        ("short", 0o600, "it has 5 characters"),
        ("\n", 0o600, "0 characters"),
    ],
)
def test_a_token_that_cannot_be_used_is_refused(tmp_path: Path, text: str, mode: int, said: str) -> None:
    file = tmp_path / "token"
    file.write_text(text)
    file.chmod(mode)
    with pytest.raises(ConfigError, match=said) as refused:
        read_token(str(file))
    assert refused.value.param == "--token"


def test_a_missing_token_names_where_it_comes_from(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--listen-engines"):
        read_token(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="cannot be created"):
        read_or_create_token(str(tmp_path / "none" / "token"))


def test_keys_follow_from_the_token_and_differ_by_role() -> None:
    token = new_token()
    keys = LinkKeys.of(token)
    assert keys == LinkKeys.of(token)
    assert keys.server != keys.machine
    assert keys.server.public != LinkKeys.of(new_token()).server.public


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"listen_engines": "0.0.0.0:8100"}, "--token"),
        ({"listen_engines": "127.0.0.1:8100"}, "--token"),
        ({"token": "file"}, "--listen-engines"),
        ({"replicas": "0"}, "--replicas"),
        ({"listen_engines": "8100", "token": "file"}, "--listen-engines"),
        ({"listen_engines": "host:99999", "token": "file"}, "--listen-engines"),
    ],
)
def test_nothing_listens_for_engines_without_a_token(settings: dict[str, object], param: str) -> None:
    with pytest.raises(ConfigError) as refused:
        ServerConfig(**settings).check()  # type: ignore[arg-type]
    assert refused.value.param == param


def test_addresses_are_host_and_port() -> None:
    assert tcp_address("[::]:8100", flag="--listen-engines") == "tcp://[::]:8100"


def test_another_version_is_refused_with_both_versions() -> None:
    def hello(link_version: int, weft_version: str) -> Hello:
        return Hello(link_version=link_version, weft_version=weft_version, agent="a", attempt=1, host="far")

    refusal = refusal_of(hello(LINK_VERSION, "0.0.7")) or ""
    assert "far runs weft 0.0.7" in refusal
    assert "need one version" in refusal
    assert refusal_of(hello(LINK_VERSION + 1, "0.1.0")) is not None


async def test_an_address_that_is_taken_is_said_with_its_flag() -> None:
    def listener(address: str) -> LinkListener:
        return LinkListener(address, LinkKeys.of(new_token()), on_hello=lambda *_: None, on_leaving=lambda _: None)

    first = listener("tcp://127.0.0.1:0")
    first.bind()
    try:
        with pytest.raises(ConfigError, match=rf"^--listen-engines 127\.0\.0\.1:{first.port}: Address already in use$"):
            listener(f"tcp://127.0.0.1:{first.port}").bind()
    finally:
        await first.close("the test ends")
