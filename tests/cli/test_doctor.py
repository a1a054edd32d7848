"""`labctl doctor` on a newcomer's machine."""

from __future__ import annotations

import itertools
import json
import os
import platform
import socket
import time
from collections.abc import Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from unittest.mock import Mock

import pytest
from msgspec.structs import replace

from labctl import Lab
from labctl.cli.doctor_report import mask
from labctl.config import find_paths
from labctl.lifecycle import doctor
from labctl.lifecycle.doctor import check_own_keeper
from labctl.model import GIB, Endpoint, Gpu, Offer, Server, ServerFacts
from labctl.providers.aws.account import has_credentials
from labctl.servers.clock import check_clock
from labctl.state import State
from labctl.transports.failures import (
    make_authentication_error,
    make_dns_error,
    make_jump_error,
    make_refused_error,
    make_turned_away_error,
    make_unreachable_error,
)

# docker leaves its socket open where no engine answers
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

REFUSAL = b"""<ErrorResponse><Error><Type>Sender</Type><Code>InvalidClientTokenId</Code>
<Message>The key AKIAIOSFODNN7EXAMPLE of arn:aws:iam::123456789012:user/alice at 192.0.2.7 is
unknown to ops@corp.example in 123456789012 (profile corp-admin)</Message></Error>
</ErrorResponse>"""


class Internet(ThreadingHTTPServer):
    """Tells the time, `ahead_s` from ours, and refuses AWS's calls."""

    ahead_s = 0.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"


