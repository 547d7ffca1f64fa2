"""A fuzzing target for each reader of files that users name: its seeds, how they are mutated, and what is asked.

The seeds lie in ``seeds/<target>``.  An input that once failed is added there, and so is tried by every test run.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from stepsight.dataset.configs.formats import read_configs, write_config
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.dataset.runs.run_folder import read_event_file
from stepsight.dataset.runs.run_manifest import read_box, read_manifest
from stepsight.dataset.tables import FORMATS, Measurements, read_table, summary, summary_text
from stepsight.dataset.traces.import_traces import Imported, import_ranks
from stepsight.dataset.traces.import_traces import summary as import_summary
from stepsight.dataset.traces.read_rank import read_kineto
from stepsight.experiments.evaluation.evaluate import evaluate, evaluation_text
from stepsight.experiments.reports.job_texts import prediction_report
from stepsight.experiments.reports.run_texts import trace_summary
from stepsight.experiments.search.search import search
from stepsight.experiments.search.search_report import search_report
from stepsight.experiments.tasks.collecting import read_plan
from stepsight.simulator.replay.replay import replay
from stepsight.simulator.schedules import read_schedule, write_schedule
from stepsight.training.prediction.prediction import POSSIBLE_MFU, predict
from stepsight.training.predictor.model_tables import write_manifest
from stepsight.training.predictor.predictor import Predictor
from tests.fuzz.folders import (
    ASK,
    ask_model,
    exported_seed,
    folder_seed,
    mutated_exported,
    mutated_folder,
    mutated_onnx,
    onnx_seed,
)
from tests.fuzz.mutate import Mutate, mutated_bytes, mutated_csv, mutated_json, mutated_text
from tests.fuzz.toy import SEARCHED, search_journal, toy_job, toy_predictor
from tests.fuzz.watch import check_numbers

SEEDS = Path(__file__).parent / "seeds"
IMPOSSIBLE_MFU = 10.0


@dataclass(frozen=True)
class Target:
    """A reader.

    Attributes:
        name: Folder of its seeds.
        ask: Reads an input that lies in a file, and checks what comes of it.
        mutate: How an input comes from a seed.
        suffix: Of the input's file.
    """

    name: str
    ask: Callable[[Path], None]
    mutate: Mutate
    suffix: str

    @property
    def seeds(self) -> list[Path]:
        return sorted(path for path in (SEEDS / self.name).iterdir() if path.is_file())


def _job(path: Path) -> None:
    job = Job.from_file(path)
    _check_prediction(job, None)


def _check_prediction(job: Job, predictor: Predictor | None) -> None:
    prediction = predict(job, predictor)
    report = prediction_report(job, prediction)
    json.dumps(report, allow_nan=False)
    check_numbers(report)
    seconds = prediction.iteration_time_s
    assert 0 < prediction.low_s <= seconds <= prediction.high_s, report["text"]
    assert all(part >= -1e-9 * seconds for part in prediction.breakdown.values()), report["text"]
    assert np.isclose(sum(prediction.breakdown.values()), seconds), report["text"]
    assert prediction.memory.peak_bytes > 0, report["text"]
    told = any("of their peak" in warning for warning in prediction.warnings)
    assert 0 <= prediction.mfu <= (IMPOSSIBLE_MFU if told else POSSIBLE_MFU), report["text"]


def _runs(path: Path) -> None:
    result = evaluate(path)
    value = result.to_dict()
    json.dumps(value, allow_nan=False)
    check_numbers(value)
    evaluation_text(result, 5, {})


def _kineto(path: Path) -> None:
    trace = read_kineto(path)
    for values in (trace.start_s, trace.duration_s, trace.slot_s, trace.wait_s, trace.launch_s, trace.tail_s):
        assert np.isfinite(values).all()
    for values in (trace.duration_s, trace.slot_s):
        assert (values >= 0).all()
    assert all(seconds >= 0 for seconds in trace.step_s)
    for node in trace.program.nodes:
        assert node.work.num_bytes >= 0


def _chakra(path: Path) -> None:
    _check_import(import_ranks([path], form="chakra"))


def _imported(path: Path) -> None:
    _check_import(import_ranks([path]))


def _check_import(found: Imported) -> None:
    """One rank as ``import`` reads it, what it prints, where the time goes, and its replay."""
    json.dumps(import_summary(found), allow_nan=False)
    graph = found.graphs[0]
    for values in (graph.start_s, graph.duration_s, graph.delay_s, graph.unrecorded_s, graph.steps_s):
        assert np.isfinite(values).all()
    assert (graph.duration_s >= 0).all() and (graph.unrecorded_s >= 0).all()
    assert (graph.edge_columns["source"] < graph.edge_columns["target"]).all()
    json.dumps(trace_summary("fuzzed", found.graphs), allow_nan=False)
    json.dumps(replay(found.graphs).to_dict(), allow_nan=False)


_NAMES = {"vtrain": "AR_GPU8_1M_1024M_LUT", "vidur": "mlp.csv"}  # of files whose name says what they are


def _check_table(table: Measurements) -> None:
    assert (np.isfinite(table.seconds) & (table.seconds > 0)).all()
    value = summary(table)
    json.dumps(value, allow_nan=False)
    check_numbers(value)
    summary_text(value)


def _table(name: str, path: Path) -> None:
    if name in _NAMES:
        path = path.rename(path.with_name(_NAMES[name]))
    _check_table(read_table(name, path))


def _aiconfigurator(path: Path) -> None:
    """Columns in JSON, written as the Parquet file that they make; the seed's name is the table's."""
    told = {"framework": "SGLang", "version": "0.5", "device": "NVIDIA H100 80GB HBM3", "kernel_source": "fa3"}
    columns = json.loads(path.read_bytes().decode("utf-8", "replace"))
    rows = max((len(values) for values in columns.values()), default=0)
    name = "moe_perf" if "topk" in columns else "gemm_perf" if "gemm_dtype" in columns else "context_attention_perf"
    target = path.with_name(f"{name}.parquet")
    try:
        pq.write_table(pa.table({**{key: [text] * rows for key, text in told.items()}, **columns}), target)
    except (pa.ArrowException, ValueError, TypeError, OverflowError, AttributeError):
        return  # nothing that Parquet can hold
    _check_table(read_table("aiconfigurator", target))


def _aiconfigurator_mutated(rng: Any, data: bytes) -> bytes:
    """Always JSON of a table."""
    while True:
        out = mutated_json(rng, data)
        try:
            if isinstance(tree := json.loads(out), dict) and all(isinstance(column, list) for column in tree.values()):
                return out
        except (ValueError, RecursionError):
            continue


def _measurements(path: Path) -> None:
    _check_table(Measurements.from_parquet(path))


def _predictor(path: Path) -> None:
    """The input is one JSON file of a predictor's folder, or the text of its trees; the folder is sealed again."""
    tree = json.loads(path.read_bytes())
    folder = path.with_suffix("")
    folder.mkdir()
    for file in _toy_folder().iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    for name, value in tree.items():
        if name in ("hardware.json", "kernel.json", "collective.json", "intervals.json"):
            (folder / name).write_text(json.dumps(value))
        elif name == "trees" and isinstance(value, str):
            for file in folder.glob("kernel.*.txt.gz"):
                file.write_bytes(value.encode("utf-8", "replace"))
    manifest = json.loads((folder / "manifest.json").read_text())
    write_manifest(folder, {key: value for key, value in manifest.items() if key != "files"}, manifest["hardware"])
    _check_prediction(toy_job(), Predictor.load(folder))


