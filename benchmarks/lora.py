"""What adapters cost: decode of many rows, of one, and prompts, with adapters and without, in one engine.

    python -m benchmarks.lora [--geometry LFM2-350M] [--layers 16] [--rows 32] [--adapters 8] [--rank 16]
                              [--rounds 5] [--peft] [--json FILE]

A random bfloat16 model of a public geometry with ``--adapters`` adapters of all its projections. Each round
runs every arm once, in turns; the figure of an arm is the median over rounds of the CPU time of its steps, on
one thread, so other load on the machine counts little. Beside it stands the ratio to the arm without
adapters, the median of the rounds' own: 1.00x is free. Speed does not depend on what weights say, so random
ones do.

    32 rows        rows of the batch have the adapters in turns: neighbours differ
    one stream     one row, with the first adapter
    prompt         512 tokens, with the first adapter

``--peft``: peft over transformers decodes one row of the same files, with and without its adapter.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.start import write_checkpoint
from weft.api import Engine
from weft.host import cpu_name_and_flags
from weft.models.decoder import CausalModel
from weft.planning.geometries import find_geometry
from weft.request import Request, SamplingParams
from weft.tensor import native

PROMPT_TOKENS, STEPS, CONTEXT = 512, 16, 64


def write_adapter(engine: Engine, directory: Path, rank: int, seed: int) -> Path:
    """Factors of every projection of the layers, as the model has them."""
    model = engine._core.executor.model  # type: ignore[attr-defined]
    assert isinstance(model, CausalModel)
    directory.mkdir()
    generator, tensors = torch.Generator().manual_seed(seed), {}
    stored = set(model.targets.stored)
    for name in sorted(stored):
        target = model.targets.find(name)
        if target.kind != "product" or not name.startswith("layers."):
            continue
        rows, columns = target.whole_shape
        for side, shape in (("A", (rank, columns)), ("B", (rows, rank))):
            values = torch.randn(shape, generator=generator) * 0.02
            tensors[f"base_model.model.model.{name}.lora_{side}.weight"] = values.bfloat16()
    save_file(tensors, directory / "adapter_model.safetensors")
    leaves = sorted({name.rpartition(".")[2] for name in stored if name.startswith("layers.")})
    (directory / "adapter_config.json").write_text(
        json.dumps(
            {
                "peft_type": "LORA",
                "r": rank,
                "lora_alpha": rank,
                "target_modules": leaves,
                "bias": "none",
                "task_type": "CAUSAL_LM",
            }
        )
    )
    return directory


def decode_seconds(engine: Engine, names: Sequence[str | None], seed: int) -> float:
    """CPU seconds of one decode step of a row for each of ``names``."""
    core = engine._core
    for row, name in enumerate(names):
        prompt = [(7 * at + 131 * row + seed) % 1000 + 3 for at in range(CONTEXT)]
        sampling = SamplingParams(max_tokens=STEPS + 64, temperature=0.0, ignore_eos=True)
        core.submit(
            Request(request_id=f"row-{row}", prompt_tokens=prompt, sampling=sampling, adapter=engine._adapter(name))
        )
    while core.stats().last_step_decodes < len(names):
        core.step()
    taken = []
    for _ in range(STEPS):
        began_s = time.thread_time()
        core.step()
        taken.append(time.thread_time() - began_s)
    assert core.stats().last_step_decodes == len(names), "a row has ended"
    core.cancel_all("measured")
    while core.has_work:
        core.step()
    return statistics.median(taken)


def prompt_seconds(engine: Engine, name: str | None, seed: int) -> float:
    prompt = [(11 * at + seed) % 1000 + 3 for at in range(PROMPT_TOKENS)]
    began_s = time.thread_time()
    engine.generate([prompt], lora=name, max_tokens=1, temperature=0.0, progress=False)
    return time.thread_time() - began_s


def peft_seconds(checkpoint: Path, adapter: Path, rounds: int) -> dict[str, float]:
    """Of one decode step, by transformers alone and with peft's adapter."""
    import peft
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()
    adapted = peft.PeftModel.from_pretrained(model, adapter).eval()
    taken: dict[str, list[float]] = {"peft": [], "transformers": []}
    with torch.inference_mode():
        past = adapted(torch.arange(3, 3 + CONTEXT)[None], use_cache=True).past_key_values
        for _ in range(rounds * STEPS):
            for arm in taken:
                began_s = time.thread_time()
                if arm == "peft":
                    adapted(torch.tensor([[5]]), past_key_values=past, use_cache=True)
                else:
                    with adapted.disable_adapter():
                        adapted(torch.tensor([[5]]), past_key_values=past, use_cache=True)
                taken[arm].append(time.thread_time() - began_s)
    return {arm: statistics.median(seconds) for arm, seconds in taken.items()}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", default="LFM2-350M")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peft", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    geometry = find_geometry(args.geometry)
    if geometry is None:
        parser.error(f"--geometry {args.geometry} is not in weft's table of models")
    config = dict(geometry.config)
    for kinds in ("layer_types", "layers_block_type"):
        if kinds in config:
            config[kinds] = config[kinds][: args.layers]
    config["num_hidden_layers"] = min(config["num_hidden_layers"], args.layers)
    with tempfile.TemporaryDirectory(prefix="weft-lora-") as folder:
        home = Path(folder)
        (home / "base").mkdir()
        write_checkpoint(home / "base", config)
        with Engine(
            str(home / "base"),
            dtype="bfloat16",
            memory="1GB",
            max_model_len=1024,
            threads=1,
            prefix_cache=False,
            speculate="off",
        ) as engine:
            names = [f"a{number}" for number in range(args.adapters)]
            for number, name in enumerate(names):
                engine.load_lora(name, write_adapter(engine, home / name, args.rank, number))
            table, ratios = measure(engine, names, args)
        if args.peft:
            table |= peft_seconds(home / "base", home / "a0", args.rounds)
    print(
        f"{cpu_name_and_flags()[0]}, {native.describe()}; {args.geometry}, {args.layers} layers, "
        f"{args.adapters} adapters of rank {args.rank}; CPU time, one thread"
    )
    for arm, seconds in table.items():
        base = table["transformers"] if arm == "peft" else table[arm.removesuffix(" adapted")]
        ratio = f"  {ratios.get(arm, base / seconds):.2f}x" if base != seconds else ""
        print(f"{arm:<22} {1e3 * seconds:>9.2f} ms{ratio}")
    if args.json is not None:
        args.json.write_text(
            json.dumps({"processor": cpu_name_and_flags()[0], "seconds": table, "ratios": ratios}, indent=1)
        )
    return 0


