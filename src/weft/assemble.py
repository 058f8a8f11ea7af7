"""The composition root: the one place that knows every part and puts them together.

    EngineConfig --+-- device     the CPU or a GPU, its kernels
                   +-- model      directory or hub name -> weights in RAM, or on the GPU
                   |      |
                   |      spec ------+
                   |                 v
                   +-- memory     bytes -> ArenaPlan -> Sizes (what does not fit is shrunk and said)
                   |                 |
                   |       Memory    |    TorchExecutor(model, plan)
                   |             \\   |   /
                   +-----------> EngineCore            + ModelInfo: all of it in words and numbers

The order matters twice. The OpenMP wait policy is set before torch is imported, since torch reads it once;
spinning threads of two processes on the same cores cost ten times the work itself. And memory is measured
after the weights are loaded, so that its default is a share of what is really left; on a GPU after a step was
measured too, and graphs are recorded last, when everything that they hold addresses of is in its place.

Importing this module costs nothing: torch comes in with ``assemble``, so the process that serves HTTP can
name ``ModelInfo`` without it.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from weft.config import EngineConfig
from weft.engine.engine import EngineCore
from weft.engine.grammars import GrammarCompiler
from weft.errors import ConfigError
from weft.host import free_ram_bytes, usable_cores
from weft.info import MemoryRow, ModelInfo
from weft.memory.frames.plan import ArenaPlan, plan_arena
from weft.memory.frames.sizes import WORKSPACE_SHARE, default_memory_bytes, fit_sizes
from weft.memory.memory import Memory
from weft.memory.prefix.policies import check_policy, make_policy
from weft.memory.prefix.policy import Policy, PrefillCost, geometric_cost
from weft.memory.prefix.value.cost_fit import PrefillFit
from weft.schedule.checkpoints import parse_checkpoints
from weft.schedule.plan import StepPlan
from weft.schedule.work import work_of
from weft.spec import (
    COMPRESSED_KV_DTYPES,
    ITEM_BYTES,
    KV_DTYPES,
    STATE_DTYPES,
    CacheDTypeName,
    ModelSpec,
    kept_in,
)
from weft.text.grammar_sandbox import grammar_sandbox
from weft.units import format_bytes, pages_for, parse_bytes

if TYPE_CHECKING:
    import torch

    from weft.models.loading import LoadedModel
    from weft.runner.graphs import CudaCapture
    from weft.runner.torch_executor import TorchExecutor

__all__ = ["Assembled", "MemoryRow", "ModelInfo", "OnProgress", "assemble"]

OnProgress = Callable[[str], None]
"""Told, in one line, what is being done now."""

EMBEDDED_MODEL = "weft-recall"
THREADS_MAX = 1024


@dataclass(frozen=True, slots=True)
class Assembled:
    core: EngineCore
    info: ModelInfo


def assemble(config: EngineConfig, *, on_progress: OnProgress | None = None) -> Assembled:
    """Everything between a config and an engine that takes requests.

    Raises ConfigError (a flag cannot work), CheckpointError or UnknownArchitectureError (the model cannot be
    read or served); each names the flag, file or tensor.
    """
    tell = on_progress or (lambda line: None)
    notes: list[str] = []
    checkpoints = parse_checkpoints(config.checkpoints)
    check_policy(config.cache_policy)
    if config.memory is not None:  # what cannot be read is said before weights are
        parse_bytes(config.memory, flag="--memory")
    threads = _prepare_torch(config, notes)
    device = _choose_device(config, notes)
    overlap = overlaps(config, device)
    kernels = _choose_kernels(config, threads, device)
    started = time.monotonic()
    name, directory = _find_model(config, tell)
    loaded = _load(config, name, directory, tell, device)
    notes += loaded.warnings
    spec, kv_dtype = cache_dtypes(config, loaded.spec)
    capture = _capture(config, device)
    room = (_gpu_room(config, loaded, spec, kv_dtype, device, capture, tell) if device.type == "cuda"
            else _ram_room(config, spec, kv_dtype))
    arena, memory_note = _plan_memory(config, spec, kv_dtype, room)

    from weft.runner.torch_executor import TorchExecutor
    from weft.tensor.device import describe
    from weft.tensor.grain import grid_tokens

    sizes = replace(fit_sizes(config, spec, arena), grid_tokens=grid_tokens(spec, device))
    notes += [*memory_note, *sizes.notes]
    tell(f"memory: {format_bytes(arena.arena_bytes)} in {arena.frame_count} frames")
    executor = TorchExecutor(loaded.model, arena, sizes, kv_scales=loaded.kv_scales, device=device,
                             reload=lambda: _load(config, name, directory, lambda line: None, device),
                             capture=capture)
    notes += _record_graphs(executor, tell)
    defaults = loaded.generation_defaults
    cost = _guessed_cost(loaded)
    policy = make_policy(config.cache_policy, arena, cost, time.monotonic)
    core = EngineCore(vocab_size=loaded.spec.vocab_size, sizes=sizes,
                      memory=Memory(arena, cache=config.prefix_cache, count_salt=config.count_salt,
                                    policy=policy),
                      executor=executor,
                      clock=time.monotonic, seed=config.seed, eos_ids=defaults.eos_ids,
                      checkpoints=checkpoints, overlap=overlap,
                      grammars=_grammar_compiler(config, directory, defaults.eos_ids, loaded.spec.vocab_size))
    core.on_step.append(_cost_learner(policy, cost))
    info = ModelInfo(
        name=name, directory=str(directory), family=loaded.spec.family, layers=_layers_in_words(loaded.spec),
        vocab_size=loaded.spec.vocab_size, dtype=loaded.spec.dtype, weights_bytes=loaded.weights_bytes,
        load_s=time.monotonic() - started, device=describe(device), threads=threads, kernels=kernels,
        sizes=sizes,
        memory=_memory_table(spec, loaded, arena, sizes.max_model_len), notes=notes,
        eos_ids=list(defaults.eos_ids),
        generation_defaults=defaults.sampling())
    return Assembled(core, info)


def overlaps(config: EngineConfig, device: torch.device) -> bool:
    """Whether the next step is planned while one is computed. On a CPU both want the same cores, and the way
    between two threads costs more than it hides (docs/decisions/0015-overlap.md). Raises ConfigError."""
    if config.overlap not in ("auto", "on", "off"):
        raise ConfigError(f"--overlap is {config.overlap!r}; it may be auto, on or off", param="--overlap")
    return config.overlap == "on" or (config.overlap == "auto" and device.type != "cpu")


def _guessed_cost(loaded: LoadedModel) -> PrefillCost:
    spec = loaded.spec
    return geometric_cost(hidden_size=spec.hidden_size, attention_layers=len(spec.attention_layers),
                          parameters=loaded.weights_bytes / ITEM_BYTES[spec.dtype])


def _cost_learner(policy: Policy, guess: PrefillCost) -> Callable[[StepPlan, float], None]:
    """Tells ``policy`` what computing a prompt costs here, from the steps that were measured. A step of
    decodes alone is like the one before it: of those one in sixteen is enough."""
    fit = PrefillFit(guess)

    def measured(plan: StepPlan, seconds: float) -> None:
        if plan.step % 16 and plan.decode_count == plan.run_count:
            return
        if fit.told(*work_of(plan), seconds):
            policy.costs(fit.cost())

    return measured


def _prepare_torch(config: EngineConfig, notes: list[str]) -> int:
    """Import torch as the CPU path wants it; returns the threads it will use."""
    if "torch" in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        notes.append("torch was imported before the engine was made, and OMP_WAIT_POLICY is not set: set it "
                     "to passive, or torch's threads spin whenever another process shares their cores.")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    import torch

    if config.threads is not None and not 1 <= config.threads <= THREADS_MAX:
        raise ConfigError(f"--threads is {config.threads}; it must be at least 1 and at most {THREADS_MAX}",
                          param="--threads")
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(usable_cores())
    return torch.get_num_threads()


def _choose_device(config: EngineConfig, notes: list[str]) -> torch.device:
    from weft.tensor.device import choose_device, remarks

    if not 0 < config.gpu_memory_fraction <= 1:
        raise ConfigError(f"--gpu-memory-fraction is {config.gpu_memory_fraction}; it must be above 0 and at "
                          "most 1", param="--gpu-memory-fraction")
    device = choose_device(config.device)
    notes += remarks(device)
    return device


def _choose_kernels(config: EngineConfig, threads: int, device: torch.device) -> str:
    """Which kernels run, in words for the start-up line."""
    from weft.tensor import gpu, native
    from weft.tensor.device import kernels_in_words
    from weft.tensor.gpu import prefill_backend

    native.choose(config.cpu_kernels)
    native.set_threads(threads)
    gpu.choose(config.gpu_kernels)
    prefill_backend.choose(config.attention_backend)
    return kernels_in_words() if device.type == "cuda" else native.describe()


def _find_model(config: EngineConfig, tell: OnProgress) -> tuple[str, Path]:
    """(the name to serve it under, its directory)."""
    from weft.models.hub import resolve_model

    if config.model is None:
        directory = Path(__file__).parent / "embedded" / EMBEDDED_MODEL
        if not (directory / "config.json").is_file():
            raise ConfigError("this installation has no embedded model; name a checkpoint directory or a hub "
                              "model", param="--model")
        return EMBEDDED_MODEL, directory
    tell(f"model: {config.model}")
    directory = resolve_model(config.model, config.revision)
    is_path = Path(config.model).expanduser().is_dir()
    return (directory.name if is_path else config.model), directory


def _load(config: EngineConfig, name: str, directory: Path, tell: OnProgress,
          device: torch.device) -> LoadedModel:
    from weft.models.loading import load_model

    shown_percent = -1

    def on_bytes(done: int, total: int) -> None:
        nonlocal shown_percent
        percent = 100 * done // max(total, 1) // 5 * 5
        if percent > shown_percent:
            shown_percent = percent
            bar = "█" * (percent // 5) + "·" * (20 - percent // 5)
            tell(f"weights of {name}: {bar} {percent} % of {format_bytes(total)}")

    loaded = load_model(directory, config.dtype, on_bytes, quantize=config.quantize,
                        quantize_inputs=config.quantize_inputs, twelve_bit=config.twelve_bit, device=device)
    tell(f"weights of {name}: {_read_in_words(loaded)}")
    return loaded


def _read_in_words(loaded: LoadedModel) -> str:
    """``1.2 GiB read in 0.8 s, 1.5 GiB/s``; ordering and rounding included."""
    rate = format_bytes(int(loaded.read_bytes / max(loaded.read_s, 1e-9)))
    return f"{format_bytes(loaded.read_bytes)} read in {loaded.read_s:.1f} s, {rate}/s"


def cache_dtypes(config: EngineConfig, spec: ModelSpec) -> tuple[ModelSpec, CacheDTypeName]:
    """``spec`` with its states as ``config`` asks for them, and the dtype of its pages.

    Raises ConfigError for a dtype that there is none of, for a head that cannot be packed in it, and for int4
    where nothing is compressed.
    """
    for flag, value, names in (("--kv-dtype", config.kv_dtype, ("auto", *KV_DTYPES)),
                               ("--state-dtype", config.state_dtype, STATE_DTYPES),
                               ("--compress-kv", config.compress_kv, COMPRESSED_KV_DTYPES)):
        if value not in names:
            raise ConfigError(f"{flag} is {value!r}; it may be {', '.join(names)}", param=flag)
    if config.exact and config.compress_kv != "int8":
        raise ConfigError(f"--compress-kv {config.compress_kv} needs --no-exact: without it nothing is compressed",
                          param="--compress-kv")
    asked = KV_DTYPES.get(config.kv_dtype)
    kv_dtype = asked or spec.dtype
    packed = 4 // ITEM_BYTES[kv_dtype]
    for layer in spec.layers:
        if layer.kv_heads and layer.head_dim % packed:
            raise ConfigError(f"--kv-dtype is {config.kv_dtype}, which packs {packed} numbers of a head: the "
                              f"{layer.head_dim} of this model's heads are no multiple of that; use "
                              "--kv-dtype float32", param="--kv-dtype")
    return kept_in(spec, asked, config.state_dtype), kv_dtype


@dataclass(frozen=True, slots=True)
class _Room:
    """What an arena may take: ``most_bytes`` whatever is asked, ``usual_bytes`` where nothing is. ``why``:
    where the limit comes from, a sentence."""

    most_bytes: int
    usual_bytes: int
    why: str


def _ram_room(config: EngineConfig, spec: ModelSpec, kv_dtype: CacheDTypeName) -> _Room:
    available = free_ram_bytes()
    return _Room(int(available * (1 - WORKSPACE_SHARE)), default_memory_bytes(available, spec, config, kv_dtype),
                 f"{format_bytes(available)} of RAM are free now.")


def _gpu_room(config: EngineConfig, loaded: LoadedModel, spec: ModelSpec, kv_dtype: CacheDTypeName,
              device: torch.device, capture: CudaCapture | None, tell: OnProgress) -> _Room:
    """The weights are there; what a step takes is measured; the arena gets a share of what is left."""
    from weft.runner.reserve import CudaMeter, measure_reserve
    from weft.tensor.device import free_bytes

    tell("memory: measuring what a step takes")
    reserve = measure_reserve(
        loaded.model, spec, kv_dtype, step_tokens=config.max_num_batched_tokens, rows=config.max_num_seqs,
        model_len=min(config.max_model_len or spec.max_positions, spec.max_positions), device=device,
        meter=CudaMeter(device), capture=capture)
    return gpu_room(config, free_bytes(device), reserve.total_bytes, reserve.in_words())


def gpu_room(config: EngineConfig, free: int, reserved: int, reserved_in_words: str) -> _Room:
    """``free``: bytes of the GPU that nobody holds, weights loaded; ``reserved``: what a step takes of them.

    Raises ConfigError where a step leaves nothing.
    """
    most = int((free - reserved) * config.gpu_memory_fraction)
    if most <= 0:
        raise ConfigError(
            f"beside the weights {format_bytes(free)} of the GPU are free, and a step takes "
            f"{format_bytes(reserved)} ({reserved_in_words}): nothing is left for KV and states; use a "
            "smaller --max-num-batched-tokens or --max-num-seqs, or --quantize",
            param="--max-num-batched-tokens")
    return _Room(most, most, f"{format_bytes(free)} of the GPU are free beside the weights, a step takes "
                             f"{format_bytes(reserved)} of them ({reserved_in_words}), and "
                             f"--gpu-memory-fraction is {config.gpu_memory_fraction}.")


def _plan_memory(config: EngineConfig, spec: ModelSpec, kv_dtype: CacheDTypeName,
                 room: _Room) -> tuple[ArenaPlan, list[str]]:
    asked = room.usual_bytes if config.memory is None else parse_bytes(config.memory, flag="--memory")
    size = min(asked, room.most_bytes)
    note = f"--memory {config.memory} shrunk to {format_bytes(size)}: {room.why}"
    return (plan_arena(spec, size, kv_dtype=kv_dtype, compress=not config.exact, compress_kv=config.compress_kv),
            [note] if size < asked and config.memory is not None else [])


def _capture(config: EngineConfig, device: torch.device) -> CudaCapture | None:
    """On a GPU, unless it is turned off."""
    if config.cuda_graphs not in ("auto", "off"):
        raise ConfigError(f"--cuda-graphs is {config.cuda_graphs!r}; it may be auto or off",
                          param="--cuda-graphs")
    if device.type != "cuda" or config.cuda_graphs == "off":
        return None
    from weft.runner.graphs import CudaCapture

    return CudaCapture(device)


def _record_graphs(executor: TorchExecutor, tell: OnProgress) -> list[str]:
    """What the user should know of them: how many there are, or why there are none."""
    if executor.graphs is None:
        return []
    tell(f"CUDA graphs: recording {len(executor.graphs.widths)} batch sizes")
    refused = executor.record_graphs()
    notes = [] if refused is None else [
        f"some decode steps are not recorded as CUDA graphs, and are slower for it: {refused}"]
    widths = executor.graphs.recorded_widths
    if widths:
        notes.append(f"decode steps of up to {widths[-1]} sequences are CUDA graphs: {len(widths)} batch "
                     f"sizes, recorded in {executor.graphs.recorded_s:.1f} s.")
    return notes


def _grammar_compiler(config: EngineConfig, directory: Path, eos_ids: tuple[int, ...],
                      vocab_size: int) -> GrammarCompiler:
    sandbox = grammar_sandbox(config, directory, eos_ids)
    return GrammarCompiler(None if sandbox is None else sandbox.read_tokenizer, eos_ids, vocab_size, sandbox,
                           cache_bytes=parse_bytes(config.grammar_cache, flag="--grammar-cache"))


def _layers_in_words(spec: ModelSpec) -> str:
    kinds = Counter(layer.kind for layer in spec.layers)
    return ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in kinds.items())


def _memory_table(spec: ModelSpec, loaded: LoadedModel, arena: ArenaPlan,
                  max_model_len: int) -> list[MemoryRow]:
    kv_token_bytes = spec.kv_bytes_per_token(arena.kv_dtype)
    longest = pages_for(max_model_len) * arena.page_bytes + arena.slot_bytes
    kinds = " or ".join(f"{count} {noun}{'s' if count > 1 else ''}" for count, noun in
                        ((arena.pages_per_frame, "KV page"), (arena.slots_per_frame, "state")) if count)
    return [
        MemoryRow("weights", loaded.weights_bytes, f"{loaded.weights_form}; {_read_in_words(loaded)}"),
        MemoryRow("arena", arena.arena_bytes,
                  f"{arena.frame_count} frames of {format_bytes(arena.frame_bytes)}, each {kinds}"),
        MemoryRow("a token's KV", kv_token_bytes,
                  f"{len(spec.attention_layers)} attention layers, {arena.kv_dtype}"),
        MemoryRow("a sequence's state", arena.slot_bytes,
                  f"{len(spec.recurrent_layers)} recurrent layers, {spec.state_dtype}"),
        *([MemoryRow("a compressed state", arena.compressed_bytes, f"in {arena.compressed_pages} KV pages, 8 bits")]
          if arena.compressed_pages else []),
        *([MemoryRow("a token's compressed KV", arena.compressed_kv_bytes // arena.page_tokens,
                     f"{arena.compressed_kv_dtype}, while nobody reads it")] if arena.compressed_kv_bytes else []),
        MemoryRow("longest sequence", longest, f"{max_model_len} tokens"),
    ]
