"""The image of a run: its reference, and how it gets onto the server."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from labctl.config import ImageConfig
from labctl.config.packages import PackageList
from labctl.errors import BuildError, UsageError
from labctl.events import SharedProgress, Step, report_lock_wait
from labctl.lazy import lazy_imports
from labctl.model import Server
from labctl.runs import environment
from labctl.servers.agent import AgentClient
from labctl.servers.context import LabContext
from labctl.wire.runs import ENVIRONMENT

if TYPE_CHECKING:
    from labctl.wire.images import BuildImageRequest

# most runs find their image on the server
with lazy_imports(__name__):
    from labctl.runs import (
        build_output,
        image_jobs,
        image_sources,
        server_environments,
        stored_images,
        wheelhouse,
    )
    from labctl.sync import ignore
    from labctl.wire import images as messages

# The repository of all images that labctl builds for labs.
BUILT = "labctl/built"
DIGEST_DIGITS = 16
# seconds a second process waits while the first gets the same image onto the server
IMAGE_S = 3600.0
COPY = re.compile(r"^\s*(?:ONBUILD\s+)?(?:COPY|ADD)\s+(.*)$", re.IGNORECASE)
# A step that can read any file of the directory without copying it.
MOUNT = re.compile(r"^\s*(?:ONBUILD\s+)?RUN\s.*--mount=(?!type=(?:cache|tmpfs|secret|ssh)\b)", re.I)


def build_args(context: LabContext, image: ImageConfig) -> dict[str, str]:
    """Return lab.yaml's build arguments, overridden by this machine's settings."""
    args = dict(image.args)
    if context.config.base_image:
        args["BASE"] = context.config.base_image
    if context.config.package_index:
        args["PIP_INDEX_URL"] = context.config.package_index
    return args


def image_reference(context: LabContext) -> str:
    """Return the image of a run. For a build, its tag is a hash of everything that goes into it.

    The name has no lab in it, so labs with the same content share the image. A registry that can
    replace the image is part of the content: it decides for the labs that name it, and no others.
    UsageError for a lab whose runs are plain processes or jobs.
    """
    if context.config.submits_jobs:
        raise UsageError(
            "this needs a container, and the runs of this lab are jobs of Slurm",
            why="a job uses the programs of its machine",
            hint="labctl config   # shows where executor is set",
        )
    if not context.config.uses_containers:
        raise UsageError(
            "this needs a Docker container, and the runs of this lab have none",
            why="on a cluster, and with `executor: process` in lab.yaml, labctl uses no Docker",
            hint="labctl config   # shows the provider, and where executor is set",
        )
    image = context.config.image
    if image.reference:
        return image.reference
    if image.environment_file:
        packages = environment.read_list(context.config.root, image)
        args = _list_all_args(context, packages)
        recipe = environment.read_dockerfile(image)
        return _name_image(environment.hash_environment(recipe, packages, args), image)
    args = build_args(context, image)
    directory = context.config.root / image.build
    # Files that are never pushed cannot be in the image: a pull must not change the tag.
    absent = ignore.NEVER_AT_TOP if directory == context.config.root else frozenset[str]()
    return _name_image(content_hash(directory, args, absent), image)


def _list_all_args(context: LabContext, packages: PackageList) -> dict[str, str]:
    """Return the build arguments of an image that is made of packages."""
    image = context.config.image
    return {**environment.list_args(image, packages), **build_args(context, image)}


def _name_image(digest: str, image: ImageConfig) -> str:
    if image.registry:
        digest = hashlib.sha256(f"{digest}\0{image.registry}".encode()).hexdigest()
    return f"{BUILT}:{digest[:DIGEST_DIGITS]}"


def content_hash(
    directory: Path, args: dict[str, str], absent: frozenset[str] = frozenset()
) -> str:
    """Hash the Dockerfile, .dockerignore, the build arguments and every file that is copied.

    `absent` are names at the top of the directory that are left out.
    """
    digest = hashlib.sha256(repr(sorted(args.items())).encode())
    text = (directory / "Dockerfile").read_text(encoding="utf-8", errors="replace")
    digest.update(text.encode())
    ignored = directory / ".dockerignore"
    if ignored.is_file():
        digest.update(b"\0.dockerignore\0" + hashlib.sha256(ignored.read_bytes()).digest())
    for path in sorted(list_copied_files(directory, text)):
        name = path.relative_to(directory)
        if name.parts[0] in absent:
            continue
        mode = "x" if path.stat().st_mode & 0o100 else ""  # COPY keeps it
        digest.update(f"\0{name}\0{mode}".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def list_copied_files(directory: Path, dockerfile: str) -> set[Path]:
    """Return the files of the context that the Dockerfile copies, without links and .git.

    These are all files if it also takes some in a way that is not understood here.
    """
    matches: set[Path] = set()
    for line in dockerfile.replace("\\\n", " ").splitlines():
        for pattern in _list_patterns(line):
            paths = [] if pattern in ("", ".") else list(directory.glob(pattern))
            for path in paths or [directory]:
                matches.update(p for p in (path.rglob("*") if path.is_dir() else [path]))
    return {
        p
        for p in matches
        if p.is_file()
        and not p.is_symlink()
        and not {".git", ".labctl"} & {*p.relative_to(directory).parts}
    }


def _list_patterns(line: str) -> list[str]:
    """Return the names, perhaps with wildcards, that a line takes from the context; "" for all."""
    if MOUNT.match(line):
        return [""]
    match = COPY.match(line)
    if not match or "--from=" in line:
        return []
    words = [w for w in re.split(r"[\s,\[\]\"]+", match[1]) if w and not w.startswith("--")]
    return [
        "" if "$" in word else word.strip("/").removeprefix("./")
        for word in words[:-1]
        if "://" not in word and not word.startswith("<<")
    ]


def ensure_image(
    context: LabContext,
    server: Server,
    remote: AgentClient,
    wanted: str,
    of_run: str = "",
    before_build: Callable[[], None] = lambda: None,
) -> None:
    """Make the image `wanted` present on the server, from the nearest place that has it.

    The places are the server, this machine's Docker Engine, the archives that this machine keeps,
    the lab's store, and a registry. If none has it, the server builds it, unless the image is a
    reference.

    A build uses the pushed code, or the code snapshot of the run `of_run`; `before_build` is called
    first. If another process already gets the same image for this server, wait for it.
    """
    if wanted.startswith(f"{ENVIRONMENT}:"):
        if not has_image(remote, wanted):
            before_build()
            server_environments.build_environment(context, server, remote, wanted, of_run)
        return
    image = context.config.image
    what = f"getting the image {wanted}"
    with _lock_image(context, lock_name(server, wanted), what) as context:
        if has_image(remote, wanted):
            return
        if not image.is_built:
            image_sources.provide_image(context, server, remote, wanted)
        elif not image_sources.load_built(context, server, remote, wanted):
            before_build()
            _build_once(context, server, remote, wanted, of_run)


def ensure_current_image(
    context: LabContext, server: Server, remote: AgentClient, wanted: str
) -> str:
    """Make the finished image `wanted` present on the server; return the hash of its content.

    If this machine has an image of this name, the server gets that one, even if it has another:
    the image may have been built again.
    """
    what = f"getting the image {wanted}"
    with _lock_image(context, lock_name(server, wanted), what) as context:
        current = image_sources.hash_local_image(wanted)
        content = _find_content(remote, wanted)
        if content and current in ("", content):
            return content
        if content:
            image_sources.send_local_image(context, server, wanted)
        elif not has_image(remote, wanted):
            image_sources.provide_image(context, server, remote, wanted)
    return _find_content(remote, wanted)


@contextmanager
def _lock_image(context: LabContext, name: str, what: str) -> Iterator[LabContext]:
    """Hold the lock of an image. Work in the yielded context is shown to those who wait for it."""
    with report_lock_wait(
        context.reporter,
        lambda on_wait, on_progress: context.state.lock(
            name,
            what,
            wait_s=IMAGE_S,
            is_command=False,
            on_wait=on_wait,
            on_progress=on_progress,
        ),
    ):
        share = functools.partial(context.state.note_progress, name)
        yield context.replace_reporter(SharedProgress(context.reporter, share))


def lock_name(server: Server, wanted: str) -> str:
    """Return the name of the lock for one image on one server. All labs use the same lock."""
    return "image-" + hashlib.sha256(f"{server.id}\0{wanted}".encode()).hexdigest()[:24]


def _build_once(
    context: LabContext,
    server: Server,
    remote: AgentClient,
    wanted: str,
    of_run: str,
) -> None:
    """Build an image. If another process of this machine builds it, wait, and load what it kept.

    Servers whose images are not kept do not wait for each other.
    """
    if not image_jobs.can_keep(context):
        _build(context, server, remote, wanted, of_run)
        image_jobs.start_save(context, server, wanted)
        return
    lock, what = "build-" + wanted.rpartition(":")[2], f"building the image {wanted}"
    with _lock_image(context, lock, what) as context:
        image_jobs.wait_for_save(context, wanted)
        architecture = image_sources.find_architecture(context, server)
        if image_sources.open_cache(context).find(wanted, architecture) is None:
            _build(context, server, remote, wanted, of_run)
            image_jobs.start_save(context, server, wanted)
            return
    if not image_sources.load_archive(context, server, wanted):
        _build(context, server, remote, wanted, of_run)


def find_wanted_image(context: LabContext) -> str:
    """Return the image that a run would use now.

    "" if its Dockerfile or list is missing, or if runs are plain processes.
    """
    if not context.config.uses_containers:
        return ""
    image = context.config.image
    source = image.environment_file or f"{image.build}/Dockerfile"
    if image.is_built and not (context.config.root / source).is_file():
        return ""
    return image_reference(context)


def start_load(context: LabContext, server: Server) -> None:
    """Start to load the lab's image on a new server, if this machine keeps it."""
    wanted = find_wanted_image(context)
    if wanted and context.config.image.is_built:
        image_jobs.start_load(context, server, wanted, lock_name(server, wanted))


