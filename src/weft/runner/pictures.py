"""Rows of pictures on the device: encoded once, and put into steps in place of embeddings.

    PictureQueue (weft.engine.pictures) --pieces--> rows of a digest [R, D]
    admission: row 3 of the batch has picture d at positions 17..272
    a step with run [0, 64) of row 3  --> index in the step 17..63 <- rows 0..46 of d

Rows are addressed by the position in the prompt alone. So the edges of chunks, hits, preemptions and
resumptions are no cases of their own.

The engine drops rows while a step may be in flight that admits a sequence with them: such a sequence was
cancelled, and what it computes is cached all the same. So rows go only when a step that began later is
applied.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from weft.errors import RequestError
from weft.images.picture import Picture
from weft.models.decoder import CausalModel
from weft.models.vision.encoder import VisionEncoder
from weft.request import PlacedPicture
from weft.runner.kv_scales import Model
from weft.schedule.plan import StepPlan
from weft.spec import ITEM_BYTES
from weft.tensor.device import current
from weft.tensor.inputs import EmbeddedRows


class PictureRows:
    """See ``weft.engine.pictures.PictureEncoder``, which it is."""

    def __init__(self, vision: VisionEncoder, image_token: int, row_bytes: int, device: torch.device) -> None:
        self.vision: VisionEncoder | None = vision
        self.image_token = image_token
        self.row_bytes = row_bytes
        self._device = device
        self._rows: dict[bytes, torch.Tensor] = {}
        self._dropped: list[tuple[bytes, torch.Tensor]] = []
        self._drops_by_step: dict[int, list[tuple[bytes, torch.Tensor]]] = {}
        self._places: dict[int, list[tuple[int, torch.Tensor]]] = {}
        """By row of the batch: (first position, rows [n, D]) of each place."""

    # ------------------------------------------------------------------ the engine's side

    def check(self, picture: PlacedPicture) -> None:
        try:
            counts = [part for part in Picture.from_bytes(picture.data).text if isinstance(part, int)]
        except ValueError as error:
            raise RequestError(f"a picture cannot be read: {error}", param="pictures") from None
        if counts != [count for _, count in picture.places]:
            raise RequestError(f"a picture has {counts} rows in its tiles; the prompt has places for "
                               f"{[count for _, count in picture.places]}", param="pictures")

    def pieces(self, picture: PlacedPicture) -> Iterator[None]:
        assert self.vision is not None, "a picture came while the engine slept"
        encoding = self.vision.encode(Picture.from_bytes(picture.data))
        while True:
            with torch.inference_mode(), current(self._device):
                try:
                    next(encoding)
                except StopIteration as end:
                    self._rows[picture.digest] = end.value
                    return
            yield

    def drop(self, digest: bytes) -> None:
        self._dropped.append((digest, self._rows[digest]))

    def release(self, *, weights: bool) -> None:
        """Gives all rows back at once, and the tower with ``weights``. No step is in flight, none is admitted
        before ``vision`` is set again."""
        self._rows.clear()
        self._dropped.clear()
        self._drops_by_step.clear()
        self._places.clear()
        if weights:
            self.vision = None

    def begun(self, step: int) -> None:
        """Step ``step`` is the next that is applied after those in flight."""
        if self._dropped:
            self._drops_by_step[step], self._dropped = self._dropped, []

    # ------------------------------------------------------------------ the side of the steps

    def apply(self, plan: StepPlan) -> None:
        """The rows of the batch that ``plan`` clears and fills."""
        for row in plan.rows_cleared:
            self._places.pop(row, None)
        for admission in plan.admissions:
            if admission.pictures:
                self._places[admission.row] = list(self._placed(admission.pictures))
        for digest, rows in self._drops_by_step.pop(plan.step, ()):
            if self._rows.get(digest) is rows:   # else it was encoded again
                del self._rows[digest]

    def of_step(self, plan: StepPlan) -> EmbeddedRows | None:
        """What ``plan`` computes of pictures: indices in its tokens, without padding."""
        indices, parts = [], []
        if self._places:
            offsets = plan.lengths.cumsum() - plan.lengths
            for run in range(plan.decode_count, plan.run_count):
                start, end = int(plan.starts[run]), int(plan.starts[run] + plan.lengths[run])
                for first, rows_ND in self._places.get(int(plan.rows[run]), ()):
                    low, high = max(first, start), min(first + len(rows_ND), end)
                    if low < high:
                        indices.append(torch.arange(low, high) + (int(offsets[run]) - start))
                        parts.append(rows_ND[low - first:high - first])
        if not indices:
            return None
        return EmbeddedRows(torch.cat(indices).to(self._device), torch.cat(parts))

    def _placed(self, pictures: tuple[PlacedPicture, ...]) -> Iterator[tuple[int, torch.Tensor]]:
        for picture in pictures:
            rows_ND = self._rows[picture.digest]
            for first, count in picture.places:
                yield first, rows_ND[:count]
                rows_ND = rows_ND[count:]


def picture_rows(model: Model, device: torch.device) -> PictureRows | None:
    """None where ``model`` reads text only."""
    if not isinstance(model, CausalModel) or model.vision is None:
        return None
    architecture = model.architecture
    assert architecture.vision is not None
    return PictureRows(model.vision, architecture.vision.image_token_id,
                       architecture.hidden_size * ITEM_BYTES[architecture.dtype], device)
