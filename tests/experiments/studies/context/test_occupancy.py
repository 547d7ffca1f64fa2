"""Processors that a collective holds, and what a kernel beside it has to wait for."""

from __future__ import annotations

import pytest

from stepsight.experiments.studies.context.occupancy import (
    Launch,
    Processors,
    held_ratio,
    processors_of,
    resident_blocks,
    waves,
)

H100 = Processors(132)


def test_a_grid_as_large_as_the_device_needs_a_second_wave_beside_a_collective() -> None:
    """132 blocks of a product fill the 132 processors of an H100; 24 channels of an all-gather take some of them."""
    product = Launch(132, 384, 168, 200 * 1024)
    assert waves(H100, product) == 1
    assert waves(H100, product, Launch(24, 544, 96, 90 * 1024)) == 2


def test_a_grid_that_leaves_room_needs_no_more_waves() -> None:
    """DeepSeek's products take 112 blocks, and their all-to-all the other 20 processors."""
    product = Launch(112, 384, 168, 200 * 1024)
    assert waves(H100, product) == waves(H100, product, Launch(20, 512, 110)) == 1


@pytest.mark.parametrize(
    ("kernel", "blocks"),
    [
        (Launch(1, 1024), 2),  # threads
        (Launch(1, 128, 255), 2),  # registers: 65536 / (128 * 255)
        (Launch(1, 128, 16, 100 * 1024), 2),  # shared memory
        (Launch(1, 32, 16), 32),  # blocks
    ],
)
def test_threads_registers_and_shared_memory_limit_what_a_processor_holds(kernel: Launch, blocks: int) -> None:
    assert resident_blocks(H100, kernel) == blocks


def test_held_processors_are_told_by_the_channels() -> None:
    a100 = processors_of("NVIDIA A100-SXM4-80GB")
    assert a100 is not None and a100 == processors_of("", ("ampere_sgemm_32x128_nn",))
    assert held_ratio(a100, Launch(27)) == pytest.approx(27 / 81)
    assert processors_of("cpu") is None
    assert held_ratio(None, Launch(8)) == held_ratio(a100, Launch(0)) == 0
