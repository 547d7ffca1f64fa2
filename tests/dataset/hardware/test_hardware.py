"""Hardware facts and what follows from them."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.base.files import preset
from stepsight.dataset.hardware.hardware import (
    FABRICS,
    HARDWARE,
    alpha_beta_seconds,
    canonical_hardware,
    fabric_from_dict,
    find_fabric,
    find_hardware,
    hardware_from_dict,
    read_fabric_words,
    roofline_seconds,
    suspicious_links,
    usual_fabric,
)
from stepsight.dataset.hardware.hardware_facts import LaunchCalls
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.training.prediction.prediction import predict


def test_presets_are_sound() -> None:
    """Every preset can be built, and round-trips."""
    for name in HARDWARE.names():
        hardware = find_hardware(name)
        assert hardware is not None and hardware_from_dict(hardware.to_dict()) == hardware and hardware.source
    for name in FABRICS.names():
        assert find_fabric(name).intra_node.bandwidth_bytes_per_s > 0
    assert find_hardware("abacus") is None


# Their chips double nothing in 16 or 8 bits, have no fp16, or come without a usual fabric.
OTHERS = ("apple", "ascend", "gaudi3", "mi250x", "rtx", "a10g", "tpu")


@pytest.mark.parametrize("name", [name for name in HARDWARE.names() if find_hardware(name).kind == "gpu"])
def test_presets_of_gpus(name: str) -> None:
    """Half-precision peaks are dense and above fp32; the usual fabric exists and looks like one device's links."""
    hardware = find_hardware(name)
    assert hardware is not None
    named = float(name.split("-")[-1].removesuffix("gb"))
    assert 0.97 * named <= hardware.memory_bytes / 2**30 <= 1.02 * named or named <= hardware.memory_bytes / 1e9
    if name.startswith(OTHERS):
        return
    peaks = hardware.peak_flops
    assert (1.9 if name.startswith("p100") else 3.9) <= peaks["fp16"] / peaks["fp32"] <= 32  # no tensor cores
    assert "fp8" not in peaks or 1.9 <= peaks["fp8"] / peaks["bf16"] <= 2.1
    if not name.startswith("gh200"):  # whose owners join them in their own ways
        assert not suspicious_links(find_fabric(usual_fabric(name)), 8)


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("H100", "h100-sxm-80gb"),
        ("A100-SXM4-80GB", "a100-sxm-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090-24gb"),
        ("AMD Instinct MI300X", "mi300x-192gb"),
        ("TPU v5p", "tpu-v5p-95gb"),
        ("a100-sxm-40gb", "a100-sxm-40gb"),
        ("my-gpu", "my-gpu"),
        ("T4", "t4-pcie-16gb"),
        ("Tesla P100", "p100-pcie-16gb"),
        ("v100", "v100-sxm-32gb"),
        ("rtx", "rtx"),  # of which there are several
    ],
)
def test_usual_words_for_devices(said: str, meant: str) -> None:
    assert canonical_hardware(said) == meant
    assert _job(said, fabric="dgx-a100").cluster.hardware == meant


def _job(hardware: object, **cluster: object) -> Job:
    return Job.of(
        {
            "model": {"name": "gpt2-124m"},
            "batch": {"micro_batch": 1, "global_batch": 8, "precision": "bf16"},
            "cluster": {"hardware": hardware, "nodes": 1, "devices_per_node": 8, **cluster},
        }
    )


def test_aliases_name_presets() -> None:
    aliases = preset("hardware.toml")["alias"]
    assert set(aliases.values()) <= set(HARDWARE.names())


def test_hardware_stated_in_the_job() -> None:
    """A table of facts in the job file is a device of its own, with memory and speed; the job's tables read back."""
    facts = {
        "name": "mine",
        "kind": "gpu",
        "peak_flops": {"bf16": 4e14, "fp32": 5e13},
        "memory_bandwidth_bytes_per_s": 3e12,
        "memory_bytes": 8e10,
    }
    links = {
        "intra_node": {"bandwidth_gbytes_per_s": 300.0, "latency_us": 5.0},
        "inter_node": {"bandwidth_gbytes_per_s": 25.0, "latency_us": 10.0},
    }
    job = _job(facts, fabric=links)
    assert job.hardware_name == "mine" and Job.of(job.to_dict()) == job
    assert predict(job).memory.capacity_bytes == pytest.approx(8e10)
    with pytest.raises(JobError, match=r"cluster.hardware: hardware mine: flops must be left out; the fields are"):
        _job({**facts, "flops": 1}, fabric=links)
    with pytest.raises(JobError, match=r"'h100-sxm-80gb' is the name of a known hardware"):
        _job({**facts, "name": "h100-sxm-80gb"}, fabric=links)


