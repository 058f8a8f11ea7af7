"""The value of a thing while it waits: the Gittins index of a wait with a known hazard. A pure function.

Something is held until it is used, or until holding it was a mistake. Over the next moments the chance of a
use may rise: no user answers within a second. It may also fall: after ten minutes of silence most never
return. The index at an age is the best bargain from there on, over all times at which to give up:

    index(age) = max over T of   P(used within T)  /  E[time held until used or given up at T]

A hazard that falls with age is its own index. A hazard that rises is worth more than its present value: it
pays to wait for the peak. Per byte and seconds saved, keeping the highest index is the optimal rule for
choosing among such waits one at a time (Gittins, 1979; its use for caches of known hazards is folklore).

    hazard        ____/\\____        index    /‾‾‾\\_____         up to the peak the index looks ahead
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def index_table(rates: Floats, widths: Floats, factors: Floats) -> Floats:
    """float64 [factors, ages]: the index per second at the beginning of each age bin. The hazard is ``rates``
    (float64 [ages], uses per second in each bin) times a factor of ``factors`` (float64 [factors]).
    ``widths``: seconds of each bin, float64 [ages]."""
    hazard = factors[:, None] * rates
    nothing = np.zeros((len(factors), 1))
    survived = np.exp(-np.concatenate([nothing, np.cumsum(hazard * widths, axis=1)], axis=1))
    spent = (survived[:, :-1] - survived[:, 1:]) / hazard
    held = np.concatenate([nothing, np.cumsum(spent, axis=1)], axis=1)
    used = survived[:, :-1, None] - survived[:, None, 1:]
    waited = held[:, None, 1:] - held[:, :-1, None]
    later = np.triu(np.ones((len(rates), len(rates)), dtype=np.bool_))
    bargains = np.where(later, used, 0.0) / np.where(later, np.maximum(waited, 1e-300), 1.0)
    best: Floats = bargains.max(axis=2)
    return best
