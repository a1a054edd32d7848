"""A lab on a cluster with Slurm, by the commands that a student types."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from guide_session import trust_machine
from lab_servers import ROOT
from slurm_cluster import Cluster, run_cluster
from sshd_container import wait_for
from terminal import open_terminal
from transcripts import make_session, replay

from labctl.servers.host_keys import ensure_key_pair

pytestmark = pytest.mark.engine

MIB = 1024**2
TRAIN = """
import os, signal, sys, time

def save(*_):
    with open(os.path.join(os.environ["LABCTL_CHECKPOINT_DIR"], "model"), "w") as file:
        file.write("weights")
    sys.exit(int(sys.argv[1]))

signal.signal(signal.SIGTERM, save)
print("training on", os.environ["SLURMD_NODENAME"], os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
time.sleep(float(sys.argv[2]))
save()
"""
LAB = """\
lab: plain
server:
  provider: slurm
  gpu: t4
  slurm:
    login: {{host: 127.0.0.1, port: {port}, user: student, identity: '{key}'}}
    partition: gpu
    qos: student
    time: 20m
    base: /var/scratch/$USER/labs
    modules: [cuda/12.4]
services:
  page: {{port: 18700, command: [sh, -c, 'exec python3 -m http.server 18700 --bind 127.0.0.1']}}
run: python3 train.py 0 0
"""
FIT = """
import torch

model = torch.nn.Linear(100, 100)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(300):
    optimizer.zero_grad()
    model(torch.randn(64, 100)).sum().backward()
    optimizer.step()
"""
COUNT = """
import os, time

path = os.path.join(os.environ["LABCTL_CHECKPOINT_DIR"], "step")
step = int(open(path).read()) if os.path.exists(path) else 0
print("from step", step, "on", os.environ["SLURMD_NODENAME"], flush=True)
while step < 40 or os.environ["SLURMD_NODENAME"] == "n1":
    step += 1
    with open(path + ".new", "w") as file:
        file.write(str(step))
    os.replace(path + ".new", path)
    time.sleep(0.1)
print("done at step", step, flush=True)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with run_cluster(tmp_path_factory.mktemp("keys")) as cluster:
        cluster.sh("mkdir -m 1777 /var/scratch")
        yield cluster


@pytest.fixture(scope="module")
def project(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("home") / "plain"
    directory.mkdir()
    (directory / "lab.yaml").write_text(LAB.format(port=cluster.port, key=cluster.key))
    (directory / "train.py").write_text(TRAIN)
    return directory


GUIDE = ROOT / "docs" / "cluster.md"
PROJECT = ROOT / "tests" / "guide" / "counting"
GUIDE_LAB = """\
server:
  provider: slurm
  gpu: any
  slurm: {login: hpc, partition: gpu, account: ml2026, qos: student, time: 20m}
run: python3 train.py
"""


class Labctl:
    """labctl in a project's directory, in the home of its user."""

    def __init__(self, project: Path) -> None:
        home = str(project.parent)
        environ = {"HOME": home, "PATH": os.environ["PATH"], "LANG": "C.UTF-8"}
        self.options: dict[str, Any] = {"cwd": project, "env": environ}

    def build(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "labctl", *words]

    def __call__(
        self, *words: str, code: int = 0, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        options = {**self.options, "env": {**self.options["env"], **variables}}
        done = subprocess.run(
            self.build(*words), capture_output=True, text=True, timeout=120, **options
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done


@pytest.fixture(scope="module")
def labctl(project: Path) -> Labctl:
    ensure_key_pair(project.parent / ".ssh" / "id_ed25519")
    labctl = Labctl(project)
    labctl("up", "--yes")
    return labctl


def read_run(labctl: Labctl, name: str) -> dict[str, Any]:
    runs = json.loads(labctl("status", "--refresh", "--json").stdout)["runs"]
    return next(run for run in runs if run["id"] == name)


@pytest.mark.long
def test_a_run_prints_its_log_and_its_results_come_home(
    labctl: Labctl, project: Path, cluster: Cluster
) -> None:
    done = labctl("run", "--id", "first")
    assert "training on n1 0" in done.stdout
    labctl("pull", "first")
    assert (project / "runs" / "first" / "checkpoints" / "model").read_text() == "weights"
    run = read_run(labctl, "first")
    assert (run["state"], run["executor"], run["image"]) == ("exited", "slurm", "")
    wait_for(lambda: cluster.list_jobs("plain-first") == ["COMPLETED"])
    refused = labctl("run", "--id", "refused", code=255, LABCTL_GPU="a100")
    assert "Slurm refused run refused" in refused.stderr
    assert "Requested node configuration is not available" in refused.stderr
    assert "training on n1 0" in labctl("run", "--id", "refused").stdout


@pytest.mark.parametrize(
    ("run", "victim", "code"),
    [
        pytest.param("unconfirmed", "$PPID", 0, marks=pytest.mark.long),
        ("unreported", "$(ps -o ppid= -p $PPID)", 255),
    ],
)
def test_a_job_whose_confirmation_is_lost_is_not_submitted_again(
    labctl: Labctl, cluster: Cluster, run: str, victim: str, code: int
) -> None:
    """sbatch submits the job, and before it can say so its caller ends, or the whole agent."""
    lines = f"'#!/bin/sh' '/opt/sbatch \"$@\" >/dev/null' 'kill -9 {victim}'"
    cluster.sh(
        "mv /usr/bin/sbatch /opt/sbatch; "
        f"printf '%s\\n' {lines} >/usr/bin/sbatch; chmod 755 /usr/bin/sbatch"
    )
    labctl("run", "--id", run, code=code)
    cluster.sh("mv /opt/sbatch /usr/bin/sbatch")
    assert "training on n1 0" in labctl("run", "--id", run).stdout
    wait_for(lambda: cluster.list_jobs(f"plain-{run}") == ["COMPLETED"])


@pytest.mark.long
def test_a_run_starts_once_after_the_controller_was_away(labctl: Labctl, cluster: Cluster) -> None:
    cluster.stop_controller()
    refused = labctl("run", "--id", "later", code=75)
    assert "Slurm on the login node does not answer" in refused.stderr
    cluster.start_controller()
    assert "training on n1 0" in labctl("run", "--id", "later").stdout
    wait_for(lambda: cluster.list_jobs("plain-later") == ["COMPLETED"])


def test_a_queued_run_says_what_it_waits_for(labctl: Labctl, project: Path) -> None:
    """The QOS of the course allows one GPU at once."""
    labctl("run", "--detach", "--id", "long", "--", "python3", "train.py", "143", "60")
    labctl("run", "--detach", "--id", "waiting")
    wait_for(lambda: "training" in labctl("logs", "long").stdout)
    reason = "waiting: you already use 1 of 1 GPUs"
    wait_for(lambda: read_run(labctl, "waiting")["told"] == reason)
    assert "queued" in labctl("status").stdout
    (offer,) = json.loads(labctl("offers", "--json").stdout)["offers"]
    assert (offer["type"], offer["free_gpus"], offer["all_gpus"]) == ("gpu", 3, 4)
    line = "echo $LABCTL_RUN_ID with $LOADED on $SLURMD_NODENAME; exit 3"
    # The machine is measured from inside the job, which has one of its four processors.
    measured = json.loads(labctl("top", "--json").stdout)["server"]
    (run,) = measured["runs"]
    assert (run["run"], run["cores"], run["processes"]) == ("long", 1.0, 3)
    assert run["memory_limit_bytes"] == 200 * MIB
    beside = labctl("exec", "long", "--", "sh", "-c", line, code=3)
    assert beside.stdout == "long with cuda/12.4 on n1\n"
    assert "canceled" in labctl("cancel", "long").stdout
    labctl("pull", "long")
    assert (project / "runs" / "long" / "checkpoints" / "model").read_text() == "weights"
    telemetry = (project / "runs" / "long" / "logs" / "telemetry.jsonl").read_text()
    sample = json.loads(telemetry.splitlines()[0])
    assert (sample["attempt"], sample["cores"], sample["memory_limit_bytes"]) == (1, 1.0, 200 * MIB)
    assert "training on n1 0" in labctl("logs", "--follow", "waiting").stdout


def open_url(url: str) -> str:
    with urllib.request.urlopen(url, timeout=20) as reply:
        text: str = reply.read().decode()
    return text


def forward(labctl: Labctl, service: str) -> str:
    """Open a forward in the background and return its URL."""
    reply = json.loads(labctl("forward", service, "--detach", "--json").stdout)
    url: str = reply["forwards"][0]["url"]
    return url


@pytest.mark.long
def test_forwards_lead_to_the_machine_of_the_run(labctl: Labctl, cluster: Cluster) -> None:
    refused = labctl("forward", "page", "--detach", code=4)
    assert "no run of this lab is running on the cluster" in refused.stderr
    labctl("run", "--detach", "--id", "served", "--", "python3", "train.py", "143", "600")
    wait_for(lambda: "training" in labctl("logs", "served").stdout)
    try:
        page = forward(labctl, "page")
        assert "train.py" in open_url(page)
        assert "labctl-service-page" in "".join(cluster.squeue("%j %N", "--steps"))
        # A program that the user started beside the run, and many connections at once
        port = "python3 -m http.server 18701 --bind 127.0.0.1 >/dev/null 2>&1 & sleep 600"
        with subprocess.Popen(
            labctl.build("exec", "served", "--", "sh", "-c", port), **labctl.options
        ) as beside:
            url = forward(labctl, "18701")
            with ThreadPoolExecutor(20) as pool:
                pages = list(pool.map(open_url, [url] * 40))
            assert all("train.py" in text for text in pages)
            beside.terminate()
        labctl("forward", "--stop")
        refused = labctl("serve", "served", code=2)
        assert "the login node of a cluster runs none" in refused.stderr
    finally:
        labctl("cancel", "served")
    wait_for(lambda: cluster.squeue("%j", "--steps") == [])


@pytest.mark.long
def test_attach_opens_a_session_on_the_machine_of_the_run(labctl: Labctl) -> None:
    labctl("run", "--detach", "--id", "seen", "--", "python3", "train.py", "143", "600")
    wait_for(lambda: "training" in labctl("logs", "seen").stdout)
    node = labctl("logs", "seen").stdout.split("training on ")[1].split()[0]
    with open_terminal(labctl.options["cwd"], labctl.options["env"], 80) as terminal:
        terminal.start(" ".join(labctl.build("attach", "seen")))
        terminal.wait_for("training on", 60)
        terminal.press("C-b", "2")  # the window with a shell in the job
        terminal.wait_for("2:shell*", 60)
        terminal.start('echo "here: $SLURMD_NODENAME"')
        terminal.wait_for(f"here: {node}", 60)
        terminal.press("C-b", "d")
        terminal.wait_for("[detached", 60)
    assert read_run(labctl, "seen")["state"] == "running"
    labctl("cancel", "seen")


def answers(url: str) -> bool:
    with contextlib.suppress(OSError):
        return bool(open_url(url))
    return False


@pytest.mark.long
def test_an_open_forward_goes_on_with_the_next_run(labctl: Labctl) -> None:
    words = ("python3", "train.py", "143", "600")
    labctl("run", "--detach", "--id", "before", "--", *words)
    wait_for(lambda: "training" in labctl("logs", "before").stdout)
    page = forward(labctl, "page")
    try:
        assert answers(page)
        labctl("cancel", "before")
        wait_for(lambda: not answers(page))
        labctl("run", "--detach", "--id", "after", "--", *words)
        wait_for(lambda: answers(page))
    finally:
        labctl("forward", "--stop")
        labctl("cancel", "after")


@pytest.mark.long
def test_packages_of_the_lab_are_those_of_its_runs_and_services(
    labctl: Labctl, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheelhouse = os.environ.get("LABCTL_WHEELHOUSE")
    if not wheelhouse:
        pytest.skip("LABCTL_WHEELHOUSE is not set")
    (project / "fit.py").write_text(FIT)
    packages = "torch\nnumpy\nPyYAML\ntensorboard\njupyterlab\njupyter-server>=2.20\nipykernel\n"
    (project / "requirements.txt").write_text(packages)
    file = project / "lab.yaml"
    text = file.read_text()
    file.write_text(f"{text}image: {{requirements: requirements.txt}}\n")
    monkeypatch.setitem(
        labctl.options, "env", {**labctl.options["env"], "LABCTL_WHEELHOUSE": wheelhouse}
    )
    labctl("trust", "--yes")
    program = "import sys, yaml, time; print('using', sys.prefix, flush=True); time.sleep(600)"
    try:
        built = labctl("run", "--detach", "--id", "packages", "--", "python", "-c", program)
        assert "✓ building the environment" in built.stderr
        wait_for(lambda: "using" in labctl("logs", "packages").stdout)
        prefix = "/home/student/labctl/.environments/"
        assert f"using {prefix}" in labctl("logs", "packages").stdout
        page = open_url(forward(labctl, "tensorboard"))
        assert "TensorBoard" in page
        url = forward(labctl, "jupyter")
        base, _, token = url.partition("/lab?token=")
        contents = json.loads(open_url(f"{base}/api/contents?token={token}"))["content"]
        names = [each["name"] for each in contents]
        assert {"code", "runs"} <= set(names)
        with pytest.raises(urllib.error.HTTPError, match="403"):
            open_url(f"{base}/api/contents")
        listed = json.loads(labctl("forward", "--list", "--json").stdout)["forwards"]
        assert url in [each["url"] for each in listed]
        labctl("cancel", "packages")
        labctl("run", "--id", "fit", "--", "python", "fit.py")
        profiled = labctl("profile", "fit").stdout
        assert "aten::addmm" in profiled
        page = profiled.rpartition("page: ")[2].strip()
        assert "<html" in (project / page).read_text()
    finally:
        labctl("forward", "--stop")
        labctl("cancel", "packages")
        file.write_text(text)
        labctl("trust", "--yes")


@pytest.mark.long
def test_a_run_goes_on_from_its_checkpoint_after_its_machine_failed(
    labctl: Labctl, project: Path, cluster: Cluster
) -> None:
    (project / "count.py").write_text(COUNT)
    with subprocess.Popen(
        labctl.build("run", "--id", "counting", "--", "python3", "count.py"),
        stdout=subprocess.PIPE,
        text=True,
        **labctl.options,
    ) as following:
        step = "/home/student/labctl/plain/runs/counting/checkpoints/step"
        wait_for(lambda: int(cluster.sh(f"cat {step} 2>/dev/null || echo 0")) > 5)
        (job,) = cluster.squeue("%i")
        cluster.kill_node("n1")
        wait_for(lambda: cluster.squeue("%T") == ["PENDING"])
        # Slurm waits two minutes before it starts a job again.
        cluster.sh(f"scontrol update jobid={job} StartTime=now")
        wait_for(lambda: cluster.squeue("%T %N") in (["RUNNING n2"], []))
        output, _ = following.communicate(timeout=120)
    cluster.sh("cluster start-node n1")
    starts = [line.split()[2:] for line in output.splitlines() if line.startswith("from step")]
    assert [start[2] for start in starts] == ["n1", "n2"]
    assert int(starts[1][0]) > 5
    assert f"Slurm started job {job} again, on n2" in output
    assert "done at step" in output
    assert following.returncode == 0
    assert read_run(labctl, "counting")["exit_code"] == 0


@pytest.mark.long
def test_the_time_limit_of_a_job_is_a_pause_for_a_run_that_saves_checkpoints(
    labctl: Labctl, project: Path, cluster: Cluster
) -> None:
    """One run saves a checkpoint, one ends without, and one does not listen to SIGTERM."""
    (project / "count.py").write_text(COUNT)
    deaf = "trap '' TERM; while :; do sleep 1; done"
    for name, words in (
        ("saving", ["python3", "count.py"]),
        ("polite", ["sleep", "300"]),
        ("deaf", ["sh", "-c", deaf]),
    ):
        labctl("run", "--detach", "--id", name, "--", *words, LABCTL_GPU="none")
    wait_for(lambda: cluster.squeue("%T") == ["RUNNING"] * 3)
    step = "/home/student/labctl/plain/runs/saving/checkpoints/step"
    wait_for(lambda: int(cluster.sh(f"cat {step} 2>/dev/null || echo 0")) > 5)
    for job in cluster.squeue("%i"):
        cluster.sh(f"scontrol update jobid={job} TimeLimit=1")
    wait_for(lambda: cluster.squeue("%T") == ["PENDING"], timeout_s=150)
    assert read_run(labctl, "saving")["told"] == "waiting: Slurm starts it again in a moment"
    stopped = "Slurm stopped it before the time limit of its job, and it had saved no checkpoint"
    assert read_run(labctl, "polite")["told"] == f"{stopped} (exit code 143)"
    assert read_run(labctl, "deaf")["told"] == "it reached the time limit of its job"
    assert "reached the time limit of its job" in labctl("explain", "deaf").stdout
    (job,) = cluster.squeue("%i")
    cluster.sh(f"scontrol update jobid={job} StartTime=now TimeLimit=20 ReqNodeList=n2")
    log = labctl("logs", "--follow", "saving").stdout
    starts = [line.split()[2] for line in log.splitlines() if line.startswith("from step")]
    assert len(starts) == 2
    assert int(starts[1]) > 5
    assert f"job {job} is near its time limit; it saved a checkpoint" in log
    assert read_run(labctl, "saving")["exit_code"] == 0


@pytest.mark.long
def test_a_run_that_must_make_room_saves_a_checkpoint_and_goes_on(
    labctl: Labctl, project: Path, cluster: Cluster
) -> None:
    """A job of a partition with a higher priority takes all processors of the run's machine."""
    (project / "count.py").write_text(COUNT)
    labctl("run", "--detach", "--id", "evicted", "--", "python3", "count.py")
    step = "/home/student/labctl/plain/runs/evicted/checkpoints/step"
    wait_for(lambda: int(cluster.sh(f"cat {step} 2>/dev/null || echo 0")) > 5)
    (job,) = cluster.squeue("%i")
    urgent = "sbatch -p urgent --chdir=/tmp -w n1 -c 4 --mem=100 --wrap 'sleep 5'"
    cluster.sh(urgent, user="ann")
    wait_for(lambda: cluster.squeue("%T", "-j", job) == ["PENDING"], timeout_s=90)
    wait_for(lambda: cluster.squeue("%i") == [job], timeout_s=60)
    cluster.sh(f"scontrol update jobid={job} StartTime=now ReqNodeList=n2")
    log = labctl("logs", "--follow", "evicted").stdout
    starts = [line.split()[2] for line in log.splitlines() if line.startswith("from step")]
    assert len(starts) == 2
    assert int(starts[1]) > 5
    assert f"Slurm started job {job} again, on n2" in log
    assert read_run(labctl, "evicted")["exit_code"] == 0


@pytest.mark.long
def test_the_guide_shows_what_labctl_prints_on_a_cluster(cluster: Cluster, tmp_path: Path) -> None:
    session = make_session(tmp_path, PROJECT, {})
    ssh_dir = Path(session.environ["HOME"]) / ".ssh"
    trust_machine(session, tmp_path, cluster.endpoint())
    (ssh_dir / "config").write_text(
        f"Host hpc\n  HostName 127.0.0.1\n  Port {cluster.port}\n  User student\n"
        f"  IdentityFile {cluster.key}\n"
    )
    (session.directory / "lab.yaml").write_text(GUIDE_LAB)
    try:
        assert "\n".join(replay(GUIDE, "cluster", session)) == ""
    finally:
        session.run("labctl down --yes --discard")


@pytest.mark.long
def test_down_cancels_the_jobs_and_gives_the_login_node_back(
    labctl: Labctl, project: Path, cluster: Cluster
) -> None:
    labctl("run", "--id", "failing", "--", "sh", "-c", "exit 7", code=7)
    labctl("run", "--detach", "--id", "last", "--", "python3", "train.py", "143", "60")
    wait_for(lambda: "training" in labctl("logs", "last").stdout)
    labctl("down", "--yes")
    assert (project / "runs" / "last" / "checkpoints" / "model").read_text() == "weights"
    assert cluster.squeue() == []
    own = {".bash_logout", ".bashrc", ".cache", ".profile", ".ssh"}
    # Jupyter and podman write here, and labctl writes nothing.
    others = {".config", ".ipython", ".jupyter", ".local"}
    found = set(cluster.sh("ls -A /home/student", user="student").split())
    assert found <= own | others
    for directory in sorted(found & others):
        search = f"find /home/student/{directory} -iname '*labctl*'"
        assert cluster.sh(search, user="student") == ""
    assert cluster.sh("ls -A /var/scratch/student") == ""
