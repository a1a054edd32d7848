"""Three models for tables, behind one interface.

| --model  | library      | a round is                              |
|----------|--------------|-----------------------------------------|
| linear   | scikit-learn | one pass over the rows                  |
| xgboost  | XGBoost      | five more trees for each class          |
| lightgbm | LightGBM     | the same, grown leaf by leaf            |

A model after a round is a function of the model before it, the rows, and the
number of the round. So a resumed run equals an uninterrupted one.

The files are numbers and text. `pickle` and `joblib`, which are common with
scikit-learn, run any code that is in the file when they load it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy

from checkpoints import Checkpoint
from findings import Split

TREES_PER_ROUND = 5
Array = numpy.ndarray[Any, Any]


@dataclass(frozen=True)
class Settings:
    """What the models learn with, stored in a checkpoint's state.json."""

    model: str = "linear"
    rounds: int = 20
    lr: float = 0.1
    depth: int = 4
    seed: int = 1


class Model(Protocol):
    """A model with some rounds of training. `file` is its file in a checkpoint."""

    file: ClassVar[str]

    def train_round(self, inputs: Array, labels: Array, number: int) -> None: ...
    def probabilities(self, inputs: Array) -> Array: ...
    def to_bytes(self) -> bytes: ...
    def restore(self, content: bytes) -> None: ...


class Linear:
    """Logistic regression by stochastic gradient descent, on standardized columns."""

    file: ClassVar[str] = "model.safetensors"

    def __init__(self, settings: Settings, classes: int) -> None:
        # Not at the top: only the library that is used must be installed.
        from sklearn.linear_model import SGDClassifier

        self.settings, self.classes = settings, classes
        self.classifier = SGDClassifier
        self.state: dict[str, Array] = {}

    def train_round(self, inputs: Array, labels: Array, number: int) -> None:
        if not self.state:
            mean, deviation = numpy.nanmean(inputs, axis=0), numpy.nanstd(inputs, axis=0)
            self.state = {"mean": mean, "scale": numpy.where(deviation > 0, deviation, 1)}
        # The rate falls with the rounds, so that the last passes settle.
        rate = 0.1 * self.settings.lr / number
        model = self.classifier(
            loss="log_loss", learning_rate="constant", eta0=rate, shuffle=False, alpha=1e-5
        )
        if "coef" in self.state:
            model.coef_ = self.state["coef"].copy()
            model.intercept_ = self.state["intercept"].copy()
            model.classes_ = numpy.arange(self.classes)
        order = numpy.random.RandomState(self.settings.seed * 1_000_003 + number)
        rows = order.permutation(len(inputs))
        model.partial_fit(self._standardize(inputs[rows]), labels[rows], range(self.classes))
        self.state |= {"coef": model.coef_, "intercept": model.intercept_}

    def probabilities(self, inputs: Array) -> Array:
        scores = self._standardize(inputs) @ self.state["coef"].T + self.state["intercept"]
        if scores.shape[1] == 1:  # two classes need one score
            scores = numpy.concatenate([-scores, scores], axis=1) / 2
        odds = numpy.exp(scores - scores.max(axis=1, keepdims=True))
        result: Array = odds / odds.sum(axis=1, keepdims=True)
        return result

    def _standardize(self, inputs: Array) -> Array:
        scaled = (inputs.astype("float64") - self.state["mean"]) / self.state["scale"]
        # A missing value counts as the mean.
        return numpy.nan_to_num(scaled, nan=0.0)

    def to_bytes(self) -> bytes:
        from safetensors.numpy import save

        content: bytes = save({name: numpy.ascontiguousarray(a) for name, a in self.state.items()})
        return content

    def restore(self, content: bytes) -> None:
        from safetensors.numpy import load

        self.state = load(content)


