"""The C++ kernels (``weft._native``): their availability, and the passing of tensors to them.

The extension is optional: an install without a compiler works without it. ``choose("auto" | "native" |
"torch")`` decides for the process; the start-up line prints ``describe()``.

The C++ form of an op checks dtypes, shapes and strides before the call, and keeps the tensors alive during the call;
the C++ side checks nothing. The checks of each kind of argument are here once: ``rows_of``, ``slots_of``, ``pages_of``
and so on. The kernels have their own thread pool (``csrc/pool.hpp``), as large as torch's.

Tensors cross as integers (address, strides).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from weft.errors import ConfigError
from weft.tensor import gpu
from weft.tensor.adapter_rows import RowGroups, number_of
from weft.tensor.inputs import Runs, StepInputs
from weft.tensor.replay_log import Replay
from weft.units import PAD

INTERFACE = 29
"""Version of the calling convention; equals INTERFACE in csrc/module.cpp."""
NO_MINIMUMS = (0, 0, 0, 0, 0, False, 0)
"""Argument for a weight without minimums, numbers in bytes, tables and order: ``MinimumsTuple`` of csrc/module.cpp."""
REBUILD = "pip install --force-reinstall --no-deps -e ."
"""Command that rebuilds the kernels, run in the checkout."""


@dataclass(frozen=True, slots=True)
class NativeModule:
    """The extension. ``extension`` is None if it cannot be used: ``missing`` says why, and ``stale`` whether a build
    from other sources is installed.
    """

    extension: Any
    missing: str | None = None
    stale: bool = False


def load(find: Callable[[], Any]) -> NativeModule:
    """Return the module that ``find`` imports, if it was built for this ``INTERFACE``."""
    try:
        extension = find()
    except ImportError as error:
        return NativeModule(None, str(error))
    built = getattr(extension, "INTERFACE", 0)
    # A build of other sources would read memory by other rules.
    if built == INTERFACE:
        return NativeModule(extension)
    age = "older" if built < INTERFACE else "newer"
    return NativeModule(
        None,
        f"they were built from {age} sources (interface {built}, this weft has "
        f"{INTERFACE}); rebuild them with `{REBUILD}`",
        stale=True,
    )


def _import() -> Any:
    from weft import _native

    return _native


_module = load(_import)
_extension, MISSING, STALE = _module.extension, _module.missing, _module.stale
if STALE:
    logging.getLogger("weft").warning("the C++ kernels are not used: %s", MISSING)

Choice = Literal["auto", "native", "torch"]
DTYPES: dict[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1}
"""Dtypes of the kernels' inputs -> their number in csrc/kernels.hpp."""
KV_DTYPES: dict[torch.dtype, int] = DTYPES | {torch.float16: 2, torch.float8_e4m3fn: 3, torch.int8: 4}
"""Dtypes of pages."""
STATE_DTYPES: dict[torch.dtype, int] = DTYPES | {torch.float16: 2}
"""Dtypes of recurrent states."""
LANES = 16
"""Channels of one vector: dims must be multiples of it."""
SOFTMAX_COLUMNS_MAX = 1 << 14
"""Most columns of a row of softmax in C++."""
KERNEL_MAX = 8
"""Largest kernel of a convolution in C++."""
KEY_DIM_MAX = 256
"""Largest key dim of the delta rule in C++, and of one tile in the Triton kernels."""
STATE_DIM_MAX = 256
"""Largest N of Mamba in C++, and of one tile in the Triton kernels."""

_in_use = _extension is not None


def choose(choice: Choice) -> None:
    """Choose for the entire process. Raises ConfigError for "native" where the extension was not built."""
    global _in_use
    if choice == "native" and _extension is None:
        what = (
            f"the C++ kernels cannot be used: {MISSING}"
            if STALE
            else f"weft was installed without its C++ kernels ({MISSING}); install a C++ compiler and reinstall weft"
        )
        raise ConfigError(
            f"debug.cpu_kernels is native, but {what}, or use debug.cpu_kernels auto", param="debug.cpu_kernels"
        )
    _in_use = _extension is not None and choice != "torch"


