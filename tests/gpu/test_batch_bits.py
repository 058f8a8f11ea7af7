"""What a row's bits depend on, printed: torch's products choose a kernel by the number of rows, weft's own do not.

docs/gpu.md says so ("Bits"). On a GPU the first case prints the numbers of rows whose bits are those of the row
alone.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.gpu.tolerances import COMPILED
from tests.oracle.serving import DEVICE
from weft.tensor.ops.norm import rms_norm

ROWS = (1, 2, 8, 16, 64, 256, 1024) if COMPILED else (1, 2, 8)
COLUMNS, OUT = (2560, 9728) if COMPILED else (64, 96)


def noise(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, torch.bfloat16)


def test_a_product_of_torch_is_the_same_number_within_its_rounding(capsys: pytest.CaptureFixture[str]) -> None:
    weight, x = noise(OUT, COLUMNS), noise(max(ROWS), COLUMNS)
    alone = F.linear(x[:1], weight)[0].float()
    equal = []
    for rows in ROWS:
        among = F.linear(x[:rows], weight)[0].float()
        assert (among - alone).abs().max() <= 2.0**-7 * alone.abs().max(), "a bfloat16 number, rounded elsewhere"
        equal += [rows] if torch.equal(among, alone) else []
    with capsys.disabled():
        print(f"\nbfloat16 product of {COLUMNS} x {OUT}: the bits of a row alone among {equal} of {list(ROWS)} rows")


def test_a_kernel_of_weft_gives_a_row_the_same_bits_in_any_batch() -> None:
    x, weight = noise(max(ROWS), COLUMNS), noise(COLUMNS)
    whole = rms_norm(x, weight, 1e-6)
    for rows in ROWS:
        assert torch.equal(rms_norm(x[:rows].contiguous(), weight, 1e-6), whole[:rows])
