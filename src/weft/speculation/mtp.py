"""Drafts from the model's own head for multi-token prediction, and whether it pays to ask the head.

    step k     tokens chosen --head--> offer(d1 d2 d3, with the head's chance of each)
    step k+1   propose            the head's chances, calibrated, compete with those of other sources
    step k+1   drafts wanted      how many tokens the head drafts behind this step

Other sources cost the host some microseconds. A draft of the head costs device time, before it is known
whether it will be verified. So the number of drafts is chosen ahead, by the average chance of each place and
by the measured seconds of the head:

    tokens / seconds  =  R (1 + a1 + a1 a2 + ...) / (cost(R (1 + k)) + head(R, k))     R sequences, k drafts

The best k wins if it beats a step without the head by GAIN_MIN. Where it does not pay, it stays off. Then it
is asked again every PROBE_STEPS steps, since a text may have become easier to predict.

The head's own chance is calibrated by classes: of those that it gave between 0.6 and 0.7, what share was
right. First drafts and later ones have tables of their own, as later ones read the head's own hidden state.

Rejected: the chances of the head as they are (a head trained on other text is too sure of itself); a number
of drafts for each sequence (the head computes all sequences in one batch).
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.speculation.choice import GAIN_MIN
from weft.speculation.costs import SHAPE_STEP, StepCosts
from weft.speculation.proposal import Proposal

HEAD_DRAFTS_MAX = 3
PROBE_STEPS = 64
_CLASSES = 10
_CLASS_WEIGHT = 4.0
"""Tokens that the head's own chance counts as, in each class."""
_DECAY = 0.995
_PLACE_GUESS = 0.75
_PLACE_WEIGHT = 4.0
_PLACE_DECAY = 0.98
_CHANCE_MAX = 0.98
_DRAFT_SHARE = 0.15
"""Guessed seconds of a draft over those of a step."""
_SEQUENCES_MAX = 64


class MtpFollower:
    """A ``Follower`` of one sequence."""

    __slots__ = ("_offered",)

    def __init__(self) -> None:
        self._offered: Proposal | None = None

    def offer(self, tokens: Sequence[int], chances: Sequence[float]) -> None:
        self._offered = Proposal(tuple(tokens), 0, tuple(chances))

    def extend(self, tokens: Sequence[int]) -> None:
        if tokens:
            self._offered = None

    def propose(self, count: int) -> Proposal | None:
        offered = self._offered
        return None if offered is None or not offered.tokens else offered.first(count)


class HeadChances:
    """Of all sequences."""

    def __init__(self) -> None:
        self._right = [[_CLASS_WEIGHT * (at + 0.5) / _CLASSES for at in range(_CLASSES)] for _ in range(2)]
        self._tried = [[_CLASS_WEIGHT] * _CLASSES for _ in range(2)]
        self._place_right = [_PLACE_GUESS * _PLACE_WEIGHT] * HEAD_DRAFTS_MAX
        self._place_tried = [_PLACE_WEIGHT] * HEAD_DRAFTS_MAX

    def survivals(self, proposal: Proposal) -> list[float]:
        """The chance of each token that it and all before it are right."""
        survival, survivals = 1.0, []
        for place, own in enumerate(proposal.chances):
            later, at = _class_of(place, own)
            survival *= min(_CHANCE_MAX, self._right[later][at] / self._tried[later][at])
            survivals.append(survival)
        return survivals

    def score(self, proposal: Proposal, tokens: Sequence[int]) -> int:
        """The sequence went on with ``tokens``. Returns how many tokens of ``proposal`` were right."""
        equal = 0
        for place, (proposed, own, token) in enumerate(
                zip(proposal.tokens, proposal.chances, tokens, strict=False)):
            right = proposed == token
            later, at = _class_of(place, own)
            self._right[later][at] = self._right[later][at] * _DECAY + right
            self._tried[later][at] = self._tried[later][at] * _DECAY + 1.0
            if place < HEAD_DRAFTS_MAX:
                self._place_right[place] = self._place_right[place] * _PLACE_DECAY + right
                self._place_tried[place] = self._place_tried[place] * _PLACE_DECAY + 1.0
            if not right:
                break
            equal += 1
        return equal

    def expected(self, drafts: int) -> float:
        """Right tokens of ``drafts``, on average."""
        survival, expected = 1.0, 0.0
        for place in range(drafts):
            survival *= self._place_right[place] / self._place_tried[place]
            expected += survival
        return expected


class HeadPlan:
    """How many tokens the head drafts. ``measured``: its seconds for one sequence, by drafts."""

    def __init__(self, measured: dict[int, float], drafts_max: int) -> None:
        self.chances = HeadChances()
        self._drafts_max = min(HEAD_DRAFTS_MAX, drafts_max)
        self._measured = dict(measured)
        self._shares: dict[tuple[int, int], float] = {}
        """By the size class of sequences and drafts: seconds over those of a plain step of one sequence."""
        self._steps_off = 0

    def seconds(self, sequences: int, drafts: int, costs: StepCosts) -> float:
        """Of ``drafts`` for each of ``sequences``."""
        alone_s = costs.seconds(1)
        known = self._shares.get((sequences.bit_length(), drafts))
        if known is not None:
            return known * alone_s
        measured_s = self._measured.get(drafts, drafts * _DRAFT_SHARE * alone_s)
        return measured_s * costs.seconds(sequences) / alone_s

    def drafts(self, sequences: int, costs: StepCosts) -> int | None:
        """For a step in which ``sequences`` choose a token; None: the head stays off."""
        if self._steps_off >= PROBE_STEPS:
            return self._drafts_max
        sequences = max(1, sequences)
        best_rate, best = GAIN_MIN * sequences / costs.seconds(sequences), None
        for drafts in range(1, self._drafts_max + 1):
            rows = sequences * (1 + drafts)
            if rows > _SEQUENCES_MAX:
                break
            rate = sequences * (1 + self.chances.expected(drafts)) / (
                costs.seconds(rows) + self.seconds(sequences, drafts, costs))
            if rate > best_rate:
                best_rate, best = rate, drafts
        return best

    def note(self, sequences: int, drafts: int, seconds: float, costs: StepCosts) -> None:
        """The head took ``seconds``, in a step that set the pace of ``costs``. Corrections have one size, as
        those of ``StepCosts``."""
        at, share = (sequences.bit_length(), drafts), seconds / costs.pace(1)
        known = self._shares.get(at)
        if known is None:
            self._shares[at] = min(share, self.seconds(sequences, drafts, costs) / costs.seconds(1))
        else:
            self._shares[at] = known * SHAPE_STEP if share > known else known / SHAPE_STEP

    def stepped(self, *, ran: bool) -> None:
        """A step went by, in which the head ran or did not."""
        self._steps_off = 0 if ran else self._steps_off + 1


def _class_of(place: int, own: float) -> tuple[int, int]:
    return min(place, 1), min(_CLASSES - 1, int(own * _CLASSES))
