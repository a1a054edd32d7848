"""What a release is held to before it is built, and the workflow that runs the same scripts."""

from __future__ import annotations

import os
import re
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import release  # noqa: E402  # after the path above

READY = """\
# Changelog

## [Unreleased]

## [1.2.0] - 2026-12-01

### Added
- a word

## [1.1.0] - 2026-11-01
- more
"""


def test_a_changelog_with_a_dated_section_is_ready() -> None:
    release.check_changelog(READY, "1.2.0")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (READY.replace(" - 2026-12-01", ""), "no section for 1.2.0"),
        (READY.replace("[1.2.0]", "[1.2.01]"), "no section for 1.2.0"),
        (READY.replace("- a word\n", ""), "has no entries"),
        (READY.replace("[Unreleased]\n", "[Unreleased]\n- left over\n"), "below [Unreleased]"),
    ],
)
def test_an_unfinished_changelog_stops_a_release(text: str, why: str) -> None:
    with pytest.raises(release.ReleaseError, match=re.escape(why)):
        release.check_changelog(text, "1.2.0")


def test_a_package_without_a_template_stops_a_release(tmp_path: Path) -> None:
    wheel, sdist = tmp_path / "labctl.whl", tmp_path / "labctl.tar.gz"
    files = sorted(release.list_data_files())
    assert len(files) > 50
    with zipfile.ZipFile(wheel, "w") as packed:
        for name in files[1:]:
            packed.writestr(f"labctl/_data/{name}", "")
    with tarfile.open(sdist, "w:gz") as archive:
        for name in files:
            archive.addfile(tarfile.TarInfo(f"labctl-1/{name}"))
    with pytest.raises(release.ReleaseError, match=re.escape(f"labctl.whl lacks {files[0]}")):
        release.check_contents(wheel, sdist)
    with zipfile.ZipFile(wheel, "a") as packed:
        packed.writestr(f"labctl/_data/{files[0]}", "")
    release.check_contents(wheel, sdist)


def test_the_version_is_that_of_the_package() -> None:
    from labctl import __version__

    assert release.read_version() == __version__


def test_the_workflow_runs_scripts_that_are_there() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    scripts = {
        word
        for step in steps
        for word in step.get("run", "").split()
        if word.startswith("scripts/")
    }
    pushed = {"scripts/test", "scripts/docs", "scripts/release"}
    weekly = {"scripts/demo-course", "scripts/demo-cluster", "scripts/demo-market"}
    assert scripts == pushed | weekly
    assert all(os.access(ROOT / script, os.X_OK) for script in scripts)
