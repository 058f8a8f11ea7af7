"""The server's end of the process that reads pictures (``weft.images.worker``).

    ImagePart, ImagePart --one after another--> worker --> Picture, Picture | RequestError that names the part
                 '-- https: the bytes of its file first (weft.server.media)

The line before the worker is bounded (law L11), and so is the number of pictures of a request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from weft.errors import EngineUnavailableError, RequestError
from weft.images.decoding import ImageLimits
from weft.images.picture import Picture
from weft.images.settings import ImageSettings
from weft.images.worker import FILE, URL, PictureStart, decoded
from weft.text.pictures import ImagePart
from weft.text.worker_main import JobFunction
from weft.text.workers import BoundedWorker, WorkerLane

if TYPE_CHECKING:
    from weft.server.media import MediaFetcher

LINE_MAX = 64
_START_WITHIN_S = 10.0


class PictureReader:
    """``token``: the model's image token, as text. ``media`` None: pictures at addresses are refused."""

    def __init__(self, settings: ImageSettings, limits: ImageLimits, *, token: str, seconds: float,
                 memory_bytes: int, pictures_max: int, media: MediaFetcher | None = None) -> None:
        self.token = token
        self._media = media
        self._seconds = seconds
        self._pictures_max = pictures_max
        function = JobFunction("weft.images.worker:prepare", memory_bytes)
        start = msgspec.msgpack.encode(PictureStart(settings, limits))
        self._lane = WorkerLane(lambda: _started(function, start), seconds)

    async def read(self, images: Sequence[ImagePart]) -> list[Picture]:
        """Raises RequestError that names the part, EngineUnavailableError where too many wait."""
        if len(images) > self._pictures_max:
            raise RequestError(
                f"the conversation has {len(images)} pictures; the limit is {self._pictures_max} "
                "(limits.images)", param=images[self._pictures_max].where)
        return [await self._read(image) for image in images]

    async def _read(self, image: ImagePart) -> Picture:
        url = image.source
        assert isinstance(url, str), "no file comes over HTTP"
        try:
            if not url[:6].lower().startswith(("http:", "https:")):
                return await self._decoded(URL + url.encode("utf-8", "surrogatepass"))
            if self._media is None:
                raise RequestError(f"the picture is at {url[:100]!r}; this server fetches none (it has "
                                   "no --media-domains): send it as a data: URL")
            async with self._media.running:
                return await self._decoded(FILE + await self._media.fetch(url))
        except RequestError as error:
            raise RequestError(f"{image.where}: {error.message}", param=image.where,
                               code="invalid_image") from None
        except TimeoutError:
            raise RequestError(f"{image.where}: the picture takes more than {self._seconds:g} s to read "
                               "(limits.image_seconds)", param=image.where, code="invalid_image") from None
        except OSError:
            raise RequestError(f"{image.where}: the picture ended the process that read it",
                               param=image.where, code="invalid_image") from None

    async def _decoded(self, job: bytes) -> Picture:
        if self._lane.waiting >= LINE_MAX:
            raise EngineUnavailableError(f"{self._lane.waiting} pictures wait to be read; the limit is "
                                         f"{LINE_MAX}. Try again later")
        return await asyncio.to_thread(decoded, await self._lane.ask(job))


def _started(function: JobFunction, start: bytes) -> BoundedWorker:
    worker = BoundedWorker(function, start)
    worker.receive(0, _START_WITHIN_S)
    return worker
