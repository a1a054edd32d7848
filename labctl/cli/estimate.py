"""The command estimate: what a model needs, before anything is paid for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import click

from labctl.cli.completion_values import complete_files
from labctl.cli.estimate_output import print_estimate
from labctl.cli.options import json_option, need_options, open_lab
from labctl.cli.screen import print_json
from labctl.config import scalars
from labctl.errors import UsageError
from labctl.estimate.compute import Workload
from labctl.estimate.constants import UTILIZATION, Optimizer, Precision
from labctl.estimate.plan import LINKS, Attention, Compression, Kind, ModelPlan, parse_count
from labctl.insight.estimate import estimate
from labctl.insight.model_measurement import ModelSource, parse_target

if TYPE_CHECKING:
    from labctl.lab import Lab

F = TypeVar("F", bound=Callable[..., Any])
PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "fp8", "int8", "int4")
OPTIMIZERS = ("sgd", "momentum", "adam", "adamw", "adam8bit")
INPUT_TYPES = ("float32", "uint8", "int64")
NEED = ("provider", "gpu", "gpu_memory", "arch", "work", "spot", "max_price")


def _make_parser(load: Callable[[], Callable[[str], Any]], metavar: str, default: Any = 0) -> Any:
    """Return click's arguments for an option that a function parses.

    `load` imports the function when it is needed. Its ValueError says what is allowed.
    """

    def parse(ctx: click.Context, param: click.Parameter, value: str | None) -> Any:
        if value is None:
            return default
        try:
            return load()(value)
        except ValueError as error:
            raise click.BadParameter(str(error), ctx, param) from None

    return {"callback": parse, "metavar": metavar}


def _load_count_parser() -> Callable[[str], Any]:
    return parse_count


def _defer_scalar_parser(name: str) -> Callable[[], Callable[[str], Any]]:
    def load() -> Callable[[str], Any]:
        parser: Callable[[str], Any] = getattr(scalars, name)
        return parser

    return load


def _parse_shape(text: str) -> tuple[int, ...]:
    parts = text.lower().split("x")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(f"{text!r} is not a shape: write 3x224x224, without the batch")
    return tuple(int(part) for part in parts)


COUNT = _make_parser(_load_count_parser, "NUMBER")
SIZE = _make_parser(_defer_scalar_parser("parse_size"), "SIZE")
PRICE = _make_parser(_defer_scalar_parser("parse_price"), "USD", default=None)
DURATION = _make_parser(_defer_scalar_parser("parse_duration"), "TIME")
SHAPE = _make_parser(lambda: _parse_shape, "SHAPE", default=())
AT_LEAST_ONE = click.IntRange(min=1)


def _combine(*options: Callable[[F], F]) -> Callable[[F], F]:
    def apply(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return apply


model_options = _combine(
    click.option("--params", **COUNT, help="Number of parameters: 8B, 110M."),
    click.option(
        "--precision",
        type=click.Choice(PRECISIONS),
        help="Number format of the weights (default: bf16; for code: fp32).",
    ),
    click.option(
        "--train",
        "optimizer",
        type=click.Choice(OPTIMIZERS),
        help="Estimate training with this optimizer.",
    ),
    click.option("--serve", is_flag=True, help="Estimate inference instead of training."),
    click.option("--batch", default="1", **COUNT, help="Items per step, over all GPUs."),
    click.option("--seq", **COUNT, help="Tokens per item."),
    click.option("--hidden", **COUNT, help="Hidden width of a transformer."),
    click.option("--layers", **COUNT, help="Layers of a transformer."),
    click.option("--heads", **COUNT, help="Attention heads (default: hidden / 128)."),
    click.option("--kv-heads", **COUNT, help="Key-value heads (default: all heads)."),
    click.option("--vocab", "vocabulary", **COUNT, help="Vocabulary size (default: 32,000)."),
    click.option(
        "--attention",
        type=click.Choice(["fused", "stored"]),
        default="fused",
        help="Whether attention scores are stored (default: fused, not stored).",
    ),
    click.option(
        "--checkpointing", is_flag=True, help="Recompute activations in the backward pass."
    ),
    click.option(
        "--accumulate",
        type=AT_LEAST_ONE,
        default=1,
        metavar="N",
        help="Accumulate gradients over N smaller batches.",
    ),
    click.option(
        "--data-parallel",
        type=AT_LEAST_ONE,
        default=1,
        metavar="N",
        help="Copy the model to N GPUs.",
    ),
    click.option(
        "--tensor-parallel",
        type=AT_LEAST_ONE,
        default=1,
        metavar="N",
        help="Split each layer over N GPUs.",
    ),
    click.option(
        "--pipeline-parallel",
        type=AT_LEAST_ONE,
        default=1,
        metavar="N",
        help="Split the layers into N groups.",
    ),
    click.option(
        "--zero",
        type=click.IntRange(0, 3),
        default=0,
        metavar="STAGE",
        help="ZeRO stage: what data parallelism divides.",
    ),
    click.option(
        "--link",
        type=click.Choice(list(LINKS)),
        help="What connects the GPUs of --data-parallel.",
    ),
    click.option(
        "--compress",
        type=click.Choice(["fp16", "powersgd"]),
        help="How their gradients are compressed.",
    ),
    click.option(
        "--kind",
        type=click.Choice(["network", "tabular", "trees"]),
        default="network",
        help="Kind of model (default: network).",
    ),
    click.option("--rows", **COUNT, help="Rows of the table, for tabular and trees."),
    click.option("--columns", **COUNT, help="Columns of the table."),
)
amount_options = _combine(
    click.option("--tokens", **COUNT, help="Training tokens per epoch."),
    click.option("--items", **COUNT, help="Training items per epoch, for a model from code."),
    click.option("--epochs", type=AT_LEAST_ONE, default=1, metavar="N", help="Number of epochs."),
    click.option(
        "--tokens-per-second",
        type=float,
        default=0.0,
        metavar="NUMBER",
        help="Measured speed, in tokens or items.",
    ),
    click.option(
        "--utilization",
        type=float,
        metavar="SHARE",
        help="Share of the GPU's peak that is reached (default: 0.4).",
    ),
    click.option("--requests-per-day", **COUNT, help="Load, with --serve."),
    click.option(
        "--seconds-per-request",
        type=float,
        default=0.0,
        metavar="NUMBER",
        help="Time of one GPU per request.",
    ),
    click.option("--reply", "reply_tokens", **COUNT, help="Tokens per reply."),
    click.option("--bandwidth", **SIZE, help="GPU memory bandwidth per second: 3TB."),
    click.option("--price", **PRICE, help="Use this price per hour for all GPUs; read no offers."),
)
code_options = _combine(
    click.option("--input", "shape", **SHAPE, help="Shape of one item, for code: 3x224x224."),
    click.option(
        "--input-type",
        type=click.Choice(INPUT_TYPES),
        default="float32",
        help="Data type of --input (default: float32).",
    ),
    click.option(
        "--python", default="", help="Python that builds the model (default: the lab's .venv)."
    ),
    click.option(
        "--time-limit", default="2m", **DURATION, help="Longest time to build it (default: 2m)."
    ),
)


class EstimateOptions(NamedTuple):
    """The options of the command, as parsed; 0, "" and () mean not given."""

    target: str
    params: int
    precision: Precision | None
    optimizer: Optimizer | None
    serve: bool
    batch: int
    seq: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    attention: Attention
    checkpointing: bool
    accumulate: int
    data_parallel: int
    tensor_parallel: int
    pipeline_parallel: int
    zero: int
    link: str | None
    compress: Compression | None
    kind: Kind
    rows: int
    columns: int
    tokens: int
    items: int
    epochs: int
    tokens_per_second: float
    utilization: float | None
    requests_per_day: int
    seconds_per_request: float
    reply_tokens: int
    bandwidth: int
    price: float | None
    shape: tuple[int, ...]
    input_type: str
    python: str
    time_limit: int


@click.command("estimate")
@click.argument("target", default="", metavar="[FILE.py:FUNCTION]", shell_complete=complete_files)
@model_options
@amount_options
@code_options
@need_options
@json_option
@click.pass_context
def estimate_command(ctx: click.Context, /, json_: bool, **values: Any) -> None:
    """Estimate the memory, time and cost of a model, and list the GPUs that it fits on.

    With FILE.py:FUNCTION, your code builds the model in the lab's own Python, which needs PyTorch.
    labctl then counts the parameters and measures the activations. docs/estimate.md has the
    formulas.

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
    overrides = {name: values.pop(name) for name in NEED}
    options = EstimateOptions(**values)
    lab = open_lab(ctx, quiet=json_, overrides=overrides, needs_file=False)
    source = _read_source(lab, options)
    plan, amount = _read_plan(options, from_code=source is not None), _read_amount(options)
    result = estimate(lab.context, plan, amount, source)
    if json_:
        print_json(result)
    else:
        print_estimate(result)


