"""A program for the lab's own Python: build a model, run it on two small batches, and measure it.

It is passed to `python -c`, so it imports nothing of labctl and runs where labctl is not installed
(Python 3.8 and PyTorch 2.4 or newer). Its arguments are the texts of MODULES, which it imports. The
request is a JSON object on standard input; the reply is the last line of standard output that
begins with MARK. Bytes are those of all live tensors, without the gradients of parameters.

A model with scikit-learn's interface needs no PyTorch: it is trained on parts of its table. Models
of Keras and Flax are counted by measured_arrays.py.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import sys
import traceback
import types
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

MARK = "labctl-measured:"
MODULES = ("measured_tensors", "measured_fit", "measured_arrays")
SIZES = (2, 4)
# An error message shows as many of the user's lines, the innermost, and as many of its own.
MOST_FRAMES = 3
MOST_MESSAGE_LINES = 6


class MeasureRequest(NamedTuple):
    """What to build and measure. `input` is the shape of one item; if empty, it is derived."""

    file: str
    function: str
    training: bool
    precision: str
    seq: int
    input: Sequence[int]
    input_type: str


class MeasureReply(NamedTuple):
    """The measurements; labctl.estimate.plan.ModelMeasurement describes them."""

    layers: Sequence[Any]
    parameters: int
    weight_bytes: int
    trained_parameters: int
    trained_bytes: int
    fixed_bytes: int
    item_bytes: int
    item_flops: int
    input_shape: Sequence[int]
    input_type: str
    input_from: str
    python: str
    torch: str = ""
    autocast: bool = False
    activations: str = "measured"
    framework: str = ""


class RefusalReply(NamedTuple):
    """Why the code cannot be measured. `error` is "torch" or an UnmeasurableError's kind.

    It is "build" or "pass" if the code raised an exception. `why` is its traceback then,
    `exception` its class, and `module` the module that is not installed.
    """

    error: str
    why: str = ""
    exception: str = ""
    module: str = ""


def main() -> None:
    request = MeasureRequest(**json.loads(sys.stdin.readline()))
    for number, name in enumerate(MODULES, start=1):
        load_module(name, sys.argv[number])
    limit_memory()
    # JAX and TensorFlow would otherwise take all memory of a GPU.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    warnings.simplefilter("ignore")
    stage = "build"
    try:
        model, example = build_model(request)
        stage = "pass"
        reply(measure_any(model, example, request))
    except UnmeasurableError as refused:
        reply(RefusalReply(refused.kind, str(refused)))
    except Exception as error:
        reply(describe_exception(stage, error))


def load_module(name: str, source: str) -> None:
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(source, name + ".py", "exec"), module.__dict__)


def get_tensors_module() -> Any:
    return sys.modules["measured_tensors"]


def get_arrays_module() -> Any:
    return sys.modules["measured_arrays"]


def describe_exception(stage: str, error: Exception) -> RefusalReply:
    """Describe an exception by the user's lines that led to it, as Python shows them."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_own_file(f.filename)]
    lines = "".join(
        f'  File "{os.path.relpath(frame.filename)}", line {frame.lineno}, in {frame.name}\n'
        f"    {frame.line}\n"
        for frame in frames[-MOST_FRAMES:]
    )
    message = "".join(traceback.format_exception_only(type(error), error)).splitlines()
    why = lines + "\n".join(message[:MOST_MESSAGE_LINES])
    module = (error.name or "") if isinstance(error, ModuleNotFoundError) else ""
    if module == "torch":
        return RefusalReply("torch")
    return RefusalReply(stage, why, type(error).__name__, module)


def is_own_file(name: str) -> bool:
    """Tell whether a file is in the lab, the current directory, and in no installed package."""
    path = Path.cwd() / name
    return path.is_file() and Path.cwd() in path.parents and "site-packages" not in path.parts


def reply(message: Any) -> None:
    print("\n" + MARK + json.dumps(message._asdict()), flush=True)


class UnmeasurableError(Exception):
    """The code cannot be measured. `kind` says what is wrong.

    It is "file", "function", "model", "table", "input" or "output".
    """

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind = kind


