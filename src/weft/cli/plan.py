"""``weft plan MODEL``: a model's use of a device's memory, and the requests that then fit, without the device.

The configuration comes from a directory, the table of public geometries, or the hub, of which only config.json is
fetched. Exit code 1 if the model does not fit, for scripts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import click

import weft
from weft.cli.flags import Count, FlagCommand, Number, Size, SpelledChoice
from weft.config import RANKS_MAX, DTypeChoice, KvDTypeChoice, StateDTypeChoice
from weft.errors import CheckpointError, ConfigError
from weft.planning.weights import FORMS
from weft.spec import KV_DTYPES
from weft.speculation.drafter import parse_sources
from weft.units import TOKENS_MAX, VERIFY_TOKENS_MAX, format_bytes, parse_bytes

DTYPES = SpelledChoice(get_args(DTypeChoice))
KV_DTYPE_CHOICE = SpelledChoice(get_args(KvDTypeChoice))
STATE_DTYPE_CHOICE = SpelledChoice(get_args(StateDTypeChoice))
QUANTIZE = click.Choice(["none", *FORMS])
"""Values of ``--quantize``, as for ``weft serve``, and fp8, the form of published checkpoints."""

_EMBEDDED = Path(weft.__file__).parent / "embedded"


@click.command(
    "plan",
    cls=FlagCommand,
    params=[
        click.Argument(["models"], nargs=-1, metavar="[MODEL]..."),
        click.Option(
            ["--memory"],
            type=Size(),
            help="Memory of one device, weights included, such as 80GiB; default: the RAM "
            "that is free here. The --memory of `weft serve` is a part of it.",
        ),
        click.Option(
            ["--arena"],
            type=Size(),
            help="Instead: that part, the memory for KV pages and states without weights, "
            "as `weft serve --memory` takes it.",
        ),
        click.Option(
            ["--tp"],
            type=Count(1, RANKS_MAX),
            default=1,
            show_default=True,
            help="Devices that share the model (tensor parallelism).",
        ),
        click.Option(["--ep"], is_flag=True, help="The devices divide experts by number, not by width."),
        click.Option(
            ["--dtype"],
            type=DTYPES,
            default="auto",
            show_default=True,
            help="Dtype of weights and KV; auto takes the checkpoint's own.",
        ),
        click.Option(
            ["--kv-dtype"],
            type=KV_DTYPE_CHOICE,
            default="auto",
            show_default=True,
            help="Dtype of KV; auto takes --dtype.",
        ),
        click.Option(
            ["--state-dtype"],
            type=STATE_DTYPE_CHOICE,
            help="Dtype of recurrent states; default: float32, as weft serve.",
        ),
        click.Option(
            ["--quantize"],
            type=QUANTIZE,
            default="none",
            show_default=True,
            help="Format of matrices; none: as config.json says.",
        ),
        click.Option(
            ["--twelve-bit/--no-twelve-bit"],
            default=None,
            help="Large bfloat16 matrices are in 12 bits, as on a CPU with AVX-512 or NEON. Default: "
            "yes for the RAM of a machine with one, no for a size that is named.",
        ),
        click.Option(
            ["--max-model-len", "lengths"],
            type=Count(1, TOKENS_MAX),
            multiple=True,
            help="Tokens of a sequence; may be given several times. Default: 4k, 32k, 128k and the model's longest.",
        ),
        click.Option(
            ["--lora"], multiple=True, help="Adapter as name=path or path; the memory of its factors is counted."
        ),
        click.Option(
            ["--store"],
            help="Rate of a store, and its latency if that is not 1 ms, such as 3GB/s or "
            "3GB/s@100us: how long a prefix takes to restore, and to compute.",
        ),
        click.Option(
            ["--device"],
            default="H100",
            show_default=True,
            help="The device that computes, for --store; `weft simulate --help` has their names.",
        ),
        click.Option(
            ["--prefill-rate"],
            type=Number(0, 1_000_000_000, above=True),
            help="Tokens of a prompt that are computed in a second, as measured; instead of --device.",
        ),
        click.Option(["--compare"], is_flag=True, help="Compare with the layouts of other engines in the same bytes."),
        click.Option(
            ["--drafts"],
            type=Count(0, VERIFY_TOKENS_MAX),
            default=3,
            show_default=True,
            help="Speculated tokens per step, for --compare.",
        ),
        click.Option(
            ["--speculate"],
            default="auto",
            show_default=True,
            help="As `weft serve` takes it. With mtp, the model's own head and its KV count; auto "
            "counts them on this machine, without --memory and --arena.",
        ),
        click.Option(["--json", "as_json"], is_flag=True, help="Print every figure as JSON."),
        click.Option(
            ["--plot"],
            type=click.Path(path_type=Path, dir_okay=False),
            help="Write the screen, pictures included, to this .svg or .html file.",
        ),
        click.Option(["--revision"], help="Branch, tag or commit of a hub model."),
    ],
)
def command(
    models: tuple[str, ...],
    memory: str | None,
    arena: str | None,
    lengths: tuple[int, ...],
    compare: bool,
    as_json: bool,
    plot: Path | None,
    revision: str | None,
    store: str | None,
    device: str,
    prefill_rate: float | None,
    speculate: str,
    twelve_bit: bool | None,
    lora: tuple[str, ...],
    **more: Any,
) -> int:
    """Show a model's use of a device's memory, and how many sequences then fit at once.

    MODEL is a checkpoint directory, a public model that weft knows by name, or a hub name (only config.json
    is fetched). Without one, lists the models it knows. With several, or NAME=MODEL, it shows the share of each in
    the memory of one server, and how many fit together.
    """
    if len(models) > 1:
        return _plan_several(models, memory, lengths, more, as_json=as_json)
    model = models[0] if models else None
    if plot is not None and plot.suffix not in (".svg", ".html"):
        raise ConfigError(f"--plot {plot}: the file's name must end in .svg or .html", param="--plot")
    if plot is not None and not os.access(plot.parent, os.W_OK):
        raise ConfigError(f"--plot {plot}: there is no folder {plot.parent} that can be written", param="--plot")
    if model is None:
        return _list_known(as_json)

    from weft.host import keeps_codes
    from weft.planning.model_plan import PlanOptions, make_plan, plan_data

    sizes, from_here = _sizes(memory, arena)
    adapters = adapter_bytes(lora)
    for size in sizes:  # also for an arena: host and device memory are the same
        sizes[size] = max(sizes[size] - sum(adapters.values()), 1)
    name, config = find_config(model, revision)
    mtp = "mtp" in parse_sources(speculate) and (from_here or speculate != "auto")
    packed = from_here and packs_bfloat16() if twelve_bit is None else twelve_bit
    options = PlanOptions(
        **sizes,
        lengths=lengths,
        mtp=mtp,
        twelve_bit=packed,
        coded_tiles=packed and (not from_here or keeps_codes()),
        **stored_as(more),
    )
    plan = make_plan(name, config, options)
    from weft.cli.plan_view import serve_command

    is_path = Path(model).expanduser().exists()
    served = model if is_path else None if _embedded(name) else name
    serve = serve_command(served, revision, config, plan, speculate)
    times = None
    if store is not None:
        from weft.cli.plan_store import restore_times

        times = restore_times(plan, make_plan(name, config, replace(options, tp=1)), store, device, prefill_rate)
    if as_json:
        stored = {} if times is None else {"store": times.to_json()}
        data = {**plan_data(plan, compare=compare), **stored, "serve": serve and serve.line}
        if adapters:
            data["adapters"] = adapters
        click.echo(json.dumps(data, indent=2))
    if plot is not None or not as_json:
        from weft.cli.plan_view import show

        show(plan, compare=compare, from_here=from_here, quiet=as_json, file=plot, times=times, serve=serve)
    if adapters and not as_json:
        click.echo(_adapters_line(adapters))
    return 0 if plan.enough else 1


def _plan_several(
    models: Sequence[str], memory: str | None, lengths: tuple[int, ...], flags: Mapping[str, Any], *, as_json: bool
) -> int:
    from weft.cli.plan_together import plan_together
    from weft.host import keeps_codes
    from weft.models.hub import name_of
    from weft.planning.model_plan import PlanOptions
    from weft.planning.together import AMPLE_BYTES

    served = ("dtype", "kv_dtype", "state_dtype", "quantize")
    sizes, from_here = _sizes(memory, None)
    options = PlanOptions(
        arena_bytes=AMPLE_BYTES,
        lengths=lengths[-1:],
        twelve_bit=from_here and packs_bfloat16(),
        coded_tiles=from_here and keeps_codes(),
        **stored_as({name: flags[name] for name in served}),
    )
    configs = []
    for text in models:
        name, sign, model = text.partition("=")
        is_path = Path(text).expanduser().exists()
        named, config = find_config(text if is_path or not sign else model)
        if is_path or ("/" in text and not sign):
            name = name_of(text)  # the name that `weft serve` would use
        elif not sign:
            name = named
        configs.append((name, config))
    return plan_together(configs, options, sizes["memory_bytes"], as_json=as_json)


def adapter_bytes(entries: tuple[str, ...]) -> dict[str, int]:
    """Return the bytes of each adapter's factors, by name. Raise CheckpointError for a directory without an adapter."""
    if not entries:
        return {}
    from weft.adapters import WEIGHTS_FILE, named_paths, read_adapter
    from weft.models.hub import resolve_adapter
    from weft.models.safetensors_header import read_header

    paths = named_paths(entry if "=" in entry else f"{Path(entry).name}={entry}" for entry in entries)
    sizes = {}
    for name, path in paths.items():
        directory = resolve_adapter(path)
        read_adapter(name, directory)
        sizes[name] = sum(tensor.stored_bytes for tensor in read_header(directory / WEIGHTS_FILE).values())
    return sizes


