import pytest

from stepsight.dataset.hardware import Hardware
from stepsight.dataset.job import ModelSpec
from stepsight.simulator.layers import RankShape, layer_block
from stepsight.simulator.memory import block_activation_bytes, estimate_memory, micro_batches_in_flight
from stepsight.simulator.schedules import find_schedule
from tests.simulator.conftest import JobMaker

S, B, H, A = 2048, 2, 4096, 32


def shape(tp: int, sequence_parallel: bool) -> RankShape:
    model = ModelSpec(
        family="gpt", layers=1, hidden=H, heads=A, kv_heads=A, ffn=4 * H, vocab=51200, seq_len=S, gated_mlp=False
    )
    return RankShape(model, B, "bf16", tp, tp, sequence_parallel)


@pytest.mark.parametrize(
    ("tp", "sequence_parallel", "per_sbh"),
    [(1, False, 34 - 2), (8, False, 10 - 2 + 24 / 8), (8, True, (34 - 2) / 8)],
)
def test_activations_of_a_layer(tp: int, sequence_parallel: bool, per_sbh: float) -> None:
    """Korthikanti et al. 2022, table 2 without the attention core, less the two dropout masks (2 s b h) that are
    not there."""
    layer = layer_block(shape(tp, sequence_parallel))
    assert block_activation_bytes(layer, without_core=True) + 6 * S * B * H // tp == pytest.approx(per_sbh * S * B * H)


def test_fused_attention_keeps_no_score_matrix() -> None:
    """Queries, keys, values, and one number per row and head."""
    layer = layer_block(shape(1, False))
    core = block_activation_bytes(layer) - block_activation_bytes(layer, without_core=True)
    assert core == 6 * S * B * H + 4 * S * B * A


def test_micro_batches_in_flight() -> None:
    assert micro_batches_in_flight(find_schedule("1f1b", 4, 8)) == (4, 3, 2, 1)
    assert micro_batches_in_flight(find_schedule("1f1b", 4, 2)) == (2, 2, 2, 1)
    assert micro_batches_in_flight(find_schedule("gpipe", 4, 8)) == (8, 8, 8, 8)


@pytest.mark.parametrize(
    ("zero_stage", "bytes_per_parameter"), [(0, 18.0), (1, 6 + 12 / 8), (2, 2 + 16 / 8), (3, 16 / 8)]
)
def test_states_in_mixed_precision(
    make_job: JobMaker, gpu: Hardware, zero_stage: int, bytes_per_parameter: float
) -> None:
    """ZeRO divides optimizer, gradients and parameters in turn (Rajbhandari et al. 2019)."""
    (stage,) = estimate_memory(make_job(dp=8, zero_stage=zero_stage, precision="bf16"), gpu).stages
    numel = 4 * (12 * 64**2 + 13 * 64) + 2 * 256 * 64 + 32 * 64 + 2 * 64
    assert stage.parameters + stage.gradients + stage.optimizer == pytest.approx(bytes_per_parameter * numel)


def test_full_recomputation_keeps_inputs_alone(make_job: JobMaker, gpu: Hardware) -> None:
    none, full = (estimate_memory(make_job(recompute=how), gpu).stages[0] for how in ("none", "full"))
    assert full.activations < none.activations
    assert full.buffers > 0
    assert full.total < none.total


def test_what_does_not_fit_is_explained(make_job: JobMaker, gpu: Hardware) -> None:
    memory = estimate_memory(make_job(pp=2, micro_batches=8, micro_batch=64, model={"seq_len": 131072}), gpu)
    assert not memory.fits
    assert memory.reason.startswith("stage 0 needs ")
    assert memory.reason.endswith("2 micro-batches in flight), a device has 80.0 GB")
    assert memory.to_dict()["peak_bytes"] == memory.peak_bytes


def test_what_fits_has_no_reason(make_job: JobMaker, gpu: Hardware) -> None:
    memory = estimate_memory(make_job(), gpu)
    assert memory.fits and memory.reason == ""
