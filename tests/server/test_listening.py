"""Where a server listens besides a plain port: with TLS, and at a Unix socket."""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.running import RunningServer, eventually, running_server
from tests.server.scripted_engine import write_model_directory
from tests.support.certificates import make_certificate
from weft.cli.main import main
from weft.cli.remote import RemoteModel
from weft.errors import ConfigError
from weft.server.config import ServerConfig
from weft.server.connection import peer_is_owner
from weft.server.listening import listening, tls_context

TURN = {"model": "default", "stream": True, "max_tokens": 20, "messages": [{"role": "user", "content": "sing"}]}


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with two certificates, their keys, and one of the keys encrypted."""
    directory = tmp_path_factory.mktemp("pem")
    for name in ("own", "other"):
        make_certificate(directory / f"{name}.crt", ["localhost"], key_file=directory / f"{name}.key")
    make_certificate(directory / "both.pem", ["localhost"])
    make_certificate(directory / "secret.crt", ["localhost"], key_file=directory / "secret.key", password="sesame")
    return directory


def flags(pem: Path, **given: str) -> ServerConfig:
    """``given``: names in ``pem`` of the files of ssl flags."""
    return ServerConfig(**{f"ssl_{name}": str(pem / file) for name, file in given.items()})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"certfile": "own.crt"}, "--ssl-certfile .*own.crt: the file has no private key .*--ssl-keyfile"),
        ({"keyfile": "own.key"}, "--ssl-keyfile needs --ssl-certfile"),
        ({"ca_certs": "own.crt"}, "server.ssl_ca_certs needs --ssl-certfile"),
        ({"certfile": "none.crt", "keyfile": "own.key"}, "--ssl-certfile .*none.crt: no such file or directory"),
        ({"certfile": "own.crt", "keyfile": "none.key"}, "--ssl-keyfile .*none.key: no such file or directory"),
        (
            {"certfile": "own.key", "keyfile": "own.key"},
            "--ssl-certfile .*own.key: the file has no certificate in PEM form",
        ),
        ({"certfile": "own.crt", "keyfile": "own.crt"}, "--ssl-keyfile .*own.crt: the file has no private key"),
        (
            {"certfile": "own.crt", "keyfile": "other.key"},
            "other.key: this is not the key of the certificate .*own.crt",
        ),
        ({"certfile": "secret.crt", "keyfile": "secret.key"}, "the key is encrypted; .*WEFT_SSL_KEYFILE_PASSWORD"),
        ({"certfile": "both.pem", "ca_certs": "own.key"}, "server.ssl_ca_certs .*own.key: the file has no certificate"),
    ],
)
def test_a_certificate_that_cannot_work_is_one_line_that_names_the_flag(
    pem: Path, given: dict[str, str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        tls_context(flags(pem, **given))
    assert "\n" not in caught.value.message
    assert "Errno" not in caught.value.message


def test_the_password_of_a_key_opens_it_and_a_wrong_one_is_said(pem: Path) -> None:
    files: dict[str, Any] = {"ssl_certfile": str(pem / "secret.crt"), "ssl_keyfile": str(pem / "secret.key")}
    assert tls_context(ServerConfig(**files, ssl_keyfile_password="sesame")) is not None
    with pytest.raises(ConfigError, match="ssl_keyfile_password does not decrypt it"):
        tls_context(ServerConfig(**files, ssl_keyfile_password="millet"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"uds": "s", "port": 8000}, "--uds s and --port 8000 both name where to listen"),
        ({"uds": "s", "host": "0.0.0.0"}, "--uds s and --host 0.0.0.0 both name where"),
        ({"uds": " "}, "--uds is empty"),
        ({"uds": "s", "ssl_certfile": "c"}, "--ssl-certfile is for a port"),
        ({"uds": "s", "uds_mode": "rw"}, "server.uds_mode is 'rw'"),
    ],
)
def test_a_unix_socket_takes_no_flag_of_a_port(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ServerConfig(**given).check()


def test_a_socket_file_goes_with_its_server_and_one_that_nobody_answers_at_is_replaced(tmp_path: Path) -> None:
    file = tmp_path / "weft.sock"
    config = ServerConfig(uds=str(file), uds_mode="600")
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(file))
    with listening(config):
        assert file.stat().st_mode & 0o777 == 0o600
        with pytest.raises(ConfigError, match=r"another program listens there"), listening(config):
            pass
        assert file.is_socket(), "the second server took the file of the first"
    assert not file.exists()
    file.write_text("notes")
    with pytest.raises(ConfigError, match="it is not a socket"), listening(config):
        pass
    assert file.read_text() == "notes"
    with pytest.raises(ConfigError, match="at most 107 bytes"), listening(ServerConfig(uds=str(tmp_path / ("s" * 99)))):
        pass


def test_a_server_that_was_replaced_at_its_socket_leaves_the_file_of_the_new_one(tmp_path: Path) -> None:
    file = tmp_path / "weft.sock"
    with listening(ServerConfig(uds=str(file))), socket.socket(socket.AF_UNIX) as new:
        new.bind(str(tmp_path / "new.sock"))
        (tmp_path / "new.sock").rename(file)
    assert file.is_socket()


# ---------------------------------------------------------------------- TLS


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_directory(tmp_path_factory.mktemp("model"))


def test_two_http_workers_speak_tls_and_take_a_renewed_certificate(
    pem: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    certificate, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    certificate.write_bytes((pem / "own.crt").read_bytes())
    key.write_bytes((pem / "own.key").read_bytes())
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    settings = {"ssl_certfile": str(certificate), "ssl_keyfile": str(key), "http_workers": 2}
    with running_server("build", engine={"model": str(model)}, server=settings) as server:
        assert server.url.startswith("https://127.0.0.1:")
        url = server.url.replace("127.0.0.1", "localhost")
        trust = ssl.create_default_context(cafile=str(certificate))
        with httpx.Client(verify=trust) as client:
            with client.stream("POST", f"{url}/v1/chat/completions", json=TURN) as stream:
                assert "data: [DONE]" in list(stream.iter_lines())
            assert client.get(f"{url}/metrics").status_code == 200, "a worker passes it on to the supervisor"
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"{url}/health")
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.get(f"http{url.removeprefix('https')}/health")
        with pytest.raises(ConfigError, match=r"its certificate is not trusted .*SSL_CERT_FILE"):
            RemoteModel(url).names()
        assert main(["ps"]) == 0
        assert "scripted" in capsys.readouterr().out.splitlines()[1], (
            "it knows the certificate of its machine's servers"
        )
        certificate.write_bytes((pem / "other.crt").read_bytes())
        key.write_bytes((pem / "other.key").read_bytes())
        renewed = ssl.create_default_context(cafile=str(certificate))

        def is_renewed() -> bool:
            with suppress(httpx.ConnectError):
                return all(httpx.get(f"{url}/health", verify=renewed).status_code == 200 for _ in range(4))
            return False

        assert eventually(is_renewed)


def test_clients_need_a_certificate_where_their_authorities_are_named(pem: Path) -> None:
    server = tls_context(flags(pem, certfile="both.pem", ca_certs="own.crt"))
    assert server is not None
    client = ssl.create_default_context(cafile=str(pem / "both.pem"))
    with pytest.raises(ssl.SSLError, match="did not return a certificate"):
        shake_hands(client, server)
    client.load_cert_chain(pem / "other.crt", pem / "other.key")
    with pytest.raises(ssl.SSLError, match="certificate verify failed"):
        shake_hands(client, server)
    client = ssl.create_default_context(cafile=str(pem / "both.pem"))
    client.load_cert_chain(pem / "own.crt", pem / "own.key")
    shake_hands(client, server)


def shake_hands(client: ssl.SSLContext, server: ssl.SSLContext) -> None:
    """Raises SSLError of the side that refuses."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [client.wrap_bio(down, up, server_hostname="localhost"), server.wrap_bio(up, down, server_side=True)]
    for _ in range(4):
        for side in sides:
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()


