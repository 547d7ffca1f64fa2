from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from stepsight.dataset.hardware.hardware import Hardware
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import Collective
from stepsight.simulator.blocks.dlrm import dlrm_embedding, dlrm_head, dlrm_layer
from stepsight.simulator.durations.latency_model import RooflineLatency
from stepsight.simulator.iteration.simulate import simulate
from stepsight.simulator.memory import estimate_memory
from stepsight.simulator.programs.sizes import rank_shape
from tests.dataset.job.test_sharding_plans import tables_of_job
from tests.simulator.blocks.shapes import collectives, flops, ops

EXAMPLE = Path(__file__).parents[3] / "examples" / "dlrm-dcnv2-64h100.toml"


def test_the_reference_model_has_its_flop() -> None:
    """MLPerf's DLRM-DCNv2: three cross layers of rank 512 on 27 vectors of 128, and both MLPs."""
    shape, width = rank_shape(Job.of(EXAMPLE)), 27 * 128
    bottom = 13 * 512 + 512 * 256 + 256 * 128
    top = width * 1024 + 1024 * 1024 + 1024 * 512 + 512 * 256 + 256
    assert flops(dlrm_embedding(shape), "linear") == 2 * shape.rows * bottom
    assert flops(dlrm_layer(shape, "cross"), "linear") == 4 * shape.rows * width * 512
    assert flops(dlrm_head(shape), "linear") == 2 * shape.rows * top


def test_dot_multiplies_all_pairs() -> None:
    shape = rank_shape(Job.from_dict(tables_of_job()))
    assert flops(dlrm_layer(shape, "dot"), "batched_matmul") == 3 * 2 * 64 * 3 * 3 * 64


def test_sums_travel_as_the_largest_sent_or_received() -> None:
    """One table of 4 ranks: its rank sends sums to all, the others receive their part."""
    tables = [{"rows": 10_000, "dim": 64, "pooling": 4.0}]
    job = Job.from_dict(tables_of_job(tables, sharding={"rule": "table-wise"}))
    block = dlrm_embedding(rank_shape(job))
    (sums, back), (indices,) = collectives(block, "ep"), collectives(block, "cp")
    assert sums == back == Collective("all_to_all", 256 * 64 * 4, 4, 4)
    assert indices.num_bytes == 8 * 256 * 4


def test_alone_nothing_is_exchanged() -> None:
    tables = tables_of_job(cluster={"hardware": "v100-sxm-32gb", "devices_per_node": 1})
    block = dlrm_embedding(rank_shape(Job.from_dict({**tables, "batch": {"micro_batch": 8, "global_batch": 8}})))
    assert not collectives(block, "ep") and {op.kind for op in ops(block)} >= {"table_lookup"}


@pytest.mark.parametrize("rule", ["auto", "table-wise", "row-wise", "column-wise", "data-parallel"])
def test_the_breakdown_adds_up(rule: str, gpu: Hardware) -> None:
    job = Job.from_dict(tables_of_job(sharding={"rule": rule, "replicate_mbytes": 0.0}))
    found = simulate(job, RooflineLatency(gpu, job.fabric))
    assert sum(found.breakdown.values()) == pytest.approx(found.iteration_time_s)
    assert min(found.breakdown.values()) >= 0 and found.breakdown["lookups"] > 0


def test_tables_take_memory_where_they_lie(gpu: Hardware) -> None:
    """All in the device's memory, a fifth in its cache, or nothing."""
    found = []
    for location in ("hbm", "uvm", "host"):
        tables = [{"rows": 10**6, "dim": 64}]
        job = Job.from_dict(tables_of_job(tables, sharding={"rule": "row-wise", "location": location}))
        found.append(estimate_memory(job, gpu).stages[0].parameters)
    assert found[0] - found[2] == 10**6 * 64 * 4 / 4 and found[1] - found[2] == pytest.approx(
        0.2 * (found[0] - found[2])
    )


def test_indices_of_the_next_batch_travel_beside(gpu: Hardware) -> None:
    job = Job.from_dict(tables_of_job(sharding={"rule": "table-wise"}))
    slow = replace(job, sharding=replace(job.sharding, pipelined=False))
    fast, plain = (simulate(one, RooflineLatency(gpu, job.fabric)) for one in (job, slow))
    assert fast.iteration_time_s < plain.iteration_time_s
    assert plain.breakdown["index_exchange"] > fast.breakdown["index_exchange"]


def test_what_does_not_fit_is_told_by_rank_and_table(gpu: Hardware) -> None:
    tables = [{"name": f"own{at}", "rows": 60_000_000, "dim": 128, "pooling": 1.0} for at in range(5)]
    job = Job.from_dict(tables_of_job(tables, sharding={"rule": "table-wise"}))
    reason = estimate_memory(job, replace(gpu, memory_bytes=32e9)).reason
    assert "; rank 0 has 61.9 GB of tables, most in own4 31.0, own0 31.0" in reason
