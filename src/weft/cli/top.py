"""``weft top``: figures of a running server in the terminal, drawn again every second.

    /metrics   ---> Reading  (numbers by name and label) --.
    /v1/cache  ---> cached bytes, the biggest prefixes    +--> frame(now, before, ...) --> rich
                                                           -'
Rates are differences of two readings; the first frame, and the frame of ``--once``, has only totals.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import click
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from weft.cli.flags import DAY_S, FlagCommand, Number
from weft.cli.main import screen_console
from weft.cli.remote import RemoteModel
from weft.errors import UserError
from weft.memory.values import LOSS_REASONS
from weft.server.metrics import combines
from weft.units import PAGE_TOKENS, format_bytes

TIMEOUT_S = 10.0
_USES = {
    "running_kv": ("KV of running requests", "green"),
    "running_states": ("their states", "cyan"),
    "shared_kv": ("KV they share", "blue"),
    "cached_kv": ("cached KV", "yellow"),
    "cached_states": ("cached states", "magenta"),
    "open": ("free in part", "bright_black"),
    "free": ("free", "white"),
}
_BAR_CELLS = 60
_PREFIXES_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Reading:
    """One reading of the metrics. ``values``: by name without the prefix; ``by_label``: by name and the value of the
    metric's own label. Both cover all engines, combined as the table of metrics says. ``engines``: the values of each
    engine by number; with several models, the values of each model by name, loaded or not."""

    at_s: float
    model: str
    values: Mapping[str, float]
    by_label: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    engines: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def is_several(self) -> bool:
        return "model_loaded" in self.values

    def rate(self, name: str, before: Reading | None) -> float | None:
        """Return the rate per second since ``before``; None without an earlier reading, or if the server was restarted
        since."""
        if before is None or self.at_s <= before.at_s:
            return None
        gained = self.values.get(name, 0.0) - before.values.get(name, 0.0)
        return gained / (self.at_s - before.at_s) if gained >= 0 else None


def read_metrics(text: str, at_s: float) -> Reading:
    """Parse the metrics of a server. Raise UserError if ``text`` is not the metrics of a weft server."""
    values: dict[str, float] = {}
    by_label: dict[str, dict[str, float]] = {}
    engines: dict[str, dict[str, float]] = {}
    model, is_weft = "", False
    listed = list(text_string_to_metric_families(text))
    models = {
        sample.labels["model_name"]
        for family in listed
        for sample in family.samples
        if sample.name.endswith(":model_loaded")
    }
    for family in listed:
        if family.type not in ("gauge", "counter"):
            continue
        for sample in family.samples:
            name = sample.name.partition(":")[2]
            if not name:  # metrics of the process, not of weft
                continue
            own = [value for label, value in sample.labels.items() if label not in ("model_name", "engine")]
            model = sample.labels.get("model_name", model)
            is_weft = is_weft or name in ("engine_up", "model_loaded")
            numbers, key = (by_label.setdefault(name, {}), own[0]) if own else (values, name)
            numbers[key] = numbers.get(key, 0.0) + sample.value
            if not own:
                number = sample.labels.get("engine", "")
                place = sample.labels.get("model_name", "") if models else number
                engines.setdefault(place, {})[name] = sample.value
    for name, combine in combines().items():
        if combine == "mean" and name in values:
            values[name] /= sum(name in numbers for numbers in engines.values())
    if not is_weft:
        raise UserError("the answering process has no metrics of a weft server")
    return Reading(
        at_s,
        f"{len(models)} models" if models else model,
        values,
        by_label,
        {place: numbers for place, numbers in engines.items() if "engine_up" in numbers or "model_loaded" in numbers},
    )


def frame(
    url: str, now: Reading, before: Reading | None, cache: Mapping[str, Any], replicas: Sequence[Mapping[str, Any]] = ()
) -> RenderableType:
    """Return the screen. ``cache``: the answer of /v1/cache, empty while there is no engine; ``replicas``: the rows of
    /v1/replicas, only while some replica does not serve."""
    up = int(now.values.get("engine_up", 0.0))
    state = (
        _state(now)
        if now.is_several or up == len(now.engines)
        else Text(f"{up} of {len(now.engines)} engines up" if up else "the engine is not there", "bold red")
    )
    head = Text.assemble(("weft top", "bold"), f"  {now.model or '(no model yet)'} at {url}  ", state)
    engines = [Text(), _engines(now, replicas)] if len(now.engines) > 1 else []
    return Group(
        head,
        *engines,
        Text(),
        _traffic(now, before),
        *_speculation(now),
        Text(),
        _memory(now),
        Text(),
        _reuse(now, before),
        Text(),
        *_caches(cache),
    )


def _state(now: Reading) -> Text:
    """Return ``up``, or the kind of sleep by the names of the gauge ``engine_sleep_state``."""
    if now.is_several:
        return Text(f"{now.values['model_loaded']:.0f} of {len(now.engines)} loaded", "green")
    states = now.by_label.get("engine_sleep_state", {})
    for state, words in (
        ("weights_offloaded", "asleep (level 1: weights in host memory)"),
        ("discard_all", "asleep (level 2: weights dropped)"),
    ):
        if states.get(state):
            return Text(words, "yellow")
    return Text("up", "green")


def _table(*columns: str, first_width: int = 26) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(columns[0], min_width=first_width)
    for column in columns[1:]:
        table.add_column(column, justify="right", min_width=9)
    return table


def _engines(now: Reading, replicas: Sequence[Mapping[str, Any]]) -> RenderableType:
    rows = {str(row["replica"]): row for row in replicas}
    kind = "model" if now.is_several else "engine"
    table = _table(kind, "", "running", "waiting", "generated", "restarts", first_width=8)
    for number, values in now.engines.items():
        if now.is_several and not values["model_loaded"]:
            state = "absent"
        else:
            state = "up" if values.get("engine_up") else _engine_state(rows.get(number))
        table.add_row(
            number,
            state,
            *(
                _count(values.get(name))
                for name in (
                    "num_requests_running",
                    "num_requests_waiting",
                    "generation_tokens_total",
                    "engine_restarts_total",
                )
            ),
        )
    return Group(
        table,
        *(
            Text(f"engine {number} is dead: {row['reason']}; weft drain {number} --start starts it again", "bold red")
            for number, row in rows.items()
            if row["state"] == "dead"
        ),
    )


def _engine_state(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "not up"
    return "restarting" if row["state"] == "waiting" else str(row["state"])


def _traffic(now: Reading, before: Reading | None) -> RenderableType:
    values = now.values
    table = _table("traffic", "now", "per second", "in all")
    table.add_row("requests running", _count(values.get("num_requests_running")), "", "")
    table.add_row("requests waiting", _count(values.get("num_requests_waiting")), "", "")
    ended = sum(now.by_label.get("request_success_total", {}).values())
    table.add_row("answers ended", "", "", _count(ended))
    for what, name in (
        ("tokens generated", "generation_tokens_total"),
        ("tokens computed", "computed_tokens_total"),
        ("prompt tokens from cache", "prompt_tokens_cached_total"),
        ("preemptions", "num_preemptions_total"),
    ):
        rate = now.rate(name, before)
        table.add_row(what, "", "" if rate is None else f"{rate:,.0f}", _count(values.get(name)))
    return table


def _speculation(now: Reading) -> list[RenderableType]:
    """Return lines about drafts by source; none before the first draft was verified."""
    drafted = now.by_label.get("spec_decode_num_draft_tokens_total", {})
    if not any(drafted.values()):
        return []
    accepted = now.by_label.get("spec_decode_num_accepted_tokens_total", {})
    table = _table("speculation", "drafted", "accepted", "rate")
    for source, count in drafted.items():
        right = accepted.get(source, 0.0)
        table.add_row(source, _count(count), _count(right), f"{right / count:.0%}" if count else "")
    windows = now.values.get("spec_decode_num_drafts_total", 0.0)
    length = 1 + sum(accepted.values()) / windows if windows else 1.0
    saved_s = now.values.get("spec_decode_saved_seconds", 0.0)
    size = f"{abs(saved_s):,.1f}"
    saved = (
        "no time saved yet"
        if size == "0.0"
        else (f"{size} s slower than without drafts" if saved_s < 0 else f"{size} s saved")
    )
    return [Text(), table, Text(f"{length:.2f} tokens for each verify run, {saved}", "bright_black")]


def _memory(now: Reading) -> RenderableType:
    uses = now.by_label.get("memory_bytes", {})
    total = sum(uses.values())
    if not total:
        why = "given back while the engine sleeps" if uses else "nothing is known of it yet"
        return Text(f"memory: {why}", "bright_black")
    bar, drawn, passed = Text(), 0, 0.0
    table = _table("memory", "bytes", "share")
    for use, (words, style) in _USES.items():
        size = uses.get(use, 0.0)
        passed += size
        cells = round(_BAR_CELLS * passed / total) - drawn
        drawn += cells
        bar.append(("░" if use in ("open", "free") else "█") * cells, style)
        table.add_row(Text.assemble(("■ ", style), words), format_bytes(int(size)), f"{size / total:.1%}")
    return Group(table, bar)


def _reuse(now: Reading, before: Reading | None) -> RenderableType:
    values = now.values
    queries, hits = (values.get(f"prefix_cache_{what}_total", 0.0) for what in ("queries", "hits"))
    table = _table("prefix cache", "tokens", "of prompts")

    def row(words: str, tokens: float) -> None:
        table.add_row(words, _count(tokens), f"{tokens / queries:.1%}" if queries else "")

    row("found", hits)
    for reason, tokens in now.by_label.get("prefix_cache_lost_tokens_total", {}).items():
        row(f"lost: {LOSS_REASONS[reason].words if reason in LOSS_REASONS else reason}", tokens)
    row("computed again", values.get("recomputed_tokens_total", 0.0))
    recent = _recent_hit_rate(now, before)
    gone = ", ".join(
        f"{int(count):,} {kind}{'' if count == 1 else 's'}"
        for kind, count in now.by_label.get("prefix_cache_evictions_total", {}).items()
    )
    moves = ", ".join(
        f"{int(count):,} {kind}{'' if count == 1 else 's'}"
        for kind, count in now.by_label.get("compaction_moves_total", {}).items()
    )
    lines = [f"evicted: {gone or 'nothing'}", f"moved to empty frames: {moves or 'nothing'}", *_store(now)]
    return Group(
        table,
        *([Text(f"found since the last frame: {recent:.1%}")] if recent is not None else []),
        *(Text(line, "bright_black") for line in lines),
    )


def _store(now: Reading) -> list[str]:
    """Return the lines about the store; none without a store."""
    values = now.values
    if not values.get("store_capacity_bytes"):
        return []
    writes = now.by_label.get("store_writes_total", {})
    restored = int(values.get("store_restored_tokens_total", 0))
    saved_s = values.get("store_saved_seconds_total", 0.0)
    return [
        f"store: {int(values['store_checkpoints']):,} snapshots, "
        f"{format_bytes(int(values['store_bytes']))} of "
        f"{format_bytes(int(values['store_capacity_bytes']))}",
        f"from the store: {restored:,} tokens, {saved_s:,.1f} s saved, "
        f"{int(values.get('store_damaged_total', 0)):,} damaged",
        f"to the store: {int(writes.get('written', 0)):,} written, "
        f"{int(writes.get('dropped', 0)):,} dropped; "
        f"{int(values.get('store_requests_waiting', 0)):,} requests wait for it",
        *_bucket(now),
    ]


def _bucket(now: Reading) -> list[str]:
    """Return the lines about the store's bucket; none while it answers and nothing was uploaded."""
    uploads = now.by_label.get("store_uploads_total", {})
    waiting = int(now.values.get("store_uploads_waiting", 0))
    away_s = now.values.get("store_unreachable_seconds_total", 0.0)
    if not (waiting or away_s or any(uploads.values())):
        return []
    said = ", ".join(f"{int(count):,} {outcome}" for outcome, count in uploads.items())
    return [f"to the bucket: {said or 'nothing yet'}; {waiting:,} wait; unreachable for {away_s:,.0f} s so far"]


