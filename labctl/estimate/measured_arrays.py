"""Count what a Keras model or a Flax module keeps, from shapes alone: no batch is computed.

A part of measure.py, which imports it in the lab's own Python: nothing of labctl is imported here,
and Keras and JAX only if the lab's code did. How activations were found is in `activations`:

- "residuals" (Flax): what JAX's differentiation hands from the forward to the backward pass,
  without the parameters. XLA fuses operations and may keep less.
- "outputs" (Keras): the outputs of all layers. What is kept within a layer, such as the scores of
  attention, is not seen.
- "unknown": a Keras model whose layers have no fixed outputs, since its `call` is code.

In inference the first two are the largest operation's, or layer's, input and output.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

SIZES = (2, 4)
# Keras layers that share the memory of what they are given.
VIEWS = ("Flatten", "Reshape", "InputLayer")
# Keras layers whose operations are the products with one kernel.
PRODUCTS = ("Dense", "Conv1D", "Conv2D", "Conv3D")
# Keras layers with weights that do few operations.
CHEAP = ("Normalization", "Embedding", "PReLU")
# How often training multiplies with a kernel: forward, and for the gradients of input and kernel.
PASSES = 3
# Arguments that switch a Flax module to training, and their values then.
TRAINING_ARGUMENTS = {"training": True, "train": True, "deterministic": False}
# Calls within a jaxpr whose operations are repeated as often as this parameter says.
REPETITIONS = "length"


class FreeDimensionError(ValueError):
    """The shapes of a model's layers depend on that of its input, which is unknown."""


class CountedLayer(NamedTuple):
    """One layer; sizes are the bytes of one item."""

    name: str
    fixed_bytes: int
    item_bytes: int
    input_item_bytes: int


class CountedModel(NamedTuple):
    """What was counted; measure.py's MeasureReply has the same fields, and describes them."""

    layers: Sequence[CountedLayer]
    parameters: int
    weight_bytes: int
    trained_parameters: int
    trained_bytes: int
    fixed_bytes: int
    item_bytes: int
    item_flops: int
    input_shape: Sequence[int]
    input_type: str
    activations: str
    framework: str


def find_counter(model: Any) -> Callable[..., CountedModel] | None:
    """Return the function that counts this model, of Keras or Flax; None for another model."""
    for module, kind, counter in (
        ("keras", "Model", count_keras),
        ("flax.linen", "Module", count_linen),
        ("flax.nnx", "Module", count_nnx),
    ):
        if module in sys.modules and isinstance(model, getattr(sys.modules[module], kind)):
            return counter
    return None


def needs_example(model: Any) -> bool:
    """Tell whether the shape of the input is unknown: only a built Keras model knows its own."""
    return find_counter(model) is not count_keras or not model.built


def bytes_of(array: Any) -> int:
    """Return the bytes of an array, or of what has its shape and type."""
    bits = re.search(r"\d+", str(array.dtype))  # bool has none
    return int(prod(array.shape)) * int(bits.group() if bits else 8) // 8


def call(function: Callable[..., Any], batch: Any) -> Any:
    if isinstance(batch, dict):
        return function(**batch)
    return function(*batch) if isinstance(batch, (tuple, list)) else function(batch)


# Keras


def count_keras(model: Any, example: Any, request: Any) -> CountedModel:
    keras = sys.modules["keras"]
    if not model.built:
        model(example)
    model = fix_shapes(model, example, request.seq)
    inputs = getattr(model, "inputs", None) or keras.tree.flatten(example)
    layers = list_layers(model, inputs)
    item = sum(layer.item_bytes for layer in layers or ())
    if not request.training:
        item = max((layer.item_bytes + layer.input_item_bytes for layer in layers or ()), default=0)
    trained = model.trainable_weights
    return CountedModel(
        layers=layers if layers and request.training else (),
        parameters=model.count_params(),
        weight_bytes=sum(bytes_of(weight) for weight in model.weights),
        trained_parameters=sum(int(prod(weight.shape)) for weight in trained),
        trained_bytes=sum(bytes_of(weight) for weight in trained),
        fixed_bytes=0,
        item_bytes=item,
        item_flops=count_products(model) * (PASSES if request.training else 1),
        input_shape=inputs[0].shape[1:],
        input_type=str(inputs[0].dtype),
        activations="outputs" if layers is not None else "unknown",
        framework="Keras " + keras.__version__ + " on " + keras.backend.backend(),
    )


