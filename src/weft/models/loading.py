"""From a checkpoint directory to a model that is ready to run: check everything, then read.

    config.json -> Architecture -> build against headers (no weights read) -> build against the files

The first build finds every missing or mis-shaped tensor and counts the bytes, so that the second cannot
fail half way and progress has a denominator. See ``weights``.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from weft.config import DTypeChoice, QuantizeChoice
from weft.errors import ConfigError
from weft.families import named_dtype, read_architecture
from weft.models.decoder import CausalModel
from weft.models.draft_weights import DraftWeights
from weft.models.generation import GenerationDefaults, read_generation_defaults
from weft.models.kv_scales import read_kv_scales
from weft.models.reader import TensorReader
from weft.models.registry import FAMILIES
from weft.models.runtime_form import RuntimeForm
from weft.models.skipped import skipped_line
from weft.models.weights import Checkpoint, OnProgress, TensorCheck, unused_warning
from weft.spec import DTypeName, ModelSpec
from weft.tensor.layout import DTYPES

_NAME_OF_STORED: dict[str, DTypeName] = {"F32": "float32", "F64": "float32", "BF16": "bfloat16",
                                         "F16": "float16"}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """``spec.dtype`` is the dtype that is computed in. ``weights_bytes``: what the weights take in memory,
    ``weights_form`` what they are, in words; ``read_bytes``: what was read of the files for it, in ``read_s``
    seconds, ordering and rounding included.
    ``draft``: multi-token prediction heads, where the files have them; not read yet.
    ``kv_scales``: the checkpoint's, see there. ``warnings``: one sentence each, about the checkpoint, for the
    user."""

    model: CausalModel
    spec: ModelSpec
    generation_defaults: GenerationDefaults
    weights_bytes: int
    warnings: tuple[str, ...] = ()
    kv_scales: Mapping[int, torch.Tensor] = field(default_factory=dict)
    weights_form: str = ""
    read_bytes: int = 0
    read_s: float = 0.0
    draft: DraftWeights | None = None


def load_model(directory: Path, dtype: DTypeChoice = "auto",
               on_progress: OnProgress | None = None, *, quantize: QuantizeChoice = "none",
               quantize_inputs: bool = True, twelve_bit: bool = True,
               device: torch.device | None = None) -> LoadedModel:
    """Load the checkpoint in ``directory`` with weights in ``dtype``; "auto" is the dtype that config.json
    names, or where it names none that of the stored embedding. ``on_progress(done_bytes, all_bytes)`` is
    called as tensors are read. ``quantize``, ``quantize_inputs`` and ``twelve_bit``: see ``runtime_form``.
    ``device``: where the weights go, the CPU by default.

    Raises ConfigError for w8a8 with inputs as they are, UnknownArchitectureError, or CheckpointError naming
    file, tensor, and found and expected shape, before any weight is read.
    """
    if quantize == "w8a8" and not quantize_inputs:
        raise ConfigError("--quantize is w8a8, which rounds inputs, and --no-quantize-inputs leaves them as "
                          "they are; use --quantize int8 with it", param="--quantize-inputs")
    checkpoint = Checkpoint.open(Path(directory))
    name = named_dtype(checkpoint.config) if dtype == "auto" else dtype
    chosen: DTypeName = name or _NAME_OF_STORED.get(checkpoint.stored_dtype, "float32")
    architecture = dataclasses.replace(read_architecture(checkpoint.config), dtype=chosen)
    defaults = read_generation_defaults(checkpoint.directory, checkpoint.config)
    build = FAMILIES[architecture.family]
    runtime = RuntimeForm(quantize, exact_inputs=not quantize_inputs, twelve_bit=twelve_bit)
    started_s = time.perf_counter()
    with torch.inference_mode():
        check = TensorCheck(checkpoint, DTYPES[chosen], runtime)
        build(architecture, check)
        check.raise_problems()
        with TensorReader(checkpoint, DTYPES[chosen], runtime=runtime, order=check.order,
                          total_bytes=check.read_bytes, on_progress=on_progress, device=device) as reader:
            model = build(architecture, reader)
    read_s = time.perf_counter() - started_s
    kv_scales, scale_names = read_kv_scales(checkpoint, architecture.spec())
    lines = (runtime.note(), skipped_line(checkpoint.tensors),
             unused_warning(checkpoint.unused(check.used | scale_names)))
    return LoadedModel(model=model, spec=architecture.spec(), generation_defaults=defaults,
                       kv_scales=kv_scales,
                       weights_bytes=reader.held_bytes, weights_form=reader.form_in_words(),
                       read_bytes=check.read_bytes, read_s=read_s,
                       draft=DraftWeights.of(checkpoint, DTYPES[chosen]),
                       warnings=tuple(line for line in lines if line))
