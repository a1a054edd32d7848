"""The accounting of a class in a real Slurm: made, changed and taken away."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from slurm_cluster import Cluster, run_cluster
from sshd_container import wait_for

from labctl.commands.slurm_accounting import (
    ClassAccounting,
    ClassLimits,
    build_changes,
    build_query,
    class_account,
    parse_accounting,
)

pytestmark = pytest.mark.engine

ACCOUNT = class_account("ml")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with run_cluster(tmp_path_factory.mktemp("keys")) as cluster:
        yield cluster


def read(cluster: Cluster) -> ClassAccounting:
    return parse_accounting(cluster.sh(build_query(ACCOUNT)))


def apply(
    cluster: Cluster, limits: ClassLimits, names: Sequence[str], ended: Sequence[str] = ()
) -> int:
    """How many changes it took; afterwards nothing is left to change."""
    changes = build_changes(ACCOUNT, limits, names, read(cluster), ended)
    if changes:
        cluster.sh(" && ".join(changes))
    assert build_changes(ACCOUNT, limits, names, read(cluster), ended) == []
    return len(changes)


def test_a_class_is_made_once_and_changed_where_it_differs(cluster: Cluster) -> None:
    limits = ClassLimits(gpus=1, gpu_minutes=1200, wall_s=26 * 3600)
    assert apply(cluster, limits, ["ann", "student"]) == 3
    assert apply(cluster, limits, ["ann", "student"]) == 0
    # No limit at all, then a new one.
    assert apply(cluster, ClassLimits(gpus=2), ["ann", "student"]) == 2
    assert apply(cluster, limits, ["ann", "student"]) == 2
    both = "cd /tmp; sbatch --account=course-ml --qos=course-ml --gres=gpu:2 --wrap id 2>&1 || true"
    assert "QOSMaxGRESPerUser" in cluster.sh(both, user="ann")
    # One of the four GPUs has a quarter of the eight processors.
    cpus = both.replace("--gres=gpu:2", "--cpus-per-task=3")
    assert "QOSMaxCpuPerUserLimit" in cluster.sh(cpus, user="ann")


@pytest.mark.long
def test_an_ended_account_runs_nothing_until_its_student_returns(cluster: Cluster) -> None:
    limits, both = ClassLimits(gpu_minutes=60), ["ann", "student"]
    apply(cluster, limits, both)
    submit = "cd /tmp; sbatch --account=course-ml --qos=course-ml --gres=gpu:1 --wrap 'sleep 600'"
    cluster.sh(f"{submit}; {submit}", user="ann")
    wait_for(lambda: sorted(cluster.squeue("%t")) == ["PD", "R"])
    assert apply(cluster, limits, both, ended=["ann"]) == 1
    assert cluster.squeue() == []
    assert "AssocGrpSubmitJobsLimit" in cluster.sh(f"{submit} 2>&1 || true", user="ann")
    assert apply(cluster, limits, both) == 1
    assert "Submitted" in cluster.sh(submit, user="ann")
    cluster.sh("scancel -u ann")
    wait_for(lambda: cluster.squeue() == [])


@pytest.mark.long
def test_a_user_with_jobs_leaves_the_class(cluster: Cluster) -> None:
    limits = ClassLimits(gpu_minutes=60)
    apply(cluster, limits, ["ann", "student"])
    words = "sbatch --account=course-ml --qos=course-ml --gres=gpu:1 --wrap 'sleep 600'"
    cluster.sh(f"cd /tmp; {words}; {words}", user="ann")
    wait_for(lambda: sorted(cluster.squeue("%t")) == ["PD", "R"])
    assert apply(cluster, limits, ["student"]) == 2
    assert cluster.squeue() == []
    assert [user.name for user in read(cluster).users or ()] == ["student"]
    # In the account of another course, the user is as before.
    assert "ann" in cluster.sh("sacctmgr -nP show assoc account=ml2026 format=User")
