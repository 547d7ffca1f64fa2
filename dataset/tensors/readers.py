"""Model files as tensor programs: what the nodes of an ONNX graph, and of one of ``torch.export``, are as calls.

Weights stay unread; of constants, only small ones are read, and what follows from constants and shapes is computed.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stepsight.dataset.base.errors import CaptureError
from stepsight.dataset.capture.model_files import PRECISIONS
from stepsight.dataset.capture.model_readers import ATEN_VIEWS, ONNX_VIEWS, SMALL, open_exported, open_onnx, tensors_of
from stepsight.dataset.kinds.op import Op
from stepsight.dataset.tensors.calls import POINTWISE, Shapes, TensorCall
from stepsight.dataset.tensors.ranks import no_ops

Found = tuple[str, dict[str, Any], list[str]]  # op, settings and reads of a node
_EPSILON = float(np.finfo(np.float32).eps)  # of a norm that states none
_MOST = 2**22  # elements of a constant that is computed
_SAME = ("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Dropout")
_ATEN_NAMES = (
    "view reshape _unsafe_view unsqueeze squeeze flatten unflatten contiguous clone dropout alias detach _to_copy to "
    "lift_fresh_copy view_as"
)
_ATEN_SAME = frozenset(_ATEN_NAMES.split())


def load_tensors(path: Path, dims: Mapping[str, int], precision: str) -> dict[str, Any]:
    """Read a model as the attributes of a ``TensorStep``; raises ``CaptureError`` if its shapes are not known."""
    if path.suffix not in (".onnx", ".pt2") or not path.is_file():
        raise CaptureError(f"a tensor program must be read from a file .onnx or .pt2, got {str(path)!r:.200}")
    if precision not in ("", *PRECISIONS):
        raise CaptureError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r:.40}")
    try:
        reader = _Onnx(open_onnx(path, dims)) if path.suffix == ".onnx" else _Exported(open_exported(path, dims))
        return reader.program(precision)
    except CaptureError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise CaptureError(f"{path.name} must be a whole model: {type(error).__name__}: {error!s:.200}") from None


class _Reader(ABC):
    """What both formats share: ``reader``, whose signatures of ops are used, and the calls found so far."""

    def __init__(self, reader: Any) -> None:
        self.model = reader.model()
        self.reader, self.calls = reader, list[TensorCall]()
        self.shapes: dict[str, tuple[int, ...]] = {name: tuple(shape) for name, shape in reader.shapes.items()}
        self.constants: dict[str, Any] = {}
        self.same: dict[str, str] = {}  # names of one tensor

    def made(self, inputs: Sequence[str], outputs: Sequence[str], precision: str) -> dict[str, Any]:
        """Attributes of the step."""
        read = {name for call in self.calls for name in call.reads}
        written = {name for call in self.calls for name in call.writes}
        inputs = [name for name in dict.fromkeys([*inputs, *sorted(read - written)]) if name in read]
        given = [name for name in inputs if name not in self.constants and name not in self.model.parameters]
        found = {name: self.same.get(name, name) for name in outputs}
        if not self.calls or not {*found.values()} <= written:
            raise CaptureError(f"a tensor program must compute its outputs, got {len(self.calls)} calls")
        return {
            "calls": tuple(self.calls),
            "shapes": {name: self.shapes[name] for name in (*read, *written)},
            "inputs": tuple(given),
            "parameters": tuple(name for name in self.shapes if name in self.model.parameters and name in read),
            "outputs": found,
            "constants": {name: value for name, value in self.constants.items() if name in read},
            "dtype": precision or self.model.dtype,
            "precision": precision,
            "notes": self.model.notes,
        }

    def add(self, found: Found, writes: Sequence[str], name: str, node: Any) -> None:
        """Add a call, and as one of its own the bias that a product adds."""
        op, settings, reads = found
        names = [self.same.get(each, each) for each in reads]
        unknown = [each for each in (*names, *writes) if each not in self.shapes]
        if unknown:
            raise CaptureError(f"shapes of all tensors must be known, got none of {unknown[0]!r:.80} of {name!r:.80}")
        place = len(self.calls)
        ops = self.ops_of(node, reads, writes)
        if op == "product" and len(reads) > 2:
            plain = f"{writes[0]} without bias"
            self.shapes[plain] = self.shapes[writes[0]]
            self.calls.append(TensorCall(op, (*names[:2],), (plain,), settings, name, origin=place, ops=ops))
            bias = TensorCall("add", (plain, names[2]), (*writes,), {"bias": True}, name, origin=place)
            self.calls.append(bias)
        else:
            self.calls.append(TensorCall(op, (*names,), (*writes,), settings, name, origin=place, ops=ops))

    def ops_of(self, node: Any, reads: Sequence[str], writes: Sequence[str]) -> Any:
        """Signatures of the kernels of a node, from shapes."""

        def ops(of_reads: Shapes, of_writes: Shapes) -> list[Op]:
            local = dict(zip((*reads, *writes), map(list, (*of_reads, *of_writes)), strict=False))
            return [op for op in self.signatures(node, ChainMap(local, self.reader.shapes)) if op is not None]

        return no_ops if self.is_view(node) else ops

    @abstractmethod
    def signatures(self, node: Any, shapes: Mapping[str, Any]) -> Sequence[Op | None]:
        """Signatures of a node's kernels; None: none."""

    @abstractmethod
    def is_view(self, node: Any) -> bool:
        """Whether a node only views or names tensors."""


