"""The service of a language model: its request, with the command of the engine."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from labctl.estimate.weight_formats import GGUF
from labctl.model import Server, Value
from labctl.runs import images, runs
from labctl.servers.context import LabContext
from labctl.servers.gpus import choose_container_gpus_option
from labctl.services.language_models.engines import QUANTIZER, Engine
from labctl.services.language_models.serving_plan import UTILIZATION, ServingPlan
from labctl.services.language_models.source import HUB_TOKEN, LanguageModelSource
from labctl.sync.push import push_tree
from labctl.sync.scan import HashIndex, scan_data
from labctl.sync.transfer_lock import hold_transfers
from labctl.wire.services import ServiceRequest

NAME = "serve-model"
PORT = 8000
# of the engine on the loopback, behind the guard
ENGINE_PORT = 8001
OLLAMA_PORT = 11434
MODEL = "/lab/model"
# The directory of a pushed model on the server; a push of another one replaces it.
PUSHED = "language-model"
LOADING_S = 1800.0
SEED = 0
# Exports the secrets as variables, as for a run, and becomes the engine.
_SCRIPT = (
    "for file in /run/labctl-secrets/*; do "
    '[ -f "$file" ] && export "${file##*/}=$(cat "$file")"; done; exec "$@"'
)
_BITS = {"bnb-4bit": "bnb-4bit", "int8": "bnb-8bit"}


class LaunchChoice(Value, frozen=True, kw_only=True):
    """What is served, by which engine; `sequences` is how many requests may run at once.

    `threads` of llama.cpp is 0 for all processors.
    """

    source: LanguageModelSource
    engine: Engine
    plan: ServingPlan
    sequences: int = 1
    threads: int = 0
    env: dict[str, str] = msgspec.field(default_factory=dict)
    loading_s: float = LOADING_S


def request_service(context: LabContext, server: Server, choice: LaunchChoice) -> ServiceRequest:
    """Build the request for the service; send the model if it is on this machine."""
    if choice.engine.image:
        return _request_ollama(context, server, choice)
    image = images.image_reference(context)
    if choice.source.path:
        _push_weights(context, server, choice.source)
    limits = context.config.limits
    is_local = bool(choice.source.path)
    # The engine downloads the model, and needs no other secret of the lab.
    secrets = {} if is_local else runs.read_secrets(context)
    token = {name: value for name, value in secrets.items() if name == HUB_TOKEN}
    offline = {"HF_HUB_OFFLINE": "1"} if is_local else {}
    return ServiceRequest(
        lab=context.config.name,
        lab_id=context.lab_id,
        name=NAME,
        image=image,
        port=PORT,
        command=("/bin/sh", "-c", _SCRIPT, choice.engine.name, *build_command(choice)),
        gpus=choose_container_gpus_option(context, server) if choice.plan.gpus else "",
        args={
            **images.build_args(context, context.config.image),
            "PACKAGES": _list_packages(choice),
            "SYSTEM_PACKAGES": choice.engine.system_packages,
        },
        wheelhouse=bool(context.config.wheelhouse),
        env={**context.config.env, **offline, **choice.env},
        replace=True,
        deadline_s=choice.loading_s,
        memory_bytes=limits.memory_bytes,
        cpus=limits.cpus,
        shm_bytes=limits.shm_bytes,
        test=choice.engine.test,
        weights=PUSHED if is_local else "",
        secrets=token,
    )


def _request_ollama(context: LabContext, server: Server, choice: LaunchChoice) -> ServiceRequest:
    """Build the request for ollama's own image, which downloads the model on request."""
    limits = context.config.limits
    return ServiceRequest(
        lab=context.config.name,
        lab_id=context.lab_id,
        name=NAME,
        image=choice.engine.image,
        port=OLLAMA_PORT,
        gpus=choose_container_gpus_option(context, server),
        env={"OLLAMA_CONTEXT_LENGTH": str(choice.plan.context), **choice.env},
        replace=True,
        as_is=True,
        deadline_s=choice.loading_s,
        memory_bytes=limits.memory_bytes,
        cpus=limits.cpus,
        shm_bytes=limits.shm_bytes,
    )


def name_ollama_model(source: LanguageModelSource, form: str) -> str:
    """Return ollama's name of a GGUF model on the hub (docs of the hub: "Use Ollama with GGUF")."""
    return f"hf.co/{source.repository}:{form.removeprefix(GGUF)}"


def build_command(choice: LaunchChoice) -> tuple[str, ...]:
    """Return the command in the container; not for an engine with its own image.

    It is a guard that refuses requests of foreign web pages, and starts the engine behind it.
    """
    build = {
        "vllm": _build_vllm,
        "transformers": _build_transformers,
        "llama.cpp": _build_llama,
    }
    ports = (str(PORT), str(ENGINE_PORT))
    return ("python3", "-c", _read_program("guard"), *ports, *build[choice.engine.name](choice))


def _build_vllm(choice: LaunchChoice) -> tuple[str, ...]:
    plan = choice.plan
    quantized = ("--quantization", "bitsandbytes") if plan.quantize == "bnb-4bit" else ()
    several = ("--tensor-parallel-size", str(plan.gpus)) if plan.gpus > 1 else ()
    return (
        *("vllm", "serve", _find_model(choice), "--served-model-name", choice.source.name),
        *("--host", "127.0.0.1", "--port", str(ENGINE_PORT), "--seed", str(SEED)),
        *("--max-model-len", str(plan.context), "--gpu-memory-utilization", str(UTILIZATION)),
        *(*quantized, *several),
    )


def _build_transformers(choice: LaunchChoice) -> tuple[str, ...]:
    kind = _BITS.get(choice.plan.quantize, "")
    return (
        *("transformers", "serve", _find_model(choice)),
        *("--host", "127.0.0.1", "--port", str(ENGINE_PORT), "--default-seed", str(SEED)),
        *("--device", "auto" if choice.plan.gpus else "cpu", "--no-trust-remote-code"),
        *(("--quantization", kind) if kind else ()),
    )


def _build_llama(choice: LaunchChoice) -> tuple[str, ...]:
    source = choice.source
    file = source.file if source.repository else f"{MODEL}/{source.file}"
    options = {
        "file": file,
        "repository": source.repository,
        "name": source.name,
        "context": choice.plan.context,
        "sequences": choice.sequences,
        "threads": choice.threads,
        "port": ENGINE_PORT,
    }
    return ("python3", "-c", _read_program("llama"), json.dumps(options, sort_keys=True))


def _read_program(name: str) -> str:
    return Path(__file__).with_name(f"{name}_program.py").read_text(encoding="utf-8")


def _find_model(choice: LaunchChoice) -> str:
    return MODEL if choice.source.path else choice.source.name


def _list_packages(choice: LaunchChoice) -> str:
    added = f" {QUANTIZER}" if choice.plan.quantize in _BITS else ""
    return choice.engine.packages + added


def _push_weights(context: LabContext, server: Server, source: LanguageModelSource) -> None:
    """Send the model's directory, or the one GGUF file of it; links are left out."""
    root, directory = context.config.root, Path(source.path)
    index = HashIndex(root, f"data/{PUSHED}")
    files = scan_data(root, PUSHED, directory, context.reporter, later=index)
    if source.is_gguf:
        files = tuple(file for file in files if file.path == source.file)
    target = (context.open_agent(server), context.config.name, context.lab_id, f"model/{PUSHED}")
    with hold_transfers(root, "push", context.reporter):
        push_tree(*target, directory, files, context.reporter, force=True, index=index)