def _schedule(path: Path) -> None:
    schedule = read_schedule(path)
    write_schedule(schedule, path.with_name("copy.csv"))
    chunks = int(schedule.placement[:, 1].max()) + 1
    if schedule.num_stages * chunks > 64 or schedule.num_micro_batches > 64:
        return  # it is read; its job would only be larger
    job = toy_job()
    stages = schedule.num_stages
    parallel = replace(job.parallel, pp=stages, virtual_stages=chunks, schedule=str(path), tp=1, dp=1)
    model = replace(job.model, layers=max(stages * chunks, 2))
    batch = replace(job.batch, micro_batch=1, global_batch=schedule.num_micro_batches)
    cluster = replace(job.cluster, devices_per_node=stages)
    _check_prediction(replace(job, model=model, parallel=parallel, batch=batch, cluster=cluster), _toy())


def _box(path: Path) -> None:
    box = read_box(str(path))
    check_numbers(box.to_dict())
    links = box.links
    assert links.inter_node.bandwidth_bytes_per_s > 0 and links.inter_node.latency_s >= 0
    assert box.num_ranks >= 1 and box.name


def _config(path: Path) -> None:
    read = read_configs([path])
    assert not set(read.mapped) & set(read.assumed) and set(read.reasons) >= set(read.assumed)
    if read.read is not None:
        assert read.job.cluster.num_devices >= 1
        path.with_suffix(".toml").write_text(read.to_toml())
        assert Job.from_file(path.with_suffix(".toml")) == read.job
        for name in ("megatron", "deepspeed", "accelerate"):
            assert write_config(read.job, name).text


def _plan(path: Path) -> None:
    plan = read_plan(path)
    assert plan["runs"] or plan["events"] or plan == plan
    check_numbers(plan)


def _manifest(path: Path) -> None:
    folder = path.with_suffix("")
    folder.mkdir()
    path.rename(folder / "manifest.json")
    manifest = read_manifest(folder)
    assert 0 < manifest.iteration_time_s < 1e30


def _events(path: Path) -> None:
    events = read_event_file(path)
    assert all(seconds > 0 for seconds in events.seconds)
    assert all(isinstance(work, Op | Collective) for work in events.works)
    check_numbers(dict(events.hardware))


