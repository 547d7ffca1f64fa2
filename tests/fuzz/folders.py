"""Folders of JSON and Parquet files as one JSON text that is mutated, and models in files as the trees they hold."""

from __future__ import annotations

import io
import json
import math
import random
import tempfile
import zipfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from stepsight.dataset.base.errors import CaptureError
from stepsight.dataset.capture.captured import rank_summary, read_captured, write_captured
from stepsight.dataset.graph.graph_table import GraphTable
from stepsight.dataset.graph.program import Program
from stepsight.dataset.tables import Measurements, summary
from stepsight.dataset.tensors.program import TensorProgram, read_model
from stepsight.dataset.trace_graphs.graph_dataset import make_dataset
from stepsight.simulator.replay.replay import replay
from stepsight.training.prediction.captured_prediction import predict_captured
from tests.dataset.traced_jobs import imported_collection, two_ranks
from tests.fuzz.mutate import mutated_bytes, mutated_json, mutated_tree
from tests.fuzz.watch import check_numbers


def packed(folder: Path) -> bytes:
    """The files of a folder: JSON as it is, of Parquet columns and metadata."""
    tree: dict[str, Any] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix == ".parquet":
            table = pq.read_table(path)
            meta = {key.decode(): json.loads(text) for key, text in (table.schema.metadata or {}).items()}
            tree[path.name] = {"columns": {name: table[name].to_pylist() for name in table.column_names}, "meta": meta}
        elif path.suffix == ".json":
            tree[path.name] = json.loads(path.read_text())
    return json.dumps(tree).encode()


def unpacked(data: bytes, folder: Path) -> None:
    """Write what ``packed`` made of a folder, mutated or not; ``ValueError`` where no file could hold it."""
    tree = json.loads(data.decode("utf-8", "replace"))
    if not isinstance(tree, dict):
        raise ValueError("no folder")
    for name, content in tree.items():
        if "/" in name or "\x00" in name or not 0 < len(name) < 100:
            continue
        if name.endswith(".parquet") and isinstance(content, dict) and isinstance(content.get("columns"), dict):
            columns = {key: _column(values) for key, values in content["columns"].items()}
            meta = content.get("meta")
            texts = {key: json.dumps(value) for key, value in meta.items()} if isinstance(meta, dict) else {}
            try:
                pq.write_table(pa.table(columns).replace_schema_metadata(texts), folder / name)
            except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
                raise ValueError(f"nothing that Parquet can hold: {error}") from None
        else:
            (folder / name).write_text(json.dumps(content), "utf-8", "replace")


def _column(values: Any) -> pa.Array:
    values = values if isinstance(values, list) else [values]
    if not values:
        return pa.array([], pa.int64())  # not of type null, as a column of nothing would be
    try:
        found = pa.array(values)
        return found.cast(pa.list_(pa.int64())) if found.type == pa.list_(pa.null()) else found
    except (pa.ArrowException, ValueError, TypeError, OverflowError):
        return pa.array([str(value)[:300].encode("utf-8", "replace").decode() for value in values])


def ask_folder(ask: Callable[[Path], None], path: Path) -> None:
    """Write the folder that an input packs, and ask about it."""
    folder = path.with_suffix("")
    folder.mkdir()
    try:
        unpacked(path.read_bytes(), folder)
    except (ValueError, RecursionError):
        return
    ask(folder)


def mutated_folder(rng: random.Random, data: bytes) -> bytes:
    """Mutate some files, each as likely: most values of a folder are cells of its largest table."""
    tree = json.loads(data)
    for name in rng.sample(sorted(tree), min(len(tree), rng.choice((1, 1, 2)))):
        content = tree[name]
        if name.endswith(".parquet") and rng.random() < 0.8:
            column = rng.choice(sorted(content["columns"]))
            content["columns"][column] = mutated_tree(rng, content["columns"][column])
        else:
            tree[name] = mutated_tree(rng, content)
    return json.dumps(tree, ensure_ascii=rng.random() < 0.5).encode("utf-8", "replace")


def _table(folder: Path) -> None:
    table = Measurements.from_parquet(folder / "t.parquet")
    assert (np.isfinite(table.seconds) & (table.seconds > 0)).all()
    json.dumps(summary(table), allow_nan=False)


def _graph(folder: Path) -> None:
    graph = Program.load(folder / "rank0")
    assert (graph.duration_s >= 0).all() and (graph.edge_columns["source"] < graph.edge_columns["target"]).all()
    json.dumps(replay([graph]).to_dict(), allow_nan=False)


def _dataset(folder: Path) -> None:
    table = GraphTable.load(folder)
    assert len(table.select(range(len(table)))) == len(table)


