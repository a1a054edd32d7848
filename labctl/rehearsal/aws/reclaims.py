"""Reclaims of spot instances: recommendation, notice, end."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from fnmatch import fnmatchcase

from labctl.errors import NotFoundError
from labctl.rehearsal.aws.backend import Backend
from labctl.rehearsal.aws.fleet import RECLAIMED, Fleet, InstanceRecord
from labctl.rehearsal.aws.scenario import Scenario, SpotReclaim
from labctl.rehearsal.core.clock import TaskTimer


class SpotReclaims:
    """The reclaims.

    `plan_reclaims` is called with each started instance, and plans the scenario's.
    """

    def __init__(
        self, backend: Backend, clock: TaskTimer, fleet: Fleet, scenario: Callable[[], Scenario]
    ) -> None:
        self._backend = backend
        self._clock = clock
        self._fleet = fleet
        self._scenario = scenario
        self._done: Counter[SpotReclaim] = Counter()

    def plan_reclaims(self, record: InstanceRecord) -> None:
        if not record.spot_request:
            return
        with self._backend.lock():
            instance = self._fleet.instance(record)
            kind, zone = instance.instance_type, str(instance.availability_zone)
            for reclaim in self._scenario().spot.reclaims:
                matches = fnmatchcase(kind, reclaim.type) and fnmatchcase(zone, reclaim.zone)
                if matches and self._done[reclaim] < reclaim.count:
                    self._done[reclaim] += 1
                    self._plan(record, reclaim)
                    return

    def reclaim(self, instance_id: str, notice_s: float = 120.0, rebalance_s: float = 0.0) -> None:
        """Reclaim: a recommendation now, the notice `rebalance_s` later, the end `notice_s` later.

        0 skips that step. NotFoundError if there is no such spot instance.
        """
        record = self._fleet.records.get(instance_id)
        if record is None or not record.spot_request:
            raise NotFoundError(f"this rehearsal has no spot instance {instance_id!r}")
        if rebalance_s:
            record.rebalance_at = time.time()
        self._clock.run_after(rebalance_s, lambda: self._notice(record, notice_s))

    def _plan(self, record: InstanceRecord, reclaim: SpotReclaim) -> None:
        begin_s = max(0.0, reclaim.after - reclaim.notice - reclaim.rebalance)
        self._clock.run_after(
            begin_s, lambda: self.reclaim(record.id, reclaim.notice, reclaim.rebalance)
        )

    def _notice(self, record: InstanceRecord, notice_s: float) -> None:
        if notice_s:
            record.notice_at = time.time() + notice_s
        self._clock.run_after(notice_s, lambda: self._take(record))

    def _take(self, record: InstanceRecord) -> None:
        self._fleet.terminate(record, RECLAIMED)
