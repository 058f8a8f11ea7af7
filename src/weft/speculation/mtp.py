"""Drafts from the model's own head for multi-token prediction, and the decision whether the head pays.

    step k     tokens chosen --head--> offer(d1 d2 d3, with the head's chance of each)
    step k+1   propose            the head's chances, calibrated, compete with those of other sources
    step k+1   drafts wanted      how many tokens the head drafts after this step

    tokens / seconds  =  R (1 + a1 + a1 a2 + ...) / (cost(R (1 + k)) + head(R, k))     R sequences, k drafts

A draft of the head costs device time, before it is known whether it will be verified. So the number of drafts is
chosen ahead, by the average chance of each place and by the measured seconds of the head. The best k wins if it beats
a step without the head by HEAD_GAIN_MIN. A head that the operator named may lose a little while its drafts are right
(NAMED_GAIN_MIN). A head that does not pay stays off, and is probed now and then for PROBE_LENGTH steps. If the
sequences are too many for the head to pay even with only right drafts, it is *hopeless*: probes are rarer, and prompts
are not read.

Reading a prompt helps its answer, and costs time before anything is known of that answer. The head has a credit: the
seconds that its drafts save, and SHARE of all steps. Prompts are read while there is credit. A sequence with an unread
prompt drafts from the positions where the head ran: worse drafts, the same tokens.

The head's own chance is calibrated by classes: the share of right drafts among those with a chance between 0.6 and
0.7, and so on. First and later drafts have separate tables, because later drafts read the head's own hidden state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from weft.costs.rows import SHAPE_STEP, RowCosts
from weft.speculation.choice import SHARE, ByAdapter
from weft.speculation.drafter import Proposal
from weft.units import HEAD_DRAFTS_MAX

HEAD_GAIN_MIN = 1.1
"""Ratio to other drafts' tokens per second that the head must promise: it also takes the trunk out of the caches."""
NAMED_GAIN_MIN = 0.8
_NAMED_CHANCE_MIN = 0.5
"""Chance: a head that the operator named, and whose first drafts are right at least this often, may cost a little. It
drafts while tokens per second stay above NAMED_GAIN_MIN of those without.
"""
_WRITE_SHARE_MAX = 0.05
"""Share of a plain step: the head writes keys after drafts of other sources if that takes at most this."""
PROBE_STEPS = 64
"""Steps before the first probe."""
PROBE_STEPS_MAX = 1024
PROBE_LENGTH = 4
_HOPELESS_PROBE_STEPS = 4096
_CLASSES = 10
_CLASS_WEIGHT = 4.0
"""Tokens, the weight of the head's own chance in each class."""
_DECAY = 0.995
_PLACE_GUESS = 0.75
_PLACE_WEIGHT = 4.0
_PLACE_DECAY = 0.96
_CHANCE_MAX = 0.98
_DRAFT_SHARE = 0.15
"""Guessed seconds of a draft over those of a step."""
_ROWS_MAX = 16
"""Most rows of a step with drafts of the head: the profile run measures no more. Figures of wider steps are guesses,
and with one of them 32 sequences were a quarter slower.
"""
_CREDIT_START = 30.0
_CREDIT_MAX = 100.0
"""Credit at the start and at most, in seconds of a plain step of one sequence."""
_PROMPTS_UNPAID = 8
"""The head reads the prompts of one in this many steps while drafts do not pay."""

