"""What a step costs on a device that is not here: a pure function of the work in it.

    work of a step      prefill tokens, (query, key) pairs of their attention, decodes, tokens that these read

    roofline            fixed + max( arithmetic: tokens x token_s + pairs x pair_s,
                                     traffic:    weights + KV read + states read and written )
    fitted              fixed + a x prefill tokens + b x pairs + c x decodes + d x context

    moved in the arena  bytes that are read and written before anything is computed / bandwidth     (roofline)

Both are linear + quadratic in the length of a prompt, as attention is, and say so as ``prefill_s``: the
seconds that a hit saves, and the currency in which what the cache holds is valued.

The roofline is that of the published comparisons of this trace: a share of peak FLOP/s, a share of the memory
bandwidth, and a fixed time per step for all that is neither. Arithmetic is 2 FLOP per active parameter and
token, and 4 x heads x head_dim per pair and attention layer. A step reads the weights outside the experts
whole, and of the experts those that at least one of its tokens is expected to choose.

The bytes that a step compresses, restores and copies (``ArenaWork.moved_bytes``) are read and written by
kernels of their own, in front of the others. So their seconds come on top. A fit has no number for them: the
steps it was fitted to had theirs in their times. """

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

from weft.errors import ConfigError
from weft.schedule.work import Work, pairs_of


