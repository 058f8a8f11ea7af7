"""Size of the arena: from the free memory of the machine, the flags, and the dtypes of its pages.

    CPU   free RAM, weights loaded             -> a share by default, nearly all of it at most
    GPU   free bytes - the measured need of a step         -> x --gpu-memory-fraction, by default and at most

Memory is measured after the weights are loaded, so a default is a share of the memory that is really left.
``--memory`` beyond the room is shrunk, and a note says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from weft.config import STEP_TOKENS_GPU, EngineConfig
from weft.errors import ConfigError, RankLostError
from weft.families import read_spec
from weft.files import read_json
from weft.host import GPU_CONTEXT_BYTES, free_ram_bytes, memory_share_bytes
from weft.memory.frames.plan import WORKSPACE_SHARE, ArenaPlan, default_memory_bytes, fit_sizes, memory_for, plan_arena
from weft.spec import ITEM_BYTES, KV_DTYPES, CacheDTypeName, ModelSpec, with_cache_dtypes
from weft.units import CHUNK_TOKENS, format_bytes, parse_bytes

if TYPE_CHECKING:
    import torch

    from weft.models.loading import LoadedModel
    from weft.runner.graphs import Capture
    from weft.runner.reserve import Reserve

STEP_TOKENS_LEAST = CHUNK_TOKENS + 1
"""Tokens, the least budget of a step: a chunk and a decode."""

_log = logging.getLogger("weft")


def cache_dtypes(config: EngineConfig, spec: ModelSpec) -> tuple[ModelSpec, CacheDTypeName]:
    """Return ``spec`` with the state dtypes that ``config`` sets, and the dtype of its pages.

    Raises ConfigError for a head that cannot be packed in that dtype.
    """
    requested = KV_DTYPES.get(config.kv_dtype)
    kv_dtype = requested or spec.dtype
    packed = 4 // ITEM_BYTES[kv_dtype]
    for layer in spec.layers:
        if layer.kv_heads and layer.head_dim % packed:
            raise ConfigError(
                f"--kv-dtype is {config.kv_dtype}, which packs {packed} numbers of a head: the "
                f"{layer.head_dim} of this model's heads are not a multiple of that; use "
                "--kv-dtype float32",
                param="--kv-dtype",
            )
    return with_cache_dtypes(spec, requested, config.state_dtype), kv_dtype


@dataclass(frozen=True, slots=True)
class ArenaRoom:
    """Limits of an arena: ``most_bytes``, and ``usual_bytes`` without ``--memory``. ``why``: the reason for the limit,
    a sentence.
    """

    most_bytes: int
    usual_bytes: int
    why: str
    process_bytes: int = 0
    """Memory of this process in addition to weights and arena: on a GPU its context, and the reserve of a step."""


def adapter_bytes(config: EngineConfig) -> int:
    """Return the bytes of the budget of adapters, 0 without --lora and ``limits.lora_memory``."""
    adapts = config.lora or config.lora_memory != EngineConfig().lora_memory
    return parse_bytes(config.lora_memory, flag="limits.lora_memory") if adapts else 0


def ram_room(config: EngineConfig, spec: ModelSpec, kv_dtype: CacheDTypeName) -> ArenaRoom:
    """Return the room for an arena in RAM. Ranks divide the free memory."""
    available = max(0, free_ram_bytes() // config.tp - adapter_bytes(config))
    return ArenaRoom(
        int(available * (1 - WORKSPACE_SHARE)),
        default_memory_bytes(available, spec, config, kv_dtype),
        f"{format_bytes(available)} of RAM are free now.",
    )


def within_share(config: EngineConfig, room: ArenaRoom, weights_bytes: int) -> ArenaRoom:
    """Return ``room``, or less if the weights leave less of this process's share of the server's memory. Raises
    ConfigError if nothing is left.
    """
    share = memory_share_bytes()
    if share is None:
        return room
    share //= config.tp  # ranks divide it
    used_bytes = weights_bytes + room.process_bytes
    if used_bytes >= share:
        process = f", its process and a step {format_bytes(room.process_bytes)}" if room.process_bytes else ""
        raise ConfigError(
            f"its share of --memory is {format_bytes(share)}, and its weights take "
            f"{format_bytes(weights_bytes)}{process}: raise --memory, or serve fewer models",
            param="--memory",
        )
    most = min(room.most_bytes, share - used_bytes)
    return ArenaRoom(most, most, room.why)


def measured_gpu_room(
    config: EngineConfig,
    loaded: LoadedModel,
    spec: ModelSpec,
    kv_dtype: CacheDTypeName,
    device: torch.device,
    capture: Capture | None,
    tell: Callable[[str], None],
) -> ArenaRoom:
    """Return the room on a GPU after the weights are loaded: the need of a step is measured, and the arena gets a
    share of the rest.
    """
    from weft.runner.arena import MOVES_ROOM_BYTES
    from weft.runner.reserve import CudaMeter, measure_reserve
    from weft.tensor.device import free_bytes

    rooms_bytes = MOVES_ROOM_BYTES + _store_rooms_bytes(config, spec, kv_dtype)
    tokens = max(config.max_num_batched_tokens or STEP_TOKENS_GPU, STEP_TOKENS_LEAST)  # as by ``fit_sizes``
    measure = partial(
        measure_reserve,
        loaded.model,
        spec,
        kv_dtype,
        rows=config.max_num_seqs,
        device=device,
        meter=CudaMeter(device),
        mixed_tokens_max=mixed_tokens_max(config),
        verify_runs=records_verify_runs(config),
        adapters=adapter_bytes(config) > 0,
        model_len=min(config.max_model_len or spec.max_positions, spec.max_positions),
        tell=tell,
    )
    tell("memory: measuring the need of a step")
    reserve = _reserve(config, partial(measure, step_tokens=tokens), capture)
    if reserve is None:
        free = free_bytes(device)
        if config.tp > 1:
            # The other ranks wait in a collective, so no shorter step can be tried.
            raise RankLostError(
                f"a step of {tokens} tokens and {config.max_num_seqs} sequences does not fit into the memory of this "
                f"rank's GPU, of which {format_bytes(free)} are free after the weights: lower --max-num-batched-tokens "
                "or --max-num-seqs",
                param="--max-num-batched-tokens",
            )
        raise ConfigError(
            f"a step of {tokens} tokens and {config.max_num_seqs} sequences does not fit into the "
            f"{format_bytes(free)} of the GPU that are free after the weights. "
            + (
                _fitting(config, partial(measure, capture=None), tokens, free - rooms_bytes - adapter_bytes(config))
                or _no_step(loaded.weights_bytes)
            ),
            param="--max-num-batched-tokens",
        )
    reserve = replace(reserve, transfer_bytes=rooms_bytes, adapter_bytes=adapter_bytes(config))
    free = free_bytes(device)
    return gpu_room(
        config,
        free,
        reserve.total_bytes,
        reserve.in_words(),
        lambda: _ways_out(config, reserve, free, partial(measure, capture=None), tokens, loaded.weights_bytes),
    )


def _reserve(config: EngineConfig, measure: Callable[..., Reserve], capture: Capture | None) -> Reserve | None:
    """Return the measured reserve, or None if memory is too small. The memory of a failed step is freed only after the
    handler, because the traceback of the error refers to it.
    """
    import torch

    from weft.tensor import gpu

    try:
        return measure(capture=capture)
    except torch.OutOfMemoryError:
        return None
    except gpu.KernelTooLargeError as error:
        if config.gpu_kernels != "auto":
            raise ConfigError(
                f"debug.gpu_kernels is {config.gpu_kernels}: {error}", param="debug.gpu_kernels"
            ) from error
        _log.warning("Triton kernels are off, and torch's operators run in their place, many times slower: %s", error)
    except gpu.KernelsDifferError as error:
        raise ConfigError(
            f"kernels give other numbers than torch's operators on this GPU: {error}. It is a fault of this Triton, "
            "driver or GPU: install another version, or debug.gpu_kernels torch, many times slower",
            param="debug.gpu_kernels",
        ) from error
    gpu.choose("torch")
    try:
        return measure(capture=None)  # torch's operators cannot be recorded
    except torch.OutOfMemoryError:
        return None


def _ways_out(
    config: EngineConfig, reserve: Reserve, free: int, measure: Callable[..., Reserve], tokens: int, weights_bytes: int
) -> str:
    """Return which flags to lower, and by how much, when ``reserve`` leaves nothing of ``free``."""
    from weft.runner.arena import MOVES_ROOM_BYTES

    lacking = reserve.total_bytes - free
    parts = {
        "debug.cuda_graphs off": reserve.graph_bytes,
        "no --store": reserve.transfer_bytes - MOVES_ROOM_BYTES,
        "no --lora": reserve.adapter_bytes,
    }
    ways = [f"{flag} frees {format_bytes(size)}" for flag, size in parts.items() if size > lacking]
    if ways:
        return " or ".join(ways)
    free -= reserve.transfer_bytes + reserve.adapter_bytes
    beside_graphs = _fitting(config, measure, tokens, free - reserve.graph_bytes)
    without = None if beside_graphs else _fitting(config, measure, tokens, free)
    return beside_graphs or (f"debug.cuda_graphs off with {without}" if without else _no_step(weights_bytes))


def _store_rooms_bytes(config: EngineConfig, spec: ModelSpec, kv_dtype: CacheDTypeName) -> int:
    """Return the bytes of a store's rooms on the device, 0 without one."""
    from weft.runner.transfers import rooms_bytes_for

    if not config.moves_records:
        return 0
    arena = plan_arena(spec, memory_for(spec, kv_dtype, 1, 1)[0], kv_dtype=kv_dtype)
    load_bytes, store_bytes = rooms_bytes_for(arena.slot_bytes, arena.page_bytes)
    return load_bytes + 2 * store_bytes


