"""``weft plan A B C --memory 24GiB``: the shares of several models of one server, and which models are unloaded for
which.

The shares are those of ``weft serve A B C --memory`` (``planning.together``). ``planning.residency`` says
which model is unloaded: the models are used one after the other, as listed, each when the one before is idle.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import click

from weft.cli.main import print_table, screen_console, table_of
from weft.errors import ConfigError
from weft.planning.model_plan import PlanOptions
from weft.planning.residency import Residency
from weft.planning.together import ModelNeed, need_of, share_out
from weft.units import format_bytes


def plan_together(
    models: Sequence[tuple[str, Mapping[str, Any]]], options: PlanOptions, budget: int, *, as_json: bool
) -> int:
    """Print the plan of several models. ``models``: name and config.json. Exit code 0: all fit together; 1: some give
    way to others. Raise ConfigError for a model that does not fit by itself."""
    needs = [need_of(name, config, options) for name, config in models]
    if len({need.name for need in needs}) < len(needs):
        raise ConfigError("two of the models have the same name; give one another name: NAME=MODEL", param="model")
    shares = share_out(needs, budget)
    unloads = first_round(shares, budget)
    if as_json:
        rows = [
            {
                "model": need.name,
                "weights_bytes": need.weights_bytes,
                "arena_bytes": shares[need.name] - need.weights_bytes,
                "wanted_arena_bytes": need.arena_bytes,
                "share_bytes": shares[need.name],
                "unloads": unloads[need.name],
            }
            for need in needs
        ]
        click.echo(
            json.dumps(
                {"memory_bytes": budget, "fit_together": sum(shares.values()) <= budget, "models": rows}, indent=2
            )
        )
    else:
        _show(needs, shares, unloads, budget)
    return 0 if sum(shares.values()) <= budget else 1


def first_round(shares: Mapping[str, int], budget: int) -> dict[str, list[str]]:
    """Return for each model the models that are unloaded when a request names it, if requests name the models in order.
    The round is done twice, so that the first model follows the last."""
    machine = Residency.of(shares, budget, waiting_max=1, keep_alive_s=None)
    unloaded: dict[str, list[str]] = {}
    for turn, name in enumerate([*shares, *shares]):
        unloaded[name] = []
        if machine.enter(name, 1000.0 * turn) == "waits":
            for action in machine.actions(1000.0 * turn):
                if action.verb == "unload":
                    unloaded[name].append(action.name)
                    machine.unloaded(action.name)
            if machine.models[name].state == "absent":
                machine.actions(1000.0 * turn)
            machine.loaded(name, 1000.0 * turn)
        machine.leave(machine.use(name), 1000.0 * turn + 1)
    return unloaded


def _show(needs: Sequence[ModelNeed], shares: Mapping[str, int], unloads: Mapping[str, list[str]], budget: int) -> None:
    table = table_of(["model"], ["weights", "KV and states", "together"])
    table.add_column("unloads")
    for need in needs:
        share = shares[need.name]
        others = ", ".join(name.split("/")[-1] for name in unloads[need.name])
        table.add_row(
            need.name.split("/")[-1],
            format_bytes(need.weights_bytes),
            format_bytes(share - need.weights_bytes),
            format_bytes(share),
            others or "none",
        )
    print_table(table)
    console = screen_console(highlight=False)
    total = sum(shares.values())
    if total <= budget:
        console.print(f"all of them fit together: {format_bytes(total)} of {format_bytes(budget)}")
    else:
        console.print(
            f"not all of them fit together: {format_bytes(total)} of {format_bytes(budget)}. Asked "
            "for one after the other, each unloads the model not used for the longest time"
        )
