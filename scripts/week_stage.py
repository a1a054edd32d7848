"""What the demonstration runs on: a simulated AWS, a grader, a keeper and students' homes."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from week_files import PRICE_USD
from week_page import StudentBrowser

from labctl.courses.records.folder import CourseFolder
from labctl.servers.host_keys import ensure_key_pair

LABCTL = str(Path(sys.executable).with_name("labctl"))
SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
WAIT_S = 300.0
# What a step found, to compare with what is expected.
Figures = dict[str, object]
TYPES = ("g4dn.xlarge", "g5.xlarge")
PAGE = "page for students"
BROWSERS = ("chromium-headless-shell", "chromium")
SSHD_CONFIG = """\
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host
AuthorizedKeysFile {home}/.ssh/authorized_keys
StrictModes no
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
PidFile none
Subsystem sftp internal-sftp
SetEnv HOME={home}
"""


def labctl(
    *words: str, cwd: Path, code: int = 0, capture: bool = False, home: Path | None = None
) -> str:
    """Run a command in this terminal; return its standard output if captured.

    `home` is that of a student, who has no credentials.
    """
    print(f"\n{f'({home.name}) ' if home else ''}$ labctl {shlex.join(words)}", flush=True)
    out = subprocess.PIPE if capture else None
    environ = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "HOME": str(home)} if home else None
    done = subprocess.run([LABCTL, *words], cwd=cwd, text=True, stdout=out, env=environ)
    if done.returncode != code:
        message = f"exited with code {done.returncode}, not {code}"
        raise SystemExit(f"labctl {shlex.join(words)} {message}")
    return done.stdout or ""


def run_json(*words: str, cwd: Path, code: int = 0) -> dict[str, object]:
    """Return the output of a command with --json, without showing it."""
    words = words if "--json" in words else (*words, "--json")
    body: dict[str, object] = json.loads(labctl(*words, cwd=cwd, code=code, capture=True))
    return body


def announce(text: str) -> None:
    print(f"\n# {text}", flush=True)


def wait_for(what: str, is_done: Callable[[], bool]) -> None:
    """Wait until something has happened; SystemExit if it does not within WAIT_S."""
    until_s = time.monotonic() + WAIT_S
    while not is_done():
        if time.monotonic() > until_s:
            raise SystemExit(f"waited {WAIT_S:g} s for {what}")
        time.sleep(0.2)


@contextmanager
def rehearse_aws(home: Path) -> Iterator[None]:
    """Run a simulated AWS in its own process, and export its variables to this process."""
    prices = ", ".join(f"{name}: {PRICE_USD}" for name in TYPES)
    words = [LABCTL, "rehearse", "aws", "--set", f"types=[{', '.join(TYPES)}]"]
    words += ["--set", f"spot.prices={{{prices}}}"]
    print(f"\n$ labctl {shlex.join(words[1:])} &", flush=True)
    with subprocess.Popen(
        words, cwd=home, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as cloud:
        try:
            assert cloud.stdout is not None
            for line in cloud.stdout:
                word, _, rest = line.strip().partition(" ")
                if word == "unset":
                    for name in rest.split():
                        os.environ.pop(name, None)
                name, equals, value = rest.partition("=")
                if word == "export" and equals:
                    os.environ[name] = shlex.split(value)[0]
                if "LABCTL_SERVER_AWS_ADDRESS_FROM" in os.environ:
                    break
            else:
                raise SystemExit("the rehearsal did not start")
            yield
        finally:
            cloud.terminate()


def change_cloud(switch: str) -> None:
    """Change a setting of the simulated AWS from now on."""
    body = json.dumps({"switches": [switch]}).encode()
    url = f"{os.environ['AWS_ENDPOINT_URL']}/rehearsal/set"
    request = urllib.request.Request(url, body, {"X-Labctl-Rehearsal": "1"})
    urllib.request.urlopen(request, timeout=30).close()


@contextmanager
def build_image(name: str, dockerfile: str, base: str) -> Iterator[Callable[[], None]]:
    """Build an image with this machine's engine; yield a function that waits for its end."""
    words = ["docker", "build", "-q", "-t", name, "--build-arg", f"BASE={base}", "-"]
    with (
        tempfile.TemporaryFile("w+") as output,
        subprocess.Popen(words, stdin=subprocess.PIPE, stdout=output, stderr=output) as build,
    ):

        def await_image() -> None:
            if build.wait(WAIT_S) != 0:
                output.seek(0)
                raise SystemExit(f"{name} could not be built:\n{output.read()}")

        assert build.stdin is not None
        build.stdin.write(dockerfile.encode())
        build.stdin.close()
        try:
            yield await_image
        finally:
            build.terminate()


