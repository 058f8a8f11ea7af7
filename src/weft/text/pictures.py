"""Pictures and videos of a conversation: taken out before the template is rendered, and put into the rendered text.

    messages  {"type": "image_url", "image_url": {"url": "data:..."}}      split_pictures
              {"type": "image"}  + PicturePart                             the template sees no pixels
    text      ... <image> ...                                              what the template writes for it
              ... <|image_start|><image><image>...<|image_end|> ...        with_pictures: one for each row
    tokens    ... 498  396 396 396 ...  499 ...                            placed: where the rows stand

A video is a picture of another kind, with its own token. A dialect makes a ``PicturePart``, or passes on OpenAI's form
and other engines' forms for videos. Pictures belong where the template writes the tokens of their kind, in the order of
the messages. A token that a text of the request spells is not a picture (``weft.text.control_tokens``); if texts are
trusted to spell tokens, the conversation is refused.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import msgspec

from weft.errors import RequestError
from weft.request import PictureKind, PlacedPicture
from weft.text.chat import ChatMessage
from weft.text.template_worker import ShownPicture

if TYPE_CHECKING:
    from weft.images.picture import Picture

_KIND_OF: dict[str, PictureKind] = {
    "image_url": "image",
    "input_image": "image",
    "image": "image",
    "video_url": "video",
    "input_video": "video",
    "video": "video",
}
"""Kind of picture by the type of a part."""


class PicturePart(msgspec.Struct, frozen=True):
    """A part of a message that is a picture. ``source``: an address, or the bytes of a file; for a video also a list of
    frames, each an address or bytes. ``where``: the part of the request, for errors. The last three fields are for
    videos (``weft.images.video.Sampling``)."""

    source: str | bytes | list[str | bytes]
    where: str
    cache_control: Any = None
    kind: PictureKind = "image"
    fps: float | None = None
    min_frames: int | None = None
    max_frames: int | None = None


def split_pictures(
    messages: list[ChatMessage], *, reads: Collection[PictureKind]
) -> tuple[list[ChatMessage], list[PicturePart]]:
    """Return the messages with a bare ``{"type": "image"}`` for each picture, and the pictures and videos in order.
    ``reads``: kinds that the model reads. Raise RequestError for a part without an address, and for a kind that the
    model does not read."""
    pictures: list[PicturePart] = []
    shown = []
    for number, message in enumerate(messages):
        if isinstance(message.content, list) and any(map(_is_picture, message.content)):
            parts = []
            for index, part in enumerate(message.content):
                if _is_picture(part):
                    picture = _read(part, f"messages[{number}].content[{index}]", reads)
                    pictures.append(picture)
                    part = {"type": picture.kind}
                    if picture.cache_control is not None:
                        part["cache_control"] = picture.cache_control
                parts.append(part)
            message = msgspec.structs.replace(message, content=parts)
        shown.append(message)
    return shown, pictures


def without_unread_results(
    messages: list[ChatMessage], *, reads: Collection[PictureKind]
) -> tuple[list[ChatMessage], list[str]]:
    """Replace each picture in a tool result that the model does not read by a text that says so. Return the messages,
    and the fields of the replaced pictures. (An agent opened a file, and a refusal would end the conversation.)
    Pictures in messages of the user stay, to be refused."""
    shown, places = [], []
    for number, message in enumerate(messages):
        if message.role == "tool" and isinstance(message.content, list):
            parts = list(message.content)
            for index, part in enumerate(parts):
                kind = _kind(part)
                if kind is not None and kind not in reads:
                    what = "a picture" if kind == "image" else "a video"
                    parts[index] = {"type": "text", "text": f"[{what}, which this model cannot read]"}
                    places.append(f"messages.{number}.{kind}")
            message = msgspec.structs.replace(message, content=parts)
        shown.append(message)
    return shown, places


def _kind(part: Any) -> PictureKind | None:
    if isinstance(part, PicturePart):
        return part.kind
    kind = part.get("type") if isinstance(part, dict) else None
    return _KIND_OF.get(kind) if isinstance(kind, str) else None


def with_pictures(
    text: str,
    places: Sequence[Sequence[int]],
    pictures: Sequence[Picture],
    tokens: Mapping[PictureKind, str],
    *,
    quoted: Collection[int] = (),
) -> tuple[str, list[ShownPicture], list[list[int]]]:
    """Replace each token of a picture in ``text`` by the text of the picture's rows, and move the lists of ``places``
    (characters) with it. ``tokens``: by kind; ``quoted``: positions at which a text spells a token. Raise RequestError
    if the template writes another number of tokens of a kind than there are pictures."""
    spelled = frozenset(quoted)
    pattern = "|".join(map(re.escape, tokens.values()))
    spots = [spot for spot in re.finditer(pattern, text) if spot.start() not in spelled]
    written_tokens = [spot[0] for spot in spots]
    bounds = [0, *(position for spot in spots for position in spot.span()), len(text)]
    pieces = [text[first:last] for first, last in pairwise(bounds)][::2]
    if written_tokens != [tokens[picture.kind] for picture in pictures]:
        shown_of = Counter(picture.kind for picture in pictures)
        counts = [
            f"{token} {written_tokens.count(token)} times for {shown_of[kind]} "
            f"{kind.replace('image', 'picture')}{'s' * (shown_of[kind] != 1)}"
            for kind, token in tokens.items()
        ]
        raise RequestError(
            f"the chat template writes {' and '.join(counts)}: a text of the conversation has it too, or the "
            "template leaves some out or moves them",
            param="messages",
        )
    shown, out, position = [], [pieces[0]], len(pieces[0])
    ends, shifts = [], []
    for picture, token, after in zip(pictures, written_tokens, pieces[1:], strict=True):
        spans, begin = [], position
        for part in picture.text:
            written = part if isinstance(part, str) else token * part
            if not isinstance(part, str):
                spans.append((position, len(written), part))
            out.append(written)
            position += len(written)
        shown.append(ShownPicture(picture.digest, picture.to_bytes(), spans))
        ends.append(begin)
        shifts.append(position - begin - len(token))
        out.append(after)
        position += len(after)
    # A position after a picture moves by the growth of all pictures before that position; ``ends`` are in the new text.
    starts = [end - shift for end, shift in zip(ends, (0, *accumulate(shifts)), strict=False)]
    grown = [0, *accumulate(shifts)]
    moved = [[place + grown[bisect_left(starts, place)] for place in group] for group in places]
    return "".join(out), shown, moved


def placed(pictures: Sequence[ShownPicture], positions: Sequence[int]) -> list[PlacedPicture]:
    """Return the pictures with positions in tokens. ``positions``: the token position of each span's first character,
    in order."""
    following = iter(positions)
    return [
        PlacedPicture(
            digest=picture.digest, data=picture.data, places=[(next(following), rows) for _, _, rows in picture.spans]
        )
        for picture in pictures
    ]


def _is_picture(part: Any) -> bool:
    return isinstance(part, PicturePart) or (isinstance(part, dict) and part.get("type") in _KIND_OF)


def _read(part: Any, where: str, reads: Collection[PictureKind]) -> PicturePart:
    kind, name = (part.kind, "") if isinstance(part, PicturePart) else (_KIND_OF[part["type"]], part["type"])
    if isinstance(part, PicturePart):
        where = part.where
    if kind not in reads:
        what = "picture" if kind == "image" else "video"
        sees = (
            "text and pictures: send some of the frames as pictures"
            if reads
            else "text only: its checkpoint has no vision encoder"
        )
        raise RequestError(f"{where} is a {what}; this model reads {sees}", param=where, code="unsupported_parameter")
    if isinstance(part, PicturePart):
        return part
    if kind == "video":
        return _video(part, where, name)
    value = part.get("image_url")
    url = value.get("url") if isinstance(value, dict) else value
    if not isinstance(url, str) or not url:
        raise RequestError(
            f"{where}.image_url: expected an object with url, the picture as a data: URL", param=f"{where}.image_url"
        )
    return PicturePart(url, where, part.get("cache_control"))


def _video(part: dict[str, Any], where: str, name: str) -> PicturePart:
    """Read ``{"type": "video_url", "video_url": {"url": ...}}``, or ``{"type": "video", "video": [frame, ...]}``;
    ``fps``, ``min_frames`` and ``max_frames`` are keys of the part or of the inner object."""
    field = "video" if name == "video" else "video_url"
    value = part.get(field)
    inner = value if isinstance(value, dict) else {}
    source: Any = inner.get("url") if inner else value
    frames = source if isinstance(source, list) else [source]
    if not frames or not all(isinstance(frame, str) and frame for frame in frames):
        raise RequestError(
            f"{where}.{field}: expected a data: URL of a video, or a list of data: URLs of its frames",
            param=f"{where}.{field}",
        )
    sampling = {key: inner.get(key, part.get(key)) for key in ("fps", "min_frames", "max_frames")}
    return PicturePart(source, where, part.get("cache_control"), "video", **checked_sampling(sampling, where))


def checked_sampling(sampling: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return ``sampling``, checked: ``fps``, ``min_frames``, ``max_frames`` of a part. Raise RequestError."""
    for key, value in sampling.items():
        right = isinstance(value, int | float if key == "fps" else int) and not isinstance(value, bool)
        if value is not None and not (right and 0 < value <= 1000):
            raise RequestError(
                f"{where}.{key} is {value!r:.100}; it must be a "
                f"{'number above 0' if key == 'fps' else 'whole number from 1'}, to 1000",
                param=f"{where}.{key}",
            )
    return dict(sampling)
