"""When sources are asked: without drafts, asking takes at most a small share of the time of steps.

    awake     the drafter proposes and scores         8 steps in a row bring no draft; 2 of many sequences
    asleep    it does nothing, not even per token     until the host time of these steps is SHARE of all steps
    awake     it catches up with the texts and proposes again

Sources cost microseconds for each sequence and step. Beside a step of 30 ms that is nothing, and the drafter
never sleeps. Beside a step of 3 ms with 32 sequences it is a tenth. Then a text that repeats nothing would
pay for drafts that never come.

With many sequences rows are dear, so fewer drafts pay: CROWD_SHARE holds there. A step that asks all of them
says as much as several steps of one, so two end a stretch. The first one only brings the texts.

With so many sequences that no draft would pay, even if all were right, the drafter rests: it sleeps for
REST_STEPS at least, and what it spent before is owed as well. It rests on while that is so.

The time of the model's own head counts too, where none of its drafts is verified. A stretch ends with a
draft: what was spent before it has paid.

Seconds come from outside. With a clock that stands still nothing is spent, so nothing sleeps.

Rejected: a pause for each sequence alone (the loop over 32 sequences is the cost); a number of sequences
above which nothing is asked (what a step costs beside it differs by a thousand).
"""

from __future__ import annotations

SHARE = 0.01
FEW_SEQUENCES = 4
CROWD_SHARE = 0.005
"""In place of SHARE, of steps of more than FEW_SEQUENCES."""
BARREN_STEPS = 8
"""Steps of one sequence without drafts that end a stretch."""
_BARREN_STEPS_MIN = 2
SLEEP_STEPS_MAX = 512
REST_STEPS = 32


class HostBudget:
    """Begins awake."""

    def __init__(self) -> None:
        self.awake = True
        self._spent_s = 0.0
        self._steps_s = 0.0
        self._barren = 0
        self._share = SHARE
        self._sleep_s = 0.0
        self._sleep_steps = 0
        """Steps left to sleep at most."""
        self._rest_steps = 0
        """Steps left to sleep at least."""

    def spend(self, seconds: float) -> None:
        """Of the host or the head, for drafts."""
        self._spent_s += seconds

    def wake(self) -> None:
        """A stretch begins."""
        self.awake = True
        self._spent_s = self._steps_s = 0.0
        self._barren = 0

    def rest(self) -> None:
        """No draft would pay in the steps to come."""
        self._sleep(max(0.0, self._owed_s))
        self._rest_steps = REST_STEPS

    def step(self, seconds: float, *, drafted: bool, sequences: int = 1) -> None:
        """A step of ``sequences`` took ``seconds``; ``drafted``: it verified drafts."""
        if not self.awake:
            self.sleep_through(1, seconds)
        elif drafted:
            self.wake()
        else:
            self._steps_s += seconds
            self._barren += 1
            self._share = SHARE if sequences <= FEW_SEQUENCES else CROWD_SHARE
            if self._barren >= max(_BARREN_STEPS_MIN, BARREN_STEPS // max(1, sequences)):
                if self._owed_s > 0:
                    self._sleep(self._owed_s)
                else:
                    self.wake()

    def sleep_through(self, steps: int, seconds: float) -> None:
        """``steps`` steps took ``seconds`` in all. Asleep."""
        self._sleep_s -= seconds
        self._sleep_steps -= steps
        self._rest_steps -= steps
        if self._sleep_steps <= 0 or (self._sleep_s <= 0 and self._rest_steps <= 0):
            self.wake()

    @property
    def _owed_s(self) -> float:
        """Seconds of steps in which nothing is asked, for what was spent."""
        return self._spent_s / self._share - self._steps_s

    def _sleep(self, seconds: float) -> None:
        self.awake = False
        self._sleep_s, self._sleep_steps, self._rest_steps = seconds, SLEEP_STEPS_MAX, 0
