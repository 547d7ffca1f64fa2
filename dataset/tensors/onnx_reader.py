"""Reads an ONNX graph as calls on tensors; its weights stay unread, and nothing in the file runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stepsight.dataset.base.bounded import read_file
from stepsight.dataset.base.errors import CaptureError, need
from stepsight.dataset.base.files import preset
from stepsight.dataset.kinds.op import Op
from stepsight.dataset.tensors.calls import POINTWISE, attention, matrix_product, rows_of, streamed
from stepsight.dataset.tensors.ranks import TensorStep
from stepsight.dataset.tensors.readers import Found, ModelReader, Shape, check_count, check_names, check_order, named
from stepsight.dataset.traces.classify import DTYPES

_OPS = preset("model_ops.toml")["onnx"]
_TYPES = {int(number): DTYPES[name] for number, name in _OPS["types"].items()}
_STREAMED = {name: kind for kind, names in _OPS["kinds"].items() for name in names.split()}
_VIEWS, _SAME, _LIKE_FIRST = (frozenset(_OPS[key].split()) for key in ("views", "same", "like_first"))
_FLOATS = (1, 10, 11, 16)
_NORMS = {"Softmax": "softmax", "LayerNormalization": "layer_norm", "RMSNormalization": "rms_norm"}
_NORMS["SimplifiedLayerNormalization"] = "rms_norm"
_SMALL = 1024  # elements of a constant that may be a shape


def open_onnx(path: Path, dims: Mapping[str, int]) -> OnnxReader:
    """The reader of an ONNX model (else ``CaptureError``); ``dims``: sizes of symbolic dimensions, 1 for others."""
    need("onnx")
    import onnx
    from google.protobuf.message import DecodeError

    hint, invalid = "", onnx.shape_inference.InferenceError
    try:
        model = onnx.load_model_from_string(read_file(path))
        check_count(path, _num_nodes(model))
        if len(model.functions):
            model = onnx.inliner.inline_local_functions(model)
        graph = model.graph
        names = {dim.dim_param for given in graph.input for dim in given.type.tensor_type.shape.dim}
        check_names(path, dims, names - {""})
        if not graph.node:
            raise ValueError("it must have at least one node, got none")
        given = [each.name for each in (*graph.input, *graph.initializer)]
        given += [each.values.name for each in graph.sparse_initializer]
        rows = [(_title(node), node.input, node.output) for node in graph.node]
        check_order([*rows, ("the graph", [each.name for each in graph.output], [])], given)
        _check_ranges(graph)
        missing, constants = dict[str, None](), {tensor.name for tensor in graph.initializer}
        for each in (each for each in graph.input if each.name not in constants):
            for dim in each.type.tensor_type.shape.dim:
                if not dim.HasField("dim_value") or dim.dim_value < 1:
                    if dim.dim_param not in dims:
                        missing[dim.dim_param or f"of {each.name}"] = None
                    dim.dim_value = dims.get(dim.dim_param, 1)
        hint = f"dimensions {', '.join(missing)} are taken as 1: give their sizes with --dims" if missing else ""
        del graph.value_info[:]
        for output in graph.output:
            output.type.tensor_type.ClearField("shape")
        for tensor in graph.initializer:
            if math.prod(tensor.dims) > _SMALL:
                tensor.ClearField("raw_data")
        inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    except CaptureError:
        raise
    except (DecodeError, OSError, RuntimeError, ValueError, invalid, onnx.checker.ValidationError) as error:
        told = f"{' '.join(str(error).split()):.300}{hint and f' ({hint})'}"
        raise CaptureError(f"{path} must be an ONNX model: {told}") from None
    return OnnxReader(inferred, hint)


def _check_ranges(graph: Any) -> None:
    """Check that no range counts further than a model can: onnx works its shape out number by number."""
    from onnx.numpy_helper import to_array

    tensors = {tensor.name: tensor for tensor in graph.initializer}
    tensors |= {node.output[0]: at.t for node in graph.node for at in node.attribute if at.HasField("t")}
    for node in graph.node:
        given = (tensors[name] for name in node.input if node.op_type == "Range" and name in tensors)
        if any(math.prod(each.dims) == 1 and abs(to_array(each).item()) > ModelReader.left for each in given):
            raise CaptureError(f"{_title(node)} must count to at most {ModelReader.left}")


def _num_nodes(model: Any) -> int:
    """Nodes of a graph once its functions are inlined: functions that call each other twice make billions of one."""
    bodies = {(each.domain, each.name): each.node for each in model.functions}
    for node in (node for nodes in (model.graph.node, *bodies.values()) for node in nodes):
        if any(at.HasField("g") or at.graphs for at in node.attribute):
            raise CaptureError(f"{_title(node)} must not branch or loop: its way is not known before it runs")

    sizes: dict[tuple[str, str], int] = {}

    def size(node: Any) -> int:
        key = node.domain, node.op_type
        if key not in sizes:
            sizes[key] = 1  # of a function that calls itself
            sizes[key] = min(sum(map(size, bodies.get(key, ()))), 2**62) or 1
        return sizes[key]

    lists = (model.graph.initializer, model.graph.input, model.graph.output, model.graph.value_info)
    return max(sum(map(size, model.graph.node)), *map(len, lists))


def _title(node: Any) -> str:
    return f"node {node.name or ', '.join(node.output):.80} ({node.op_type:.40})"


class OnnxReader(ModelReader):
    """Reads one graph whose shapes are known."""

    def __init__(self, model: Any, hint: str) -> None:
        super().__init__()
        self._graph = graph = model.graph
        self._opsets = {each.domain: each.version for each in model.opset_import}
        self.notes, self._hint = [hint] if hint else [], hint and f" ({hint})"
        self.shapes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
        self._types: dict[str, int] = {tensor.name: tensor.data_type for tensor in graph.initializer}
        self.parameters = frozenset(
            tensor.name for tensor in graph.initializer if tensor.data_type in _FLOATS and len(tensor.dims)
        )
        self._keep_types({value.name: value.type for value in (*graph.input, *graph.value_info, *graph.output)})

    def _keep_types(self, found: Mapping[str, Any]) -> None:
        for name, each in found.items():
            tensor = each.tensor_type
            if tensor.HasField("shape") and all(dim.HasField("dim_value") for dim in tensor.shape.dim):
                self.shapes.setdefault(name, tuple(max(dim.dim_value, 1) for dim in tensor.shape.dim))
            self._types.setdefault(name, tensor.elem_type)

    def read(self) -> TensorStep:
        import onnx

        graph = self._graph
        for tensor in graph.initializer:
            if tensor.name not in self.parameters and math.prod(tensor.dims) <= _SMALL:
                self.constants[tensor.name] = onnx.numpy_helper.to_array(tensor)
        for node in graph.node:
            with named(_title(node) + self._hint):
                self._node(node)
        inputs, outputs = ([each.name for each in side] for side in (graph.input, graph.output))
        return self.step(inputs, outputs, [_TYPES.get(self._types[name], _TYPES[1])[0] for name in self.parameters])

    def _node(self, node: Any) -> None:
        reads, writes = ([name for name in names if name] for names in (node.input, node.output))
        self._infer(node, reads, writes)
        if node.op_type == "Identity":
            self.same[writes[0]] = self.same.get(reads[0], reads[0])
            self.shapes[writes[0]] = self.shapes.get(reads[0], ())
            if reads[0] in self.constants:
                self.constants[writes[0]] = self.constants[reads[0]]
        elif not self._is_computed(node, reads, writes) and writes:
            is_view = node.op_type in _VIEWS
            self.add(self._found(node, reads), writes, node.name or node.op_type, None if is_view else node)
            for mask in writes[1:] if node.op_type == "Dropout" else ():  # inference keeps all elements
                if mask in self.shapes and self.affords(math.prod(self.shapes[mask])):
                    self.constants[mask] = np.ones(self.shapes[mask], dtype=bool)

    def _infer(self, node: Any, reads: Sequence[str], writes: Sequence[str]) -> None:
        """Find shapes that follow from values, which the inference of the whole graph does not know."""
        import onnx

        if {*writes} <= self.shapes.keys() or not {*reads} <= self.shapes.keys():
            return
        try:
            schema = onnx.defs.get_schema(node.op_type, self._opsets.get(node.domain, 1), node.domain)
            types = {name: onnx.helper.make_tensor_type_proto(self._types[name], self.shapes[name]) for name in reads}
            known = [name for name in reads if name in self.constants]
            data = {name: onnx.numpy_helper.from_array(self.constants[name]) for name in known}
            found = onnx.shape_inference.infer_node_outputs(schema, node, types, data)
        except (onnx.shape_inference.InferenceError, onnx.checker.ValidationError) as error:
            told = " ".join(str(error).split())
            raise CaptureError(f"{_title(node)} must fit its inputs: {told:.200}") from None
        except (onnx.defs.SchemaError, LookupError, RuntimeError):  # an op that the library does not know
            if node.op_type in _LIKE_FIRST and reads:
                self.shapes[writes[0]], self._types[writes[0]] = self.shapes[reads[0]], self._types[reads[0]]
            return
        self._keep_types(found)

    def _is_computed(self, node: Any, reads: Sequence[str], writes: Sequence[str]) -> bool:
        """Compute what follows from shapes or constants alone, if it is small."""
        import onnx.reference

        numel = sum(math.prod(self.shapes.get(name, (ModelReader.left + 1,))) for name in writes)
        is_random = _STREAMED.get(node.op_type) == "random"
        if node.op_type == "Shape" and reads[0] in self.shapes:
            found: Any = [self.shapes[self.same.get(reads[0], reads[0])]]
        elif is_random or not {*reads} <= self.constants.keys() or not self.affords(numel):
            return False
        else:
            try:
                given = {name: self.constants[name] for name in reads}
                found = onnx.reference.ReferenceEvaluator(node).run(None, given)
            except (RuntimeError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError):
                return False  # an op that the library does not compute
        for name, value in zip(writes, found, strict=False):
            self.constants[name] = array = np.asarray(value)
            self.shapes[name], self._types[name] = array.shape, onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
        return True

    def _found(self, node: Any, reads: list[str]) -> Found:
        kind, settings = node.op_type, _settings(node)
        rank = len(self.shapes.get(reads[0], ())) if reads else 0
        plain = all(settings.get(name, 1.0) == 1.0 for name in ("alpha", "beta"))
        if kind in ("MatMul", "Gemm") and plain and min(len(self.shapes.get(name, ())) for name in reads[:2]) > 1:
            return "product", {"left": settings.get("transA"), "right": settings.get("transB")}, reads
        if kind in _SAME or kind == "Expand":
            return "expand" if kind == "Expand" else "reshape", {}, reads[:1]
        if kind == "Transpose":
            return "permute", {"order": tuple(settings.get("perm") or range(rank)[::-1])}, reads
        if kind in ("Split", "Concat"):
            return kind.lower(), {"axis": settings.get("axis", 0) % rank}, reads[:1] if kind == "Split" else reads
        if kind in ("Slice", "Gather") and (index := self._index(kind, settings, reads[1:], rank)):
            return "index", {"index": index}, reads[:1]
        if kind == "Gather" and settings.get("axis", 0) == 0 and rank == 2:
            return "embedding", {}, reads
        if kind in _NORMS:
            axis = settings.get("axis", -1) % rank
            axes = (axis,) if kind == "Softmax" else tuple(range(axis, rank))
            return _NORMS[kind], {"axes": axes, "epsilon": settings.get("epsilon", 1e-5)}, reads
        if kind in ("ReduceMean", "ReduceSum", "ReduceMax"):
            reduced = settings.get("axes") or (self.constants[reads[1]].tolist() if len(reads) > 1 else range(rank))
            how = kind.removeprefix("Reduce").lower()
            return "reduce", {"reduced": tuple(axis % rank for axis in reduced), "how": how}, reads[:1]
        lower = "gelu_tanh" if kind == "Gelu" and settings.get("approximate") == b"tanh" else kind.lower()
        return lower if lower in POINTWISE else kind, {}, reads

    def _index(self, kind: str, settings: Mapping[str, Any], reads: Sequence[str], rank: int) -> tuple[Any, ...]:
        """The constant index of a slice or gather; empty if it is not constant."""
        if not {*reads} <= self.constants.keys():
            return ()
        index: list[Any] = [slice(None)] * rank
        values = [self.constants[name].tolist() for name in reads]
        if kind == "Gather":
            index[settings.get("axis", 0)] = values[0]
            return tuple(index) if np.ndim(values[0]) < 2 else ()
        values = values or [settings[key] for key in ("starts", "ends", "axes") if key in settings]  # opset < 10
        count = len(values[0])
        values += [list(range(count)), [1] * count][len(values) - 2 :]
        for start, end, axis, step in zip(*values, strict=True):
            index[axis] = slice(start, end, step)
        return tuple(index)

    def kernels(self, node: Any, shapes: Mapping[str, Shape]) -> tuple[Sequence[Op | None], str]:
        kind, given, sizes = node.op_type, _settings(node), [shapes.get(name, ()) for name in node.input]
        writes = [name for name in node.output if name]
        if not sizes:
            return [], ""
        first, result = sizes[0], shapes.get(writes[0], ())
        dtype, weight = _TYPES.get(self._types.get(node.input[0] or writes[0], 1), _TYPES[1])
        match kind:
            case "Gather" if len(first) == 2 and self.same.get(node.input[0], node.input[0]) in self.parameters:
                return [Op("embedding", (max(math.prod(sizes[1]), 1), first[1], first[0]), dtype)], ""
            case "Attention" if node.domain == "com.microsoft":  # with projections of q, k and v
                part = [*first[:-1], sizes[1][-1] // 3]
                return [matrix_product(first, sizes[1], dtype), _heads(given, part, part, dtype)], ""
            case "Attention" | "MultiHeadAttention" | "GroupQueryAttention":
                return [_heads(given, first, sizes[1] or first, dtype)], ""
            case "SkipLayerNormalization":
                return [streamed("add", first, dtype), rows_of("layer_norm", first, dtype)], ""
            case "LSTM" | "GRU" | "RNN":
                gates, directions = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind], min(sizes[2][0], 2)
                return [Op("recurrent", (*first, sizes[2][-1], gates), dtype)] * directions, ""
            case "MatMul" | "Gemm" | "FusedMatMul":
                left = first[::-1] if given.get("transA") else first
                return [matrix_product(left, sizes[1], dtype, transposed=bool(given.get("transB")))], ""
            case "Conv" | "ConvTranspose":
                return [_convolution(kind, given.get("group") or 1, (first, sizes[1], result), dtype)], ""
            case "Softmax" | "LogSoftmax":
                return [rows_of("softmax", first, dtype)], ""
            case _ if kind in _NORMS or kind in ("GroupNormalization", "InstanceNormalization"):
                hidden = math.prod(first[given.get("axis", -1) :])
                return [rows_of(_NORMS.get(kind, "layer_norm"), first, dtype, hidden)], ""
            case "BatchNormalization":
                return [Op("batch_norm", (math.prod(first) // sizes[1][0], sizes[1][0]), dtype)], ""
            case "MaxPool" | "AveragePool" | "GlobalAveragePool" | "GlobalMaxPool":
                return [Op("pool", (math.prod(first[:2]), math.prod(first[2:]), math.prod(result[2:])), dtype)], ""
        known = _STREAMED.get(kind)
        largest = max([*sizes, result] if known in ("reduce", None) else [result, first], key=math.prod)
        elements = [max(int(math.prod(largest) * weight), 1)]
        if known == "cast" and dtype not in ("fp16", "bf16"):
            dtype, known = "fp32", "elementwise"
        return [streamed(known or "elementwise", elements, dtype)], "" if known else kind


def _settings(node: Any) -> Mapping[str, Any]:
    """Settings of a node by name."""
    import onnx

    return {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}


def _convolution(kind: str, groups: int, shapes: Sequence[Shape], dtype: str) -> Op:
    """Of an image, a weight and a result."""
    image, weight, result = shapes
    ins, outs = (weight[0] // groups, weight[1] * groups) if kind == "ConvTranspose" else (weight[1], weight[0])
    if image[1] != ins * groups:
        raise ValueError(f"a convolution's input must have {ins * groups} channels, as its weight, got {image[1]}")
    positions, window = (math.prod(result[2:]), math.prod(image[2:])), math.prod(weight[2:])
    return Op("conv", (image[0], ins, outs, positions[0], window, groups, positions[1], len(image) - 2), dtype)


def _heads(given: Mapping[str, Any], q: Shape, k: Shape, dtype: str) -> Op | None:
    """Attention of ``[batch, heads, length, dim]``, or ``[batch, length, heads * dim]`` with numbers of heads."""
    heads = given.get("q_num_heads") or given.get("num_heads") or 1
    of_keys = given.get("kv_num_heads") or heads
    if len(q) == 3:
        q, k = ([each[0], many, each[1], each[2] // many] for each, many in ((q, heads), (k, of_keys)))
    return attention(q, k, dtype, causal=bool(given.get("is_causal") or given.get("unidirectional")))
