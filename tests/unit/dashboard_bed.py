"""A course's folder and record, made by hand, for the dashboard: no server stands behind it."""

from __future__ import annotations

import html
import http.client
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from labctl.config import Paths
from labctl.config import find_paths as all_paths
from labctl.courses.grading import record as records
from labctl.courses.grading.flags import Flag
from labctl.courses.records.folder import CourseFolder, Seat, make_private
from labctl.courses.records.free_days import FreeDays
from labctl.courses.records.ledger_entries import CourseLedgerDraft
from labctl.model import Endpoint, Offer, Run, Server
from labctl.state import State
from labctl.submissions.receipt import Receipt, Signed, utc_text
from labctl.submissions.receiver import Receiver
from labctl.web import http_server

HOUR_S = 3600.0
COURSE = """\
course: ml-2026
server: {provider: static, gpu: none, static: {hosts: [gpu1.example.edu], user: labctl}}
per_student: {budget: 20.00, ttl: 8h, max_ttl: 12h}
term: {from: 2026-09-01, to: 2027-01-31}
assignments:
  hw3: {due: "SOON", late: 48h, penalty: 10, points: 100}
  hw4: {due: "LATER", points: 50}
"""
NAMES = (
    "Ada Lovelace", "Alan Turing", "Grace Hopper", "Edsger Dijkstra", "Barbara Liskov",
    "Donald Knuth", "Frances Allen", "Ken Thompson", "Radia Perlman", "Tony Hoare",
)  # fmt: skip


NO_DAYS = FreeDays()


@dataclass
class Bed:
    """A course on disk; `now` is the clock of what was written."""

    folder: CourseFolder
    paths: Paths
    state: State
    now: float

    def seat(self, number: int) -> Seat:
        return self.folder.list_seats()[number]

    def start(self, stop: threading.Event) -> str:
        """The dashboard on a free port; its first URL."""
        return http_server.serve_dashboard(self.folder, self.paths, self.state, port=0, stop=stop)

    def serve_up(self, number: int, *, price: float = 0.526, hours: float = 2.0) -> Server:
        """A seat's server on record, with the ledger's lines."""
        seat = self.seat(number)
        made = Server(
            id=f"i-{seat.pseudonym}",
            provider="aws",
            lab=seat.lab,
            lab_id=seat.lab_id,
            alias=seat.lab,
            endpoint=Endpoint(host="192.0.2.7"),
            offer=Offer(
                provider="aws", type="g4dn.xlarge", zone="eu-central-1a", gpu_name="T4",
                gpu_count=1, price_usd_per_hour=price, spot=number % 3 == 0,
            ),
            created_at=self.now - hours * HOUR_S,
            state="running",
            deadline_at=self.now + (8 - hours) * HOUR_S,
        )  # fmt: skip
        self.state.save_server(made)
        detail = {
            "server_id": made.id, "usd_per_hour": price, "type": "g4dn.xlarge",
            "spot": False, "created_at": made.created_at,
        }  # fmt: skip
        line = CourseLedgerDraft(kind="up", seat=seat.name, at=made.created_at, detail=detail)
        self.folder.ledger.append_all([line])
        return made

    def watch(
        self,
        server: Server,
        *,
        idle_s: float = 0.0,
        busy: tuple[str, ...] = (),
        gpu_percent: float = 0.0,
    ) -> None:
        """What the server's watchdog said last."""
        said = {
            "alive": True, "ttl_left_s": 5 * HOUR_S, "idle_for_s": idle_s, "busy": list(busy),
            "gpu_percent": gpu_percent,
        }  # fmt: skip
        self.state.record(
            "watch", lab_id=server.lab_id, server_id=server.id, detail={"watch": said}
        )

    def run(self, server: Server, run_id: str, state: str = "running", code: int = 0) -> Run:
        made = Run(
            id=run_id,
            lab_id=server.lab_id,
            server_id=server.id,
            state=state,  # type: ignore[arg-type]
            command=("python", "train.py", "--epochs", "20"),
            exit_code=None if state == "running" else code,
            summary="" if state == "running" else f"exit {code}",
            created_at=self.now - 1800,
            started_at=self.now - 1790,
            ended_at=None if state == "running" else self.now - 60,
            container=f"{run_id}-1",
            progress={"step": 420.0, "total_steps": 1000.0},
        )
        self.state.save_run(made)
        return made

    def hand_in(self, student: str, assignment: str, number: int = 1, late_s: int = 0) -> Receipt:
        """A receipt in the receiver's list."""
        due = self.folder.config.assignments[assignment].due
        assert due is not None
        received = due.at + late_s if late_s else min(self.now, due.at) - 7200
        made = Receipt(
            kind="labctl-receipt", version=1, course="ml-2026", assignment=assignment,
            student=student,
            number=number, received=utc_text(received), due="",
            late_s=late_s, penalty=10 if late_s else 0, run="1120-101010-abcd",
            bundle_bytes=3_400_000, bundle_sha256="0" * 64, manifest_sha256="1" * 64,
        )  # fmt: skip
        with (self.folder.drop / "receipts.jsonl").open("ab") as log:
            log.write(msgspec.json.encode(Signed(receipt=made, key="", signature="")) + b"\n")
        return made

    def grade(
        self,
        student: str,
        assignment: str,
        score: float | None,
        message: str = "",
        number: int = 1,
        free_days: FreeDays = NO_DAYS,
    ) -> None:
        place = self.folder.grades / assignment / student
        place.mkdir(parents=True, exist_ok=True)
        made = records.GradeRecord(
            assignment=assignment, seat=student, students=(student,), student=student,
            number=number,
            received="", bundle_sha256="", key="k", outcome="failed" if score is None else "graded",
            points=100, score=score, message=message, free_days=free_days,
            flags=(Flag(kind="shared", what="its model is byte for byte another's"),),
        )  # fmt: skip
        (place / records.FILE).write_bytes(records.encode(made))


