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
from labctl.commands.slurm_reservations import build_changes as build_reservation_changes
from labctl.commands.slurm_reservations import build_query as build_reservation_query
from labctl.commands.slurm_reservations import build_wanted, parse_reservations

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


def reserve(cluster: Cluster, hours: Sequence[tuple[float, float]]) -> int:
    """How many changes the class hours took; afterwards nothing is left to change."""
    counts = []
    for _ in range(2):
        now = float(cluster.sh("date +%s"))
        present = parse_reservations(cluster.sh(build_reservation_query()), ACCOUNT)
        wanted = build_wanted(ACCOUNT, hours, now)
        changes = build_reservation_changes(ACCOUNT, wanted, present, now)
        counts.append(len(changes))
        if changes:
            cluster.sh(" && ".join(changes))
    assert counts[1] == 0
    return counts[0]


def test_class_hours_are_reserved_once(cluster: Cluster) -> None:
    apply(cluster, ClassLimits(), ["ann"])
    now = float(cluster.sh("date +%s"))
    both = [(now - 60, now + 600), (now + 7200, now + 9000)]
    assert reserve(cluster, both) == 2
    assert reserve(cluster, [(now - 60, now + 900), both[1]]) == 1
    assert reserve(cluster, []) == 2
    assert "No reservations" in cluster.sh("scontrol show reservation")


@pytest.mark.long
def test_class_hours_that_staff_edited_are_put_back(cluster: Cluster) -> None:
    apply(cluster, ClassLimits(), ["ann"])
    now = float(cluster.sh("date +%s"))
    edits = (
        "Accounts=ml2026",
        "Users=ann",
        "Flags-=FLEX",
        f"StartTime=uts{now + 6 * 7200 - 1800:.0f}",
        f"StartTime=uts{now + 7 * 7200 + 1800:.0f}",
    )
    hours = [(now - 60, now + 600)]
    hours += [(now + at * 7200, now + at * 7200 + 3600) for at in range(3, 3 + len(edits))]
    assert reserve(cluster, hours) == len(hours)
    present = parse_reservations(cluster.sh(build_reservation_query()), ACCOUNT)
    names = [each.name for each in sorted(present, key=lambda each: each.begins)]
    for name, edit in zip(names[1:], edits, strict=True):
        cluster.sh(f"scontrol update ReservationName={name} {edit}")
    assert reserve(cluster, hours) == len(edits)
    # Slurm deletes none in which a job runs.
    job = cluster.sh(
        "cd /tmp; sbatch --parsable --account=course-ml --qos=course-ml --wrap 'sleep 600'",
        user="ann",
    ).strip()
    wait_for(lambda: cluster.squeue("%t", f"-j {job}") == ["R"])
    cluster.sh(f"scontrol update ReservationName={names[0]} Flags-=FLEX Users=ann")
    assert reserve(cluster, hours) == 1
    assert cluster.squeue("%t", f"-j {job}") == ["R"]
    cluster.sh("scancel -u ann")
    wait_for(lambda: cluster.squeue() == [])
    assert reserve(cluster, []) == len(hours)


@pytest.mark.long
def test_class_hours_keep_the_machines_for_the_class(cluster: Cluster) -> None:
    """Its jobs need no option, also those that begin before; long ones of others do not begin."""
    apply(cluster, ClassLimits(gpus=2), ["ann"])
    now = float(cluster.sh("date +%s"))
    later = (now + 600, now + 4200)
    assert reserve(cluster, [later]) == 1
    submit = "cd /tmp; sbatch --parsable --gres=gpu:1 --time=30:00 --wrap 'sleep 600'"
    own = "--account=course-ml --qos=course-ml"
    early = cluster.sh(f"{submit} {own}", user="ann").strip()
    other = cluster.sh(f"{submit} --account=ml2026", user="student").strip()
    wait_for(lambda: cluster.squeue("%t", f"-j {early}") == ["R"])
    wait_for(lambda: "Reserved" in "".join(cluster.squeue("%r", f"-j {other}")))
    assert cluster.squeue("%t", f"-j {other}") == ["PD"]
    # Another hour: the one in which a job runs already ends soon, and the job goes on.
    assert reserve(cluster, [(now - 60, now + 5000)]) == 2
    during = cluster.sh(f"{submit} {own}", user="ann").strip()
    wait_for(lambda: cluster.squeue("%t", f"-j {during}") == ["R"])
    assert cluster.squeue("%t", f"-j {early}") == ["R"]
    assert cluster.squeue("%t", f"-j {other}") == ["PD"]
    cluster.sh("scancel -u ann")
    wait_for(lambda: cluster.squeue("%i", "-u ann") == [])
    assert reserve(cluster, []) == 1
    wait_for(lambda: cluster.squeue("%t", f"-j {other}") == ["R"])
    cluster.sh("scancel -u student")
    wait_for(lambda: cluster.squeue() == [])
