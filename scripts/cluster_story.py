"""Trains on two servers and on a Slurm cluster, and loses a machine of each in the middle.

Each command is what a person would type. The last line of output is a JSON object with the
results. Everything, including HOME, is in a temporary directory that is removed at the end.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
# The cluster in a container is the one that the tests use.
sys.path[:0] = [str(ROOT / "tests" / "e2e"), str(ROOT / "tests")]

from slurm_cluster import Cluster, run_cluster  # noqa: E402

LABCTL = str(Path(sys.executable).with_name("labctl"))
EPOCHS = 16
# A training that needs nothing but Python, since the machines of the cluster have no PyTorch: a
# logistic regression of points on both sides of a line, by stochastic gradient descent.
TRAIN = """\
import json, math, os, random, time
from pathlib import Path

def score(weights, point):
    return weights[0] * point[0] + weights[1] * point[1] + weights[2]

def make_points(seed, count):
    generator = random.Random(seed)
    points = [(generator.uniform(-1, 1), generator.uniform(-1, 1)) for _ in range(count)]
    return [(point, float(point[0] + 2 * point[1] > 0.3)) for point in points]

saved = Path(os.environ["LABCTL_CHECKPOINT_DIR"], "model.json")
model = json.loads(saved.read_text()) if saved.exists() else {"epoch": 0, "weights": [0.0] * 3}
weights = model["weights"]
print("from epoch", model["epoch"], "on", os.environ["SLURMD_NODENAME"], flush=True)
training, test = make_points(0, 2000), make_points(1, 1000)
while model["epoch"] < 100:
    random.Random(model["epoch"]).shuffle(training)
    for point, label in training:
        error = label - 1 / (1 + math.exp(-score(weights, point)))
        for i, value in enumerate((*point, 1.0)):
            weights[i] += 0.05 * error * value
    model["epoch"] += 1
    saved.with_suffix(".new").write_text(json.dumps(model))
    saved.with_suffix(".new").replace(saved)
    time.sleep(0.3)
correct = sum((score(weights, point) > 0) == (label > 0) for point, label in test)
print("test accuracy", correct / len(test), "on", os.environ["SLURMD_NODENAME"], flush=True)
"""
# A job that Slurm started twice keeps its number.
JOB_IDS = "sacct -a -n -X -D -S 2000-01-01 --format=JobID"
CLUSTER_LAB = """\
lab: regression
server:
  provider: slurm
  gpu: t4
  slurm:
    login: {{host: 127.0.0.1, port: {port}, user: student, identity: '{key}'}}
    partition: gpu
    time: 20m