def measure(engine: Engine, names: Sequence[str], args: Any) -> tuple[dict[str, float], dict[str, float]]:
    in_turns = [names[row % len(names)] for row in range(args.rows)]
    arms: dict[str, Callable[[int], float]] = {
        f"{args.rows} rows": lambda seed: decode_seconds(engine, [None] * args.rows, seed),
        f"{args.rows} rows adapted": lambda seed: decode_seconds(engine, in_turns, seed),
        "one stream": lambda seed: decode_seconds(engine, [None], seed),
        "one stream adapted": lambda seed: decode_seconds(engine, [names[0]], seed),
        "prompt": lambda seed: prompt_seconds(engine, None, seed),
        "prompt adapted": lambda seed: prompt_seconds(engine, names[0], seed),
    }
    taken: dict[str, list[float]] = {arm: [] for arm in arms}
    for number in range(args.rounds + 1):
        for arm, run in arms.items():
            seconds = run(number)
            if number:  # the first round warms up
                taken[arm].append(seconds)
    ratios = {
        arm: statistics.median(
            base / own for base, own in zip(taken[arm.removesuffix(" adapted")], seconds, strict=True)
        )
        for arm, seconds in taken.items()
        if arm.endswith(" adapted")
    }
    return {arm: statistics.median(seconds) for arm, seconds in taken.items()}, ratios


if __name__ == "__main__":
    raise SystemExit(main())
