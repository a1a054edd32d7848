"""A job on a Slurm cluster, from the command to its start: `sbatch` over ssh, and `labctl run`."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

from benchmarks.lab_server import run_labctl
from benchmarks.measure import Comparison, Row, environment
from benchmarks.settings import Settings

ROOT = Path(__file__).parents[1]
# The cluster in a container is the one that the tests use.
sys.path[:0] = [str(ROOT / "tests" / "e2e"), str(ROOT / "tests")]

from slurm_cluster import Cluster, run_cluster  # type: ignore[import-not-found]  # noqa: E402

TARGET = 1.5
START_LIMIT_S = 60
LAB = """\
lab: jobs
server:
  provider: slurm
  slurm:
    login: {{host: 127.0.0.1, port: {port}, user: student, identity: '{key}'}}
    partition: gpu
    account: ml2026
    qos: student
    time: 20m
run: 'true'
"""


def compare(settings: Settings) -> Generator[Comparison]:
    """Compare the time from the command to the first line of the job's program."""
    home = settings.home / "slurm"
    root = home / "jobs"
    root.mkdir(parents=True)
    with run_cluster(home) as cluster:
        (root / "lab.yaml").write_text(LAB.format(port=cluster.port, key=cluster.key))
        env = environment(home)
        run_labctl(root, env, "up", "--yes")
        ssh = _build_ssh(home, cluster)

        def submit(number: int) -> None:
            options = "--parsable --partition=gpu --account=ml2026 --qos=student --time=20"
            line = f"sbatch {options} --wrap {shlex.quote(_mark(f'sbatch-{number}'))}"
            subprocess.run([*ssh, line], check=True, capture_output=True)
            _wait_for_start(cluster, f"sbatch-{number}")

        def run(number: int) -> None:
            words = ("run", "--detach", "--no-push", "--id", f"run-{number}")
            run_labctl(root, env, *words, "--", "sh", "-c", _mark(f"run-{number}"))
            _wait_for_start(cluster, f"run-{number}")

        rows = [Row("ssh HOST sbatch", submit), Row("labctl run --detach", run, TARGET)]
        # The machines are free again before the next turn.
        yield Comparison("a job from its submission to its start", rows, settings.sizes.few, 3.0)
        run_labctl(root, env, "down", "--yes", "--discard")


def _build_ssh(home: Path, cluster: Cluster) -> tuple[str, ...]:
    """Return ssh as a person uses it: defaults, a known host, no shared connection."""
    return (
        *("ssh", "-F", "none", "-o", "BatchMode=yes", "-o", "IdentitiesOnly=yes"),
        *("-o", "StrictHostKeyChecking=accept-new", "-o", f"UserKnownHostsFile={home}/known"),
        *("-i", str(cluster.key), "-p", str(cluster.port), "student@127.0.0.1"),
    )


def _mark(name: str) -> str:
    """Return the job's program: a file that says that it runs. The machines share /home."""
    return f"touch /home/student/begun-{name}"


def _wait_for_start(cluster: Cluster, name: str) -> None:
    """Wait on the cluster for the file, with one look every 10 ms."""
    looks = START_LIMIT_S * 100
    line = (
        f"for i in $(seq {looks}); do [ -e /home/student/begun-{name} ] && exit; sleep 0.01; done"
    )
    cluster.sh(f"{line}; exit 1")
