"""A row does not depend on its company: alone, as row i of 2 to 16, as a decode or inside a verify run.

Speculation stands on this (docs/speculation.md): the row of a draft must be the row of the decode that it
replaces, to the last bit. It holds for every product and every attention of the C++ kernels, in each
instruction set. It does not hold for torch's own products: the last test names one.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tests.ops.batches import Run, make_runs
from tests.ops.kv_pages import KV_DTYPES, Pages, filled_pages
from tests.ops.quantised import noise, weight
from tests.ops.test_native import in_each_set
from tests.support import native_ops
from weft.tensor import native
from weft.tensor.inputs import Runs
from weft.tensor.ops import linear
from weft.tensor.weights import tiles
from weft.tensor.weights.quantized import QuantizedWeight
from weft.tensor.weights.tiles import in_best_tiles, serves

ROWS_MAX = {False: 16, True: 15}
"""From 16 rows on, codes of 8 and 4 bits may become floats that torch multiplies (``QuantizedWeight.widens``)."""
PAGES = 400


@pytest.fixture(autouse=True)
def native_kernels(torch_kernels: None) -> None:
    native.choose("native")


def codes(
    bits: int, *, zeros: bool = False, exact: bool = False, group: int | None = None
) -> Callable[[torch.Tensor], torch.Tensor]:
    w = weight(bits, 130, 256, zeros=zeros, exact=exact, group=group)
    for dtype in (torch.float32, torch.bfloat16):
        assert not w.widens(15, dtype), "torch multiplies fewer rows than it should"
    return lambda x: native_ops.weight_product(x, w, None)


@pytest.mark.parametrize("multiplies", [True, False])
def test_many_rows_meet_dequantised_blocks_in_a_dtype_that_the_cpu_multiplies(
    multiplies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products of bfloat16 that oneDNN emulates take a hundred times as long as those of float32."""
    monkeypatch.setattr(linear, "_multiplies_bfloat16", lambda: multiplies)
    monkeypatch.setattr(QuantizedWeight, "widens", lambda *_: True)
    dtypes: list[torch.dtype] = []
    take = linear.scratch.take

    def noted(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        dtypes.append(dtype)
        return take(name, shape, dtype)

    monkeypatch.setattr(linear.scratch, "take", noted)
    w, x = weight(4, 130, 256), noise(2, 20, 256)
    y = native_ops.weight_product(x.bfloat16(), w, None)
    assert dtypes == [torch.bfloat16 if multiplies else torch.float32]
    assert y.dtype == torch.bfloat16
    expected = x.bfloat16().float() @ w.dense(0, 130, torch.float32).T
    torch.testing.assert_close(y.float(), expected, rtol=0.02, atol=0.1)


def float_tiles(dtype: torch.dtype, *, twelve_bit: bool = False) -> Callable[[torch.Tensor], torch.Tensor]:
    dense = (noise(1, 130, 256) * 0.1).to(dtype)
    w = in_best_tiles(dense, twelve_bit=True) if twelve_bit else tiles.tiled(dense)
    assert w is not None
    return lambda x: native_ops.weight_product(x, w, None)


FORMS: dict[str, Callable[[], Callable[[torch.Tensor], torch.Tensor]]] = {
    "float32 tiles": lambda: float_tiles(torch.float32),
    "int8": lambda: codes(8),
    "int8 exact": lambda: codes(8, exact=True),
    "int8 zeros": lambda: codes(8, zeros=True, group=32),
    "int4": lambda: codes(4),
    "int4 zeros exact": lambda: codes(4, zeros=True, exact=True, group=64),
}
if native.MISSING is None and serves(torch.bfloat16):
    FORMS["bfloat16 tiles"] = lambda: float_tiles(torch.bfloat16)
if native.MISSING is None and serves(torch.bfloat16) and native.extension().has_twelve_bit_products():
    FORMS["12 bits"] = lambda: float_tiles(torch.bfloat16, twelve_bit=True)
DTYPE = {"bfloat16 tiles": torch.bfloat16, "12 bits": torch.bfloat16}


@pytest.mark.parametrize("form", FORMS)
def test_a_product_of_a_row_alone_is_that_row_of_2_to_16(form: str) -> None:
    product = FORMS[form]()
    x = noise(2, 16, 256).to(DTYPE.get(form, torch.float32))
    alone = list(in_each_set(lambda: torch.cat([product(x[row : row + 1]) for row in range(16)])))
    assert all(rows.abs().sum() > 0 for rows in alone)
    for count in range(2, ROWS_MAX[form.startswith("int")] + 1):
        together = list(in_each_set(lambda n=count: product(x[:n])))
        assert all(map(torch.equal, together, [rows[:count] for rows in alone])), f"{form}: {count} rows"


def rows_of_runs(runs: Runs, q: torch.Tensor, pages: Pages) -> torch.Tensor:
    return native_ops.paged_attention(q, pages.k, pages.v, runs, 0.2, None, pages.scales)


def part_of(runs: Runs, whole: int, starts: list[int], lengths: list[int]) -> Runs:
    """Runs that read the pages of run ``whole``."""
    parts = list(zip(starts, lengths, strict=True))
    part = make_runs(
        [Run(start) for start, length in parts if length == 1],
        [Run(start, length) for start, length in parts if length > 1],
    )
    table = runs.page_table_RP[whole : whole + 1].expand(len(starts), -1).contiguous()
    object.__setattr__(part, "page_table_RP", table)
    return part


@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
@pytest.mark.parametrize(("start", "threads"), [(3, 1), (507, 3), (1020, 1)])
def test_attention_of_a_decode_is_that_row_of_a_window_and_of_a_prompt(
    kv_dtype: torch.dtype, start: int, threads: int
) -> None:
    """Contexts are cut every 512 tokens, whatever the length of the run and the number of threads."""
    count = 8
    whole = make_runs([], [Run(0, start + count), Run(0, 700)], pages=PAGES)
    pages = filled_pages(whole, PAGES, 2, 64, kv_dtype)
    dtype = torch.float32 if kv_dtype == torch.float32 else torch.bfloat16
    q = noise(3, start + count, 6, 64).to(dtype)
    prompt = make_runs([], [Run(0, start + count)])
    object.__setattr__(prompt, "page_table_RP", whole.page_table_RP[:1].contiguous())
    before = native.extension().threads()
    native.set_threads(threads)
    try:
        decodes = list(
            in_each_set(
                lambda: torch.cat(
                    [
                        rows_of_runs(part_of(whole, 0, [start + i], [1]), q[start + i : start + i + 1], pages)
                        for i in range(count)
                    ]
                )
            )
        )
        one_run = part_of(whole, 0, [start], [count])
        window = list(in_each_set(lambda: rows_of_runs(one_run, q[start:], pages)))
        in_prompt = list(in_each_set(lambda: rows_of_runs(prompt, q, pages)[start:]))
        half, third = start // 2, start // 3
        starts, lengths = [start, half, start + 1, third, start + 2], [1, 1, 5, 9, 3]
        company = torch.cat([q[first : first + length] for first, length in zip(starts, lengths, strict=True)])
        mixed = list(in_each_set(lambda: rows_of_runs(part_of(whole, 0, starts, lengths), company, pages)))
    finally:
        native.set_threads(before)
    for alone, together, prompted, in_step in zip(decodes, window, in_prompt, mixed, strict=True):
        assert torch.equal(together, alone)
        assert torch.equal(prompted, alone)
        assert torch.equal(in_step[0:1], alone[0:1])
        assert torch.equal(in_step[2:7], alone[1:6])
        assert torch.equal(in_step[16:19], alone[2:5])


def test_torch_products_depend_on_the_rows_beside_them() -> None:
    """Why small matrices, routers and torch's attention are compared by tokens: oneDNN and MKL choose another
    order of sums for another number of rows."""
    x, w = noise(4, 64, 512), noise(5, 300, 512)
    alone = torch.cat([F.linear(x[row : row + 1], w) for row in range(64)])
    assert not torch.equal(F.linear(x, w), alone)
    torch.testing.assert_close(F.linear(x, w), alone, rtol=1e-4, atol=1e-4)
