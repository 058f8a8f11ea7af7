"""The models that ``weft serve A B=path C.gguf`` names: names, directories, needs, shares.

    NAME=path    the name that requests use; default: the name of the directory, of the file or on the hub
    --memory     of all models together, weights and arenas; by default 80 % of the RAM that is free
    --lora       MODEL/NAME=path: an adapter belongs to one model
    --store      each model gets its own directory below it, so that each can write
    --pulled     models on this machine's disk, now and later, by the names of their pulls

Wrong paths and names, and flags that several models cannot have, are errors before anything listens. A model whose
config.json cannot be read is listed all the same: only requests for it get the error.

Tokenizers are read here, before anything is served. Reading a tokenizer blocks every other thread of the process
(``text.tokenizer``); during a later load it would block answers of other models.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from weft.adapters import named_paths
from weft.config import STORE_BYTES_MIN, EngineConfig
from weft.errors import CheckpointError, ConfigError
from weft.fleet.places import visible_gpus
from weft.host import GPU_CONTEXT_BYTES, GPU_STEP_BYTES, cpu_name_and_flags, free_ram_bytes, keeps_codes
from weft.models.generation import read_generation_defaults
from weft.models.hub import local_checkpoint, name_of, resolve_model
from weft.models.local import whole_models
from weft.planning.together import ModelNeed, need_of, options_of
from weft.server.config import ServerConfig
from weft.server.models import ANY_NAME
from weft.server.on_demand import ModelSource
from weft.text.tokenizer import Tokenizer
from weft.units import format_bytes, parse_bytes

MEMORY_SHARE = 0.8
"""Share of the RAM that is free when the server starts."""
_log = logging.getLogger("weft.server")
_NAME = re.compile(r"[^\x00-\x20\x7f=]{1,256}")


def named_model(text: str) -> tuple[str, str]:
    """Return (name, path or hub name) of ``A`` or ``NAME=A``. Raise ConfigError for an invalid name."""
    name, sign, path = text.partition("=")
    if not sign or Path(text).expanduser().exists():
        return name_of(text), text
    if not _NAME.fullmatch(name) or name == ANY_NAME or not path:
        raise ConfigError(
            f"{text[:200]!r} is not NAME=MODEL: a name has 1 to 256 characters without spaces "
            f"and =, and is not {ANY_NAME!r}",
            param="model",
        )
    return name, path


def check_together(engine: EngineConfig, server: ServerConfig) -> None:
    """Raise ConfigError for flags that work only with one model, or with a model that stays loaded."""
    of_one = {
        "--served-model-name": (bool(server.served_model_name), "a model's name is NAME=MODEL"),
        "--revision": (engine.revision is not None, "it is a commit of one repository: pull the models first"),
        "--chat-template": (server.chat_template is not None, "put each one into its model's directory"),
        "--ray": (server.ray is not None, "a machine that joins serves one model"),
        "--listen-engines": (server.listen_engines is not None, "a machine that joins serves one model"),
        "--kv-events-config": (server.kv_events_config is not None, "an address publishes one model"),
        "--http-workers": (server.http_workers > 1, "one process loads and unloads them"),
    }
    for flag, (is_set, why) in of_one.items():
        if is_set:
            raise ConfigError(
                f"{flag} is not served with models that are loaded when they are asked for: {why}", param=flag
            )
    if engine.memory is None and engine.device != "cpu" and visible_gpus():
        raise ConfigError(
            "several models on a GPU need --memory: the bytes of it for all of them, weights and arenas",
            param="--memory",
        )


def memory_of(engine: EngineConfig) -> int:
    """Return the memory for all models together, bytes."""
    if engine.memory is None:
        return int(free_ram_bytes() * MEMORY_SHARE)
    return parse_bytes(engine.memory, flag="--memory")


def read_sources(
    models: Sequence[str], engine: EngineConfig, server: ServerConfig, *, reads_weights: bool = True
) -> list[ModelSource]:
    """Return the models of a server. ``reads_weights``: False for scripted engines, which need no checkpoint. Raise
    ConfigError, CheckpointError."""
    check_together(engine, server)
    named = [named_model(text) for text in models]
    names = [name for name, _ in named]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two models are called {name}; give one of them another name: NAME=MODEL", param="model")
    adapters = _adapters_of(engine.lora, names)
    own = replace(engine, memory=None, lora_required=False)
    sources: list[ModelSource] = []
    for index, (name, model) in enumerate(named):
        config = _with_own_store(replace(own, model=model, lora=tuple(adapters[name])), index, names)
        directory = resolve_model(model, text_only=True) if reads_weights else Path(model)
        if engine.tp > 1 and reads_weights:
            from weft.assemble.ranks import check_divides

            check_divides(config, directory)
        sources.append(_source(name, directory, config, server, sources))
    return sources


def read_pulled(engine: EngineConfig, server: ServerConfig, known: Sequence[ModelSource]) -> list[ModelSource]:
    """Return the models on this machine's disk whose names are not ``known``. They have no adapters and no store, since
    a server divides its stores at the start."""
    names = {source.name for source in known}
    own = replace(engine, memory=None, lora=(), store=None, store_cache=None, store_size=None)
    sources: list[ModelSource] = []
    for model in whole_models().values():
        if model.name in names:
            continue
        try:
            directory = local_checkpoint(model.path)
            assert directory is not None, "a directory is not a hub name"
            config = replace(own, model=model.name)
            source = _source(model.name, directory, config, server, [*known, *sources])
            sources.append(replace(source, pulled_s=model.manifest.pulled_s))
        except (CheckpointError, ConfigError) as error:
            _log.warning("%s is on disk and is not served: %s", model.name, error.message)
    return sources


def _source(
    name: str, directory: Path, engine: EngineConfig, server: ServerConfig, known: Sequence[ModelSource]
) -> ModelSource:
    tokenizers = [tokenizer for source in known for tokenizer in source.tokenizers]
    return ModelSource(
        name,
        engine,
        replace(server, served_model_name=(name,)),
        directory,
        _need(name, directory, engine, server.own_replicas),
        _tokenizer(directory, tokenizers),
        _generation_defaults(directory),
    )


def _tokenizer(directory: Path, known: Sequence[Tokenizer]) -> tuple[Tokenizer, ...]:
    """Return the tokenizer; models with equal files share it. Return an empty tuple if it cannot be read: the load
    reports the error."""
    try:
        return (Tokenizer.load(directory, known),)
    except CheckpointError:
        return ()


def _generation_defaults(directory: Path) -> Mapping[str, float | int]:
    """Return the sampling that the checkpoint recommends; empty if it cannot be read: the load reports the error."""
    try:
        return read_generation_defaults(directory, {}).sampling
    except CheckpointError:
        return {}


def _need(name: str, directory: Path, config: EngineConfig, replicas: int) -> ModelNeed:
    """Return the memory that a model needs. For a model that cannot be planned, return the size of its files: the load
    reports the error."""
    # A GPU keeps matrices as they are, whatever this machine's CPU can do.
    on_cpu = config.device == "cpu" or (config.device == "auto" and not visible_gpus())
    features = cpu_name_and_flags()[1] if on_cpu else frozenset()
    options = options_of(config, twelve_bit=bool({"avx512f", "asimd"} & features), coded_tiles=on_cpu and keeps_codes())
    try:
        read = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        process_bytes = 0 if on_cpu else GPU_CONTEXT_BYTES + GPU_STEP_BYTES
        return replace(need_of(name, read, options), replicas=replicas, process_bytes=process_bytes)
    except (CheckpointError, ConfigError, OSError, ValueError, KeyError, TypeError):
        size = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
        return ModelNeed(name, size, replicas=replicas)


def _adapters_of(entries: Sequence[str], names: Sequence[str]) -> dict[str, list[str]]:
    """Return ``name=path`` of each model's own adapters. Raise ConfigError for an adapter that belongs to no model."""
    adapters: dict[str, list[str]] = {name: [] for name in names}
    for full, path in named_paths(entries).items():
        bases = [name for name in names if full.startswith(f"{name}/") and len(full) > len(name) + 1]
        if not bases:
            raise ConfigError(
                f"--lora {full} belongs to no model; with several models it is "
                f"MODEL/NAME=path, and the models are {', '.join(names)}",
                param="--lora",
            )
        base = max(bases, key=len)
        adapters[base].append(f"{full.removeprefix(f'{base}/')}={path}")
    return adapters


def _with_own_store(engine: EngineConfig, index: int, names: Sequence[str]) -> EngineConfig:
    """Return the config with a store of its own: only one process writes to a store. ``--store-size`` is the size of
    all stores together."""
    if engine.store is None:
        return engine
    slugs = [re.sub(r"[^\w.-]+", "-", name).strip(".") or "model" for name in names]
    slug = slugs[index] if slugs.count(slugs[index]) == 1 else f"{slugs[index]}-{index}"
    cache, size = engine.store_cache, engine.store_size
    own_bytes = None if size is None else parse_bytes(size, flag="--store-size") // len(names)
    if own_bytes is not None and own_bytes < STORE_BYTES_MIN:
        raise ConfigError(
            f"--store-size {size} is too small for {len(names)} models: each has a store of "
            f"its own, of at least {format_bytes(STORE_BYTES_MIN)}",
            param="--store-size",
        )
    return replace(
        engine,
        store=f"{engine.store.rstrip('/')}/{slug}",
        store_cache=None if cache is None else f"{cache.rstrip('/')}/{slug}",
        store_size=None if own_bytes is None else f"{own_bytes}B",
    )
