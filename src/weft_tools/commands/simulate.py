"""``weft simulate TRACE``: replay traffic through the cache without a device, and count hits.

    TRACE        a file (Mooncake's form, or a recording of `weft serve --record`), or `sample`
    --model      a directory, a public model by name, or a hub name: its geometry; a recording has its own
    seconds      a roofline of --device x --tp; or fitted from a recording: --fit, or the trace itself

Everything is computed by ``weft_tools.sim``. Torch is never imported.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from weft.cli.flags import DAY_S, Count, FlagCommand, Number, Size
from weft.cli.main import progress_bar
from weft.cli.plan import KV_DTYPE_CHOICE, QUANTIZE
from weft.config import RANKS_MAX
from weft.config import STEP_TOKENS_MAX as STEP_TOKENS_BOUND
from weft.errors import ConfigError
from weft.handoff import REPLICAS_MAX
from weft.planning.roofline import DEVICES
from weft.router.choice import DEFAULT_ROUTER
from weft.speculation.drafter import parse_sources
from weft.units import TOKENS_MAX, parse_byte_rate
from weft_tools.commands.simulate_setup import DEFAULT_DEVICE, DEFAULT_MEMORY, Setup, setup_of, several
from weft_tools.sim.arms import ARMS, DEFAULT_ARM, Arm, find_arm
from weft_tools.sim.fleet_replay import RESTART_S
from weft_tools.sim.replay import ROWS_MAX, STEP_TOKENS_MAX
from weft_tools.sim.routers import ROUTERS

if TYPE_CHECKING:
    from weft_tools.sim.recording import Recording
    from weft_tools.sim.study import OnStudyProgress, Study
    from weft_tools.sim.traffic import Traffic

LINK = "25GB/s"
"""Default rate of the link: a network of 200 Gbit/s."""


@click.command(
    "simulate",
    cls=FlagCommand,
    params=[
        click.Argument(["trace"]),
        click.Option(
            ["--model"],
            help="Checkpoint directory, public model or hub name; only its config.json is "
            "read. A recording has its model's geometry in it.",
        ),
        click.Option(
            ["--memory"],
            type=Size(several=True),
            help="Memory for KV and states on each device, as `weft serve --memory`; "
            f"several with commas. Default: {DEFAULT_MEMORY}, or as recorded.",
        ),
        click.Option(
            ["--policy"],
            default=DEFAULT_ARM,
            show_default=True,
            help=f"Cache policy: {', '.join(ARMS)}, every:N. Each also with +compressed (KV and "
            "states in 8 bits, as `weft serve --no-exact`) or +compressed4 (and KV in 4 bits, "
            "cache.compress_kv). Several with commas.",
        ),
        click.Option(
            ["--store"],
            default="none",
            show_default=True,
            help="Store of a node, as SIZE@RATE or SIZE@RATE@LATENCY, such as 1TB@3GB/s@100us; `none`: "
            "without. Several with commas.",
        ),
        click.Option(
            ["--store-write"],
            type=Size(a_second=True),
            default="200MB/s",
            show_default=True,
            help="Most bytes that the store writes in a second, as limits.store_write of `weft serve`; reads go first.",
        ),
        click.Option(
            ["--store-pack"],
            type=click.Choice(["auto", "off"]),
            default="auto",
            show_default=True,
            help="Packed records, as debug.store_pack of `weft serve` where a GPU computes. A replay as "
            "recorded packs none.",
        ),
        click.Option(
            ["--tp"], type=Count(1, RANKS_MAX), default=1, show_default=True, help="Devices that share the model."
        ),
        click.Option(
            ["--device"],
            help=f"The device: {', '.join(spec.name for spec in DEVICES.values())}. "
            f"Default: {DEFAULT_DEVICE}, or times fitted from the recording.",
        ),
        click.Option(
            ["--fit"],
            type=click.Path(path_type=Path),
            help="Recording whose step times the cost is fitted to, instead of a roofline.",
        ),
        click.Option(
            ["--quantize"],
            type=QUANTIZE,
            default="none",
            show_default=True,
            help="Format of matrices; none: as config.json says.",
        ),
        click.Option(
            ["--kv-dtype"],
            type=KV_DTYPE_CHOICE,
            default="auto",
            show_default=True,
            help="Dtype of KV; auto takes the model's dtype.",
        ),
        click.Option(["--limit"], type=Count(1, 1_000_000_000), help="Only the first COUNT requests."),
        click.Option(
            ["--rate"],
            type=Number(0, 1_000_000, above=True),
            default=1.0,
            show_default=True,
            help="Factor on the rate of arrivals.",
        ),
        click.Option(
            ["--linked/--not-linked"],
            default=True,
            show_default=True,
            help="Infer which requests of a Mooncake trace go on with the answer of which.",
        ),
        click.Option(
            ["--max-num-seqs"],
            type=Count(1, STEP_TOKENS_BOUND),
            default=ROWS_MAX,
            show_default=True,
            help="Most sequences that run at once.",
        ),
        click.Option(
            ["--max-num-batched-tokens"],
            type=Count(65, STEP_TOKENS_BOUND),
            default=STEP_TOKENS_MAX,
            show_default=True,
            help="Token budget of one step.",
        ),
        click.Option(
            ["--max-model-len"],
            type=Count(1, TOKENS_MAX),
            help="Longest request that is served; default: the model's own.",
        ),
        click.Option(
            ["--oracle/--no-oracle"],
            default=True,
            show_default=True,
            help="Also the hits of eviction with the future known.",
        ),
        click.Option(
            ["--replicas"],
            type=Count(1, REPLICAS_MAX),
            help="Replay through this number of replicas, once for each --router; --memory is for each.",
        ),
        click.Option(
            ["--router"],
            default=DEFAULT_ROUTER,
            show_default=True,
            help=f"With --replicas: {', '.join(ROUTERS)}. Several with commas.",
        ),
        click.Option(
            ["--roles"],
            help="Prefill apart from decode, as `weft serve --roles`, such as 2p2d; compared with the same "
            "replicas without roles.",
        ),
        click.Option(
            ["--link"],
            type=Size(a_second=True),
            help=f"With --roles: bytes a second that a replica sends to others. Default: {LINK}.",
        ),
        click.Option(
            ["--kill"],
            help="With --replicas: engines that die, as REPLICA@SECONDS, such as 2@600s. Several with commas.",
        ),
        click.Option(
            ["--restart-after"],
            type=Number(0, DAY_S),
            default=RESTART_S,
            show_default=True,
            help="With --kill: seconds until the engine serves again, with an empty cache.",
        ),
        click.Option(
            ["--speculate"],
            default="off",
            show_default=True,
            help="Also the drafts that speculation would accept on a recording's answers: auto, off, or a "
            "list of sources.",
        ),
        click.Option(["--json", "as_json"], is_flag=True, help="Print every figure as JSON."),
        click.Option(
            ["--plot"],
            type=click.Path(path_type=Path, dir_okay=False),
            help="Draw hit rate by memory into this .png, .svg or .pdf file (needs `weft[plot]`).",
        ),
        click.Option(["--revision"], help="Branch, tag or commit of a hub model."),
    ],
)
def command(
    trace: str,
    policy: str,
    memory: str | None,
    as_json: bool,
    plot: Path | None,
    oracle: bool,
    limit: int | None,
    rate: float,
    linked: bool,
    speculate: str,
    replicas: int | None,
    **more: Any,
) -> int:
    """Replay a trace through weft's own cache and scheduler, with a cost model instead of the device.

    TRACE is a file of JSON lines (Mooncake's form, or a recording of `weft serve --record`), or `sample`.
    """
    from weft_tools.sim.recording import read_trace
    from weft_tools.sim.study import run_study

    if plot is not None:
        from weft_tools.commands.simulate_view import check_plot

        check_plot(plot)
    is_fleet = replicas is not None or more["roles"] is not None
    for flag, needs, has_it in (
        ("link", "--roles", more["roles"] is not None),
        ("kill", "--replicas or --roles", is_fleet),
    ):
        if more[flag] is not None and not has_it:
            raise ConfigError(f"--{flag} {more[flag]} has no effect without {needs}", param=f"--{flag}")
    arms = [find_arm(name) for name in several(policy, "--policy")]
    sources = parse_sources(speculate)
    traffic, recording = read_trace(trace, limit=limit, linked=linked, rate=rate)
    if sources and recording is None:
        raise ConfigError(
            f"--speculate is {speculate!r}, and {trace} has no answers, only their lengths: "
            "speculation is replayed on recordings of `weft serve --record`",
            param="--speculate",
        )
    setup = setup_of(memory, recording, more)
    if is_fleet:
        return _replay_fleet(trace, traffic, setup, arms, replicas, more, as_json=as_json, single=[plot, *sources])
    with _progress(len(arms) * len(setup.plans) * len(setup.stores)) as on_progress:
        study = run_study(
            traffic,
            setup.plans,
            setup.cost,
            arms,
            stores=setup.stores,
            asked_bytes=setup.sizes,
            oracle=oracle,
            on_progress=on_progress,
            rows_max=more["max_num_seqs"],
            step_tokens_max=more["max_num_batched_tokens"],
            length_max=setup.length_max,
            grid_tokens=setup.grid_tokens,
        )
    speculated = None
    if sources and recording is not None:
        from weft_tools.sim.speculation import replay_speculation

        speculated = replay_speculation(traffic, recording, sources, setup.cost)
    if as_json:
        data = _data(trace, setup, study, recording)
        if speculated is not None:
            data["speculation"] = speculated.to_json()
        click.echo(json.dumps(data, indent=2))
    else:
        from weft_tools.commands.simulate_view import show, show_speculation

        show(trace, setup.words, study, recording)
        if speculated is not None:
            show_speculation(speculated)
    if plot is not None:
        from weft_tools.commands.simulate_view import draw

        draw(plot, f"{Path(trace).stem}, {setup.model}", study)
    return 0


def _replay_fleet(
    trace: str,
    traffic: Traffic,
    setup: Setup,
    arms: list[Arm],
    replicas: int | None,
    more: dict[str, Any],
    *,
    as_json: bool,
    single: list[Any],
) -> int:
    from weft_tools.commands.simulate_fleet import FleetStudy, parse_kills, parse_routers, print_fleet, roles_of

    if len(arms) > 1 or any(single) or any(setup.stores):
        raise ConfigError(
            "--replicas compares routers: it takes one --policy, no --plot, no --speculate and no --store",
            param="--replicas",
        )
    routers = parse_routers(more["router"])
    roles = roles_of(more["roles"], replicas, routers)
    replicas = replicas or len(roles)
    kills = parse_kills(more["kill"], replicas, more["roles"])
    link_bytes_s = parse_byte_rate(more["link"] or LINK, flag="--link")
    with _progress((len(routers) + 1) * len(setup.plans)) as on_progress:
        study = FleetStudy(
            traffic,
            setup,
            arms[0],
            replicas=replicas,
            routers=routers,
            kills=kills,
            restart_s=more["restart_after"],
            rows_max=more["max_num_seqs"],
            step_tokens_max=more["max_num_batched_tokens"],
            on_progress=on_progress,
            roles=roles,
            named=more["roles"] or "",
            link_bytes_s=link_bytes_s,
        )
    print_fleet(trace, setup, study, as_json=as_json)
    return 0


def _data(trace: str, setup: Setup, study: Study, recording: Recording | None) -> dict[str, Any]:
    recorded = (
        {}
        if recording is None
        else {"recorded_cached_tokens": sum(recording.cached_tokens), "recorded_dropped": recording.dropped}
    )
    return {"trace": trace, "model": setup.model, "cost": setup.cost.to_json(), **recorded, **study.to_json()}


@contextmanager
def _progress(runs: int) -> Iterator[OnStudyProgress]:
    """Show a bar over the requests of all runs."""
    with progress_bar("requests") as show:
        yield lambda words, run, ended, requests: show(run * requests + ended, runs * requests, words)
