"""A checkpoint of random weights in the geometry of a release, to serve where nothing can be downloaded.

    python -m benchmarks.gpu_checkpoint Qwen3.5-4B path/to/it [--layers N] [--head] [--adapters 2] [--form fp8]

    weft.planning.geometries --> the tensors that weft's own reader asks for --> model.safetensors, bfloat16
                             --> config.json, and a tokenizer that knows every id

It is as large as the release: 8.4 GB for the 4B model. Speed does not depend on what the weights are. ``every-part``
is no release: a small model of the gated delta rule, attention, a tower of pictures, and with ``--head`` a head for
further tokens.

    --head       the model's own head for drafts
    --adapters   path/to/it-adapter-0, ...: in peft's form, for every product of the layers
    --form fp8   products of the layers in fp8, by blocks of 128 x 128; int4: as ``weft quantize`` writes it
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_decode import noise_model
from benchmarks.gpu_families import CONFIGS, write_adapter
from benchmarks.serve.checkpoints import save_tokenizer
from weft.planning.geometries import find_geometry

BLOCK = 128
RANK = 8
FP8_LARGEST = 448.0
EVERY_PART = "every-part"
POSITIONS = 32_768
"""Of ``every-part``: its largest picture has 16,384 rows."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("geometry", help=f"of `weft plan`'s table, or {EVERY_PART}")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--head", action="store_true", help="with the model's own head for drafts")
    parser.add_argument("--adapters", type=int, default=0, help="so many, next to the directory")
    parser.add_argument("--form", choices=("bf16", "fp8", "int4"), default="bf16")
    args = parser.parse_args(argv)
    config = config_of(args.geometry, layers=args.layers, head=args.head)
    if config is None:
        parser.error(f"`weft plan` knows no {args.geometry}")
    size = write(args.directory, config, head=args.head, adapters=args.adapters, form=args.form)
    print(f"{size / 1e9:.2f} GB")
    return 0


def config_of(geometry: str, *, layers: int | None = None, head: bool = False) -> dict[str, Any] | None:
    """The config.json of a geometry; None for an unknown one."""
    known = find_geometry(geometry)
    if geometry != EVERY_PART and known is None:
        return None
    config = dict(CONFIGS["pictures"] if known is None else known.config)
    more = ({"num_hidden_layers": layers} if layers else {}) | ({"mtp_num_hidden_layers": 1} if head else {})
    if known is None:
        more |= {"max_position_embeddings": POSITIONS}
    text = config.get("text_config")
    return config | more if text is None else config | {"text_config": text | more}


def write(directory: Path, config: dict[str, Any], *, head: bool, adapters: int, form: str) -> int:
    """Write the checkpoint; the bytes of its tensors."""
    from safetensors.torch import save_file

    tensors: dict[str, torch.Tensor] = {}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = noise_model(config, device, stored=tensors, head=head)
    for number in range(adapters):
        write_adapter(directory.with_name(f"{directory.name}-adapter-{number}"), model, RANK)
    if form == "fp8":
        tensors = dict(pair for name, tensor in tensors.items() for pair in in_fp8(name, tensor).items())
        settings = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}
        config = config | {"quantization_config": settings}
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(directory / "model.safetensors"), metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config | {"eos_token_id": 2, "bos_token_id": 1}))
    save_tokenizer(directory, config.get("text_config", config)["vocab_size"])
    if form == "int4":
        from weft_tools.quantize.quantized_copy import write_quantized

        plain = directory.rename(directory.with_name(f"{directory.name}-plain"))
        write_quantized(plain, directory, "int4")
        shutil.rmtree(plain)
    return sum(tensor.nbytes for tensor in tensors.values())


def in_fp8(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The codes and scales of a product of the text's layers; other tensors as they are."""
    product = ".layers." in name and name.endswith("_proj.weight") and not name.startswith("model.visual.")
    if not product or any(size % BLOCK for size in tensor.shape):
        return {name: tensor}
    rows, columns = (size // BLOCK for size in tensor.shape)
    blocks = tensor.float().view(rows, BLOCK, columns, BLOCK)
    scales = blocks.abs().amax((1, 3)).clamp(min=1e-12) / FP8_LARGEST
    codes = (blocks / scales[:, None, :, None]).view_as(tensor).to(torch.float8_e4m3fn)
    return {name: codes, f"{name}_scale_inv": scales}


if __name__ == "__main__":
    raise SystemExit(main())
