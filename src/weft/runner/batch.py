"""Inputs of the model, made of a step plan. Only this file and the rows that it drives read a StepPlan.

    kept by row of the executor (``rows``)    page table, and the token that the row chose last
    kept here                                 prompts of sequences that asked for prompt logprobs
    new in each step, in one staging buffer   tokens, positions, starts, slots, contexts, rows, runs to sample,
                                              table writes, ids of arena work, the table of runs

``apply`` stages the inputs of the step and sends them in one copy (``staging``). Then it updates rows and arena in the
order that the plan promises (L5, L6):

    rows_cleared -> admissions -> table_writes, table_patches -> arena work, in the order of ``ArenaWork``
    after the runs: ``store``, the rest of the arena work

``build`` makes the model inputs from the staged arrays. Decodes come first, so padding follows them:

    runs       d0 d1 PAD PAD | p0 p1                 PAD row: slot PAD, start PAD, context 0, table all PAD
    tokens_T   d0 d1  0   0  | p0 p0 p0 p1 p1        its position is PAD: no read, no write (L4)

A step is padded to the first of the recorded ``shapes`` that holds it (``graph_shapes`` has the PAD of steps with
prompts). PAD as a decode's token is the last token of its row, on the device: a step can
be sent before the tokens of the previous step have arrived.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from weft.request import Pooling
from weft.runner.arena import DeviceArena
from weft.runner.decodes import SteadyBlock, SteadyDecodes
from weft.runner.graph_shapes import BLOCK_FIELDS, GraphShape, outside, split_fields, stride_of
from weft.runner.graphs import known_tokens
from weft.runner.pictures import PictureRows, padded
from weft.runner.rows import Rows
from weft.runner.sampler import Sampler, TokenChoice
from weft.runner.staging import Staged
from weft.runner.step_graphs import StepBlock
from weft.schedule.plan import StepPlan
from weft.tensor import gpu
from weft.tensor.adapter_rows import BASE, ActiveAdapters, AdapterBlocks, StepAdapters, most_blocks
from weft.tensor.gpu import runs as device_runs
from weft.tensor.inputs import EmbeddedRows, OutputRows, Runs, StepInputs, TapPoint
from weft.tensor.replay_log import ReplayLog
from weft.units import PAD, PAGE_TOKENS, ceil_div

Int64s = npt.NDArray[np.int64]
Item = TypeVar("Item", bound=np.generic)


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """A request for prompt logprobs in run ``run``. ``next_tokens_N`` (int64, on the device) follow the
    tokens at index ``first``, ``first + 1``, ... of T. Each comes with the ``top_count`` best tokens."""

    run: int
    first: int
    next_tokens_N: torch.Tensor
    top_count: int


@dataclass(frozen=True, slots=True)
class PooledSpan:
    """Tokens [first, stop) of T, which are all of run ``run``, from position ``start`` on."""

    run: int
    first: int
    stop: int
    start: int
    pooling: Pooling


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Inputs of one step. ``inputs``: the model's, or the block of a graph if the step has one.

    ``sample_runs``, ``sample_rows``, ``sample_positions``: int64 [X], for the runs that sample: the index in
    the plan, the row, and the position of the token to choose. A verify run has one for each of its tokens.
    On the device: ``sample_index_X``, the index in T of the token before it, None if these are the first X;
    ``sample_rows_X``, their rows, None in a steady step on a CPU. ``head_inputs``: for the model's own head,
    where a graph computes the step. ``launched``: why no graph does (``graph_shapes.outside``), empty if one does.
    """

    inputs: StepInputs | StepBlock
    sample_runs: Int64s
    sample_rows: Int64s
    sample_positions: Int64s
    sample_index_X: torch.Tensor | None
    sample_rows_X: torch.Tensor | None
    prompt_spans: tuple[PromptSpan, ...] = ()
    pooled_spans: tuple[PooledSpan, ...] = ()
    head_inputs: StepInputs | None = None
    launched: str = ""

    def sampled_of(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the hidden states of the runs that sample [X, D], of the output of ``forward`` for ``inputs``."""
        inputs, index_X = self.inputs, self.sample_index_X
        # Reading rows of a tensor costs 10 to 40 us after kernels that empty the caches.
        if isinstance(inputs, StepInputs) and (
            inputs.output_rows is not None or (index_X is None and not inputs.runs.padded)
        ):
            return hidden
        if index_X is not None:
            return hidden[index_X]
        count = self.sample_rows.shape[0]
        return hidden if hidden.shape[0] == count else hidden[:count]


@dataclass(frozen=True, slots=True)
class _Padding:
    """Padding of a step. ``rows`` of PAD after the decodes; ``shape``: of the graph that computes the step, if one
    does. Then ``verifies``, verify runs of PAD without a token, follow ``rows``, and ``runs`` and ``tokens`` of PAD
    follow the prompts, all tokens in the last run. ``launched``: as in ``StepBatch``.
    """

    rows: int = 0
    shape: GraphShape | None = None
    verifies: int = 0
    runs: int = 0
    tokens: int = 0
    launched: str = ""

    @property
    def runs_inside(self) -> int:
        """Number of PAD runs between the decodes and the other runs."""
        return self.rows + self.verifies


@dataclass(frozen=True, slots=True)
class _StagedRuns:
    """The runs of a step, staged by ``apply`` for ``build``. By run, with PAD rows: ``offsets``, ``lengths``.

    ``flat``: tokens, positions [T each], starts, slots, contexts, rows [R each]. ``sampling``: index in T, row [X
    each]. Both int64. ``unknown``: some decodes have PAD for their token. ``following``: the tokens after those of
    each run in the plan's ``prompt_logprob_runs``. ``pictured``: the index of each token among the rows of pictures
    (None in a block with that field), and these rows; ``turns``: positions of the rotation of tokens, if a row has
    pictures.
    ``adapter_rows``: rows of ``AdapterBlocks``, by count of rows as in ``adapters``.
    """

    plan: StepPlan
    padding: _Padding
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
    pictured: tuple[Staged | None, torch.Tensor] | None = None
    turns: Staged | None = None
    adapters: StepAdapters | None = None
    adapter_rows: Mapping[int, Staged] = field(default_factory=dict)

    @property
    def pads(self) -> int:
        return self.padding.rows

    @property
    def token_count(self) -> int:
        return self.plan.token_count + self.padding.rows + self.padding.tokens

    def run_of(self, run: int) -> int:
        """Return the index, with PAD, of run ``run`` of the plan."""
        return run + (self.padding.runs_inside if run >= self.plan.decode_count else 0)


class BatchBuilder:
    """Builder of steps of up to ``step_tokens_max`` tokens over ``rows``.

    ``pad_decode_to``: fewest rows in the decode part of a batch. ``shapes``: ascending, to which steps are padded; a
    step that none of them holds is not padded.
    """

    def __init__(self, rows: Rows, *, step_tokens_max: int, pad_decode_to: int = 0) -> None:
        rows_max = len(rows.table) - 1
        self.rows = rows
        self._pad_decode_to = pad_decode_to
        self._pad_row = rows_max
        self._tokens_max = max(step_tokens_max, rows_max) + pad_decode_to
        self.shapes: Sequence[GraphShape] = ()
        self.adapted_shapes: Sequence[GraphShape] = ()
        """Shapes that are recorded with adapters too."""
        self.active: ActiveAdapters | None = None
        """Adapters of the model, if the Triton kernels multiply factors."""
        self._steady: SteadyDecodes | None = None
        self._steady_block: SteadyBlock | None = None
        self._steady_shapes: Sequence[GraphShape] = ()
        """Shapes for which the block was made."""
        self._prompts: dict[int, tuple[Int64s, int]] = {}
        self._pooled: dict[int, Pooling] = {}
        self._adapters: dict[int, str] = {}
        """Digest of the adapter by row; rows of the base model are not in it."""
        self._places = np.arange(self._tokens_max, dtype=np.int64)
        self._staged: _StagedRuns | None = None
        self.pictures: PictureRows | None = None

    def pages_of(self, row: int) -> list[int]:
        """Return the pages of ``row``, in order: for tests and evaluations that write into them."""
        return [page for page in self.rows.table[row].tolist() if page != PAD]

    def apply(self, plan: StepPlan, sampler: Sampler, arena: DeviceArena) -> None:
        """Update rows, sampler and arena to the state that the runs of the plan expect, and send the runs to the
        device.
        """
        if self.pictures is not None:
            self.pictures.apply(plan)
        if plan.rows_cleared or plan.admissions:
            self._change_rows(plan, sampler)
        rows, staging = self.rows, self.rows.staging
        staging.begin()
        rows.stage(plan)
        self._steady = None if self._pad_decode_to or self.shapes else rows.steady(plan)
        if self._steady is not None:
            if self._steady.step < 0:
                self._steady.adapters = StepAdapters.of(self.adapters_of(plan), plan.lengths.tolist())
                rows_R = plan.rows.tolist()
                if self.pictures is not None and self.pictures.turn(rows_R):
                    self._steady.turn_by(self.pictures.deltas(rows_R))
            self._steady.advance(plan)
            sampler.stage(staging, self._steady.rows, self._steady.contexts)
        elif (block := self._block_going_on(plan)) is not None:
            block.stage(plan, staging)
            sampler.stage(staging, block.rows, block.contexts)
        else:
            self._staged = self._stage_runs(plan, sampler)
            self._steady_block = self._block_to_go_on(self._staged)
        staging.send()
        rows.perform(arena)

    def store(self, arena: DeviceArena) -> None:
        """Perform the arena work that comes after the runs of the plan applied last."""
        self.rows.store(arena)

    def _change_rows(self, plan: StepPlan, sampler: Sampler) -> None:
        for cleared in plan.rows_cleared:
            self._prompts.pop(cleared, None)
            self._pooled.pop(cleared, None)
            self._adapters.pop(cleared, None)
            sampler.clear(cleared)
        for a in plan.admissions:
            sampler.admit(a.row, a.tokens, a.prompt_tokens, a.sampling, a.seed, a.stop_ids, a.grammar)
            if a.adapter:
                self._adapters[a.row] = a.adapter
            if a.pooling is not None:
                self._pooled[a.row] = a.pooling
            if a.sampling.prompt_logprobs is not None:
                prompt = a.tokens[: a.prompt_tokens].astype(np.int64)
                self._prompts[a.row] = (prompt, a.sampling.prompt_logprobs)

    def _block_to_go_on(self, staged: _StagedRuns | None) -> SteadyBlock | None:
        """Return a block for the steps that follow, if they may be the same decodes in the same graph."""
        self._steady_shapes = self.shapes
        shape = None if staged is None else staged.padding.shape
        if staged is None or shape is None or not shape.decodes_alone:
            return None
        if staged.adapters or staged.turns or len(staged.sample_runs) != staged.plan.run_count:
            return None
        return SteadyBlock(staged.plan, staged.flat.host.reshape(BLOCK_FIELDS, -1), shape)

    def _block_going_on(self, plan: StepPlan) -> SteadyBlock | None:
        """Return the block of the step before, if ``plan`` is of the same decodes."""
        # A row that another sequence takes may get an adapter. Graphs that are recorded again may get other shapes.
        if plan.rows_cleared or plan.admissions or self._steady_shapes is not self.shapes:
            return None
        block = self._steady_block
        return block if block is not None and block.goes_on(plan) else None

    def note_chosen(self, batch: StepBatch, choice: TokenChoice) -> None:
        """Record ``choice`` of the runs that sample: the tokens that their rows decode next."""
        self.rows.note_chosen(batch.sample_rows, batch.sample_rows_X, choice)

    def adapters_of(self, plan: StepPlan) -> list[str]:
        """Return the digest of the adapter of each run, empty for the base model."""
        if not self._adapters:
            return [""] * plan.run_count
        return [self._adapters.get(row, "") for row in plan.rows.tolist()]

    def _padding(self, plan: StepPlan) -> _Padding:
        decodes, digests = plan.decode_count, self.adapters_of(plan)
        adapted = any(digests)
        shapes = self.adapted_shapes if adapted else self.shapes
        unpadded = _Padding(max(0, self._pad_decode_to - decodes))
        if adapted and (self.active is None or not self.active.recorded(digests)):
            return replace(unpadded, launched="adapters")
        lengths = plan.lengths.tolist()
        prompts, verified = lengths[plan.prefills.start :], lengths[decodes : plan.prefills.start]
        shape = next((size for size in shapes if size.holds(decodes, prompts, len(plan.taps), verified)), None)
        if shape is None:
            return replace(unpadded, launched=outside(shapes, plan.token_count, len(prompts), len(verified)))
        return _Padding(
            shape.decodes - decodes,
            shape,
            shape.verifies - len(verified),
            shape.prompts + (not shape.decodes_alone) - len(prompts),
            shape.tokens - shape.decodes - sum(lengths[decodes:]),
        )

    def _stage_runs(self, plan: StepPlan, sampler: Sampler) -> _StagedRuns | None:
        if not plan.run_count:
            return None
        decodes, padding = plan.decode_count, self._padding(plan)
        pads, tail_pads = padding.rows, padding.runs
        assert (plan.lengths[:decodes] == 1).all(), "a decode run has one token"
        no_runs = [PAD] * padding.runs_inside
        lengths = _with_pads(plan.lengths.astype(np.int64), decodes, [1] * pads + [0] * padding.verifies, tail_pads, 0)
        if tail_pads:
            lengths[-1] = padding.tokens
        run_count, token_count = len(lengths), plan.token_count + pads + padding.tokens
        assert padding.shape is not None or token_count <= self._tokens_max, f"a step of {token_count} tokens"
        decodes_alone = run_count == token_count and not tail_pads
        places = np.arange(token_count) if tail_pads else self._places[:token_count]
        offsets = places if decodes_alone else lengths.cumsum() - lengths
        shape = padding.shape
        flat = self.rows.staging.take(
            2 * stride_of(token_count) + 4 * stride_of(run_count) if shape is None else shape.block_numbers
        )
        (tokens, positions), (starts, slots, contexts, rows) = split_fields(flat.host, token_count, run_count)
        starts[:] = _with_pads(plan.starts, decodes, no_runs, tail_pads, PAD)
        slots[:] = _with_pads(plan.slots, decodes, no_runs, tail_pads, PAD)
        rows[:] = _with_pads(plan.rows, decodes, [self._pad_row] * len(no_runs), tail_pads, self._pad_row)
        np.add(starts, lengths, out=contexts)
        contexts[decodes : decodes + len(no_runs)] = contexts[run_count - tail_pads :] = 0
        tokens[:] = _with_pads(plan.tokens, decodes, [0] * pads, padding.tokens, 0)
        if decodes_alone:
            positions[:] = starts
        else:
            np.add(np.repeat(starts - offsets, lengths), places, out=positions)
            positions[token_count - padding.tokens :] = PAD
        fresh = _with_pads(plan.fresh, decodes, [False] * len(no_runs), tail_pads, False).tolist()
        taps = tuple(
            TapPoint(
                tap.run + (len(no_runs) if tap.run >= decodes else 0),
                tap.position - int(plan.starts[tap.run]),
                tap.slot,
            )
            for tap in plan.taps
        )
        pictured, turns = self._stage_pictures(plan, padding, flat.host, positions)
        runs_table = self._stage_table(padding, flat.host, (offsets, starts, lengths), fresh, decodes + pads, taps)
        sampling, sample_runs, positions = self._stage_sampling(plan, sampler, len(no_runs), offsets, lengths, contexts)
        adapters = self._step_adapters(plan, len(no_runs), lengths, sample_runs)
        return _StagedRuns(
            plan,
            padding,
            offsets,
            lengths,
            fresh,
            taps,
            flat,
            unknown=bool((tokens[:decodes] == PAD).any()),
            sampling=sampling,
            sample_runs=sample_runs,
            sample_positions=positions,
            runs_table=runs_table,
            pictured=pictured,
            turns=turns,
            following=tuple(self.rows.staging.add(self._following(plan, run)) for run in plan.prompt_logprob_runs),
            adapters=adapters,
            adapter_rows=self._stage_adapters(adapters, 0 if shape is None else token_count),
        )

    def _stage_table(
        self,
        padding: _Padding,
        block: Int64s,
        runs: tuple[Int64s, Int64s, Int64s],
        fresh: list[bool],
        decode_count: int,
        taps: tuple[TapPoint, ...],
    ) -> tuple[Staged, int] | None:
        """Write the table of runs into ``block`` if that of the step's shape changes. Otherwise return a staged table,
        if kernels need one. ``runs``: offsets, starts, lengths.
        """
        shape = padding.shape
        if not gpu.fits(self.rows.table) if shape is None else shape.decodes_alone:
            return None
        offsets, starts, lengths = (numbers.tolist() for numbers in runs)
        packed, chunk_count = device_runs.pack_lists(
            offsets, starts, lengths, fresh, decode_count, taps, 0 if shape is None else shape.chunks
        )
        if shape is None:
            return self.rows.staging.add(packed), chunk_count
        block[shape.table_at :] = packed.view(np.int64)
        return None

    def _stage_pictures(
        self, plan: StepPlan, padding: _Padding, block: Int64s, positions: Int64s
    ) -> tuple[tuple[Staged | None, torch.Tensor] | None, Staged | None]:
        """Return ``_StagedRuns.pictured`` and ``turns``. The block of a recorded shape gets both."""
        if self.pictures is None:
            return None, None
        decodes, pads = plan.decode_count, padding.rows
        shown = self.pictures.of_step(plan)
        turned = self.pictures.turn(plan.rows.tolist())
        row_T = np.full(len(positions), PAD, np.int64)
        if shown is not None:  # prefills come after the decodes
            row_T[shown[0] + pads] = np.arange(len(shown[0]))
        turns = padded(self.pictures.turns_of_step(plan), decodes, pads) if turned else None
        shape = padding.shape
        if shape is not None and shape.picture_fields:
            fields = shape.fields_of(block)
            fields[0] = row_T
            fields[1:] = positions
            if turns is not None:
                fields[1:, : turns.shape[-1]] = turns
            return (None if shown is None else (None, shown[1])), None
        if shape is not None and plan.mtp_drafts is None:
            turns = None  # the graph knows those of its rows
        add = self.rows.staging.add
        return None if shown is None else (add(row_T), shown[1]), None if turns is None else add(turns)

    def _stage_adapters(self, adapters: StepAdapters | None, graphed: int) -> dict[int, Staged]:
        """Stage the rows of adapters, by count of rows; ``graphed`` rows are those of a graph."""
        if adapters is None or self.active is None:
            return {}
        return {
            count: self.rows.staging.add(
                groups.in_blocks(self.active.lines, most_blocks(count) if count == graphed else None)
            )
            for count, groups in adapters.by_count.items()
        }

    def _stage_sampling(
        self, plan: StepPlan, sampler: Sampler, pads: int, offsets: Int64s, lengths: Int64s, contexts: Int64s
    ) -> tuple[Staged, Int64s, Int64s]:
        """Return ``_StagedRuns.sampling``, ``sample_runs`` and ``sample_positions``. ``pads``: PAD runs after the
        decodes.
        """
        sample_runs, tokens_after = _sampled(plan)
        in_batch = sample_runs + np.where(sample_runs >= plan.decode_count, pads, 0)
        sampling = self.rows.staging.take((2, len(sample_runs)))
        sampling.host[0] = offsets[in_batch] + lengths[in_batch] - 1 - tokens_after
        sampling.host[1] = plan.rows[sample_runs]
        positions = contexts[in_batch] - tokens_after
        if not plan.verify_count:  # verify runs choose their tokens one by one
            sampler.stage(self.rows.staging, sampling.host[1], positions)
        return sampling, sample_runs, positions

    def build(self, plan: StepPlan) -> StepBatch:
        """Return the inputs of the forward pass for the plan applied last. The next ``apply`` overwrites their
        memory.
        """
        if self._steady is not None:
            assert self._steady.step == plan.step, "the plan was not applied"
            return StepBatch(
                self._steady.inputs(), self._steady.runs, self._steady.rows, self._steady.contexts, None, None
            )
        steady = self._steady_block
        if steady is not None and steady.step == plan.step:
            return StepBatch(steady.block(), steady.runs, steady.rows, steady.contexts, None, steady.rows_R())
        staged = self._staged
        assert staged is not None, "there is nothing to compute"
        assert staged.plan.step == plan.step, "the plan was not applied"
        shape = staged.padding.shape
        first = len(staged.sample_runs) == plan.decode_count == plan.run_count  # pads come after them
        return StepBatch(
            inputs=self._inputs(staged) if shape is None else self._block(staged, shape),
            head_inputs=None if shape is None or plan.mtp_drafts is None else self._inputs(staged),
            sample_runs=staged.sample_runs,
            sample_rows=plan.rows[staged.sample_runs].astype(np.int64),
            sample_positions=staged.sample_positions,
            sample_index_X=None if first else staged.sampling.device[0],
            sample_rows_X=staged.sampling.device[1],
            prompt_spans=tuple(self._prompt_spans(staged)),
            pooled_spans=tuple(self._pooled_spans(staged)),
            launched=staged.padding.launched,
        )

    def _block(self, staged: _StagedRuns, shape: GraphShape) -> StepBlock:
        pictures = None if staged.pictured is None else staged.pictured[1]
        return StepBlock(shape, staged.flat.device, _with_device_rows(staged), pictures)

    def _inputs(self, staged: _StagedRuns) -> StepInputs:
        run_count, token_count = len(staged.lengths), staged.token_count
        fields = [stride_of(token_count)] * 2 + [stride_of(run_count)] * 4
        tokens_T, positions_T, starts_R, slots_R, context_R, rows_R = (
            field[:count]
            for field, count in zip(
                torch.split(staged.flat.device[: sum(fields)], fields), [token_count] * 2 + [run_count] * 4, strict=True
            )
        )
        _, (starts, slots, contexts, _) = split_fields(staged.flat.host, token_count, run_count)
        pages_used = max(1, ceil_div(int(contexts.max(initial=0)), PAGE_TOKENS))
        runs = Runs(
            offsets=staged.offsets.tolist(),
            starts=starts.tolist(),
            lengths=staged.lengths.tolist(),
            slots=slots.tolist(),
            fresh=staged.fresh,
            decode_count=staged.plan.decode_count + staged.pads,
            starts_R=starts_R,
            slots_R=slots_R,
            context_R=context_R,
            page_table_RP=self.rows.table[:, :pages_used].index_select(0, rows_R),
            taps=staged.taps,
            verify_count=staged.plan.verify_count + staged.padding.verifies,
            log=_log(staged),
            padded=staged.pads > 0 or gpu.fits(self.rows.table),
            unseen={
                staged.run_of(run): hidden
                for run in staged.plan.pooled_runs
                if (hidden := self._pooled[int(staged.plan.rows[run])].unseen)
            },
        )
        if staged.runs_table is not None:
            flat, chunk_count = staged.runs_table
            device_runs.remember(runs, flat.device, chunk_count)
        if staged.unknown:
            decodes = staged.plan.decode_count
            fed = known_tokens(tokens_T[:decodes], rows_R[:decodes], self.rows.chosen)
            tokens_T = torch.cat((fed, tokens_T[decodes:]))
        return StepInputs(
            tokens_T,
            positions_T,
            runs,
            self._output_rows(staged, token_count),
            _with_device_rows(staged),
            _embedded(staged),
            _turns(staged),
        )

    def _step_adapters(self, plan: StepPlan, pads: int, lengths: Int64s, sample_runs: Int64s) -> StepAdapters | None:
        digests, decodes = self.adapters_of(plan), plan.decode_count
        if not any(digests):
            return None
        digests[decodes:decodes] = [BASE] * pads
        digests += [BASE] * (len(lengths) - len(digests))
        output_runs = sample_runs + np.where(sample_runs >= decodes, pads, 0)
        return StepAdapters.of(digests, lengths.tolist(), output_runs.tolist())

    def _output_rows(self, staged: _StagedRuns, token_count: int) -> OutputRows | None:
        """Return the rows whose output is needed; None if it is needed for all, as for prompt logprobs, pooled
        prompts, verify runs and the model's own head.
        """
        if (
            len(staged.sample_runs) == token_count
            or staged.plan.verify_count
            or staged.plan.prompt_logprob_runs
            or staged.plan.pooled_runs
            or staged.plan.mtp_drafts is not None
        ):
            return None
        decodes = staged.plan.decode_count
        runs = staged.sample_runs + np.where(staged.sample_runs >= decodes, staged.padding.runs_inside, 0)
        return OutputRows(runs.tolist(), staged.sampling.device[0])

    def _following(self, plan: StepPlan, run: int) -> Int64s:
        prompt, _ = self._prompts[int(plan.rows[run])]
        start = int(plan.starts[run])
        return prompt[start + 1 : start + 1 + int(plan.lengths[run])]

    def _prompt_spans(self, staged: _StagedRuns) -> list[PromptSpan]:
        spans, plan = [], staged.plan
        for run, following in zip(plan.prompt_logprob_runs, staged.following, strict=True):
            first = int(staged.offsets[staged.run_of(run)])
            spans.append(PromptSpan(run, first, following.device, self._prompts[int(plan.rows[run])][1]))
        return spans

    def _pooled_spans(self, staged: _StagedRuns) -> list[PooledSpan]:
        plan, spans = staged.plan, []
        for run in plan.pooled_runs:
            first = int(staged.offsets[staged.run_of(run)])
            spans.append(
                PooledSpan(
                    run, first, first + int(plan.lengths[run]), int(plan.starts[run]), self._pooled[int(plan.rows[run])]
                )
            )
        return spans


def _sampled(plan: StepPlan) -> tuple[Int64s, Int64s]:
    """Return int64 [X]: the run of each token that is chosen, and how many tokens of the run come after the one that
    chooses it: 0, except in verify runs.
    """
    runs = np.flatnonzero(plan.samples)
    if not plan.verify_count:
        return runs, np.zeros(len(runs), np.int64)
    in_verify_run = (runs >= plan.verify_runs.start) & (runs < plan.verify_runs.stop)
    counts = np.where(in_verify_run, plan.lengths[runs], 1)
    ends = np.repeat(counts.cumsum(), counts)
    return np.repeat(runs, counts), ends - 1 - np.arange(len(ends))


def _with_device_rows(staged: _StagedRuns) -> StepAdapters | None:
    if staged.adapters is not None:
        for count, rows in staged.adapter_rows.items():
            staged.adapters.by_count[count].device = AdapterBlocks.of(rows.device)
    return staged.adapters


def _embedded(staged: _StagedRuns) -> EmbeddedRows | None:
    row_T, rows_ND = staged.pictured or (None, None)
    return None if row_T is None or rows_ND is None else EmbeddedRows(row_T.device, rows_ND)


def _turns(staged: _StagedRuns) -> torch.Tensor | None:
    """Return the turns of the tokens, from the block if it has that field."""
    shape = staged.padding.shape
    if shape is not None and shape.picture_fields > 1:
        turns: torch.Tensor = shape.fields_of(staged.flat.device)[1:]
        return turns
    return None if staged.turns is None else staged.turns.device


def _log(staged: _StagedRuns) -> ReplayLog | None:
    plan = staged.plan
    if not plan.verify_count:
        return None
    first, stop = plan.verify_runs.start, plan.verify_runs.stop
    return ReplayLog(int(staged.offsets[staged.run_of(first)]), int(plan.lengths[first:stop].sum()))


def _with_pads(
    values: npt.NDArray[Item], decodes: int, inside: list[int] | list[bool], after: int, value: int | bool
) -> npt.NDArray[Item]:
    """Return ``values`` with the entries ``inside`` after the first ``decodes``, and ``after`` entries of ``value`` at
    the end.
    """
    padded = np.insert(values, decodes, inside) if inside else values
    return np.concatenate((padded, np.full(after, value, padded.dtype))) if after else padded
