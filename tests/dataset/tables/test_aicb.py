"""AICB: collectives in a training loop."""

import pytest

from stepsight.dataset.kinds.op import Collective
from stepsight.dataset.tables import Measurements
from stepsight.testing import TableReaderContract

_HEADER = "comm_type,comm_group,comm_group_size,msg_size,stage,dst,src,additional,_elapsed_time,algbw,busbw,count\n"
_END = "CommType.epoch_end,None,None,0,,None,None,,433.2,0,0,1\n"


def _call(kind: str, group: object, size: int, stage: str, milliseconds: float) -> str:
    return f"CommType.{kind},CommGroup.tp_group,{group},{size},{stage},None,None,,{milliseconds},0,0,1\n"


class TestAicb(TableReaderContract):
    format = "aicb"
    place = "A100_example.csv.gz"
    text = (
        _HEADER
        + _call("all_reduce", 4, 8, "init.model_setup", 3380.2)
        + _END
        + _call("all_gather", 2, 16777216, "forward.MLP", 59.5)
        + _END
        + "".join(_call("all_gather", 2, 16777216, "forward.MLP", time) for time in (0.131, 0.135, 0.4))
        + _call("all_gather", "None", 134217728, "forward.MoE", 0.5)
        + _call("all_reduce", 2, 0, "step", 0.15)
        + _call("barrier", 2, 8, "step", 0.15)
    )

    def test_a_collective_is_its_median(self, table: Measurements) -> None:
        """Set-up and the first iteration are left out; sizes are bytes of the gathered buffer."""
        assert table.works == (Collective("all_gather", 16777216, 2, 2),)
        assert table.seconds.tolist() == pytest.approx([135e-6])
        assert table.skipped == {
            "up to the first iteration, which sets communicators up": 2,
            "the end of an iteration": 2,
            "folded into a median": 2,
            "no group size": 1,
            "no message size": 1,
            "no collective kind for barrier": 1,
        }
