"""From a step plan to what the model sees: the only reader of a StepPlan on the torch side.

Persistent, per row of the executor:    page table int32 [rows + 1, pages], PAD where there is no page
                                        prompts of the sequences that asked for prompt logprobs
                                        the token it chose last, int64 [rows + 1]
Per step, in one staging buffer:        tokens, positions, starts, slots, contexts, rows, what to sample,
                                        table writes, frames to zero, state_compressions, copies, the table of runs

``apply`` stages all that the step brings to the device, sends it in one copy (``staging``), and brings the
rows and the arena up to date, in the order the plan promises (L5, L6):

    rows_cleared -> admissions -> table_writes, table_patches -> arena work, in the order of ``ArenaWork``

``build`` makes the inputs of what was sent. Decodes come first, so that is where padding goes: up to
``pad_decode_to`` in every step, and in a step of decodes alone up to the next of ``decode_widths``, the batch
sizes that there are graphs for:

    runs       d0 d1 PAD PAD | p0 p1                 PAD row: slot PAD, start PAD, context 0, table all PAD
    tokens_T   d0 d1  0   0  | p0 p0 p0 p1 p1        its position is PAD: no read, no write (L4)

A decode whose token is PAD in the plan is fed the one that its row chose last, on the device (``chosen``,
which the executor writes as soon as tokens are chosen): so a step can be sent before the one before it is
home. The table has one row more than there are rows; it stays PAD for ever and is the row of every PAD run.

A step of decodes alone on a CPU goes another way, on which nothing is made again that is as it was in the
step before (``decodes``).

Rejected: a table sent whole with each step (linear in the context of all sequences), PAD rows that point
at a real page or slot "that nobody reads" (it gets written).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from weft.memory.arena_work import WorkKind
from weft.runner.arena import DeviceArena, Items
from weft.runner.decodes import SteadyDecodes
from weft.runner.graphs import DecodeBlock, known_tokens, stride_of
from weft.runner.sampler import TokenChoice, Sampler, as_tensor
from weft.runner.staging import Staged, Staging, step_bytes
from weft.schedule.plan import StepPlan
from weft.tensor import gpu
from weft.tensor.gpu import runs as device_runs
from weft.tensor.inputs import OutputRows, Runs, StepInputs, TapPoint
from weft.units import PAD, PAGE_TOKENS, ceil_div

Int64s = npt.NDArray[np.int64]
Item = TypeVar("Item", bound=np.generic)


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """Logprobs of prompt tokens are wanted: ``next_tokens_N`` (int64, on the device) follow the tokens at
    index ``first``, ``first + 1``, ... of T, which are those of run ``run``; ``top_count`` best ones beside
    each."""

    run: int
    first: int
    next_tokens_N: torch.Tensor
    top_count: int


@dataclass(frozen=True, slots=True)
class StepBatch:
    """``inputs``: what the model takes, or the block that a graph takes, where there is one for the step.
    ``sample_runs``, ``sample_rows``, ``sample_positions``: int64 [X], of the runs that sample: their
    index in the plan, their row, and the position of the token to be chosen; ``sample_index_X``: the
    index in T of their last token, None where that is every token; ``sample_rows_X``: their row, None
    where the host's memory is the device's; both on the device."""

    inputs: StepInputs | DecodeBlock
    sample_runs: Int64s
    sample_rows: Int64s
    sample_positions: Int64s
    sample_index_X: torch.Tensor | None
    sample_rows_X: torch.Tensor | None
    prompt_spans: tuple[PromptSpan, ...] = ()

    def sampled_of(self, hidden: torch.Tensor) -> torch.Tensor:
        """What ``forward`` returned for ``inputs`` -> the hidden states of the runs that sample [X, D]."""
        narrow = isinstance(self.inputs, StepInputs) and self.inputs.asked is not None
        return hidden if narrow or self.sample_index_X is None else hidden[self.sample_index_X]


@dataclass(frozen=True, slots=True)
class _Sent:
    """What ``build`` takes up of what ``apply`` staged. By run, with PAD rows: ``offsets``, ``lengths``.
    ``flat``: tokens, positions [T each], starts, slots, contexts, rows [R each]; ``sampling``: index in T,
    row [X each]; int64. ``unknown``: some decodes have PAD for their token. ``following``: what follows the
    tokens of each of the plan's ``prompt_logprob_runs``."""

    plan: StepPlan
    pads: int
    graphed: bool
    offsets: Int64s
    lengths: Int64s
    fresh: list[bool]
    taps: tuple[TapPoint, ...]
    flat: Staged
    unknown: bool
    sampling: Staged
    sample_runs: Int64s
    sample_positions: Int64s
    runs_table: tuple[Staged, int] | None
    following: tuple[Staged, ...]


