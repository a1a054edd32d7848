"""Why a run is slow: each rule over GPU, data, processor and memory, and what it keeps quiet."""

from __future__ import annotations

from typing import Any

import pytest
from explain_cases import GIB, findings, gpu, material, run, samples, series, unknown
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from labctl.insight.explain.evidence import MemoryFit, RunData
from labctl.insight.telemetry import Sample

WAITS = series("speed/data_wait_share", [0.6] * 10)
IN_TIME = series("speed/data_wait_share", [0.02] * 10)


def test_a_busy_gpu_is_praised_and_nothing_else_said() -> None:
    made = material(IN_TIME, samples=samples(gpu()))
    found = findings(made)
    assert set(found) == {"gpu-good", "data-in-time"}
    assert "90%" in found["gpu-good"].what
    assert {line.source for line in found["gpu-good"].evidence} == {
        "logs/telemetry.jsonl",
        "TensorBoard",
    }


@pytest.mark.parametrize(
    ("use", "rule", "level"),
    [
        (4.0, "gpu-idle", "problem"),
        (9.9, "gpu-idle", "problem"),
        (10.0, "gpu-half-used", "advice"),
        (40.0, "gpu-half-used", "advice"),
        (50.0, "gpu-fair", "advice"),
        (79.0, "gpu-fair", "advice"),
        (80.0, "gpu-good", "good"),
        (100.0, "gpu-good", "good"),
    ],
)
def test_the_bands_of_use(use: float, rule: str, level: str) -> None:
    found = findings(material(IN_TIME, samples=samples(gpu(use_percent=use))))
    assert found[rule].level == level
    assert f"{use:.0f}%" in found[rule].what
    assert not {"gpu-idle", "gpu-half-used", "gpu-fair", "gpu-good"} - {rule} & set(found)


def test_the_start_of_a_run_is_no_measure() -> None:
    slow_start = samples(
        count=20, change=lambda n: {"gpus": (gpu(use_percent=0.0 if n < 4 else 95.0),)}
    )
    assert "gpu-good" in findings(material(samples=slow_start))


@pytest.mark.parametrize(
    ("curve", "fields", "why", "next_"),
    [
        (WAITS, {}, "waits for data, although the CPU has idle cores", "--workers 8"),
        (WAITS, {"cpu_cores": 7.9}, "none is left to prepare", "labctl offers"),
        (IN_TIME, {}, "too small to fill it", "--batch-size 256"),
        (IN_TIME, {"cpu_cores": 7.9}, "the CPU is at its limit", "labctl profile"),
    ],
)
def test_an_idle_gpu_has_a_cause(curve: Any, fields: Any, why: str, next_: str) -> None:
    made = material(curve, samples=samples(gpu(use_percent=5.0, memory_bytes=GIB), **fields))
    found = findings(made)["gpu-idle"]
    assert why in found.why
    assert next_ in found.next
    assert "data-wait" not in findings(made)


def test_a_gpu_that_nobody_touched_is_told_from_one_that_waits() -> None:
    idle = gpu(use_percent=0.0, memory_bytes=0)
    found = findings(material(samples=samples(idle), log="run night: 5 parameters, cpu, fp32\n"))
    assert "torch.cuda.is_available" in found["gpu-unused"].next
    assert "cpu, fp32" in found["gpu-unused"].evidence[-1].text


def test_a_large_gpu_that_waits_is_not_called_unused() -> None:
    """On an H200: a kernel runs for less than half a percent of the time, and 0.6% of the memory
    is PyTorch's."""
    held = gpu(use_percent=0.0, memory_bytes=900_530_176, memory_total_bytes=150_754_820_096)
    found = findings(material(WAITS, samples=samples(held)))
    assert "gpu-unused" not in found
    assert "it waits for data" in found["gpu-idle"].why


def test_one_of_two_gpus_does_all_the_work() -> None:
    other = gpu(uuid="GPU-2", use_percent=0.0)
    found = findings(material(samples=samples(gpu(), other)))
    assert "1 of 2 GPUs did nothing" in found["gpu-some-idle"].what
    assert found["gpu-some-idle"].next == "labctl up --gpu any:1   # uses fewer GPUs"
    assert "gpu-good" in found
    assert "gpu-idle" not in found


