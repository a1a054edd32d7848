"""Call the program that rounds a model's weights, and check what it reports."""

from __future__ import annotations

import sys
from pathlib import Path

from labctl.config.installation import install_command
from labctl.errors import NotFoundError, UsageError
from labctl.events import Step
from labctl.insight.quantization.measurements import QuantizedModel, parse_result
from labctl.runs.evaluate import resolve_target
from labctl.runs.lab_script import run_lab_script
from labctl.runs.pickle_check import refuse_pickles
from labctl.servers.context import LabContext
from labctl.services.language_models.source import CONFIG, find_source, is_repository
from labctl.shell import command

SCRIPT = "quantize.py"
LARGEST_TEXT_BYTES = 16 * 1024**2
# Fewer tokens say nothing about accuracy; a token has at least one byte.
LEAST_TOKENS = 64
# The extra of labctl that has a package; language models need all of them together.
EXTRAS = {"torch": "train", "torchao": "quantize", "transformers": "quantize"}


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
            hint="labctl init ../example   # a sample, whose quantize.py shows what to print",
        )
    if not path.is_dir():
        raise NotFoundError(
            f"run {choice.run.id} has no checkpoints on this machine",
            hint=f"labctl pull {choice.run.id}",
        )
    refuse_pickles(path, hint="labctl run   # after saving the weights as safetensors")
    again = command("labctl", "quantize", *([target] if target else []), "--to", kind).render()
    return _run(context, [SCRIPT, str(path), "--to", kind], f"fix {SCRIPT}, then:\n{again}")


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
    again = command("labctl", "quantize", target, "--to", kind, "--text", str(text)).render()
    fix = f"{again}   # after you fix the error above"
    return _run(context, [*words, str(LEAST_TOKENS)], fix)


def _require_text(text: Path) -> None:
    """UsageError for a text that cannot be used, before PyTorch is loaded."""
    if text.stat().st_size > LARGEST_TEXT_BYTES:
        raise UsageError(
            f"{text} is larger than {LARGEST_TEXT_BYTES // 1024**2} MiB",
            hint=f"{command('head', '-c', '1000000', str(text)).render()} > short.txt",
        )
    try:
        text.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UsageError(
            f"{text} is not a text in UTF-8",
            why="the model's tokens are made from characters",
            hint=command("file", str(text)).render(),
        ) from None
    if text.stat().st_size < LEAST_TOKENS:
        raise UsageError(
            f"{text} is too short",
            why=f"at least {LEAST_TOKENS} tokens are needed to measure accuracy",
            hint="labctl quantize DIRECTORY --to int8 --text FILE   # with a longer text",
        )


def _run(context: LabContext, words: list[str], fix: str) -> QuantizedModel:
    context.reporter.emit(Step(name="quantizing"))
    result = run_lab_script(
        words, context.config.root, parse_result, fix=fix, suggest_install=_suggest_install
    )
    context.reporter.emit(Step(name="quantizing", done=True))
    return result


def _suggest_install(package: str) -> str:
    """Return the command that installs a package for labctl's own Python."""
    if package in EXTRAS:
        return install_command(EXTRAS[package])
    return command(sys.executable, "-m", "pip", "install", package).render()
