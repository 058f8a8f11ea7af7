"""From a step plan to what the model sees: the only reader of a StepPlan on the torch side.

Persistent, per row of the executor:    page table int32 [rows + 1, pages], PAD where there is no page
                                        prompts of the sequences that asked for prompt logprobs
Per step, in buffers made once:         tokens, positions, starts, slots, contexts

``apply`` brings the rows up to date, in the order the plan promises (L5, L6):

    rows_cleared -> admissions -> table_writes, table_patches -> zero_frames -> parks, restores
                                                                             -> slot_copies, page_copies

``build`` makes the inputs. Decodes come first, so that is where padding goes, when asked for a batch of a
fixed width (as graphs of a device want it):

    runs       d0 d1 PAD PAD | p0 p1                 PAD row: slot PAD, start PAD, context 0, table all PAD
    tokens_T   d0 d1  0   0  | p0 p0 p0 p1 p1        its position is PAD: no read, no write (L4)

The table has one row more than there are rows; it stays PAD for ever and is the row of every PAD run.

Rejected: a table sent whole with each step (linear in the context of all sequences), PAD rows that point
at a real page or slot "that nobody reads" (it gets written).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from weft.runner.arena import DeviceArena
from weft.runner.sampler import Sampler
from weft.schedule.plan import StepPlan
from weft.tensor.inputs import Runs, StepInputs, TapPoint
from weft.units import PAD, PAGE_TOKENS, ceil_div

Int64s = npt.NDArray[np.int64]
Item = TypeVar("Item", bound=np.generic)


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """Logprobs of prompt tokens are wanted: ``next_tokens`` (int64) follow the tokens at index
    ``first``, ``first + 1``, ... of T, which are those of run ``run``; ``top_count`` best ones beside
    each."""

    run: int
    first: int
    next_tokens: Int64s
    top_count: int


@dataclass(frozen=True, slots=True)
class StepBatch:
    """``sample_runs``, ``sample_rows``, ``sample_positions``: int64 [X], of the runs that sample: their
    index in the plan, their row, and the position of the token to be chosen; ``sample_index_X``: the
    index in T of their last token."""

    inputs: StepInputs
    sample_runs: Int64s
    sample_rows: Int64s
    sample_positions: Int64s
    sample_index_X: torch.Tensor
    prompt_spans: tuple[PromptSpan, ...]


class BatchBuilder:
    """State of ``rows_max`` rows with up to ``pages_max`` pages; steps of up to ``step_tokens_max`` tokens.
    ``pad_decode_to``: the decode part of every batch has at least so many rows."""

    def __init__(self, *, rows_max: int, pages_max: int, step_tokens_max: int, device: torch.device,
                 pad_decode_to: int = 0) -> None:
        self._device = device
        self._pad_decode_to = pad_decode_to
        self._pad_row = rows_max
        self._table = torch.full((rows_max + 1, max(pages_max, 1)), PAD, dtype=torch.int32, device=device)
        self._prompts: dict[int, tuple[Int64s, int]] = {}
        tokens_max = max(step_tokens_max, rows_max) + pad_decode_to
        runs_max = rows_max + pad_decode_to
        self._tokens = np.zeros(tokens_max, np.int64)
        self._positions = np.zeros(tokens_max, np.int64)
        self._starts = np.zeros(runs_max, np.int64)
        self._slots = np.zeros(runs_max, np.int64)
        self._contexts = np.zeros(runs_max, np.int64)
        self._rows = np.zeros(runs_max, np.int64)

    def pages_of(self, row: int) -> list[int]:
        """Pages of ``row``, in order: for tests and evaluations that write into them."""
        return [page for page in self._table[row].tolist() if page != PAD]

    def table_row(self, row: int) -> torch.Tensor:
        """int32 [pages_max], the live row itself."""
        return self._table[row]

    def apply(self, plan: StepPlan, sampler: Sampler, arena: DeviceArena) -> None:
        """Bring rows, sampler and memory to where the plan's runs expect them."""
        for cleared in plan.rows_cleared:
            self._table[cleared] = PAD
            self._prompts.pop(cleared, None)
            sampler.clear(cleared)
        for a in plan.admissions:
            sampler.admit(a.row, a.tokens, a.prompt_tokens, a.sampling, a.seed, a.stop_ids, a.guide)
            if a.sampling.prompt_logprobs is not None:
                prompt = a.tokens[: a.prompt_tokens].astype(np.int64)
                self._prompts[a.row] = (prompt, a.sampling.prompt_logprobs)
        for writes in (plan.table_writes, plan.table_patches):
            if writes.size:
                rows, columns, pages = torch.from_numpy(writes.astype(np.int64)).to(self._device)
                self._table[rows, columns] = pages.to(torch.int32)
        arena.fill_frames(plan.zero_frames, 0)
        arena.park(plan.parks)
        arena.restore(plan.restores)
        arena.copy_slots(*plan.slot_copies)
        arena.copy_pages(*plan.page_copies)

    def build(self, plan: StepPlan) -> StepBatch:
        """Inputs of the forward pass. They live in buffers that the next ``build`` overwrites."""
        decodes, pads = plan.decode_count, max(0, self._pad_decode_to - plan.decode_count)
        assert (plan.lengths[:decodes] == 1).all(), "a decode run has one token"
        lengths = _with_pads(plan.lengths.astype(np.int64), decodes, pads, 1)
        offsets = lengths.cumsum() - lengths
        run_count, token_count = len(lengths), int(lengths.sum())
        assert token_count <= len(self._tokens), f"a step of {token_count} tokens"
        starts, slots, contexts = (b[:run_count] for b in (self._starts, self._slots, self._contexts))
        rows = self._rows[:run_count]
        tokens, positions = self._tokens[:token_count], self._positions[:token_count]
        starts[:] = _with_pads(plan.starts, decodes, pads, PAD)
        slots[:] = _with_pads(plan.slots, decodes, pads, PAD)
        rows[:] = _with_pads(plan.rows, decodes, pads, self._pad_row)
        np.add(starts, lengths, out=contexts)
        contexts[decodes : decodes + pads] = 0
        tokens[:] = _with_pads(plan.tokens, decodes, pads, 0)
        np.add(np.repeat(starts - offsets, lengths), np.arange(token_count), out=positions)
        pages_used = max(1, ceil_div(int(contexts.max(initial=0)), PAGE_TOKENS))
        runs = Runs(
            offsets=offsets.tolist(), starts=starts.tolist(), lengths=lengths.tolist(), slots=slots.tolist(),
            fresh=_with_pads(plan.fresh, decodes, pads, False).tolist(), decode_count=decodes + pads,
            starts_R=self._to_device(starts), slots_R=self._to_device(slots),
            context_R=self._to_device(contexts),
            page_table_RP=self._table[:, :pages_used].index_select(0, self._to_device(rows)),
            taps=tuple(TapPoint(tap.run + (pads if tap.run >= decodes else 0),
                                tap.position - int(plan.starts[tap.run]), tap.slot) for tap in plan.taps))
        inputs = StepInputs(self._to_device(tokens), self._to_device(positions), runs)
        sample_runs = np.flatnonzero(plan.samples)
        in_batch = sample_runs + np.where(sample_runs >= decodes, pads, 0)
        last = offsets[in_batch] + lengths[in_batch] - 1
        return StepBatch(
            inputs=inputs, sample_runs=sample_runs, sample_rows=plan.rows[sample_runs].astype(np.int64),
            sample_positions=contexts[in_batch].copy(), sample_index_X=self._to_device(last),
            prompt_spans=tuple(self._prompt_spans(plan, offsets, pads)))

    def _prompt_spans(self, plan: StepPlan, offsets: Int64s, pads: int) -> list[PromptSpan]:
        spans = []
        for run in plan.prompt_logprob_runs:
            prompt, top_count = self._prompts[int(plan.rows[run])]
            start = int(plan.starts[run])
            following = prompt[start + 1 : start + 1 + int(plan.lengths[run])]
            first = int(offsets[run + (pads if run >= plan.decode_count else 0)])
            spans.append(PromptSpan(run, first, following, top_count))
        return spans

    def _to_device(self, values: Int64s) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)


def _with_pads(values: npt.NDArray[Item], decodes: int, pads: int, value: int | bool) -> npt.NDArray[Item]:
    """``values`` with ``pads`` entries of ``value`` behind the first ``decodes``."""
    return np.insert(values, decodes, [value] * pads) if pads else values
