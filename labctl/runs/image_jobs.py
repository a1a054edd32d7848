"""Keep a built image, or load one before it is needed, in a process that outlives the command.

`start_save` and `start_load` start that process: `python -m labctl.runs.image_jobs`, with an
ImageJob as its argument. It stores failures in the cache, and `labctl up` and `labctl images`
report them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from labctl.commands.ssh import command_argv
from labctl.decoding import decode_json
from labctl.errors import (
    DiskFullError,
    LabError,
    LinkLostError,
    TransferError,
    assign_subject,
)
from labctl.errors.subject import LAB, Subject
from labctl.events import Note, report_lock_wait
from labctl.model import Server, Value
from labctl.runs import image_sources
from labctl.runs.image_cache import ImageCache
from labctl.servers.context import LabContext
from labctl.shell import command, portable_line
from labctl.state.locks import hold_lock
from labctl.text import add_next

_MODULE = "labctl.runs.image_jobs"
# seconds that another process waits for an image that is being saved
SAVE_S = 1800.0
# What follows a failure that needs no command.
_ADVICE = {
    "load": "the next run gets it in another way",
    "save": "labctl tries it again after the next build",
}
_PRESENT = "docker image inspect --format '{{.Size}} {{.Architecture}}' "


class ImageJob(Value, frozen=True):
    """A job for the image `reference` on one server. The process holds `lock_file` meanwhile.

    "save" keeps the image in the cache if `limit_bytes` is not 0, and pushes it to `registry` if
    that is not "".
    """

    action: Literal["save", "load"]
    reference: str
    server_id: str
    ssh_config: str
    cache_dir: str
    limit_bytes: int
    lock_file: str
    architecture: str = ""
    registry: str = ""
    subject: Subject = LAB

    @property
    def cache(self) -> ImageCache:
        return ImageCache(Path(self.cache_dir), self.limit_bytes)

    def build_argv(self, line: str) -> list[str]:
        return command_argv(self.ssh_config, self.server_id, portable_line(line))


def can_keep(context: LabContext) -> bool:
    """Whether images of the lab's server are kept: only those that this machine itself has built.

    A name says what went into an image, and nothing can verify that another machine's image is
    what its name says. That machine's owner would control the servers on which it is loaded.
    """
    return context.config.image_cache_bytes > 0 and context.is_on_this_machine


def start_save(context: LabContext, server: Server, wanted: str) -> None:
    """Start to keep an image that the server has just built, and to push it to the registry.

    If the image is kept, returns when the process holds the lock that `wait_for_save` waits for.
    """
    limit_bytes = context.config.image_cache_bytes if can_keep(context) else 0
    registry = context.config.image.registry
    if limit_bytes or registry:
        lock = _save_lock(context, wanted)
        job = _make_job(context, server, wanted, "save", lock, limit_bytes, registry)
        # Nobody waits for a push alone, which may follow that of another server for a long time.
        _start(job, ready=bool(limit_bytes))


def wait_for_save(context: LabContext, wanted: str) -> None:
    """Wait while another process keeps this image."""
    lock, what = _save_lock(context, wanted), f"waiting for the image {wanted}"
    with report_lock_wait(
        context.reporter,
        lambda on_wait, _: hold_lock(lock, what, wait_s=SAVE_S, is_command=False, on_wait=on_wait),
    ):
        pass


def start_load(context: LabContext, server: Server, wanted: str, lock_name: str) -> None:
    """Start to load an image on the server if this machine keeps it; report its failures.

    The process holds the lock `lock_name`, as `ensure_image` does.
    """
    cache = image_sources.open_cache(context)
    for text in cache.take_failures(wanted):
        context.reporter.emit(Note(text=text, level="warning"))
    if cache.find(wanted, image_sources.find_architecture(context, server)):
        lock = context.state.find_lock(lock_name)
        _start(_make_job(context, server, wanted, "load", lock, cache.limit_bytes), ready=False)


def _save_lock(context: LabContext, wanted: str) -> Path:
    return context.state.find_lock("save-" + wanted.rpartition(":")[2])


def _make_job(
    context: LabContext,
    server: Server,
    wanted: str,
    action: Literal["save", "load"],
    lock_file: Path,
    limit_bytes: int,
    registry: str = "",
) -> ImageJob:
    return ImageJob(
        action=action,
        reference=wanted,
        server_id=server.id,
        ssh_config=str(context.connections.config_path(server.id)),
        cache_dir=str(image_sources.open_cache(context).directory),
        limit_bytes=limit_bytes,
        lock_file=str(lock_file),
        architecture=image_sources.find_architecture(context, server),
        registry=registry,
        subject=context.subject,
    )


def _start(job: ImageJob, *, ready: bool) -> None:
    """Start the process of a job; with `ready`, return when it holds its lock."""
    program = [sys.executable, "-m", _MODULE, msgspec.json.encode(job).decode()]
    quiet = subprocess.DEVNULL
    # The shell ends at once, so that a long-lived labctl has no child to wait for.
    with subprocess.Popen(
        ["sh", "-c", '"$@" &', "sh", *program],
        stdin=quiet,
        stdout=subprocess.PIPE if ready else quiet,
        stderr=quiet,
        start_new_session=True,
    ) as shell:
        if shell.stdout is not None:
            shell.stdout.readline()


def run_job(job: ImageJob) -> None:
    """Do a job, and store its failures."""
    steps: list[tuple[str, Callable[[ImageJob], None]]] = []
    if job.action == "load":
        steps = [("loaded in advance", _load)]
    if job.action == "save" and job.limit_bytes:
        steps += [("kept on this machine", _save)]
    if job.action == "save" and job.registry:
        # Also an image that could not be kept is pushed.
        steps += [(f"pushed to {job.registry}", _push)]
    failures = [text for step, do in steps if (text := _try_step(job, step, do))]
    if failures:
        job.cache.record_failure(job.reference, "\n".join(failures))


def _try_step(job: ImageJob, step: str, do: Callable[[ImageJob], None]) -> str:
    """Do one step; return why it failed and what to type, "" if it succeeded."""
    try:
        with assign_subject(job.subject):
            do(job)
    except LabError as error:
        return _describe_failure(job, step, error)
    return ""


def _describe_failure(job: ImageJob, step: str, error: LabError) -> str:
    why = f" ({error.why})" if error.why else ""
    text = f"{job.reference} was not {step}: {error.what}{why}"
    if not error.hint:
        return f"{text}; {_ADVICE[job.action]}"
    return add_next(text, error.hint)


def _load(job: ImageJob) -> None:
    image = job.cache.find(job.reference, job.architecture)
    if image is None or _is_on_server(job):
        return
    with suppress(LinkLostError):  # `labctl run` reports a lost server
        image_sources.send_archive(job.cache, image, job.build_argv(image_sources.LOAD))


def _is_on_server(job: ImageJob) -> bool:
    return _run(job, _PRESENT + job.reference).returncode == 0


def _save(job: ImageJob) -> None:
    """Keep the image. LinkLostError if its server ends first: the engine ends before sshd."""
    try:
        _copy_to_cache(job)
    except DiskFullError:
        raise
    except (LinkLostError, TransferError) as error:
        if isinstance(error, TransferError) and _has_engine(job):
            raise
        text = "its server was stopped or removed before the copy was complete"
        raise LinkLostError(text) from error


def _has_engine(job: ImageJob) -> bool:
    return _run(job, "docker version").returncode == 0


def _copy_to_cache(job: ImageJob) -> None:
    size_bytes, architecture = _inspect(job)
    # An archive is a little larger than the files of its image: each has a header.
    job.cache.make_room(int(size_bytes * 1.05))
    argv = job.build_argv(f"exec docker save {job.reference}")
    with image_sources.receive_blocks(argv) as blocks:
        job.cache.add(job.reference, architecture, blocks)


def _inspect(job: ImageJob) -> tuple[int, str]:
    """Return the size and the architecture of the image on the server."""
    done = _run(job, _PRESENT + job.reference)
    _require(done, "the server no longer has the image")
    size, architecture = done.stdout.split()
    return int(size), architecture


def _push(job: ImageJob) -> None:
    _, architecture = _inspect(job)
    reference = image_sources.registry_reference(job.registry, job.reference, architecture)
    tag = command("docker", "tag", job.reference, reference).render()
    push = command("docker", "push", "--quiet", reference).render()
    # Only a build starts a push, so the user must repeat it after the login.
    lines = (f"docker login {job.registry.partition('/')[0]}", f"docker push {reference}")
    hint = "\n".join(job.subject.ssh(line) for line in lines)
    _require(_run(job, f"{tag} && {push}"), "the server could not push it", hint)


def _run(job: ImageJob, line: str) -> subprocess.CompletedProcess[str]:
    argv = job.build_argv(line)
    return subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )


def _require(done: subprocess.CompletedProcess[str], what: str, hint: str = "") -> None:
    output = done.stderr.strip()[-300:]
    if done.returncode == image_sources.SSH_FAILED:
        raise LinkLostError(
            "lost the connection to the server", why=output, hint=lambda subject: subject.refresh
        )
    if done.returncode:
        raise TransferError(what, why=output, hint=hint)


def _describe(job: ImageJob) -> str:
    if job.action == "load":
        return f"uploading the image {job.reference} to the server"
    return f"keeping the image {job.reference} for the next server"


def main() -> None:
    """Do the job in argv, unless it is to load an image that is there.

    Prints an empty line once its lock is held.
    """
    os.nice(10)  # the run that has just started is more urgent
    job = decode_json(sys.argv[1], ImageJob)
    what = f"{job.action} {job.reference}"
    try:
        # Before the lock, since `labctl run` waits for that: a new server often has the image.
        if job.action == "load" and _is_on_server(job):
            return
        with hold_lock(Path(job.lock_file), _describe(job), wait_s=SAVE_S, is_command=False):
            with suppress(OSError):  # the command that waits for the line may have ended
                os.write(1, b"\n")
            run_job(job)
    except Exception as error:
        # Nobody reads the output of this process.
        job.cache.record_failure(job.reference, f"{what} failed: {error!r}")
        raise


if __name__ == "__main__":
    main()