@pytest.mark.parametrize(
    ("intra", "inter", "said"),
    [
        (900.0, 50.0, "intra_node.* 2 times .*both directions together"),
        (450.0, 400.0, "inter_node.* 8 times .*a node's, of 8 devices or in Gbit/s"),
        (450.0, 50.0, ""),
        (450.0, 25.0, ""),
    ],
)
def test_links_that_are_not_one_devices(intra: float, inter: float, said: str) -> None:
    """Multiples of what the devices usually have are both directions, a node's, or bits."""
    links = {
        "intra_node": {"bandwidth_gbytes_per_s": intra, "latency_us": 5.0},
        "inter_node": {"bandwidth_gbytes_per_s": inter, "latency_us": 10.0},
    }
    warnings = _job("h100", fabric=links).warnings
    assert len(warnings) == bool(said) and all(re.search(said, warning) for warning in warnings)


def test_an_adapter_that_is_slower_than_one_device_has_no_effect() -> None:
    intra, inter = (
        {"bandwidth_gbytes_per_s": 450.0, "latency_us": 5.0},
        {"bandwidth_gbytes_per_s": 25.0, "latency_us": 9.0},
    )
    shared, slow = (
        _job("h100", fabric={"intra_node": intra, "inter_node": {**inter, "adapter_gbytes_per_s": speed}}).warnings
        for speed in (50.0, 12.5)
    )
    assert not shared and len(slow) == 1 and "adapter_gbytes_per_s has no effect" in slow[0]


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


def test_a_link_is_refused_in_the_units_that_the_user_wrote() -> None:
    link = {"bandwidth_gbytes_per_s": 0, "latency_us": 5}
    with pytest.raises(JobError, match=r"fabric.intra_node.bandwidth_gbytes_per_s must be .* from 1e-06 .*, got 0"):
        fabric_from_dict("f", {"intra_node": link, "inter_node": link})


def test_of_an_all_to_all_only_what_is_for_other_nodes_leaves_a_node() -> None:
    """8 of 16 parts over the network, or 7 of 16 within the node if these take longer."""
    link = {"latency_us": 0}
    for within, expected in ((4, 8 / 16), (0.5, 7 / 16 / 0.5)):
        table = {"intra_node": {"bandwidth_gbytes_per_s": within, **link},
                 "inter_node": {"bandwidth_gbytes_per_s": 1, **link}}  # fmt: skip
        seconds = alpha_beta_seconds(Collective("all_to_all", 10**9, 16, 8), fabric_from_dict("f", table))
        assert seconds == pytest.approx(expected)


def test_a_power_limit_lowers_the_clock_by_the_cube_root_of_the_excess() -> None:
    """Of what depends on the clock: of 500 and 600 W, 400 and 500 W do if 100 W never do."""
    gpu = replace(HARDWARE["h100-sxm-80gb"], idle_w=0.0)
    limited = replace(gpu, power_w=500.0, product_power_w={"bf16": 500.0 * 1.1**3, "fp8": 1e5})
    assert limited.power_slowdown("fp16") == pytest.approx(1.1)
    assert limited.power_slowdown("nvfp4") == 1.5
    assert replace(limited, power_w=1000.0).power_slowdown("bf16") == 1.0
    assert replace(limited, product_power_w={}).power_slowdown("bf16") == 1.0
    idle = replace(limited, idle_w=100.0, product_power_w={"bf16": 600.0})
    assert idle.power_slowdown("bf16") == pytest.approx(1.25 ** (1 / 3))


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
        roofline_seconds(Op("linear", (1, 1, 1), "fp8"), hardware)


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


def test_a_near_miss_of_the_usual_words() -> None:
    with pytest.raises(JobError, match=r"'H10O' \(did you mean 'h100'"):
        predict(_job("H10O", fabric="dgx-h100"))


@pytest.mark.parametrize(
    ("fact", "rule"),
    [
        ("peak_flops = { bf16 = 400.0 }", "peak_flops.bf16 is in FLOP/s, .*write 400e9 or 400e12"),
        ("peak_flops = { bfloat16 = 4e14 }", "peak_flops must name dtypes of .*got bfloat16"),
        ("memory_bytes = 80", "memory_bytes is in byte"),
        ("l2_bytes = 1e8", "l2_bytes must be left out; the fields are"),
        ("dispatch_calls = 195", "dispatch_calls must be left out; the fields are"),
    ],
)
def test_facts_in_other_units_or_words_are_refused(tmp_path: Path, fact: str, rule: str) -> None:
    """Of a file: a datasheet's numbers are in TFLOP/s and Gbyte."""
    facts = {"peak_flops": "{ bf16 = 4e14 }", "memory_bandwidth_bytes_per_s": "3e12", "memory_bytes": "8e10"}
    facts |= dict([fact.split(" = ", 1)])
    path = tmp_path / "gpu.toml"
    path.write_text("[hardware.mine]\nkind = 'gpu'\n" + "".join(f"{key} = {value}\n" for key, value in facts.items()))
    with pytest.raises(JobError, match=rule):
        find_hardware(str(path))


