"""What a decode step costs the host apart from arithmetic: a model of many layers with next to nothing in
each.

    python -m benchmarks.step_python [--family qwen lfm2 granite] [--running 64] [--layers 24] [--steps 200]

Engine, scheduler, executor and sampler are the real ones; only the widths are tiny (hidden size 128, the
least whose matrices lie in tiles as those of real models do; states of a few kilobytes; one thread). What is
left is the host's: Python, torch's dispatch, and the way into the kernels.

    step | plan, commit, settle | rows, batch | forward | logits, sampling |
                                                 '-- in kernels: calls of weft._native, from Python to Python

Microseconds of CPU time of the engine's thread (so that a busy machine disturbs less), medians over the
steps. The goal is below 1,000 for a step with 64 running and 24 layers. ``--ops`` counts what torch was asked
to do in one step, and what it allocated.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as functional
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.serve.checkpoints import save_tokenizer
from weft.assemble import assemble
from weft.config import EngineConfig
from weft.engine.engine import EngineCore
from weft.models.decoder import CausalModel
from weft.request import Request, SamplingParams
from weft.runner.torch_executor import TorchExecutor
from weft.tensor import native

_WIDTHS = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
}
PARTS = ("plan, commit, settle", "rows, batch", "forward", "logits, sampling")


def config_of(family: str, layers: int) -> tuple[str, dict[str, Any]]:
    """transformers' name of the model, and its settings: three recurrent layers to one of attention."""
    kinds = ["full_attention" if layer % 4 == 3 else "" for layer in range(layers)]
    if family == "qwen":
        return "qwen3_5_text", _WIDTHS | {
            "num_hidden_layers": layers,
            "intermediate_size": 128,
            "head_dim": 32,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
        }
    if family == "lfm2":
        return "lfm2", _WIDTHS | {
            "num_hidden_layers": layers,
            "intermediate_size": 128,
            "block_auto_adjust_ff_dim": False,
            "layer_types": [kind or "conv" for kind in kinds],
        }
    return "granitemoehybrid", _WIDTHS | {
        "num_hidden_layers": layers,
        "shared_intermediate_size": 128,
        "num_local_experts": 0,
        "layer_types": ["attention" if kind else "mamba" for kind in kinds],
        "mamba_n_heads": 4,
        "mamba_d_head": 64,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
    }


def make_checkpoint(family: str, layers: int, under: Path) -> str:
    import transformers
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    name, settings = config_of(family, layers)
    torch.manual_seed(0)
    auto: Any = transformers.AutoModelForCausalLM
    config = transformers.AutoConfig.for_model(name, **settings)
    auto.from_config(config, dtype=torch.bfloat16).save_pretrained(under)
    save_tokenizer(under, config.vocab_size)
    return str(under)


class Stopwatch:
    """CPU time of this thread inside the functions that it was put around."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.calls = 0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **more: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*args, **more)
            finally:
                self.seconds += time.thread_time() - began
                self.calls += 1

        return timed


class TimedExtension:
    """weft._native with a stopwatch around each of its functions."""

    def __init__(self, extension: Any, watch: Stopwatch) -> None:
        for name in dir(extension):
            if not name.startswith("_"):
                item = getattr(extension, name)
                setattr(self, name, item if isinstance(item, type) else watch.around(item))


class CountOps(TorchDispatchMode):
    """What torch was asked for, and the bytes of what it made anew."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()
        self.made_bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.ops[str(func)] += 1
        if isinstance(made, torch.Tensor) and not func.is_view:
            self.made_bytes[str(func)] += made.numel() * made.itemsize
        return made


def started(directory: str, running: int, steps: int, temperature: float) -> EngineCore:
    core = assemble(
        EngineConfig(model=directory, memory="256MiB", max_model_len=2048, threads=1, max_num_seqs=running)
    ).core
    random = np.random.default_rng(0)
    for number in range(running):
        core.submit(
            Request(
                request_id=f"r{number}",
                prompt_tokens=random.integers(5, 500, 100 + number).tolist(),
                sampling=SamplingParams(temperature=temperature, max_tokens=steps, ignore_eos=True),
            )
        )
    while len(core.scheduler.waiting):
        core.step()
    for _ in range(20):
        core.step()
    return core