def start_stored_load(context: LabContext, server: Server) -> None:
    """Start to load the lab's image from its store, unless this machine keeps it."""
    wanted = find_wanted_image(context) if context.config.should_store_images else ""
    architecture = image_sources.find_architecture(context, server)
    if not wanted or image_sources.open_cache(context).find(wanted, architecture):
        return
    stored_images.start_load(context, context.open_agent(server), wanted, architecture)


def _build(
    context: LabContext,
    server: Server,
    remote: AgentClient,
    wanted: str,
    of_run: str,
) -> None:
    image, base = context.config.image, context.config.base_image
    if base and not has_image(remote, base):
        image_sources.provide_image(context, server, remote, base)
    wheelhouse.push_wheelhouse(context, server, remote)
    name = "building the image"
    context.reporter.emit(Step(name=name))
    lines = build_output.BuildLines(context.reporter, name)
    request = _make_request(context, wanted, of_run)
    closing = remote.stream(
        messages.BUILD_IMAGE,
        request,
        on_reply=lambda _: None,
        on_bytes=lines.feed,
    )
    if closing.code != 0:
        raise BuildError(
            "the image build failed",
            log_path=closing.log,
            why=build_output.summarize_build(closing.tail, context.config.base_image),
            hint="\n".join(
                filter(
                    None,
                    [
                        environment.suggest_repair(image, closing.tail),
                        suggest_wheels(context, server, closing.tail, image.requirements),
                        context.subject.ssh(f"cat {closing.log}   # the full log"),
                    ],
                )
            ),
        )
    context.reporter.emit(Step(name=name, done=True, detail=wanted))
    architecture = image_sources.find_architecture(context, server)
    stored_images.store_image(context, server, remote, request, architecture)


