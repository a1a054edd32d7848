"""Models of Keras and Flax, small enough to count their bytes by hand.

Each function imports its framework itself: the other one may not be installed.
"""

from __future__ import annotations

from typing import Any

import numpy


def keras_two_layers() -> Any:
    import keras

    scores = keras.layers.Dense(2)(keras.layers.Dense(10)(images := keras.Input((5,))))
    return keras.Model(images, scores)


def keras_convolution() -> Any:
    import keras

    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(4, 3, padding="same", dtype="mixed_bfloat16"),
            layers.BatchNormalization(dtype="mixed_bfloat16"),
            layers.Flatten(),
            layers.Dense(2, dtype="float32"),
        ]
    )


def keras_nested() -> Any:
    import keras

    inner = keras.Sequential([keras.Input((5,)), keras.layers.Dense(10)])
    return keras.Sequential([keras.Input((5,)), inner, keras.layers.Dense(2)])


def keras_free_length() -> Any:
    import keras

    layers = keras.layers
    return keras.Sequential([keras.Input((None,), dtype="int32"), layers.Embedding(100, 8)])


def keras_code() -> Any:
    import keras

    class Code(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.first = keras.layers.Dense(10)

        def call(self, rows: Any) -> Any:
            return self.first(rows) if rows.shape[0] else rows

    return Code(), numpy.zeros((1, 5), "float32")


def keras_attention() -> Any:
    import keras

    words = keras.Input((6, 8))
    return keras.Model(words, keras.layers.MultiHeadAttention(2, 4)(words, words))


def flax_two_layers() -> Any:
    from flax import linen as nn

    return nn.Sequential([nn.Dense(10), nn.Dense(2)]), numpy.zeros((1, 5), "float32")


def flax_with_statistics() -> Any:
    from flax import linen as nn

    class Normalized(nn.Module):
        @nn.compact
        def __call__(self, rows: Any, train: bool) -> Any:
            hidden = nn.BatchNorm(use_running_average=not train)(nn.Dense(10)(rows))
            return nn.Dense(2)(nn.Dropout(0.5, deterministic=not train)(hidden))

    return Normalized(), numpy.zeros((1, 5), "float32")


def flax_repeated() -> Any:
    """The same layer eight times, by a loop that is compiled once."""
    from flax import linen as nn

    class Repeated(nn.Module):
        @nn.compact
        def __call__(self, rows: Any) -> Any:
            layer = nn.scan(
                lambda module, carry, _: (module(carry), None),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=8,
            )
            return layer(nn.Dense(16), rows, None)[0]

    return Repeated(), numpy.zeros((1, 16), "float32")


def nnx_two_layers() -> Any:
    from flax import nnx

    class Network(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.first = nnx.Linear(5, 10, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)
            self.second = nnx.Linear(10, 2, rngs=rngs)

        def __call__(self, rows: Any) -> Any:
            return self.second(self.drop(self.first(rows)))

    return Network(nnx.Rngs(0)), numpy.zeros((1, 5), "float32")


def flax_alone() -> Any:
    from flax import linen as nn

    return nn.Dense(10)
