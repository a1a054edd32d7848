"""estimate: what a model needs before anything is paid for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from labctl.cli.options import json_option, need_options, open_lab

if TYPE_CHECKING:
    from labctl.estimate.compute import Amount
    from labctl.estimate.plan import Plan
    from labctl.insight.model_measurement import Source
    from labctl.lab import Lab

F = TypeVar("F", bound=Callable[..., Any])
PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "fp8", "int8", "int4")
OPTIMIZERS = ("sgd", "momentum", "adam", "adamw", "adam8bit")
INPUT_TYPES = ("float32", "uint8", "int64")
NEED = ("provider", "gpu", "gpu_memory", "arch", "work", "spot", "max_price")


def _read_by(load: Callable[[], Callable[[str], Any]], metavar: str, without: Any = 0) -> Any:
    """How an option is read: by a function whose ValueError says what is allowed."""

    def read(ctx: click.Context, param: click.Parameter, value: str | None) -> Any:
        if value is None:
            return without
        try:
            return load()(value)
        except ValueError as error:
            raise click.BadParameter(str(error), ctx, param) from None

    return {"callback": read, "metavar": metavar}


def _count() -> Callable[[str], Any]:
    from labctl.estimate.plan import parse_count

    return parse_count


def _scalar(name: str) -> Callable[[], Callable[[str], Any]]:
    def load() -> Callable[[str], Any]:
        from labctl.config import scalars

        found: Callable[[str], Any] = getattr(scalars, name)
        return found

    return load


def _shape(text: str) -> tuple[int, ...]:
    parts = text.lower().split("x")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(f"{text!r} is not a shape: write 3x224x224, without the batch")
    return tuple(int(part) for part in parts)


COUNT = _read_by(_count, "NUMBER")
SIZE = _read_by(_scalar("parse_size"), "SIZE")
PRICE = _read_by(_scalar("parse_price"), "USD", without=None)
DURATION = _read_by(_scalar("parse_duration"), "TIME")
SHAPE = _read_by(lambda: _shape, "SHAPE", without=())
AT_LEAST_ONE = click.IntRange(min=1)


def _all_of(*options: Callable[[F], F]) -> Callable[[F], F]:
    def applied(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return applied


model_options = _all_of(
    click.option("--params", **COUNT, help="Parameters: 8B, 110M."),
    click.option("--precision", type=click.Choice(PRECISIONS), help="Default bf16; of code fp32."),
    click.option(
        "--train", "optimizer", type=click.Choice(OPTIMIZERS), help="With this optimizer."
    ),
    click.option("--serve", is_flag=True, help="In use, not in training."),
    click.option("--batch", default="1", **COUNT, help="Of a step, all GPUs together."),
    click.option("--seq", **COUNT, help="Tokens of one item."),
    click.option("--hidden", **COUNT, help="The hidden width."),
    click.option("--layers", **COUNT, help="Of a transformer."),
    click.option("--heads", **COUNT, help="Of attention; default: hidden / 128."),
    click.option("--kv-heads", **COUNT, help="Default: as many as heads."),
    click.option("--vocab", "vocabulary", **COUNT, help="Default 32,000."),
    click.option(
        "--attention",
        type=click.Choice(["fused", "stored"]),
        default="fused",
        help="Of its scores.",
    ),
    click.option("--checkpointing", is_flag=True, help="Activations are computed again."),
    click.option(
        "--accumulate", type=AT_LEAST_ONE, default=1, metavar="N", help="Small batches to a step."
    ),
    click.option(
        "--data-parallel", type=AT_LEAST_ONE, default=1, metavar="N", help="GPUs with a copy each."
    ),
    click.option(
        "--tensor-parallel", type=AT_LEAST_ONE, default=1, metavar="N", help="GPUs to a layer."
    ),
    click.option(
        "--pipeline-parallel", type=AT_LEAST_ONE, default=1, metavar="N", help="Groups of layers."
    ),
    click.option(
        "--zero",
        type=click.IntRange(0, 3),
        default=0,
        metavar="STAGE",
        help="What data parallel divides.",
    ),
    click.option(
        "--kind",
        type=click.Choice(["network", "tabular", "trees"]),
        default="network",
        help="Of the model.",
    ),
    click.option("--rows", **COUNT, help="Of a table, for tabular and trees."),
    click.option("--columns", **COUNT, help="Of a table."),
)
amount_options = _all_of(
    click.option("--tokens", **COUNT, help="To train on, in one epoch."),
    click.option("--items", **COUNT, help="Of the data, for a model from code."),
    click.option(
        "--epochs", type=AT_LEAST_ONE, default=1, metavar="N", help="How often all of it."
    ),
    click.option(
        "--tokens-per-second", type=float, default=0.0, metavar="NUMBER", help="Measured; or items."
    ),
    click.option(
        "--utilisation", type=float, metavar="SHARE", help="Share of a GPU's peak; default 0.4."
    ),
    click.option("--requests-per-day", **COUNT, help="To a model in use."),
    click.option(
        "--seconds-per-request", type=float, default=0.0, metavar="NUMBER", help="Of one GPU."
    ),
    click.option("--reply", "reply_tokens", **COUNT, help="Tokens to a request."),
    click.option("--bandwidth", **SIZE, help="Of a GPU's memory a second: 3TB."),
    click.option("--price", **PRICE, help="USD per hour, for all GPUs; no offers are asked for."),
)
code_options = _all_of(
    click.option("--input", "shape", **SHAPE, help="Of one item, for code: 3x224x224."),
    click.option(
        "--input-type", type=click.Choice(INPUT_TYPES), default="float32", help="Of --input."
    ),
    click.option("--python", default="", help="To build it with; default: the lab's .venv."),
    click.option("--time-limit", default="2m", **DURATION, help="For building it."),
)


@click.command("estimate")
@click.argument("target", default="", metavar="[FILE.py:FUNCTION]")
@model_options
@amount_options
@code_options
@need_options
@json_option
@click.pass_context
def estimate_command(ctx: click.Context, /, json_: bool, **given: Any) -> None:
    """What a model needs: memory, hours, dollars; which GPUs hold it, or that none is needed.

    With FILE.py:FUNCTION the model is built by your code, in the lab's own Python (PyTorch needed
    there): parameters are counted, activations measured. docs/estimate.md has the formulas.

    \b
    labctl estimate --params 8B --train adam --batch 8 --seq 2048 \\
        --hidden 4096 --layers 32
    labctl estimate train.py:build_model --batch 64 --items 60k --epochs 10
    labctl estimate --params 70B --precision int4 --serve \\
        --requests-per-day 10k --reply 300
    labctl estimate --params 8B --train adam --tokens 512M \\
        --tokens-per-second 3000 --price 15
    labctl estimate --kind trees --rows 100k --columns 50
    """
    from labctl.insight.estimate import estimate

    overrides = {name: given.pop(name) for name in NEED}
    lab = open_lab(ctx, quiet=json_, overrides=overrides, needs_file=False)
    source = _source(lab, given)
    plan, amount = _plan(given, from_code=source is not None), _amount(given)
    found = estimate(lab.ground, plan, amount, source)
    if json_:
        from labctl.cli.screen import as_json

        as_json({name: getattr(found, name) for name in found.__struct_fields__})
    else:
        from labctl.cli.estimate_output import draw

        draw(found)


def _plan(given: dict[str, Any], *, from_code: bool) -> Plan:
    from labctl.errors import UsageError
    from labctl.estimate.plan import Plan

    if given["optimizer"] and given["serve"]:
        raise UsageError(
            "--train and --serve ask two things",
            why="training keeps gradients and optimizer states, serving a KV cache",
            hint="one labctl estimate for each",
        )
    if from_code and given["params"]:
        raise UsageError(
            "--params and a function that builds the model",
            why="the function's own parameters are counted",
            hint="leave out one of them",
        )
    shared = {name: given[name] for name in Plan.__struct_fields__ if name in given}
    by_code = "adamw" if from_code and not given["serve"] else ""
    shared["precision"] = given["precision"] or ("fp32" if from_code else "bf16")
    return Plan(**{**shared, "optimizer": given["optimizer"] or by_code})


def _amount(given: dict[str, Any]) -> Amount:
    from labctl.errors import UsageError
    from labctl.estimate.compute import Amount
    from labctl.estimate.constants import UTILISATION

    share = UTILISATION if given["utilisation"] is None else given["utilisation"]
    if not 0 < share <= 1:
        raise UsageError(f"--utilisation {share:g} is no share", hint="--utilisation 0.4")
    for name in ("tokens_per_second", "seconds_per_request"):
        if not 0 <= given[name] < float("inf"):
            option = "--" + name.replace("_", "-")
            raise UsageError(f"{option} {given[name]:g} makes no sense", hint=f"{option} 7")
    return Amount(
        tokens=given["tokens"] * given["epochs"],
        items=given["items"] * given["epochs"],
        per_second=given["tokens_per_second"],
        utilisation=share,
        requests_per_day=given["requests_per_day"],
        seconds_per_request=given["seconds_per_request"],
        reply_tokens=given["reply_tokens"],
        bandwidth_bytes_per_s=given["bandwidth"],
        price_usd_per_hour=given["price"],
    )


def _source(lab: Lab, given: dict[str, Any]) -> Source | None:
    from labctl.insight.model_measurement import Source, parse_target

    if not given["target"]:
        return None
    root = lab.config.root
    file, function = parse_target(given["target"], root)
    return Source(
        file=file,
        function=function,
        root=root,
        input_shape=given["shape"],
        input_type=given["input_type"],
        python=given["python"],
        time_limit_s=given["time_limit"],
    )
