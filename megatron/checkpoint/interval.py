# SPDX-License-Identifier: Apache-2.0
"""The best save interval for a given cost of saves and rate of interruptions, and the share of time that is then of use
(Young 1974, Daly 2006).

An interruption loses half an interval on average, and a save stalls training. A longer interval means more lost work and
fewer stalls.

    >>> round(best_interval(stall=2.0, between_interruptions=3600.0))
    119
    >>> f"{goodput(interval=119.0, stall=2.0, between_interruptions=3600.0):.1%}"
    '96.7%'
"""

import math


def best_interval(stall: float, between_interruptions: float) -> float:
    """The seconds of training between saves that lose the least time.

    stall:                  seconds that a save stalls training
    between_interruptions:  mean time to interruption, in seconds
    Daly's estimate to the third term (doi:10.1016/j.future.2004.11.016, eq. 37).
    """
    if stall >= 2 * between_interruptions:
        return between_interruptions
    ratio = stall / (2 * between_interruptions)
    return math.sqrt(2 * stall * between_interruptions) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall


def goodput(interval: float, stall: float, between_interruptions: float, restart: float = 0.0) -> float:
    """The expected share of time in which a job trains steps that are not lost.

    Interruptions come at a constant rate, also during saves and restarts (Daly 2006, eq. 20). restart: seconds from an
    interruption until training goes on from the last checkpoint.
    """
    mean = between_interruptions
    exponent = (interval + stall) / mean
    if exponent + restart / mean > 700:  # e**710 is infinite
        return 0.0
    return interval / (mean * math.exp(restart / mean) * math.expm1(exponent))
