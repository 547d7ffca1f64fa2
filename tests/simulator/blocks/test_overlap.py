"""Tensor-parallel collectives beside the products."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from stepsight.dataset.kinds.op import Collective, Op
from stepsight.simulator.blocks import family
from stepsight.simulator.blocks.layer_parts import column_linear, column_parallel, row_linear, row_parallel
from stepsight.simulator.blocks.step import Block, RankShape
from stepsight.simulator.durations.segment_timing import _time_passage
from stepsight.simulator.programs.block_pass import (
    INPUT,
    WEIGHT,
    BackwardSpec,
    BlockPass,
    backward_pass,
    forward_pass,
)
from tests.simulator.blocks.shapes import items, small_shape

GATHER, SUM, PRODUCT = 3.0, 5.0, 7.0
OVERLAPS = ("", "torch", "backward", "split", "torch-async")


def _shape(overlap: str, share: float = 0.0, *, sequence: bool = True) -> RankShape:
    return small_shape(tp=4, precision="bf16", sequence_parallel=sequence, overlap_tp=overlap, compute_share=share)


def _seconds(passage: BlockPass) -> float:
    """With products that take the same, collectives by their part of the whole activation, and nothing else."""
    whole = 2 * 32 * 64 * 2
    each = {"all_gather": GATHER / whole, "reduce_scatter": SUM / whole, "all_reduce": SUM / whole}

    def one(work: Op | Collective) -> float:
        if isinstance(work, Collective):
            return each[work.kind] * work.num_bytes
        return PRODUCT if work.family == "gemm" else 0.0

    works = np.array([one(work) for work in passage.works])
    return _time_passage(
        passage, works[passage.columns.work] * passage.columns.share, np.zeros(passage.num_nodes)
    ).paths[0]


def _column(shape: RankShape) -> Block:
    return column_parallel(shape, column_linear(shape, "fc1", 64, 64))


def _row(shape: RankShape) -> Block:
    return row_parallel(shape, row_linear(shape, "fc2", 64, 64))


def test_without_overlap_all_is_in_a_row() -> None:
    shape = _shape("")
    assert _seconds(forward_pass(_column(shape))) == GATHER + PRODUCT
    assert _seconds(backward_pass(_column(shape), BackwardSpec())) == 2 * PRODUCT + SUM


@pytest.mark.parametrize("overlap", ["backward", "split"])
def test_a_column_gathers_again_beside_one_product_and_sums_beside_the_other(overlap: str) -> None:
    """Megatron's asynchronous backward: what is shorter than its product costs nothing."""
    assert _seconds(backward_pass(_column(_shape(overlap)), BackwardSpec())) == 2 * PRODUCT
    plain = _shape(overlap, sequence=False)
    assert _seconds(backward_pass(_column(plain), BackwardSpec())) == 2 * PRODUCT


def test_a_product_loses_a_share_of_what_runs_beside_it() -> None:
    shape = _shape("backward", 0.2)
    assert _seconds(backward_pass(_column(shape), BackwardSpec())) == pytest.approx(2 * PRODUCT + 0.2 * (GATHER + SUM))


def test_split_collectives_expose_their_first_or_last_part() -> None:
    shape = _shape("split")
    assert _seconds(forward_pass(_column(shape))) == GATHER / 4 + PRODUCT
    assert _seconds(forward_pass(_row(shape))) == PRODUCT + SUM / 4
    assert _seconds(backward_pass(_row(shape), BackwardSpec())) == GATHER / 4 + 2 * PRODUCT


def test_pytorch_sums_stacked_parts_by_a_kernel_that_reads_all_of_them() -> None:
    """One read of each element after a row's forward and a column's backward; the rest is as ``split`` has it."""
    for part, backward in ((_row, False), (_column, True)):
        split, stacked = (items(part(_shape(overlap)), backward=backward) for overlap in ("split", "torch-async"))
        (extra,) = [item for item in stacked if item not in split]
        shape = _shape("split")
        assert isinstance(extra, Op) and extra.num_bytes == shape.rows * shape.model.hidden * shape.dtype_bytes
        assert len(stacked) == len(split) + 1


