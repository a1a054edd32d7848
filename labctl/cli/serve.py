"""The command serve: a model, or any image that speaks HTTP, behind a local port."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import click
import msgspec

from labctl.cli import serve_model
from labctl.cli.completion_values import complete_runs
from labctl.cli.exit_codes import clean
from labctl.cli.interrupt import close_at_interrupt, wait_until_interrupted
from labctl.cli.number_range import NumberRange
from labctl.cli.options import json_option, open_lab, yes_option
from labctl.cli.own_command import split_words
from labctl.cli.tables import print_json
from labctl.cli.wrapping import print_message
from labctl.errors import UsageError
from labctl.lazy import lazy_imports
from labctl.state.uses import hold_use

if TYPE_CHECKING:
    from labctl.lab import Lab
    from labctl.model import Server
    from labctl.wire.services import ServiceRequest

with lazy_imports(__name__):
    from labctl import shell
    from labctl.runs import runs
    from labctl.services import model_serving


# the words after `--`, in the context of the command
IMAGE_ARGS = "labctl.serve.args"
MOST_SHOWN_COLUMNS = 8
LONGEST_LOADING_S = 24 * 3600


class ServeOptions(NamedTuple):
    """The options of the command; None and "" mean not given."""

    checkpoint: str = ""
    push: bool = False
    batch: int | None = None
    image: str = ""
    port: int | None = None
    env: tuple[str, ...] = ()
    local_port: int = 0
    load_time: int = 600
    detach: bool = False
    stop: bool = False
    yes: bool = False


# What --model cannot be combined with.
WITHOUT_MODEL = ("checkpoint", "push", "batch", "image", "port", "stop")


class ServeCommand(click.Command):
    """Notes the words after `--`, which click puts among those before it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        _, ctx.meta[IMAGE_ARGS] = split_words(args)
        return super().parse_args(ctx, args)


@click.command("serve", cls=ServeCommand)
@click.argument("words", nargs=-1, metavar="[RUN] [-- ARGS...]", shell_complete=complete_runs)
@click.option("--checkpoint", default="", metavar="NAME", help="Serve this checkpoint of the run.")
@click.option("--push", is_flag=True, help="Use the code on this machine instead of the run's.")
@click.option(
    "--batch",
    type=NumberRange(32, 1, 4096),
    metavar="N",
    help="Largest batch of images (32); 1: no batching.",
)
@click.option("--image", default="", help="Serve this Docker image instead of a model.")
@click.option(
    "--port", type=NumberRange(8000, 1, 65535), metavar="N", help="Port that --image listens on."
)
@click.option(
    "--env", "-e", multiple=True, metavar="NAME=VALUE", help="Set a variable in the container."
)
@click.option(
    "--local-port",
    type=NumberRange(8000, 0, 65535),
    default=0,
    metavar="N",
    help="Use this port on this machine.",
)
@click.option(
    "--load-time",
    type=NumberRange(1800, 1, LONGEST_LOADING_S),
    default=600,
    metavar="S",
    help="Fail if loading takes longer (600 seconds).",
)
@click.option("--detach", "-d", is_flag=True, help="Keep the forward open in the background.")
@click.option("--stop", is_flag=True, help="Stop serving.")
@serve_model.model_options
@yes_option
@json_option
@click.pass_context
def serve_command(
    ctx: click.Context, /, words: tuple[str, ...], json_: bool, **values: Any
) -> None:
    """Serve the model of RUN (default: the latest run) as POST /predict, through a forward.

    The model runs on the server. The project's predict.py defines how it is loaded; its weights
    must be safetensors. ARGS after -- become the command of an --image. With --model, a language
    model answers as OpenAI's API does; labctl computes first whether it fits.

    \b
    labctl serve
    curl -F image=@digit.png http://127.0.0.1:8000/predict
    labctl serve --image ollama/ollama --port 11434
    labctl serve --model Qwen/Qwen2.5-1.5B-Instruct --ask "2+2?"
    labctl serve --stop
    """
    about_model = {name: values.pop(name) for name in serve_model.ModelOptions._fields}
    model = serve_model.ModelOptions(
        **{name: value for name, value in about_model.items() if value}
    )
    options = ServeOptions(**values)
    if model.model:
        _require_model_alone(words, options)
    else:
        serve_model.require_model(model)
    lab = open_lab(ctx, yes=options.yes, quiet=json_)
    if model.model:
        env = dict(_parse_assignment(text) for text in options.env)
        served = serve_model.RequestedModel(
            env, options.local_port, options.load_time, options.detach, json_
        )
        with close_at_interrupt(ctx, "interrupted" if options.detach else "closed"):
            serve_model.serve_model(lab, model, served)
        return
    if words and not options.image and not options.stop:
        if args := ctx.meta[IMAGE_ARGS]:
            call = ("labctl", "serve", "--image", "IMAGE", "--port", "8000", "--", *args)
            raise UsageError(
                "ARGS need --image",
                why="the words after -- become the command of an image",
                hint=shell.command(*call).render(),
            )
        runs.find_run(lab.context, words[0])  # a misspelled name before a missing server
    server = lab.context.get_server()
    if options.stop:
        _stop(lab, server, json_)
        return
    with close_at_interrupt(ctx, "interrupted" if options.detach else "closed"):
        request = _build_request(lab, server, words, options)
        _serve(lab, server, request, options, json_)


