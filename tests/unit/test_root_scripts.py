"""One rule for scripts that need root: the machine says who logs in."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from labctl.commands.root import NO_ROOT_EXIT_CODE, as_root


def run(tmp_path: Path, uid: int, script: str, *words: str) -> tuple[int, bytes]:
    """Run it where the login has this uid, and where sudo is not installed."""
    (tmp_path / "id").write_text(f"#!/bin/sh\necho {uid}\n")
    (tmp_path / "id").chmod(0o755)
    (tmp_path / "sh").symlink_to("/bin/sh")
    argv = ["/bin/sh", "-c", as_root(script, *words)]
    done = subprocess.run(argv, env={"PATH": str(tmp_path)}, capture_output=True, check=False)
    return done.returncode, done.stdout


def test_root_needs_no_sudo_whatever_its_account_is_called(tmp_path: Path) -> None:
    assert run(tmp_path, 0, 'echo "as $1"; exit 3', "it's root") == (3, b"as it's root\n")


@pytest.mark.parametrize("uid", [1, 1000])
def test_an_account_without_root_is_distinct_from_a_script_that_fails(
    tmp_path: Path, uid: int
) -> None:
    assert run(tmp_path, uid, "echo 'as root'") == (NO_ROOT_EXIT_CODE, b"")
