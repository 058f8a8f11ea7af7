"""Decode steps of a model of random weights, by batch: what a step takes, and the least it could.

    graphs, plain loop      execute (device and the host's part of it), and what the host adds
    graphs, overlapped      the same steps with the next one launched ahead
    no graphs               what recording saves
    prompts                 steps with a prompt beside the decodes, recorded and launched from Python: the
                            whole step, and how long the host takes to launch it, by layer too

``waits`` counts what torch itself calls a synchronisation in a step (``torch.cuda.set_sync_debug_mode``).
The profile says where a step's time is: microseconds on the device by kernel, and the gaps between them.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

DECODED = 48
"""Steps that are timed, after a few to begin with."""
BEGINNING = 8
UNRECORDED_MAX = 16
"""Sequences up to which steps without graphs are timed too: beyond them launches hide behind the device."""
PROMPTS = (256, 1024)
"""Tokens of the prompt beside the decodes."""
PICTURES_BYTES, ADAPTERS_BYTES = 16 << 20, 64 << 20
RECORDED = 64
"""Tokens of the largest step with prompts that is recorded beside verify runs: more shapes would take their time."""
WATCHED = 4
"""Steps behind them that torch watches for synchronisations."""
PROFILED = ((1, 0), (64, 0), (256, 0), (0, 1024), (0, 8192))
"""(decodes, tokens of a prompt) of the steps whose kernels are timed one by one."""
NAMED = 24
"""Kernels of a profile that take the most; the others are one row."""


def decode_steps(args: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    from weft.runner.sleep import storages_of
    from weft.tensor.device import describe

    model = random_model(args.geometry, args.layers, device)
    weights = sum(storage.nbytes() for storage in storages_of(model))
    rate = copy_rate(device)
    yield {
        "device": describe(device),
        "geometry": args.geometry,
        "layers": len(model.spec.layers),
        "context": args.context,
        "weights_bytes": weights,
        "copy_bytes_per_s": rate,
    }
    on_gpu = device.type == "cuda"
    for batch in args.batch:
        ways = [(True, False), (True, True)] if on_gpu else []
        if batch <= UNRECORDED_MAX or not on_gpu:
            ways.append((False, False))
        for graphs, overlap in ways:
            found: dict[str, Any] = {"batch": batch, "graphs": graphs, "overlap": overlap}
            try:
                took = timed_steps(model, device, batch, args.context, graphs, overlap)
            except Exception as error:  # a batch that does not fit leaves the others their turn
                yield found | {"error": f"{type(error).__name__}: {error}".split("\n")[0][:300]}
                continue
            moved = weights + took.pop("kv_bytes") + took.pop("state_bytes")
            least_ms = moved / rate * 1e3
            yield (
                found
                | took
                | {"moved_bytes": moved, "least_ms": least_ms, "times_the_least": took["step_ms"] / least_ms}
            )


def draft_steps(args: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """Medians of the steps of one sequence, in milliseconds, in both loops: plain, with drafts, with drafts of the
    model's own head. All drafts are token 0, so with random weights nearly all are wrong."""
    model = random_model(args.geometry, args.layers, device, head=True)
    graphs, length = device.type == "cuda", 5 * (BEGINNING + DECODED)
    for overlap in (True, False):
        for drafts, by_head in ((0, None), (1, None), (3, None), (0, 1), (1, 1), (3, 3)):
            found = {"overlap": overlap, "drafts": drafts, "drafts_of_head": by_head}
            try:
                yield found | timed_drafts(model, device, graphs, overlap, length, drafts, by_head)
            except Exception as error:
                yield found | {"error": f"{type(error).__name__}: {error}".split("\n")[0][:300]}


