"""serve."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import click

from labctl.cli.options import json_option, open_lab, yes_option

if TYPE_CHECKING:
    from labctl.lab import Lab
    from labctl.model import Server
    from labctl.services.services import ServiceRequest


@click.command("serve")
@click.argument("words", nargs=-1, metavar="[RUN] [-- ARGS...]")
@click.option("--checkpoint", default="", metavar="NAME", help="One of the run's checkpoints.")
@click.option("--push", is_flag=True, help="Load it with the code as it is here, not the run's.")
@click.option("--batch", default=0, metavar="N", help="Images at once (32); 1: no batching.")
@click.option("--image", default="", help="Any image that listens at --port, instead of a model.")
@click.option("--port", default=0, metavar="N", help="Where --image listens in its container.")
@click.option("--env", "-e", multiple=True, metavar="NAME=VALUE", help="Set in the container.")
@click.option("--local-port", default=0, metavar="N", help="The port on this machine.")
@click.option("--load-time", default=600, metavar="S", help="How long loading may take (600).")
@click.option("--detach", "-d", is_flag=True, help="Keep the forward after this terminal closes.")
@click.option("--stop", is_flag=True, help="End what is served.")
@yes_option
@json_option
@click.pass_context
def serve_command(ctx: click.Context, /, words: tuple[str, ...], json_: bool, **given: Any) -> None:
    """The model of RUN (the latest) behind POST /predict, on the server, through a forward.

    The project's predict.py says how it is loaded; safetensors only. What follows -- goes to the
    command of an --image.

    \b
    labctl serve
    curl -F image=@digit.png http://127.0.0.1:8000/predict
    labctl serve --image ollama/ollama --port 11434
    labctl serve --stop
    """
    lab = open_lab(ctx, yes=given["yes"], quiet=json_)
    server = lab.ground.server()
    if given["stop"]:
        _stop(lab, server, json_)
        return
    wanted = _wanted(lab, server, words, given)
    _serve(lab, server, wanted, given, json_)


def _stop(lab: Lab, server: Server, json_: bool) -> None:
    from labctl.cli.screen import as_json
    from labctl.services import model_serving

    ended = model_serving.stop(lab.ground, server)
    if json_:
        as_json({"stopped": ended})
    else:
        click.echo(f"ended: {', '.join(ended)}" if ended else "nothing was served", err=True)


def _wanted(
    lab: Lab, server: Server, words: tuple[str, ...], given: dict[str, Any]
) -> ServiceRequest:
    from labctl.errors import UsageError
    from labctl.services import model_serving

    env = dict(_pair(one) for one in given["env"])
    if given["image"]:
        if not 0 < given["port"] < 65536:
            hint = f"labctl serve --image {given['image']} --port 8000"
            raise UsageError("--image needs --port: where it listens", hint=hint)
        return model_serving.of_image(
            lab.ground,
            server,
            given["image"],
            given["port"],
            command=words,
            env=env,
            loading_s=given["load_time"],
        )
    if given["port"]:
        hint = "labctl serve --local-port PORT"
        raise UsageError("--port is where an --image listens", hint=hint)
    if len(words) > 1:
        raise UsageError("one run at a time", hint=f"labctl serve {words[0]}")
    if given["batch"]:
        env["LABCTL_SERVE_MAX_BATCH"] = str(given["batch"])
    choice = model_serving.Choice(
        run=words[0] if words else "",
        checkpoint=given["checkpoint"],
        push=given["push"],
        env=env,
        loading_s=given["load_time"],
    )
    return model_serving.of_model(lab.ground, server, choice)


def _pair(text: str) -> tuple[str, str]:
    from labctl.errors import UsageError

    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise UsageError(f"{text!r} is no NAME=VALUE", hint="labctl serve -e NAME=VALUE")
    return name, value


def _serve(
    lab: Lab, server: Server, wanted: ServiceRequest, given: dict[str, Any], json_: bool
) -> None:
    from labctl.services import model_serving

    port = given["local_port"]
    if given["detach"]:
        made = model_serving.forward_detached(lab.ground, server, wanted, port)
        _show(wanted, made.url, made.local_port, json_)
        return
    with model_serving.forward(lab.ground, server, wanted, port) as opened:
        _show(wanted, opened.url, opened.local_port, json_)
        click.echo("Ctrl-C ends the forward; labctl serve --stop ends the server", err=True)
        with contextlib.suppress(KeyboardInterrupt):
            opened.wait()


def _show(wanted: ServiceRequest, url: str, port: int, json_: bool) -> None:
    import msgspec

    from labctl.cli.exit_codes import clean
    from labctl.cli.screen import as_json
    from labctl.services import model_serving

    url = url.rstrip("/")
    told: dict[str, Any] = {"service": wanted.name, "url": url}
    if wanted.model is None:
        told["image"] = wanted.image
        said = [f"{wanted.image}: {url}"]
    else:
        model = model_serving.health(port)
        told |= msgspec.to_builtins(model)
        said = [
            f"run {model.run}, {model.checkpoint}, {model.classes} classes: {url}",
            f"  curl -F image=@PICTURE {url}/predict",
            f"  {url}/healthz  {url}/metrics",
        ]
    if json_:
        as_json({"serve": told})
    else:
        click.echo(clean("\n".join(said)))
