"""Dense modules of sentence-transformers, which project pooled vectors and vectors of tokens; scores by max-sim.

    2_Dense/config.json          in_features 768, out_features 3072, bias false, activation_function Identity
    2_Dense/model.safetensors    linear.weight [out, in], linear.bias [out], residual.weight [out, in]

Sources: ``Dense`` of sentence-transformers 5.4, and of PyLate 1.6 (``use_residual``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.errors import CheckpointError
from weft.files import inside, read_json

Floats = npt.NDArray[np.float32]
_ACTIVATIONS: dict[str, Callable[[Floats], Floats]] = {"Identity": lambda x: x, "Tanh": np.tanh}
_BYTES_MAX = 1 << 30
_HEADER_BYTES_MAX = 1 << 20
_LENGTH_MIN = 1e-12
"""Least length by which a vector is divided, as in torch."""
_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


@dataclass(frozen=True, slots=True)
class DenseModule:
    weight: Floats
    bias: Floats | None
    activation: str
    residual: Floats | None = None

    @property
    def width(self) -> int:
        return len(self.weight)

    def __call__(self, rows: Floats) -> Floats:
        """Return the projection of each row, float32 [X, out]."""
        product: Floats = rows @ self.weight.T
        projected: Floats = _ACTIVATIONS[self.activation](product if self.bias is None else product + self.bias)
        if self.residual is not None:
            projected += rows @ self.residual.T
        return projected


def token_vectors(
    pooled: bytes,
    tokens: int,
    positions: Sequence[int] | None,
    modules: Sequence[DenseModule],
    dimensions: int | None,
    *,
    normalize: bool,
) -> Floats:
    """Return the vectors of a text's tokens, float32 [vectors, width]. ``pooled``: float32 rows of its ``tokens``
    tokens; ``positions``: of the tokens whose vectors count, None for all; ``dimensions``: keep only the first
    numbers."""
    rows: Floats = np.frombuffer(pooled, "<f4").reshape(tokens, -1)
    if positions is not None:
        rows = rows[list(positions)]
    for project in modules:
        rows = project(rows)
    rows = rows[:, :dimensions]
    lengths = np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True) if normalize else 1.0
    vectors: Floats = (rows / np.maximum(lengths, _LENGTH_MIN)).astype(np.float32)
    return vectors


def max_sim(query: Floats, document: Floats) -> float:
    """Return the sum over vectors of ``query`` of the largest product with a vector of ``document``; 0 for a document
    without any."""
    return float((query @ document.T).max(axis=1).sum(dtype=np.float64)) if len(document) else 0.0


def read_dense(directory: Path) -> DenseModule:
    """Read a Dense module. Raise CheckpointError that names the file, and the setting if it is not served."""
    settings = read_json(directory / "config.json")
    activation = str(settings.get("activation_function", "Tanh")).rpartition(".")[2]
    if activation not in _ACTIVATIONS:
        raise CheckpointError(
            f"{directory / 'config.json'}: activation_function is {settings['activation_function']!r:.100}; "
            f"{' and '.join(_ACTIVATIONS)} are served",
            param="model",
        )
    path = directory / "model.safetensors"
    tensors = _read_tensors(path)
    weight, bias = tensors.get("linear.weight"), tensors.get("linear.bias")
    shape = (settings.get("out_features"), settings.get("in_features"))
    if weight is None or weight.shape != shape or (bias is not None and bias.shape != shape[:1]):
        shapes = {name: list(values.shape) for name, values in tensors.items()}
        raise CheckpointError(f"{path}: has {shapes}; config.json says linear.weight {list(shape)}", param="model")
    residual = tensors.get("residual.weight") if settings.get("use_residual") else None
    if settings.get("use_residual") and residual is None:
        residual = np.eye(len(weight), weight.shape[1], dtype=np.float32)
    if residual is not None and residual.shape != weight.shape:
        raise CheckpointError(
            f"{path}: residual.weight is {list(residual.shape)}, not {list(weight.shape)}", param="model"
        )
    return DenseModule(weight, bias, activation, residual)


def _read_tensors(path: Path) -> dict[str, Floats]:
    inside(path)
    with path.open("rb") as file:
        content = file.read(_BYTES_MAX + 1)
    size = int.from_bytes(content[:8], "little")
    if len(content) > _BYTES_MAX or not 0 < size <= min(_HEADER_BYTES_MAX, len(content) - 8):
        raise CheckpointError(f"{path}: is not a safetensors file of at most 1 GiB", param="model")
    data = memoryview(content)[8 + size :]
    try:
        header: dict[str, Any] = json.loads(content[8 : 8 + size])
        return {name: _floats(entry, data) for name, entry in header.items() if name != "__metadata__"}
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as safetensors: {error}", param="model") from None


def _floats(entry: Mapping[str, Any], data: memoryview) -> Floats:
    first, last = entry["data_offsets"]
    stored = np.frombuffer(data[first:last], _DTYPES[entry["dtype"]]).reshape(entry["shape"])
    if entry["dtype"] == "BF16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)
