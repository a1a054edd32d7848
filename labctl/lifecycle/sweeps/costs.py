"""What the trials of a sweep cost: the hours that servers worked for them, times their prices.

Trials side by side on a server share its price. Time in which no trial ran is not the sweep's.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from labctl.config.member_ids import list_lab_ids
from labctl.lifecycle.sweeps.plan import make_run_id
from labctl.lifecycle.sweeps.trials import Trial
from labctl.model import Run, Value
from labctl.servers.context import LabContext
from labctl.servers.cost import HOUR_S, list_server_costs
from labctl.text import dollars_text


class SweepCost(Value, frozen=True):
    """`spent_usd` by all trials so far, and what the dearest ended trial would cost again.

    `is_free` if no server of the trials has a price.
    """

    spent_usd: float = 0.0
    dearest_usd: float = 0.0
    is_free: bool = True


def compute_cost(context: LabContext, study: str, trials: Iterable[Trial]) -> SweepCost:
    """Compute the cost of the trials' runs from this machine's records."""
    now = time.time()
    prices = {
        server.server_id: server.price_usd_per_hour or 0.0
        for lab_id in list_lab_ids(context.lab_id)
        for server in list_server_costs(context.state, lab_id, now)
    }
    intervals: dict[str, list[tuple[float, float]]] = {}
    dearest = 0.0
    for run in list_trial_runs(context, study, trials):
        start, end = find_interval(run, now)
        intervals.setdefault(run.server_id, []).append((start, end))
        if run.has_ended:
            dearest = max(dearest, (end - start) / HOUR_S * prices.get(run.server_id, 0.0))
    spent = sum(
        measure_union_s(parts) / HOUR_S * prices.get(server_id, 0.0)
        for server_id, parts in intervals.items()
    )
    is_free = not any(prices.get(server_id) for server_id in intervals)
    return SweepCost(spent_usd=spent, dearest_usd=dearest, is_free=is_free)


def list_trial_runs(context: LabContext, study: str, trials: Iterable[Trial]) -> list[Run]:
    """List the recorded runs of trials, also of attempts whose servers were lost."""
    names = {
        make_run_id(study, trial.number, attempt)
        for trial in trials
        if trial.placement
        for attempt in range(1, trial.placement.attempt + 1)
    }
    recorded = (
        run for lab_id in list_lab_ids(context.lab_id) for run in context.state.list_runs(lab_id)
    )
    return [run for run in recorded if run.id in names]


def find_interval(run: Run, now: float) -> tuple[float, float]:
    """Return when a run worked on its server, in Unix seconds."""
    start = run.started_at or run.created_at
    # Nobody saw the end of a run that is lost: it counts until it was last seen.
    end = run.ended_at or (run.seen_at if run.has_ended else now)
    return start, max(start, end)


def measure_union_s(intervals: Sequence[tuple[float, float]]) -> float:
    """Measure the seconds that any of the intervals covers."""
    total, covered_until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, covered_until))
        covered_until = max(covered_until, end)
    return total


def describe_exhausted_budget(cost: SweepCost, budget_usd: float, running: int) -> str:
    """Say why a budget allows no new trial, "" if it does.

    A new trial may cost as much as the dearest one, and so may those that are `running`.
    """
    expected = cost.dearest_usd * (running + 1)
    if cost.spent_usd >= budget_usd:
        return f"the budget of {dollars_text(budget_usd)} is spent"
    if cost.spent_usd + expected > budget_usd:
        spent = dollars_text(cost.spent_usd)
        return f"another trial may exceed the budget of {dollars_text(budget_usd)} ({spent} spent)"
    return ""
