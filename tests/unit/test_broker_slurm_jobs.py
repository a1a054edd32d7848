"""Which job of Slurm a process is in, and what its containers get."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from http.client import RemoteDisconnected
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from broker_bed import ALICE, BOB, CAROL, SETTINGS, make_bed
from engine_socket import Answer, EngineSocket, engine_socket

from labctl.agent.broker import cgroup, slurm_jobs
from labctl.agent.broker.account_containers import AccountContainer
from labctl.agent.broker.account_networks import AccountNetworks
from labctl.agent.broker.gpu_leases import GpuIdentity, list_leases
from labctl.agent.broker.http import HttpRefusal
from labctl.agent.broker.rules import ATTEMPT, GPUS, JOB, OWNER, AccountShare
from labctl.agent.broker.slurm_jobs import RunningJob

ALL_BYTES = cgroup.read_total_memory_bytes()
# Of Slurm 22.05 on a machine with cgroup v1, without controllers that say the same
V1 = """\
9:name=systemd:/system.slice/slurmd.service
8:pids:/system.slice/slurmd.service
6:freezer:/slurm_gpu1/uid_20000/job_17/step_batch
5:devices:/slurm_gpu1/uid_20000/job_17/step_batch/task_0
4:memory:/slurm_gpu1/uid_20000/job_17/step_batch/task_0
0::/system.slice/slurmd.service
"""
V1_OF_AN_ONLY_DAEMON = "4:memory:/slurm/uid_1004/job_9/step_0/task_0\n"
V1_OF_A_CONTAINER = f"4:memory:/slurm/uid_1004/job_9/{'a5' * 32}\n"
# https://slurm.schedmd.com/cgroup_v2.html#hierarchy_overview
V2 = "0::/system.slice/slurmstepd.scope/job_17/step_0/user/task_0\n"
V2_OF_ONE_DAEMON_OF_SEVERAL = (
    "0::/system.slice/gpu1_slurmstepd.scope/job_17/step_extern/user/task_special\n"
)
GPU_LIST = [GpuIdentity("GPU-a", "0", "T4"), GpuIdentity("GPU-b", "1", "T4")]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (V1, ("17", "/slurm_gpu1/uid_20000/job_17")),
        (V1_OF_AN_ONLY_DAEMON, ("9", "/slurm/uid_1004/job_9")),
        (V1_OF_A_CONTAINER, ("9", "/slurm/uid_1004/job_9")),
        (V2, ("17", "/system.slice/slurmstepd.scope/job_17")),
        (V2_OF_ONE_DAEMON_OF_SEVERAL, ("17", "/system.slice/gpu1_slurmstepd.scope/job_17")),
        ("0::/user.slice/user-1000.slice/session-2.scope\n", None),
        # An account may make groups of any name, but only below its own.
        ("0::/user.slice/user-1000.slice/user@1000.service/slurmstepd.scope/job_17/step_0\n", None),
        ("4:memory:/user.slice/slurm/uid_1004/job_9/step_0\n", None),
        ("4:memory:/slurm/uid_1004/job_9x/step_0\n", None),
        ("", None),
    ],
)
def test_a_job_is_known_by_its_control_group(text: str, found: tuple[str, str] | None) -> None:
    assert slurm_jobs.parse_cgroups(text) == found


def test_a_job_runs_as_long_as_slurm_has_a_record_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_jobs, "JOBS", tmp_path)
    (tmp_path / "17").write_text(f"{ALICE.uid} 0,2 a1\n")
    (tmp_path / "18").write_text(f"{ALICE.uid}  b2\n")
    assert slurm_jobs.read_job("17") == RunningJob("17", ALICE.uid, gpus=("0", "2"), attempt="a1")
    assert slurm_jobs.read_job("18") == RunningJob("18", ALICE.uid, attempt="b2")
    assert slurm_jobs.read_job("19") is None
    # As an earlier version recorded it
    (tmp_path / "20").write_text(f"{ALICE.uid} 0\n")
    (tmp_path / "21").write_text(f"{ALICE.uid} \n")
    assert slurm_jobs.read_job("20") == RunningJob("20", ALICE.uid, gpus=("0",))
    assert slurm_jobs.read_job("21") == RunningJob("21", ALICE.uid)
    for labels in ({JOB: "17", ATTEMPT: "a1"}, {JOB: "20"}, {JOB: "21", ATTEMPT: ""}):
        slurm_jobs.require_running(labels, ALICE, needs_job=True)
    for labels, account in (
        ({JOB: "19"}, ALICE),
        ({JOB: "17", ATTEMPT: "a1"}, BOB),
        ({JOB: "17", ATTEMPT: "a0"}, ALICE),
        ({JOB: "17"}, ALICE),
    ):
        with pytest.raises(HttpRefusal, match="has ended, and its containers with it"):
            slurm_jobs.require_running(labels, account, needs_job=True)
    # A record that cannot be read ends no container.
    (tmp_path / "17").unlink()
    (tmp_path / "17").mkdir()
    with pytest.raises(OSError, match="directory"):
        slurm_jobs.has_ended({JOB: "17"}, ALICE.uid, needs_job=True)


def test_a_container_from_before_slurm_ends_where_a_job_is_needed() -> None:
    assert slurm_jobs.has_ended({JOB: ""}, ALICE.uid, needs_job=True)
    assert not slurm_jobs.has_ended({JOB: ""}, ALICE.uid, needs_job=False)
    with pytest.raises(HttpRefusal, match="only inside Slurm jobs; this one has no job"):
        slurm_jobs.require_running({}, ALICE, needs_job=True)


@pytest.mark.parametrize(
    ("gpus", "wanted", "chosen"),
    [
        (("1",), ["*"], ["GPU-b"]),
        (("0", "1"), ["*"], ["GPU-a", "GPU-b"]),
        # Inside of the job it is the first one.
        (("1",), ["0"], ["GPU-b"]),
        (("1",), ["GPU-b"], ["GPU-b"]),
        (("1",), [], []),
        ((), [], []),
    ],
)
def test_a_container_gets_the_gpus_of_its_job(
    gpus: tuple[str, ...], wanted: list[str], chosen: list[str]
) -> None:
    assert (
        slurm_jobs.choose_gpus(RunningJob("17", ALICE.uid, gpus=gpus), wanted, GPU_LIST) == chosen
    )


@pytest.mark.parametrize(
    ("gpus", "wanted", "message"),
    [
        ((), ["*"], "srun --gres=gpu:1"),
        (("1",), ["GPU-a"], "only the GPUs of its job"),
        (("1",), ["1"], "the job has GPU-b, not 1"),
    ],
)
def test_a_container_gets_no_other_gpu(
    gpus: tuple[str, ...], wanted: list[str], message: str
) -> None:
    with pytest.raises(HttpRefusal, match=message):
        slurm_jobs.choose_gpus(RunningJob("17", ALICE.uid, gpus=gpus), wanted, GPU_LIST)


def test_the_driver_numbers_device_files_in_an_order_of_its_own(tmp_path: Path) -> None:
    for bus, uuid, minor in (("0000:01:00.0", "GPU-a", 1), ("0000:02:00.0", "GPU-b", 0)):
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "information").write_text(
            f"Model: \t\t Tesla T4\nIRQ:   \t\t 35\nGPU UUID: \t {uuid}\nVideo BIOS: \t ??.??\n"
            f"Bus Location: \t {bus}\nDevice Minor: \t {minor}\n"
        )
    assert slurm_jobs.read_minor_numbers(tmp_path) == {"GPU-a": "1", "GPU-b": "0"}
    assert slurm_jobs.read_minor_numbers(tmp_path / "none") == {}


def test_a_container_of_a_job_has_no_lease() -> None:
    labels = {GPUS: "GPU-a", JOB: "17"}
    assert list_leases([AccountContainer("c", "c", "running", 0.0, ALICE.uid, labels)]) == []


@pytest.mark.parametrize(
    ("files", "memory_bytes", "cpus"),
    [
        (
            {
                "memory/g/memory.limit_in_bytes": "209715200\n",
                "cpuset/g/cpuset.cpus": "1\n",
            },
            209715200,
            1,
        ),
        (
            {"g/memory.max": "209715200\n", "g/cpuset.cpus.effective": "0-3,8\n"},
            209715200,
            5,
        ),
        ({"g/memory.max": "max\n", "g/cpuset.cpus.effective": "0\n"}, ALL_BYTES, 1),
        (
            {
                "memory/g/memory.limit_in_bytes": "9223372036854771712\n",
                "cpuset/g/cpuset.cpus": "2-3\n",
            },
            ALL_BYTES,
            2,
        ),
    ],
)
def test_the_limits_of_a_job_are_those_of_its_control_group(
    files: dict[str, str],
    memory_bytes: int,
    cpus: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cgroup, "ROOT", tmp_path)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cgroup.read_memory_limit("/g") == memory_bytes
    assert cgroup.count_cpus("/g") == cpus


def test_a_control_group_that_is_gone_is_not_taken_for_one_without_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last step of the job has ended meanwhile: runc would make the group again, unlimited."""
    monkeypatch.setattr(cgroup, "ROOT", tmp_path)
    job = RunningJob("7", os.getuid(), "/slurm/uid_1000/job_7")
    with pytest.raises(HttpRefusal) as caught:
        slurm_jobs.read_share(job, 100)
    assert caught.value.status == 409
    with pytest.raises(HttpRefusal, match="its job has just ended"):
        slurm_jobs.prepare_start(job.cgroup)
    assert slurm_jobs.prepare_start("labctl-job7.slice") == {}
    slurm_jobs.require_same_group("labctl-job7.slice", {})


