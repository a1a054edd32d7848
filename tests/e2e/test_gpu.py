"""What `gpu:` in lab.yaml does to a run, on a server with stand-in GPUs and on one without."""

from __future__ import annotations

import json

import pytest
from lab_directory import UNTIL_GO, LabDirectory
from lab_servers import wait_for

from labctl.agent.host.gpu_access import EVERY_S, FIRST_S, STATE
from labctl.insight.telemetry import TELEMETRY_FILE, read_samples

pytest_plugins = ["lab_fixture"]
pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    "need",
    [
        "auto",
        pytest.param("any", marks=pytest.mark.long),
        pytest.param("T4", marks=pytest.mark.long),
        "T4:2",
    ],
)
def test_a_run_sees_the_gpus(gpu_lab: LabDirectory, need: str) -> None:
    run = "gpu-" + need.lower().replace(":", "-")
    with gpu_lab.gpu(need):
        done = gpu_lab.labctl("run", "--id", run, "--", "nvidia-smi", "-L")
    assert done.stdout.count("Tesla T4 (UUID: GPU-") == 2
    (asked,) = gpu_lab.inspected(run)["HostConfig"]["DeviceRequests"]
    assert asked["Count"] == -1
    assert asked["Capabilities"] == [["gpu"]]


def test_a_run_that_wants_none_has_none(gpu_lab: LabDirectory) -> None:
    with gpu_lab.gpu("none"):
        gpu_lab.labctl("run", "--id", "gpu-none", "--", "nvidia-smi", code=127)
    assert not gpu_lab.inspected("gpu-none")["HostConfig"]["DeviceRequests"]


def test_a_run_can_use_a_part_of_the_gpus(gpu_lab: LabDirectory) -> None:
    one = gpu_lab.labctl("run", "--gpus", "1", "--", "nvidia-smi", "-L").stdout
    assert one.count("Tesla T4 (UUID: GPU-") == 1
    done = gpu_lab.labctl("run", "--gpus", "3", "--", "true", code=255)
    assert "--gpus 3 is more than the server has" in done.stderr
    assert "next: labctl run --gpus 2" in done.stderr
    # torchrun starts a Python program on each: there is none in this image, but its command is.
    two = ("run", "--detach", "--gpus", "2", "--id", "gpu-ranks", "--", "python3", "train.py")
    assert "--nproc-per-node=2 " in gpu_lab.labctl(*two).stderr


def refused(lab: LabDirectory, need: str) -> str:
    """What is said; nothing was pushed and no run directory made."""
    with lab.holding("unsent.txt", "unsent\n"), lab.gpu(need):
        said = lab.labctl("run", "--id", "gpu-refused", "--", "true", code=255).stderr
    assert "gpu-refused" not in lab.student(f"ls -a {lab.place('')}").split()
    code = f"/home/student/labctl/{lab.name}/code"
    assert "unsent.txt" not in lab.student(f"ls -a {code}").split()
    return said


@pytest.mark.parametrize("need", ["any", "H100"])
def test_without_a_gpu_what_needs_one_is_refused(lab: LabDirectory, need: str) -> None:
    said = refused(lab, need)
    assert "GPU" in said
    assert "next:" in said


def test_up_does_not_suggest_another_container_of_this_machine(lab: LabDirectory) -> None:
    refused = lab.labctl("up", "--gpu", "any", code=3).stderr
    assert "this lab needs a GPU, and the server has none" in refused
    assert refused.endswith("next: labctl up\n        (uses the server as it is)\n")


@pytest.mark.parametrize("need", ["H100", "T4:3", ">=40GB"])
def test_another_gpu_than_there_is_is_refused(gpu_lab: LabDirectory, need: str) -> None:
    assert "T4" in refused(gpu_lab, need)


def test_auto_without_a_gpu_runs_on_the_cpu_as_up_has_said(lab: LabDirectory) -> None:
    done = lab.run("echo on the cpu", "--id", "gpu-auto")
    assert done.stdout == "on the cpu\n"
    assert "No GPU" not in done.stderr
    assert not lab.inspected("gpu-auto")["HostConfig"]["DeviceRequests"]


CARD = "GPU-5b1d6f0e-0000-4000-8000-000000000000"


