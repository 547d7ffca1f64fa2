"""Jobs: what the user asks about.  Frozen, validated once, read from TOML or JSON or built in Python."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args, get_type_hints

from stepsight.dataset.errors import JobError
from stepsight.dataset.hardware import Fabric, fabric_from_dict, find_fabric
from stepsight.dataset.models import MODELS

FAMILIES = ("gpt", "llama")
SCHEDULES = ("gpipe", "1f1b")
RECOMPUTE = ("none", "selective", "full")
MOST, MOST_LAYERS, MOST_ACTIONS = 2**31, 10_000, 2**23  # beyond, a number is a slip of the pen
PRECISIONS = ("fp32", "bf16", "fp16")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """A dense decoder-only transformer.

    ``gpt``: LayerNorm, biases, plain MLP with GELU, learned positions.  ``llama``: RMSNorm, no biases, gated
    MLP with SiLU, rotary positions.  ``gated_mlp`` overrides the family's MLP.
    """

    name: str = ""
    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int = 0  # 0: as many as heads
    ffn: int = 0  # 0: 4 x hidden
    vocab: int
    seq_len: int
    gated_mlp: bool | None = None  # None: as the family has it
    tied_embeddings: bool = False

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def has_bias(self) -> bool:
        return self.family == "gpt"


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelSpec:
    """Parallel degrees and how each is done.

    ``zero_stage`` 0 is DDP (bucketed all-reduce overlapped with backward), 1 and 2 shard optimizer and
    gradients, 3 is FSDP.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 0  # 0: what remains of the cluster
    sequence_parallel: bool = False
    zero_stage: int = 0
    schedule: str = "1f1b"
    virtual_stages: int = 1
    recompute: str = "none"
    bucket_mbytes: float = 25.0  # size of a gradient bucket


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSpec:
    """Sizes in sequences; ``global_batch`` is split over dp replicas and their micro-batches."""

    micro_batch: int
    global_batch: int
    precision: str = "bf16"


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterSpec:
    """Devices and how they are joined.  ``fabric`` is a preset's name or a table of links."""

    hardware: str
    nodes: int = 1
    devices_per_node: int
    fabric: Any = "dgx-a100"

    @property
    def num_devices(self) -> int:
        return self.nodes * self.devices_per_node


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training iteration of one model on one cluster in one parallel strategy.

    Raises:
        JobError: On construction, with every broken rule and its values.
    """

    model: ModelSpec
    parallel: ParallelSpec
    batch: BatchSpec
    cluster: ClusterSpec

    def __post_init__(self) -> None:
        problems = [problem for section in _SECTIONS for problem in _type_problems(section, getattr(self, section))]
        if problems:
            raise JobError("; ".join(problems))
        model = self.model
        filled = replace(
            model,
            kv_heads=model.kv_heads or model.heads,
            ffn=model.ffn or 4 * model.hidden,
            gated_mlp=model.family == "llama" if model.gated_mlp is None else model.gated_mlp,
        )
        object.__setattr__(self, "model", filled)
        parallel = self.parallel
        if parallel.dp == 0 and parallel.tp > 0 and parallel.pp > 0:
            remaining = max(1, self.cluster.num_devices // (parallel.tp * parallel.pp))
            object.__setattr__(self, "parallel", replace(parallel, dp=remaining))
        problems = _problems(self)
        if problems:
            raise JobError("; ".join(problems))

    def __hash__(self) -> int:
        return hash(self.to_json())

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches that each replica runs in an iteration."""
        return self.batch.global_batch // (self.batch.micro_batch * self.parallel.dp)

    @cached_property
    def fabric(self) -> Fabric:
        value = self.cluster.fabric
        return find_fabric(value) if isinstance(value, str) else fabric_from_dict("custom", dict(value))

    @property
    def name(self) -> str:
        """Short name for tables: ``gpt-8L-512h tp2 pp4-1f1b dp1 mb4x2``."""
        m, p, b = self.model, self.parallel, self.batch
        model = m.name or f"{m.family}-{m.layers}L-{m.hidden}h"
        kind = f"z{p.zero_stage}" if p.zero_stage else ""
        sp = "sp" if p.sequence_parallel else ""
        pipe = f"-{p.schedule}" if p.pp > 1 else ""
        words = [
            model,
            f"tp{p.tp}{sp}",
            f"pp{p.pp}{pipe}",
            f"dp{p.dp}{kind}",
            f"mb{b.micro_batch}x{self.num_micro_batches}",
        ]
        return " ".join(words)

    def to_dict(self) -> dict[str, Any]:
        """Plain tables that ``from_dict`` reads back to an equal job."""
        return {section: asdict(getattr(self, section)) for section in _SECTIONS}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), sort_keys=True)

    @classmethod
    def from_dict(cls, tables: Mapping[str, Any]) -> Job:
        """Build a job from its four tables; unknown, missing and wrongly typed keys are all reported at once."""
        problems = [f"unknown table [{name}]" for name in tables if name not in _SECTIONS]
        specs: dict[str, Any] = {}
        for section, spec in _SECTIONS.items():
            table = tables.get(section, {} if section == "parallel" else None)
            if not isinstance(table, Mapping):
                problems.append(f"a job needs a table [{section}], got {table!r}")
                continue
            table = dict(table)
            if section == "model" and table.get("name") in MODELS:
                table = {**MODELS[table["name"]], **table}
            elif section == "model" and "name" in table and not {"layers", "hidden"} & set(table):
                problems.append(
                    f"model.name must be one of {', '.join(MODELS)} or come with sizes, got {table['name']!r}"
                )
                continue
            names = {f.name for f in fields(spec)}
            unknown = sorted(set(table) - names)
            problems += [f"unknown key {section}.{key} (known: {', '.join(sorted(names))})" for key in unknown]
            required = [f.name for f in fields(spec) if f.default is f.default_factory]
            missing = [key for key in required if key not in table]
            problems += [f"missing key {section}.{key}" for key in missing]
            if not unknown and not missing:
                specs[section] = spec(**table)
                problems += _type_problems(section, specs[section])
        if problems:
            raise JobError("; ".join(problems))
        return cls(**specs)

    @classmethod
    def from_file(cls, path: str | Path) -> Job:
        """Read a ``.toml`` or ``.json`` job file."""
        path = Path(path)
        if path.suffix not in (".toml", ".json"):
            raise JobError(f"a job file ends in .toml or .json, got {str(path)!r}")
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise JobError(f"cannot read job file {path}: {error}") from None
        try:
            tables = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
        except ValueError as error:
            raise JobError(f"{path} is not valid {path.suffix[1:].upper()}: {error}") from None
        if not isinstance(tables, dict):
            raise JobError(
                f"{path} must hold tables [model], [parallel], [batch], [cluster], got {type(tables).__name__}"
            )
        try:
            return cls.from_dict(tables)
        except JobError as error:
            raise JobError(f"{path}: {error}") from None


