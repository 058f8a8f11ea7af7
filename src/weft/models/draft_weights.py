"""Heads for multi-token prediction that a checkpoint brings (``mtp.*``): a handle, nothing is read.

They are left out of the model and of its bytes, unless speculation wants them (``weft.models.mtp``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from weft.models.checkpoint_files import DRAFT_PREFIXES, CheckpointFiles


@dataclass(frozen=True, slots=True)
class DraftWeights:
    """``names``: behind the prefix, sorted. ``stored_bytes``: in the files."""

    checkpoint: CheckpointFiles
    dtype: torch.dtype
    names: tuple[str, ...]
    stored_bytes: int

    @classmethod
    def of(cls, checkpoint: CheckpointFiles, dtype: torch.dtype) -> DraftWeights | None:
        """None for a checkpoint without such heads."""
        for prefix in DRAFT_PREFIXES:
            heads = [stored for name, stored in checkpoint.tensors.items() if name.startswith(prefix)]
            if heads:
                names = tuple(sorted(stored.name.removeprefix(prefix) for stored in heads))
                return cls(replace(checkpoint, prefix=prefix), dtype, names,
                           sum(stored.stored_bytes for stored in heads))
        return None
