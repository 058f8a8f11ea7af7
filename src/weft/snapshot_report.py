"""An engine's report on its prefix cache: digests of the prefixes at which a request can resume.

    tokens    [ page 0 | page 1 | page 2 | tail ]      page: 16 tokens; tail: fewer
    report    number 7:  + (digest, tail, position, place, restore seconds)    - (digest, no tail)

The digests are those of ``weft.prefix_digests``. Reports are numbered. A router that misses a number knows
that its table is stale, and asks for a full report, which has every snapshot
(``weft.router.snapshot_table``).
"""

from __future__ import annotations

from typing import Literal

import msgspec

Place = Literal["memory", "compressed"]


class ReportedSnapshot(msgspec.Struct, frozen=True, array_like=True):
    """A snapshot at which a request can resume. ``digest``: of the complete pages before ``position``. ``tail``: the
    tokens after these pages up to ``position``. ``restore_s``: seconds until a request can resume here."""

    digest: int
    position: int
    tail: tuple[int, ...] = ()
    place: Place = "memory"
    restore_s: float = 0.0


class RemovedSnapshot(msgspec.Struct, frozen=True, array_like=True):
    digest: int
    tail: tuple[int, ...] = ()


class SnapshotReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A numbered report. ``number``: one more than that of the previous report. ``is_full``: whether ``added`` has
    every snapshot."""

    number: int
    added: list[ReportedSnapshot] = []
    removed: list[RemovedSnapshot] = []
    is_full: bool = False
