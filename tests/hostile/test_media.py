"""Pictures at addresses: no socket goes where it must not, whatever names, redirects and hosts say.

A resolver of the test answers for every name. Sockets are opened by a backend that writes down each address,
and leads the public ones to a real TLS server on loopback.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ipaddress
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpcore
import pytest

from tests.fixtures.vision_checkpoints import vision_settings, vision_start
from tests.support.certificates import make_certificate
from tests.support.pictures import drawn, encoded
from weft.errors import ConfigError, EngineUnavailableError, RequestError
from weft.images.decoding import ImageLimits
from weft.images.picture import Picture
from weft.images.video import Sampling
from weft.images.worker import PictureStart, read_picture, read_video
from weft.server import media
from weft.server.media import MediaFetcher, _CheckedDial, is_public, read_domains
from weft.server.pictures import PictureReader
from weft.text.pictures import PicturePart

PUBLIC, OTHER = "93.184.216.34", "2606:2800:220:1:248:1893:25c8:1946"
NAMES = {
    "img.example.org": [PUBLIC],
    "cdn.example.org": [OTHER],
    "inside.example.org": ["10.0.0.7"],
    "elsewhere.test": [PUBLIC],
    "wrong-name.example.org": [PUBLIC],
    "silent.example.org": [],
}
PNG = encoded(drawn("photo", 90, 60))
BYTES_MAX = 1 << 20
REFUSED = [
    "127.0.0.1", "127.255.255.254", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254",
    "169.254.0.1", "100.64.0.1", "100.100.100.200", "168.63.129.16", "192.0.0.192", "198.18.0.1",
    "224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255", "192.0.2.1", "::1", "::", "fe80::1",
    "fe80::1%lo", "fc00::1", "fd00:ec2::254", "ff02::1", "ff0e::1", "::ffff:127.0.0.1",
    "::ffff:169.254.169.254", "::ffff:93.184.216.34", "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b:1::a00:1",
    "2002:7f00:1::", "2002:a9fe:a9fe::1", "2001:0:1::1", "2001:db8::1", "no number"]  # fmt: skip


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        redirects = {
            "/inside": "https://inside.example.org/cat.png",
            "/file": "file:///etc/passwd",
            "/plain": "http://img.example.org/cat.png",
            "/port": "https://img.example.org:8443/",
            "/elsewhere": "https://elsewhere.test/cat.png",
            "/loop": "/loop",
            "/cdn": "//cdn.example.org/cat.png",
            "/number": "https://[::ffff:169.254.169.254]/latest/meta-data",
        }
        if self.path in redirects:
            self.send_response(302)
            self.send_header("Location", redirects[self.path])
            self.end_headers()
        elif self.path == "/huge":
            self._answer(b"", {"Content-Length": str(BYTES_MAX + 1)})
        elif self.path == "/endless":
            self._answer(b"", {})
            with_errors_ignored(lambda: self._for_ever(bytes(1 << 16), 0.0))
        elif self.path == "/slow":
            self._answer(b"", {"Content-Length": "1000000"})
            with_errors_ignored(lambda: self._for_ever(b"x", 0.05))
        elif self.path == "/gone":
            self.send_error(404)
        else:  # the media type and the name lie
            data = PNG if "cat" in self.path else b"<svg xmlns='http://www.w3.org/2000/svg'/>"
            self._answer(data, {"Content-Type": "text/html", "Content-Length": str(len(data))})

    def _answer(self, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(200)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def _for_ever(self, piece: bytes, apart_s: float) -> None:
        """Until the client has gone."""
        while True:
            self.wfile.write(piece)
            self.wfile.flush()
            time.sleep(apart_s)

    def log_message(self, *_: Any) -> None:
        pass


def with_errors_ignored(write: Callable[[], Any]) -> None:
    with contextlib.suppress(OSError):  # the client has gone, as it should
        write()


class Sockets(httpcore.AnyIOBackend):
    """``dialled``: every address that a socket was opened to."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self.dialled: list[str] = []
        self._port = port

    async def connect_tcp(self, host: str, port: int, *more: Any, **named: Any) -> httpcore.AsyncNetworkStream:
        self.dialled.append(host)
        assert port == 443
        return await super().connect_tcp("127.0.0.1", self._port)


