"""Which of a server's GPUs a lab's runs use, and whether they are those that the lab needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec.structs import replace

from labctl.commands.probe import list_missing
from labctl.errors import LabError, PolicyError, UsageError
from labctl.errors.subject import Subject
from labctl.estimate.cards import suggest_model
from labctl.events import Note
from labctl.model import GpuNeed, Need, Server, ServerFacts
from labctl.providers import Guarded
from labctl.text import bytes_text

if TYPE_CHECKING:
    from labctl.servers.context import LabContext

# Kind of the ledger entry of a note that was shown about a server's GPUs.
GPU_NOTE = "gpu note"
# where `--gpu` was typed, and the lab has a server already
SAME_SERVER = "labctl up   # uses the server as it is"
OTHER_SERVER = f"{SAME_SERVER}\nlabctl down   # first, to get a server with that GPU"
# A card sold as 24 GB shows 22.5 GiB: drivers and ECC use the rest.
_SOLD_SIZE_SLACK = 0.07
_NO_RUNTIME = "the NVIDIA Container Toolkit is not installed there"


def choose_server_gpus_option(context: LabContext, server: Server) -> str:
    """Do `choose_gpus_option` for the lab's need. A note is shown once for each server."""

    def show_once(note: Note) -> None:
        notes = context.state.list_events(server_id=server.id, kind=GPU_NOTE, limit=1)
        if not notes or notes[-1].detail.get("text") != note.text:
            context.reporter.emit(note)
            context.state.record(
                GPU_NOTE, lab_id=context.lab_id, server_id=server.id, detail={"text": note.text}
            )

    if context.config.submits_jobs:
        return _choose_job_gpus_option(context.config.server.need)
    is_typed = context.config.origins.get("server.gpu") == "--gpu"
    # No other container on this machine has a GPU either.
    typed_hint = SAME_SERVER if context.is_on_this_machine else OTHER_SERVER
    hint = typed_hint if is_typed else ""
    facts = load_usable_facts(context, server)
    return choose_gpus_option(context.config.server.need, facts, show_once, hint)


def choose_service_gpus_option(context: LabContext, server: Server) -> str:
    """Do `choose_gpus_option` for a service of the lab, without a note."""
    need = context.config.server.need
    if context.config.submits_jobs:
        return _choose_job_gpus_option(need)
    return choose_gpus_option(need, load_usable_facts(context, server))


def choose_container_gpus_option(context: LabContext, server: Server) -> str:
    """Do `choose_gpus_option` for a container on the server, without a note.

    UsageError on a cluster, whose login node runs none.
    """
    if context.config.submits_jobs:
        raise UsageError(
            "this needs a container on the server, and the login node of a cluster runs none",
            why="on a cluster everything is a run",
            hint="labctl run -- python SCRIPT.py   # a script that does the same",
        )
    return choose_gpus_option(context.config.server.need, context.load_facts(server))


def _choose_job_gpus_option(need: Need) -> str:
    """Return "all", those of its job, or "": a login node has no GPU of its own."""
    return "all" if need.gpu.is_required else ""


def select_gpus(facts: ServerFacts, count: int) -> str:
    """Return the value of `--gpus` for the first `count` GPUs of a server.

    UsageError if it has fewer.
    """
    if count > len(facts.gpus):
        raise UsageError(
            f"--gpus {count} is more than the server has",
            why=_describe_gpus(facts) if facts.gpus else "it has no GPU",
            hint="labctl run" + (f" --gpus {len(facts.gpus)}" if facts.gpus else ""),
        )
    is_all = count == len(facts.gpus)
    return "all" if is_all else ",".join(gpu.uuid for gpu in facts.gpus[:count])


def suggest_other_server(context: LabContext) -> list[str]:
    """Return the commands that get a server with a GPU; [] if a course chooses the server."""
    if isinstance(context.provider, Guarded):
        return []
    return [
        "labctl offers --provider auto --gpu any   # servers with a GPU, and their prices",
        "labctl move --provider NAME --gpu any   # gets one of them, with your results",
    ]


def load_usable_facts(context: LabContext, server: Server) -> ServerFacts:
    """Return what is known of the server; a plain process needs no GPU runtime for containers."""
    facts = context.load_facts(server)
    return facts if context.config.uses_containers else replace(facts, nvidia_runtime=True)


