"""Which program serves a language model, chosen by its format and the server's GPU."""

from __future__ import annotations

from typing import Literal, get_args

from labctl.errors import UsageError
from labctl.estimate.weight_formats import GGUF, NONE
from labctl.model import Value

EngineName = Literal["vllm", "llama.cpp", "ollama", "transformers"]
ENGINES: tuple[EngineName, ...] = get_args(EngineName)
AUTO = "auto"
PUBLISHED = ("awq", "gptq")  # formats that a model is published in, not made when it is loaded


class Engine(Value, frozen=True, kw_only=True):
    """A program that serves language models.

    `packages` and Debian's `system_packages` are installed into the lab's image where `test` fails;
    h11 is what the guard before the engine needs.
    `formats` are the weights that it loads; those in `gpu_formats` only on a GPU.
    """

    name: EngineName
    packages: str = ""
    system_packages: str = ""
    test: str = ""
    formats: tuple[str, ...] = ()
    gpu_formats: tuple[str, ...] = ()
    needs_gpu: bool = False
    image: str = ""


KNOWN: dict[EngineName, Engine] = {
    "vllm": Engine(
        name="vllm",
        packages="vllm h11",
        test="command -v vllm && python3 -c 'import h11'",
        formats=(NONE, "awq", "gptq", "bnb-4bit"),
        gpu_formats=("awq", "gptq", "bnb-4bit"),
        needs_gpu=True,
    ),
    "llama.cpp": Engine(
        name="llama.cpp",
        packages="xllamacpp huggingface_hub h11",
        system_packages="libgomp1",
        test="python3 -c 'import xllamacpp, huggingface_hub, h11'",
        formats=(GGUF,),
    ),
    "ollama": Engine(name="ollama", formats=(GGUF,), image="ollama/ollama"),
    "transformers": Engine(
        name="transformers",
        packages="transformers[serving]>=5.5 accelerate torch h11",
        test="command -v transformers && "
        "python3 -c 'import fastapi, uvicorn, accelerate, torch, h11'",
        formats=(NONE, "bnb-4bit", "int8"),
        gpu_formats=("bnb-4bit", "int8"),
    ),
}
WORDS = {NONE: "safetensors", GGUF: "GGUF files"}
# installed beside transformers, where weights are quantized as they are loaded
QUANTIZER = "bitsandbytes"


class EngineChoice(Value, frozen=True):
    """The engine, and why it was chosen, in words."""

    engine: Engine
    reason: str


def choose_engine(
    wanted: str,
    form: str,
    *,
    is_gguf: bool,
    published: str,
    has_gpu: bool,
    is_here: bool = False,
) -> EngineChoice:
    """Choose the engine; UsageError if it cannot load the weights, or not on this hardware.

    `published` is how the model itself is quantized, "" if it is not. A model that `is_here`, on
    this machine, is served as it is: nothing else is downloaded.
    """
    if is_here and form.startswith(GGUF) and not is_gguf:
        raise UsageError(
            "this directory has no GGUF file",
            why="labctl converts no weights; it finds GGUF files of a model on the hub",
            hint="labctl serve --model FILE.gguf   # made with convert_hf_to_gguf.py of llama.cpp\n"
            "labctl serve --model OWNER/NAME --quantize gguf:Q4_K_M",
        )
    is_gguf = is_gguf or form.startswith(GGUF)
    if form in PUBLISHED and published != form:
        raise UsageError(
            f"this model is not published in {form}",
            why=f"its config says {published or 'no quantization'}; {form} weights are made once, "
            "with examples of text, and loaded as they are",
            hint="labctl serve --model OWNER/NAME-AWQ   # a repository with such weights",
        )
    if wanted == AUTO:
        return _choose(form, is_gguf=is_gguf, has_gpu=has_gpu)
    engine = KNOWN[next(name for name in ENGINES if name == wanted)]
    _require(engine, GGUF if is_gguf else form, has_gpu=has_gpu)
    return EngineChoice(engine, "named by --engine")


def _choose(form: str, *, is_gguf: bool, has_gpu: bool) -> EngineChoice:
    if is_gguf:
        reason = "the weights are GGUF, which llama.cpp computes with on a processor"
        return EngineChoice(KNOWN["llama.cpp"], reason)
    if form == "int8":
        _require(KNOWN["transformers"], form, has_gpu=has_gpu)
        return EngineChoice(KNOWN["transformers"], "it quantizes to int8 as it loads the weights")
    if has_gpu:
        return EngineChoice(KNOWN["vllm"], "the server has a GPU, on which vLLM batches requests")
    _require(KNOWN["transformers"], form, has_gpu=has_gpu)
    return EngineChoice(KNOWN["transformers"], "no GPU, and the weights are safetensors")


def _require(engine: Engine, form: str, *, has_gpu: bool) -> None:
    if form not in engine.formats:
        able = [one.name for one in KNOWN.values() if form in one.formats]
        raise UsageError(
            f"{engine.name} does not load {WORDS.get(form, f'{form} weights')}",
            why=f"engines that do: {', '.join(able)}" if able else "no engine here does",
            hint="labctl serve --model MODEL   # chooses an engine that does",
        )
    if not has_gpu and (engine.needs_gpu or form in engine.gpu_formats):
        what = engine.name if engine.needs_gpu else form
        raise UsageError(
            f"{what} needs a GPU, and this lab has none",
            why="its kernels are written for NVIDIA GPUs",
            hint="labctl serve --model MODEL --quantize gguf:Q4_K_M   # runs on a processor\n"
            "labctl up --gpu any",
        )
