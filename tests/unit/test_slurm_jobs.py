"""How the jobs of a class ended: lines that Slurm 22.05 printed, and what labctl makes of them."""

from __future__ import annotations

import msgspec
import pytest

from labctl.commands.slurm_jobs import ClassJobs, build_query, parse_jobs

GPU = "billing=1,cpu=1,gres/gpu=1,mem=10847M,node=1"
CPU = "billing=1,cpu=1,mem=200M,node=1"
# On a course's machine: alice canceled two runs; the minutes of bob were used up.
COURSE = f"""\
--- jobs
lab-alice|COMPLETED|1795888356|1795888356|1795888356|0:0|0|{GPU}
lab-alice|FAILED|1795888363|1795888363|1795888390|15:0|27|{GPU}
lab-alice|FAILED|1795888366|1795888391|1795888408|15:0|17|{GPU}
lab-bob|TIMEOUT|1795888574|1795888575|1795888647|0:0|72|{GPU}
lab-bob|CANCELLED by 1002|1795888683|None|1795888691|0:0|0|
lab-carol|PENDING|1795888683|Unknown|Unknown|0:0|0|
"""
# On a cluster whose jobs can be preempted and started again
CLUSTER = f"""\
--- jobs
ann|COMPLETED|1795889099|1795889099|1795889102|0:0|3|billing=1,cpu=1,gres/gpu=1,mem=200M,node=1
ann|FAILED|1795889099|1795889100|1795889100|3:0|0|{CPU}
ann|FAILED|1795889100|1795889100|1795889100|0:15|0|{CPU}
ann|PREEMPTED|1795889110|1795889134|1795889175|0:0|41|billing=4,cpu=4,gres/gpu=2,mem=800M,node=1
ann|REQUEUED|1795889135|1795889136|1795889137|0:0|1|{CPU}
ann|NODE_FAIL|1795889188|1795889188|1795889204|0:0|16|{CPU}
ann|RUNNING|1795889110|1795889134|Unknown|0:0|4|{GPU}
"""


def test_jobs_of_a_course_are_counted_for_each_student() -> None:
    jobs = parse_jobs(COURSE)
    assert jobs["lab-alice"] == ClassJobs(
        completed=1,
        canceled=2,
        gpu_hours=44 / 3600,
        last_end_at=1795888408,
        median_wait_s=0,
    )
    assert jobs["lab-bob"] == ClassJobs(
        timed_out=1, canceled=1, gpu_hours=72 / 3600, last_end_at=1795888691, median_wait_s=1
    )
    assert jobs["lab-carol"] == ClassJobs(), "nothing has started"


def test_each_start_of_a_job_counts() -> None:
    """A running job uses nothing yet, but has waited."""
    assert parse_jobs(CLUSTER)["ann"] == ClassJobs(
        completed=1,
        failed=1,
        preempted=1,
        canceled=1,
        other=2,
        gpu_hours=(3 + 2 * 41) / 3600,
        last_end_at=1795889204,
        median_wait_s=1,
    )


@pytest.mark.parametrize(
    ("state", "name"),
    [("OUT_OF_MEMORY", "out_of_memory"), ("DEADLINE", "timed_out"), ("BOOT_FAIL", "other")],
)
def test_an_end_that_slurm_names_is_counted(state: str, name: str) -> None:
    jobs = parse_jobs(f"--- jobs\nann|{state}|1|2|3|0:125|1|{CPU}\n")
    assert msgspec.structs.asdict(jobs["ann"])[name] == 1


def test_a_class_without_jobs_has_none() -> None:
    assert parse_jobs("--- qos\n--- users\n--- jobs\n") == {}
    assert "-A course-ml " in build_query("course-ml")