# ---------------------------------------------------------------------- a Unix socket


@pytest.fixture(scope="module")
def at_socket(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    file = tmp_path_factory.mktemp("socket") / "weft.sock"
    settings = {
        "port": None,
        "uds": str(file),
        "max_connections_per_address": 1,
        "log_file": str(file.with_suffix(".log")),
    }
    with running_server("build", engine={"model": str(model)}, server=settings) as server:
        yield server


def through(server: RunningServer, **more: Any) -> httpx.Client:
    transport = httpx.HTTPTransport(uds=server.url.removeprefix("unix:"))
    return httpx.Client(transport=transport, base_url="http://localhost", **more)


def test_a_server_answers_at_a_unix_socket_and_its_commands_reach_it(
    at_socket: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    with through(at_socket) as client, client.stream("POST", "/v1/chat/completions", json=TURN) as stream:
        assert "data: [DONE]" in list(stream.iter_lines())
        with through(at_socket) as second:  # clients of a socket have no address that a limit could count
            assert second.get("/health").status_code == 200
    assert main(["ps", "--url", at_socket.url]) == 0
    assert "scripted" in capsys.readouterr().out
    assert RemoteModel(at_socket.url.replace("unix:", "unix://")).names() == ["scripted"]
    assert f"curl --unix-socket {at_socket.url.removeprefix('unix:')} http://localhost/v1" in at_socket.output
    with pytest.raises(ConfigError, match="nothing answers at unix:/none: no such file or directory"):
        RemoteModel("unix:/none").names()


def test_a_proxy_at_the_socket_says_where_its_clients_are(at_socket: RunningServer) -> None:
    """Who is on another machine operates nothing, and the log names the address."""
    with through(at_socket) as client:
        assert client.post("/reset_prefix_cache").status_code == 200
        far = client.post("/reset_prefix_cache", headers={"X-Forwarded-For": "203.0.113.7"})
        assert (far.status_code, far.json()["error"]["code"]) == (403, "operator_only")
    log = Path(at_socket.url.removeprefix("unix:")).with_suffix(".log")

    def said() -> list[str]:
        lines = log.read_text().splitlines()
        return [line for line in lines if "/reset_prefix_cache 403" in line and ", 203.0.113.7, " in line]

    assert eventually(lambda: len(said()) == 1), log.read_text()


def test_a_proxy_that_says_nothing_of_its_clients_operates_nothing(at_socket: RunningServer) -> None:
    """It passes on the name by which they know the server."""
    with through(at_socket) as client:
        far = client.post("/reset_prefix_cache", headers={"Host": "192.0.2.1"})
        assert (far.status_code, far.json()["error"]["code"]) == (403, "operator_only")
        assert client.get("/metrics", headers={"Host": "192.0.2.1"}).status_code == 200


def test_another_user_at_the_socket_operates_nothing(at_socket: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = socket.socketpair()
    with left, right:
        assert peer_is_owner(left)
        if os.geteuid():
            monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
            assert not peer_is_owner(left)
            return
    file = Path(at_socket.url.removeprefix("unix:"))
    for path in (file, *file.parents):
        if not path.stat().st_mode & 0o001:  # pytest's folders are of their owner alone
            path.chmod(0o777)
    asks = f"curl -s -X POST --unix-socket {file} http://localhost/reset_prefix_cache"
    nobody = subprocess.run(asks.split(), user="nobody", capture_output=True, text=True, check=True)
    assert '"code":"operator_only"' in nobody.stdout.replace(" ", "")
    own = subprocess.run(asks.split(), capture_output=True, text=True, check=True)
    assert "operator_only" not in own.stdout


def test_handshakes_that_never_end_are_counted_and_cut(pem: Path, model: Path) -> None:
    """Else they would take every descriptor of the server."""
    settings = {"ssl_certfile": str(pem / "both.pem"), "max_connections": 2, "header_timeout": 1.0}
    with running_server("build", engine={"model": str(model)}, server=settings) as server:
        url = server.url.replace("127.0.0.1", "localhost")
        trust = ssl.create_default_context(cafile=str(pem / "both.pem"))
        with ExitStack() as open_ones:
            address = ("127.0.0.1", int(url.rpartition(":")[2]))
            silent = [open_ones.enter_context(socket.create_connection(address, timeout=60)) for _ in range(12)]
            for one in silent[4:]:  # twice the limit may be open, so that refusals are read
                assert ended(one)
            with httpx.Client(verify=trust) as client:
                assert eventually(lambda: has_room(client, url)), "those within the limit have no longer than a header"
            for one in silent[:4]:
                assert ended(one)


def ended(one: socket.socket) -> bool:
    try:
        return one.recv(1) == b""
    except ConnectionResetError:
        return True


def has_room(client: httpx.Client, url: str) -> bool:
    with suppress(httpx.HTTPError):
        return client.get(f"{url}/health").status_code == 200
    return False
