"""Prefill attention by FlashInfer, if requested, installed and applicable.

    debug.attention_backend weft         our own kernels: nothing to install, every shape (the default)
    debug.attention_backend flashinfer   for the shapes of ``fits``; our kernels for the others

    pages [P, kv_heads, 16, D], where they are ---+
    page ids, tokens of the last page of each run --+--> BatchPrefillWithPagedKVCacheWrapper --> o
    q of the prefill runs --------------------------+

Pages on a GPU are rows (``tensor.layout``), which the library calls HND, so it reads the arena in place.
Decodes always use our kernels. Gates are applied to its rounded output, one rounding more than in ours.

By default the library splits a context by the batch. The bits of a token's sums would then depend on the other
sequences. So splits are turned off: a tile of queries reads all of its context, as in our kernels. Among its kernels
only those for capability 9.0 ("fa3") have tiles that depend only on the head dim. The others take tiles by the mean
length of the batch's runs, and the smallest ones add up keys in another order: they are refused.

The library is not the default, and cannot be recorded in graphs. A graph would compute a single prompt by our kernels,
and a larger step the same prompt by the library: two orders of sums for one token. So with the library no step is
recorded.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from itertools import accumulate
from typing import Any, Literal

import torch

from weft.errors import ConfigError
from weft.tensor.device import recorded, wait_for
from weft.tensor.inputs import Runs
from weft.tensor.layout import k_rows, v_rows
from weft.units import PAD, PAGE_TOKENS, pages_for

Choice = Literal["weft", "flashinfer"]
HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16)
WORKSPACE_BYTES = 256 << 20
_MEMO = "prefill_backend"
_WHOLE = "disable_split_kv"
"""Name of the parameter that keeps a context undivided."""
_KERNELS = "fa3"
_CAPABILITY = (9, 0)

_library: Any = None
_planners: dict[tuple[object, ...], _Planner] = {}


def installed() -> bool:
    return importlib.util.find_spec("flashinfer") is not None


def choose(choice: Choice, capability: tuple[int, int] | None) -> None:
    """Choose for the entire process. ``capability``: of its GPU, None without one. Raises ConfigError for "flashinfer"
    on any GPU but those of ``_CAPABILITY``, or if it is not installed or fails to import.
    """
    global _library
    _planners.clear()
    _library = None
    if choice == "weft":
        return
    if capability != _CAPABILITY:
        own = "no GPU" if capability is None else f"a GPU of capability {capability[0]}.{capability[1]}"
        raise ConfigError(
            "debug.attention_backend is flashinfer, which needs capability 9.0, and this machine has "
            f"{own}: tokens would depend on the batch; use debug.attention_backend weft",
            param="debug.attention_backend",
        )
    if not installed():
        raise ConfigError(
            "debug.attention_backend is flashinfer, which is not installed; pip install "
            "flashinfer-python, or use debug.attention_backend weft",
            param="debug.attention_backend",
        )
    try:
        library = importlib.import_module("flashinfer")
    except Exception as error:  # the library finds no compiler, no driver, or another torch
        raise ConfigError(
            f"debug.attention_backend is flashinfer, which cannot be imported: {error}", param="debug.attention_backend"
        ) from error
    if _WHOLE not in inspect.signature(library.BatchPrefillWithPagedKVCacheWrapper.plan).parameters:
        raise ConfigError(
            f"debug.attention_backend is flashinfer, whose version has no {_WHOLE}: tokens "
            "would depend on the batch; pip install -U flashinfer-python, or use "
            "debug.attention_backend weft",
            param="debug.attention_backend",
        )
    _library = library


def fits(q_dtype: torch.dtype, page_dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether FlashInfer takes this shape: 16-bit pages in the dtype of the queries, and its head dims. Windows
    and gates fit; 8-bit pages do not, because their scales are weft's own.
    """
    return q_dtype in DTYPES and page_dtype == q_dtype and head_dim in HEAD_DIMS


def takes(q_THD: torch.Tensor, cache_k: torch.Tensor, runs: Runs) -> bool:
    """Return whether FlashInfer computes the prefill runs of this step."""
    if _library is None or PAD in runs.starts[runs.decode_count :]:
        return False
    return fits(q_THD.dtype, cache_k.dtype, q_THD.shape[2])


def attend(
    q_THD: torch.Tensor, cache_k: torch.Tensor, cache_v: torch.Tensor, runs: Runs, scale: float, window: int | None
) -> torch.Tensor:
    """Return [tokens of the prefill runs, heads, D]. A token sees the tokens of its sequence up to itself, at most the
    last ``window``.
    """
    key = (q_THD.device, q_THD.dtype, q_THD.shape[1], cache_k.shape[1], q_THD.shape[2], scale, window)
    planned = runs.memo.setdefault(_MEMO, {})
    if key not in planned:
        planned[key] = _planned(q_THD, cache_k, runs, scale, window, key)
    attended = planned[key].run(q_THD[runs.offsets[runs.decode_count] :], (k_rows(cache_k), v_rows(cache_v)))
    assert isinstance(attended, torch.Tensor)
    return attended


class _Planner:
    """Planner with two wrappers in turn, for layers of one shape. They share a workspace: runs are in the order of one
    stream.
    """

    # Two wrappers, because a plan is in a pinned buffer of its wrapper and is copied asynchronously: planning again
    # during the copy would overwrite the source.

    def __init__(self, device: torch.device) -> None:
        self._device = device
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrappers = [
            _library.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND", backend=_KERNELS) for _ in range(2)
        ]
        self._copied: list[Any] = [None, None]
        self._turn = 0

    def plan(self, **shapes: Any) -> Any:
        """Return the wrapper of this step, planned."""
        self._turn = turn = 1 - self._turn
        # Wait for the copy of the step before the last, which has almost always ended.
        if self._copied[turn] is not None:
            wait_for(self._copied[turn])
        self._wrappers[turn].plan(**shapes)
        self._copied[turn] = recorded(self._device)
        return self._wrappers[turn]


def _planned(
    q_THD: torch.Tensor, cache_k: torch.Tensor, runs: Runs, scale: float, window: int | None, key: tuple[object, ...]
) -> Any:
    if key not in _planners:
        _planners[key] = _Planner(q_THD.device)
    lengths, starts = runs.lengths[runs.decode_count :], runs.starts[runs.decode_count :]
    contexts = [start + length for start, length in zip(starts, lengths, strict=True)]
    counts = [pages_for(context) for context in contexts]
    ids = torch.cat([row[:count] for row, count in zip(runs.page_table_RP[runs.decode_count :], counts, strict=True)])
    last = [context - (count - 1) * PAGE_TOKENS for context, count in zip(contexts, counts, strict=True)]
    return _planners[key].plan(
        qo_indptr=_begins(lengths),
        paged_kv_indptr=_begins(counts),
        paged_kv_indices=ids,
        paged_kv_last_page_len=torch.tensor(last, dtype=torch.int32),
        num_qo_heads=q_THD.shape[1],
        num_kv_heads=cache_k.shape[1],
        head_dim_qk=q_THD.shape[2],
        page_size=PAGE_TOKENS,
        causal=True,
        window_left=-1 if window is None else window - 1,
        sm_scale=scale,
        q_data_type=q_THD.dtype,
        kv_data_type=cache_k.dtype,
        disable_split_kv=True,
    )


def _begins(counts: list[int]) -> torch.Tensor:
    """Return int32 [N + 1], on the host, where FlashInfer's planner reads it."""
    return torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