def _read_plan(options: EstimateOptions, *, from_code: bool) -> ModelPlan:
    if options.optimizer and options.serve:
        raise UsageError(
            "--train cannot be combined with --serve",
            why="training stores gradients and optimizer states, serving stores a KV cache",
            hint="estimate each in a call of its own",
        )
    if from_code and options.params:
        raise UsageError(
            "--params cannot be combined with FILE.py:FUNCTION",
            why="the parameters of the function's model are counted",
            hint="leave out one of them",
        )
    default_optimizer: Optimizer | Literal[""] = "adamw" if from_code and not options.serve else ""
    return ModelPlan(
        kind=options.kind,
        params=options.params,
        precision=options.precision or ("fp32" if from_code else "bf16"),
        optimizer=options.optimizer or default_optimizer,
        batch=options.batch,
        seq=options.seq,
        hidden=options.hidden,
        layers=options.layers,
        heads=options.heads,
        kv_heads=options.kv_heads,
        vocabulary=options.vocabulary,
        attention=options.attention,
        checkpointing=options.checkpointing,
        accumulate=options.accumulate,
        data_parallel=options.data_parallel,
        tensor_parallel=options.tensor_parallel,
        pipeline_parallel=options.pipeline_parallel,
        zero=options.zero,
        link=options.link or "",
        compress=options.compress or "",
        rows=options.rows,
        columns=options.columns,
    )


