"""Models of Keras and Flax, measured in a child process, against counts by hand."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from labctl.errors import UsageError
from labctl.estimate.plan import FitMeasurement, ModelMeasurement, ModelPlan
from labctl.events import SilentReporter
from labctl.insight.model_measurement import ModelSource, measure_model

# TensorFlow and JAX take seconds to import, on a busy machine half a minute.
PATIENCE_S = 900
MODELS = Path(__file__).with_name("array_models.py")
pytestmark = [pytest.mark.train, pytest.mark.long]
needs_keras = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)
needs_flax = pytest.mark.skipif(
    importlib.util.find_spec("flax") is None, reason="JAX and Flax are not installed"
)
# 5 x 10 + 10, and 10 x 2 + 2
PARAMETERS = 82


def count(function: str, optimizer: Any = "adamw", **plan: Any) -> ModelMeasurement:
    source = ModelSource(
        file=MODELS, function=function, root=MODELS.parent, time_limit_s=PATIENCE_S
    )
    found = measure_model(
        source, ModelPlan(precision="fp32", optimizer=optimizer, **plan), SilentReporter()
    )
    assert not isinstance(found, FitMeasurement)
    return found


@needs_keras
def test_the_layers_of_keras_are_as_counted_by_hand() -> None:
    found = count("keras_two_layers")
    assert (found.parameters, found.weight_bytes, found.trained_bytes) == (82, 328, 328)
    # 5 numbers in, 10 in the middle, 2 out
    assert (found.fixed_bytes, found.item_bytes) == (0, (5 + 10 + 2) * 4)
    assert [layer.item_bytes for layer in found.layers] == [20, 40, 8]
    assert found.item_flops == 3 * 2 * (5 * 10 + 10 * 2)
    assert (found.activations, found.framework[:6]) == ("outputs", "Keras ")
    served = count("keras_two_layers", "")
    assert (served.item_bytes, served.item_flops) == ((5 + 10) * 4, 2 * (5 * 10 + 10 * 2))
    nested = count("keras_nested")
    assert (nested.parameters, nested.item_bytes) == (PARAMETERS, found.item_bytes)


@needs_keras
def test_the_types_of_keras_are_those_of_its_policies() -> None:
    found = count("keras_convolution")
    # Kernel and bias, scale and offset, mean and variance that are not trained, the last layer.
    assert found.parameters - found.trained_parameters == 2 * 4
    assert found.weight_bytes == 4 * found.parameters
    # Convolution and normalization compute in two bytes; the image and the scores have four.
    assert found.item_bytes == 8 * 8 * 3 * 4 + 2 * (8 * 8 * 4 * 2) + 2 * 4
    assert found.item_flops == 3 * 2 * (64 * 3 * 3 * 3 * 4 + 64 * 4 * 2)


@needs_keras
def test_what_keras_does_not_say_is_not_made_up() -> None:
    code = count("keras_code")
    assert (code.activations, code.item_bytes, code.parameters) == ("unknown", 0, 60)
    assert count("keras_attention").item_flops == 0
    with pytest.raises(UsageError, match="input shape") as raised:
        count("keras_free_length")
    assert "--seq" in raised.value.why
    assert count("keras_free_length", seq=7).item_bytes == 7 * 4 + 7 * 8 * 4


@needs_flax
@pytest.mark.parametrize("function", ["flax_two_layers", "nnx_two_layers"])
def test_the_arrays_of_flax_are_as_counted_by_hand(function: str) -> None:
    found = count(function)
    assert (found.parameters, found.trained_bytes) == (PARAMETERS, 328)
    # The input's gradient is not computed.
    assert found.item_flops == 2 * (2 * 5 * 10 + 3 * 10 * 2)
    # At least the inputs of both products, and not more than all there is, each number twice.
    assert (5 + 10) * 4 <= found.item_bytes + found.fixed_bytes <= 2 * (5 + 10 + 10 + 2) * 4
    assert (found.activations, found.framework[:5]) == ("residuals", "Flax ")


@needs_flax
def test_statistics_and_repeated_layers_of_flax() -> None:
    found = count("flax_with_statistics")
    # The mean and variance of ten numbers are stored, and not trained.
    assert found.weight_bytes - found.trained_bytes == 2 * 10 * 4
    repeated = count("flax_repeated")
    assert repeated.parameters == 8 * (16 * 16 + 16)
    assert count("flax_repeated", "").item_flops == 8 * 2 * 16 * 16
    assert repeated.item_flops == 3 * 8 * 2 * 16 * 16


@needs_flax
def test_a_flax_module_needs_an_example() -> None:
    with pytest.raises(UsageError, match="input shape"):
        count("flax_alone")
