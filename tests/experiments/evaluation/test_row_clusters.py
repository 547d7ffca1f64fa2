"""What ran a row: devices, networks, and recipes of Megatron-Bridge."""

from __future__ import annotations

from typing import Any

import pytest

from stepsight.dataset.job.specs import DISPATCHERS, RECOMPUTE_MODULES
from stepsight.experiments.evaluation.row_jobs import cluster_of, framework_of
from stepsight.experiments.evaluation.runs_table import DEGREES, RowError, find_recipe, recipe_habits, recipes
from tests.experiments.evaluation.run_tables import job_of, run_row


@pytest.mark.parametrize(
    ("hardware", "memory", "name"),
    [
        ("A100-SXM", 40, "a100-sxm-40gb"),
        ("A100-SXM", "", "a100-sxm-80gb"),
        ("A100-PCIe", 80, "a100-pcie-80gb"),
        ("H100 96GB HBM2e (2.4 TB/s), 500 W limit, Grand Teton", 96, "h100-sxm-96gb"),
        ("V100-SXM3 (DGX-2)", 32, "v100-sxm-32gb"),
        ("h200-sxm-141gb", "", "h200-sxm-141gb"),
        ("NVIDIA A100-SXM4-40GB", "", "a100-sxm-40gb"),
        ("NVIDIA H100 80GB HBM3", 80, "h100-sxm-80gb"),
        ("A100 (PCIe)", "", "a100-pcie-80gb"),
    ],
)
def test_devices(hardware: str, memory: object, name: str) -> None:
    """Words, size of the memory, or a preset's own name."""
    assert cluster_of(run_row(hardware=hardware, gpu_mem_gb=memory))["hardware"] == name


@pytest.mark.parametrize(
    ("hardware", "text", "gbytes_per_s"),
    [
        ("A100-SXM", "8x 200 Gb/s HDR IB per node (Selene; paper)", 25.0),
        ("A100-SXM", "4 x 100Gb RoCE per node", 6.25),
        ("A100-SXM", "400 Gbps per node", 6.25),
        ("A100-SXM", "config: inter_node_bandwidth=800 Gbps", 12.5),
        ("A100-SXM", "1600 Gbps node-node interconnect (RoCE)", 25.0),
        ("A100-SXM", "Jean Zay Omni-Path 4x100 Gb/s", 2.53),
        ("A100-SXM", "aws-p4d", 6.25),
        ("A100-SXM", "EFA", 6.25),
        ("A100-SXM", "NCCL over TCP sockets", 1.25),
        ("A100-SXM", "", 25.0),
        ("H100-SXM", "8x 400 Gbit/s InfiniBand per node", 50.0),
        ("H100-SXM", "400 Gb/s RDMA per GPU", 50.0),
        ("H100-SXM", "1600 Gbps node-node interconnect (RoCE)", 25.0),
    ],
)
def test_networks(hardware: str, text: str, gbytes_per_s: float) -> None:
    """Gbit/s of a node's ports, or of one device where it says so, are Gbyte/s of one device."""
    fabric = job_of(run_row(hardware=hardware, inter_interconnect=text)).job.fabric
    assert fabric.inter_node.bandwidth_bytes_per_s == pytest.approx(gbytes_per_s * 1e9)


@pytest.mark.parametrize(("day", "gbytes_per_s"), [("02-20", 1.27), ("02-24", 1.27), ("02-25", 2.53), ("02-27", 2.53)])
def test_a_network_before_its_nodes_were_mended(day: str, gbytes_per_s: float) -> None:
    row = run_row(inter_interconnect="Jean Zay Omni-Path 4x100 Gb/s", notes=f"layers inferred; date {day}; vocab ~250k")
    assert job_of(row).job.fabric.inter_node.bandwidth_bytes_per_s == pytest.approx(gbytes_per_s * 1e9)


@pytest.mark.parametrize(
    ("changes", "nodes"),
    [({}, (2, 8)), ({"nodes": "", "gpus_per_node": ""}, (2, 8)), ({"gpus": 4, "nodes": 1}, (1, 4))],
)
def test_nodes(changes: dict[str, Any], nodes: tuple[int, int]) -> None:
    """Nodes of eight where a table does not say; a part of a node is one node."""
    cluster = cluster_of(run_row(**changes))
    assert (cluster["nodes"], cluster["devices_per_node"]) == nodes


def test_nvlink_beyond_a_node() -> None:
    """Trays of four share NVLink with the rest of their rack: these are the nodes that matter."""
    cluster = cluster_of(run_row(hardware="GB200", gpu_mem_gb=186, gpus=128, nodes=32, gpus_per_node=4))
    assert (cluster["nodes"], cluster["devices_per_node"]) == (2, 64)


