"""The vision tower of a checkpoint: found by its tensors, checked against headers, then read.

    model.vision_tower.vision_model.…   releases of LFM2-VL         model.multi_modal_projector.…
    model.vision_tower.…                what transformers saves     the same
    vision_tower.…, vision_model.…      older saves                 multi_modal_projector.…

A checkpoint whose config.json tells of a tower may hold its text part alone, as some conversions do: it has
no tower then, which is a sentence at start and no error. Under tensor parallelism no rank reads the tower.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch

from weft.families.architecture import Architecture
from weft.images.settings import read_settings
from weft.models.checkpoint_files import CheckpointFiles
from weft.models.reader import TensorCheck, TensorReader
from weft.models.runtime_form import RuntimeForm
from weft.models.vision.encoder import VisionEncoder
from weft.models.vision.siglip2 import build_siglip2

_TOWERS = tuple(f"{wrapper}{name}" for wrapper in ("model.", "")
                for name in ("vision_tower.vision_model", "vision_tower", "vision_model"))
_PROJECTORS = ("model.multi_modal_projector", "multi_modal_projector")
_FIRST = "embeddings.patch_embedding.weight"


def tower_prefix(checkpoint: CheckpointFiles) -> str | None:
    """Where the tower's tensors lie, None without any."""
    return next((name for name in _TOWERS if f"{name}.{_FIRST}" in checkpoint.tensors), None)


@dataclass(frozen=True, slots=True)
class LoadedVision:
    """``held_bytes``: of the weights."""

    encoder: VisionEncoder
    held_bytes: int


def load_vision(checkpoint: CheckpointFiles, architecture: Architecture, dtype: torch.dtype,
                device: torch.device | None = None, *,
                allow_nonfinite: bool = False) -> LoadedVision | None:
    """None for an architecture without a tower.

    Raises CheckpointError as ``load_model`` does, and for settings of pictures that do not fit the tower.
    """
    tower, prefix = architecture.vision, tower_prefix(checkpoint)
    if tower is None:
        return None
    assert prefix is not None
    settings = read_settings(checkpoint.directory, tower)
    projector = next((name for name in _PROJECTORS if f"{name}.linear_1.weight" in checkpoint.tensors),
                     _PROJECTORS[0])
    build = partial(build_siglip2, tower, architecture.hidden_size, settings, vision=prefix,
                    projector=projector)
    whole = replace(checkpoint, prefix="")
    with torch.inference_mode():
        check = TensorCheck(whole, dtype, RuntimeForm(twelve_bit=False))
        build(check)
        check.raise_problems()
        with TensorReader(check, device=device, allow_nonfinite=allow_nonfinite) as reader:
            encoder = build(reader)
    return LoadedVision(encoder, reader.held_bytes)
