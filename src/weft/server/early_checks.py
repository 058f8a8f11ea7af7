"""Checks of a server's flags before weights are read: the machine's cores, and places on the disk.

    --threads, --http-workers, --replicas    at most PROCESSES_A_CORE for each core of this machine
    --device cuda                     a torch that was built for CUDA
    --store, --weights-cache          a directory, or a bucket with a name
    --record                          a file in a directory that exists
    --lora NAME=PATH                  a directory

The engine checks each of them too, but only after the weights, seconds or minutes later.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from weft.adapters import named_paths, read_settings
from weft.config import EngineConfig
from weft.errors import ConfigError
from weft.host import usable_cores
from weft.models.hub import is_path
from weft.server.config import ServerConfig
from weft.store.location import check_location, is_bucket

PROCESSES_A_CORE = 4
"""Most processes, and most threads, per core."""
LEAST_BOUND = 16
"""Bound for a machine with few cores: tests and containers with a quota may ask for more than they have."""


def check_early(engine: EngineConfig, server: ServerConfig) -> None:
    """Raise ConfigError that names the flag. Nothing is written."""
    _check_count("--threads", engine.threads)
    _check_count("--http-workers", server.http_workers)
    _check_count("--replicas" if server.roles is None else "--roles", server.own_replicas)
    if engine.store is not None and is_bucket(engine.store):
        check_location(engine.store)
    recording = server.recording()
    if recording is not None and not Path(recording.file).parent.is_dir():
        raise ConfigError(
            f"--record {recording.file}: there is no directory {Path(recording.file).parent}", param="--record"
        )


def make_directories(engine: EngineConfig) -> None:
    """Make the directories that the flags name, after all other checks: a start that is refused leaves none.

    Raise ConfigError that names the flag where one cannot be made."""
    if engine.store is not None and not is_bucket(engine.store):
        _make_directory("--store", engine.store)
    _make_directory("--weights-cache", engine.weights_cache)
    _make_directory("cache.store_cache", engine.store_cache)


def check_adapters(engine: EngineConfig) -> None:
    """Raise ConfigError that names the adapter. With several models, their names in ``--lora`` are checked first."""
    for name, path in named_paths(engine.lora).items():
        if not is_path(path):
            continue
        if not Path(path).expanduser().is_dir():
            raise ConfigError(f"--lora {name}={path}: there is no such directory of an adapter", param="--lora")
        read_settings(Path(path).expanduser())


def check_device(engine: EngineConfig) -> None:
    """Raise ConfigError for a GPU that the installed build of torch cannot use. The engine reports torch's other
    reasons."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        return
    if engine.device.startswith("cuda") and torch.endswith("+cpu"):
        raise ConfigError(
            f"--device is {engine.device}, and torch {torch} was built for CPUs only: install a build for CUDA, or "
            "use --device cpu",
            param="--device",
        )


def _check_count(flag: str, value: int | None) -> None:
    cores = usable_cores()
    most = max(LEAST_BOUND, PROCESSES_A_CORE * cores)
    if value is not None and value > most:
        raise ConfigError(
            f"{flag} is {value}; this machine has {cores} cores for it, and the most is {most}", param=flag
        )


def _make_directory(flag: str, location: str | None) -> None:
    """Make the directory and its parents. Raise ConfigError that names the flag."""
    if location is None:
        return
    path = Path(location).expanduser()
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{flag} {location}: this is a file, not a directory", param=flag)
    existing = next(parent for parent in path.absolute().parents if parent.exists())
    if not existing.is_dir():
        raise ConfigError(f"{flag} {location}: {existing} is a file, not a directory", param=flag)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{flag} {location}: {(error.strerror or str(error)).lower()}", param=flag) from None
