"""``weft simulate --plot FILE``: hit rate by memory, a line for each policy, with the oracle and the bound.

matplotlib is an extra (``pip install 'weft[plot]'``): serving never needs it, and it is looked for before
the first replay, not after the last. A file is drawn, never a window.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from weft.errors import ConfigError
from weft.sim.study import Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLOT_SUFFIXES = (".png", ".svg", ".pdf")
_MARKERS = "oD^vPX"


def check_plot(path: Path) -> None:
    """Raises ConfigError where the file cannot be drawn: its kind, its folder, or no matplotlib."""
    if path.suffix.lower() not in PLOT_SUFFIXES:
        raise ConfigError(f"--plot {path}: the file's name must end in {', '.join(PLOT_SUFFIXES)}",
                          param="--plot")
    folder = path.expanduser().absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"--plot {path}: there is no folder {folder}", param="--plot")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise ConfigError("--plot draws with matplotlib, which is not installed: pip install 'weft[plot]'",
                          param="--plot") from None


def draw(path: Path, title: str, study: Study) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.add_subplot()
    sizes = [size.memory_bytes / 1e9 for size in study.sizes]
    arms = [report.arm for report in study.sizes[0].reports]
    for at, arm in enumerate(arms):
        rates = [size.reports[at].hit_rate for size in study.sizes]
        _line(axes, sizes, rates, arm, "-", _MARKERS[at % len(_MARKERS)])
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


def _line(axes: Axes, sizes: list[float], rates: list[float], name: str, style: str, marker: str,
          color: str | None = None) -> None:
    axes.plot(sizes, [100 * rate for rate in rates], linestyle=style, marker=marker, label=name, color=color)
