"""What people type and read: help, errors in three parts, exit codes, JSON."""

from __future__ import annotations

import io
import json
import os
import shlex
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import msgspec
import pytest
from click.testing import CliRunner
from rich.console import Console

from labctl.cli.checks import print_checks
from labctl.cli.exit_codes import BUG, clean, print_error, run_and_exit
from labctl.cli.groups import COMMANDS, cli
from labctl.cli.screen import Screen
from labctl.cli.tables import print_json, print_table
from labctl.config import find_paths
from labctl.errors import ConfigError, InterruptError, LabError, PolicyError, Problem
from labctl.events import Event, Progress, Question, SharedReporter, SilentReporter, Step
from labctl.lab import Lab
from labctl.lifecycle import sample_project
from labctl.model import (
    Check,
    CreateServerRequest,
    Endpoint,
    Gpu,
    Need,
    Offer,
    Resource,
    Run,
    Server,
    ServerFacts,
)
from labctl.parallel import run_parts
from labctl.providers.local import LocalProvider
from labctl.servers.gpus import choose_server_gpus_option
from labctl.servers.playbooks import TaskEvent, _PlaybookProgress
from labctl.state import State
from labctl.state.disks import STOPPED
from labctl.wire.codec import to_json
from labctl.wire.watchdog import WatchRecord

NAMES = list(COMMANDS)


def test_help_lists_every_command_under_its_heading() -> None:
    said = CliRunner().invoke(cli, ["--help"])
    assert said.exit_code == 0
    for name in NAMES:
        assert f"\n  {name} " in said.output
    assert "Everyday commands:" in said.output


@pytest.mark.parametrize("name", NAMES)
def test_the_help_of_a_command_shows_how_to_call_it(name: str) -> None:
    said = CliRunner().invoke(cli, [name, "--help"], prog_name="labctl")
    assert said.exit_code == 0
    assert f"\n  labctl {name}" in said.output or f"\n  labctl pull && labctl {name}" in said.output
    assert all(len(line) <= 100 for line in said.output.splitlines())


def test_a_word_misspelt(labctl: Any) -> None:
    said = labctl("statsu")
    assert said.code == 2
    assert "did you mean status?" in said.err
    assert "  next: labctl status --all\n" in labctl("statsu", "--all").err
    assert "  next: labctl --help\n" in labctl("qqq").err
    assert labctl("up", "--no-such-option").code == 2


def test_everything_wrong_in_lab_yaml_is_told_at_once(labctl: Any, home: Path) -> None:
    (home / "digits" / "lab.yaml").write_text("lab: Bad Name\nrum: x\nserver:\n  max_price: lots\n")
    said = labctl("up")
    assert (said.code, said.out) == (2, "")
    for line, word in ((1, "lab"), (2, "rum"), (4, "server.max_price")):
        assert f"line {line}: {word}" in said.err
    assert "3 problems" in said.err


def test_without_a_lab_the_way_to_one_is_named(labctl: Any, home: Path) -> None:
    (home / "empty").mkdir()
    said = labctl("-C", str(home / "empty"), "status")
    assert said.code in (2, 4)
    assert "next: labctl init" in said.err


def test_a_misspelled_directory_is_named(labctl: Any, home: Path) -> None:
    for words in (("status",), ("offers", "--provider", "local")):
        misspelled = labctl("-C", str(home / "digts"), *words)
        assert misspelled.code == 2
        assert f"there is no directory {home}/digts\n" in misspelled.err


def test_c_leads_to_another_directory(labctl: Any, home: Path) -> None:
    os.chdir(home)
    said = labctl("-C", "digits", "status")
    assert (said.code, said.out) == (0, "digits: no server\n  next: labctl up\n")


@pytest.mark.parametrize(
    "words",
    [
        ("run",),
        ("ssh",),
        ("exec", "--", "ls"),
        ("attach",),
        ("-C", ".", "ssh"),
        ("-C", ".", "exec", "ls"),
        ("run", "--no-such-option-before", "--id", "BAD NAME"),
    ],
)
def test_own_failure_is_255_where_codes_pass_through(labctl: Any, words: tuple[str, ...]) -> None:
    said = labctl(*words)
    assert said.code == 255
    assert "labctl:" in said.err


@pytest.mark.parametrize(
    ("words", "what", "next_command"),
    [
        (
            ("run", "--epochs", "3"),
            "labctl run has no option --epochs\n",
            "labctl run -- python train.py --epochs 3\n",
        ),
        (
            ("run", "--id", "night", "--detatch"),
            "no option --detatch; did you mean --detach?",
            "labctl run --id night --detach\n"
            "        labctl run --id night -- python train.py --detatch\n"
            "        (instead, for an option of your command)\n",
        ),
        (
            ("run", "-d", "python", "train.py", "--lr=1e-3"),
            "labctl run has no option --lr\n",
            "labctl run -d -- python train.py --lr=1e-3\n",
        ),
        (("run", "--lr", "--", "ls"), "labctl run has no option --lr\n", "labctl run -- ls --lr\n"),
        (
            ("run", "train.py", "--lr", "1"),
            "labctl run has no option --lr\n",
            "labctl run -- python train.py --lr 1\n",
        ),
        (("exec", "ls", "-a"), "labctl exec has no option -a\n", "labctl exec -- ls -a\n"),
        (("exec", "r1", "-a", "--", "ls"), "has no option -a\n", "labctl exec r1 -- ls -a\n"),
        (("exec", "ls"), "labctl exec needs `--` before the command", "labctl exec -- ls\n"),
        (("exec",), "labctl exec needs `--` before the command", "labctl exec -- bash\n"),
    ],
)
def test_an_unknown_option_is_not_taken_for_a_command(
    labctl: Any, words: tuple[str, ...], what: str, next_command: str
) -> None:
    said = labctl(*words)
    assert said.code == 255
    assert what in said.err
    assert said.err.endswith(f"next: {next_command}")


@pytest.mark.parametrize(
    "words",
    [
        *(("attach", ""), ("cancel", ""), ("eval", ""), ("exec", "", "--", "ls")),
        *(("explain", ""), ("logs", ""), ("profile", ""), ("pull", ""), ("report", "")),
        *(("submit", ""), ("init", "")),
    ],
)
def test_an_empty_name_is_not_the_default(labctl: Any, home: Path, words: tuple[str, ...]) -> None:
    before = sorted(home.rglob("*"))
    result = labctl(*words)
    assert result.code in (2, 255)
    assert " is empty\n" in result.err
    assert "next: labctl " in result.err
    assert sorted(home.rglob("*")) == before


def test_exec_keeps_the_run_after_an_unknown_option(labctl: Any) -> None:
    lab = Lab.load(".")
    lab.context.state.save_run(Run(id="r1", lab_id=lab.id, server_id="s1", state="running"))
    said = labctl("exec", "--detatch", "r1", "--", "ls")
    assert said.err.endswith("next: labctl exec r1 -- ls --detatch\n")
    said = labctl("exec", "--workdir", "/tmp", "--", "ls")
    assert said.err.endswith("next: labctl exec -- ls --workdir /tmp\n")
    lab.context.state.close()


def test_forward_checks_the_name_of_a_service_before_the_server(labctl: Any, home: Path) -> None:
    said = labctl("forward", "tensorbord")
    assert said.code == 2
    assert said.err.startswith("labctl: unknown service 'tensorbord'\n")
    assert said.err.endswith("next: labctl forward tensorboard\n")
    assert "digits has no server" in labctl("forward", "tensorboard").err


