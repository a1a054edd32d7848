"""`labctl up` on a rehearsed AWS: what keeps results from the lab's bucket, before the price."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from rehearsal_bed import RehearsalSetup, client


def refuse_price(setup: RehearsalSetup, directory: Path, aws: str = "") -> str:
    """Return the messages of an `up` that nobody answers."""
    (directory / "lab.yaml").write_text(
        f"lab: birds\nstore: s3://birds-results/labs\nserver: {{provider: aws{aws}}}\n"
    )
    environ = {"HOME": str(directory), "PATH": "/usr/bin:/bin", **setup.rehearsal.environment}
    labctl = [sys.executable, "-m", "labctl", "-C", str(directory)]
    subprocess.run([*labctl, "trust", "--yes"], env=environ, check=True, capture_output=True)
    done = subprocess.run(
        [*labctl, "up"], env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 3, done.stderr
    return done.stderr.partition("it costs at most")[0]


@pytest.mark.long
def test_up_says_that_results_cannot_reach_the_bucket_before_it_asks_for_the_price(
    setup: RehearsalSetup, tmp_path: Path
) -> None:
    warned = refuse_price(setup, tmp_path)
    missing_profile = "server.aws.instance_profile is not set (see labctl docs aws)"
    lost = "results cannot be mirrored to s3://birds-results/labs: "
    assert f"{lost}{missing_profile}; instead: labctl pull --follow\n" in warned
    missing_bucket = "the bucket birds-results does not exist\n  next: aws s3 mb s3://birds-results"
    assert f"{lost}{missing_bucket}\n" in warned
    client(setup.rehearsal, "s3").create_bucket(Bucket="birds-results")
    warned = refuse_price(setup, tmp_path, ", aws: {instance_profile: labctl-server}")
    assert "results cannot" not in warned
