"""Kernels of libraries are known by their names: what communicates, and what kind of op the others are."""

from __future__ import annotations

import pytest

from stepsight.dataset.traces.kernel_kinds import is_collective, named_kind


@pytest.mark.parametrize(
    "name",
    [
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)",
        "void deep_ep::internode::combine<false, 8, __nv_bfloat16>(int4*)",
        "void dpsk::ep::internode::cached_notify<false>(int, int)",
        "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>(vllm::RankData*)",
    ],
)
def test_kernels_of_communication_libraries_are_collectives(name: str) -> None:
    assert is_collective(name)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("void cuda::per_token_cast_to_fp8_with_channels<__nv_bfloat16>", "elementwise"),
        ("cuda::swiglu_forward_backward_with_weight_impl", "elementwise"),
        ("cuda::expand_to_fused_with_scales_impl(int4 const*)", "copy"),
        ("void flash_bwd_dq_dk_dv_loop_kernel", "attention_backward"),
        ("my_very_own_kernel(float*)", None),
    ],
)
def test_a_name_says_the_kind(name: str, kind: str | None) -> None:
    assert not is_collective(name) and named_kind(name) == kind
