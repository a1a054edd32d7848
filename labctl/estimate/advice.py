"""Advice from an estimate: whether a GPU is needed, which term dominates, what to change."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from labctl.estimate.compute import Workload, cpu_seconds, cpu_token_seconds
from labctl.estimate.constants import (
    CPU_PATIENCE_S,
    CPU_TOKEN_S,
    SMALL_ITEM_FLOPS,
    SMALL_PARAMETERS,
    TABLE_VALUES,
)
from labctl.estimate.fit_time import compute_fit_seconds
from labctl.estimate.fits import find_largest_gpu, find_smallest_gpu
from labctl.estimate.memory import MemoryEstimate, estimate_memory, simple_activations
from labctl.estimate.plan import ModelPlan, is_mixed
from labctl.model import Value
from labctl.text import decimal_bytes_text, duration_text, timing_text

MINUTE_S, HALF_DAY_S = 60.0, 43_200.0
MOST_GPUS = 1024


class Suggestion(Value, frozen=True):
    """A suggested change: its options, its drawback, and its result in bytes per GPU.

    `fits_on` is the smallest GPU with enough memory then, "" for none.
    """

    options: str
    what: str
    total_bytes: int
    fits_on: str
    gpus: int = 1


class GpuVerdict(Value, frozen=True):
    """Whether a GPU is needed, and why."""

    needed: bool
    why: str


def judge_gpu(plan: ModelPlan, amount: Workload) -> GpuVerdict:
    """Decide whether a GPU is needed, by rules of thumb; `constants` has the assumptions."""
    if plan.kind != "network":
        return _judge_table(plan)
    params = plan.measured.parameters if plan.measured else plan.params
    if not plan.training:
        return _judge_use(plan, amount)
    seconds = cpu_seconds(plan, amount)
    if seconds is not None:
        about = "about " if seconds >= 0.5 else ""  # a shorter time is written as < 1 s
        why = f"{about}{duration_text(seconds)} on a laptop's CPU, at an assumed 100 GFLOP/s"
        return GpuVerdict(needed=seconds > CPU_PATIENCE_S, why=why)
    item = plan.measured.item_flops if plan.measured else 0
    small = params <= SMALL_PARAMETERS and item <= SMALL_ITEM_FLOPS
    why = f"{params:,} parameters are {'few enough for' if small else 'too many for'} a CPU"
    hint = f"set the amount of data for a better answer: {_amount_option(plan)}"
    return GpuVerdict(needed=not small, why=f"{why}; {hint}")


def _amount_option(plan: ModelPlan) -> str:
    return "--items 60k --epochs 10" if plan.measured else "--tokens 100M"


def _judge_table(plan: ModelPlan) -> GpuVerdict:
    if plan.fit is not None:
        seconds = compute_fit_seconds(plan.fit, plan.rows)
        about = timing_text(seconds) if seconds < MINUTE_S else duration_text(seconds)
        why = f"training takes about {about} for {plan.rows:,} rows on this machine's CPU"
        why += f" (measured with up to {plan.fit.trials[-1][0]:,} rows)"
        return GpuVerdict(needed=seconds > CPU_PATIENCE_S, why=why)
    values = plan.rows * plan.columns
    if values > TABLE_VALUES:
        why = f"with {values:.2g} values a GPU may be faster (XGBoost: device=cuda), if they fit"
        return GpuVerdict(needed=True, why=why)
    if plan.kind == "trees":
        why = "trees split sorted columns, which CPUs do well; and on tables of usual size "
        why += "they still outperform networks (arXiv:2207.08815)"
    else:
        why = f"a CPU is fast enough for a table of {values:.2g} values"
    return GpuVerdict(needed=False, why=why)


def _judge_use(plan: ModelPlan, amount: Workload) -> GpuVerdict:
    each = cpu_token_seconds(plan)
    unit = "item" if plan.measured else "token"
    why = f"a CPU reads the weights in {timing_text(each)}, once for each {unit}"
    busy = amount.requests_per_day * each * max(amount.reply_tokens, 1)
    if amount.requests_per_day and amount.seconds_per_request:
        return GpuVerdict(needed=each > CPU_TOKEN_S, why=why)
    return GpuVerdict(needed=each > CPU_TOKEN_S or busy > HALF_DAY_S, why=why)


def why_simple_differs(plan: ModelPlan, found: MemoryEstimate) -> tuple[str, ...]:
    """What the rule of thumb leaves out, largest part of the sum first; empty without training."""
    if plan.kind != "network" or found.total_bytes == found.simple_rule_bytes:
        return ()
    reasons: list[tuple[float, str]] = [(found.overhead_bytes, "overhead")]
    if is_mixed(plan):
        master = 4.0 * plan.params
        reasons.append((master, f"fp32 master weights ({decimal_bytes_text(master)})"))
        if plan.optimizer in ("adam", "adamw", "momentum"):
            reasons.append((master * 2, f"fp32 optimizer states (it assumes {plan.precision})"))
    if found.activations_bytes:
        rule = simple_activations(plan)
        by_rule = (
            f" ({decimal_bytes_text(rule)} by its own rule, one tensor per layer)"
            if rule and plan.training
            else ""
        )
        reasons.append((found.activations_bytes, f"activations{by_rule}"))
    if found.kv_cache_bytes:
        reasons.append((found.kv_cache_bytes, "the KV cache"))
    if plan.gpus > 1:
        reasons.append((0, "the division among GPUs"))
    return tuple(text for _, text in sorted(reasons, key=lambda pair: -pair[0]))


def list_suggestions(plan: ModelPlan) -> tuple[Suggestion, ...]:
    """List the changes that help, each by itself; then, if needed, their combination."""
    if plan.kind != "network":
        return ()
    now = estimate_memory(plan).total_bytes
    single = [_way(changed, *texts) for *texts, changed in _changes(plan)]
    helpful = [way for way in single if way.total_bytes < now * 0.99]
    together = _combine(plan)
    options = {way.options for way in helpful}
    return (*helpful, *([together] if together and together.options not in options else []))


def _way(plan: ModelPlan, options: str, what: str) -> Suggestion:
    total = estimate_memory(plan).total_bytes
    fits_on = find_smallest_gpu(total)
    return Suggestion(
        options=options, what=what, total_bytes=total, fits_on=fits_on, gpus=plan.gpus
    )


def _changes(plan: ModelPlan) -> Iterator[tuple[str, str, ModelPlan]]:
    """Yield (options, drawback, changed plan), the mildest first."""
    if plan.training:
        yield from _list_training_changes(plan)
    else:
        yield from _list_use_changes(plan)
    yield from _find_sharding(plan)


def _list_training_changes(plan: ModelPlan) -> Iterator[tuple[str, str, ModelPlan]]:
    if plan.precision in ("fp32", "tf32"):
        yield "--precision bf16", "also faster", _to_bf16(plan)
    if plan.attention == "stored" and plan.has_shape:
        yield "--attention fused", "same result, faster", replace(plan, attention="fused")
    parts = plan.batch // plan.data_parallel
    if parts > plan.accumulate:
        yield f"--accumulate {parts}", "same result, slower", replace(plan, accumulate=parts)
    if plan.has_shape and not plan.checkpointing:
        yield "--checkpointing", "a third more compute", replace(plan, checkpointing=True)
    if plan.batch > 1:
        smaller = replace(plan, batch=1, data_parallel=1, accumulate=1, zero=0)
        yield "--batch 1", "noisier steps", smaller
    if plan.optimizer in ("adam", "adamw"):
        change = replace(plan, optimizer="adam8bit")
        yield "--train adam8bit", "8-bit states: bitsandbytes", change


def _to_bf16(plan: ModelPlan) -> ModelPlan:
    """Change the plan to bf16. For measured models, autocast about halves activations only."""
    if plan.measured is None:
        return replace(plan, precision="bf16")
    item, fixed = plan.measured.item_bytes // 2, plan.measured.fixed_bytes // 2
    halved = replace(plan.measured, item_bytes=item, fixed_bytes=fixed)
    return replace(plan, precision="bf16", measured=halved)


def _list_use_changes(plan: ModelPlan) -> Iterator[tuple[str, str, ModelPlan]]:
    smaller = {"fp32": ("bf16", "int8", "int4"), "tf32": ("bf16", "int8", "int4")}
    if plan.measured is None:
        for precision in smaller.get(plan.precision, ("int8", "int4")):
            changed = replace(plan, precision=precision)
            costs = "some quality" if precision == "int4" else "little quality"
            yield f"--precision {precision}", costs, changed
    if plan.batch > 1:
        yield "--batch 1", "one request at a time", replace(plan, batch=1)


def _find_sharding(plan: ModelPlan) -> Iterator[tuple[str, str, ModelPlan]]:
    """Find the smallest power of two of GPUs on which the model fits when divided."""
    if plan.gpus > 1 and plan.zero == 3:
        return
    count = 2 * plan.gpus
    while count <= MOST_GPUS:
        changed, options = _divide(plan, count)
        if find_smallest_gpu(estimate_memory(changed).total_bytes):
            yield options, f"{count} GPUs", changed
            return
        count *= 2


def _divide(plan: ModelPlan, count: int) -> tuple[ModelPlan, str]:
    if plan.training:
        batch = -(-max(plan.batch, count) // count) * count
        changed = replace(plan, data_parallel=count, zero=3, batch=batch, accumulate=1)
        more = f" --batch {batch}" if batch != plan.batch else ""
        rest = replace(changed, tensor_parallel=1, pipeline_parallel=1)
        return rest, f"--zero 3 --data-parallel {count}{more}"
    return replace(plan, tensor_parallel=count), f"--tensor-parallel {count}"


def _combine(plan: ModelPlan) -> Suggestion | None:
    """Combine changes, the mildest first, until a single GPU has enough memory."""
    changed, total = plan, estimate_memory(plan).total_bytes
    steps = _list_training_changes if plan.training else _list_use_changes
    used: dict[str, str] = {}
    while total > find_largest_gpu()[1]:
        better = next(
            (
                (options, after)
                for options, _, after in steps(changed)
                if estimate_memory(after).total_bytes < total * 0.99
            ),
            None,
        )
        if better is None:
            return None
        options, changed = better
        used[options.split()[0]] = options
        total = estimate_memory(changed).total_bytes
    return _way(changed, " ".join(used.values()), "together") if len(used) > 1 else None