@contextmanager
def start_grader(home: Path) -> Iterator[str]:
    """Run a lab server on this machine; yield it as an entry of `static.hosts`.

    To the course it is a host like any other.
    """
    lab = home / "grader"
    lab.mkdir()
    (lab / "lab.yaml").write_text("lab: grader\nserver: {provider: local, gpu: none}\n")
    announce("Start a lab server on this machine for grading")
    server = run_json("up", "--yes", cwd=lab)["server"]
    assert isinstance(server, dict)
    entry = {name: server["endpoint"][name] for name in ("host", "port", "user", "identity")}
    try:
        yield json.dumps(entry)
    finally:
        labctl("down", "--yes", "--discard", cwd=lab)


@dataclass
class KeeperMachine:
    """The keeper's machine: an sshd for students, if there is one here, and the keeper's process.

    Its account is that of the staff, whose HOME it shares.
    """

    home: Path
    port: int
    host_key: str
    sshd: subprocess.Popen[bytes] | None = None
    keeper: subprocess.Popen[bytes] | None = None
    page_url: str = ""
    log: Path = field(init=False)

    def __post_init__(self) -> None:
        self.log = self.home / "keeper.log"

    def start(self, course: Path) -> None:
        """Run the keeper, with its dashboard and the page for students, until it answers."""
        words = [LABCTL, "course", "serve", "--dashboard", "--port", "0", "--students"]
        words += ["--students-port", "0", "--services-port", "0"]
        print(f"\n$ labctl {shlex.join(words[1:])} &", flush=True)
        before = self._count_starts()
        with self.log.open("ab") as log:
            self.keeper = subprocess.Popen(words, cwd=course, stderr=log)
        wait_for("the keeper", lambda: self._count_starts() > before)
        self.page_url = self.log.read_text().rpartition(f"{PAGE}: ")[2].split()[0]

    def kill(self) -> None:
        """End the keeper as a crash does."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> None:
        if self.keeper is not None:
            self.keeper.send_signal(number)
            self.keeper.wait(WAIT_S)
            self.keeper = None

    def _count_starts(self) -> int:
        return self.log.read_text().count(f"{PAGE}: ") if self.log.exists() else 0


@dataclass
class Week:
    """The course of the week, the staff's home and the keeper's machine."""

    home: Path
    course: Path
    grader_host: str
    keeper: KeeperMachine
    await_grading_image: Callable[[], None]
    browser: StudentBrowser | None = None

    @property
    def folder(self) -> CourseFolder:
        return CourseFolder(self.course)

    def labctl(self, *words: str, code: int = 0) -> None:
        """Run a command of the staff in the course's folder."""
        labctl(*words, cwd=self.course, code=code)

    def run_as(self, student: str, *words: str, code: int = 0, lab_name: str = "") -> str:
        """Run a student's command, in their lab if they have joined; return its output."""
        home = self.home / student
        lab = home / "ml-2026" / lab_name
        where = lab if lab.exists() else home
        return labctl(*words, cwd=where, code=code, home=home, capture=True)


@contextmanager
def start_keeper_machine(home: Path) -> Iterator[KeeperMachine]:
    """Run an sshd for the account of the staff on a port of its own."""
    (home / ".ssh").mkdir(mode=0o700, exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    key = ensure_key_pair(home / "host").rpartition(" ")[0]
    machine = KeeperMachine(home, port, key)
    if Path(SSHD).exists():
        config = home / "sshd_config"
        config.write_text(SSHD_CONFIG.format(port=port, folder=home, home=home))
        if os.getuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)
        with (home / "sshd.log").open("wb") as log:
            words = [SSHD, "-D", "-e", "-f", str(config)]
            machine.sshd = subprocess.Popen(words, stderr=log, stdout=log)
        wait_for("sshd", lambda: _is_open(port))
    try:
        yield machine
    finally:
        machine.stop()
        if machine.sshd is not None:
            machine.sshd.terminate()
            machine.sshd.wait(WAIT_S)


def _is_open(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


def take_picture(url: str, file: Path) -> bool:
    """Make a picture of a page, if there is a Chromium here."""
    chromium = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if chromium is None:
        return False
    words = [chromium, "--headless", "--disable-gpu", "--window-size=1280,800"]
    # Chromium's sandbox does not work for root.
    words += ["--no-sandbox"] if os.getuid() == 0 else []
    # The page never ends to load: the server sends events.
    quiet = subprocess.DEVNULL
    words += ["--timeout=4000", f"--screenshot={file}"]
    with tempfile.TemporaryDirectory() as profile, suppress(subprocess.TimeoutExpired):
        # The first address signs this browser in.
        for address in (url, url.partition("?")[0]):
            command = [*words, f"--user-data-dir={profile}", address]
            with subprocess.Popen(
                command, stderr=quiet, stdout=quiet, start_new_session=True
            ) as browser:
                try:
                    browser.wait(30)
                finally:  # its processes would outlive it
                    with suppress(ProcessLookupError):
                        os.killpg(browser.pid, signal.SIGKILL)
    return file.exists()
