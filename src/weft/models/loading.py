"""Loading of a checkpoint directory into a model that is ready to run: check everything, then read.

    config.json -> Architecture -> build against headers (no weights read) -> build against the files

The first build reports every missing or mis-shaped tensor and counts the bytes. So the second can only fail half way
for values that are not finite, and progress has a denominator.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from weft.config import DTypeChoice, QuantizeChoice
from weft.errors import CheckpointError
from weft.families import named_dtype
from weft.families.architecture import Architecture
from weft.families.tower_tensors import tower_prefix
from weft.models.checkpoint_files import CheckpointFiles, DraftWeights, skipped_line, text_alone_line, unused_warning
from weft.models.decoder import CausalModel
from weft.models.families import build
from weft.models.generation import GenerationDefaults, read_generation_defaults
from weft.models.kv_scales import read_kv_scales
from weft.models.mtp import load_mtp
from weft.models.rank_share import RankGroup, RankShare
from weft.models.reader import TensorCheck, TensorReader
from weft.models.runtime_form import RuntimeForm
from weft.models.safetensors_header import unread_line
from weft.models.score_head import HEAD_TENSORS, architecture_in, is_headless, read_score_head
from weft.models.stored_values import check_copies, check_derived, check_unused
from weft.models.weights import OnProgress
from weft.models.weights_cache import WeightsCache
from weft.spec import DTypeName, ModelSpec
from weft.tensor import gpu
from weft.tensor.device import multiplies_fp8
from weft.tensor.layout import DTYPES
from weft.tensor.weights.tiles import serves_coded

if TYPE_CHECKING:
    from weft.models.vision.loading import LoadedVision

_NAMES_SHOWN = 4
_NAME_OF_STORED: dict[str, DTypeName] = {"F32": "float32", "F64": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that was loaded. ``spec.dtype`` is the dtype of all computation. ``weights_bytes``: the memory that the
    weights take, ``weights_form`` their form in words. ``read_bytes`` of the files were read in ``read_s`` seconds,
    ordering and rounding included. ``headless``: the model has no head for next tokens. ``kv_scales``: those of the
    checkpoint, see ``read_kv_scales``. ``warnings``: one sentence each, about the checkpoint.
    """

    model: CausalModel
    spec: ModelSpec
    generation_defaults: GenerationDefaults
    weights_bytes: int
    warnings: tuple[str, ...] = ()
    kv_scales: Mapping[int, torch.Tensor] = field(default_factory=dict)
    weights_form: str = ""
    read_bytes: int = 0
    read_s: float = 0.0
    headless: bool = False


def load_model(
    directory: Path,
    dtype: DTypeChoice = "auto",
    on_progress: OnProgress | None = None,
    *,
    quantize: QuantizeChoice = "none",
    quantize_inputs: bool = True,
    twelve_bit: bool = True,
    device: torch.device | None = None,
    allow_nonfinite: bool = False,
    mtp: bool = False,
    weights_cache: WeightsCache | None = None,
    ranks: RankGroup | None = None,
) -> LoadedModel:
    """Load the checkpoint in ``directory`` with weights in ``dtype``; "auto" is the dtype that config.json names, or
    else that of the stored embedding. ``on_progress(done_bytes, all_bytes)`` is called as tensors are read.
    ``quantize``, ``quantize_inputs``, ``twelve_bit``: see ``runtime_form``. ``device``: of the weights, the CPU by
    default. ``allow_nonfinite``: NaN and infinity in weights are a warning. ``mtp``: the head for multi-token
    prediction too. ``ranks``: this process holds the share of one rank.

    Before any weight is read, raises UnknownArchitectureError, or CheckpointError naming file, tensor, and stored and
    expected shape. While weights are read, CheckpointError for values that are not finite.
    """
    checkpoint, place = CheckpointFiles.open(Path(directory)), device or torch.device("cpu")
    name = named_dtype(checkpoint.config) if dtype == "auto" else dtype
    chosen: DTypeName = name or _NAME_OF_STORED.get(checkpoint.stored_dtype, "float32")
    architecture = dataclasses.replace(architecture_in(checkpoint), dtype=chosen)
    tower = architecture.vision
    if tower is not None and tower_prefix(checkpoint.tensors, tower) is None:
        architecture = dataclasses.replace(architecture, vision=None)
    share = None if ranks is None else ranks.share(architecture)
    _check_device(architecture, place)
    whole, whole_spec = architecture, architecture.spec()
    architecture = architecture if share is None else share.architecture
    defaults = read_generation_defaults(checkpoint.directory, checkpoint.config)
    runtime = RuntimeForm(
        quantize,
        not quantize_inputs,
        True,
        twelve_bit,
        gpu.reaches(place),
        # Not for float32 models, which are served for accuracy: e4m3 has 4 bits, and sums are bfloat16.
        fp8_inputs=quantize_inputs and chosen != "float32" and multiplies_fp8(place),
        coded_tiles=quantize == "none" and serves_coded(place, DTYPES[chosen]),
    )
    started_s = time.perf_counter()
    with torch.inference_mode():
        check = TensorCheck(checkpoint, DTYPES[chosen], runtime, share)
        try:
            build(architecture, check)
        except RuntimeError:  # torch: a tensor of more bytes than an address can count
            check.raise_problems()
            raise
        check.raise_problems()
        check_copies(checkpoint, check.copies)
        check_derived(checkpoint, check.derived)
        kv_scales, scale_names = read_kv_scales(checkpoint, whole_spec)
        drafts = DraftWeights.of(checkpoint, DTYPES[chosen], architecture.layer_count)
        used = check.used if share is None else _used_by_all_ranks(checkpoint, whole)
        unused = checkpoint.unused(used | scale_names | HEAD_TENSORS | (drafts.names if drafts else frozenset()))
        check_unused(checkpoint, unused)
        score_head = read_score_head(checkpoint, whole_spec.hidden_size, device)
        if share is not None:
            kv_scales = share.head_scales(kv_scales)
        vision = None
        if ranks is None or ranks.place.rank == 0:  # it sends the rows of pictures to the others
            vision = _load_vision(checkpoint, architecture, DTYPES[chosen], device, allow_nonfinite)
        with (
            weights_cache or nullcontext(),
            TensorReader(
                check, on_progress=on_progress, device=device, allow_nonfinite=allow_nonfinite, cache=weights_cache
            ) as reader,
        ):
            model = build(architecture, reader)
    model.score_head = score_head
    model.vision = None if vision is None else vision.encoder
    head_bytes, head_line = _add_mtp(model, drafts, runtime, device, share) if mtp and drafts else (0, None)
    read_s = time.perf_counter() - started_s
    lines = (
        runtime.note(),
        reader.form.note(),
        defaults.note(),
        text_alone_line(checkpoint.config),
        unread_line(checkpoint.directory),
        skipped_line(checkpoint.tensors, sees=vision is not None),
        _nonfinite_warning(reader.nonfinite),
        head_line,
        unused_warning(unused),
    )
    return LoadedModel(
        model=model,
        spec=model.spec,
        generation_defaults=defaults,
        kv_scales=kv_scales,
        weights_bytes=(reader.held_bytes + head_bytes + (0 if vision is None else vision.held_bytes)),
        weights_form=reader.form_in_words(),
        read_bytes=check.read_bytes,
        read_s=read_s,
        headless=is_headless(checkpoint),
        warnings=tuple(line for line in lines if line),
    )


