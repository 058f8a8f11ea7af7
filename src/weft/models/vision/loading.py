"""The vision tower of a checkpoint: found by its tensors, checked against headers, then read.

    model.vision_tower.vision_model.…   releases of LFM2-VL         model.multi_modal_projector.…
    model.vision_tower.…                saves of transformers       the same
    vision_tower.…, vision_model.…      older saves                 multi_modal_projector.…
    model.vision_tower.…                LFM3-VL                     the same
    model.visual.…, visual.…            Qwen3.5                     the same prefix: its projector is merger.…

A checkpoint whose config.json describes a tower may have only its text part, as after some conversions: it has no
tower then, which is a sentence at start, not an error. With several ranks only the first reads the tower.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from weft.families.architecture import Architecture
from weft.families.tower_tensors import tower_prefix
from weft.families.vision import TowerKind, VisionTower
from weft.images.settings import ImageSettings, read_settings
from weft.models.checkpoint_files import CheckpointFiles
from weft.models.reader import TensorCheck, TensorReader
from weft.models.runtime_form import RuntimeForm
from weft.models.table_reader import TableReader
from weft.models.vision import lfm3
from weft.models.vision.encoder import VisionEncoder
from weft.models.vision.qwen3_5 import TurnedPlaces
from weft.models.vision.siglip2 import InterpolatedPlaces
from weft.models.vision.tower import PatchPlaces, ReadMixer, TowerEncoder, build_tower, read_attended
from weft.models.weights import TensorSource

_PROJECTORS = ("model.multi_modal_projector", "multi_modal_projector")
_PARTS: dict[TowerKind, tuple[Callable[[VisionTower, TableReader], PatchPlaces], ReadMixer]] = {
    "siglip2": (InterpolatedPlaces.of, read_attended),
    "qwen3_5": (TurnedPlaces.of, read_attended),
    "lfm3": (TurnedPlaces.of, lfm3.read_mixer),
}


@dataclass(frozen=True, slots=True)
class LoadedVision:
    """A loaded tower. ``held_bytes``: of the weights."""

    encoder: VisionEncoder
    held_bytes: int


def load_vision(
    checkpoint: CheckpointFiles,
    architecture: Architecture,
    dtype: torch.dtype,
    device: torch.device | None = None,
    *,
    allow_nonfinite: bool = False,
) -> LoadedVision:
    """Return the tower of an architecture that has one.

    Raises CheckpointError as ``load_model`` does, and for settings of pictures that do not fit the tower.
    """
    tower = architecture.vision
    assert tower is not None
    prefix = tower_prefix(checkpoint.tensors, tower)
    assert prefix is not None
    settings = read_settings(checkpoint.directory, tower)
    projector = (
        prefix
        if tower.kind == "qwen3_5"
        else next((name for name in _PROJECTORS if f"{name}.linear_1.weight" in checkpoint.tensors), _PROJECTORS[0])
    )
    build = partial(read_tower, tower, architecture.hidden_size, settings, vision=prefix, projector=projector)
    whole = replace(checkpoint, prefix="")
    with torch.inference_mode():
        check = TensorCheck(whole, dtype, RuntimeForm(twelve_bit=False))
        build(check)
        check.raise_problems()
        with TensorReader(check, device=device, allow_nonfinite=allow_nonfinite) as reader:
            encoder = build(reader)
    return LoadedVision(encoder, reader.held_bytes)


def read_tower(
    tower: VisionTower, text_hidden: int, settings: ImageSettings, source: TensorSource, *, vision: str, projector: str
) -> TowerEncoder:
    """Read the tower as ``build_tower``, with the parts of its kind."""
    places_of, mixer_of = _PARTS[tower.kind]
    return build_tower(
        tower, text_hidden, settings, source, vision=vision, projector=projector, places_of=places_of, mixer_of=mixer_of
    )
