"""Everything that a machine with a GPU can say about weft and a machine without one cannot, in one run.

    python -m benchmarks.gpu_first_run [--output benchmarks/results/gpu.json] [--skip tests kernels]

    doctor      the machine, its GPU, torch and Triton
    compile     every shape of every Triton kernel, for the GPUs it is made for
    tests       make test-gpu: kernels against their twins, the engine against transformers
    kernels     weft bench kernels: time, bytes, FLOPs, share of the measured ceiling
    decode      a model of random weights (Qwen3.5-4B by default, bfloat16): the time of a decode step by
                batch, with CUDA graphs and without, beside the time in which its bytes could be moved; what
                of it is the host's; what zeroing a frame takes of it

Each part is a process of its own, so that one that fails leaves the others their turn: what it said is kept.
The figures of docs/gpu.md come from the file that this writes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PARTS = ("doctor", "compile", "tests", "kernels", "decode")
DECODED = 64
"""Steps that are timed, after as many as it takes to begin."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/gpu.json"))
    parser.add_argument("--skip", nargs="*", choices=PARTS, default=[])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--geometry", default="Qwen3.5-4B", help="of `weft plan`'s table")
    parser.add_argument("--layers", type=int, help="fewer than the model has, for a look at a small machine")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--only-decode", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.only_decode:
        print(json.dumps(decode_steps(args)))
        return 0
    python, found = sys.executable, {}
    with tempfile.TemporaryDirectory() as folder:
        kernels = Path(folder) / "kernels.json"
        commands = {
            "doctor": [python, "-m", "weft", "doctor", "--json", "--offline"],
            "compile": [python, "-m", "weft.tensor.compile_gate", "--all"],
            "tests": ["make", "test-gpu", f"GPU_PYTHON={python}"],
            "kernels": [python, "-m", "weft", "bench", "kernels", "--device", args.device.split(":")[0],
                        "--output-json", str(kernels)],
            "decode": [python, "-m", "benchmarks.gpu_first_run", "--only-decode", "--device", args.device,
                       "--geometry", args.geometry, "--context", str(args.context), "--batch",
                       *map(str, args.batch), *(["--layers", str(args.layers)] if args.layers else [])]}
        for part in (part for part in PARTS if part not in args.skip):
            print(f"== {part}: {' '.join(commands[part])}", flush=True)
            found[part] = said_by(commands[part])
            if part == "kernels" and kernels.exists():
                found[part]["result"] = json.loads(kernels.read_text())
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(found, indent=1) + "\n")
    print(f"written to {args.output}")
    return max((part["exit_code"] for part in found.values()), default=0)


def said_by(command: list[str]) -> dict[str, Any]:
    """Exit code, seconds, and the last line as JSON if it is that, else the last lines."""
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        print(line, end="", flush=True)
        lines.append(line.rstrip("\n"))
    said: dict[str, Any] = {"exit_code": process.wait(), "seconds": round(time.monotonic() - began, 1)}
    try:
        said["result"] = json.loads(lines[-1] if len(lines) == 1 or lines[-1].startswith("{") else
                                    "\n".join(lines))
    except (ValueError, IndexError):
        said["last_lines"] = lines[-30:]
    return said