def test_torchrun_is_advised_only_to_code_that_reads_its_rank() -> None:
    both = samples(gpu(), gpu(uuid="GPU-2", use_percent=0.0))
    command = ("python", "train.py", "--lr", "1")
    data = material(samples=both, is_distributed=True, run=run(command=command))
    assert "torchrun --nproc-per-node=2 train.py --lr 1 " in findings(data)["gpu-some-idle"].next


def test_several_gpus_alike_are_told_once_by_the_least_used() -> None:
    others = [gpu(uuid=f"GPU-{n}", use_percent=20.0 + n) for n in range(4)]
    found = [f for f in findings(material(samples=samples(*others))).values() if "gpu" in f.rule]
    assert [one.rule for one in found] == ["gpu-half-used"]
    assert "20%" in found[0].what


def test_busy_at_low_power() -> None:
    assert "gpu-low-power" not in findings(material(samples=samples(gpu())))
    found = findings(material(samples=samples(gpu(power_w=25.0))))["gpu-low-power"]
    assert "36%" in found.what
    assert "25 W of 70 W" in found.evidence[0].text
    silent = material(samples=samples(gpu(power_w=None)))
    assert "gpu-low-power" not in findings(silent)
    assert "does not report its power" in unknown(silent)["gpu-power"].why


@pytest.mark.parametrize(
    ("reason", "rule", "level"),
    [
        ("thermal", "gpu-throttled-by-heat", "problem"),
        ("power", "gpu-throttled-by-power", "advice"),
        ("hardware", "gpu-throttled-by-hardware", "problem"),
    ],
)
def test_throttling(reason: str, rule: str, level: str) -> None:
    hot = samples(change=lambda n: {"gpus": (gpu(throttle=(reason,) if n % 2 else ()),)})
    found = findings(material(samples=hot))[rule]
    assert found.level == level
    assert "50%" in found.evidence[0].text
    rare = samples(change=lambda n: {"gpus": (gpu(throttle=(reason,) if n == 20 else ()),)})
    assert rule not in findings(material(samples=rare))


def test_a_mig_part_does_not_tell_its_use() -> None:
    made = material(samples=samples(gpu(use_percent=None, power_w=None)))
    assert "MIG" in unknown(made)["gpu-use"].why
    assert not [rule for rule in findings(made) if rule.startswith("gpu")]


@pytest.mark.parametrize(("share", "level"), [(0.19, "good"), (0.2, "advice"), (0.5, "problem")])
def test_the_share_of_time_waiting_for_data(share: float, level: str) -> None:
    made = material(series("speed/data_wait_share", [share] * 5), samples=samples(gpu()))
    found = findings(made)
    assert {found[rule].level for rule in ("data-wait", "data-in-time") if rule in found} == {level}


def test_without_a_gpu_waiting_for_data_is_no_fault_of_its_own() -> None:
    made = material(series("speed/data_wait_share", [0.3] * 5), samples=samples())
    assert "the same cores" in findings(made)["data-in-time"].why
    assert "data-wait" in findings(material(WAITS, samples=samples()))


def test_a_curve_that_is_no_share_is_not_taken_for_one() -> None:
    made = material(series("speed/data_wait_share", [12.0] * 5), samples=samples(gpu()))
    assert "data-wait" in unknown(made)


@pytest.mark.parametrize(
    ("command", "curves", "log"),
    [
        (("python", "train.py", "--workers", "16"), (), ""),
        (("python", "train.py", "--num-workers=16"), (), ""),
        (("python", "train.py"), (series("setup/workers", [16.0]),), ""),
        (
            ("python", "train.py"),
            (),
            "UserWarning: This DataLoader will create 16 worker processes in total. Our suggested "
            "max number of worker in current system is 8, which is smaller than",
        ),
    ],
)
def test_more_workers_than_cores(command: Any, curves: Any, log: str) -> None:
    made = material(*curves, run=run(command=command), log=log, samples=samples(gpu()))
    found = findings(made)["workers-above-cores"]
    assert "16 DataLoader workers share 8 cores" in found.what
    assert found.next.endswith(("--workers 8", "--num-workers=8"))
    fewer = material(run=run(command=("python", "train.py", "--workers", "8")), samples=samples())
    assert "workers-above-cores" not in findings(fewer)


