"""The server's half of runs: claims, what a container is made of, how a run is said to end."""

from __future__ import annotations

import io
import os
import stat
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from engine_socket import Answer, EngineSocket, engine_socket

from labctl.agent.host.engine_objects import (
    Container,
    ContainerImageConfig,
    ContainerState,
    DeviceRequest,
    Image,
    Mount,
    NewContainer,
    NewDevice,
)
from labctl.agent.host.paths import (
    lab_dir,
    labctl_home,
    read_json,
    require_name,
    resolve_inside,
    write_json,
)
from labctl.agent.reply import Failure
from labctl.agent.runs import (
    containers,
    docker_executor,
    fast_network,
    records,
    resume,
    run_state,
    runs,
    secrets_tmpfs,
)
from labctl.agent.runs.docker_executor import describe_container
from labctl.agent.runs.executor import NewAttempt, ProgramState
from labctl.agent.runs.exit_summary import describe_exit
from labctl.wire.boot_id import read_boot_token
from labctl.wire.codec import encode, to_json
from labctl.wire.runs import (
    AdoptPushedRequest,
    AttemptRecord,
    CancelRunRequest,
    ExitRecord,
    GangMember,
    ResumeRunRequest,
    RunRecord,
    RunSpec,
    StartRunReply,
    StartRunRequest,
    StatusRequest,
)

LAB_ID = "0f1e2d3c4b5a"
GIB = 1024**3
IMAGE = Image("sha256:" + "ab" * 32, Config=ContainerImageConfig(Entrypoint=("/tini", "--")))
SPEC = RunSpec(
    id="night",
    lab="digits",
    lab_id=LAB_ID,
    command=("python", "train.py"),
    image="python:3.11",
    env={},
    outputs=("checkpoints",),
)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineSocket]:
    """The server's Docker Engine; it knows no container and no image at all."""
    with engine_socket() as made:
        monkeypatch.setenv("DOCKER_HOST", made.host)
        yield made


