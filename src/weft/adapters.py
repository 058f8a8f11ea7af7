"""Adapters as values: a name, a directory in peft's form, and the sha256 of its files.

    directory/adapter_config.json            rank, alpha, target modules
    directory/adapter_model.safetensors      the factors A and B of each module

    name=path --read_adapter--> Adapter(name, directory, digest, rank)
                                    |
    a request carries it            '-- salt(cache_salt): separates its prefixes from all others

The digest is the identity, never the name or the path. States after a prompt depend on the weights that computed them,
so the digest is a part of the salt: the prefix tree, the store, the router, recordings and the index of suffixes
separate adapters as they separate tenants (law L10). Files that change under the same name and path are another
adapter, which finds nothing of the old one.

A client chooses its ``cache_salt`` freely. So the two are joined in a way that is unique for each pair:

    with an adapter      NUL digest NUL cache_salt
    without              cache_salt; one that begins with NUL gets two more in front

Rejected: the name in the key (vllm 42125: a name that is used again answers from the old adapter's prefix);
name and path (a rewritten file still hits).
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from weft.errors import CheckpointError, ConfigError
from weft.files import inside, read_json

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PICKLES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")
_CHUNK_BYTES = 1 << 20
_NAME = re.compile(r"[^\x00-\x20\x7f=]{1,256}")

Number = TypeVar("Number", int, float)

_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of ``init_lora_weights`` that also change the weights of the base, so that the factors are not the complete
change."""
_VARIANTS = (
    "use_qalora",
    "alora_invocation_tokens",
    "trainable_token_indices",
    "layer_replication",
    "megatron_config",
    "arrow_config",
    "use_bdlora",
    "velora_config",
    "kasa_config",
    "monteclora_config",
    "lora_ga_config",
)
"""Settings of peft that compute another function than W x + scale B A x."""


class Adapter(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter by name. ``directory`` has the files, whose ``digest`` is a sha256 in hex. ``rank``: the largest rank
    of a module."""

    name: str
    directory: str
    digest: str
    rank: int = 0

    def salt(self, cache_salt: str) -> str:
        return f"\0{self.digest}\0{cache_salt}"


def salted(adapter: Adapter | None, cache_salt: str) -> str:
    """Return the salt of cached prefixes of ``adapter``, or of the base model."""
    if adapter is not None:
        return adapter.salt(cache_salt)
    return f"\0\0{cache_salt}" if cache_salt.startswith("\0") else cache_salt


def salt_parts(salt: str) -> tuple[str | None, str]:
    """Return the digest of the adapter (None for the base model) and the ``cache_salt`` that ``salted`` joined."""
    if not salt.startswith("\0"):
        return None, salt
    _, digest, cache_salt = salt.split("\0", 2)
    return digest or None, cache_salt


class AdapterSettings(msgspec.Struct, frozen=True):
    """The contents of adapter_config.json. ``targets``: peft's ``target_parameters``, for fused experts."""

    rank: int
    alpha: float
    root_scale: bool
    dora: bool
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    saved_modules: tuple[str, ...]
    targets: tuple[str, ...]
    base: str

    @property
    def rank_max(self) -> int:
        return max((self.rank, *self.ranks.values()))

    def rank_of(self, module: str) -> int:
        """Return the rank of the module named ``module`` in the model that was trained."""
        return _matching(self.ranks, module, self.rank)

    def scale_of(self, module: str) -> float:
        alpha, rank = _matching(self.alphas, module, self.alpha), self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.root_scale else rank)


def read_adapter(name: str, directory: Path, *, rank_max: int | None = None) -> Adapter:
    """Return the adapter in ``directory``; both files are read for the digest. Raise CheckpointError as
    ``read_settings`` does, and for a pickle, a missing file, a link out of the directory or a rank above
    ``rank_max``."""
    settings = read_settings(directory)
    if rank_max is not None and settings.rank_max > rank_max:
        raise CheckpointError(
            f"adapter {name}: its rank is {settings.rank_max}; the limit is {rank_max} (limits.max_lora_rank)",
            param="limits.max_lora_rank",
        )
    if not (directory / WEIGHTS_FILE).exists():
        raise weights_missing(directory, [file.name for file in directory.iterdir()])
    return Adapter(name=name, directory=str(directory), digest=files_digest(directory), rank=settings.rank_max)


def weights_missing(where: Path | str, files: Collection[str]) -> CheckpointError:
    """Return the error of missing weights. ``files``: the files found in the directory."""
    pickle = next((pickle_name for pickle_name in _PICKLES if pickle_name in files), None)
    return CheckpointError(
        f"{where}: has its weights as a pickle, {pickle}, which can run any code when it is read; weft reads "
        f"{WEIGHTS_FILE}, which peft's save_pretrained writes"
        if pickle
        else f"{where}: {WEIGHTS_FILE} is missing",
        param="lora",
    )


