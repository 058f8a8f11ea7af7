"""The screen of ``weft simulate``: a row for each policy and memory size, with hits and losses by reason.

Every number comes from the study; only shares are computed here. The screen must be readable at 80 columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from weft.cli.main import print_table, table_of
from weft.errors import ConfigError
from weft.memory.values import LOSS_REASONS
from weft_tools.sim.recording import Recording
from weft_tools.sim.report import Report
from weft_tools.sim.speculation import SpeculationReport
from weft_tools.sim.study import Sized, Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_WIDEST = 1000


def show(trace: str, words: Sequence[str], study: Study, recording: Recording | None) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"[bold]{trace}[/bold]: {study.requests:,} requests in {study.duration_s:,.0f} s, "
        f"{_tokens(study.prompt_tokens)} prompt tokens"
        + ("" if recording else f", {study.linked:,} requests go on with an answer (inferred)")
    )
    for line in words:
        console.print(line, markup=False)
    console.print()
    for index, table in enumerate((_results(study), _lost(study))):
        if index:
            console.print()
        # A narrow terminal wraps its lines; an ellipsis would hide figures.
        width = console.measure(table, options=console.options.update(width=_WIDEST)).maximum
        Console(highlight=False, width=max(console.width, width)).print(table)
    for line in _notes(study, recording):
        console.print(Text(line, style="dim"))


def show_speculation(report: SpeculationReport) -> None:
    console = Console(highlight=False)
    console.print()
    table = table_of(
        ["source"], ["drafted", "accepted", "rate"], title="Speculation on the recorded answers, one at a time"
    )
    for source, counts in report.sources.items():
        table.add_row(
            source, f"{counts.drafted:,}", f"{counts.accepted:,}", f"{counts.accepted / max(1, counts.drafted):.0%}"
        )
    for source, why in report.left_out.items():
        table.add_row(source, "", "", why, style="dim")
    print_table(table)
    console.print(
        f"{report.tokens:,} tokens of {report.requests:,} answers in {report.steps:,} steps: "
        f"{report.tokens_per_step:.2f} tokens a step, {report.speedup:.2f} times the tokens/s.",
        markup=False,
    )


def _tokens(count: int) -> str:
    return f"{count / 1e6:.1f}M" if count >= 1e6 else f"{count:,}"


def _size(size: Sized) -> str:
    scale, unit = next(
        ((scale, unit) for scale, unit in ((1e9, "GB"), (1e6, "MB")) if size.memory_bytes >= scale), (1e3, "kB")
    )
    return f"{size.memory_bytes / scale:.3g} {unit}"


def _results(study: Study) -> Table:
    """Return the table of results. With stores, the columns of a store replace those of running sequences."""
    stores = any(report.store is not None for size in study.sizes for report in size.reports)
    table = table_of(["memory", "policy", *(["store"] if stores else [])], _STORE_TITLES if stores else _TITLES)
    cells, pad = (_store_cells, ("",)) if stores else (_cells, ())
    for size in study.sizes:
        for index, report in enumerate(size.reports):
            table.add_row(_size(size) if not index else "", report.arm, *cells(report))
        if size.oracle is not None:
            table.add_row(
                "", "oracle", *pad, f"{size.oracle.hit_rate:.1%}", *pad, f"{size.oracle.saved_s:,.0f} s", style="dim"
            )
    bound = f"{study.bound.state_rate:.1%}"
    table.add_row("no limit", "", *pad, bound, style="dim")
    return table


_TITLES = ("hits", "saved", "TTFT 50/99", "TPOT 50/99", "runs", "preempted")
_STORE_TITLES = ("hits", "restored", "saved", "net", "TTFT 50/99")


def _store_cells(report: Report) -> list[str]:
    restored = 0 if report.store is None else report.store.restored_tokens / max(1, report.prompt_tokens)
    return [
        report.store.name if report.store is not None else "",
        f"{report.hit_rate:.1%}",
        f"{restored:.1%}",
        f"{report.saved_s:,.0f} s",
        f"{report.net_saved_s:,.0f} s",
        f"{report.ttft.p50:.2f} / {report.ttft.p99:.1f} s",
    ]


def _cells(report: Report) -> list[str]:
    return [
        f"{report.hit_rate:.1%}",
        f"{report.saved_s:,.0f} s",
        f"{report.ttft.p50:.2f} / {report.ttft.p99:.1f} s",
        f"{report.tpot.p50 * 1e3:.0f} / {report.tpot.p99 * 1e3:.0f} ms",
        f"{report.running_max:,}",
        f"{report.preemptions:,}",
    ]


def _lost(study: Study) -> Table:
    """Return the lost tokens, as shares of all prompt tokens."""
    reports = [report for size in study.sizes for report in size.reports]
    stores = any(report.store is not None for report in reports)
    reasons = [
        reason
        for reason, loss in LOSS_REASONS.items()
        if loss.is_common or any(report.lost[reason] for report in reports)
    ]
    table = table_of(
        ["memory", "policy", *(["store"] if stores else [])],
        [*(LOSS_REASONS[reason].short for reason in reasons), "kept", "evicted"],
        title="Matched in part, and computed again; states",
    )
    for size in study.sizes:
        for index, report in enumerate(size.reports):
            shares = [f"{report.lost[reason] / max(1, report.prompt_tokens):.1%}" for reason in reasons]
            store = (report.store.name if report.store is not None else "",) if stores else ()
            table.add_row(
                _size(size) if not index else "",
                report.arm,
                *store,
                *shares,
                f"{report.states_saved:,}",
                f"{report.cache.evicted_states:,}",
            )
    return table


def _notes(study: Study, recording: Recording | None) -> list[str]:
    notes = []
    refused = max(report.refused for size in study.sizes for report in size.reports)
    if refused:
        notes.append(f"{refused:,} requests are longer than the served context, and were left out.")
    if recording is not None:
        cached, prompts = sum(recording.cached_tokens), study.prompt_tokens
        notes.append(f"When it was recorded, the engine found {cached / max(1, prompts):.1%} in its cache.")
        if recording.dropped:
            notes.append(f"{recording.dropped:,} lines were dropped while recording.")
    return notes


PLOT_SUFFIXES = (".png", ".svg", ".pdf")
_MARKERS = "oD^vPX"


def check_plot(path: Path) -> None:
    """Raise ConfigError if the file cannot be drawn, because of its kind, its folder, or missing matplotlib."""
    if path.suffix.lower() not in PLOT_SUFFIXES:
        raise ConfigError(f"--plot {path}: the file's name must end in {', '.join(PLOT_SUFFIXES)}", param="--plot")
    folder = path.expanduser().absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"--plot {path}: there is no folder {folder}", param="--plot")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise ConfigError(
            "--plot draws with matplotlib, which is not installed: pip install 'weft[plot]'", param="--plot"
        ) from None


def draw(path: Path, title: str, study: Study) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.add_subplot()
    sizes = [size.memory_bytes / 1e9 for size in study.sizes]
    arms = [report.arm for report in study.sizes[0].reports]
    for index, arm in enumerate(arms):
        rates = [size.reports[index].hit_rate for size in study.sizes]
        _line(axes, sizes, rates, arm, "-", _MARKERS[index % len(_MARKERS)])
    known = [size.oracle.hit_rate for size in study.sizes if size.oracle is not None]
    if known:
        _line(axes, sizes, known, "oracle", "--", "s", color="0.45")
    axes.axhline(100 * study.bound.state_rate, color="0.6", linestyle=":", label="no limit")
    if len(sizes) > 1:
        axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size:.3g}" for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel("memory for KV and states on each device, GB")
    axes.set_ylabel("prompt tokens found in the cache, %")
    axes.set_ylim(bottom=0)
    axes.set_title(title, loc="left")
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    try:
        figure.savefig(path.expanduser(), dpi=160)
    except OSError as error:
        raise ConfigError(f"--plot {path} cannot be written: {error.strerror}", param="--plot") from None


def _line(
    axes: Axes, sizes: list[float], rates: list[float], name: str, style: str, marker: str, color: str | None = None
) -> None:
    axes.plot(sizes, [100 * rate for rate in rates], linestyle=style, marker=marker, label=name, color=color)