@pytest.mark.parametrize(
    "command", ["eval", "explain", "logs", "profile", "pull", "report", "serve"]
)
def test_a_misspelled_run_is_corrected_without_a_server(
    labctl: Any, home: Path, command: str
) -> None:
    lab = Lab.load(".")
    lab.context.state.save_run(Run(id="night", lab_id=lab.id, server_id="s1", state="exited"))
    lab.context.state.close()
    said = labctl(command, "nigth")
    assert said.code == 4
    assert "; did you mean night?\n" in said.err
    assert said.err.endswith(f"next: labctl {command} night\n")


def test_a_misspelled_run_to_recover_is_corrected_without_a_server(labctl: Any, home: Path) -> None:
    lab = Lab.load(".")
    lab.context.state.save_run(Run(id="night", lab_id=lab.id, server_id="s1", state="running"))
    lab.context.state.close()
    said = labctl("run", "--recover", "--id", "nigth")
    assert said.code == 255
    assert "there is no run nigth; did you mean night?\n  digits has no server" in said.err
    assert said.err.endswith("next: labctl run --recover --id night\n")
    other = labctl("run", "--recover", "--id", "morning")
    assert "labctl: digits has no server\n" in other.err


def test_exec_names_the_run_before_the_command(labctl: Any, home: Path) -> None:
    lab = Lab.load(".")
    lab.context.state.save_run(Run(id="r1", lab_id=lab.id, server_id="s1", state="running"))
    assert labctl("exec", "r1").err.endswith("next: labctl exec r1 -- bash\n")
    assert "there is no run r2" in labctl("exec", "r2", "--", "ls").err
    assert "digits has no server" in labctl("exec", "r1", "--", "ls").err
    # As people type it for docker exec and labctl run.
    assert "digits has no server" in labctl("exec", "-it", "r1", "--", "bash").err


@pytest.mark.parametrize(
    ("command", "suggested"),
    [
        ("nvidia-smi", "labctl ssh -- nvidia-smi"),
        ("nvidia-smi -L", "labctl ssh -- nvidia-smi -L"),
        ("bash", "labctl run -it -- bash"),
        ("python evaluate.py", "labctl run -- python evaluate.py"),
    ],
)
def test_exec_in_a_run_that_has_ended_suggests_what_still_works(
    labctl: Any, home: Path, monkeypatch: pytest.MonkeyPatch, command: str, suggested: str
) -> None:
    lab = Lab.load(".")
    ended = Run(id="r1", lab_id=lab.id, server_id="s1", state="exited", exit_code=0)
    lab.context.state.save_run(ended)
    server = Server(
        id="s1", provider="local", lab="digits", lab_id=lab.id, alias="digits", state="running",
        endpoint=Endpoint(host="127.0.0.1"), offer=Offer(provider="local", type="container"),
        created_at=1.0,
    )  # fmt: skip
    lab.context.state.save_server(server)
    monkeypatch.setattr("labctl.runs.runs.refresh", lambda context, server: None)
    said = labctl("exec", "--", *command.split())
    assert said.code == 255
    assert "run r1 has ended" in said.err
    assert f"next: {suggested}\n" in said.err
    other = Run(id="r0", lab_id=lab.id, server_id="s1", state="running")
    lab.context.state.save_run(other)
    said = labctl("exec", "r1", "--", *command.split())
    assert f"next: labctl exec r0 -- {command}\n" in said.err
    assert f"        {suggested}\n" in said.err


@pytest.mark.parametrize("found", [True, False])
def test_exec_of_nvidia_smi_without_a_gpu_says_so(
    labctl: Any, home: Path, monkeypatch: pytest.MonkeyPatch, found: bool
) -> None:
    server = kept(home)
    context = Lab.load(".").context
    context.state.save_run(
        Run(id="r1", lab_id=context.lab_id, server_id=server.id, state="running")
    )
    (context.paths.ssh_dir / server.id).mkdir(parents=True)
    gpu = Gpu(name="T4", uuid="GPU-1", memory_bytes=16 * 10**9)
    context.save_facts(server, ServerFacts(os="Debian", gpus=(gpu,) if found else ()))
    executed: list[str] = []
    monkeypatch.setattr("labctl.runs.runs.refresh", lambda context, server: None)
    monkeypatch.setattr(
        "labctl.cli.attach.replace_with_exec", lambda context, run, command: executed.append(run.id)
    )
    said = labctl("exec", "r1", "--", "nvidia-smi", "-L")
    assert bool(executed) == found
    assert (said.code == 255) != found
    assert ("this server has no GPU" in said.err) != found
    assert ("next: labctl offers --provider auto --gpu any\n" in said.err) != found
    assert ("labctl move --provider NAME --gpu any\n" in said.err) != found


def test_an_option_of_openssh_is_sent_to_ssh(labctl: Any) -> None:
    said = labctl("ssh", "-L", "8000:localhost:8000", "--", "ls")
    assert said.code == 255
    assert "labctl ssh has no option -L" in said.err
    assert "next: ssh -L 8000:localhost:8000 digits\n" in said.err


@pytest.mark.parametrize("words", [("pull",), ("logs",), ("cancel",), ("push",), ("inventory",)])
def test_not_found_is_4_elsewhere(labctl: Any, words: tuple[str, ...]) -> None:
    said = labctl(*words)
    assert said.code == 4
    assert "next: labctl " in said.err


@pytest.mark.parametrize(
    ("words", "problem", "command"),
    [
        (
            ("--follow", "--all"),
            "--follow cannot be combined with --all",
            "labctl pull --follow && labctl pull --all",
        ),
        (
            ("--follow", "night", "--all"),
            "--follow cannot be combined with --all",
            "labctl pull --follow night && labctl pull --all night",
        ),
        (
            ("-f", "night", "--all", "--runs"),
            "--follow cannot be combined with --all and --runs",
            "labctl pull --follow night && labctl pull --all --runs",
        ),
        (("--code", "night"), "--code cannot be combined with RUN", "labctl pull --code"),
        (("--code", "-f"), "--code cannot be combined with --follow", "labctl pull --code"),
        (
            ("--code", "--all", "--runs"),
            "--code cannot be combined with --all and --runs",
            "labctl pull --code",
        ),
        (("--runs", "night"), "--runs cannot be combined with RUN", "labctl pull --runs"),
    ],
)
def test_pull_refuses_options_that_would_do_nothing(
    labctl: Any, words: tuple[str, ...], problem: str, command: str
) -> None:
    said = labctl("pull", *words)
    assert said.code == 2
    assert f"labctl: {problem}\n" in said.err
    assert f"next: {command}\n" in said.err


def kept(home: Path, **more: Any) -> Server:
    """A server and a run on record, with names that would steer a terminal."""
    lab = Lab.load(home / "digits", environ={"HOME": str(home)})
    offer = Offer(provider="local", type="\x1b[2Jbig", price_usd_per_hour=0.5)
    server = Server(
        id="box-1", provider="local", lab="digits", lab_id=lab.id, alias="digits",
        endpoint=Endpoint(host="127.0.0.1"), offer=offer, created_at=time.time() - 7200,
        state="running",
    )  # fmt: skip
    lab.context.state.save_server(server)
    run = Run(
        id="night", lab_id=lab.id, server_id="box-1", state="exited", exit_code=1,
        command=("python", "train.py"), summary="failed \x1b]0;title\x07 \u202eexe",
        started_at=time.time() - 60, ended_at=time.time(), created_at=time.time() - 61, **more,
    )  # fmt: skip
    lab.context.state.save_run(run)
    lab.context.state.close()
    return server


def test_status_draws_names_that_cannot_steer_a_terminal(labctl: Any, home: Path) -> None:
    kept(home)
    said = labctl("status")
    assert said.code == 0
    assert "\\x1b[2Jbig" in said.out
    assert not {"\x1b", "\x07", "\u202e"} & {*said.out}
    assert "$1.00 so far at $0.50/h" in said.out
    assert "night" in said.out


