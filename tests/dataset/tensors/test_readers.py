"""Impossible graphs are refused in one line that names the node; shapes that follow from values are found."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepsight.dataset.base.errors import CaptureError, JobError
from stepsight.dataset.job.job import Job
from stepsight.dataset.tensors.program import TensorProgram, read_model

Node = tuple[str, list[str], list[str], dict[str, Any]]


def onnx_file(path: Path, nodes: list[Node], inputs: dict[str, tuple[int, list[Any]]], **weights: Any) -> Path:
    """An ONNX file whose last node makes the output; ``inputs``: types and shapes."""
    onnx = pytest.importorskip("onnx")
    h = onnx.helper
    made = [h.make_node(op, reads, writes, f"node{n}", **more) for n, (op, reads, writes, more) in enumerate(nodes)]
    given = [h.make_tensor_value_info(name, *typed) for name, typed in inputs.items()]
    last = [h.make_tensor_value_info(nodes[-1][2][0], onnx.TensorProto.FLOAT, None)]
    values = [onnx.numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items()]
    opsets = [h.make_opsetid("", 18), h.make_opsetid("com.microsoft", 1)]
    onnx.save(h.make_model(h.make_graph(made, "g", given, last, values), opset_imports=opsets), path)
    return path


X = {"x": (1, [8, 5])}
IMPOSSIBLE: dict[str, tuple[list[Node], dict[str, tuple[int, list[Any]]], dict[str, Any], str]] = {
    "product": ([("MatMul", ["x", "w"], ["y"], {})], X, {"w": np.zeros((4, 3), np.float32)}, "MatMul.*node0.*Incompat"),
    "cycle": ([("Add", ["x", "b"], ["a"], {}), ("Relu", ["a"], ["b"], {})], X, {}, r"node0 \(Add\).*'b'.*in a cycle"),
    "unknown name": ([("Add", ["x", "nope"], ["y"], {})], X, {}, r"node0 \(Add\).*'nope'.*that nothing has"),
    "types": ([("Add", ["x", "i"], ["y"], {})], {**X, "i": (7, [8, 5])}, {}, "Add.*node0.*inconsistent type"),
    "sum": ([("Add", ["x", "z"], ["y"], {})], {**X, "z": (1, [8, 4])}, {}, "Add.*node0.*Incompatible"),
    "axis": ([("Softmax", ["x"], ["y"], {"axis": 7})], X, {}, "Softmax.*node0.*axis"),
    "twice": ([("Relu", ["x"], ["y"], {}), ("Relu", ["x"], ["y"], {})], X, {}, r"node1 \(Relu\).*'y' again"),
    "norm": (
        [("LayerNormalization", ["x", "w"], ["y"], {})], X, {"w": np.ones(3, np.float32)},
        r"node0 \(LayerNormalization\).*fit together.*\(3,\)",
    ),
    "convolution": (
        [("Conv", ["x", "w"], ["y"], {})], {"x": (1, [2, 3, 8, 8])}, {"w": np.zeros((4, 5, 3, 3), np.float32)},
        r"node0 \(Conv\).*5 channels.*got 3",
    ),
    "range": (
        [("Range", ["a", "b", "c"], ["r"], {}), ("Cast", ["r"], ["y"], {"to": 1})], X,
        {"a": np.int64(0), "b": np.int64(2**50), "c": np.int64(1)}, r"node0 \(Range\) must count to at most",
    ),
    "reshape": (
        [("Reshape", ["x", "to"], ["y"], {})], X, {"to": np.array([4, 2])},
        r"node0 \(Reshape\).*fit together.*\(4, 2\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_an_impossible_graph_is_refused_with_its_node(what: str, tmp_path: Path) -> None:
    nodes, inputs, weights, rule = IMPOSSIBLE[what]
    path = onnx_file(tmp_path / "a.onnx", nodes, inputs, **weights)
    for read in (lambda: read_model(path), lambda: TensorProgram.load(path)):
        with pytest.raises(CaptureError, match=rule) as error:
            read()
        assert "\n" not in str(error.value)


def test_a_graph_that_branches_is_refused(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    h = onnx.helper
    body = h.make_graph([h.make_node("Relu", ["x"], ["o"])], "b", [], [h.make_tensor_value_info("o", 1, [8, 5])])
    both = {"then_branch": body, "else_branch": body}
    path = onnx_file(tmp_path / "a.onnx", [("If", ["c"], ["y"], both)], {**X, "c": (9, [1])})
    with pytest.raises(CaptureError, match=r"node0 \(If\) must not branch or loop"):
        read_model(path)


def test_shapes_that_follow_from_values_are_found(tmp_path: Path) -> None:
    """The rows of a reshape follow from those of the input, which the inference of the whole graph leaves open."""
    onnx = pytest.importorskip("onnx")
    nodes: list[Node] = [
        ("Shape", ["x"], ["s"], {}), ("Gather", ["s", "zero"], ["n"], {}), ("Mul", ["n", "two"], ["n2"], {}),
        ("Concat", ["n2", "rest"], ["to"], {"axis": 0}), ("Reshape", ["x", "to"], ["r"], {}),
        ("Relu", ["r"], ["y"], {}),
    ]  # fmt: skip
    values = {"zero": np.array([0]), "two": np.array([2]), "rest": np.array([-1, 2])}
    path = onnx_file(tmp_path / "a.onnx", nodes, {"x": (onnx.TensorProto.FLOAT, ["batch", 8])}, **values)
    program = TensorProgram.load(path, {"batch": 6})
    assert program.shapes["r"] == (12, 2, 2)
    (rank,) = read_model(path, dims={"batch": 6}).ranks
    assert [node.work.dims for node in rank.graph.nodes if hasattr(node.work, "dims")] == [(48,)]  # no op on shapes


def test_shapes_that_stay_unknown_are_told(tmp_path: Path) -> None:
    nodes: list[Node] = [("Own", ["x"], ["a"], {"domain": "com.microsoft"}), ("Relu", ["a"], ["y"], {})]
    path = onnx_file(tmp_path / "a.onnx", nodes, X)
    (rank,) = read_model(path).ranks
    assert any("shapes from node1 on are not known" in warning for warning in rank.graph.warnings)
    with pytest.raises(CaptureError, match="shapes of all tensors must be known"):
        TensorProgram.load(path)


def _nodes(tree: Any) -> Any:
    return tree["graph_module"]["graph"]["nodes"]


def _shrink(tree: Any) -> None:
    values = tree["graph_module"]["graph"]["tensor_values"]
    values["p_0_weight"]["sizes"][1]["as_int"] -= 1


DAMAGE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "order": (lambda tree: _nodes(tree).reverse(), r"node 0 .*out of order or in a cycle"),
    "name": (lambda tree: _nodes(tree)[0]["inputs"][0]["arg"]["as_tensor"].update(name="nope"), "node 0.*'nope'"),
    "shape": (_shrink, r"node 0 \(linear\).*fit together"),
    "part": (lambda tree: _nodes(tree)[0].pop("outputs"), "must be whole.*'outputs'"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_program_is_refused(what: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    torch.export.save(torch.export.export(model, (torch.randn(3, 8),)), tmp_path / "a.pt2")
    damage, rule = DAMAGE[what]
    with zipfile.ZipFile(tmp_path / "a.pt2") as old, zipfile.ZipFile(tmp_path / "b.pt2", "w") as new:
        (name,) = [name for name in old.namelist() if name.endswith("models/model.json")]
        tree = json.loads(old.read(name))
        damage(tree)
        new.writestr(name, json.dumps(tree))
    for read in (lambda: read_model(tmp_path / "b.pt2"), lambda: TensorProgram.load(tmp_path / "b.pt2")):
        with pytest.raises(CaptureError, match=rule) as error:
            read()
        assert "\n" not in str(error.value)


def test_a_range_of_a_number_without_a_tensor_is_read(tmp_path: Path) -> None:
    """A constant that states its value as a number has no tensor."""
    ends = [("Constant", [], [name], {"value_int": end}) for name, end in (("a", 0), ("b", 8), ("c", 1))]
    nodes = [
        *ends,
        ("Range", ["a", "b", "c"], ["r"], {}),
        ("Cast", ["r"], ["i"], {"to": 1}),
        ("Relu", ["x"], ["y"], {}),
    ]
    read_model(onnx_file(tmp_path / "a.onnx", nodes, X))


def _positions(path: Path) -> Path:
    """A program with two dynamic dimensions, and positions of one of them."""
    torch = pytest.importorskip("torch")

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.table = torch.nn.Linear(8, 8), torch.nn.Embedding(64, 8)

        def forward(self, x: Any) -> Any:
            return (self.inner(x) + self.table(torch.arange(x.shape[1]))).flatten(0, 1)

    dims = {0: torch.export.Dim("batch", min=2, max=64), 1: torch.export.Dim("seq", min=2, max=64)}
    torch.export.save(torch.export.export(Model(), (torch.randn(3, 5, 8),), dynamic_shapes=(dims,)), path)
    return path


def test_dynamic_dimensions_have_the_sizes_that_are_given(tmp_path: Path) -> None:
    """Without, the notes tell the sample inputs' sizes by input and place: the file has no other names of them."""
    path = _positions(tmp_path / "a.pt2")
    (rank,) = read_model(path).ranks
    told = [
        re.fullmatch(r"dimension (\d) of x is taken as (\d), .* --dims (\w+)=\.\.\.", each)
        for each in rank.graph.warnings
    ]
    found = {int(each[1]): (int(each[2]), each[3]) for each in told if each}
    assert [found[place][0] for place in range(2)] == [3, 5]
    program = TensorProgram.load(path, {found[0][1]: 4, found[1][1]: 9})
    assert not program.notes
    with pytest.raises(JobError, match=r"TensorProgram\(.*: predict captured\(\)\.ranks\[0\]\.graph"):
        Job.of(program)  # type: ignore[arg-type]
    assert program.shapes[program.inputs[0]] == (4, 9, 8)
    (output,) = program.run(program.random_values()).values()
    assert output.shape == (36, 8)


