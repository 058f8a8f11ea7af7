"""Assembly of an engine from its config: every part is built here, in this order.

    EngineConfig --+-- check      each field by its type hint
                   +-- text       directory or hub name -> the tokenizer, the chat template
                   +-- device     the CPU or a GPU, its kernels
                   +-- model      weights in RAM, or on the GPU
                   |      |
                   |      spec ------+
                   |                 v
                   +-- memory     bytes -> ArenaPlan -> Sizes (shrunk, with a note, if they do not fit)
                   |                 |
                   |       Memory    |    TorchExecutor(model, plan)
                   |             \\   |   /
                   +-----------> EngineCore            + ModelInfo: all of it in words and numbers

The order matters. Refusals that need no weights come before weights are read, and that of a missing tokenizer before
torch is imported. The OpenMP wait policy is set before that, since torch reads it once; spinning threads of two
processes on the same cores cost ten times the work itself. Memory is measured after the weights are loaded, so that
its default is a share of the memory that is really left. On a GPU it is measured after a step too. Graphs are recorded
last, since they keep addresses: all memory that graphs refer to is allocated by then.

This module imports no torch; ``assemble`` does. So the process that serves HTTP can use ``ModelInfo``.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from weft.adapters import Adapter, named_paths, read_adapter
from weft.assemble.identity import engine_identity
from weft.assemble.ranks import StartedRanks, start_ranks, with_rank_threads
from weft.assemble.room import (
    adapter_bytes,
    cache_dtypes,
    check_memory,
    measured_gpu_room,
    mixed_tokens_max,
    plan_memory,
    ram_room,
    records_verify_runs,
    within_share,
)
from weft.assemble.speculation import make_drafter
from weft.assemble.weights import WeightsSource, read_in_words
from weft.config import STEP_TOKENS_CPU, STEP_TOKENS_GPU, STEP_TOKENS_WHOLE, EngineConfig, Sizes
from weft.costs.step import given_cost
from weft.default_sampling import read_default_sampling
from weft.engine.adapters import AdapterPool
from weft.engine.engine import EngineCore
from weft.engine.grammars import GrammarCompiler
from weft.engine.stats import WeightsState
from weft.errors import CheckpointError, ConfigError, UserError
from weft.families import read_spec
from weft.files import read_json
from weft.host import usable_cores
from weft.info import MemoryRow, ModelInfo
from weft.memory.frames.plan import ArenaPlan, fit_sizes
from weft.memory.memory import Memory
from weft.memory.prefix.policies import check_policy, make_policy
from weft.memory.prefix.policy import Policy, PrefillCost, geometric_cost
from weft.models.local import LoadedLock
from weft.schedule.plan import StepPlan
from weft.schedule.snapshots import on_grid, parse_snapshots
from weft.schedule.store_tier import StoreTier
from weft.spec import ITEM_BYTES, ModelSpec
from weft.speculation.drafter import parse_sources
from weft.text.chat import check_syntax, read_chat_template
from weft.text.grammar_limits import parser_limits
from weft.text.grammar_sandbox import grammar_sandbox
from weft.text.pooling import is_embedder
from weft.text.side_files import unknown_keys
from weft.text.tokenizer import Tokenizer
from weft.units import CHUNK_TOKENS, format_bytes, pages_for, parse_bytes

if TYPE_CHECKING:
    import torch

    from weft.models.loading import LoadedModel
    from weft.models.rank_share import RankGroup
    from weft.ranks.executor import RankedExecutor
    from weft.ranks.peers import Peers
    from weft.runner.graphs import Capture
    from weft.runner.torch_executor import TorchExecutor

OnProgress = Callable[[str], None]
"""Function that is called with one line about the work in progress."""

EMBEDDED_MODEL = "weft-recall"
MAX_STEP_MS_CPU, MAX_STEP_MS_GPU = 1000, 100
"""Defaults of ``--max-step-ms``, milliseconds."""


@dataclass(frozen=True, slots=True)
class Assembled:
    core: EngineCore
    info: ModelInfo


def assemble(config: EngineConfig, *, on_progress: OnProgress | None = None, peers: Peers | None = None) -> Assembled:
    """Build an engine from ``config``. ``peers``: ranks that run already; they stay running when the engine closes.

    Raises ConfigError (a flag cannot work), CheckpointError or UnknownArchitectureError (the model cannot be read or
    served); each names the flag, file or tensor.
    """
    tell = on_progress or (lambda line: None)
    notes: list[str] = []
    config.check()
    config = with_rank_threads(config)
    snapshots = parse_snapshots(config.snapshots)
    check_policy(config.cache_policy)
    parse_sources(config.speculate)
    step_costs = given_cost(config.step_costs)
    started = time.monotonic()
    loaded_lock = LoadedLock(config.model)
    name, directory = find_model(config, tell)
    end = _check_text_files(directory)
    source = WeightsSource(config, name, directory)
    adapters, refused_adapters = registered_adapters(config)
    threads, device = prepare_torch(config, notes), choose_device_of(config, 0, notes)
    config = without_prefixes(config, directory)
    config, overlap = with_step_tokens(config, device), overlaps(config, device)
    choose_kernels(config, threads, device)
    check_memory(config, directory, device)
    ranks = None if config.tp == 1 else start_ranks(config, directory, device, tell, peers)
    try:
        placed = _place(config, source, device, ranks, tell)
    except BaseException:
        if ranks is not None:
            ranks.peers.close()
        raise
    kernels = kernels_in_use(device)  # a kernel that does not fit turns Triton off
    loaded, arena, sizes = placed.loaded, placed.arena, placed.sizes
    notes += [*placed.notes, *unknown_keys(directory)]
    defaults, cost = loaded.generation_defaults.ending(end), _guessed_cost(loaded)
    policy = make_policy(config.cache_policy, arena, cost, time.monotonic)
    memory = Memory(
        arena, cache=config.prefix_cache, count_salt=config.count_salt, policy=policy, pins_share=config.session_memory
    )
    tier = None
    if config.moves_records:
        if config.store is not None:
            tell(f"store {config.store}: opening")
        tier, store_notes = _store_tier(
            config, name, source, placed, memory, kernels=kernels, threads=threads, device=device
        )
        if store_notes:
            tell(store_notes[0].removesuffix("."))
        notes += store_notes
    drafter = make_drafter(config, memory, placed.executor, sizes, loaded, tell, step_costs, overlap)
    core = EngineCore(
        vocab_size=loaded.spec.vocab_size,
        sizes=sizes,
        memory=memory,
        executor=placed.executor,
        store=tier,
        pause=time.sleep,
        drafter=drafter,
        clock=time.monotonic,
        seed=config.seed,
        eos_ids=defaults.eos_ids,
        snapshots=snapshots,
        overlap=overlap,
        max_step_s=max_step_s(config, device),
        pair_tokens=2 * cost.quadratic,
        adapters=_adapter_pool(config, placed.executor, device),
        encoder=placed.executor.pictures,
        pictures_bytes=placed.pictures_bytes,
        step_costs=step_costs,
        grammars=_grammar_compiler(config, directory, defaults.eos_ids, loaded.spec.vocab_size),
    )
    core.weights = WeightsState(digest=source.digest())
    core.source = source
    if placed.own.graphs is not None:
        core.counters.steps_by_form = placed.own.steps_by_form.copy
    notes += load_adapters(core, adapters, refused_adapters, config, tell)
    core.on_close.append(loaded_lock.close)
    core.on_step.append(_cost_listener(core, policy, cost, tier))
    if ranks is not None:
        core.counters.ranks = partial(ranks.stats, placed.own)
        core.processes = ranks.peers
    info = ModelInfo(
        name=name,
        directory=str(directory),
        family=loaded.spec.family,
        layers=layers_in_words(loaded.spec),
        vocab_size=loaded.spec.vocab_size,
        dtype=loaded.spec.dtype,
        weights_bytes=loaded.weights_bytes,
        load_s=time.monotonic() - started,
        device=placed.device_name,
        threads=threads,
        kernels=kernels,
        sizes=sizes,
        memory=memory_table(placed, sizes.max_model_len),
        notes=notes,
        eos_ids=list(defaults.eos_ids),
        generation_defaults=defaults.sampling,
        default_sampling=read_default_sampling(config.default_sampling) | defaults.sampling,
        trust_control_tokens=config.trust_control_tokens,
        identity=engine_identity(config, directory, source.digest(), loaded, arena, sizes.max_model_len)
        | _records_identity(config, tier, arena, kernels, threads),
        adapters=adapters,
        refused_adapters=refused_adapters,
        picture_tokens=[] if placed.own.pictures is None else list(placed.own.pictures.picture_tokens),
        hidden_size=loaded.spec.hidden_size,
        generates=loaded.spec.causal and not (loaded.headless or is_embedder(directory)),
        score_labels=0 if loaded.model.score_head is None else loaded.model.score_head.labels,
    )
    return Assembled(core, info)


def _records_identity(
    config: EngineConfig, tier: StoreTier | None, arena: ArenaPlan, kernels: str, threads: int
) -> dict[str, str]:
    """Return further facts that must be equal between engines that send each other records: the fact ``records``."""
    from weft.store.peer_store import PeerStore

    if tier is None or not isinstance(tier.store, PeerStore):
        return {}
    from weft.assemble.prefix_store import arithmetic

    return {
        "records": tier.store.namespace.hex()[:12],
        "threads": str(threads),
        "tp": str(config.tp),
        "kernels": arithmetic(kernels),
        "page layout": arena.kv_layout,
    }


def _store_tier(
    config: EngineConfig,
    name: str,
    source: WeightsSource,
    placed: _Placed,
    memory: Memory,
    *,
    kernels: str,
    threads: int,
    device: torch.device,
) -> tuple[StoreTier, list[str]]:
    """Return the tier, with its buffers attached to the arena, and notes for the user."""
    from weft.assemble.prefix_store import open_tier, own_parts
    from weft.ranks.executor import RankedExecutor

    executor, own = placed.executor, placed.own
    tier, notes = open_tier(
        config,
        name,
        source,
        placed.loaded,
        memory,
        kernels=kernels,
        threads=threads,
        device=device,
        clock=time.monotonic,
        ranks=executor if isinstance(executor, RankedExecutor) else None,
        fp8_scales=lambda: own.fp8_scales,
        chunk_tokens=on_grid(placed.sizes.step_tokens_max) or CHUNK_TOKENS,
    )
    own.arena.attach(own_parts(tier.buffers))
    return tier, notes


def load_adapters(
    core: EngineCore, adapters: list[Adapter], refused: dict[str, str], config: EngineConfig, tell: OnProgress
) -> list[str]:
    """Read the adapters of ``--lora``, and keep them in memory while there is room. An adapter that cannot be served
    ends the start (``_refuse``), or moves from ``adapters`` to ``refused``. Return notes for the user."""
    for adapter in list(adapters):
        tell(f"adapter {adapter.name}: rank {adapter.rank}")
        try:
            core.adapters.check(adapter)
        except UserError as error:
            _refuse(adapter.name, error, refused, config)
            adapters.remove(adapter)
    notes = [f"not served: {why}" for why in refused.values()]
    if not adapters:
        return notes
    stats = core.adapters.stats()
    return [
        *notes,
        f"{len(adapters)} adapters are served, {stats.resident} of them in memory: "
        f"{format_bytes(stats.held_bytes)} of {format_bytes(stats.budget_bytes)} (limits.lora_memory).",
    ]


def registered_adapters(config: EngineConfig) -> tuple[list[Adapter], dict[str, str]]:
    """Return the adapters of ``--lora`` that can be served, and why others are refused. Raises CheckpointError for a
    directory that is not an adapter, or too large a rank, with ``lora_required``.
    """
    from weft.models.hub import resolve_adapter

    adapters: list[Adapter] = []
    refused: dict[str, str] = {}
    for name, path in named_paths(config.lora).items():
        try:
            adapters.append(read_adapter(name, resolve_adapter(path), rank_max=config.max_lora_rank))
        except UserError as error:
            _refuse(name, error, refused, config)
    return adapters, refused


def _refuse(name: str, error: UserError, refused: dict[str, str], config: EngineConfig) -> None:
    """Note why an adapter is not served. Raises CheckpointError if the start ends for it (server.lora_required)."""
    why = f"--lora {name}={named_paths(config.lora)[name]}: {error.message}"
    if config.lora_required:
        raise CheckpointError(why, param=error.param) from None
    refused[name] = why


def _adapter_pool(config: EngineConfig, executor: TorchExecutor | RankedExecutor, device: torch.device) -> AdapterPool:
    """Return the pool of adapters; an empty one on a GPU whose start reserved no memory for adapters."""
    if device.type == "cuda" and not adapter_bytes(config):
        return AdapterPool(
            None,
            refusal="this engine reserved no memory of its GPU for adapters: start it with --lora NAME=path, or set "
            "limits.lora_memory",
        )
    return AdapterPool(
        executor, budget_bytes=parse_bytes(config.lora_memory, flag="limits.lora_memory"), rank_max=config.max_lora_rank
    )


def _guessed_cost(loaded: LoadedModel) -> PrefillCost:
    """Return the guessed cost of a prompt, used until steps were measured."""
    spec = loaded.spec
    return geometric_cost(
        hidden_size=spec.hidden_size,
        attention_layers=len(spec.attention_layers),
        parameters=loaded.weights_bytes / ITEM_BYTES[spec.dtype],
    )


def _cost_listener(
    core: EngineCore, policy: Policy, guess: PrefillCost, tier: StoreTier | None
) -> Callable[[StepPlan, float], None]:
    """Return a listener that gives the eviction policy and the store's prices the measurements of ``core``'s meter."""

    def measured(plan: StepPlan, seconds: float) -> None:
        if plan.verify_count:
            return
        if tier is not None:
            tier.prices.stepped(core.meter.last, seconds)
        if plan.prefills and core.meter.quadratic_is_due:
            policy.costs(PrefillCost(1.0, core.meter.quadratic(guess.quadratic)))

    return measured


@dataclass(frozen=True, slots=True)
class _Placed:
    """A model on its device, with its arena. ``own``: the executor of this process; ``executor``: the executor of all
    ranks. ``spec``: with the dtypes of the caches.
    """

    loaded: LoadedModel
    spec: ModelSpec
    arena: ArenaPlan
    sizes: Sizes
    own: TorchExecutor
    executor: TorchExecutor | RankedExecutor
    device_name: str
    notes: list[str]
    pictures_bytes: int


def _place(
    config: EngineConfig, source: WeightsSource, device: torch.device, ranks: StartedRanks | None, tell: OnProgress
) -> _Placed:
    from weft.runner.product_choice import choose_products
    from weft.runner.sampler import Sampler
    from weft.runner.torch_executor import TorchExecutor
    from weft.tensor.chunks import grid_tokens
    from weft.tensor.device import describe

    group = None if ranks is None else ranks.group
    loaded = source.load(device, group, tell)
    spec, kv_dtype = cache_dtypes(config, loaded.spec)
    capture = choose_capture(config, device, group)
    if ranks is not None:
        ranks.await_loaded(loaded)
    choose_products(config.few_row_products, loaded.model, device, tell)
    room = (
        measured_gpu_room(config, loaded, spec, kv_dtype, device, capture, tell)
        if device.type == "cuda"
        else ram_room(config, spec, kv_dtype)
    )
    room = within_share(config, room, loaded.weights_bytes)
    if ranks is not None:
        room = ranks.common_room(room)
    arena, pictures_bytes, memory_note = plan_memory(
        config, spec, kv_dtype, room, device, sees=loaded.model.vision is not None
    )
    sizes = replace(fit_sizes(config, spec, arena), grid_tokens=grid_tokens(spec, device))
    tell(f"memory: {format_bytes(arena.arena_bytes)} in {arena.frame_count} frames")
    if ranks is not None:
        ranks.peers.lay_out(arena, sizes)
    own = TorchExecutor(
        loaded.model,
        arena,
        sizes,
        kv_scales=loaded.kv_scales,
        device=device,
        reload=source.reload,
        read_from=source.read_from,
        capture=capture,
        mixed_tokens_max=mixed_tokens_max(config),
        verify_runs=records_verify_runs(config),
        adapters=adapter_bytes(config) > 0,
        on_worker=overlaps(config, device),
        sampler=Sampler if ranks is None else ranks.sampler,
    )
    executor = own if ranks is None else ranks.executor(own)  # every rank has its arena then
    notes = [*loaded.warnings, *memory_note, *sizes.notes, *_record_graphs(own, tell)]
    own.warm()
    return _Placed(loaded, spec, arena, sizes, own, executor, describe(device), notes, pictures_bytes)


def overlaps(config: EngineConfig, device: torch.device) -> bool:
    """Return whether the next step is planned while one is computed. On a CPU planning and computing share the cores,
    and switching threads costs more than the overlap saves (decision 0015).
    """
    return config.overlap == "on" or (config.overlap == "auto" and device.type != "cpu")


def with_step_tokens(config: EngineConfig, device: torch.device) -> EngineConfig:
    """Return ``config`` with the token budget of a step, by default that of the device."""
    if config.max_num_batched_tokens is not None:
        return config
    tokens = STEP_TOKENS_CPU if device.type == "cpu" else STEP_TOKENS_GPU
    return replace(config, max_num_batched_tokens=tokens)


def without_prefixes(config: EngineConfig, directory: Path) -> EngineConfig:
    """Return ``config`` itself for a causal model; for others a config without prefix cache, drafts and recorded
    steps, with steps that hold a long prompt. Raises ConfigError for a flag that needs kept prefixes.
    """
    if read_spec(read_json(directory / "config.json")).causal:
        return config
    for flag, wanted in (("--store", config.store is not None), ("--roles", config.handoffs)):
        if wanted:
            raise ConfigError(
                f"{flag} needs a causal model: tokens of this one see later ones (is_causal false), so no prefix can "
                "be kept",
                param=flag,
            )
    return replace(
        config,
        prefix_cache=False,
        speculate="off",
        cuda_graphs="off",
        max_num_batched_tokens=config.max_num_batched_tokens or STEP_TOKENS_WHOLE,
    )


def max_step_s(config: EngineConfig, device: torch.device) -> float | None:
    """Return ``--max-step-ms`` in seconds, None for no limit."""
    milliseconds = config.max_step_ms
    if milliseconds is None:
        milliseconds = MAX_STEP_MS_CPU if device.type == "cpu" else MAX_STEP_MS_GPU
    return milliseconds / 1e3 if milliseconds else None


def prepare_torch(config: EngineConfig, notes: list[str]) -> int:
    """Import torch with the settings of the CPU path; return the number of its threads."""
    if "torch" in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        notes.append(
            "torch was imported before the engine was made, and OMP_WAIT_POLICY is not set: set it "
            "to passive, or torch's threads spin whenever another process shares their cores."
        )
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    import torch

    if config.threads is not None:
        torch.set_num_threads(config.threads)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(usable_cores())
    return torch.get_num_threads()


def choose_device_of(config: EngineConfig, rank: int, notes: list[str]) -> torch.device:
    """Return the device of rank ``rank``: each rank has its own GPU."""
    from weft.tensor.device import choose_device, remarks

    device = choose_device(config.device)
    if device.type == "cuda" and config.tp > 1:
        device = choose_device(f"cuda:{(device.index or 0) + rank}")
    notes += remarks(device)
    return device


def choose_kernels(config: EngineConfig, threads: int, device: torch.device) -> None:
    from weft.tensor import gpu, native
    from weft.tensor.device import capability_of
    from weft.tensor.gpu import prefill_backend

    native.choose(config.cpu_kernels)
    native.set_threads(threads)
    gpu.choose(config.gpu_kernels, joined=config.joined_kernels == "on")
    prefill_backend.choose(config.attention_backend, capability_of(device))
    if gpu.INSTALLED:
        from weft.tensor.gpu import launch

        launch.choose_programmatic(config.programmatic_launches, capability_of(device))


def kernels_in_use(device: torch.device) -> str:
    """Return the kernels in use in words, for the start-up line."""
    from weft.tensor import native
    from weft.tensor.device import kernels_in_words

    return kernels_in_words() if device.type == "cuda" else native.describe()


def find_model(config: EngineConfig, tell: OnProgress, *, text_only: bool = False) -> tuple[str, Path]:
    """Return (the name to serve the model under, its directory). ``text_only``: a hub model without its weights."""
    from weft.models.hub import name_of, resolve_model

    if config.model is None:
        directory = Path(__file__).parents[1] / "embedded" / EMBEDDED_MODEL
        if not (directory / "config.json").is_file():
            raise ConfigError(
                "this installation has no embedded model; name a checkpoint directory or a hub model", param="--model"
            )
        return EMBEDDED_MODEL, directory
    tell(f"model: {config.model}")
    return name_of(config.model), resolve_model(config.model, config.revision, text_only=text_only)


def _check_text_files(directory: Path) -> int | None:
    """Return the tokenizer's end token. Raises an error for a tokenizer or chat template that cannot be used, before
    any weight is read.
    """
    end = Tokenizer.load(directory).end_id
    template = read_chat_template(directory)
    if template is not None:
        check_syntax(*template)
    return end


def choose_capture(config: EngineConfig, device: torch.device, ranks: RankGroup | None) -> Capture | None:
    """Return the recorder of graphs on a GPU, None if it is turned off. Several ranks record together."""
    if device.type != "cuda" or config.cuda_graphs == "off":
        return None
    from weft.ranks.graph_capture import RankedCapture
    from weft.runner.graphs import CudaCapture

    return CudaCapture(device) if ranks is None else RankedCapture(CudaCapture(device), ranks.collectives)


def _record_graphs(executor: TorchExecutor, tell: OnProgress) -> list[str]:
    """Record graphs and return notes for the user: how many graphs, or why none."""
    graphs = executor.graphs
    if graphs is None:
        return []
    decodes = [shape for shape in graphs.shapes if shape.decodes_alone]
    tell(
        f"CUDA graphs: recording {len(decodes)} batch sizes and "
        f"{len(graphs.shapes) - len(decodes)} sizes of steps with prompts"
    )
    refused = executor.record_graphs()
    notes = [] if refused is None else [f"some steps are not recorded as CUDA graphs, and are slower for it: {refused}"]
    if graphs.recorded():
        widths = [shape.decodes for shape in graphs.recorded() if shape.decodes_alone]
        tokens = [shape.tokens for shape in graphs.recorded() if not shape.decodes_alone]
        notes.append(
            f"CUDA graphs, recorded in {graphs.seconds:.1f} s: decode steps of up to {max(widths, default=0)} "
            f"sequences in {len(widths)} batch sizes, steps with prompts of up to {max(tokens, default=0)} tokens in "
            f"{len(tokens)} sizes."
        )
    return notes


def _grammar_compiler(
    config: EngineConfig, directory: Path, eos_ids: tuple[int, ...], vocab_size: int
) -> GrammarCompiler:
    sandbox = grammar_sandbox(config, directory, eos_ids)
    return GrammarCompiler(
        None if sandbox is None else sandbox.read_tokenizer,
        eos_ids,
        vocab_size,
        sandbox,
        cache_bytes=parse_bytes(config.grammar_cache, flag="limits.grammar_cache"),
        step_s=config.grammar_step_ms / 1e3,
        limits=parser_limits(config.grammar_step_ms / 1e3),
    )


def layers_in_words(spec: ModelSpec) -> str:
    kinds = Counter(layer.kind for layer in spec.layers)
    return ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in kinds.items())


def memory_table(placed: _Placed, max_model_len: int) -> list[MemoryRow]:
    spec, loaded, arena = placed.spec, placed.loaded, placed.arena
    seen = [MemoryRow("pictures", placed.pictures_bytes, "rows of those that were encoded, at most")]
    kv_token_bytes = spec.kv_bytes_per_token(arena.kv_dtype)
    longest = pages_for(max_model_len) * arena.page_bytes + arena.slot_bytes
    kinds = " or ".join(
        f"{count} {noun}{'s' if count > 1 else ''}"
        for count, noun in ((arena.pages_per_frame, "KV page"), (arena.slots_per_frame, "state"))
        if count
    )
    compressed = []
    if arena.compressed_pages:
        compressed.append(
            MemoryRow("a compressed state", arena.compressed_bytes, f"in {arena.compressed_pages} KV pages, 8 bits")
        )
    if arena.compressed_kv_bytes:
        compressed.append(
            MemoryRow(
                "a token's compressed KV",
                arena.compressed_kv_bytes // arena.page_tokens,
                f"{arena.compressed_kv_dtype}, while no sequence reads it",
            )
        )
    return [
        MemoryRow("weights", loaded.weights_bytes, f"{loaded.weights_form}; {read_in_words(loaded)}"),
        MemoryRow(
            "arena", arena.arena_bytes, f"{arena.frame_count} frames of {format_bytes(arena.frame_bytes)}, each {kinds}"
        ),
        MemoryRow("a token's KV", kv_token_bytes, f"{len(spec.attention_layers)} attention layers, {arena.kv_dtype}"),
        MemoryRow(
            "a sequence's state", arena.slot_bytes, f"{len(spec.recurrent_layers)} recurrent layers, {spec.state_dtype}"
        ),
        *compressed,
        *(seen if placed.pictures_bytes else []),
        MemoryRow("longest sequence", longest, f"{max_model_len} tokens"),
    ]
