"""docker and tmux on the server: command lines as values, and one place that runs them."""

from __future__ import annotations

import json
import os
import subprocess
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
            raise Failure("engine", "Docker is not installed on the server", hint="labctl doctor")
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
        copied = subprocess.run(
            f"docker cp {made}:/etc/passwd - | tar -xOf -",
            shell=True,
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        docker("rm", made, check=False)
    kept = [
        row
        for row in copied.stdout.splitlines()
        if row.count(":") == 6 and row.split(":")[2] != str(os.getuid())
    ]
    kept.append(f"lab:x:{os.getuid()}:{os.getgid()}:labctl:/lab/cache/home:/bin/sh")
    staging = path.with_name(path.name + ".new")
    staging.write_text("\n".join(kept) + "\n")
    staging.replace(path)
    return path


def tmux(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["tmux", *args], capture_output=True, text=True, check=False)
