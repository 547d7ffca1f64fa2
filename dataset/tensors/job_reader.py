"""The model of a job as calls on tensors: decoders of the families GPT and Llama, as the simulator's blocks count them.

Rotary positions are a product with a constant matrix that turns pairs of numbers, two products and a sum; they count as
one kernel, as a fused one does, and so does the gate of SwiGLU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from stepsight.dataset.base.errors import CaptureError
from stepsight.dataset.job.job import Job
from stepsight.dataset.job.model_spec import ModelSpec
from stepsight.dataset.kinds.op import Op
from stepsight.dataset.tensors.calls import attention, matrix_product, rows_of, streamed
from stepsight.dataset.tensors.ranks import TensorStep
from stepsight.dataset.tensors.readers import ModelReader, Shape

FAMILIES = ("gpt", "llama")
_EPSILON = 1e-5  # of norms
_ROPE_BASE = 10_000.0
MOST_LAYERS = 1_000

Kernels = Callable[[list[Shape], Shape], Op | None]  # the signature of a call, from what it reads and its output


class JobReader(ModelReader):
    """Writes the forward of a job's model for all sequences of a global batch; logits are the output."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        model, batch = job.model, job.batch
        heads_differ = model.head_dim and model.head_dim * model.heads != model.hidden
        if model.family not in FAMILIES or model.experts or model.attention != "mha" or heads_differ:
            rule = f"must be of a dense decoder ({' or '.join(FAMILIES)}) whose heads make its width"
            found = f"{job.model_name} of family {model.family!r:.40}"
            raise CaptureError(f"a tensor program {rule}, got {found}: export the model, and load the file")
        if model.layers > MOST_LAYERS:
            raise CaptureError(f"a tensor program must have at most {MOST_LAYERS} layers, got {model.layers}")
        self._model, self._rows = model, batch.global_batch
        self._weights: list[str] = []

    def read(self) -> TensorStep:
        model, size = self._model, (self._rows, self._model.seq_len)
        self.shapes["tokens"] = size
        table = self._parameter("embedding.weight", model.vocab, model.hidden)
        x = self._call(("embedding", {}, [table, "tokens"]), "embedding", (*size, model.hidden), _embedded)
        if model.family == "gpt":
            x = self._sum(x, self._parameter("positions.weight", model.seq_len, model.hidden), "positions")
        else:
            self._add_rotation()
        for layer in range(model.layers):
            name = f"layers.{layer}"
            x = self._sum(x, self._attention(self._norm(x, f"{name}.norm1"), f"{name}.attention"), f"{name}.add1")
            x = self._sum(x, self._mlp(self._norm(x, f"{name}.norm2"), f"{name}.mlp"), f"{name}.add2")
        x = self._norm(x, "norm")
        table = table if model.tied_embeddings else self._parameter("head.weight", model.vocab, model.hidden)
        logits = self._call(("product", {"right": True}, [x, table]), "head", (*size, model.vocab), _multiplied)
        self.parameters = frozenset(self._weights)
        self.notes.append("the loss of a job is left out: the gradients of the logits are inputs, as with a file")
        return self.step(["tokens"], [logits], ["fp32"])

    def kernels(self, node: Any, shapes: Mapping[str, Shape]) -> tuple[Sequence[Op | None], str]:
        kernel, reads, made = node
        return [kernel([shapes[name] for name in reads], shapes[made])], ""

    def _parameter(self, name: str, *shape: int) -> str:
        self.shapes[name] = shape
        self._weights.append(name)
        return name

    def _call(
        self, found: tuple[str, dict[str, Any], list[str]], name: str, shape: Shape, kernel: Kernels | None = None
    ) -> str:
        """Add a call with one output, which has the call's name and op; without ``kernel`` it costs nothing."""
        made = f"{name} {found[0]}"
        self.shapes[made] = shape
        self.add(found, [made], name, kernel and (kernel, tuple(found[2]), made))
        return made

    def _sum(self, x: str, y: str, name: str) -> str:
        return self._call(("add", {}, [x, y]), name, self.shapes[x], _streams("add"))

    def _linear(self, x: str, name: str, columns: int) -> str:
        *rows, inner = self.shapes[x]
        given = [x, self._parameter(f"{name}.weight", columns, inner)]
        given += [self._parameter(f"{name}.bias", columns)] if self._model.has_bias else []
        return self._call(("product", {"right": True}, given), name, (*rows, columns), _multiplied)

    def _norm(self, x: str, name: str) -> str:
        op, parts = ("layer_norm", ("weight", "bias")) if self._model.has_bias else ("rms_norm", ("weight",))
        given = [x, *(self._parameter(f"{name}.{part}", self._model.hidden) for part in parts)]
        kernel: Kernels = lambda reads, made: rows_of(op, reads[0], "fp32")
        return self._call((op, {"axes": (2,), "epsilon": _EPSILON}, given), name, self.shapes[x], kernel)

    def _split(self, x: str, name: str, count: int) -> list[str]:
        *rows, columns = self.shapes[x]
        made = [f"{name} part {part}" for part in range(count)]
        self.shapes |= dict.fromkeys(made, (*rows, columns // count))
        self.add(("split", {"axis": 2}, [x]), made, name, None)
        return made

    def _attention(self, x: str, name: str) -> str:
        model, (batch, length, hidden) = self._model, self.shapes[x]
        wide = hidden // model.heads
        if model.kv_heads == model.heads:
            parts = self._split(self._linear(x, f"{name}.qkv", 3 * hidden), f"{name}.qkv", 3)
        else:
            kv = model.kv_heads * wide
            parts = [
                self._linear(x, f"{name}.{part}", size) for part, size in zip("qkv", (hidden, kv, kv), strict=True)
            ]
        heads = []
        for part, of in zip("qkv", parts, strict=True):
            count = self.shapes[of][-1] // wide
            rows = self._call(("reshape", {}, [of]), f"{name}.{part} heads", (batch, length, count, wide))
            shape = (batch, count, length, wide)
            head = self._call(("permute", {"order": (0, 2, 1, 3)}, [rows]), f"{name}.{part} heads", shape)
            heads.append(self._rotated(head, f"{name}.{part}") if model.family == "llama" and part != "v" else head)
        shape = (batch, model.heads, length, wide)
        call = "attention", {"causal": True}, heads
        attended = self._call(call, name, shape, lambda reads, _: attention(reads[0], reads[1], "fp32", causal=True))
        order = (batch, length, model.heads, wide)
        rows = self._call(("permute", {"order": (0, 2, 1, 3)}, [attended]), f"{name} rows", order)
        rows = self._call(("reshape", {}, [rows]), f"{name} rows", (batch, length, hidden))
        return self._linear(rows, f"{name}.out", hidden)

    def _add_rotation(self) -> None:
        """Constants of rotary positions: places, angles of one place, and what makes (-x2, x1) of halves (x1, x2)."""
        wide = self._model.hidden // self._model.heads
        half = np.eye(wide // 2)
        turn = np.block([[0 * half, half], [-half, 0 * half]])
        angles = np.tile(_ROPE_BASE ** (-np.arange(0, wide, 2) / wide), 2)
        places = np.arange(self._model.seq_len, dtype=np.float64)[:, None]
        self.constants |= {"rope places": places, "rope angles": angles, "rope turn": turn}
        self.shapes |= {name: self.constants[name].shape for name in ("rope places", "rope angles", "rope turn")}

    def _rotated(self, x: str, name: str) -> str:
        """Heads turned by their places.  Angles are made anew each time, so that no pipeline stage sends them."""
        shape = self.shapes[x]
        angles = self._call(("mul", {}, ["rope places", "rope angles"]), f"{name} angles", shape[2:])
        cos, sin = (self._call((op, {}, [angles]), f"{name} angles", shape[2:]) for op in ("cos", "sin"))
        plain = self._call(("mul", {}, [x, cos]), f"{name} straight", shape)
        turned = self._call(("product", {}, [x, "rope turn"]), f"{name} turned", shape)
        crossed = self._call(("mul", {}, [turned, sin]), f"{name} turned", shape)
        return self._call(("add", {}, [plain, crossed]), f"{name} rope", shape, _streams("rope"))

    def _mlp(self, x: str, name: str) -> str:
        model: ModelSpec = self._model
        if model.gated_mlp:
            gate, up = self._split(self._linear(x, f"{name}.up", 2 * model.ffn), f"{name}.up", 2)
            open_gate = self._call(("silu", {}, [gate]), f"{name}.gate", self.shapes[gate])
            made = self._call(("mul", {}, [open_gate, up]), f"{name}.gate", self.shapes[up], _streams("swiglu"))
        else:
            up = self._linear(x, f"{name}.up", model.ffn)
            made = self._call(("gelu", {}, [up]), f"{name}.act", self.shapes[up], _streams("gelu"))
        return self._linear(made, f"{name}.down", model.hidden)


def _streams(kind: str) -> Kernels:
    return lambda reads, made: streamed(kind, made, "fp32")


def _multiplied(reads: list[Shape], made: Shape) -> Op | None:
    return matrix_product(reads[0], reads[1], "fp32", transposed=True)


def _embedded(reads: list[Shape], made: Shape) -> Op | None:
    (vocab, hidden), tokens = reads[0], reads[1]
    return Op("embedding", (int(np.prod(tokens)), hidden, vocab), "fp32")
