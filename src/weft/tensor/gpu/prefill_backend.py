"""Attention of prompts by FlashInfer, where it is asked for, installed, and fits.

    --attention-backend weft         our own kernels: nothing to install, every shape         (the default)
    --attention-backend flashinfer   by the table; what it does not list stays with ours

    pages of 16 bits --gather--> k, v [rows, kv_heads, D] --\\
    q of the prefill runs ----------------------------------+--> BatchPrefillWithRaggedKVCacheWrapper --> o

Decodes stay with our kernels. Packed pages fit no layout that FlashInfer has (NHD or HND: keys lie transposed
here, and values in pairs), so its paged wrapper could be given none of them; the ragged one takes what a copy
makes of them (``gather_kernels``). Gates are applied to what comes back, which is rounded by then: once more
than in our own kernels.

It is not the default, because it cuts a context into pieces by the batch: what a token's sums are, to the
last bit, then depends on its company, and a prefix computed again need not be the one that was cached.

A plan is made once a step for each shape of layer, from lists of the host. Nothing waits for the device.
"""

from __future__ import annotations

import importlib
import importlib.util
from itertools import accumulate
from typing import Any, Literal

import torch

from weft.errors import ConfigError
from weft.tensor.inputs import Runs
from weft.units import PAD

Choice = Literal["weft", "flashinfer"]
HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16)
WORKSPACE_BYTES = 256 << 20
_MEMO = "prefill_backend"

_library: Any = None
_wrappers: dict[tuple[object, ...], Any] = {}


def installed() -> bool:
    return importlib.util.find_spec("flashinfer") is not None


def choose(choice: Choice) -> None:
    """For the whole process. Raises ConfigError for "flashinfer" where it is not installed or cannot be
    imported."""
    global _library
    _wrappers.clear()
    _library = None
    if choice == "weft":
        return
    if not installed():
        raise ConfigError("--attention-backend is flashinfer, which is not installed; pip install "
                          "flashinfer-python, or use --attention-backend weft", param="--attention-backend")
    try:
        _library = importlib.import_module("flashinfer")
    except Exception as error:  # of a library that finds no compiler, no driver, another torch
        raise ConfigError(f"--attention-backend is flashinfer, which cannot be imported: {error}",
                          param="--attention-backend") from error


def fits(q_dtype: torch.dtype, page_dtype: torch.dtype, head_dim: int) -> bool:
    """The table: pages in the dtype of the queries, 16 bits, and the head dims that FlashInfer is built for.
    Windows and gates fit; what is kept in 8 bits does not, as its scales are ours."""
    return q_dtype in DTYPES and page_dtype == q_dtype and head_dim in HEAD_DIMS


def takes(q_THD: torch.Tensor, cache_k: torch.Tensor, runs: Runs) -> bool:
    """Whether the prefill runs of this step go to it."""
    if _library is None or PAD in runs.starts[runs.decode_count:]:
        return False
    return fits(q_THD.dtype, cache_k.dtype, q_THD.shape[2])


def attend(q_THD: torch.Tensor, k_CHD: torch.Tensor, v_CHD: torch.Tensor, runs: Runs, scale: float,
           window: int | None) -> torch.Tensor:
    """[tokens of the prefill runs, heads, D]. ``k_CHD``, ``v_CHD``: the contexts of those runs, one behind
    the other. A token sees what is not behind it, of the last ``window`` places."""
    key = (q_THD.device, q_THD.dtype, q_THD.shape[1], *k_CHD.shape[1:], scale, window)
    planned = runs.memo.setdefault(_MEMO, {})
    if key not in planned:
        planned[key] = _planned(q_THD, k_CHD, runs, scale, window, key)
    attended = planned[key].run(q_THD[runs.offsets[runs.decode_count]:], k_CHD, v_CHD)
    assert isinstance(attended, torch.Tensor)
    return attended


def _planned(q_THD: torch.Tensor, k_CHD: torch.Tensor, runs: Runs, scale: float, window: int | None,
             key: tuple[object, ...]) -> Any:
    if key not in _wrappers:
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=q_THD.device)
        _wrappers[key] = _library.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
    lengths, starts = runs.lengths[runs.decode_count:], runs.starts[runs.decode_count:]
    contexts = [start + length for start, length in zip(starts, lengths, strict=True)]
    _wrappers[key].plan(
        qo_indptr=_begins(lengths), kv_indptr=_begins(contexts), num_qo_heads=q_THD.shape[1],
        num_kv_heads=k_CHD.shape[1], head_dim_qk=q_THD.shape[2], causal=True,
        window_left=-1 if window is None else window - 1, sm_scale=scale, q_data_type=q_THD.dtype,
        kv_data_type=k_CHD.dtype)
    return _wrappers[key]


def _begins(counts: list[int]) -> torch.Tensor:
    """int32 [N + 1], on the host, where its planner reads them."""
    return torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
