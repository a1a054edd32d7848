"""The end of a term at a simulated AWS, as an instructor types and reads it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from rehearsal_bed import RehearsalSetup, client

from labctl.courses.records.folder import CourseFolder
from labctl.providers.aws.deadline import schedule_name

ROLE = "arn:aws:iam::123456789012:role/labctl-deadline"
COURSE = f"""\
course: ml
server: {{provider: aws, gpu: any, aws: {{scheduler_role: "{ROLE}"}}}}
grading: {{server: {{provider: aws, gpu: none, aws: {{regions: [us-west-2]}}}}}}
"""


def test_schedules_go_and_an_account_is_listed_once(setup: RehearsalSetup, tmp_path: Path) -> None:
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "AWS_ENDPOINT_URL": setup.rehearsal.url,
        "AWS_ACCESS_KEY_ID": "AKIAEXAMPLE",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
    }

    def run(directory: Path, *words: str) -> str:
        argv = [sys.executable, "-m", "labctl", "course", *words]
        done = subprocess.run(argv, cwd=directory, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    (tmp_path / "roster.csv").write_text("id,name\nada,Ada\nbob,Bob\n")
    run(tmp_path, "init", "ml", "--roster", "roster.csv")
    course = tmp_path / "ml"
    (course / "course.yaml").write_text(COURSE)
    scheduler = client(setup.rehearsal, "scheduler")
    for seat in CourseFolder(course).list_seats():
        scheduler.create_schedule(
            Name=schedule_name(seat.lab_id, "i-0123456789abcdef0"),
            ScheduleExpression="at(2099-01-01T00:00:00)",
            FlexibleTimeWindow={"Mode": "OFF"},
            Target={"Arn": "arn:aws:scheduler:::aws-sdk:ec2:terminateInstances", "RoleArn": ROLE},
        )
    output = run(course, "down", "--end-of-term", "--yes")
    assert scheduler.list_schedules()["Schedules"] == []
    assert "still there" not in output
    assert output.count("aws has nothing of this course in any region") == 1
