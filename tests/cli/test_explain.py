"""`labctl explain` and `labctl profile` as they are typed and read."""

from __future__ import annotations

import json
import math
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click
import pytest

from labctl.cli.findings_output import print_labeled
from labctl.cli.profile import _show_page
from labctl.config import ensure_lab_id, find_paths
from labctl.insight import profile
from labctl.insight.explain.profile import Profile
from labctl.insight.explain.server_commands import IN_NEXT_RUN, ServerCommands
from labctl.insight.explain.wording import join_suggestions
from labctl.insight.profile import ProfileResult
from labctl.lab import Lab
from labctl.model import Endpoint, Offer, Run, Server, ServerState
from labctl.state import State
from labctl.wire.codec import to_json
from labctl.wire.telemetry import GpuRecord, OtherProgramRecord, TelemetryRecord

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from event_files import curve

EVENTS = "events.out.tfevents.1700000000.host.1.0"


@pytest.fixture
def logs(home: Path) -> Path:
    """The logs of a run whose server is gone."""
    root = home / "digits"
    run = Run(
        id="night",
        lab_id=ensure_lab_id(root),
        server_id="gone",
        state="exited",
        exit_code=1,
        summary="failed with exit code 1",
        command=("python", "train.py", "--lr", "0.1"),
        started_at=1000.0,
        ended_at=1240.0,
        created_at=1000.0,
    )
    with State(find_paths().database) as state:
        state.save_run(run)
    made = root / "runs" / "night" / "logs"
    made.mkdir(parents=True)
    values = [2.3 * math.exp(-number / 5) for number in range(30)] + [math.nan]
    (made / EVENTS).write_bytes(curve("train/loss", values))
    (made / "run.log").write_text("epoch 1\n\x1b[2Jtrain: the loss became nan\n")
    return made