def choose_gpus_option(
    need: Need,
    facts: ServerFacts,
    on_note: Callable[[Note], None] = lambda note: None,
    hint: str = "",
) -> str:
    """Return the value of `--gpus` for this need on this server: "" (none) or "all".

    PolicyError if the lab requires a GPU that the server cannot provide. `auto` without a GPU
    returns "" and passes a Note to `on_note`, since training on the CPU is slow. `hint` replaces
    the error's command, which is to change lab.yaml.
    """
    gpu = need.gpu
    if gpu.kind == "none":
        return ""
    fitting = [g for g in facts.gpus if _is_enough(gpu, g.name, g.memory_bytes)]
    usable = len(fitting) >= max(1, gpu.count)
    if usable and facts.nvidia_runtime:
        return "all"
    if gpu.is_required:
        raise _make_no_gpu_error(gpu, facts, usable, hint)
    if not facts.gpus:
        on_note(Note(text="No GPU on this server; using the CPU."))
    elif not facts.nvidia_runtime:
        gpus = _describe_gpus(facts)
        text = f"{gpus}, but containers cannot use it ({_NO_RUNTIME}); using the CPU."
        on_note(Note(text=text, level="warning"))
    else:
        text = f"{_describe_gpus(facts)}, not {_describe_need(gpu)}; using the CPU."
        on_note(Note(text=text))
    return ""


def _make_no_gpu_error(gpu: GpuNeed, facts: ServerFacts, usable: bool, hint: str) -> LabError:
    what = f"this lab needs {_describe_need(gpu)}"
    unknown = _describe_unknown_model(gpu)
    if not facts.gpus:
        none = f"{what}, and the server has none"
        return PolicyError(none, why=unknown, hint=hint or _change_gpu)
    why, fix = "\n".join(filter(None, [_describe_gpus(facts), unknown])), ""
    if usable:
        what += ", and containers on the server cannot use one"
        why += f", but {_NO_RUNTIME}"
        fix = "; ".join(lack.command for lack in list_missing(facts) if lack.optional)
    else:
        what += ", which this server does not have"
    return PolicyError(what, why=why, hint=fix or hint or _change_gpu)


def warn_of_unknown_model(context: LabContext) -> None:
    """Warn before a server is sought for a GPU whose name looks like a slip.

    A provider may have it nevertheless, as a machine of your own or a cluster can have any GPU.
    """
    if text := _describe_unknown_model(context.config.server.need.gpu):
        context.reporter.emit(Note(text=text, level="warning"))


def _describe_unknown_model(gpu: GpuNeed) -> str:
    near = suggest_model(gpu.kind) if gpu.is_required and gpu.kind != "any" else ""
    return near and f"labctl knows no GPU named {gpu.kind}; did you mean {near}?"


def _change_gpu(subject: Subject) -> str:
    file = subject.config_file
    return f"change `gpu:` under `server:` in {file} (auto uses a GPU if the server has one)"


def _is_enough(gpu: GpuNeed, name: str, memory_bytes: int) -> bool:
    if memory_bytes < gpu.min_memory_bytes * (1 - _SOLD_SIZE_SLACK):
        return False
    return gpu.kind in ("auto", "any") or is_gpu_model(gpu.kind, name)


def is_gpu_model(kind: str, name: str) -> bool:
    """Whether nvidia-smi's `name` ("NVIDIA A100-SXM4-80GB") is a `kind` ("A100", "a100-80gb").

    Only whole words match, so that A10 is not an A100; words may be written together (RTX4090).
    """
    words = _words(name)
    if set(_words(kind)) <= set(words):
        return True
    sought = "".join(_words(kind))
    runs = ("".join(words[i:j]) for i in range(len(words)) for j in range(i + 1, len(words) + 1))
    return sought in runs


def _words(text: str) -> list[str]:
    return "".join(c if c.isalnum() else " " for c in text.lower()).split()


def _describe_need(gpu: GpuNeed) -> str:
    kind = "a GPU" if gpu.kind in ("auto", "any") else f"a GPU of kind {gpu.kind}"
    if gpu.count > 1:
        kind = f"{gpu.count} GPUs" + ("" if gpu.kind in ("auto", "any") else f" of kind {gpu.kind}")
    size = f" with at least {bytes_text(gpu.min_memory_bytes)}" if gpu.min_memory_bytes else ""
    return kind + size


def _describe_gpus(facts: ServerFacts) -> str:
    gpus = (f"{gpu.name} ({bytes_text(gpu.memory_bytes)})" for gpu in facts.gpus)
    return "the server has " + ", ".join(gpus)