class Handler(BaseHTTPRequestHandler):
    server: Internet

    def do_HEAD(self) -> None:
        self.send_response_only(405)
        self.send_header("Date", formatdate(time.time() + self.server.ahead_s, usegmt=True))
        self.end_headers()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(403)
        self.send_header("Content-Length", str(len(REFUSAL)))
        self.end_headers()
        self.wfile.write(REFUSAL)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def internet(monkeypatch: pytest.MonkeyPatch) -> Iterator[Internet]:
    with Internet(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        for name in [each for each in os.environ if each.startswith("AWS_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("LABCTL_SERVER_AWS_ADDRESS_FROM", server.url)
        yield server
        server.shutdown()


def run_doctor(labctl: Any, *words: str) -> dict[str, dict[str, Any]]:
    done = labctl("doctor", "--json", *words)
    return {check["name"]: check for check in json.loads(done.out)["checks"]}


def test_a_machine_without_a_lab_is_checked(
    labctl: Any, home: Path, internet: Internet, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "empty").mkdir()
    monkeypatch.chdir(home / "empty")
    checks = run_doctor(labctl)
    assert {"labctl", "ssh", "rsync", "disk", "Docker Engine", "lab"} <= set(checks)
    assert "clock" not in checks  # no provider here depends on it
    assert checks["lab"]["next"].startswith("labctl init digits && cd digits   # a sample")
    assert "aws credentials" not in checks
    assert list((home / "empty").iterdir()) == []


def test_a_directory_with_code_becomes_a_lab_next(
    labctl: Any, home: Path, internet: Internet, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "birds").mkdir()
    (home / "birds" / "train.py").write_text("print()")
    monkeypatch.chdir(home / "birds")
    assert run_doctor(labctl)["lab"]["next"] == "labctl init   # writes one for your code"


def test_a_line_that_is_ok_has_no_next_command(
    labctl: Any, home: Path, internet: Internet, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "empty").mkdir()
    monkeypatch.chdir(home / "empty")
    lines = labctl("doctor").out.splitlines()
    assert "--  lab: not checked, because this directory has no lab.yaml" in lines
    assert lines[lines.index("      next: labctl init digits && cd digits") - 1].startswith("--")
    above = [line for line, below in itertools.pairwise(lines) if "  next: " in below]
    assert not [line for line in above if line.startswith("ok")]


def record_server() -> Server:
    """Record a server of the lab in the current directory, at which nothing answers."""
    server = Server(
        id="srv-silent", provider="local", lab="digits", lab_id=Lab.load("lab.yaml").id,
        alias="digits", endpoint=Endpoint(host="127.0.0.1", port=1, user="me", identity=""),
        created_at=0.0, state="running", offer=Offer(provider="local", type="container"),
    )  # fmt: skip
    with State(find_paths().database) as state:
        state.save_server(server)
    return server


COMPLETE = ServerFacts(
    os="Debian 12", user="me", uid=1000, python="3.11.2", tmux="3.3a", rsync="3.2.7",
    docker="20.10.24", sudo=True,
)  # fmt: skip
NO_DOCKER = replace(COMPLETE, docker="", docker_fault="missing", docker_error="not installed")
T4 = Gpu(uuid="GPU-1", name="Tesla T4", memory_bytes=16 * GIB)


@pytest.mark.parametrize(
    ("facts", "is_usable", "commands"),
    [
        (COMPLETE, True, []),
        (NO_DOCKER, False, ["labctl up   # installs it"] * 2),
        (
            replace(NO_DOCKER, sudo=False),
            False,
            [
                "sudo apt-get install --yes docker.io   # on 127.0.0.1, by an administrator",
                "sudo usermod --append --groups docker me   # on 127.0.0.1, by an administrator",
            ],
        ),
        (
            replace(COMPLETE, docker="", docker_fault="silent", docker_error="no answer"),
            False,
            ["labctl ssh -- sudo systemctl enable --now docker"],
        ),
        (
            replace(COMPLETE, rsync=""),
            True,
            ["labctl ssh -- sudo apt-get install --yes rsync"],
        ),
        (
            replace(COMPLETE, gpus=(T4,)),
            True,
            [
                "install nvidia-container-toolkit 1.17.8 or newer: https://docs.nvidia.com/"
                "datacenter/cloud-native/container-toolkit/latest/install-guide.html"
                "   # on 127.0.0.1, by an administrator"
            ],
        ),
    ],
)
def test_a_server_that_lacks_something_comes_with_the_command_that_helps(
    labctl: Any,
    home: Path,
    internet: Internet,
    monkeypatch: pytest.MonkeyPatch,
    facts: ServerFacts,
    is_usable: bool,
    commands: list[str],
) -> None:
    record_server()
    monkeypatch.setattr(doctor, "probe", Mock(return_value=facts))
    checks = json.loads(labctl("doctor", "--json").out)["checks"]
    summary, *lacking = [check for check in checks if check["name"] == "digits"]
    assert summary["ok"] == is_usable
    assert [check["next"] for check in lacking] == commands
    assert all(check["ok"] == check["warning"] == is_usable for check in lacking)


def test_a_server_that_cannot_be_reached_is_no_reason_to_type_doctor_again(
    labctl: Any, home: Path, internet: Internet, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = record_server().endpoint
    proxy = replace(endpoint, proxy_command="nc %h %p")
    for error, fix in (
        (make_unreachable_error(endpoint, "no banner"), "labctl up "),
        (make_dns_error(endpoint, ""), "labctl up "),
        (make_refused_error(endpoint, ""), "labctl up "),
        (make_turned_away_error(endpoint, ""), "labctl up "),
        (make_jump_error(proxy, ""), "ssh -v -p 1 me@127.0.0.1"),
        (make_authentication_error(endpoint, "denied"), "ssh-copy-id "),
    ):
        monkeypatch.setattr(doctor, "probe", Mock(side_effect=error))
        check = run_doctor(labctl)["digits"]
        assert not check["ok"]
        assert check["next"].startswith(fix)


def test_missing_programs_come_with_the_command_that_installs_them(
    labctl: Any, home: Path, internet: Internet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(home))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{home}/absent.sock")
    done = labctl("doctor")
    assert done.code == 1
    assert "!!  ssh: not found" in done.out
    assert "next: sudo apt-get install openssh-client" in done.out
    assert "!   rsync: not found" in done.out
    assert "next: sudo apt-get install rsync" in done.out


def test_an_unused_engine_and_unused_credentials_are_warnings(
    labctl: Any, home: Path, internet: Internet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{home}/absent.sock")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAIOSFODNN7EXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
    monkeypatch.setenv("AWS_ENDPOINT_URL", internet.url)
    checks = run_doctor(labctl, "--provider", "course")
    assert checks["clock"]["detail"] == "right, compared with 127.0.0.1"
    for name in ("Docker Engine", "aws credentials"):
        assert (checks[name]["ok"], checks[name]["warning"]) == (True, True)
        assert checks[name]["detail"].endswith("(this lab does not need it)")
        assert checks[name]["next"]


def test_the_values_in_a_wrong_lab_yaml_are_not_shown(
    labctl: Any, home: Path, internet: Internet
) -> None:
    (home / "digits" / "lab.yaml").write_text("lab: digits\nmirror: hunter2\nrunn: x\n")
    check = run_doctor(labctl)["lab.yaml"]
    assert (check["ok"], check["detail"]) == (False, "2 problems in line 2, 3")


@pytest.mark.parametrize(
    ("ahead_s", "ok", "warning", "detail"),
    [(0, True, False, "right"), (100, True, True, "behind"), (-3600, False, True, "ahead")],
)
def test_a_wrong_clock_is_noticed(
    internet: Internet, ahead_s: float, ok: bool, warning: bool, detail: str
) -> None:
    internet.ahead_s = ahead_s
    check = check_clock(internet.url)
    assert (check.ok, check.warning) == (ok, warning)
    assert detail in check.detail
    assert ok != ("set-ntp" in check.next) or warning


def test_without_a_network_the_clock_is_not_checked() -> None:
    assert check_clock("http://127.0.0.1:9/").skipped


def test_a_region_alone_is_no_credential(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path)}
    (tmp_path / ".aws").mkdir()
    config = tmp_path / ".aws" / "config"
    config.write_text("[default]\nregion = eu-west-1\n")
    assert not has_credentials("", environ)
    config.write_text("[default]\nsso_session = work\n")
    assert has_credentials("", environ)
    config.unlink()
    (tmp_path / ".aws" / "credentials").write_text("[default]\n")
    assert has_credentials("", environ)


def test_a_machine_that_keeps_no_lab_needs_no_keeper(home: Path) -> None:
    from labctl.config import find_paths

    assert check_own_keeper(find_paths(), lambda paths: False) == []


SECRETS = {
    "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
    "AWS_PROFILE": "corp-admin",
    "HF_TOKEN": "hf_abcdefghijklmnopqrstuvwxyz0123456789",
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "MY_PASSWORD": "hunter2hunter2",
}
CONFIG = """\
lab: cancer-study
env: {DB: "postgres://bob:s3cretpass@db.corp.example/x", CODE: opensesame}
store: s3://corp-bucket-9/results
server:
  static: {hosts: [carol@gpu7.corp.example]}
  aws: {profile: lab-yaml-profile}
"""
CREDENTIALS = """\
[lab-yaml-profile]
aws_access_key_id = AKIAI44QH8DHBEXAMPLE
aws_secret_access_key = je7MtGbClwBF/2Zp9Utk/h3yCo8nvbEXAMPLEKEY
aws_session_token = FwoGZXIvYXdzEBYaDExampleSessionToken0123456789
account_id = 123456789012
"""
HIDDEN = (
    *SECRETS.values(), "bob", "s3cretpass", "db.corp", "opensesame", "corp-bucket-9", "carol",
    "gpu7", "lab-yaml-profile", "cancer-study", "AKIAI44QH8DHBEXAMPLE", "je7MtGbClwBF",
    "FwoGZXIvYXdz", "123456789012", "alice", "192.0.2.7", "ops@corp",
)  # fmt: skip


@pytest.mark.parametrize("provider", ["local", "aws", "static"])
def test_the_report_has_no_secrets(
    provider: str, labctl: Any, home: Path, internet: Internet, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / ".aws").mkdir()
    (home / ".aws" / "credentials").write_text(CREDENTIALS)
    (home / "digits" / "lab.yaml").write_text(CONFIG)
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", internet.url)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(home / "absent"))
    monkeypatch.setenv("LOGNAME", "dave-the-user")
    monkeypatch.setattr(socket, "gethostname", lambda: "daves-laptop")
    done = labctl("doctor", "--report", "report.txt", "--provider", provider)
    assert "wrote report.txt" in done.err
    report = (home / "digits" / "report.txt").read_text()
    assert [text for text in (*HIDDEN, "dave", str(home)) if text in report] == []
    assert "ok       rsync: version" in report
    assert "credentials: " in report
    assert "The key <" in report, "the answer of AWS is in the report, masked"


def test_a_mistake_in_lab_yaml_is_in_the_report_without_its_value(
    labctl: Any, home: Path, internet: Internet
) -> None:
    (home / "digits" / "lab.yaml").write_text("lab: digits\nmirror: hunter2hunter2\n")
    labctl("doctor", "--report")
    report = (home / "digits" / "labctl-report.txt").read_text()
    assert "error    lab.yaml: 1 problem in line 2" in report
    assert "hunter2" not in report


def test_a_lab_without_a_keeper_does_not_deny_that_of_its_course(labctl: Any, home: Path) -> None:
    (home / "digits" / "lab.yaml").write_text("lab: digits\n")
    assert "ok  keeper: none for this lab; " in labctl("-C", str(home / "digits"), "doctor").out


def test_the_keeper_of_a_course_is_not_denied_in_its_lab(labctl: Any, home: Path) -> None:
    key = f"ssh-ed25519 {'A' * 68}"
    keeper = f"keeper: 'ssh://course@127.0.0.1:9', host_key: {key}"
    course = f"course: {{{keeper}, course: ml, student: alice, seat: '0f1e2d3c4b5a'}}"
    (home / "digits" / "lab.yaml").write_text(
        f"lab: digits\nserver: {{provider: course, {course}}}\n"
    )
    said = labctl("-C", str(home / "digits"), "doctor")
    assert "ssh://course@127.0.0.1:9" in said.out
    assert "none for this lab" not in said.out


def test_a_version_in_lab_yaml_does_not_mask_that_of_python(labctl: Any, home: Path) -> None:
    version = platform.python_version().rpartition(".")[0]
    lab_file = f'lab: digits\nimage: {{python: "{version}", requirements: requirements.txt}}\n'
    (home / "digits" / "lab.yaml").write_text(lab_file)
    (home / "digits" / "requirements.txt").write_text("numpy\n")
    labctl("doctor", "--report")
    report = (home / "digits" / "labctl-report.txt").read_text()
    assert f"Python {platform.python_version()}, " in report


def test_a_report_replaces_no_file(labctl: Any, home: Path) -> None:
    (home / "digits" / "train.py").write_text("work")
    done = labctl("doctor", "--report", "train.py")
    assert (done.code, (home / "digits" / "train.py").read_text()) == (2, "work")
    assert "train.py exists already" in done.err


def test_forms_are_masked_and_instructions_are_not() -> None:
    masked = mask("gpu.uni.de fe80::1:2 /home/eve/x i-0123456789abcdef0 bob", ["bob"])
    assert masked == "<host> <address> ~/x <id> <masked>"
    kept = "see docs/aws.md, lab.yaml, server.aws.scheduler_role, https://docs.docker.com/engine/"
    assert mask(kept, ()) == kept
