"""Messages, commands, handouts, assignments' files and more time for the servers of a course."""

from __future__ import annotations

from collections.abc import Sequence

from labctl.courses import server_contents
from labctl.courses.context import build_seat_contexts, make_subject
from labctl.courses.material import collect_material, push_material
from labctl.courses.records.folder import Seat
from labctl.courses.seat_reporter import label_events, make_done_notifier
from labctl.courses.seat_results import SeatFailure
from labctl.courses.server_starters import SeatStarter, read_in_order, write_starter
from labctl.courses.servers import CourseOperator, SeatOutcome
from labctl.courses.status import build_seat_context, find_server, list_running_servers
from labctl.errors import LabError, NotFoundError, UsageError, assign_subject
from labctl.lifecycle import extend as more_time
from labctl.lifecycle import fleet
from labctl.model import Run, Server
from labctl.servers import affordable_offers, guard
from labctl.servers.context import LabContext
from labctl.servers.fan_out import LoginLimiter, ServerResult, run_on_all
from labctl.shell import command
from labctl.wire.watchdog import WatchRecord

MOST_MESSAGE = 500
MESSAGE_S = 60.0
_SHOW_SCRIPT = """m=$1; u=$(id -u)
mkdir -p "$HOME/labctl" && printf '%s %s\\n' "$(date -u +%Y-%m-%dT%H:%M:%SZ)" "$m" \\
  >> "$HOME/labctl/messages.txt"
for t in /dev/pts/[0-9]*; do
  [ -O "$t" ] && [ -w "$t" ] && printf '\\r\\n*** course: %s ***\\r\\n' "$m" > "$t" 2>/dev/null
done
for s in /tmp/tmux-"$u"/*; do
  [ -S "$s" ] || continue
  tmux -S "$s" list-clients -F '#{client_width} #{client_name}' 2>/dev/null | while read -r w c; do
    line="course: $m" rest=' (all: ~/labctl/messages.txt)'
    if [ ${#line} -gt "$w" ]; then  # tmux would cut it anywhere
      room=$((w - ${#rest}))
      line=$(printf %s "$line" | fold -sw $((room > 30 ? room : 30)) | head -n 1)$rest
    fi
    e=$(printf %s "$line" | sed 's/#/##/g; s/%/%%/g')
    # It stays until a key is pressed, but tmux before 3.2 does not know -d.
    tmux -S "$s" display-message -c "$c" -d 20000 "$e" 2>/dev/null ||
      tmux -S "$s" display-message -c "$c" "$e" 2>/dev/null
  done
done
true
"""


def send_message(staff: CourseOperator, seats: Sequence[Seat], text: str) -> list[ServerResult]:
    """Show a line in every terminal and tmux session on the seats' servers.

    It is also appended to `~/labctl/messages.txt` there. UsageError for control characters.
    """
    if not text.strip() or len(text) > MOST_MESSAGE or not text.isprintable():
        raise UsageError(
            "a message must be one line of text",
            why=f"it can have at most {MOST_MESSAGE} characters and no control characters",
            hint='labctl course message "lab starts at 10"',
        )
    line = command("sh", "-c", _SHOW_SCRIPT, "sh", text).render()
    return run_on_seats(staff, list_running_servers(staff, seats), line, timeout_s=MESSAGE_S)


def run_on_seats(
    staff: CourseOperator,
    pairs: Sequence[tuple[Seat, Server]],
    line: str,
    *,
    timeout_s: float | None = None,
) -> list[ServerResult]:
    """Run a shell command line on all of these servers; each answer carries its seat's name."""
    return run_on_all(
        staff.course().connections,
        [server for _, server in pairs],
        line,
        names=[seat.name for seat, _ in pairs],
        subjects=[make_subject(seat) for seat, _ in pairs],
        timeout_s=timeout_s,
    )


class PushOutcome(SeatOutcome, frozen=True):
    """What a push did for one seat; `starters` are the assignments with files that needed it."""

    starters: tuple[SeatStarter, ...] = ()


def push_files(staff: CourseOperator, seats: Sequence[Seat]) -> list[PushOutcome]:
    """Copy handouts and the published files of assignments to these seats' running servers.

    The handouts go to every lab, the assignments' files into the code of the seat's own lab.
    NotFoundError if no seat has a server.
    """
    pairs = list_running_servers(staff, seats)
    handouts = collect_material(staff.folder, staff.reporter, data=False)
    starters = read_in_order(staff.folder)
    servers = {seat.lab_id: server for seat, server in pairs}
    by_lab = {seat.lab_id: seat for seat, _ in pairs}
    contexts = build_seat_contexts(
        staff.folder, staff.paths, staff.state, staff.reporter, [seat for seat, _ in pairs]
    )
    reporting = [label_events(context, by_lab[context.lab_id].name) for context in contexts]
    login_limiter = LoginLimiter(list(servers.values()))

    def push_to_seat(context: LabContext) -> tuple[SeatStarter, ...]:
        server = servers[context.lab_id]
        with login_limiter.acquire_slot(server.endpoint):
            push_material(context, server, handouts)
            written = [
                SeatStarter(assignment=one.assignment, changes=write_starter(context, server, one))
                for one in starters
            ]
        return tuple(starter for starter in written if starter.changes)

    outcomes = fleet.run_for_each(
        reporting, push_to_seat, on_result=make_done_notifier(staff.reporter, by_lab)
    )
    return [
        PushOutcome(
            seat=by_lab[outcome.context.lab_id].name,
            students=by_lab[outcome.context.lab_id].students,
            server=servers[outcome.context.lab_id],
            starters=outcome.value or (),
            failure=SeatFailure(outcome.context.subject, outcome.error) if outcome.error else None,
        )
        for outcome in outcomes
    ]


def extend_server(
    staff: CourseOperator, seat: Seat, span_s: int, why: str = ""
) -> WatchRecord | None:
    """Give a seat's server `span_s` more seconds, even beyond `max_ttl`.

    Returns the watchdog's report afterwards. The ledger records who extended and why. PolicyError
    if the seat's budget would not last.
    """
    server = find_server(staff, seat)
    staff.folder.ledger.append("extend", seat=seat.name, by=staff.by, why=why, seconds=span_s)
    context = build_seat_context(staff, seat)
    need = context.config.server.need
    left_usd = affordable_offers.budget_left_usd(context, need, but=server.id)
    latest_at = server.created_at + need.max_ttl_s if need.max_ttl_s else None
    try:
        with assign_subject(context.subject):
            guard.arm(
                context, server, budget_left_usd=left_usd, ceiling_s=need.max_ttl_s, always=True
            )
            return more_time.extend(context, span_s, latest_at=latest_at)
    except LabError:
        # Not granted after all: cancel the line above in the ledger.
        staff.folder.ledger.append(
            "extend", seat=seat.name, by=staff.by, why="refused", seconds=-span_s
        )
        raise


def find_run(staff: CourseOperator, seat: Seat, run_id: str = "") -> tuple[LabContext, Server, Run]:
    """Return a seat's run, by id or the newest, with the lab and the server that it is on."""
    server = find_server(staff, seat)
    context = build_seat_context(staff, seat)
    try:
        with assign_subject(context.subject):
            lab, run = server_contents.find_latest_run(
                server_contents.list_labs(context, server), server, run_id
            )
    except NotFoundError as error:
        # The original hint is a command that only the student could type.
        error.hint = f"labctl course ssh {seat.name} -- ls labctl   # lists the labs on its server"
        raise
    return lab, server, run
