"""The interface for `labctl serve`: images in, a probability per class out.

`load` is called once when the server starts, `predict` for every batch of
pictures. What else belongs to serving (HTTP, batches, limits) is labctl's.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import nn

import checkpoints
import places
from dataset import ImageFolder, loader, locate, to_tensor
from evaluate import choose_batch_size, pick_device
from model import Classifier, Shape, from_json
from prepare_data import DatasetError

# Validation images that are looked at when the server starts.
MOST_REFERENCES = 2000


class Predictor:
    """A loaded model. `reference` counts its predictions on the validation set, by class."""

    def __init__(self, model: nn.Module, shape: Shape, checkpoint: str) -> None:
        self.device = pick_device("auto")
        self.model = model.to(self.device).eval()
        self.shape = shape
        self.checkpoint = checkpoint
        self.classes = shape.classes
        self.reference = self._reference()

    @torch.inference_mode()
    def predict(self, pictures: Sequence[Image.Image]) -> list[list[float]]:
        """Return, for each picture, a probability for each class, in the order of `classes`."""
        batch = torch.stack([to_tensor(picture, self.shape) for picture in pictures])
        logits = self.model(batch.to(self.device))
        rows: list[list[float]] = logits.float().softmax(dim=1).tolist()
        return rows

    @torch.inference_mode()
    def _reference(self) -> list[int] | None:
        """Count predictions by class; None without a validation set, so that drift is unknown."""
        counts = torch.zeros(len(self.classes), dtype=torch.int64)
        try:
            data = locate(places.from_environment(os.environ))
            images = ImageFolder(data / "val", self.shape)
            images.files = images.files[:: 1 + len(images) // MOST_REFERENCES]
            size = choose_batch_size(self.shape.image_size)
            for batch, _ in loader(images, size, self.device):
                said = self.model(batch.to(self.device)).argmax(dim=1).cpu()
                counts += torch.bincount(said, minlength=len(self.classes))
        except DatasetError:
            return None
        return counts.tolist()  # type: ignore[no-any-return]


def load(path: Path) -> Predictor:
    """Load the best complete checkpoint at or below `path`; raises CheckpointError without one."""
    checkpoint = checkpoints.best(path)
    shape = from_json(checkpoints.load_state(checkpoint)["shape"])
    model = Classifier(shape)
    model.load_state_dict(checkpoints.load_tensors(checkpoint, "model"))
    return Predictor(model, shape, checkpoint.path.resolve().name)
