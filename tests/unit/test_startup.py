"""What a command imports before it says anything: start-up time is a feature.

The lists say what is allowed, so that a new import at the top of a module shows up here. Times are
in benchmarks/; nothing here is timed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from labctl.cli.plain_ssh import parse_plain_command, parse_plain_exec, remote_line
from labctl.shell import portable_line

# All of labctl that `labctl --help` may import; beyond it click and the standard library.
HELP_MODULES = {
    "labctl",
    "labctl.cli",
    "labctl.cli.exit_codes",
    "labctl.cli.groups",
    "labctl.errors",
    "labctl.errors.subject",
    "labctl.lazy",
}
# `labctl --version` looks for the commit of a clone.
VERSION_MODULES = HELP_MODULES | {"labctl.config", "labctl.config.installation"}

# Every package beyond the standard library that `labctl status` may import; the last two come with
# yaml's C part and with msgspec.
STATUS_PACKAGES = {"click", "labctl", "msgspec", "yaml", "cython_runtime", "typing_extensions"}

# What `labctl status` may import beside the command line, the config and the state.
STATUS_MODULES = {
    "labctl.decoding",
    "labctl.events",
    "labctl.servers",
    "labctl.servers.accounts",
    "labctl.servers.cost",
    "labctl.servers.disks",
    "labctl.servers.context",
    "labctl.servers.provider_choice",
    "labctl.servers.provider_traits",
    "labctl.servers.watch_reports",
    "labctl.wire",
    "labctl.wire.codec",
    "labctl.wire.containment",
    "labctl.wire.node_access",
    "labctl.wire.run_ids",
    "labctl.wire.server_paths",
    "labctl.wire.text",
    "labctl.lifecycle",
    "labctl.lifecycle.lab_status",
    "labctl.lifecycle.status",
    "labctl.lab",
    "labctl.model",
    "labctl.parallel",
    "labctl.providers",
    "labctl.shell",
    "labctl.text",
}

HEAVY = {
    "ansible",
    "boto3",
    "cryptography",
    "docker",
    "fabric",
    "filelock",
    "jinja2",
    "paramiko",
    "pathspec",
    "requests",
    "rich",
    "tenacity",
    "torch",
}
# Of the standard library: slow to load, and needed by neither `--help` nor `status`.
SLOW_STANDARD = {"asyncio", "hashlib", "http.client", "urllib.request", "ssl", "email.parser"}

ROOT = Path(__file__).parents[2]
# What Python's audit hooks call it when a process starts another one or asks the network.
REACHING_OUT = {
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.system",
    "socket.connect",
    "socket.getaddrinfo",
    "socket.gethostbyname",
    "subprocess.Popen",
}

SCRIPT = """
import json, sys
reached = []
sys.addaudithook(lambda event, _: reached.append(event) if event in REACHING_OUT else None)
before = set(sys.modules)  # what the interpreter itself starts with
from labctl.cli.groups import cli
from labctl.cli.exit_codes import run_and_exit
sys.argv = ["labctl", *sys.argv[1:]]
code = run_and_exit(cli)
print()
print(json.dumps([code, sorted(set(sys.modules) - before), reached]))
"""


def imported_by(*words: str, cwd: Path, home: Path) -> tuple[int, set[str], str]:
    """labctl in a process of its own: its exit code, every module it imported, what it printed."""
    code, modules, said, _ = called(*words, cwd=cwd, home=home)
    return code, modules, said


def called(*words: str, cwd: Path, home: Path) -> tuple[int, set[str], str, list[str]]:
    """`imported_by`, and by what it reached out of its process."""
    done = subprocess.run(
        [sys.executable, "-I", "-c", f"REACHING_OUT = {REACHING_OUT!r}{SCRIPT}", *words],
        cwd=cwd,
        env={"PATH": os.environ["PATH"], "HOME": str(home), "LANG": "C.UTF-8"},
        capture_output=True,
        text=True,
        check=True,
    )
    said, _, last = done.stdout.rstrip("\n").rpartition("\n")
    code, modules, reached = json.loads(last)
    return code, set(modules), said, reached


def packages(modules: set[str]) -> set[str]:
    """The packages beyond the standard library."""
    own = {name.partition(".")[0] for name in modules}
    return {name for name in own if name not in sys.stdlib_module_names and name[0] != "_"}


@pytest.mark.parametrize("words", [("--help",), ("--version",), ("-h",)])
def test_help_imports_click_and_the_frame_alone(words: tuple[str, ...], tmp_path: Path) -> None:
    code, modules, said = imported_by(*words, cwd=tmp_path, home=tmp_path)
    assert code == 0
    assert said
    allowed = VERSION_MODULES if words == ("--version",) else HELP_MODULES
    assert {name for name in modules if name.startswith("labctl")} <= allowed
    assert packages(modules) == {"click", "labctl"}
    assert not modules & SLOW_STANDARD


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    """A lab with a server and a run on record, as `up` and `run` leave them."""
    from labctl.config import ensure_lab_id, find_paths
    from labctl.model import Endpoint, Offer, Run, Server
    from labctl.state import State

    root = tmp_path / "digits"
    root.mkdir()
    (root / "lab.yaml").write_text("lab: digits\nrun: python train.py\n")
    identity = ensure_lab_id(root)
    server = Server(
        id="labctl-digits-1",
        provider="local",
        lab="digits",
        lab_id=identity,
        alias="digits",
        endpoint=Endpoint(host="127.0.0.1", user="student"),
        state="running",
        offer=Offer(provider="local", type="container"),
        created_at=time.time() - 3600,
    )
    with State(find_paths({"HOME": str(tmp_path)}).database) as state:
        state.save_server(server)
        state.save_run(
            Run(id="first", lab_id=identity, server_id=server.id, state="running", container="c")
        )
    return root


def test_status_imports_what_reading_the_record_needs(lab: Path, tmp_path: Path) -> None:
    code, modules, said = imported_by("status", cwd=lab, home=tmp_path)
    assert code == 0
    assert "first" in said
    assert packages(modules) <= STATUS_PACKAGES
    assert not modules & (HEAVY | SLOW_STANDARD)
    own = {name for name in modules if name.startswith("labctl.")} - HELP_MODULES - STATUS_MODULES
    assert {name.split(".")[1] for name in own} <= {"cli", "config", "state"}


@pytest.mark.parametrize("words", [("--help",), ("--version",), ("status",), ("status", "--json")])
def test_neither_a_process_nor_the_network_is_needed_to_begin(
    words: tuple[str, ...], lab: Path, tmp_path: Path
) -> None:
    code, _, said, reached = called(*words, cwd=lab, home=tmp_path)
    assert (code, reached) == (0, [])
    assert said


PLAIN_SSH = """
import json, os, sys

