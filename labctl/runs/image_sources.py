"""Get an image onto a server without a build, from the nearest place that has it.

The places are this machine's Docker Engine, the archives that this machine keeps, the lab's store,
and a registry.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from labctl.commands.ssh import command_argv
from labctl.errors import LabError, LinkLostError, TransferError
from labctl.events import Note, Progress, Step
from labctl.parallel import CanceledError, is_canceled, on_cancel
from labctl.runs import stored_images
from labctl.runs.build_output import PullLines, join_plain
from labctl.runs.image_cache import (
    CHUNK_BYTES,
    CachedImage,
    DamagedArchiveError,
    ImageCache,
    read_verified,
)
from labctl.shell import portable_line
from labctl.text import add_next, duration_text
from labctl.wire import docker_archives
from labctl.wire.docker_archives import DockerCommandError
from labctl.wire.images import PULL_IMAGE, BuildResult, PullImageRequest, hash_image_content

if TYPE_CHECKING:
    from labctl.config import LabConfig
    from labctl.model import Server
    from labctl.servers.agent import AgentClient
    from labctl.servers.context import LabContext

LOAD = "docker load --quiet"
# exit code of ssh itself; those of docker are smaller
SSH_FAILED = 255
# After this many seconds of sending, the remaining time is estimated from the speed so far. If it
# is longer than a typical build, the server builds the image instead.
MEASURE_S = 10.0
MOST_REMAINING_S = 300.0
# Docker's names of architectures, by those of `uname -m`
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


class SlowLinkError(TransferError):
    """Sending an archive would take longer than building the image."""


def open_cache(context: LabContext) -> ImageCache:
    return ImageCache(context.paths.cache_dir / "images", context.config.image_cache_bytes)


def find_architecture(context: LabContext, server: Server) -> str:
    """Return Docker's name for the server's architecture, "" if it is unknown."""
    arch = context.load_facts(server).arch
    return _ARCHITECTURES.get(arch, arch)


def load_built(context: LabContext, server: Server, remote: AgentClient, wanted: str) -> bool:
    """Get a built image from the nearest place that has it; False if it must be built."""
    try:
        if send_local_image(context, server, wanted, most_s=MOST_REMAINING_S):
            return True
        if load_archive(context, server, wanted):
            return True
    except TransferError as error:
        _note_failure(context, error)
    architecture = find_architecture(context, server)
    if stored_images.load_stored(context, remote, wanted, architecture):
        return True
    return pull_built(context, server, remote, wanted)


def load_archive(context: LabContext, server: Server, wanted: str) -> bool:
    """Load this machine's archive of an image on the server; False without a usable one.

    LinkLostError if the connection to the server is lost.
    """
    cache, architecture = open_cache(context), find_architecture(context, server)
    image = cache.find(wanted, architecture)
    if image is None:
        if other := cache.find(wanted):
            kept = other.architecture
            text = f"the archive of {wanted} is for {kept}; the server is {architecture}"
            context.reporter.emit(Note(text=text))
        return False
    argv = command_argv(
        str(context.connections.config_path(server.id)), server.id, portable_line(LOAD)
    )
    name = f"loading {wanted}"
    context.reporter.emit(Step(name=name))
    try:
        send_archive(cache, image, argv, _progress(context, name, image.size_bytes))
    except TransferError as error:
        context.reporter.emit(Step(name=name, done=True, brief=True))
        _note_failure(context, error)
        return False
    context.reporter.emit(Step(name=name, done=True))
    return True


def send_archive(
    cache: ImageCache,
    image: CachedImage,
    argv: list[str],
    on_sent: Callable[[int], None] = lambda sent: None,
) -> None:
    """Send an archive to `argv`, a `docker load` over ssh; delete the archive if it is damaged.

    TransferError if the archive is damaged or gone, the server refuses it, or the link is too slow.
    """
    try:
        blocks = read_verified(cache.path(image), image)
        send_blocks(argv, pace(blocks, image.size_bytes, MOST_REMAINING_S, on_sent))
    except OSError as error:
        raise TransferError(f"cannot read {cache.path(image)}", why=str(error)) from error
    except DamagedArchiveError:
        cache.remove(image)
        raise
    cache.mark_used(image)


def pull_built(context: LabContext, server: Server, remote: AgentClient, wanted: str) -> bool:
    """Pull a built image from the lab's registry; False without a registry or the image in it."""
    registry, architecture = context.config.image.registry, find_architecture(context, server)
    if not registry:
        return False
    if not architecture:
        text = f"the server's architecture is unknown, so it pulls nothing from {registry}"
        text = add_next(text, context.subject.up)
        context.reporter.emit(Note(text=text, level="warning"))
        return False
    reference = registry_reference(registry, wanted, architecture)
    closing = _pull_on_server(context, remote, reference, wanted)
    if closing.code != 0:
        login = context.subject.ssh(f"docker login {registry.partition('/')[0]}")
        # Also before the first build of an image; docker tells it from a refusal only in words.
        why, tag = "; ".join(closing.tail[-1:]), reference.rpartition(":")[2]
        text = f"{registry} gave the server no {tag}, so it builds it: {why}"
        hint = f"{login}   # if the registry needs a login"
        context.reporter.emit(Note(text=add_next(text, hint)))
    return closing.code == 0


