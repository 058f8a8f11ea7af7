"""Verify runs on the device: which tokens they choose, and what their states are then.

    logits     [ decodes | w0 w0 w0 | w1 w1 | prompts ]      a row for each decode, draft and prompt
    round 1      x         x          x       x              every run chooses its first token
    round 2                   x                              verify runs whose first draft is that token
    round 3                      x                           ... and whose second draft is the second
    replay                 n = 3      n = 1                  states of the verify runs after n tokens

A round samples as a step of decodes does: the same row, logits and position. Histories, grammars,
``min_tokens`` and logprobs see a right draft exactly as they see a chosen token. So a text with drafts is the
text without, at any temperature, and no rule of sampling knows of drafts.

Where no row looks back, all rows are sampled at once, and those behind a wrong draft are dropped. A call of
the sampler costs more than a row. With penalties or a grammar a row depends on the drafts before it.

Afterwards every recurrent op consumes the right part of its run (``tensor.replay_log``). A run of one right
token goes through the replay as a decode, others as prefills.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from weft.request import TokenLogprobs
from weft.runner.sampler import Sampler
from weft.schedule.plan import StepPlan
from weft.tensor.inputs import Runs
from weft.tensor.replay_log import LoggedRuns
from weft.units import PAD

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The rows of the logits, in order. ``runs``, ``rows``, ``positions``: int64 [X]: the run of each, its
    row, and the position of the token to choose."""

    runs: Int64s
    rows: Int64s
    positions: Int64s


@dataclass(slots=True)
class Verified:
    """``tokens``: int32 [runs], the last that each run chose. The rest by run, as in ``StepResult``."""

    tokens: npt.NDArray[np.int32]
    by_run: dict[int, tuple[int, ...]] = field(default_factory=dict)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    verified_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)


def choose(sampler: Sampler, logits_XV: torch.Tensor, of: SampledRows, plan: StepPlan) -> Verified:
    """Tokens of all runs of ``plan``, in rounds. All tokens of earlier steps are known. Changes the
    logits."""
    verified = Verified(np.full(plan.run_count, PAD, np.int32))
    chosen: dict[int, list[int]] = {run: [] for run in plan.verify_runs}
    at = np.flatnonzero(np.diff(of.runs, prepend=-1))   # the first row of each run
    drafts = _drafts(plan)
    apart = sampler.sample(logits_XV, of.rows, of.positions) if sampler.chooses_apart(of.rows) else None
    while at.size:
        sampled = (sampler.sample(_rows_at(logits_XV, at), of.rows[at], of.positions[at]) if apart is None
                   else apart.of(at))
        going_on = []
        for i, (row, token) in enumerate(zip(at.tolist(), sampled.tokens.tolist(), strict=True)):
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
        at = np.asarray(going_on, np.int64)
    verified.by_run.update((run, tuple(tokens)) for run, tokens in chosen.items())
    return verified


def _drafts(plan: StepPlan) -> dict[int, list[int]]:
    """The drafts of each verify run, PAD behind the last."""
    begin, drafts = plan.decode_count, {}
    for run, length in zip(plan.verify_runs, plan.lengths[plan.decode_count :].tolist(), strict=False):
        drafts[run] = [*plan.tokens[begin + 1 : begin + length].tolist(), PAD]
        begin += length
    return drafts


def _rows_at(logits_XV: torch.Tensor, at: Int64s) -> torch.Tensor:
    first, count = int(at[0]), len(at)
    if int(at[-1]) - first + 1 == count:
        return logits_XV[first : first + count]
    return logits_XV.index_select(0, torch.from_numpy(at).to(logits_XV.device))


def replay(runs: Runs, counts: Sequence[int]) -> None:
    """The states of the verify runs of ``runs`` after ``counts`` tokens each."""
    assert runs.log is not None, "a step without verify runs"
    at = slice(runs.decode_count, runs.decode_count + len(counts))
    runs.log.replay_filled(LoggedRuns([offset - runs.log.first for offset in runs.offsets[at]],
                                      runs.starts[at], list(counts), runs.slots[at]))
    if not runs.log.has_notes:
        return
    if len(counts) == 1:
        _replay_alone(runs, counts[0])
        return
    first = runs.decode_count
    order = sorted(range(len(counts)), key=lambda at: counts[at] > 1)
    verified = [first + at for at in order]
    lengths = [counts[at] for at in order]
    starts, slots = ([values[run] for run in verified] for values in (runs.starts, runs.slots))
    begins = [runs.offsets[run] - runs.log.first for run in verified]
    index = [begin + at for begin, length in zip(begins, lengths, strict=True) for at in range(length)]
    device = runs.slots_R.device

    def on_device(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    again = Runs(
        offsets=[sum(lengths[:at]) for at in range(len(lengths))], starts=starts, lengths=lengths,
        slots=slots, fresh=[False] * len(lengths), decode_count=sum(length == 1 for length in lengths),
        starts_R=on_device(starts), slots_R=on_device(slots),
        context_R=on_device([start + length for start, length in zip(starts, lengths, strict=True)]),
        page_table_RP=runs.page_table_RP.index_select(0, on_device(verified)))
    runs.log.replay(on_device(index), again)


def _replay_alone(runs: Runs, count: int) -> None:
    """The one verify run of ``runs``: its rows are in a row, so views do, and nothing is gathered."""
    assert runs.log is not None
    alone = slice(runs.decode_count, runs.decode_count + 1)
    runs.log.replay(slice(0, count), Runs(
        offsets=[0], starts=runs.starts[alone], lengths=[count], slots=runs.slots[alone], fresh=[False],
        decode_count=int(count == 1), starts_R=runs.starts_R[alone], slots_R=runs.slots_R[alone],
        context_R=runs.starts_R[alone] + count, page_table_RP=runs.page_table_RP[alone]))