def _recent_hit_rate(now: Reading, before: Reading | None) -> float | None:
    queries, hits = (now.rate(f"prefix_cache_{what}_total", before) for what in ("queries", "hits"))
    return hits / queries if queries and hits is not None else None


def _caches(cache: Mapping[str, Any]) -> list[RenderableType]:
    """Return the tables of the caches; with several models, each under the model's name."""
    if "models" not in cache:
        return [_prefixes(cache)]
    return [part for name, own in cache["models"].items() for part in (Text(name, "bold"), _prefixes(own))]


def _prefixes(cache: Mapping[str, Any]) -> RenderableType:
    shape: Mapping[str, Any] = cache.get("tree", {})
    rows: Sequence[Mapping[str, Any]] = shape.get("prefixes", ())[:_PREFIXES_SHOWN]
    if not rows:
        return Text("no prefix is shared yet", "bright_black")
    table = _table("biggest prefixes", "tokens", "hits", "branches", "read by", "last used", first_width=24)
    for place, row in enumerate(rows, start=1):
        holds = "state kept" if row["snapshot"] else "KV only"
        table.add_row(
            f"{place}. {row['label']} {holds}",
            _count(row["tokens"]),
            _count(row["hits"]),
            _count(row["branches"]),
            _count(row["readers"]),
            _age(row["age_s"]),
        )
    count = shape["salt_count"]
    return Group(
        table,
        Text(
            f"{cache['nodes']:,} nodes, {cache['states']:,} states{_compressed(cache)}, "
            f"{count} "
            f"salt{'' if count == 1 else 's'}",
            "bright_black",
        ),
    )


