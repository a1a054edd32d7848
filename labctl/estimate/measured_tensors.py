"""Watch the tensors of a model: those that are alive, and those that each layer keeps.

`measure.py` imports this module in the lab's own Python, so it imports nothing of labctl (Python
3.8 and PyTorch 2.4 or newer).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

# Layers beyond these are put together, so that a reply stays small.
MOST_LAYERS = 200
CONTAINERS = ("ModuleList", "ModuleDict", "Sequential")


def list_tensors(values: Any) -> list[Any]:
    import torch
    from torch.utils._pytree import tree_leaves

    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


class LayerReply(NamedTuple):
    """What one layer keeps for the backward pass: fixed + n x item bytes for n items.

    `input_item_bytes` is its input, which is all that activation checkpointing keeps of it.
    """

    name: str
    fixed_bytes: int
    item_bytes: int
    input_item_bytes: int


def measure_layers(
    model: Any, inputs: Any, sizes: Sequence[int], passes: Sequence[Callable[[], Any]]
) -> list[LayerReply]:
    """Measure what each layer keeps, from forward passes over as many items as `sizes` say."""
    small, large = (LayerWatcher(model, inputs).run(forward) for forward in passes)
    step = sizes[1] - sizes[0]
    replies = []
    for name, (kept, read) in large.items():
        small_kept, small_read = small.get(name, (0, 0))
        each = max(0, kept - small_kept) // step
        fixed = max(0, small_kept - sizes[0] * each)
        replies.append(LayerReply(name, fixed, each, max(0, read - small_read) // step))
    return replies


class LayerWatcher:
    """Notes which layer was running when autograd kept a tensor, each storage once.

    A layer is a child of the model; the children of a list of blocks are layers themselves. What is
    kept outside of all layers, as by the loss, has the name "loss".
    """

    OUTSIDE = "loss"

    def __init__(self, model: Any, inputs: Any) -> None:
        self.layers = list_layers(model)[:MOST_LAYERS]
        own = [*model.parameters(), *model.buffers()]
        self.counted = {value.untyped_storage()._cdata for value in own}
        self.storages: list[Any] = []  # alive until the end, so that no address is used twice
        self.kept: dict[str, int] = {}
        self.read: dict[str, int] = {}
        self.running: list[str] = []

    def run(self, forward: Callable[[], Any]) -> dict[str, tuple[int, int]]:
        """Run a forward pass; return name -> (bytes kept, bytes of its input)."""
        torch = sys.modules["torch"]
        hooks: list[Any] = []
        for name, layer in self.layers:
            hooks.append(layer.register_forward_pre_hook(self._make_entry(name), with_kwargs=True))
            hooks.append(layer.register_forward_hook(self._leave))
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._keep, lambda value: value):
                result = forward()
        finally:
            for hook in hooks:
                hook.remove()
        del result
        names = dict.fromkeys([*(name for name, _ in self.layers), *self.kept])
        return {name: (self.kept.get(name, 0), self.read.get(name, 0)) for name in names}

    def _make_entry(self, name: str) -> Callable[..., None]:
        def enter(layer: Any, args: Any, kwargs: Any) -> None:
            self.running.append(name)
            sizes = {v.untyped_storage()._cdata: v.nbytes for v in list_tensors((args, kwargs))}
            self.read[name] = self.read.get(name, 0) + sum(sizes.values())

        return enter

    def _leave(self, layer: Any, args: Any, output: Any) -> None:
        self.running.pop()

    def _keep(self, tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.counted:
            self.counted.add(storage._cdata)
            self.storages.append(storage)
            name = self.running[-1] if self.running else self.OUTSIDE
            self.kept[name] = self.kept.get(name, 0) + storage.nbytes()
        return tensor


def list_layers(model: Any) -> list[tuple[str, Any]]:
    """List the layers of a model by name: its children, and those of its lists of blocks."""
    layers: list[tuple[str, Any]] = []
    for name, child in model.named_children():
        has_blocks = any(len(list(inner.children())) for inner in child.children())
        if type(child).__name__ in CONTAINERS and has_blocks:
            layers += [(name + "." + inner, layer) for inner, layer in list_layers(child)]
        else:
            layers.append((name, child))
    return layers


def watch_tensors(known: list[int]) -> Any:
    """Return a mode that records every tensor of an operation, until its storage is freed."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watcher(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.known: dict[int, int] = dict.fromkeys(known, -1)
            self.events: list[tuple[int, int]] = []  # (storage number, bytes; negative when freed)
            self.gradients: set[int] = set()

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            for tensor in list_tensors(result):
                self.on_tensor(tensor)
            return result

        def on_tensor(self, tensor: Any) -> None:
            storage = tensor.untyped_storage()
            if storage._cdata in self.known:
                return
            number, size = len(self.events), storage.nbytes()
            self.known[storage._cdata] = number
            self.events.append((number, size))
            weakref.finalize(storage, self.on_freed, storage._cdata, number, size)

        def on_freed(self, key: int, number: int, size: int) -> None:
            self.known.pop(key, None)
            self.events.append((number, -size))

        def exclude_gradient(self, tensor: Any) -> None:
            """Exclude a parameter's gradient, which is counted elsewhere."""
            self.gradients.add(self.known.get(tensor.untyped_storage()._cdata, -1))

        def peak(self) -> int:
            now = most = 0
            for number, size in self.events:
                now += 0 if number in self.gradients else size
                most = max(most, now)
            return most

    return Watcher()
