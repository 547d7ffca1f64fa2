"""Reads a program of ``torch.export`` as calls on tensors; its weights stay unread, and nothing in the file runs."""

from __future__ import annotations

import ast
import json
import math
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stepsight.dataset.base.bounded import reason
from stepsight.dataset.base.errors import MALFORMED, CaptureError, StepsightError
from stepsight.dataset.base.files import preset
from stepsight.dataset.capture.captured import op_of_call
from stepsight.dataset.kinds.op import Op
from stepsight.dataset.tensors.calls import POINTWISE, attention, matrix_product, rows_of
from stepsight.dataset.tensors.ranks import TensorStep
from stepsight.dataset.tensors.readers import Found, ModelReader, Shape, check_count, check_names, check_order, named
from stepsight.dataset.traces.classify import DTYPES, NAMES, Scope

_GRAPHS = ("/models/model.json", "serialized_exported_program.json")  # ends of names in the archive
MOST_TEXT = 2**25  # bytes of the graph's text: parsed, it takes up to thirty times as many
_OPS = preset("model_ops.toml")["exported"]
_TYPES = {int(number): name for number, name in _OPS["types"].items()}  # in the words of torch's profiler
_SAME = frozenset(_OPS["same"].split())
_VIEWS = frozenset([*NAMES["weightless"].split(), "lift_fresh_copy"])
_SYMBOL = re.compile(r"(?:Symbol\(')?([a-z]\w*)(?:'[^()]*\))?")  # of one dimension
_OF_SIZES: dict[str, Callable[[list[int]], int]] = {"Mul": math.prod, "Add": sum, "Max": max, "Min": min}
_OF_SIZES["FloorDiv"] = lambda pair: pair[0] // max(pair[1], 1)
_EPSILON = float(np.finfo(np.float32).eps)  # of a norm that states none


