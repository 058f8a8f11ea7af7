"""The ranks of an engine, as ``assemble`` starts them: the other processes first, so that all load at once.

    start_ranks     processes, the meeting, the group that ``load_model`` shards by
    common_room     the arena that fits on every rank; refuses ranks that differ from rank 0
    executor        rank 0's executor, which sends its plans to the others

Cores are divided: a rank has ``--threads``, or its part of all cores. Importing this module costs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.assemble.identity import file_digest, files_fingerprint
from weft.assemble.room import ArenaRoom
from weft.config import EngineConfig
from weft.engine.stats import RankStats
from weft.errors import ConfigError, RankLostError
from weft.host import usable_cores
from weft.units import format_bytes
from weft.version import weft_version

if TYPE_CHECKING:
    import torch

    from weft.models.loading import LoadedModel
    from weft.models.rank_share import RankGroup
    from weft.ranks.executor import RankedExecutor
    from weft.ranks.peers import Peers
    from weft.runner.torch_executor import TorchExecutor
    from weft.tensor.collectives import GroupCollectives


@dataclass(frozen=True, slots=True)
class StartedRanks:
    """Ranks that were started. ``group``: the group of rank 0."""

    peers: Peers
    group: RankGroup
    identity: dict[str, str]
    shares_choice: bool
    borrowed: bool = False
    """The processes outlive this engine."""

    def await_loaded(self, loaded: LoadedModel) -> None:
        """Wait for the weights of all ranks: collectives follow, and would not end for a rank that failed. Raises
        ConfigError if a rank differs.
        """
        self.peers.loaded(identity_with(self.identity, loaded))

    def common_room(self, own: ArenaRoom) -> ArenaRoom:
        """Return the room that all ranks have."""
        most, usual, why = own.most_bytes, own.usual_bytes, own.why
        for rank, answer in enumerate(self.peers.rooms(), 1):
            if answer.room_bytes < most:
                most, why = answer.room_bytes, f"rank {rank} has room for {format_bytes(answer.room_bytes)}."
            usual = min(usual, answer.usual_bytes)
        return ArenaRoom(most, min(usual, most), why)

    def sampler(self, rows_max: int, vocab_size: int, device: torch.device) -> Any:
        """Return the sampler of rank 0."""
        from weft.ranks.samplers import LeadingSampler
        from weft.runner.sampler import Sampler

        if not self.shares_choice:
            return Sampler(rows_max, vocab_size, device)
        return LeadingSampler(self.group.collectives, rows_max, vocab_size, device)

    def stats(self, own: TorchExecutor) -> RankStats:
        from weft.models.sharded_model import RankedModel

        choices = own.model.expert_choices() if isinstance(own.model, RankedModel) else []
        return RankStats(self.peers.size, self.group.collectives.seconds, choices)

    def executor(self, own: TorchExecutor) -> RankedExecutor:
        """Return the executor of all ranks once every rank has its arena."""
        from weft.ranks.executor import RankedExecutor

        self.peers.ready()
        return RankedExecutor(own, self.peers, self.group.collectives, borrowed=self.borrowed)


def with_rank_threads(config: EngineConfig) -> EngineConfig:
    """Return ``config`` with the cores of this machine divided among ranks, unless it sets threads."""
    if config.tp == 1 or config.threads is not None:
        return config
    return replace(config, threads=max(1, usable_cores() // config.tp))


def start_ranks(
    config: EngineConfig, directory: Path, device: torch.device, tell: Callable[[str], None], peers: Peers | None = None
) -> StartedRanks:
    """Start the other ranks (or launch ``peers`` again) and meet them. Raises ConfigError for a model that does not
    divide, before any process is started.
    """
    from weft.ranks.peers import Peers
    from weft.tensor.device import watch_while_waiting

    check_divides(config, directory)
    tell(f"ranks: starting {config.tp - 1} in addition to this process")
    started = peers or Peers(config.tp, config.rank_timeout)
    shares_choice = sends_choices(config, device)
    started.end_watch()
    started.end_watch = watch_while_waiting(started.check_alive)
    try:
        folder = started.launch(config, directory, shares_choice=shares_choice)
        group = group_of(config, 0, meet(config, folder, 0, device))
    except BaseException:
        started.close()
        raise
    return StartedRanks(
        started, group, identity_of(directory, settings_of(config)), shares_choice, borrowed=peers is not None
    )


def sends_choices(config: EngineConfig, device: torch.device) -> bool:
    """Return whether a step may use the tokens chosen by the step before: see ``weft.ranks.samplers``."""
    overlap = config.overlap == "on" or (config.overlap == "auto" and device.type != "cpu")
    return overlap or config.speculate != "off"


def meet(config: EngineConfig, folder: Path, rank: int, device: torch.device) -> GroupCollectives:
    """Return the collectives of the ranks that meet in ``folder``. Raises RankLostError if not all ranks come."""
    from weft.tensor.collectives import GroupCollectives

    try:
        return GroupCollectives.open(folder, rank, config.tp, device, config.rank_timeout)
    except RuntimeError as error:
        raise RankLostError(
            f"rank {rank} did not meet the others within limits.rank_timeout {config.rank_timeout:g} s: {error}",
            param="limits.rank_timeout",
        ) from error


def group_of(config: EngineConfig, rank: int, collectives: GroupCollectives) -> RankGroup:
    from weft.families.rank_place import RankPlace
    from weft.models.rank_share import RankGroup

    return RankGroup(RankPlace(rank, config.tp, config.ep), collectives)


def settings_of(config: EngineConfig) -> list[tuple[str, str]]:
    """Return the settings, next to the checkpoint, that must be equal on all ranks."""
    import torch

    return [("version", weft_version()), ("torch", torch.__version__), ("quantize", config.quantize)]


def identity_with(identity: dict[str, str], loaded: LoadedModel) -> dict[str, str]:
    return {**identity, "dtype": loaded.spec.dtype, "weights form": loaded.weights_form}


def check_no_gguf(config: EngineConfig, is_gguf: bool) -> None:
    """Raise ConfigError for a GGUF file."""
    if is_gguf:
        raise ConfigError(
            f"--tp is {config.tp}, and {config.model} is a GGUF file, which ranks do not "
            "divide; use the checkpoint that it was made of",
            param="--tp",
        )


def check_divides(config: EngineConfig, directory: Path) -> None:
    """Raise ConfigError if the model in ``directory`` cannot be divided over ``config.tp`` ranks."""
    from weft.families import read_architecture
    from weft.families.sharding import rank_architecture
    from weft.files import read_json

    settings = read_json(directory / "config.json")
    check_no_gguf(config, (settings.get("quantization_config") or {}).get("quant_method") == "gguf")
    rank_architecture(read_architecture(settings), config.tp, ep=config.ep)


def identity_of(directory: Path, settings: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the facts that must be equal on all ranks, as text. ``settings``: (name, value) of choices made for this
    rank.
    """
    return {
        **dict(settings),
        "config.json": file_digest(directory / "config.json"),
        "weights": files_fingerprint(directory),
    }
