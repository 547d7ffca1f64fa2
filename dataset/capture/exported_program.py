"""Reads the forward of a model that ``torch.export.save`` wrote (``.pt2``).

Only the graph is read, which is JSON: weights, constants and sample inputs stay unread, and nothing in the file runs.
"""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from stepsight.dataset.base.errors import CaptureError
from stepsight.dataset.capture.model_steps import (
    ModelReader,
    ModelStep,
    ModelSteps,
    attention,
    matrix_product,
    norm,
    rows_of,
)
from stepsight.dataset.capture.record_graph import op_of_call
from stepsight.dataset.kinds.op import Op
from stepsight.dataset.traces.classify import DTYPES, Scope

MOST_BYTES = 2**30  # of the graph's text
# torch's numbers of types, in the words of its profiler.
_TYPES = MappingProxyType(
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
_VIEWS = frozenset(_VIEW_NAMES.split())  # and ops that compute no tensor


def read_exported(path: Path, dims: Mapping[str, int]) -> ModelSteps:
    """Read a model.

    Args:
        path: Of the file.
        dims: Sizes of symbolic dimensions, by torch's names (``s77``); others are those of the sample inputs.

    Raises:
        CaptureError: If it holds no exported program.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            found = [entry for entry in archive.infolist() if entry.filename.endswith("/models/model.json")
                     or entry.filename.endswith("serialized_exported_program.json")]  # fmt: skip
            if len(found) != 1 or found[0].file_size > MOST_BYTES:
                raise CaptureError(f"{path.name} must hold one exported program, got {len(found)}")
            tree = json.loads(archive.read(found[0]))
        return _Reader(tree, dims).model()
    except zipfile.BadZipFile:
        raise CaptureError(
            f"{path.name} must be a whole file that torch.export.save wrote, but it is cut short or of another format: "
            "save or copy it again"
        ) from None
    except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        if isinstance(error, CaptureError):
            raise
        raise CaptureError(f"{path.name} must be a file that torch.export.save wrote: {error}") from None


class _Reader(ModelReader):
    """Reads one program."""

    def __init__(self, tree: Mapping[str, Any], dims: Mapping[str, int]) -> None:
        super().__init__()
        module = tree["graph_module"]
        self._graph, self._dims = module["graph"], dims
        values = self._graph["tensor_values"].items()
        self.shapes = {name: [self._size(size) for size in meta["sizes"]] for name, meta in values}
        self._types = {name: _TYPES.get(meta["dtype"], "float") for name, meta in values}
        specs = module["signature"]["input_specs"]
        self.parameters = frozenset(spec["parameter"]["arg"]["name"] for spec in specs if "parameter" in spec)

    def model(self) -> ModelSteps:
        steps = [step for node in self._graph["nodes"] for step in self._steps(node)]
        return self.of_steps(steps, [DTYPES[self._types[name]][0] for name in self.parameters])

    def _size(self, size: Mapping[str, Any]) -> int:
        if "as_int" in size:
            return int(size["as_int"])
        expression = size["as_expr"]
        hint = (expression.get("hint") or {}).get("as_int", 1)
        return int(self._dims.get(expression["expr_str"], hint))

    def _steps(self, node: Mapping[str, Any]) -> list[ModelStep]:
        words = node["target"].split(".")
        name = words[3] if words[:3] == ["torch", "ops", "aten"] and len(words) > 3 else words[-1]
        writes = [tensor for output in node["outputs"] for tensor in _tensors(output)]
        reads = [self.root(tensor) for given in node["inputs"] for tensor in _tensors(given["arg"])]
        op, known = (None, True) if name in _VIEWS or not writes else self._op(name, node, writes)
        if not known:
            self.unknown[name] = None
        if op is None:
            self.add_views(writes, reads)
            return []
        return [ModelStep(name, op, tuple(dict.fromkeys(reads)), tuple(writes), known)]

    def _op(self, name: str, node: Mapping[str, Any], writes: list[str]) -> tuple[Op | None, bool]:
        given = {each["name"]: each["arg"] for each in node["inputs"]}
        shapes = [self.shapes[tensor] for each in node["inputs"] for tensor in _tensors(each["arg"])]
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
            tensors = _tensors(each["arg"])
            listed = "as_tensors" in each["arg"]
            dims.append([self.shapes[t] for t in tensors] if listed else self.shapes[tensors[0]] if tensors else [])
            types.append(f"TensorList {self._types[tensors[0]]}" if listed and tensors else
                         self._types[tensors[0]] if tensors else "Scalar")  # fmt: skip
            literals.append("" if tensors else str(next(iter(each["arg"].values()), "")))
        made = (self.shapes[writes[0]], self._types[writes[0]], len(writes))
        return op_of_call((f"aten::{name}", dims, types, [()] * len(dims), literals, made), Scope())


def _tensors(argument: Mapping[str, Any]) -> list[str]:
    """Names of the tensors of an argument."""
    if "as_tensor" in argument:
        return [argument["as_tensor"]["name"]]
    if "as_tensors" in argument:
        return [each["name"] for each in argument["as_tensors"]]
    if "as_optional_tensor" in argument:
        return [each["name"] for each in argument["as_optional_tensor"].values() if isinstance(each, dict)]
    return []
