"""The command estimate: what a model needs, before anything is paid for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import click

from labctl.cli.completion_values import complete_files
from labctl.cli.estimate_options import (
    EstimateOptions,
    amount_options,
    code_options,
    model_options,
)
from labctl.cli.estimate_output import print_estimate
from labctl.cli.options import json_option, need_options, open_lab
from labctl.cli.tables import print_json
from labctl.errors import UsageError
from labctl.estimate.compute import Workload
from labctl.estimate.constants import UTILIZATION, Optimizer
from labctl.estimate.plan import ModelPlan
from labctl.insight.estimate import estimate
from labctl.insight.model_measurement import ModelSource, parse_target

if TYPE_CHECKING:
    from labctl.lab import Lab

NEED = ("provider", "gpu", "type", "gpu_memory", "arch", "work", "spot", "max_price")


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

    With FILE.py:FUNCTION, your code builds the model in the lab's own Python. labctl counts the
    parameters and measures the activations of a PyTorch module, derives those of a Keras or Flax
    model from shapes, and times a model that has fit() on parts of its table.
    `labctl docs estimate` has the formulas.

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
        active_params=options.active_params,
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
        gpu_hours=options.gpu_hours,
        replicas=options.replicas or 0,
        reclaim_every_s=options.reclaim_every,
        checkpoint_s=options.checkpoint_time,
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