class XGBoost:
    """Gradient-boosted trees, each as deep as `depth`."""

    file: ClassVar[str] = "model.json"

    def __init__(self, settings: Settings, classes: int) -> None:
        import xgboost

        self.library = xgboost
        self.parameters = {
            "objective": "multi:softprob",
            "num_class": classes,
            "max_depth": settings.depth,
            "eta": settings.lr,
            "seed": settings.seed,
            "tree_method": "hist",
        }
        self.text = b""

    def train_round(self, inputs: Array, labels: Array, number: int) -> None:
        rows = self.library.DMatrix(inputs, labels)
        earlier = bytearray(self.text) if self.text else None
        booster = self.library.train(self.parameters, rows, TREES_PER_ROUND, xgb_model=earlier)
        self.text = bytes(booster.save_raw("json"))

    def probabilities(self, inputs: Array) -> Array:
        booster = self.library.Booster(model_file=bytearray(self.text))
        result: Array = booster.predict(self.library.DMatrix(inputs))
        return result

    def to_bytes(self) -> bytes:
        return self.text

    def restore(self, content: bytes) -> None:
        json.loads(content)  # a clear error before the library's own
        self.text = content


class LightGBM:
    """Gradient-boosted trees that split where it helps most, with as many leaves as `depth`."""

    file: ClassVar[str] = "model.txt"

    def __init__(self, settings: Settings, classes: int) -> None:
        import lightgbm

        self.library = lightgbm
        self.parameters = {
            "objective": "multiclass",
            "num_class": classes,
            "num_leaves": 2**settings.depth - 1,
            "learning_rate": settings.lr,
            "seed": settings.seed,
            "deterministic": True,
            "force_row_wise": True,
            "verbosity": -1,
        }
        self.text = ""

    def train_round(self, inputs: Array, labels: Array, number: int) -> None:
        rows = self.library.Dataset(inputs, labels)
        earlier = self.library.Booster(model_str=self.text) if self.text else None
        booster = self.library.train(self.parameters, rows, TREES_PER_ROUND, init_model=earlier)
        self.text = booster.model_to_string()

    def probabilities(self, inputs: Array) -> Array:
        result: Array = self.library.Booster(model_str=self.text).predict(inputs)
        return result

    def to_bytes(self) -> bytes:
        return self.text.encode()

    def restore(self, content: bytes) -> None:
        self.text = content.decode()


MODELS: dict[str, type[Linear | XGBoost | LightGBM]] = {
    "linear": Linear,
    "xgboost": XGBoost,
    "lightgbm": LightGBM,
}


class Estimator:
    """A whole training with scikit-learn's `fit`, for `labctl estimate`."""

    def __init__(self, settings: Settings, classes: int) -> None:
        self.settings, self.classes = settings, classes
        self.model: Model = MODELS[settings.model](settings, classes)

    def fit(self, inputs: Array, labels: Array) -> Estimator:
        self.model = MODELS[self.settings.model](self.settings, self.classes)
        for number in range(1, self.settings.rounds + 1):
            self.model.train_round(inputs, labels, number)
        return self


def build_estimator(train: Split, settings: Settings) -> tuple[Estimator, tuple[Array, Array]]:
    return Estimator(settings, len(train.classes)), (train.inputs, train.labels)


@dataclass(frozen=True)
class Loaded:
    """The model of a checkpoint, ready to be asked."""

    model: Model
    classes: tuple[str, ...]
    columns: tuple[str, ...]
    device: str = "cpu"

    @property
    def file(self) -> str:
        return self.model.file

    def probabilities(self, inputs: Array) -> Array:
        return self.model.probabilities(inputs)


def load(checkpoint: Checkpoint) -> Loaded:
    state = checkpoint.read_state()
    settings, classes = Settings(**state["settings"]), tuple(state["classes"])
    model: Model = MODELS[settings.model](settings, len(classes))
    model.restore(checkpoint.read_bytes(model.file))
    return Loaded(model, classes, tuple(state["columns"]))
