"""What of a multimodal checkpoint is left on disk: its eyes and ears. Weft serves the text part.

A tower is known by the place of its tensors. One line names the skipped towers and their bytes. So the
account of the files is complete, and it is clear that images are not understood.
"""

from __future__ import annotations

from collections.abc import Mapping

from weft.models.safetensors_header import StoredTensor
from weft.units import format_bytes

_TOWERS: dict[str, tuple[str, ...]] = {
    "vision tower": ("visual.", "vision_tower.", "vision_model.", "multi_modal_projector.", "embed_vision."),
    "audio tower": ("audio_tower.", "audio_model.", "embed_audio."),
}

SKIPPED_PREFIXES: tuple[str, ...] = tuple(
    wrapper + name for names in _TOWERS.values() for name in names for wrapper in ("", "model."))


def skipped_line(tensors: Mapping[str, StoredTensor]) -> str | None:
    """One sentence for the user; None for a checkpoint of text alone."""
    towers = []
    for tower, names in _TOWERS.items():
        prefixes = names + tuple(f"model.{name}" for name in names)
        sizes = [stored.stored_bytes for name, stored in tensors.items() if name.startswith(prefixes)]
        if sizes:
            plural = "s" if len(sizes) > 1 else ""
            towers.append(f"{tower} ({len(sizes)} tensor{plural}, {format_bytes(sum(sizes))})")
    if not towers:
        return None
    return f"Skipped the {' and the '.join(towers)}: weft serves the text part of this model."