def test_shared_memory() -> None:
    line = "RuntimeError: DataLoader worker (pid 5) is killed by signal: Bus error."
    killed = material(log=f"x\n{line}\n", run=run(exit_code=1), samples=samples(gpu()))
    found = findings(killed)["shm-full"]
    assert found.evidence[0].text == line
    assert "limits: {shm: 8GB}" in found.next
    full = material(samples=samples(gpu(), shm_bytes=int(1.95 * GIB)))
    assert "shm-full" in findings(full)
    small = material(
        run=run(command=("python", "train.py", "--workers", "4")),
        samples=samples(gpu(), shm_limit_bytes=64 * 1024**2),
    )
    assert findings(small)["shm-small"].level == "advice"
    assert "limits: {shm: 2GB}" in findings(small)["shm-small"].next


@pytest.mark.parametrize(
    ("busy", "rule"),
    [(7.5, "processor-busy"), (1.0, "processor-one-core"), (3.0, "processor-idle")],
)
def test_the_processor_where_no_gpu_is(busy: float, rule: str) -> None:
    made = material(samples=samples(cpu_cores=busy))
    assert rule in findings(made)
    assert "the run had no GPU" in findings(made)[rule].evidence[1].text


def creeping(per_sample: int, **fields: Any) -> RunData:
    return material(
        samples=samples(change=lambda n: {"memory_bytes": 2 * GIB + n * per_sample}, **fields)
    )


