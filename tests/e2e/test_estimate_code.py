"""Models from code, checked against the tensors themselves, on the CPU.

An independent count stands beside labctl's: what autograd says it saves. tests/gpu compares with a
GPU's allocator.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: labctl[train]")

import estimate_models  # noqa: E402  (only where torch is)

from labctl.estimate.plan import ModelMeasurement, ModelPlan  # noqa: E402
from labctl.events import SilentReporter  # noqa: E402
from labctl.insight.model_measurement import ModelSource, measure_model  # noqa: E402

HERE = Path(__file__).parent
TEMPLATE = HERE.parents[1] / "templates" / "image-classifier"
pytestmark = pytest.mark.train


@functools.cache
def count(function: str, precision: Any = "fp32", optimizer: Any = "adamw") -> ModelMeasurement:
    file = TEMPLATE / "train.py" if function == "build_model" else HERE / "estimate_models.py"
    source = ModelSource(file=file, function=function, root=file.parent)
    return measure_model(
        source, ModelPlan(precision=precision, optimizer=optimizer), SilentReporter()
    )


def built(function: str) -> tuple[Any, Any]:
    made = estimate_models.MODELS[function]()
    return made if isinstance(made, tuple) else (made, torch.zeros(1, 3, 224, 224))


def saved_bytes(model: Any, inputs: Any) -> int:
    """What autograd keeps for the backward pass, each storage once, parameters left out."""
    own = {one.untyped_storage().data_ptr() for one in (*model.parameters(), *model.buffers())}
    kept: dict[int, Any] = {}

    def keep(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = model(inputs)
    size = sum(storage.nbytes() for storage in kept.values())
    del result
    return size


@pytest.mark.long
@pytest.mark.parametrize("template", ["ddp", "fsdp", "zero", "accelerate"])
def test_a_template_for_several_gpus_builds_its_network_in_one_process(template: str) -> None:
    if template == "accelerate":
        pytest.importorskip("accelerate")
    root = TEMPLATE.parent / template
    source = ModelSource(file=root / "train.py", function="build_model", root=root)
    found = measure_model(source, ModelPlan(precision="fp32", optimizer="adamw"), SilentReporter())
    assert isinstance(found, ModelMeasurement)
    assert found.parameters > 1_000_000
    assert found.input_shape == (64,)


def test_two_layers_are_as_counted_by_hand() -> None:
    """4 bytes each. The peak is in the backward pass of ReLU: the input (1,000), what ReLU gave
    (2,000) and the gradients on both of its sides, beside the ten outputs."""
    found = count("two_layers")
    assert found.parameters == 1000 * 2000 + 2000 + 2000 * 10 + 10
    assert found.weight_bytes == found.trained_bytes == 4 * found.parameters
    assert found.item_bytes == 4 * (1000 + 2000 + 2000 + 2000 + 10)
    assert found.fixed_bytes <= 64
    # Forward 2 m n a layer; backward that for weights, and again for inputs but not the first's.
    assert found.item_flops == 2 * (2 * 1000 * 2000) + 3 * (2 * 2000 * 10)


@pytest.mark.long
def test_frozen_parameters_get_neither_gradient_nor_state() -> None:
    found = count("frozen")
    assert found.parameters == 100 * 50 + 50 + 50 * 10 + 10
    assert found.trained_parameters == 50 * 10 + 10


@pytest.mark.long
def test_in_use_nothing_is_kept() -> None:
    found = count("two_layers", optimizer="")
    assert found.item_bytes == 4 * (1000 + 2000 + 2000)
    assert found.item_flops == 2 * 1000 * 2000 + 2 * 2000 * 10


@pytest.mark.long
def test_the_sample_project_builds_its_own() -> None:
    for name in ("numpy", "PIL", "safetensors", "tensorboard"):
        pytest.importorskip(name, reason=f"{name} is not installed: labctl[train]")
    found = count("build_model")
    assert found.input_shape == (1, 16, 16)
    assert found.input_type == "uint8"
    by_layer = 9 * 32 + 9 * 32 * 64 + 9 * 64 * 128 + 2 * (32 + 64 + 128) + 128 * 10 + 10
    assert found.parameters == by_layer


@pytest.mark.long
def test_resnet_50_has_its_published_size() -> None:
    """25.6 million parameters; 4.1e9 multiplications and additions forward, so 8.2e9 operations
    (arXiv:1512.03385, table 1, has 3.8e9 with the stride elsewhere)."""
    found = count("resnet50")
    assert found.parameters == 25_557_032
    assert found.input_shape == (3, 224, 224)
    assert found.item_flops == pytest.approx(3 * 8.2e9, rel=0.03)


@pytest.mark.long
@pytest.mark.parametrize("function", ["resnet50", "transformer"])
def test_activations_are_what_autograd_saves_and_little_more(function: str) -> None:
    """More, since outputs and gradients are alive while the backward pass begins."""
    found = count(function)
    model, inputs = built(function)
    two, four = (saved_bytes(model, inputs[:1].repeat(n, *[1] * (inputs.ndim - 1))) for n in (2, 4))
    each = (four - two) // 2
    assert each <= found.item_bytes <= 1.25 * each


@pytest.mark.long
def test_bf16_by_autocast_takes_less() -> None:
    full, half = count("transformer"), count("transformer", precision="bf16")
    assert half.autocast
    assert half.weight_bytes == full.weight_bytes
    assert 0.4 < half.item_bytes / full.item_bytes < 0.95


@pytest.mark.long
def test_autocast_normalizes_in_fp32_as_on_a_gpu() -> None:
    """The norm's input and output take 4 bytes each; with 2 it were 0.6 of the whole."""
    full, half = count("group_norm"), count("group_norm", precision="bf16")
    assert 0.65 < half.item_bytes / full.item_bytes < 0.75
