"""``weft simulate TRACE``: what the cache would find on this traffic, by policy and by memory, without a
device.

    TRACE        a file (Mooncake's form, or a recording of `weft serve --record`), or `sample`
    --model      a directory, a public model by name, or a hub name: its geometry; a recording has its own
    seconds      a roofline of --device x --tp; or fitted from a recording: --fit, or the trace itself

Everything is computed by ``weft.sim``; here are the flags, the progress bar, and what is shown
(simulate_view, simulate_plot). Torch is never imported.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from weft.cli.flags import FlagCommand
from weft.cli.plan import KV_DTYPE_CHOICE, QUANTIZE, find_config, stored_as
from weft.errors import ConfigError
from weft.router.protocol import DEFAULT_ROUTER, ROUTERS
from weft.sim.arms import ARMS, DEFAULT_ARM, Arm, find_arm
from weft.sim.fleet_replay import REPLICAS_MAX, RESTART_S
from weft.sim.replay import ROWS_MAX, STEP_TOKENS_MAX
from weft.sim.roofline import BANDWIDTH_SHARE, DEVICES, FLOPS_SHARE, STEP_FIXED_S
from weft.speculation.proposal import parse_sources
from weft.units import CHUNK_TOKENS, format_bytes, parse_byte_rate, parse_bytes

if TYPE_CHECKING:
    from weft.costs.step import CostModel
    from weft.memory.frames.plan import ArenaPlan
    from weft.sim.recording import Recording
    from weft.sim.store_tier import StoreModel
    from weft.sim.study import OnStudyProgress, Study
    from weft.sim.traffic import Traffic
    from weft.store.virtual_disk import PackingModel

DEFAULT_MEMORY = "20GB,40GB,80GB"
DEFAULT_DEVICE = "H100"


@click.command("simulate", cls=FlagCommand, params=[
    click.Argument(["trace"]),
    click.Option(["--model"], help="Checkpoint directory, public model or hub name; only its config.json is "
                                   "read. A recording has its model's geometry in it."),
    click.Option(["--memory"], help="Memory for KV and states on each device, as `weft serve --memory`; "
                                    f"several with commas. Default: {DEFAULT_MEMORY}, or as recorded."),
    click.Option(["--policy"], default=DEFAULT_ARM, show_default=True,
                 help=f"Cache policy: {', '.join(ARMS)}, every:N. Each also with +compressed (KV and "
                      "states in 8 bits, as `weft serve --no-exact`) or +compressed4 (and --compress-kv "
                      "int4). Several with commas."),
    click.Option(["--store"], default="none", show_default=True,
                 help="Store of a node, as SIZE@RATE or SIZE@RATE@LATENCY, such as 1TB@3GB/s@100us; `none`: "
                      "without. Several with commas."),
    click.Option(["--store-write"], default="200MB/s", show_default=True,
                 help="Most bytes that the store writes in a second, as `weft serve --store-write`; reads go "
                      "first."),
    click.Option(["--store-pack"], type=click.Choice(["auto", "off"]), default="auto", show_default=True,
                 help="Packed records, as `weft serve --store-pack` where a GPU computes. A replay as "
                      "recorded packs none."),
    click.Option(["--tp"], type=click.IntRange(min=1), default=1, show_default=True,
                 help="Devices that share the model."),
    click.Option(["--device"], help=f"The device: {', '.join(one.name for one in DEVICES.values())}. "
                                    f"Default: {DEFAULT_DEVICE}, or times fitted from the recording."),
    click.Option(["--fit"], type=click.Path(path_type=Path), help="Recording whose step times the cost is "
                                                                  "fitted to, instead of a roofline."),
    click.Option(["--quantize"], type=QUANTIZE, default="none", show_default=True,
                 help="What matrices are stored in; none: as config.json says."),
    click.Option(["--kv-dtype"], type=KV_DTYPE_CHOICE, default="auto", show_default=True,
                 help="What KV is kept in; auto takes the model's dtype."),
    click.Option(["--limit"], type=click.IntRange(min=1), help="Only the first so many requests."),
    click.Option(["--rate"], type=click.FloatRange(min=0, min_open=True), default=1.0, show_default=True,
                 help="Requests arrive so many times as fast."),
    click.Option(["--linked/--not-linked"], default=True, show_default=True,
                 help="Infer which requests of a Mooncake trace go on with the answer of which."),
    click.Option(["--max-num-seqs"], type=click.IntRange(min=1), default=ROWS_MAX, show_default=True,
                 help="Most sequences that run at once."),
    click.Option(["--max-num-batched-tokens"], type=click.IntRange(min=65), default=STEP_TOKENS_MAX,
                 show_default=True, help="Token budget of one step."),
    click.Option(["--max-model-len"], type=click.IntRange(min=1),
                 help="Longest request that is served; default: the model's own."),
    click.Option(["--oracle/--no-oracle"], default=True, show_default=True,
                 help="Also what eviction could reach with the future known."),
    click.Option(["--replicas"], type=click.IntRange(min=1, max=REPLICAS_MAX),
                 help="Replay through so many replicas, once for each --router; --memory is for each."),
    click.Option(["--router"], default=DEFAULT_ROUTER, show_default=True,
                 help=f"With --replicas: {', '.join(ROUTERS)}. Several with commas."),
    click.Option(["--kill"], help="With --replicas: engines that die, as REPLICA@SECONDS, such as 2@600s. "
                                  "Several with commas."),
    click.Option(["--restart-after"], type=click.FloatRange(min=0), default=RESTART_S, show_default=True,
                 help="With --kill: seconds until the engine serves again, with an empty cache."),
    click.Option(["--speculate"], default="off", show_default=True,
                 help="Also what speculation would accept on a recording's answers: auto, off, or a list of "
                      "sources."),
    click.Option(["--json", "as_json"], is_flag=True, help="Print every figure as JSON."),
    click.Option(["--plot"], type=click.Path(path_type=Path, dir_okay=False),
                 help="Draw hit rate by memory into this .png, .svg or .pdf file (needs `weft[plot]`)."),
    click.Option(["--revision"], help="Branch, tag or commit of a hub model."),
])
def command(trace: str, policy: str, memory: str | None, as_json: bool, plot: Path | None, oracle: bool,
            limit: int | None, rate: float, linked: bool, speculate: str, replicas: int | None,
            **more: Any) -> int:
    """Replay a trace through weft's own cache and scheduler, with a cost model in place of the device.

    TRACE is a file of JSON lines (Mooncake's form, or a recording of `weft serve --record`), or `sample`.
    """
    from weft.sim.study import run_study
    from weft.sim.trace_files import read_trace

    if plot is not None:
        from weft.cli.simulate_view import check_plot

        check_plot(plot)
    arms = [find_arm(name) for name in several(policy, "--policy")]
    sources = parse_sources(speculate)
    traffic, recording = read_trace(trace, limit=limit, linked=linked, rate=rate)
    if sources and recording is None:
        raise ConfigError(f"--speculate is {speculate!r}, and {trace} has no answers, only their lengths: "
                          "speculation is replayed on recordings of `weft serve --record`",
                          param="--speculate")
    setup = setup_of(memory, recording, more)
    if replicas is not None:
        return _replay_fleet(trace, traffic, setup, arms, replicas, more, as_json=as_json,
                             single=[plot, *sources])
    with _progress(len(arms) * len(setup.plans) * len(setup.stores)) as on_progress:
        study = run_study(traffic, setup.plans, setup.cost, arms, stores=setup.stores,
                          asked_bytes=setup.sizes, oracle=oracle, on_progress=on_progress,
                          rows_max=more["max_num_seqs"], step_tokens_max=more["max_num_batched_tokens"],
                          length_max=setup.length_max, grid_tokens=setup.grid_tokens)
    speculated = None
    if sources and recording is not None:
        from weft.sim.speculation import replay_speculation

        speculated = replay_speculation(traffic, recording, sources, setup.cost)
    if as_json:
        data = _data(trace, setup, study, recording)
        if speculated is not None:
            data["speculation"] = speculated.to_json()
        click.echo(json.dumps(data, indent=2))
    else:
        from weft.cli.simulate_view import show, show_speculation

        show(trace, setup.words, study, recording)
        if speculated is not None:
            show_speculation(speculated)
    if plot is not None:
        from weft.cli.simulate_view import draw

        draw(plot, f"{Path(trace).stem}, {setup.model}", study)
    return 0


def _replay_fleet(trace: str, traffic: Traffic, setup: Setup, arms: list[Arm], replicas: int,
                  more: dict[str, Any], *, as_json: bool, single: list[Any]) -> int:
    from weft.cli.simulate_fleet import FleetStudy, parse_kills, parse_routers, print_fleet

    if len(arms) > 1 or any(single) or any(setup.stores):
        raise ConfigError("--replicas compares routers: it takes one --policy, no --plot, no --speculate "
                          "and no --store",
                          param="--replicas")
    routers, kills = parse_routers(more["router"]), parse_kills(more["kill"], replicas)
    with _progress((len(routers) + 1) * len(setup.plans)) as on_progress:
        study = FleetStudy(traffic, setup, arms[0], replicas=replicas, routers=routers, kills=kills,
                           restart_s=more["restart_after"], rows_max=more["max_num_seqs"],
                           step_tokens_max=more["max_num_batched_tokens"], on_progress=on_progress)
    print_fleet(trace, setup, study, as_json=as_json)
    return 0


def _data(trace: str, setup: Setup, study: Study, recording: Recording | None) -> dict[str, Any]:
    recorded = {} if recording is None else {"recorded_cached_tokens": sum(recording.cached_tokens),
                                             "recorded_dropped": recording.dropped}
    return {"trace": trace, "model": setup.model, "cost": setup.cost.to_json(), **recorded, **study.to_json()}


@contextmanager
def _progress(runs: int) -> Iterator[OnStudyProgress | None]:
    """A bar on stderr, over the requests of all runs; nothing where that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f} %"),
               TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        row = bar.add_task("reading", total=None)

        def show(words: str, run: int, ended: int, requests: int) -> None:
            bar.update(row, description=words, total=runs * requests, completed=run * requests + ended)

        yield show


