"""GPTQ with act-order: columns lie by group in the kernels' tiles, and a product takes x in that order."""

from __future__ import annotations

import json
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.fixtures import quantised_forms
from tests.fixtures.adapters import factors, written
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.quantised_forms import FORMS, Form, Tensors, gptq, groups_of, meant, to_words, write
from tests.oracle.test_adapters import logits as adapter_logits
from tests.ranks.threads import load_ranks
from tests.unit.models.test_quantised_forms import CLOSE, NAMES, Q_PROJ, load, logits
from weft.adapters import read_adapter
from weft.errors import CheckpointError
from weft.models.adapters import install, load_adapter
from weft.models.blocks.feed_forward import ExpertsBlock
from weft.models.blocks.linear import Linear
from weft.models.forms import stored_form
from weft.models.forms.stored_form import order_by_group, unpacked
from weft.models.fused_decoder import FusedDecoder
from weft.models.loading import load_model
from weft.models.runtime_form import RuntimeForm
from weft.models.safetensors_header import StoredTensor
from weft.runner.sleep import HostWeights, storages_of
from weft.tensor.ops.linear import JoinedWeight, take_columns
from weft.tensor.weights import tiles
from weft.tensor.weights.quantized import Codes, QuantizedWeight

ORDERED = FORMS["gptq_ordered"]
G_IDX = f"{Q_PROJ.removesuffix('weight')}g_idx"


def apart(name: str) -> int:
    """Each matrix has an order of its own."""
    return zlib.crc32(name.encode())


def other_than(end: str) -> Form:
    """Matrices whose names end so have another order than their neighbours."""
    return replace(
        ORDERED,
        quantise=gptq(
            symmetric=False, first_version=True, ordered=True, seed=lambda name: 1 if name.endswith(end) else 0
        ),
    )


def read(tensors: Tensors, rows: int, columns: int, **settings: object) -> Codes | torch.Tensor:
    config = {"quantization_config": {**ORDERED.config, **settings}}
    form = stored_form(
        config,
        {name: StoredTensor(Path(), name, NAMES[one.dtype], tuple(one.shape), 0) for name, one in tensors.items()},
    )

    def ask(name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> torch.Tensor:
        assert tuple(tensors[name].shape) == shape
        return tensors[name]

    return form.read(ask, "x.weight", (rows, columns))


def stored(rows: int, of_column: torch.Tensor, bits: int, group: int) -> tuple[Tensors, torch.Tensor]:
    """(tensors, the values that the libraries make of them): any codes, zeros and scales."""
    columns, groups = len(of_column), int(of_column.max()) + 1
    draw = torch.Generator().manual_seed(bits + columns)
    codes = torch.randint(0, 1 << bits, (rows, columns), generator=draw)
    zeros = torch.randint(1, 1 << bits, (rows, groups), generator=draw)
    scales = (torch.rand(rows, groups, generator=draw) / 64).half().float()
    tensors = {
        "x.qweight": to_words(codes, bits).T,
        "x.scales": scales.T.half(),
        "x.qzeros": to_words((zeros - 1).T, bits),
        "x.g_idx": of_column.int(),
    }
    return tensors, meant(codes.float(), zeros.float(), scales, of_column)


@pytest.mark.parametrize(("bits", "columns", "group"), [(4, 256, 32), (8, 256, 128), (4, 144, 64), (4, 96, 24)])
def test_values_are_those_of_the_library_and_so_are_products(bits: int, columns: int, group: int) -> None:
    """144 columns have a last group of 16, and groups of 24 columns are widened."""
    of_column = groups_of(columns, group)[torch.randperm(columns, generator=torch.Generator().manual_seed(2))]
    tensors, values = stored(48, of_column, bits, group)
    made = read(tensors, 48, columns, bits=bits, group_size=group)
    if group % 32:
        assert isinstance(made, torch.Tensor)
        assert torch.equal(made, values)
        return
    assert isinstance(made, Codes)
    assert torch.equal(made.dense(), values)
    held = RuntimeForm(exact_inputs=True).of_codes(made)
    assert isinstance(held, QuantizedWeight)
    assert held.order is not None
    assert torch.equal(held.dense(), values)
    bias = torch.linspace(-1, 1, 48)
    for rows in (1, 3, 40):
        x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
        # In float64: torch's own sums in float32 are as far from it as the kernels'.
        truth = x.double() @ values.double().T + bias
        torch.testing.assert_close(Linear(held, bias)(x), truth.float())
    wrong = replace(held, order=held.order.flip(0))
    assert (wrong.dense() - values).abs().max() > 0.1 * values.abs().max()
    assert (Linear(wrong)(x) - x @ values.T).abs().max() > 0.1 * (x @ values.T).abs().max()


def test_groups_that_are_neighbours_have_no_order() -> None:
    """``static_groups``: columns are quantised in another order, and groups are those of the matrix."""
    tensors, values = stored(32, groups_of(128, 32), 4, 32)
    made = read(tensors, 32, 128, static_groups=True)
    assert isinstance(made, Codes)
    assert made.order is None
    assert torch.equal(made.dense(), values)
    assert isinstance(RuntimeForm().of_codes(made), QuantizedWeight)


def test_columns_of_a_group_keep_their_order() -> None:
    order = order_by_group("x.g_idx", torch.tensor([1, 0, 0, 1, 2, 1, 0, 2]), 3)
    assert order is not None
    assert order.tolist() == [1, 2, 6, 0, 3, 5, 4, 7]
    assert order.dtype == torch.int32


def test_a_whole_row_that_is_one_group_has_no_order(tmp_path: Path) -> None:
    tensors, values = stored(32, torch.zeros(128, dtype=torch.long), 4, 128)
    made = read(tensors, 32, 128, group_size=-1)
    assert isinstance(made, Codes)
    assert made.order is None
    assert torch.equal(made.dense(), values)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda groups: groups.index_fill_(0, torch.tensor([3]), 4), ["names the group 4", "groups 0 to 1"]),
        (lambda groups: groups.index_fill_(0, torch.tensor([3]), -1), ["names the group -1", "groups 0 to 1"]),
        (lambda groups: groups.zero_(), ["gives group 0 64 columns", "groups have 32"]),
    ],
)
def test_groups_that_are_none_are_named(change: object, words: list[str], tmp_path: Path) -> None:
    def spoil(tensors: Tensors) -> None:
        change(tensors[G_IDX])  # type: ignore[operator]

    quantised, _ = write("qwen3_5", tmp_path, ORDERED, spoil=spoil)
    with pytest.raises(CheckpointError) as caught:
        load(quantised)
    line = str(caught.value)
    assert all(word in line for word in (G_IDX, *words)), line
    assert "\n" not in line


