"""The options of `labctl estimate`: the model, the amount of work, the code that builds it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import click

from labctl.cli.number_range import NumberRange
from labctl.config import scalars
from labctl.estimate.constants import MOST_GPUS, Optimizer, Precision
from labctl.estimate.plan import LINKS, Attention, Compression, Kind, parse_count

F = TypeVar("F", bound=Callable[..., Any])
PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "fp8", "int8", "int4")
OPTIMIZERS = ("sgd", "momentum", "adam", "adamw", "adam8bit")
INPUT_TYPES = ("float32", "uint8", "int64")


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
GPU_COUNT = NumberRange(2, 1, MOST_GPUS)
REPETITIONS = NumberRange(2, 1, 1_000_000)


def _combine(*options: Callable[[F], F]) -> Callable[[F], F]:
    def apply(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return apply


model_options = _combine(
    click.option("--params", **COUNT, help="Number of parameters: 8B, 110M."),
    click.option(
        "--active-params",
        **COUNT,
        help="Parameters that one token uses, in a mixture of experts.",
    ),
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
        type=REPETITIONS,
        default=1,
        metavar="N",
        help="Accumulate gradients over N smaller batches.",
    ),
    click.option(
        "--data-parallel",
        type=GPU_COUNT,
        default=1,
        metavar="N",
        help="Copy the model to N GPUs.",
    ),
    click.option(
        "--tensor-parallel",
        type=GPU_COUNT,
        default=1,
        metavar="N",
        help="Split each layer over N GPUs.",
    ),
    click.option(
        "--pipeline-parallel",
        type=GPU_COUNT,
        default=1,
        metavar="N",
        help="Split the layers into N groups.",
    ),
    click.option(
        "--zero",
        type=NumberRange(2, 0, 3),
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
    click.option("--epochs", type=REPETITIONS, default=1, metavar="N", help="Number of epochs."),
    click.option(
        "--tokens-per-second",
        type=float,
        default=0.0,
        metavar="NUMBER",
        help="Measured speed, in tokens or items.",
    ),
    click.option("--gpu-hours", **COUNT, help="GPU-hours of the training, measured or published."),
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
    click.option(
        "--replicas",
        type=GPU_COUNT,
        metavar="N",
        help="Copies of the model that answer requests.",
    ),
    click.option("--reply", "reply_tokens", **COUNT, help="Tokens per reply."),
    click.option("--bandwidth", **SIZE, help="GPU memory bandwidth per second: 3TB."),
    click.option("--price", **PRICE, help="Use this price per hour for all GPUs; read no offers."),
    click.option(
        "--reclaim-every",
        **DURATION,
        help="Mean time between reclaims of a spot server.",
    ),
    click.option(
        "--checkpoint-time",
        **DURATION,
        help="Time to write a checkpoint (default: its size at 125 MB/s).",
    ),
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
    active_params: int
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
    replicas: int | None
    gpu_hours: int
    reclaim_every: int
    checkpoint_time: int
    bandwidth: int
    price: float | None
    shape: tuple[int, ...]
    input_type: str
    python: str
    time_limit: int
