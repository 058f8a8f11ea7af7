"""``weft simulate TRACE --replicas N``: the same trace through N replicas, once for each router.

    --router seconds,prefix-hash     one row for each, next to one engine with N times the memory
    --kill 2@600s                    the engine of replica 2 dies after 600 s, and restarts
    --roles 2p2d --link 25GB/s       prefill and decode replicas, next to the same replicas without roles

``weft_tools.sim.fleet_replay`` computes everything; this module has the flags and the screen.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from weft.cli.main import print_table, table_of
from weft.errors import ConfigError
from weft.handoff import Role, parse_roles, partner_missing
from weft_tools.sim.arms import Arm
from weft_tools.sim.fleet_replay import FleetReplayReport, Kill, replay_fleet
from weft_tools.sim.replay import OnProgress, replay, sizes_for
from weft_tools.sim.report import Report
from weft_tools.sim.routers import check_router
from weft_tools.sim.traffic import Traffic

if TYPE_CHECKING:
    from weft_tools.commands.simulate_setup import Setup
    from weft_tools.sim.study import OnStudyProgress

_KILL = re.compile(r"(\d{1,4})@(\d{1,7}(?:\.\d+)?)s?")


def parse_kills(text: str | None, replicas: int, roles: str | None = None) -> list[Kill]:
    """Parse ``2@600s,0@900``: replica and seconds. ``roles``: the value of --roles. Raise ConfigError."""
    kills = []
    for item in (text or "").split(",") if text is not None else ():
        matched = _KILL.fullmatch(item.strip())
        if matched is None:
            raise ConfigError(
                f"--kill {item.strip()!r} is not of the form REPLICA@SECONDS, such as 2@600s", param="--kill"
            )
        replica = int(matched[1])
        if replica >= replicas:
            flag_text = f"--replicas {replicas}" if roles is None else f"--roles {roles}"
            raise ConfigError(f"--kill names replica {replica}; {flag_text} has 0 to {replicas - 1}", param="--kill")
        kills.append(Kill(replica, float(matched[2])))
    return kills


def parse_routers(text: str) -> list[str]:
    """Parse the names of routers. Raise ConfigError."""
    names = list(dict.fromkeys(item.strip() for item in text.split(",")))
    for name in names:
        check_router(name)
    return names


SPLITTING = ("seconds", "split")


def roles_of(text: str | None, replicas: int | None, routers: Sequence[str]) -> list[Role]:
    """Return the roles; empty without --roles. Raise ConfigError."""
    if text is None:
        return []
    roles = parse_roles(text)
    missing, others = partner_missing(roles), [name for name in routers if name not in SPLITTING]
    if missing:
        raise ConfigError(f"--roles {text} has no {missing} replica, so nothing is split", param="--roles")
    if replicas not in (None, len(roles)):
        raise ConfigError(f"--roles {text} are {len(roles)} replicas, and --replicas is {replicas}", param="--roles")
    if others:
        raise ConfigError(
            f"--router {others[0]} splits no prompt: with --roles it is {' or '.join(SPLITTING)}", param="--router"
        )
    return roles


class FleetStudy:
    """Reports for each memory size: one for each router, and for comparison one engine with the memory of all replicas,
    or with ``roles`` the same replicas without roles."""

    def __init__(
        self,
        traffic: Traffic,
        setup: Setup,
        arm: Arm,
        *,
        replicas: int,
        routers: Sequence[str],
        kills: Sequence[Kill],
        restart_s: float,
        rows_max: int,
        step_tokens_max: int,
        on_progress: OnStudyProgress | None,
        roles: Sequence[Role] = (),
        named: str = "",
        link_bytes_s: float = 0.0,
    ) -> None:
        self.replicas = replicas
        self.roles = named
        link = setup.link_for(link_bytes_s, step_tokens_max) if roles else None
        self.kills = kills
        self.traffic = traffic
        self.arm = arm
        self.by_size: list[tuple[int, list[FleetReplayReport], FleetReplayReport | Report]] = []
        run = 0
        for size, plan in zip(setup.sizes, setup.plans, strict=True):
            whole = setup.plan_for(size * replicas)
            limit, one_limit = (
                sizes_for(
                    arena,
                    traffic,
                    rows_max=rows_max,
                    step_tokens_max=step_tokens_max,
                    length_max=setup.length_max,
                    grid_tokens=setup.grid_tokens,
                )
                for arena in (plan, whole)
            )
            reports = []
            for name in routers:
                reports.append(
                    replay_fleet(
                        traffic,
                        plan,
                        setup.cost,
                        replicas=replicas,
                        router=name,
                        arm=arm,
                        sizes=limit,
                        kills=kills,
                        restart_s=restart_s,
                        on_progress=_progress_of(on_progress, name, run),
                        roles=roles,
                        link=link,
                    )
                )
                run += 1
            other: FleetReplayReport | Report
            if roles:
                other = replay_fleet(
                    traffic,
                    plan,
                    setup.cost,
                    replicas=replicas,
                    arm=arm,
                    sizes=limit,
                    kills=kills,
                    restart_s=restart_s,
                    on_progress=_progress_of(on_progress, "without roles", run),
                )
            else:
                other = replay(
                    traffic,
                    whole,
                    setup.cost,
                    arm=arm,
                    sizes=one_limit,
                    on_progress=_progress_of(on_progress, "one engine", run),
                )
            run += 1
            self.by_size.append((size, reports, other))

    def to_json(self) -> dict[str, Any]:
        results = [
            {"memory_bytes_each": size, **report.to_json()} for size, reports, _ in self.by_size for report in reports
        ]
        return {
            "requests": len(self.traffic),
            "prompt_tokens": self.traffic.prompt_tokens,
            "replicas": self.replicas,
            "policy": self.arm.name,
            "kills": [{"replica": kill.replica, "at_s": kill.at_s} for kill in self.kills],
            **({"roles": self.roles} if self.roles else {}),
            "results": results,
            "unsplit" if self.roles else "one_engine": [other.to_json() for _, _, other in self.by_size],
        }


def _progress_of(on_progress: OnStudyProgress | None, words: str, run: int) -> OnProgress | None:
    if on_progress is None:
        return None
    return lambda ended, requests: on_progress(words, run, ended, requests)


def show_fleet(trace: str, words: Sequence[str], study: FleetStudy) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"[bold]{trace}[/bold]: {len(study.traffic):,} requests, "
        f"{study.traffic.prompt_tokens / 1e6:.1f}M prompt tokens, {study.replicas} replicas, "
        f"policy {study.arm.name}"
    )
    for line in words:
        console.print(line, markup=False)
    console.print()
    if study.roles:
        _show_roles(study)
        return
    table = table_of(["memory", "router"], ["hits", "predicted", "TTFT 50/99", "TPOT 50/99", "load"])
    for size, reports, single in study.by_size:
        for index, report in enumerate(reports):
            predicted = (
                ""
                if not report.predicted_tokens
                else (f"{report.predicted_tokens / max(1, report.admitted_tokens):.1%}")
            )
            table.add_row(
                f"{_decimal(size)} each" if not index else "",
                report.router,
                f"{report.hit_rate:.1%}",
                predicted,
                *_times(report),
                f"{report.load_max_share:.2f}x",
            )
        table.add_row(
            _decimal(size * study.replicas),
            "one engine",
            f"{single.hit_rate:.1%}",
            "",
            *_times(single),
            "",
            style="dim",
        )
    print_table(table)
    if study.kills:
        reports = study.by_size[0][1]
        resumes = ", ".join(f"{report.router} {report.resumes}" for report in reports)
        console.print(f"{len(study.kills)} deaths; requests resumed elsewhere: {resumes}.", markup=False)


def _show_roles(study: FleetStudy) -> None:
    table = table_of(["memory", "roles", "router"], ["split", "sent", "hits", "TTFT 50/99", "gaps 50/99"])
    for size, reports, other in study.by_size:
        assert isinstance(other, FleetReplayReport)
        for index, report in enumerate([*reports, other]):
            is_split = report is not other
            table.add_row(
                f"{_decimal(size)} each" if not index else "",
                study.roles if is_split else "none",
                report.router,
                f"{report.splits / max(1, report.requests):.0%}" if is_split else "",
                f"{report.sent_bytes / 1e9:,.0f} GB" if is_split else "",
                f"{report.hit_rate:.1%}",
                _times(report)[0],
                f"{report.gaps.p50 * 1e3:.0f} / {report.gaps.p99 * 1e3:.0f} ms",
                style=None if is_split else "dim",
            )
    print_table(table)


def _decimal(size: int) -> str:
    return f"{size / 1e9:.3g} GB"


def _times(report: FleetReplayReport | Report) -> tuple[str, str]:
    return (
        f"{report.ttft.p50:.2f} / {report.ttft.p99:.1f} s",
        f"{report.tpot.p50 * 1e3:.0f} / {report.tpot.p99 * 1e3:.0f} ms",
    )


def print_fleet(trace: str, setup: Setup, study: FleetStudy, *, as_json: bool) -> None:
    if as_json:
        click.echo(
            json.dumps(
                {"trace": trace, "model": setup.model, "cost": setup.cost.to_json(), **study.to_json()}, indent=2
            )
        )
    else:
        show_fleet(trace, setup.words, study)