_PERFECT = [sum(_CHANCE_MAX**place for place in range(1, drafts + 1)) for drafts in range(1, HEAD_DRAFTS_MAX + 1)]


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
    """Chances that the head's drafts are right, over all sequences of an adapter."""

    def __init__(self) -> None:
        self._right = [[_CLASS_WEIGHT * (number + 0.5) / _CLASSES for number in range(_CLASSES)] for _ in range(2)]
        self._tried = [[_CLASS_WEIGHT] * _CLASSES for _ in range(2)]
        self._place_right = [_PLACE_GUESS * _PLACE_WEIGHT] * HEAD_DRAFTS_MAX
        self._place_tried = [_PLACE_WEIGHT] * HEAD_DRAFTS_MAX

    def survivals(self, proposal: Proposal) -> list[float]:
        """Return the survival of each token: the chance that it and all tokens before are right."""
        survival, survivals = 1.0, []
        for place, own in enumerate(proposal.chances):
            later, chance_class = _class_of(place, own)
            survival *= min(_CHANCE_MAX, self._right[later][chance_class] / self._tried[later][chance_class])
            survivals.append(survival)
        return survivals

    def score(self, proposal: Proposal, tokens: Sequence[int]) -> int:
        """Score ``proposal`` against ``tokens``, with which the sequence went on. Return how many tokens were right."""
        equal = 0
        for place, (proposed, own, token) in enumerate(zip(proposal.tokens, proposal.chances, tokens, strict=False)):
            right = proposed == token
            later, chance_class = _class_of(place, own)
            self._right[later][chance_class] = self._right[later][chance_class] * _DECAY + right
            self._tried[later][chance_class] = self._tried[later][chance_class] * _DECAY + 1.0
            if place < HEAD_DRAFTS_MAX:
                self._place_right[place] = self._place_right[place] * _PLACE_DECAY + right
                self._place_tried[place] = self._place_tried[place] * _PLACE_DECAY + 1.0
            if not right:
                break
            equal += 1
        return equal

    def expected(self, drafts: int) -> float:
        """Return the right tokens of ``drafts``, on average."""
        survival, expected = 1.0, 0.0
        for place in range(drafts):
            survival *= self._place_right[place] / self._place_tried[place]
            expected += survival
        return expected