@dataclass(frozen=True, slots=True)
class Setup:
    """``plans``: an arena for each of ``sizes``, in bytes. ``length_max``: longest request served.
    ``grid_tokens``: states are kept at its multiples. ``plan_for``: an arena of another size. ``stores``:
    those of --store, None without."""

    model: str
    sizes: list[int]
    plans: list[ArenaPlan]
    cost: CostModel
    length_max: int
    words: list[str]
    plan_for: Callable[[int], ArenaPlan]
    grid_tokens: int = CHUNK_TOKENS
    stores: Sequence[StoreModel | None] = (None,)


def setup_of(memory: str | None, recording: Recording | None, more: dict[str, Any]) -> Setup:
    """Geometry and costs. Raises ConfigError where neither the flags nor the recording say what they are."""
    if more["model"] is None:
        return _as_recorded(memory, recording, more)
    from weft.memory.frames.plan import plan_arena
    from weft.planning.model_plan import Asked, make_plan
    from weft.sim.roofline import model_load, roofline
    from weft.sim.store_tier import packing_of

    name, config = find_config(more["model"], more["revision"])
    sizes = _sizes(memory or DEFAULT_MEMORY)
    asked = Asked(arena_bytes=max(sizes),
                  **stored_as({flag: more[flag] for flag in ("tp", "kv_dtype", "quantize")}))
    tp, kv_dtype = asked.tp, asked.kv_dtype
    plan = make_plan(name, config, asked)

    def plan_for(size: int) -> ArenaPlan:
        return _enough(plan_arena(plan.spec, size, kv_dtype=kv_dtype, compress=True), size)

    plans = [plan_for(size) for size in sizes]
    cost = _fitted(more["fit"], recording, more["device"])
    if cost is None:
        load = model_load(
            plan.architecture, parameters=plan.weights.parameters,
            eight_bit=plan.weights.form in ("fp8", "int8"),
            weight_bytes=plan.weights.rank_bytes * tp / plan.weights.parameters,
            kv_bytes=plan.kv_token_bytes * tp, state_bytes=plan.state_bytes * tp)
        cost = roofline(load, more["device"] or DEFAULT_DEVICE, count=tp)
    length_max = min(plan.spec.max_positions, more["max_model_len"] or plan.spec.max_positions)
    where = f" on each of {tp} devices" if tp > 1 else ""
    words = [f"{name}: {format_bytes(plan.kv_token_bytes)} of KV a token, "
             f"{format_bytes(plan.state_bytes)} of state a sequence{where}", _cost_words(cost)]
    whole = make_plan(name, config, replace(asked, tp=1))
    arena = plan_arena(whole.spec, max(sizes), kv_dtype=kv_dtype)
    packing = packing_of(arena.kv_dtype, "float32") if more["store_pack"] == "auto" else None
    stores = _stores(more, arena.page_bytes, whole.state_bytes, ranks=tp, packing=packing)
    return Setup(name, sizes, plans, cost, length_max, words + _packing_words(stores), plan_for,
                 stores=stores)