def make(
    root: Path,
    names: tuple[str, ...] = NAMES,
    teams: bool = True,
    due_in_s: float = 7 * 86_400,
) -> Bed:
    """A course of these people below `root`; the last two are a team. Nothing is up yet.

    hw3 is due in `due_in_s`, hw4 in three weeks.
    """
    now = time.time()
    path = root / "ml-2026"
    path.mkdir()
    due = {"SOON": now + due_in_s, "LATER": now + 21 * 86_400}
    text = COURSE
    for word, at in due.items():
        text = text.replace(word, time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(at)))
    (path / "course.yaml").write_text(text)
    make_private(path)
    rows = ["id,name,email,team,section,active"]
    for number, name in enumerate(names):
        student = name.lower().split()[-1] if name in NAMES else f"s{number:04}"
        team = "owls" if teams and number >= len(names) - 2 else ""
        rows.append(f'{student},"{name}",{student}@example.edu,{team},a{number % 3 + 1},yes')
    (path / "roster.csv").write_text("\n".join(rows) + "\n")
    (path / "roster.csv").chmod(0o600)
    paths = all_paths({"HOME": str(root / "home")})
    folder = CourseFolder(path)
    Receiver(folder.drop).init()
    return Bed(folder, paths, State(paths.database, network=False), now)


def fill(bed: Bed) -> Bed:
    """A morning in the lab: servers that work, idle, near their budget; runs; hand-ins; grades."""
    people = [one.id for one in bed.folder.list_students()]
    for number in range(len(bed.folder.list_seats()) - 1):
        kind = number % 5
        if kind == 4:
            continue
        price, hours = (0.526, 2.0) if kind != 2 else (3.06, 5.7)
        server = bed.serve_up(number, price=price, hours=hours)
        if kind == 1:
            bed.watch(server, idle_s=2640)
            bed.run(server, f"1120-0900{number % 60:02}-aaaa", "exited", code=number % 2)
        else:
            used = 90 - number % 40
            bed.watch(server, busy=(f"GPU 0 is at {used}%", "a run"), gpu_percent=used)
            bed.run(server, f"1120-1000{number % 60:02}-bbbb")
    last = bed.folder.list_seats()[-2]
    bed.folder.ledger.append("refused", seat=last.name, why="the budget is spent: $20.00 of $20.00")
    bed.folder.ledger.append("budget", seat=bed.seat(0).name, by="staff", why="big model", usd=5.0)
    for number, student in enumerate(people):
        if number % 3 != 2:
            bed.hand_in(student, "hw3", late_s=5400 if number % 4 == 3 else 0)
        if number % 3 == 0:
            bed.grade(student, "hw3", 97 - number % 50)
    return bed


