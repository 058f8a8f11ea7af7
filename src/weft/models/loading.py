"""From a checkpoint directory to a model that is ready to run: check everything, then read.

    config.json -> Architecture -> build against headers (no weights read) -> build against the files

The first build finds every missing or mis-shaped tensor and counts the bytes, so that the second cannot
fail half way and progress has a denominator. See ``weights``.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch

from weft.config import DTypeChoice
from weft.families import named_dtype, read_architecture
from weft.models.decoder import CausalModel
from weft.models.generation import GenerationDefaults, read_generation_defaults
from weft.models.registry import FAMILIES
from weft.models.weights import Checkpoint, OnProgress, TensorCheck, TensorReader, unused_warning
from weft.spec import DTypeName, ModelSpec
from weft.tensor.layout import DTYPES

_NAME_OF_STORED: dict[str, DTypeName] = {"F32": "float32", "F64": "float32", "BF16": "bfloat16",
                                         "F16": "float16"}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """``spec.dtype`` is the dtype the weights have now. ``weights_bytes``: what they take in memory.
    ``warnings``: one sentence each, about the checkpoint, for the user."""

    model: CausalModel
    spec: ModelSpec
    generation_defaults: GenerationDefaults
    weights_bytes: int
    warnings: tuple[str, ...] = ()


def load_model(directory: Path, dtype: DTypeChoice = "auto",
               on_progress: OnProgress | None = None) -> LoadedModel:
    """Load the checkpoint in ``directory`` with weights in ``dtype``; "auto" is the dtype that config.json
    names, or where it names none that of the stored embedding. ``on_progress(done_bytes, all_bytes)`` is
    called as tensors are read.

    Raises UnknownArchitectureError, or CheckpointError naming file, tensor, and found and expected shape,
    before any weight is read.
    """
    checkpoint = Checkpoint.open(Path(directory))
    name = named_dtype(checkpoint.config) if dtype == "auto" else dtype
    chosen: DTypeName = name or _NAME_OF_STORED.get(checkpoint.stored_dtype, "float32")
    architecture = dataclasses.replace(read_architecture(checkpoint.config), dtype=chosen)
    defaults = read_generation_defaults(checkpoint.directory, checkpoint.config)
    build = FAMILIES[architecture.family]
    with torch.inference_mode():
        check = TensorCheck(checkpoint, DTYPES[chosen])
        build(architecture, check)
        check.raise_problems()
        with TensorReader(checkpoint, DTYPES[chosen], total_bytes=check.read_bytes,
                          on_progress=on_progress) as reader:
            model = build(architecture, reader)
    warning = unused_warning(checkpoint.unused(check.used))
    return LoadedModel(model=model, spec=architecture.spec(), generation_defaults=defaults,
                       weights_bytes=reader.held_bytes, warnings=(warning,) if warning else ())
