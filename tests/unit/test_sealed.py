"""What is asked of the engine for a stranger's program, and how its pipes are read: with bounds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from labctl.agent.host.engine_objects import (
    Container,
    ContainerImageConfig,
    ContainerLog,
    ContainerState,
    Image,
    Mount,
    NewContainer,
    Ulimit,
)
from labctl.agent.reply import Failure
from labctl.agent.sandbox import grading, sandbox
from labctl.wire.sandbox import SandboxLimits
from labctl.wire.verbs import LabRequest

LIMITS = SandboxLimits(
    memory_bytes=64 << 20, cpus=1.5, pids=32, disk_bytes=16 << 20, shm_bytes=8 << 20
)


def made() -> NewContainer:
    mounts = [Mount("bind", "/lab/code", Source="/x", ReadOnly=True)]
    volumes: dict[str, object] = {"/data": {}, "/lab/code": {}, "/tmp": {}}
    image = Image("sha256:1", Config=ContainerImageConfig(Entrypoint=("/banner",), Volumes=volumes))
    return sandbox.build_sandbox_container(
        image, ("sh", "p.sh"), "predictions", mounts, {"A": "b"}, {}, LIMITS
    )


def test_nothing_is_open_and_everything_is_bounded() -> None:
    body = made()
    host = body.HostConfig
    assert body.User == "65534:65534"
    assert body.Entrypoint is not None
    assert body.Entrypoint[:2] == ("/bin/sh", "-c")
    assert host.NetworkMode == "none"
    # NetworkDisabled would also take /etc/hosts, and programs in the container know no localhost.
    assert body.NetworkDisabled is False
    assert (host.ReadonlyRootfs, host.CapDrop) == (True, ("ALL",))
    assert host.SecurityOpt == ("no-new-privileges",)
    assert host.Memory == host.MemorySwap == 64 << 20
    assert (host.NanoCpus, host.PidsLimit) == (1_500_000_000, 32)
    assert host.ShmSize == 8 << 20
    assert host.Tmpfs
    assert all(f"size={16 << 20}" in options for options in host.Tmpfs.values())
    assert all("nr_inodes=" in options for options in host.Tmpfs.values())
    assert host.LogConfig == ContainerLog("none", {})
    assert Ulimit("core", 0, 0) in host.Ulimits
    pushed, cover = host.Mounts
    assert pushed.ReadOnly
    assert (cover.Type, cover.Target) == ("tmpfs", "/data"), "else it would be the disk"
    assert cover.TmpfsOptions is not None
    assert cover.TmpfsOptions.SizeBytes == 16 << 20


class Engine:
    """The engine's part: a docker command that is a shell script, and what inspect says after."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.state = ContainerState(StartedAt="2026")
        self.removed: list[str] = []
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        monkeypatch.setattr(sandbox.engine, "remove_container", self.removed.append)
        monkeypatch.setattr(sandbox.engine, "create_container", lambda name, body: True)
        monkeypatch.setattr(
            sandbox.engine, "inspect_container", lambda name: Container(State=self.state)
        )

    def run(self, script: str, deadline_s: float = 60.0, most: int = 1000) -> sandbox.SandboxResult:
        docker = self.folder / "docker"
        docker.write_text(f"#!/bin/sh\n{script}\n")
        docker.chmod(0o755)
        return sandbox.run_sandboxed("x", NewContainer("x"), deadline_s, most)


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    return Engine(tmp_path, monkeypatch)


def test_the_file_and_what_was_printed_come_apart(engine: Engine) -> None:
    found = engine.run("echo words >&2; echo a,b")
    assert (found.program.outcome, found.output) == ("ok", b"a,b\n")
    assert found.program.said == "words\n"
    assert engine.removed == ["x", "x"]


def test_an_answer_without_end_is_not_read_to_its_end(engine: Engine) -> None:
    found = engine.run("exec yes")
    assert (found.program.outcome, found.output) == ("large", b"")


def test_who_does_not_end_is_ended(engine: Engine) -> None:
    found = engine.run("exec sleep 1000", deadline_s=0.2)
    assert found.program.outcome == "time"


def test_of_much_that_was_printed_beginning_and_end_are_kept(engine: Engine) -> None:
    found = engine.run("echo begin >&2; yes x | head -c 1000000 >&2; echo end >&2; echo a")
    assert found.program.said.startswith("begin\n")
    assert found.program.said.endswith("end\n")
    assert "bytes ...]" in found.program.said
    assert len(found.program.said) < 40_000


@pytest.mark.parametrize(
    ("state", "outcome"),
    [
        ({"OOMKilled": True, "ExitCode": 137}, "memory"),
        ({"ExitCode": 3}, "exit"),
        ({"ExitCode": 0}, "none"),
    ],
)
def test_how_it_ended_is_the_engines_word(
    engine: Engine, state: dict[str, Any], outcome: str
) -> None:
    engine.state = engine.state._replace(**state)
    assert engine.run("true").program.outcome == outcome


@pytest.mark.parametrize(
    "state",
    [
        {"Error": "no such file: /bin/sh", "ExitCode": 127},
        {"StartedAt": "0001-01-01T00:00:00Z"},
        {"Running": True},
    ],
)
def test_what_never_ran_is_no_submissions_failure(engine: Engine, state: dict[str, Any]) -> None:
    engine.state = engine.state._replace(**state)
    with pytest.raises(Failure):
        engine.run("echo a")


def test_credentials_of_all_sorts_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(grading, "_get_role", lambda imds: "")
    for name in grading.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "authorized_keys").write_text("ssh-ed25519 AAAA")
    (tmp_path / ".docker").mkdir()
    (tmp_path / ".docker" / "config.json").write_text('{"proxies": {}}')
    assert grading.check(LabRequest("lab", "1")).credentials == ()
    (tmp_path / ".ssh" / "work").write_text("-----BEGIN OPENSSH PRIVATE KEY-----\n")
    (tmp_path / ".docker" / "config.json").write_text('{"auths": {"x": {"auth": "eA=="}}}')
    (tmp_path / ".netrc").write_text("machine x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    monkeypatch.setattr(grading, "_get_role", lambda imds: "admin")
    assert grading.check(LabRequest("lab", "1")).credentials == (
        "~/.netrc",
        "~/.docker/config.json",
        "the variable AWS_SECRET_ACCESS_KEY",
        "~/.ssh/work",
        "the machine's own role, admin",
    )