run: python3 train.py
"""


def announce(text: str) -> None:
    print(f"\n=== {text} ===", flush=True)


def labctl(*words: str, cwd: Path) -> str:
    """Run a command, show its output and return it; end the story if it fails."""
    print(f"\n$ labctl {' '.join(words)}", flush=True)
    done = subprocess.run([LABCTL, *words], cwd=cwd, text=True, stdout=subprocess.PIPE, check=False)
    print(done.stdout, end="", flush=True)
    if done.returncode != 0:
        raise SystemExit(f"labctl {' '.join(words)} exited with code {done.returncode}")
    return done.stdout


class Following:
    """A `labctl` that goes on while other things happen; it shows what it prints."""

    def __init__(self, *words: str, cwd: Path) -> None:
        print(f"\n$ labctl {' '.join(words)} &", flush=True)
        self.output = ""
        self._process = subprocess.Popen(
            [LABCTL, *words],
            cwd=cwd,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            print(line, end="", flush=True)
            self.output += line

    def wait_for(self, pattern: str, timeout_s: float = 600.0) -> None:
        """Wait until the output matches; end the story if the command ends before."""
        wait_until(
            lambda: re.search(pattern, self.output) is not None or self._process.poll() is not None,
            timeout_s,
        )
        if not re.search(pattern, self.output):
            raise SystemExit(f"labctl ended without {pattern!r}")

    def end(self, timeout_s: float = 600.0) -> int:
        code = self._process.wait(timeout_s)
        self._reader.join()
        return code


def wait_until(is_over: Callable[[], bool], timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not is_over():
        if time.monotonic() > deadline_s:
            raise SystemExit("nothing happened in time")
        time.sleep(0.5)


def train_on_two_servers(home: Path) -> dict[str, object]:
    """Train with torchrun on two servers, remove one of them, and let the run resume."""
    announce("Two servers: data parallelism with torchrun")
    labctl("init", "pair", "--template", "ddp", cwd=home)
    lab = home / "pair"
    text = (lab / "lab.yaml").read_text()
    text = text.replace("gpu: auto", "gpu: auto\n  count: 2").replace(
        "per_server: 2", "per_server: 1"
    )
    (lab / "lab.yaml").write_text(text)
    try:
        labctl("up", "--yes", cwd=lab)
        command = ("python", "train.py", "--epochs", str(EPOCHS))
        run = Following("run", "--recover", "--id", "night", "--", *command, cwd=lab)
        run.wait_for(r"step 100/")
        status = json.loads(labctl("status", "--json", cwd=lab))
        lost = status["servers"][0]["id"]
        announce(f"The second server, {lost}, is gone")
        subprocess.run(["docker", "rm", "-f", "-v", lost], check=True, stdout=subprocess.DEVNULL)
        code = run.end()
        resumed = re.search(r"resuming after step (\d+)", run.output)
        labctl("status", cwd=lab)
        labctl("pull", cwd=lab)
        accuracy = re.findall(r"test accuracy ([\d.]+)", run.output)[-1]
        return {
            "gang_exit": code,
            "gang_attempts": run.output.count("starting again (attempt"),
            "gang_resumed_after_step": int(resumed[1]) if resumed else 0,
            "gang_accuracy": float(accuracy),
        }
    finally:
        labctl("down", "--yes", cwd=lab)


def train_on_slurm(home: Path, cluster: Cluster) -> dict[str, object]:
    """Run a job on a cluster, kill the machine that it is on, and let Slurm start it elsewhere."""
    announce("A cluster: the same commands, each run is a job of Slurm")
    lab = home / "regression"
    lab.mkdir()
    (lab / "lab.yaml").write_text(CLUSTER_LAB.format(port=cluster.port, key=cluster.key))
    (lab / "train.py").write_text(TRAIN)
    try:
        labctl("up", "--yes", cwd=lab)
        labctl("offers", cwd=lab)
        run = Following("run", "--id", "night", cwd=lab)
        run.wait_for(r"from epoch 0 on")
        saved = "/home/student/labctl/regression/runs/night/checkpoints/model.json"
        no_model = '{"epoch": 0}'

        def count_epochs() -> int:
            model = json.loads(cluster.sh(f"cat {saved} 2>/dev/null || echo '{no_model}'"))
            return int(model["epoch"])

        wait_until(lambda: count_epochs() > 20, 120.0)
        (job,) = cluster.squeue("%i")
        (node,) = cluster.squeue("%N")
        announce(f"The machine {node} is gone")
        cluster.kill_node(node)
        # Nothing that ran on it may go on.
        cluster.sh("pkill -9 slurmstepd; pkill -9 -f '[t]rain.py'; true")
        wait_until(lambda: cluster.squeue("%T") == ["PENDING"], 300.0)
        labctl("status", "--refresh", cwd=lab)
        # Slurm waits two minutes before it starts a job again: this spares the time.
        cluster.sh(f"scontrol update jobid={job} StartTime=now")
        code = run.end()
        starts = re.findall(r"from epoch (\d+) on (\w+)", run.output)
        accuracy = re.findall(r"test accuracy ([\d.]+)", run.output)[-1]
        labctl("pull", cwd=lab)
        return {
            "slurm_exit": code,
            "slurm_jobs": len(set(cluster.sh(JOB_IDS).split())),
            "slurm_machines": [machine for _, machine in starts],
            "slurm_resumed_after_epoch": int(starts[-1][0]),
            "slurm_accuracy": float(accuracy),
        }
    finally:
        labctl("down", "--yes", cwd=lab)


def is_as_expected(results: dict[str, object]) -> bool:
    machines = results["slurm_machines"]
    return (
        (results["gang_exit"], results["slurm_exit"]) == (0, 0)
        and (results["gang_attempts"], results["slurm_jobs"]) == (1, 1)
        and isinstance(machines, list)
        and len(set(machines)) == 2
        and int(str(results["gang_resumed_after_step"])) >= 20
        and int(str(results["slurm_resumed_after_epoch"])) >= 20
        and float(str(results["slurm_accuracy"])) > 0.95
    )


def main() -> int:
    started_s = time.monotonic()
    home = Path(tempfile.mkdtemp(prefix="labctl-demo-"))
    for name in [n for n in os.environ if n.startswith("XDG_") or n == "LABCTL_STATE_DIR"]:
        del os.environ[name]
    os.environ["HOME"] = str(home)
    try:
        results = train_on_two_servers(home)
        keys = home / "cluster"
        keys.mkdir()
        with run_cluster(keys) as cluster:
            results |= train_on_slurm(home, cluster)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    is_passed = is_as_expected(results)
    results["seconds"] = round(time.monotonic() - started_s, 1)
    results["passed"] = is_passed
    print(json.dumps(results))
    return 0 if is_passed else 1


if __name__ == "__main__":
    sys.exit(main())
