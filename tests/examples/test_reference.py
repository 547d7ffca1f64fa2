"""The scripts that are captured in examples compute, sharded over two real ranks, what they compute on one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")


def test_sharded_scripts_give_the_loss_and_gradients_of_the_plain_ones(tmp_path: Path) -> None:
    """FSDP2, tensor with sequence and loss parallelism, recomputation, and experts on two ranks."""
    script = Path(__file__).with_name("reference_check.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(tmp_path), str(rank)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            text, _ = rank.communicate(timeout=300)
            assert rank.returncode == 0, text
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