@pytest.fixture
def root(engine: EngineSocket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The lab's directory on a server."""
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    (bin_dir / "docker").write_text('#!/bin/sh\n[ "$1" = logs ] && echo from the container\nexit 1')
    said = tmp_path / "tmux.said"
    (bin_dir / "tmux").write_text(f'#!/bin/sh\n[ ! -p {said} ] || echo "$@" >{said}')
    for name in ("docker", "tmux"):
        (bin_dir / name).chmod(0o755)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", f"{bin_dir}:{os.environ['PATH']}")
    passwd = tmp_path / "home" / "labctl" / ".passwd" / ("passwd-" + "ab" * 12)
    passwd.parent.mkdir(parents=True)
    passwd.touch()
    return lab_dir("digits", LAB_ID)


def bind(source: Path | str, target: str, read_only: bool = False) -> Mount:
    return Mount("bind", target, Source=str(source), ReadOnly=read_only)


def build_body(
    root: Path, spec: RunSpec, image: Image = IMAGE, member: GangMember | None = None
) -> NewContainer:
    attempt = NewAttempt("c", root, root / "runs" / "night", spec, image, member)
    return containers.build_run_body(attempt)


def test_a_part_of_a_run_on_several_servers_uses_their_network(root: Path) -> None:
    member = GangMember(2, 4, "10.0.0.7", 41234, "ens5")
    body = build_body(root, SPEC._replace(env={"GLOO_SOCKET_IFNAME": "ib0"}), member=member)
    assert body.HostConfig.NetworkMode == "host"
    assert {
        *("RANK=2", "WORLD_SIZE=4", "LOCAL_RANK=0", "MASTER_ADDR=10.0.0.7", "MASTER_PORT=41234"),
        *("PET_NODE_RANK=2", "PET_NNODES=4", "PET_MASTER_ADDR=10.0.0.7", "PET_MASTER_PORT=41234"),
        *("NCCL_SOCKET_IFNAME==ens5", "GLOO_SOCKET_IFNAME=ib0"),
    } <= {*body.Env}
    alone = build_body(root, SPEC)
    assert alone.HostConfig.NetworkMode == ""
    assert not [line for line in alone.Env if line.startswith(("RANK=", "PET_"))]


@pytest.mark.parametrize(("driver", "provider"), [("efa", ["FI_PROVIDER=efa"]), ("mlx5_core", [])])
def test_a_part_gets_the_fast_network_of_its_server(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: str, provider: list[str]
) -> None:
    nodes, adapters = tmp_path / "nodes", tmp_path / "adapters"
    drivers, device = tmp_path / "drivers" / driver, adapters / "rdmap0s6" / "device"
    for directory in (nodes, drivers, device):
        directory.mkdir(parents=True)
    # A character device of this machine in place of an adapter's, which needs the hardware.
    (nodes / "uverbs0").symlink_to(os.devnull)
    (nodes / "umad0").symlink_to(os.devnull)  # with it, a program could manage the network
    (nodes / "by-path").mkdir()
    (device / "driver").symlink_to(drivers)
    monkeypatch.setattr(fast_network, "NODES", nodes)
    monkeypatch.setattr(fast_network, "ADAPTERS", adapters)
    body = build_body(root, SPEC, member=GangMember(2, 4, "10.0.0.7", 41234, "ens5"))
    node = str(nodes / "uverbs0")
    assert body.HostConfig.Devices == (NewDevice(node, node),)
    assert [line for line in body.Env if line.startswith("FI_PROVIDER")] == provider
    alone = build_body(root, SPEC)
    assert alone.HostConfig.Devices == ()
    assert not [line for line in alone.Env if line.startswith("FI_PROVIDER")]
    tunnel = build_body(root, SPEC, member=GangMember(2, 4, "10.1.2.1", 41234, "labctl0f1e2d"))
    assert tunnel.HostConfig.Devices == (), "RDMA would not be encrypted"
    assert "NCCL_NET=Socket" in tunnel.Env


def test_the_container_of_a_plain_run(root: Path) -> None:
    directory = root / "runs" / "night"
    body = containers.build_run_body(NewAttempt("c", root, directory, SPEC, IMAGE))
    assert (body.Image, body.Hostname) == (IMAGE.Id, "digits")
    assert (body.User, body.WorkingDir) == (f"{os.getuid()}:{os.getgid()}", "/lab/code")
    assert body.Labels == {"labctl.lab-id": LAB_ID, "labctl.run": "night"}
    assert {"LABCTL_RUN_ID=night", "PYTHONUNBUFFERED=1"} <= {*body.Env}
    assert body.Entrypoint == ("/bin/sh",)
    assert body.Cmd == ("/lab/run/.labctl/entry.sh", "/tini", "--", "python", "train.py")
    assert (body.StopTimeout, body.Tty, body.OpenStdin) == (60, False, False)
    host = body.HostConfig
    assert host.SecurityOpt == ("no-new-privileges",)
    assert host.LogConfig is not None
    assert host.LogConfig.Config == {"max-size": "50m"}
    kept = labctl_home() / ".passwd" / ("passwd-" + "ab" * 12)
    assert host.Mounts == (
        bind(root / "data", "/lab/data", read_only=True),
        bind(labctl_home() / ".cache", "/lab/cache"),
        bind(kept, "/etc/passwd", read_only=True),
        bind(directory / "code", "/lab/code"),
        bind(directory, "/lab/run"),
    )
    assert not any((host.Memory, host.MemorySwap, host.NanoCpus, host.ShmSize))
    sent = to_json(body, drop_defaults=True)["HostConfig"]
    assert {*sent} == {"Mounts", "SecurityOpt", "LogConfig"}


def test_the_container_of_a_run_with_everything(root: Path) -> None:
    wanted = SPEC._replace(
        env={"LR": "1 2", "HOME": "/elsewhere"}, gpus="GPU-1,GPU-2", memory_bytes=3 * GIB,
        cpus=1.1, shm_bytes=GIB, tty=True, secrets=("TOKEN",), command=("echo", "a b", "$HOME"),
    )  # fmt: skip
    body = build_body(root, wanted, Image(IMAGE.Id))
    host = body.HostConfig
    gpu = DeviceRequest(Capabilities=(("gpu",),))
    assert host.DeviceRequests == (gpu._replace(DeviceIDs=("GPU-1", "GPU-2")),)
    assert host.Memory == host.MemorySwap == 3 * GIB
    assert (host.NanoCpus, host.ShmSize) == (1_100_000_000, GIB)
    assert (body.Tty, body.OpenStdin) == (True, True)
    assert {"LR=1 2", "HOME=/elsewhere"} <= {*body.Env}
    (secrets,) = [mount for mount in host.Mounts if mount.Target == "/run/labctl-secrets"]
    assert secrets.Source.startswith("/dev/shm/")
    assert secrets.ReadOnly is True
    assert not [each for each in body.Env if each.startswith("TOKEN")]
    assert body.Cmd is not None
    assert body.Cmd[-3:] == ("echo", "a b", "$HOME")
    every = build_body(root, SPEC._replace(gpus="all"))
    assert every.HostConfig.DeviceRequests == (gpu._replace(Count=-1),)


def test_a_path_with_a_comma_is_mounted_like_any_other(root: Path, tmp_path: Path) -> None:
    body = containers.build_run_body(NewAttempt("c", root, tmp_path / "a,readonly", SPEC, IMAGE))
    assert bind(tmp_path / "a,readonly", "/lab/run") in body.HostConfig.Mounts


def test_the_passwd_of_an_image_gets_our_user_and_is_made_once(
    engine: EngineSocket, tmp_path: Path
) -> None:
    said = b"root:x:0:0::/root:/bin/sh\nbroken\nme:x:%d:1::/:/bin/false\n" % os.getuid()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        info = tarfile.TarInfo("passwd")
        info.size = len(said)
        tar.addfile(info, io.BytesIO(said))
    engine.answers = lambda method, path, body: (200, buffer.getvalue() if method == "GET" else {})
    path = containers.make_passwd_file(IMAGE.Id, tmp_path / "kept")
    lines = path.read_text().splitlines()
    assert lines[-1] == f"lab:x:{os.getuid()}:{os.getgid()}:labctl:/lab/cache/home:/bin/sh"
    assert lines[:-1] == ([] if os.getuid() == 0 else ["root:x:0:0::/root:/bin/sh"])
    assert [method for method, _, _ in engine.asked] == ["POST", "GET", "DELETE"]
    assert containers.make_passwd_file(IMAGE.Id, tmp_path / "kept") == path
    assert len(engine.asked) == 3


class Containers:
    """What an engine says while one container is made and started; `refusal` at its start."""

    def __init__(self, refusal: str = "", *, taken: bool = False, is_limit: bool = False) -> None:
        self.refusal = {"message": refusal, **({"labctl_limit": True} if is_limit else {})}
        self.taken = taken
        self.changes: list[str] = []

    def __call__(self, method: str, path: str, body: Any) -> Answer | None:
        target = path.split("/", 2)[2]
        if method != "GET":
            self.changes.append(f"{method} {target}")
        if target.startswith("images/"):
            return 200, to_json(IMAGE, drop_defaults=True)
        if target.startswith("containers/create"):
            said = 'The container name "/x" is already in use by container "7"'
            return (409, {"message": said}) if self.taken else (201, {"Id": "7"})
        if target.endswith("/start"):
            return (500, self.refusal) if self.refusal["message"] else (204, b"")
        if target.startswith("containers/json"):
            names = ("day", "night", "dawn")
            return 200, [{"Id": name, "Labels": {"labctl.run": name}} for name in names]
        return (204, b"") if method == "DELETE" else None


def test_a_start_makes_and_starts_one_container_and_asks_no_more(
    root: Path, engine: EngineSocket, tmp_path: Path
) -> None:
    engine.answers = calls = Containers()
    os.mkfifo(tmp_path / "tmux.said")
    said = runs.start(StartRunRequest(SPEC))
    name = "digits-night-1"
    assert calls.changes == [f"POST containers/create?name={name}", f"POST containers/{name}/start"]
    assert [path for method, path, _ in engine.asked if method == "GET"] == [
        "/v1.41/images/python:3.11/json",
        "/v1.41/containers/json?all=0&filters="
        + quote(f'{{"label": ["labctl.run", "labctl.lab-id={LAB_ID}"]}}'),
    ]
    assert said.active == ("day", "dawn"), "the lab's other runs, in the engine's order"
    assert said.run is not None
    assert (said.found, said.run.state, said.run.container) == (False, "running", name)
    assert records.read_last_attempt(root / "runs" / "night").launched is True
    asked_of_tmux = (tmp_path / "tmux.said").read_text()
    assert f"new-session -d -s labctl-night -n run -c {root}/runs/night" in asked_of_tmux


def test_a_list_that_the_engine_spoils_does_not_fail_a_run_that_has_started(
    root: Path, engine: EngineSocket, tmp_path: Path
) -> None:
    def answer(method: str, path: str, body: Any) -> Answer | None:
        if "/containers/json" in path:
            return 200, [{"Id": ["not", "a", "name"]}]
        return Containers()(method, path, body)

    engine.answers = answer
    os.mkfifo(tmp_path / "tmux.said")
    reply = runs.start(StartRunRequest(SPEC))
    (tmp_path / "tmux.said").read_text()
    assert reply.run is not None
    assert reply.active == ()


def test_a_held_container_is_created_once_and_started_by_its_caller(
    root: Path, engine: EngineSocket
) -> None:
    made: list[str] = []

    def answer(method: str, path: str, body: Any) -> Answer | None:
        if path.endswith("/containers/digits-night-1/json") and made:
            return 200, {"Name": "/digits-night-1", "State": {"Status": "created"}}
        made.extend([path] if "/containers/create" in path else [])
        return Containers()(method, path, body)

    engine.answers = answer
    request = StartRunRequest(SPEC._replace(tty=True), held=True)
    first, again = runs.start(request), runs.start(request)
    assert first.run
    assert again.run
    assert (first.run.state, first.found) == ("claimed", False)
    assert (again.run.state, again.found) == ("claimed", True)
    assert first.run.container == again.run.container == "digits-night-1"
    assert made == ["/v1.41/containers/create?name=digits-night-1"]
    assert not [path for _, path, _ in engine.asked if path.endswith("/start")]


@pytest.mark.parametrize(
    ("refusal", "kind"),
    [
        ('could not select device driver "" with capabilities: [[gpu]]', "gpu"),
        ("mkdir /var/lib/docker/x: no space left on device", "disk"),
        ("OCI runtime create failed", "docker"),
    ],
)
def test_a_start_that_the_engine_refuses_leaves_nothing(
    root: Path, engine: EngineSocket, refusal: str, kind: str
) -> None:
    engine.answers = calls = Containers(refusal)
    with pytest.raises(Failure) as caught:
        runs.start(StartRunRequest(SPEC))
    assert (caught.value.report.kind, caught.value.report.why) == (kind, refusal)
    assert calls.changes[-1] == "DELETE containers/digits-night-1?force=1"
    assert not (root / "runs" / "night").exists()


@pytest.mark.parametrize(
    ("command", "again"),
    [
        (("sh", "-c", "echo a; sleep 3"), "labctl run -- sh -c 'echo a; sleep 3'"),
        (("sh", "-c", "echo a\nsleep 3"), "labctl run"),
    ],
)
def test_a_run_that_must_wait_names_its_own_command(
    root: Path, engine: EngineSocket, command: tuple[str, ...], again: str
) -> None:
    engine.answers = Containers("no GPU is free", is_limit=True)
    with pytest.raises(Failure) as caught:
        runs.start(StartRunRequest(SPEC._replace(command=command)))
    assert caught.value.report.hint == f"{again}   # again later"


@pytest.mark.parametrize("is_limit", [True, False])
def test_only_a_limit_of_the_broker_is_waited_for(
    root: Path, engine: EngineSocket, is_limit: bool
) -> None:
    """Its response says so itself, whatever its text."""
    why = "no GPU is free" if is_limit else "shared server: no GPU is free"
    engine.answers = Containers(why, is_limit=is_limit)
    with pytest.raises(Failure) as caught:
        runs.start(StartRunRequest(SPEC))
    report = caught.value.report
    assert (report.kind, report.why) == ("policy" if is_limit else "docker", why)


def test_a_container_of_that_name_is_left_alone(root: Path, engine: EngineSocket) -> None:
    engine.answers = calls = Containers(taken=True)
    runs.start(StartRunRequest(SPEC))
    assert calls.changes == ["POST containers/create?name=digits-night-1"]


def test_whoever_claimed_launches_nothing_that_was_launched_meanwhile(
    root: Path, engine: EngineSocket
) -> None:
    """Between a claim and its launch another call of the same run may have been quicker."""
    engine.answers = calls = Containers()
    directory = root / "runs" / "night"
    assert runs._claim(directory, SPEC)
    records.write_attempt(directory, 1, AttemptRecord("c", started_at=time.time()))
    said = runs._launch_claimed(StartRunRequest(SPEC), root, directory, IMAGE, existed=False)
    assert said.run is not None
    assert (said.found, said.run.state) == (True, "starting")
    assert not calls.changes


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="a server is Linux")
def test_secrets_are_private_and_gone_afterwards() -> None:
    run_id = f"t{os.getpid()}"
    try:
        secrets_tmpfs.write_secrets(run_id, {"A": "x\n"})
        file = secrets_tmpfs.secrets_directory(run_id) / "A"
        assert file.read_text() == "x\n"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    finally:
        secrets_tmpfs.remove_secrets(run_id)
    assert not secrets_tmpfs.secrets_directory(run_id).exists()