def test_what_the_gpus_do_is_kept_with_a_run_and_shown_live(gpu_lab: LabDirectory) -> None:
    gpu_lab.labctl("run", "--detach", "--id", "gauged", "--", "sh", "-c", f"sleep 600 & {UNTIL_GO}")
    file = f"{gpu_lab.place('gauged')}/logs/{TELEMETRY_FILE}"
    wait_for(lambda: gpu_lab.student(f"cat {file}", check=False).endswith("}\n"))
    (pid,) = gpu_lab.sh("pgrep -f '^sleep 600$'").split()
    gpu_lab.sh(f"echo '{CARD}, {pid}, 1480' > /tmp/gpu-processes")
    try:
        now = gpu_lab.json("top")["server"]
        drawn = gpu_lab.labctl("top", "--once").stdout
    finally:
        gpu_lab.sh("rm /tmp/gpu-processes")
        gpu_lab.let_go("gauged")
    assert [(one["index"], one["use_percent"], one["throttle"]) for one in now["gpus"]] == [
        ("0", 37.0, ["thermal"]),
        ("1", 0.0, []),
    ]
    (run,) = [one for one in now["runs"] if one["run"] == "gauged"]
    assert (run["person"], run["lab"], len(run["gpus"])) == ("student", gpu_lab.name, 2)
    assert run["cores"] == 1.5
    assert 0 <= 96_000_000 - run["memory_limit_bytes"] < 65536  # whole pages
    assert 0 < run["memory_bytes"] < 96_000_000
    (process,) = [one for one in now["processes"] if one["gpus"]]
    assert (process["pid"], process["run"], process["command"]) == (int(pid), "gauged", "sleep 600")
    assert process["gpus"] == [{"uuid": CARD, "memory_bytes": 1480 * 1024**2}]
    for said in ("gauged", "T4", "37%", "1.4 GiB", "sleep 600", "heat"):
        assert said in drawn
    gpu_lab.labctl("logs", "-f", "gauged")
    gpu_lab.labctl("pull", "gauged")
    samples = read_samples(gpu_lab.root / "runs" / "gauged" / "logs" / TELEMETRY_FILE)
    first = samples[0]
    assert first.attempt == 1
    assert first.shm_limit_bytes is not None
    assert 0 <= first.shm_limit_bytes - 32_000_000 < 65536
    assert first.processes is not None
    assert first.processes >= 2
    assert [gpu.power_w for gpu in first.gpus] == [41.52, 9.87]
    assert first.gpus[0].energy_j is None


def take_gpu_away(lab: LabDirectory, run: str) -> None:
    """What a reload of systemd does to a container: its device rules no longer name the GPU.

    With cgroup v2 the rules are a program in the kernel; the nodes' rights have the same effect.
    """
    container = lab.inspected(run)
    cgroup = lab.sh(
        f"find /sys/fs/cgroup/devices -type d -name {container['Id']} 2>/dev/null", check=False
    ).strip()
    if cgroup:
        lab.sh(f"echo 'c 1:7 rwm' > {cgroup}/devices.deny")
    else:
        pid = container["State"]["Pid"]
        lab.sh(f"nsenter --target {pid} --mount -- sh -c 'chmod 0 /dev/nvidia*'")


@pytest.mark.long
def test_a_container_that_loses_its_gpu_is_named_everywhere(gpu_lab: LabDirectory) -> None:
    gpu_lab.labctl("run", "--detach", "--id", "bereft", "--", "sh", "-c", UNTIL_GO)
    file = f"{gpu_lab.place('bereft')}/.labctl/{STATE}"

    def access() -> dict[str, float | None]:
        return json.loads(gpu_lab.student(f"cat {file} 2>/dev/null", check=False) or "{}")

    try:
        wait_for(lambda: access().get("opened_at"), FIRST_S + 60)
        assert gpu_lab.json("status", "--refresh")["runs"][0]["gpu_lost_at"] is None
        take_gpu_away(gpu_lab, "bereft")
        seen = gpu_lab.labctl("exec", "bereft", "--", "nvidia-smi", "-L", code=255)
        assert "Failed to initialize NVML: Unknown Error" in seen.stdout
        wait_for(lambda: access().get("lost_at"), EVERY_S + 60)
        status = gpu_lab.labctl("status", "--refresh").stdout
        explained = gpu_lab.json("explain", "bereft")
    finally:
        gpu_lab.let_go("bereft")
    assert "bereft has lost its GPU\n  next: labctl explain bereft" in status
    (finding,) = [one for one in explained["findings"] if one["rule"] == "gpu-lost"]
    assert finding["next"].startswith("labctl cancel bereft && labctl run")
    followed = gpu_lab.labctl("logs", "-f", "bereft")
    assert "the container of run bereft has lost access to its GPU" in followed.stdout
    assert "its container had lost access to its GPU" in followed.stderr
    run = gpu_lab.seen("bereft")
    assert run["exit_code"] == 0
    assert run["gpu_lost_at"] == access()["lost_at"]
