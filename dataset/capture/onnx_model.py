"""Reads the forward of a model from an ONNX file.

Only the graph is read: weights in other files stay unread, and nothing in the file runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from stepsight.dataset.base.errors import CaptureError, need
from stepsight.dataset.capture.model_steps import (
    ModelStep,
    ModelSteps,
    attention,
    matrix_product,
    norm,
    rows_of,
    streamed,
)
from stepsight.dataset.kinds.op import Op

# ONNX's numbers of types: our name, and the number of its elements in one of ours.
_TYPES = MappingProxyType(
    {1: ("fp32", 1.0), 10: ("fp16", 1.0), 16: ("bf16", 1.0), 11: ("fp32", 2.0), 7: ("fp32", 2.0), 6: ("fp32", 1.0),
     9: ("fp8", 1.0), 2: ("fp8", 1.0), 3: ("fp8", 1.0), 17: ("fp8", 1.0), 19: ("fp8", 1.0)}
)  # fmt: skip
_FLOATS = (1, 10, 11, 16)
_SMALL = 1024  # elements of a constant that may be a shape
_VIEWS = frozenset(
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
    """Read a model.

    Args:
        path: Of the file.
        dims: Sizes of symbolic dimensions by their names; others are 1.

    Raises:
        CaptureError: If it is not a model.
        StepsightError: If the library onnx is not installed.
    """
    need("onnx")
    import onnx
    from google.protobuf.message import DecodeError

    try:
        model = onnx.load(str(path), load_external_data=False)
        if len(model.functions):
            model = onnx.inliner.inline_local_functions(model)
        missing = _set_dims(model.graph, dims)
        for tensor in model.graph.initializer:
            if math.prod(tensor.dims) > _SMALL:
                tensor.ClearField("raw_data")
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    except (DecodeError, OSError, RuntimeError, ValueError, *_errors(onnx)) as error:
        raise CaptureError(f"{path.name} must be an ONNX model: {str(error).splitlines()[0]:.200}") from None
    if not inferred.graph.node:
        raise CaptureError(f"{path.name} must be an ONNX model with at least one node, got none")
    return _Reader(inferred.graph, missing).model()


def _errors(onnx: Any) -> tuple[type[Exception], ...]:
    """Errors that the library raises for invalid graphs."""
    return onnx.checker.ValidationError, onnx.shape_inference.InferenceError


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


class _Reader:
    """Reads one graph whose shapes are known."""

    def __init__(self, graph: Any, missing: list[str]) -> None:
        self._graph, self._missing = graph, missing
        self._shapes: dict[str, list[int]] = {tensor.name: list(tensor.dims) for tensor in graph.initializer}
        self._types: dict[str, int] = {tensor.name: tensor.data_type for tensor in graph.initializer}
        self.parameters = frozenset(
            tensor.name for tensor in graph.initializer if tensor.data_type in _FLOATS and len(tensor.dims)
        )
        for value in (*graph.input, *graph.value_info, *graph.output):
            tensor = value.type.tensor_type
            self._shapes.setdefault(value.name, [max(dim.dim_value, 1) for dim in tensor.shape.dim])
            self._types.setdefault(value.name, tensor.elem_type)
        self._source: dict[str, str] = {}
        self._unknown: dict[str, None] = {}

    def model(self) -> ModelSteps:
        steps = [step for node in self._graph.node for step in self._steps(node)]
        notes = []
        if self._missing:
            notes.append(f"dimensions {', '.join(self._missing)} are taken as 1: give their sizes with --dims")
        if self._unknown:
            notes.append(f"ops that are not known, counted as element-wise: {', '.join(self._unknown)}")
        types = [_TYPES.get(self._types[name], ("fp32", 1.0))[0] for name in self.parameters] or ["fp32"]
        numel = {name: math.prod(shape) for name, shape in self._shapes.items()}
        return ModelSteps(tuple(steps), numel, self.parameters, max(types, key=types.count), tuple(notes))

    def _steps(self, node: Any) -> list[ModelStep]:
        reads = tuple(dict.fromkeys(self._root(name) for name in node.input if name))
        writes = [name for name in node.output if name]
        if node.op_type in _VIEWS:
            self._source |= dict.fromkeys(writes, reads[0]) if reads else {}
            return []
        if not reads or not writes:
            return []
        steps, ops = [], self._ops(node, writes)
        known = node.op_type not in self._unknown
        for op in ops:
            if op is not None:
                steps.append(ModelStep(node.name or node.op_type, op, reads, tuple(writes), known))
        return steps

    def _root(self, name: str) -> str:
        while name in self._source:
            name = self._source[name]
        return name

    def _ops(self, node: Any, writes: list[str]) -> list[Op | None]:
        shapes = [self._shapes.get(name, []) for name in node.input]
        result = self._shapes.get(writes[0], [])
        dtype, weight = _TYPES.get(self._types.get(node.input[0] if node.input[0] else writes[0], 1), ("fp32", 1.0))
        settings = {attribute.name: _value(attribute) for attribute in node.attribute}
        special = _SPECIAL.get(node.op_type)
        if node.op_type == "Gather" and self._root(node.input[0]) in self.parameters and len(shapes[0]) == 2:
            return [Op("embedding", (max(math.prod(shapes[1]), 1), shapes[0][1], shapes[0][0]), dtype)]
        if node.op_type == "Attention" and node.domain == "com.microsoft":
            return _with_products(shapes, result, dtype, settings)
        if special is not None:
            return special(shapes, result, dtype, settings)
        kind = _STREAMED.get(node.op_type)
        if kind is None:
            self._unknown[node.op_type] = None
        largest = max([*shapes, result] if kind in ("reduce", None) else [result, shapes[0]], key=math.prod)
        sizes = [max(int(math.prod(largest) * weight), 1)]
        if kind == "cast" and dtype not in ("fp16", "bf16"):
            dtype, kind = "fp32", "elementwise"
        return [streamed(kind or "elementwise", sizes, dtype)]


def _value(attribute: Any) -> Any:
    """Number, numbers or text of an attribute."""
    by_type = {1: attribute.f, 2: attribute.i, 3: attribute.s, 7: list(attribute.ints)}
    return by_type.get(attribute.type)


Shapes = list[list[int]]
Settings = Mapping[str, Any]


def _gemm(shapes: Shapes, result: list[int], dtype: str, settings: Settings) -> list[Op | None]:
    left = shapes[0][::-1] if settings.get("transA") else shapes[0]
    return [matrix_product(left, shapes[1], dtype, transposed=bool(settings.get("transB")))]


def _convolution(shapes: Shapes, result: list[int], dtype: str, settings: Settings) -> list[Op | None]:
    return [_conv_op(shapes, result, dtype, settings.get("group") or 1, shapes[1][1], shapes[1][0])]


def _transposed(shapes: Shapes, result: list[int], dtype: str, settings: Settings) -> list[Op | None]:
    groups = settings.get("group") or 1
    return [_conv_op(shapes, result, dtype, groups, shapes[1][0] // groups, shapes[1][1] * groups)]


def _conv_op(shapes: Shapes, result: list[int], dtype: str, groups: int, ins: int, outs: int) -> Op:
    image, weight = shapes[:2]
    window, spatial = math.prod(weight[2:]), len(image) - 2
    positions = math.prod(result[2:]), math.prod(image[2:])
    return Op("conv", (image[0], ins, outs, positions[0], window, groups, positions[1], spatial), dtype)


def _normed(shapes: Shapes, result: list[int], dtype: str, settings: Settings) -> list[Op | None]:
    axis = settings.get("axis", -1)
    return [norm("layer_norm", shapes[0], math.prod(shapes[0][axis:]), dtype)]


def _rms(shapes: Shapes, result: list[int], dtype: str, settings: Settings) -> list[Op | None]:
    return [norm("rms_norm", shapes[0], shapes[0][-1] if shapes[0] else 1, dtype)]


def _added_norm(shapes: Shapes, result: list[int], dtype: str, settings: Settings) -> list[Op | None]:
    return [streamed("add", shapes[0], dtype), *_normed(shapes, result, dtype, {})]


def _softmax(shapes: Shapes, result: list[int], dtype: str, settings: Settings) -> list[Op | None]:
    return [rows_of("softmax", shapes[0], dtype)]


def _batch_norm(shapes: Shapes, result: list[int], dtype: str, settings: Settings) -> list[Op | None]:
    channels = shapes[1][0]
    return [Op("batch_norm", (math.prod(shapes[0]) // channels, channels), dtype)]


def _pool(shapes: Shapes, result: list[int], dtype: str, settings: Settings) -> list[Op | None]:
    image = shapes[0]
    return [Op("pool", (math.prod(image[:2]), math.prod(image[2:]), math.prod(result[2:])), dtype)]


def _recurrent(gates: int) -> Callable[..., list[Op | None]]:
    def ops(shapes: Shapes, result: list[int], dtype: str, settings: Settings) -> list[Op | None]:
        directions, hidden = shapes[2][0], shapes[2][-1]
        steps, batch, given = shapes[0]
        return [Op("recurrent", (steps, batch, given, hidden, gates), dtype)] * directions

    return ops


def _heads(shapes: Shapes, result: list[int], dtype: str, settings: Settings) -> list[Op | None]:
    """Attention of ``[batch, heads, length, dim]``, or ``[batch, length, heads * dim]`` with numbers of heads."""
    q, k = shapes[0], shapes[1] or shapes[0]
    heads = settings.get("q_num_heads") or settings.get("num_heads") or 1
    of_keys = settings.get("kv_num_heads") or heads
    if len(q) == 3:
        q, k = ([each[0], many, each[1], each[2] // many] for each, many in ((q, heads), (k, of_keys)))
    causal = bool(settings.get("is_causal") or settings.get("unidirectional"))
    return [attention(q, k, dtype, causal=causal)]


def _with_products(shapes: Shapes, result: list[int], dtype: str, settings: Settings) -> list[Op | None]:
    """Attention with the projections of queries, keys and values."""
    width = shapes[1][-1] // 3
    part = [*shapes[0][:-1], width]
    return [matrix_product(shapes[0], shapes[1], dtype), *_heads([part, part], result, dtype, settings)]


_SPECIAL: MappingProxyType[str, Callable[..., list[Op | None]]] = MappingProxyType(
    {
        "MatMul": _gemm,
        "Gemm": _gemm,
        "FusedMatMul": _gemm,
        "Conv": _convolution,
        "ConvTranspose": _transposed,
        "LayerNormalization": _normed,
        "SkipLayerNormalization": _added_norm,
        "GroupNormalization": _normed,
        "InstanceNormalization": _normed,
        "RMSNormalization": _rms,
        "SimplifiedLayerNormalization": _rms,
        "Softmax": _softmax,
        "LogSoftmax": _softmax,
        "BatchNormalization": _batch_norm,
        "MaxPool": _pool,
        "AveragePool": _pool,
        "GlobalAveragePool": _pool,
        "GlobalMaxPool": _pool,
        "LSTM": _recurrent(4),
        "GRU": _recurrent(3),
        "RNN": _recurrent(1),
        "Attention": _heads,
        "MultiHeadAttention": _heads,
        "GroupQueryAttention": _heads,
    }
)