def measure(core: EngineCore, running: int, steps: int) -> dict[str, float]:
    """Median microseconds of each part and of the step, and what lay in kernels; calls of kernels."""
    executor: Any = core.executor
    batches, forward, rest, step = (Stopwatch() for _ in range(4))
    executor.batches.apply, executor.batches.build = (
        batches.around(executor.batches.apply),
        batches.around(executor.batches.build),
    )
    executor.model.forward = forward.around(executor.model.forward)
    executor.model.logits, executor.sampler.launch = (
        rest.around(executor.model.logits),
        rest.around(executor.sampler.launch),
    )
    run = step.around(core.step)
    execute = Stopwatch()
    executor.execute = execute.around(executor.execute)
    taken = []
    for _ in range(steps):
        for watch in (batches, forward, rest, step, execute):
            watch.seconds, watch.calls = 0.0, 0
        run()
        assert core.failure is None, core.failure
        taken.append((step.seconds - execute.seconds, batches.seconds, forward.seconds, rest.seconds, step.seconds))
    medians = dict(zip((*PARTS, "step"), np.median(np.asarray(taken) * 1e6, axis=0).tolist(), strict=True))
    return medians | in_kernels(core, max(1, steps // 2))


def in_kernels(core: EngineCore, steps: int) -> dict[str, float]:
    """Median microseconds of a step inside the calls of kernels and of torch's matrix products; the number of
    calls; and the rest of the step, which is the host's."""
    kernels, products, whole = Stopwatch(), Stopwatch(), Stopwatch()
    step = whole.around(core.step)
    model = cast(CausalModel, cast(TorchExecutor, core.executor).model)
    extension, linear = native._extension, functional.linear
    taken = []
    if extension is not None:
        native._extension = TimedExtension(extension, kernels)
        middles = [layer.mixer.middle for layer in model.layers if hasattr(layer.mixer, "middle")]
        for middle in middles:
            middle.bound = TimedExtension(middle.bound, kernels)
        fused = model._fused
        for held in () if fused is None else fused._bindings.values():
            if held[0] is not None:
                held[0] = TimedExtension(held[0], kernels)
    functional.linear = products.around(linear)
    try:
        for _ in range(steps):
            for watch in (kernels, products, whole):
                watch.seconds, watch.calls = 0.0, 0
            step()
            taken.append((kernels.seconds, products.seconds, whole.seconds - kernels.seconds - products.seconds))
    finally:
        native._extension, functional.linear = extension, linear
    kernels_us, products_us, host_us = (np.median(np.asarray(taken), axis=0) * 1e6).tolist()
    return {"kernels": kernels_us, "products": products_us, "calls": kernels.calls + products.calls, "host": host_us}


def show_ops(core: EngineCore) -> None:
    with CountOps() as counted:
        core.step()
    print(
        f"  {sum(counted.ops.values())} operations of torch in a step, which made "
        f"{sum(counted.made_bytes.values()) / 1024:.0f} KiB"
    )
    for name, count in counted.ops.most_common():
        print(f"    {count:>5}  {name:<40}{counted.made_bytes[name] / 1024:>10.1f} KiB")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="+", choices=["qwen", "lfm2", "granite"], default=["qwen", "lfm2", "granite"])
    parser.add_argument("--running", type=int, default=64)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--ops", action="store_true", help="count torch's operations in a step")
    args = parser.parse_args(argv)
    print(
        f"{args.running} running, {args.layers} layers, kernels: {native.describe()}; us of CPU time, "
        f"medians of {args.steps} steps"
    )
    for family in args.family:
        folder = Path(tempfile.mkdtemp(prefix="weft-step-"))
        try:
            core = started(
                make_checkpoint(family, args.layers, folder), args.running, 2 * args.steps + 200, args.temperature
            )
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if args.ops:
            show_ops(core)
        found = measure(core, args.running, args.steps)
        print(f"{family:<9}" + "  ".join(f"{name} {value:.0f}" for name, value in found.items()))
        core.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