def fix_shapes(model: Any, example: Any, seq: int) -> Any:
    """Return the model, or one with the same layers whose input has no free dimension.

    That of the example replaces it, or `seq`. FreeDimensionError without both.
    """
    keras = sys.modules["keras"]
    free = [one for one in getattr(model, "inputs", None) or () if None in one.shape[1:]]
    if not free:
        return model
    if len(model.inputs) > 1 or (example is None and not seq):
        raise FreeDimensionError(
            "a dimension of its input is free; --seq 512 sets the length of a text"
        )
    shape = free[0].shape[1:] if example is None else keras.tree.flatten(example)[0].shape[1:]
    shape = [seq if size is None else size for size in shape]
    return keras.models.clone_model(model, input_tensors=keras.Input(shape, dtype=free[0].dtype))


def list_layers(model: Any, inputs: Any) -> list[CountedLayer] | None:
    """Return the input and each layer that has memory of its own; None if shapes are not fixed."""
    counted = [CountedLayer("input", 0, sum_items(inputs), 0)]
    for layer in flatten(model):
        try:
            sizes = [sum_items(tensors) for tensors in (layer.output, layer.input)]
        except (AttributeError, ValueError, TypeError):
            return None
        if type(layer).__name__ not in VIEWS:
            counted.append(CountedLayer(layer.name, 0, *sizes))
    return counted


def flatten(model: Any) -> list[Any]:
    """List the layers, those of models within the model included."""
    keras = sys.modules["keras"]
    nested = (flatten(one) if isinstance(one, keras.Model) else [one] for one in model.layers)
    return [layer for layers in nested for layer in layers]


def sum_items(tensors: Any) -> int:
    """Return the bytes of one item of tensors; TypeError if a dimension is free."""
    each = sys.modules["keras"].tree.flatten(tensors)
    return sum(bytes_of(Shaped(one.shape[1:], one.dtype)) for one in each)


class Shaped(NamedTuple):
    shape: Sequence[int]
    dtype: Any


def count_products(model: Any) -> int:
    """Count the multiplications and additions of one item; 0 if a layer's are unknown."""
    total = 0
    for layer in flatten(model):
        name = type(layer).__name__
        if name in PRODUCTS:
            kernel = layer.kernel.shape
            try:
                positions = prod(layer.output.shape[1:]) // kernel[-1]
            except (AttributeError, ValueError, TypeError):
                return 0
            total += 2 * int(prod(kernel)) * positions
        elif layer.weights and not name.endswith(CHEAP):
            return 0
    return total


# Flax


def count_linen(model: Any, example: Any, request: Any) -> CountedModel:
    jax = sys.modules["jax"]
    key = jax.random.key(0)
    known = inspect.signature(type(model).__call__).parameters
    flags = {
        name: value if request.training else not value
        for name, value in TRAINING_ARGUMENTS.items()
        if name in known
    }
    build = partial(model.init, {"params": key, "dropout": key}, **flags)
    variables = dict(jax.eval_shape(partial(call, build), make_batch(example, 1)))
    parameters = variables.pop("params", {})
    changed = list(variables) if request.training else []

    def forward(parameters: Any, others: Any, batch: Any) -> Any:
        apply = partial(model.apply, {"params": parameters, **others}, rngs={"dropout": key})
        output = call(partial(apply, mutable=changed or False, **flags), batch)
        return output[0] if changed else output

    return count_flax(forward, parameters, variables, example, request)


def count_nnx(model: Any, example: Any, request: Any) -> CountedModel:
    nnx = sys.modules["flax.nnx"]
    if request.training:
        model.train()
    else:
        model.eval()
    graph, parameters, others = nnx.split(model, nnx.Param, ...)

    def forward(parameters: Any, others: Any, batch: Any) -> Any:
        return call(nnx.merge(graph, parameters, others, copy=True), batch)

    return count_flax(forward, parameters, others, example, request)


