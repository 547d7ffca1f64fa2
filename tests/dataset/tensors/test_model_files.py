"""Models in files: their forward is read without running anything, and training is derived from it."""

from __future__ import annotations

import json
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepsight.dataset.base.errors import CaptureError
from stepsight.dataset.capture.captured import rank_summary
from stepsight.dataset.tensors.program import read_model

BATCH, WIDTH, INNER, OUT = 8, 16, 32, 4
PRODUCTS = 2 * BATCH * (WIDTH * INNER + INNER * OUT)  # FLOP of the forward


def summary(path: Path, **asked: Any) -> dict[str, Any]:
    (rank,) = read_model(path, **asked).ranks
    return rank_summary(rank)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``Linear(GELU(LayerNorm(Linear(x))))`` as torch.export writes it."""
    torch = pytest.importorskip("torch")
    layers = (torch.nn.Linear(WIDTH, INNER), torch.nn.LayerNorm(INNER), torch.nn.GELU(), torch.nn.Linear(INNER, OUT))
    path = tmp_path_factory.mktemp("exported") / "mlp.pt2"
    torch.export.save(torch.export.export(torch.nn.Sequential(*layers), (torch.randn(BATCH, WIDTH),)), path)
    return path


def onnx_file(path: Path, batch: int | str = BATCH) -> Path:
    """The same as ONNX, without biases."""
    onnx = pytest.importorskip("onnx")
    h, float32 = onnx.helper, onnx.TensorProto.FLOAT
    sizes = {"w1": (WIDTH, INNER), "g": (INNER,), "b": (INNER,), "w2": (INNER, OUT)}
    weights = [onnx.numpy_helper.from_array(np.zeros(size, np.float32), name) for name, size in sizes.items()]
    nodes = [
        h.make_node("MatMul", ["x", "w1"], ["y"]),
        h.make_node("LayerNormalization", ["y", "g", "b"], ["n"]),
        h.make_node("Gelu", ["n"], ["a"]),
        h.make_node("MatMul", ["a", "w2"], ["z"]),
    ]
    x, z = (h.make_tensor_value_info(name, float32, [batch, size]) for name, size in (("x", WIDTH), ("z", OUT)))
    onnx.save(h.make_model(h.make_graph(nodes, "mlp", [x], [z], weights)), path)
    return path


@pytest.mark.parametrize("kind", ["pt2", "onnx"])
def test_training_is_derived_from_the_forward(kind: str, exported: Path, tmp_path: Path) -> None:
    """Both weights have a gradient, and the input of the first product has none."""
    path = exported if kind == "pt2" else onnx_file(tmp_path / "mlp.onnx")
    forward, step = summary(path), summary(path, training=True, replicas=16)
    assert forward["flops"] == PRODUCTS and step["flops"] == 3 * PRODUCTS - 2 * BATCH * WIDTH * INNER
    kinds = step["ops_by_kind"]
    assert (kinds["linear"], kinds["linear_wgrad"], kinds["linear_dgrad"], kinds["adamw"]) == (2, 2, 1, 1)
    assert kinds["gelu_backward"] == kinds["layer_norm_backward"] == 1
    (row,) = step["collectives"]
    biases = (INNER + OUT) * (kind == "pt2")
    assert row["num_bytes"] == 4 * (WIDTH * INNER + 2 * INNER + INNER * OUT + biases) and row["group_size"] == 16
    assert step["peak_bytes"] > 4 * row["num_bytes"] > forward["peak_bytes"]


def test_a_tensor_that_two_steps_read_has_its_gradients_added(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    class Twice(torch.nn.Module):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False)

        def forward(self, x: Any) -> Any:
            y = self.one(x)
            return y.tanh() * self.two(y)

    torch.export.save(torch.export.export(Twice(), (torch.randn(4, 8),)), tmp_path / "twice.pt2")
    assert summary(tmp_path / "twice.pt2", training=True)["ops_by_kind"]["add"] == 1


def test_symbolic_dimensions_have_the_sizes_that_are_asked_for(tmp_path: Path) -> None:
    path = onnx_file(tmp_path / "mlp.onnx", "batch")
    assert summary(path, dims={"batch": BATCH})["flops"] == PRODUCTS
    unknown = summary(path)
    assert unknown["flops"] == PRODUCTS / BATCH and "batch are taken as 1" in unknown["warnings"][0]


def test_a_size_must_lie_in_the_range_of_the_file(tmp_path: Path) -> None:
    """Outside of it the graph is another one."""
    torch = pytest.importorskip("torch")
    path, layer = tmp_path / "layer.pt2", torch.nn.Linear(8, 8)
    dynamic = ({0: torch.export.Dim("batch", min=2, max=64)},)
    torch.export.save(torch.export.export(layer, (torch.randn(4, 8),), dynamic_shapes=dynamic), path)
    (name,) = re.findall(r"--dims (\w+)=", summary(path)["warnings"][0])
    assert summary(path, dims={name: 64})["flops"] == 32 * summary(path, dims={name: 2})["flops"]
    for size in (1, 65):
        with pytest.raises(CaptureError, match=rf"layer\.pt2 holds for {name} from 2 to 64, got {size}: export it"):
            summary(path, dims={name: size})


def test_an_unknown_op_is_counted_and_told(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    h = onnx.helper
    x, y = (h.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [64]) for name in "xy")
    onnx.save(h.make_model(h.make_graph([h.make_node("Celu", ["x"], ["y"])], "one", [x], [y])), tmp_path / "one.onnx")
    found = summary(tmp_path / "one.onnx")
    assert found["ops_by_kind"] == {"elementwise": 1} and "Celu" in found["warnings"][0]
    assert found["unknown_ops"] == 1


class Evil:
    """Fails the test if somebody unpickles it."""

    def __reduce__(self) -> Any:
        return pytest.fail, ("a file was unpickled",)


def test_nothing_in_a_file_runs(exported: Path, tmp_path: Path) -> None:
    """Pickled parts of an exported program stay unread."""
    path = tmp_path / "evil.pt2"
    with zipfile.ZipFile(exported) as old, zipfile.ZipFile(path, "w") as new:
        for entry in old.infolist():
            is_graph = entry.filename.endswith("models/model.json")
            new.writestr(entry.filename, old.read(entry) if is_graph else pickle.dumps(Evil()))
    assert summary(path) == summary(exported)


@pytest.mark.parametrize("suffix", [".onnx", ".pt2"])
@pytest.mark.parametrize("content", [b"", b"junk", b"PK\x03\x04"])
def test_other_files_are_refused(suffix: str, content: bytes, tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    path = tmp_path / f"model{suffix}"
    path.write_bytes(content)
    with pytest.raises(CaptureError, match="must be"):
        read_model(path)


def test_a_graph_of_another_form_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.pt2"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("other/models/model.json", json.dumps({"graph_module": []}))
    with pytest.raises(CaptureError, match=r"must be a file that torch.export.save wrote"):
        read_model(path)


def test_a_file_that_would_grow_is_refused_before_it_does(tmp_path: Path) -> None:
    """Functions that call each other twice, forty deep; an archive of a gigabyte of lists."""
    onnx = pytest.importorskip("onnx")
    h, float32 = onnx.helper, onnx.TensorProto.FLOAT
    opsets, functions = [h.make_opsetid("", 18), h.make_opsetid("l", 1)], []
    for depth in range(40):
        name, domain = (f"f{depth - 1}", "l") if depth else ("Relu", "")
        calls = [h.make_node(name, [x], [y], domain=domain) for x, y in (("x", "a"), ("a", "y"))]
        functions.append(h.make_function("l", f"f{depth}", ["x"], ["y"], calls, opsets))
    x, y = (h.make_tensor_value_info(name, float32, [8]) for name in "xy")
    graph = h.make_graph([h.make_node("f39", ["x"], ["y"], domain="l")], "g", [x], [y])
    onnx.save(h.make_model(graph, functions=functions, opset_imports=opsets), tmp_path / "a.onnx")
    with zipfile.ZipFile(tmp_path / "a.pt2", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("m/models/model.json", b"[]," * 12_000_000)
    for name, rule in (("a.onnx", "at most 60000 nodes and tensors"), ("a.pt2", "at most 33554432 bytes")):
        with pytest.raises(CaptureError, match=rule):
            summary(tmp_path / name)


@pytest.mark.parametrize(("place", "byte"), [(8, 99), (10, 99), (60, 255)])
def test_an_archive_that_cannot_be_unpacked_is_refused(place: int, byte: int, tmp_path: Path) -> None:
    """The method of compression is none that is known, in one of its two places, or the packed bytes are damaged."""
    path = tmp_path / "model.pt2"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("m/models/model.json", json.dumps({"graph_module": {"graph": {"nodes": ["x" * 999]}}}))
    data = bytearray(path.read_bytes())
    at = data.index(b"PK\x01\x02") if place == 10 else 0
    data[at + place] = byte
    path.write_bytes(bytes(data))
    with pytest.raises(CaptureError, match="must be a file that"):
        read_model(path)


def test_a_model_with_a_negative_size_is_refused(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    exported, path = tmp_path / "relu.pt2", tmp_path / "negative.pt2"
    torch.export.save(torch.export.export(torch.nn.ReLU(), (torch.randn(BATCH, WIDTH),)), exported)
    with zipfile.ZipFile(exported) as whole, zipfile.ZipFile(path, "w") as changed:
        for name in whole.namelist():
            data = whole.read(name)
            if name.endswith("model.json"):
                tree = json.loads(data)
                for tensor in tree["graph_module"]["graph"]["tensor_values"].values():
                    tensor["sizes"][0] = {"as_int": -8}
                data = json.dumps(tree).encode()
            changed.writestr(name, data)
    with pytest.raises(CaptureError, match="sizes of a tensor must lie from 0"):
        read_model(path)