def _as_recorded(memory: str | None, recording: Recording | None, more: dict[str, Any]) -> Setup:
    from weft.sim.recording import resized

    if recording is None:
        raise ConfigError("the trace does not say which model it is for: name one with --model, such as "
                          "--model Qwen3.5-4B (`weft plan` lists those it knows)", param="--model")
    cost = _fitted(more["fit"], recording, None)
    if cost is None:
        raise ConfigError("the recording has no step times to fit: name the model with --model for a "
                          "roofline, or a recording that has them with --fit", param="--fit")
    arena = recording.arena
    sizes = [arena.arena_bytes] if memory is None else _sizes(memory)
    plans = [arena] if memory is None else [_enough(resized(arena, size), size) for size in sizes]
    words = [f"{recording.model}, as recorded: {format_bytes(arena.page_bytes / arena.page_tokens)} of KV a "
             f"token, {format_bytes(arena.slot_bytes)} of state a sequence", _cost_words(cost)]
    return Setup(recording.model, sizes, plans, cost, more["max_model_len"] or recording.max_model_len, words,
                 lambda size: _enough(resized(arena, size), size), recording.grid_tokens,
                 _stores(more, arena.page_bytes, arena.slot_bytes))


def _packing_words(stores: list[StoreModel | None]) -> list[str]:
    """What the replay takes packing for; nothing without a store that packs."""
    from weft.store.virtual_disk import NO_PACKING

    return list(dict.fromkeys(
        f"stored KV is packed to {one.packing.kv:.0%} and states to {one.packing.state:.0%} of their bytes, "
        f"at {one.packing.pack_bytes_s / 1e9:.1f} GB/s, and unpacked at "
        f"{one.packing.unpack_bytes_s / 1e9:.1f} GB/s"
        for one in stores if one is not None and one.packing != NO_PACKING))