def test_a_range_beyond_what_is_computed_stays_an_op(tmp_path: Path) -> None:
    path = _positions(tmp_path / "a.pt2")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(tmp_path / "b.pt2", "w") as new:
        (name,) = [name for name in old.namelist() if name.endswith("models/model.json")]
        tree = json.loads(old.read(name))
        tree["graph_module"]["graph"]["tensor_values"]["arange"]["sizes"] = [{"as_int": 2**40}]
        new.writestr(name, json.dumps(tree))
    with pytest.raises(CaptureError):
        read_model(tmp_path / "b.pt2")


def test_the_mask_of_a_dropout_does_not_stop_a_cut(tmp_path: Path) -> None:
    """Inference drops nothing: only the first output is one."""
    nodes: list[Node] = [
        ("MatMul", ["x", "w"], ["a"], {}),
        ("Dropout", ["a"], ["b", "mask"], {}),
        ("MatMul", ["b", "v"], ["y"], {}),
    ]
    weights = {"w": np.zeros((5, 4), np.float32), "v": np.zeros((4, 6), np.float32)}
    program = TensorProgram.load(onnx_file(tmp_path / "a.onnx", nodes, X, **weights), training=True).split(2)
    assert program.world_size == 2 and all(len(call.writes) == 1 for call in program.calls if call.op == "reshape")