class _Onnx(_Reader):
    def program(self, precision: str) -> dict[str, Any]:
        import onnx

        graph, known = self.reader.graph, self.model.parameters
        for tensor in graph.initializer:
            if tensor.name not in known and math.prod(tensor.dims) <= SMALL:
                self.constants[tensor.name] = onnx.numpy_helper.to_array(tensor)
        for node in graph.node:
            self._node(node)
        given = [each.name for each in graph.input if each.name not in self.constants and each.name not in known]
        return self.made(given, [each.name for each in graph.output], precision)

    def _node(self, node: Any) -> None:
        reads = [name for name in node.input if name]
        if node.op_type == "Identity":
            self.same[node.output[0]] = self.same.get(reads[0], reads[0])
            if reads[0] in self.constants:
                self.constants[node.output[0]] = self.constants[reads[0]]
        elif node.op_type == "Shape":
            self._keep(node.output, [np.array(self.shapes[self.same.get(reads[0], reads[0])], dtype=np.int64)])
        elif all(name in self.constants for name in reads) and self._is_small(node):
            from onnx.reference import ReferenceEvaluator

            run = ReferenceEvaluator(node)
            self._keep(node.output, run.run(None, {name: self.constants[name] for name in reads}))
        else:
            self.add(self._found(node, reads), [name for name in node.output if name], node.name or node.op_type, node)

    def _is_small(self, node: Any) -> bool:
        return all(math.prod(self.shapes.get(name, (_MOST + 1,))) <= _MOST for name in node.output if name)

    def _keep(self, names: Sequence[str], values: Sequence[Any]) -> None:
        for name, value in zip(names, values, strict=False):
            self.constants[name], self.shapes[name] = np.asarray(value), np.shape(value)

    def _found(self, node: Any, reads: list[str]) -> Found:
        kind, settings, rank = node.op_type, self.reader.settings(node), len(self.shapes.get(reads[0], ()))
        plain = all(settings.get(name, 1.0) == 1.0 for name in ("alpha", "beta"))
        if kind in ("MatMul", "Gemm") and plain and min(len(self.shapes[name]) for name in reads[:2]) > 1:
            return "product", {"left": settings.get("transA"), "right": settings.get("transB")}, reads
        if kind in _SAME or kind == "Expand":
            return "expand" if kind == "Expand" else "reshape", {}, reads[:1]
        if kind == "Transpose":
            return "permute", {"order": tuple(settings.get("perm") or range(rank)[::-1])}, reads
        if kind in ("Split", "Concat"):
            kept = reads[:1] if kind == "Split" else reads
            return kind.lower(), {"axis": settings.get("axis", 0) % rank}, kept
        if kind in ("Slice", "Gather") and (index := self._index(kind, settings, reads[1:], rank)):
            return "index", {"index": index}, reads[:1]
        if kind == "Gather" and settings.get("axis", 0) == 0 and rank == 2:
            return "embedding", {}, reads
        if kind in ("Softmax", "LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"):
            axis = settings.get("axis", -1) % rank
            axes = (axis,) if kind == "Softmax" else tuple(range(axis, rank))
            op = "softmax" if kind == "Softmax" else "layer_norm" if kind == "LayerNormalization" else "rms_norm"
            return op, {"axes": axes, "epsilon": settings.get("epsilon", 1e-5)}, reads
        if kind in ("ReduceMean", "ReduceSum", "ReduceMax"):
            reduced = settings.get("axes") or (self.constants[reads[1]].tolist() if len(reads) > 1 else range(rank))
            how = kind.removeprefix("Reduce").lower()
            return "reduce", {"reduced": tuple(axis % rank for axis in reduced), "how": how}, reads[:1]
        lower = "gelu_tanh" if kind == "Gelu" and settings.get("approximate") == b"tanh" else kind.lower()
        return lower if lower in POINTWISE else kind, dict(settings), reads

    def _index(self, kind: str, settings: Mapping[str, Any], reads: Sequence[str], rank: int) -> tuple[Any, ...]:
        """The constant index of a slice or gather; empty if it is not constant."""
        if not all(name in self.constants for name in reads):
            return ()
        index: list[Any] = [slice(None)] * rank
        values = [self.constants[name].tolist() for name in reads]
        if kind == "Gather":
            index[settings.get("axis", 0)] = values[0]
            return tuple(index) if np.ndim(values[0]) < 2 else ()
        count = len(values[0])
        values += [list(range(count)), [1] * count][len(values) - 2 :]
        for start, end, axis, step in zip(*values, strict=True):
            index[axis] = slice(start, end, step)
        return tuple(index)

    def signatures(self, node: Any, shapes: Mapping[str, Any]) -> Sequence[Op | None]:
        found: list[Op | None] = self.reader.signatures(node, [name for name in node.output if name], shapes)
        return found

    def is_view(self, node: Any) -> bool:
        return node.op_type in ONNX_VIEWS


