"""What-if on a replay: closed forms on small made-up jobs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stepsight.dataset.base.errors import StepsightError
from stepsight.dataset.graph.program import Program
from stepsight.dataset.hardware.hardware import HARDWARE, find_fabric
from stepsight.dataset.kinds.op import Op
from stepsight.dataset.traces.import_traces import import_ranks
from stepsight.simulator.durations.latency_model import RooflineLatency
from stepsight.simulator.replay import changes
from stepsight.simulator.replay.changes import Tally, with_buckets
from stepsight.simulator.replay.replay import replay
from tests.dataset.traced_jobs import GpuJob, two_ranks

US = 1e-6


@pytest.fixture
def single(tmp_path: Path) -> list[Program]:
    return list(import_ranks([GpuJob().step(1).step(2).file.write(tmp_path / "t.json")]).graphs)


@pytest.fixture
def pair(tmp_path: Path) -> list[Program]:
    return list(import_ranks([f.write(tmp_path / f"{i}.json") for i, f in enumerate(two_ranks())]).graphs)


@pytest.mark.parametrize("what", ["gemm", "xmma_gemm"])
def test_faster_products_save_their_time(single: list[Program], what: str) -> None:
    tally = Tally()
    after = replay(changes.faster(single, tally, what, 4.0)).replayed_s
    assert replay(single).replayed_s - after == pytest.approx(1200 * US * 3 / 4, rel=0.05)
    assert tally.scaled_s == pytest.approx(2 * 1200 * US) and not tally.predicted_s


def test_attention_without_a_mask_has_known_sizes() -> None:
    model = RooflineLatency(HARDWARE["a100-sxm-80gb"], find_fabric("dgx-a100"))
    sizes = (2, 8, 8, 64, 64, 32)
    masked, free, unknown = (Op("attention", dims, "bf16") for dims in ((*sizes, 1), (*sizes, 0), (0,) * 7))
    seconds = changes.sized_seconds(model, [masked, free, unknown])
    assert 0 < seconds[0] <= seconds[1] and np.isnan(seconds[2])


def test_a_name_that_nothing_has_is_refused(single: list[Program]) -> None:
    with pytest.raises(StepsightError, match="the trace has"):
        changes.faster(single, Tally(), "conv2d_of_somebody", 2.0)
    with pytest.raises(StepsightError, match="> 0"):
        changes.faster(single, Tally(), "gemm", 0.0)


def test_without_a_host_only_the_device_remains(single: list[Program]) -> None:
    after = replay(changes.without_host(single, Tally())).replayed_s
    assert after == pytest.approx(1350 * US, rel=0.02)  # the kernels of one step, one after the other
    assert replay(changes.as_device_graph(single, Tally())).replayed_s == pytest.approx(after)


def test_a_faster_device_helps_no_host_bound_step(tmp_path: Path) -> None:
    job = GpuJob(slow=0.001).step(1).step(2)
    graphs = list(import_ranks([job.file.write(tmp_path / "t.json")]).graphs)
    before = replay(graphs).replayed_s
    assert replay(changes.faster(graphs, Tally(), "gemm", 10.0)).replayed_s == pytest.approx(before, rel=0.01)


def test_without_the_straggler_both_ranks_take_what_the_fast_one_needs(pair: list[Program]) -> None:
    before, after = replay(pair), replay(changes.without_straggler(pair, Tally()))
    assert before.replayed_s - after.replayed_s == pytest.approx(1200 * US, rel=0.1)
    with pytest.raises(StepsightError, match="at least two ranks"):
        changes.without_straggler(pair[:1], Tally())


def test_another_fabric_changes_collectives_alone(pair: list[Program]) -> None:
    hardware, fabric = HARDWARE["a100-sxm-80gb"], find_fabric("dgx-a100")
    slow = find_fabric("pcie-gen4")
    before, after = (RooflineLatency(hardware, each) for each in (fabric, slow))
    changed = changes.on_latencies(pair, Tally(), before, after)
    assert replay(changed).replayed_s > replay(pair).replayed_s
    ops = pair[0].columns["kind"] == 0
    assert changed[0].duration_s[ops] == pytest.approx(pair[0].duration_s[ops])


def test_twice_the_batch_scales_what_batches_scale(single: list[Program]) -> None:
    latency = RooflineLatency(HARDWARE["a100-sxm-80gb"], find_fabric("dgx-a100"))
    tally = Tally()
    graph = changes.with_batch(single, tally, 2.0, latency)[0]
    device = single[0].on_device
    ratio, phases = graph.duration_s[device] / single[0].duration_s[device], single[0].columns["phase"][device]
    assert ratio[phases == 2] == pytest.approx(1.0)  # the optimizer
    assert (ratio[phases != 2] > 1.0).all() and (ratio <= 2.0 + 1e-9).all()
    assert tally.predicted_s > 0 and tally.scaled_s == pytest.approx(2 * 50 * US)  # the opaque kernel


def test_buckets_join_only_what_is_smaller(pair: list[Program]) -> None:
    latency = RooflineLatency(HARDWARE["a100-sxm-80gb"], find_fabric("dgx-a100"))
    with pytest.raises(StepsightError, match="none smaller"):
        with_buckets(pair, Tally(), 1e6, latency)


def test_more_ranks_make_collectives_of_all_ranks_longer(pair: list[Program]) -> None:
    latency = RooflineLatency(HARDWARE["a100-sxm-80gb"], find_fabric("dgx-a100"))
    tally = Tally()
    changed = changes.with_replicas(pair, tally, 8, latency)
    joined = pair[0].columns["kind"] == 1
    assert (changed[0].duration_s[joined] > pair[0].duration_s[joined]).all() and tally.predicted_s > 0
    assert changed[0].duration_s[~joined] == pytest.approx(pair[0].duration_s[~joined])
    assert replay(changed).replayed_s > replay(pair).replayed_s


def test_no_collective_means_nothing_to_scale(single: list[Program]) -> None:
    latency = RooflineLatency(HARDWARE["a100-sxm-80gb"], find_fabric("dgx-a100"))
    with pytest.raises(StepsightError, match="collectives of all 1 ranks"):
        changes.with_replicas(single, Tally(), 2, latency)
