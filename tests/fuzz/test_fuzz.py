"""A few inputs of every fuzzing target, and every seed as it stands; ``make fuzz`` tries many more."""

from __future__ import annotations

import os
import random
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.targets import TARGETS, Target, corpus
from tests.fuzz.watch import answered

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "20"))


def ask(target: Target, data: bytes) -> bool:
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"input{target.suffix}"
        path.write_bytes(data)
        return answered(lambda: target.ask(path))


@pytest.mark.parametrize("name", TARGETS)
def test_no_input_is_worse_than_refused(name: str) -> None:
    """No traceback, no hang, no number that is NaN, negative or absurd."""
    target = TARGETS[name]

    @settings(max_examples=EXAMPLES, deadline=None, database=None, derandomize=True)
    @given(st.integers(0, 2**32))
    def mutated(seed: int) -> None:
        rng = random.Random(seed)
        ask(target, target.mutate(rng, rng.choice(corpus(name))))

    mutated()


@pytest.mark.parametrize("name", TARGETS)
def test_a_seed_is_read_or_refused(name: str) -> None:
    """At least one seed of each target is read: else its mutations would test nothing but refusals."""
    assert any([ask(TARGETS[name], data) for data in corpus(name)])
