"""Train the reference solution. Its model is in reference/model beside this.

    python make_reference.py

`labctl course grade hands-on --dry-run` grades this solution as it grades a
submission. Its code is the sample project of `labctl init`, and augment.py,
which changes what the network learns from.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

REFERENCE = Path(__file__).absolute().parent / "reference"
CODE = REFERENCE / "code"
COPIES, EPOCHS = 2, 4


def train(checkpoints: Path, scratch: Path) -> None:
    """Make a dataset in an empty directory, and train on it."""
    environ = {
        **os.environ,
        "LABCTL_RUN_DIR": str(scratch),
        "LABCTL_CHECKPOINT_DIR": str(checkpoints),
        "PYTHONDONTWRITEBYTECODE": "1",
        # Pictures this small make more work for threads than they share.
        "OMP_NUM_THREADS": "1",
    }
    data = str(scratch / "varied")
    options = ("--data", data, "--epochs", str(EPOCHS), "--keep", "1")
    copies = ("--out", data, "--copies", str(COPIES))
    for words in (("augment.py", *copies), ("train.py", *options)):
        program = [sys.executable, str(CODE / words[0]), *words[1:]]
        subprocess.run(program, cwd=scratch, env=environ, check=True)


def main() -> None:
    model = REFERENCE / "model"
    if model.exists():
        raise SystemExit(f"{model} exists; delete it to train another one")
    draft = model.with_name(".model.draft")
    shutil.rmtree(draft, ignore_errors=True)
    with tempfile.TemporaryDirectory() as scratch:
        train(draft, Path(scratch))
    draft.rename(model)
    print(f"the reference solution is in {REFERENCE}")


if __name__ == "__main__":
    main()