def print_and_end(program, argv):
    print(json.dumps([argv, sorted(sys.modules)]), flush=True)
    os._exit(0)

os.execvp = print_and_end
from labctl.cli import main
main()
"""


@pytest.mark.parametrize(
    ("words", "remote"),
    [
        (("ssh", "--", "df", "-h", "/a b"), "df -h '/a b'"),
        (("ssh", "df -h | head"), "df -h | head"),
        (("ssh", "df", "--all"), "df --all"),
        (("ssh",), ""),
    ],
)
def test_a_plain_ssh_needs_no_click(
    words: tuple[str, ...], remote: str, lab: Path, tmp_path: Path
) -> None:
    plain_ssh("ssh", cwd=lab, home=tmp_path)  # writes the server's ssh_config, under a lock
    argv, modules = plain_ssh(*words, cwd=lab, home=tmp_path)
    assert argv[0] == "ssh"
    assert "labctl-digits-1" in argv
    command = [word for word in words[1:] if word != "--"]
    assert remote_line(command).endswith(remote)
    assert not remote or argv[-1] == portable_line(remote_line(command))
    assert {"click", "labctl.lifecycle", *HEAVY} & set(modules) == set()
    assert {"hashlib", "socket", "subprocess", "tarfile", "tempfile"} & set(modules) == set()


def test_a_plain_ssh_does_not_read_the_providers_settings(lab: Path, tmp_path: Path) -> None:
    (lab / "lab.yaml").write_text("lab: digits\nserver: {local: {memori: 8GB}}\n")
    argv, _ = plain_ssh("ssh", "--", "true", cwd=lab, home=tmp_path)
    assert argv[0] == "ssh"


@pytest.mark.parametrize("words", [("--alll",), ("--json",), ("-C", ".")])
def test_options_of_ssh_are_left_to_click(words: tuple[str, ...]) -> None:
    assert parse_plain_command(words) is None


@pytest.mark.parametrize("words", [("exec", "--", "df", "-h"), ("exec", "first", "--", "df", "-h")])
def test_a_plain_exec_needs_no_click(words: tuple[str, ...], lab: Path, tmp_path: Path) -> None:
    plain_ssh("ssh", cwd=lab, home=tmp_path)
    argv, modules = plain_ssh(*words, cwd=lab, home=tmp_path)
    assert argv[0] == "ssh"
    assert {"click", "labctl.runs", "labctl.lifecycle", *HEAVY} & set(modules) == set()


@pytest.mark.parametrize(
    "words",
    [
        ("first",),
        ("first", "df"),
        ("--", "-h"),
        ("a", "b", "--", "df"),
        ("--json", "--", "df"),
        (),
        ("--", "nvidia-smi"),
    ],
)
def test_a_mistake_of_exec_is_left_to_click(words: tuple[str, ...]) -> None:
    assert parse_plain_exec(words) is None


def plain_ssh(*words: str, cwd: Path, home: Path) -> tuple[list[str], list[str]]:
    """The command line that `labctl WORDS` becomes, and the modules imported until then."""
    done = subprocess.run(
        [sys.executable, "-I", "-c", PLAIN_SSH, *words],
        cwd=cwd,
        env={"PATH": os.environ["PATH"], "HOME": str(home), "LANG": "C.UTF-8"},
        capture_output=True,
        text=True,
        check=True,
    )
    argv, modules = json.loads(done.stdout)
    return argv, modules


def test_what_reaches_out_is_noticed(lab: Path, tmp_path: Path) -> None:
    _, _, _, reached = called("ssh", "--all", "--", "true", cwd=lab, home=tmp_path)
    assert "subprocess.Popen" in reached


def test_status_that_asks_the_provider_still_reads_its_settings(lab: Path, tmp_path: Path) -> None:
    (lab / "lab.yaml").write_text("lab: digits\nserver: {local: {memori: 8GB}}\n")
    _, modules, _ = imported_by("status", "--refresh", cwd=lab, home=tmp_path)
    assert "labctl.providers.local" in modules


def test_a_provider_of_labctls_own_is_found_without_asking_what_is_installed() -> None:
    from labctl.providers import BUILT_IN

    registered = {each.name: each.value for each in entry_points(group="labctl.providers")}
    assert {name: registered.get(name) for name in BUILT_IN} == BUILT_IN
    script = """
