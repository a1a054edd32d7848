"""A small convolutional network in Keras, trained with TensorFlow."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# TensorFlow's notes about the processor, which are no warnings.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy
import tensorflow as tf
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as save_arrays
from tensorflow import keras

from checkpoints import Checkpoint, CheckpointError

PRECISIONS = ("float32", "bfloat16", "float16")
WEIGHTS, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
BATCH_SIZE = 256  # for probabilities


@dataclass(frozen=True)
class Settings:
    """What the network learns with, stored in a checkpoint's state.json."""

    lr: float = 3e-3
    steps: int = 600
    width: int = 32
    precision: str = "float32"
    seed: int = 1


def build_network(classes: int, width: int, policy: str) -> keras.Model:
    """Images (B, 8, 8, 1) from 0 to 1 -> logits (B, classes), float32.

    Two convolutions, each followed by half the resolution, then one linear layer.
    """
    layers = keras.layers
    images = keras.Input((8, 8, 1))
    # Layers compute in the type of the policy. Their weights stay in float32
    # (mixed precision), since small updates would be rounded away.
    hidden = layers.Rescaling(2.0, offset=-1.0, dtype=policy)(images)
    for channels in (width, 2 * width):
        hidden = layers.Conv2D(channels, 3, padding="same", use_bias=False, dtype=policy)(hidden)
        hidden = layers.GroupNormalization(8, dtype=policy)(hidden)
        hidden = layers.MaxPooling2D(dtype=policy)(layers.ReLU(dtype=policy)(hidden))
    hidden = layers.GlobalAveragePooling2D(dtype=policy)(hidden)
    hidden = layers.Dropout(0.2, dtype=policy)(hidden)
    # The loss is computed in float32.
    return keras.Model(images, layers.Dense(classes, dtype="float32")(hidden))


class Learner:
    """The network with its optimizer (AdamW) and the learning rate of each step."""

    file = WEIGHTS

    def __init__(self, settings: Settings, classes: tuple[str, ...]) -> None:
        self.settings, self.classes = settings, classes
        keras.utils.set_random_seed(settings.seed)
        # GPUs sum in an order that varies between runs, unless this is set.
        tf.config.experimental.enable_op_determinism()
        self.device = "gpu" if tf.config.list_physical_devices("GPU") else "cpu"
        mixed = settings.precision != "float32"
        policy = f"mixed_{settings.precision}" if mixed else "float32"
        self.network = build_network(len(classes), settings.width, policy)
        warmup = max(1, settings.steps // 20)
        self.schedule = keras.optimizers.schedules.CosineDecay(
            0.0, settings.steps - warmup, warmup_target=settings.lr, warmup_steps=warmup
        )
        optimizer = keras.optimizers.AdamW(self.schedule, weight_decay=0.01, clipnorm=1.0)
        if settings.precision == "float16":
            # In float16 small gradients would vanish; scaling the loss up and
            # the gradients down again keeps them.
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
        self.optimizer = optimizer
        self.network.compile(
            optimizer,
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        optimizer.build(self.network.trainable_variables)

    def count_parameters(self) -> int:
        return int(sum(numpy.prod(weight.shape) for weight in self.network.trainable_variables))

    def rate(self, step: int) -> float:
        return float(self.schedule(step))

    def step(
        self, images: numpy.ndarray, labels: numpy.ndarray, number: int
    ) -> tuple[float, float]:
        """Do one step with a batch. Return its loss and accuracy."""
        self.network.reset_metrics()
        loss, accuracy = self.network.train_on_batch(images, labels)
        return float(loss), float(accuracy)

    def probabilities(self, images: numpy.ndarray) -> numpy.ndarray:
        """Return a row of probabilities for each image."""
        rows = []
        for start in range(0, len(images), BATCH_SIZE):
            logits = self.network.predict_on_batch(images[start : start + BATCH_SIZE])
            rows.append(tf.nn.softmax(logits).numpy())
        return numpy.concatenate(rows)

    def files(self) -> dict[str, bytes]:
        """Return all state of the next step, by file.

        The variables of a network include the random state of its dropout, those of an optimizer
        the number of its steps.
        """
        return {
            WEIGHTS: save_arrays(to_arrays(self.network.variables)),
            OPTIMIZER: save_arrays(to_arrays(self.optimizer.variables)),
        }

    def restore(self, checkpoint: Checkpoint) -> None:
        assign(checkpoint, WEIGHTS, self.network.variables)
        assign(checkpoint, OPTIMIZER, self.optimizer.variables)


def to_arrays(variables: Sequence[Any]) -> dict[str, numpy.ndarray]:
    """Number the variables, in the order of the layers: their names may occur twice."""
    return {f"{number:03}": numpy.asarray(variable) for number, variable in enumerate(variables)}


def assign(checkpoint: Checkpoint, name: str, variables: Sequence[Any]) -> None:
    found: Mapping[str, numpy.ndarray] = load_arrays(checkpoint.read_bytes(name))
    shapes = [found[key].shape for key in sorted(found)]
    if shapes != [tuple(variable.shape) for variable in variables]:
        raise CheckpointError(f"{checkpoint.path}: {name} is of another network")
    for key, variable in zip(sorted(found), variables, strict=True):
        variable.assign(found[key])


def load(checkpoint: Checkpoint) -> Learner:
    """Return the network of a checkpoint, ready to be asked."""
    state = checkpoint.read_state()
    learner = Learner(Settings(**state["settings"]), tuple(state["classes"]))
    assign(checkpoint, WEIGHTS, learner.network.variables)
    return learner
