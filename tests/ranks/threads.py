"""Ranks as threads of one process: the same models, so that a test can break a shard for all of them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from tests.oracle.model_driver import ModelDriver
from weft.families.rank_place import RankPlace
from weft.models.loading import LoadedModel, load_model
from weft.models.rank_share import RankGroup
from weft.models.weights_cache import WeightsCache


class ThreadCollectives:
    """``board``: a place for each rank's tensor; ``barrier``: of all ranks."""

    def __init__(self, rank: int, board: list[torch.Tensor], barrier: threading.Barrier) -> None:
        self.rank, self.size, self.seconds = rank, len(board), 0.0
        self.device = torch.device("cpu")
        self._board, self._barrier = board, barrier

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._board[self.rank] = x.clone()
        self._barrier.wait()
        parts = list(self._board)
        self._barrier.wait()
        return parts

    def add(self, x: torch.Tensor) -> torch.Tensor:
        total, *others = self.gather(x.float())
        for other in others:
            total = total + other
        return total.to(x.dtype)

    def from_first(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(self.gather(x)[0])


def load_ranks(
    directory: Path,
    size: int,
    *,
    by_expert: bool = False,
    caches: Sequence[WeightsCache | None] | None = None,
    **more: object,
) -> list[LoadedModel]:
    """``caches``: of packed weights, one for each rank."""
    board, barrier = [torch.empty(0)] * size, threading.Barrier(size, timeout=60)
    return [
        load_model(
            directory,
            ranks=RankGroup(RankPlace(rank, size, by_expert), ThreadCollectives(rank, board, barrier)),  # type: ignore[arg-type]
            weights_cache=None if caches is None else caches[rank],
            **more,
        )
        for rank in range(size)
    ]


def logits_of(models: list[LoadedModel]) -> torch.Tensor:
    """Of a prompt of 70 tokens, one of 3, and two decodes of each: the same on every rank."""
    prompts = [[3 + (i * i * 5 + i * 17) % 490 for i in range(length)] for length in (70, 3)]

    def of_rank(loaded: LoadedModel) -> torch.Tensor:
        driver = ModelDriver(loaded.model, sequences=2, length=128)
        rows = list(driver.step((0, prompts[0]), (1, prompts[1])))
        for token in (11, 23):
            rows += driver.step((0, [token]), (1, [token + 1]))
        return torch.cat(rows)

    with ThreadPoolExecutor(len(models)) as pool:
        logits = list(pool.map(of_rank, models))
    for other in logits[1:]:
        assert torch.equal(other, logits[0]), "ranks differ in their logits"
    return logits[0]
