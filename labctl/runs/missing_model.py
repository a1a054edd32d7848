"""What to say where `eval` lacks an evaluate.py, or a run's model: what is needed, and a way on."""

from __future__ import annotations

import textwrap
from pathlib import Path, PurePosixPath

from labctl.errors import LabError, NotFoundError
from labctl.model import Run
from labctl.runs.checkpointed_runs import NONE_HAS_ANY, has_saved_none
from labctl.shell import Command, command
from labctl.wire.model_files import describe_saving, find_model

# What programs save as pickles by default: `eval` does not load these on this machine.
PICKLE_SUFFIXES = frozenset((".ckpt", ".joblib", ".pkl", ".pt", ".pth"))
# An evaluate.py that would do: `build_model` and `test_batches` stand for the lab's own code.
EXAMPLE = """\
# For PyTorch. For another library, replace the lines that load and call
# the model.
import json, sys
from pathlib import Path
import torch
# From your own code. Importing it must not start a training: keep what
# train.py does as a program below `if __name__ == "__main__":`.
from train import build_model, test_batches

kinds = (".safetensors", ".pth", ".pt", ".ckpt")
files = Path(sys.argv[1]).rglob("*")
file = sorted(path for path in files if path.suffix in kinds)[-1]
if file.suffix == ".safetensors":
    from safetensors.torch import load_file
    weights = load_file(file)
else:
    weights = torch.load(file, map_location="cpu", weights_only=True)
model = build_model().eval()
model.load_state_dict(weights)
right = [
    int(guess == label)
    for inputs, labels in test_batches()
    for guess, label in zip(model(inputs).argmax(1), labels)
]
result = {"accuracy": sum(right) / len(right), "total": len(right)}
print(json.dumps({**result, "checkpoint": file.name}))
"""


def make_no_script_error() -> LabError:
    """Make the error for a lab without evaluate.py, with an example that would do."""
    needs = (
        "`labctl eval` runs `python evaluate.py CHECKPOINTS` in the lab's directory. The last line "
        "of its output must be JSON with the accuracy. For example:"
    )
    return NotFoundError(
        "this lab has no evaluate.py",
        why=f"{needs}\n\n{textwrap.indent(EXAMPLE, '    ')}",
        hint="labctl eval --example > evaluate.py   # beside lab.yaml; adapt it to your code\n"
        "labctl eval",
    )


def make_not_pulled_error(run: Run) -> LabError:
    """Make the error for a run whose checkpoints were not downloaded."""
    return NotFoundError(
        f"run {run.id} was not pulled to this machine",
        hint=command("labctl", "pull", run.id).render(),
    )


def make_no_local_checkpoints_error(
    run: Run, home: Path, other: str, *, has_server: bool
) -> LabError:
    """Make the error for a run that has no checkpoints on this machine.

    `has_server` is whether the run's server is still there, and can load a pickle. `other` is the
    line of a hint that evaluates another run, "" if none has checkpoints.
    """
    if not home.is_dir() and not has_saved_none(run):
        return make_not_pulled_error(run)
    follow = command("labctl", "pull", "--follow", run.id)
    return _make_no_checkpoints_error(run, home, "this machine", follow, other, has_server)


def make_no_server_checkpoints_error(run: Run, home: Path, other: str) -> LabError:
    """Make the error for a run that has saved no checkpoints on its server; `other` as above."""
    follow = command("labctl", "logs", "-f", run.id)
    return _make_no_checkpoints_error(run, home, "the server", follow, other, True)


def make_ended_server_error(run: Run) -> LabError:
    """Make the error for a run that the lab's present server does not have."""
    again = command("labctl", "run", "--", *run.command).render() if run.command else "labctl run"
    return NotFoundError(
        f"the server of run {run.id} has ended",
        why="an evaluation on the server needs the run's own code and results there",
        hint=f"{again}   # runs it again, on the lab's server",
    )


def _make_no_checkpoints_error(
    run: Run, home: Path, where: str, follow: Command, other: str, has_server: bool
) -> LabError:
    what = f"run {run.id} has no checkpoints on {where}"
    if not run.has_ended:
        return NotFoundError(
            what,
            why="it has not ended (last known), and may save its first one later",
            hint="\n".join(filter(None, [follow.render(), other])),
        )
    needs = "`labctl eval` needs what the run saves in the directory $LABCTL_CHECKPOINT_DIR"
    model = _find_model_elsewhere(run, home)
    if model is None and (run.exit_code != 0 or run.state != "exited"):
        return NotFoundError(
            what,
            why=f"it ended before it saved one: {run.summary or run.state_text}"
            + ("" if other else f"; {NONE_HAS_ANY}"),
            hint=other or command("labctl", "explain", run.id).render(),
        )
    if model is None:
        save = "save the model there in your code, then:\nlabctl run"
        if not other:
            return NotFoundError(what, why=f"{needs}; {NONE_HAS_ANY}", hint=save)
        return NotFoundError(what, why=needs, hint="\n".join([other, f"or {save}"]))
    is_pickle = model.suffix.lower() in PICKLE_SUFFIXES
    if is_pickle and not has_server:
        why = f"{needs}; this run wrote {model} instead, a pickle, and its server has ended"
        return NotFoundError(what, why=why, hint=describe_saving(model))
    options = ["--on-server"] if is_pickle else []
    evaluate = command("labctl", "eval", *options, f"runs/{run.id}/{model.parent}")
    if (home / model).is_file():
        pulled, step = ", which is on this machine", evaluate
    else:
        pulled, step = "", command("labctl", "pull", "--all", run.id).chain(evaluate)
    why = f"{needs}; this run wrote {model} instead{pulled}"
    return NotFoundError(what, why=why, hint=step.render())


def _find_model_elsewhere(run: Run, home: Path) -> PurePosixPath | None:
    """Return the first file outside the checkpoints that looks like a model.

    The run wrote it outside its outputs, or it is another output that was pulled to `home`.
    """
    pulled = (
        path.relative_to(home).as_posix() for path in sorted(home.rglob("*")) if path.is_file()
    )
    return find_model((*run.new_files, *pulled))