def test_a_dispatchers_host_takes_its_calls_and_a_launch_for_each_expert() -> None:
    """Other ops take one launch, and so do all without a dispatcher."""
    plain = find_hardware("h100-sxm-80gb")
    assert plain is not None
    permute, experts, norm = (
        Op("permute", (64, 32, 8)),
        Op("grouped_linear_dgrad", (16, 64, 8, 8)),
        Op("rms_norm", (8, 8)),
    )
    calls = LaunchCalls(dispatch=195.0)
    assert [plain.launch_s(op, calls) / plain.host_op_s for op in (permute, experts, norm)] == [
        195.0,
        16.0,
        1.0,
    ]
    assert {plain.launch_s(op) for op in (permute, experts, norm)} == {plain.host_op_s}


def test_a_backward_of_lookups_takes_the_time_of_all_its_kernels() -> None:
    """Of small batches hardly more: 14 to 20 kernels take 71 to 176 us in a public trace of eight V100."""
    gpu, cpu = find_hardware("v100-sxm-32gb"), find_hardware("local-cpu")
    assert gpu is not None and cpu is not None
    forward = Op("table_lookup", (768, 16, 384, 768, 3), "fp32")
    back = Op("table_lookup_backward", (*forward.dims, 16), "fp32")
    assert gpu.latency_s(back) == 15 * gpu.op_latency_s and cpu.latency_s(back) == cpu.latency_s(forward)
    assert gpu.launch_s(back) == 15 * gpu.launch_s(forward) == 15 * gpu.host_op_s
    assert 71e-6 < roofline_seconds(back, gpu) < 98e-6


def test_long_sums_take_a_load_for_each_of_their_rows() -> None:
    """13,312 rows of 100 and of 2 a sum took 66 us on a V100, where 768 rows of 2 took 7."""
    gpu = find_hardware("v100-sxm-32gb")
    assert gpu is not None
    seconds = [roofline_seconds(Op("table_lookup", (each, 16, 128, each, 1), "fp32"), gpu) for each in (256, 12800)]
    assert 5e-6 < seconds[0] < 8e-6 and 55e-6 < seconds[1] < 70e-6


@pytest.mark.parametrize(
    ("text", "hardware", "preset"),
    [
        ("dgx-a100", "a100-sxm-80gb", "dgx-a100"),
        ("NCCL over TCP sockets", "h100-sxm-80gb", "sockets-100g-h100"),
        ("EFA, 3200 Gbps", "h100-sxm-80gb", "aws-p5"),
        ("HPE Slingshot-11", "a100-sxm-80gb", "slingshot-11-a100"),
        ("8x400Gb/s IB per node (DGX reference)", "a100-sxm-80gb", ""),
        ("RoCE 400 Gb/s per GPU (3-layer Clos, 24K cluster)", "a100-sxm-80gb", ""),
        ("400G RoCE over Ethernet", "a100-sxm-80gb", ""),
        ("2xHDR100, 1.6Tb/s, RoCE v2", "a100-sxm-80gb", ""),
    ],
)
def test_words_for_a_fabric_name_its_preset(text: str, hardware: str, preset: str) -> None:
    """InfiniBand and RoCE name none: they are what the devices usually have."""
    found = read_fabric_words(text, hardware)
    assert found[1] == "" and (found[0][:1] or ("",))[0] == preset


def test_words_that_are_not_understood_are_said_with_the_nearest_presets() -> None:
    found = read_fabric_words("2x carrier pigeons, efaa", "a100-sxm-80gb")
    assert found[0] == () and "not understood (carrier, pigeons, efaa)" in found[1]
    assert "aws-p4d" in found[1] and "dgx-a100" in found[1]
    for text, word in (("100 Gb/s Ethernet", "ethernet"), ("100GbE", "gbe"), ("8x25GbE", "gbe")):
        found = read_fabric_words(text, "a100-sxm-80gb")
        assert f"not understood ({word})" in found[1] and "roce-400-a100, sockets-100g-a100" in found[1]


def test_unknown_keys_of_a_fabric_are_named_whatever_their_types() -> None:
    with pytest.raises(JobError, match="got also 1, a"):
        fabric_from_dict("mine", {1: {}, "a": {}})  # type: ignore[dict-item]