class Tls:
    def __init__(self, port: int, trust: ssl.SSLContext) -> None:
        self.port = port
        self.trust = trust

    def fetcher(
        self, domains: Sequence[str] = ("*.example.org",), *, seconds: float = 5.0, names: Any = None
    ) -> tuple[MediaFetcher, Sockets, list[str]]:
        """The fetcher, its sockets, and the names that were resolved."""
        asked: list[str] = []

        def resolve(host: str, port: int) -> list[str]:
            asked.append(host)
            return (names or NAMES.__getitem__)(host)  # type: ignore[no-any-return]

        sockets = Sockets(self.port)
        return (
            MediaFetcher(
                domains, bytes_max=BYTES_MAX, seconds=seconds, resolve=resolve, backend=sockets, trust=self.trust
            ),
            sockets,
            asked,
        )


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tls]:
    file = tmp_path_factory.mktemp("tls") / "cert.pem"
    make_certificate(file, ["img.example.org", "cdn.example.org", "inside.example.org"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield Tls(server.server_address[1], ssl.create_default_context(cafile=str(file)))
    server.shutdown()
    server.server_close()


def fetched(fetcher: MediaFetcher, url: str) -> bytes:
    async def data() -> bytes:
        async with fetcher.file(url) as held:
            return held

    return asyncio.run(data())


def refusal(fetcher: MediaFetcher, url: str) -> str:
    with pytest.raises(RequestError) as caught:
        fetched(fetcher, url)
    assert "\n" not in caught.value.message
    return caught.value.message


def test_a_picture_of_an_allowed_host_is_fetched_from_the_address_that_was_checked(tls: Tls) -> None:
    fetcher, sockets, asked = tls.fetcher()
    assert fetched(fetcher, "HTTPS://IMG.example.org/cat.png?size=2#part") == PNG
    assert (sockets.dialled, asked) == ([PUBLIC], ["img.example.org"])
    assert fetched(fetcher, "https://cdn.example.org/cat") == PNG
    assert sockets.dialled[1:] == [OTHER]


@pytest.mark.parametrize("address", REFUSED)
def test_no_socket_is_opened_to_an_address_that_is_not_public(tls: Tls, address: str) -> None:
    """Nor where a public address stands beside it."""
    for addresses in ([address], [PUBLIC, address], [address, PUBLIC]):
        fetcher, sockets, _ = tls.fetcher(names=lambda host, found=addresses: found)
        assert "an address that is not public" in refusal(fetcher, "https://img.example.org/cat.png")
        assert sockets.dialled == []


def test_a_host_that_is_written_as_a_number_is_checked_like_a_name(tls: Tls) -> None:
    for host in ("127.0.0.1", "2130706433", "0x7f000001", "[::1]", "[::ffff:10.0.0.1]", "localhost"):
        fetcher = MediaFetcher(
            ["*"], bytes_max=BYTES_MAX, seconds=5, backend=(sockets := Sockets(tls.port)), trust=tls.trust
        )  # with the machine's own resolver
        assert "an address that is not public" in refusal(fetcher, f"https://{host}/latest/meta-data")
        assert sockets.dialled == []


def test_a_name_that_changes_its_address_behind_the_check_reaches_nothing(tls: Tls) -> None:
    answers = iter([[PUBLIC], ["127.0.0.1"], ["127.0.0.1"]])
    fetcher, sockets, asked = tls.fetcher(names=lambda host: next(answers))
    assert fetched(fetcher, "https://img.example.org/cat.png") == PNG
    assert (asked, sockets.dialled) == (["img.example.org"], [PUBLIC])


class DialByName(_CheckedDial):
    """The mistake: it checks an answer, and connects by name."""

    async def connect_tcp(self, host: str, port: int, *more: Any, **named: Any) -> httpcore.AsyncNetworkStream:
        assert all(map(is_public, self._resolve(host, port)))
        return await self._backend.connect_tcp(self._resolve(host, port)[0], port)


def test_the_same_name_reaches_loopback_where_the_connection_goes_by_name(tls: Tls, monkeypatch: Any) -> None:
    """The control of the test above."""
    monkeypatch.setattr("weft.server.media._CheckedDial", DialByName)
    answers = iter([[PUBLIC], ["127.0.0.1"]])
    fetcher, sockets, _ = tls.fetcher(names=lambda host: next(answers))
    fetched(fetcher, "https://img.example.org/cat.png")
    assert sockets.dialled == ["127.0.0.1"]


@pytest.mark.parametrize(
    ("path", "words", "dialled"),
    [
        ("/inside", "an address that is not public", [PUBLIC]),
        ("/number", "'::ffff:169.254.169.254', which --media-domains does not name", [PUBLIC]),
        ("/plain", "only by https", [PUBLIC]),
        ("/file", "only by https", [PUBLIC]),
        ("/port", "from port 443", [PUBLIC]),
        ("/elsewhere", "which --media-domains does not name", [PUBLIC]),
        ("/loop", "redirects more than 3 times", [PUBLIC] * 4),
        ("/gone", "answers 404", [PUBLIC]),
    ],
)
def test_each_redirect_is_checked_as_the_address_was(tls: Tls, path: str, words: str, dialled: list[str]) -> None:
    fetcher, sockets, _ = tls.fetcher()
    assert words in refusal(fetcher, f"https://img.example.org{path}")
    assert sockets.dialled == dialled


def test_a_redirect_to_another_allowed_host_is_followed(tls: Tls) -> None:
    fetcher, sockets, _ = tls.fetcher()
    assert fetched(fetcher, "https://img.example.org/cdn") == PNG
    assert sockets.dialled == [PUBLIC, OTHER]


def test_a_redirect_by_number_is_refused_where_every_host_is_allowed(tls: Tls) -> None:
    fetcher, sockets, _ = tls.fetcher(["*"], names=lambda host: NAMES.get(host, [host]))
    assert "an address that is not public" in refusal(fetcher, "https://img.example.org/number")
    assert sockets.dialled == [PUBLIC]


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://img.example.org/cat.png", "only by https"),
        ("https://img.example.org:22/", "from port 443"),
        ("https://img.example.org@elsewhere.test/", "without a user's name"),
        ("https://elsewhere.test/#.example.org", "which --media-domains does not name"),
        ("https://elsewhere.test\\.example.org/", "without blanks and backslashes"),
        ("https://img.example.org/a b", "without blanks"),
        ("https://img.example.org/\r\nHost: x", "without blanks"),
        ("https://img.example.org/\u00e9", "percent-encoded"),
        ("https://img.example.org/" + "a" * 9000, "8192"),
        ("https://example.org/cat.png", "which --media-domains does not name"),
        ("https://evilexample.org/cat.png", "which --media-domains does not name"),
        ("https:///cat.png", "which --media-domains does not name"),
        ("https://[::1/", "is not an address"),
        ("https://img.example.org:x/", "is not an address"),
    ],
)
def test_an_address_that_is_not_served_is_refused_before_its_name_is_resolved(tls: Tls, url: str, words: str) -> None:
    fetcher, sockets, asked = tls.fetcher()
    assert words in refusal(fetcher, url)
    assert (sockets.dialled, asked) == ([], [])


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("https://img.example.org/huge", "more than 1.0 MiB (limits.image_bytes)"),
        ("https://img.example.org/endless", "more than 1.0 MiB (limits.image_bytes)"),
        ("https://img.example.org/slow", "more than 0.5 s to fetch (limits.image_seconds)"),
        ("https://wrong-name.example.org/cat.png", "its certificate is not trusted"),
        ("https://silent.example.org/cat.png", "has no address"),
    ],
)
def test_a_host_costs_no_more_than_the_limits(tls: Tls, url: str, words: str) -> None:
    """The endless and the slow one send for ever: that the fetch ends at all is its limit."""
    fetcher, _, _ = tls.fetcher(seconds=0.5)
    assert words in refusal(fetcher, url)


