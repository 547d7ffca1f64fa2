"""Small Kineto traces made by hand, in the profiler's own layout or in another."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

MAIN, WORKER = 100, 200


class KinetoFile:
    """Builds the events of one rank; times in microseconds.

    Args:
        rank: As the trace states it.
        world_size: Likewise.
    """

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        ranks = list(range(world_size))
        self.events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "ts": 0.0, "args": {}}
        ]
        self.header: dict[str, Any] = {
            "schemaVersion": 1,
            "distributedInfo": {"rank": rank, "world_size": world_size, "pg_config": [{"pg_desc": "", "ranks": ranks}]},
        }

    def call(self, name: str, start: float, length: float, *dims: Any, thread: int = MAIN, **args: Any) -> KinetoFile:
        """A ``cpu_op`` with float inputs of these shapes; ``args`` use ``_`` for blanks."""
        types = ["TensorList" if dim and isinstance(dim[0], list) else "float" for dim in dims]
        recorded = {
            "Input Dims": list(dims),
            "Input type": types,
            **{key.replace("_", " "): v for key, v in args.items()},
        }
        return self.event("cpu_op", name, start, length, thread, recorded)

    def note(self, name: str, start: float, length: float, thread: int = MAIN, **args: Any) -> KinetoFile:
        """A ``user_annotation``."""
        return self.event(
            "user_annotation", name, start, length, thread, {k.replace("_", " "): v for k, v in args.items()}
        )

    def segment(self, label: str, start: float, length: float, micro_batch: int = 0, stage: int = 0) -> KinetoFile:
        facts = "" if label == "step" else f" micro_batch={micro_batch} stage={stage}"
        return self.note(f"stepsight::segment label={label}{facts}", start, length)

    def kernel(self, name: str, start: float, length: float, stream: int, correlation: int, **args: Any) -> KinetoFile:
        recorded = {
            "stream": stream,
            "device": 0,
            "correlation": correlation,
            **{k.replace("_", " "): v for k, v in args.items()},
        }
        return self.event("kernel", name, start, length, stream, recorded, pid=0)

    def launch(self, start: float, correlation: int, name: str = "cudaLaunchKernel") -> KinetoFile:
        return self.event("cuda_runtime", name, start, 2.0, MAIN, {"correlation": correlation})

    def event(
        self, category: str, name: str, start: float, length: float, thread: int, args: dict[str, Any], pid: int = 1
    ) -> KinetoFile:
        self.events.append(
            {
                "ph": "X",
                "cat": category,
                "name": name,
                "pid": pid,
                "tid": thread,
                "ts": start,
                "dur": length,
                "args": args,
            }
        )
        return self

    def text(self, layout: str = "profiler") -> str:
        """``profiler``: one key per line, as PyTorch writes it; ``compact``: one line."""
        if layout == "compact":
            return json.dumps({**self.header, "traceEvents": self.events})
        body = ",\n".join(self._event_text(event) for event in self.events)
        header = json.dumps(self.header)[1:-1]
        return f'{{\n  {header},\n  "traceEvents": [\n{body}\n  ],"traceName": "x" }}'

    @staticmethod
    def _event_text(event: dict[str, Any]) -> str:
        first = ("ph", "cat", "name", "pid", "tid", "ts", "dur")
        lines = [f'    "{key}": {json.dumps(event[key])}' for key in first if key in event]
        args = json.dumps(event["args"])[1:-1]
        return "  {\n" + ",\n".join(lines) + ',\n    "args": {\n      ' + args + "\n    }\n  }"

    def write(self, path: Path, layout: str = "profiler") -> Path:
        data = self.text(layout).encode()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
        return path


def tiny_step(rank: int = 0, world_size: int = 1) -> KinetoFile:
    """One step: forward (linear, all-reduce if there are peers, gelu), backward (dgrad, wgrad, bias), optimizer."""
    file = KinetoFile(rank, world_size)
    file.segment("step", 0, 1000)
    file.segment("forward", 10, 290)
    file.call("aten::linear", 20, 100, [4, 8], [6, 8], [6], Sequence_number=7)
    file.call("aten::t", 22, 5, [6, 8])
    file.call("aten::addmm", 30, 80, [6], [4, 8], [8, 6], Sequence_number=7)
    file.call("aten::copy_", 40, 10, [4, 6], [4, 6])
    if world_size > 1:
        ranks = ",".join(map(str, range(world_size)))
        file.note(
            f"stepsight::collective kind=all_reduce num_bytes=96 ranks={ranks} group=tp seq=0 async=0",
            130,
            50 + 10 * rank,
        )
        file.note("gloo:all_reduce", 140, 30, thread=WORKER)
    file.call("aten::gelu", 200, 60, [4, 6])
    file.segment("backward", 300, 400)
    file.call("autograd::engine::evaluate_function: GeluBackward0", 310, 90)
    file.call("aten::gelu_backward", 320, 60, [4, 6], [4, 6])
    file.call("autograd::engine::evaluate_function: AddmmBackward0", 400, 200, Sequence_number=7)
    file.call("aten::mm", 410, 50, [4, 6], [6, 8], Input_Strides=[[6, 1], [8, 1]])
    file.call("aten::mm", 470, 60, [6, 4], [4, 8], Input_Strides=[[1, 6], [8, 1]])
    file.call("aten::sum", 540, 20, [4, 6], [], [], [], Concrete_Inputs=["", "[0]", "True", ""])
    file.segment("optimizer", 700, 300)
    file.call("aten::_fused_adamw_", 720, 200, [[6, 8], [6]], [[6, 8], [6]])
    return file