def test_the_same_claim_is_found_and_another_is_refused(root: Path) -> None:
    directory = root / "runs" / "night"
    assert runs._claim(directory, SPEC)
    kept = (directory / ".labctl" / "claim.json").read_bytes()
    assert not runs._claim(directory, SPEC)
    with pytest.raises(Failure) as caught:
        runs._claim(directory, SPEC._replace(command=("other",)))
    assert caught.value.report.kind == "taken"
    assert (directory / ".labctl" / "claim.json").read_bytes() == kept
    assert [p.name for p in directory.parent.iterdir()] == ["night"], "no drafts are left"


def test_a_claim_is_the_one_of_earlier_versions(root: Path) -> None:
    """The claim in tests/fixtures/first is that of labctl's first version."""
    spec = RunSpec(
        id="first",
        lab="digits",
        lab_id=LAB_ID,
        command=("python", "train.py", "40"),
        image="python:3.11-slim",
        env={},
        outputs=("checkpoints", "logs"),
        shm_bytes=2_000_000_000,
    )
    directory = root / "runs" / "first"
    assert runs._claim(directory, spec)
    assert records.read_claim(directory).hash == (
        "6a1a28e16729ce4178c06d65f27eff96383ea16765ebb10037bf8a3c38788067"
    )


CLAIM = """
import sys
from pathlib import Path
from labctl.agent.runs.runs import _claim
from labctl.wire.codec import decode
from labctl.wire.runs import RunSpec
print("ready", flush=True)
sys.stdin.readline()
print(_claim(Path(sys.argv[1]) / "runs" / "night", decode(RunSpec, sys.argv[2])))
"""


