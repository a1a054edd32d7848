"""Images on the server: find, pull and build them. The log of a build is complete."""

from __future__ import annotations

import fcntl
import functools
import http.server
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ...wire.images import (
    BuildImageRequest,
    BuildOpening,
    BuildResult,
    FindImagesReply,
    FindImagesRequest,
    PullImageRequest,
    hash_image_content,
)
from ...wire.verbs import PUSH_COMMAND, Empty
from ..broker.detection import is_brokered
from ..host import rootless
from ..host.docker import run_docker
from ..host.engine import inspect_image
from ..host.paths import lab_dir, labctl_home, resolve_inside, run_dir, write_text
from ..reply import Failure, send_closing_reply, send_reply
from .environments import is_environment, is_whole

# Fixed, since the address is a build argument and so part of Docker's layer cache key.
WHEELHOUSE_PORT = 8437
# what the installation of a Python project reads
PROJECT_FILES = {"pyproject.toml", "setup.py", "setup.cfg"}
MODULES = (".py", ".pyi", ".typed")
TEXTS = (".toml", ".cfg", ".txt", ".md", ".rst", ".in")
MOST_TEXT_BYTES = 1024 * 1024
FAILED_STEP = re.compile(r"^(Step \d+/\d+ : |#\d+ \[)")


def find(request: FindImagesRequest) -> FindImagesReply:
    environments = [one for one in request.references if is_environment(one)]
    images = {
        reference: inspect_image(reference)
        for reference in request.references
        if reference not in environments
    }
    ids = {reference: reference if is_whole(reference) else "" for reference in environments}
    return FindImagesReply(
        {**ids, **{reference: image.Id if image else "" for reference, image in images.items()}},
        {
            reference: hash_image_content(image.Created, image.layers) if image else ""
            for reference, image in images.items()
        },
    )


def pull(request: PullImageRequest) -> None:
    send_reply(Empty())
    code, lines = run_and_tee(["docker", "pull", request.reference], None)
    if code == 0 and request.tag:
        code, lines = _tag_pulled(request)
    send_closing_reply(BuildResult(code, tuple(lines[-8:])))


def _tag_pulled(request: PullImageRequest) -> tuple[int, list[str]]:
    """Tag a pulled image; refuse and untag one for another architecture.

    The engine also pulls such an image, and its programs cannot start.
    """
    architecture = run_docker(
        "image", "inspect", "--format", "{{.Architecture}}", request.reference
    ).stdout.strip()
    needed = run_docker("version", "--format", "{{.Server.Arch}}").stdout.strip()
    if architecture != needed:
        run_docker("image", "rm", request.reference, check=False)
        return 1, [f"the image is for {architecture}, and the server needs {needed}"]
    return run_and_tee(["docker", "tag", request.reference, request.tag], None)


def build(request: BuildImageRequest) -> None:
    """Build an image; stream and log the output of docker."""
    lab = lab_dir(request.lab, request.lab_id)
    source = run_dir(lab, request.run) / "code" if request.run else lab / "code"
    name = request.tag.replace("/", "-").replace(":", "-")
    log = lab / "builds" / f"{name}.log"
    log.parent.mkdir(exist_ok=True)
    context = log.with_suffix(".context") if request.dockerfile else _find_context(request, source)
    if is_brokered():
        rootless.require_buildkit()
    send_reply(BuildOpening(str(log)))
    with lock_build(name):
        if inspect_image(request.tag):
            send_closing_reply(BuildResult(0, (), str(log)))
            return
        if request.dockerfile:
            # Under the lock: another build of the image may be reading the directory.
            _write_context(request, source, context)
        if is_brokered():
            code, lines = rootless.build_image(request, context, log, run_and_tee)
            send_closing_reply(BuildResult(code, tuple(pick_failing_lines(lines)), str(log)))
        else:
            words = ["docker", "build", "--tag", request.tag]
            run_build(words, request.args, request.wheelhouse, log, context)


def _find_context(request: BuildImageRequest, code: Path) -> Path:
    """Return the directory of the Dockerfile; Failure (missing) without one."""
    context = code
    if request.directory not in ("", "."):
        context = resolve_inside(code, request.directory)
    if not (context / "Dockerfile").is_file():
        raise Failure("missing", f"no Dockerfile in {context} on the server", "", PUSH_COMMAND)
    return context


