"""The input of an estimate: a model, its training or use, and the number of GPUs."""

from __future__ import annotations

import re
from typing import Literal

from labctl.errors import UsageError
from labctl.estimate.constants import HEAD_WIDTH, MIXED, QUANTIZED, Optimizer, Precision
from labctl.model import Value

Kind = Literal["network", "tabular", "trees"]
Attention = Literal["fused", "stored"]
Compression = Literal["", "fp16", "powersgd"]

# Bytes per second in one direction, at best. NVLink 3, all links of an A100: 600 GB/s in both
# directions (NVIDIA's data sheet). PCIe 4.0, 16 lanes: 16 GT/s, 128 of 130 bits are data.
LINKS = {
    "nvlink": 300e9,
    "pcie4": 31.5e9,
    "100gbit": 12.5e9,
    "25gbit": 3.125e9,
    "10gbit": 1.25e9,
    "1gbit": 0.125e9,
}

_COUNT = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?|[0-9](?:\.[0-9]{1,6})?e[0-9]{1,2})([kmbt]?)")
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
MOST = 10**18


class LayerMeasurement(Value, frozen=True):
    """What one layer keeps for the backward pass: fixed + n x item bytes for n items.

    With activation checkpointing it keeps its input, `input_item_bytes` for each item.
    """

    name: str
    fixed_bytes: int
    item_bytes: int
    input_item_bytes: int


class ModelMeasurement(Value, frozen=True):
    """The measurements of a model that was built. Activations of n items: fixed + n x item bytes.

    `weight_bytes` counts parameters and buffers in the types that the code gave them,
    `trained_bytes` those that get gradients. `item_flops` is one item's forward and, in training,
    backward pass, 0 if unknown. `framework` is what the model was built with, "" for PyTorch.
    `activations` says how they were found: measured, or derived from shapes (measured_arrays.py).
    """

    parameters: int
    weight_bytes: int
    trained_parameters: int
    trained_bytes: int
    fixed_bytes: int
    item_bytes: int
    item_flops: int
    input_shape: tuple[int, ...] = ()
    input_type: str = ""
    input_from: str = ""
    python: str = ""
    torch: str = ""
    autocast: bool = False
    activations: Literal["measured", "residuals", "outputs", "unknown"] = "measured"
    framework: str = ""
    layers: tuple[LayerMeasurement, ...] = ()


class FitMeasurement(Value, frozen=True):
    """Trainings of a model for tables, the class `name`, on parts of a table.

    `trials` are (rows, seconds) of each part, in growing order. `rows` and `columns` are those of
    the whole table.
    """

    name: str
    rows: int
    columns: int
    trials: tuple[tuple[int, float], ...]
    python: str = ""


