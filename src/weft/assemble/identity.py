"""What decides the tokens that an engine gives. A replica that joins a fleet must have the same, and the
ranks of an engine the same files.

    weights      digest over all headers, and samples of each file (``weft.store.identity``)
    config       digest of config.json         tokenizer    digest of the vocabulary
    dtype, kv_dtype, state_dtype, quantize     the forms in which the model computes
    max_model_len                              a request that one replica accepts fits into each of them
    version                                    of weft

Each value is short text, so that a refusal can show both sides.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from weft.config import EngineConfig
from weft.memory.frames.plan import ArenaPlan
from weft.store.identity import weights_digest
from weft.text.tokenizer_file import tokenizer_digest, tokenizer_path
from weft.version import weft_version

if TYPE_CHECKING:
    from weft.models.loading import LoadedModel

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")
_DIGEST_CHARS = 12


def weight_files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if path.suffix in WEIGHT_SUFFIXES)


def engine_identity(
    config: EngineConfig, directory: Path, loaded: LoadedModel, arena: ArenaPlan, max_model_len: int
) -> dict[str, str]:
    """By the name of each fact."""
    return {
        "weights": checkpoint_digest(directory),
        "config": file_digest(directory / "config.json"),
        "tokenizer": vocabulary_digest(directory),
        "dtype": loaded.spec.dtype,
        "kv_dtype": arena.kv_dtype,
        "state_dtype": config.state_dtype,
        "quantize": f"{loaded.weights_form}{'' if config.quantize_inputs else ', inputs as they are'}",
        "max_model_len": str(max_model_len),
        "version": weft_version(),
    }


def checkpoint_digest(directory: Path) -> str:
    """Of the weights. Raises OSError."""
    # Samples tell one fine-tune from another. All bytes would make each rank read the whole model, which is
    # what shards avoid.
    return weights_digest(weight_files(directory))[:_DIGEST_CHARS]


def vocabulary_digest(directory: Path) -> str:
    """Return a digest of tokenizer.json and of the tokens that files next to it add. Raises CheckpointError."""
    return tokenizer_digest(tokenizer_path(directory))[:_DIGEST_CHARS]


def file_digest(path: Path) -> str:
    """Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:_DIGEST_CHARS]
