"""Jobs: the questions of users. Frozen, validated once, read from TOML or JSON or built in Python."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.base.files import SUFFIXES, read_document
from stepsight.dataset.base.registry import did_you_mean
from stepsight.dataset.hardware import hardware as presets
from stepsight.dataset.harness.base.parallel_rules import Rules
from stepsight.dataset.job.frameworks import GENERIC, Framework, find_framework, framework_in
from stepsight.dataset.job.rules import JobTables, broken_rules
from stepsight.dataset.job.sharding import placement_words, placements_of
from stepsight.dataset.job.sharding_plans import (
    TABLE_FIELDS,
    TABLE_MODELS,
    read_plan,
    recommendation_model,
    shared_batch,
)
from stepsight.dataset.job.specs import (
    MODELS,
    OPTIONAL,
    SECTIONS,
    BatchSpec,
    ClusterSpec,
    ExecutionSpec,
    ModelSpec,
    OptimizerSpec,
    ParallelSpec,
    spec_from_table,
    type_problems,
)

__all__ = ["BatchSpec", "ClusterSpec", "ExecutionSpec", "Job", "JobLike", "ModelSpec", "OptimizerSpec", "ParallelSpec"]

# GPT-3 175B, Nemotron 340B, Qwen3 30B and Llama 4 have 12 in NVIDIA's recipes of 2024-26, with 12 to 24 layers a stage.
MOST_USUAL_CHUNKS = 12


@dataclass(frozen=True, kw_only=True)
class Job(JobTables):
    """One training iteration of one model on one cluster in one parallel strategy.

    Attributes:
        framework: The framework that runs the job: the name of a profile, a text that contains one of its words, or a
            ``.json`` or ``.toml`` file; empty: unknown.  ``from_dict`` fills open keys from the profile, takes
            the framework of a container where none is named, and a calibrated predictor looks for runs of the same
            framework.
        open_stages: Whether the job says nothing about virtual stages although its framework usually interleaves.
            ``from_dict`` then takes the usual number of chunks; ``uninterleaved`` is the other job that may be meant.
        shares_batch: Whether the micro-batch follows from the global batch, which the ranks of a ``dlrm`` share.
        own_vocab: The vocabulary that tables stated, and the one that the framework's profile padded it to.

    Raises:
        JobError: On construction, with every broken rule and its values.
    """

    framework: str = ""
    open_stages: bool = field(default=False, compare=False, repr=False)
    shares_batch: bool = field(default=False, compare=False, repr=False)
    own_vocab: tuple[Any, Any] = field(default=(0, 0), compare=False, repr=False)

    def __post_init__(self) -> None:
        problems = Rules()
        for name, spec in SECTIONS.items():
            held = getattr(self, name)
            wrong = [] if isinstance(held, spec) else [f"a job's {name} must be a {spec.__name__}, got {held!r:.80}"]
            problems += wrong or type_problems(name, spec, held)
        if not isinstance(self.framework, str) or not self.framework.isprintable():
            problems.append(f"framework must be a printable string, got {self.framework!a:.80}")
        if problems:
            raise JobError(problems.text())
        if self.framework and not self.framework.endswith(SUFFIXES):
            _ = self.profile
        for name, table in _filled(self).items():
            object.__setattr__(self, name, table)
        if problems := broken_rules(self):
            raise JobError(problems.text())

    def __hash__(self) -> int:
        return hash((self.model, self.parallel, self.batch, self.optimizer, self.cluster.hardware, self.cluster.nodes))

    @cached_property
    def uninterleaved(self) -> Job | None:
        """The same job with one chunk per stage, if it leaves that open; None: it means what it says."""
        if not self.open_stages or self.parallel.virtual_stages == 1:
            return None
        return replace(self, parallel=replace(self.parallel, virtual_stages=1, runtime=""), open_stages=False)

    def _as_usual(self) -> Job:
        """The job with as many chunks as recipes of NeMo usually have: one for each layer of a stage, at most
        ``MOST_USUAL_CHUNKS``; one chunk where layers or micro-batches do not allow several.
        """
        p, layers = self.parallel, self.model.layers // max(self.parallel.pp, 1)
        chunks = next((c for c in range(MOST_USUAL_CHUNKS, 1, -1) if layers % c == 0), 1)
        if not self.open_stages or p.pp == 1 or p.virtual_stages != 1 or p.schedule != "1f1b" or chunks == 1:
            return self
        with suppress(JobError):
            return replace(self, parallel=replace(p, virtual_stages=chunks, runtime=""))
        return self

    @property
    def profile(self) -> Framework | None:
        """The profile of the job's framework, container and date; None if the job names no framework.

        Raises:
            JobError: If the framework is a file that cannot be read.
        """
        execution = self.execution
        return find_framework(self.framework, execution.container, execution.date) if self.framework else None

    @property
    def tokens(self) -> int:
        """Tokens of an iteration, including those of an encoder."""
        return self.batch.global_batch * (self.model.seq_len + self.model.encoder_seq_len)

    @property
    def unit(self) -> str:
        """What ``tokens`` counts: a recommendation model has samples."""
        return "samples" if self.model.tables else "tokens"

    @property
    def hardware_name(self) -> str:
        """Name of the cluster's hardware, also if ``cluster.hardware`` is the path of a file."""
        return presets.hardware_name(self.cluster.hardware)

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """Legal settings that are probably mistakes."""
        stated = self.cluster.fabric
        usual = None
        if stated and not (isinstance(stated, str) and stated in presets.FABRICS):
            with suppress(JobError):  # there is nothing to compare with
                usual = presets.find_fabric(presets.usual_fabric(self.cluster.hardware))
        return presets.suspicious_links(self.fabric, self.cluster.devices_per_node, usual)

    @property
    def model_name(self) -> str:
        """The model's name, or its family and size: ``gpt-8L-512h``, ``dlrm-26T-128h``."""
        if self.model.tables and not self.model.name:
            return f"dlrm-{len(self.model.tables)}T-{self.model.hidden}h"
        return self.model.name or f"{self.model.family}-{self.model.layers}L-{self.model.hidden}h"

    @property
    def name(self) -> str:
        """Short name for tables: ``gpt-8L-512h tp2 pp4-1f1b dp1 mb4x2``, ``dlrm-4T-128h dp8 mb512x1, 4 table-wise``."""
        p, batch = self.parallel, f"mb{self.batch.micro_batch}x{self.num_micro_batches}"
        if self.model.tables:
            places = placements_of(self.model.tables, self.sharding, self.table_ranks)
            return f"{self.model_name} dp{p.dp} {batch}, {placement_words(places)}"
        chunks = f"x{p.virtual_stages}" if p.virtual_stages > 1 else ""
        words = [self.model_name, f"tp{p.tp}{'sp' if p.sequence_parallel else ''}"]
        words += [f"cp{p.cp}"] if p.cp > 1 else []
        words += [f"pp{p.pp}" + (f"-{Path(p.schedule).stem}{chunks}" if p.pp > 1 else "")]
        words += [f"ep{p.ep}"] if p.ep > 1 else []
        return " ".join([*words, f"dp{p.dp}" + (f"z{p.zero_stage}" if p.zero_stage else ""), batch])

    def __repr__(self) -> str:
        return f"Job({self.name} on {self.cluster.num_devices} x {self.hardware_name})"

    def to_dict(self) -> dict[str, Any]:
        """Plain tables that ``from_dict`` reads as an equal job; ``execution`` only if it states an engine."""
        left_out = {"sharding"} if not self.model.tables else set()
        left_out |= {"execution"} if self.execution == ExecutionSpec() else set()
        tables = {section: asdict(getattr(self, section)) for section in SECTIONS if section not in left_out}
        for key in TABLE_FIELDS if not self.model.tables else ():
            del tables["model"][key]
        whole = {"global_batch": self.batch.global_batch}
        if self.shares_batch and shared_batch(whole, tables["cluster"]).get("micro_batch") == self.batch.micro_batch:
            del tables["batch"]["micro_batch"]  # it follows on other devices too
        return {"framework": self.framework, **tables} if self.framework else tables

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), sort_keys=True)

    @classmethod
    def of(cls, value: JobLike, given: Mapping[str, Any] | None = None) -> Job:
        """Return a job unchanged, build one from its tables, or read one from a job file.

        Args:
            value: A ``Job``, the tables of one (see ``from_dict``), or the path of a job file (see ``from_file``).
            given: Values by key, as ``parallel.tp``, that override those of the job.

        Raises:
            JobError: If the value is something else, or no job can be built from it.
        """
        if isinstance(value, cls):
            return cls.from_dict(_with(value.to_dict(), given)) if given else value
        if isinstance(value, Mapping):
            return cls.from_dict(_with(value, given or {}))
        if isinstance(value, str | Path):
            return cls.from_file(value, given=given)
        ranks = ": predict captured().ranks[0].graph.replace(device_name=...)" if hasattr(value, "captured") else ""
        raise JobError(f"a job must be a Job, a dict of its tables or the path of a job file, got {value!r:.80}{ranks}")

    @classmethod
    def from_dict(cls, tables: Mapping[str, Any], habits: Framework | None = None) -> Job:
        """Build a job from its tables; all unknown, missing and wrongly typed keys are reported together.

        Args:
            tables: Tables by name; ``framework`` is a key beside them.
            habits: Profile that fills open keys, instead of the one of ``framework``.
        """
        tables = dict(tables)
        framework = tables.pop("framework", "")
        unknown = (f"unknown table [{name!s:.80}]{did_you_mean(name, SECTIONS)}" for name in {*tables} - {*SECTIONS})
        problems = [text.replace("\n", "\\n") for text in sorted(unknown)]
        if not isinstance(framework, str) or not framework.isprintable():
            problems.append(f"framework must be a printable string, got {framework!a:.80}")
        elif habits is None:
            try:
                habits = _framework_of(framework, tables.get("execution"))
            except JobError as error:
                problems.append(str(error))
            framework = framework or (habits.name if habits else "")
        stated: dict[str, dict[str, Any]] = {}
        for section in SECTIONS:
            table = tables.get(section, {} if section in OPTIONAL else None)
            if not isinstance(table, Mapping):
                problems.append(f"a job needs a table [{section}], got {table!r:.80}")
                continue
            table = dict(table)
            name = table.get("name", "")
            if section == "model" and table.get("family", "dlrm" if str(name) in TABLE_MODELS else "") == "dlrm":
                table = recommendation_model(table)
            elif section == "model" and isinstance(name, str):
                if name in MODELS:
                    table = {**MODELS[name], **table}
                elif not {"layers", "hidden"} & set(table):
                    problems.append(
                        f"model.name must be one of {', '.join(MODELS)} or come with sizes, got {name!r:.80}"
                        f"{did_you_mean(name, MODELS)}"
                    )
                    continue
            if section == "cluster" and isinstance(table.get("hardware"), Mapping):
                table["hardware"] = presets.stated_hardware(table["hardware"])
            stated[section] = table
        silent = not {"virtual_stages", "schedule"} & set(stated.get("parallel", {}))
        vocab = stated.get("model", {}).get("vocab", 0)
        if habits is not None:
            filled = habits.fill(stated)
            stated = {section: filled[section] for section in stated}
        shares = "tables" in stated.get("model", {}) and "micro_batch" not in stated.get("batch", {"micro_batch": 0})
        if shares:
            stated["batch"] = shared_batch(stated["batch"], stated.get("cluster", {}))
        specs: dict[str, Any] = {}
        for section, table in stated.items():
            specs[section], wrong = spec_from_table(section, SECTIONS[section], table)
            problems += wrong
        if problems:
            raise JobError(Rules(problems).text())
        more: dict[str, Any] = {"open_stages": silent and habits is not None and habits.interleaves}
        more["own_vocab"] = vocab, specs["model"].vocab
        return cls(**specs, framework=framework, shares_batch=shares, **more)._as_usual()

    @classmethod
    def from_file(cls, path: str | Path, framework: str = "", given: Mapping[str, Any] | None = None) -> Job:
        """Read a ``.toml`` or ``.json`` job file.

        Paths in the file (schedules, hardware, fabrics, frameworks) are relative to its folder.

        ``framework``, if not empty, and ``given`` (values by key, as ``parallel.tp``) override those of the file.
        """
        path = Path(path)
        if path.suffix not in (".toml", ".json"):
            others = "`stepsight job` reads configurations of frameworks, `stepsight capture` models (.onnx, .pt2)"
            raise JobError(f"a job file ends in .toml or .json, got {str(path)!r:.80}: {others}")
        tables = read_document(path, f"job file {path}")
        if not isinstance(tables, dict):
            rule = "must hold tables [model], [parallel], [batch], [cluster]"
            raise JobError(f"{path} {rule}, got {type(tables).__name__}")
        _resolve_paths(tables, path.parent)
        if framework:
            tables["framework"] = framework
        try:
            return cls.from_dict(_with(tables, given or {}))
        except JobError as error:
            raise JobError(f"{path}: {error}") from None