def timed_drafts(
    model: Any, device: torch.device, graphs: bool, overlap: bool, length: int, drafts: int, by_head: int | None
) -> dict[str, Any]:
    """The median of DECODED steps that verify ``drafts`` drafts each, without the ``head_ms`` in which the head drafts
    ``by_head`` after each."""
    from weft.request import Request, SamplingParams
    from weft.speculation.profile_run import ProfileRun

    class Always(ProfileRun):
        """Drafts in every step."""

        awake = bool(drafts or by_head)

        def draft(self, rows: Any) -> dict[int, tuple[int, ...]]:
            return {row.key: (0,) * min(drafts, row.limit) for row in rows if drafts}

        def head_drafts(self, sequences: int, *, prompts: bool) -> int | None:
            return by_head

        def observe(self, decodes: int, drafted: int, seconds: float, *, prefills: bool = False) -> None:
            if drafted == drafts * decodes and not prefills:
                steps.append(seconds)

        def observe_head(self, sequences: int, drafts: int, seconds: float, *, prefills: bool = False) -> None:
            head.append(seconds)

    steps, head = list[float](), list[float]()
    core, executor, _, _ = small_engine(
        model, device, 1, length, graphs, overlap, mixed_tokens_max=RECORDED, verify_runs=True, drafter=Always()
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=length - 4, ignore_eos=True)
    core.submit(Request(request_id="drafts", prompt_tokens=[5, 6, 7], sampling=sampling))
    if not core.drafter.awake:
        core.on_step.append(lambda plan, seconds: steps.append(seconds) if plan.decode_count else None)
    while len(steps) < BEGINNING + DECODED and core.has_work:
        core.step()
    if core.failure is not None:
        raise core.failure
    forms = {form: count for form, count in executor.steps_by_form.items() if count}
    core.close()
    return {
        "step_ms": statistics.median(steps[BEGINNING:]) * 1e3,
        "head_ms": statistics.median(head[BEGINNING:]) * 1e3 if head else None,
        "steps_by_form": forms,
    }


