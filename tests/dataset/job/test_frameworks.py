"""Profiles of frameworks."""

import pytest

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.job.frameworks import (
    GENERIC,
    find_framework,
    framework_from_dict,
    framework_in,
    framework_names,
    unknown_frameworks,
)


def test_presets_are_sound() -> None:
    """Every preset can be built, says where it is known from, and is found by its own name."""
    assert len(framework_names()) > 10
    for name in framework_names():
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
        ({"zoo": 1}, "unknown keys zoo"),
        ({"p2p": "half"}, "p2p must be one of full, scattered, got 'half'"),
        ({"attention": "flash-9"}, "attention must be one of unfused, flash-1"),
        ({"gradients": "fp8"}, "gradients must be one of"),
        ({"selective": "some"}, "selective must be one of"),
        ({"bucket_mbytes": 0}, "bucket_mbytes > 0"),
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
    for name in framework_names():
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
