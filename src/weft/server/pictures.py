"""The server's end of the process that reads pictures (``weft.images.worker``).

    PicturePart, PicturePart --one after another--> worker --> Picture, Picture | RequestError that names it
                     '-- https: the bytes of its file first (weft.server.media)

Videos take longer and have their own worker. The queue of each worker is bounded (law L11), and so is the number of
pictures of a request.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from weft.errors import RequestError
from weft.images.picture import Picture
from weft.images.video import Sampling
from weft.images.worker import FILE, URL, VIDEO, PictureStart, Source, VideoJob, decoded
from weft.request import PICTURE_KINDS, PictureKind
from weft.text.current_request import API_KEY
from weft.text.pictures import PicturePart
from weft.text.worker_main import JobFunction
from weft.text.workers import BoundedWorker, WorkerLane

if TYPE_CHECKING:
    from weft.server.media import MediaFetcher

LINE_MAX = 64
_START_WITHIN_S = 10.0


class PictureReader:
    """The reader of pictures of one model. ``tokens``: the model's picture tokens as text, by kind. ``seconds``,
    ``memory_bytes``: limits for reading one picture, by kind. ``media`` None: pictures at addresses are refused."""

    def __init__(
        self,
        start: PictureStart,
        *,
        tokens: Mapping[PictureKind, str],
        seconds: Mapping[PictureKind, float],
        memory_bytes: int,
        pictures_max: int,
        media: MediaFetcher | None = None,
    ) -> None:
        self.tokens = tokens
        self._limits = start.limits
        self._media = media
        self._seconds = seconds
        self._pictures_max = pictures_max
        function = JobFunction("weft.images.worker:prepare", memory_bytes)
        body = msgspec.msgpack.encode(start)
        self._lanes = {
            kind: WorkerLane(lambda: _started(function, body), seconds[kind], workers=2, line_max=LINE_MAX)
            for kind in PICTURE_KINDS
        }

    async def read(self, parts: Sequence[PicturePart]) -> list[Picture]:
        """Read ``parts`` in order. Raise RequestError that names the part, EngineUnavailableError if too many pictures
        wait."""
        if len(parts) > self._pictures_max:
            raise RequestError(
                f"the conversation has {len(parts)} pictures and videos; the limit is {self._pictures_max} "
                "(limits.images)",
                param=parts[self._pictures_max].where,
            )
        return [await self._read(part) for part in parts]

    async def _read(self, part: PicturePart) -> Picture:
        what = "picture" if part.kind == "image" else "video"
        failed = {"param": part.where, "code": f"invalid_{part.kind}"}
        try:
            async with contextlib.AsyncExitStack() as files:
                return await self._decoded(part.kind, await self._job(part, files))
        except RequestError as error:
            raise RequestError(f"{part.where}: {error.message}", **failed) from None
        except TimeoutError:
            raise RequestError(
                f"{part.where}: the {what} takes more than {self._seconds[part.kind]:g} s to "
                f"read (limits.{part.kind}_seconds)",
                **failed,
            ) from None
        except OSError:
            raise RequestError(f"{part.where}: the process that read the {what} died", **failed) from None

    async def _job(self, part: PicturePart, files: contextlib.AsyncExitStack) -> bytes:
        """Return the job for the worker; ``files`` keeps fetched files until it is closed."""
        if part.kind == "video":
            sampling = Sampling(part.fps, part.min_frames, part.max_frames)
            return VIDEO + msgspec.msgpack.encode(VideoJob(await self._video(part.source, files), sampling))
        source = await self._fetched(part.source, "image", files)
        return FILE + source if isinstance(source, bytes) else URL + source.encode("utf-8", "surrogatepass")

    async def _video(self, source: object, files: contextlib.AsyncExitStack) -> Source | list[Source]:
        if not isinstance(source, list):
            return await self._fetched(source, "video", files)
        if len(source) > self._limits.video_frames:
            raise RequestError(
                f"the video has {len(source)} frames; the limit is {self._limits.video_frames} (limits.video_frames)"
            )
        return [await self._fetched(frame, "image", files) for frame in source]

    async def _fetched(self, url: object, kind: PictureKind, files: contextlib.AsyncExitStack) -> Source:
        """Return the file at an address; return a source of any other kind unchanged."""
        assert isinstance(url, str), "no file comes over HTTP"
        if not url[:6].lower().startswith(("http:", "https:")):
            return url
        if self._media is None:
            raise RequestError(
                f"the {'picture' if kind == 'image' else kind} is at {url[:100]!r}; this "
                "server fetches none (it has no --media-domains): send it as a data: URL"
            )
        return await files.enter_async_context(self._media.file(url, kind))

    async def _decoded(self, kind: PictureKind, job: bytes) -> Picture:
        lane = self._lanes[kind]
        key = API_KEY.get()
        lane.check_line(key, "pictures wait to be read")
        return await asyncio.to_thread(decoded, await lane.ask(job, key))


def _started(function: JobFunction, start: bytes) -> BoundedWorker:
    worker = BoundedWorker(function, start)
    worker.receive(0, _START_WITHIN_S)
    return worker
