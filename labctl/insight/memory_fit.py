"""The memory of the model that a run's script builds: what fits, and what would need less."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from labctl.errors import LabError
from labctl.estimate.layers import compute_layers
from labctl.estimate.memory import estimate_memory
from labctl.estimate.plan import FitMeasurement, ModelPlan
from labctl.events import Note
from labctl.insight.explain.evidence import MemoryFit, RunData
from labctl.insight.explain.memory import OutOfMemory
from labctl.insight.model_measurement import ModelSource, measure_model
from labctl.model import Run, Value
from labctl.servers.context import LabContext

if TYPE_CHECKING:
    from labctl.estimate.constants import Optimizer, Precision

# Memory of Python with PyTorch in a container, before it loads a model. An assumption.
PROCESS_BYTES = 256 * 1024**2
MOST_SCRIPTS = 50
LARGEST_SCRIPT_BYTES = 256 * 1024
BUILDS = re.compile(r"^def build_model\b", re.MULTILINE)


class RunModel(Value, frozen=True):
    """The measured model of a run, as a plan for a batch of one, and its function."""

    plan: ModelPlan
    target: str

    @property
    def item(self) -> str:
        """The shape of one item of the batch, for a sentence."""
        model = self.plan.measured
        shape = model.input_shape if model else ()
        return "x".join(map(str, shape)) or "its example's shape"


def read_scripts(root: Path) -> dict[str, str]:
    """Read the lab's own Python files; name -> text."""
    scripts = {}
    for path in sorted(root.glob("*.py"))[:MOST_SCRIPTS]:
        if path.is_file() and path.stat().st_size <= LARGEST_SCRIPT_BYTES:
            scripts[path.name] = path.read_text(encoding="utf-8", errors="replace")
    return scripts


def measure_run_model(
    context: LabContext, run: Run, log: str, optimizer: Optimizer = "adamw"
) -> RunModel | None:
    """Build and measure the model of a run's script; None without build_model, or if it fails."""
    scripts = read_scripts(context.config.root)
    named = [Path(word).name for word in run.command if word.endswith(".py")]
    name = next((script for script in named if BUILDS.search(scripts.get(script, ""))), "")
    if not name:
        return None
    root = context.config.root
    source = ModelSource(file=root / name, function="build_model", root=root)
    plan = ModelPlan(precision=_find_precision(log), optimizer=optimizer)
    try:
        model = measure_model(source, plan, context.reporter)
    except LabError as error:
        text = f"cannot estimate the model's memory: {error.what}"
        context.reporter.emit(Note(text=text, level="warning"))
        return None
    if isinstance(model, FitMeasurement) or model.activations == "unknown":
        return None  # its memory is that of the table, or of activations that nobody counted
    return RunModel(
        plan=msgspec.structs.replace(plan, measured=model), target=f"{name}:build_model"
    )


def _find_precision(log: str) -> Precision:
    if "bfloat16" in log:
        return "bf16"
    return "fp16" if "float16" in log else "fp32"


def estimate_fit(context: LabContext, material: RunData, failure: OutOfMemory) -> MemoryFit | None:
    """Estimate the memory of the model that the run's script builds; None without build_model."""
    if not failure.limit_bytes:
        return None
    model = measure_run_model(context, material.run, material.log)
    return compute_fit(model.plan, failure, model.target) if model else None


def compute_fit(plan: ModelPlan, failure: OutOfMemory, target: str) -> MemoryFit:
    """Compute the largest power of two that fits, with the numbers of `labctl estimate`."""
    assert plan.measured is not None
    item = plan.measured.item_bytes
    single = estimate_memory(plan)
    fixed = single.total_bytes - item
    if failure.whose == "container":
        fixed += PROCESS_BYTES - single.overhead_bytes  # that overhead is CUDA's, on the GPU
    available = failure.limit_bytes - fixed
    largest = available // item if item > 0 and available > 0 else 0
    return MemoryFit(
        target=target,
        item=RunModel(plan=plan, target=target).item,
        fixed_bytes=fixed,
        item_bytes=item,
        limit_bytes=failure.limit_bytes,
        batch=1 << (largest.bit_length() - 1) if largest else 0,
        item_flops=plan.measured.item_flops,
        checkpointed_bytes=_checkpointed_bytes(plan, failure.batch),
        precision=plan.precision,
    )


def _checkpointed_bytes(plan: ModelPlan, batch: int) -> int:
    """Compute the activations of the failed batch with activation checkpointing; 0 if unknown."""
    table = compute_layers(msgspec.structs.replace(plan, batch=batch)) if batch else None
    return table.checkpointed_total_bytes if table else 0
