"""McNemar's test: do two models differ in accuracy on the same items by more than chance?

Only the items on which exactly one of the two is right (the discordant ones) tell them apart. If
neither model is better, each of them is equally likely to be that one.

Sources: Q. McNemar, Psychometrika 12 (1947) 153; for its exact form, A. Agresti, Categorical Data
Analysis, 3rd ed. (2013), section 11.1; the correction for continuity, A. L. Edwards, Psychometrika
13 (1948) 185; T. G. Dietterich, Neural Computation 10 (1998) 1895, on comparing classifiers;
for several pairs, S. Holm, Scandinavian Journal of Statistics 6 (1979) 65.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from labctl.model import Value

# A difference counts if chance alone makes one as large in fewer than 5 of 100 cases.
SIGNIFICANCE = 0.05
# With up to this many discordant items the binomial distribution is summed; it takes milliseconds.
MOST_EXACT = 1000


class PairedTest(Value, frozen=True):
    """A test's result: the items that only the first, or only the second, classified correctly.

    `p_value` is two-sided. `method` is the exact binomial test, or the approximation by the
    chi-squared distribution with a correction for continuity.
    """

    only_first: int
    only_second: int
    p_value: float
    method: Literal["exact", "chi-squared"]


def run_mcnemar_test(only_first: int, only_second: int) -> PairedTest:
    """Test whether two models differ, from the numbers of their discordant items."""
    discordant, fewer = only_first + only_second, min(only_first, only_second)
    method: Literal["exact", "chi-squared"] = "exact"
    if discordant <= MOST_EXACT:
        tail = sum(math.comb(discordant, count) for count in range(fewer + 1))
        # Integers, since 2**1000 is no float; the tail counts twice, for either model.
        p_value = min(1.0, 2 * tail / 2**discordant)
    else:
        method = "chi-squared"
        distance = max(0, abs(only_first - only_second) - 1)
        # The chi-squared distribution with one degree of freedom is that of a squared normal one.
        p_value = math.erfc(distance / math.sqrt(2 * discordant))
    return PairedTest(
        only_first=only_first, only_second=only_second, p_value=p_value, method=method
    )


def adjust_for_several(p_values: Sequence[float]) -> tuple[float, ...]:
    """Return Holm's adjusted p-values, in the same order: of many tests, some succeed by chance."""
    order = sorted(range(len(p_values)), key=lambda place: p_values[place])
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p_values[place]))
        adjusted[place] = largest
    return tuple(adjusted)