def in_use() -> bool:
    return _in_use


MATRIX_UNITS = ("none", "AMX", "software")
"""Names by their number in csrc/matrix_unit.hpp. ``software`` is AMX in plain C++, for tests."""


def matrix_unit() -> str:
    """Return the unit that multiplies tiles of many rows; ``none`` without the kernels too."""
    return MATRIX_UNITS[extension().matrix_unit()] if _in_use else "none"


def use_matrix_unit(name: str) -> bool:
    """Choose the unit for the entire process. Return False, and change nothing, if the unit cannot be used."""
    return bool(extension().use_matrix_unit(MATRIX_UNITS.index(name)))


def matrix_units() -> list[str]:
    """Return the units that can be used here."""
    return [name for name in MATRIX_UNITS if name != "AMX" or not extension().amx_missing()]


def amx_report() -> str:
    """Return ``weft doctor``'s line about the unit: whether its kernels run here, and otherwise the reason."""
    missing = extension().amx_missing()
    if missing:
        return f"no matrix unit: {missing}"
    order = "sums as the vector kernels" if extension().follows_manual() else "with sums of its own order"
    return f"AMX, {order}"


def describe() -> str:
    """Return the kernels in words: ``native (x86_64_v4)``, or ``torch`` with the reason."""
    if _in_use:
        unit = matrix_unit()
        return f"native ({extension().instruction_set()}{'' if unit == 'none' else f' and {unit}'})"
    if _extension is not None:
        return "torch"
    return f"torch (the C++ kernels {'are of other sources' if STALE else 'were not built'})"


def set_threads(count: int) -> None:
    """Set the threads of a kernel, the caller's included."""
    if _extension is not None:
        _extension.set_threads(count)


def extension() -> Any:
    assert _extension is not None
    return _extension


def fits(first: torch.Tensor, *others: torch.Tensor) -> bool:
    """Return whether the kernels are in use and can read these tensors: all of one supported dtype, on the CPU."""
    # Interpreted Triton kernels serve the CPU too, and their pages have another layout.
    if not (_in_use and first.dtype in DTYPES and first.is_cpu) or gpu.interpreting():
        return False
    return all(other.dtype == first.dtype for other in others) if others else True


def rows_of(x_THD: torch.Tensor) -> tuple[int, int, int, int]:
    """Return the arguments of ``[T, H, D]`` with dense rows of D, any other strides: address, token stride, head
    stride, dtype.
    """
    assert x_THD.stride(-1) == 1 or x_THD.shape[-1] == 1, f"rows of stride {x_THD.stride()} are not dense"
    return x_THD.data_ptr(), x_THD.stride(0), x_THD.stride(1), DTYPES[x_THD.dtype]


def plain_rows_of(x_TC: torch.Tensor) -> tuple[int, int, int, int]:
    """Return the arguments of ``[T, C]`` with dense rows: C heads of one number each."""
    stride, inner = x_TC.stride()
    assert inner == 1 or x_TC.shape[1] == 1, f"rows of stride {inner} are not dense"
    return x_TC.data_ptr(), stride, 1, DTYPES[x_TC.dtype]


def projected_of(x_TW: torch.Tensor) -> tuple[int, int, int, int]:
    """Return the arguments of ``[T, W]`` with dense rows: address, row stride, tokens, dtype."""
    stride, inner = x_TW.stride()
    assert inner == 1, f"rows of stride {inner} are not dense"
    return x_TW.data_ptr(), stride, x_TW.shape[0], DTYPES[x_TW.dtype]


def weight_of(weight: torch.Tensor) -> tuple[int, int]:
    """Return the address and dtype of a dense weight."""
    assert weight.is_contiguous()
    return weight.data_ptr(), DTYPES[weight.dtype]