def test_projections_of_one_input_are_one_matrix_and_one_gather(tmp_path: Path) -> None:
    quantised, _ = write("qwen3_5", tmp_path, ORDERED)
    layer = load(quantised).model.layers[1]
    assert layer.mixer.qkv.weight.order is not None  # type: ignore[union-attr]
    assert layer.feed_forward.gate_up.weight.order is not None  # type: ignore[union-attr]


@pytest.mark.parametrize(("end", "count"), [("v_proj.weight", 2), ("k_proj.weight", 3)])
def test_projections_with_orders_of_their_own_are_multiplied_apart(end: str, count: int, tmp_path: Path) -> None:
    quantised, plain = write("qwen3_5", tmp_path, other_than(end))
    loaded = load(quantised)
    qkv = loaded.model.layers[1].mixer.qkv.weight  # type: ignore[union-attr]
    assert isinstance(qkv, JoinedWeight)
    assert [part.order is not None for part in qkv.parts] == [True] * count  # type: ignore[union-attr]
    torch.testing.assert_close(logits(loaded), logits(load(plain)), **CLOSE)


def test_another_order_has_other_logits(tmp_path: Path) -> None:
    """The control: two columns of one matrix change groups."""

    def spoil(tensors: Tensors) -> None:
        first, other = (int((tensors[G_IDX] == group).nonzero()[0]) for group in (0, 1))
        tensors[G_IDX][first], tensors[G_IDX][other] = 1, 0

    quantised, plain = write("qwen3_5", tmp_path, ORDERED, spoil=spoil)
    assert (logits(load(quantised)) - logits(load(plain))).abs().max() > 100 * CLOSE["atol"]


@pytest.mark.parametrize("source", ["lfm2", "granite"])
def test_other_families_have_the_logits_of_their_values(source: str, tmp_path: Path) -> None:
    quantised, plain = write(
        source, tmp_path, replace(ORDERED, quantise=gptq(symmetric=False, first_version=True, ordered=True, seed=apart))
    )
    torch.testing.assert_close(logits(load(quantised)), logits(load(plain)), **CLOSE)