@pytest.mark.parametrize(("per_host", "waits"), [(media.HOST_FETCHES_MAX, False), (media.FETCHES_MAX, True)])
def test_slow_hosts_do_not_hold_up_others(
    tls: Tls, monkeypatch: pytest.MonkeyPatch, per_host: int, waits: bool
) -> None:
    """Eight of them, asked for many files. The control: without a bound for each they fill the line."""
    monkeypatch.setattr(media, "HOST_FETCHES_MAX", per_host)
    opened = asyncio.Event()

    class Silent(Sockets):
        async def connect_tcp(self, host: str, *more: Any, **named: Any) -> httpcore.AsyncNetworkStream:
            if host == PUBLIC:
                return await super().connect_tcp(host, *more, **named)
            await opened.wait()
            raise httpcore.ConnectError

    fetcher = MediaFetcher(
        ["*"],
        bytes_max=BYTES_MAX,
        seconds=30,
        backend=Silent(tls.port),
        trust=tls.trust,
        resolve=lambda host, port: [PUBLIC if host == "img.example.org" else OTHER],
    )

    async def data(url: str) -> bytes:
        async with fetcher.file(url) as held:
            return held

    async def run() -> None:
        slow = [asyncio.create_task(data(f"https://slow{number % 8}.test/{number}")) for number in range(64)]
        await asyncio.sleep(0)
        quick = asyncio.create_task(data("https://img.example.org/cat.png"))
        if waits:
            for _ in range(100):
                await asyncio.sleep(0.001)
            assert not quick.done()
            opened.set()
        assert await quick == PNG
        opened.set()
        ends = await asyncio.gather(*slow, return_exceptions=True)
        assert all(isinstance(end, RequestError) for end in ends)

    asyncio.run(run())