_SECTIONS: MappingProxyType[str, type] = MappingProxyType(
    {"model": ModelSpec, "parallel": ParallelSpec, "batch": BatchSpec, "cluster": ClusterSpec}
)


def _type_problems(section: str, spec: object) -> list[str]:
    problems = []
    for name, hint in get_type_hints(type(spec)).items():
        value = getattr(spec, name)
        allowed = get_args(hint) or (hint,)
        if hint is Any:
            if not isinstance(value, str | Mapping):
                problems.append(f"{section}.{name} must be a preset's name or a table, got {value!r}")
            continue
        accepted = (*allowed, int) if float in allowed else allowed
        mistaken_bool = isinstance(value, bool) and bool not in allowed  # bool is a subclass of int
        if mistaken_bool or not isinstance(value, accepted):
            problems.append(f"{section}.{name} must be {_words(allowed)}, got {value!r}")
    return problems


def _words(allowed: tuple[type, ...]) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
    return " or ".join(names[kind] for kind in allowed if kind in names)


def _problems(job: Job) -> list[str]:
    m, p, b, c = job.model, job.parallel, job.batch, job.cluster
    problems: list[str] = []

    def require(rule: bool, text: str) -> None:
        if not rule:
            problems.append(text)

    sizes = {
        **{
            f"model.{key}": getattr(m, key)
            for key in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq_len")
        },
        **{f"parallel.{key}": getattr(p, key) for key in ("tp", "pp", "dp", "virtual_stages", "bucket_mbytes")},
        **{f"batch.{key}": getattr(b, key) for key in ("micro_batch", "global_batch")},
        **{f"cluster.{key}": getattr(c, key) for key in ("nodes", "devices_per_node")},
    }
    for key, value in sizes.items():
        most = MOST_LAYERS if key == "model.layers" else MOST
        require(0 < value <= most, f"{key} must be > 0 and <= {most}, got {value}")
    for key, value, allowed in (
        ("model.family", m.family, FAMILIES),
        ("parallel.schedule", p.schedule, SCHEDULES),
        ("parallel.recompute", p.recompute, RECOMPUTE),
        ("parallel.zero_stage", p.zero_stage, (0, 1, 2, 3)),
        ("batch.precision", b.precision, PRECISIONS),
    ):
        require(value in allowed, f"{key} must be one of {', '.join(map(str, allowed))}, got {value!r}")
    require(bool(c.hardware), "cluster.hardware must name a device, got ''")
    try:
        _ = job.fabric
    except JobError as error:
        problems.append(str(error))
    if problems:
        return problems  # the rules below need positive sizes
    devices = p.tp * p.pp * p.dp
    require(
        devices == c.num_devices,
        f"tp * pp * dp must equal the number of devices, got {p.tp} * {p.pp} * {p.dp} = {devices} != {c.num_devices}",
    )
    require(
        m.hidden % m.heads == 0, f"model.heads must divide hidden, got {m.hidden} % {m.heads} = {m.hidden % m.heads}"
    )
    require(
        m.heads % m.kv_heads == 0,
        f"model.kv_heads must divide heads, got {m.heads} % {m.kv_heads} = {m.heads % m.kv_heads}",
    )
    for key, value in (("heads", m.heads), ("kv_heads", m.kv_heads), ("ffn", m.ffn), ("vocab", m.vocab)):
        require(value % p.tp == 0, f"parallel.tp must divide model.{key}, got {value} % {p.tp} = {value % p.tp}")
    require(
        not p.sequence_parallel or m.seq_len % p.tp == 0,
        f"sequence_parallel needs tp to divide model.seq_len, got {m.seq_len} % {p.tp} = {m.seq_len % p.tp}",
    )
    require(p.virtual_stages == 1, f"schedule {p.schedule} has virtual_stages = 1, got {p.virtual_stages}")
    require(m.layers >= p.pp, f"every pipeline stage needs a layer: layers >= pp, got {m.layers} < {p.pp}")
    replica = b.micro_batch * p.dp
    require(
        b.global_batch % replica == 0,
        f"micro_batch * dp must divide global_batch, got {b.global_batch} % ({b.micro_batch} * {p.dp}) "
        f"= {b.global_batch % replica}",
    )
    actions = b.global_batch // replica * p.pp
    require(
        actions <= MOST_ACTIONS,
        f"micro-batches * pp must be <= {MOST_ACTIONS}, got {b.global_batch // replica} * {p.pp} = {actions}",
    )
    return problems