def test_memory_that_creeps() -> None:
    found = findings(creeping(GIB // 10, cpu_cores=7.9))["memory-creeps"]
    assert "GiB an hour" in found.evidence[0].text
    assert "will be full in 5 min" in found.what
    assert "memory-creeps" not in findings(creeping(1024))
    card = samples(change=lambda n: {"gpus": (gpu(memory_bytes=2 * GIB + n * GIB // 4),)})
    assert "gpu-memory-creeps" in findings(material(samples=card))


def test_memory_that_goes_up_and_down_does_not_creep() -> None:
    saw = samples(change=lambda n: {"memory_bytes": 2 * GIB + (n % 5) * GIB})
    assert "memory-creeps" not in findings(material(samples=saw))


def test_a_new_attempt_begins_its_memory_anew() -> None:
    fresh = samples(change=lambda n: {"attempt": 1 + n // 15, "memory_bytes": (n // 15 + 1) * GIB})
    assert "memory-creeps" not in findings(material(samples=fresh))


def test_memory_that_is_nearly_full() -> None:
    made = material(samples=samples(memory_bytes=int(7.8 * GIB)))
    assert "97%" in findings(made)["memory-nearly-full"].evidence[0].text


CUDA = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total "
    "capacity of 14.56 GiB of which 1.06 GiB is free."
)
FIT = MemoryFit(
    target="train.py:build_model",
    item="3x224x224",
    fixed_bytes=2 * GIB,
    item_bytes=GIB // 4,
    limit_bytes=14 * GIB,
    batch=32,
)


def test_the_gpus_memory_ran_out_with_the_plans_numbers() -> None:
    made = material(log=f"x\n{CUDA}\n", run=run(exit_code=1, summary="failed"), fit=FIT)
    found = findings(made)["gpu-out-of-memory"]
    said = " ".join(line.text for line in found.evidence)
    assert CUDA in said
    assert "2.0 GiB for weights" in said
    assert "with a batch of 64 (the command) that is 18.0 GiB, of 14.0 GiB" in said
    assert found.next == ("labctl run -- python train.py --lr 0.01 --batch-size 32 --accumulate 2")
    assert "exception" not in findings(made)


def test_out_of_memory_has_three_levers_with_their_price() -> None:
    fit = replace(
        FIT, item_flops=10**9, checkpointed_bytes=3 * GIB, precision="fp32", item_bytes=GIB // 4
    )
    options = frozenset({"--batch-size", "--accumulate", "--checkpoint-activations", "--amp"})
    made = material(log=CUDA, run=run(exit_code=1), fit=fit, options=options)
    made = replace(made, samples=samples(gpu()))
    batch, checkpointing, precision = findings(made)["gpu-out-of-memory"].levers
    # 2 GiB fixed, and 0.25 GiB for each of 32 items; 64 did not fit into 14 GiB.
    assert (batch.name, batch.total_bytes, batch.fits) == (
        "2 batches of 32, accumulated",
        10 * GIB,
        True,
    )
    assert batch.price == "the same operations (6.4e+10 a step) in 2 parts"
    assert batch.next.endswith("--batch-size 32 --accumulate 2")
    assert (checkpointing.total_bytes, checkpointing.fits) == (5 * GIB, True)
    assert "8.5e+10 operations a step instead of 6.4e+10" in checkpointing.price
    assert checkpointing.next.endswith("--batch-size 64 --checkpoint-activations")
    assert (precision.total_bytes, precision.fits) == (10 * GIB, True)
    assert precision.price == "none: products are up to 8 times as fast on the T4"
    assert precision.next.endswith("--amp fp16")


def test_the_levers_use_the_steps_that_the_run_made() -> None:
    curve = series("train/loss", [2.0] * 8)  # ten steps in a second
    made = replace(
        material(curve, log=CUDA, run=run(exit_code=1), fit=replace(FIT, precision="bf16")),
        options=frozenset(),
    )
    batch, checkpointing, precision = findings(made)["gpu-out-of-memory"].levers
    assert "at least the 100 ms of a step" in batch.price
    assert "a step of 100 ms takes about 133 ms" in checkpointing.price
    assert checkpointing.next == "torch.utils.checkpoint.checkpoint(layer, x)"
    assert (checkpointing.total_bytes, checkpointing.fits) == (0, None)
    assert precision.price == "none left: it computes in bf16"


def test_memory_that_is_reserved_and_not_used_is_fragmentation() -> None:
    error = (
        f"{CUDA} Of the allocated memory 9.00 GiB is allocated by PyTorch, and 4.00 GiB is "
        "reserved by PyTorch but unallocated."
    )
    found = findings(material(log=error, run=run(exit_code=1)))["gpu-memory-fragmented"]
    assert found.what.startswith("4.0 GiB of the GPU's memory is reserved and not used")
    assert "expandable_segments:True" in found.next
    little = error.replace("4.00 GiB is reserved", "0.10 GiB is reserved")
    assert "gpu-memory-fragmented" not in findings(material(log=little, run=run(exit_code=1)))
    odd = error.replace("4.00 GiB is reserved", "4.0.0 GiB is reserved")
    assert "gpu-memory-fragmented" not in findings(material(log=odd, run=run(exit_code=1)))
    curves = (
        series("gpu_memory/reserved_mib", [8192.0] * 3),
        series("gpu_memory/peak_mib", [4096.0] * 3),
    )
    by_curve = findings(material(*curves))["gpu-memory-fragmented"]
    assert "at most 4.0 GiB of it allocated (50%)" in by_curve.evidence[0].text


def test_out_of_memory_without_a_plan_halves_the_batch() -> None:
    made = material(log=CUDA, run=run(exit_code=1))
    assert "--batch-size 32 --accumulate 2" in findings(made)["gpu-out-of-memory"].next
    bare = material(log=CUDA, run=run(exit_code=1, command=("sh", "-c", "go")), options=frozenset())
    assert (
        findings(bare)["gpu-out-of-memory"].next
        == "halve the batch size and accumulate gradients over two batches"
    )


def test_a_plan_that_should_have_fitted_says_so() -> None:
    made = material(
        log=CUDA,
        run=run(exit_code=1),
        fit=FIT.__class__(
            **{
                **{name: getattr(FIT, name) for name in FIT.__struct_fields__},
                "limit_bytes": 40 * GIB,
                "batch": 128,
            }
        ),
    )
    found = findings(made)["gpu-out-of-memory"]
    assert "something else took the memory" in found.why
    assert "--batch-size 32" in found.next


def test_a_model_of_which_no_item_fits_needs_a_larger_card() -> None:
    fit = MemoryFit(
        target="t", item="8", fixed_bytes=20 * GIB, item_bytes=GIB, limit_bytes=14 * GIB, batch=0
    )
    made = material(log=CUDA, run=run(exit_code=1), fit=fit)
    assert "labctl offers" in findings(made)["gpu-out-of-memory"].next


@pytest.mark.parametrize(
    ("told", "limit"),
    [
        ("killed: too much memory", 2 * GIB),
        # a record of an earlier version
        ("out of memory: killed at its limit of 2.00 GiB (peak 2.00 GiB)", UNSET),
    ],
)
def test_the_containers_memory_ran_out(told: str, limit: int | UnsetType) -> None:
    ended = run(exit_code=137, summary=told, oom_limit_bytes=limit)
    made = material(run=ended, samples=samples(gpu(), count=5))
    found = findings(made)["out-of-memory"]
    assert found.evidence[0].text == told
    assert "peak use 2.0 GiB" in found.evidence[1].text
    assert "--batch-size 32" in found.next
    assert "killed" not in findings(made)


def test_memory_that_filled_up_between_two_samples() -> None:
    summary = "out of memory: killed at its limit of 1.4 GiB (peak 1.4 GiB)"
    command = ("python", "train.py")
    ended = run(exit_code=137, summary=summary, oom_limit_bytes=3 * GIB // 2, command=command)
    early = samples(gpu(), count=1, memory_bytes=98 * 1024**2)
    found = findings(material(run=ended, samples=early))["out-of-memory"]
    assert [item.text for item in found.evidence] == [summary]
    assert "batch" not in found.why


@pytest.mark.parametrize("count", [0, 1, 2])
def test_too_little_telemetry_is_said(count: int) -> None:
    made = material(samples=samples(gpu(), count=count))
    rule = "gpu-use" if count else "telemetry"
    assert "labctl explain" in unknown(made)[rule].next
    bare = material(samples=samples(count=count))
    assert ("processor-use" if count else "telemetry") in unknown(bare)


def test_samples_that_measured_nothing_are_no_zeros() -> None:
    made = material(samples=tuple(Sample(at=1000.0 + 10 * n) for n in range(30)))
    assert findings(made) == {}
    assert "could not measure" in unknown(made)["processor-use"].why


NVML_LOST = "epoch 3\nFailed to initialize NVML: Unknown Error\nepoch 4\n"


@pytest.mark.parametrize(
    ("fields", "log", "evidence"),
    [
        ({"gpu_lost_at": 1500.0}, "epoch 3\n", "1970-01-01 00:25:00 UTC"),
        ({}, NVML_LOST, "Failed to initialize NVML: Unknown Error"),
        (
            {"exit_code": 1, "gpu_lost_at": 1500.0},
            "RuntimeError: CUDA error: unknown error\n",
            "1970-01-01 00:25:00 UTC",
        ),
    ],
)
def test_a_container_without_its_gpu_is_named(
    fields: dict[str, Any], log: str, evidence: str
) -> None:
    made = material(run=run(**fields), log=log)
    found = findings(made)
    assert evidence in found["gpu-lost"].evidence[0].text
    assert "exception" not in found
    assert "gpu-lost" not in findings(material(log="epoch 3\n"))


def test_other_work_on_the_server_is_blamed_before_the_data_pipeline() -> None:
    waits = series("speed/data_wait_share", [0.6] * 30)
    crowded: dict[str, Any] = {
        "cpu_cores": 1.0,
        "host_cores": 8.0,
        "host_cpu_cores": 7.6,
        "other_runs": 2,
    }
    found = findings(material(waits, samples=samples(**crowded)))
    finding = found["host-busy"]
    assert finding.what == "other work took 6.6 of the server's 8 cores"
    assert "2 other runs of this account at the same time" in finding.evidence[2].text
    assert "labctl top" in finding.next
    outside = findings(material(waits, samples=samples(**{**crowded, "other_runs": 0})))
    assert outside["host-busy"].evidence[-1].text.startswith("by programs outside the server")
    assert "labctl top" not in outside["host-busy"].next, "it would show nothing"
    assert not {"data-wait", "processor-one-core", "processor-idle"} & set(found)
    idle = findings(material(waits, samples=samples(gpu(use_percent=5.0), **crowded)))
    assert "other work on the server" in idle["gpu-idle"].why
    assert "data-wait" not in idle


@pytest.mark.parametrize(
    "load",
    [
        {},
        {"host_cores": 8.0, "host_cpu_cores": 3.5},
        {"host_cores": 8.0, "host_cpu_cores": 7.9, "cpu_cores": 7.5},
        {"host_cores": 8.0},
    ],
)
def test_without_other_work_the_run_itself_is_judged(load: dict[str, Any]) -> None:
    waits = series("speed/data_wait_share", [0.6] * 30)
    found = findings(material(waits, samples=samples(**load)))
    assert "host-busy" not in found
    assert "data-wait" in found
