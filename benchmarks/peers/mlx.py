"""Do weft and mlx-lm compute the same logits?

    python -m venv build/peers/mlx && build/peers/mlx/bin/pip install mlx-lm==0.32.2 "mlx[cpu]==0.32.4"
    python -m benchmarks.peers.mlx [--python PROGRAM] [NAME ...]

    tiny checkpoint --+--> mlx-lm, float32 on a CPU --> logits --+--> greatest difference, of 90 positions
                      +--> weft ---------------------> logits --+

The tests compare with transformers, or with classes of their own where it has none. mlx-lm is written apart from both.
A line says "not read" where mlx-lm does not load the tiny checkpoint. Checkpoints on which it is known to differ are
named with the reason, and are not counted.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.peers.environment import ROOT
from tests.fixtures.checkpoints import CHECKPOINTS, checkpoint, copy_checkpoint
from tests.oracle.model_driver import ModelDriver
from weft.models.loading import load_model

DEFAULT_PYTHON = ROOT / "build" / "peers" / "mlx" / "bin" / "python"
ALLOWED = 1e-4
"""Largest difference, by the largest logit or 1."""
TOKENS = torch.randint(3, 500, (90,), generator=torch.Generator().manual_seed(5)).tolist()
CHANGES: dict[str, dict[str, Any]] = {
    "plamo2": {"full_attention_idx": [1, 3]},
    "plamo2_pages": {"full_attention_idx": [1], "rope_theta": 10_000.0},
    "plamo3_scaled": {"rope_scaling_factor": None, "initial_context_length": None, "scale_embedding": False},
}
"""Settings of config.json for both, where mlx-lm ignores those of the checkpoint: it has no windows of PLaMo 2, and one
base of positions; of PLaMo 3 no scaled positions and embeddings."""
KNOWN_TO_DIFFER: dict[str, str] = {}
"""Seen with mlx-lm 0.32.2."""


def spelled(copy: Path) -> Path:
    """Return a copy of the checkpoint ``copy`` whose config.json has the ``model_type`` that mlx-lm knows."""
    theirs = copy.parent / "mlx" / copy.name
    shutil.copytree(copy, theirs)
    config = json.loads((copy / "config.json").read_text())
    kind = config["model_type"].removesuffix("_text")
    if kind != config["model_type"]:
        config = {"model_type": kind, "text_config": config}
    (theirs / "config.json").write_text(json.dumps(config))
    return theirs


def ours(checkpoint: Path) -> torch.Tensor:
    model = load_model(checkpoint, "float32").model
    return ModelDriver(model, sequences=1, length=96).step((0, TOKENS))[0]


def outcome(name: str, folder: Path) -> tuple[str, bool]:
    """Return the outcome of one checkpoint, and whether it is right."""
    reason = folder / f"{name}.txt"
    if reason.exists():
        return f"not read: {reason.read_text()}", True
    theirs, here = torch.from_numpy(np.load(folder / f"{name}.npy")), ours(folder / name)
    width = min(theirs.shape[1], here.shape[1])
    difference, scale = (theirs[:, :width] - here[:, :width]).abs().max().item(), here.abs().max().item()
    return f"{difference:.1e} of {scale:.1f}", difference < ALLOWED * max(1.0, scale)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers.mlx", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--python", type=Path, default=DEFAULT_PYTHON, help="interpreter of an environment with mlx-lm")
    args = parser.parse_args(argv)
    names, wrong = args.names or [*CHECKPOINTS], 0
    with tempfile.TemporaryDirectory(prefix="weft-mlx-") as at:
        folder = Path(at)
        (folder / "tokens.json").write_text(json.dumps(TOKENS))
        copies = [copy_checkpoint(checkpoint(name), folder / name, **CHANGES.get(name, {})) for name in names]
        subprocess.run(
            [args.python, "-P", Path(__file__).with_name("mlx_logits.py"), folder, *map(spelled, copies)], check=True
        )
        for name in names:
            said, right = outcome(name, folder)
            known = KNOWN_TO_DIFFER.get(name, "")
            print(f"{name:<22} {said}{'' if right else f' ({known})' if known else '   WRONG'}", flush=True)
            wrong += not right and not known
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