def _require_model_alone(words: tuple[str, ...], options: ServeOptions) -> None:
    """UsageError if --model is combined with what is about a run or an image."""
    given = [f"--{name}" for name in WITHOUT_MODEL if getattr(options, name)]
    given += ["RUN"] if words else []
    if given:
        raise UsageError(
            f"--model cannot be combined with {given[0]}",
            why="it serves a language model instead of a run's model or an image",
            hint="labctl serve --model Qwen/Qwen2.5-1.5B-Instruct",
        )


def _stop(lab: Lab, server: Server, json_: bool) -> None:
    stopped = model_serving.stop(lab.context, server)
    if json_:
        print_json({"stopped": stopped})
    else:
        text = f"stopped: {', '.join(stopped)}" if stopped else "nothing was being served"
        print_message(text)


def _build_request(
    lab: Lab, server: Server, words: tuple[str, ...], options: ServeOptions
) -> ServiceRequest:
    env = dict(_parse_assignment(text) for text in options.env)
    if options.image:
        if not options.port:
            hint = f"labctl serve --image {options.image} --port 8000"
            raise UsageError("--image needs --port, the port that it listens on", hint=hint)
        return model_serving.request_image(
            lab.context,
            server,
            options.image,
            options.port,
            command=words,
            env=env,
            loading_s=options.load_time,
        )
    if options.port:
        hint = "labctl serve --local-port PORT"
        raise UsageError("--port needs --image, which listens on it", hint=hint)
    if len(words) > 1:
        raise UsageError("only one run can be served", hint=f"labctl serve {words[0]}")
    if options.batch:
        env["LABCTL_SERVE_MAX_BATCH"] = str(options.batch)
    choice = model_serving.ServeChoice(
        run=words[0] if words else "",
        checkpoint=options.checkpoint,
        push=options.push,
        env=env,
        loading_s=options.load_time,
    )
    return model_serving.request_model(lab.context, server, choice)


def _parse_assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise UsageError(f"{text!r} is not NAME=VALUE", hint="labctl serve -e NAME=VALUE")
    return name, value


def _serve(
    lab: Lab, server: Server, request: ServiceRequest, options: ServeOptions, json_: bool
) -> None:
    port = options.local_port
    if options.detach:
        detached = model_serving.forward_detached(lab.context, server, request, port)
        _print_address(request, detached.url, detached.local_port, json_)
        return
    with (
        hold_use(lab.context.state, lab.id, "forward"),
        model_serving.forward(lab.context, server, request, port) as forward,
    ):
        _print_address(request, forward.url, forward.local_port, json_)
        text = "Press Ctrl-C to close the forward. To stop the model too: labctl serve --stop"
        print_message(text)
        wait_until_interrupted([forward])


def _format_request(columns: tuple[str, ...]) -> str:
    """Return the start of a command that asks the model, for one with few columns."""
    if not columns:
        return "curl -F image=@PICTURE"
    values = ", ".join("0" for _ in columns[:MOST_SHOWN_COLUMNS])
    more = ", ..." if len(columns) > MOST_SHOWN_COLUMNS else ""
    body = f'{{"rows": [[{values}{more}]]}}'
    return f"curl -H 'Content-Type: application/json' -d '{body}'"


def _print_address(request: ServiceRequest, url: str, port: int, json_: bool) -> None:
    url = url.rstrip("/")
    report = {"service": request.name, "url": url}
    if request.model is None:
        report["image"] = request.image
        lines = [f"{request.image}: {url}"]
    else:
        model = model_serving.check_health(port)
        report |= msgspec.to_builtins(model)
        lines = [
            f"run {model.run}, {model.checkpoint}, {model.classes} classes: {url}",
            f"  {_format_request(model.columns)} {url}/predict",
            f"  {url}/healthz  {url}/metrics",
        ]
    if json_:
        print_json({"serve": report})
    else:
        click.echo(clean("\n".join(lines)))
