"""Packages by others that the agent takes along: as released, and usable where it runs."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from labctl.errors import LabError
from labctl.servers.agent import build_program
from labctl.servers.vendored import HASHES, read_vendored_files

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
IMPORTS = """
import sys, types
sys.path.insert(0, sys.argv[1])
sys.modules["labctl"] = types.ModuleType("labctl")
sys.modules["labctl"].__path__ = [sys.argv[1]]
import labctl.agent.broker.broker, labctl.agent.broker.relay, labctl.agent.host.nvml, h11, pynvml
print(h11.__file__, pynvml.__file__)
"""


def test_every_vendored_file_is_hashed_and_pinned() -> None:
    dependencies = tomllib.loads(PROJECT.read_text())["project"]["dependencies"]
    for package, versions in json.loads(HASHES.read_text()).items():
        assert [f"{package}=={version}" for version in versions] == [
            one for one in dependencies if one.startswith(package)
        ]
    files = dict(read_vendored_files())
    assert {"h11/__init__.py", "h11/_connection.py", "pynvml.py"} <= files.keys()


def test_a_package_that_was_changed_goes_to_no_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root runs it there. A file that no hash names stays here."""
    package = tmp_path / "labctl_test_vendored"
    package.mkdir()
    content = b"SAFE = True\n"
    (package / "__init__.py").write_bytes(content)
    (package / "other.py").write_bytes(b"import os\n")
    hashes = tmp_path / "hashes.json"
    good = {f"{package.name}/__init__.py": hashlib.sha256(content).hexdigest()}
    hashes.write_text(
        json.dumps({package.name: {"1.0": {f"{package.name}/gone.py": ""}, "1.1": good}})
    )
    with pytest.raises(LabError, match="differs from its release") as absent:
        list(read_vendored_files(hashes))
    assert absent.value.why == "it is not installed"
    monkeypatch.syspath_prepend(tmp_path)
    assert list(read_vendored_files(hashes)) == [(f"{package.name}/__init__.py", content)]
    (package / "__init__.py").write_bytes(b"SAFE = False\n")
    with pytest.raises(LabError, match="differs from its release") as changed:
        list(read_vendored_files(hashes))
    assert f"{package / '__init__.py'} is not the file of {package.name} 1.1" in changed.value.why
    assert changed.value.hint == (
        f"{sys.executable} -m pip install --force-reinstall --no-deps {package.name}==1.1"
    )


@pytest.mark.parametrize("python", [sys.executable, "python3.8"])
def test_the_broker_starts_from_its_archive_alone(tmp_path: Path, python: str) -> None:
    """As root starts it on a server: no site-packages, nothing of ours but the archive."""
    if not shutil.which(python) or subprocess.run([python, "-V"], check=False).returncode:
        pytest.skip(f"there is no {python} here")
    archive = tmp_path / "broker.zip"
    archive.write_bytes(build_program())
    words = [python, "-I", "-S", "-B", "-W", "error", "-c", IMPORTS, str(archive)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout.split() == [f"{archive}/h11/__init__.py", f"{archive}/pynvml.py"]