def test_of_eight_claims_at_once_one_wins(root: Path) -> None:
    words = [sys.executable, "-c", CLAIM, str(root), encode(SPEC)]
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
    assert runs.start(StartRunRequest(SPEC)) == StartRunReply(missing="python:3.11")
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
        (143, {}, True, "canceled (SIGTERM)"),
        (0, {}, True, "canceled (exit code 0)"),
        (0, {"oom_kills": 1}, False, "done"),
        (1, {"oom_kills": 2}, False, "out of memory: killed at its limit of 2.0 GiB"),
        (
            137,
            {"oom_kills": 1, "peak_memory_bytes": GIB},
            True,
            "out of memory: killed at its limit of 2.0 GiB (peak 1.0 GiB)",
        ),
    ],
)
def test_every_ending_is_told(code: int, written: Any, cancelled: bool, told: str) -> None:
    ending = describe_exit(code, **written, memory_bytes=2 * GIB, cancelled=cancelled)
    assert ending == told


@pytest.mark.parametrize(
    ("oom_kills", "code", "limit"), [(1, 137, 2 * GIB), (1, 0, None), (0, 137, None)]
)
def test_a_record_has_the_limit_at_which_its_run_was_killed(
    root: Path, oom_kills: int, code: int, limit: int | None
) -> None:
    record = run_state._describe_exit(
        root,
        SPEC._replace(memory_bytes=2 * GIB),
        ExitRecord(code, 1.0, oom_kills=oom_kills),
        None,
        False,
        False,
        RunRecord("night", "running"),
    )
    assert record.oom_limit_bytes == limit