def _journal(path: Path) -> None:
    result = search(toy_job(), _toy(), storage=str(path), study_name=SEARCHED, trials=2, seed=1)
    report = search_report(toy_job(), result, 3)
    json.dumps(report, allow_nan=False)
    check_numbers(report)


@cache
def _toy() -> Predictor:
    return toy_predictor()


@cache
def _toy_folder() -> Path:
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="stepsight-fuzz-")) / "toy"
    _toy().save(folder)
    return folder


def toy_seed() -> bytes:
    """The files of a predictor as one JSON table."""
    import gzip

    folder = _toy_folder()
    tree = {path.name: json.loads(path.read_text()) for path in folder.glob("*.json") if path.name != "manifest.json"}
    tree["trees"] = gzip.decompress(next(iter(sorted(folder.glob("kernel.*.txt.gz")))).read_bytes()).decode()
    return json.dumps(tree).encode()


def measurements_seed() -> bytes:
    """A table of measurements as ``import`` writes it."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.parquet"
        read_table("csv", SEEDS / "table_csv" / "mine.csv").to_parquet(path)
        return path.read_bytes()


def _mutated_predictor(rng: Any, data: bytes) -> bytes:
    """Mutate one of its files, each as likely, and now and then the text of its trees."""
    tree = json.loads(data)
    name = rng.choice(sorted(tree))
    if name == "trees":
        return json.dumps({name: mutated_text(rng, tree[name].encode()).decode("utf-8", "replace")}).encode()
    whole = mutated_json(rng, json.dumps(tree[name]).encode())
    try:
        return json.dumps({name: json.loads(whole)}).encode()
    except (ValueError, RecursionError):
        return json.dumps({name: odd_text(whole)}).encode()


def odd_text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def mutated_journal(rng: Any, data: bytes) -> bytes:
    """Change one line's table, or lines as text."""
    lines = data.splitlines()
    if rng.random() < 0.3 or not lines:
        return mutated_text(rng, data)
    at = rng.randrange(len(lines))
    lines[at] = mutated_json(rng, lines[at]).replace(b"\n", b"")
    return b"\n".join([*lines, b""])


_TABLES = ("csv", "aicb", "neusight", "vidur")
_MUTATE: dict[str, Mutate] = {**dict.fromkeys(_TABLES, mutated_csv), "simumax": mutated_json}


def _suffix(name: str) -> str:
    return ".csv" if name in _TABLES else ".log"


TARGETS = {
    target.name: target
    for target in (
        Target("job", _job, mutated_json, ".json"),
        Target("job_toml", _job, mutated_text, ".toml"),
        Target("config_script", _config, mutated_text, ".sh"),
        Target("config_yaml", _config, mutated_text, ".yaml"),
        Target("config_toml", _config, mutated_text, ".toml"),
        Target("config_json", _config, mutated_json, ".json"),
        Target("config_registry", _config, mutated_text, ".py"),
        Target("runs", _runs, mutated_csv, ".csv"),
        Target("kineto", _kineto, mutated_json, ".json"),
        Target("import_kineto", _imported, mutated_json, ".json"),
        Target("import_chakra", _chakra, mutated_bytes, ".et"),
        Target("import_chakra_json", _chakra, mutated_json, ".json"),
        *(
            Target(f"table_{name}", partial(_table, name), _MUTATE.get(name, mutated_text), _suffix(name))
            for name in FORMATS
            if name not in ("aiconfigurator",)
        ),
        Target("table_aiconfigurator", _aiconfigurator, _aiconfigurator_mutated, ".json"),
        *(Target(name, ask, mutated_folder, ".json") for name, ask in ASK.items()),
        Target("onnx", ask_model, mutated_onnx, ".onnx"),
        Target("exported", ask_model, mutated_exported, ".pt2"),
        Target("measurements", _measurements, mutated_bytes, ".parquet"),
        Target("predictor", _predictor, _mutated_predictor, ".json"),
        Target("schedule", _schedule, mutated_csv, ".csv"),
        Target("box", _box, mutated_text, ".toml"),
        Target("plan", _plan, mutated_json, ".json"),
        Target("manifest", _manifest, mutated_json, ".json"),
        Target("events", _events, mutated_json, ".json"),
        Target("journal", _journal, mutated_journal, ".log"),
    )
}  # fmt: skip
_MADE: dict[str, Callable[[], bytes]] = {name: partial(folder_seed, name) for name in ASK}
_MADE |= {"onnx": onnx_seed, "exported": exported_seed}
_MADE |= {"predictor": toy_seed, "measurements": measurements_seed, "journal": search_journal}


@cache
def corpus(name: str) -> tuple[bytes, ...]:
    """Seeds of a target: its files, and what today's code writes where that is what is read."""
    made = [_MADE[name]()] if name in _MADE else []
    folder = SEEDS / name
    return (*made, *(path.read_bytes() for path in (TARGETS[name].seeds if folder.is_dir() else [])))