def _adapters_line(adapters: Mapping[str, int]) -> str:
    plural = "s take" if len(adapters) > 1 else " takes"
    return (
        f"{len(adapters)} adapter{plural} {format_bytes(sum(adapters.values()))} of it "
        "(limits.lora_memory). A prefix is cached for each adapter by itself: the same text gives other "
        "states under other weights, so nothing of it is shared."
    )


def stored_as(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``flags`` as ``PlanOptions`` names dtypes and forms: None for auto and none."""
    return {
        name: KV_DTYPES.get(value) if name.endswith("dtype") else None if value == "none" else value
        for name, value in flags.items()
    }


def find_config(model: str, revision: str | None = None) -> tuple[str, Mapping[str, Any]]:
    """Return (name to show, parsed config.json) of a directory, a name of the table, or a hub name.

    Raise CheckpointError that says where it searched and names similar models of the table.
    """
    from weft.planning.geometries import find_geometry, near_names

    is_path = Path(model).expanduser().exists()
    known = find_geometry(model)
    if known is not None and not is_path and revision is None:
        return known.name, known.config
    if is_path or "/" in model or _embedded(model):
        return _read_config(model, revision)
    near = near_names(model)
    hint = f"did you mean {' or '.join(near)}?" if near else "`weft plan` lists those it knows."
    raise CheckpointError(
        f"there is no directory {model!r}, and weft knows no model of that name: {hint} "
        "Or give a directory that holds config.json, or a hub name (owner/name)",
        param="model",
    )


def _read_config(model: str, revision: str | None) -> tuple[str, Mapping[str, Any]]:
    from weft.models.config_file import read_config
    from weft.models.hub import resolve_model
    from weft.planning.geometries import near_names

    try:
        directory = _embedded(model) or resolve_model(model, revision, config_only=True)
    except CheckpointError as error:
        near = near_names(model)
        hint = f". weft knows {' and '.join(near)} without the hub" if near else ""
        raise CheckpointError(error.message + hint, param="model") from None
    return (
        directory.name if Path(model).expanduser().is_dir() else model,
        _with_codes(directory, _without_missing_tower(directory, read_config(directory))),
    )


def _without_missing_tower(directory: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``config`` of the text part only, if the weights are in the directory and have no tower."""
    if not isinstance(config.get("vision_config"), Mapping):
        return config
    from weft.families import read_architecture
    from weft.families.tower_tensors import tower_prefix
    from weft.models.safetensors_header import stored_names

    names, tower = stored_names(directory), read_architecture(config).vision
    if not names or tower is None or tower_prefix(names, tower) is not None:
        return config
    return {key: value for key, value in config.items() if key != "vision_config"}


def _with_codes(directory: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``config`` with the codes of quantised files, if they are in the directory."""
    settings = config.get("quantization_config")
    if not isinstance(settings, Mapping) or settings.get("quant_method") == "gguf":
        return config
    from weft.families import read_architecture
    from weft.models.safetensors_header import all_stored
    from weft.planning.weights import CODED, coded

    whole = read_architecture({key: value for key, value in config.items() if key != "quantization_config"})
    codes = coded(((tensor.name, tensor.dtype, tensor.shape) for tensor in all_stored(directory)), whole.layer_count)
    return {**config, "quantization_config": {**settings, CODED: codes}}


def _embedded(name: str) -> Path | None:
    """Return the directory of the model ``name`` if it ships with weft."""
    folder = _EMBEDDED / name
    return folder if folder.parent == _EMBEDDED and folder.is_dir() else None


def _sizes(memory: str | None, arena: str | None) -> tuple[dict[str, Any], bool]:
    """Return (the requested bytes, as fields of PlanOptions; whether they are this machine's)."""
    if memory is not None and arena is not None:
        raise ConfigError("--memory and --arena exclude each other: give one of them", param="--arena")
    if arena is not None:
        return {"arena_bytes": parse_bytes(arena, flag="--arena")}, False
    if memory is not None:
        return {"memory_bytes": parse_bytes(memory, flag="--memory")}, False
    from weft.host import free_ram_bytes

    return {"memory_bytes": free_ram_bytes()}, True


def packs_bfloat16() -> bool:
    """Return whether this machine's CPU keeps bfloat16 in 12 bits, if the C++ kernels were built."""
    from weft.cli.doctor import cpu_facts

    features = cpu_facts()["features"]
    return bool(features["avx512f"] or features["asimd"])


def _list_known(as_json: bool) -> int:
    """Return the table of public geometries, each planned by itself."""
    from weft.planning.geometries import GEOMETRIES
    from weft.planning.model_plan import PlanOptions, make_plan, plan_data

    options = PlanOptions(arena_bytes=1 << 40)
    plans = [make_plan(geometry.name, geometry.config, options) for geometry in GEOMETRIES]
    if as_json:
        click.echo(json.dumps([plan_data(plan, compare=False) for plan in plans], indent=2))
    else:
        from weft.cli.plan_view import show_known

        show_known(plans)
    return 0
