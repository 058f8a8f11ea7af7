"""FlashInfer for prompts: which calls go to it, and that it is handed what it documents, in its order.

It runs on a GPU alone, so a stand-in with the documented signatures takes its place, and computes with plain
torch from nothing but what it was given.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.gpu.steps import on_device, pages_on
from tests.gpu.tolerances import close
from tests.ops.batches import PAD_ROW, Run, make_runs, tokens_in
from tests.ops.kv_pages import filled_pages
from tests.support import naive_ops
from weft.errors import ConfigError
from weft.tensor.gpu import prefill_backend
from weft.tensor.gpu.softmax import Gates
from weft.tensor.kernels import paged_attention as triton

SCALE = 0.11
HOPPER = (9, 0)


class Paged:
    """``flashinfer.BatchPrefillWithPagedKVCacheWrapper``, version 0.3 on."""

    plans = 0

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", *, backend: str = "auto") -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert backend == "fa3", "others take tiles by the mean length of the batch's runs"
        self.device = float_workspace_buffer.device
        self.layout = kv_layout

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Any = None,
        packed_custom_mask: Any = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        non_blocking: bool = True,
        disable_split_kv: bool = False,
    ) -> None:
        assert disable_split_kv, "bits would depend on the batch"
        for one in (qo_indptr, paged_kv_indptr, paged_kv_last_page_len):
            assert one.dtype == torch.int32
            assert one.device.type == "cpu", "its planner reads it on the host"
        assert paged_kv_indices.dtype == torch.int32
        assert paged_kv_indices.device == self.device
        assert len(paged_kv_indices) == int(paged_kv_indptr[-1])
        assert ((paged_kv_last_page_len >= 1) & (paged_kv_last_page_len <= page_size)).all()
        assert causal
        assert pos_encoding_mode == "NONE"
        self.asked = SimpleNamespace(**{name: value for name, value in locals().items() if name != "self"})
        Paged.plans += 1

    def run(self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        asked = self.asked
        assert self.layout == "HND"
        k, v = paged_kv_cache
        assert k.stride() == v.stride(), "one set of strides serves both"
        assert k.stride(3) == q.stride(2) == 1
        assert q.shape[1:] == (asked.num_qo_heads, asked.head_dim_qk)
        assert k.shape == v.shape
        assert k.shape[1:] == (asked.num_kv_heads, asked.page_size, asked.head_dim_qk)
        assert q.dtype == asked.q_data_type
        assert k.dtype == asked.kv_data_type
        q_at, page_at = asked.qo_indptr.tolist(), asked.paged_kv_indptr.tolist()
        assert q_at[-1] == len(q)
        made = []
        for run, last in enumerate(asked.paged_kv_last_page_len.tolist()):
            ids = asked.paged_kv_indices[page_at[run] : page_at[run + 1]].long()
            context = (len(ids) - 1) * asked.page_size + last
            ours = q[q_at[run] : q_at[run + 1]].float()
            keys, values = (
                x[ids]
                .transpose(1, 2)
                .flatten(0, 1)[:context]
                .float()
                .repeat_interleave(asked.num_qo_heads // asked.num_kv_heads, dim=1)
                for x in (k, v)
            )
            scores = torch.einsum("qhd,khd->hqk", ours, keys) * asked.sm_scale
            key, query = (torch.arange(len(x), device=q.device) for x in (keys, ours))
            place = key - (len(keys) - len(ours) + query[:, None])
            hidden = place > 0
            if asked.window_left >= 0:
                hidden |= place < -asked.window_left
            weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
            made.append(torch.einsum("hqk,khd->qhd", weights, values))
        return torch.cat(made).to(q.dtype)


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Paged]]:
    module: Any = ModuleType("flashinfer")
    module.__spec__ = importlib.util.spec_from_loader("flashinfer", None)
    module.BatchPrefillWithPagedKVCacheWrapper = Paged
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(Paged, "plans", 0)
    prefill_backend.choose("flashinfer", HOPPER)
    yield Paged
    prefill_backend.choose("weft", None)


def noise(*shape: int, seed: int = 3, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(
    ("dtype", "dim", "window", "gated"),
    [(torch.bfloat16, 64, None, True), (torch.float16, 128, 20, False), (torch.bfloat16, 256, None, False)],
)
def test_prompts_go_to_it_and_decodes_do_not(
    flashinfer: type[Paged], device: torch.device, dtype: torch.dtype, dim: int, window: int | None, gated: bool
) -> None:
    """Contexts that begin in the middle of a page, one that is new, one token alone, beside decodes."""
    runs = make_runs([Run(70), PAD_ROW], [Run(20, 30), Run(0, 65), Run(16, 1)], pages=20)
    pages, q = filled_pages(runs, 20, 2, dim, dtype), noise(tokens_in(runs), 6, dim, dtype=dtype)
    gates = (
        Gates(noise(len(q), 6 * dim, seed=4, dtype=dtype).to(device), noise(len(q), 6, seed=5, dtype=dtype).to(device))
        if gated
        else None
    )
    there, ours = pages_on(pages, device), on_device(runs, device)
    for _ in range(2):  # one plan for all layers of a step
        got = triton.attend(q.to(device), there.k, there.v, ours, SCALE, window, gates=gates).cpu()
    assert flashinfer.plans == 1
    want = naive_ops.paged_attention(q, pages.k, pages.v, runs, SCALE, window)
    if gates is not None and gates.gate_TC is not None and gates.head_gate_TH is not None:
        want = want.float() * gates.gate_TC.cpu().view(want.shape).float().sigmoid()
        want *= gates.head_gate_TH.cpu()[:, :, None].float().sigmoid()
    # Rounded before the gates once more than our own kernels do.
    torch.testing.assert_close(got.float(), want.float(), atol=2e-3, rtol=2e-2)
    # The control: the page of another run is seen.
    ours.page_table_RP[2, 0] = ours.page_table_RP[3, 0]
    ours.memo.clear()
    other = triton.attend(q.to(device), there.k, there.v, ours, SCALE, window, gates=gates).cpu()
    assert (other.float() - want.float()).abs().max() > 0.1


@pytest.mark.parametrize(
    ("q_dtype", "page_dtype", "dim", "fits"),
    [
        (torch.bfloat16, torch.bfloat16, 128, True),
        (torch.float16, torch.float16, 64, True),
        (torch.bfloat16, torch.float8_e4m3fn, 128, False),
        (torch.bfloat16, torch.int8, 128, False),
        (torch.float32, torch.float32, 128, False),
        (torch.bfloat16, torch.float16, 128, False),
        (torch.bfloat16, torch.bfloat16, 80, False),
        (torch.bfloat16, torch.bfloat16, 512, False),
    ],
)
def test_the_table_lists_what_fits(q_dtype: torch.dtype, page_dtype: torch.dtype, dim: int, fits: bool) -> None:
    assert prefill_backend.fits(q_dtype, page_dtype, dim) == fits


def test_what_does_not_fit_stays_with_our_kernels(flashinfer: type[Paged], device: torch.device) -> None:
    runs = make_runs([], [Run(20, 30), PAD_ROW], pages=10)
    for dtype, dim in ((torch.float32, 64), (torch.bfloat16, 64)):  # by its dtype; by a row that is PAD
        pages, q = filled_pages(runs, 10, 2, dim, dtype), noise(tokens_in(runs), 4, dim, dtype=dtype)
        there = pages_on(pages, device)
        got = triton.paged_attention(q.to(device), there.k, there.v, on_device(runs, device), SCALE).cpu()
        want = naive_ops.paged_attention(q, pages.k, pages.v, runs, SCALE)
        torch.testing.assert_close(got, want, **close(dtype))
    assert flashinfer.plans == 0


def test_it_is_an_error_to_ask_for_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_backend, "installed", lambda: False)
    with pytest.raises(ConfigError, match=r"debug\.attention_backend is flashinfer, which is not installed"):
        prefill_backend.choose("flashinfer", HOPPER)
    prefill_backend.choose("weft", None)


@pytest.mark.parametrize(
    ("capability", "named"), [(None, "no GPU"), ((8, 0), "capability 8.0"), ((10, 0), "capability 10.0")]
)
def test_a_gpu_on_which_its_tiles_follow_the_batch_is_an_error(
    flashinfer: type[Paged], capability: tuple[int, int] | None, named: str
) -> None:
    with pytest.raises(ConfigError, match=rf"needs capability 9\.0, and this machine has .*{named}"):
        prefill_backend.choose("flashinfer", capability)


def test_a_version_whose_splits_follow_the_batch_is_an_error(
    flashinfer: type[Paged], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flashinfer, "plan", lambda self, qo_indptr: None)
    with pytest.raises(ConfigError, match="whose version has no disable_split_kv"):
        prefill_backend.choose("flashinfer", HOPPER)


class LateCopies:
    """Events and copies of a device that lags behind: a plan is read from its wrapper's pinned buffer when
    the host waits for the event behind the copy, and not before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.under_way: dict[int, list[int]] = {}
        monkeypatch.setattr(prefill_backend, "recorded", lambda device: self.last)
        monkeypatch.setattr(prefill_backend, "wait_for", self.under_way.pop)
        plan = Paged.plan

        def planned(wrapper: Paged, qo_indptr: torch.Tensor, **shapes: Any) -> None:
            self.last = id(wrapper)
            assert self.last not in self.under_way, "this buffer is still being copied"
            self.under_way[self.last] = qo_indptr.tolist()
            plan(wrapper, qo_indptr=qo_indptr, **shapes)

        monkeypatch.setattr(Paged, "plan", planned)


def test_a_plan_does_not_overwrite_the_one_that_is_on_its_way(
    flashinfer: type[Paged], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = LateCopies(monkeypatch)
    for length in (30, 20, 10, 5):
        runs = make_runs([], [Run(0, length)], pages=4)
        pages, q = filled_pages(runs, 4, 2, 64, torch.bfloat16), noise(length, 4, 64)
        on_it = pages_on(pages, device)
        triton.paged_attention(q.to(device), on_it.k, on_it.v, on_device(runs, device), SCALE)
    assert flashinfer.plans == 4
    assert sorted(late.under_way.values()) == [[0, 5], [0, 10]], "two are under way, and two were waited for"
