"""Installed packages bring things by entry point; job files bring hardware, fabrics and frameworks by path."""

import sys
import tomllib
from pathlib import Path

import pytest

from stepsight import Job, predict
from stepsight.dataset.base.caching import clear_caches
from stepsight.dataset.base.errors import JobError
from stepsight.dataset.base.registry import Registry
from stepsight.dataset.hardware.hardware import FABRICS, HARDWARE, find_hardware
from stepsight.dataset.job.frameworks import FRAMEWORKS, find_framework
from stepsight.dataset.job.schedules import SCHEDULES
from stepsight.dataset.job.specs import FAMILIES
from stepsight.dataset.kinds import COLLECTIVE_KINDS, OP_KINDS
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.dataset.tables.formats import FORMATS
from stepsight.dataset.traces.import_traces import TRACE_READERS

REGISTRIES: dict[str, Registry[object]] = {
    "stepsight.hardware": HARDWARE,
    "stepsight.fabrics": FABRICS,
    "stepsight.frameworks": FRAMEWORKS,
    "stepsight.families": FAMILIES,
    "stepsight.schedules": SCHEDULES,
    "stepsight.op_kinds": OP_KINDS,
    "stepsight.collective_kinds": COLLECTIVE_KINDS,
    "stepsight.trace_readers": TRACE_READERS,
    "stepsight.table_readers": FORMATS,
}  # type: ignore[dict-item]
CODE = """
from dataclasses import replace
from stepsight.dataset.job.frameworks import find_framework
from stepsight.dataset.hardware.hardware import find_fabric, find_hardware
from stepsight.dataset.kinds import COLLECTIVE_KINDS, OP_KINDS
from stepsight.dataset.job.schedules import SCHEDULES
from stepsight.dataset.tables.formats import FORMATS
from stepsight.simulator.blocks.family import find_family

hardware = replace(find_hardware("a100-sxm-80gb"), name="lab_thing")
fabrics = replace(find_fabric("dgx-a100"), name="lab_thing")
frameworks = replace(find_framework("megatron-lm"), name="lab_thing", words=("labtrain",))
families = find_family("gpt")
schedules = replace(SCHEDULES["gpipe"])
op_kinds = replace(OP_KINDS["gelu"], name="lab_thing", code=-1, calls={}, in_harness=False)
collective_kinds = replace(COLLECTIVE_KINDS["broadcast"], name="lab_thing2", code=-1)
table_readers = FORMATS["csv"]
def trace_readers(path, placement): ...
"""
JOB = """
framework = "{framework}"
[model]
family = "{family}"
layers = 2
hidden = 256
heads = 4
vocab = 1024
seq_len = 128
[parallel]
pp = 2
schedule = "{schedule}"
[batch]
micro_batch = 1
global_batch = 8
[cluster]
hardware = "{hardware}"
devices_per_node = 8
{fabric}
"""
GPU = """
[hardware.lab-gpu]
kind = "gpu"
peak_flops = { bf16 = 100e12, fp32 = 20e12 }
memory_bandwidth_bytes_per_s = 1e12
memory_bytes = 40e9
"""
LINKS = """
[fabric.lab-links]
intra_node = { bandwidth_gbytes_per_s = 100.0, latency_us = 5.0 }
inter_node = { bandwidth_gbytes_per_s = 10.0, latency_us = 10.0 }
"""


def _text(**changes: str) -> str:
    table = {"framework": "", "family": "gpt", "schedule": "1f1b", "hardware": "a100-sxm-80gb", "fabric": ""}
    return JOB.format(**{**table, **changes})


