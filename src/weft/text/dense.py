"""Dense modules of sentence-transformers, which project a pooled vector.

    2_Dense/config.json          in_features 768, out_features 3072, bias false, activation_function Identity
    2_Dense/model.safetensors    linear.weight [out, in], linear.bias [out]

Source: ``Dense`` of sentence-transformers 5.4.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Mapping
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
_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


@dataclass(frozen=True, slots=True)
class DenseModule:
    weight: Floats
    bias: Floats | None
    activation: str

    @property
    def width(self) -> int:
        return len(self.weight)

    def __call__(self, values: array[float]) -> array[float]:
        product: Floats = self.weight @ np.frombuffer(values, np.float32)
        projected = _ACTIVATIONS[self.activation](product if self.bias is None else product + self.bias)
        return array("f", projected.astype(np.float32).tobytes())


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
    return DenseModule(weight, bias, activation)


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
