"""The server's half of runs: claims, the container's command line, and how a run is said to end."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from labctl.remote import looks, runs, secrets_tmpfs
from labctl.remote.place import boot_token, checked_name, inside, lab_dir, read_json, write_json
from labctl.remote.reply import Failure

LAB_ID = "0f1e2d3c4b5a"
GIB = 1024**3
IMAGE = {"Id": "sha256:" + "ab" * 32, "Config": {"Entrypoint": ["/tini", "--"]}}


def spec(**more: Any) -> dict[str, Any]:
    return {
        "id": "night", "lab": "digits", "lab_id": LAB_ID, "command": ["python", "train.py"],
        "image": "python:3.11", "env": {}, "secrets": [], "outputs": ["checkpoints"], "gpus": "",
        "memory_bytes": 0, "cpus": 0.0, "shm_bytes": 0, "tty": False, **more,
    }  # fmt: skip


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The lab's directory on a "server" whose docker knows no container at all."""
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    (bin_dir / "docker").write_text('#!/bin/sh\n[ "$1" = logs ] && echo from the container\nexit 1')
    (bin_dir / "docker").chmod(0o755)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", f"{bin_dir}:{os.environ['PATH']}")
    passwd = tmp_path / "home" / "labctl" / ".passwd" / ("passwd-" + "ab" * 12)
    passwd.parent.mkdir(parents=True)
    passwd.touch()
    return lab_dir("digits", LAB_ID)


def pairs(words: list[str], flag: str) -> list[str]:
    return [words[i + 1] for i, word in enumerate(words) if word == flag]


def test_the_line_of_a_plain_run(root: Path) -> None:
    directory = root / "runs" / "night"
    words = runs.run_line(root, directory, spec(), IMAGE, "digits-night-1")
    assert words[:4] == ["run", "--detach", "--name", "digits-night-1"]
    assert pairs(words, "--user") == [f"{os.getuid()}:{os.getgid()}"]
    assert pairs(words, "--workdir") == ["/lab/code"]
    assert pairs(words, "--security-opt") == ["no-new-privileges"]
    assert pairs(words, "--label") == [f"labctl.lab-id={LAB_ID}", "labctl.run=night"]
    assert pairs(words, "--log-opt") == ["max-size=50m"]
    mounts = pairs(words, "--mount")
    assert f"type=bind,source={directory},target=/lab/run" in mounts
    assert f"type=bind,source={directory}/code,target=/lab/code" in mounts
    assert f"type=bind,source={root}/data,target=/lab/data,readonly" in mounts
    assert {"LABCTL_RUN_ID=night", "PYTHONUNBUFFERED=1"} <= {*pairs(words, "--env")}
    assert not {"--gpus", "--memory", "--cpus", "--shm-size", "--tty", "--privileged"} & {*words}
    assert words[-6:] == [
        *(IMAGE["Id"], "/lab/run/.labctl/entry.sh", "/tini", "--", "python", "train.py")
    ]


def test_the_line_of_a_run_with_everything(root: Path) -> None:
    wanted = spec(
        env={"LR": "1 2", "HOME": "/elsewhere"}, gpus="GPU-1,GPU-2", memory_bytes=3 * GIB,
        cpus=1.5, shm_bytes=GIB, tty=True, secrets=["TOKEN"], command=["echo", "a b", "$HOME"],
    )  # fmt: skip
    words = runs.run_line(root, root / "runs" / "night", wanted, {"Id": IMAGE["Id"]}, "c")
    assert pairs(words, "--gpus") == ['"device=GPU-1,GPU-2"']
    assert pairs(words, "--memory") == pairs(words, "--memory-swap") == [str(3 * GIB)]
    assert (pairs(words, "--cpus"), pairs(words, "--shm-size")) == (["1.5"], [str(GIB)])
    assert {"--interactive", "--tty"} <= {*words}
    assert {"LR=1 2", "HOME=/elsewhere"} <= {*pairs(words, "--env")}
    (secrets,) = [m for m in pairs(words, "--mount") if "labctl-secrets" in m]
    assert secrets.startswith("type=bind,source=/dev/shm/")
    assert secrets.endswith("readonly")
    assert not [e for e in pairs(words, "--env") if e.startswith("TOKEN")]
    assert words[-3:] == ["echo", "a b", "$HOME"]
    assert runs.gpu_words("all") == ["--gpus", "all"]


def test_a_comma_in_a_mounted_path_is_refused(root: Path, tmp_path: Path) -> None:
    with pytest.raises(Failure, match="comma"):
        runs.run_line(root, tmp_path / "a,readonly", spec(), IMAGE, "c")


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="a server is Linux")
def test_secrets_are_private_and_gone_afterwards() -> None:
    run_id = f"t{os.getpid()}"
    try:
        secrets_tmpfs.put(run_id, {"A": "x\n"})
        file = secrets_tmpfs.directory_of(run_id) / "A"
        assert file.read_text() == "x\n"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    finally:
        secrets_tmpfs.drop(run_id)
    assert not secrets_tmpfs.directory_of(run_id).exists()


