"""Reads the forward of a model from an ONNX file, or one that ``torch.export.save`` wrote (``.pt2``).

Only the graph is read: weights, constants and sample inputs stay unread, and nothing in the file runs.
"""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from stepsight.dataset.base.bounded import read_file
from stepsight.dataset.base.errors import CaptureError, need
from stepsight.dataset.capture.model_steps import (
    ModelReader,
    ModelStep,
    ModelSteps,
    attention,
    matrix_product,
    norm,
    rows_of,
    streamed,
)
from stepsight.dataset.capture.record_graph import op_of_call
from stepsight.dataset.kinds.op import Op
from stepsight.dataset.traces.classify import DTYPES, Scope

# ONNX's numbers of types: our name, and the number of its elements in one of ours.
_ONNX_TYPES = MappingProxyType(
    {1: ("fp32", 1.0), 10: ("fp16", 1.0), 16: ("bf16", 1.0), 11: ("fp32", 2.0), 7: ("fp32", 2.0), 6: ("fp32", 1.0),
     9: ("fp8", 1.0), 2: ("fp8", 1.0), 3: ("fp8", 1.0), 17: ("fp8", 1.0), 19: ("fp8", 1.0)}
)  # fmt: skip
_FLOATS = (1, 10, 11, 16)
MOST_NODES = 60_000  # of a graph
SMALL = 1024  # elements of a constant that may be a shape
ONNX_VIEWS = frozenset(
    ["Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Shape", "Size", "Constant", "ConstantOfShape", "Range"]
)
_KINDS = {
    "copy": "Transpose Concat Slice Split Expand Pad Tile Gather GatherElements GatherND ScatterElements ScatterND "
    "DepthToSpace SpaceToDepth Resize",
    "reduce": "ReduceMean ReduceSum ReduceMax ReduceMin ReduceProd ReduceL2 ReduceSumSquare ReduceLogSumExp ArgMax "
    "ArgMin CumSum",
    "add": "Add Sum",
    "gelu": "Gelu FastGelu BiasGelu QuickGelu",
    "relu": "Relu",
    "dropout": "Dropout",
    "sort": "TopK",
    "random": "RandomNormal RandomNormalLike RandomUniform RandomUniformLike Bernoulli",
    "elementwise": "Sub Mul Div Pow Sqrt Exp Log Erf Tanh Sigmoid Neg Abs Reciprocal Where Clip Min Max Floor Ceil "
    "Round Sign Sin Cos Softplus Elu Selu LeakyRelu PRelu HardSigmoid HardSwish Mish Swish And Or Not Xor Equal "
    "Greater GreaterOrEqual Less LessOrEqual Mod IsNaN IsInf Trilu OneHot",
    "cast": "Cast CastLike",
}
_STREAMED = MappingProxyType({name: kind for kind, names in _KINDS.items() for name in names.split()})


def read_onnx(path: Path, dims: Mapping[str, int]) -> ModelSteps:
    """Read an ONNX model (else ``CaptureError``); ``dims``: sizes of symbolic dimensions by name, 1 for others."""
    return open_onnx(path, dims).model()


def open_onnx(path: Path, dims: Mapping[str, int]) -> OnnxReader:
    """The reader of an ONNX model, as ``read_onnx`` takes it."""
    need("onnx")
    import onnx
    from google.protobuf.message import DecodeError

    try:
        model = onnx.load_model_from_string(read_file(path))
        check_count(path, _num_nodes(model))
        if len(model.functions):
            model = onnx.inliner.inline_local_functions(model)
        names = {dim.dim_param for given in model.graph.input for dim in given.type.tensor_type.shape.dim}
        _check_dims(path, dims, names - {""})
        missing = _set_dims(model.graph, dims)
        for tensor in model.graph.initializer:
            if math.prod(tensor.dims) > SMALL:
                tensor.ClearField("raw_data")
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    except CaptureError:
        raise
    except (DecodeError, OSError, RuntimeError, ValueError, *_errors(onnx)) as error:
        raise CaptureError(f"{path.name} must be an ONNX model: {str(error).splitlines()[0]:.200}") from None
    if not inferred.graph.node:
        raise CaptureError(f"{path.name} must be an ONNX model with at least one node, got none")
    return OnnxReader(inferred.graph, missing)


