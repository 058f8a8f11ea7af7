"""Verify runs on the device: how their tokens are chosen, and their states afterwards.

    logits     [ decodes | w0 w0 w0 | w1 w1 | prompts ]      a row for each decode, draft and prompt
    round 1      x         x          x       x              every run chooses its first token
    round 2                   x                              verify runs whose first draft is that token
    round 3                      x                           ... and whose second draft is the second
    replay                 n = 3      n = 1                  states of the verify runs after n tokens

A round samples as a step of decodes does: the same row, logits and position. Histories, grammars,
``min_tokens`` and logprobs see a right draft exactly as they see a chosen token. So a text with drafts is the
text without, at any temperature, and no rule of sampling knows of drafts.

If no row needs the token before it, all rows are sampled at once, and those after a wrong draft are dropped. A call of
the sampler costs more than a row. With penalties or a grammar a row depends on the drafts before it.

Afterwards every recurrent op consumes the right part of its run (``tensor.replay_log``). A run of one right token goes
through the replay as a decode, others as prefills.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from weft.request import TokenLogprobs
from weft.runner.sampler import Sampled, Sampler
from weft.runner.staging import Staging
from weft.schedule.plan import StepPlan
from weft.tensor import gpu
from weft.tensor.gpu import runs as device_runs
from weft.tensor.inputs import Runs
from weft.tensor.replay_log import LoggedRuns
from weft.units import PAD

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SampledRows:
    """Rows of the logits, in order. ``runs``, ``rows``, ``positions``: int64 [X]: the run of each, its row, and the
    position of the token to choose.
    """

    runs: Int64s
    rows: Int64s
    positions: Int64s


@dataclass(slots=True)
class Verified:
    """Result of verification. ``tokens``: int32 [runs], the last that each run chose. The rest by run, as in
    ``StepResult``.
    """

    tokens: npt.NDArray[np.int32]
    by_run: dict[int, tuple[int, ...]] = field(default_factory=dict)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    verified_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)


def choose(
    sampler: Sampler, logits_XV: torch.Tensor, of: SampledRows, plan: StepPlan, staging: Staging, apart: Sampled | None
) -> Verified:
    """Return the tokens of all runs of ``plan``. ``apart``: those of all rows, if they were chosen apart; None: choose
    in rounds, which changes the logits. All tokens of earlier steps are known.
    """
    verified = Verified(np.full(plan.run_count, PAD, np.int32))
    chosen: dict[int, list[int]] = {run: [] for run in plan.verify_runs}
    indices = np.flatnonzero(np.diff(of.runs, prepend=-1))  # the first row of each run
    drafts = _drafts(plan)
    while indices.size:
        sampled = (
            apart.of(indices)
            if apart is not None
            else sampler.sample(_rows_at(logits_XV, indices, staging), of.rows[indices], of.positions[indices])
        )
        going_on = []
        for i, (row, token) in enumerate(zip(indices.tolist(), sampled.tokens.tolist(), strict=True)):
            run = int(of.runs[row])
            verified.tokens[run] = token
            logprobs = sampled.logprobs.get(i)
            if i in sampled.failures:
                verified.failures[run] = sampled.failures[i]
            if run not in chosen:
                if logprobs is not None:
                    verified.logprobs[run] = logprobs
                continue
            chosen[run].append(token)
            if logprobs is not None:
                verified.verified_logprobs.setdefault(run, []).append(logprobs)
            if i not in sampled.failures and token == drafts[run][len(chosen[run]) - 1]:
                going_on.append(row + 1)
        indices = np.asarray(going_on, np.int64)
    verified.by_run.update((run, tuple(tokens)) for run, tokens in chosen.items())
    return verified


def _drafts(plan: StepPlan) -> dict[int, list[int]]:
    """Return the drafts of each verify run, then PAD."""
    begin, drafts = plan.decode_count, {}
    for run, length in zip(plan.verify_runs, plan.lengths[plan.decode_count :].tolist(), strict=False):
        drafts[run] = [*plan.tokens[begin + 1 : begin + length].tolist(), PAD]
        begin += length
    return drafts


def _rows_at(logits_XV: torch.Tensor, indices: Int64s, staging: Staging) -> torch.Tensor:
    first, count = int(indices[0]), len(indices)
    if int(indices[-1]) - first + 1 == count:
        return logits_XV[first : first + count]
    staging.begin()
    index = staging.add(indices)
    staging.send()
    return logits_XV.index_select(0, index.device)


def replay(runs: Runs, counts: Sequence[int], staging: Staging) -> None:
    """Replay the states of the verify runs of ``runs`` after ``counts`` tokens each."""
    log, first = runs.log, runs.decode_count
    assert log is not None, "a step without verify runs"
    span = slice(first, first + len(counts))
    log.replay_filled(
        LoggedRuns(
            [offset - log.first for offset in runs.offsets[span]], runs.starts[span], list(counts), runs.slots[span]
        )
    )
    if not log.has_notes:
        return
    order = sorted(range(len(counts)), key=lambda i: counts[i] > 1)
    verified = [first + i for i in order]
    lengths = [counts[i] for i in order]
    starts, slots = ([values[run] for run in verified] for values in (runs.starts, runs.slots))
    offsets, fresh = [sum(lengths[:i]) for i in range(len(lengths))], [False] * len(lengths)
    decodes = sum(length == 1 for length in lengths)
    begins = [runs.offsets[run] - log.first for run in verified]
    flat, chunk_count = device_runs.pack_lists(offsets, starts, lengths, fresh, decodes, ())
    staging.begin()
    by_run = staging.add(np.array([starts, slots, np.add(starts, lengths), verified], np.int64))
    index = staging.add(
        np.concatenate([np.arange(begin, begin + length) for begin, length in zip(begins, lengths, strict=True)])
    )
    packed = staging.add(flat)
    staging.send()
    starts_R, slots_R, context_R, verified_R = by_run.device
    # A single run's numbers are contiguous: views suffice.
    alone, table_RP = len(counts) == 1, runs.page_table_RP
    again = Runs(
        offsets=offsets,
        starts=starts,
        lengths=lengths,
        slots=slots,
        fresh=fresh,
        decode_count=decodes,
        starts_R=starts_R,
        slots_R=slots_R,
        context_R=context_R,
        page_table_RP=table_RP[span] if alone else table_RP.index_select(0, verified_R),
    )
    if gpu.fits(table_RP):
        device_runs.remember(again, packed.device, chunk_count)
    log.replay(slice(0, counts[0]) if alone else index.device, again)