def test_the_same_claim_is_found_and_another_is_refused(root: Path) -> None:
    directory = root / "runs" / "night"
    assert runs._claim(root, directory, spec())
    kept = (directory / ".labctl" / "claim.json").read_bytes()
    assert not runs._claim(root, directory, dict(reversed(spec().items())))
    with pytest.raises(Failure) as caught:
        runs._claim(root, directory, spec(command=["other"]))
    assert caught.value.body["kind"] == "policy"
    assert (directory / ".labctl" / "claim.json").read_bytes() == kept
    assert [p.name for p in directory.parent.iterdir()] == ["night"], "no drafts are left"


CLAIM = """
import json, sys
from pathlib import Path
from labctl.remote.runs import _claim
print("ready", flush=True)
sys.stdin.readline()
root = Path(sys.argv[1])
print(_claim(root, root / "runs" / "night", json.loads(sys.argv[2])))
"""


def test_of_eight_claims_at_once_one_wins(root: Path) -> None:
    words = [sys.executable, "-c", CLAIM, str(root), json.dumps(spec())]
    processes = [
        subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(8)
    ]
    for one in processes:
        assert one.stdout
        assert one.stdout.readline() == "ready\n"
    for one in processes:
        assert one.stdin
        one.stdin.write("go\n")
        one.stdin.flush()
    said = [one.communicate()[0].strip() for one in processes]
    assert sorted(said) == ["False"] * 7 + ["True"]


def test_an_image_that_is_not_there_claims_nothing(root: Path) -> None:
    assert runs.start({"spec": spec()}) == {"missing": "python:3.11"}
    assert not (root / "runs").exists()


@pytest.mark.parametrize(
    ("code", "written", "cancelled", "told"),
    [
        (0, {}, False, "done"),
        (3, {}, False, "failed with exit code 3"),
        (126, {}, False, "exit 126: the command was found but cannot be executed"),
        (127, {}, False, "exit 127: the command was not found in the image"),
        (137, {}, False, "ended by SIGKILL (exit 137)"),
        (139, {}, False, "ended by SIGSEGV (exit 139)"),
        (255, {}, False, "failed with exit code 255"),
        (143, {}, True, "cancelled; the command ended with 143"),
        (0, {}, True, "cancelled; the command ended with 0"),
        (0, {"oom_kills": 1}, False, "done"),
        (1, {"oom_kills": 2}, False, "out of memory: killed at its limit of 2.00 GiB"),
        (
            137,
            {"oom_kills": 1, "peak_memory_bytes": GIB},
            True,
            "out of memory: killed at its limit of 2.00 GiB (peak 1.00 GiB)",
        ),
    ],
)
def test_every_ending_is_told(code: int, written: Any, cancelled: bool, told: str) -> None:
    assert looks.told_of(code, written, {"memory_bytes": 2 * GIB}, cancelled) == told


def test_out_of_memory_without_a_limit_is_the_servers() -> None:
    assert looks.told_of(137, {"oom_kills": 1}, {}, False).endswith("killed at the server's memory")


@pytest.fixture
def run_dir(root: Path) -> Path:
    directory = root / "runs" / f"night{os.getpid()}"
    assert runs._claim(root, directory, spec(id=directory.name, memory_bytes=GIB))
    (directory / "logs").mkdir()
    (directory / "logs" / "run.log").write_text("epoch 1\n")
    return directory


def launched(directory: Path, number: int = 1, **more: Any) -> None:
    attempt = {"container": "c", "boot": boot_token(), "started_at": time.time() - 100, **more}
    write_json(directory / ".labctl" / f"attempt-{number}", attempt)


def state(status: str, code: int = 0, **more: Any) -> dict[str, dict[str, Any]]:
    inner = {"Status": status, "Running": status == "running", "ExitCode": code}
    inner |= {"FinishedAt": "2026-01-02T03:04:05.678Z", **more}
    return {"c": {"Name": "/c", "State": inner}}


def test_a_claim_without_a_container_is_only_that(run_dir: Path) -> None:
    assert looks.look(run_dir, {})["state"] == "claimed"
    launched(run_dir)
    assert looks.look(run_dir, state("created"))["state"] == "claimed"
    assert not looks.final(run_dir)


def test_a_running_run_has_progress_and_no_record(run_dir: Path) -> None:
    launched(run_dir)
    (run_dir / "logs" / "progress.json").write_text('{"step": 3, "note": "x"}')
    seen = looks.look(run_dir, state("running"))
    assert (seen["state"], seen["progress"]) == ("running", {"step": 3.0})
    assert not looks.final(run_dir)


def test_docker_run_may_still_be_at_work(run_dir: Path) -> None:
    launched(run_dir, started_at=time.time())
    assert looks.look(run_dir, {})["state"] == "starting"