def _num_nodes(model: Any) -> int:
    """Nodes of a graph once its functions are inlined: functions that call each other twice make billions of one."""
    sizes: dict[tuple[str, str], float] = {}
    bodies = {(each.domain, each.name): each.node for each in model.functions}

    def total(nodes: Any) -> float:
        if len(nodes) > MOST_NODES:
            return float(len(nodes))
        graphs = [graph for node in nodes for at in node.attribute for graph in (at.g, *at.graphs)]
        return sum(size((node.domain, node.op_type)) for node in nodes) + sum(total(graph.node) for graph in graphs)

    def size(key: tuple[str, str]) -> float:
        if key not in sizes:
            sizes[key] = math.inf  # while it is counted: a function that calls itself
            sizes[key] = total(bodies[key]) if key in bodies else 1
        return sizes[key]

    lists = (model.graph.initializer, model.graph.input, model.graph.output, model.graph.value_info)
    return int(min(max(total(model.graph.node), *map(len, lists)), 2**62))


def check_count(path: Path, count: int) -> None:
    """Refuse a model with more nodes than any has, before memory is taken for them."""
    if count > MOST_NODES:
        raise CaptureError(f"{path.name} must have at most {MOST_NODES} nodes and tensors, got {count}")


def _errors(onnx: Any) -> tuple[type[Exception], ...]:
    """Errors that the library raises for invalid graphs."""
    return onnx.checker.ValidationError, onnx.shape_inference.InferenceError


def _check_dims(path: Path, dims: Mapping[str, int], names: Collection[str]) -> None:
    """Check that sizes are of dimensions that a model has, and that each is a whole number of at least 1."""
    for name, size in dims.items():
        if name not in names:
            known = ", ".join(sorted(names)) or "none"
            raise CaptureError(f"{path.name} must have the dimension {name!r:.80}; it has {known:.200}")
        if type(size) is not int or size < 1:
            raise CaptureError(f"a dimension must be a whole number of at least 1, got {name} = {size!r:.80}")


def _set_dims(graph: Any, dims: Mapping[str, int]) -> list[str]:
    """Set the sizes of symbolic dimensions of inputs; return the dimensions without a size."""
    missing: dict[str, None] = {}
    constants = {tensor.name for tensor in graph.initializer}
    for given in graph.input:
        for dim in given.type.tensor_type.shape.dim if given.name not in constants else ():
            if not dim.HasField("dim_value"):
                if dim.dim_param not in dims:
                    missing[dim.dim_param or f"of {given.name}"] = None
                dim.dim_value = dims.get(dim.dim_param, 1)
    del graph.value_info[:]
    for output in graph.output:
        output.type.tensor_type.ClearField("shape")
    return list(missing)


@dataclass(frozen=True)
class _Call:
    """A node of the graph: shapes of its inputs and of its first output, type and settings."""

    shapes: list[list[int]]
    result: list[int]
    dtype: str
    settings: Mapping[str, Any]