def _name(group: str) -> str:
    return "lab_thing2" if group == "stepsight.collective_kinds" else "lab_thing"


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Install a package with an entry point in every group."""
    (tmp_path / "lab.py").write_text(CODE)
    info = tmp_path / "lab-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lab\nVersion: 1\n")
    points = "".join(f"[{group}]\n{_name(group)} = lab:{group.split('.')[1]}\n" for group in REGISTRIES)
    (info / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(tmp_path)
    clear_caches()
    yield
    monkeypatch.undo()
    sys.modules.pop("lab", None)
    for registry in REGISTRIES.values():
        for name in [name for name, package in registry._added.items() if package]:
            registry._remove(name)
        assert not any("lab" in name for name in registry.names())


@pytest.mark.parametrize("group", REGISTRIES)
def test_a_package_brings_a_thing_in_every_group(lab: None, group: str) -> None:
    registry, name = REGISTRIES[group], _name(group)
    assert registry.group == group
    assert name in registry.names() and name not in list(registry) and "lab" not in sys.modules
    assert registry[name] is getattr(sys.modules["lab"], group.split(".")[1])


def test_jobs_use_what_packages_bring(lab: None, tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    fabric = 'fabric = "lab_thing"'
    path.write_text(
        _text(framework="LabTrain 2", family="lab_thing", schedule="lab_thing", hardware="lab_thing", fabric=fabric)
    )
    job = Job.from_file(path)
    assert find_framework("LabTrain 2").name == "lab_thing" and not job.warnings
    assert predict(job).iteration_time_s > 0
    assert Op("lab_thing", (8,)).flops == Op("gelu", (8,)).flops
    assert Collective("lab_thing2", 8, 2, 2).record.name == "lab_thing2"


def test_a_job_file_names_files_beside_it(tmp_path: Path) -> None:
    """One file for hardware and its usual fabric; one for other links; one for a framework's profile."""
    (tmp_path / "gpu.toml").write_text(GPU + LINKS)
    (tmp_path / "links.toml").write_text(LINKS.replace("100.0", "1.0"))
    (tmp_path / "train.toml").write_text("[labtrain]\ndropout = 0.1\n")
    path = tmp_path / "job.toml"
    path.write_text(
        _text(
            framework="train.toml",
            hardware="gpu.toml",
        )
    )
    job = Job.from_file(path)
    assert job.model.dropout == 0.1 and not job.warnings
    assert job.fabric.name == "lab-links" and job.fabric.intra_node.bandwidth_bytes_per_s == 1e11
    own = predict(job)
    assert own.predictor is None and "nothing was measured" in own.source
    path.write_text(_text(hardware="gpu.toml", fabric='fabric = "links.toml"'))
    slow = predict(Job.from_file(path))
    assert slow.job.fabric.intra_node.bandwidth_bytes_per_s == 1e9 and slow.iteration_time_s > own.iteration_time_s
    assert Job.from_dict(slow.job.to_dict()) == slow.job


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "gpu.toml"
    path.write_text(GPU)
    before = find_hardware(str(path))
    path.write_text(GPU.replace("100e12", "1100e12"))
    after = find_hardware(str(path))
    assert before is not None and after is not None and after.peak_flops["bf16"] == 11 * before.peak_flops["bf16"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "gpu.toml: cannot read it: No such file or directory$"),
        ("x =", "it is not valid TOML"),
        ("[gpu.a]\n", r"it must hold tables \[hardware.NAME\], \[fabric.NAME\], got 'gpu'"),
        ("hardware = 1\n", r"\[hardware.NAME\] must be a table, got 1"),
        (LINKS, "must hold exactly one hardware, got none"),
        (GPU + GPU.replace("lab-gpu", "other"), "must hold exactly one hardware, got lab-gpu, other"),
        (GPU.replace("memory_bytes = 40e9", "memory = 1"), "memory_bytes must be stated and memory must be left out"),
        (GPU.replace("40e9", "'40 GB'"), "memory_bytes must be a number from 1 to 1e.18, got '40 GB'"),
        (GPU.replace('"gpu"', '"tpu"'), "kind must be gpu or cpu, got 'tpu'"),
        (GPU.replace("lab-gpu", "a100-sxm-80gb"), "'a100-sxm-80gb' is already the name of a known hardware"),
        (GPU, r"cluster.fabric must be stated, .* a \[fabric.NAME\] in its file, or a table of links"),
    ],
)
def test_a_wrong_file_of_hardware_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "gpu.toml").write_text(text)
    path = tmp_path / "job.toml"
    path.write_text(
        _text(
            hardware="gpu.toml",
        )
    )
    with pytest.raises(JobError, match=message):
        Job.from_file(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[a]\n[b]\n", "must hold exactly one profile, got a, b"),
        ("", r"job.toml: \S*train.toml must hold exactly one profile, got none"),
        ("dropout = 0.1\n", r"\[dropout\] must be a table, got 0.1"),
        ("[a]\ndropout = 'much'\n", "framework.a.dropout must be a number, got 'much'"),
        ("[a]\nspeed = 1\n", "unknown key framework.a.speed"),
    ],
)
def test_a_wrong_profile_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "train.toml").write_text(text)
    path = tmp_path / "job.toml"
    path.write_text(
        _text(
            framework="train.toml",
        )
    )
    with pytest.raises(JobError, match=message):
        Job.from_file(path)


def test_unknown_names_are_answered_with_known_ones() -> None:
    text = _text(
        hardware="a100-smx-80gb",
    )
    tables = tomllib.loads(text)
    with pytest.raises(JobError, match=r"hardware must be one of .*got 'a100-smx-80gb' \(did you mean 'a100-sxm-80gb'"):
        predict(Job.from_dict(tables))
    tables["cluster"]["fabric"] = "dgx-a10"
    with pytest.raises(JobError, match=r"fabric must be one of .* table of links.* 'dgx-a10' \(did you mean"):
        Job.from_dict(tables)
    tables["cluster"]["fabric"], tables["model"]["family"] = "dgx-a100", "lama"
    with pytest.raises(JobError, match=r"model.family must be one of gpt.* got 'lama' \(did you mean 'llama'\?\)"):
        Job.from_dict(tables)