def test_status_says_that_the_cost_includes_earlier_servers(labctl: Any, home: Path) -> None:
    server = kept(home)
    lab = Lab.load(".")
    before = {"created_at": time.time() - 7200, "price_usd_per_hour": 1.0, "lab": "digits"}
    lab.context.state.record("created", lab_id=lab.id, server_id="box-0", detail=before)
    lab.context.state.record("terminated", lab_id=lab.id, server_id="box-0")
    lab.context.state.close()
    line = labctl("status").out.splitlines()[1]
    assert line.endswith("$3.00 so far with earlier servers, at $0.50/h"), (server, line)


def test_status_calls_a_free_server_free_and_a_canceled_run_canceled(
    labctl: Any, home: Path
) -> None:
    server = kept(home)
    offer = msgspec.structs.replace(server.offer, price_usd_per_hour=0.0)
    lab = Lab.load(".")
    lab.context.state.save_server(msgspec.structs.replace(server, offer=offer))
    run = Run(id="night", lab_id=lab.id, server_id=server.id, state="cancelled", summary="stopped")
    lab.context.state.save_run(run)
    lab.context.state.close()
    lines = labctl("status").out.splitlines()
    assert lines[1].endswith(", free")
    assert next(line.split()[:2] for line in lines if "night" in line) == ["night", "canceled"]
    assert json.loads(labctl("status", "--json").out)["runs"][0]["state"] == "cancelled"


@pytest.mark.parametrize(
    ("setting", "executor", "line"),
    [
        ("", "docker", "runs are Docker containers"),
        ("executor: process", "process", "runs are plain processes (executor: process)"),
    ],
)
def test_status_names_the_executor(
    labctl: Any, home: Path, setting: str, executor: str, line: str
) -> None:
    kept(home)
    (home / "digits" / "lab.yaml").write_text(f"lab: digits\nserver: {{{setting}}}\n")
    said = labctl("status")
    assert f"  {line}\n" in said.out, said
    assert json.loads(labctl("status", "--json").out)["executor"] == executor


def test_status_says_that_a_run_was_stopped_because_its_gpu_time_ended(
    labctl: Any, home: Path
) -> None:
    server = kept(home)
    lab = Lab.load(".")
    summary = "stopped: its GPU time ended; the outputs saved by then are kept"
    for name, state, stopped_by in (("night", "lost", "GPU lease"), ("day", "lost", "")):
        run = Run(
            id=name, lab_id=lab.id, server_id=server.id, state=state, summary=summary,
            stopped_by=stopped_by,
        )  # fmt: skip
        lab.context.state.save_run(run)
    lab.context.state.close()
    rows = {line.split()[0]: line for line in labctl("status").out.splitlines() if "GPU" in line}
    assert rows["night"].split()[1] == "stopped"
    assert rows["night"].endswith(summary)
    assert rows["day"].split()[1] == "lost"


def test_status_and_an_interrupted_up_name_the_same_next_commands(labctl: Any, home: Path) -> None:
    lab = Lab.load(".")
    offer = Offer(provider="local", type="container")
    request = CreateServerRequest(
        lab="digits", lab_id=lab.id, token="t1", public_key="", identity="", need=Need()
    )
    lab.context.state.begin_attempt("t1", request, offer)
    lab.context.state.close()
    said = labctl("status")
    assert said.code == 0
    assert "an interrupted labctl up may have created one\n" in said.out
    assert "  labctl up " in said.out
    assert "  labctl down " in said.out


def test_canceling_the_run_of_an_earlier_server_says_that_it_has_ended(
    labctl: Any, home: Path
) -> None:
    server = kept(home)
    lab = Lab.load(".")
    lab.context.state.save_server(msgspec.structs.replace(server, id="box-2"))
    lab.context.state.drop_server(server.id)
    lab.context.state.close()
    said = labctl("cancel", "night")
    assert said.code == 0, said.err
    assert said.out.startswith("run night had already ended: failed")


