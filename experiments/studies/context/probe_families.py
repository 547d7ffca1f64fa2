"""Probes: small regions that show what one operation or one access of memory takes on this machine.

Every model is taught by all of them; none is ever judged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from stepsight.experiments.studies.context.region_families import Dice, Draw

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp, "log": lambda x: torch.log(x.abs() + 1), "log1p": lambda x: torch.log1p(x.abs()),
    "expm1": torch.expm1, "tanh": torch.tanh, "erf": torch.erf, "sin": torch.sin, "cos": torch.cos,
    "sqrt": lambda x: x.abs().sqrt(), "rsqrt": lambda x: torch.rsqrt(x.abs() + 1), "sigmoid": torch.sigmoid,
    "divide": lambda x: 1.5 / (x.abs() + 1), "pow": lambda x: (x.abs() + 1).pow(1.7),
    "arithmetic": lambda x: ((x * 1.5 + 0.5) * x - 0.25) * x + x.abs().clamp(0.1, 3.0),
    "where": lambda x: torch.where(x > 0.5, x * 2, torch.where(x < -0.5, x, -x)), "round": torch.round,
    "dropout": lambda x: F.dropout(x, 0.1, training=True),
}  # fmt: skip


def _flat(dice: Dice, low: int = 2**11, high: int = 2**22) -> int:
    return int(low * (high / low) ** dice.random.random()) // 64 * 64


def _function(name: str) -> Callable[[Dice], Draw]:
    def make(dice: Dice) -> Draw:
        function, scalar = FUNCTIONS[name], dice.flag(0.4)
        dice.training = False
        x = dice.tensor(_flat(dice, 2**11, 2**17), 2, dtype=torch.float32)
        return dice.draw((lambda x: function(x[:, 0])) if scalar else function, x)

    return make


def _stream(name: str, count: int) -> Callable[[Dice], Draw]:
    def make(dice: Dice) -> Draw:
        dice.training = False
        numel = _flat(dice, 2**11, 2**23)
        tensors = [dice.tensor(numel) for _ in range(count)]
        makes: dict[str, Callable[..., Any]] = {
            "copy": lambda x: x * 2, "triad": lambda x, y: x + 3 * y, "four": lambda x, y, z, w: x * y + z * w,
            "split": lambda x: (x * 2, x + 1, x - 1), "mask": lambda x: (x > 0.1, x * 2),
            "masked": lambda x, y: torch.where(x > 0, y, 0.0), "cast": lambda x: x.to(torch.float32).to(torch.bfloat16),
            "whole": lambda x: x.sum(), "norm": lambda x: x.float().square().sum().sqrt(),
            "wide": lambda x: (x * 4).to(torch.int64),
        }  # fmt: skip
        return dice.draw(makes[name], *tensors)

    return make


def _matrix(name: str) -> Callable[[Dice], Draw]:
    def make(dice: Dice) -> Draw:
        dice.training = False
        width = dice.width(16, 2048)
        rows = max(8, _flat(dice, 2**13, 2**22) // width // 8 * 8)
        x = dice.tensor(rows, width, dtype=torch.float32)
        index = dice.indices(rows, rows)
        columns = dice.indices(width, rows)
        makes: dict[str, Callable[[Tensor], Any]] = {
            "rows": lambda x: x.sum(1), "columns": lambda x: x.sum(0), "most": lambda x: x.amax(1),
            "welford": lambda x: torch.var_mean(x, 1), "welford_columns": lambda x: torch.var_mean(x, 0),
            "argmax": lambda x: x.argmax(1), "turn": lambda x: x.t().contiguous(),
            "turn_add": lambda x: x.t() + 1.5 * x.view(width, rows), "even": lambda x: x[:, ::2] + 1,
            "interleave": lambda x: torch.stack((x, -x), -1).flatten(1), "gather_rows": lambda x: x[index] * 2,
            "gather_one": lambda x: x.gather(1, columns[:, None]), "join": lambda x: torch.cat((x, x * 2), 1),
            "pad": lambda x: F.pad(x, (1, 1)) + 1, "broadcast": lambda x: x * x[:1] + x[:, :1],
            "softmax": lambda x: torch.softmax(x, 1), "norm": lambda x: F.layer_norm(x, (width,)),
            "shift": lambda x: torch.roll(x, 3, 1),
        }  # fmt: skip
        return dice.draw(makes[name], x)

    return make


def is_probe(family: str) -> bool:
    """Whether a family is one of the probes."""
    return family.startswith("probe_")


_STREAMS = {"copy": 1, "triad": 2, "four": 4, "split": 1, "mask": 1, "masked": 2, "cast": 1, "whole": 1, "norm": 1,
            "wide": 1}  # fmt: skip
_MATRICES = ("rows", "columns", "most", "welford", "welford_columns", "argmax", "turn", "turn_add", "even",
             "interleave", "gather_rows", "gather_one", "join", "pad", "broadcast", "softmax", "norm",
             "shift")  # fmt: skip
PROBES: dict[str, Callable[[Dice], Draw]] = {
    **{f"probe_function_{name}": _function(name) for name in FUNCTIONS},
    **{f"probe_stream_{name}": _stream(name, count) for name, count in _STREAMS.items()},
    **{f"probe_matrix_{name}": _matrix(name) for name in _MATRICES},
}
