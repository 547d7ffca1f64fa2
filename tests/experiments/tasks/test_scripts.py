"""Delays of emulated collectives: where they come from, and what comes on top."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stepsight.dataset.base.errors import CollectError
from stepsight.dataset.hardware.hardware import alpha_beta_seconds, find_fabric
from stepsight.dataset.harness.base.errors import HarnessError
from stepsight.dataset.harness.emulation.stand_in import asked_delays
from stepsight.dataset.kinds.op import Collective
from stepsight.experiments.tasks.scripts import answers_of, delays_of, extra_delay

SMALL = Collective("all_reduce", 1000, 16, 8)
LARGE = Collective("all_gather", 10**8, 256, 8)


def test_extra_delays_come_on_top_of_what_matches() -> None:
    fabric = find_fabric("dgx-h100")
    extra = [extra_delay(text) for text in ("all=1", "all_reduce=10", "group:256=100", "bytes:1000000=1000")]
    delay = delays_of("alpha-beta", fabric, None, extra)
    assert delay(SMALL) == pytest.approx(alpha_beta_seconds(SMALL, fabric) + 0.011)
    assert delay(LARGE) == pytest.approx(alpha_beta_seconds(LARGE, fabric) + 1.101)


@pytest.mark.parametrize("text", ["all", "gossip=1", "group=1", "group:x=1", "all=-1", "all=nan", "all_reduce:3=1", ""])
def test_a_wrong_extra_delay_is_refused(text: str) -> None:
    with pytest.raises(CollectError, match="--extra-ms takes"):
        extra_delay(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "def seconds(kind, num_bytes, group_size, ranks_per_node):\n    return -1.0\n",
            "delays must be 0 to 3600",
        ),
        ("def seconds(kind, num_bytes, group_size, ranks_per_node):\n    return 1 / 0\n", "raised ZeroDivisionError"),
        ("def delay(c): ...\n", r"must define seconds\(kind, num_bytes"),
        ("1 / 0\n", "raised ZeroDivisionError"),
    ],
)
def test_a_wrong_file_of_delays_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "delays.py"
    path.write_text(text)
    with pytest.raises(CollectError, match=message):
        delays_of(str(path), None, None, [])(SMALL)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("alpha-beta", "needs --fabric"),
        ("predictor", "needs --fabric"),
        ("no.py", "no file"),
        ("ring", "must be alpha"),
    ],
)
def test_a_source_of_delays_that_lacks_something_is_refused(source: str, message: str) -> None:
    with pytest.raises(CollectError, match=message):
        delays_of(source, None, None, [])


def test_an_emulated_rank_asks_once_for_each_signature(tmp_path: Path) -> None:
    told: list[Collective] = []

    def delay(collective: Collective) -> float:
        told.append(collective)
        if collective.kind == "broadcast":
            raise CollectError("nobody knows")
        return 0.25

    with (
        answers_of(delay) as (questions, answers),
        os.fdopen(os.dup(questions), "wb") as ask,
        os.fdopen(os.dup(answers), "rb") as read,
    ):
        asked = asked_delays(ask, read)
        assert [asked("all_reduce", 1000, 16, 8) for _ in range(3)] == [0.25] * 3
        with pytest.raises(HarnessError, match="nobody knows"):
            asked("broadcast", 1, 2, 2)
        with pytest.raises(HarnessError, match="gossip"):
            asked("gossip", 1, 2, 2)
    assert told[0] == SMALL
    assert len(told) == 2