def small_kernels(args: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """Overlapped steps of decodes, recorded, with one choice of small kernels after the other."""
    model = random_model(args.geometry, args.layers, device)
    for way, choose in ways_of_small_kernels(device).items():
        choose()
        for batch in args.batch:
            found: dict[str, Any] = {"kernels": way, "batch": batch}
            try:
                took = timed_steps(model, device, batch, args.context, device.type == "cuda", True)
                yield found | {"step_ms": took["step_ms"], "graphs_refused": took["graphs_refused"]}
            except Exception as error:
                yield found | {"error": f"{type(error).__name__}: {error}".split("\n")[0][:300]}


def ways_of_small_kernels(device: torch.device) -> dict[str, Callable[[], None]]:
    from weft.tensor import gpu

    kernels: gpu.Choice = "triton" if device.type == "cuda" else "auto"
    return {"separate": lambda: gpu.choose(kernels, joined=False), "joined": lambda: gpu.choose(kernels)}


def prompt_steps(args: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """Of prompts beside a few decodes, with graphs and without."""
    model = random_model(args.geometry, args.layers, device)
    for tokens in PROMPTS if args.context >= max(PROMPTS) else (args.context,):
        for graphs in (True, False) if device.type == "cuda" else (False,):
            found: dict[str, Any] = {"prompt": tokens, "graphs": graphs}
            try:
                yield found | timed_prompts(model, device, tokens, args.context, graphs)
            except Exception as error:
                yield found | {"error": f"{type(error).__name__}: {error}".split("\n")[0][:300]}


def profiles(args: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """Of steps with graphs: ``kernels`` {name: [launches, microseconds on the device] of a step}, ``busy_us``
    their sum, ``step_ms`` the step beside which they were taken."""
    model = random_model(args.geometry, args.layers, device)
    for batch, prompt in PROFILED:
        found: dict[str, Any] = {"batch": batch, "prompt": prompt}
        try:
            yield found | profiled(model, device, batch, prompt, args.context)
        except Exception as error:
            yield found | {"error": f"{type(error).__name__}: {error}".split("\n")[0][:300]}


def profiled(model: Any, device: torch.device, batch: int, prompt: int, context: int) -> dict[str, Any]:
    from torch.profiler import ProfilerActivity, profile

    from weft.request import Request, SamplingParams

    if batch:
        core, _, _, _ = engine(model, device, batch, context, device.type == "cuda", False)
    else:
        core, _, _, _ = small_engine(model, device, 2, prompt + 8, device.type == "cuda", False, mixed_tokens_max=2048)

    def step(number: int) -> None:
        if prompt:
            tokens = torch.randint(5, model.spec.vocab_size, (prompt,)).tolist()
            core.submit(
                Request(
                    request_id=f"p{number}",
                    prompt_tokens=tokens,
                    sampling=SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True),
                )
            )
        core.step()

    for number in range(3):
        step(number)
    began = now(device)
    for number in range(WATCHED):
        step(3 + number)
    step_ms = (now(device) - began) / WATCHED * 1e3
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as watch:
        for number in range(WATCHED):
            step(3 + WATCHED + number)
        now(device)
    core.close()
    rows = [
        (one.key[:60], one.count / WATCHED, one.self_device_time_total / WATCHED)
        for one in watch.key_averages()
        if one.self_device_time_total > 0
    ]
    rows.sort(key=lambda row: -row[2])
    kernels = {name: [launches, round(us, 1)] for name, launches, us in rows[:NAMED]}
    kernels["others"] = [sum(row[at] for row in rows[NAMED:]) for at in (1, 2)]
    return {"step_ms": step_ms, "busy_us": round(sum(row[2] for row in rows), 1), "kernels": kernels}


def timed_prompts(model: Any, device: torch.device, tokens: int, context: int, graphs: bool) -> dict[str, Any]:
    """Medians over steps in which a new prompt of ``tokens`` is computed beside UNRECORDED_MAX decodes."""
    from weft.request import Request, SamplingParams

    core, executor, _, why_not = engine(model, device, UNRECORDED_MAX, context, graphs, False, beside=1)
    if graphs and all(shape.decodes_alone for shape in executor.batches.shapes):
        core.close()
        return {"graphs_refused": why_not}
    launches, launch = [], executor._launch

    def launching(step: Any) -> Any:
        began = time.perf_counter()
        launched = launch(step)
        if step.run_count > step.decode_count:
            launches.append(time.perf_counter() - began)
        return launched

    executor._launch = executor._worker._launch = launching
    took = []
    for number in range(BEGINNING + 2):
        prompt = torch.randint(5, model.spec.vocab_size, (tokens,)).tolist()
        core.submit(
            Request(
                request_id=f"p{number}",
                prompt_tokens=prompt,
                sampling=SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True),
            )
        )
        began = now(device)
        core.step()
        took.append(now(device) - began)
    core.close()
    launch_ms = statistics.median(launches) * 1e3
    return {
        "step_ms": statistics.median(took) * 1e3,
        "launch_ms": launch_ms,
        "launch_us_per_layer": launch_ms * 1e3 / len(model.spec.layers),
        "graphs_refused": why_not,
    }


def random_model(name: str, layers: int | None, device: torch.device, *, head: bool = False) -> Any:
    """Of a geometry that `weft plan` knows."""
    from weft.planning.geometries import find_geometry

    geometry = find_geometry(name)
    assert geometry is not None, f"`weft plan` knows no {name}"
    return noise_model(geometry.config | ({"num_hidden_layers": layers} if layers else {}), device, head=head)


def noise_model(
    config: Mapping[str, Any],
    device: torch.device,
    stored: dict[str, torch.Tensor] | None = None,
    *,
    head: bool = False,
) -> Any:
    """A model whose matrices are noise of a size that keeps activations finite, its tower too, and with ``head`` its
    head for further tokens. ``stored`` receives its tensors by name, in the model's dtype on the host."""
    from dataclasses import replace

    from weft.families import read_architecture
    from weft.models.checkpoint_files import CheckpointFiles
    from weft.models.families import build
    from weft.models.mtp import build_mtp
    from weft.models.runtime_form import RuntimeForm
    from weft.models.weights import TensorSource

    class Noise(TensorSource):
        @property
        def device(self) -> torch.device:
            return device

        def _known(self, name: str) -> bool:
            # A table of n-grams is in one piece, and a head has the names of Qwen's.
            return ("shard_" not in name or "shard_0." in name) and "eh_proj" not in name and "fc_hidden" not in name

        def _stored(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> torch.Tensor:
            noise = torch.ones(shape, device=device)
            if len(shape) > 1:
                noise = torch.randn(shape, device=device, dtype=self.dtype) * shape[-1] ** -0.5
            if stored is not None:
                stored[name] = noise.to(self.dtype, copy=True).cpu()
            return noise

    nowhere = Path("nowhere")
    checkpoint = CheckpointFiles(nowhere, config, {}, "model.", nowhere)
    architecture = read_architecture(config)
    dtype = getattr(torch, architecture.dtype)
    source = Noise(checkpoint, dtype, RuntimeForm(packs=False))
    torch.manual_seed(0)
    with torch.inference_mode():
        model = build(architecture, source)
        if architecture.vision is not None:
            plain = RuntimeForm(twelve_bit=False)
            model.vision = tower_of(architecture, Noise(replace(checkpoint, prefix=""), dtype, plain))
        if head:
            drafts = Noise(replace(checkpoint, prefix="mtp."), dtype, RuntimeForm(packs=False))
            model.mtp = build_mtp(architecture, drafts, model)
            model.spec, model.keeps_streams = architecture.spec(mtp=True), model.mtp.collapse is not None
    return model


def tower_of(architecture: Any, source: Any) -> Any:
    """The tower of pictures, with the settings that its processor has where a checkpoint names none."""
    from weft.images.settings import read_settings
    from weft.models.vision.loading import read_tower

    tower = architecture.vision
    settings = read_settings(source.checkpoint.directory, tower)
    return read_tower(
        tower, architecture.hidden_size, settings, source, vision="model.visual", projector="model.visual"
    )


def copy_rate(device: torch.device, size: int = 1 << 30) -> float:
    """Bytes read and written per second by a large copy."""
    size = size if device.type == "cuda" else size >> 4
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    rates = []
    for _ in range(10):
        began = now(device)
        target.copy_(source)
        rates.append(2 * size / (now(device) - began))
    return max(rates)


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def timed_steps(
    model: Any, device: torch.device, batch: int, context: int, graphs: bool, overlap: bool
) -> dict[str, Any]:
    """Medians over DECODED steps of ``batch`` sequences of about ``context`` tokens, greedy."""
    core, executor, plan, why_not = engine(model, device, batch, context, graphs, overlap)
    device_s = []
    launch = executor._launch

    def launching(step: Any) -> Any:
        began = time.perf_counter()
        launched = launch(step)
        device_s.append(time.perf_counter() - began)
        return launched

    executor._launch = executor._worker._launch = launching
    for _ in range(BEGINNING):
        core.step()
    began, took = now(device), []
    for _ in range(DECODED):
        core.step()  # in the overlapped loop this is when the step before came home
        took.append(time.perf_counter())
    steps = [after - before for before, after in zip([began, *took], took, strict=False)]
    launches = device_s[-DECODED:]
    waits = synchronisations(core, device)
    began = now(device)
    for _ in range(10):
        executor.arena.fill([0], executor.arena.plan.frame_bytes, 0)
    zeroing_s = (now(device) - began) / 10
    spec = model.spec
    core.close()
    return {
        "step_ms": statistics.median(steps) * 1e3,
        "launch_ms": statistics.median(launches) * 1e3,
        "waits_per_step": waits,
        "graphs_refused": why_not,
        "recorded_s": executor.graphs.seconds if executor.graphs else None,
        "zero_a_frame_ms": zeroing_s * 1e3,
        "frame_bytes": plan.frame_bytes,
        "frames": plan.frame_count,
        "kv_bytes": batch * context * spec.kv_bytes_per_token(plan.kv_dtype),
        "state_bytes": 2 * batch * plan.slot_bytes,
    }


def engine(
    model: Any, device: torch.device, batch: int, context: int, graphs: bool, overlap: bool, beside: int = 0
) -> tuple[Any, Any, Any, str | None]:
    """An engine all of whose ``batch`` sequences decode, its executor, the arena's plan, and why there are no
    graphs. ``beside``: further sequences that have room; with them, steps with prompts are recorded."""
    import numpy as np

    from weft.request import Request, SamplingParams
    from weft.runner.graph_shapes import TOKENS_MAX

    made_max = DECODED + BEGINNING + WATCHED + 16
    core, executor, plan, why_not = small_engine(
        model,
        device,
        batch + beside,
        context + made_max,
        graphs,
        overlap,
        one_width=True,
        mixed_tokens_max=TOKENS_MAX if beside else 0,
    )
    random = np.random.default_rng(0)
    for number in range(batch):
        prompt = random.integers(5, model.spec.vocab_size, context).tolist()
        core.submit(
            Request(
                request_id=f"r{number}",
                prompt_tokens=prompt,
                sampling=SamplingParams(temperature=0.0, max_tokens=made_max, ignore_eos=True),
            )
        )
    while len(core.scheduler.waiting) or core.computed_tokens < batch * context:
        core.step()
        if core.failure is not None:
            raise core.failure
    return core, executor, plan, why_not


def small_engine(
    model: Any,
    device: torch.device,
    rows: int,
    length: int,
    graphs: bool,
    overlap: bool,
    *,
    mixed_tokens_max: int,
    one_width: bool = False,
    verify_runs: bool = False,
    adapts: bool = False,
    drafter: Any = None,
    observer: Any = None,
) -> tuple[Any, Any, Any, str | None]:
    """Room for ``rows`` sequences of ``length`` tokens, and no more. ``one_width``: decodes of all rows are
    recorded alone."""
    from weft.config import EngineConfig
    from weft.engine.adapters import AdapterPool
    from weft.engine.engine import EngineCore
    from weft.memory.frames.plan import fit_sizes, memory_for, plan_arena
    from weft.memory.memory import Memory
    from weft.runner.graphs import CudaCapture
    from weft.runner.torch_executor import TorchExecutor
    from weft.tensor.gpu import page_layout

    spec = model.spec
    config = EngineConfig(max_num_seqs=rows, max_model_len=length, max_num_batched_tokens=8192)
    plan = plan_arena(spec, memory_for(spec, spec.dtype, rows, length)[0], kv_layout=page_layout(device))
    sizes = fit_sizes(config, spec, plan)
    executor = TorchExecutor(
        model,
        plan,
        sizes,
        device=device,
        capture=CudaCapture(device) if graphs else None,
        mixed_tokens_max=mixed_tokens_max,
        verify_runs=verify_runs,
        adapters=adapts,
        observer=observer,
    )
    if executor.graphs is not None and one_width:
        # The others would take their time to record and not be used.
        executor.graphs.shapes = tuple(
            shape for shape in executor.graphs.shapes if not shape.decodes_alone or shape.decodes == rows
        )
    why_not = executor.record_graphs()
    adapters = AdapterPool(executor, budget_bytes=ADAPTERS_BYTES, rank_max=64)
    core = EngineCore(
        vocab_size=spec.vocab_size,
        sizes=sizes,
        memory=Memory(plan, cache=False),
        executor=executor,
        clock=time.monotonic,
        seed=0,
        eos_ids=(),
        overlap=overlap,
        drafter=drafter,
        adapters=adapters,
        encoder=executor.pictures,
        pictures_bytes=PICTURES_BYTES,
    )
    return core, executor, plan, why_not


def synchronisations(core: Any, device: torch.device) -> float | None:
    """Of a step, as torch counts them; None without a GPU."""
    if device.type != "cuda":
        return None
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        for _ in range(WATCHED):
            core.step()
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(one.message) for one in said) / WATCHED
