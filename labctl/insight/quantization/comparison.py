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
from labctl.services.language_models.source import CONFIG, find_source, is_repository
from labctl.shell import command

SCRIPT = "quantize.py"
SHOWN_LINES = 5
SHOWN_CHARACTERS = 1500
LARGEST_TEXT_BYTES = 16 * 1024**2
# Fewer tokens say nothing about accuracy; a token has at least one byte.
LEAST_TOKENS = 64
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
    _refuse_model_of_hub(target, kind)
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


def _refuse_model_of_hub(target: str, kind: str) -> None:
    """UsageError for OWNER/NAME of the hub: only files on this machine can be quantized."""
    if not is_repository(target) or Path(target).exists() or target.startswith("runs/"):
        return
    directory = target.rpartition("/")[2]
    raise UsageError(
        f"{target} is neither a run nor a directory with {CONFIG}",
        why="labctl quantizes a language model from a directory on this machine",
        hint=command("hf", "download", target, "--local-dir", directory).render()
        + f"\nlabctl quantize ./{directory} --to {kind} --text FILE",
    )


def _quantize_language_model(
    context: LabContext, target: str, kind: str, text: Path | None
) -> QuantizedModel:
    find_source(target, "none", "")  # refuses a config without sense, and weights that run code
    if text is None:
        raise UsageError(
            "a language model needs --text",
            why="accuracy is the share of the text's tokens that the model predicts",
            hint=command("labctl", "quantize", target, "--to", kind, "--text", "FILE").render(),
        )
    _require_text(text)
    program = Path(__file__).with_name("language_model_program.py")
    words = [str(program), str(Path(target).resolve()), kind, str(text.resolve())]
    return _run(context, [*words, str(LEAST_TOKENS)], context.config.root)


def _require_text(text: Path) -> None:
    """UsageError for a text that cannot be used, before PyTorch is loaded."""
    if text.stat().st_size > LARGEST_TEXT_BYTES:
        raise UsageError(
            f"{text} is larger than {LARGEST_TEXT_BYTES // 1024**2} MiB",
            hint=f"{command('head', '-c', '1000000', str(text)).render()} > short.txt",
        )
    try:
        content = text.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UsageError(
            f"{text} is not a text in UTF-8",
            why="the model's tokens are made from characters",
            hint=command("file", str(text)).render(),
        ) from None
    if len(content.encode()) < LEAST_TOKENS:
        raise UsageError(
            f"{text} is too short",
            why=f"at least {LEAST_TOKENS} tokens are needed to measure accuracy",
            hint="labctl quantize DIRECTORY --to int8 --text FILE   # with a longer text",
        )


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
        raise _make_program_error(Path(words[0]).name, done, str(error)) from None
    context.reporter.emit(Step(name="quantizing", done=True))
    return result


def _make_program_error(
    name: str, done: subprocess.CompletedProcess[str], problem: str
) -> LabError:
    """Quote the last lines that the program wrote to stderr: libraries fill those before them."""
    lines = [line for line in done.stderr.splitlines() if line.strip()][-SHOWN_LINES:]
    is_missing = any(line.startswith(("ModuleNotFoundError", "ImportError")) for line in lines)
    what = (
        f"{name} failed with exit code {done.returncode}"
        if done.returncode
        else f"{name} printed no comparison: {problem}"
    )
    return LabError(
        what,
        why="\n".join(lines)[-SHOWN_CHARACTERS:],
        hint=install_command("quantize") if is_missing else "labctl quantize --help",
    )