def _no_step(weights_bytes: int) -> str:
    return (
        f"Nor does one of {STEP_TOKENS_LEAST} tokens and 1 sequence: --quantize int4 frees up to three "
        f"quarters of the {format_bytes(weights_bytes)} of weights"
    )


def _fitting(config: EngineConfig, measure: Callable[..., Reserve], tokens: int, free: int) -> str | None:
    """Return the largest half, quarter, ... of a step that takes less than ``free``: first fewer tokens are tried,
    then fewer sequences. None if none fits.
    """
    import torch

    sizes = [
        (tokens >> half, config.max_num_seqs)
        for half in range(1, tokens.bit_length())
        if tokens >> half > STEP_TOKENS_LEAST
    ]
    sizes += [(STEP_TOKENS_LEAST, config.max_num_seqs >> half) for half in range(config.max_num_seqs.bit_length())]
    for fewer, seqs in sizes if free > 0 else ():
        try:
            if measure(step_tokens=fewer, rows=seqs).step_bytes < free:
                also = "" if seqs == config.max_num_seqs else f" with --max-num-seqs {seqs}"
                return f"--max-num-batched-tokens {fewer}{also} fits"
        except torch.OutOfMemoryError:
            continue
    return None


def records_verify_runs(config: EngineConfig) -> bool:
    """Return whether steps with drafts are recorded as graphs."""
    return config.speculate != "off"


