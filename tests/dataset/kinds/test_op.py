"""Signatures carry FLOP and bytes, and refuse nonsense."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepsight.dataset.kinds import STREAMED
from stepsight.dataset.kinds.op import OP_KINDS, OPAQUE, Collective, Op, check_sizes


def test_gemm_counts() -> None:
    """A matrix product does 2mnk FLOP and touches three matrices."""
    op = Op("linear", (3, 5, 7), "fp32")
    assert op.flops == 2 * 3 * 5 * 7
    assert op.num_bytes == 4 * (15 + 21 + 35)


def test_a_grouped_product_does_the_flop_of_one_and_reads_a_matrix_for_each_group() -> None:
    one, many = Op("linear", (96, 5, 7)), Op("grouped_linear", (4, 96, 5, 7))
    assert many.flops == one.flops
    assert many.num_bytes - one.num_bytes == 2 * 3 * 5 * 7


def test_a_batched_product_is_as_many_products() -> None:
    one, many = Op("linear", (3, 5, 7)), Op("batched_matmul", (4, 3, 5, 7))
    assert (many.flops, many.num_bytes) == (4 * one.flops, 4 * one.num_bytes)


@pytest.mark.parametrize("kind", ["attention", "attention_backward"])
def test_latent_attention_with_equal_widths_is_ordinary_attention(kind: str) -> None:
    usual = Op(kind, (2, 4, 4, 32, 64, 16, 0))
    latent = Op(f"mla_{kind}", (2, 4, 32, 64, 16, 16, 0))
    assert (latent.flops, latent.num_bytes) == (usual.flops, usual.num_bytes)


@given(st.sampled_from(sorted(OP_KINDS)), st.data())
def test_costs_grow_with_every_dim(kind: str, data: st.DataObject) -> None:
    """No dimension makes an op cheaper (but the causal flag, which halves the work)."""
    names = OP_KINDS[kind].dim_names
    dims = tuple(1 if n == "causal" else data.draw(st.integers(1, 64)) for n in names)
    op = Op(kind, dims, "bf16")
    for i, name in enumerate(names):
        if name != "causal":
            larger = Op(kind, (*dims[:i], dims[i] + 1, *dims[i + 1 :]), "bf16")
            assert larger.flops >= op.flops and larger.num_bytes >= op.num_bytes


@pytest.mark.parametrize(
    ("kind", "dims", "dtype"), [("linera", (1, 1, 1), "fp32"), ("linear", (1, 1), "fp32"), ("add", (1,), "int3")]
)
def test_bad_ops(kind: str, dims: tuple[int, ...], dtype: str) -> None:
    """Unknown kinds, dims and dtypes are refused."""
    with pytest.raises(ValueError, match="got"):
        Op(kind, dims, dtype)


def test_bad_collectives() -> None:
    """A collective needs two ranks and a known kind."""
    assert Collective("all_reduce", 8, 16, 8).num_nodes == 2
    for arguments in (("all_reduce", 8, 1, 1), ("gossip", 8, 2, 2), ("all_reduce", 8, 4, 5)):
        with pytest.raises(ValueError, match="got"):
            Collective(*arguments)


def test_a_flag_is_true_or_false_whatever_its_number() -> None:
    sizes = (2, 8, 8, 64, 64, 32)
    for kind in ("attention", "attention_backward"):
        assert Op(kind, (*sizes, 64), "fp32").flops == Op(kind, (*sizes, 1), "fp32").flops
        assert 2.0 * Op(kind, (*sizes, 1), "fp32").flops == Op(kind, (*sizes, 0), "fp32").flops


@pytest.mark.parametrize("name", [name for name in OP_KINDS if OP_KINDS[name].flags])
def test_every_function_of_a_kind_takes_any_number_of_a_flag_as_one(name: str) -> None:
    kind, of = OP_KINDS[name], range(3, 3 + len(OP_KINDS[name].dim_names))
    one, many = (
        [flag if at in kind.flags else size for at, size in zip(kind.dim_names, of, strict=True)] for flag in (1, 7)
    )
    for function in (kind.flops, kind.elements, kind.units, kind.operands, kind.grid):
        assert function is None or function(*one) == function(*many)
    if kind.base in OP_KINDS and kind.base != STREAMED:
        assert Op(kind.base, kind.base_dims(*one)).flops == Op(kind.base, kind.base_dims(*many)).flops


@pytest.mark.parametrize("name", sorted(OP_KINDS))
def test_only_a_size_of_0_is_unknown_and_a_flag_may_be_0(name: str) -> None:
    """Attention without a mask, and the first convolution's backward, were once taken for ops of unknown sizes."""
    kind = OP_KINDS[name]
    for at, of in enumerate(kind.dim_names):
        dims = [0 if place == at else 2 for place in range(len(kind.dim_names))]
        assert Op(name, tuple(dims), "fp32").sized == (of in kind.flags and name != OPAQUE)
    assert Op(name, (2,) * len(kind.dim_names), "fp32").sized == (name != OPAQUE)
    assert Collective("all_reduce", 8, 2, 2).sized and not Collective("all_reduce", 0, 2, 2).sized


def test_sizes_that_nobody_could_have_run_are_refused() -> None:
    """Each size may be whole and small, and their product still be absurd."""
    check_sizes([Op("linear", (3, 5, 7)), Collective("all_reduce", 4, 2, 2)], "a file")
    for op in (Op("linear", (2**30, 2**30, 1)), Op("linear", (2**29, 2**29, 2**29))):
        with pytest.raises(ValueError, match="sizes of a file must be whole numbers"):
            check_sizes([op], "a file")
