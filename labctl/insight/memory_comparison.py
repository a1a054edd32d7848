"""Compare the memory of a profiled step with what `labctl estimate` predicts for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from labctl.errors import LabError, NotFoundError
from labctl.estimate.memory import estimate_memory
from labctl.estimate.plan import ModelPlan
from labctl.insight.explain.memory import find_batch_size
from labctl.insight.explain.memory_profile import MemorySizes
from labctl.insight.explain.profile import FILE, LARGEST_BYTES
from labctl.insight.explanation import load_material
from labctl.insight.memory_fit import measure_run_model
from labctl.insight.profile import (
    PAGE_MARK,
    PredictedMemory,
    ProfileResult,
    read_page,
    unwrap_command,
)
from labctl.runs import runs
from labctl.servers.context import LabContext

if TYPE_CHECKING:
    from labctl.estimate.constants import Optimizer

# PyTorch's optimizers, by their class names, as the estimate knows them.
OPTIMIZERS: dict[str, Optimizer] = {
    "SGD": "sgd",
    "Adam": "adam",
    "AdamW": "adamw",
    "Adam8bit": "adam8bit",
    "AdamW8bit": "adam8bit",
}


def add_prediction(context: LabContext, profiled: ProfileResult) -> ProfileResult:
    """Add what the estimate predicts, and draw both on the profile's page on this machine."""
    if profiled.profile.memory is None:
        raise NotFoundError(
            f"{profiled.run} has no figures of memory",
            why="it was recorded without --memory",
            hint="labctl profile --memory",
        )
    predicted = predict_memory(context, profiled)
    _write_page(Path(profiled.directory), predicted)
    return msgspec.structs.replace(profiled, predicted=predicted)


def predict_memory(context: LabContext, profiled: ProfileResult) -> PredictedMemory:
    """Estimate the memory of the command's model, by category; `why` says why it cannot."""
    memory = profiled.profile.memory
    assert memory is not None
    optimizer = OPTIMIZERS.get(memory.optimizer)
    if optimizer is None:
        return PredictedMemory(why=f"labctl estimate does not know {memory.optimizer or 'it'}")
    if optimizer == "sgd" and memory.most.optimizer:
        optimizer = "momentum"
    material = load_material(context, unwrap_command(runs.find_run(context, profiled.run)))
    batch, where = find_batch_size(material)
    if not batch:
        return PredictedMemory(why="the batch size is in no option, curve or line of the log")
    model = measure_run_model(context, material.run, material.log, optimizer)
    if model is None:
        return PredictedMemory(why="the script has no build_model that PyTorch here can build")
    plan = msgspec.structs.replace(model.plan, batch=batch)
    return PredictedMemory(
        sizes=predict_sizes(plan),
        target=model.target,
        item=model.item,
        batch=batch,
        where_batch=where,
    )


def predict_sizes(plan: ModelPlan) -> MemorySizes:
    """Return the estimate's terms by category, without CUDA's own overhead."""
    found = estimate_memory(plan)
    return MemorySizes(
        parameters=found.weights_bytes,
        gradients=found.gradients_bytes,
        optimizer=found.optimizer_bytes,
        activations=found.activations_bytes,
    )


def _write_page(directory: Path, predicted: PredictedMemory) -> None:
    """Write the profile's page again, with the prediction. The figures are the server's own."""
    with (directory / FILE).open("rb") as file:
        text = file.read(LARGEST_BYTES + 1)
    try:
        figures = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LabError(
            f"{directory / FILE} is not valid JSON",
            why=str(error),
            hint="labctl profile --memory   # records it again",
        ) from None
    figures["predicted"] = msgspec.to_builtins(predicted)
    # Inside a script element, `<` could end the element.
    escaped = json.dumps(figures).replace("<", "\\u003c")
    partial = directory / ".index.html.partial"
    partial.write_text(read_page().replace(PAGE_MARK, escaped), encoding="utf-8")
    partial.replace(directory / "index.html")