def test_out_of_memory_without_a_limit_is_the_servers() -> None:
    assert describe_exit(137, oom_kills=1).endswith("killed at the server's memory")


@pytest.mark.parametrize(
    ("program", "code", "summary", "limit"),
    [
        (
            ProgramState("j", "ended", None, is_out_of_memory=True),
            137,
            "out of memory: killed at the memory limit of its job",
            0,
        ),
        (
            ProgramState("j", "ended", None, summary="it reached the time limit of its job"),
            143,
            "it reached the time limit of its job (exit code 143)",
            None,
        ),
        (ProgramState("j", "ended", None, summary="its machine failed"), 0, "done", None),
    ],
)
def test_slurm_knows_why_the_command_of_a_job_ended(
    root: Path, program: ProgramState, code: int, summary: str, limit: int | None
) -> None:
    spec, record = SPEC._replace(executor="slurm"), RunRecord("night", "running")
    record = run_state._describe_exit(
        root, spec, ExitRecord(code, 1.0), program, False, False, record
    )
    assert (record.summary, record.oom_limit_bytes) == (summary, limit)


@pytest.fixture
def run_dir(root: Path) -> Path:
    directory = root / "runs" / f"night{os.getpid()}"
    assert runs._claim(directory, SPEC._replace(id=directory.name, memory_bytes=GIB))
    (directory / "logs").mkdir()
    (directory / "logs" / "run.log").write_text("epoch 1\n")
    return directory


