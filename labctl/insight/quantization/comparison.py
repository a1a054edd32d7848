"""Call the program that rounds a model's weights, and check what it reports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import msgspec

from labctl.config import copy_environment
from labctl.config.installation import install_command
from labctl.decoding import decode_json
from labctl.errors import LabError, NotFoundError, UsageError
from labctl.events import Step
from labctl.model import Value
from labctl.runs.evaluate import resolve_target
from labctl.runs.pickle_check import refuse_pickles
from labctl.servers.context import LabContext
from labctl.services.language_models.source import CONFIG, find_source

SCRIPT = "quantize.py"
SHOWN_CHARACTERS = 1500
LARGEST_TEXT_BYTES = 16 * 1024**2
ShortText = Annotated[str, msgspec.Meta(max_length=80)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class QuantizedRow(Value, frozen=True):
    """One way to store the weights, and what was measured with it."""

    name: ShortText
    size_bytes: Annotated[int, msgspec.Meta(ge=1, le=2**53)]
    latency_ms: Annotated[float, msgspec.Meta(ge=0, le=1e9)]
    correct: Count
    total: Annotated[int, msgspec.Meta(ge=1, le=2**53)]

    @property
    def accuracy(self) -> float:
        return self.correct / self.total


class QuantizedModel(Value, frozen=True):
    """The rows, the original weights first. Rounding is no error: accuracy may rise by chance."""

    model: Annotated[str, msgspec.Meta(max_length=200)]
    rows: Annotated[tuple[QuantizedRow, ...], msgspec.Meta(min_length=2, max_length=20)]


def parse_result(output: str) -> QuantizedModel:
    """Read the last line that the program printed; ValueError, with the reason, otherwise."""
    lines = output.strip().splitlines()
    try:
        result = decode_json(lines[-1] if lines else "", QuantizedModel)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from None
    if any(row.correct > row.total for row in result.rows):
        raise ValueError("more correct answers than items")
    return result


def quantize(context: LabContext, target: str, kind: str, text: Path | None) -> QuantizedModel:
    """Round the weights of a run's model, or of a language model in a directory, and compare.

    A run's project does it by its own quantize.py, on this machine, from pulled checkpoints.
    """
    if (Path(target) / CONFIG).is_file():
        return _quantize_language_model(context, target, kind, text)
    if text is not None:
        raise UsageError(
            "--text needs a language model",
            why=f"{target or 'a run'} is no directory with {CONFIG}; a run has a test set",
            hint="labctl quantize DIRECTORY --to int8 --text FILE",
        )
    choice = resolve_target(context, target)
    script, path = context.config.root / SCRIPT, choice.directory / choice.path
    if not script.is_file():
        raise NotFoundError(
            f"the lab has no {SCRIPT}",
            why="it loads the model, rounds its weights and evaluates it",
            hint="labctl init EXAMPLE   # its quantize.py shows what it must print",
        )
    if not path.is_dir():
        raise NotFoundError(
            f"run {choice.run.id} has no checkpoints on this machine",
            hint=f"labctl pull {choice.run.id}",
        )
    refuse_pickles(path, hint="labctl run   # after saving the weights as safetensors")
    return _run(context, [SCRIPT, str(path), "--to", kind], context.config.root)


def _quantize_language_model(
    context: LabContext, target: str, kind: str, text: Path | None
) -> QuantizedModel:
    find_source(target, "none", "")  # refuses a config without sense, and weights that run code
    if text is None:
        raise UsageError(
            "a language model needs --text",
            why="accuracy is the share of the text's tokens that the model predicts",
            hint=f"labctl quantize {target} --to {kind} --text FILE",
        )
    if text.stat().st_size > LARGEST_TEXT_BYTES:
        raise UsageError(
            f"{text} is larger than {LARGEST_TEXT_BYTES // 1024**2} MiB",
            hint=f"head -c 1000000 {text} > short.txt",
        )
    program = Path(__file__).with_name("language_model_program.py")
    words = [str(program), str(Path(target).resolve()), kind, str(text.resolve())]
    return _run(context, words, context.config.root)


def _run(context: LabContext, words: list[str], directory: Path) -> QuantizedModel:
    context.reporter.emit(Step(name="quantizing"))
    done = subprocess.run(
        [sys.executable, *words],
        cwd=directory,
        env=copy_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    try:
        result = parse_result(done.stdout)
    except ValueError as error:
        output = done.stderr.strip()[-SHOWN_CHARACTERS:]
        raise LabError(
            f"{Path(words[0]).name} failed with exit code {done.returncode}"
            if done.returncode
            else f"{Path(words[0]).name} printed no comparison: {error}",
            why=output,
            hint=f"{install_command('quantize')}   # if it lacks torchao or transformers",
        ) from None
    context.reporter.emit(Step(name="quantizing", done=True))
    return result