def test_files_that_wait_to_be_read_are_bounded(tls: Tls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media, "HELD_FILES", 1)
    fetcher, _, _ = tls.fetcher()
    fetcher._limits["image"] = (len(PNG) + 10, 5.0)

    async def run() -> None:
        async with fetcher.file("https://img.example.org/cat.png") as first:
            with pytest.raises(EngineUnavailableError, match="files that are fetched have"):
                async with fetcher.file("https://cdn.example.org/cat.png"):
                    pass
            assert first == PNG
        async with fetcher.file("https://cdn.example.org/cat.png") as again:
            assert again == PNG
        assert fetcher._held == 0

    asyncio.run(run())


def test_a_fetched_picture_is_what_the_same_picture_is_in_the_request(tls: Tls) -> None:
    settings, limits = vision_settings("lfm2_vl"), ImageLimits()
    fetcher, _, _ = tls.fetcher()
    reader = PictureReader(
        PictureStart(settings, limits),
        tokens={"image": "<image>"},
        seconds={"image": 10, "video": 10},
        memory_bytes=1 << 30,
        pictures_max=4,
        media=fetcher,
    )

    async def read(url: str) -> list[Picture]:
        return await reader.read([PicturePart(url, "messages[0].content[0]")])

    assert [one.digest for one in asyncio.run(read("https://img.example.org/cat"))] == [
        read_picture(PNG, settings, limits).digest
    ]
    with pytest.raises(RequestError, match="in no known format"):
        asyncio.run(read("https://img.example.org/dog.png"))


def test_frames_and_files_of_videos_are_fetched(tls: Tls) -> None:
    start, (fetcher, sockets, _) = vision_start("qwen3_5_vl"), tls.fetcher()
    reader = PictureReader(
        start,
        tokens={"image": "<|image_pad|>", "video": "<|video_pad|>"},
        seconds={"image": 10, "video": 10},
        memory_bytes=1 << 30,
        pictures_max=4,
        media=fetcher,
    )

    def read(source: str | list[str | bytes]) -> Picture:
        part = PicturePart(source, "messages[0].content[0]", kind="video")
        return asyncio.run(reader.read([part]))[0]

    inline = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
    assert read(["https://img.example.org/cat", inline]).digest == read_video([PNG, PNG], Sampling(), start).digest
    with pytest.raises(RequestError, match="the video is in no known format"):
        read("https://img.example.org/cat.mp4")
    assert sockets.dialled == [PUBLIC] * 2
    with pytest.raises(RequestError, match=r"'elsewhere.test', which --media-domains does not name"):
        read([inline, "https://elsewhere.test/cat.png"])
    assert fetcher._held == 0


def test_hosts_are_read_as_names(tls: Tls) -> None:
    assert read_domains(["Example.org.,*.a.test", "*"]) == ("example.org", "*.a.test", "*")
    for wrong in ("https://example.org", "example.org/x", "exa*mple.org", "", "a..b", "example.org:443"):
        with pytest.raises(ConfigError, match="--media-domains"):
            read_domains([wrong])
    fetcher, _, _ = tls.fetcher(["img.example.org"])
    assert "does not name" in refusal(fetcher, "https://cdn.example.org/cat.png")
    assert ipaddress.ip_address(PUBLIC).is_global
