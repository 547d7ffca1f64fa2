"""The page of captures says what a capture does; ``make matrix`` tries all of its cells."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from tests.dataset.capture.matrix import CELLS, FEATURES, STRATEGIES, outcome, page_cells

# Every strategy and every feature at least once.
COVERING = (
    ("DDP", "torch.compile"),
    ("DDP", "sparse embeddings"),
    ("FSDP2", "SDPA with a learnt bias"),
    ("HSDP", "AMP with GradScaler"),
    ("TP", "torch.compile"),
    ("TP", "activation checkpointing"),
    ("PP", "SDPA with a mask"),
    ("DDP + uneven all-to-all", "torch.compile"),
    ("DDP + uneven all-to-all", "sparse embeddings"),
    ("plain", "SDPA with a chosen backend"),
    ("plain", "gradient accumulation"),
)


def test_the_page_has_every_cell_and_no_traceback() -> None:
    cells = page_cells()
    assert set(cells) == set(CELLS) and all(cells.values())
    assert not [text for text in cells.values() if "Traceback" in text or "hand calculation" in text]
    assert {cell[0] for cell in COVERING} == set(STRATEGIES)
    assert {cell[1] for cell in COVERING} == set(FEATURES) - {"eager"}


@pytest.mark.parametrize("cell", COVERING)
def test_a_capture_does_what_the_page_says(cell: tuple[str, str]) -> None:
    assert outcome(*cell) == page_cells()[cell]