@pytest.mark.parametrize(
    ("seen", "cancel", "expected"),
    [
        ({}, False, ("lost", None, "container was removed")),
        (state("exited", 137, OOMKilled=True), False, ("exited", 137, "out of memory")),
        (state("exited", 137), False, ("exited", 137, "killed from outside (SIGKILL)")),
        (state("exited", 2), False, ("exited", 2, "ended with 2 before the command did")),
        (state("exited", 137), True, ("cancelled", 137, "did not stop within its time")),
        (state("created", 127, Error="no such exec"), False, ("exited", 127, "no such exec")),
    ],
)
def test_endings_that_the_container_could_not_write(
    run_dir: Path, seen: Any, cancel: bool, expected: tuple[str, int | None, str]
) -> None:
    launched(run_dir)
    if cancel:
        (run_dir / ".labctl" / "cancel").touch()
    found = looks.look(run_dir, seen)
    assert (found["state"], found.get("exit_code")) == expected[:2]
    assert expected[2] in found["told"]
    assert looks.look(run_dir, state("running")) == found == looks.final(run_dir), "once for all"
    if seen:
        assert found["ended_at"] == 1767323045.0


def test_a_reboot_is_told_by_the_boot_token(run_dir: Path) -> None:
    launched(run_dir, boot="another boot")
    found = looks.look(run_dir, state("exited", 137))
    assert (found["state"], found.get("exit_code")) == ("lost", None)
    assert "restarted" in found["told"]


def test_what_the_command_wrote_goes_before_a_reboot_and_a_removed_container(
    run_dir: Path,
) -> None:
    launched(run_dir, boot="another boot")
    write_json(run_dir / ".labctl" / "exit.json", {"code": 5, "ended_at": 7, "oom_kills": 0})
    found = looks.look(run_dir, {})
    assert (found["state"], found["exit_code"], found["ended_at"]) == ("exited", 5, 7.0)


def test_the_last_attempt_counts_by_number(run_dir: Path) -> None:
    for number in (1, 2, 10):
        launched(run_dir, number, container=f"c-{number}")
    assert looks.last_attempt(run_dir)["container"] == "c-10"


def test_an_empty_log_gets_what_the_container_said(run_dir: Path) -> None:
    (run_dir / "logs" / "run.log").write_text("")
    launched(run_dir)
    looks.look(run_dir, state("exited", 1))
    assert (run_dir / "logs" / "run.log").read_text() == "from the container\n"


def test_new_files_are_those_outside_the_outputs(run_dir: Path) -> None:
    for name in ("checkpoints/a.pt", "logs/x", "code/train.py", "code/made.csv", "stray.txt"):
        (run_dir / name).parent.mkdir(exist_ok=True)
        (run_dir / name).touch()
    (run_dir / "code" / "__pycache__").mkdir()
    (run_dir / "code" / "__pycache__" / "x.pyc").touch()
    (run_dir / "link").symlink_to("/etc/passwd")
    write_json(run_dir / ".labctl" / "code.json", ["train.py"])
    assert looks.new_files(run_dir, ["checkpoints"]) == ["code/made.csv", "stray.txt"]


def test_cancelling_a_claim_ends_it_and_again_says_so(run_dir: Path, root: Path) -> None:
    request = {"lab": "digits", "lab_id": LAB_ID, "run": run_dir.name}
    first, second = runs.cancel(request), runs.cancel(request)
    assert (first["run"]["state"], first["already"]) == ("cancelled", False)
    assert (second["run"]["state"], second["already"]) == ("cancelled", True)
    with pytest.raises(Failure, match="no run other"):
        runs.cancel({**request, "run": "other"})


def test_status_lists_every_run_of_the_lab(run_dir: Path) -> None:
    launched(run_dir)
    said = looks.status({"lab": "digits", "lab_id": LAB_ID})
    assert [one["id"] for one in said["runs"]] == [run_dir.name]
    assert 0 < said["disk"]["free_bytes"] <= said["disk"]["total_bytes"]
    assert looks.status({"lab": "digits", "lab_id": LAB_ID, "runs": ["no"]})["runs"] == []


def test_two_labs_of_one_name_have_two_directories(root: Path) -> None:
    other = lab_dir("digits", "ffffffffffff")
    assert other != root
    assert (lab_dir("digits", LAB_ID), lab_dir("digits", "ffffffffffff")) == (root, other)


@pytest.mark.parametrize("name", ["", "../x", "A", "a/b", "-a", "a" * 40, "a\n"])
def test_names_that_no_run_may_have(name: str) -> None:
    with pytest.raises(Failure, match="bad name"):
        checked_name(name)


@pytest.mark.parametrize("path", ["/etc", "..", "a/../b", "a//b", "", "./a", "a\0"])
def test_paths_that_leave(tmp_path: Path, path: str) -> None:
    with pytest.raises(Failure, match="leaves"):
        inside(tmp_path, path)


def test_nothing_is_written_through_links(tmp_path: Path) -> None:
    (tmp_path / "away").symlink_to("/tmp")
    with pytest.raises(Failure, match="link"):
        inside(tmp_path, "away/x")
    assert read_json(tmp_path / "none" / "x.json") == {}
