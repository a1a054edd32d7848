"""All groups of measurements.

A group is a module with a function that takes the settings and yields comparisons. The runner
measures each comparison before it asks for the next one, so servers that the function started
are up until it ends.
"""

from __future__ import annotations

from benchmarks import (
    control,
    course,
    data,
    first_line,
    fleet,
    forwards,
    gangs,
    jobs,
    slurm_jobs,
    soak,
    startup,
)
from benchmarks.runner import Group

# The times with --quick are five minutes together.
GROUPS = {
    "start-up": Group(startup.compare, 10.0),
    "control": Group(control.compare_one_server, 20.0),
    "fan-out": Group(control.compare_all_servers, 25.0),
    "data": Group(data.compare, 45.0),
    "forward": Group(forwards.compare, 20.0),
    "jobs": Group(jobs.compare, 35.0),
    "first-line": Group(first_line.compare, 40.0),
    "gang": Group(gangs.compare, 15.0),
    "slurm": Group(slurm_jobs.compare, 15.0),
    "aws": Group(fleet.compare, 25.0),
    "course": Group(course.compare, 25.0),
    "soak": Group(soak.compare, 25.0),
}