def limit_memory() -> None:
    """Limit memory so that an allocation fails before the machine runs out of it (Linux)."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (int(free * 1024 * 0.9), most))


def measure(model: Any, example: Any, request: MeasureRequest) -> MeasureReply:
    import torch

    inputs, source = choose_inputs(model, example, request)
    training = request.training
    model.train(training)
    small, large = (MeasuredPass(model, inputs, request, size).run() for size in SIZES)
    passes = [MeasuredPass(model, inputs, request, size).forward for size in SIZES]
    item_bytes = max(0, large[0] - small[0]) // (SIZES[1] - SIZES[0])
    parameters = list({id(parameter): parameter for parameter in model.parameters()}.values())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    tensors = get_tensors_module()
    first = tensors.list_tensors(inputs)[0]
    layers = tensors.measure_layers(model, inputs, SIZES, passes) if training else ()
    return MeasureReply(
        layers=[layer._asdict() for layer in layers],
        parameters=sum(parameter.numel() for parameter in parameters),
        weight_bytes=sum(parameter.nbytes for parameter in [*parameters, *model.buffers()]),
        trained_parameters=sum(parameter.numel() for parameter in trained),
        trained_bytes=sum(parameter.nbytes for parameter in trained),
        fixed_bytes=max(0, small[0] - SIZES[0] * item_bytes),
        item_bytes=item_bytes,
        item_flops=(large[1] - small[1]) // (SIZES[1] - SIZES[0]),
        input_shape=list(first.shape[1:]),
        input_type=str(first.dtype).replace("torch.", ""),
        input_from=source,
        python=sys.executable,
        torch=torch.__version__,
        autocast=request.precision in ("bf16", "fp16"),
    )


def build_model(request: MeasureRequest) -> tuple[Any, Any]:
    """Call the function; return (model, the example input that it returned, or None)."""
    path = Path(request.file)
    sys.path.insert(0, str(path.parent))
    sys.argv = [str(path)]
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UnmeasurableError("file", f"{path.name} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    make = getattr(module, request.function, None)
    if not callable(make):
        names = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        own = [n for n in names if getattr(getattr(module, n), "__module__", "") == path.stem]
        raise UnmeasurableError("function", ", ".join(sorted(own)[:20]))
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
    made = make()
    return made if isinstance(made, tuple) and len(made) == 2 else (made, None)


def measure_any(model: Any, example: Any, request: MeasureRequest) -> Any:
    """Measure a module, or time a model for tables. No framework is imported that was not."""
    from measured_fit import is_estimator, is_table, measure_fit

    if get_arrays_module().find_counter(model) is not None:  # before the next: Keras has `fit`, too
        return count_arrays(model, example, request)
    if is_estimator(model):
        if not is_table(example):
            raise UnmeasurableError("table", f"it returned {type(model).__name__} without a table")
        return measure_fit(model, example, sys.executable)
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(model, torch.nn.Module):
        raise UnmeasurableError("model", f"it returned {type(model).__name__}")
    return measure(model, example, request)


def count_arrays(model: Any, example: Any, request: MeasureRequest) -> MeasureReply:
    """Count a model of Keras or Flax."""
    arrays, source = get_arrays_module(), request.function
    if request.input:
        # Keras and JAX have imported NumPy.
        example = sys.modules["numpy"].zeros((1, *request.input), request.input_type)
        source = "--input"
    elif arrays.needs_example(model):
        if example is None:
            raise UnmeasurableError("input", "the function returned the model alone")
    elif example is None:
        source = "the model's own input"
    try:
        counted = arrays.find_counter(model)(model, example, request)._asdict()
    except arrays.FreeDimensionError as error:
        raise UnmeasurableError("input", str(error)) from None
    counted["layers"] = [layer._asdict() for layer in counted["layers"]]
    return MeasureReply(input_from=source, python=sys.executable, **counted)


def choose_inputs(model: Any, example: Any, request: MeasureRequest) -> tuple[Any, str]:
    """Choose a batch of inputs; return (inputs, the source of their shape)."""
    import torch

    if request.input:
        kind = getattr(torch, request.input_type)
        return torch.zeros(1, *request.input, dtype=kind), "--input"
    if example is not None:
        return example, request.function
    nn = torch.nn
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            return torch.zeros(1, layer.in_channels, 224, 224), "a guess from its first layer"
        if isinstance(layer, nn.Embedding):
            long = torch.zeros(1, request.seq or 512, dtype=torch.int64)
            return long, "--seq" if request.seq else "a guess from its first layer"
        if isinstance(layer, nn.Linear):
            return torch.zeros(1, layer.in_features), "its first layer"
    raise UnmeasurableError("input", "it cannot be derived from the model's first layer")


class MeasuredPass:
    """One forward pass and, for training, one backward pass over a batch of `size` items."""

    def __init__(self, model: Any, inputs: Any, request: MeasureRequest, size: int) -> None:
        self.model, self.inputs, self.request, self.size = model, inputs, request, size

    def run(self) -> tuple[int, int]:
        """Run; return (peak bytes beside weights and their gradients, operations)."""
        from torch.utils.flop_counter import FlopCounterMode

        tensors = get_tensors_module()
        inputs = tensors.list_tensors(self.inputs)
        kept = [*self.model.parameters(), *self.model.buffers(), *inputs]
        live = tensors.watch_tensors([value.untyped_storage()._cdata for value in kept])
        hooks = [
            value.register_post_accumulate_grad_hook(lambda p: live.exclude_gradient(p.grad))
            for value in self.model.parameters()
            if value.requires_grad
        ]
        try:
            with live, FlopCounterMode(display=False) as counter:
                self._step()
        finally:
            for hook in hooks:
                hook.remove()
            self.model.zero_grad(set_to_none=True)
        return live.peak(), counter.get_total_flops()

    def _step(self) -> None:
        # A training loop keeps the output during the backward pass.
        output, total = self.forward()
        if total is not None:
            total.backward()
        del output

    def forward(self) -> tuple[Any, Any]:
        """Compute (the output, the loss) of one batch; in inference, the loss is None."""
        import torch

        training = self.request.training
        half = self.request.precision in ("bf16", "fp16")
        with torch.set_grad_enabled(training), contextlib.ExitStack() as precision:
            if half:
                precision.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))
                precision.enter_context(normalize_in_fp32(torch))
            output = self._call_model(self._make_batch())
            return output, loss(output) if training else None

    def _make_batch(self) -> Any:
        from torch.utils._pytree import tree_map

        return tree_map(lambda value: self._repeat(value), self.inputs)

    def _repeat(self, value: Any) -> Any:
        import torch

        if not isinstance(value, torch.Tensor):
            return value
        if not value.ndim:
            return value.clone()
        return value[:1].repeat(self.size, *[1] * (value.ndim - 1))

    def _call_model(self, batch: Any) -> Any:
        if isinstance(batch, dict):
            return self.model(**batch)
        if isinstance(batch, (tuple, list)):
            return self.model(*batch)
        return self.model(batch)


def loss(output: Any) -> Any:
    """Compute a loss: cross-entropy over the last dimension of likely scores, else the mean."""
    import torch

    given = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if given is not None:
        return given
    tensors = get_tensors_module().list_tensors(output)
    scores = [value for value in tensors if value.is_floating_point()]
    if not scores and hasattr(output, "logits"):
        scores = [output.logits]
    if not scores:
        raise UnmeasurableError("output", f"its output is a {type(output).__name__} without floats")
    first = scores[0]
    if first.ndim < 2 or first.shape[-1] < 2:
        return sum(value.float().mean() for value in scores)
    flat = first.flatten(0, -2).float()
    labels = torch.zeros(len(flat), dtype=torch.int64)
    return torch.nn.functional.cross_entropy(flat, labels)


def normalize_in_fp32(torch: Any) -> Any:
    """Return a mode that normalizes layers and groups in fp32, as autocast does on a GPU only.

    PyTorch, Automatic Mixed Precision: "CUDA Ops that can autocast to float32".
    """
    norms = (torch.nn.functional.layer_norm, torch.nn.functional.group_norm)

    class NormalizeInFp32(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func in norms:
                args = [to_fp32(value) for value in args]
                kwargs = {name: to_fp32(value) for name, value in (kwargs or {}).items()}
            return func(*args, **(kwargs or {}))

    def to_fp32(value: Any) -> Any:
        return value.float() if isinstance(value, torch.Tensor) else value

    return NormalizeInFp32()


if __name__ == "__main__":
    main()