def _write_context(request: BuildImageRequest, code: Path, target: Path) -> None:
    """Create the directory of a build that needs lists of packages, and perhaps Python projects."""
    if target.exists():
        shutil.rmtree(str(target))
    write_code(target / "code", code, request.files, has_code=request.has_code)
    write_text(target / "Dockerfile", request.dockerfile)


def write_code(copy: Path, code: Path, files: Mapping[str, str], *, has_code: bool) -> None:
    """Write the lists of packages, and copy what an editable installation reads of the code."""
    copy.mkdir(parents=True)
    names = _list_project_files(code) if has_code else ()
    for name in names:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(str(code / name), str(copy / name))
    for path, text in files.items():
        file = resolve_inside(copy, path)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, text)


def _list_project_files(code: Path) -> Iterator[Path]:
    """Yield the files that an editable installation may read: modules, and texts of projects."""
    for folder, folders, names in os.walk(str(code)):
        folders[:] = [name for name in folders if not name.startswith(".")]
        is_project = not PROJECT_FILES.isdisjoint(names) or Path(folder).name == "requirements"
        for name in names:
            file = Path(folder) / name
            is_text = is_project and (name.endswith(TEXTS) or "." not in name)
            if not (name.endswith(MODULES) or is_text) or file.is_symlink():
                continue
            if file.is_file() and file.stat().st_size <= MOST_TEXT_BYTES:
                yield file.relative_to(code)


@contextmanager
def lock_build(name: str) -> Iterator[None]:
    """Let a second build of the same image wait, also if another lab or machine requested it."""
    folder = labctl_home() / ".cache" / "builds"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (folder / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def run_build(
    words: list[str],
    args: Mapping[str, str],
    wheelhouse: bool,
    log: Path,
    context: Path,
) -> None:
    """Run `docker build` with these arguments; stream and log its output, and send the result."""
    with serve_wheelhouse(wheelhouse) as wheel_args:
        for key, value in {**args, **wheel_args}.items():
            words = [*words, "--build-arg", f"{key}={value}"]
        if wheel_args:
            words += ["--network", "host"]
        code, lines = run_and_tee([*words, str(context)], log)
    send_closing_reply(BuildResult(code, tuple(pick_failing_lines(lines)), str(log)))


def pick_failing_lines(lines: list[str]) -> list[str]:
    """Return the line of the last step that began, and at most the last twelve lines after it."""
    starts = [i for i, text in enumerate(lines) if FAILED_STEP.match(text)]
    if not starts:
        return lines[-12:]
    return [lines[starts[-1]], *lines[max(starts[-1] + 1, len(lines) - 12) :]]


def run_and_tee(
    words: list[str], log: Path | None, environ: Mapping[str, str] | None = None
) -> tuple[int, list[str]]:
    """Run a command, copy its output to stdout and `log`; return (exit code, the last lines).

    If the output can go nowhere, the command is ended with all that it started.
    """
    process = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environ,
        start_new_session=True,
    )
    lines: list[str] = []
    file = log.open("wb") if log else None
    try:
        for raw in process.stdout or ():
            if file:
                file.write(raw)
            lines = [*lines[-400:], raw.decode(errors="replace").rstrip()]
            sys.stdout.buffer.write(raw)
            sys.stdout.buffer.flush()
        return process.wait(), lines
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
        if process.stdout:
            process.stdout.close()
        if file:
            file.close()


@contextmanager
def serve_wheelhouse(enabled: bool) -> Iterator[dict[str, str]]:
    """Serve ~/labctl/.wheelhouse on the loopback while a build runs, for pip in the build."""
    root = labctl_home() / ".wheelhouse"
    if not enabled or not root.is_dir():
        yield {}
        return
    quiet = type("Quiet", (http.server.SimpleHTTPRequestHandler,), {"log_message": _ignore})
    serve = functools.partial(quiet, directory=str(root))
    try:
        server = http.server.ThreadingHTTPServer(("127.0.0.1", WHEELHOUSE_PORT), serve)
    except OSError:
        # Another build uses the port. Any other works too, but misses the cached layers.
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), serve)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        address = f"http://127.0.0.1:{server.server_address[1]}/"
        yield {"PIP_FIND_LINKS": address, "PIP_NO_INDEX": "1"}
    finally:
        server.shutdown()
        server.server_close()


def _ignore(*_args: object) -> None:
    pass