def launched(directory: Path, number: int = 1, **more: Any) -> None:
    attempt = AttemptRecord("c", read_boot_token(), started_at=time.time() - 100)
    records.write_attempt(directory, number, attempt._replace(**more))


def state(status: str, code: int = 0, **more: Any) -> dict[str, ProgramState]:
    inner = ContainerState(
        status,
        Running=status == "running",
        ExitCode=code,
        FinishedAt="2026-01-02T03:04:05.678Z",
    )
    return {"c": describe_container("c", Container(Name="/c", State=inner._replace(**more)))}


def test_a_claim_without_a_container_is_only_that(run_dir: Path) -> None:
    assert run_state.inspect_run(run_dir, {}).state == "claimed"
    launched(run_dir)
    assert run_state.inspect_run(run_dir, state("created")).state == "claimed"
    assert not records.read_final_record(run_dir)


def test_a_running_run_has_progress_and_no_record(run_dir: Path) -> None:
    launched(run_dir)
    (run_dir / "logs" / "progress.json").write_text('{"step": 3, "note": "x"}')
    seen = run_state.inspect_run(run_dir, state("running"))
    assert (seen.state, seen.progress) == ("running", {"step": 3.0})
    assert not records.read_final_record(run_dir)


def test_docker_run_may_still_be_at_work(run_dir: Path) -> None:
    launched(run_dir, started_at=time.time())
    assert run_state.inspect_run(run_dir, {}).state == "starting"


@pytest.mark.parametrize(
    ("seen", "cancel", "expected"),
    [
        ({}, False, ("lost", None, "container was removed")),
        (state("exited", 137, OOMKilled=True), False, ("exited", 137, "out of memory")),
        (state("exited", 137), False, ("exited", 137, "killed from outside (SIGKILL)")),
        (state("exited", 2), False, ("exited", 2, "ended with exit code 2 before the command did")),
        (state("exited", 137), True, ("cancelled", 137, "did not stop in time and was killed")),
        (state("created", 127, Error="no such exec"), False, ("exited", 127, "no such exec")),
    ],
)
def test_endings_that_the_container_could_not_write(
    run_dir: Path, seen: Any, cancel: bool, expected: tuple[str, int | None, str]
) -> None:
    launched(run_dir)
    if cancel:
        (run_dir / ".labctl" / "cancel").touch()
    found = run_state.inspect_run(run_dir, seen)
    assert (found.state, found.exit_code) == expected[:2]
    assert expected[2] in found.summary
    assert (found.oom_limit_bytes is not None) == (expected[2] == "out of memory")
    assert (
        run_state.inspect_run(run_dir, state("running"))
        == found
        == records.read_final_record(run_dir)
    ), "once for all"
    if seen:
        assert found.ended_at == 1767323045.0


