"""Whether a language model fits, and with how much context, before anything is rented."""

from __future__ import annotations

import math

from labctl.errors import UsageError
from labctl.estimate.cards import GIB, NOMINAL, find_card
from labctl.estimate.constants import OLD_CARDS, OVERHEAD_BYTES
from labctl.estimate.fits import label, select_cards, usable_bytes
from labctl.estimate.language_model import (
    KvType,
    ModelShape,
    kv_bytes_per_token,
    kv_cache_bytes,
    longest_fitting_context,
)
from labctl.estimate.weight_formats import (
    BITS,
    GGUF,
    NONE,
    PROPOSED,
    parse_format,
    weight_bytes,
)
from labctl.model import Server, Value
from labctl.servers.context import LabContext
from labctl.servers.gpus import choose_container_gpus_option
from labctl.services.language_models.engines import KNOWN, Engine
from labctl.services.language_models.source import LanguageModelSource
from labctl.shell import command
from labctl.text import bytes_text

# The share of the memory that an engine may use: vLLM's default for gpu_memory_utilization.
UTILIZATION = 0.9
# Files that are so many times smaller than the model that config.json describes are incomplete.
MISSING_SHARE = 2
# Tokens that are computed at once while a prompt is read: vLLM's max_num_batched_tokens.
PREFILL_TOKENS = 8192
# Enough for a conversation, where the memory is not known or others need it too.
USUAL_CONTEXT = 8192


class ServingMemory(Value, frozen=True):
    """The memory that a model may use: `bytes` of one device, 0 if unknown; `gpus` of them.

    With `is_shared`, other programs use the memory too, as on the user's own machine.
    """

    bytes: int
    name: str
    gpus: int = 0
    is_shared: bool = False


class ServingPlan(Value, frozen=True, kw_only=True):
    """How a model is served, and what it needs; `sequences` is how many fit at full length."""

    model: str
    engine: str
    reason: str
    quantize: str
    context: int
    longest_context: int
    weights_bytes: int
    kv_bytes_per_token: int
    kv_cache_bytes: int
    working_bytes: int
    overhead_bytes: int
    memory_bytes: int
    memory_name: str
    gpus: int = 0
    sequences: int = 0
    notes: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_cache_bytes + self.working_bytes + self.overhead_bytes


def find_memory(context: LabContext, server: Server | None) -> ServingMemory:
    """Return the memory of the server, or else of the smallest that the lab would get."""
    limits = context.config.limits
    if server is not None:
        facts = context.load_facts(server)
        has_gpu = bool(choose_container_gpus_option(context, server) and facts.gpus)
        gpu = facts.gpus[0] if has_gpu else None
        if gpu and not _is_old(gpu.name, gpu.memory_bytes):
            count = sum(one.name == gpu.name for one in facts.gpus)
            return ServingMemory(usable_bytes(gpu.name, gpu.memory_bytes), gpu.name, count)
        if limits.memory_bytes:
            return ServingMemory(limits.memory_bytes, "the container's limit")
        if server.offer.memory_bytes:
            return ServingMemory(server.offer.memory_bytes, "main memory")
        return ServingMemory(facts.memory_bytes, "main memory", is_shared=True)
    need = context.config.server.need.gpu
    if need.is_required:
        card = next(one for one in select_cards(need) if one.name not in OLD_CARDS)
        return ServingMemory(
            usable_bytes(card.name, card.memory_bytes), label(card), need.count or 1
        )
    return ServingMemory(
        limits.memory_bytes, "the container's limit" if limits.memory_bytes else ""
    )


def _is_old(name: str, memory_bytes: int) -> bool:
    """Whether current engines have no kernels for this GPU any more."""
    card = find_card(name, memory_bytes)
    return card is not None and card.name in OLD_CARDS


def working_bytes(shape: ModelShape) -> int:
    """Compute the working set while a prompt is read: one layer and the last token's scores.

    Input, queries and outputs (4 h), gate and up (2 f), for each token of a prefill, with 2 bytes
    (as `estimate.memory._layer`), and a score of 4 bytes for each word of the vocabulary.
    """
    tokens = min(PREFILL_TOKENS, shape.longest_context)
    width = max(shape.width, shape.expert_width * shape.active_experts)
    return tokens * (4 * shape.hidden + 2 * width) * 2 + 4 * shape.vocabulary