def open_exported(path: Path, dims: Mapping[str, int]) -> ExportedReader:
    """The reader of an exported program, else ``CaptureError``.

    ``dims``: sizes of symbolic dimensions by torch's names (``s77``); others are those of the sample inputs.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            found = [entry for entry in archive.infolist() if entry.filename.endswith(_GRAPHS)]
            if len(found) != 1 or found[0].file_size > MOST_TEXT:
                told = f"at most {MOST_TEXT} bytes, got {len(found)} of {sum(each.file_size for each in found)} bytes"
                raise CaptureError(f"{path} must hold one exported program of {told}")
            tree = json.loads(archive.read(found[0]))
        check_count(path, len(tree["graph_module"]["graph"]["nodes"]))
        ranges = dict(tree.get("range_constraints") or {})
        check_names(path, dims, ranges)
        for name, size in dims.items():
            least, most = (ranges[name].get(key) for key in ("min_val", "max_val"))
            if not (least or 0) <= size <= (size if most is None else most):
                rule = f"{path} holds for {name} from {least} to {most}, got {size}"
                raise CaptureError(f"{rule}: export it again with another range")
        return ExportedReader(tree, dims)
    except StepsightError:
        raise
    except (*MALFORMED, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        rule = "must be a file that torch.export.save wrote, save or copy it again"
        raise CaptureError(f"{path} {rule}: {reason(error):.200}") from None


class ExportedReader(ModelReader):
    """Reads one program."""

    def __init__(self, tree: Mapping[str, Any], dims: Mapping[str, int]) -> None:
        super().__init__()
        module = tree["graph_module"]
        self._graph = module["graph"]
        values = self._graph["tensor_values"].items()
        self._symbols: dict[str, int] = {}  # sizes of dynamic dimensions; the user is told of those that are not given
        for name in _names(self._graph["inputs"]):
            for place, size in enumerate(self._graph["tensor_values"][name]["sizes"]):
                found = _SYMBOL.fullmatch(size.get("as_expr", {}).get("expr_str", "-"))
                if found is None or found[1] in self._symbols:
                    continue
                symbol = found[1]
                self._symbols[symbol] = taken = dims.get(symbol, self._size(size))
                if symbol not in dims:
                    why = f"as in the sample inputs: give another size with --dims {symbol}=..."
                    self.notes.append(f"dimension {place} of {name} is taken as {taken}, {why}")
        self.shapes = {name: tuple(map(self._size, meta["sizes"])) for name, meta in values}
        self._types = {name: _TYPES.get(meta["dtype"], "float") for name, meta in values}
        self._specs = module["signature"]["input_specs"]
        self.parameters = frozenset(spec["parameter"]["arg"]["name"] for spec in self._specs if "parameter" in spec)

    def read(self) -> TensorStep:
        graph, given, outputs = self._graph, _names(self._graph["inputs"]), _names(self._graph["outputs"])
        rows = [(f"node {place} ({_name_of(node)})", *_names_of(node)) for place, node in enumerate(graph["nodes"])]
        check_order([*rows, ("the graph", outputs, [])], given)
        for (title, *_), node in zip(rows, graph["nodes"], strict=True):
            with named(title):
                self._node(node)
        first = _names(spec.get("user_input", {}).get("arg", {}) for spec in self._specs)
        types = [DTYPES[self._types[name]][0] for name in self.parameters]
        return self.step([*first, *given], outputs, types)

    def _size(self, size: Mapping[str, Any]) -> int:
        if "as_int" in size:
            return int(size["as_int"])
        expression = size["as_expr"]
        try:
            return _evaluated(ast.parse(expression["expr_str"][:1000], mode="eval").body, self._symbols)
        except (LookupError, SyntaxError):  # of sizes that only a run tells, or in a form that is not known
            return int((expression.get("hint") or {}).get("as_int", 1))

    def _node(self, node: Mapping[str, Any]) -> None:
        name, (reads, writes) = _name_of(node), _names_of(node)
        number = {each["name"]: _number(each["arg"]) for each in node["inputs"]}
        of = None if name in _VIEWS else node
        start, step = number.get("start", 0), number.get("step", 1)
        if name == "arange" and None not in (start, step) and self.affords(math.prod(self.shapes[writes[0]])):
            self.constants[writes[0]] = start + step * np.arange(self.shapes[writes[0]][0])
        elif name == "unbind":
            axis = number.get("dim", 0) % len(self.shapes[reads[0]])
            parts = {f"{made} of one": made for made in writes}
            self.shapes |= {part: (*(x := self.shapes[made])[:axis], 1, *x[axis:]) for part, made in parts.items()}
            self.add(("split", {"axis": axis}, reads), [*parts], name, of)
            for part, made in parts.items():
                self.add(("reshape", {}, [part]), [made], name, of)
        elif writes:
            self.add(self._found(name, number, reads, writes), writes, name, of)

    def _found(self, name: str, number: Mapping[str, Any], reads: list[str], writes: Sequence[str]) -> Found:
        rank = len(self.shapes[reads[0]]) if reads else 0
        if name in ("linear", "matmul", "bmm", "mm") and min(len(self.shapes[each]) for each in reads[:2]) > 1:
            return "product", {"right": name == "linear"}, reads
        if name == "addmm" and number.get("alpha", 1) == number.get("beta", 1) == 1:
            return "product", {}, [*reads[1:], reads[0]]
        if name in _SAME or name.startswith("expand"):
            return "expand" if name.startswith("expand") else "reshape", {}, reads[:1]
        if name in ("t", "transpose", "permute"):
            order = [axis % rank for axis in number.get("dims") or range(rank)]
            if name != "permute":
                one, two = number.get("dim0", 0) % rank, number.get("dim1", 1) % rank
                order[one], order[two] = order[two], order[one]
            return "permute", {"order": tuple(order)}, reads
        if name in ("split", "split_with_sizes", "chunk", "cat"):
            return "concat" if name == "cat" else "split", {"axis": number.get("dim", 0) % rank}, reads
        if name in ("slice", "select"):
            axis = number.get("dim", 0) % rank
            part = number["index"] if name == "select" else slice(*map(number.get, ("start", "end", "step")))
            return "index", {"index": tuple(part if at == axis else slice(None) for at in range(rank))}, reads
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
        if name == "embedding" or (name == "gelu" and number.get("approximate") == "tanh"):
            return "embedding" if name == "embedding" else "gelu_tanh", {}, reads
        if name not in POINTWISE or not reads or number.get("alpha", 1) != 1:
            return f"aten::{name}", {}, reads
        scalars = {f"{writes[0]} {key}": number[key] for key in number if key in ("other", "exponent")}
        scalars = {each: np.array(float(value)) for each, value in scalars.items() if isinstance(value, int | float)}
        self.constants |= scalars
        self.shapes |= dict.fromkeys(scalars, ())
        return name, {}, [*reads, *scalars]

    def kernels(self, node: Any, shapes: Mapping[str, Shape]) -> tuple[Sequence[Op | None], str]:
        name, (reads, writes) = _name_of(node), _names_of(node)
        given = {each["name"]: each["arg"] for each in node["inputs"]}
        sizes = [list(shapes[tensor]) for tensor in reads]
        dtype = DTYPES[self._types[writes[0]]][0]
        if name in ("linear", "matmul", "bmm", "mm") and len(sizes) > 1:
            return [matrix_product(sizes[0], sizes[1], dtype, transposed=name == "linear")], ""
        if name == "scaled_dot_product_attention":
            causal = bool(given.get("is_causal", {}).get("as_bool", False))
            return [attention(sizes[0], sizes[1], dtype, causal=causal)], ""
        if name in ("layer_norm", "rms_norm", "group_norm"):
            hidden = math.prod(given.get("normalized_shape", {}).get("as_ints", sizes[0][-1:]))
            return [rows_of("rms_norm" if name == "rms_norm" else "layer_norm", sizes[0], dtype, hidden)], ""
        if name in ("softmax", "_softmax", "log_softmax"):
            return [rows_of("softmax", sizes[0], dtype)], ""
        dims, types, literals = [], [], []
        for argument in given.values():
            tensors, listed = _tensors_of(argument), "as_tensors" in argument
            parts = [list(shapes[tensor]) for tensor in tensors]
            dims.append(parts if listed else parts[0] if tensors else [])
            types.append("TensorList " * listed + self._types[tensors[0]] if tensors else "Scalar")
            literals.append("" if tensors else str(next(iter(argument.values()), "")))
        made = (list(shapes[writes[0]]), self._types[writes[0]], len(writes))
        op, known = op_of_call((f"aten::{name}", dims, types, [()] * len(dims), literals, made), Scope())
        return [op], "" if known else name


def _evaluated(node: ast.expr, symbols: Mapping[str, int]) -> int:
    """A size as torch writes it, in sympy's form: ``Mul(Integer(2), Symbol('s77', positive=True, integer=True))``."""
    match node:
        case ast.Call(ast.Name("Symbol"), [ast.Constant(str(name))]) | ast.Name(name):
            return symbols[name]
        case ast.Call(ast.Name("Integer"), [number]):
            return int(ast.literal_eval(number))
        case ast.Call(ast.Name(name), arguments):
            return int(_OF_SIZES[name]([_evaluated(each, symbols) for each in arguments]))
    raise LookupError(type(node).__name__)


def _name_of(node: Mapping[str, Any]) -> str:
    """Name of the op of a node."""
    words = node["target"].split(".")
    return str(words[3] if words[:3] == ["torch", "ops", "aten"] and len(words) > 3 else words[-1])


def _names_of(node: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Names of the tensors that a node reads, and of those that it writes."""
    return _names(each["arg"] for each in node["inputs"]), _names(node["outputs"])


def _names(arguments: Iterable[Mapping[str, Any]]) -> list[str]:
    return [name for each in arguments for name in _tensors_of(each)]


def _number(argument: Mapping[str, Any]) -> Any:
    """A number, text or list of an argument; None for a tensor."""
    known = ("as_int", "as_float", "as_bool", "as_string", "as_ints", "as_floats")
    return next((value for key, value in argument.items() if key in known), None)


def _tensors_of(argument: Mapping[str, Any]) -> list[str]:
    """Names of the tensors of an argument."""
    several = [*argument.get("as_tensors", ()), *dict(argument.get("as_optional_tensor", {})).values()]
    return [each["name"] for each in (argument.get("as_tensor"), *several) if isinstance(each, dict)]
