"""The first of two builds: every tensor of a model checked against the headers, and no weight read."""

from __future__ import annotations

import torch

from weft.errors import CheckpointError
from weft.models.checkpoint_files import CheckpointFiles
from weft.models.forms.stored_form import FLOATS
from weft.models.runtime_form import RuntimeForm
from weft.models.sharded_model import RankShare
from weft.models.stored_values import TORCH_DTYPES
from weft.models.weights import TensorSource

_PROBLEMS_SHOWN = 8
_UNNAMED_FORM = " (quantised tensors need a quantization_config in config.json)"


class TensorCheck(TensorSource):
    """Notes every fault; ``raise_problems`` then reports them together. ``order``: the names in the order of
    the build, which is the order that the reader fetches them in. ``read_bytes``: what the reader will
    read."""

    def __init__(self, checkpoint: CheckpointFiles, dtype: torch.dtype,
                 runtime: RuntimeForm | None = None, share: RankShare | None = None) -> None:
        super().__init__(checkpoint, dtype, runtime, share)
        self.problems: list[str] = []
        self.order: list[str] = []
        self.read_bytes = 0

    @property
    def device(self) -> torch.device:
        return torch.device("meta")

    def _stored(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> torch.Tensor:
        stored = self.checkpoint.tensors.get(name)
        self.used.add(name)
        shard = self.shard_of(name)
        if stored is None:
            self.problems.append(f"{self.checkpoint.source}: tensor {name} of shape {list(shape)} is missing")
        elif stored.dtype not in dtypes:
            self.problems.append(f"{stored.file}: tensor {name} is stored as {stored.dtype}; weft reads "
                                 f"{', '.join(dtypes)} here{_UNNAMED_FORM if dtypes == FLOATS else ''}")
        elif shard is not None and (not shard.fits(stored.shape) or shard.of_rank(stored.shape) != shape):
            self.problems.append(f"{stored.file}: tensor {name} has shape {list(stored.shape)}; config.json "
                                 f"makes the part of a rank {list(shape)}")
        elif shard is None and stored.shape != shape:
            self.problems.append(f"{stored.file}: tensor {name} has shape {list(stored.shape)}; "
                                 f"config.json makes it {list(shape)}")
        else:
            self.read_bytes += stored.stored_bytes if shard is None else shard.read_bytes(stored.stored_bytes)
            self.order.append(name)
        known = stored.dtype if stored is not None and stored.dtype in dtypes else dtypes[0]
        return torch.empty(shape, dtype=TORCH_DTYPES.get(known, torch.uint8), device="meta")

    def raise_problems(self) -> None:
        """Raises CheckpointError with the faults (the first few in full)."""
        if not self.problems:
            return
        shown = "; ".join(self.problems[:_PROBLEMS_SHOWN])
        more = len(self.problems) - _PROBLEMS_SHOWN
        raise CheckpointError(shown + (f"; and {more} more like these" if more > 0 else ""), param="model")