def _capture(folder: Path) -> None:
    captured = read_captured(folder)
    json.dumps(captured.to_dict(), allow_nan=False)
    told = predict_captured(captured, HARDWARE, predictor="roofline").to_dict()
    json.dumps(told, allow_nan=False)
    check_numbers(told)


HARDWARE = "a100-sxm-80gb"
FOLDERS = {"measured_table": _table, "graph": _graph, "graph_dataset": _dataset, "capture": _capture}


def folder_seed(name: str) -> bytes:
    """A folder as today's code writes it."""
    with tempfile.TemporaryDirectory() as place:
        folder, runs = Path(place) / "made", Path(place) / "runs"
        if name == "measured_table":
            from stepsight.dataset.tables import read_table

            own = Path(__file__).parent / "seeds" / "table_csv" / "mine.csv"
            read_table("csv", own).to_parquet(folder / "t.parquet")
        elif name == "capture":
            (Path(place) / "m.onnx").write_bytes(onnx_seed())
            write_captured(read_model(Path(place) / "m.onnx", training=True), folder)
        else:
            runs = imported_collection(runs, *two_ranks())
            if name == "graph_dataset":
                make_dataset([runs], folder)
            folder = next(runs.rglob("rank0.json") if name == "graph" else folder.rglob("graphs.parquet")).parent
        return packed(folder)


def ask_model(path: Path) -> None:
    """A model in a file, read for inference and for training, distributed and computed."""
    for training in (False, True):
        (rank,) = read_model(path, replicas=2, training=training).ranks
        told = rank_summary(rank)
        json.dumps(told, allow_nan=False)
        check_numbers(told)
    program = TensorProgram.load(path)
    for ask in (lambda: program.replicate(2).captured(), lambda: program.split(2).captured(), lambda: compute(program)):
        with suppress(CaptureError):
            ask()


def compute(program: TensorProgram) -> None:
    """Run a program if it is small."""
    if sum(math.prod(shape) for shape in program.shapes.values()) < 2**18:
        with np.errstate(all="ignore"):
            program.run(program.random_values())


def onnx_seed() -> bytes:
    """A product, a norm, an attention and a convolution."""
    import onnx

    h, float32 = onnx.helper, onnx.TensorProto.FLOAT
    sizes = {"w": (16, 32), "g": (32,), "b": (32,), "k": (4, 1, 3, 3), "shape": (4,)}
    weights = [onnx.numpy_helper.from_array(np.zeros(size, np.float32), name) for name, size in sizes.items()]
    weights[-1] = onnx.numpy_helper.from_array(np.array([-1, 1, 4, 8], np.int64), "shape")
    nodes = [
        h.make_node("MatMul", ["x", "w"], ["y"]),
        h.make_node("LayerNormalization", ["y", "g", "b"], ["n"]),
        h.make_node("Reshape", ["n", "shape"], ["r"]),
        h.make_node("Conv", ["r", "k"], ["c"], kernel_shape=[3, 3], strides=[2, 2]),
        h.make_node("Softmax", ["c"], ["z"]),
    ]
    x, z = (h.make_tensor_value_info(name, float32, shape) for name, shape in (("x", ["batch", 16]), ("z", None)))
    model = h.make_model(h.make_graph(nodes, "m", [x], [z], weights))
    return bytes(model.SerializeToString())


def mutated_onnx(rng: random.Random, data: bytes) -> bytes:
    """Bytes of the file, or values of its tree."""
    import onnx
    from google.protobuf import json_format

    if rng.random() < 0.4:
        return mutated_bytes(rng, data)
    tree = mutated_tree(rng, json_format.MessageToDict(onnx.load_from_string(data)))
    try:
        return bytes(json_format.ParseDict(tree, onnx.ModelProto(), ignore_unknown_fields=True).SerializeToString())
    except (json_format.ParseError, ValueError, TypeError, AttributeError, RecursionError, OverflowError):
        return mutated_bytes(rng, data)


def exported_seed() -> bytes:
    """The same without the convolution, as ``torch.export`` writes it."""
    import torch

    layers = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.LayerNorm(32), torch.nn.GELU(), torch.nn.Softmax(-1))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.pt2"
        torch.export.save(torch.export.export(layers, (torch.randn(8, 16),)), path)
        return path.read_bytes()


def mutated_exported(rng: random.Random, data: bytes) -> bytes:
    """Bytes of the archive, or values of the program within."""
    if rng.random() < 0.2:
        return mutated_bytes(rng, data)
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as whole, zipfile.ZipFile(out, "w") as archive:
        for entry in whole.infolist():
            text = whole.read(entry)
            if entry.filename.endswith((".json", "model.json")) and "model" in entry.filename:
                text = mutated_json(rng, text)
            archive.writestr(entry.filename, text)
    return out.getvalue()


ASK = {name: partial(ask_folder, ask) for name, ask in FOLDERS.items()}
