"""``weft bench latency`` and ``weft bench throughput``: ``weft_tools.bench.offline`` with the usual flags."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from weft.cli.flags import COUNT_MAX, Count, FlagCommand, build, given_flags
from weft.cli.main import progress_bar
from weft.config import STEP_TOKENS_MAX, EngineConfig
from weft.host import usable_cores
from weft.request import SEQUENCES_MAX
from weft.units import TOKENS_MAX
from weft_tools.bench import report
from weft_tools.bench.diagnosis import Diagnosis, EngineRun, of_engine
from weft_tools.commands.bench_serve import DATASET_FLAGS, asks_of

if TYPE_CHECKING:
    from weft.api import Engine

_OUTPUT = click.Option(
    ["--output-json"], type=click.Path(path_type=Path, dir_okay=False), help="Write the result to this file."
)
_N = click.Option(["--n"], type=Count(1, SEQUENCES_MAX), default=1, show_default=True, help="Answers to each prompt.")


@click.command(
    "latency",
    cls=FlagCommand,
    configs=(EngineConfig,),
    params=[
        click.Option(
            ["--input-len"], type=Count(1, TOKENS_MAX), default=32, show_default=True, help="Tokens of each prompt."
        ),
        click.Option(
            ["--output-len"], type=Count(1, TOKENS_MAX), default=128, show_default=True, help="Tokens to generate."
        ),
        click.Option(
            ["--batch-size"], type=Count(1, STEP_TOKENS_MAX), default=8, show_default=True, help="Prompts at once."
        ),
        _N,
        click.Option(
            ["--num-iters-warmup"],
            type=Count(0, COUNT_MAX),
            default=2,
            show_default=True,
            help="Runs that are not counted.",
        ),
        click.Option(
            ["--num-iters"], type=Count(1, COUNT_MAX), default=10, show_default=True, help="Runs that are counted."
        ),
        _OUTPUT,
    ],
)
@click.pass_context
def latency(
    ctx: click.Context,
    /,
    input_len: int,
    output_len: int,
    batch_size: int,
    n: int,
    num_iters_warmup: int,
    num_iters: int,
    output_json: Path | None,
    **values: Any,
) -> int:
    """Time one batch, from the prompts to the last token, without a server.

    MODEL as for `weft serve`. The prefix cache is off unless --prefix-cache is given.
    """
    report.check_writable(output_json, "--output-json")
    config = build(EngineConfig, values)
    if "prefix_cache" not in given_flags(ctx, EngineConfig):
        config = dataclasses.replace(config, prefix_cache=False)
    from weft_tools.bench import offline

    done, total = itertools.count(1), num_iters_warmup + num_iters
    with _engine(config) as engine, progress_bar("runs") as show:
        results = offline.latency(
            engine,
            batch_size=batch_size,
            input_len=input_len,
            output_len=output_len,
            n=n,
            warmups=num_iters_warmup,
            iterations=num_iters,
            seed=config.seed,
            on_done=lambda seconds: show(next(done), total, f"{seconds:.2f} s"),
        )
        model = engine.info.name
        ceilings, diagnosis = _beside_ceilings(
            config,
            engine,
            results["avg_latency"],
            prompt_tokens=batch_size * input_len,
            steps=output_len - 1,
            rows=batch_size * n,
        )
    report.show(
        f"{model}: {batch_size} x {input_len} -> {output_len} tokens, {num_iters} runs",
        {
            "average (s)": results["avg_latency"],
            **{f"{percent} % (s)": seconds for percent, seconds in results["percentiles"].items()},
            "output tokens per second": batch_size * n * output_len / results["avg_latency"],
            **ceilings,
        },
    )
    report.conclude(diagnosis)
    if output_json is not None:
        report.write(
            output_json,
            {
                **report.facts(),
                "model_id": model,
                "batch_size": batch_size,
                "input_len": input_len,
                "output_len": output_len,
                **results,
                "ceilings": ceilings,
                "diagnosis": diagnosis.rows(),
            },
        )
    return 0


@click.command(
    "throughput",
    cls=FlagCommand,
    configs=(EngineConfig,),
    params=[
        *DATASET_FLAGS,
        _N,
        click.Option(
            ["--num-warmups"],
            type=Count(0, COUNT_MAX),
            default=0,
            show_default=True,
            help="Prompts that are run before the clock starts; their cached prefixes are dropped.",
        ),
        _OUTPUT,
    ],
)
def throughput(n: int, num_warmups: int, output_json: Path | None, **values: Any) -> int:
    """Count requests and tokens per second when many prompts come at once, without a server.

    MODEL as for `weft serve`; so are all its flags, the prefix cache included.
    """
    report.check_writable(output_json, "--output-json")
    config = build(EngineConfig, values)
    from weft_tools.bench import offline
    from weft_tools.bench.prompts import SampleRequest

    with _engine(config) as engine:
        asks = [
            SampleRequest(ask.prompt, len(engine.tokenizer.encode(ask.answer)) or 1) if ask.answer else ask
            for ask in asks_of({**values, "seed": config.seed}, engine.info.vocab_size)
        ]
        results = offline.throughput(engine, asks, n=n, warmups=num_warmups)
        model = engine.info.name
        steps = max(ask.output_tokens for ask in asks) - 1
        ceilings, diagnosis = _beside_ceilings(
            config,
            engine,
            results["elapsed_time"],
            steps=steps,
            prompt_tokens=results["total_input_tokens"] - results["total_cached_tokens"],
            rows=results["total_output_tokens"] / (steps + 1),
        )
    report.show(
        f"{model}: {results['num_requests']} requests",
        {
            "seconds": results["elapsed_time"],
            "requests per second": results["requests_per_second"],
            "tokens per second, all": results["tokens_per_second"],
            "output tokens per second": results["output_tokens_per_second"],
            "input tokens": results["total_input_tokens"],
            "of them from the prefix cache": results["total_cached_tokens"],
            "output tokens": results["total_output_tokens"],
            **ceilings,
        },
    )
    report.conclude(diagnosis)
    if output_json is not None:
        report.write(
            output_json,
            {**report.facts(), "model_id": model, **results, "ceilings": ceilings, "diagnosis": diagnosis.rows()},
        )
    return 0


def _beside_ceilings(
    config: EngineConfig, engine: Engine, seconds: float, *, prompt_tokens: int, steps: int, rows: float
) -> tuple[dict[str, Any], Diagnosis]:
    """Return the machine's ceilings and the share of them that ``seconds`` reached, with a diagnosis."""
    from weft.tensor import native
    from weft.tensor.device import choose_device
    from weft_tools.bench.machine import demand_of, measure_machine, share_rows

    device = choose_device(config.device)
    machine = measure_machine(device)
    demand = demand_of(config, engine.info)
    least = demand.least(machine, prompt_tokens=prompt_tokens, steps=steps, rows=rows)
    on_cpu = device.type == "cpu"
    run = EngineRun(
        seconds,
        least,
        rows,
        quantize=config.quantize,
        speculates=config.speculate != "off",
        threads=engine.info.threads if on_cpu else 0,
        cores=usable_cores() if on_cpu else 0,
        cpp_kernels=native.in_use() or not on_cpu,
        byte_gain=machine.rate("int8") / machine.rate(demand.dtype),
    )
    return share_rows(machine, least.total, seconds), of_engine(run)


def _engine(config: EngineConfig) -> Engine:
    from weft.api import Engine

    return Engine(**dataclasses.asdict(config))
