"""Build wheel and sdist, try each in clean environments, and say how to publish them.

    scripts/release [--no-demo] [--rehearse] [--out FOLDER]

Nothing is published. Without --rehearse, the changelog must have a section for the version.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Folders that are part of the wheel, below labctl/_data (pyproject.toml says so).
DATA_FOLDERS = ("images", "playbooks", "templates")
OLDEST_PYTHON = "3.11"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
# A release that takes long is broken: a pip that resolves for ever, a server that does not start.
DEADLINE_S = 1800.0


class ReleaseError(Exception):
    """The release is not ready; the text says what to change."""


def say(text: str) -> None:
    print(f"release: {text}", flush=True)


def run(words: list[str], cwd: Path, environ: Mapping[str, str] | None = None) -> str:
    """Run a command and return its output; ReleaseError if it fails."""
    done = subprocess.run(
        words, cwd=cwd, env=environ, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        tail = "\n".join(done.stdout.splitlines()[-30:])
        raise ReleaseError(f"{' '.join(words)} exited with code {done.returncode}:\n{tail}")
    return done.stdout


def read_version(root: Path = ROOT) -> str:
    text = (root / "labctl" / "__init__.py").read_text()
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if not found:
        raise ReleaseError('labctl/__init__.py has no line __version__ = "..."')
    return found.group(1)


def check_changelog(text: str, version: str) -> None:
    """Require a dated section with entries for this version, and nothing below [Unreleased]."""
    sections = dict(re.findall(r"^## (\[[^\n]*)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    wanted = re.compile(rf"\[{re.escape(version)}\] - \d{{4}}-\d{{2}}-\d{{2}}$")
    heading = next((name for name in sections if wanted.match(name)), None)
    if heading is None:
        raise ReleaseError(
            f"CHANGELOG.md has no section for {version}\n"
            f"  next: write `## [{version}] - YYYY-MM-DD` below `## [Unreleased]`"
        )
    if "- " not in sections[heading]:
        raise ReleaseError(f"the section of {version} in CHANGELOG.md has no entries")
    if "- " in sections.get("[Unreleased]", ""):
        raise ReleaseError(
            "CHANGELOG.md has entries below [Unreleased]\n"
            f"  next: move them to the section of {version}"
        )


def build(out: Path) -> tuple[Path, Path]:
    """Build both; the wheel is made from the sdist, so that the sdist must be complete."""
    shutil.rmtree(out, ignore_errors=True)
    run([sys.executable, "-m", "build", "--outdir", str(out), str(ROOT)], ROOT)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, sdist


def list_data_files(root: Path = ROOT) -> set[str]:
    """Return the files in git that the package needs when it runs, as paths in the repository."""
    return set(run(["git", "ls-files", "--", *DATA_FOLDERS], root).split("\n")) - {""}


def check_contents(wheel: Path, sdist: Path) -> None:
    """Require every image, playbook and template in both files."""
    wanted = list_data_files()
    with zipfile.ZipFile(wheel) as packed:
        prefix = "labctl/_data/"
        in_wheel = {name.removeprefix(prefix) for name in packed.namelist()}
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    for name, files in ((wheel.name, in_wheel), (sdist.name, in_sdist)):
        if missing := sorted(wanted - files):
            raise ReleaseError(f"{name} lacks {', '.join(missing)}")
    say(f"both have all {len(wanted)} images, playbooks and templates")


def can_start(program: str) -> bool:
    """Whether it runs: a version manager has programs of versions that are switched off."""
    if not shutil.which(program):
        return False
    return subprocess.run([program, "-c", ""], capture_output=True, check=False).returncode == 0


def find_pythons() -> Iterator[str]:
    for version in PYTHONS:
        name = f"python{version}"
        if can_start(name):
            yield name
        elif version == OLDEST_PYTHON:
            raise ReleaseError(f"{name} is not installed, and labctl supports it")
        else:
            say(f"{name} is not installed here: not tried")


def try_package(python: str, package: Path, version: str) -> None:
    """Use a package as a new user does, in an environment that has nothing else."""
    with tempfile.TemporaryDirectory(prefix="labctl-release-") as scratch:
        folder = Path(scratch)
        run([python, "-m", "venv", "venv"], folder)
        program = folder / "venv" / "bin" / "python"
        run([str(program), "-m", "pip", "install", "-q", str(package)], folder)
        use_labctl(folder / "home", program, version)
    say(f"{package.name} works with {python}")


def use_labctl(home: Path, program: Path, version: str) -> None:
    """Type the first commands of a new user, as far as no server is needed."""
    home.mkdir()
    dropped = ("PYTHON", "VIRTUAL_ENV", "XDG_", "LABCTL_STATE_DIR")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    environ |= {"HOME": str(home), "PATH": f"{program.parent}:{environ['PATH']}"}
    origin = run([str(program), "-c", "import labctl; print(labctl.__file__)"], home, environ)
    if not origin.startswith(str(program.parents[1])):
        raise ReleaseError(f"the package was not tried, but {origin}")
    if version not in run(["labctl", "--version"], home, environ):
        raise ReleaseError(f"labctl --version is not {version}")
    run(["labctl", "--help"], home, environ)
    run(["labctl", "init", "digits", "--provider", "local"], home, environ)
    run(["labctl", "config"], home / "digits", environ)
    doctor = subprocess.run(
        ["labctl", "doctor"], cwd=home / "digits", env=environ, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    # Exit code 1 is right where there is no Docker Engine.
    if "Docker Engine" not in doctor.stdout or doctor.returncode not in (0, 1):
        raise ReleaseError(f"labctl doctor:\n{doctor.stdout}{doctor.stderr}")


def run_demo(python: str, wheel: Path) -> None:
    """Run the demo from the wheel alone: a server, training, the report, and no server left."""
    with tempfile.TemporaryDirectory(prefix="labctl-release-") as scratch:
        folder = Path(scratch)
        torch = os.environ.get("LABCTL_RELEASE_TORCH", "torch")
        run([python, "-m", "venv", str(folder / "venv")], folder)
        program = str(folder / "venv" / "bin" / "python")
        run([program, "-m", "pip", "install", "-q", torch], folder)
        run([program, "-m", "pip", "install", "-q", f"{wheel}[train]"], folder)
        shutil.copy2(ROOT / "scripts" / "story.py", folder)
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        run([program, str(folder / "story.py")], folder, environ)
    say("the demo works from the wheel alone")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-demo", action="store_true", help="start no server")
    parser.add_argument("--rehearse", action="store_true", help="accept an unfinished changelog")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="default: dist")
    options = parser.parse_args()
    version = read_version()
    try:
        check_changelog((ROOT / "CHANGELOG.md").read_text(), version)
    except ReleaseError as error:
        if not options.rehearse:
            raise
        say(f"before the release: {error}")
    wheel, sdist = build(options.out)
    check_contents(wheel, sdist)
    pythons = list(find_pythons())
    for python in pythons:
        for package in (wheel, sdist):
            try_package(python, package, version)
    if not options.no_demo:
        run_demo(pythons[0], wheel)
    say("everything works. To publish, type:")
    print(f"  git tag -a v{version} -m 'labctl {version}' && git push origin v{version}")
    print(f"  python3 -m pip install twine && python3 -m twine upload {wheel} {sdist}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        sys.exit(1)
