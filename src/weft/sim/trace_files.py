"""Traces in files: JSON, an object a line, of either form; or the sample that comes with weft.

The first line says which: a recording's has ``weft_recording``, anything else is read as Mooncake's form.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from weft.errors import ConfigError
from weft.sim.mooncake import mooncake_traffic
from weft.sim.recording import Recording, read_recording
from weft.sim.traffic import Traffic

SAMPLE = "sample"


def sample_path() -> Path:
    """The first requests of the conversation trace that the Mooncake project published (Apache-2.0)."""
    return Path(__file__).parent / "sample" / "mooncake_conversation.jsonl"


def read_trace(name: str, *, limit: int | None = None, linked: bool = True,
               rate: float = 1.0) -> tuple[Traffic, Recording | None]:
    """``name``: a file, or "sample". The first ``limit`` requests by arrival, ``rate`` times as fast. Raises
    ConfigError that names the file, and the line where one is wrong."""
    path = sample_path() if name == SAMPLE and not Path(name).exists() else Path(name).expanduser()
    rows = list(_rows(path, name))
    if not rows:
        raise ConfigError(f"{name} has no requests in it", param="TRACE")
    recording = None
    if "weft_recording" in rows[0]:
        recording = read_recording(rows, name=name, limit=limit)
        traffic = recording.traffic
    else:
        if limit is not None:
            rows = sorted(rows, key=_arrival)[:limit]
        traffic = mooncake_traffic(rows, linked=linked, name=name)
    if not len(traffic):
        raise ConfigError(f"{name} has no requests in it", param="TRACE")
    return (traffic.faster(rate) if rate != 1.0 else traffic), recording


def _arrival(row: dict[str, Any]) -> float:
    at_ms = row.get("timestamp")
    return at_ms if isinstance(at_ms, int | float) else 0.0


def _rows(path: Path, name: str) -> Iterator[dict[str, Any]]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except ValueError as error:
                    if number > 1 and not line.endswith("\n"):
                        return  # the server was killed, or the disk was full, in the middle of the last line
                    raise ConfigError(f"{name}, line {number}: not JSON ({error})", param="TRACE") from None
                if not isinstance(row, dict):
                    raise ConfigError(f"{name}, line {number}: a JSON object is needed", param="TRACE")
                yield row
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror}; name a trace, or `sample`",
                          param="TRACE") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{name} is not a text file: a trace is JSON, an object a line",
                          param="TRACE") from None
