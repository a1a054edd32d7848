"""What limits a step, what each layer keeps, how often to save, and work in GPU-hours."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from labctl.errors import UsageError
from labctl.estimate.cards import CARDS, RENTABLE, Card, find_card
from labctl.estimate.checkpoint_interval import compute_interval
from labctl.estimate.compute import (
    Workload,
    compute_hours,
    compute_load,
    flops,
    peak_flops,
    reached_utilization,
    token_seconds,
    trainable_amount,
)
from labctl.estimate.fits import choose_card, compare_gpus, find_largest_gpu
from labctl.estimate.intensity import compute_intensity
from labctl.estimate.layers import compute_layers
from labctl.estimate.memory import activations, estimate_memory
from labctl.estimate.plan import (
    LayerMeasurement,
    ModelMeasurement,
    ModelPlan,
    require_consistent,
)
from labctl.model import GpuNeed

GB, GIB = 10**9, 1024**3
TRAINED = ModelPlan(params=8 * GB, optimizer="adam", batch=8, seq=2048, hidden=4096, layers=32)
SERVED = replace(TRAINED, optimizer="", batch=1)
MIXTRAL = ModelPlan(params=47 * GB, active_params=13 * GB, precision="bf16")


def card(name: str, gib: int) -> Card:
    found = find_card(name, gib * GIB)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("name", "gib", "balance"),
    # Peak operations in 16 bits, divided by the bandwidth, by the data sheets.
    [("T4", 16, 203), ("A100", 80, 153), ("H200", 141, 206), ("NVIDIA GeForce RTX 4090", 24, 164)],
)
def test_a_card_balances_at_its_ridge_point(name: str, gib: int, balance: int) -> None:
    plan = replace(SERVED, precision="fp16")
    found = compute_intensity(plan, card(name, gib))
    assert found is not None
    assert round(found.ridge_flop_per_byte) == balance
    # One sequence: two operations for each weight of two bytes.
    assert found.flop_per_byte == pytest.approx(1.0, abs=0.1)
    assert found.is_memory_bound


def test_a_batch_of_sequences_shares_the_weights() -> None:
    h100 = card("H100", 80)
    large = compute_intensity(replace(SERVED, batch=64, seq=1, precision="fp16"), h100)
    assert large is not None
    assert large.flop_per_byte == pytest.approx(64, rel=0.01)
    training = compute_intensity(TRAINED, h100)
    assert training is not None
    assert not training.is_memory_bound
    assert training.step_flops == 6 * 8 * GB * 8 * 2048
    # Without a shape, the tokens of a step are unknown.
    assert compute_intensity(ModelPlan(params=8 * GB, optimizer="adam"), h100) is None
    # A TPU has no published rate in fp32.
    assert compute_intensity(replace(TRAINED, precision="fp32"), card("TPU v5e", 16)) is None


def test_accumulated_parts_read_the_weights_again() -> None:
    h100 = card("H100", 80)
    one = compute_intensity(TRAINED, h100)
    parts = compute_intensity(replace(TRAINED, accumulate=8), h100)
    assert one is not None
    assert parts is not None
    assert parts.step_bytes - one.step_bytes == pytest.approx(7 * 2 * 16 * GB)


def test_the_layers_add_up_to_the_activations() -> None:
    for plan in (
        TRAINED,
        replace(TRAINED, attention="stored", heads=32, kv_heads=8),
        replace(TRAINED, tensor_parallel=4, precision="fp32", accumulate=2),
    ):
        table = compute_layers(plan)
        assert table is not None
        kept = sum(layer.kept_bytes * layer.count for layer in table.layers)
        assert kept == pytest.approx(activations(plan), rel=1e-6)
        assert table.total_bytes == round(activations(plan))
        saved = round(activations(replace(plan, checkpointing=True)))
        assert table.checkpointed_total_bytes == saved
        # The table is the same, whether the plan itself checkpoints or not.
        assert compute_layers(replace(plan, checkpointing=True)) == table
    # Korthikanti et al.: 11 s b h for attention, 19 s b h for the feed-forward part.
    table = compute_layers(TRAINED)
    assert table is not None
    sizes = {layer.name: layer.kept_bytes for layer in table.layers}
    sbh = 8 * 2048 * 4096
    assert (sizes["attention"], sizes["feed-forward"]) == (11 * sbh, 19 * sbh)
    assert compute_layers(SERVED) is None
    assert compute_layers(ModelPlan(params=GB, optimizer="adam")) is None


def test_layers_from_code_are_scaled_to_the_batch() -> None:
    measured = ModelMeasurement(
        parameters=10,
        weight_bytes=40,
        trained_parameters=10,
        trained_bytes=40,
        fixed_bytes=0,
        item_bytes=1100,
        item_flops=60,
        layers=(
            LayerMeasurement(name="a", fixed_bytes=8, item_bytes=600, input_item_bytes=100),
            LayerMeasurement(name="b", fixed_bytes=0, item_bytes=400, input_item_bytes=200),
        ),
    )
    table = compute_layers(ModelPlan(optimizer="adamw", batch=10, measured=measured))
    assert table is not None
    assert [layer.kept_bytes for layer in table.layers] == [6008, 4000]
    assert table.total_bytes == 11_000
    # Both inputs, the largest layer once more, and what the backward pass adds.
    assert table.checkpointed_total_bytes == 3000 + 6008 + (11_000 - 10_008)


def test_youngs_formula() -> None:
    """Young, 1974: sqrt(2 x 5 min x 24 h) is two hours."""
    found = compute_interval(TRAINED, Workload(checkpoint_s=300, reclaim_every_s=24 * 3600))
    assert found is not None
    assert found.seconds == 7200
    assert found.lost_share == pytest.approx(300 / 7200 + 3600 / (24 * 3600))
    assumed = compute_interval(TRAINED, Workload(reclaim_every_s=6 * 3600))
    assert assumed is not None
    assert (assumed.checkpoint_s, assumed.is_assumed) == (96e9 / 125e6, True)
    assert compute_interval(TRAINED, Workload()) is None


def test_a_mixture_of_experts_computes_with_some_and_keeps_all() -> None:
    assert flops(replace(MIXTRAL, optimizer="adam"), Workload(tokens=10)) == 6 * 13 * GB * 10
    assert estimate_memory(MIXTRAL).weights_bytes == 94 * GB
    h200 = card("H200", 141)
    seconds = token_seconds(MIXTRAL, Workload(), h200)
    assert seconds == pytest.approx(26e9 / 4800e9)
    # Enough sequences use all experts.
    assert token_seconds(replace(MIXTRAL, batch=64), Workload(), h200) == pytest.approx(94 / 4800)
    with pytest.raises(UsageError, match="larger than --params"):
        require_consistent(replace(MIXTRAL, active_params=48 * GB))


def test_gpu_hours_are_a_time_a_utilization_or_an_amount() -> None:
    """Llama 2 7B took 184,320 GPU-hours of A100 for 2T tokens (arXiv:2307.09288, table 2)."""
    llama = ModelPlan(params=7 * GB, optimizer="adamw", batch=8, data_parallel=8)
    a100 = card("A100", 80)
    published = Workload(gpu_hours=184_320, tokens=2000 * GB)
    assert compute_hours(a100, llama, published) == 184_320 / 8
    assert reached_utilization(llama, published, a100) == pytest.approx(0.41, abs=0.01)
    assert trainable_amount(llama, published, a100) is None
    tokens = trainable_amount(llama, Workload(gpu_hours=184_320), a100)
    assert tokens == pytest.approx(2000 * GB, rel=0.05)
    assert reached_utilization(llama, Workload(gpu_hours=1), a100) is None


def test_replicas_share_the_requests() -> None:
    day = Workload(requests_per_day=10_000, seconds_per_request=7, replicas=2)
    load = compute_load(day, 7)
    assert load is not None
    assert (load.gpus, load.busy_share) == (1, pytest.approx(0.405, abs=0.001))


def test_cards_that_labctl_cannot_rent_are_compared_and_never_chosen() -> None:
    names = {listed.name for listed in CARDS} - {listed.name for listed in RENTABLE}
    assert names == {"MI300X", "TPU v5e", "Trainium"}
    rows = compare_gpus(SERVED, Workload(), 185 * GB)
    largest = {row.gpu: row.note for row in rows if row.fits}
    assert largest == {"MI300X 192GB": "labctl cannot rent this", "B200 180GB": ""}
    assert find_largest_gpu()[0] == "B200 180GB"
    chosen, _ = choose_card(SERVED, 200 * GB, GpuNeed(kind="any"), None)
    assert chosen.rentable
    assert find_card("NVIDIA GeForce RTX 4090 Laptop GPU", 16 * GIB) is None
    assert find_card("NVIDIA GeForce RTX 4090 D", 24 * GIB) is None
    assert card("AMD Instinct MI300X OAM", 192).name == "MI300X"
    assert peak_flops(card("Trainium", 32), "tf32") == 190e12