def registry_reference(registry: str, wanted: str, architecture: str) -> str:
    """Return the name of a built image in a registry.

    The architecture is part of the tag, so that images of two architectures do not replace each
    other.
    """
    return f"{registry}:{wanted.rpartition(':')[2]}-{architecture}"


def provide_image(context: LabContext, server: Server, remote: AgentClient, wanted: str) -> None:
    """Get a finished image onto the server: send it if this machine has it, else pull it there."""
    if not send_local_image(context, server, wanted):
        pull(context, remote, wanted)


def pull(context: LabContext, remote: AgentClient, wanted: str) -> None:
    """Pull an image on the server; LabError if that fails."""
    closing = _pull_on_server(context, remote, wanted)
    if closing.code != 0:
        source = _find_source(context.config, wanted)
        raise LabError(
            f"the server cannot pull {wanted}",
            why=join_plain([*filter(None, [source]), *closing.tail[-3:]]),
            hint=f"docker pull {wanted}   # on this machine, which then sends the image",
        )


def _find_source(config: LabConfig, wanted: str) -> str:
    """Say which setting names the image; "" if none does, as in `labctl serve --image`."""
    origins = {
        config.base_image: config.origins.get("base_image", ""),
        config.image.reference: config.origins.get("image", "the default of image: in lab.yaml"),
    }
    return f"{origins[wanted]} names it" if wanted in origins else ""


def _pull_on_server(
    context: LabContext, remote: AgentClient, reference: str, tag: str = ""
) -> BuildResult:
    name = f"pulling {reference} on the server"
    context.reporter.emit(Step(name=name))
    closing = remote.stream(
        PULL_IMAGE,
        PullImageRequest(reference, tag),
        on_reply=lambda _: None,
        on_bytes=PullLines(context.reporter, name).feed,
    )
    # Without a ✓ after a failure: the build that follows has a bar of its own.
    context.reporter.emit(Step(name=name, done=True, brief=closing.code != 0))
    return closing


def send_local_image(
    context: LabContext, server: Server, wanted: str, *, most_s: float = float("inf")
) -> bool:
    """Pipe `docker save` here into `docker load` there; False if this machine lacks the image.

    For labs without a container registry, and for images that exist only on this machine.
    SlowLinkError if it would take longer than `most_s`, TransferError if either engine fails.
    """
    local = _inspect_local_image(wanted)
    if local is None:
        return False
    size_bytes, architecture = local
    needed = find_architecture(context, server)
    if needed not in ("", architecture):
        text = f"{wanted} on this machine is for {architecture}; the server is {needed}"
        context.reporter.emit(Note(text=text))
        return False
    name = f"sending {wanted}"
    context.reporter.emit(Step(name=name))
    config = str(context.connections.config_path(server.id))
    load = command_argv(config, server.id, portable_line(LOAD))
    try:
        with receive_blocks(["docker", "save", wanted]) as blocks:
            report = _progress(context, name, size_bytes)
            send_blocks(load, pace(blocks, size_bytes, most_s, report))
    except SlowLinkError:
        context.reporter.emit(Step(name=name, done=True, brief=True))
        raise
    except TransferError as error:
        why = f"{error.what}: {error.why}" if error.why else error.what
        what = f"cannot send {wanted} to the server"
        raise TransferError(what, why=why, hint="labctl doctor") from error
    context.reporter.emit(Step(name=name, done=True))
    return True