import sys
from labctl.providers import get_provider_class
assert get_provider_class("local").__name__ == "LocalProvider"
assert "importlib.metadata" not in sys.modules
"""
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT).returncode == 0


def test_no_command_pays_for_another_one_to_be_described(tmp_path: Path) -> None:
    from labctl.cli.groups import COMMANDS

    for name in sorted(COMMANDS):
        code, modules, said = imported_by(name, "--help", cwd=tmp_path, home=tmp_path)
        assert code == 0
        assert "Usage:" in said
        assert not modules & HEAVY, name


def test_every_verb_of_the_program_on_the_server_leads_to_a_function() -> None:
    script = """
from importlib import import_module
from labctl.agent.entrypoint import STREAMING_VERBS, VERBS
for name in [*VERBS.values(), *STREAMING_VERBS.values()]:
    module, _, function = name.rpartition(".")
    assert callable(getattr(import_module(f"labctl.agent.{module}"), function))
"""
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT).returncode == 0


def test_the_program_on_the_server_imports_one_verb_alone() -> None:
    """What it imports is waited for, at every call."""
    script = """
import io
import sys
before = set(sys.modules)
from labctl.agent.entrypoint import VERBS, _call_verb
try:
    _call_verb(VERBS["start"], io.BytesIO(b"{}"))
except Exception as failure:
    assert "spec is missing" in failure.report.why
print(*(set(sys.modules) - before))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    imported = set(done.stdout.split())
    assert "labctl.agent.runs.runs" in imported
    assert not imported & {
        "labctl.agent.files.fetch",
        "labctl.wire.files",
        "labctl.agent.runs.services",
        "http.client",
        "ssl",
        "subprocess",
        "shutil",
    }
