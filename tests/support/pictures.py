"""Drawn pictures, for tests and benchmarks: gradients, text, noise, and something like a photograph."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from weft.images.picture import Pixels

KINDS = ("gradient", "text", "noise", "photo")


def drawn(kind: str, width: int, height: int, seed: int = 0) -> Pixels:
    """Draw a picture, uint8 [height, width, 3]; the same arguments give the same picture."""
    random = np.random.default_rng(seed)
    if kind == "noise":
        return random.integers(0, 256, (height, width, 3), dtype=np.uint8)
    if kind == "gradient":
        return _smooth(width, height, 255)
    if kind == "text":
        image = Image.new("RGB", (width, height), "white")
        draw = ImageDraw.Draw(image)
        for row in range(0, height, 14):
            line = f"{row:>5} The quick brown fox jumps over the lazy dog. " * 8
            draw.text((row % 40, row), line, fill="black")
        return np.array(image)
    assert kind == "photo"
    image = Image.fromarray(_smooth(width, height, 200))
    draw = ImageDraw.Draw(image)
    for _ in range(60):
        x, y, size = (random.random(3) * (width, height, min(width, height) / 3)).tolist()
        color = tuple(random.integers(0, 256, 3).tolist())
        draw.ellipse((x, y, x + size, y + size), fill=color)
    blurred = np.array(image.filter(ImageFilter.GaussianBlur(1.5)), np.int16)
    return np.clip(blurred + random.integers(-9, 10, blurred.shape), 0, 255).astype(np.uint8)


def _smooth(width: int, height: int, most: int) -> Pixels:
    across, down = np.linspace(0, 1, width), np.linspace(0, 1, height)[:, None]
    made = np.empty((height, width, 3), np.uint8)
    for channel, values in enumerate((across, down, (across * 3 + down * 2) % 1)):
        made[..., channel] = (values * most).astype(np.uint8)
    return made


def encoded(image: Image.Image | Pixels, form: str = "PNG", **options: Any) -> bytes:
    """Encode ``image`` as a file of ``form``."""
    out = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(out, form, **options)
    return out.getvalue()


def filmed(
    frames: Sequence[Pixels], form: str = "mp4", codec: str = "libx264", *, fps: int, rotation: int = 0
) -> bytes:
    """Encode the frames as a video file."""
    import av

    out = io.BytesIO()
    with av.open(out, "w", format=form) as container:
        stream: Any = container.add_stream(codec, rate=fps)
        stream.height, stream.width, _ = frames[0].shape
        stream.bit_rate = 8_000_000
        stream.pix_fmt = {"mjpeg": "yuvj420p", "libx264rgb": "rgb24"}.get(codec, "yuv420p")
        if rotation:
            stream.set_display_rotation(rotation)
        for pixels in frames:
            for packet in stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")):
                container.mux(packet)
        container.mux(stream.encode())
    return out.getvalue()
