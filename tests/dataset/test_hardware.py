"""Hardware facts and what follows from them."""

from dataclasses import replace

import pytest

from stepsight.dataset.errors import JobError
from stepsight.dataset.hardware import (
    HARDWARE,
    fabric_from_dict,
    fabric_names,
    find_fabric,
    find_hardware,
    hardware_from_dict,
    hardware_names,
    suspicious_links,
    usual_fabric,
)
from stepsight.dataset.op import Collective, Op
from stepsight.dataset.physics import alpha_beta_seconds, roofline_seconds


def test_presets_are_sound() -> None:
    """Every preset can be built, and round-trips."""
    for name in hardware_names():
        hardware = find_hardware(name)
        assert hardware is not None and hardware_from_dict(hardware.to_dict()) == hardware and hardware.source
    for name in fabric_names():
        assert find_fabric(name).intra_node.bandwidth_bytes_per_s > 0
    assert find_hardware("abacus") is None


@pytest.mark.parametrize("name", [name for name in hardware_names() if find_hardware(name).kind == "gpu"])
def test_presets_of_gpus(name: str) -> None:
    """Half-precision peaks are dense and above fp32; the usual fabric exists and looks like one device's links."""
    hardware = find_hardware(name)
    assert hardware is not None
    peaks = hardware.peak_flops
    assert 3.9 <= peaks["fp16"] / peaks["fp32"] <= 32
    assert "fp8" not in peaks or 1.9 <= peaks["fp8"] / peaks["bf16"] <= 2.1
    named = float(name.split("-")[-1].removesuffix("gb"))
    assert 0.97 * named <= hardware.memory_bytes / 2**30 <= 1.02 * named or named <= hardware.memory_bytes / 1e9
    assert not suspicious_links(find_fabric(usual_fabric(name)), 8)


def test_usual_fabrics() -> None:
    """A card in a PCIe slot has no NVLink, whatever its chip; without a known fabric, a job must state one."""
    found = {name: usual_fabric(name) for name in ("a100-pcie-80gb", "h100-pcie-80gb", "h200-sxm-141gb", "local-cpu")}
    assert list(found.values()) == ["pcie-gen4", "pcie-gen5", "dgx-h100", "loopback"]
    mine = replace(HARDWARE["h100-sxm-80gb"], name="mine")
    with (
        HARDWARE.registered("mine", mine),
        pytest.raises(JobError, match=r"cluster.fabric must be stated.*'mine': name one of dgx-a100, .*file"),
    ):
        usual_fabric("mine")


def test_hardware_that_nobody_knows_is_named_before_its_fabric() -> None:
    with pytest.raises(JobError, match=r"^cluster.hardware must be one of .*'my-gpu'; .*cluster.fabric too"):
        usual_fabric("my-gpu")


def test_the_first_mistake_of_hardware_is_told_first() -> None:
    """Its name before its kind, its kind before its numbers."""
    facts = HARDWARE["h100-sxm-80gb"].to_dict()
    with pytest.raises(JobError, match="name of a hardware must be a printable text, got 7"):
        hardware_from_dict({**facts, "name": 7, "kind": "tpu", "memory_bytes": -1})
    with pytest.raises(JobError, match="hardware h100-sxm-80gb: kind must be gpu or cpu, got 'tpu'"):
        hardware_from_dict({**facts, "kind": "tpu", "memory_bytes": -1})


def test_ring_cost() -> None:
    """A ring all-reduce moves 2 (n - 1) / n of the buffer over the slowest link."""
    fabric = fabric_from_dict(
        "f",
        {
            "intra_node": {"bandwidth_gbytes_per_s": 10, "latency_us": 0},
            "inter_node": {"bandwidth_gbytes_per_s": 1, "latency_us": 0},
        },
    )
    within = alpha_beta_seconds(Collective("all_reduce", 10**9, 4, 4), fabric)
    across = alpha_beta_seconds(Collective("all_reduce", 10**9, 4, 1), fabric)
    assert within == pytest.approx(2 * 3 / 4 / 10) and across == pytest.approx(10 * within)


def test_all_nics_of_a_node_work_for_a_group() -> None:
    """Two ranks on each node leave through two links; eight are held back by the links within the node."""
    link = {"latency_us": 0}
    fabric = fabric_from_dict(
        "f",
        {"intra_node": {"bandwidth_gbytes_per_s": 4, **link}, "inter_node": {"bandwidth_gbytes_per_s": 1, **link}},
    )
    seconds = [alpha_beta_seconds(Collective("all_gather", 10**9, 16, n), fabric) for n in (1, 2, 4, 8)]
    assert seconds == pytest.approx([seconds[0] / n for n in (1, 2, 4, 4)])


def test_of_an_all_to_all_only_what_is_for_other_nodes_leaves_a_node() -> None:
    """8 of 16 parts over the network, or 7 of 16 within the node if these take longer."""
    link = {"latency_us": 0}
    for within, expected in ((4, 8 / 16), (0.5, 7 / 16 / 0.5)):
        table = {"intra_node": {"bandwidth_gbytes_per_s": within, **link},
                 "inter_node": {"bandwidth_gbytes_per_s": 1, **link}}  # fmt: skip
        seconds = alpha_beta_seconds(Collective("all_to_all", 10**9, 16, 8), fabric_from_dict("f", table))
        assert seconds == pytest.approx(expected)


def test_roofline() -> None:
    """A large product is bound by compute, a large copy by memory."""
    hardware = hardware_from_dict(
        {
            "name": "h",
            "kind": "gpu",
            "peak_flops": {"bf16": 1e12},
            "memory_bandwidth_bytes_per_s": 1e9,
            "memory_bytes": 1e9,
        }
    )
    assert roofline_seconds(Op("linear", (4096, 4096, 4096)), hardware) == pytest.approx(2 * 4096**3 / 1e12)
    assert roofline_seconds(Op("copy", (10**9,)), hardware) == pytest.approx(4.0)
    with pytest.raises(JobError, match="no peak for fp8"):
        roofline_seconds(Op("copy", (1,), "fp8"), hardware)


@pytest.mark.parametrize(
    "change",
    [
        {"peak_flops": {"bf16": 0}},
        {"memory_efficiency": 1.5},
        {"comm_compute_share": 2},
        {"compute_spread": -1},
        {"zoo": 1},
    ],
)
def test_bad_hardware(change: dict[str, object]) -> None:
    """Impossible facts are refused."""
    table = {
        "name": "h",
        "kind": "gpu",
        "peak_flops": {"bf16": 1e12},
        "memory_bandwidth_bytes_per_s": 1e9,
        "memory_bytes": 1e9,
    }
    with pytest.raises(JobError):
        hardware_from_dict({**table, **change})