@pytest.mark.parametrize(
    ("existing", "file"),
    [
        ("pids", "pids/slurm/uid_1000/job_7/pids.max"),
        ("slurm/uid_1000/job_7", "slurm/uid_1000/job_7/pids.max"),
    ],
)
def test_all_containers_of_a_job_share_a_limit_of_processes(
    existing: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroup, "ROOT", tmp_path)
    monkeypatch.setattr(slurm_jobs, "JOBS", tmp_path)
    (tmp_path / existing).mkdir(parents=True)
    if existing != "pids":
        (tmp_path / "cgroup.controllers").touch()
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()  # as the kernel makes it
    job = RunningJob("7", os.getuid(), "/slurm/uid_1000/job_7")
    parent = slurm_jobs.set_job_limits(job, AccountShare(1, 1.0, 400), "cgroupfs")
    assert parent == job.cgroup
    assert path.read_text() == "400"


def test_a_control_group_that_ends_meanwhile_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroup, "ROOT", tmp_path)
    monkeypatch.setattr(slurm_jobs, "JOBS", tmp_path)
    group = tmp_path / "slurm" / "job_7"
    group.mkdir(parents=True)
    (tmp_path / "cgroup.controllers").touch()
    write = cgroup._write

    def end_and_write(folder: Path, file: str, value: str) -> None:
        if folder == group.parent:
            group.rmdir()
        write(folder, file, value)

    monkeypatch.setattr(cgroup, "_write", end_and_write)
    job = RunningJob("7", os.getuid(), "/slurm/job_7")
    with pytest.raises(HttpRefusal, match="its job has just ended"):
        slurm_jobs.set_job_limits(job, AccountShare(1, 1.0, 400), "cgroupfs")
    assert not group.exists(), "nothing would limit the containers there"


