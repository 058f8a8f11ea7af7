"""A checkpoint of random weights in the geometry of a release, to serve where nothing can be downloaded.

    python -m benchmarks.gpu_checkpoint Qwen3.5-4B path/to/it [--layers N]

    weft.planning.geometries --> the tensors that weft's own reader asks for --> model.safetensors, bfloat16
                             --> config.json, and a tokenizer that knows every id

It is as large as the release: 8.4 GB for the 4B model. Speed does not depend on what the weights are.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.gpu_decode import noise_model
from benchmarks.serve.checkpoints import save_tokenizer
from weft.planning.geometries import find_geometry


def main(argv: Sequence[str] | None = None) -> int:
    from safetensors.torch import save_file

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("geometry", help="of `weft plan`'s table")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    args = parser.parse_args(argv)
    geometry = find_geometry(args.geometry)
    if geometry is None:
        parser.error(f"`weft plan` knows no {args.geometry}")
    config = geometry.config | ({"num_hidden_layers": args.layers} if args.layers else {})
    tensors: dict[str, torch.Tensor] = {}
    noise_model(config, torch.device("cuda" if torch.cuda.is_available() else "cpu"), stored=tensors)
    args.directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(args.directory / "model.safetensors"), metadata={"format": "pt"})
    (args.directory / "config.json").write_text(json.dumps(config | {"eos_token_id": 2, "bos_token_id": 1}))
    save_tokenizer(args.directory, config.get("text_config", config)["vocab_size"])
    print(f"{len(tensors)} tensors, {sum(one.nbytes for one in tensors.values()) / 1e9:.2f} GB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
