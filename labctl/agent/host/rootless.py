"""Builds on a shared server: rootless BuildKit as the account itself, without the engine.

It runs for one build, inside a user namespace that rootlesskit creates. The image goes to the
broker as a `docker save` archive, and the broker stores it under the account's own names.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Callable, Iterator, List, Optional, Tuple

from ...wire.images import BuildImageRequest
from ...wire.verbs import CONFIG_FILE
from ..reply import Failure
from .docker import run_docker
from .paths import labctl_home

PROGRAMS = ("rootlesskit", "buildkitd", "buildctl", "newuidmap")
PLACES = "/opt/labctl/buildkit/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
READY_S = 60.0
Streamed = Callable[[List[str], Optional[Path]], Tuple[int, List[str]]]


def require_buildkit() -> None:
    """Raise Failure (policy) if this server cannot build images for an account."""
    missing = [name for name in PROGRAMS if not shutil.which(name, path=PLACES)]
    if missing:
        why = f"rootless BuildKit builds images here, and {', '.join(missing)} is missing"
        staff = " (image: NAME), or ask the course's staff for one"
        hint = ("use an existing image in ", CONFIG_FILE, staff)
        raise Failure("policy", "this shared server cannot build images", why, hint)


def build_image(
    request: BuildImageRequest, context: Path, log: Path, streamed: Streamed
) -> tuple[int, list[str]]:
    """Build an image from the Dockerfile in `context`; return the exit code and the last lines."""
    folder = labctl_home() / ".cache" / "buildkit"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="build-", dir=str(folder)) as build_folder:
        archive = Path(build_folder) / "image.tar"
        with _run_daemon(folder, Path(build_folder)) as address:
            words = ["buildctl", "--addr", address, "build", "--progress", "plain"]
            words += ["--frontend", "dockerfile.v0"]
            words += ["--local", f"context={context}", "--local", f"dockerfile={context}"]
            for key, value in request.args.items():
                words += ["--opt", f"build-arg:{key}={value}"]
            words += ["--output", f"type=docker,name={request.tag},dest={archive}"]
            code, lines = streamed(["env", f"PATH={PLACES}", *words], log)
        if code == 0:
            run_docker("load", "--quiet", "--input", str(archive))
    return code, lines


@contextmanager
def _run_daemon(folder: Path, build_folder: Path) -> Iterator[str]:
    """Run a BuildKit daemon of the account during the build; yield its address."""
    address = f"unix://{build_folder}/socket"
    environ = {**os.environ, "PATH": PLACES, "XDG_RUNTIME_DIR": str(build_folder)}
    words = ["rootlesskit", "--net=host", "--copy-up=/etc", "--copy-up=/run", "buildkitd"]
    words += ["--rootless", "--addr", address, "--root", str(folder / "root")]
    words += ["--oci-worker-no-process-sandbox"]
    with (folder / "buildkitd.log").open("wb") as log:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ
        )
        try:
            _wait_for_daemon(process, address, environ, folder / "buildkitd.log")
            yield address
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_for_daemon(
    process: subprocess.Popen[bytes], address: str, environ: dict[str, str], log: Path
) -> None:
    deadline = time.monotonic() + READY_S
    words = [str(shutil.which("buildctl", path=PLACES)), "--addr", address, "debug", "workers"]
    while subprocess.run(words, env=environ, capture_output=True, check=False).returncode:
        if process.poll() is not None or time.monotonic() > deadline:
            output = log.read_text(errors="replace")[-1000:]
            raise Failure("docker", "rootless BuildKit did not start on the server", output)
        time.sleep(0.1)
