"""Types and constants that all layers share: ids, the index for "nothing here", and byte units.

``int`` ids are NewTypes so that a page cannot be passed where a slot is meant; they cost nothing at
run time. *Index*, *count* and *bytes* are different words in every name.
"""

from __future__ import annotations

import math
import re
from typing import NewType

from weft.errors import ConfigError

PageId = NewType("PageId", int)
SlotId = NewType("SlotId", int)
FrameId = NewType("FrameId", int)
RowId = NewType("RowId", int)
"""Row of the page table and of every per-row buffer of the executor."""
SeqId = NewType("SeqId", int)
BufferId = NewType("BufferId", int)
"""A transfer buffer: host memory between the arena and a store."""

PAD = -1
"""The only index for "nothing here" (law L4): kernels of every backend neither read nor write there."""

PAGE_TOKENS = 16
"""Number of tokens in a KV page."""

CHUNK_TOKENS = 64
"""The absolute grid of the chunked recurrent kernels: chunks start at multiples of it. A prompt that is computed in
pieces which end on the grid is divided into the same chunks as in one piece."""

TOKENS_MAX = 2**24
"""Most tokens of a sequence, 16.8 million: rotary positions are computed in float32, which represents no larger
integers exactly."""

VERIFY_TOKENS_MAX = 64
"""Most tokens in the verify runs of a step. It bounds the replay log of the step (law L11)."""
HEAD_DRAFTS_MAX = 3
"""Most drafts of the model's own head for a sequence in one step."""

ALIGN_BYTES = 256
"""Alignment, bytes: every field in a page or slot starts at a multiple of it."""

_SUFFIX = {
    "": 1,
    "B": 1,
    "K": 1000,
    "KB": 1000,
    "M": 1000**2,
    "MB": 1000**2,
    "G": 1000**3,
    "GB": 1000**3,
    "T": 1000**4,
    "TB": 1000**4,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}

BYTES_MAX = 2**60
"""Most bytes that a flag may name: 1 EiB, more than any machine addresses or any disk holds."""

_BARE_BYTES_LEAST = 1_000_000
"""Bound, bytes: a smaller number without a unit is more likely meant as gigabytes."""


def ceil_div(value: int, by: int) -> int:
    return -(-value // by)


def align_up(value: int, to: int = ALIGN_BYTES) -> int:
    return ceil_div(value, to) * to


def pages_for(tokens: int) -> int:
    """Return the number of KV pages that hold ``tokens`` tokens."""
    return ceil_div(tokens, PAGE_TOKENS)


def parse_bytes(text: str, *, flag: str, a_second: bool = False, least: int = 0) -> int:
    """Parse ``"80GiB"``, ``"512 MB"``, ``"1e9"`` or ``"1048576"`` as bytes; ``a_second``: ``"3GB/s"`` too.

    Raise ConfigError that names ``flag`` and the valid forms; also for a small number without a unit (``--memory 24``
    more likely means gigabytes), and for fewer bytes than ``least`` or more than ``BYTES_MAX``.
    """
    match = re.fullmatch(
        r"\s*([0-9]*\.?[0-9]+(?:[eE][0-9]+)?)\s*([A-Za-z]*)\s*", text.removesuffix("/s") if a_second else text
    )
    scale = _SUFFIX.get(match.group(2).upper()) if match else None
    if match is None or scale is None:
        what, example = ("a rate", "4GB/s") if a_second else ("a size", "4GiB")
        raise ConfigError(
            f"{flag} {text!r} is not {what}: write a number with B, MB, GB, MiB or GiB, for example {flag} {example}",
            param=flag,
        )
    number = match.group(1)
    count = float(number) * scale
    if not match.group(2) and 0 < count < _BARE_BYTES_LEAST:
        raise ConfigError(f"{flag} {text!r} has no unit: write {number}GiB, {number}MiB or {number}B", param=flag)
    if not least <= count <= BYTES_MAX:
        limits = f"at least {format_bytes(least)} and at most {format_bytes(BYTES_MAX)}"
        raise ConfigError(f"{flag} is {text!r}; it must be {limits}", param=flag)
    return int(count)


def parse_byte_rate(text: str, *, flag: str) -> int:
    """Parse ``"200MB/s"`` or ``"200MB"`` as bytes a second. Raise ConfigError, for 0 as well."""
    rate = parse_bytes(text, flag=flag, a_second=True)
    if rate <= 0:
        raise ConfigError(f"{flag} is {text!r}; it must be above 0 bytes a second", param=flag)
    return rate


_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_duration(text: str | float, *, flag: str) -> float | None:
    """Parse ``"5m"``, ``"1h30m"``, ``"300"`` or 300 as seconds; below 0: None, for ever. Raise ConfigError."""
    if isinstance(text, str):
        parts = re.findall(r"([0-9]*\.?[0-9]+)(ns|us|µs|ms|s|m|h|d)", text.strip().lstrip("-+"))
        if parts and "".join(number + unit for number, unit in parts) == text.strip().lstrip("-+"):
            seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts)
            return None if text.strip().startswith("-") and seconds else seconds
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if math.isnan(seconds):
        raise ConfigError(
            f"{flag} {str(text)[:50]!r} is not a time: write seconds, or such as 30s, 5m or 1h30m; below 0 is for ever",
            param=flag,
        )
    return None if seconds < 0 or math.isinf(seconds) else seconds


def format_bytes(count: int | float) -> str:
    """Format 1536 as '1.5 KiB', for people; never parsed back."""
    for suffix, scale in (("EiB", 2**60), ("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            value = count / scale
            return f"{value:.0f} {suffix}" if value >= 100 else f"{value:.1f} {suffix}"
    return f"{count:.0f} B"
