"""Rows of pictures on the device: encoded once, and put into steps instead of embeddings.

    PictureQueue (weft.engine.pictures) --pieces--> rows of a digest [R, D]
    admission: row 3 of the batch has picture d at positions 17..272
    a step with run [0, 64) of row 3  --> index in the step 17..63 <- rows 0..46 of d
                                      --> turns 0..16, then by the grid of d (``weft.pictures.Turns``)

Rows are addressed only by the position in the prompt, and turns are computed only from the places of the pictures. So
the edges of chunks, hits, preemptions and resumptions need no special cases.

Decodes come after every picture: the turn of a decode is its position plus one number per row, which graphs read from
``deltas_R``.

On a GPU a piece is launched once the piece before the last is done: the device always has the next piece, and at most
two pieces delay a step, however large a picture is.

The engine drops rows while a step may be in flight that admits a sequence with them: such a sequence was cancelled,
and its results are cached all the same. So rows go only when a step that began later is applied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from weft.errors import RequestError
from weft.families.vision import VisionTower
from weft.images.picture import Picture
from weft.models.decoder import CausalModel
from weft.models.vision.encoder import VisionEncoder
from weft.pictures import Turns
from weft.request import PlacedPicture
from weft.runner.kv_scales import Model
from weft.schedule.plan import StepPlan
from weft.tensor.device import current, recorded, wait_for
from weft.tensor.layout import DTYPES
from weft.units import PAD

Int64s = npt.NDArray[np.int64]
Grids = tuple[tuple[int, int], ...]
_PLAIN = Turns(())


@dataclass(frozen=True, slots=True, eq=False)
class _Encoded:
    """One encoded picture: ``rows_RD``; ``grids``: (rows, columns) of the text that each tile fills."""

    rows_RD: torch.Tensor
    grids: Grids


class PictureRows:
    """The ``weft.engine.pictures.PictureEncoder`` of one device. ``vision`` None: a rank that receives rows from the
    first (``receive``). ``hidden``: width of the text model, in ``dtype``. ``rows_max``: rows of the batch.
    """

    def __init__(
        self,
        vision: VisionEncoder | None,
        tower: VisionTower,
        hidden: int,
        dtype: torch.dtype,
        device: torch.device,
        rows_max: int,
    ) -> None:
        self.vision = vision
        self.picture_tokens = tower.picture_tokens
        self.row_bytes = hidden * dtype.itemsize
        self.deltas_R = torch.zeros(rows_max + 1, dtype=torch.int64, device=device) if tower.sections else None
        """Number that a row of the batch adds to its position; None for a model whose positions are plain."""
        self._factor = tower.projector.downsample_factor
        self._hidden, self._dtype = hidden, dtype
        self._device = device
        self._rows: dict[bytes, _Encoded] = {}
        self._dropped: list[tuple[bytes, _Encoded]] = []
        self._drops_by_step: dict[int, list[tuple[bytes, _Encoded]]] = {}
        self._places: dict[int, list[tuple[int, torch.Tensor]]] = {}
        """By row of the batch: (first position, rows [n, D]) of each place."""
        self._turns: dict[int, Turns] = {}
        """Turns by row of the batch, of rows whose turns differ from their positions."""

    @property
    def fields(self) -> int:
        """Numbers of a token in a recorded step: its row among the step's pictures, and its three turns."""
        return 1 if self.deltas_R is None else 4

    def room(self, tokens: int) -> torch.Tensor:
        """Return memory for the rows of a recorded step, [tokens, D]."""
        return torch.zeros((tokens, self._hidden), dtype=self._dtype, device=self._device)

    # ------------------------------------------------------------------ the engine's side

    def check(self, picture: PlacedPicture) -> None:
        try:
            counts = [part for part in Picture.from_bytes(picture.data).text if isinstance(part, int)]
        except ValueError as error:
            raise RequestError(f"a picture cannot be read: {error}", param="pictures") from None
        if counts != [count for _, count in picture.places]:
            raise RequestError(
                f"a picture has {counts} rows in its tiles; the prompt has places for "
                f"{[count for _, count in picture.places]}",
                param="pictures",
            )

    def pieces(self, picture: PlacedPicture) -> Iterator[None]:
        assert self.vision is not None, "a picture came while the engine slept"
        seen = Picture.from_bytes(picture.data)
        grids = tuple((tile.rows // self._factor, tile.columns // self._factor) for tile in seen.tiles)
        encoding, before = self.vision.encode(seen), None
        while True:
            with torch.inference_mode(), current(self._device):
                try:
                    next(encoding)
                except StopIteration as end:
                    self._rows[picture.digest] = _Encoded(end.value, grids)
                    return
                except torch.OutOfMemoryError:
                    break
                queued = recorded(self._device)
                if before is not None:
                    wait_for(before)
                before = queued
            yield
        # Outside of the handler, which holds the memory of the tower by its traceback.
        patches = sum(len(tile.patches) for tile in seen.tiles)
        raise RequestError(
            f"a picture of {patches} patches does not fit into the free memory of the GPU: send a smaller one, or "
            "lower --gpu-memory-fraction",
            param="pictures",
        )

    def encoded(self, digest: bytes) -> tuple[bytes, Grids]:
        """Return an encoded picture, for ``receive`` of another rank."""
        picture = self._rows[digest]
        return picture.rows_RD.contiguous().view(torch.uint8).cpu().numpy().tobytes(), picture.grids

    def receive(self, digest: bytes, data: bytes, grids: Grids) -> None:
        rows_RD = torch.frombuffer(bytearray(data), dtype=self._dtype).view(-1, self._hidden)
        self._rows[digest] = _Encoded(rows_RD.to(self._device), grids)

    def drop(self, digest: bytes) -> None:
        self._dropped.append((digest, self._rows[digest]))

    def release(self, *, weights: bool) -> None:
        """Free all rows at once, and the tower with ``weights``. No step may be in flight, and none is admitted before
        ``vision`` is set again.
        """
        self._rows.clear()
        self._dropped.clear()
        self._drops_by_step.clear()
        self._places.clear()
        if weights:
            self.vision = None

    def begun(self, step: int) -> None:
        """Record that step ``step`` is the next that is applied after those in flight."""
        if self._dropped:
            self._drops_by_step[step], self._dropped = self._dropped, []

    # ------------------------------------------------------------------ the side of the steps

    def apply(self, plan: StepPlan) -> None:
        """Take the rows of the batch that ``plan`` clears and fills."""
        for row in plan.rows_cleared:
            self._places.pop(row, None)
            if self._turns.pop(row, None) is not None and self.deltas_R is not None:
                self.deltas_R[row] = 0
        for admission in plan.admissions:
            if admission.pictures:
                self._places[admission.row] = list(self._placed(admission.pictures))
                if self.deltas_R is not None:
                    turns = self._turns[admission.row] = Turns(self._spans(admission.pictures))
                    self.deltas_R[admission.row] = turns.delta
        for digest, rows in self._drops_by_step.pop(plan.step, ()):
            if self._rows.get(digest) is rows:  # else it was encoded again
                del self._rows[digest]

    def of_step(self, plan: StepPlan) -> tuple[Int64s, torch.Tensor] | None:
        """Return the rows of pictures that ``plan`` computes: indices in its tokens, without padding [N], and rows [N,
        D].
        """
        indices, parts = [], []
        if self._places:
            offsets = plan.lengths.cumsum() - plan.lengths
            for run in range(plan.decode_count, plan.run_count):
                start, end = int(plan.starts[run]), int(plan.starts[run] + plan.lengths[run])
                for first, rows_ND in self._places.get(int(plan.rows[run]), ()):
                    low, high = max(first, start), min(first + len(rows_ND), end)
                    if low < high:
                        indices.append(np.arange(low, high, dtype=np.int64) + (int(offsets[run]) - start))
                        parts.append(rows_ND[low - first : high - first])
        return (np.concatenate(indices), torch.cat(parts)) if indices else None

    def turn(self, rows: Sequence[int]) -> bool:
        """Return whether the turns of some of ``rows`` of the batch differ from their positions."""
        return bool(self._turns) and any(row in self._turns for row in rows)

    def turns_of_step(self, plan: StepPlan) -> Int64s:
        """Return the turns of the tokens of ``plan``, without padding: [T], and [3, T] if a picture is among them."""
        parts, plain = [], True
        for row, start, length in zip(plan.rows.tolist(), plan.starts.tolist(), plan.lengths.tolist(), strict=True):
            turns = self._turns.get(row, _PLAIN)
            parts.append(turns.at(start, start + length))
            plain = plain and turns.plain(start)
        turned_3T = np.concatenate(parts, 1, dtype=np.int64)
        return turned_3T[0] if plain else turned_3T

    def turns_at(self, rows: Sequence[int], positions: Sequence[int]) -> Int64s | None:
        """Return the turns of single tokens of ``rows``: [3, X], None if they equal the positions."""
        if not self.turn(rows):
            return None
        return np.concatenate(
            [
                self._turns.get(row, _PLAIN).at(position, position + 1)
                for row, position in zip(rows, positions, strict=True)
            ],
            1,
        )

    def deltas(self, rows: Sequence[int]) -> Int64s:
        """Return the numbers that decodes of ``rows`` add to their positions."""
        return np.array([self._turns.get(row, _PLAIN).delta for row in rows], np.int64)

    def _spans(self, pictures: tuple[PlacedPicture, ...]) -> list[tuple[int, int, int]]:
        return [
            (first, *grid)
            for picture in pictures
            for (first, _), grid in zip(picture.places, self._rows[picture.digest].grids, strict=True)
        ]

    def _placed(self, pictures: tuple[PlacedPicture, ...]) -> Iterator[tuple[int, torch.Tensor]]:
        for picture in pictures:
            rows_ND = self._rows[picture.digest].rows_RD
            for first, count in picture.places:
                yield first, rows_ND[:count]
                rows_ND = rows_ND[count:]


def padded(turns: Int64s, decodes: int, pads: int) -> Int64s:
    """Return ``turns`` of a step with ``pads`` rows of PAD after its decodes."""
    return np.insert(turns, [decodes] * pads, PAD, axis=-1) if pads else turns


def picture_rows(model: Model, device: torch.device, rows_max: int) -> PictureRows | None:
    """Return the picture rows for ``model``; None if it reads only text."""
    if not isinstance(model, CausalModel) or model.architecture.vision is None:
        return None
    architecture = model.architecture
    assert architecture.vision is not None
    return PictureRows(
        model.vision, architecture.vision, architecture.hidden_size, DTYPES[architecture.dtype], device, rows_max
    )