def test_a_reboot_is_told_by_the_boot_token(run_dir: Path) -> None:
    launched(run_dir, boot="another boot")
    found = run_state.inspect_run(run_dir, state("exited", 137))
    assert (found.state, found.exit_code) == ("lost", None)
    assert "restarted" in found.summary


def test_what_the_command_wrote_goes_before_a_reboot_and_a_removed_container(
    run_dir: Path,
) -> None:
    launched(run_dir, boot="another boot")
    write_json(run_dir / ".labctl" / "exit.json", to_json(ExitRecord(code=5, ended_at=7.0)))
    found = run_state.inspect_run(run_dir, {})
    assert (found.state, found.exit_code, found.ended_at) == ("exited", 5, 7.0)


def test_a_record_that_a_program_has_damaged_counts_as_missing(run_dir: Path) -> None:
    """The run's own program can write to this directory."""
    launched(run_dir)
    meta = run_dir / ".labctl"
    for name in ("exit.json", "record.json", "limit.json", "resumed.json"):
        write_json(meta / name, {"code": "x", "state": 5, "by": [], "offset": "far"})
    found = run_state.inspect_run(run_dir, state("exited", 2))
    assert (found.state, found.exit_code, found.log_offset) == ("exited", 2, 0)


def test_the_last_attempt_counts_by_number(run_dir: Path) -> None:
    for number in (1, 2, 10):
        launched(run_dir, number, container=f"c-{number}")
    assert records.read_last_attempt(run_dir).container == "c-10"


def test_an_empty_log_gets_what_the_container_said(run_dir: Path) -> None:
    (run_dir / "logs" / "run.log").write_text("")
    launched(run_dir)
    run_state.inspect_run(run_dir, state("exited", 1))
    assert (run_dir / "logs" / "run.log").read_text() == "from the container\n"


def test_new_files_are_those_outside_the_outputs(run_dir: Path) -> None:
    for name in ("checkpoints/a.pt", "logs/x", "code/train.py", "code/made.csv", "stray.txt"):
        (run_dir / name).parent.mkdir(exist_ok=True)
        (run_dir / name).touch()
    (run_dir / "code" / "__pycache__").mkdir()
    (run_dir / "code" / "__pycache__" / "x.pyc").touch()
    (run_dir / "link").symlink_to("/etc/passwd")
    write_json(run_dir / ".labctl" / "code.json", ["train.py"])
    assert run_state.list_new_files(run_dir, ["checkpoints"]) == ["code/made.csv", "stray.txt"]
    assert run_state.list_new_files(run_dir, ["code/made.csv"]) == ["stray.txt"]
    assert run_state.list_new_files(run_dir, ["code", "stray.txt"]) == []


@pytest.mark.parametrize("has_checkpoints", [True, False])
def test_a_record_says_whether_the_run_left_checkpoints(
    run_dir: Path, has_checkpoints: bool
) -> None:
    launched(run_dir)
    (run_dir / "checkpoints" / "step-1").mkdir(parents=True)
    if has_checkpoints:
        (run_dir / "checkpoints" / "step-1" / "state.pt").touch()
    found = run_state.inspect_run(run_dir, state("exited", 1))
    assert found.has_checkpoints == has_checkpoints


def test_cancelling_a_claim_ends_it_and_again_says_so(run_dir: Path, root: Path) -> None:
    request = CancelRunRequest("digits", LAB_ID, run_dir.name)
    first, second = runs.cancel(request), runs.cancel(request)
    assert (first.run.state, first.already) == ("cancelled", False)
    assert (second.run.state, second.already) == ("cancelled", True)
    with pytest.raises(Failure, match="run other does not exist"):
        runs.cancel(request._replace(run="other"))


