"""Help in groups: which heading of ``--help`` a config flag stands under, and which wait for ``--help-all``.

    Options:   the command's own flags
    Model:     --model, --quantize, ...      Memory:  ...      Cache:  ...      Scheduling:  ...
    Server:    --host, --port, ...           Security:  ...    Device: ...

``weft serve`` has over 80 flags, and most are set once in a thousand starts. ``--help`` shows the frequent
ones, ``--help-all`` shows all. Every command that takes a config has both, with the same groups.

A test holds that each field of ``EngineConfig`` and ``ServerConfig`` is in exactly one group.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import click

GROUPS: dict[str, tuple[str, ...]] = {
    "Model": ("model", "revision", "dtype", "quantize", "quantize_inputs", "twelve_bit", "weights_cache",
              "allow_nonfinite", "seed", "served_model_name", "chat_template", "reasoning_parser",
              "tool_parser"),
    "Memory": ("memory", "gpu_memory_fraction", "max_model_len", "kv_dtype", "state_dtype"),
    "Cache": ("prefix_cache", "checkpoints", "exact", "compress_kv", "cache_policy", "count_salt", "store",
              "store_size", "store_write", "store_pack", "store_reserve", "store_cache"),
    "Scheduling": ("max_num_seqs", "max_num_batched_tokens", "max_step_ms", "max_queued_requests", "overlap",
                   "speculate", "speculate_max", "grammar_seconds", "grammar_memory", "grammar_cache"),
    "Server": ("host", "port", "log_level", "access_log", "otlp_endpoint", "drain_timeout",
               "metrics_prefix", "sse_keep_alive", "record",
               "record_tokens", "record_limit", "response_store", "response_store_size",
               "max_stored_responses", "response_days", "max_response_turns", "file_store", "file_store_size",
               "max_stored_files", "file_days", "max_batch_lines", "replicas", "router", "restarts",
               "stall_after", "listen_engines", "token", "http_workers", "ray", "ray_cpus", "ray_gpus"),
    "Security": ("api_key", "api_key_file", "operator_key", "allowed_host", "allowed_origin",
                 "tenant_by_key", "hide_cached_tokens", "show_text", "key_requests_per_minute",
                 "key_tokens_per_minute", "key_mb_in_flight", "max_body_mb", "max_json_values",
                 "max_buffered_mb",
                 "max_request_line", "max_header_bytes", "max_headers", "max_connections",
                 "max_connections_per_address", "header_timeout", "body_timeout",
                 "max_answer_logprobs", "min_body_rate", "idle_timeout", "write_timeout",
                 "max_tokenize_chars", "template_seconds", "template_chars", "template_memory"),
    "Device": ("device", "threads", "tp", "ep", "rank_timeout", "cuda_graphs", "cpu_kernels",
               "gpu_kernels", "attention_backend"),
}

FREQUENT = frozenset({
    "model", "revision", "dtype", "quantize", "seed", "served_model_name", "chat_template",
    "reasoning_parser", "tool_parser", "memory", "gpu_memory_fraction", "max_model_len", "kv_dtype",
    "state_dtype", "prefix_cache", "checkpoints", "exact", "store", "store_size", "max_num_seqs",
    "max_num_batched_tokens", "max_queued_requests", "speculate", "response_store", "file_store", "host",
    "port", "replicas", "listen_engines", "token", "ray", "log_level", "record", "api_key",
    "api_key_file", "operator_key", "allowed_host", "allowed_origin", "tenant_by_key", "device", "threads",
    "tp"})
"""Fields that ``--help`` shows."""

AS_FLAG = "_as_flag"
"""Suffix of the hidden twin of a positional field: ``--model X`` beside ``MODEL``."""
_SHOW_ALL = "weft.help_all"


def help_all_option() -> click.Option:
    return click.Option(["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=_show_all,
                        help="Show this message with the rare flags, and exit.")


def _show_all(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
    if wanted:
        ctx.meta[_SHOW_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


def write_groups(
    ctx: click.Context, formatter: click.HelpFormatter, params: Sequence[click.Parameter],
    config_fields: Collection[str]
) -> None:
    """The options under their headings; those that are no field of a config under Options."""
    show_all = ctx.meta.get(_SHOW_ALL, False)
    headings = {name: heading for heading, names in GROUPS.items() for name in names
                if name in config_fields}
    rows: dict[str, list[tuple[str, str]]] = {"Options": [], **{heading: [] for heading in GROUPS}}
    for param in params:
        if isinstance(param, click.Argument):
            continue
        field = (param.name or "").removesuffix(AS_FLAG)
        record = param.get_help_record(ctx)
        if record is not None and (show_all or field not in headings or field in FREQUENT):
            rows[headings.get(field, "Options")].append(record)
    for heading, records in rows.items():
        if records:
            with formatter.section(heading):
                formatter.write_dl(records)