def wait_until(condition: Callable[[], bool], deadline_s: float = 60.0) -> None:
    """Until something that another thread does is done."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


class Visitor:
    """A browser's requests without a browser: what it sends is what a test says."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.host, _, self.query = url.removeprefix("http://").partition("/")
        self.cookie = ""

    def ask(
        self, path: str, method: str = "GET", body: str = "", **headers: str
    ) -> tuple[int, dict[str, str], str]:
        """(status, headers, body); an underscore in a header's name is a dash."""
        host, port = self.host.split(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=60)
        sent = {"Host": self.host, **({"Cookie": self.cookie} if self.cookie else {})}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        try:
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            if body:
                sent["Content-Length"] = str(len(body.encode()))
            for name, value in sent.items():
                connection.putheader(name, value)
            connection.endheaders(body.encode() or None)
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            if "set-cookie" in found:
                self.cookie = found["set-cookie"].partition(";")[0]
            return answer.status, found, answer.read().decode("utf-8", "replace")
        finally:
            connection.close()

    def enter(self) -> dict[str, str]:
        """Spend the URL's token; the answer's headers."""
        status, headers, _ = self.ask(f"/{self.query}")
        assert status == 200
        assert self.cookie
        return headers

    def post(self, path: str, **fields: str) -> tuple[int, dict[str, str], str]:
        """A form as this dashboard's own page sends it, with that page's word."""
        _, _, page = self.ask("/")
        word = page.partition('name="csrf" value="')[2].partition('"')[0]
        return self.form(path, csrf=word, **fields)

    def form(self, path: str, **fields: str) -> tuple[int, dict[str, str], str]:
        return self.ask(
            path,
            "POST",
            urllib.parse.urlencode(fields),
            Origin=f"http://{self.host}",
            Content_Type="application/x-www-form-urlencoded",
        )


class Stream:
    """Server-sent events as they come."""

    def __init__(self, visitor: Visitor, path: str, last_event_id: str = "") -> None:
        host, port = visitor.host.split(":")
        sent = {"Host": visitor.host, "Cookie": visitor.cookie, "Last-Event-ID": last_event_id}
        self._connection = http.client.HTTPConnection(host, int(port), timeout=60)
        self._connection.request("GET", path, headers=sent)
        self._answer = self._connection.getresponse()
        self.status = self._answer.status
        self.version = ""

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self._answer.close()
        self._connection.close()

    def update(self) -> dict[str, str]:
        """Parts that come under one version, id -> HTML; `reload` where the page is to be loaded
        anew; {} where the stream has ended."""
        found: dict[str, str] = {}
        for kind, data, id_ in self._events():
            if kind == "part":
                found[data.partition(' id="')[2].partition('"')[0]] = data
            elif kind == "reload":
                found["reload"] = data
            if id_:
                self.version = id_
                return found
        return {}

    def _events(self) -> Iterator[tuple[str, str, str]]:
        """(event, data, id) of each block."""
        fields: dict[str, list[str]] = {}
        for raw in self._answer:
            line = raw.decode().rstrip("\n")
            if line:
                name, _, value = line.partition(": ")
                fields.setdefault(name, []).append(value)
            else:
                kind, data, id_ = ("\n".join(fields.get(n, [])) for n in ("event", "data", "id"))
                yield kind, data, id_
                fields = {}


def stream_of(page: str) -> str:
    """The address of a page's live parts."""
    return html.unescape(page.partition(' sse-connect="')[2].partition('"')[0])