def suggest_wheels(
    context: LabContext, server: Server, output: Sequence[str], package_file: str = ""
) -> str:
    """Return what to type if a build lacked a wheel or an index; "" after other errors."""
    if not context.config.wheelhouse:
        return wheelhouse.suggest_cached_wheels(context.paths.cache_dir, output)
    arch = context.load_facts(server).arch
    return wheelhouse.suggest_download(context.config.wheelhouse, output, arch, package_file)


def _make_request(context: LabContext, wanted: str, of_run: str) -> BuildImageRequest:
    image = context.config.image
    request = messages.BuildImageRequest(
        lab=context.config.name,
        lab_id=context.lab_id,
        directory=image.build,
        tag=wanted,
        run=of_run,
        args=build_args(context, image),
        wheelhouse=bool(context.config.wheelhouse),
    )
    if not image.environment_file:
        return request
    packages = environment.read_list(context.config.root, image)
    return request._replace(
        args=_list_all_args(context, packages),
        dockerfile=environment.read_dockerfile(image),
        files=packages.files,
        has_code=packages.has_code,
    )


def _find_content(remote: AgentClient, reference: str) -> str:
    request = messages.FindImagesRequest((reference,))
    return remote.call(messages.FIND_IMAGES, request).contents.get(reference, "")


def has_image(remote: AgentClient, reference: str) -> bool:
    """Return whether an image is on the server."""
    request = messages.FindImagesRequest((reference,))
    return bool(remote.call(messages.FIND_IMAGES, request).ids.get(reference))