def _read_amount(options: EstimateOptions) -> Workload:
    share = UTILIZATION if options.utilization is None else options.utilization
    if not 0 < share <= 1:
        raise UsageError(
            f"--utilization {share:g} is not between 0 and 1", hint="--utilization 0.4"
        )
    for option, number in (
        ("--tokens-per-second", options.tokens_per_second),
        ("--seconds-per-request", options.seconds_per_request),
    ):
        if not 0 <= number < float("inf"):
            raise UsageError(
                f"{option} {number:g} is not a finite number of at least 0",
                hint=f"{option} 7",
            )
    return Workload(
        tokens=options.tokens * options.epochs,
        items=options.items * options.epochs,
        per_second=options.tokens_per_second,
        utilization=share,
        requests_per_day=options.requests_per_day,
        seconds_per_request=options.seconds_per_request,
        reply_tokens=options.reply_tokens,
        bandwidth_bytes_per_s=options.bandwidth,
        price_usd_per_hour=options.price,
    )


def _read_source(lab: Lab, options: EstimateOptions) -> ModelSource | None:
    if not options.target:
        return None
    root = lab.config.root
    file, function = parse_target(options.target, root)
    return ModelSource(
        file=file,
        function=function,
        root=root,
        input_shape=options.shape,
        input_type=options.input_type,
        python=options.python,
        time_limit_s=options.time_limit,
    )