@dataclass(frozen=True, slots=True)
class _Memory:
    """What ``apply`` does to rows and arena, staged; None where there is nothing to do."""

    cleared: Staged | None = None
    table_writes: tuple[Staged, ...] = ()
    work: tuple[tuple[WorkKind, Items], ...] = ()


class BatchBuilder:
    """State of ``rows_max`` rows with up to ``pages_max`` pages; steps of up to ``step_tokens_max`` tokens.
    ``pad_decode_to``: the decode part of every batch has at least so many rows. ``decode_widths``: sizes that
    steps of decodes alone are padded to, ascending; what is larger than all of them is not. ``by_copies``:
    whether everything comes to the device by a copy, by default on every device but the CPU."""

    def __init__(self, *, rows_max: int, pages_max: int, step_tokens_max: int, device: torch.device,
                 pad_decode_to: int = 0, by_copies: bool | None = None) -> None:
        by_copies = device.type != "cpu" if by_copies is None else by_copies
        self._pad_decode_to = pad_decode_to
        self._pad_row = rows_max
        self._tokens_max = max(step_tokens_max, rows_max) + pad_decode_to
        self.decode_widths: Sequence[int] = ()
        self.table = torch.full((rows_max + 1, max(pages_max, 1)), PAD, dtype=torch.int32, device=device)
        """int32 [rows_max + 1, pages_max]; the last row is that of every PAD run."""
        self.chosen = torch.zeros(rows_max + 1, dtype=torch.int64, device=device)
        """int64 [rows_max + 1]: the token that each row chose last."""
        # The same memory where the host can write it: some entries change in most steps, and an indexed
        # write of torch costs more than all of them.
        self._host_table = None if by_copies else self.table.numpy()
        self._host_chosen = None if by_copies else self.chosen.numpy()
        self._steady: SteadyDecodes | None = None
        self._prompts: dict[int, tuple[Int64s, int]] = {}
        self.staging = Staging(device, step_bytes(self._tokens_max, rows_max, pages_max), copies=by_copies)
        self._places = np.arange(self._tokens_max, dtype=np.int64)
        self._sent: _Sent | None = None

    def pages_of(self, row: int) -> list[int]:
        """Pages of ``row``, in order: for tests and evaluations that write into them."""
        return [page for page in self.table[row].tolist() if page != PAD]

    def table_row(self, row: int) -> torch.Tensor:
        """int32 [pages_max], the live row itself: whoever asks for it may write it before the next step."""
        self._steady = None
        return self.table[row]

    def apply(self, plan: StepPlan, sampler: Sampler, arena: DeviceArena) -> None:
        """Bring rows, sampler and memory to where the plan's runs expect them, and the runs to the device."""
        if plan.rows_cleared or plan.admissions:
            self._change_rows(plan, sampler)
        self.staging.begin()
        memory = self._stage_memory(plan)
        self._steady = self._steady_of(plan)
        if self._steady is not None:
            self._steady.advance(plan)
            sampler.stage(self.staging, self._steady.rows, self._steady.contexts)
        else:
            self._sent = self._stage_runs(plan, sampler)
        self.staging.send()
        self._apply_rows(memory)
        for kind, ids in memory.work:
            arena.perform(kind, ids)

    def _change_rows(self, plan: StepPlan, sampler: Sampler) -> None:
        self._steady = None
        for cleared in plan.rows_cleared:
            self._prompts.pop(cleared, None)
            sampler.clear(cleared)
            if self._host_table is not None:
                self._host_table[cleared] = PAD
        for a in plan.admissions:
            sampler.admit(a.row, a.tokens, a.prompt_tokens, a.sampling, a.seed, a.stop_ids, a.grammar)
            if a.sampling.prompt_logprobs is not None:
                prompt = a.tokens[: a.prompt_tokens].astype(np.int64)
                self._prompts[a.row] = (prompt, a.sampling.prompt_logprobs)

    def _steady_of(self, plan: StepPlan) -> SteadyDecodes | None:
        """The decodes of ``plan`` that go on, or begin to: where there is nothing else in it."""
        if self._host_table is None or self._host_chosen is None or self._pad_decode_to or self.decode_widths:
            return None
        if self._steady is not None and self._steady.goes_on(plan):
            return self._steady
        if not 0 < plan.decode_count == plan.run_count or not plan.samples.all():
            return None
        assert (plan.lengths == 1).all(), "a decode run has one token"
        return SteadyDecodes(plan, self._host_table, self._host_chosen)

    def note_chosen(self, batch: StepBatch, choice: TokenChoice) -> None:
        """``choice`` is of the runs that sample: what their rows decode next."""
        if self._host_chosen is not None:
            chosen_X = choice.chosen_X
            self._host_chosen[batch.sample_rows] = (
                chosen_X if isinstance(chosen_X, np.ndarray) else chosen_X.numpy())
        elif batch.sample_rows_X is not None:
            self.chosen.index_copy_(0, batch.sample_rows_X, as_tensor(choice.chosen_X))

    def _stage_memory(self, plan: StepPlan) -> _Memory:
        """On the host tables are written here, and the arena takes what the plan says as it is."""
        if self._host_table is not None:
            for writes in (plan.table_writes, plan.table_patches):
                if writes.size:
                    self._host_table[writes[0], writes[1]] = writes[2]
                    if self._steady is not None:
                        self._steady.write(writes)
            return _Memory(work=tuple(plan.arena_work.ordered()))
        staged = self.staging.add
        return _Memory(
            cleared=staged(np.array(plan.rows_cleared, np.int64)) if plan.rows_cleared else None,
            table_writes=tuple(staged(writes, np.int64) for writes in (plan.table_writes, plan.table_patches)
                               if writes.size),
            work=tuple((kind, staged(ids, np.int64)) for kind, ids in plan.arena_work.ordered()))

    def _apply_rows(self, memory: _Memory) -> None:
        """On a GPU; the host's own table was written already."""
        if memory.cleared is not None:
            self.table.index_fill_(0, memory.cleared.device, PAD)
        for writes in memory.table_writes:
            rows, columns, pages = writes.device
            self.table.index_put_((rows, columns), pages.to(torch.int32))

    def _pads(self, plan: StepPlan) -> tuple[int, bool]:
        """PAD rows of the step, and whether a graph takes it."""
        decodes = plan.decode_count
        if decodes == plan.run_count:
            width = next((width for width in self.decode_widths if width >= decodes), 0)
            if width:
                return width - decodes, True
        return max(0, self._pad_decode_to - decodes), False

    def _stage_runs(self, plan: StepPlan, sampler: Sampler) -> _Sent | None:
        if not plan.run_count:
            return None
        decodes, (pads, graphed) = plan.decode_count, self._pads(plan)
        assert (plan.lengths[:decodes] == 1).all(), "a decode run has one token"
        lengths = _with_pads(plan.lengths.astype(np.int64), decodes, pads, 1)
        run_count, token_count = len(lengths), plan.token_count + pads
        decodes_alone = run_count == token_count
        places = self._places[:token_count]
        offsets = places if decodes_alone else lengths.cumsum() - lengths
        assert graphed or token_count <= self._tokens_max, f"a step of {token_count} tokens"
        flat = self.staging.take(2 * stride_of(token_count) + 4 * stride_of(run_count))
        (tokens, positions), (starts, slots, contexts, rows) = _fields(flat.host, token_count, run_count)
        starts[:] = _with_pads(plan.starts, decodes, pads, PAD)
        slots[:] = _with_pads(plan.slots, decodes, pads, PAD)
        rows[:] = _with_pads(plan.rows, decodes, pads, self._pad_row)
        np.add(starts, lengths, out=contexts)
        contexts[decodes : decodes + pads] = 0
        tokens[:] = _with_pads(plan.tokens, decodes, pads, 0)
        if decodes_alone:
            positions[:] = starts
        else:
            np.add(np.repeat(starts - offsets, lengths), places, out=positions)
        sample_runs = np.flatnonzero(plan.samples)
        in_batch = sample_runs + np.where(sample_runs >= decodes, pads, 0)
        fresh = _with_pads(plan.fresh, decodes, pads, False).tolist()
        taps = tuple(TapPoint(tap.run + (pads if tap.run >= decodes else 0),
                              tap.position - int(plan.starts[tap.run]), tap.slot) for tap in plan.taps)
        sampling = self.staging.take((2, len(sample_runs)))
        sampling.host[0] = offsets[in_batch] + lengths[in_batch] - 1
        sampling.host[1] = plan.rows[sample_runs]
        sampler.stage(self.staging, sampling.host[1], contexts[in_batch])
        runs_table = None
        if not graphed and gpu.fits(self.table):
            packed, chunk_count = device_runs.pack_lists(
                offsets.tolist(), starts.tolist(), lengths.tolist(), fresh, decodes + pads, taps)
            runs_table = self.staging.add(packed), chunk_count
        return _Sent(
            plan, pads, graphed, offsets, lengths, fresh, taps, flat,
            unknown=bool((tokens[:decodes] == PAD).any()), sampling=sampling, sample_runs=sample_runs,
            sample_positions=contexts[in_batch].copy(), runs_table=runs_table,
            following=tuple(self.staging.add(self._following(plan, run)) for run in plan.prompt_logprob_runs))

    def build(self, plan: StepPlan) -> StepBatch:
        """Inputs of the forward pass of the plan that was applied last. They live in memory that the next
        ``apply`` overwrites."""
        if self._steady is not None:
            assert self._steady.step == plan.step, "the plan was not applied"
            return StepBatch(self._steady.inputs(), self._steady.runs, self._steady.rows,
                             self._steady.contexts, None, None)
        sent = self._sent
        assert sent is not None, "there is nothing to compute"
        assert sent.plan.step == plan.step, "the plan was not applied"
        every = len(sent.sample_runs) == len(sent.offsets) == sent.plan.token_count
        return StepBatch(
            inputs=self._block(sent) if sent.graphed else self._inputs(sent), sample_runs=sent.sample_runs,
            sample_rows=plan.rows[sent.sample_runs].astype(np.int64), sample_positions=sent.sample_positions,
            sample_index_X=None if every else sent.sampling.device[0], sample_rows_X=sent.sampling.device[1],
            prompt_spans=tuple(self._prompt_spans(sent)))

    def _block(self, sent: _Sent) -> DecodeBlock:
        width = len(sent.lengths)
        _, (starts, slots, _, _) = _fields(sent.flat.host, width, width)
        return DecodeBlock(width, sent.flat.device, starts=starts.tolist(), slots=slots.tolist())

    def _inputs(self, sent: _Sent) -> StepInputs:
        run_count, token_count = len(sent.lengths), sent.plan.token_count + sent.pads
        tokens_T, positions_T, starts_R, slots_R, context_R, rows_R = (
            field[:count] for field, count in zip(
                torch.split(sent.flat.device, [stride_of(token_count)] * 2 + [stride_of(run_count)] * 4),
                [token_count] * 2 + [run_count] * 4, strict=True))
        _, (starts, slots, contexts, _) = _fields(sent.flat.host, token_count, run_count)
        pages_used = max(1, ceil_div(int(contexts.max(initial=0)), PAGE_TOKENS))
        runs = Runs(
            offsets=sent.offsets.tolist(), starts=starts.tolist(), lengths=sent.lengths.tolist(),
            slots=slots.tolist(), fresh=sent.fresh, decode_count=sent.plan.decode_count + sent.pads,
            starts_R=starts_R, slots_R=slots_R, context_R=context_R,
            page_table_RP=self.table[:, :pages_used].index_select(0, rows_R), taps=sent.taps)
        if sent.runs_table is not None:
            flat, chunk_count = sent.runs_table
            device_runs.remember(runs, flat.device, chunk_count)
        if sent.unknown:
            decodes = sent.plan.decode_count
            fed = known_tokens(tokens_T[:decodes], rows_R[:decodes], self.chosen)
            tokens_T = torch.cat((fed, tokens_T[decodes:]))
        return StepInputs(tokens_T, positions_T, runs, self._asked(sent, token_count))

    def _asked(self, sent: _Sent, token_count: int) -> OutputRows | None:
        """The rows that are sampled, where there are others and nobody wants logprobs of a prompt."""
        if len(sent.sample_runs) == token_count or len(sent.plan.prompt_logprob_runs):
            return None
        decodes = sent.plan.decode_count
        runs = sent.sample_runs + np.where(sent.sample_runs >= decodes, sent.pads, 0)
        return OutputRows(runs.tolist(), sent.sampling.device[0])

    def _following(self, plan: StepPlan, run: int) -> Int64s:
        prompt, _ = self._prompts[int(plan.rows[run])]
        start = int(plan.starts[run])
        return prompt[start + 1 : start + 1 + int(plan.lengths[run])]

    def _prompt_spans(self, sent: _Sent) -> list[PromptSpan]:
        spans, plan = [], sent.plan
        for run, following in zip(plan.prompt_logprob_runs, sent.following, strict=True):
            first = int(sent.offsets[run + (sent.pads if run >= plan.decode_count else 0)])
            spans.append(PromptSpan(run, first, following.device, self._prompts[int(plan.rows[run])][1]))
        return spans


def _fields(flat: Int64s, token_count: int, run_count: int) -> tuple[Int64s, Int64s]:
    """tokens, positions [2, T]; starts, slots, contexts, rows [4, R]: each begins on 16 bytes."""
    tokens, runs = stride_of(token_count), stride_of(run_count)
    return (flat[: 2 * tokens].reshape(2, tokens)[:, :token_count],
            flat[2 * tokens :].reshape(4, runs)[:, :run_count])


def _with_pads(values: npt.NDArray[Item], decodes: int, pads: int, value: int | bool) -> npt.NDArray[Item]:
    """``values`` with ``pads`` entries of ``value`` behind the first ``decodes``."""
    return np.insert(values, decodes, [value] * pads) if pads else values
