"""Bring durations from elsewhere: a vendor's table of matrix products, or another predictor such as DistSim's Habitat.

What is asked for is an object with ``op_seconds(ops)``; with ``collective_seconds(collectives)`` too if it knows them.
NaN means that it does not know: hardware facts answer for that op. From the folder of this file::

    stepsight predict gpt3-175b-1024.toml --latency own_latency:vendor_table

or run it with ``python examples/own_latency.py``.  ``stepsight.testing.LatencyModelContract`` checks one, and
``tests/examples`` applies it to this.
"""

import numpy as np

from stepsight.registries import Fabric, Hardware, Op

# TFLOP/s that the vendor states for products with at least so many rows, columns and depth.
TABLE = ((8192, 230.0), (2048, 200.0), (512, 120.0))


class VendorTable:
    """Products by the table; nothing else.

    Args:
        hardware: What the job runs on.
    """

    def __init__(self, hardware: Hardware) -> None:
        self.launch_s = hardware.op_latency_s

    def op_seconds(self, ops: list[Op]) -> np.ndarray:
        """Seconds of each op, shape ``(len(ops),)``; NaN of those that the table does not have."""
        return np.array([self._seconds(op) for op in ops], dtype=float)

    def _seconds(self, op: Op) -> float:
        if op.family != "gemm" or not op.kind.startswith("linear"):
            return np.nan
        for least, tflops in TABLE:
            if min(op.dims) >= least:
                return self.launch_s + op.flops / (tflops * 1e12)
        return np.nan


def vendor_table(hardware: Hardware, fabric: Fabric) -> VendorTable:
    """What ``--latency own_latency:vendor_table`` calls."""
    return VendorTable(hardware)


if __name__ == "__main__":
    from pathlib import Path

    from stepsight import predict
    from stepsight.registries import LATENCIES

    with LATENCIES.registered("vendor-table", vendor_table):
        print(predict(Path(__file__).parent / "gpt3-175b-1024.toml", latency="vendor-table"))