def test_cancelling_a_run_that_is_being_launched_stops_its_container(
    root: Path, engine: EngineSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in a command that starts a run sends its cancel while the start is at work."""
    calls = Containers()
    order: list[str] = []
    cancel = threading.Thread(
        target=runs.cancel, args=(CancelRunRequest("digits", LAB_ID, SPEC.id),)
    )

    def answer(method: str, path: str, body: Any) -> Answer | None:
        if method == "POST" and "create" in path:
            cancel.start()
            cancel.join(1)  # it waits for the launch; without that it ends at once
        elif method == "POST":
            order.append("start")
        return calls(method, path, body)

    def run_docker(*words: str, **options: Any) -> None:
        order.append(words[0])

    engine.answers = answer
    monkeypatch.setattr(docker_executor, "run_docker", run_docker)
    runs.start(StartRunRequest(SPEC))
    cancel.join()
    assert order == ["start", "stop"]


def test_a_pushed_run_is_lost_and_its_next_attempt_begins_where_the_log_was_cut(
    root: Path, engine: EngineSocket, tmp_path: Path
) -> None:
    pushed = root / "restore" / "night"
    for name, text in {"code/train.py": "", "logs/run.log": "epoch 1\nepo"}.items():
        (pushed / name).parent.mkdir(parents=True)
        (pushed / name).write_text(text)
    checkpoint = pushed / "checkpoints" / "one"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text('{"step": 7, "files": {}}')
    adopted = resume.from_push(AdoptPushedRequest(SPEC, created_at=5.0, attempts=2)).run
    assert (adopted.state, adopted.created_at, adopted.container) == ("lost", 5.0, "")
    assert resume.from_push(AdoptPushedRequest(SPEC, created_at=6.0, attempts=1)).run == adopted

    engine.answers = calls = Containers()
    os.mkfifo(tmp_path / "tmux.said")
    request = ResumeRunRequest(SPEC, reason="its server was lost; resuming here")
    reply = resume.resume(request)
    assert reply.run is not None
    assert (reply.run.state, reply.run.container) == ("running", "digits-night-3")
    assert (reply.found, reply.offset, reply.step) == (False, len("epoch 1\nepo"), 7)
    assert calls.changes[0] == "POST containers/create?name=digits-night-3"
    log = (root / "runs" / "night" / "logs" / "run.log").read_text()
    assert "its server was lost; resuming here (attempt 3) ---\n" in log
    assert (root / "runs" / "night" / ".labctl" / "ended-2-record.json").exists()
    assert "new-session -d -s labctl-night" in (tmp_path / "tmux.said").read_text()


def test_status_lists_every_run_of_the_lab(run_dir: Path) -> None:
    launched(run_dir)
    reply = run_state.status(StatusRequest("digits", LAB_ID))
    assert [run.id for run in reply.runs] == [run_dir.name]
    assert 0 < reply.disk.free_bytes <= reply.disk.total_bytes
    assert run_state.status(StatusRequest("digits", LAB_ID, ("no",))).runs == ()


def test_two_labs_of_one_name_have_two_directories(root: Path) -> None:
    other = lab_dir("digits", "ffffffffffff")
    assert other != root
    assert (lab_dir("digits", LAB_ID), lab_dir("digits", "ffffffffffff")) == (root, other)


@pytest.mark.parametrize("name", ["", "../x", "A", "a/b", "-a", "a" * 40, "a\n"])
def test_names_that_no_run_may_have(name: str) -> None:
    with pytest.raises(Failure, match="bad name"):
        require_name(name)


@pytest.mark.parametrize("path", ["/etc", "..", "a/../b", "a//b", "", "./a", "a\0"])
def test_paths_that_leave(tmp_path: Path, path: str) -> None:
    with pytest.raises(Failure, match="leaves"):
        resolve_inside(tmp_path, path)


def test_nothing_is_written_through_links(tmp_path: Path) -> None:
    (tmp_path / "away").symlink_to("/tmp")
    with pytest.raises(Failure, match="link"):
        resolve_inside(tmp_path, "away/x")
    assert read_json(tmp_path / "none" / "x.json") == {}