def test_the_type_of_a_cast_is_no_stage_to_which_it_is_sent(tmp_path: Path) -> None:
    """ONNX writes a cast to fp32 as ``to = 1``."""
    nodes: list[Node] = [("Cast", ["x"], ["a"], {"to": 1}), ("Mul", ["x", "a"], ["y"], {})]
    program = TensorProgram.load(onnx_file(tmp_path / "a.onnx", nodes, X))
    values = program.random_values()
    assert np.allclose(program.run(values)["y"], values["x"] ** 2)


def test_a_mask_of_a_dropout_that_is_read_later_is_whole(tmp_path: Path) -> None:
    """Inference keeps all elements, so nobody is asked for a mask."""
    nodes: list[Node] = [
        ("Dropout", ["x"], ["a", "mask"], {}),
        ("Cast", ["mask"], ["kept"], {"to": 1}),
        ("Mul", ["a", "kept"], ["y"], {}),
    ]
    program = TensorProgram.load(onnx_file(tmp_path / "a.onnx", nodes, X))
    values = program.random_values()
    assert program.inputs == ("x",) and np.array_equal(program.run(values)["y"], values["x"])


def test_single_numbers_are_computed_on_one_rank(tmp_path: Path) -> None:
    """As in ONNX's own tests of gradients."""
    path = onnx_file(
        tmp_path / "a.onnx", [("ReduceSum", ["x"], ["a"], {"keepdims": 0}), ("Add", ["a", "a"], ["y"], {})], X
    )
    program = TensorProgram.load(path)
    values = program.random_values()
    assert program.run(values)["y"] == pytest.approx(2 * values["x"].sum())
