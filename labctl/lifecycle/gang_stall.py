"""Find a run on several servers that stalls: its processes live, and none shows any progress.

One process that hangs makes the others wait for it, while every server answers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from labctl.events import Note
from labctl.lifecycle.fleet import run_for_each
from labctl.servers.context import LabContext
from labctl.text import duration_text
from labctl.wire.runs import MEASURE_STALL, RunRequest, StallReply

# Checks during the time after which a run counts as stalled, and the seconds between two at most.
CHECKS, LONGEST_PAUSE_S = 20, 30.0
# One process that printed this much before all others (seconds) was the first to fall silent:
# those that wait for it print together. The times of two servers are as exact as a round trip.
CLEARLY_FIRST_S = 3.0


class Stall(NamedTuple):
    """A stalled run: why it counts as one, and the rank of the server that most likely hangs."""

    rank: int
    reason: str


class RankOutput(NamedTuple):
    """When the process of a rank printed last, by this machine's clock: servers' clocks may differ.

    It had printed for `printed_s` then, 0 if it has printed nothing, and is silent for `silent_s`.
    """

    rank: int
    member: LabContext
    printed_at: float
    printed_s: float
    silent_s: float

    def describe(self) -> str:
        return f"rank {self.rank} ({self.member.config.name})"


class StallCheck:
    """Checks regularly whether a run stalls, that is, shows no progress anywhere for `stall_s`."""

    def __init__(self, members: Sequence[LabContext], run_id: str, stall_s: float) -> None:
        self._members = list(members)
        self._run_id = run_id
        self._stall_s = stall_s
        self._pause_s = min(stall_s / CHECKS, LONGEST_PAUSE_S)
        self._next_s = 0.0
        self._has_warned = False

    def find(self) -> Stall | None:
        """Return the stall if a check is due and finds one; the next check is due at once then."""
        now_s = time.monotonic()
        if not self._stall_s or now_s < self._next_s:
            return None
        replies = self._measure()
        running = [reply for reply in replies or () if reply.stalled_s is not None]
        stalled_s = min((reply.stalled_s or 0.0 for reply in running), default=0.0)
        outputs = self._list_outputs(replies or [])
        if stalled_s >= self._stall_s:
            return self._describe(stalled_s, outputs)
        self._next_s = now_s + self._pause_s
        if not self._has_warned and (silent := find_silent_rank(outputs, self._stall_s)):
            self._has_warned = True
            text = f"{silent.describe()} has printed nothing for {duration_text(silent.silent_s)}"
            text += ", while every other rank still prints"
            self._members[0].reporter.emit(Note(text=text, level="warning"))
        return None

    def _measure(self) -> list[StallReply] | None:
        """Return the reply of each server; None unless all of them answer."""

        def measure(one: LabContext) -> StallReply:
            request = RunRequest(one.config.name, one.lab_id, self._run_id)
            return one.open_agent(one.get_server()).call(MEASURE_STALL, request)

        outcomes = run_for_each(self._members, measure)
        replies = [outcome.value for outcome in outcomes if outcome.value is not None]
        return replies if len(replies) == len(self._members) else None

    def _list_outputs(self, replies: Sequence[StallReply]) -> list[RankOutput]:
        """List the output of every process that runs, by rank; all servers have as many."""
        count = 1 + max((one.process for reply in replies for one in reply.outputs), default=0)
        now = time.time()
        return [
            RankOutput(
                rank=server * count + one.process,
                member=self._members[server],
                printed_at=now - (reply.now - one.printed_at),
                printed_s=one.printed_at - one.started_at,
                silent_s=reply.now - one.printed_at,
            )
            for server, reply in enumerate(replies)
            for one in reply.outputs
        ]

    def _describe(self, stalled_s: float, outputs: Sequence[RankOutput]) -> Stall:
        last = max(outputs, key=lambda one: one.printed_at)
        reason = f"stalled: no rank has shown any progress for {duration_text(stalled_s)}; "
        if last.printed_s > 0:
            reason += f"the last was {last.describe()} at {_clock_text(last.printed_at)}"
        else:
            reason += "none has printed anything"
        first = find_first_silent_rank(outputs)
        if first is not None:
            reason += f"; {first.describe()} fell silent first, at {_clock_text(first.printed_at)}"
        return Stall((first or last).member.rank or 0, reason)


def find_first_silent_rank(outputs: Sequence[RankOutput]) -> RankOutput | None:
    """Find the one rank that stopped printing before all others, which most likely hangs.

    Not one that hardly ever prints, as all but the first do in many programs: before, it must have
    printed for longer than the others have gone on without it.
    """
    if len(outputs) < 2:
        return None
    first, second, *_ = sorted(outputs, key=lambda one: one.printed_at)
    latest_at = max(one.printed_at for one in outputs)
    is_clear = second.printed_at - first.printed_at >= CLEARLY_FIRST_S
    return first if is_clear and first.printed_s > latest_at - first.printed_at else None


def find_silent_rank(outputs: Sequence[RankOutput], stall_s: float) -> RankOutput | None:
    """Find the one rank that has been silent for `stall_s`, while all others print.

    It must have printed for as long before: many programs print on the first rank alone.
    """
    silent = [one for one in outputs if one.silent_s >= stall_s]
    if len(outputs) < 2 or len(silent) != 1:
        return None
    return silent[0] if silent[0].printed_s >= stall_s else None


def is_stalled(members: Sequence[LabContext], run_id: str, stall_s: float) -> bool:
    """Check once whether the run stalls; False if a server does not answer."""
    return StallCheck(members, run_id, stall_s).find() is not None


def _clock_text(at: float) -> str:
    """Return a time as the run's log does, which users read in other places than the server's."""
    return time.strftime("%H:%M:%S UTC", time.gmtime(at))
