"""NeuSight (ASPLOS'25): forward ops in FP32, milliseconds.

Columns of a product are ``B, M, N, K`` with ``N`` the *inner* size: ``[B, M, N] @ [N, K]``, as the grids of the kernels
show (tiles of every row cover ``M x K``).
"""

from __future__ import annotations

from stepsight.dataset.kinds.op import Op
from stepsight.dataset.tables.device_names import device_name
from stepsight.dataset.tables.rows import Line, Rows, read_csv

_COLUMNS = ("OPName", "Latency", "Device", "Torch Version")
# A product or quotient of two tensors reads and writes what their sum does.
_ELEMENTWISE = {
    **{name: "add" for name in ("add", "sub", "mul", "div")},
    **{name: "elementwise" for name in ("tanh", "exp", "sqrt", "sigmoid", "neg", "pow")},
    "gelu": "gelu",
    "relu": "relu",
}


def read(rows: Rows) -> None:
    for line in read_csv(rows, _COLUMNS):
        name, device = line.text("OPName").lower(), device_name(line.text("Device"))
        work = _op(name, line)
        if work is None:
            rows.skip(f"no op kind for {name}")
        elif device == "p4-pcie-8gb" and name == "linear" and "train" in rows.path.parts:
            rows.skip("a throttled device")  # a quarter of what the same device reaches in the test set
        else:
            software = f"torch {line.text('Torch Version').lstrip('p')}"
            rows.add(work, line.real("Latency") * 1e-3, device=device, software=software)


def _op(name: str, line: Line) -> Op | None:
    if name in ("linear", "bmm"):
        batch, m, inner, n = (_size(line, column) for column in "BMNK")
        if name == "bmm":
            return Op("batched_matmul", (batch, m, n, inner), "fp32")
        return Op("linear", (batch * m, n, inner), "fp32")
    if name in _ELEMENTWISE:
        return Op(_ELEMENTWISE[name], (_size(line, "B") * _size(line, "H"),), "fp32")
    if name in ("ln", "softmax"):
        return Op({"ln": "layer_norm"}.get(name, name), (_size(line, "B"), _size(line, "H")), "fp32")
    return None


def _size(line: Line, column: str) -> int:
    if column not in line.cells:
        raise line.rows.error(f"{line.text('OPName')} needs column {column}", line.number)
    return line.whole(column)
