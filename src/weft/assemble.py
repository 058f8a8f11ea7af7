"""The composition root: the one place that knows every part and puts them together.

    EngineConfig --+-- model      directory or hub name -> weights in RAM
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
after the weights are loaded, so that its default is a share of what is really left.

Importing this module costs nothing: torch comes in with ``assemble``, so the process that serves HTTP can
name ``ModelInfo`` without it.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from weft.config import EngineConfig
from weft.engine.engine import EngineCore
from weft.errors import ConfigError
from weft.host import free_ram_bytes, usable_cores
from weft.info import MemoryRow, ModelInfo
from weft.memory.memory import Memory
from weft.memory.plan import ArenaPlan, default_memory_bytes, fit_sizes, plan_arena
from weft.schedule.taps import parse_checkpoints
from weft.spec import ModelSpec
from weft.units import format_bytes, pages_for, parse_bytes

if TYPE_CHECKING:
    from weft.models import LoadedModel

__all__ = ["Assembled", "MemoryRow", "ModelInfo", "OnProgress", "assemble"]

OnProgress = Callable[[str], None]
"""Told, in one line, what is being done now."""

EMBEDDED_MODEL = "weft-recall"
_RAM_KEPT_SHARE = 0.1
"""Share of the free RAM that an explicit ``--memory`` may not take: the step's own tensors live there."""


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
    threads = _prepare_torch(config, notes)
    started = time.monotonic()
    name, directory = _find_model(config, tell)
    loaded = _load(config, name, directory, tell)
    notes += loaded.warnings
    arena, memory_note = _plan_memory(config, loaded.spec)
    sizes = fit_sizes(config, loaded.spec, arena)
    notes += [*memory_note, *sizes.notes]
    tell(f"memory: {format_bytes(arena.arena_bytes)} in {arena.frame_count} frames")

    from weft.runner.torch_executor import TorchExecutor

    executor = TorchExecutor(loaded.model, arena, sizes)
    defaults = loaded.generation_defaults
    core = EngineCore(vocab_size=loaded.spec.vocab_size, sizes=sizes,
                      memory=Memory(arena, cache=config.prefix_cache), executor=executor,
                      clock=time.monotonic, seed=config.seed, eos_ids=defaults.eos_ids,
                      checkpoints=checkpoints)
    info = ModelInfo(
        name=name, directory=str(directory), family=loaded.spec.family, layers=_layers_in_words(loaded.spec),
        vocab_size=loaded.spec.vocab_size, dtype=loaded.spec.dtype, weights_bytes=loaded.weights_bytes,
        load_s=time.monotonic() - started, device="cpu", threads=threads, sizes=sizes,
        memory=_memory_table(loaded, arena, sizes.max_model_len), notes=notes, eos_ids=list(defaults.eos_ids),
        generation_defaults=defaults.sampling())
    return Assembled(core, info)


def _prepare_torch(config: EngineConfig, notes: list[str]) -> int:
    """Import torch as the CPU path wants it; returns the threads it will use."""
    if "torch" in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        notes.append("torch was imported before the engine was made, and OMP_WAIT_POLICY is not set: set it "
                     "to passive, or torch's threads spin whenever another process shares their cores.")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    import torch

    if config.threads is not None and config.threads < 1:
        raise ConfigError(f"--threads is {config.threads}; it must be at least 1", param="--threads")
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(usable_cores())
    return torch.get_num_threads()


def _find_model(config: EngineConfig, tell: OnProgress) -> tuple[str, Path]:
    """(the name to serve it under, its directory)."""
    from weft.models import resolve_model

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


def _load(config: EngineConfig, name: str, directory: Path, tell: OnProgress) -> LoadedModel:
    from weft.models import load_model

    shown_percent = -1

    def on_bytes(done: int, total: int) -> None:
        nonlocal shown_percent
        percent = 100 * done // max(total, 1) // 10 * 10
        if percent > shown_percent:
            shown_percent = percent
            tell(f"weights of {name}: {percent} % of {format_bytes(total)}")

    return load_model(directory, config.dtype, on_bytes)


def _plan_memory(config: EngineConfig, spec: ModelSpec) -> tuple[ArenaPlan, list[str]]:
    available = free_ram_bytes()
    if config.memory is None:
        return plan_arena(spec, default_memory_bytes(available, spec, config)), []
    asked = parse_bytes(config.memory, flag="--memory")
    most = int(available * (1 - _RAM_KEPT_SHARE))
    if asked <= most:
        return plan_arena(spec, asked), []
    return plan_arena(spec, most), [f"--memory {config.memory} shrunk to {format_bytes(most)}: "
                                    f"{format_bytes(available)} of RAM are free now."]


def _layers_in_words(spec: ModelSpec) -> str:
    kinds = Counter(layer.kind for layer in spec.layers)
    return ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in kinds.items())


def _memory_table(loaded: LoadedModel, arena: ArenaPlan, max_model_len: int) -> list[MemoryRow]:
    spec = loaded.spec
    kv_token_bytes = spec.kv_bytes_per_token(arena.kv_dtype)
    longest = pages_for(max_model_len) * arena.page_bytes + arena.slot_bytes
    kinds = " or ".join(f"{count} {noun}{'s' if count > 1 else ''}" for count, noun in
                        ((arena.pages_per_frame, "KV page"), (arena.slots_per_frame, "state")) if count)
    return [
        MemoryRow("weights", loaded.weights_bytes, spec.dtype),
        MemoryRow("arena", arena.arena_bytes,
                  f"{arena.frame_count} frames of {format_bytes(arena.frame_bytes)}, each {kinds}"),
        MemoryRow("a token's KV", kv_token_bytes, f"{len(spec.attention_layers)} attention layers"),
        MemoryRow("a sequence's state", arena.slot_bytes, f"{len(spec.recurrent_layers)} recurrent layers"),
        MemoryRow("longest sequence", longest, f"{max_model_len} tokens"),
    ]