def test_what_is_wrong_comes_with_evidence_source_and_the_next_command(
    labctl: Any, logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    said = labctl("explain")
    assert (said.code, said.err) == (0, "")
    lines = said.out.splitlines()
    assert lines[0] == "run night: failed with exit code 1 after 4 min"
    assert lines[1] == "  python train.py --lr 0.1"
    assert "✗ the loss became NaN at step 310" in lines
    assert any("at step 300, NaN at step 310 [TensorBoard]" in line for line in lines)
    assert any(
        line.startswith("  next    labctl up && labctl run -- python train.py --lr 0.01")
        for line in lines
    )
    assert any("tuning_playbook" in line for line in lines)
    assert lines[-1] == "1 problem; start with: the loss became NaN at step 310"
    assert all(len(line) <= 80 for line in lines if "labctl run" not in line)
    assert "\x1b" not in said.out


def test_a_narrow_terminal_shows_whole_words(
    labctl: Any, logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    lines = click.unstyle(labctl("explain").out).splitlines()
    assert lines[:2] == ["run night: failed with exit code 1", "  after 4 min"]


def test_packages_that_a_script_installed_are_named_with_their_time(
    labctl: Any, logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if much was logged since."""
    monkeypatch.setenv("COLUMNS", "120")
    head = "Collecting torch\nSuccessfully installed mpmath-1.3.0 torch-2.8.0\n"
    (logs / "run.log").write_text(head + "epoch 1: loss 2.3\n" * 40_000)
    sizes = [0, 17, 17, 17, len(head) + 900]
    lines = [f'{{"at":{1000 + 45 * n},"log_bytes":{size}}}\n' for n, size in enumerate(sizes)]
    (logs / "telemetry.jsonl").write_text("".join(lines))
    said = labctl("explain").out
    assert "the run itself installed 2 packages, which took about 2 min" in said
    assert "Successfully installed mpmath-1.3.0 torch-2.8.0 [logs/run.log]" in said
    assert "requirements: requirements.txt}" in " ".join(said.split())


def test_the_note_of_a_command_is_wrapped_and_the_command_is_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    command = "labctl run -- python train.py --lr 0.01"
    print_labeled("next", f"{command}   # then run one at a time, please")
    assert capsys.readouterr().out.splitlines() == [
        "  next    labctl run -- python train.py --lr 0.01",
        "          (then run one at a time,",
        "           please)",
    ]


@pytest.mark.parametrize(
    ("size", "norm"),
    [(0.0006, ""), (0.004, ""), (0.03, "1"), (0.4, "1"), (3.3, "7"), (44.0, "100")],
)
@pytest.mark.parametrize("has_option", [True, False])
def test_a_suggested_maximum_norm_is_at_least_1_and_the_same_in_each_finding(
    labctl: Any, home: Path, logs: Path, size: float, norm: str, has_option: bool
) -> None:
    option = 'add_argument("--clip")' if has_option else ""
    (home / "digits" / "train.py").write_text(f"import argparse\n{option}\n")
    (logs / "run.log").write_text("epoch 1\n")
    norms = [size * (1 + 0.1 * (n % 3)) for n in range(60)]
    losses = [2.3 * math.exp(-n / 5) + 0.05 for n in range(60)]
    norms[40], losses[40] = 90 * size, 2.3
    (logs / EVENTS).write_bytes(curve("train/gradient_norm", norms))
    (logs / EVENTS.replace("1.0", "2.0")).write_bytes(curve("train/loss", losses))
    said = " ".join(labctl("explain", "night", "--all").out.split())
    assert "the gradient norm has spikes (1 of 60 points)" in said
    assert "the loss has spikes (1 of 60 points)" in said
    suggested = re.findall(
        r"--clip (\S+)|model.parameters\(\), (\S+)\)|to a norm of ([^\s,]+)", said
    )
    expected = [] if not norm else [norm] if has_option else [norm, norm]
    assert ["".join(groups) for groups in suggested] == expected


def test_a_command_below_a_sentence_is_not_wrapped(
    labctl: Any, logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    (logs / "run.log").write_text("ModuleNotFoundError: No module named 'pandas'\n")
    lines = labctl("explain", "night").out.splitlines()
    command = lines[next(n for n, line in enumerate(lines) if line.endswith("then:")) + 1]
    assert len(command) > 40
    assert command.strip().startswith("labctl up && labctl run -- ")


def test_a_command_after_advice_has_its_own_line() -> None:
    command = "labctl run -- python train.py --clip 5.5"
    joined = join_suggestions("look at the batch of that step", command)
    assert joined == f"look at the batch of that step, then:\n{command}"


def test_what_is_not_known_is_said_and_at_length_if_asked(labctl: Any, logs: Path) -> None:
    short, long = labctl("explain", "night").out, labctl("explain", "night", "--all").out
    for out in (short, long):
        assert "Unknown" in out
        assert "? how long the training waits for data" in out
    assert "labctl explain --all" in short
    assert "speed/data_wait_share" in long
    assert "speed/data_wait_share" not in short


def test_json_is_json_whatever_the_curves_hold(labctl: Any, logs: Path) -> None:
    def strict(token: str) -> None:
        raise AssertionError(token)

    body = json.loads(labctl("explain", "--json").out, parse_constant=strict)
    assert body["version"] == 1
    assert body["run"]["id"] == "night"
    assert set(body) == {"version", "run", "findings", "unknown", "read"}
    (first, *_) = body["findings"]
    assert (first["rule"], first["level"]) == ("loss-nan", "problem")
    assert set(first) == {
            "rule", "level", "what", "why", "evidence", "next", "source", "levers",
        }  # fmt: skip
    assert set(first["source"]) == {"title", "url"}
    assert body["read"]["points"] == 31


def test_a_cut_event_file_is_read_as_far_as_it_goes(labctl: Any, logs: Path) -> None:
    whole = (logs / EVENTS).read_bytes()
    (logs / EVENTS).write_bytes(whole[:-30])
    said = labctl("explain")
    assert said.code == 0
    assert "it ends in the middle of a record" in " ".join(said.out.split())
    (logs / EVENTS).write_bytes(b"\x00" * 4096)
    said = labctl("explain")
    assert said.code == 0
    assert "the rest was not read" in " ".join(said.out.split())


def test_a_file_that_is_none_of_its_kind_is_no_crash(labctl: Any, logs: Path) -> None:
    (logs / "telemetry.jsonl").write_bytes(b"\xff\xfe" * 500)
    (logs / "run.log").write_bytes(b"\x80\x81\n" * 500)
    assert labctl("explain").code == 0
    (logs / "telemetry.jsonl").unlink()
    (logs / "telemetry.jsonl").mkdir()
    said = labctl("explain")
    assert said.code == 1
    assert "telemetry.jsonl cannot be read" in " ".join(said.err.split())
    assert "next: labctl pull night" in said.err


def test_without_a_run_the_next_step_is_named(labctl: Any, home: Path) -> None:
    said = labctl("explain")
    assert said.code == 4
    assert "next: labctl run" in said.err
    assert labctl("explain", "never").code == 4


def test_a_profile_needs_a_server_and_sensible_numbers(labctl: Any, logs: Path) -> None:
    assert labctl("profile").code == 4
    said = labctl("profile", "--steps", "0")
    assert said.code == 2
    assert "next: labctl profile --steps 5 --warmup 10" in said.err
    assert labctl("profile", "--warmup", "1").code == 2


def test_a_profile_is_shown_again_without_its_server(labctl: Any, logs: Path) -> None:
    root = logs.parents[2]
    run = Run(
        id="profile-1", lab_id=ensure_lab_id(root), server_id="gone", state="exited", exit_code=0
    )
    with State(find_paths().database) as state:
        state.save_run(run)
    said = labctl("profile", "profile-1")
    assert said.code == 1
    assert "nothing was profiled" in said.err
    folder = root / "runs" / "profile-1" / "logs" / "profile"
    folder.mkdir(parents=True)
    row = {"name": "aten::mul\x1b[2J", "us": 900.0, "count": 2.0, "share": 1.0}
    figures = {"phases": {"data": 0.6, "forward": 0.4}, "operations": [row], "kernels": []}
    about = {"steps": 1, "step_us": 1500.0, "gpu_busy": None, "copies_us": 0.0, "syncs": 0.0}
    body = {**figures, **about, "kernel_count": 0.0, "kernel_us": 0.0, "command": ["train.py"]}
    (folder / "profile.json").write_text(json.dumps(body))
    said = labctl("profile", "profile-1")
    assert (said.code, said.err) == (0, "")
    lines = said.out.splitlines()
    assert lines[0] == "1 step of train.py"
    assert any(line.startswith("getting the next batch") and "900 us" in line for line in lines)
    assert "✗ 60% of a step is spent getting the next batch" in lines
    assert lines[-1] == "page: runs/profile-1/logs/profile/index.html"
    assert "\x1b" not in said.out
    body = json.loads(labctl("profile", "profile-1", "--json").out)
    assert (body["run"], body["there"]) == ("profile-1", False)


class InterruptedForward:
    """An open forward at whose terminal somebody presses Ctrl-C."""

    url = "http://127.0.0.1:1/night/"

    def wait(self) -> None:
        raise KeyboardInterrupt


def test_ctrl_c_closes_the_page_of_a_profile_and_says_so(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(profile, "open_page", lambda *_: nullcontext(InterruptedForward()))
    lab = Lab.load(home / "digits", environ={"HOME": str(home)})
    figures = Profile(
        steps=1, step_us=1500.0, phases={}, operations=(), kernels=(), kernel_count=0.0,
        kernel_us=0.0, gpu_busy=None, copies_us=0.0, syncs=0.0,
    )  # fmt: skip
    profiled = ProfileResult(run="night", directory="", there=True, profile=figures, findings=())
    _show_page(lab, profiled, 0, open_=False)
    assert capsys.readouterr().err.endswith("index.html\nclosed\n")


def test_on_a_busy_server_what_else_runs_there_is_named(labctl: Any, logs: Path) -> None:
    others = (
        OtherProgramRecord("stress", "bob", cpu_cores=4.0, gpus=("GPU-1",)),
        OtherProgramRecord("python3", "alice", "second", 2.25),
    )
    line = TelemetryRecord(
        at=0.0, attempt=1, cores=8.0, cpu_cores=1.0, host_cores=8.0, host_cpu_cores=7.6,
        gpus=(GpuRecord(uuid="GPU-1", name="H100", use_percent=90.0),),
        other_runs=1, others=others,
    )  # fmt: skip
    lines = [line._replace(at=1000.0 + 10 * number) for number in range(20)]
    # As earlier versions wrote it.
    lines[9:12] = [old._replace(others=()) for old in lines[9:12]]
    text = "\n".join(json.dumps(to_json(one, drop_defaults=True)) for one in lines)
    (logs / "telemetry.jsonl").write_text(text + "\n")
    (logs / "run.log").write_text("epoch 1\n")
    said = " ".join(labctl("explain", "night").out.split())
    assert "other work took 6.6 of the server's 8 cores" in said
    assert re.search(r"by stress \(bob\): 3\.\d cores, python3 \(run second\): 1\.\d cores", said)
    assert "the run shared its GPU with stress (bob)" in said
    in_next_run = "this run's server has ended; during the next run: labctl top (shows what"
    assert f"one job at a time, or use another server {in_next_run} runs there)" in said
    assert f"use a GPU that no other program uses {in_next_run} is on the GPU)" in said
    little = (OtherProgramRecord("python3", "alice", "second", 0.25),)
    text = "\n".join(
        json.dumps(to_json(one._replace(others=little), drop_defaults=True)) for one in lines
    )
    (logs / "telemetry.jsonl").write_text(text + "\n")
    said = " ".join(labctl("explain", "night").out.split())
    assert "python3 (run second): 0.2 cores (mean)" in said
    assert "most of it by programs outside the server" in said
    assert "most of it by python3" not in said


@pytest.mark.parametrize(
    ("state", "run_again", "inspect"),
    [
        (
            None,
            "labctl up && labctl run",
            "this run's server has ended; during the next run: labctl ssh -- df -h",
        ),
        ("stopped", "labctl start && labctl run", "labctl start && labctl ssh -- df -h"),
    ],
)
def test_a_command_that_needs_a_server_says_how_to_get_one(
    labctl: Any, logs: Path, state: ServerState | None, run_again: str, inspect: str
) -> None:
    if state is not None:
        with State(find_paths().database) as records:
            records.save_server(_make_server(logs, state))
    (logs / "run.log").write_text("OSError: [Errno 28] No space left on device\n")
    said = " ".join(labctl("explain", "night").out.split())
    assert f"next {run_again} -- df -h /dev/shm {inspect} source" in said


def test_a_command_for_a_server_that_exists_is_unchanged(logs: Path) -> None:
    server = _make_server(logs, "running")
    text = "first:\nlabctl run   # again\nlabctl top   # shows what runs there"
    assert ServerCommands(server, server).adapt_text(text) == text
    # The lab has a new server: `labctl top` would show that one.
    assert ServerCommands(None, server).adapt_text(text) == (
        f"first:\nlabctl run   # again\n{IN_NEXT_RUN}\nlabctl top   # shows what runs there"
    )
    for line in ("labctl run --recover --id night", "labctl run --up", "labctl logs night -n 40"):
        assert ServerCommands(None, None).adapt_text(line) == line


def _make_server(logs: Path, state: ServerState) -> Server:
    """Make a server with the id of the run's."""
    return Server(
        id="gone",
        provider="local",
        lab="digits",
        lab_id=ensure_lab_id(logs.parents[2]),
        alias="digits",
        endpoint=Endpoint(host="127.0.0.1", port=9, user="student"),
        offer=Offer(provider="local", type="container"),
        created_at=1000.0,
        state=state,
    )


@pytest.mark.parametrize(
    ("log", "title", "why", "command"),
    [
        (
            "",
            "its log, which is empty",
            "logs/run.log is empty: the run printed nothing",
            "labctl pull night --all",
        ),
        (None, "no log", "logs/run.log is not on this machine", "labctl logs night"),
    ],
    ids=["empty", "missing"],
)
def test_a_run_without_output_is_not_a_run_without_a_log(
    labctl: Any, logs: Path, log: str | None, title: str, why: str, command: str
) -> None:
    (logs / "run.log").unlink()
    if log is not None:
        (logs / "run.log").write_text(log)
    said = labctl("explain", "night", "--all").out
    assert f", {title}\n" in said
    assert f"? what it printed: {why}\n" in said
    assert f" {command}\n" in said
