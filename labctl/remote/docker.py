"""docker and tmux on the server: command lines as values, and one place that runs them."""

from __future__ import annotations

import io
import json
import os
import subprocess
import tarfile
import time
from pathlib import Path
from typing import Any

from .reply import Failure

ATTEMPTS_S = 20.0
"""How long a daemon that is being restarted is waited for."""


def docker(*args: str, check: bool = True, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """One docker command. A daemon that does not answer is asked again for ATTEMPTS_S."""
    deadline = time.monotonic() + ATTEMPTS_S
    while True:
        try:
            done = subprocess.run(
                ["docker", *args], input=stdin, capture_output=True, text=True, check=False
            )
        except FileNotFoundError:
            said = "Docker is not installed on the server"
            raise Failure("engine", said, hint="labctl doctor") from None
        gone = done.returncode != 0 and "Cannot connect to the Docker daemon" in done.stderr
        if gone and time.monotonic() < deadline:
            time.sleep(0.5)
            continue
        break
    if gone:
        raise Failure(
            "engine",
            "the Docker Engine on the server does not answer",
            done.stderr.strip(),
            "labctl ssh -- systemctl status docker",
        )
    if check and done.returncode != 0:
        raise Failure("docker", f"docker {args[0]} failed", done.stderr.strip()[-2000:])
    return done


def inspect(names: list[str]) -> dict[str, dict[str, Any]]:
    """name -> what `docker inspect` says, for those that exist."""
    if not names:
        return {}
    done = docker("container", "inspect", *names, check=False)
    found = json.loads(done.stdout or "[]")
    return {one["Name"].lstrip("/"): one for one in found}


def image(reference: str) -> dict[str, Any] | None:
    done = docker("image", "inspect", reference, check=False)
    if done.returncode != 0:
        return None
    found: dict[str, Any] = json.loads(done.stdout)[0]
    return found


def mount(source: Path | str, target: str, read_only: bool = False) -> list[str]:
    """A bind mount. `--mount` splits at commas, so those are refused rather than misread."""
    if "," in str(source):
        raise Failure("usage", f"the path {source} has a comma, which docker cannot mount")
    ending = ",readonly" if read_only else ""
    return ["--mount", f"type=bind,source={source},target={target}{ending}"]


def passwd_file(image_id: str, directory: Path) -> Path:
    """The image's /etc/passwd with our user in it, made once per image.

    Libraries ask who they are (getpass, torch's cache, ssh): without an entry they fail.
    """
    path = directory / f"passwd-{image_id.rpartition(':')[2][:24]}"
    if path.exists():
        return path
    directory.mkdir(parents=True, exist_ok=True)
    made = docker("create", "--entrypoint", "/bin/true", image_id).stdout.strip()
    try:
        text = _file_in(made, "/etc/passwd")
    finally:
        docker("rm", made, check=False)
    kept = [
        row
        for row in text.splitlines()
        if row.count(":") == 6 and row.split(":")[2] != str(os.getuid())
    ]
    kept.append(f"lab:x:{os.getuid()}:{os.getgid()}:labctl:/lab/cache/home:/bin/sh")
    staging = path.with_name(path.name + ".new")
    staging.write_text("\n".join(kept) + "\n")
    staging.replace(path)
    return path


def _file_in(container: str, path: str) -> str:
    """A file of a container that need not run and need not hold any program; "" if absent."""
    words = ["docker", "cp", f"{container}:{path}", "-"]
    copied = subprocess.run(words, capture_output=True, check=False)
    if copied.returncode != 0:
        return ""
    with tarfile.open(fileobj=io.BytesIO(copied.stdout)) as archive:
        member = archive.extractfile(archive.getmembers()[0])
        return member.read().decode(errors="replace") if member else ""


def tmux(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["tmux", *args], capture_output=True, text=True, check=False)
