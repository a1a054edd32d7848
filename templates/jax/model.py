"""A small convolutional network in Flax, trained with JAX and optax.

JAX computes with pure functions: the parameters are an argument of each, and a
step returns new ones. `jax.jit` compiles a function for the shapes it is called
with, so the last, smaller batch of an epoch is compiled once more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy
import optax
from flax import linen as nn
from jax import numpy as jnp
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as save_arrays

from checkpoints import Checkpoint, CheckpointError

PRECISIONS = ("float32", "bfloat16", "float16")
# In float16 small gradients would vanish; scaling the loss up and the gradients
# down again keeps them.
LOSS_SCALE = {"float16": 1024.0}
WEIGHTS, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
BATCH_SIZE = 256  # for probabilities
Tree = Any  # nested containers of arrays


@dataclass(frozen=True)
class Settings:
    """What the network learns with, stored in a checkpoint's state.json."""

    lr: float = 3e-3
    steps: int = 600
    width: int = 32
    precision: str = "float32"
    seed: int = 1


class Network(nn.Module):
    """Two convolutions, each followed by half the resolution, then one linear layer."""

    classes: int
    width: int
    # Products are computed in this type. Parameters stay in float32 (mixed
    # precision), since small updates would be rounded away.
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, images: jax.Array, *, training: bool = False) -> jax.Array:
        """Images (B, S, S, 1) from 0 to 1 -> logits (B, classes), float32."""
        hidden = 2 * images - 1
        for width in (self.width, 2 * self.width):
            hidden = nn.Conv(width, (3, 3), dtype=self.dtype)(hidden)
            hidden = nn.GroupNorm(8, dtype=self.dtype)(hidden)
            hidden = nn.max_pool(nn.relu(hidden), (2, 2), strides=(2, 2))
        hidden = nn.Dropout(0.2, deterministic=not training)(hidden.mean(axis=(1, 2)))
        return nn.Dense(self.classes, dtype=self.dtype)(hidden).astype(jnp.float32)


class Learner:
    """The network with its optimizer (AdamW) and the learning rate of each step."""

    file = WEIGHTS

    def __init__(self, settings: Settings, classes: tuple[str, ...]) -> None:
        self.settings, self.classes = settings, classes
        self.device = jax.devices()[0].platform  # "gpu" if JAX found one
        self.network = Network(len(classes), settings.width, jnp.dtype(settings.precision))
        self.schedule = optax.warmup_cosine_decay_schedule(
            0.0, settings.lr, warmup_steps=max(1, settings.steps // 20), decay_steps=settings.steps
        )
        self.optimizer = optax.chain(
            optax.clip_by_global_norm(1.0), optax.adamw(self.schedule, weight_decay=0.01)
        )
        self.key = jax.random.key(settings.seed)
        example = jnp.zeros((1, 8, 8, 1))
        # Compiled as a whole: faster than each operation by itself.
        self.parameters: Tree = jax.jit(self.network.init)(self.key, example)["params"]
        self.moments: Tree = jax.jit(self.optimizer.init)(self.parameters)

    def count_parameters(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(self.parameters))

    def rate(self, step: int) -> float:
        return float(self.schedule(step))

    def step(
        self, images: numpy.ndarray, labels: numpy.ndarray, number: int
    ) -> tuple[float, float]:
        """Do one step with a batch. Return its loss and accuracy."""
        # The random numbers of dropout depend on nothing but the step, so that
        # a resumed run has the same.
        key = jax.random.fold_in(self.key, number)
        self.parameters, self.moments, loss, accuracy = self._step(
            self.parameters, self.moments, images, labels, key
        )
        return float(loss), float(accuracy)

    @partial(jax.jit, static_argnums=0)
    def _step(
        self, parameters: Tree, moments: Tree, images: Any, labels: Any, key: jax.Array
    ) -> tuple[Tree, Tree, jax.Array, jax.Array]:
        scale = LOSS_SCALE.get(self.settings.precision, 1.0)

        def compute_loss(parameters: Tree) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            logits = self.network.apply(
                {"params": parameters}, images, training=True, rngs={"dropout": key}
            )
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
            return loss * scale, (loss, (logits.argmax(1) == labels).mean())

        scaled, (loss, accuracy) = jax.grad(compute_loss, has_aux=True)(parameters)
        gradients = jax.tree.map(lambda gradient: gradient / scale, scaled)
        updates, moments = self.optimizer.update(gradients, moments, parameters)
        return optax.apply_updates(parameters, updates), moments, loss, accuracy

    def probabilities(self, images: numpy.ndarray) -> numpy.ndarray:
        """Return a row of probabilities for each image."""
        rows = []
        for start in range(0, len(images), BATCH_SIZE):
            batch = images[start : start + BATCH_SIZE]
            # Padded to one size: each further one would be compiled.
            padded = numpy.zeros((BATCH_SIZE, *batch.shape[1:]), batch.dtype)
            padded[: len(batch)] = batch
            rows.append(numpy.asarray(self._probabilities(self.parameters, padded))[: len(batch)])
        return numpy.concatenate(rows)

    @partial(jax.jit, static_argnums=0)
    def _probabilities(self, parameters: Tree, images: Any) -> jax.Array:
        return nn.softmax(self.network.apply({"params": parameters}, images))

    def files(self) -> dict[str, bytes]:
        """Return all state of the next step, by file: weights and moments."""
        trees = {WEIGHTS: self.parameters, OPTIMIZER: self.moments}
        return {name: save_arrays(to_arrays(tree)) for name, tree in trees.items()}

    def restore(self, checkpoint: Checkpoint) -> None:
        self.parameters = from_file(checkpoint, WEIGHTS, self.parameters)
        self.moments = from_file(checkpoint, OPTIMIZER, self.moments)


def to_arrays(tree: Tree) -> dict[str, numpy.ndarray]:
    """Name the arrays of a tree by their paths in it: "Conv_0/kernel"."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): numpy.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def from_file(checkpoint: Checkpoint, name: str, like: Tree) -> Tree:
    """Read a tree of the same structure as `like`."""
    found: Mapping[str, numpy.ndarray] = load_arrays(checkpoint.read_bytes(name))
    wanted = to_arrays(like)
    if {key: array.shape for key, array in found.items()} != {
        key: array.shape for key, array in wanted.items()
    }:
        raise CheckpointError(f"{checkpoint.path}: {name} is of another network")
    leaves = [jnp.asarray(found[key]) for key in wanted]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def load(checkpoint: Checkpoint) -> Learner:
    """Return the network of a checkpoint, ready to be asked."""
    state = checkpoint.read_state()
    learner = Learner(Settings(**state["settings"]), tuple(state["classes"]))
    learner.parameters = from_file(checkpoint, WEIGHTS, learner.parameters)
    return learner