class _Exported(_Reader):
    def program(self, precision: str) -> dict[str, Any]:
        graph = self.reader.graph
        for node in graph["nodes"]:
            self._node(node)
        specs = self.reader.specs
        first = [spec["user_input"]["arg"].get("as_tensor", {}).get("name") for spec in specs if "user_input" in spec]
        given = [name for each in graph["inputs"] for name in tensors_of(each)]
        outputs = [name for each in graph["outputs"] for name in tensors_of(each)]
        return self.made([name for name in (*first, *given) if name], outputs, precision)

    def _node(self, node: Mapping[str, Any]) -> None:
        name = self.reader.name_of(node)
        writes = [tensor for output in node["outputs"] for tensor in tensors_of(output)]
        given = {each["name"]: each["arg"] for each in node["inputs"]}
        reads = [tensor for each in given.values() for tensor in tensors_of(each)]
        if name == "arange":
            ends = [_number(given[each]) for each in ("start", "end", "step") if each in given]
            self.constants[writes[0]] = np.arange(*ends)
        elif name == "unbind":
            axis, rank = _number(given.get("dim", {"as_int": 0})), len(self.shapes[reads[0]])
            for place, made in enumerate(writes):
                index = tuple(place if dim == axis % rank else slice(None) for dim in range(rank))
                self.add(("index", {"index": index}, reads), [made], name, node)
        elif writes:
            self.add(self._found(name, given, reads, writes), writes, name, node)

    def _found(self, name: str, given: Mapping[str, Any], reads: list[str], writes: Sequence[str]) -> Found:
        rank = len(self.shapes[reads[0]]) if reads else 0
        number = {key: _number(value) for key, value in given.items()}
        if name in ("linear", "matmul", "bmm", "mm") and min(len(self.shapes[each]) for each in reads[:2]) > 1:
            return "product", {"right": name == "linear"}, reads
        if name == "addmm" and number.get("alpha", 1) == number.get("beta", 1) == 1:
            return "product", {}, [*reads[1:], reads[0]]
        if name in _ATEN_SAME or name in ("expand", "expand_as"):
            return "expand" if name in ("expand", "expand_as") else "reshape", {}, reads[:1]
        if name in ("t", "transpose", "permute"):
            order = [axis % rank for axis in number.get("dims") or range(rank)]
            if name != "permute":
                one, two = (number.get(key, place) % rank for key, place in (("dim0", 0), ("dim1", 1)))
                order[one], order[two] = order[two], order[one]
            return "permute", {"order": tuple(order)}, reads
        if name in ("split", "split_with_sizes", "chunk", "cat"):
            return "concat" if name == "cat" else "split", {"axis": number.get("dim", 0) % rank}, reads
        if name in ("slice", "select"):
            axis = number.get("dim", 0) % rank
            part = slice(number.get("start"), number.get("end"), number.get("step"))
            index = tuple(
                (number["index"] if name == "select" else part) if place == axis else slice(None)
                for place in range(rank)
            )
            return "index", {"index": index}, reads
        if name in ("softmax", "_softmax"):
            return "softmax", {"axes": (number["dim"] % rank,)}, reads
        if name in ("layer_norm", "rms_norm"):
            axes = tuple(range(rank - len(number["normalized_shape"]), rank))
            return name, {"axes": axes, "epsilon": number.get("eps") or _EPSILON}, reads
        if name == "scaled_dot_product_attention" and rank == 4:
            return "attention", {"causal": number.get("is_causal"), "scale": number.get("scale")}, reads
        if name in ("mean", "sum"):
            reduced = number.get("dim") or range(rank)
            return "reduce", {"reduced": tuple(axis % rank for axis in reduced), "how": name}, reads
        if name == "embedding":
            return "embedding", {}, reads
        if name == "gelu" and number.get("approximate") == "tanh":
            return "gelu_tanh", {}, reads
        name = name if name in POINTWISE and number.get("alpha", 1) == 1 else f"aten::{name}"
        return name, {}, [*reads, *self._scalars(name, given, writes)]

    def _scalars(self, name: str, given: Mapping[str, Any], writes: Sequence[str]) -> Iterator[str]:
        """Numbers that an op on elements reads, as constants."""
        for key, value in given.items():
            if name in POINTWISE and key in ("other", "exponent") and isinstance(_number(value), int | float):
                constant = f"{writes[0]} {key}"
                self.constants[constant], self.shapes[constant] = np.array(float(_number(value))), ()
                yield constant

    def signatures(self, node: Any, shapes: Mapping[str, Any]) -> Sequence[Op | None]:
        writes = [tensor for output in node["outputs"] for tensor in tensors_of(output)]
        return [self.reader.signature(self.reader.name_of(node), node, writes, shapes)[0]]

    def is_view(self, node: Any) -> bool:
        return self.reader.name_of(node) in ATEN_VIEWS


def _number(argument: Mapping[str, Any]) -> Any:
    """A number, text or list of an argument; None for a tensor."""
    known = ("as_int", "as_float", "as_bool", "as_string", "as_ints", "as_floats")
    return next((value for key, value in argument.items() if key in known), None)