def hash_local_image(wanted: str) -> str:
    """Return the hash of the content of an image of this machine's engine; "" if it lacks it."""
    output = _inspect_image(wanted, "{{.Created}} {{json .RootFS.Layers}}")
    if output is None:
        return ""
    created, _, layers = output.partition(" ")
    return hash_image_content(created, json.loads(layers) or [])


def _inspect_local_image(wanted: str) -> tuple[int, str] | None:
    """Return size and architecture of an image of this machine's engine; None if it lacks it."""
    output = _inspect_image(wanted, "{{.Size}} {{.Architecture}}")
    if output is None:
        return None
    size, architecture = output.split()
    return int(size), architecture


def _inspect_image(wanted: str, template: str) -> str | None:
    """Inspect an image of this machine's engine; None if it lacks it or cannot send it."""
    if not shutil.which("docker") or not shutil.which("ssh"):
        return None
    inspect = ["docker", "image", "inspect", "--format", template, wanted]
    inspected = subprocess.run(inspect, capture_output=True, text=True, check=False)
    return inspected.stdout if inspected.returncode == 0 else None


@contextmanager
def receive_blocks(argv: list[str]) -> Iterator[Iterator[bytes]]:
    """Run a `docker save`, perhaps over ssh, and yield its output.

    If the command fails, the output ends with a TransferError, or a LinkLostError if ssh failed: a
    reader of it never mistakes the first part of an archive for all of it.
    """
    with docker_archives.open_saved(argv) as archive:
        yield _read_blocks(archive)


def _read_blocks(archive: docker_archives.SavedArchive) -> Iterator[bytes]:
    try:
        while block := archive.read(CHUNK_BYTES):
            yield block
    except DockerCommandError as error:
        if error.code == SSH_FAILED:
            raise LinkLostError(
                "lost the connection to the server",
                why=error.output,
                hint=lambda subject: subject.refresh,
            ) from error
        what = f"`docker save` ended with exit code {error.code}"
        raise TransferError(what, why=error.output) from error


def send_blocks(argv: list[str], blocks: Iterable[bytes]) -> None:
    """Run `argv`, a `docker load` over ssh, and send it `blocks`.

    LinkLostError if ssh fails, TransferError if the command does, CanceledError if another part
    that runs beside this one has failed. If `blocks` raises, the command never gets the end of its
    input, so it loads nothing.
    """
    try:
        docker_archives.feed_load(argv, lambda stdin: stdin.writelines(blocks), on_cancel)
    except DockerCommandError as error:
        if is_canceled():
            raise CanceledError from error  # `on_cancel` has ended the command
        if error.code == SSH_FAILED:
            raise LinkLostError(
                "lost the connection to the server while sending an image",
                why=error.output,
                hint=lambda subject: f"{subject.refresh}\n{subject.up}",
            ) from error
        what = f"`docker load` on the server ended with exit code {error.code}"
        if error.code < 0:
            what = f"ssh was ended by {signal.Signals(-error.code).name} while it sent an image"
        raise TransferError(what, why=error.output) from error


def pace(
    blocks: Iterable[bytes], total: int, most_s: float, on_sent: Callable[[int], None]
) -> Iterator[bytes]:
    """Yield `blocks` and report the bytes sent; SlowLinkError if over `most_s` seconds remain."""
    started_s, sent = time.monotonic(), 0
    for block in blocks:
        yield block
        sent += len(block)
        on_sent(sent)
        elapsed_s = time.monotonic() - started_s
        remaining_s = (total - sent) * elapsed_s / max(sent, 1)
        if elapsed_s > MEASURE_S and remaining_s > most_s:
            why = f"it would take {duration_text(remaining_s)} more; a build is usually faster"
            raise SlowLinkError("the link is too slow to send the image", why=why)


def _progress(context: LabContext, name: str, total: int) -> Callable[[int], None]:
    def report(sent: int) -> None:
        # The engine unpacks what has arrived, which takes as long again.
        detail = "unpacking" if sent >= total else ""
        event = Progress(name=name, done=sent, total=max(total, sent), unit="bytes", detail=detail)
        context.reporter.emit(event)

    return report


def _note_failure(context: LabContext, error: LabError) -> None:
    text = f"{error.what}: {error.why}" if error.why else error.what
    context.reporter.emit(Note(text=text, level="warning"))