def _stores(more: dict[str, Any], page_bytes: int, state_bytes: int, *, ranks: int = 1,
            packing: PackingModel | None = None) -> list[StoreModel | None]:
    """The stores of --store, for pages and states of all ranks together. ``packing``: None for none."""
    from weft.sim.store_tier import StoreModel, parse_disk
    from weft.store.virtual_disk import NO_PACKING

    rate = parse_byte_rate(more["store_write"], flag="--store-write")
    disks = {text: parse_disk(text, rate) for text in several(more["store"], "--store")}
    return [None if disk is None else StoreModel(text, disk, page_bytes, state_bytes, ranks,
                                                 packing or NO_PACKING)
            for text, disk in disks.items()]


def _fitted(fit: Path | None, recording: Recording | None, device: str | None) -> CostModel | None:
    """The cost of the steps of --fit, or of the trace where no device is named; None: a roofline it is."""
    from weft.costs.fit import STEPS_MIN, fit_steps
    from weft.sim.trace_files import read_trace

    if fit is not None:
        _, source = read_trace(str(fit))
        if source is None:
            raise ConfigError(f"--fit {fit}: only a recording of `weft serve --record` has step times",
                              param="--fit")
        return fit_steps(source.steps, name=str(fit))
    if recording is None or device is not None or len(recording.steps) < STEPS_MIN:
        return None
    return fit_steps(recording.steps)


def _cost_words(cost: CostModel) -> str:
    numbers = cost.to_json()
    prefill = f"a prompt of 1,000 tokens adds {cost.prefill_s(0, 1000) * 1e3:.1f} ms"
    if numbers["kind"] == "fitted":
        return (f"times fitted to {numbers['steps']:,} steps (median error {numbers['error']:.0%}): "
                f"{numbers['fixed_s'] * 1e3:.1f} ms a step, {prefill}")
    return (f"{numbers['name']} at {FLOPS_SHARE:.0%} of FLOP/s and {BANDWIDTH_SHARE:.0%} of bandwidth: "
            f"{STEP_FIXED_S * 1e3:.0f} ms a step, {prefill}")


def _sizes(memory: str) -> list[int]:
    return [parse_bytes(item, flag="--memory") for item in several(memory, "--memory")]


def several(text: str, flag: str) -> list[str]:
    items = [item.strip() for item in text.split(",")]
    if not all(items):
        raise ConfigError(f"{flag} {text!r} has an empty item in it", param=flag)
    return list(dict.fromkeys(items))


def _enough(arena: ArenaPlan, size: int) -> ArenaPlan:
    if arena.frame_count < arena.frames_min:
        raise ConfigError(f"--memory {format_bytes(size)} holds {arena.frame_count} frames of "
                          f"{format_bytes(arena.frame_bytes)}: not even one sequence", param="--memory")
    return arena