def decode_steps(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    from weft.tensor.device import choose_device, describe

    device = choose_device(args.device)
    model = random_model(args.geometry, args.layers, device)
    weights = sum(storage.nbytes() for storage in storages(model))
    rate = copy_rate(device)
    found: dict[str, Any] = {
        "device": describe(device), "geometry": args.geometry, "layers": len(model.spec.layers),
        "context": args.context, "weights_bytes": weights, "copy_bytes_per_s": rate,
        "torch": torch.__version__, "batches": []}
    for batch in args.batch:
        for graphs in ((True, False) if device.type == "cuda" else (False,)):
            took = timed_steps(model, device, batch, args.context, graphs)
            moved = weights + took.pop("kv_bytes") + took.pop("state_bytes")
            found["batches"].append({"batch": batch, "graphs": graphs, **took, "moved_bytes": moved,
                                     "least_ms": moved / rate * 1e3})
    return found


def random_model(name: str, layers: int | None, device: Any) -> Any:
    """A model of that geometry whose matrices are noise of a size that keeps activations finite."""
    import torch

    from weft.families import read_architecture
    from weft.models.registry import FAMILIES
    from weft.models.runtime_form import RuntimeForm
    from weft.models.weights import Checkpoint, TensorSource
    from weft.planning.geometries import find_geometry

    class Noise(TensorSource):
        @property
        def device(self) -> Any:
            return device

        def _known(self, name: str) -> bool:
            return True

        def _stored(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> torch.Tensor:
            if len(shape) < 2:
                return torch.ones(shape, device=device)
            return torch.randn(shape, device=device, dtype=torch.bfloat16) * shape[-1] ** -0.5

    geometry = find_geometry(name)
    assert geometry is not None, f"`weft plan` knows no {name}"
    config = geometry.config | ({"num_hidden_layers": layers} if layers else {})
    nowhere = Path("nowhere")
    checkpoint = Checkpoint(nowhere, config, {}, "model.", nowhere)
    source = Noise(checkpoint, torch.bfloat16, RuntimeForm(packs=False))
    architecture = read_architecture(config)
    torch.manual_seed(0)
    with torch.inference_mode():
        return FAMILIES[architecture.family](architecture, source)


def storages(model: Any) -> list[Any]:
    from weft.runner.sleep import storages_of

    return storages_of(model)


def copy_rate(device: Any, size: int = 1 << 30) -> float:
    """Bytes read and written per second by a large copy."""
    import torch

    size = size if device.type == "cuda" else size >> 4
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    rates = []
    for _ in range(10):
        began = now(device)
        target.copy_(source)
        rates.append(2 * size / (now(device) - began))
    return max(rates)


def now(device: Any) -> float:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def timed_steps(model: Any, device: Any, batch: int, context: int, graphs: bool) -> dict[str, Any]:
    """Medians over DECODED steps of ``batch`` sequences of about ``context`` tokens, greedy."""
    import numpy as np

    from weft.config import EngineConfig
    from weft.engine.engine import EngineCore
    from weft.memory.memory import Memory
    from weft.memory.plan import fit_sizes, memory_for, plan_arena
    from weft.request import Request, SamplingParams
    from weft.runner.graphs import CudaCapture
    from weft.runner.torch_executor import TorchExecutor

    spec = model.spec
    length = context + 2 * DECODED
    config = EngineConfig(max_num_seqs=batch, max_model_len=length, max_num_batched_tokens=8192)
    plan = plan_arena(spec, memory_for(spec, spec.dtype, batch, length)[0])
    executor = TorchExecutor(model, plan, fit_sizes(config, spec, plan), device=device,
                             capture=CudaCapture(device) if graphs else None)
    why_not = executor.record_graphs()
    core = EngineCore(vocab_size=spec.vocab_size, sizes=fit_sizes(config, spec, plan),
                      memory=Memory(plan, cache=False), executor=executor, clock=time.monotonic, seed=0,
                      eos_ids=())
    random = np.random.default_rng(0)
    for number in range(batch):
        prompt = random.integers(5, spec.vocab_size, context - DECODED).tolist()
        core.submit(Request(
            request_id=f"r{number}", prompt_tokens=prompt,
            sampling=SamplingParams(temperature=0.0, max_tokens=2 * DECODED, ignore_eos=True)))
    while len(core.scheduler.waiting) or core.computed_tokens < batch * (context - DECODED):
        core.step()
    steps, device_s = [], []
    execute = executor.execute

    def timed(plan: Any) -> Any:
        result = execute(plan)
        device_s.append(result.device_s)
        return result

    executor.execute = timed  # type: ignore[method-assign]
    for step in range(DECODED + 8):
        began = now(device)
        core.step()
        if step >= 8:
            steps.append(now(device) - began)
    began = now(device)
    for _ in range(10):
        executor.arena.fill_frames([0], 0)
    zeroing_s = (now(device) - began) / 10
    frames = plan.frame_count
    core.close()
    step_ms = statistics.median(steps) * 1e3
    execute_ms = statistics.median(device_s[-DECODED:]) * 1e3
    return {"step_ms": step_ms, "execute_ms": execute_ms, "outside_execute_ms": step_ms - execute_ms,
            "graphs_refused": why_not, "recorded_s": executor.graphs.recorded_s if executor.graphs else None,
            "zero_a_frame_ms": zeroing_s * 1e3, "frame_bytes": plan.frame_bytes, "frames": frames,
            "kv_bytes": batch * context * spec.kv_bytes_per_token(plan.kv_dtype),
            "state_bytes": 2 * batch * plan.slot_bytes}


if __name__ == "__main__":
    raise SystemExit(main())