def read_settings(directory: Path) -> AdapterSettings:
    """Read adapter_config.json. Raise CheckpointError that names the file and the setting: no directory, no peft
    config, another method than LoRA, a variant that weft does not compute, a value that is not a number."""
    if not directory.is_dir():
        raise CheckpointError(
            f"{directory}: there is no such directory; an adapter is a directory in peft's "
            f"form, with {CONFIG_FILE} and {WEIGHTS_FILE}",
            param="lora",
        )
    file = directory / CONFIG_FILE
    config = read_json(file)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(
            f"{file}: peft_type is {kind!r}; weft serves LORA (rsLoRA and DoRA are settings of it)", param="lora"
        )
    for setting in _VARIANTS:
        if config.get(setting):
            raise CheckpointError(
                f"{file}: {setting} is {str(config[setting])[:80]}, which weft does not compute", param="lora"
            )
    begun = str(config.get("init_lora_weights", "")).lower()
    if begun.startswith(_CHANGED_BASE):
        raise CheckpointError(
            f"{file}: init_lora_weights is {begun!r}, which changes the weights of the "
            "base; save it with path_initial_model_for_weight_conversion",
            param="lora",
        )
    return AdapterSettings(
        rank=int(_number(file, "r", config.get("r", 8), whole=True)),
        alpha=_number(file, "lora_alpha", config.get("lora_alpha", 8)),
        root_scale=bool(config.get("use_rslora")),
        dora=bool(config.get("use_dora")),
        ranks={key: int(value) for key, value in _pattern(file, config, "rank_pattern", whole=True).items()},
        alphas=_pattern(file, config, "alpha_pattern"),
        saved_modules=_texts(file, config, "modules_to_save"),
        targets=_texts(file, config, "target_parameters"),
        base=str(config.get("base_model_name_or_path") or ""),
    )


def files_digest(directory: Path, weights: bytes | bytearray | None = None) -> str:
    """Return the sha256 over both files, each preceded by its length. ``weights``: contents of the second file, if they
    are in memory."""
    digest = hashlib.sha256()
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        path = inside(directory / name)
        if name == WEIGHTS_FILE and weights is not None:
            digest.update(len(weights).to_bytes(8, "little"))
            digest.update(weights)
            continue
        digest.update(path.stat().st_size.to_bytes(8, "little"))
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


def named_paths(entries: Iterable[str], *, flag: str = "--lora") -> dict[str, str]:
    """Parse ``name=path`` or vLLM's JSON ``{"name": ..., "path": ...}`` of each entry. Raise ConfigError."""
    paths: dict[str, str] = {}
    for entry in entries:
        name, _, path = entry.partition("=")
        if entry.startswith("{"):
            try:
                listed = msgspec.json.decode(entry.encode())
                name, path = str(listed["name"]), str(listed["path"])
            except (msgspec.DecodeError, KeyError, TypeError):
                raise ConfigError(f"{flag} {entry} is not a JSON object with a name and a path", param=flag) from None
        if not path:
            raise ConfigError(f"{flag} {entry} has no path; write it as name=path", param=flag)
        check_name(name, flag=flag)
        if name in paths:
            raise ConfigError(f"{flag} names {name} twice", param=flag)
        paths[name] = path
    return paths


def check_name(name: str, *, flag: str = "--lora") -> None:
    """Raise ConfigError for an empty or very long name, and for spaces or control characters."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{flag}: {name[:80]!r} is not a valid adapter name: 1 to 256 characters without spaces and =", param=flag
        )


def _matching(pattern: Mapping[str, Number], module: str, otherwise: Number) -> Number:
    # peft's own rule (utils/other.py, get_pattern_key): the first key that the end of the name matches.
    for key, value in pattern.items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return otherwise


def _number(file: Path, setting: str, value: Any, *, whole: bool = False) -> float:
    good = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not good or not math.isfinite(value) or (whole and value < 1):
        raise CheckpointError(
            f"{file}: {setting} is {str(value)[:80]}; it must be a {'whole number above 0' if whole else 'number'}",
            param="lora",
        )
    return float(value)


def _pattern(file: Path, config: Mapping[str, Any], setting: str, *, whole: bool = False) -> dict[str, float]:
    pattern = config.get(setting) or {}
    if not isinstance(pattern, dict):
        raise CheckpointError(f"{file}: {setting} is not a JSON object", param="lora")
    for key in pattern:
        try:
            re.compile(key)
        except re.error:
            raise CheckpointError(f"{file}: {setting} has {key[:80]!r}, which is not a pattern", param="lora") from None
    return {key: _number(file, f"{setting}.{key}", value, whole=whole) for key, value in pattern.items()}


def _texts(file: Path, config: Mapping[str, Any], setting: str) -> tuple[str, ...]:
    listed = config.get(setting) or []
    if not isinstance(listed, list) or not all(isinstance(text, str) for text in listed):
        raise CheckpointError(f"{file}: {setting} is not a list of names", param="lora")
    return tuple(listed)