class OnnxReader(ModelReader):
    """Reads one graph whose shapes are known."""

    def __init__(self, graph: Any, missing: list[str]) -> None:
        super().__init__()
        self.graph = graph
        if missing:
            self.notes.append(f"dimensions {', '.join(missing)} are taken as 1: give their sizes with --dims")
        self.shapes = {tensor.name: list(tensor.dims) for tensor in graph.initializer}
        self._types: dict[str, int] = {tensor.name: tensor.data_type for tensor in graph.initializer}
        self.parameters = frozenset(
            tensor.name for tensor in graph.initializer if tensor.data_type in _FLOATS and len(tensor.dims)
        )
        for value in (*graph.input, *graph.value_info, *graph.output):
            tensor = value.type.tensor_type
            self.shapes.setdefault(value.name, [max(dim.dim_value, 1) for dim in tensor.shape.dim])
            self._types.setdefault(value.name, tensor.elem_type)

    def model(self) -> ModelSteps:
        steps = [step for node in self.graph.node for step in self._steps(node)]
        return self.of_steps(steps, [_onnx_type(self._types[name])[0] for name in self.parameters])

    def _steps(self, node: Any) -> list[ModelStep]:
        reads = tuple(dict.fromkeys(self.root(name) for name in node.input if name))
        writes = [name for name in node.output if name]
        if node.op_type in ONNX_VIEWS:
            self.add_views(writes, reads)
        if node.op_type in ONNX_VIEWS or not reads or not writes:
            return []
        ops = self.signatures(node, writes, self.shapes)
        known = node.op_type not in self.unknown
        name = node.name or node.op_type
        return [ModelStep(name, op, reads, tuple(writes), known) for op in ops if op is not None]

    def settings(self, node: Any) -> Mapping[str, Any]:
        """Settings of a node by name."""
        return {each.name: _value(each) for each in node.attribute}

    def signatures(self, node: Any, writes: list[str], of: Mapping[str, list[int]]) -> list[Op | None]:
        """Signatures of a node whose tensors have the shapes ``of``."""
        shapes = [of.get(name, []) for name in node.input]
        result = of.get(writes[0], [])
        dtype, weight = _onnx_type(self._types.get(node.input[0] if node.input[0] else writes[0], 1))
        call = _Call(shapes, result, dtype, self.settings(node))
        if node.op_type == "Gather" and self.root(node.input[0]) in self.parameters and len(shapes[0]) == 2:
            return [Op("embedding", (max(math.prod(shapes[1]), 1), shapes[0][1], shapes[0][0]), dtype)]
        if node.op_type == "Attention" and node.domain == "com.microsoft":  # with projections of q, k and v
            part = [*shapes[0][:-1], shapes[1][-1] // 3]
            return [matrix_product(shapes[0], shapes[1], dtype), _heads(replace(call, shapes=[part, part]))]
        if node.op_type == "SkipLayerNormalization":
            return [streamed("add", shapes[0], dtype), _layer_norm(replace(call, settings={}))]
        if node.op_type in _GATES:
            directions, hidden = shapes[2][0], shapes[2][-1]
            return [Op("recurrent", (*shapes[0], hidden, _GATES[node.op_type]), dtype)] * min(directions, 2)
        if node.op_type in _SPECIAL:
            return [_SPECIAL[node.op_type](call)]
        kind = _STREAMED.get(node.op_type)
        if kind is None:
            self.unknown[node.op_type] = None
        largest = max([*shapes, result] if kind in ("reduce", None) else [result, shapes[0]], key=math.prod)
        sizes = [max(int(math.prod(largest) * weight), 1)]
        if kind == "cast" and dtype not in ("fp16", "bf16"):
            dtype, kind = "fp32", "elementwise"
        return [streamed(kind or "elementwise", sizes, dtype)]


def _onnx_type(number: int) -> tuple[str, float]:
    return _ONNX_TYPES.get(number, ("fp32", 1.0))


def _value(attribute: Any) -> Any:
    """Number, numbers or text of an attribute."""
    by_type = {1: attribute.f, 2: attribute.i, 3: attribute.s, 7: list(attribute.ints)}
    return by_type.get(attribute.type)


def _product(call: _Call) -> Op | None:
    left = call.shapes[0][::-1] if call.settings.get("transA") else call.shapes[0]
    return matrix_product(left, call.shapes[1], call.dtype, transposed=bool(call.settings.get("transB")))


def _convolution(call: _Call, *, transposed: bool = False) -> Op:
    (image, weight), groups = call.shapes[:2], call.settings.get("group") or 1
    ins, outs = (weight[0] // groups, weight[1] * groups) if transposed else (weight[1], weight[0])
    positions, window = (math.prod(call.result[2:]), math.prod(image[2:])), math.prod(weight[2:])
    return Op("conv", (image[0], ins, outs, positions[0], window, groups, positions[1], len(image) - 2), call.dtype)


def _layer_norm(call: _Call) -> Op | None:
    shape = call.shapes[0]
    return norm("layer_norm", shape, math.prod(shape[call.settings.get("axis", -1) :]), call.dtype)


def _rms_norm(call: _Call) -> Op | None:
    shape = call.shapes[0]
    return norm("rms_norm", shape, shape[-1] if shape else 1, call.dtype)


def _softmax(call: _Call) -> Op | None:
    return rows_of("softmax", call.shapes[0], call.dtype)


def _batch_norm(call: _Call) -> Op:
    channels = call.shapes[1][0]
    return Op("batch_norm", (math.prod(call.shapes[0]) // channels, channels), call.dtype)


def _pool(call: _Call) -> Op:
    image = call.shapes[0]
    return Op("pool", (math.prod(image[:2]), math.prod(image[2:]), math.prod(call.result[2:])), call.dtype)


def _heads(call: _Call) -> Op | None:
    """Attention of ``[batch, heads, length, dim]``, or ``[batch, length, heads * dim]`` with numbers of heads."""
    settings, q, k = call.settings, call.shapes[0], call.shapes[1] or call.shapes[0]
    heads = settings.get("q_num_heads") or settings.get("num_heads") or 1
    of_keys = settings.get("kv_num_heads") or heads
    if len(q) == 3:
        q, k = ([each[0], many, each[1], each[2] // many] for each, many in ((q, heads), (k, of_keys)))
    causal = bool(settings.get("is_causal") or settings.get("unidirectional"))
    return attention(q, k, call.dtype, causal=causal)


_GATES = MappingProxyType({"LSTM": 4, "GRU": 3, "RNN": 1})
_MAKERS: dict[Callable[[_Call], Op | None], str] = {
    _product: "MatMul Gemm FusedMatMul",
    _convolution: "Conv",
    partial(_convolution, transposed=True): "ConvTranspose",
    _layer_norm: "LayerNormalization GroupNormalization InstanceNormalization",
    _rms_norm: "RMSNormalization SimplifiedLayerNormalization",
    _softmax: "Softmax LogSoftmax",
    _batch_norm: "BatchNormalization",
    _pool: "MaxPool AveragePool GlobalAveragePool GlobalMaxPool",
    _heads: "Attention MultiHeadAttention GroupQueryAttention",
}
_SPECIAL = MappingProxyType({name: maker for maker, names in _MAKERS.items() for name in names.split()})


MOST_TEXT = 2**25  # bytes of the graph's text: parsed, it takes up to thirty times as many
# torch's numbers of types, in the words of its profiler.
_PROFILER_TYPES = MappingProxyType(
    {
        1: "unsigned char", 2: "signed char", 3: "short", 4: "int", 5: "long int", 6: "c10::Half", 7: "float",
        8: "double", 12: "bool", 13: "c10::BFloat16", 29: "c10::Float8_e4m3fn", 30: "c10::Float8_e5m2",
    }
)  # fmt: skip
_VIEW_NAMES = (
    "view reshape permute transpose t unsqueeze squeeze expand expand_as slice select split split_with_sizes chunk "
    "unbind detach alias flatten unflatten narrow swapaxes getitem _assert_tensor_metadata sym_size _assert_scalar "
    "lift_fresh_copy movedim view_as contiguous size"
)
ATEN_VIEWS = frozenset(_VIEW_NAMES.split())  # and ops that compute no tensor


def read_exported(path: Path, dims: Mapping[str, int]) -> ModelSteps:
    """Read an exported program, else raise ``CaptureError``.

    ``dims``: sizes of symbolic dimensions by torch's names (``s77``); others are those of the sample inputs.
    """
    try:
        return open_exported(path, dims).model()
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        if isinstance(error, CaptureError):
            raise
        raise _not_exported(path, error) from None


def _not_exported(path: Path, error: Exception) -> CaptureError:
    return CaptureError(f"{path.name} must be a file that torch.export.save wrote: {error}")


def open_exported(path: Path, dims: Mapping[str, int]) -> ExportedReader:
    """The reader of an exported program, as ``read_exported`` takes it."""
    try:
        with zipfile.ZipFile(path) as archive:
            found = [entry for entry in archive.infolist() if entry.filename.endswith("/models/model.json")
                     or entry.filename.endswith("serialized_exported_program.json")]  # fmt: skip
            if len(found) != 1 or found[0].file_size > MOST_TEXT:
                told = f"{len(found)} of {sum(entry.file_size for entry in found)} bytes"
                raise CaptureError(
                    f"{path.name} must hold one exported program of at most {MOST_TEXT} bytes, got {told}"
                )
            tree = json.loads(archive.read(found[0]))
            check_count(path, len(tree["graph_module"]["graph"]["nodes"]))
        _check_dims(path, dims, dict(tree.get("range_constraints") or {}))
        return ExportedReader(tree, dims)
    except zipfile.BadZipFile:
        raise CaptureError(
            f"{path.name} must be a whole file that torch.export.save wrote, but it is cut short or of another format: "
            "save or copy it again"
        ) from None
    except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        if isinstance(error, CaptureError):
            raise
        raise _not_exported(path, error) from None


class ExportedReader(ModelReader):
    """Reads one program."""

    def __init__(self, tree: Mapping[str, Any], dims: Mapping[str, int]) -> None:
        super().__init__()
        module = tree["graph_module"]
        self.graph, self._dims = module["graph"], dims
        values = self.graph["tensor_values"].items()
        self.shapes = {name: [self._size(size) for size in meta["sizes"]] for name, meta in values}
        self._types = {name: _PROFILER_TYPES.get(meta["dtype"], "float") for name, meta in values}
        self.specs = module["signature"]["input_specs"]
        self.parameters = frozenset(spec["parameter"]["arg"]["name"] for spec in self.specs if "parameter" in spec)

    def model(self) -> ModelSteps:
        steps = [step for node in self.graph["nodes"] for step in self._steps(node)]
        return self.of_steps(steps, [DTYPES[self._types[name]][0] for name in self.parameters])

    def _size(self, size: Mapping[str, Any]) -> int:
        if "as_int" in size:
            return int(size["as_int"])
        expression = size["as_expr"]
        hint = (expression.get("hint") or {}).get("as_int", 1)
        return int(self._dims.get(expression["expr_str"], hint))

    def name_of(self, node: Mapping[str, Any]) -> str:
        """Name of the op of a node."""
        words = node["target"].split(".")
        return str(words[3] if words[:3] == ["torch", "ops", "aten"] and len(words) > 3 else words[-1])

    def _steps(self, node: Mapping[str, Any]) -> list[ModelStep]:
        name = self.name_of(node)
        writes = [tensor for output in node["outputs"] for tensor in tensors_of(output)]
        reads = [self.root(tensor) for given in node["inputs"] for tensor in tensors_of(given["arg"])]
        is_view = name in ATEN_VIEWS or not writes
        op, known = (None, True) if is_view else self.signature(name, node, writes, self.shapes)
        if not known:
            self.unknown[name] = None
        if op is None:
            self.add_views(writes, reads)
            return []
        return [ModelStep(name, op, tuple(dict.fromkeys(reads)), tuple(writes), known)]

    def signature(
        self, name: str, node: Mapping[str, Any], writes: list[str], of: Mapping[str, list[int]]
    ) -> tuple[Op | None, bool]:
        """Signature of a node whose tensors have the shapes ``of``, and whether its kind is known."""
        given = {each["name"]: each["arg"] for each in node["inputs"]}
        shapes = [of[tensor] for each in node["inputs"] for tensor in tensors_of(each["arg"])]
        dtype = DTYPES[self._types[writes[0]]][0]
        if name in ("linear", "matmul", "bmm", "mm") and len(shapes) > 1:
            return matrix_product(shapes[0], shapes[1], dtype, transposed=name == "linear"), True
        if name == "scaled_dot_product_attention":
            causal = bool(given.get("is_causal", {}).get("as_bool", False))
            return attention(shapes[0], shapes[1], dtype, causal=causal), True
        if name in ("layer_norm", "rms_norm", "group_norm"):
            hidden = math.prod(given.get("normalized_shape", {}).get("as_ints", shapes[0][-1:]))
            return norm(name, shapes[0], hidden, dtype), True
        if name in ("softmax", "_softmax", "log_softmax"):
            return rows_of("softmax", shapes[0], dtype), True
        dims, types, literals = [], [], []
        for each in node["inputs"]:
            tensors = tensors_of(each["arg"])
            listed = "as_tensors" in each["arg"]
            dims.append([of[t] for t in tensors] if listed else of[tensors[0]] if tensors else [])
            types.append(f"TensorList {self._types[tensors[0]]}" if listed and tensors else
                         self._types[tensors[0]] if tensors else "Scalar")  # fmt: skip
            literals.append("" if tensors else str(next(iter(each["arg"].values()), "")))
        made = (of[writes[0]], self._types[writes[0]], len(writes))
        return op_of_call((f"aten::{name}", dims, types, [()] * len(dims), literals, made), Scope())


def tensors_of(argument: Mapping[str, Any]) -> list[str]:
    """Names of the tensors of an argument."""
    if "as_tensor" in argument:
        return [argument["as_tensor"]["name"]]
    if "as_tensors" in argument:
        return [each["name"] for each in argument["as_tensors"]]
    if "as_optional_tensor" in argument:
        return [each["name"] for each in argument["as_optional_tensor"].values() if isinstance(each, dict)]
    return []
