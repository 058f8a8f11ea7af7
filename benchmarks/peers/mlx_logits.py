"""Logits of checkpoints by mlx-lm, in float32 on a CPU; run by the environment that has it (``benchmarks.peers.mlx``).

    python mlx_logits.py FOLDER CHECKPOINT ...

Reads the tokens of FOLDER/tokens.json. Writes FOLDER/NAME.npy, [tokens, vocab], for each checkpoint, NAME being the
name of its directory; FOLDER/NAME.txt with the reason where mlx-lm cannot load or compute it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.utils import load_model


def logits(checkpoint: Path, tokens: list[int]) -> Any:
    model, _ = load_model(checkpoint, lazy=False)
    return np.array(model(mx.array([tokens]))[0].astype(mx.float32))


def main() -> None:
    folder, *checkpoints = map(Path, sys.argv[1:])
    tokens = json.loads((folder / "tokens.json").read_text())
    for checkpoint in checkpoints:
        try:
            np.save(folder / f"{checkpoint.name}.npy", logits(checkpoint, tokens))
        except (Exception, SystemExit) as error:  # olmo ends the process where its package is missing
            line = " ".join(str(error).split())
            (folder / f"{checkpoint.name}.txt").write_text(f"{type(error).__name__}: {line[:90]}")


if __name__ == "__main__":
    main()
