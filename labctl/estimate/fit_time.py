"""The time of a training on a table, from shorter ones on parts of its rows."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import median

from labctl.estimate.plan import FitMeasurement

# Assumption: no training of a table grows faster with its rows.
STEEPEST = 3.0
# Growth is that between the largest parts, as many pairs; others are too short to time.
PAIRS = 3


def compute_fit_seconds(fit: FitMeasurement, rows: int) -> float:
    """Extrapolate to `rows` from the largest parts.

    If twice the rows took at most twice as long, by a straight line: a fixed part, and the same for
    each row. Otherwise by the power of the rows with which it grew.
    """
    last = fit.trials[-PAIRS - 1 :]
    last_rows, last_s = last[-1]
    if len(last) == 1:
        return last_s * rows / last_rows
    power = median(
        math.log(max(s_after, 1e-9) / max(s_before, 1e-9)) / math.log(after / before)
        for (before, s_before), (after, s_after) in pairwise(last)
    )
    if power > 1:
        return last_s * math.pow(rows / last_rows, min(power, STEEPEST))
    first_rows, first_s = last[0]
    each = max(0.0, last_s - first_s) / (last_rows - first_rows)
    return max(0.0, last_s + each * (rows - last_rows))