def test_unknown_devices() -> None:
    """No preset, no job: what is nearly a device, or another one of its name, is none."""
    for hardware in ("MI250", "A4000", "h100-quux", "A1000", ""):
        with pytest.raises(RowError, match="no hardware preset for"):
            cluster_of(run_row(hardware=hardware))
    with pytest.raises(RowError, match=r"'A100' of 60 GB \(known: a100-sxm-40gb, a100-sxm-80gb\)"):
        cluster_of(run_row(hardware="A100", gpu_mem_gb=60))
    with pytest.raises(RowError, match="state different memories"):
        cluster_of(run_row(hardware="A100-SXM4-40GB", gpu_mem_gb=80))
    with pytest.raises(RowError, match="gpus_per_node must divide gpus, got"):
        cluster_of(run_row(gpus=12, nodes=""))


@pytest.mark.parametrize(
    "changes",
    [{"nodes": 4}, {"gpus_per_node": 4}, {"nodes": 3, "gpus_per_node": ""}, {"nodes": 0}, {"gpus": 8, "nodes": 2}],
)
def test_nodes_that_contradict_each_other_are_no_cluster(changes: dict[str, Any]) -> None:
    with pytest.raises(RowError, match=r"nodes \* gpus_per_node must be gpus, got "):
        cluster_of(run_row(**changes))


def recipe(model: str, hardware: str, precision: str, release: str, **degrees: int) -> dict[str, str] | None:
    cells = {"tp": 1, "pp": 1, "vp": "", "ep": 1, "micro_batch": "", **degrees}
    software = f"{release} NeMo Container"
    return find_recipe(run_row(model_name=model, hardware=hardware, precision=precision, framework=software, **cells))


def test_every_line_is_one_that_a_job_can_say() -> None:
    for line in recipes():
        assert line["dispatcher"] in DISPATCHERS and line["graphs"] in ("none", "router", "parts", "whole")
        assert set(line["recompute"].split()) <= set(RECOMPUTE_MODULES)
        assert line["overlap"] in ("yes", "no") and all(line[key].isdigit() for key in DEGREES)
    assert [line["release"] for line in recipes()] == sorted(line["release"] for line in recipes())


@pytest.mark.parametrize(
    ("release", "dispatcher"), [("26.02", "alltoall"), ("26.04", "hybridep"), ("26.06", "alltoall")]
)
def test_the_newest_one_up_to_a_release_counts(release: str, dispatcher: str) -> None:
    """GPT-OSS on B200 sent copies, then tokens once, then copies again."""
    found = recipe("gptoss120b", "B200", "BF16", release, ep=8, micro_batch=4)
    assert found is not None and recipe_habits(found)["recompute_modules"] == ("layernorm", "moe_act")
    if release != "26.02":
        assert found["dispatcher"] == dispatcher


def test_degrees_tell_variants_apart() -> None:
    """Virtual stages mark the recipe for B300 that overlapped."""
    overlapped = recipe("qwen3235ba22b", "B300", "MXFP8", "26.02.01", pp=8, vp=4, ep=8, micro_batch=1)
    plain = recipe("qwen3235ba22b", "B300", "MXFP8", "26.04", pp=8, ep=8, micro_batch=2)
    assert overlapped is not None and overlapped["overlap"] == "yes" and overlapped["dispatcher"] == "alltoall"
    assert plain is not None and plain["overlap"] == "no"


def test_whole_graphs_fuse_experts_and_leave_the_host_nothing() -> None:
    whole = recipe("qwen330ba3b", "GB300", "MXFP8", "26.06", ep=8, micro_batch=8)
    assert whole is not None
    assert recipe_habits(whole) == {
        "dispatcher": "hybridep", "overlap_ep": True, "fused_experts": True, "dispatch_calls": 0.0, "op_calls": 1.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("device", "precision", "free"), [("GB200", "BF16", True), ("GB200", "MXFP8", False), ("GB300", "MXFP8", False)]
)
def test_a_host_launches_attention_that_graphs_of_a_router_leave_out(device: str, precision: str, free: bool) -> None:
    found = recipe("qwen330ba3b", device, precision, "26.04", ep=8, micro_batch=4 if device == "GB200" else 8)
    assert found is not None and found["graphs"] == ("parts" if free else "router")
    assert ("dispatch_calls" in recipe_habits(found)) == free


def test_hosts_launch_as_before_where_a_release_with_whole_graphs_has_none() -> None:
    """In 8 bits with one scale a tensor, releases since 26.06 have no graphs on H100; in MXFP8 the iteration is one."""
    cells = {"model_name": "Qwen3_30B_a3B", "framework": "26.06 NeMo Container", "tp": 1, "pp": 1, "vp": 1}
    eager = framework_of(run_row(**cells, hardware="H100-SXM", precision="FP8", ep=16, micro_batch=1))
    whole = framework_of(run_row(**cells, hardware="GB300", precision="MXFP8", ep=8, micro_batch=8))
    assert (eager.op_calls, eager.dispatch_calls, eager.overlap_ep) == (3.0, 195.0, False)
    assert (whole.op_calls, whole.dispatch_calls, whole.overlap_ep) == (1.0, 0.0, True)


@pytest.mark.parametrize(("model", "release"), [("llama370b", "26.02"), ("qwen330ba3b", "25.09"), ("qwen330ba3b", "")])
def test_other_models_and_earlier_runs_have_none(model: str, release: str) -> None:
    assert recipe(model, "GB200", "MXFP8", release) is None
