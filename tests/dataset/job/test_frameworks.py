"""Profiles of frameworks."""

from __future__ import annotations

import pytest

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.job.frameworks import (
    FRAMEWORKS,
    GENERIC,
    attention_of,
    find_framework,
    framework_from_dict,
    framework_in,
    plain_version,
    release_month,
    unknown_frameworks,
    version_numbers,
)
from stepsight.dataset.job.job import Job


def test_presets_are_sound() -> None:
    """Every preset can be built, says where it is known from, and is found by its own name."""
    assert len(FRAMEWORKS.names()) > 10
    for name in FRAMEWORKS.names():
        framework = find_framework(name)
        assert framework.name == name and (framework.words or framework is GENERIC) and len(framework.source) > 40
        assert all(word == word.lower() for word in framework.words)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Megatron-LM @6985e589", "megatron-lm"),
        ("Megatron-LM 2022", "megatron-lm-2022"),
        ("Megatron-LM 0.14 (no comm overlap) + TE 2.11", "megatron-core"),
        ("Megatron-DeepSpeed", "megatron-deepspeed"),
        ("Megatron-DeepSpeed (ZeRO-1 + PP)", "bloom"),
        ("DeepSpeed ZeRO-3", "deepspeed"),
        ("DeepSpeed ZeRO-3 2021", "deepspeed-2021"),
        ("DeepSpeed 2021-10", "deepspeed-2021"),
        ("DeepSpeed 2021-11", "deepspeed"),
        ("DeepSpeed 2023", "deepspeed"),
        ("2021 Megatron-DeepSpeed", "megatron-deepspeed"),
        ("NeMo (v25.02 recipes)", "nemo"),
        ("NeMo-Megatron", "nemo-2021"),
        ("MaxText (JAX) (v25.04 recipes)", "maxtext"),
        ("Composer + PyTorch FSDP, FlashAttention", "llm-foundry"),
        ("torchtitan (FSDP2)", "torchtitan"),
        ("PyTorch FSDP + torch.compile", "fms-fsdp"),
        ("InternEvo (FlashAttention, Apex)", "internevo"),
        ("NeMo25.04.rc2", "nemo"),
        ("my own trainer", "generic"),
        ("megatron-lmm", "generic"),
        ("ajax", "generic"),
        ("", "generic"),
    ],
)
def test_names_that_runs_use(text: str, name: str) -> None:
    """The first profile of which a word stands in the text; PyTorch's defaults for what nobody knows."""
    assert framework_in(text).name == name


def test_generations_of_attention() -> None:
    """Unfused attention keeps a score matrix; every generation of flash attention does not."""
    kernels = {name: find_framework(name) for name in ("bloom", "llm-foundry", "nemo")}
    assert [f.attention for f in kernels.values()] == ["unfused", "flash-1", "flash-3"]
    assert [f.fused_attention for f in kernels.values()] == [False, True, True]


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ({"zoo": 1}, "unknown key framework.mine.zoo"),
        ({"p2p": "half"}, "p2p must be one of full, scattered, got 'half'"),
        ({"attention": "flash-9"}, "attention must be one of unfused, flash-1"),
        ({"gradients": "fp8"}, "gradients must be one of"),
        ({"selective": "some"}, "selective must be one of"),
        ({"bucket_mbytes": 0}, "bucket_mbytes must be > 0"),
        ({"runtime": "mine"}, "runtime must be one of"),
        ({"until": "2021"}, "until must be a month as 2021-11, got '2021'"),
    ],
)
def test_bad_profiles(table: dict[str, object], text: str) -> None:
    """A profile that cannot be is refused with its rule."""
    with pytest.raises(JobError, match=text):
        framework_from_dict("mine", table)


def test_filling_twice_changes_nothing() -> None:
    """Also where selective recomputation becomes every second layer."""
    tables = {"model": {"vocab": 50257}, "parallel": {"tp": 8, "recompute": "selective"}}
    for name in FRAMEWORKS.names():
        framework = find_framework(name)
        once = framework.fill(tables)
        assert framework.fill(once) == once
        assert once["model"]["vocab"] % framework.vocab_multiple == 0
        every = once["parallel"].get("recompute_every", 1)
        assert (once["parallel"]["recompute"], every) == (
            ("full", 2) if framework.selective == "every-2nd-layer" else ("selective", 1)
        )
    assert tables["model"] == {"vocab": 50257}


def test_unknown_names() -> None:
    """Those that no profile knows are told together; an empty one is not named."""
    assert framework_in("mine") is GENERIC
    assert unknown_frameworks(["NeMo", "", "generic"]) == ""
    assert "framework 'mine', 'yours': generic" in unknown_frameworks(["mine", "NeMo", "yours"])