def plan_serving(
    source: LanguageModelSource,
    engine: Engine,
    reason: str,
    form: str,
    memory: ServingMemory,
    *,
    context: int = 0,
    sequences: int = 1,
) -> ServingPlan:
    """Choose the context, or check the given one; UsageError if the model does not fit.

    There is room for `sequences` of that length at once.
    """
    shape = source.shape
    if context > shape.longest_context:
        raise UsageError(
            f"a context of {context:,} tokens is longer than this model's",
            why=f"it was made for at most {shape.longest_context:,}",
            hint=_suggest_command(source, form, shape.longest_context),
        )
    weights = compute_weights(source, form)
    devices = _count_devices(shape, engine, memory)
    fixed = weights + working_bytes(shape) + OVERHEAD_BYTES * devices
    room = int(memory.bytes * devices * UTILIZATION) - fixed
    kv_type = find_kv_type(shape, engine)
    fitting = longest_fitting_context(shape, room // sequences, kv_type) if memory.bytes else 0
    if memory.bytes and (fitting == 0 or context > fitting):
        raise _make_size_error(source, engine, form, memory, context, fitting, fixed, devices)
    usual = fitting or min(USUAL_CONTEXT, shape.longest_context)
    if memory.is_shared:
        usual = min(USUAL_CONTEXT, usual)
    chosen = context or usual
    cache = kv_cache_bytes(shape, chosen, kv_type)
    many = max(sequences, room // cache) if memory.bytes else 0
    return ServingPlan(
        model=source.name,
        engine=engine.name,
        reason=reason,
        quantize=form,
        context=chosen,
        longest_context=shape.longest_context,
        weights_bytes=weights,
        kv_bytes_per_token=kv_bytes_per_token(shape, kv_type),
        kv_cache_bytes=cache * sequences,
        working_bytes=working_bytes(shape),
        overhead_bytes=OVERHEAD_BYTES * devices,
        memory_bytes=memory.bytes * devices,
        memory_name=memory.name,
        gpus=devices if memory.gpus else 0,
        sequences=many,
        notes=_list_notes(source, memory),
    )


def parse_quantize(text: str) -> str:
    """Return the format that --quantize names; UsageError for an unknown one."""
    try:
        return parse_format(text)
    except ValueError as error:
        raise UsageError(
            f"--quantize: {error}", hint="labctl serve --model MODEL --quantize gguf:Q4_K_M"
        ) from None


def compute_weights(source: LanguageModelSource, form: str) -> int:
    """Return the bytes of the weights: those of the files, or what the format makes of them."""
    published = source.shape.quantized
    if source.file_bytes and form in (NONE, published):
        return source.file_bytes
    if source.file_bytes and source.is_gguf:
        return source.file_bytes
    if form == NONE and published in BITS:
        return weight_bytes(source.shape, published)
    return weight_bytes(source.shape, form)


def find_kv_type(shape: ModelShape, engine: Engine) -> KvType:
    """Return the type of the KV cache: 16 bits, but transformers uses that of the weights."""
    return "fp32" if engine.name == "transformers" and shape.weight_bytes == 4 else "fp16"


def _count_devices(shape: ModelShape, engine: Engine, memory: ServingMemory) -> int:
    """Return how many GPUs share the model: all of them in vLLM, if its heads can be divided."""
    several = memory.gpus > 1 and engine.name == "vllm"
    divides = shape.heads % max(1, memory.gpus) == 0 and shape.kv_heads % max(1, memory.gpus) == 0
    return memory.gpus if several and divides else 1


def _list_notes(source: LanguageModelSource, memory: ServingMemory) -> tuple[str, ...]:
    notes = []
    if not source.shape.is_counted and not source.file_bytes:
        notes.append(
            f"the weights are those of a Llama of this shape: labctl does not know "
            f"{source.shape.kind or 'this architecture'}"
        )
    if source.file_bytes and not source.is_gguf and not source.shape.quantized:
        described = weight_bytes(source.shape, NONE)
        if source.file_bytes < described / MISSING_SHARE:
            notes.append(
                f"the files have {bytes_text(source.file_bytes)}, but config.json describes a "
                f"model of {bytes_text(described)}: some weights may be missing"
            )
    if not memory.bytes:
        notes.append("labctl does not know the memory, so the context is not compared with it")
    return tuple(notes)


def propose_format(
    source: LanguageModelSource, engine: Engine, memory: ServingMemory, context: int, form: str
) -> str:
    """Return the most exact format in which a context fits on this hardware; "" without one."""
    shape = source.shape
    if source.is_gguf or shape.quantized:
        return ""
    for other in PROPOSED:
        loaded = GGUF if other.startswith(GGUF) else other
        able = [
            one
            for one in KNOWN.values()
            if loaded in one.formats and (memory.gpus or loaded not in one.gpu_formats)
        ]
        # llama.cpp computes on the processor here: it is no way to use a GPU's memory.
        if other == form or other in ("awq", "gptq") or not able:
            continue
        # Of a model on this machine there are only the files that it has.
        if other.startswith(GGUF) and (memory.gpus or source.path):
            continue
        fixed = weight_bytes(shape, other) + working_bytes(shape) + OVERHEAD_BYTES
        room = int(memory.bytes * UTILIZATION) - fixed
        if longest_fitting_context(shape, room) >= max(context, 16):
            return other
    return ""


def _make_size_error(
    source: LanguageModelSource,
    engine: Engine,
    form: str,
    memory: ServingMemory,
    context: int,
    fitting: int,
    fixed: int,
    devices: int,
) -> UsageError:
    other = propose_format(source, engine, memory, context, form)
    place = f"{memory.name} ({bytes_text(memory.bytes * devices)})"
    if context:
        what = f"a context of {context:,} tokens does not fit on {place}"
        cache = kv_cache_bytes(source.shape, context, find_kv_type(source.shape, engine))
        why = f"the KV cache needs {bytes_text(cache)}, weights and the rest {bytes_text(fixed)}"
    else:
        what, why = f"the model does not fit on {place}", f"it needs {bytes_text(fixed)}"
    ways = [f"it fits at {fitting:,}"] if fitting else []
    ways += [f"{'or ' if ways else 'it fits '}quantized to {other}"] if other else []
    why += f", of which {UTILIZATION:.0%} may be used; {', '.join(ways)}" if ways else ""
    hints = [_suggest_command(source, form, fitting)] if fitting else []
    hints += [_suggest_command(source, other, context)] if other else []
    needed = math.ceil((fixed / UTILIZATION) / GIB / (1 - NOMINAL))
    hints += [] if hints else [f"labctl offers --min-gpu-memory {needed}GB"]
    return UsageError(what, why=why, hint="\n".join(hints))


def _suggest_command(source: LanguageModelSource, form: str, context: int) -> str:
    words = ["labctl", "serve", "--model", source.name]
    words += ["--quantize", form] if form != NONE else []
    words += ["--context", str(context)] if context else []
    return command(*words).render()
