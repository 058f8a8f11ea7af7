"""The screen of ``weft plan``: a bar of the device's memory, the costs, the sequences that fit, and the comparison.

Every number and bar comes from ``planning``. The screen must be readable at 80 columns without colours, so bars differ
by their fill. The printed command is planned again with the same bytes, with the arena rounded down to the size in
``--memory``. If the weights leave too little, int8 and then int4 are tried.
"""

from __future__ import annotations

import io
import re
import shlex
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from weft.cli.main import print_table, screen_console, table_of
from weft.planning.layouts import Load
from weft.planning.model_plan import SHORT_TOKENS, Fit, ModelPlan, PlanOptions, loads, make_plan
from weft.spec import KV_DTYPES
from weft.units import ceil_div, format_bytes

if TYPE_CHECKING:
    from weft.cli.plan_store import RestoreTimes


BAR_CELLS_MAX = 60
PICTURES_MAX = 3
"""Most lengths that are drawn; the table has all of them."""
FULL, PART = "█", "░"
_COST_COLUMNS = ("bold", "", "dim")


class ServeCommand(NamedTuple):
    """The command to type, and its split of the memory. ``split``: parts of a device's memory, of which ``weft serve
    --memory`` is one."""

    line: str
    split: str


def show(
    plan: ModelPlan,
    *,
    compare: bool,
    from_here: bool,
    quiet: bool,
    file: Path | None,
    serve: ServeCommand | None,
    times: RestoreTimes | None = None,
) -> None:
    """Print the screen unless ``quiet``, and write it to ``file`` (.svg or .html). ``from_here``: the memory
    is this machine's own."""
    console = screen_console(highlight=False, record=file is not None, file=io.StringIO() if quiet else None)
    console.print(screen(plan, compare=compare, from_here=from_here, width=console.width, serve=serve, times=times))
    if file is not None and file.suffix == ".svg":
        console.save_svg(str(file), title=f"weft plan {plan.name}")
    elif file is not None:
        console.save_html(str(file))


def screen(
    plan: ModelPlan,
    *,
    compare: bool,
    from_here: bool,
    width: int,
    serve: ServeCommand | None,
    times: RestoreTimes | None = None,
) -> RenderableType:
    """Return all parts of the screen, for a terminal of ``width`` columns."""
    parts: list[RenderableType] = [
        _head(plan),
        "",
        *_device(plan, from_here, width),
        _costs(plan, records=times is not None),
        "",
    ]
    parts += [_lengths(plan), "", _verdict(plan)]
    if times is not None:
        from weft.cli.plan_store import shown

        parts += ["", *shown(times)]
    if compare:
        parts += ["", _comparison(plan)]
        if plan.enough:
            parts += ["", *_pictures(plan, width)]
        parts += ["", _footnote(plan)]
    parts.append(_serve_lines(serve, width))
    return Group(*parts)


def show_known(plans: Sequence[ModelPlan]) -> None:
    """Print the models that are known by name, with their costs at --tp 1 and their own dtypes."""
    table = table_of(["model"], ["weights", "KV, 1k tokens", "a state", "as KV of"])
    for plan in plans:
        table.add_row(
            plan.name.split("/")[-1],
            format_bytes(plan.weights.rank_bytes),
            format_bytes(1024 * plan.kv_token_bytes),
            format_bytes(plan.state_bytes),
            f"{plan.snapshot_tokens:,} tokens",
        )
    print_table(table)
    screen_console(highlight=False).print(
        "\nPlan one of them, a checkpoint directory or a hub model:\n"
        "  [bold]weft plan MODEL --memory 80GiB --tp 2 --compare[/]"
    )


def _head(plan: ModelPlan) -> Text:
    kinds = Counter(layer.kind.replace("_", " ") for layer in plan.spec.layers)
    layers = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    text = Text(plan.name, style="bold")
    text.append(f"\n{_parameters(plan)} parameters; {len(plan.spec.layers)} layers: {layers}\n", style="not bold")
    stored = _SHORT.get(plan.weights.form, plan.weights.form)
    text.append(f"weights {stored}", style="dim not bold")
    if plan.kv_token_bytes:
        text.append(f", KV {_SHORT[plan.arena.kv_dtype]}", style="dim not bold")
    if plan.state_bytes:
        text.append(f", states {_SHORT[plan.state_dtype]}", style="dim not bold")
    if plan.options.tp > 1:
        text.append(f"; each figure is of one of {plan.options.tp} devices", style="dim not bold")
    return text