def angles_of(cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of the rotary tables."""
    assert cos_TD.dtype == sin_TD.dtype == torch.float32
    assert cos_TD.is_contiguous()
    assert sin_TD.is_contiguous()
    return cos_TD.data_ptr(), sin_TD.data_ptr()


def slots_of(state: torch.Tensor) -> tuple[int, int, int]:
    """Return the address, slot stride, dtype of a state's view over the arena."""
    return state.data_ptr(), slot_stride(state), STATE_DTYPES[state.dtype]


def pages_of(cache: torch.Tensor) -> tuple[int, int, int]:
    """Return the address, page stride, dtype of the K or V pages of a layer."""
    return cache.data_ptr(), slot_stride(cache), KV_DTYPES[cache.dtype]


def page_table_of(runs: Runs) -> tuple[int, int]:
    """Return the address and row stride of the step's page table."""
    table = runs.page_table_RP
    row, column = table.stride()
    assert table.dtype == torch.int32
    assert column == 1
    return table.data_ptr(), row


def slot_stride(state: torch.Tensor) -> int:
    """Return the elements from one slot to the next; the part inside a slot must be dense."""
    strides = state.stride()
    assert _dense(tuple(state.shape), strides), f"a state of strides {strides} is not dense in its slot"
    return strides[0]


@functools.lru_cache(maxsize=1024)
def _dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    dense = 1
    for size, stride in zip(reversed(shape[1:]), reversed(strides[1:]), strict=True):
        if size != 1 and stride != dense:
            return False
        dense *= size
    return True


def address_of(x: torch.Tensor | None) -> int:
    """Return the address of ``x``, 0 for None."""
    return 0 if x is None else x.data_ptr()


def token_scales(scales: torch.Tensor | None) -> tuple[int, int, int]:
    """Return the address of bfloat16 [P, 2, H, 16], the page stride and the stride from K to V, in elements; zeros for
    None.
    """
    if scales is None:
        return 0, 0, 0
    assert scales.dtype == torch.bfloat16
    return scales.data_ptr(), slot_stride(scales), scales.stride(1)


def output_runs_of(inputs: StepInputs) -> Any:
    """Return the runs of ``inputs.output_rows`` with one token each, the others with none; all runs if it is None."""
    output_rows, runs = inputs.output_rows, inputs.runs
    if output_rows is None:
        return runs_of(runs)
    known = runs.memo.get("native.output_runs")
    if known is None:
        wanted = [0] * runs.run_count
        for run in output_rows.runs:
            wanted[run] = 1
        lasts = [length - count for length, count in zip(runs.lengths, wanted, strict=True)]
        known = runs.memo["native.output_runs"] = extension().Runs(
            *(
                [first + last for first, last in zip(firsts, lasts, strict=True)]
                for firsts in (runs.offsets, runs.starts)
            ),
            wanted,
            runs.slots,
            runs.fresh,
            [],
        )
    return known


def runs_of(runs: Runs) -> Any:
    """Return the step's runs as a C++ object, built once per step."""
    known = runs.memo.get("native.runs")
    if known is None:
        taps = sorted((tap.run, tap.offset, tap.slot) for tap in runs.taps if tap.slot != PAD)
        known = runs.memo["native.runs"] = extension().Runs(
            runs.offsets, runs.starts, runs.lengths, runs.slots, runs.fresh, taps
        )
        if runs.verify_count:
            known.windows(runs.decode_count, runs.verify_count)
    return known


def adapter_rows_of(whose: RowGroups) -> Any:
    """Return the step's rows of adapters as a C++ object, built once for each count of rows."""
    known = whose.memo.get("native")
    if known is None:
        known = whose.memo["native"] = extension().AdapterRows(
            [(number_of(group.digest), group.numbers) for group in whose.groups]
        )
    return known


def log_projected(
    runs: Runs, window_SCW: torch.Tensor, width: int, gate: tuple[int, int], dtype: torch.dtype, replay: Replay
) -> None:
    """Let the layer of ``window_SCW`` copy ``width`` columns of its projection into the step's log, if it has
    one. ``gate``: the first of the other columns, and how many. They gate the output and reach no state."""
    if runs.log is not None:
        room = runs.log.room(replay, width, dtype)
        first, count = gate
        runs_of(runs).log(
            window_SCW.data_ptr(),
            room.data_ptr(),
            width * dtype.itemsize,
            first * dtype.itemsize,
            count * dtype.itemsize,
        )
