"""Samplers of ranks: rank 0 chooses tokens, and sends them to the other ranks if the next step needs them.

    rank 0     LeadingSampler     logits -> tokens, by the sampler of any engine  --broadcast-->
    rank r     FollowingSampler   tokens as rank 0 chose them

A plan usually has the tokens of its step. With overlap and verify runs a step needs tokens that are chosen after its
plan was made. Only then rank 0 sends its choices, an int64 for each row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from weft.request import SamplingParams
from weft.runner.sampler import Sampled, Sampler, TokenChoice, as_tensor
from weft.schedule.plan import CompiledGrammar
from weft.tensor.collectives import Collectives

_FAILED = "the sequence failed on rank 0"


class LeadingSampler(Sampler):
    """Sampler of rank 0 when choices are sent."""

    def __init__(self, collectives: Collectives, rows_max: int, vocab_size: int, device: torch.device) -> None:
        super().__init__(rows_max, vocab_size, device)
        self._collectives = collectives

    def chooses_apart(self, rows: npt.NDArray[np.int64]) -> bool:
        """Return False: ranks sample windows in the same rounds, whatever settings a row has."""
        return False

    def sample(self, logits_XV: torch.Tensor, rows: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> Sampled:
        sampled = super().sample(logits_XV, rows, positions)
        failed_X = torch.zeros(len(rows), dtype=torch.int64)
        failed_X[list(sampled.failures)] = 1
        # A second word for each row: failures must end the same rows on every rank.
        self._collectives.from_first(failed_X.to(logits_XV.device))
        return sampled

    def launch(
        self,
        logits_XV: torch.Tensor,
        rows: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        host_XV: npt.NDArray[np.float32] | None = None,
    ) -> TokenChoice:
        choice = super().launch(logits_XV, rows, positions, host_XV)
        self._collectives.from_first(as_tensor(choice.chosen_X).to(torch.int64).clone())
        return choice


class FollowingSampler(Sampler):
    """Sampler of every rank but 0. ``collectives`` None: choices are not sent, and the tokens of this rank are
    unspecified."""

    def __init__(self, collectives: Collectives | None, rows_max: int, vocab_size: int, device: torch.device) -> None:
        super().__init__(rows_max, vocab_size, device)
        self._collectives = collectives

    def admit(
        self,
        row: int,
        tokens: npt.NDArray[np.int32],
        prompt_tokens: int,
        sampling: SamplingParams,
        seed: int,
        stop_ids: tuple[int, ...],
        grammar: CompiledGrammar | None = None,
    ) -> None:
        """Do nothing: rank 0 samples the row."""

    def clear(self, row: int) -> None:
        """Do nothing: rank 0 samples the row."""

    def chooses_apart(self, rows: npt.NDArray[np.int64]) -> bool:
        return False

    def sample(self, logits_XV: torch.Tensor, rows: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> Sampled:
        chosen_X = self._from_first(len(rows), logits_XV.device)
        failed_X = self._from_first(len(rows), logits_XV.device)
        failures = {int(i): _FAILED for i in failed_X.nonzero().flatten()}
        return Sampled(chosen_X.cpu().numpy().astype(np.int32), {}, failures)

    def launch(
        self,
        logits_XV: torch.Tensor,
        rows: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        host_XV: npt.NDArray[np.float32] | None = None,
    ) -> TokenChoice:
        self._staged = None
        chosen_X: Any = self._from_first(len(rows), logits_XV.device)
        if chosen_X.device.type == "cpu":
            chosen_X = chosen_X.numpy()
        return TokenChoice(chosen_X, [], np.empty(0, np.int64), [], [], None)

    def _from_first(self, count: int, device: torch.device) -> torch.Tensor:
        tokens_X = torch.zeros(count, dtype=torch.int64, device=device)
        return tokens_X if self._collectives is None else self._collectives.from_first(tokens_X)
