"""What is asked: a model, how it is used or trained, and over how many GPUs."""

from __future__ import annotations

import re
from typing import Literal

from labctl.errors import UsageError
from labctl.estimate.constants import HEAD_WIDTH, MIXED, QUANTISED, Optimizer, Precision
from labctl.model import Value

Kind = Literal["network", "tabular", "trees"]
Attention = Literal["fused", "stored"]

_COUNT = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?|[0-9](?:\.[0-9]{1,6})?e[0-9]{1,2})([kmbt]?)")
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
MOST = 10**18


class Measured(Value, frozen=True):
    """What was found by building the model. Activations of n items: fixed + n x item bytes.

    `weight_bytes` counts parameters and buffers in the types that the code gave them,
    `trained_bytes` those that get gradients. `item_flops` is one item's forward and, where it
    trains, backward pass.
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


class Plan(Value, frozen=True):
    """One question. `optimizer` "" is use (inference); 0 is not given.

    `batch` is what one optimizer step (or one forward pass) takes, all GPUs together; `accumulate`
    and `data_parallel` divide it. Shapes are a transformer's: hidden width, layers, heads.
    """

    kind: Kind = "network"
    params: int = 0
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
    rows: int = 0
    columns: int = 0
    measured: Measured | None = None

    @property
    def training(self) -> bool:
        return bool(self.optimizer)

    @property
    def gpus(self) -> int:
        return self.data_parallel * self.tensor_parallel * self.pipeline_parallel

    @property
    def micro_batch(self) -> int:
        """Items that go through one model replica at a time."""
        return -(-self.batch // (self.data_parallel * self.accumulate))

    @property
    def shaped(self) -> bool:
        """Whether activations and the KV cache can be counted from the shape."""
        return bool(self.seq and self.hidden and self.layers)

    @property
    def all_heads(self) -> int:
        return self.heads or max(1, self.hidden // HEAD_WIDTH)


def parse_count(text: str) -> int:
    """`8B`, `512M`, `1.5T`, `100k`, `3e11` or a plain number. ValueError says what is allowed."""
    match = _COUNT.fullmatch(text.strip().lower().replace(",", "").replace("_", ""))
    if match is None:
        raise ValueError(f"{text!r} is not a number: write 8B, 512M, 100k, 3e11 or plain digits")
    number = round(float(match[1]) * _UNITS[match[2]])
    if not 0 < number <= MOST:
        raise ValueError(f"{text!r} is out of range: more than 0, at most 1e18")
    return number


def checked(plan: Plan) -> Plan:
    """The plan, if it makes sense; UsageError with what to type instead."""
    if plan.kind != "network":
        return _checked_table(plan)
    if not plan.params and plan.measured is None:
        raise UsageError(
            "there is no model to estimate",
            why="either its number of parameters or a function that builds it is needed",
            hint="labctl estimate --params 8B, or labctl estimate train.py:build_model --batch 64",
        )
    _check_precision(plan)
    _check_shape(plan)
    _check_sharing(plan)
    return plan


def _checked_table(plan: Plan) -> Plan:
    if not plan.rows or not plan.columns:
        raise UsageError(
            f"how large is the table? --kind {plan.kind} needs --rows and --columns",
            hint=f"labctl estimate --kind {plan.kind} --rows 100k --columns 50",
        )
    return plan


def _check_precision(plan: Plan) -> None:
    if plan.training and plan.precision in QUANTISED:
        raise UsageError(
            f"{plan.precision} weights cannot be trained",
            why="they are too coarse for small steps; QLoRA (arXiv:2305.14314) keeps them frozen "
            "and trains small adapters over them",
            hint="--precision bf16 --train adam8bit, or --serve for using the model",
        )
    if plan.measured is not None and plan.precision in QUANTISED | {"fp8"}:
        raise UsageError(
            f"a model built from code is not measured in {plan.precision}",
            why="PyTorch would need another library's layers for it",
            hint="--precision fp32, tf32, fp16 or bf16; or labctl estimate --params 8B",
        )


def _check_shape(plan: Plan) -> None:
    if plan.measured is not None:
        return
    shape = {"--seq": plan.seq, "--hidden": plan.hidden, "--layers": plan.layers}
    missing = [name for name, value in shape.items() if not value]
    if 0 < len(missing) < 3 and missing != ["--hidden", "--layers"]:
        raise UsageError(
            f"the shape is not whole: {' and '.join(missing)} missing",
            why="activations and the KV cache are counted from all three",
            hint="--seq 2048 --hidden 4096 --layers 32",
        )
    if plan.hidden and plan.hidden % plan.all_heads:
        raise UsageError(
            f"--hidden {plan.hidden} is not a multiple of --heads {plan.all_heads}",
            hint=f"--heads {max(1, plan.hidden // HEAD_WIDTH)} makes heads of {HEAD_WIDTH}",
        )
    if plan.kv_heads and plan.all_heads % plan.kv_heads:
        raise UsageError(
            f"--heads {plan.all_heads} is not a multiple of --kv-heads {plan.kv_heads}",
            why="each key-value head serves the same number of heads (arXiv:2305.13245)",
            hint="Llama 3 8B: --heads 32 --kv-heads 8",
        )


def _check_sharing(plan: Plan) -> None:
    if plan.zero and (not plan.training or plan.data_parallel == 1):
        why = "ZeRO divides a training's state among the GPUs of data parallelism"
        raise UsageError(
            f"--zero {plan.zero} has nothing to divide", why=why, hint="--zero 3 --data-parallel 8"
        )
    if plan.measured is not None and plan.tensor_parallel * plan.pipeline_parallel > 1:
        raise UsageError(
            "a model built from code is measured whole",
            why="how it would be cut into tensor or pipeline parts is not known",
            hint="--data-parallel N, with --zero 1, 2 or 3",
        )
    if plan.data_parallel * plan.accumulate > plan.batch and plan.training:
        parts = plan.data_parallel * plan.accumulate
        raise UsageError(
            f"--batch {plan.batch} cannot be divided into {parts} parts",
            why="--batch counts all GPUs and all accumulated parts together",
            hint=f"--batch {parts}",
        )
    if plan.layers and plan.pipeline_parallel > plan.layers:
        raise UsageError(
            f"--pipeline-parallel {plan.pipeline_parallel} with {plan.layers} layers",
            why="a stage has one layer at least",
            hint=f"--pipeline-parallel {plan.layers}",
        )


def mixed(plan: Plan) -> bool:
    """Whether it trains 16-bit (or fp8) weights beside an fp32 copy of them."""
    return plan.training and plan.precision in MIXED and plan.measured is None