class HeadPlan:
    """Choice of how many tokens the head drafts. ``measured``: seconds of the head for one sequence, by drafts.
    ``prompt_share``: cost of reading the prompts of a step, as a share of the step, in addition to the head's own
    seconds; None: the operator named the head, so prompts are read without credit, and the head may cost a little.
    """

    def __init__(self, measured: dict[int, float], drafts_max: int, *, prompt_share: float | None = None) -> None:
        self.chances = ByAdapter(HeadChances)
        self._running: dict[int, HeadChances] = {}
        """Chances by running sequence."""
        self.pays = True
        """Whether the head pays in the step that is planned."""
        self._drafts_max = min(HEAD_DRAFTS_MAX, drafts_max)
        self._measured = dict(measured)
        self._prompt_share = prompt_share
        self._shares: dict[tuple[int, int], float] = {}
        """Seconds over those of a plain step of one sequence, by the size class of sequences and by drafts."""
        self._steps_off = 0
        self._probe_wait = PROBE_STEPS
        self._probe_left = 0
        self._credit = _CREDIT_START
        self._prompts_unread = 0

    def begin(self, key: int, adapter: str) -> HeadChances:
        """Begin the sequence ``key``, which decodes with ``adapter``."""
        chances = self._running[key] = self.chances.of(adapter)
        return chances

    def end(self, key: int) -> None:
        self._running.pop(key, None)

    def expected(self) -> list[float]:
        """Return the right tokens of 1, 2, ... drafts of a sequence, on average of those that run."""
        present = Counter(self._running.values()) or {self.chances.of(""): 1}
        return [
            sum(count * chances.expected(drafts) for chances, count in present.items()) / sum(present.values())
            for drafts in range(1, HEAD_DRAFTS_MAX + 1)
        ]

    def seconds(self, sequences: int, drafts: int, costs: RowCosts) -> float:
        """Return the seconds of ``drafts`` drafts for each of ``sequences``."""
        alone_s = costs.seconds(1)
        known = self._shares.get((sequences.bit_length(), drafts))
        if known is not None:
            return known * alone_s
        measured_s = self._measured.get(drafts, drafts * _DRAFT_SHARE * alone_s)
        return measured_s * costs.seconds(sequences) / alone_s

    def drafts(self, sequences: int, costs: RowCosts) -> int | None:
        """Return the drafts for a step in which ``sequences`` choose a token; None: the head stays off."""
        sequences = max(1, sequences)
        best = self._best(sequences, costs, self.expected())
        self.pays = best is not None
        if best is not None:
            return best
        wait = _HOPELESS_PROBE_STEPS if self.hopeless(sequences, costs) else self._probe_wait
        if self._probe_left or self._steps_off >= wait:
            return max(0, min(self._drafts_max, _ROWS_MAX // sequences - 1)) or None
        return None

    def hopeless(self, sequences: int, costs: RowCosts) -> bool:
        """Return whether the head would not pay even if nearly all drafts were right."""
        return self._best(sequences, costs, _PERFECT) is None

    def reads_prompts(self, sequences: int, costs: RowCosts) -> bool:
        """Return whether the head reads the prompts of a step in which it drafts nothing, and ``sequences`` run."""
        if self.hopeless(max(1, sequences), costs):
            return False
        if self._prompt_share is None:
            return True
        return self._credit > 0 and (self.pays or self._prompts_unread >= _PROMPTS_UNPAID)

    def writes_keys(self, sequences: int, costs: RowCosts) -> bool:
        """Return whether the head writes keys in a step whose drafts are of other sources."""
        write_s = self.seconds(max(1, sequences), 1, costs)
        return self.pays and write_s < _WRITE_SHARE_MAX * costs.seconds(max(1, sequences))

    def skip_prompts(self) -> None:
        """Record that the prompts of a step were not read."""
        self._prompts_unread += 1

    def pay_prompts(self, step_s: float, head_s: float, costs: RowCosts) -> None:
        """Record that the prompts of a step were read."""
        self._prompts_unread = 0
        self.earn(-head_s - (self._prompt_share or 0.0) * step_s, costs)

    def _best(self, sequences: int, costs: RowCosts, expected: Sequence[float]) -> int | None:
        """Return the best number of drafts. ``expected``: right tokens of 1, 2, ... drafts."""
        trusted = self._prompt_share is None and expected[0] >= _NAMED_CHANCE_MIN
        gain_min = NAMED_GAIN_MIN if trusted else HEAD_GAIN_MIN
        best_rate, best = gain_min * sequences / costs.seconds(sequences), None
        for drafts in range(1, self._drafts_max + 1):
            if sequences * (1 + drafts) > _ROWS_MAX:
                break
            rate = (
                sequences
                * (1 + expected[drafts - 1])
                / (costs.verify_seconds(sequences, sequences * drafts) + self.seconds(sequences, drafts, costs))
            )
            if rate > best_rate:
                best_rate, best = rate, drafts
        return best

    def note(self, sequences: int, drafts: int, seconds: float, costs: RowCosts) -> None:
        """Record that the head took ``seconds``, in a step that set the pace of ``costs``. Like those of ``RowCosts``,
        corrections have a fixed size.
        """
        shape, share = (sequences.bit_length(), drafts), seconds / costs.pace(1)
        known = self._shares.get(shape)
        if known is None:
            self._shares[shape] = min(share, self.seconds(sequences, drafts, costs) / costs.seconds(1))
        else:
            self._shares[shape] = known * SHAPE_STEP if share > known else known / SHAPE_STEP

    def earn(self, seconds: float, costs: RowCosts) -> None:
        """Add ``seconds`` that the head's drafts saved to the credit; negative seconds are a cost."""
        self._credit = max(-_CREDIT_MAX, min(_CREDIT_MAX, self._credit + seconds / costs.seconds(1)))

    def stepped(self, seconds: float, costs: RowCosts, *, drafted: bool, steps: int = 1) -> None:
        """Record ``steps`` of ``seconds`` in all, after which the head drafted or did not."""
        self.earn(SHARE * seconds, costs)
        if not drafted:
            self._steps_off += steps
        elif self.pays:
            self._steps_off, self._probe_left, self._probe_wait = 0, 0, PROBE_STEPS
        elif self._probe_left:
            self._probe_left -= 1
        else:
            self._steps_off, self._probe_left = 0, PROBE_LENGTH - 1
            self._probe_wait = min(2 * self._probe_wait, PROBE_STEPS_MAX)


def _class_of(place: int, own: float) -> tuple[int, int]:
    return min(place, 1), min(_CLASSES - 1, int(own * _CLASSES))