def _framework_of(framework: str, execution: Any) -> Framework | None:
    """The profile that a job names, or that the container of its table ``execution`` belongs to."""
    told = execution if isinstance(execution, Mapping) else {}
    container, date = (word if isinstance(word := told.get(key), str) else "" for key in ("container", "date"))
    if framework:
        return find_framework(framework, container, date)
    found = framework_in("", container, date) if container else GENERIC
    return None if found is GENERIC else found


def _with(tables: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Tables with other values, by key; ``from_dict`` refuses what is no table."""
    changed, model = dict(tables), tables.get("model")
    derived = {"model.layers", "model.hidden"} & set(given)
    if derived and isinstance(model, Mapping) and ("tables" in model or str(model.get("name")) in TABLE_MODELS):
        raise JobError(f"{min(derived)} of a dlrm follows from its tables and cross_layers: set those instead")
    for key, value in given.items():
        section, _, name = key.partition(".")
        table = changed.get(section, {})
        if not name or isinstance(table, Mapping):
            changed[section] = {**table, name: value} if name else value
    return changed


_PATHS: dict[str, dict[str, tuple[str, ...]]] = {
    "parallel": {"schedule": (".csv",)},
    "sharding": {"plan": (".json",)},
    "model": {"tables": (".csv", ".toml", ".json")},
    "cluster": {"hardware": SUFFIXES, "fabric": SUFFIXES},
}


def _resolve_paths(tables: dict[str, Any], folder: Path) -> None:
    """Make paths in the tables of a job file relative to where the reader is, not to the job file."""
    cluster = tables.get("cluster")
    mixed = cluster.get("mixed") if isinstance(cluster, dict) else None
    places: list[tuple[Any, dict[str, tuple[str, ...]]]] = [(tables, {"framework": SUFFIXES})]
    places += [(tables.get(name), keys) for name, keys in _PATHS.items()]
    places += [(other, {"hardware": SUFFIXES}) for other in (mixed if isinstance(mixed, list) else ())]
    for table, key, suffixes in ((table, *pair) for table, keys in places for pair in keys.items()):
        value = table.get(key) if isinstance(table, dict) else None
        if isinstance(value, str) and value.endswith(suffixes):
            table[key] = str(folder / value)


def _filled(job: Job) -> dict[str, Any]:
    """Tables with what they leave open: devices by the names of their presets, derived sizes, and replicas."""
    m, p, cluster = job.model, job.parallel, job.cluster
    hardware = presets.canonical_hardware(cluster.hardware)
    mixed = tuple(replace(other, hardware=presets.canonical_hardware(other.hardware)) for other in cluster.mixed)
    if hardware != cluster.hardware or mixed != cluster.mixed:
        cluster = replace(cluster, hardware=hardware, mixed=mixed)
    if not (m.kv_heads and m.ffn and m.expert_ffn and m.gated_mlp is not None):
        ffn, gated = m.ffn or 4 * m.hidden, m.family == "llama" if m.gated_mlp is None else m.gated_mlp
        kv_heads = m.kv_heads or m.heads
        m = replace(m, kv_heads=kv_heads, ffn=ffn, expert_ffn=m.expert_ffn or ffn, gated_mlp=gated)
    if not p.dp:
        others = p.tp * p.cp * p.pp
        p = replace(p, dp=max(1, cluster.num_devices // others) if others > 0 else 1)
    sharding = job.sharding
    if sharding.plan and not sharding.tables:
        sharding = replace(sharding, tables=read_plan(sharding.plan))
    return {"model": m, "parallel": p, "cluster": cluster, "sharding": sharding}


JobLike: TypeAlias = Job | Mapping[str, Any] | str | Path  # what ``Job.of`` takes
