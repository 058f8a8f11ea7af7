"""Reading the weights of an engine: at the start, after a sleep of level 2, and when they are replaced.

    directory --WeightsReading--> digest of all bytes, on a thread          (rank 0)
              --load_weights----> LoadedModel, packed weights from --weights-cache where it has them

``WeightsSource`` is the directory that an engine reads from. Another directory may replace it while the server runs,
and files in it may change. So the digest belongs to a read, not to the engine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from weft.assemble.identity import WeightsReading
from weft.config import EngineConfig
from weft.errors import CheckpointError, ConfigError
from weft.families import read_architecture
from weft.files import read_json
from weft.speculation.drafter import parse_sources
from weft.units import format_bytes

if TYPE_CHECKING:
    import torch

    from weft.models.loading import LoadedModel
    from weft.models.rank_share import RankGroup
    from weft.models.weights_cache import WeightsCache


class WeightsSource:
    """Source of the weights: the checkpoint in ``directory``. ``leads``: this process is rank 0, which computes the
    digest for all ranks.
    """

    def __init__(self, config: EngineConfig, name: str, directory: Path, *, leads: bool = True) -> None:
        self.directory = directory
        self._config, self._name, self._leads = config, name, leads
        self._architecture = read_architecture(read_json(directory / "config.json"))
        self._place: tuple[torch.device, RankGroup | None] | None = None
        self._reading = self._begin()

    def _begin(self) -> WeightsReading:
        reading = WeightsReading(self.directory)
        if self._leads:
            reading.begin()
        return reading

    def load(
        self, device: torch.device, ranks: RankGroup | None = None, tell: Callable[[str], None] = lambda line: None
    ) -> LoadedModel:
        """Read the weights for the first time. Raises as ``load_weights``, and CheckpointError if the files change
        meanwhile.
        """
        self._place = device, ranks
        loaded = self._read(tell)
        if device.type == "cpu":
            _tune_products(loaded.weights_bytes)
        return loaded

    def reload(self) -> LoadedModel:
        """Read the weights again, as the files are now. Raises as ``load``."""
        self._reading = self._begin()
        loaded = self._read(lambda line: None)
        if self._leads:
            self._reading.digest()
        return loaded

    def _read(self, tell: Callable[[str], None]) -> LoadedModel:
        assert self._place is not None
        device, ranks = self._place
        loaded = load_weights(self._config, self._name, self._reading, tell, device, ranks)
        self._reading.check()
        self._config = replace(self._config, dtype=loaded.spec.dtype)  # the next files may have another dtype
        return loaded

    @property
    def place(self) -> str:
        return str(self.directory)

    def read_from(self, directory: str) -> None:
        """Let ``reload`` read from ``directory`` from now on."""
        self.directory = Path(directory)

    def check(self, directory: str) -> None:
        """Raise CheckpointError if ``directory`` has no weights of the shapes that are served. Reads no weight."""
        files = Path(directory)
        architecture = read_architecture(read_json(files / "config.json"))
        if replace(architecture, dtype=self._architecture.dtype) != self._architecture:
            raise CheckpointError(
                f"{files / 'config.json'}: describes another model than the one that is served; start a server "
                "for it, or give weights of the same shapes",
                param="path",
            )
        from weft.models.loading import check_model

        WeightsReading(files)
        check_model(files, self._config.dtype)

    def digest(self) -> str:
        """Return the digest of the weights that were read last. Raises OSError, CheckpointError."""
        return self._reading.digest()


def _tune_products(weights_bytes: int) -> None:
    """Measure the numbers of products once, for weights that take far longer to read."""
    from weft.tensor import native, tuning

    if native.in_use() and weights_bytes >= tuning.WEIGHTS_BYTES_MIN:
        tuning.tune()


def load_weights(
    config: EngineConfig,
    name: str,
    reading: WeightsReading,
    tell: Callable[[str], None],
    device: torch.device,
    ranks: RankGroup | None = None,
) -> LoadedModel:
    """Read the weights. Raises as ``load_model``, and ConfigError if the memory of the device is too small."""
    import torch

    from weft.models.loading import load_model
    from weft.tensor.device import free_bytes

    shown_percent = -1

    def on_bytes(done: int, total: int) -> None:
        nonlocal shown_percent
        percent = 100 * done // max(total, 1) // 5 * 5
        if percent > shown_percent:
            shown_percent = percent
            bar = "█" * (percent // 5) + "·" * (20 - percent // 5)
            tell(f"weights of {name}: {bar} {percent} % of {format_bytes(total)}")

    free = free_bytes(device) if device.type == "cuda" else 0
    try:
        loaded = load_model(
            reading.directory,
            config.dtype,
            on_bytes,
            quantize=config.quantize,
            quantize_inputs=config.quantize_inputs,
            twelve_bit=config.twelve_bit,
            device=device,
            allow_nonfinite=config.allow_nonfinite,
            mtp="mtp" in parse_sources(config.speculate),
            ranks=ranks,
            weights_cache=_weights_cache(config, reading, device, ranks),
        )
    except torch.OutOfMemoryError:
        size = sum(file.stat().st_size for file in reading.files)
        beyond = f"{format_bytes(size - free)} too many" if size > free else "too few to load them"
        raise ConfigError(
            f"the weights do not fit: the checkpoint has {format_bytes(size)}, and of the GPU's memory "
            f"{format_bytes(free)} were free: {beyond}. Use --quantize int8 or int4, or --tp",
            param="--quantize",
        ) from None
    tell(f"weights of {name}: {read_in_words(loaded)}")
    return loaded


def _weights_cache(
    config: EngineConfig, reading: WeightsReading, device: torch.device, ranks: RankGroup | None
) -> WeightsCache | None:
    """Return the cache of the weights that ``reading`` reads, under a name that no other weights, kernels or rank
    have. Waits for their digest, which a later start has at once.
    """
    if config.weights_cache is None or device.type != "cpu":
        return None
    from weft.models.weights_cache import WeightsCache
    from weft.tensor import native

    facts = [
        reading.digest(),
        (reading.directory / "config.json").read_text(),
        config.dtype,
        native.INTERFACE,
        *(() if ranks is None else (ranks.place,)),
    ]
    return WeightsCache(Path(config.weights_cache).expanduser(), hashlib.sha256(repr(facts).encode()).hexdigest()[:32])


_RATE_BYTES_MIN = 256 << 20


def read_in_words(loaded: LoadedModel) -> str:
    """Return the reading in words, as in ``1.2 GiB read and packed in 0.8 s, 1.5 GiB/s``. Small models have no rate:
    their seconds are the first use of the kernels, not reading.
    """
    words = f"{format_bytes(loaded.read_bytes)} read and packed in {loaded.read_s:.1f} s"
    if loaded.read_bytes < _RATE_BYTES_MIN:
        return words
    return f"{words}, {format_bytes(int(loaded.read_bytes / max(loaded.read_s, 1e-9)))}/s"