def _device(plan: ModelPlan, from_here: bool, width: int) -> list[RenderableType]:
    """Return the bar of one device's memory, and its legend."""
    memory = plan.options.memory_bytes
    if memory is None:
        return []
    weights = plan.weights.rank_bytes
    left = max(0, memory - weights)
    cells = min(width - 4, BAR_CELLS_MAX)
    for_weights = min(cells, round(cells * weights / memory))
    for_arena = round(cells * plan.arena.arena_bytes / memory)
    bar = Text("  ")
    bar.append(FULL * for_weights, style="blue" if left else "red")
    bar.append("▒" * for_arena, style="green")
    bar.append("·" * (cells - for_weights - for_arena), style="dim")
    words = Text("  ")
    words.append(f"{FULL} weights {format_bytes(weights)}", style="blue" if left else "red")
    if left:
        words.append(f"   ▒ arena {format_bytes(plan.arena.arena_bytes)}", style="green")
        words.append(f"   · kept free {format_bytes(left - plan.arena.arena_bytes)}", style="dim")
    else:
        words.append(", more than there is")
    where = "RAM free on this machine" if from_here else "memory of a device"
    return [Text(f"{format_bytes(memory)} {where}"), bar, words, ""]


def _costs(plan: ModelPlan, *, records: bool) -> Table:
    arena, spec = plan.arena, plan.spec
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for style in _COST_COLUMNS:
        table.add_column(style=style)
    if plan.options.memory_bytes is None:
        table.add_row("arena", format_bytes(plan.options.arena_bytes or 0), "weights apart")
        table.add_row("weights", format_bytes(plan.weights.rank_bytes), "")
    if plan.kv_token_bytes:
        table.add_row(
            "a token's KV",
            format_bytes(plan.kv_token_bytes),
            f"{plan.kv_token_bytes:,} bytes in {len(spec.attention_layers)} layers; pages of "
            f"{arena.page_tokens} tokens",
        )
    if plan.state_bytes:
        table.add_row(
            "a sequence's state",
            format_bytes(plan.state_bytes),
            f"{plan.state_bytes:,} bytes in {len(spec.recurrent_layers)} layers, at any length",
        )
    kinds = " or ".join(
        f"{count:,} {noun}{'s' if count > 1 else ''}"
        for count, noun in ((arena.pages_per_frame, "KV page"), (arena.slots_per_frame, "state"))
        if count
    )
    table.add_row(
        "a frame",
        format_bytes(arena.frame_bytes),
        kinds + (f"; {arena.frame_count:,} of them" if arena.frame_count else ""),
    )
    if arena.slot_stride_bytes:
        table.add_row(
            "a snapshot",
            format_bytes(arena.slot_stride_bytes),
            f"equal to the KV of {plan.snapshot_tokens:,} tokens" if plan.kv_token_bytes else "one state",
        )
    if records:
        table.add_row(
            "a handoff", f"{format_bytes(plan.handoff_bytes_s)}/s", "with --roles, at 1,000 prompt tokens a second"
        )
    if plan.compressed_bytes:
        table.add_row("one in 8 bits", format_bytes(plan.compressed_bytes), "--no-exact, when memory is short")
    if plan.compressed_kv_token_bytes:
        table.add_row(
            "KV in 8 bits", format_bytes(plan.compressed_kv_token_bytes), "a token, --no-exact: cached, and not in use"
        )
        table.add_row(
            "KV in 4 bits", format_bytes(plan.compressed4_kv_token_bytes), "a token, and cache.compress_kv = 'int4'"
        )
    return table


def _lengths(plan: ModelPlan) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0))
    table.add_column("tokens", justify="right")
    table.add_column("one sequence", justify="right")
    table.add_column("at once", justify="right", style="bold")
    table.add_column()
    for fit in plan.fits:
        note = "the model's longest" if fit.tokens == plan.spec.max_positions else ""
        table.add_row(f"{fit.tokens:,}", format_bytes(fit.request_bytes), f"{fit.sequences:,}", Text(note, style="dim"))
    return table


def _verdict(plan: ModelPlan) -> Text:
    shortest = plan.fits[0].tokens
    where = "--memory" if plan.options.memory_bytes is not None else "--arena"
    if not plan.enough:
        text = Text("does not fit", style="red bold")
        text.append(
            f": one sequence of {shortest:,} tokens needs {where} {_typed(plan.need_bytes, up=True)}"
            f" at --tp {plan.options.tp}",
            style="not bold default",
        )
        if plan.tp_that_fits is not None:
            text.append(f", or --tp {plan.tp_that_fits} with this memory", style="not bold default")
        if plan.longest_tokens:
            text.append(f"; {plan.longest_tokens:,} tokens do fit", style="not bold default")
        return text
    text = Text("fits", style="green bold")
    alone = f", only on CPUs: it {why}" if (why := plan.architecture.why_no_gpu) else ""
    return text.append(f": up to {plan.longest_tokens:,} tokens{alone}", style="not bold default")


