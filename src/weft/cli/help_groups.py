"""Help in groups: which heading of ``--help`` a config flag stands under, and which wait for ``--help-all``.

    Options:   the command's own flags
    Model:     --model, --quantize, ...      Memory:  ...      Cache:  ...      Scheduling:  ...
    Server:    --host, --port, ...           Security:  ...    Device: ...
    Config file, [limits]: ...               Config file, [debug]: ...

``--help`` fits two screens: the frequent flags, the first sentence of each. ``--help-all`` shows every flag
and every key of the config file whole. Every command that takes a config has both, with the same groups.

A test holds that each flag of ``EngineConfig`` and ``ServerConfig`` is in exactly one group.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import click

GROUPS: dict[str, tuple[str, ...]] = {
    "Model": ("model", "revision", "dtype", "quantize", "weights_cache", "seed", "served_model_name",
              "chat_template", "reasoning_parser", "tool_parser"),
    "Memory": ("memory", "gpu_memory_fraction", "max_model_len", "kv_dtype", "state_dtype"),
    "Cache": ("prefix_cache", "checkpoints", "exact", "compress_kv", "store", "store_size", "store_cache"),
    "Scheduling": ("max_num_seqs", "max_num_batched_tokens", "max_step_ms", "max_queued_requests",
                   "speculate"),
    "Server": ("host", "port", "log_level", "access_log", "otlp_endpoint", "record", "record_tokens",
               "response_store", "file_store", "replicas", "listen_engines", "token", "http_workers",
               "ray", "ray_cpus", "ray_gpus"),
    "Security": ("api_key", "api_key_file", "operator_key", "allowed_host", "allowed_origin", "tenant_by_key",
                 "hide_cached_tokens", "show_text"),
    "Device": ("device", "threads", "tp", "ep"),
}

FREQUENT = frozenset({
    "model", "dtype", "quantize", "served_model_name", "memory", "max_model_len", "kv_dtype", "state_dtype",
    "prefix_cache", "exact", "store", "store_size", "max_num_seqs", "max_queued_requests", "speculate",
    "host", "port", "replicas", "listen_engines", "record", "api_key", "operator_key", "allowed_host",
    "tenant_by_key", "device", "threads", "tp"})
"""Fields that ``--help`` shows."""

AS_FLAG = "_as_flag"
"""Suffix of the hidden twin of a positional field: ``--model X`` beside ``MODEL``."""
_SHOW_ALL = "weft.help_all"


def help_all_option() -> click.Option:
    return click.Option(["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=_show_all,
                        help="Every flag, limit and debug switch, whole.")


def _show_all(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
    if wanted:
        ctx.meta[_SHOW_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


def write_groups(
    ctx: click.Context, formatter: click.HelpFormatter, params: Sequence[click.Parameter],
    config_fields: Collection[str], tables: Mapping[str, str]
) -> None:
    """The options under their headings; those that are no field of a config under Options. ``tables``: of the
    fields that are keys of the config file alone."""
    show_all = ctx.meta.get(_SHOW_ALL, False)
    headings = {name: heading for heading, names in GROUPS.items() for name in names if name in config_fields}
    headings |= {name: f"Config file, [{table}]" for name, table in tables.items()}
    rows: dict[str, list[tuple[str, str]]] = {heading: [] for heading in ("Options", *headings.values())}
    for param in params:
        if isinstance(param, click.Argument):
            continue
        field = (param.name or "").removesuffix(AS_FLAG)
        record = param.get_help_record(ctx)
        if record is not None and (show_all or field not in headings or field in FREQUENT):
            name, text = record
            rows[headings.get(field, "Options")].append((name, text if show_all else _first_sentence(text)))
    for heading, records in rows.items():
        if records:
            with formatter.section(heading):
                formatter.write_dl(records)


def _first_sentence(text: str) -> str:
    """Without the default, which ``--help-all`` shows."""
    return text.partition("  [default")[0].partition(". ")[0].partition("; ")[0].rstrip(".")