def test_a_stopped_server_is_the_last_known_state_only_without_refresh(
    labctl: Any, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = msgspec.structs.replace(kept(home), state="stopped")
    lab = Lab.load(".")
    lab.context.state.save_server(server)
    lab.context.state.close()
    monkeypatch.setattr("labctl.servers.adoption.adopt", lambda context: server)
    out = labctl("status").out
    assert ": stopped (last known), " in out
    assert "\n  up " not in out
    assert ": stopped, " in labctl("status", "--refresh").out


def report(server: Server, **watch: Any) -> None:
    """Record a report of the server's watchdog."""
    lab = Lab.load(".")
    lab.context.state.save_server(server)
    record = to_json(WatchRecord(alive=True, server_id=server.id, **watch))
    lab.context.state.record("watch", server_id=server.id, detail={"watch": record})
    lab.context.state.close()


def test_a_stopped_server_shows_none_of_the_clocks_that_rest(labctl: Any, home: Path) -> None:
    server = msgspec.structs.replace(kept(home), state="stopped")
    report(server, ttl_left_s=600.0, idle_left_s=60.0, busy=("run night is running",))
    lines = labctl("status").out.splitlines()
    assert "  ttl 10 min left" in lines
    assert "  its disk is kept, with everything on it; to use it: labctl start" in lines
    assert not [line for line in lines if "idle" in line or line.startswith("  ssh ")]


@pytest.mark.parametrize(
    ("watch", "reason"),
    [
        ({"ttl_left_s": 600.0, "idle_left_s": -1.0}, "it was idle"),
        ({"ttl_left_s": -1.0, "idle_left_s": -2.0}, "it was idle or its ttl ended"),
        ({"ttl_left_s": -1.0, "idle_left_s": -2.0, "ends_by": "idle"}, "it was idle"),
        ({"ttl_left_s": -2.0, "idle_left_s": -1.0, "ends_by": "ttl"}, "its ttl ended"),
        (
            {"ttl_left_s": -1.0, "idle_left_s": -2.0, "ends_by": "ttl", "busy": ("typing",)},
            "it was idle or its ttl ended",
        ),
        ({"ttl_left_s": 600.0, "ending": "budget"}, "its budget was spent"),
        ({"ttl_left_s": 600.0, "busy": ("run night is running",)}, ""),
    ],
)
def test_status_says_why_a_server_stopped_by_itself(
    labctl: Any, home: Path, watch: dict[str, Any], reason: str
) -> None:
    server = msgspec.structs.replace(kept(home), state="stopped")
    report(server, **watch)
    said = labctl("status").out
    assert (f"  its watchdog stopped it: {reason}\n" in said) == bool(reason)
    assert ("watchdog stopped it" in said) == bool(reason)
    lab = Lab.load(".")
    lab.context.state.record(STOPPED, lab_id=lab.id, server_id=server.id, detail={})
    lab.context.state.close()
    assert "watchdog stopped it" not in labctl("status").out


def test_a_stopped_server_whose_ttl_has_passed_shows_no_time(labctl: Any, home: Path) -> None:
    report(msgspec.structs.replace(kept(home), state="stopped"), ttl_left_s=0.0)
    assert "left" not in labctl("status").out


def test_status_says_when_the_runs_stop_before_the_end(labctl: Any, home: Path) -> None:
    report(kept(home), ttl_left_s=130.0, ends_in_s=70.0, ends_by="ttl")
    out = labctl("status").out
    assert "ttl 2 min left" in out
    assert "\n  it stops runs, saves results and ends in 70 s, to be done in time\n" in out


def test_a_missing_gpu_is_noted_once_for_each_server(home: Path) -> None:
    class Notes(SilentReporter):
        def emit(self, event: Event) -> None:
            noted.append(getattr(event, "text", ""))

    noted: list[str] = []
    lab = Lab.load(".", reporter=Notes())
    first = kept(home)
    for server in (first, first, msgspec.structs.replace(first, id="box-2"), first):
        assert choose_server_gpus_option(lab.context, server) == ""
    assert noted == ["No GPU on this server; using the CPU."] * 2


def test_old_runs_fold_away(labctl: Any, home: Path) -> None:
    server = kept(home)
    lab = Lab.load(".")
    for number in range(9):
        run = Run(
            id=f"r{number}", lab_id=lab.id, server_id=server.id, created_at=1000.0 + number,
            state="running" if number == 1 else "exited", exit_code=0,
        )  # fmt: skip
        lab.context.state.save_run(run)
    lab.context.state.close()
    said = labctl("status").out
    shown = [line.split()[0] for line in said.splitlines() if "exited" in line or "running" in line]
    assert {"night", "r8", "r7", "r6", "r5", "r1"} <= {*shown}
    assert not {"r0", "r2", "r3", "r4"} & {*shown}
    assert said.endswith("and 4 older runs: labctl status --all\n")
    whole = labctl("status", "--all").out
    assert "r0 " in whole
    assert "older" not in whole
    assert len(json.loads(labctl("status", "--json").out)["runs"]) == 10


@pytest.mark.parametrize(
    ("watch", "said"),
    [
        ({"budget_left_s": None, "idle_left_s": None}, "The server now stops in 2 h.\n"),
        ({"budget_left_s": 9000.0, "idle_left_s": 7300.0}, "The server now stops in 2 h.\n"),
        (
            {"budget_left_s": None, "idle_left_s": 1800.0},
            "The server now stops in 2 h. "
            "If it is idle, it stops earlier, in 30 min at the soonest.\n",
        ),
        (
            {"budget_left_s": 3600.0, "idle_left_s": 1800.0},
            "The server stops in 1 h, when its budget is spent (ttl: 2 h). "
            "If it is idle, it stops earlier, in 30 min at the soonest.\n",
        ),
        (
            {"ttl_left_s": None, "idle_left_s": 7200.0},
            "The server stops once it is idle, in 2 h at the soonest.\n",
        ),
        (
            {"ttl_left_s": None, "budget_left_s": 3600.0},
            "The server stops in 1 h, when its budget is spent.\n",
        ),
        ({"ttl_left_s": None}, "No limit is set: only labctl down stops the server.\n"),
    ],
)
def test_extend_tells_what_may_end_the_server_sooner(
    labctl: Any, home: Path, monkeypatch: pytest.MonkeyPatch, watch: dict[str, Any], said: str
) -> None:
    from labctl.lifecycle import extend as action

    report = WatchRecord(**{"ttl_left_s": 7200.0, **watch})
    monkeypatch.setattr(action, "extend", lambda *_: report)
    assert labctl("extend", "1h").out == said


def test_status_says_line_by_line_why_a_server_is_not_idle(labctl: Any, home: Path) -> None:
    server = kept(home)
    lab = Lab.load(home / "digits", environ={"HOME": str(home)})
    busy = [f"somebody typed in terminal pts/{number}, 0 s ago" for number in range(3)]
    detail = {"watch": {"alive": True, "busy": busy}}
    lab.context.state.record("watch", lab_id=lab.id, server_id=server.id, detail=detail)
    lab.context.state.close()
    lines = labctl("status").out.splitlines()
    assert f"  not idle: {busy[0]}" in lines
    assert f"            {busy[2]}" in lines


@pytest.mark.parametrize("count", ["0", "-3"])
def test_logs_refuses_a_number_of_lines_that_is_none(labctl: Any, home: Path, count: str) -> None:
    said = labctl("logs", "-n", count)
    assert said.code == 2
    assert f"'{count}' is not a whole number of at least 1; for example: -n 50" in said.err


def test_a_pulled_log_is_shown_after_its_server_has_ended(labctl: Any, home: Path) -> None:
    server = kept(home)
    lab = Lab.load(home / "digits", environ={"HOME": str(home)})
    lab.context.state.record("ready", lab_id=lab.id, server_id=server.id)
    lab.context.state.drop_server(server.id)
    lab.context.state.close()
    said = labctl("logs")
    assert (said.code, said.out) == (4, "")
    assert "the last one has ended" in said.err
    log = home / "digits/runs/night/logs/run.log"
    log.parent.mkdir(parents=True)
    log.write_text("step 1\nstep 2\n")
    said = labctl("logs", "-n", "1")
    assert (said.code, said.out) == (0, "step 2\n")
    assert "the run's server has ended" in said.err


def test_json_is_one_object_with_a_version(labctl: Any, home: Path) -> None:
    kept(home)
    for words in (("status",), ("config",), ("secret", "list"), ("forward", "--list")):
        said = labctl(*words, "--json")
        assert said.code == 0
        assert json.loads(said.out)["version"] == 1
        assert said.err == ""
    body = json.loads(labctl("status", "--json").out)
    assert body["runs"][0]["exit_code"] == 1
    assert body["server"]["id"] == "box-1"


@pytest.mark.parametrize("name", ["Bad_Name", "-x", "a" * 40, "My Lab/"])
def test_init_refuses_names_that_no_lab_can_have(labctl: Any, home: Path, name: str) -> None:
    (home / "code").mkdir()
    (home / "code" / "train.py").write_text("print(1)\n")
    said = labctl("init", "--provider", "local", "--", f"{home}/{name}")
    assert said.code == 2
    assert not (home / name).exists()
    suggested = shlex.split(said.err.rpartition("next: ")[2])
    assert suggested[:2] == ["labctl", "init"]
    assert Path(suggested[2]).parent == home
    # With code in it, so that no data set of the sample is made for each name.
    (home / "code").rename(suggested[2])
    assert labctl(*suggested[1:], "--provider", "local").code == 0


def test_init_names_the_directory_in_which_it_is_typed(labctl: Any, home: Path) -> None:
    (home / "A_B").mkdir()
    os.chdir(home / "A_B")
    said = labctl("init", ".")
    assert "'A_B' is not a valid lab name" in said.err
    assert "next: labctl init a-b\n" in said.err


def test_init_keeps_the_provider_in_what_it_suggests(labctl: Any, home: Path) -> None:
    refused = labctl("init", "A_B", "--provider", "static")
    assert "next: labctl init a-b --provider static\n" in refused.err


@pytest.mark.parametrize(
    ("words", "suggested"),
    [
        (["init", "my labs/x", "--provider", "locla"], "init 'my labs/x' --provider local"),
        (["init", "--provider=locla", "x"], "init x --provider local"),
        (["-C", "..", "init", "x", "--provider", "nowhere"], "-C .. init x --provider local"),
        (["-C", "../code", "init", "--provider", "stattic"], "-C ../code init --provider static"),
    ],
)
def test_a_mistyped_provider_keeps_the_rest_of_the_command(
    labctl: Any, home: Path, words: list[str], suggested: str
) -> None:
    (home / "code").mkdir()
    (home / "code" / "train.py").touch()
    said = labctl(*words)
    assert said.code == 2
    assert said.err.endswith(f"next: labctl {suggested}\n")


def test_init_writes_only_into_what_is_empty(labctl: Any, home: Path) -> None:
    said = labctl("init", str(home / "digits"))
    assert said.code == 3
    assert "is already a lab" in said.err
    assert [p.name for p in (home / "digits").iterdir()] == ["lab.yaml"]
    assert labctl("init", str(home / "x"), "--provider", "nowhere").code == 2
    assert not (home / "x").exists()


def test_what_init_makes_is_a_lab(labctl: Any, home: Path) -> None:
    said = labctl("init", str(home / "fresh"))
    assert said.code == 0, said.err
    assert "labctl up" in said.out
    assert {"lab.yaml", "train.py"} <= {p.name for p in (home / "fresh").iterdir()}
    assert not list(home.glob(".fresh-*"))
    assert labctl("-C", str(home / "fresh"), "status").out.startswith("fresh: no server")


def test_a_secret_is_kept_and_never_shown(labctl: Any, home: Path) -> None:
    said = labctl("secret", "set", "WANDB_API_KEY", stdin="hunter2\n")
    assert said.code == 0
    (file,) = (home / ".config" / "labctl" / "secrets").iterdir()
    assert json.loads(file.read_text()) == {"WANDB_API_KEY": "hunter2"}
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    shown = [said, labctl("secret", "list"), labctl("secret", "list", "--json"), labctl("config")]
    assert shown[1].out == "WANDB_API_KEY\n"
    assert not [one for one in shown if "hunter2" in one.out + one.err]
    assert labctl("secret", "set", "bad name", stdin="x").code == 2
    empty = labctl("secret", "set", "WANDB_API_KEY", stdin="")  # of a program that failed
    assert empty.code == 2
    assert empty.err.startswith("labctl: the value of WANDB_API_KEY is empty\n")
    assert labctl("secret", "list").out == "WANDB_API_KEY\n"
    assert labctl("secret", "remove", "WANDB_API_KEY").code == 0
    assert labctl("secret", "list").out == ""
    assert labctl("secret", "remove", "WANDB_API_KEY").code == 4


def test_in_the_wrong_directory_the_labs_with_servers_are_named(
    labctl: Any, home: Path, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    assert "cost --all" not in labctl("-C", str(tmp_path / "elsewhere"), "down").err
    kept(home)
    for command in ("down", "status", "run"):
        said = labctl("-C", str(tmp_path / "elsewhere"), command)
        assert said.code != 0
        assert "there is no lab.yaml in" in said.err
        assert "next: labctl cost --all\n        (lists your labs with servers)\n" in said.err


def test_a_secret_that_lab_yaml_does_not_list_is_named(labctl: Any, home: Path) -> None:
    said = labctl("secret", "set", "WANDB_API_KEY", stdin="hunter2\n").err
    assert "lab.yaml lists it: secrets: [WANDB_API_KEY]\n" in said
    (home / "digits" / "lab.yaml").write_text("lab: digits\nsecrets: [WANDB_API_KEY]\n")
    again = labctl("secret", "set", "WANDB_API_KEY", stdin="hunter2\n").err
    assert again == "stored WANDB_API_KEY for digits\n"


def test_config_tells_where_each_setting_comes_from(
    labctl: Any, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LABCTL_BASE_IMAGE", "mine:1")
    rows = {r["key"]: r for r in json.loads(labctl("config", "--json").out)["settings"]}
    assert rows["run"]["origin"] == "lab.yaml:2"
    assert rows["base_image"]["value"] == "mine:1"
    assert "LABCTL_BASE_IMAGE" in rows["base_image"]["origin"]
    assert rows["server.provider"]["origin"] == "default"
    assert "lab.yaml:2" in labctl("config").out


def test_down_after_a_failed_up_on_an_unreachable_machine_forgets_the_attempt(
    labctl: Any, home: Path
) -> None:
    config = "lab: digits\nserver: {provider: static, static: {hosts: ['ann@127.0.0.1:9']}}\n"
    (home / "digits" / "lab.yaml").write_text(config)
    assert labctl("up", "--yes").code == 75
    lab_id = json.loads((home / "digits" / ".labctl" / "lab.json").read_text())["id"]
    request = CreateServerRequest(
        lab="digits", lab_id=lab_id, token="c0ffee", public_key="", identity="", need=Need()
    )
    state = State(find_paths().database)
    state.begin_attempt("c0ffee", request, Offer(provider="static", type="127.0.0.1"), "")
    said = labctl("down")
    assert (said.code, state.list_open_attempts(lab_id)) == (0, [])
    assert "digits has no server on record; nothing was removed." in said.out
    assert "127.0.0.1 refuses connections to port 9" in said.out
    assert json.loads(labctl("down", "--json").out)["unchecked"]


@pytest.mark.parametrize(
    ("setting", "next_"),
    [
        ("run: python train.py\n", "  labctl run        start the training\n"),
        ("", "  labctl forward jupyter  open JupyterLab\n"),
    ],
)
def test_up_names_commands_that_the_lab_has(
    labctl: Any, home: Path, monkeypatch: pytest.MonkeyPatch, setting: str, next_: str
) -> None:
    server = Server(
        id="srv", provider="local", lab="digits", lab_id="b", alias="digits",
        endpoint=Endpoint(host="127.0.0.1", port=1, user="student", identity=""),
        offer=Offer(provider="local", type="container"), created_at=0.0, state="running",
    )  # fmt: skip
    (home / "digits" / "lab.yaml").write_text(f"lab: digits\n{setting}")
    monkeypatch.setattr(Lab, "up", lambda self, need=None: SimpleNamespace(server=server))
    said = labctl("up")
    assert next_ in said.out
    assert ("start the training" in said.out) == bool(setting)


def test_orphans_lists_the_image_caches_that_down_counts(
    labctl: Any, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = "kept for the next up; to remove its images and layers: docker volume rm labctl-cache-1"
    cache = Resource(provider="local", kind="cache", id="labctl-cache-1", note=note)
    monkeypatch.setattr(LocalProvider, "servers", lambda self: [])
    monkeypatch.setattr(LocalProvider, "leftovers", lambda self: [cache])
    said = labctl("orphans", "--terminate", "--yes")
    assert (said.code, said.out) == (
        0,
        "Found nothing at local but image caches that labctl created.\n"
        f"image cache labctl-cache-1: free, {note}\n",
    )


def test_orphans_shows_the_whole_state_of_a_server_at_80_columns(
    labctl: Any, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(
        id="i-7934dcd0144a3ec73.us-east-1", provider="local", lab="cloud", lab_id="b",
        alias="cloud", endpoint=Endpoint(host="127.0.0.1"), state="running", created_at=0.0,
        offer=Offer(provider="local", type="g4dn.xlarge", price_usd_per_hour=0.1815),
    )  # fmt: skip
    with State(find_paths().database) as state:
        state.save_server(server)
    monkeypatch.setattr(LocalProvider, "servers", lambda self: [server])
    monkeypatch.setattr(LocalProvider, "leftovers", lambda self: [])
    monkeypatch.setenv("COLUMNS", "80")
    row = labctl("orphans").out.splitlines()[-1]
    assert row.startswith("server  i-7934dcd0144a3ec73  cloud  $0.1815/h")
    assert row.endswith("running (on record)")
    assert server.id in labctl("orphans", "--all-regions").out


def test_the_reasons_of_decisions_are_whole_at_80_columns(
    labctl: Any, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept(home)
    why = "ttl 8 h, idle 30 min, budget $5.00 at $0.1874/h, and a reason that fills the second line"
    real = Lab.status
    watch = {"decisions": [{"at": 0.0, "elapsed_s": 0.0, "what": "limits", "why": why}]}
    monkeypatch.setattr(
        Lab, "status", lambda self, **_: msgspec.structs.replace(real(self), watch=watch)
    )
    monkeypatch.setenv("COLUMNS", "80")
    assert labctl("status", "--why").out.splitlines()[-1].endswith(why), "not a terminal"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    said = labctl("status", "--why")
    rows = said.out.splitlines()[-2:]
    assert [len(row) <= 80 for row in rows] == [True, True]
    assert "…" not in said.out
    start = rows[0].index("ttl 8 h")
    assert rows[1][:start].isspace()
    assert f"{rows[0][start:]} {rows[1][start:]}" == why


def test_status_says_that_a_server_without_a_limit_has_no_watchdog(
    labctl: Any, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Lab.status  # as last known: nothing answers at this address
    monkeypatch.setattr(Lab, "status", lambda self, **_: real(self))
    assert labctl("status", "--why").out == "digits: no server\n  next: labctl up\n"
    kept(home)
    # It costs money, and does not answer: nobody knows that it has no watchdog.
    last = labctl("status", "--why").out.splitlines()[-1]
    assert last == "No report of the watchdog is known."
    monkeypatch.setattr(
        Lab, "status", lambda self, **_: msgspec.structs.replace(real(self), is_unguarded=True)
    )
    last = labctl("status", "--why").out.splitlines()[-1]
    assert last.startswith("This server has no watchdog.")
    assert last.endswith("labctl up --idle 30m")


def test_status_names_the_executor_of_another_provider(
    labctl: Any, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Lab.status
    monkeypatch.setattr(
        Lab, "status", lambda self, **_: msgspec.structs.replace(real(self), executor="htcondor")
    )
    kept(home)
    said = labctl("status")
    assert said.code == 0
    assert "  runs are jobs of htcondor\n" in said.out


def test_orphans_shows_what_the_disk_of_a_stopped_server_costs(
    labctl: Any, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(
        id="i-1.us-east-1", provider="local", lab="cloud", lab_id="b", alias="cloud",
        endpoint=Endpoint(host="127.0.0.1"), state="stopped", created_at=0.0,
        offer=Offer(provider="local", type="g4dn.xlarge", price_usd_per_hour=0.526),
    )  # fmt: skip
    with State(find_paths().database) as state:
        state.save_server(server)
        detail = {"usd_per_month": 7.52, "until": 0.0}
        state.record("stopped", lab_id="b", server_id=server.id, detail=detail)
    monkeypatch.setattr(LocalProvider, "servers", lambda self: [server])
    monkeypatch.setattr(LocalProvider, "leftovers", lambda self: [])
    row = labctl("orphans").out.splitlines()[-1]
    assert "  $7.52 a month  " in row
    assert "0.526" not in row


def test_orphans_breaks_no_command_at_80_columns(
    labctl: Any, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "labctl-cache-638e9039"
    note = f"kept for the next up; to remove its images and layers: docker volume rm {name}"
    cache = Resource(provider="local", kind="cache", id=name, note=note)
    monkeypatch.setattr(LocalProvider, "servers", lambda self: [])
    monkeypatch.setattr(LocalProvider, "leftovers", lambda self: [cache])
    monkeypatch.setenv("COLUMNS", "80")
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    lines = labctl("orphans").out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[-1] == f"  images and layers: docker volume rm {name}"


def test_orphans_counts_the_servers_of_others_and_lists_them_only_when_asked(
    labctl: Any, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(
        id="labctl-words-1", provider="local", lab="words", lab_id="b", alias="words",
        endpoint=Endpoint(host="127.0.0.1", port=1, user="student", identity="/home/ann/key"),
        offer=Offer(provider="local", type="container"),
        created_at=time.time(), state="running", owner="ann",
    )  # fmt: skip
    monkeypatch.setattr(LocalProvider, "servers", lambda self: [server])
    monkeypatch.setattr(LocalProvider, "leftovers", lambda self: [])
    said = labctl("orphans", "--terminate", "--yes")
    assert (said.code, said.out) == (0, "Found nothing at local that labctl created for you.\n")
    assert (
        "1 server of another user is not listed; to list all: labctl orphans --everyone" in said.err
    )
    everyone = labctl("orphans", "--everyone")
    assert everyone.code == 0, "another user's server is not one to remove"
    assert "labctl-words-1" in everyone.out
    own = msgspec.structs.replace(server, id="labctl-mine-1", owner="")
    monkeypatch.setattr(LocalProvider, "servers", lambda self: [server, own])
    assert labctl("orphans", "--everyone").code == 1
    monkeypatch.setattr(LocalProvider, "servers", lambda self: [server])
    assert json.loads(labctl("orphans", "--json").out)["orphans"]["others"] == []
    said = labctl("orphans", "--everyone", "--terminate", "--yes")
    assert "to terminate the servers of ann, type ann: no (not a terminal" in said.err
    assert "running, of ann" in said.out


def test_up_without_credentials_fails_before_it_asks_anything(
    labctl: Any, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    (home / "digits" / "lab.yaml").write_text("lab: digits\nserver: {provider: aws}\n")
    said = labctl("up")
    assert said.code == 1
    assert "approve this lab.yaml?" not in said.err
    assert "credentials" in said.err.splitlines()[0]


def test_a_lab_that_wants_what_is_yours_is_approved_first(labctl: Any, home: Path) -> None:
    lab = home / "digits" / "lab.yaml"
    lab.write_text("lab: digits\nrun: [python, train.py]\nsecrets: [TOKEN]\n")
    refused = labctl("up")
    assert refused.code == 3
    assert "give your TOKEN" in refused.err
    assert "next: labctl trust" in refused.err
    for answer in ("", "y\n"):
        unasked = labctl("trust", stdin=answer)
        assert (unasked.code, unasked.out) == (3, ""), "a pipe approves nothing"
        assert "give your TOKEN" in unasked.err
        assert "approve this lab.yaml? no (not a terminal; use --yes" in unasked.err
    said = labctl("trust", "--yes")
    assert (said.code, said.out.splitlines()[-1]) == (0, "approved")
    assert "TOKEN" in said.out
    assert labctl("trust").out.splitlines()[-1] == "approved"
    assert labctl("run").code == 255, "no server, but no question either"
    assert "approve" not in labctl("run").err
    lab.write_text(lab.read_text() + "store: s3://bucket/x\n")
    assert "was not approved" in labctl("up").err


def test_the_question_does_not_blame_lab_yaml_for_an_option(labctl: Any, home: Path) -> None:
    lab = home / "digits" / "lab.yaml"
    run = "lab: digits\nrun: [python, train.py]\n"
    lab.write_text(run + "server: {provider: local, gpu: T4}\n")
    said = labctl("trust")
    assert (said.code, said.out.split(":")[0]) == (0, "There is nothing to approve")
    lab.write_text(run + "server: {provider: local, gpu: T4, local: {memory: 4GB}}\n")
    assert "use a server from local on this machine (memory" in labctl("trust").err
    config = home / ".config" / "labctl" / "config.yaml"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text("server: {static: {hosts: [gpu1.lab.example]}}\n")
    said = labctl("trust", "--provider", "static")
    assert said.code == 3
    assert (
        "lab.yaml would:\n  - start a server from static with these settings: gpu T4\n" in said.err
    )
    assert "next: labctl trust --provider static\n" in said.err
    assert labctl("trust", "--provider", "static", "--yes").code == 0


def raising(error: BaseException) -> Callable[..., Any]:
    def command(**_: object) -> None:
        raise error

    return command


def test_a_failure_is_told_in_three_parts(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(PolicyError("no\x1b[31m", why="first\nsecond", hint="labctl trust"))
    assert capsys.readouterr().err == (
        "labctl: no\\x1b[31m\n  first\n  second\n  next: labctl trust\n"
    )
    print_error(ConfigError("bad", (Problem("a.b", 3, "wrong"), Problem("", 0, "empty"))))
    assert capsys.readouterr().err == "labctl: bad\n  line 3: a.b: wrong\n  empty\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (LabError("x"), 1), (PolicyError("x"), 3), (InterruptError("x"), 130),
        (KeyboardInterrupt(), 130), (click.Abort(), 130), (click.UsageError("x"), 2),
        (click.exceptions.Exit(7), 7),
    ],
)  # fmt: skip
def test_exit_codes(monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int) -> None:
    monkeypatch.setattr(sys, "argv", ["labctl", "status"])
    assert run_and_exit(raising(error)) == code


def test_a_bug_is_kept_whole_and_said_shortly(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["labctl", "status"])
    assert run_and_exit(raising(ZeroDivisionError("by \x1b zero"))) == BUG == 70
    said = capsys.readouterr().err
    (log,) = find_paths().log_dir.glob("bug-*.log")
    assert str(log) in said
    assert "Traceback" not in said
    assert "\x1b" not in said
    assert "Traceback" in log.read_text()
    assert stat.S_IMODE(log.stat().st_mode) == 0o600


def test_what_a_check_found_breaks_no_word_at_80_columns(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = "labctl course invite --all   # then hand out the files, " + "each to one " * 6
    found = [
        Check(name="deadline at AWS", ok=True, detail="nothing at AWS ends a server that " * 4),
        Check(name="students' keys", ok=False, detail="0 of 30 have joined", next=command),
    ]
    print_checks(found, 80)
    *first, second, third, fourth = capsys.readouterr().out.splitlines()
    assert max(map(len, first)) < 80
    assert " ".join(" ".join(first).split()) == f"ok deadline at AWS: {found[0].detail}".strip()
    assert second == "!!  students' keys: 0 of 30 have joined"
    assert third == "      next: labctl course invite --all"  # to be copied
    assert fourth.startswith("            (then hand out the files, each to one")
    print_checks(found)  # piped: a line each
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_what_may_be_lost_is_not_shown_as_ok(capsys: pytest.CaptureFixture[str]) -> None:
    print_checks([Check(name="instance profile", ok=True, warning=True, detail="it is not set")])
    assert capsys.readouterr().out == "!   instance profile: it is not set\n"


@pytest.mark.parametrize(("columns", "indent"), [(80, 2), (90, 10), (60, 0)])
def test_lines_below_the_rows_of_a_table_have_one_indent(
    capsys: pytest.CaptureFixture[str], columns: int, indent: int
) -> None:
    """As the URLs with a token of `labctl forward --list`, which are of several lengths."""
    urls = [f"http://127.0.0.1:8888/{path}?token={'a' * 48}" for path in ("", "x", "")]
    rows = [("c70152aa", "digits", "jupyter", url) for url in (*urls, "http://127.0.0.1:6006/")]
    print_table(rows, ("ID", "LAB", "SERVICE", "URL"), columns, cut=False)
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "token" in line] == [" " * indent + url for url in urls]
    assert lines[-1].endswith("jupyter  http://127.0.0.1:6006/")


def test_drawing(capsys: pytest.CaptureFixture[str]) -> None:
    assert clean("a\x00\tb\n\x9bé") == "a\\x00\tb\n\\x9bé"
    print_table([("a", "x" * 200), ("b\n\x1b", "y")], ("ONE", "TWO"), width=40)
    out = capsys.readouterr().out
    assert all(len(line) <= 40 for line in out.splitlines())
    assert "b \\x1b" in out
    print_table([("x" * 38, ""), ("x", "y")], ("ONE", ""), width=40)
    assert capsys.readouterr().out == f"ONE\n{'x' * 38}\n{'x'.ljust(38)}  y\n"
    print_json({"x": Endpoint(host="\x1b")})
    assert "\x1b" not in capsys.readouterr().out


def test_without_a_terminal_the_answer_is_no_and_yes_is_yes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert Screen().confirm(Question(question="go\x1b?", default=True)) is False
    assert "use --yes to answer yes" in capsys.readouterr().err
    assert Screen(yes=True).confirm(Question(question="go?", detail="what")) is True
    assert capsys.readouterr().err == ""


def test_a_plan_that_costs_money_is_shown_even_where_yes_is_said_beforehand(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = Question(question="start it?", detail="g5.xlarge: $0.34/h", about="price")
    assert Screen(yes=True).confirm(plan) is True
    assert "$0.34/h" in capsys.readouterr().err
    assert Screen(yes=True, quiet=True).confirm(plan) is True
    assert capsys.readouterr().err == ""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("typed", "default", "decision"),
    [("maybe\nY\n", False, True), ("\n", True, True), ("j\nx\nno\n", True, False)],
)
def test_a_question_is_asked_again_after_another_answer(
    typed: str,
    default: bool,
    decision: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(typed))
    assert Screen().confirm(Question(question="go?", default=default)) is decision
    said = capsys.readouterr().err
    wrong = typed.count("\n") - 1
    assert said.count("please type y or n\n") == wrong
    assert said.count("go?") == wrong + 1
    assert "Error" not in said


@pytest.mark.parametrize("columns", [80, 120])
def test_a_question_breaks_no_word_of_its_details(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "stdin", Terminal("n\n"))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert Screen().confirm(Question(question="x" * (columns - 5) + "?")) is False
    assert capsys.readouterr().err == "x" * (columns - 5) + "?\n[y/N]: "
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    monkeypatch.setattr(sys, "stdin", Terminal("n\n"))
    detail = "g5.xlarge: $0.34/h\n  " + "its disk is kept for 14 days; " * 6
    assert Screen().confirm(Question(question="go?", detail=detail)) is False
    assert detail in capsys.readouterr().err, "not a terminal"
    monkeypatch.setattr(sys, "stdin", Terminal("n\n"))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert Screen().confirm(Question(question="go?", detail=detail)) is False
    shown = capsys.readouterr().err
    assert max(map(len, shown.splitlines())) <= columns
    assert shown.split()[: len(detail.split())] == detail.split()


def test_a_cost_that_no_guard_ends_is_typed_and_never_answered_by_yes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cost = "$12.00 a day, $360.00 a month"
    asked = Question(question="type 360.00", detail=cost, about="billing", typed="360.00")
    monkeypatch.setattr(sys, "stdin", io.StringIO("360.00\n"))
    assert Screen(yes=True, quiet=True).confirm(asked) is False
    said = capsys.readouterr().err
    assert cost in said
    assert "not a terminal; --yes does not answer this" in said
    for typed, answer in (("360.00\n", True), ("yes\n", False), ("\n", False)):
        monkeypatch.setattr(sys, "stdin", Terminal(typed))
        assert Screen(yes=True).confirm(asked) is answer
    assert cost in capsys.readouterr().err


def test_a_question_of_a_part_is_asked_in_the_main_thread_and_the_others_wait(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    screen, prompting = SharedReporter(Screen()), threading.Event()
    threads: list[threading.Thread] = []

    def answer(*_: object, **__: object) -> str:
        threads.append(threading.current_thread())
        prompting.set()
        time.sleep(0.1)
        click.echo("answered", err=True)
        return "y"

    def report() -> bool:
        assert prompting.wait(30)
        screen.emit(Step(name="sending data"))
        return True

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr(click, "prompt", answer)
    question = Question(question="go?")
    assert run_parts({"a": lambda: screen.confirm(question), "b": report})["a"]
    assert threads == [threading.main_thread()]
    assert capsys.readouterr().err == "answered\n  sending data\n"


@pytest.mark.parametrize(("took_s", "shown"), [(1.04, "1.0 s"), (297.5, "5 min")])
def test_a_step_ends_with_its_duration(
    took_s: float, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s = 100.0
    monkeypatch.setattr("labctl.cli.screen.time.monotonic", lambda: now_s)
    screen = Screen()
    screen.emit(Step(name="building x"))
    now_s += took_s
    screen.emit(Step(name="building x", done=True))
    assert capsys.readouterr().err.splitlines()[-1].endswith(f"building x {shown}")


def test_a_skipped_step_leaves_no_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    screen = Screen()
    progress = _PlaybookProgress(screen)
    for task, status in (("Look up the user", "ok"), ("Install venv", "skipped")):
        progress.handle(TaskEvent(event="task", task=task))
        progress.handle(TaskEvent(event="done", task=task, status=status))
    screen.stop_drawing()
    lines = click.unstyle(capsys.readouterr().err).splitlines()
    assert any("✓ Look up the user (ok)" in line for line in lines)
    assert not any("✓ Install venv" in line for line in lines)


def test_the_line_of_a_long_step_is_wrapped_at_the_edge_of_the_screen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr("labctl.cli.screen.time.monotonic", lambda: 100.0)
    name = "creating a server: aws g4dn.2xlarge in eu-central-1a on demand"
    Screen().emit(Step(name=name, done=True, detail="i-0123456789abcdef0"))
    lines = click.unstyle(capsys.readouterr().err).splitlines()
    assert lines == [f"✓ {name}", "  (i-0123456789abcdef0) 0.0 s"]


@pytest.mark.parametrize("columns", [80, 120])
def test_two_transfers_at_once_fit_on_the_screen(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    screen = Screen()
    for name in ("sending code", f"building labctl/digits:{'0' * 16}"):
        screen.emit(Progress(name=name, done=0, total=0, unit="bytes"))
        screen.emit(Progress(name=name, done=999 * 1024**2, total=1023 * 1024**2, unit="bytes"))
    drawn = io.StringIO()
    Console(width=columns, file=drawn).print(screen.live.get_renderable())
    screen.stop_drawing()
    lines = drawn.getvalue().splitlines()
    assert len(lines) == 2
    assert all("999 MiB of 1023 MiB" in line and "0:00:0" in line for line in lines), lines
    assert max(map(len, lines)) <= columns
    assert (f"digits:{'0' * 16}" in lines[1]) == (columns == 120)


@pytest.mark.parametrize(
    ("columns", "beside_push"),
    [(80, " installing Python packages"), (120, "step 4 of 9, installing Python packages")],
)
def test_a_build_says_in_words_what_it_does(
    columns: int, beside_push: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    screen = Screen()

    def draw() -> str:
        drawn = io.StringIO()
        Console(width=columns, file=drawn).print(screen.live.get_renderable())
        return drawn.getvalue()

    name, words = "building the image", "step 4 of 9, installing Python packages"
    build = Progress(name=name, done=3, total=9, unit="steps", detail=words)
    screen.emit(Step(name=name))
    screen.emit(build)
    assert f"{name}: {words} " in draw()
    screen.emit(Progress(name="pushing data", done=1e9, total=1e10, unit="bytes"))
    assert f"{beside_push} " in draw()
    screen.emit(Progress(name="pushing data", done=1e10, total=1e10, unit="bytes"))
    assert f"{name}: {words} " in draw(), "the other bar is gone"
    assert max(map(len, draw().splitlines())) <= columns
    screen.stop_drawing()


def test_a_bar_of_bytes_stays_until_its_step_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server unpacks an image after its last byte has arrived."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    screen = Screen()
    screen.emit(Step(name="sending x"))
    screen.emit(Progress(name="sending x", done=9, total=9, unit="bytes", detail="unpacking"))
    bar = screen.bars["sending x"]
    assert bar.describe(40) == "sending x: unpacking"
    bar.detail = "step 2 of 16, getting the base image"
    assert bar.describe(27) == "getting the base image"
    assert bar.describe(20) == "step 2 of 16, getti…"
    screen.emit(Step(name="sending x", done=True))
    assert screen.live is None


def test_a_bar_without_a_step_goes_when_its_work_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a provider's: what is printed next must not continue its line."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    screen = Screen()
    screen.emit(Progress(name="copying images", done=0, total=1, unit="steps"))
    assert "copying images" in screen.bars
    screen.emit(Progress(name="copying images", done=1, total=1, unit="steps"))
    assert screen.live is None


def test_an_interrupted_init_ends_its_bar(
    labctl: Any, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the bar draws when the process ends would come after the message."""
    screens: list[Screen] = []

    def interrupt(directory: Path, reporter: Screen) -> bool:
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        reporter.emit(Step(name="creating the data set"))
        assert reporter.live is not None
        screens.append(reporter)
        raise KeyboardInterrupt

    monkeypatch.setattr(sample_project, "_make_dataset", interrupt)
    assert labctl("init", str(home / "new"), "--provider", "local").code == 130
    assert screens[0].live is None
    assert not (home / "new").exists()


def test_init_tells_of_every_provider_that_can_be_answered(
    labctl: Any, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["labctl", "init", "other"])
    monkeypatch.setattr(sys, "stdin", Terminal("nothing\n"))
    run_and_exit(cli)
    told = [line.split()[0] for line in capsys.readouterr().err.splitlines() if line[:2] == "  "]
    assert {"aws", "course", "local", "static"} <= {*told}


@pytest.mark.parametrize(("words", "is_down_named"), [(["init", "x"], False), (["up"], True)])
def test_an_interruption_names_down_only_if_there_may_be_a_server(
    home: Path,
    words: list[str],
    is_down_named: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupt(**options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["labctl", *words])
    assert run_and_exit(interrupt) == 130
    shown = capsys.readouterr().err
    assert "labctl: interrupted" in shown
    assert ("labctl down " in shown) == is_down_named
    assert ("the server, if there is one" in shown) == is_down_named


def test_a_command_that_goes_on_when_typed_again_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(**options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["labctl", "course", "up", "--only", "bob"])
    assert run_and_exit(interrupt) == 130
    assert capsys.readouterr().err == (
        "\nlabctl: interrupted\n"
        "  next: labctl course up --only bob\n"
        "        (continues)\n"
        "        labctl course status\n"
        "        (shows what is running)\n"
    )


@pytest.mark.parametrize("is_question", [True, False])
def test_an_interruption_ends_the_line_of_a_question_and_leaves_no_blank_one(
    labctl: Any, monkeypatch: pytest.MonkeyPatch, is_question: bool
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise click.Abort if is_question else KeyboardInterrupt

    monkeypatch.setattr(Lab, "load", interrupt)
    end = "\n" if is_question else ""
    assert labctl("up").err.startswith(f"{end}labctl: interrupted\n  labctl status")


def process(home: Path, *words: str, **more: Any) -> subprocess.CompletedProcess[str]:
    environ = {"PATH": os.environ["PATH"], "HOME": str(home)}
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "labctl", *words],
        cwd=home / "digits", env=environ, capture_output=True, text=True, check=False, **more,
    )  # fmt: skip


def test_real_processes_end_with_these_codes(home: Path) -> None:
    assert process(home, "--version").returncode == 0
    assert process(home, "frobnicate").returncode == 2
    assert process(home, "ssh").returncode == 255
    done = process(home, "status", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["lab"] == "digits"


@pytest.mark.parametrize("words", [("config",), ("status", "--json"), ("--help",)])
def test_a_reader_that_leaves_is_no_error(home: Path, words: tuple[str, ...]) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "labctl", *words],
            cwd=home / "digits",
            env={"PATH": os.environ["PATH"], "HOME": str(home)},
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_machine_that_keeps_no_images_says_so(labctl: Any) -> None:
    said = labctl("images")
    assert (said.code, said.out, said.err) == (0, "", "This machine keeps no built images.\n")
    assert json.loads(labctl("images", "--json").out)["images"] == []