def _serve_lines(serve: ServeCommand | None, width: int) -> Text:
    """Return the split and the command, with line breaks that a shell accepts; or the reason why there is no
    command."""
    if serve is None:
        return Text("no `weft serve` line fits in this memory; try --tp", style="dim")
    flags_with_values = re.sub(r"(--\S+) (?!-)", "\\1\N{NO-BREAK SPACE}", serve.line)
    rows = textwrap.wrap(
        flags_with_values, width - 2, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    text = Text(f"{serve.split}\n", style="dim")
    return text.append(" \\\n".join(rows).replace("\N{NO-BREAK SPACE}", " "), style="bold not dim")


def _comparison(plan: ModelPlan) -> Table:
    """Return a table with a row for each layout and load: the sequences that fit at each length, or the memory of one
    sequence if none fits."""
    what = "sequences at once" if plan.enough else "memory of one request"
    table = Table(
        box=None,
        padding=(0, 2, 0, 0),
        title=f"The same bytes, cut otherwise: {what}",
        title_justify="left",
        title_style="bold",
    )
    table.add_column("layout", no_wrap=True)
    table.add_column("block", justify="right")
    table.add_column("a request is", no_wrap=True)
    table.add_column(f"{SHORT_TOKENS} tokens", justify="right", no_wrap=True)
    fits = plan.fits if plan.enough else plan.fits[:2]
    for fit in fits:
        table.add_column(_length_title(fit), justify="right", no_wrap=True)
    for layout in plan.layouts:
        style = "green" if layout is plan.layouts[0] else ""
        for row, load in enumerate(loads(plan)):
            each = [replace(load, tokens=fit.tokens) for fit in fits]
            cells = [
                f"{layout.sequences(load_at):,}" if plan.enough else format_bytes(layout.request_bytes(load_at))
                for load_at in each
            ]
            cost = layout.request_bytes(replace(load, tokens=SHORT_TOKENS))
            first = (layout.name, f"{layout.block_tokens:,}" if layout.block_tokens else "-")
            first = first if row == 0 else ("", "")
            table.add_row(*first, _load_words(load), format_bytes(cost), *cells, style=style)
    return table


def _pictures(plan: ModelPlan, width: int) -> list[RenderableType]:
    """Return for each length a bar per layout: full for speculating, light for the further sequences that fit
    without."""
    drafts = plan.options.drafts
    key = f"{FULL} sequences at once" + (f", each with {_drafts(drafts)}   {PART} without" if drafts else "")
    parts: list[RenderableType] = [Text(key, style="dim")]
    names = max(len(layout.name) for layout in plan.layouts)
    for fit in plan.fits[:PICTURES_MAX]:
        counts = [
            (layout.sequences(Load(fit.tokens, drafts)), layout.sequences(Load(fit.tokens))) for layout in plan.layouts
        ]
        labels = [f"{full:,}" + (f" / {bare:,}" if bare != full else "") for full, bare in counts]
        most = max(bare for _, bare in counts)
        if not most:
            continue
        scale = min(width - names - max(map(len, labels)) - 6, BAR_CELLS_MAX) / most
        parts.append(Text(f"{fit.tokens:,} tokens", style="bold"))
        for layout, (full, bare), label in zip(plan.layouts, counts, labels, strict=True):
            bar = Text(f"  {layout.name:<{names}}  ")
            bar.append(
                FULL * round(scale * full) + PART * (round(scale * bare) - round(scale * full)),
                style="green" if layout is plan.layouts[0] else "yellow",
            )
            parts.append(bar.append(f" {label}"))
    return parts


def _footnote(plan: ModelPlan) -> Text:
    names = " ".join(layout.name for layout in plan.layouts)
    words = ["block: the tokens that a prefix is cached in."]
    if "padded pages" in names:
        words.append("padded pages: vLLM.")
    if "layers a page" in names:
        words.append("N layers a page: proposed there.")
    words.append(
        "static pools: SGLang at its default split. cache: with the states that a running request "
        "reserves for prefix caching."
    )
    if plan.options.drafts and plan.state_bytes:
        words.append("drafts of weft: the log of one step, and no state.")
    return Text(" ".join(words), style="dim")


def _load_words(load: Load) -> str:
    words = [_drafts(load.drafts)] if load.drafts else []
    return " + ".join([*words, "cache"] if load.cached else words) or "bare"


def _drafts(count: int) -> str:
    return f"{count} draft{'s' if count > 1 else ''}"


def _length_title(fit: Fit) -> str:
    return f"{fit.tokens // 1024}k" if fit.tokens % 1024 == 0 else f"{fit.tokens:,}"


def _parameters(plan: ModelPlan) -> str:
    count = plan.weights.parameters
    for suffix, scale in (("B", 1e9), ("M", 1e6)):
        if count >= scale:
            return f"{count / scale:.1f}{suffix}"
    return f"{count / 1e3:.0f}K"


_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float8_e4m3": "fp8", "int8": "int8"}


def _typed(count: int, *, up: bool) -> str:
    """Return ``count`` as a value of a flag with the fewest digits, rounded up or down."""
    for suffix, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= 10 * scale:
            return f"{ceil_div(count, scale) if up else count // scale}{suffix}"
    return str(count)


_SERVED_FORMS = ("int8", "w8a8", "int4")
_MIB, _KIB = 1 << 20, 1 << 10


def serve_command(
    model: str | None, revision: str | None, config: Mapping[str, Any], plan: ModelPlan, speculate: str = "auto"
) -> ServeCommand | None:
    """Return the command that serves ``plan``; None if nothing fits. ``model``: as for ``weft serve``, None for the
    embedded model."""
    options = plan.options
    forms = [options.quantize] if options.quantize is None or options.quantize in _SERVED_FORMS else []
    if not config.get("quantization_config"):
        forms += [form for form in ("int8", "int4") if form not in forms]
    for form in forms:
        served = _rounded(config, replace(options, quantize=form))
        if served is not None:
            words = [
                "weft serve",
                *([shlex.quote(model)] if model else []),
                *(["--revision", shlex.quote(revision)] if revision else []),
                *_flags(served),
                *(["--speculate", shlex.quote(speculate)] if speculate != "auto" else []),
            ]
            return ServeCommand(" ".join(words), _split(served, options.memory_bytes))
    return None


def _split(served: ModelPlan, memory: int | None) -> str:
    weights, arena = served.weights.rank_bytes, served.options.arena_bytes or 0
    form = f"{served.options.quantize} " if served.options.quantize else ""
    words = f"{format_bytes(weights)} {form}weights"
    if memory is None:
        return f"{words}, and apart from them {format_bytes(arena)} for --memory"
    return (
        f"of {format_bytes(memory)}: {words}, {format_bytes(memory - weights - arena)} kept free, "
        f"{format_bytes(arena)} for --memory"
    )


def _rounded(config: Mapping[str, Any], options: PlanOptions) -> ModelPlan | None:
    """Return the plan of the arena that ``--memory`` will name, or None where it does not fit."""
    plan = make_plan("", config, options)
    if not plan.enough:
        return None
    size = plan.options.arena_bytes or plan.arena.arena_bytes
    unit = _MIB if size >= 16 * _MIB else _KIB
    rounded = make_plan("", config, replace(options, memory_bytes=None, arena_bytes=size // unit * unit))
    return rounded if rounded.enough else None


def _flags(plan: ModelPlan) -> list[str]:
    options = plan.options
    assert options.arena_bytes is not None
    whole_mib = options.arena_bytes % _MIB == 0
    memory = f"{options.arena_bytes // _MIB}MiB" if whole_mib else f"{options.arena_bytes // _KIB}KiB"
    kv = next((name for name, dtype in KV_DTYPES.items() if dtype == options.kv_dtype), None)
    longest = plan.longest_tokens
    if options.lengths:
        longest = max(fit.tokens for fit in plan.fits if fit.sequences)
    ranks = [f"--tp {options.tp}"] if options.tp > 1 else []
    ranks += ["--ep"] if options.ep else []
    ranks += ["--device cpu"] if plan.architecture.why_no_gpu else []
    flags = {
        "--dtype": options.dtype,
        "--quantize": options.quantize,
        "--kv-dtype": kv,
        "--state-dtype": options.state_dtype,
        "--memory": memory,
        "--max-model-len": longest if longest < plan.spec.max_positions else None,
    }
    return [*ranks, *(f"{flag} {value}" for flag, value in flags.items() if value is not None)]