def mixed_tokens_max(config: EngineConfig) -> int:
    """Return the most tokens of a step with prompts that is recorded as a graph."""
    from weft.runner.graph_shapes import TOKENS_MAX

    return 0 if config.cuda_graphs == "decodes" else TOKENS_MAX


def gpu_room(
    config: EngineConfig, free: int, reserved: int, reserved_in_words: str, ways_out: Callable[[], str]
) -> ArenaRoom:
    """Return the room of an arena. ``free``: free bytes of the GPU, weights loaded; ``reserved``: the part that a step
    takes; ``ways_out``: the flags to lower if that is too much.

    Raises ConfigError if a step leaves nothing.
    """
    most = int((free - reserved) * config.gpu_memory_fraction)
    if most <= 0:
        raise ConfigError(
            f"after the weights {format_bytes(free)} of the GPU are free, and a step takes "
            f"{format_bytes(reserved)} ({reserved_in_words}), which leaves nothing for KV and states: "
            f"{format_bytes(reserved - free)} too many. {ways_out()}",
            param="--max-num-batched-tokens",
        )
    return ArenaRoom(
        most,
        most,
        f"{format_bytes(free)} of the GPU are free after the weights, a step takes "
        f"{format_bytes(reserved)} of them ({reserved_in_words}), and "
        f"--gpu-memory-fraction is {config.gpu_memory_fraction}.",
        reserved + GPU_CONTEXT_BYTES,
    )


def check_memory(config: EngineConfig, directory: Path, device: torch.device) -> None:
    """Raise ConfigError if ``--memory`` is too small for one sequence of the model in ``directory``, by its
    config.json, before weights are read. The shares of ranks and the additions of drafts are only known later.
    """
    if config.memory is None or config.tp > 1:
        return
    spec = read_spec(read_json(directory / "config.json"))
    spec, kv_dtype = cache_dtypes(config, spec if config.dtype == "auto" else replace(spec, dtype=config.dtype))
    requested = parse_bytes(config.memory, flag="--memory")
    arena, _, _ = plan_memory(config, spec, kv_dtype, ArenaRoom(requested, requested, ""), device, sees=False)
    fit_sizes(config, spec, arena)


PICTURES_SHARE = 8
"""Divisor of ``--memory``: rows of pictures take at most this part."""


def plan_memory(
    config: EngineConfig,
    spec: ModelSpec,
    kv_dtype: CacheDTypeName,
    room: ArenaRoom,
    device: torch.device,
    *,
    sees: bool,
) -> tuple[ArenaPlan, int, list[str]]:
    """Return the arena, the bytes for rows of pictures (a part of ``--memory``), and notes. ``device``: its kernels
    determine the layout of pages. ``sees``: the model reads pictures.
    """
    from weft.tensor import gpu

    requested = room.usual_bytes if config.memory is None else parse_bytes(config.memory, flag="--memory")
    size = min(requested, room.most_bytes)
    note = f"--memory {config.memory} shrunk to {format_bytes(size)}: {room.why}"
    most = parse_bytes(config.picture_rows, flag="limits.picture_rows") if sees else 0
    pictures = min(most, size // PICTURES_SHARE)
    arena = plan_arena(
        spec,
        size - pictures,
        kv_dtype=kv_dtype,
        compress=not config.exact,
        compress_kv=config.compress_kv,
        kv_layout=gpu.page_layout(device),
    )
    notes = [note] if size < requested and config.memory is not None else []
    if not config.exact and not arena.compressed_pages and not arena.compressed_kv_bytes:
        notes.append(
            "--no-exact compresses nothing here: that takes a model with recurrent states, and KV of more than 8 bits."
        )
    return arena, pictures, notes
