"""Models among the files that a run wrote, and how its script saves one where labctl looks."""

import re
from pathlib import PurePosixPath
from typing import Iterable, Optional

MODEL_SUFFIXES = frozenset(
    (".ckpt", ".h5", ".joblib", ".keras", ".npz", ".onnx", ".pkl", ".pt", ".pth", ".safetensors")
)
SAFETENSORS = ".safetensors"
# What torch.save usually writes: `labctl serve` refuses it, since it is a pickle.
TORCH_SUFFIXES = frozenset((".ckpt", ".pt", ".pth"))


def find_model(files: Iterable[str]) -> Optional[PurePosixPath]:
    """Return the first file in a directory of a run, other than its logs, that looks like a model.

    `files` are relative to the run's directory.
    """
    for name in files:
        file = PurePosixPath(name)
        is_model = file.suffix.lower() in MODEL_SUFFIXES
        if is_model and len(file.parts) > 1 and file.parts[0] != "logs":
            return file
    return None


def describe_saving(model: PurePosixPath, place: str = "your code") -> str:
    """Return the lines of a hint that change a script so that `labctl serve` can load its model.

    `place` is where the script writes `model`, for example "train.py, line 12".
    """
    stem = model.stem if re.fullmatch(r"[\w.-]+", model.stem) else "model"
    target = f'os.environ["LABCTL_CHECKPOINT_DIR"] + "/{stem}.safetensors"'
    if model.suffix.lower() in TORCH_SUFFIXES:
        line = (
            f"save_file(model.state_dict(), {target})   "
            "# import os; from safetensors.torch import save_file; safetensors in requirements.txt"
        )
    elif model.suffix.lower() == SAFETENSORS:
        line = target
    else:
        line = f"{target}   # in the format of safetensors"
    return f"in {place}, save the model so, then run again:\n{line}\nlabctl run"