class ModelPlan(Value, frozen=True):
    """One estimate's input. `optimizer` "" means inference; 0 means not given.

    `batch` is the number of items of one optimizer step (or forward pass), of all GPUs together;
    `accumulate` and `data_parallel` divide it. Shapes are a transformer's: hidden width, layers,
    heads. `link` is what connects the GPUs of data parallelism, a key of LINKS or "" for unknown;
    `compress` is how their gradients are compressed. `active_params` are those that one token of a
    mixture of experts uses. `fit` is measured on a part of `rows`.
    """

    kind: Kind = "network"
    params: int = 0
    active_params: int = 0
    precision: Precision = "bf16"
    optimizer: Optimizer | Literal[""] = ""
    batch: int = 1
    seq: int = 0
    hidden: int = 0
    layers: int = 0
    heads: int = 0
    kv_heads: int = 0
    vocabulary: int = 0
    attention: Attention = "fused"
    checkpointing: bool = False
    accumulate: int = 1
    data_parallel: int = 1
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    zero: int = 0
    link: str = ""
    compress: Compression = ""
    rows: int = 0
    columns: int = 0
    measured: ModelMeasurement | None = None
    fit: FitMeasurement | None = None

    @property
    def training(self) -> bool:
        return bool(self.optimizer)

    @property
    def gpus(self) -> int:
        return self.data_parallel * self.tensor_parallel * self.pipeline_parallel

    @property
    def micro_batch(self) -> int:
        """Number of items that one model replica processes at a time."""
        return -(-self.batch // (self.data_parallel * self.accumulate))

    @property
    def has_shape(self) -> bool:
        """Whether activations and the KV cache can be computed from the shape."""
        return bool(self.seq and self.hidden and self.layers)

    @property
    def all_heads(self) -> int:
        return self.heads or max(1, self.hidden // HEAD_WIDTH)


def parse_count(text: str) -> int:
    """Parse `8B`, `512M`, `1.5T`, `100k`, `3e11` or a plain number; ValueError otherwise."""
    match = _COUNT.fullmatch(text.strip().lower().replace(",", "").replace("_", ""))
    if match is None:
        raise ValueError(f"{text!r} is not a number: write 8B, 512M, 100k, 3e11 or plain digits")
    number = round(float(match[1]) * _UNITS[match[2]])
    if not 0 < number <= MOST:
        raise ValueError(f"{text!r} is out of range: expected more than 0 and at most 1e18")
    return number


def require_consistent(plan: ModelPlan, target: str = "FILE.py:FUNCTION") -> ModelPlan:
    """Return the plan if it is consistent; UsageError with what to type instead.

    `target` names a function that builds a model, for this suggestion.
    """
    if plan.kind != "network":
        return _check_table(plan)
    if not plan.params and plan.measured is None:
        raise UsageError(
            "there is no model to estimate",
            why="labctl needs the number of its parameters, or a function of your code that "
            "returns it and takes no arguments",
            hint=f"labctl estimate --params 8B\nlabctl estimate {target} --batch 64",
        )
    _check_experts(plan)
    _check_precision(plan)
    _check_shape(plan)
    _check_sharing(plan)
    return plan


def _check_table(plan: ModelPlan) -> ModelPlan:
    if not plan.rows or not plan.columns:
        raise UsageError(
            f"--kind {plan.kind} needs --rows and --columns",
            hint=f"labctl estimate --kind {plan.kind} --rows 100k --columns 50",
        )
    return plan


def _check_experts(plan: ModelPlan) -> None:
    if not plan.active_params:
        return
    if plan.measured is not None:
        raise UsageError(
            "--active-params cannot be used with a model from code",
            why="the operations of its experts are counted",
            hint="leave it out, or use --params 47B --active-params 13B without code",
        )
    if plan.active_params > plan.params:
        raise UsageError(
            "--active-params is larger than --params",
            why="a token uses some of the parameters, and all of them need memory",
            hint="for example, Mixtral 8x7B: --params 47B --active-params 13B",
        )


def _check_precision(plan: ModelPlan) -> None:
    if plan.training and plan.precision in QUANTIZED:
        raise UsageError(
            f"{plan.precision} weights cannot be trained",
            why="their resolution is too low for small steps; QLoRA (arXiv:2305.14314) keeps them "
            "frozen and trains small adapters",
            hint="use --precision bf16 --train adam8bit, or --serve for inference",
        )
    if plan.measured is not None and plan.precision in QUANTIZED | {"fp8"}:
        raise UsageError(
            f"a model built from code is not measured in {plan.precision}",
            why="PyTorch would need layers of another library for it",
            hint="labctl estimate --params 8B   # or use --precision fp32, tf32, fp16 or bf16",
        )


MOST_PROPOSED_HEADS = 1024


def _propose_heads(hidden: int) -> int:
    """Return a number of heads that divides the hidden size into widths near HEAD_WIDTH."""
    most = min(max(1, hidden // HEAD_WIDTH), MOST_PROPOSED_HEADS)
    return next(heads for heads in range(most, 0, -1) if hidden % heads == 0)


def _check_shape(plan: ModelPlan) -> None:
    if plan.measured is not None:
        return
    shape = {"--seq": plan.seq, "--hidden": plan.hidden, "--layers": plan.layers}
    missing = [name for name, value in shape.items() if not value]
    if 0 < len(missing) < 3 and missing != ["--hidden", "--layers"]:
        raise UsageError(
            f"the shape is incomplete: {' and '.join(missing)} missing",
            why="activations and the KV cache are computed from all three",
            hint="add --seq 2048 --hidden 4096 --layers 32",
        )
    if plan.hidden and plan.hidden % plan.all_heads:
        heads = _propose_heads(plan.hidden)
        raise UsageError(
            f"--hidden {plan.hidden} is not a multiple of --heads {plan.all_heads}",
            hint=f"--heads {heads}   # heads of width {plan.hidden // heads}",
        )
    if plan.kv_heads and plan.all_heads % plan.kv_heads:
        raise UsageError(
            f"--heads {plan.all_heads} is not a multiple of --kv-heads {plan.kv_heads}",
            why="each key-value head serves the same number of heads (arXiv:2305.13245)",
            hint="for example, Llama 3 8B: --heads 32 --kv-heads 8",
        )


def _check_sharing(plan: ModelPlan) -> None:
    if plan.zero and (not plan.training or plan.data_parallel == 1):
        raise UsageError(
            f"--zero {plan.zero} has nothing to divide",
            why="ZeRO divides a training's state among the GPUs of data parallelism",
            hint="use --zero 3 --data-parallel 8 with --train",
        )
    if plan.measured is not None and plan.tensor_parallel * plan.pipeline_parallel > 1:
        raise UsageError(
            "a model built from code is measured whole, without tensor or pipeline parallelism",
            why="labctl does not know how it would be split into such parts",
            hint="use --data-parallel N with --zero 1, 2 or 3",
        )
    if plan.data_parallel * plan.accumulate > plan.batch and plan.training:
        parts = plan.data_parallel * plan.accumulate
        raise UsageError(
            f"--batch {plan.batch} cannot be divided into {parts} parts",
            why="--batch counts all GPUs and all accumulated parts together",
            hint=f"use --batch {parts}",
        )
    _check_link(plan)
    if plan.layers and plan.pipeline_parallel > plan.layers:
        raise UsageError(
            f"--pipeline-parallel {plan.pipeline_parallel} is too large for {plan.layers} layers",
            why="a stage needs at least one layer",
            hint=f"use --pipeline-parallel {plan.layers}",
        )


def _check_link(plan: ModelPlan) -> None:
    option = "--link" if plan.link else "--compress"
    if (plan.link or plan.compress) and (not plan.training or plan.data_parallel == 1):
        raise UsageError(
            f"{option} has nothing to synchronize",
            why="the GPUs of data parallelism average their gradients in every step",
            hint="use --data-parallel 8 --link 25gbit with --train",
        )
    if plan.compress and not plan.link:
        raise UsageError(
            "--compress needs --link",
            why="a compressed gradient saves time on a link",
            hint=f"add --link 25gbit, or one of {', '.join(LINKS)}",
        )
    has_halves = plan.measured is None and plan.precision not in ("fp32", "tf32")
    if plan.compress == "fp16" and has_halves:
        raise UsageError(
            f"--compress fp16 compresses nothing: gradients in {plan.precision} have 16 bits",
            hint="use --precision fp32, or --compress powersgd",
        )
    if plan.compress == "powersgd" and not (plan.hidden and plan.layers):
        raise UsageError(
            "--compress powersgd needs the shape of the model",
            why="how much it compresses depends on the sizes of the matrices",
            hint="add --seq 2048 --hidden 4096 --layers 32",
        )


def is_mixed(plan: ModelPlan) -> bool:
    """Whether the training keeps an fp32 copy beside 16-bit (or fp8) weights."""
    return plan.training and plan.precision in MIXED and plan.measured is None