TABLES = {
    "model": {"name": "llama3-8b"},
    "batch": {"micro_batch": 1, "global_batch": 64},
    "cluster": {"hardware": "h100-sxm-80gb", "devices_per_node": 8},
}


@pytest.mark.parametrize(
    ("framework", "container", "date", "profile"),
    [
        ("nemo", "nvcr.io/nvidia/nemo:26.06.01", "", "nemo-2026-06"),
        ("NeMo", "", "2023-09", "nemo-2023"),
        ("nemo", "nvcr.io/nvidia/nemo:24.01", "", "nemo-2023"),
        ("nemo", "nvcr.io/nvidia/nemo:24.03", "", "nemo"),
        ("nemo", "nvcr.io/nvidia/nemo:24.07", "", "nemo"),
        ("torchtitan", "nvcr.io/nvidia/nemo:26.06", "", "torchtitan"),
        ("DeepSpeed", "", "2021-04", "deepspeed-2021"),
        ("deepspeed", "nvcr.io/nvidia/pytorch:21.04-py3", "", "deepspeed-2021"),
        ("deepspeed", "nvcr.io/nvidia/pytorch:21.04-py3", "2023-01", "deepspeed"),
        ("Megatron-LM", "", "2022-05", "megatron-lm-2022"),
        ("bloom", "", "2022", "bloom"),
        ("", "nvcr.io/nvidia/nemo:25.04", "", "nemo"),
        ("", "my/image", "", "generic"),
    ],
)
def test_container_and_date_choose_among_the_profiles_of_a_framework(
    framework: str, container: str, date: str, profile: str
) -> None:
    """They never replace the framework that is named."""
    assert framework_in(framework, container, date).name == profile


def test_job_takes_the_framework_of_its_container() -> None:
    """Where it names none; its open keys are those of the profile."""
    job = Job.from_dict({**TABLES, "execution": {"container": "nvcr.io/nvidia/nemo:26.06"}})
    assert job.framework == "nemo-2026-06" and job.profile == find_framework("nemo-2026-06")
    assert Job.from_dict(job.to_dict()) == job
    assert Job.from_dict({**TABLES, "execution": {"container": "my/image"}}).profile is None


def test_versions_and_dates_that_cannot_be_are_refused() -> None:
    """With the key, the form and the value."""
    for key, value, rule in (
        ("cuda", "twelve", "cuda must be a version"),
        ("nccl", "2.x", "nccl must be"),
        ("date", "July", "execution.date must be a year, a month or a day"),
        ("date", "2025-04-31", "execution.date must be a year, a month or a day"),
        ("date", "2025-13", "execution.date must be"),
    ):
        with pytest.raises(JobError, match=rule):
            Job.from_dict({**TABLES, "execution": {key: value}})
    stated = {"cuda": "12.4", "cublas": "12.4.5.8", "nccl": "2.27.3-1", "date": "2024-07-31"}
    assert Job.from_dict({**TABLES, "execution": stated}).execution.nccl == "2.27.3-1"


@pytest.mark.parametrize(
    ("text", "generation"),
    [
        ("unfused", "unfused"),
        ("FlashAttention-2", "flash-2"),
        ("flash-attn 2.5.8", "flash-2"),
        ("flash_attn v1.0.5", "flash-1"),
        ("FA3", "flash-3"),
        ("cuDNN 9.1", "flash-3"),
        ("cudnn", "flash-3"),
        ("triton", "flash-1"),
        ("sdpa", "flash-2"),
    ],
)
def test_attention_by_library(text: str, generation: str) -> None:
    """A library's name and version mean a generation of kernels."""
    assert attention_of(text) == generation


@pytest.mark.parametrize("text", ["flash-attn 4.0", "cuDNN 8.9", "xformers", "flash-attn"])
def test_unknown_attention_is_refused(text: str) -> None:
    """Neither an unknown version nor an unknown library is taken for its like."""
    with pytest.raises(JobError, match="attention must be unfused, FlashAttention 1 to 3"):
        attention_of(text)


def test_numbers_of_versions() -> None:
    """Versions compare by number, and tags of containers have the month of their release."""
    assert version_numbers("2.9.1") < version_numbers("2.27.3")
    assert release_month("nvcr.io/nvidia/pytorch:23.10-py3") == "2023-10" and release_month("mine:latest") == ""


@pytest.mark.parametrize("text", ["2.21.5", "NCCL 2.21.5", "nccl-2.21.5", "v2.21.5", " nccl v2.21.5 "])
def test_a_version_may_follow_the_name_of_its_library(text: str) -> None:
    assert plain_version(text) == "2.21.5"
    assert plain_version("banana") == "banana"