class CostModel(Protocol):
    def step_s(self, work: Work) -> float:
        """Seconds of a step."""
        ...

    def moved_s(self, moved: int) -> float:
        """Seconds that a step is longer for ``moved`` bytes read or written in the arena of one device."""
        ...

    def prefill_s(self, start: int, end: int) -> float:
        """Seconds that computing positions [start, end) of a prompt adds to whatever else is done."""
        ...

    def to_json(self) -> dict[str, Any]:
        """Kind and numbers, for the report."""
        ...


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator: dense peak FLOP/s by width of the weights, bytes/s of its memory (vendors' data
    sheets)."""

    name: str
    flops_16: float
    flops_8: float
    memory_bytes_s: float


DEVICES = {device.name.lower(): device for device in (
    Device("A100", 312e12, 312e12, 2.039e12),
    Device("L40S", 362e12, 733e12, 0.864e12),
    Device("L4", 121e12, 242e12, 0.3e12),
    Device("H100", 989e12, 1979e12, 3.35e12),
    Device("H200", 989e12, 1979e12, 4.8e12),
    Device("B200", 2250e12, 4500e12, 8.0e12),
    Device("RTX4090", 165e12, 330e12, 1.008e12),
)}

FLOPS_SHARE = 0.4
BANDWIDTH_SHARE = 0.7
STEP_FIXED_S = 5e-3


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """What a model asks of a device, all ranks together. ``dense_params``: read whole in each step;
    ``expert_params``: of all routed experts, of which a token uses ``expert_share``. ``pair_flops``:
    arithmetic of one (query, key) pair over all attention layers. ``kv_bytes`` a token, ``state_bytes`` a
    sequence."""

    dense_params: float
    expert_params: float
    expert_share: float
    pair_flops: float
    kv_bytes: float
    state_bytes: float
    weight_bytes: float = 1.0
    eight_bit: bool = True
    """Products are computed at the rate of 8-bit numbers."""

    @property
    def active_params(self) -> float:
        return self.dense_params + self.expert_params * self.expert_share


@dataclass(frozen=True, slots=True)
class Roofline:
    """Seconds by kind of work; made by ``roofline``."""

    name: str
    fixed_s: float
    token_s: float
    pair_s: float
    dense_s: float
    experts_s: float
    expert_share: float
    kv_token_s: float
    state_s: float
    byte_s: float = 0.0
    """Of one device, for a byte that it reads or writes."""

    def step_s(self, work: Work) -> float:
        tokens = work.prefill_tokens + work.decodes
        arithmetic = tokens * self.token_s + (work.pairs + work.context) * self.pair_s
        traffic = (self.dense_s + self.experts_s * (1.0 - (1.0 - self.expert_share) ** tokens)
                   + work.context * self.kv_token_s + work.decodes * self.state_s)
        return self.fixed_s + max(arithmetic, traffic)

    def moved_s(self, moved: int) -> float:
        return moved * self.byte_s

    def prefill_s(self, start: int, end: int) -> float:
        return (end - start) * self.token_s + pairs_of(start, end) * self.pair_s

    def to_json(self) -> dict[str, Any]:
        return {"kind": "roofline", **asdict(self)}


def roofline(load: ModelLoad, device: str, *, count: int, flops_share: float = FLOPS_SHARE,
             bandwidth_share: float = BANDWIDTH_SHARE, fixed_s: float = STEP_FIXED_S) -> Roofline:
    """``count`` accelerators of the name ``device`` side by side. Raises ConfigError that lists the names."""
    accelerator = DEVICES.get(device.lower())
    if accelerator is None:
        names = ", ".join(one.name for one in DEVICES.values())
        raise ConfigError(f"--device {device!r} is not in the table: it has {names}; or fit the times of a "
                          "running engine with --fit", param="--device")
    flops = count * flops_share * (accelerator.flops_8 if load.eight_bit else accelerator.flops_16)
    traffic = count * bandwidth_share * accelerator.memory_bytes_s
    return Roofline(
        name=f"{count} x {accelerator.name}", fixed_s=fixed_s,
        token_s=2 * load.active_params / flops, pair_s=load.pair_flops / flops,
        dense_s=load.dense_params * load.weight_bytes / traffic,
        experts_s=load.expert_params * load.weight_bytes / traffic, expert_share=load.expert_share,
        kv_token_s=load.kv_bytes / traffic, state_s=2 * load.state_bytes / traffic,
        byte_s=1 / (bandwidth_share * accelerator.memory_bytes_s))


@dataclass(frozen=True, slots=True)
class Fitted:
    """Seconds by kind of work, none of them negative; made by ``fit_steps``. ``error``: median relative error
    of the steps it was fitted to."""

    fixed_s: float
    token_s: float
    pair_s: float
    decode_s: float
    context_s: float
    error: float = 0.0
    steps: int = 0

    def step_s(self, work: Work) -> float:
        return (self.fixed_s + work.prefill_tokens * self.token_s + work.pairs * self.pair_s
                + work.decodes * self.decode_s + work.context * self.context_s)

    def moved_s(self, moved: int) -> float:
        return 0.0

    def prefill_s(self, start: int, end: int) -> float:
        return (end - start) * self.token_s + pairs_of(start, end) * self.pair_s

    def to_json(self) -> dict[str, Any]:
        return {"kind": "fitted", **asdict(self)}


STEPS_TO_FIT_MIN = 8


def fit_steps(steps: Sequence[tuple[Work, float]], *, name: str = "the recording") -> Fitted:
    """Least squares of the relative error, without negative terms: what would be negative is left out, the
    worst first, and the rest fitted again. Raises ConfigError where there is too little to fit."""
    timed = [(work, seconds) for work, seconds in steps if seconds > 0]
    if len(timed) < STEPS_TO_FIT_MIN:
        raise ConfigError(f"{name} has the times of {len(timed)} steps; a fit needs {STEPS_TO_FIT_MIN} at "
                          "least", param="--fit")
    seconds = np.asarray([one for _, one in timed])
    features = np.asarray([(1, *work) for work, _ in timed], dtype=np.float64)
    scale = np.maximum(np.abs(features).max(axis=0), 1.0)
    rows = features / scale / seconds[:, None]
    columns = [column for column in range(features.shape[1]) if features[:, column].any()]
    while True:
        solution, *_ = np.linalg.lstsq(rows[:, columns], np.ones(len(timed)), rcond=None)
        if solution.min() >= 0 or len(columns) == 1:
            break
        del columns[int(solution.argmin())]
    terms = np.zeros(features.shape[1])
    terms[columns] = np.maximum(solution, 0) / scale[columns]
    error = float(np.median(np.abs(features @ terms - seconds) / seconds))
    fixed_s, token_s, pair_s, decode_s, context_s = terms.tolist()
    return Fitted(fixed_s, token_s, pair_s, decode_s, context_s, error, len(timed))