def count_flax(
    forward: Callable[..., Any], parameters: Any, others: Any, example: Any, request: Any
) -> CountedModel:
    jax = sys.modules["jax"]
    leaves, first = jax.tree.leaves(parameters), jax.tree.leaves(example)[0]
    kept, operations = [], []
    for size in SIZES:
        arguments = (parameters, others, make_batch(example, size))
        if request.training:
            residuals = jax.make_jaxpr(make_residuals(forward))(*arguments).jaxpr
            kept.append(count_residuals(residuals, find_stored(residuals, example)))
            step = jax.make_jaxpr(jax.grad(make_loss(forward), allow_int=True))(*arguments).jaxpr
        else:
            step = jax.make_jaxpr(forward)(*arguments).jaxpr
            kept.append(find_largest_operation(step, find_stored(step, example)))
        operations.append(count_operations(step))
    growth = SIZES[1] - SIZES[0]
    item_bytes = max(0, kept[1] - kept[0]) // growth
    trained_bytes = sum(bytes_of(leaf) for leaf in leaves)
    return CountedModel(
        layers=(),
        parameters=sum(leaf.size for leaf in leaves),
        weight_bytes=trained_bytes + sum(bytes_of(leaf) for leaf in jax.tree.leaves(others)),
        trained_parameters=sum(leaf.size for leaf in leaves),
        trained_bytes=trained_bytes,
        fixed_bytes=max(0, kept[0] - SIZES[0] * item_bytes),
        item_bytes=item_bytes,
        item_flops=(operations[1] - operations[0]) // growth,
        input_shape=list(first.shape[1:]),
        input_type=str(first.dtype),
        activations="residuals",
        framework="Flax " + sys.modules["flax"].__version__ + " on JAX " + jax.__version__,
    )


def make_batch(example: Any, size: int) -> Any:
    """Return the shapes and types of a batch of so many items."""
    jax = sys.modules["jax"]

    def repeat(value: Any) -> Any:
        shape = (size, *value.shape[1:]) if value.ndim else ()
        return jax.ShapeDtypeStruct(shape, value.dtype)

    return jax.tree.map(repeat, example)


def make_loss(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a loss: cross-entropy over the last dimension of likely scores, else the mean."""
    jax = sys.modules["jax"]
    numpy = jax.numpy

    def loss(parameters: Any, others: Any, batch: Any) -> Any:
        leaves = jax.tree.leaves(forward(parameters, others, batch))
        scores = [leaf for leaf in leaves if numpy.issubdtype(leaf.dtype, numpy.floating)]
        if not scores:
            raise TypeError("the output of the model has no floating-point numbers")
        if scores[0].ndim < 2 or scores[0].shape[-1] < 2:
            return sum(score.astype("float32").mean() for score in scores)
        return -jax.nn.log_softmax(scores[0].astype("float32"))[..., 0].mean()

    return loss


def make_residuals(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of the forward pass that returns all that the backward pass needs."""
    jax = sys.modules["jax"]
    loss = make_loss(forward)

    def find_residuals(parameters: Any, others: Any, batch: Any) -> Any:
        return jax.vjp(lambda values: loss(values, others, batch), parameters)[1]

    return find_residuals


def find_stored(jaxpr: Any, batch: Any) -> set[int]:
    """Return the arguments that are weights: all but the batch, which comes last."""
    items = len(sys.modules["jax"].tree.leaves(batch))
    return {id(value) for value in (*jaxpr.invars[:-items], *jaxpr.constvars)}


def count_residuals(jaxpr: Any, stored: set[int]) -> int:
    """Sum what a jaxpr returns, each array once, without the weights."""
    results = {id(value): value for value in jaxpr.outvars if not hasattr(value, "val")}
    return sum(bytes_of(value.aval) for key, value in results.items() if key not in stored)


def find_largest_operation(jaxpr: Any, stored: set[int]) -> int:
    """Return the bytes of the inputs and outputs of the operation that has the most."""
    sizes = [0]
    for equation in jaxpr.eqns:
        used = {id(v): v for v in (*equation.invars, *equation.outvars) if not hasattr(v, "val")}
        sizes.append(sum(bytes_of(value.aval) for key, value in used.items() if key not in stored))
    return max(sizes)


def count_operations(jaxpr: Any) -> int:
    """Count the multiplications and additions of matrix products and convolutions."""
    total = 0
    for equation in jaxpr.eqns:
        name, values = equation.primitive.name, equation.params
        out = equation.outvars[0].aval
        if name == "dot_general":
            (contracted, _), _ = values["dimension_numbers"]
            total += 2 * out.size * prod(equation.invars[0].aval.shape[d] for d in contracted)
        elif name == "conv_general_dilated":
            kernel = equation.invars[1].aval
            filters = kernel.shape[values["dimension_numbers"].rhs_spec[0]]
            total += 2 * out.size * kernel.size // filters
        inner = sum(count_operations(one) for one in list_inner(values))
        total += inner * (values[REPETITIONS] if name == "scan" else 1)
    return int(total)


def list_inner(values: Any) -> Iterator[Any]:
    """Yield the jaxprs among an equation's parameters, as of jit and of loops."""
    for value in values.values():
        for one in value if isinstance(value, (tuple, list)) else (value,):
            inner = getattr(one, "jaxpr", one)
            if hasattr(inner, "eqns"):
                yield inner
