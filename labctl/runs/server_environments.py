"""The environment of runs without a container: its reference, and its build on the server."""

from __future__ import annotations

from labctl.config.packages import PackageList
from labctl.errors import BuildError
from labctl.events import Step
from labctl.lazy import lazy_imports
from labctl.model import Server
from labctl.runs import environment
from labctl.servers.agent import AgentClient
from labctl.servers.context import LabContext
from labctl.servers.job_queue import list_modules
from labctl.wire.runs import ENVIRONMENT

with lazy_imports(__name__):
    from labctl.runs import build_output, images, wheelhouse
    from labctl.wire import images as messages


def environment_reference(context: LabContext) -> str:
    """Return the name of the lab's environment, with a hash of everything that goes into it."""
    image = context.config.image
    packages = environment.read_list(context.config.root, image)
    args = _list_args(context, packages)
    digest = environment.hash_environment(environment.read_script(image), packages, args)
    return f"{ENVIRONMENT}:{digest[: images.DIGEST_DIGITS]}"


def _list_args(context: LabContext, packages: PackageList) -> dict[str, str]:
    """Return the script's variables: those of an image, without a base and what root installs."""
    image = context.config.image
    args = {**environment.list_args(image, packages), **images.build_args(context, image)}
    own = {name: value for name, value in args.items() if name not in ("BASE", "GIT")}
    modules = " ".join(list_modules(context))
    return {**own, "MODULES": modules} if modules else own


def build_environment(
    context: LabContext, server: Server, remote: AgentClient, wanted: str, of_run: str
) -> None:
    """Build the environment on the server; if another process does that already, wait for it.

    A build uses the pushed code, or the code snapshot of the run `of_run`.
    """
    image = context.config.image
    packages = environment.read_list(context.config.root, image)
    wheelhouse.push_wheelhouse(context, server, remote)
    name = "building the environment"
    context.reporter.emit(Step(name=name))
    request = messages.BuildEnvironmentRequest(
        lab=context.config.name,
        lab_id=context.lab_id,
        reference=wanted,
        script=environment.read_script(image),
        args=_list_args(context, packages),
        files=packages.files,
        has_code=packages.has_code,
        run=of_run,
        wheelhouse=bool(context.config.wheelhouse),
    )
    closing = remote.stream(
        messages.BUILD_ENVIRONMENT,
        request,
        on_reply=lambda _: None,
        on_bytes=build_output.BuildLines(context.reporter, name).feed,
    )
    if closing.code != 0:
        hints = (
            environment.suggest_repair(image, closing.tail),
            images.suggest_wheels(context, server, closing.tail, image.requirements),
            context.subject.ssh(f"cat {closing.log}   # the full log"),
        )
        raise BuildError(
            "the environment of the run could not be built",
            log_path=closing.log,
            why=build_output.summarize_build(closing.tail),
            hint="\n".join(filter(None, hints)),
        )
    context.reporter.emit(Step(name=name, done=True, detail=wanted))
