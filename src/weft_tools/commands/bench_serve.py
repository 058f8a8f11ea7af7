"""``weft bench serve``: ``weft_tools.bench.serve`` with the usual flags, as a table and a file."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.parse import urlsplit

import click
import uvloop

from weft.cli.flags import COUNT_MAX, DAY_S, PORTS_MAX, VOCABULARY_MAX, Count, FlagCommand, Number
from weft.cli.main import progress_bar
from weft.errors import ConfigError
from weft.units import TOKENS_MAX
from weft_tools.bench import report
from weft_tools.bench.diagnosis import Diagnosis, ServerRun, of_server
from weft_tools.bench.metrics import METRICS, figures, parse_goodput, parse_names, parse_percentiles, times_of
from weft_tools.bench.prompts import SampleRequest, file_requests, prefix_repetition_requests, random_requests
from weft_tools.bench.serve import (
    BACKENDS,
    VOCAB_SIZE_UNKNOWN,
    LoadConfig,
    Served,
    Server,
    Timing,
    check_lengths,
    run_load,
)

DATASETS = ("random", "prefix_repetition", "sharegpt", "custom")
_TOKENS = Count(1, TOKENS_MAX)
_REQUESTS = Count(1, COUNT_MAX)

DATASET_FLAGS: list[click.Parameter] = [
    click.Option(["--dataset-name"], type=click.Choice(DATASETS), default="random", show_default=True,
                 help="random tokens; prefix_repetition: random after shared prefixes; sharegpt: a JSON "
                      'file; custom: JSON lines with "prompt".'),
    click.Option(["--dataset-path"], type=click.Path(path_type=Path), help="File of sharegpt and custom."),
    click.Option(["--num-prompts"], type=_REQUESTS, default=100, show_default=True,
                 help="Number of requests."),
    click.Option(["--random-input-len", "--input-len", "input_len"], type=_TOKENS, default=1024,
                 show_default=True, help="Tokens of each prompt after the shared prefix."),
    click.Option(["--random-output-len", "--output-len", "output_len"], type=_TOKENS, default=128,
                 show_default=True, help="Tokens to make."),
    click.Option(["--random-prefix-len", "--prefix-len", "prefix_len"], type=Count(0, TOKENS_MAX), default=0,
                 show_default=True, help="Tokens that all prompts share, before their own."),
    click.Option(["--random-range-ratio"], type=Number(0, 1, below=True), default=0.0,
                 show_default=True, help="Both lengths vary by this share, up and down."),
    click.Option(["--prefix-repetition-prefix-len"], type=_TOKENS, default=256, show_default=True,
                 help="Tokens of a shared prefix."),
    click.Option(["--prefix-repetition-suffix-len"], type=_TOKENS, default=256, show_default=True,
                 help="Tokens after the prefix."),
    click.Option(["--prefix-repetition-num-prefixes"], type=_REQUESTS, default=10, show_default=True,
                 help="Different prefixes."),
    click.Option(["--prefix-repetition-output-len"], type=_TOKENS, default=128, show_default=True,
                 help="Tokens to make."),
    click.Option(["--sharegpt-output-len"], type=_TOKENS,
                 help="Tokens to generate; default: the length of the file's answer."),
    click.Option(["--custom-output-len"], type=_TOKENS,
                 help='Tokens to make; default: the line\'s "output_tokens".'),
]  # fmt: skip


def asks_of(values: Mapping[str, Any], vocab_size: int) -> list[SampleRequest]:
    """Return the requests that DATASET_FLAGS describe. Raise ConfigError."""
    kind, count, seed = values["dataset_name"], values["num_prompts"], values["seed"]
    if kind == "random":
        return random_requests(
            count,
            input_len=values["input_len"],
            output_len=values["output_len"],
            range_ratio=values["random_range_ratio"],
            prefix_len=values["prefix_len"],
            vocab_size=vocab_size,
            seed=seed,
        )
    if kind == "prefix_repetition":
        return prefix_repetition_requests(
            count,
            prefix_len=values["prefix_repetition_prefix_len"],
            suffix_len=values["prefix_repetition_suffix_len"],
            prefixes=values["prefix_repetition_num_prefixes"],
            output_len=values["prefix_repetition_output_len"],
            vocab_size=vocab_size,
            seed=seed,
        )
    if values["dataset_path"] is None:
        raise ConfigError(f"--dataset-name {kind} needs a file: --dataset-path FILE", param="--dataset-path")
    return file_requests(kind, values["dataset_path"], count, output_len=values[f"{kind}_output_len"], seed=seed)


@click.command(
    "serve",
    cls=FlagCommand,
    params=[
        click.Option(
            ["--base-url"], envvar="WEFT_URL", help="Server, with or without /v1; default: of --host and --port."
        ),
        click.Option(["--host"], default="127.0.0.1", show_default=True, help="Host of the server."),
        click.Option(["--port"], type=Count(1, PORTS_MAX), default=8000, show_default=True, help="Port of the server."),
        click.Option(
            ["--backend"],
            type=click.Choice(list(BACKENDS)),
            default="openai",
            show_default=True,
            help="How it is asked: openai (completions, token ids), openai-chat; vllm is openai.",
        ),
        click.Option(["--endpoint"], help="Path to ask; default: the backend's."),
        click.Option(["--model"], help="Name of the model; default: the first that the server lists."),
        click.Option(["--api-key"], envvar="WEFT_API_KEY", help="Its key."),
        *DATASET_FLAGS,
        click.Option(
            ["--request-rate"],
            type=Number(0, math.inf, above=True),
            default=math.inf,
            show_default=True,
            help="Requests per second; inf: all at once.",
        ),
        click.Option(
            ["--burstiness"],
            type=Number(0, 1_000_000, above=True),
            default=1.0,
            show_default=True,
            help="Shape of the gaps between requests: 1 is Poisson, less comes in bursts, more evenly.",
        ),
        click.Option(["--max-concurrency"], type=Count(1, PORTS_MAX), help="Most requests that are open at once."),
        click.Option(
            ["--num-warmups"],
            type=Count(0, COUNT_MAX),
            default=0,
            show_default=True,
            help="Uncounted requests before the load, after the first one, which is always sent.",
        ),
        click.Option(
            ["--request-timeout"],
            type=Number(0, DAY_S, above=True),
            default=600.0,
            show_default=True,
            help="Seconds of silence after which a request has failed.",
        ),
        click.Option(
            ["--ignore-eos/--no-ignore-eos"],
            default=True,
            show_default=True,
            help="Generate exactly the requested number of tokens.",
        ),
        click.Option(["--extra-body"], help="JSON object whose fields replace those of each request."),
        click.Option(
            ["--goodput"],
            multiple=True,
            metavar="NAME:MS...",
            help='Promise of each request, in milliseconds, such as ttft:500; several, or "ttft:500 tpot:50".',
        ),
        click.Option(
            ["--percentile-metrics"],
            default="ttft,tpot,itl,e2el",
            show_default=True,
            help="Figures to show, separated by commas.",
        ),
        click.Option(
            ["--metric-percentiles"], default="99", show_default=True, help="Their percentiles, separated by commas."
        ),
        click.Option(
            ["--vocab-size"],
            type=Count(2, VOCABULARY_MAX),
            help=f"Random tokens are below; default: the server's, else {VOCAB_SIZE_UNKNOWN}.",
        ),
        click.Option(
            ["--seed"],
            type=Count(-(2**63), 2**64 - 1),
            default=0,
            show_default=True,
            help="Seed of prompts and arrivals.",
        ),
        click.Option(["--save-result"], is_flag=True, help="Write the result as JSON."),
        click.Option(["--save-detailed"], is_flag=True, help="With lengths, times and errors of each request."),
        click.Option(
            ["--result-dir"],
            type=click.Path(path_type=Path, file_okay=False),
            default=Path("."),
            help="Folder of the file; default: this one.",
        ),
        click.Option(["--result-filename"], help="Its name; default: of backend, rate, model and date."),
        click.Option(["--metadata"], multiple=True, metavar="KEY=VALUE", help="Goes into the file."),
    ],
)
def serve(**values: Any) -> int:
    """Put a load on a running server and measure it as its clients do.

    Any OpenAI-compatible server works. The prompts depend only on the flags and --seed, so two servers get the same
    prompts. Exit code 1 when a request failed.
    """
    values["base_url"] = values["base_url"] or f"http://{values['host']}:{values['port']}"
    load = _load(values)
    promises, names = parse_goodput(values["goodput"]), parse_names(values["percentile_metrics"])
    percentiles, notes = parse_percentiles(values["metric_percentiles"]), _metadata(values["metadata"])
    if values["save_result"] or values["save_detailed"]:
        report.check_writable(values["result_dir"] / "result.json", "--result-dir")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # keep the client's work small
        served, asks, timings, seconds, queued, share = runner.run(_measure(values, load))
    results = figures(timings, seconds, names=names, percentiles=percentiles, promises=promises)
    _show(results, names, percentiles)
    diagnosis = _diagnosis(values["base_url"], timings, results["max_concurrent_requests"], queued, share)
    if diagnosis is not None:
        report.conclude(diagnosis)
    for why in sorted({timing.error for timing in timings if timing.error is not None})[:5]:
        click.secho(f"failed: {why}", fg="red", err=True)
    if values["save_result"] or values["save_detailed"]:
        rate = "inf" if math.isinf(load.request_rate) else load.request_rate
        whole = {
            **report.facts(),
            "backend": values["backend"],
            "base_url": values["base_url"],
            "model_id": served.name,
            "num_prompts": len(asks),
            "request_rate": rate,
            "burstiness": load.burstiness,
            "max_concurrency": load.max_concurrency,
            "goodput": promises or None,
            **notes,
            **results,
            "diagnosis": diagnosis and diagnosis.rows(),
        }
        if values["save_detailed"]:
            whole |= _details(timings)
        name = values["result_filename"] or (
            f"{values['backend']}-{rate}qps-{served.name.split('/')[-1]}-{whole['date']}.json"
        )
        report.write(values["result_dir"] / name, whole)
        click.echo(f"{values['result_dir'] / name} has the result.")
    return 1 if results["failed"] else 0


def _load(values: Mapping[str, Any]) -> LoadConfig:
    """Return the settings of the load. Raise ConfigError."""
    extra: Any = {}
    if values["extra_body"] is not None:
        try:
            extra = json.loads(values["extra_body"])
        except ValueError:
            extra = None
        if not isinstance(extra, dict):
            raise ConfigError(
                f"--extra-body is {values['extra_body']!r}; it must be a JSON object", param="--extra-body"
            )
    return LoadConfig(
        values["request_rate"],
        values["burstiness"],
        values["max_concurrency"],
        values["num_warmups"],
        values["seed"],
        values["request_timeout"],
        {"ignore_eos": values["ignore_eos"], **extra},
    )


def _metadata(pairs: tuple[str, ...]) -> dict[str, str]:
    for pair in pairs:
        if "=" not in pair:
            raise ConfigError(f"--metadata is {pair!r}; it is KEY=VALUE", param="--metadata")
    return {key: value for key, _, value in (pair.partition("=") for pair in pairs)}


async def _measure(
    values: Mapping[str, Any], load: LoadConfig
) -> tuple[Served, list[SampleRequest], list[Timing], float, float | None, float]:
    """Run the load. The last two results: mean seconds of a request in the server's queue, if it tells; the share of
    the time in which this client was busy."""
    server = Server(
        values["base_url"],
        backend=values["backend"],
        endpoint=values["endpoint"],
        api_key=values["api_key"],
        request_timeout_s=load.request_timeout_s,
    )
    async with server.http:
        served = await server.served(values["model"])
        asks = await _asks(values, server, served)
        check_lengths(asks, served)
        before = await server.queue_seconds()
        done = itertools.count(1)
        began, busy = time.perf_counter(), _busy_s()
        with progress_bar("requests") as show:
            timings, seconds = await run_load(
                server, served, asks, load, on_done=lambda timing: show(next(done), len(asks))
            )
        share = (_busy_s() - busy) / (time.perf_counter() - began)
        after = await server.queue_seconds()
    waited, requests = (late - early for late, early in zip(after, before, strict=True))
    return served, asks, timings, seconds, waited / requests if requests > 0 else None, share


def _busy_s() -> float:
    """Return the seconds that this thread ran or, if the system reports it, waited for a core."""
    try:
        ran, waited, _ = Path("/proc/thread-self/schedstat").read_text().split()
    except OSError:
        return time.thread_time()
    return (int(ran) + int(waited)) / 1e9


def _diagnosis(
    base_url: str, timings: list[Timing], at_once: int, queued: float | None, client_share: float
) -> Diagnosis | None:
    """Return the diagnosis; None if no request was answered."""
    times = [times_of(timing) for timing in timings if timing.error is None and timing.chunks]
    if not times:
        return None
    here = urlsplit(base_url).hostname in ("localhost", "127.0.0.1", "::1")
    return of_server(
        ServerRun(
            fmean(answer_times.ttft for answer_times in times),
            fmean(answer_times.e2el for answer_times in times),
            at_once,
            here,
            queued,
            client_share,
        )
    )


async def _asks(values: Mapping[str, Any], server: Server, served: Served) -> list[SampleRequest]:
    vocab_size = values["vocab_size"] or served.vocab_size or VOCAB_SIZE_UNKNOWN
    asks = asks_of(values, vocab_size)
    asks = [
        SampleRequest(ask.prompt, max(1, await server.count_tokens(ask.answer))) if ask.answer else ask for ask in asks
    ]
    if values["backend"] == "openai-chat":
        asks = [
            SampleRequest(
                ask.prompt if isinstance(ask.prompt, str) else await server.text_of(ask.prompt), ask.output_tokens
            )
            for ask in asks
        ]
    return asks


def _show(results: Mapping[str, Any], names: tuple[str, ...], percentiles: tuple[float, ...]) -> None:
    rows = {
        "requests done": results["completed"],
        "requests failed": results["failed"],
        "duration (s)": results["duration"],
        "input tokens": results["total_input_tokens"],
        "of them from the server's cache": results["total_cached_tokens"],
        "output tokens": results["total_output_tokens"],
        "request throughput (req/s)": results["request_throughput"],
        "request goodput (req/s)": results["request_goodput"],
        "output token throughput (tok/s)": results["output_throughput"],
        "most in one second (tok/s)": results["max_output_tokens_per_s"],
        "total token throughput (tok/s)": results["total_token_throughput"],
        "most requests at once": results["max_concurrent_requests"],
    }
    if results["request_goodput"] is None:
        del rows["request goodput (req/s)"]
    if results["accepted_length"] is not None:
        rows |= {
            "accepted length (tokens a step)": results["accepted_length"],
            "drafts accepted": results["total_accepted_drafts"],
            "drafts accepted (share)": results["acceptance_rate"],
        }
    report.show("LoadConfig", rows)
    for name in names:
        kinds = ["mean", "median", *(f"p{percentile:g}" for percentile in percentiles)]
        report.show(
            f"{name.upper()}: {METRICS[name]}", {f"{kind} (ms)": results[f"{kind}_{name}_ms"] for kind in kinds}
        )


def _details(timings: list[Timing]) -> dict[str, Any]:
    """Return figures per request, in the order of sending; None for steps that a request did not reach."""
    began = min(timing.sent for timing in timings)
    return {
        "input_lens": [timing.prompt_tokens for timing in timings],
        "output_lens": [timing.output_tokens for timing in timings],
        "start_times": [timing.sent - began for timing in timings],
        "ttfts": [timing.first_token_s if timing.chunks else None for timing in timings],
        "itls": [timing.gaps_s for timing in timings],
        "latencies": [timing.chunks[-1][0] - timing.sent if timing.chunks else None for timing in timings],
        "errors": [timing.error or "" for timing in timings],
    }