class JobBed:
    """A broker that needs jobs, with a container of alice in her job 7, which has not started."""

    def __init__(self, served: EngineSocket, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.record = folder / "jobs" / "7"
        root = folder / "cgroup"
        self.groups = {name: root / name / "slurm" / "job_7" for name in cgroup.LIMITING}
        for group in self.groups.values():
            group.mkdir(parents=True)
        (self.groups["memory"] / "memory.limit_in_bytes").write_text("209715200\n")
        (self.groups["cpuset"] / "cpuset.cpus").write_text("0-1\n")
        self.record.parent.mkdir()
        self.record.write_text(f"{ALICE.uid} 0 first\n")
        patch.setattr(slurm_jobs, "JOBS", self.record.parent)
        patch.setattr(cgroup, "ROOT", root)
        self.bed = make_bed(served, folder, patch)
        self.bed.settings = SETTINGS._replace(needs_job=True)
        self.bed.start_broker()
        self.add("c", {JOB: "7", ATTEMPT: "first"}, "created")
        self.answer = served.answers
        self.at_start: Callable[[], object] = lambda: None
        self.start_answer: Answer | None = None
        served.answers = self.intercept

    def add(self, name: str, labels: dict[str, str], state: str = "running") -> None:
        self.bed.engine.containers[name] = {
            "Id": name,
            "Names": [f"/u{ALICE.uid}.{name}"],
            "Name": f"/u{ALICE.uid}.{name}",
            "State": state,
            "Created": 1.0,
            "Labels": {OWNER: str(ALICE.uid), **labels},
            "HostConfig": {"CgroupParent": "/slurm/job_7"},
        }

    def intercept(self, method: str, path: str, body: Any) -> Answer | None:
        if path.endswith("/start"):
            self.at_start()
            if self.start_answer:
                return self.start_answer
        return self.answer(method, path, body)

    def remove_group(self, tree: str) -> None:
        self.groups[tree].rename(self.groups[tree].with_name("ended"))

    def make_group_again(self, tree: str) -> None:
        """As Slurm removes the group with the last step, and runc then makes it without limits."""
        if self.groups[tree].exists():
            self.remove_group(tree)
        self.groups[tree].mkdir()

    def start(self) -> tuple[int, Any]:
        return self.bed.ask(ALICE, "POST", "/containers/c/start")

    @property
    def containers(self) -> set[str]:
        return set(self.bed.engine.containers)


@pytest.fixture
def job_bed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[JobBed]:
    with engine_socket() as served:
        yield JobBed(served, tmp_path, monkeypatch)


def test_a_container_that_starts_in_its_job_stays(job_bed: JobBed) -> None:
    assert job_bed.start()[0] == 200
    job_bed.bed.keeping.run_round()
    assert job_bed.containers == {"c"}


def test_a_container_that_runs_outlives_a_repeated_start_that_fails(job_bed: JobBed) -> None:
    job_bed.add("c", {JOB: "7", ATTEMPT: "first"}, "running")
    job_bed.start_answer = (500, {"message": "the engine restarts"})
    assert job_bed.start()[0] == 500
    assert job_bed.containers == {"c"}


def test_a_container_whose_job_ends_while_it_starts_is_removed(job_bed: JobBed) -> None:
    job_bed.at_start = job_bed.record.unlink
    status, reply = job_bed.start()
    assert status == 409
    assert "job 7 of Slurm has ended" in reply["message"]
    assert job_bed.containers == set()


@pytest.mark.parametrize("tree", cgroup.LIMITING)
def test_a_container_in_a_group_that_runc_made_again_is_removed(job_bed: JobBed, tree: str) -> None:
    """Slurm's last step has ended, the allocation goes on: nothing would limit the container."""
    job_bed.at_start = lambda: job_bed.make_group_again(tree)
    status, reply = job_bed.start()
    assert status == 409
    assert "the last step of the job of Slurm ended" in reply["message"]
    assert job_bed.containers == set()
    assert not job_bed.groups[tree].exists(), "the next container would have no limits there either"


@pytest.mark.parametrize("tree", cgroup.LIMITING)
def test_a_container_does_not_run_where_one_of_the_groups_was_gone(
    job_bed: JobBed, tree: str
) -> None:
    """Slurm removes them one after another: two may still exist."""
    job_bed.remove_group(tree)
    job_bed.at_start = lambda: job_bed.make_group_again(tree)
    assert job_bed.start()[0] == 409
    assert job_bed.bed.engine.containers.get("c", {}).get("State") != "running"


@pytest.mark.parametrize("answer", [(500, {"message": "it failed"}), (0, b"")])
def test_a_container_whose_start_fails_leaves_no_group_without_limits(
    job_bed: JobBed, answer: Answer
) -> None:
    job_bed.at_start = lambda: job_bed.make_group_again("memory")
    job_bed.start_answer = answer
    assert job_bed.start()[0] >= 500
    assert job_bed.containers == set()
    assert not job_bed.groups["memory"].exists()


def test_a_container_whose_job_cannot_be_checked_is_removed(job_bed: JobBed) -> None:
    def spoil() -> None:
        job_bed.record.unlink()
        job_bed.record.mkdir()

    job_bed.at_start = spoil
    with pytest.raises(RemoteDisconnected):
        job_bed.start()
    assert job_bed.containers == set()


def test_a_container_does_not_survive_a_new_start_of_its_job(job_bed: JobBed) -> None:
    job_bed.add("late", {JOB: "7", ATTEMPT: "first"})
    job_bed.record.write_text(f"{ALICE.uid} 0 second\n")
    job_bed.add("new", {JOB: "7", ATTEMPT: "second"})
    assert job_bed.start()[0] == 409
    job_bed.bed.keeping.run_round()
    assert job_bed.containers == {"new"}


def test_containers_from_before_the_switch_to_slurm_end(job_bed: JobBed) -> None:
    job_bed.add("old", {})
    job_bed.bed.keeping.run_round()
    assert job_bed.containers == {"c"}


class NetworkEngine:
    """An engine that has addresses for some networks, and removes those that no container uses.

    `used` networks cannot be removed: the status that says so.
    """

    def __init__(self, used: dict[str, int]) -> None:
        self.used = used
        self.networks = {"labctl-u71003": "71003", "labctl-u71004": "71004"}
        self.networks = {**dict.fromkeys(used, "71009"), **self.networks}
        self.most = len(self.networks)
        self.lock = threading.Lock()

    def answer(self, method: str, path: str, body: Any) -> Answer | None:
        words = urlsplit(path).path.split("/")[2:]
        with self.lock:
            if words[0] != "networks":
                return None
            if words == ["networks"]:
                rows = [{"Id": n, "Labels": {OWNER: uid}} for n, uid in self.networks.items()]
                return 200, rows
            if words == ["networks", "create"]:
                if len(self.networks) == self.most:
                    return 500, {"message": "all predefined address pools have been fully used"}
                self.networks[body["Name"]] = body["Labels"][OWNER]
                return 201, {"Id": body["Name"]}
            if words[1] not in self.networks:
                return 404, {"message": "no such network"}
            if method == "DELETE":
                if words[1] in self.used:
                    return self.used[words[1]], {"message": "the network has active endpoints"}
                del self.networks[words[1]]
                return 204, b""
            return 200, {}


def test_a_network_stays_while_its_account_starts_a_container(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise the engine would not find it (404) when it starts the container."""
    networks, fake = AccountNetworks(), NetworkEngine({"used": 403, "unclear": 500})
    with engine_socket() as served:
        monkeypatch.setenv("DOCKER_HOST", served.host)
        served.answers = fake.answer
        with networks.hold(BOB), networks.hold(ALICE):
            assert set(fake.networks) == {"used", "unclear", "labctl-u71003", "labctl-u71001"}
        with networks.hold(CAROL):
            assert "labctl-u71004" in fake.networks
        assert "labctl-u71003" not in fake.networks