def test_pytorch_copies_what_it_gathers_or_scatters_along_the_sequence() -> None:
    """A row and a column have one of each in both passes; without sequence parallelism nothing is copied."""
    for sequence in (True, False):
        shape = _shape("torch", sequence=sequence)
        for part in (_column, _row):
            plain, copied = ([*items(part(one)), *items(part(one), backward=True)]
                             for one in (_shape("", sequence=sequence), shape))  # fmt: skip
            extra = [item for item in copied if item not in plain]
            assert len(extra) == (2 if sequence else 0) == len(copied) - len(plain)
            assert {item.dims for item in extra if isinstance(item, Op)} == ({(2 * 32 * 64,)} if sequence else set())


def test_pytorch_waits_for_the_reduce_scatter_of_a_sum_of_products() -> None:
    """Of a linear alone it is split, as the gather before it."""
    shape = replace(_shape("torch-async"), kernels=replace(_shape("").kernels, separate_linears=True))
    alone, apart = (column_linear(shape, "fc1", 64, 64, apart=widths) for widths in ((), (32, 32)))
    assert _seconds(forward_pass(column_parallel(shape, apart))) == GATHER / 4 + 2 * PRODUCT
    assert _seconds(backward_pass(column_parallel(shape, alone), BackwardSpec())) == 2 * PRODUCT
    assert _seconds(backward_pass(column_parallel(shape, apart), BackwardSpec())) == 4 * PRODUCT + SUM


@pytest.mark.parametrize("overlap", ["", "split"])
def test_operands_in_8_bits_are_gathered_as_such(overlap: str) -> None:
    """With a scale for each row they are gathered in 16 bits; sums always are in 16 bits."""

    def moved(block: Block, kind: str) -> int:
        found = [
            item.work for backward in (False, True) for item in items(block, backward=backward) if hasattr(item, "work")
        ]
        return sum(work.num_bytes for work in found if isinstance(work, Collective) and work.kind == kind)

    kernels = {"fp8_gathers": False}
    shapes = [
        _shape(overlap),
        *(
            replace(_shape(overlap), precision="fp8", kernels=replace(_shape(overlap).kernels, **more))
            for more in ({}, kernels)
        ),
    ]
    for part in (_column, _row):
        plain, narrow, rowwise = (
            [moved(part(shape), kind) for kind in ("all_gather", "reduce_scatter")] for shape in shapes
        )
        assert narrow == [plain[0] // 2, plain[1]] and rowwise == plain


def test_halves_of_the_backward_hold_their_own() -> None:
    """Zero-bubble schedules: the sum is waited for where the gradient of the input is needed."""
    block = _column(_shape("backward"))
    assert _seconds(backward_pass(block, BackwardSpec(INPUT))) == PRODUCT + SUM
    assert _seconds(backward_pass(block, BackwardSpec(WEIGHT))) == PRODUCT


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_layer_computes_the_same_and_forward_moves_as_much(overlap: str) -> None:
    plain, block = family.decoder_layer(_shape("")), family.decoder_layer(_shape(overlap))

    def moved(block: Block) -> int:
        nodes = forward_pass(block).program.nodes
        return sum(node.work.num_bytes for node in nodes if isinstance(node.work, Collective))

    def flops(block: Block) -> float:
        nodes = backward_pass(block, BackwardSpec()).program.nodes
        return sum(node.work.flops for node in nodes if isinstance(node.work, Op) and node.work.kind != "reduce")

    assert flops(block) == flops(plain)
    assert moved(block) == moved(plain)


def test_a_single_rank_overlaps_nothing() -> None:
    nodes = forward_pass(family.decoder_layer(small_shape(overlap_tp="split"))).program.nodes
    assert not any(isinstance(node.work, Collective) for node in nodes)
