"""A Canvas as its API's documentation describes it: one assignment, its submissions, bulk grading.

Lists come in pages with Link headers; grading is a job, whose Progress is polled. What differs from
a healthy Canvas is set on the object.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

TOKEN = "7~canvasTokenOfATeacher"
COURSE, ASSIGNMENT = 123, 4711
BASE = f"/api/v1/courses/{COURSE}/assignments/{ASSIGNMENT}"
PAGE = 2


@dataclass
class Canvas:
    """`scores` by user id; None is a student without a grade. `requests` are method and path."""

    scores: dict[int, float | None]
    points: float = 100.0
    grading_type: str = "points"
    published: bool = True
    # points that Canvas's own late policy takes off, by user id
    deducted: dict[int, float] = field(default_factory=dict)
    excused: set[int] = field(default_factory=set)
    # users whose grade the job does not take
    refused: set[int] = field(default_factory=set)
    # answers before the real ones: (status, headers, body)
    first: list[tuple[int, dict[str, str], str]] = field(default_factory=list)
    # a POST after so many is dropped: the connection ends
    drop_after: int = 10**9
    next_host: str = ""
    url: str = ""
    requests: list[tuple[str, str]] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)
    jobs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def posts(self) -> int:
        return sum(method == "POST" for method, _ in self.requests)

    def describe_submission(self, user: int) -> dict[str, Any]:
        entered = self.scores[user]
        score = None if entered is None else entered - self.deducted.get(user, 0)
        return {
            "id": 9000 + user,
            "user_id": user,
            "assignment_id": ASSIGNMENT,
            "score": score,
            "entered_score": entered,
            "grade": None if score is None else f"{score:g}",
            "excused": user in self.excused,
            "workflow_state": "unsubmitted" if score is None else "graded",
            "submitted_at": None,
        }

    def start_job(self, form: list[tuple[str, str]]) -> dict[str, Any]:
        grades: dict[int, float | None] = {}
        excuses = {}
        for key, value in form:
            match = re.fullmatch(r"grade_data\[(\d+)\]\[(posted_grade|excuse)\]", key)
            assert match, key
            if match[2] == "excuse":
                excuses[int(match[1])] = value == "true"
            else:
                grades[int(match[1])] = float(value)
        excused = {user for user, is_excused in excuses.items() if is_excused}
        assert excused.isdisjoint(grades), "Cannot simultaneously grade and excuse an assignment"
        # Canvas removes the score of a submission that it excuses.
        grades |= dict.fromkeys(excused)
        states = iter(("running", "completed"))
        job = {"id": len(self.jobs) + 1, "workflow_state": "queued", "message": None}
        self.jobs.append({"job": job, "grades": grades, "excuses": excuses, "states": states})
        return job

    def query_job(self, number: int) -> dict[str, Any]:
        entry = self.jobs[number - 1]
        job: dict[str, Any] = entry["job"]
        job["workflow_state"] = next(entry["states"], job["workflow_state"])
        if job["workflow_state"] == "completed":
            missing = [user for user in entry["grades"] if user in self.refused]
            self.scores.update(
                {user: score for user, score in entry["grades"].items() if user not in missing}
            )
            for user, is_excused in entry["excuses"].items():
                (self.excused.add if is_excused else self.excused.discard)(user)
            if missing:
                names = ", ".join(f"'{user}'" for user in missing)
                job["workflow_state"] = "failed"
                job["message"] = f"Couldn't find User(s) with API ids {names}"
        return job


class _Handler(BaseHTTPRequestHandler):
    canvas: Canvas

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        if not self._begin():
            return
        path, query = self._split()
        if path == BASE:
            about = {"points_possible": self.canvas.points, "published": self.canvas.published}
            about |= {"grading_type": self.canvas.grading_type, "name": "HW 3"}
            self._reply({"id": ASSIGNMENT, "course_id": COURSE, **about})
        elif path == f"{BASE}/submissions":
            self._reply_page(int(query.get("page", "1")))
        elif match := re.fullmatch(r"/api/v1/progress/(\d+)", path):
            self._reply(self.canvas.query_job(int(match[1])))
        else:
            self._reply({"errors": [{"message": "The specified resource does not exist."}]}, 404)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0)).decode()
        if not self._begin():
            return
        if self.canvas.posts > self.canvas.drop_after:
            self.close_connection = True
            return
        path, _ = self._split()
        assert path == f"{BASE}/submissions/update_grades", path
        self._reply(self.canvas.start_job(parse_qsl(body)))

    def _begin(self) -> bool:
        """Note the request; whether it gets its real answer."""
        self.canvas.requests.append((self.command, self.path))
        token = self.headers["Authorization"] or ""
        self.canvas.tokens.add(token)
        if self.canvas.first:
            status, headers, text = self.canvas.first.pop(0)
            self._send(status, headers, text.encode())
            return False
        if token != f"Bearer {TOKEN}":
            error = {"errors": [{"message": "Invalid access token."}]}
            headers = {"WWW-Authenticate": 'Bearer realm="canvas-lms"'}
            self._send(401, headers, json.dumps(error).encode())
            return False
        return True

    def _split(self) -> tuple[str, dict[str, str]]:
        parts = urlsplit(self.path)
        return parts.path, dict(parse_qsl(parts.query))

    def _reply_page(self, page: int) -> None:
        users = sorted(self.canvas.scores)
        shown = users[PAGE * (page - 1) : PAGE * page]
        base = f"{self.canvas.next_host or self.canvas.url}{BASE}/submissions"
        links = [f'<{base}?page={page}&per_page={PAGE}>; rel="current"']
        if PAGE * page < len(users):
            links.append(f'<{base}?page={page + 1}&per_page={PAGE}>; rel="next"')
        listed = [self.canvas.describe_submission(user) for user in shown]
        self._send(200, {"Link": ",".join(links)}, json.dumps(listed).encode())

    def _reply(self, body: Any, status: int = 200) -> None:
        self._send(status, {}, json.dumps(body).encode())

    def _send(self, status: int, headers: dict[str, str], data: bytes) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def serve_canvas(canvas: Canvas) -> Iterator[Canvas]:
    """Serve it on the loopback; `canvas.url` is its address."""
    handler = type("Handler", (_Handler,), {"canvas": canvas})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        canvas.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield canvas
        finally:
            server.shutdown()
            thread.join()