def _compressed(cache: Mapping[str, Any]) -> str:
    """Return a text about compressed states and pages; empty if there never were any."""
    counts: Mapping[str, int] = cache.get("counts", {})
    compressed = []
    if counts.get("compressed"):
        compressed += [
            f"{cache['states_compressed']:,} of them compressed in {format_bytes(cache['compressed_bytes'])}",
            f"{counts['restored']:,} requests began on one",
        ]
    if counts.get("compressed_pages"):
        compressed += [
            f"KV of {cache['pages_compressed'] * PAGE_TOKENS:,} tokens compressed in "
            f"{format_bytes(cache['compressed_kv_bytes'])}"
        ]
    return f" ({'; '.join(compressed)})" if compressed else ""


def _count(value: float | None) -> str:
    return "" if value is None else f"{int(value):,}"


def _age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def look(server: RemoteModel) -> tuple[Reading, Mapping[str, Any], Sequence[Mapping[str, Any]]]:
    """Return the answers that ``frame`` shows. Raise an error if no server answers, or if it is not a weft server."""
    reading = read_metrics(server.get("/metrics", timeout_s=TIMEOUT_S).text, time.monotonic())
    up = reading.values.get("engine_up", 0.0)
    replicas = server.get("/v1/replicas", timeout_s=TIMEOUT_S).json()["data"] if up < len(reading.engines) else ()
    return reading, server.get("/v1/cache", timeout_s=TIMEOUT_S).json() if up else {}, replicas


