"""Forms of quantised checkpoints x families: values, logits, memory, speed, in one table.

    python -m benchmarks.stored_forms [--families qwen3_5 lfm2] [--forms fp8 nf4] [--speed] [--json FILE]

    for each form    a tiny checkpoint of each family is packed as the form's tool would pack it
    values           float32 logits, beside a checkpoint of the values that the packed tensors mean
    logits           bfloat16 logits, beside the same values in a bfloat16 checkpoint: of the largest logit
    memory           of the weights as they are held, over the bytes of the file
    speed            one stream and a prompt of 256 over weft's own int4 or int8 (--speed): products by
                     matrices of 4096 x 1024 that come out of memory, CPU time of one thread, in turns

Logits in int8 and int4 see inputs rounded to int8 here, as by default. Forms of floats do not; nf4, fp4
and fp8 by rows add up in another order than the widened model. Packers are those of the tests, which
are written from the formats' descriptions; ``tests/fixtures/library_values`` has what the libraries
themselves packed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file

from benchmarks.linear import Product, forms_of, measure
from tests.fixtures.checkpoints import VOCAB_SIZE, checkpoint, copy_checkpoint, make_checkpoint
from tests.fixtures.quantised_forms import FORMS, Form, Tensors, bitsandbytes_plain, fp8, is_converted
from tests.oracle.model_driver import ModelDriver
from tests.unit.models.test_forms import experts_one_by_one
from weft.models.loading import LoadedModel, load_model
from weft.tensor import native
from weft.tensor.ops.linear import weight_product
from weft.tensor.weights.quantized import Codes
from weft.tensor.weights.tiles import coded_tiles

WIDER: dict[str, dict[str, int]] = {
    "qwen3_5": {"hidden_size": 256, "intermediate_size": 512},
    "lfm2": {"hidden_size": 256, "intermediate_size": 768},
    "granite": {"hidden_size": 256, "shared_intermediate_size": 512, "mamba_n_heads": 32},
    "qwen3_next": {"hidden_size": 256, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 128},
    "nemotron_h": {"hidden_size": 256, "intermediate_size": 512, "mamba_num_heads": 16},
    "falcon_h1": {"hidden_size": 256, "intermediate_size": 512},
    "kimi_linear": {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 64},
}
"""Matrices of some size, so that scales and codes are most of a file, as in a real one."""
_TRIED = (4096, 1024)
ROWS = (1, 32, 256)
"""A stream, a batch, a prompt."""


def more_forms() -> dict[str, Form]:
    """Forms in blocks of a real size, and bitsandbytes without double quantisation."""
    four = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    return FORMS | {
        "fp8": fp8(128, 128),
        "nf4_plain": Form(four, bitsandbytes_plain("nf4"), "absmax", "nf4"),
        "fp4": Form(four, bitsandbytes_plain("fp4"), "absmax", "fp4"),
    }


def pack(family: str, form: Form, directory: Path) -> tuple[Path, Path]:
    """(the checkpoint in ``form``, its values in float32); what no form holds is bfloat16."""
    source = checkpoint(family)
    if family in WIDER:
        source = make_checkpoint(source.parent / f"wide_{family}", family, **WIDER[family])
    quantised, plain = directory / "quantised", directory / "plain"
    copy_checkpoint(source, quantised, quantization_config=form.config)
    copy_checkpoint(source, plain)
    stored: Tensors = {}
    values: Tensors = {}
    for name, tensor in experts_one_by_one(load_file(source / "model.safetensors")).items():
        stored[name] = tensor.to(torch.bfloat16)
        values[name] = stored[name].float()
        if is_converted(name, tensor):
            del stored[name]
            packed, values[name] = form.quantise(name, tensor)
            stored |= packed
    for path, tensors in ((quantised, stored), (plain, values)):
        save_file({name: one.contiguous() for name, one in tensors.items()}, path / "model.safetensors")
    return quantised, plain


def logits(loaded: LoadedModel) -> torch.Tensor:
    tokens = torch.randint(0, VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(7)).tolist()
    driver = ModelDriver(loaded.model, sequences=1, length=48)
    with torch.inference_mode():
        [prefill] = driver.step((0, tokens))
        return torch.cat([prefill.clone(), *driver.step((0, [5]))]).float()


class Cell(NamedTuple):
    """A form of a family. ``values``, ``logits``: largest differences, as in the table above. ``memory``: of
    the weights, over the bytes of the file."""

    form: str
    family: str
    values: float
    logits: float
    memory: float
    held_as: str

    def line(self) -> str:
        return (
            f"| {self.form} | {self.family} | {self.values:.0e} | {self.logits:.1e} | "
            f"{self.memory:.2f} | {self.held_as} |"
        )


def cell_of(family: str, name: str, form: Form) -> Cell:
    with tempfile.TemporaryDirectory() as place:
        quantised, plain = pack(family, form, Path(place))
        exact = [logits(load_model(path, "float32", quantize_inputs=False)) for path in (quantised, plain)]
        half = [load_model(path, "bfloat16") for path in (quantised, plain)]
        found, truth = (logits(loaded) for loaded in half)
        size = (quantised / "model.safetensors").stat().st_size
        return Cell(
            name,
            family,
            float((exact[0] - exact[1]).abs().max()),
            float((found - truth).abs().max() / truth.abs().max()),
            half[0].weights_bytes / size,
            half[0].weights_form,
        )


def tried_forms() -> dict[str, Codes]:
    rows, columns = _TRIED

    def any_of(count: int) -> torch.Tensor:
        return torch.randint(0, count, (rows, columns), dtype=torch.uint8)

    numbers = torch.randn(rows, columns)
    e4m3 = (numbers * (448 / float(numbers.abs().max()))).to(torch.float8_e4m3fn).view(torch.uint8)
    blocks = torch.rand(1, columns // 128).expand(rows, -1) / columns
    powers = torch.randint(110, 121, (rows, columns // 32), dtype=torch.uint8).view(torch.float8_e8m0fnu)
    most = torch.rand(rows, columns // 64) / columns
    return {
        "fp8": Codes(8, e4m3, blocks, None, 128, fp8=True),
        "fp8_rows": Codes(8, e4m3, torch.rand(rows, 1) / columns, None, columns, fp8=True),
        "mxfp8": Codes(8, e4m3, powers, None, 32, fp8=True),
        "nf4": Codes(4, any_of(16), most, None, 64, table=torch.linspace(-1, 1, 16)),
    }


def speeds(rounds: int) -> dict[str, dict[int, float]]:
    """Times as fast as weft's own form, by form and rows. Of forms that stay floats, and of bfloat16 tiles;
    ``python -m benchmarks.linear --forms`` has the others."""
    torch.set_num_threads(1)
    native.set_threads(1)
    rows, columns = _TRIED
    forms: dict[str, tuple[int, list[Product]]] = {
        name: one for name, one in forms_of(rows, columns).items() if name in ("tiled", "int8", "int4")
    }
    copies = len(forms["int8"][1])
    for name, codes in tried_forms().items():
        coded = [made for _ in range(copies) if (made := coded_tiles(codes)) is not None]
        forms[name] = (coded[0].nbytes, [lambda x, w=w: weight_product(x, w) for w in coded])
    seconds = {count: measure(rows, columns, count, forms, rounds, time.thread_time).milliseconds for count in ROWS}
    return {
        name: {count: seconds[count][own_form(name)] / seconds[count][name] for count in ROWS}
        for name in (*tried_forms(), "tiled")
    }


def own_form(name: str) -> str:
    return "int4" if name == "nf4" else "int8"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.stored_forms",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--families", nargs="+", default=list(WIDER))
    parser.add_argument("--forms", nargs="*", default=list(more_forms()))
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="Write the tables here too.")
    asked = parser.parse_args(argv)
    known = more_forms()
    print(
        f"kernels {native.describe()}\n\n| form | family | values | logits | memory | held as |\n"
        "|---|---|---|---|---|---|"
    )
    cells = []
    for name in asked.forms:
        for family in asked.families:
            cells.append(cell_of(family, name, known[name]))
            print(cells[-1].line(), flush=True)
    ratios: dict[str, dict[int, float]] = {}
    if asked.speed:
        with torch.inference_mode():
            ratios = speeds(asked.rounds)
        print("\n| form | over | one stream | 32 rows | a prompt of 256 |\n|---|---|---|---|---|")
        for name, by_rows in ratios.items():
            print("|", " | ".join([name, own_form(name), *(f"{by_rows[count]:.2f}" for count in ROWS)]), "|")
    if asked.json is not None:
        asked.json.write_text(
            json.dumps(
                {"kernels": native.describe(), "speed": ratios, "cells": [one._asdict() for one in cells]}, indent=1
            )
            + "\n"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