def compressed(name: str, matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """compressed-tensors with ``actorder`` group, over the codes of GPTQ; down keeps its neighbours."""
    made, values = gptq(symmetric=True, first_version=False, ordered="down_proj" not in name)(name, matrix)
    base = name.removesuffix("weight")
    codes = unpacked(made[f"{base}qweight"], 4, 0).T
    of_column = made[f"{base}g_idx"] if "down_proj" not in name else torch.full((matrix.shape[1],), -1)
    return {
        f"{name}_packed": to_words(codes, 4),
        f"{name}_scale": made[f"{base}scales"].T,
        f"{name}_g_idx": of_column.int(),
        f"{name}_shape": torch.tensor(matrix.shape),
    }, values


COMPRESSED = Form(
    {
        **FORMS["packed_int4"].config,
        "config_groups": {
            "group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 32, "actorder": "group"}}
        },
    },
    compressed,
    "_scale",
    "int4",
)


def test_compressed_tensors_with_groups_by_act_order(tmp_path: Path) -> None:
    quantised, plain = write("qwen3_5", tmp_path, COMPRESSED)
    loaded = load(quantised)
    layer = loaded.model.layers[1]
    assert layer.mixer.qkv.weight.order is not None  # type: ignore[union-attr]
    assert layer.feed_forward.down.weight.order is None  # type: ignore[union-attr]
    torch.testing.assert_close(logits(loaded), logits(load(plain)), **CLOSE)
    with pytest.raises(CheckpointError, match=r"actorder.*--tp cannot cut them"):
        load_ranks(quantised, 2)


@pytest.mark.parametrize("end", ["no such name", "up_proj.weight"])
def test_experts_keep_an_order_each_and_those_with_two_are_widened(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_checkpoint(tmp_path / "wide", "qwen3_next", moe_intermediate_size=64)
    monkeypatch.setattr(quantised_forms, "checkpoint", lambda name: source)
    quantised, plain = write("wide", tmp_path, other_than(end))
    loaded, truth = load(quantised), load(plain)
    block, other = (
        next(layer.feed_forward for layer in model.model.layers if isinstance(layer.feed_forward, ExpertsBlock))
        for model in (loaded, truth)
    )
    assert isinstance(block.down, QuantizedWeight)
    assert block.down.order is not None
    assert isinstance(block.gate_up, QuantizedWeight) == (end == "no such name")
    assert isinstance(other, ExpertsBlock)
    for made, values in ((block.gate_up, other.gate_up), (block.down, other.down)):
        dense = made if isinstance(made, torch.Tensor) else made.dense()
        assert torch.equal(dense, values if isinstance(values, torch.Tensor) else values.dense())
    torch.testing.assert_close(logits(loaded), logits(truth), **CLOSE)


def test_weights_take_the_bytes_of_the_file(tmp_path: Path) -> None:
    quantised, _ = write("qwen3_5", tmp_path, ORDERED)
    tensors = load_file(quantised / "model.safetensors")
    assert load(quantised).weights_bytes < 1.02 * sum(one.numel() * one.itemsize for one in tensors.values())


@pytest.mark.parametrize("quantize", ["int8", "int4", "w8a8"])
def test_quantize_leaves_the_codes_and_their_order(quantize: str, tmp_path: Path) -> None:
    quantised, _ = write("qwen3_5", tmp_path, ORDERED)
    kept, rounded = (
        model.model.layers[1].feed_forward.down.weight  # type: ignore[union-attr]
        for model in (load(quantised), load(quantised, quantize=quantize))
    )
    assert torch.equal(kept.order, rounded.order)
    assert torch.equal(kept.codes, rounded.codes)


def test_the_order_sleeps_and_wakes_with_its_codes(tmp_path: Path) -> None:
    quantised, _ = write("qwen3_5", tmp_path, ORDERED)
    model = load(quantised).model
    down = model.layers[1].feed_forward.down  # type: ignore[union-attr]
    x = torch.randn(3, down.weight.columns)
    before = down(x)
    asleep = HostWeights(storages_of(model))
    assert down.weight.order.untyped_storage().nbytes() == 0
    asleep.restore()
    assert torch.equal(down(x), before)


@pytest.mark.parametrize("columns", [48, 1000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_columns_are_taken_in_their_order(columns: int, dtype: torch.dtype) -> None:
    order = torch.randperm(columns).int()
    for shape in ((0, columns), (1, columns), (70, columns), (2, 3, columns)):
        x = torch.randn(*shape).to(dtype)
        assert torch.equal(take_columns(x, order), x[..., order.long()])
    wide = torch.randn(5, 2 * columns).to(dtype)
    for x in (wide[:, :columns], wide[:, ::2]):
        assert torch.equal(take_columns(x, order), x[:, order.long()])


@pytest.mark.parametrize("end", ["no such name", "v_proj.weight"])
def test_a_decode_is_one_call_with_the_bits_of_its_layers(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantised, _ = write("qwen3_5", tmp_path, other_than(end))
    loaded, taken = load_model(quantised), []
    run = FusedDecoder.run

    def seen(*args: object) -> torch.Tensor | None:
        found = run(*args)  # type: ignore[arg-type]
        taken.append(found is not None)
        return found

    monkeypatch.setattr(FusedDecoder, "run", seen)
    fused = logits(loaded)
    assert taken[-1] == tiles.serves(torch.float32)
    monkeypatch.setattr(FusedDecoder, "run", lambda *_: None)
    assert torch.equal(logits(loaded), fused)


def test_adapters_add_to_columns_as_they_are_named(tmp_path: Path) -> None:
    quantised, plain = write("qwen3_5", tmp_path, ORDERED)
    width = json.loads((plain / "config.json").read_text())["intermediate_size"]
    factors_of = {
        **factors("model.layers.1.mlp.down_proj", 64, width),
        **factors("model.layers.1.mlp.up_proj", width, 64),
    }
    directory, found = written(tmp_path / "a", factors_of), []
    for path in (quantised, plain):
        model, adapter = load(path).model, read_adapter("a", directory)
        install(model, load_adapter(adapter, model))
        found.append(adapter_logits(model, adapter.digest, ""))
    for made, truth in zip(*found, strict=True):
        torch.testing.assert_close(made, truth, **CLOSE)
    adapted, base = found[0]
    assert (adapted - base).abs().max() > 100 * CLOSE["atol"]