@click.command(
    "top",
    cls=FlagCommand,
    params=[
        click.Option(
            ["--url"], envvar="WEFT_URL", default="http://127.0.0.1:8000", show_default=True, help="Server to watch."
        ),
        click.Option(
            ["--api-key"],
            envvar=["WEFT_OPERATOR_KEY", "WEFT_API_KEY"],
            help="Its key: the operator's, where it has one (--operator-key).",
        ),
        click.Option(
            ["--every"], type=Number(0.2, DAY_S), default=1.0, show_default=True, help="Seconds between two frames."
        ),
        click.Option(["--once"], is_flag=True, help="Print one frame and end."),
    ],
)
def command(url: str, api_key: str | None, every: float, once: bool) -> int:
    """Watch a running server: requests, tokens per second, memory by use, hits of its prefix cache.

    Ctrl-C ends it. The server goes on.
    """
    server = RemoteModel(url, api_key=api_key)
    console = screen_console()
    try:
        now, cache, replicas = look(server)
        if once:
            console.print(frame(server.url, now, None, cache, replicas))
            return 0
        with Live(
            frame(server.url, now, None, cache, replicas),
            console=console,
            screen=console.is_terminal,
            auto_refresh=False,
        ) as live:
            while True:
                time.sleep(every)
                before = now
                now, cache, replicas = look(server)
                live.update(frame(server.url, now, before, cache, replicas), refresh=True)
    except KeyboardInterrupt:
        return 0
    finally:
        server.close()
