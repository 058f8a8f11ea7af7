"""Quantised checkpoints: each rank reads its part of codes, scales and zeros; the rest is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.fixtures import quantised_forms
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.quantised_forms import FORMS, write
from tests.ranks.threads import load_ranks, logits_of
from tests.unit.models import test_stacked_forms
from tests.unit.models.test_stacked_forms import STACKED, write_stacked
from weft.errors import CheckpointError
from weft.models.loading import load_model

TOLERANCE = 1e-5
ALIGNED = {
    **FORMS,
    "fp8": quantised_forms.fp8(16, 32),
    "nf4": replace(FORMS["nf4"], quantise=partial(quantised_forms.bitsandbytes_nf4, size=32)),
}
"""Blocks that heads are multiples of, as in real checkpoints."""
UNCUT = {"gptq_ordered", "int4_torchao_tiles"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A rank's share of every matrix is whole groups of 32 columns."""
    return make_checkpoint(tmp_path_factory.mktemp("wide"), "qwen3_5", intermediate_size=128)


@pytest.mark.parametrize("form", [name for name in ALIGNED if name not in UNCUT])
def test_two_ranks_of_a_quantised_checkpoint(
    form: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantised_forms, "checkpoint", lambda name: source)
    quantised, _ = write("wide", tmp_path, ALIGNED[form])
    whole = load_model(quantised, quantize_inputs=False)
    ranks = load_ranks(quantised, 2, quantize_inputs=False)
    expected = logits_of([whole])
    assert float((logits_of(ranks) - expected).abs().max() / expected.abs().max()) < TOLERANCE
    assert all(rank.read_bytes < 0.6 * whole.read_bytes for rank in ranks)
    assert all(rank.weights_form == whole.weights_form for rank in ranks)


@pytest.fixture(scope="module")
def stacks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("stacks"),
        "granite_moe",
        intermediate_size=64,
        shared_intermediate_size=128,
        mamba_n_heads=16,
        mamba_expand=4,
    )


@pytest.mark.parametrize("by_expert", [False, True])
@pytest.mark.parametrize("form", ["int8_rows", "int8_groups", "packed_int4_zeros", "fp8_rows"])
def test_two_ranks_of_experts_that_are_stacked_codes(
    form: str, by_expert: bool, stacks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_stacked_forms, "checkpoint", lambda name: stacks)
    quantised, _ = write_stacked("granite_moe", tmp_path, STACKED[form])
    whole = load_model(quantised, quantize_inputs=False)
    ranks = load_ranks(quantised, 2, by_expert=by_expert, quantize_inputs=False)
    expected = logits_of([whole])
    assert float((logits_of(ranks) - expected).abs().max() / expected.abs().max()) < TOLERANCE
    assert all(rank.read_bytes < 0.6 * whole.read_bytes for rank in ranks)
    assert all(rank.weights_form == whole.weights_form for rank in ranks)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("gptq_ordered", r"desc_act.*--tp cannot cut them"),
        ("int4_torchao_tiles", r"tile_packed_to_4d.*not cut by --tp"),
        ("nf4", r"--tp is 2, and .*out_proj.weight is in blocks of 64 numbers that run over its columns"),
        ("fp8", r"--tp is 2, and .*weight_scale_inv has one entry for \d+ (rows|columns) of its matrix"),
    ],
)
def test_what_cannot_be_cut_is_refused(
    form: str, message: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups in an order of their own, blocks of 64 over two ranks' columns, of 48 rows under heads of 16."""
    monkeypatch.setattr(quantised_forms, "checkpoint", lambda name: source)
    quantised, _ = write("wide", tmp_path, FORMS[form])
    with pytest.raises(CheckpointError, match=message):
        load_ranks(quantised, 2)


@pytest.mark.parametrize("quantize", ["int8", "int4", "w8a8"])
def test_ranks_round_their_own_part(quantize: str, source: Path) -> None:
    """Groups lie inside of a rank here, so a rank rounds as one rank does."""
    expected = logits_of([load_model(source)])
    ranks = load_ranks(source, 2, quantize=quantize, quantize_inputs=quantize == "w8a8")
    gap = (logits_of(ranks) - expected).abs().max() / expected.abs().max()
    alone = load_model(source, quantize=quantize, quantize_inputs=quantize == "w8a8")  # type: ignore[arg-type]
    assert gap < 2 * (logits_of([alone]) - expected).abs().max() / expected.abs().max()