def _used_by_all_ranks(checkpoint: CheckpointFiles, architecture: Architecture) -> set[str]:
    """Return the names that a model without ranks reads: a rank may ask for only its own experts."""
    check = TensorCheck(checkpoint, DTYPES[architecture.dtype])
    build(architecture, check)
    return check.used


def check_model(directory: Path, dtype: DTypeChoice = "auto") -> None:
    """Build the checkpoint in ``directory`` against its headers, and read no weight. Raises CheckpointError that
    names each tensor that is missing or has another shape, UnknownArchitectureError."""
    checkpoint = CheckpointFiles.open(Path(directory))
    name = named_dtype(checkpoint.config) if dtype == "auto" else dtype
    chosen: DTypeName = name or _NAME_OF_STORED.get(checkpoint.stored_dtype, "float32")
    with torch.inference_mode():
        check = TensorCheck(checkpoint, DTYPES[chosen])
        build(dataclasses.replace(architecture_in(checkpoint), dtype=chosen), check)
        check.raise_problems()


def _load_vision(
    checkpoint: CheckpointFiles,
    architecture: Architecture,
    dtype: torch.dtype,
    device: torch.device | None,
    allow_nonfinite: bool,
) -> LoadedVision | None:
    """Return the vision tower, None for an architecture without one, whose start does without these modules."""
    if architecture.vision is None:
        return None
    from weft.models.vision.loading import load_vision

    return load_vision(checkpoint, architecture, dtype, device, allow_nonfinite=allow_nonfinite)


def _check_device(architecture: Architecture, place: torch.device) -> None:
    if architecture.why_no_gpu and place.type != "cpu":
        raise CheckpointError(
            f"{architecture.family} {architecture.why_no_gpu}, which weft computes only on "
            f"CPUs; this is {place}. Use --device cpu",
            param="--device",
        )


def _add_mtp(
    model: CausalModel,
    weights: DraftWeights,
    runtime: RuntimeForm,
    device: torch.device | None,
    share: RankShare | None,
) -> tuple[int, str | None]:
    """Give ``model`` its head. Return the bytes of the head, and a note on heads of the checkpoint that are
    not read.
    """
    try:
        model.mtp, held_bytes = load_mtp(model.architecture, weights, model, runtime, device, share)
    except CheckpointError as error:
        return 0, f"The head for multi-token prediction is left out: {error}"
    model.spec = model.architecture.spec(mtp=True)
    model.keeps_streams = model.mtp.collapse is not None
    return held_bytes, None if weights.count == 1 else (
        f"Of {weights.count} heads for multi-token prediction, the first makes all drafts."
    )


def _nonfinite_warning(names: list[str]) -> str | None:
    if not names:
        return None
    listed = sorted(set(names))
    more = f" and {len(listed) - _NAMES_SHOWN} more" if len(listed) > _NAMES_SHOWN else ""
    return f"NaN or infinite values are in {', '.join(listed[:_NAMES_SHOWN])}{more}: answers may be nonsense"
