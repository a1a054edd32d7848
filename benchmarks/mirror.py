"""The cost of a mirror for a run: steps of the sample project with and without a mirror.

One training run goes on all the time; the mirror is asked for a pass every EVERY_S seconds in each
other window of time, so that a slow minute of the machine falls on both. The store is a simulated
S3 on this very machine: its own work counts against the mirror here, as it would not elsewhere.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure import Comparison, NotDoneError, Row, environment
from benchmarks.report import draw_table, read_rows
from labctl.servers.agent import MARK, list_program_files

TEMPLATE = Path(__file__).parents[1] / "templates" / "image-classifier"
GROUP = "a thousand steps of the sample project"
TARGET = 1.02
EVERY_S = 5.0
WINDOW_S = 15.0
BEGIN_S, PASS_S = 120.0, 60.0
LAB, LAB_ID, RUN, BUCKET = "bench", "0f1e2d3c4b5a", "first", "results"
ABOUT = {"lab": LAB, "lab_id": LAB_ID}
CLOUD = """
import json, sys
import boto3
from labctl.rehearsal.aws import Rehearsal, Scenario
with Rehearsal(Scenario(boot="none")) as cloud:
    keys = {"aws_access_key_id": "AKIAEXAMPLE", "aws_secret_access_key": "secret"}
    s3 = boto3.client("s3", endpoint_url=cloud.url, region_name="us-east-1", **keys)
    s3.create_bucket(Bucket=sys.argv[1])
    print(json.dumps(cloud.environment), flush=True)
    sys.stdin.read()
    print(len(s3.list_objects_v2(Bucket=sys.argv[1])["Contents"]))
"""
METADATA = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Role(BaseHTTPRequestHandler):
    def do_GET(self):
        keys = {"Code": "Success", "AccessKeyId": "AKIAROLE", "SecretAccessKey": "role"}
        keys |= {"Token": "session", "Expiration": "2100-01-01T00:00:00Z"}
        listed = self.path.rstrip("/").endswith("security-credentials")
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"role" if listed else json.dumps(keys).encode())
    do_PUT = do_GET
    def log_message(self, *_):
        pass
server = ThreadingHTTPServer(("127.0.0.1", 0), Role)
print(server.server_port, flush=True)
server.serve_forever()
"""


@dataclass
class Side:
    """A lab's directory with a run in it, and the mirror's process."""

    run: Path
    mirror: subprocess.Popen[bytes]
    passes: int = 0
    # CPU time of the mirror in its windows, which other processes do not affect
    busy_s: float = 0.0

    def processor_s(self) -> float:
        fields = Path(f"/proc/{self.mirror.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def step(self) -> tuple[int, float]:
        """Return (the run's step, its time) as soon as the run reports a new step."""
        path, deadline = self.run / "logs" / "progress.json", time.monotonic() + BEGIN_S
        before = path.stat().st_mtime if path.exists() else 0.0
        while not path.exists() or path.stat().st_mtime == before:
            if time.monotonic() > deadline:
                raise NotDoneError("the run makes no progress")
            time.sleep(0.01)
        return int(json.loads(path.read_text())["step"]), path.stat().st_mtime

    def mirrored(self) -> None:
        assert self.mirror.stdin
        assert self.mirror.stdout
        self.mirror.stdin.write(json.dumps(ABOUT).encode() + b"\n")
        self.mirror.stdin.flush()
        line = self.mirror.stdout.readline()
        reply = json.loads(line[line.find(MARK) + len(MARK) :])
        if reply.get("why", "error") or reply["failed"] or not reply["sent"]:
            raise NotDoneError(f"the mirror did not send: {reply}")
        self.passes += 1

    def window(self, mirror: bool) -> float:
        """Return the seconds for a thousand steps, measured over about WINDOW_S seconds."""
        first, began = self.step()
        before = self.processor_s()
        until = time.monotonic() + WINDOW_S
        while (left := until - time.monotonic()) > 0:
            if mirror:
                due = time.monotonic() + EVERY_S
                self.mirrored()
                left = min(left, due - time.monotonic())
            time.sleep(max(0.0, left))
        self.busy_s += self.processor_s() - before
        last, ended = self.step()
        return (ended - began) / max(1, last - first) * 1000


@contextmanager
def _process(*words: str, around: dict[str, str], cwd: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, *words], env=around, cwd=cwd, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _said(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout
    return process.stdout.readline().decode().strip()


def _lab(home: Path) -> Path:
    """Create the lab's directory with one run; return the run's directory."""
    lab = home / "labctl" / LAB
    run = lab / "runs" / RUN
    spec = {"id": RUN, **ABOUT, "outputs": ["checkpoints", "logs"]}
    for path, body in (
        (lab / ".labctl" / "store.json", json.dumps({"url": f"s3://{BUCKET}/labs"})),
        (lab / ".labctl" / "id", LAB_ID),
        (run / ".labctl" / "spec.json", json.dumps(spec)),
        (run / ".labctl" / "code.json", "[]"),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(body)
    shutil.copytree(TEMPLATE, run / "code")
    (home / "program").mkdir()
    for name, content in list_program_files():
        place = home / "program" / name
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(content)
    return run


@contextmanager
def ready(home: Path) -> Iterator[Side]:
    """Start a run that trains, and a mirror process."""
    home.mkdir(parents=True, exist_ok=True)
    run = _lab(home)
    around = {**environment(home), "LABCTL_RUN_DIR": str(run), "LABCTL_RUN_ID": RUN}
    python = str(run / "code" / "train.py")
    with (
        _process("-c", CLOUD, BUCKET, around=dict(os.environ), cwd=home) as cloud,
        _process("-c", METADATA, around=around, cwd=home) as imds,
    ):
        aws = json.loads(_said(cloud)) | {"AWS_EC2_METADATA_DISABLED": "false"}
        aws["AWS_EC2_METADATA_SERVICE_ENDPOINT"] = f"http://127.0.0.1:{_said(imds)}"
        train = ("-B", python, "--epochs", "1000000", "--batch-size", "32", "--workers", "0")
        with (
            (run / "logs.txt").open("wb") as log,
            _process("program", "mirror-serve", around={**around, **aws}, cwd=home) as mirror,
        ):
            training = subprocess.Popen(
                [sys.executable, *train], cwd=run, env=around, stdout=log, stderr=log
            )
            try:
                side = Side(run, mirror)
                side.step()
                side.mirrored()
                yield side
            finally:
                training.kill()
                training.wait()


def compare(home: Path, rounds: int) -> Generator[Comparison]:
    """Compare windows without and with a mirror in turn; the baseline has none."""
    with ready(home) as side:
        rows = [
            Row("alone", lambda number: side.window(False)),
            Row(f"a mirror every {EVERY_S:g} s", lambda number: side.window(True), TARGET),
        ]
        yield Comparison(GROUP, rows, rounds)
        print(f"{side.busy_s / side.passes * 1000:.0f} ms of processor time per pass")


def main() -> int:
    """`python -m benchmarks.mirror [ROUNDS]`"""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    with tempfile.TemporaryDirectory(prefix="labctl-bench-") as folder:
        for comparison in compare(Path(folder), rounds):
            for number in range(rounds + 1):
                for row in comparison.rows:
                    row.take_turn(number, comparison.pause_s)
            print(draw_table(read_rows("mirror", comparison, complete=True), comparison.title))
    return 0


if __name__ == "__main__":
    sys.exit(main())
