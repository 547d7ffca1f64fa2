"""The saved predictor: the trained models of one hardware, in a folder of text and tensors, and its durations.

::

    manifest.json       schema, hardware, provenance, rows of runs that were fitted, metrics, digests of all files
    hardware.json       measured facts
    kernel.json         physics, neighbours and supports of ops;        kernel.<family>.txt.gz  LightGBM
    collective.json     the same for collectives;                       collective.<label>.txt.gz
    gnn.json            strengths and shape of the context network, where there is one; gnn.safetensors    its weights
    own_context.json    instead of a network: the name of a registered context model
    intervals.json      held-back residuals, calibration

Loading reads numbers and never executes code, and refuses a folder with a file changed, missing or added.  Predictors
that come with the package lie in ``predictors``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.caching import Memo, cached
from stepsight.dataset.base.errors import PredictorError
from stepsight.dataset.base.files import new_folder, write_json
from stepsight.dataset.graph.program import Program
from stepsight.dataset.hardware.hardware import Fabric, Hardware, canonical_hardware, hardware_from_dict
from stepsight.dataset.hardware.hardware_facts import ONE_LAUNCH, LaunchCalls, power_type, slowest_of, throttled
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.features.node_features import SegmentGraph
from stepsight.gnn.contexts import FORMS, LEVELS, Context, ContextFunction, OwnContext
from stepsight.training.collectives.collective_models import CollectiveModel
from stepsight.training.corrections.calibration import Calibration
from stepsight.training.corrections.corrector import Corrector, corrected
from stepsight.training.corrections.intervals import Intervals, NodeDoubts
from stepsight.training.corrections.residual import PublishedRuns
from stepsight.training.kernels.host_calls import HostCalls
from stepsight.training.kernels.kernel_models import KernelModel
from stepsight.training.kernels.transferred import Teacher
from stepsight.training.predictor import model_tables

Seconds = NDArray[np.float64]
SHIPPED = Path(__file__).parents[1] / "shipped" / "predictors"
MAX_LATENCIES = 128  # latency models in a predictor's cache
MAX_PROGRAMS, MAX_WORKS = 4096, 100_000  # entries of a latency model's cache
FASTER, SLOWER, SLOWEST_S = 10.0, 1e6, 100.0  # factors relative to peaks and bandwidths; a latency
ROWWISE = "a scale for each row"  # in names of software whose 8-bit products include a conversion
_TABLE = re.compile(r"/(sglang|trtllm|vllm|nccl)/([0-9][^/]*)/")  # software and version in the path of a table
_TABLE_NAMES = {"TensorRT-LLM": "trtllm", "SGLang": "sglang", "vLLM": "vllm", "NCCL": "nccl"}
T = TypeVar("T", Op, Collective)


class LearnedLatency:
    """A ``LatencyModel``: a predictor's durations on some cluster; arguments as in ``Predictor.latency_on``."""

    def __init__(
        self,
        predictor: Predictor,
        *,
        fabric: Fabric,
        busy: int,
        devices: int,
        dtype: str,
        software: str,
        calls: LaunchCalls,
    ) -> None:
        self._predictor = predictor
        self._kernel, self._collective, self._context = predictor.kernel, predictor.collective, predictor.context
        self.hardware, self.fabric, self.busy = predictor.hardware, fabric, busy
        self.calls = calls
        self.knows_context = predictor.context is not None
        self.host_times = None if predictor.host is None else predictor.host.shared_by(busy)
        self._software = software
        self._pace = self.hardware.power_slowdown(dtype) * (1.0 + self.hardware.compute_spread * slowest_of(devices))
        self._paid = self._kernel.hardware.power_slowdown("bf16")
        self._ops: Memo[Op, float] = Memo("predictor: ops", MAX_WORKS)
        self._collectives: Memo[Collective, float] = Memo("predictor: collectives", MAX_WORKS)
        self._programs: Memo[int, tuple[Program, Seconds, Seconds]] = Memo("predictor: programs", MAX_PROGRAMS)
        self._outside: Memo[Op | Collective, str] = Memo("predictor: support", MAX_WORKS)

    def op_seconds(self, ops: Sequence[Op]) -> Seconds:
        """Seconds of each op alone, shape ``(len(ops),)``."""
        return self._known(self._ops, ops, self._ask_kernel)

    def collective_seconds(self, collectives: Sequence[Collective]) -> Seconds:
        """Seconds of each collective alone, shape ``(len(collectives),)``."""
        return self._known(self._collectives, collectives, lambda some: self._collective.seconds(some, self.fabric))

    def _ask_kernel(self, ops: Sequence[Op]) -> Seconds:
        """Seconds of each op by the kernel model, at the clock that the power limit sustains, on the slowest device."""
        products = np.array([op.record.bound == "compute" for op in ops], dtype=np.bool_)
        wide = np.array([power_type(op.dtype) == "bf16" for op in ops], dtype=np.bool_)
        named = [self._software] * len(ops) if self._software else ()
        seconds = self._kernel.seconds(ops, self.busy, named)
        paid = np.where(wide, self._paid ** throttled(seconds), 1.0)
        return np.asarray(seconds * np.where(products, self._pace / paid, 1.0))

    def _known(self, memo: Memo[T, float], works: Sequence[T], ask: Callable[[Sequence[T]], Seconds]) -> Seconds:
        """Seconds of each work; those missing in the cache are requested once and corrected by the constants."""
        found = {work: memo.get(work) for work in works}
        missing = [work for work, seconds in found.items() if seconds is None]
        if missing:
            asked = ask(missing)
            asked = corrected(asked, missing, self._predictor.calibration.constants)
            self._check(missing, asked)
            pairs = list(zip(missing, asked.tolist(), strict=True))
            memo.update(pairs)
            found.update(pairs)
        return np.array([found[work] for work in works], dtype=np.float64)

    def _check(self, works: Sequence[T], seconds: Seconds) -> None:
        """Refuse seconds far beyond the result of any fit."""
        facts, links = self.hardware, (self.fabric.inter_node, self.fabric.intra_node)
        slowest = min(link.bandwidth_bytes_per_s for link in links)
        host = min(facts.host_link_bytes_per_s, facts.host_memory_bandwidth_bytes_per_s)
        memory = min(facts.memory_bandwidth_bytes_per_s, host)
        for work, took in zip(works, seconds.tolist(), strict=True):
            computed, moved = 0.0, work.num_bytes / memory
            if isinstance(work, Collective):
                moved = work.num_bytes * work.group_size / slowest
            else:
                computed = work.flops / facts.peak_flops.get(work.dtype, max(facts.peak_flops.values()))
            least, most = computed / FASTER, SLOWEST_S + SLOWER * (computed + moved)
            if not least <= took <= most:
                raise PredictorError(
                    f"a predictor must give times that its hardware allows, from {least:g} to {most:g} s, "
                    f"got {took:g} of {work!s:.120}"
                )

    def in_context(self, programs: Sequence[Program], seconds: Sequence[Seconds]) -> Sequence[Seconds]:
        """Seconds of every node within its program, from the seconds alone; same shapes."""
        if self._context is None:
            return seconds
        found = []
        for program, alone in zip(programs, seconds, strict=True):
            known = self._programs.get(id(program))
            if known is None or not (known[1] is alone or np.array_equal(known[1], alone)):
                inside = self._context(SegmentGraph(program, self.hardware, self.busy), alone)
                known = self._programs[id(program)] = (program, alone, inside)  # a reference keeps its id unique
            found.append(known[2])
        return found

    def outside(self, works: Sequence[Op | Collective]) -> tuple[str, list[str]]:
        """Why all work lies outside the measured range (more devices of a node compute at once than were measured), and
        why each work does; empty where it does not.
        """
        found = {work: self._outside.get(work) for work in works}
        for work in (work for work, reason in found.items() if reason is None):
            self._outside[work] = found[work] = self._predictor.unsupported(work, self.fabric)
        return self._kernel.crowded(self.busy), [found[work] or "" for work in works]


@dataclass(frozen=True)
class Predictor:
    """Trained models of one hardware: durations for ops and collectives, alone and in context.

    Attributes:
        hardware: Measured facts; its name is what ``[cluster] hardware`` must say.
        kernel: Ops on their own.
        collective: Collectives on their own.
        context: Correction of every node within its program; None: durations in context are those alone.
        calibration: Correction of whole iterations.
        intervals: How far to trust it.
        manifest: Provenance, as in ``manifest.json``.
        host: Calls that the host runs itself, learned from scripts; None: nothing was.
        doubts: Errors of single ops and collectives within runs that were held back; None: none were.
    """

    hardware: Hardware
    kernel: KernelModel
    collective: CollectiveModel
    context: Context | None = None
    calibration: Calibration = field(default_factory=Calibration)
    intervals: Intervals = field(default_factory=Intervals)
    manifest: Mapping[str, Any] = field(default_factory=dict)
    host: HostCalls | None = None
    doubts: NodeDoubts | None = None
    _bound: Memo[Any, LearnedLatency] = field(
        default_factory=lambda: Memo("predictor: latency models", MAX_LATENCIES), init=False, compare=False, repr=False
    )

    def __repr__(self) -> str:
        context = "with" if self.context is not None else "without"
        return f"Predictor({self.hardware.name}, {str(self.manifest.get('digest', ''))[:16]}, {context} context)"

    def latency(self, job: Job, *, alone: bool = False) -> LearnedLatency:
        """The latency model for the simulator, for the job's fabric and busy devices per node.

        ``alone``: only one of the job's devices is there, and waits for no slower one.  Raises ``PredictorError`` if
        the job runs on other hardware, or asks for kernels of software that nothing was measured with.
        """
        if job.hardware_name not in (self.hardware.name, canonical_hardware(self.hardware.name)):
            raise PredictorError(
                f"the predictor {self.manifest.get('name', self.hardware.name)} serves its own hardware: "
                f"cluster.hardware must be {self.hardware.name!r:.80}, "
                f"got {job.cluster.hardware!r:.80}"
            )
        devices = 1 if alone else job.cluster.num_devices
        busy = min(job.cluster.devices_per_node, devices)
        software, calls = self.kernels_asked(job), job.execution.launches
        return self.latency_on(job.fabric, busy, devices, job.batch.dtype, software, calls=calls)

    def latency_on(
        self,
        fabric: Fabric,
        busy: int,
        num_devices: int,
        dtype: str = "bf16",
        software: str = "",
        *,
        calls: LaunchCalls = ONE_LAUNCH,
    ) -> LearnedLatency:
        """Durations on any cluster of the predictor's devices, of which ``busy`` of a node compute at once and
        ``num_devices`` move in step.

        ``dtype``: of most matrix products, which decides how far the power limit lowers the clock.  ``software``: as in
        ``ExecutionSpec.kernels``; one that is not known is the one to predict for.  ``calls``: of the host's software.
        """
        devices = num_devices if self.hardware.compute_spread else 1
        key = (busy, fabric, devices, power_type(dtype), software, calls)
        known = self._bound.get(key)
        if known is None:
            self._bound[key] = known = LearnedLatency(
                self, fabric=fabric, busy=busy, devices=devices, dtype=dtype, software=software, calls=calls
            )
        return known

    def kernels_asked(self, job: Job) -> str:
        """The software whose kernels a job asks for, without its version (empty: the usual one), if it is known."""
        asked = job.execution.kernels
        if not asked:
            return ROWWISE if job.batch.fp8_scaling == "rowwise" else ""
        named = re.fullmatch(r"(.*\S) +v?([0-9][\w.]*)", asked)
        self.kernel.check_software(named[1] if named else asked)
        known = self.measured_versions(named[1]) if named else ()
        if named and named[2] not in known:
            raise PredictorError(
                f"execution.kernels asks for a version that this predictor does not know: {named[1]:.80} was measured "
                f"in {' and '.join(sorted(known)) or 'an unknown version'}, got {asked!r:.80}; leave the version out"
            )
        return named[1] if named else asked

    def measured_versions(self, name: str) -> set[str]:
        """Versions of a software such as ``SGLang (torch)`` in the paths of the tables that taught the predictor."""
        tables = {table for word, table in _TABLE_NAMES.items() if word.lower() in name.lower()}
        found = filter(None, map(_TABLE.search, self.manifest.get("sources", ())))
        return {version for table, version in (each.groups() for each in found) if table in tables}

    @property
    def source(self) -> str:
        """Source of the durations, for people."""
        name = self.manifest.get("name", "")  # shipped ones have a name
        shipped = "shipped " if name and self.manifest.get("files") == _shipped_files(name) else ""
        digest = self.manifest.get("digest", "")
        details = [f"digest {digest}"] if digest else []
        details.append("with a context model" if self.context is not None else "no context model")
        details += [f"calibrated on {self.calibrated_on}"] if self.calibrated_on else []
        named = f"{name} " if name else ""
        return f"{shipped}predictor {named}for {self.hardware.name} ({', '.join(details)})"

    @property
    def calibrated_on(self) -> str:
        """The runs that calibrated whole iterations, for people; empty if there are none."""
        residual = self.calibration.residual
        if residual is None:
            return ""
        runs = f"{len(residual.rows)} run{'' if len(residual.rows) == 1 else 's'}"
        tables = ", ".join(self.manifest.get("calibration", {}).get("runs", {}))
        return f"{runs} of {tables}" if tables else runs

    @property
    def corrections(self) -> dict[str, Mapping[str, Corrector[Any]]]:
        """What multiplies predictions, in the order of application: by what it corrects, and by kind (``""``: all)."""
        kernel, between, calibration = self.kernel, self.collective.between, self.calibration
        shared = self.host is not None and self.host.contention.factors
        published = {} if calibration.published is None else calibration.published.blocks
        found: dict[str, Mapping[str, Corrector[Any]]] = {
            "near measured signatures": {**kernel.regressor.neighbours, **self.collective.regressor.neighbours},
            "kinds by ratio": kernel.ratios,
            "ops against other devices": kernel.transfer.posteriors if kernel.transfer is not None else {},
            "kernels in traces": kernel.traced,
            "message sizes between nodes": between.residuals if between is not None else {},
            "host calls beside other ranks": {"": self.host.contention} if self.host is not None and shared else {},
            "resources": {} if calibration.constants.plain else {"": calibration.constants},
            "published iterations": {" ".join(name): residual for name, residual in published.items()},
            "whole iterations": {} if calibration.residual is None else {"": calibration.residual},
        }
        return {name: kinds for name, kinds in found.items() if kinds}

    @property
    def context_facts(self) -> dict[str, Any]:
        """Form and strengths of the context model, and the error of each form on runs held back (none: 1)."""
        strengths = (0.0,) * len(LEVELS) if self.context is None else self.context.strengths
        form = "none" if self.context is None else self.context.form
        told = self.manifest.get("context", {}) if form in FORMS else {}
        return {
            "form": form,
            "strengths": dict(zip(LEVELS, strengths, strict=True)),
            "held_back": told.get("held_back", {}),
        }

    @cached_property
    def without_context(self) -> Predictor:
        """Copy without the context model, to measure its effect."""
        return replace(self, context=None, calibration=Calibration())

    @cached_property
    def left_out(self) -> Predictor:
        """Copy that treats all requested signatures as not measured; only valid just after fitting."""
        return replace(
            self, kernel=replace(self.kernel, left_out=True), collective=replace(self.collective, left_out=True)
        )

    def with_context(self, model: ContextFunction | str | None) -> Predictor:
        """Copy with another context model, and without the calibration, which was fitted to the old one.

        Args:
            model: A function ``model(graph, alone) -> seconds``, called once for each distinct segment, or its name in
                ``stepsight.registries.CONTEXTS``.  ``graph`` has ``program``, ``hardware``, ``busy`` (devices of the
                node that compute at once) and ``to_heterodata``; ``alone`` has the seconds of each node on its own, in
                the order of issue, as the result has those in context.  A ``torch.nn.Module`` gets ``HeteroData``, as
                ``TraceGraphs`` has it, and a tensor.  None: durations in context are those alone.

        Raises:
            PredictorError: If the model does not take two arguments, or its name is unknown.
        """
        return replace(self.without_context, context=None if model is None else OwnContext.of(model))

    def with_published(self, published: PublishedRuns | None) -> Predictor:
        """Copy with other published runs near jobs, None: none; durations are the same, and so are their caches."""
        copy = replace(self, calibration=replace(self.calibration, published=published))
        object.__setattr__(copy, "_bound", self._bound)
        return copy

    def unsupported(self, work: Op | Collective, fabric: Fabric) -> str:
        """Why a work lies outside the measured range; empty if it lies within."""
        return self.kernel.unsupported(work) if isinstance(work, Op) else self.collective.unsupported(work, fabric)

    def save(self, folder: str | Path) -> None:
        """Write the folder completely or not at all; see ``check_output`` for what may be replaced."""
        model_tables.check_output(Path(folder))
        with new_folder(Path(folder)) as new:
            write_json(new / "hardware.json", self.hardware.to_dict())
            model_tables.save_kernel(self.kernel, new)
            model_tables.save_collective(self.collective, new)
            write_json(
                new / "intervals.json",
                {
                    "intervals": self.intervals.to_dict(),
                    "calibration": self.calibration.to_dict(),
                    **({"nodes": self.doubts.to_dict()} if self.doubts is not None else {}),
                },
            )
            if self.context is not None:
                self.context.save(new)
            if self.host is not None:
                model_tables.save_host_calls(self.host, new)
            model_tables.write_manifest(new, self.manifest, self.hardware.name)

    @classmethod
    def load(cls, folder: str | Path) -> Predictor:
        """Read a folder that ``save`` wrote, or a shipped predictor by its name.  Raises ``PredictorError`` if it is no
        predictor, has another schema, or its files are not those that were saved.
        """
        folder = Path(folder)
        if not folder.exists() and folder.name in shipped_names():
            folder = SHIPPED / folder.name
        loaded = model_tables.read_folder(folder, partial(cls._parse, folder), shipped_names())
        fitted = (
            loaded.manifest.get("fitted_rows") or loaded.calibration.residual or not loaded.calibration.constants.plain
        )
        if loaded.manifest["schema"] == model_tables.UNSEALED and fitted:
            raise PredictorError(
                f"{folder}: a predictor of schema {model_tables.UNSEALED} does not tell which rows it was fitted on: "
                f"calibrate it again (schema {model_tables.SCHEMA})"
            )
        return loaded

    @classmethod
    def _parse(cls, folder: Path, manifest: dict[str, Any]) -> Predictor:
        hardware = model_tables.read_part(folder / "hardware.json", hardware_from_dict)
        if hardware.name != manifest["hardware"]:
            raise PredictorError(
                f"{folder}: manifest.json and hardware.json must name the same hardware, "
                f"got {manifest['hardware']!r:.80} and {hardware.name!r:.80}"
            )
        path, made = folder / "intervals.json", model_tables.made
        tables = model_tables.read_part(path, dict)
        return cls(
            hardware,
            model_tables.load_kernel(folder, hardware, teacher_of),
            model_tables.load_collective(folder),
            model_tables.load_context(folder),
            made(path, Calibration.from_dict, tables.get("calibration")),
            made(path, Intervals.from_dict, tables.get("intervals")),
            manifest,
            model_tables.load_host_calls(folder),
            made(path, NodeDoubts.from_dict, tables["nodes"]) if "nodes" in tables else None,
        )


def shipped_names() -> tuple[str, ...]:
    """Names of the shipped predictors."""
    return tuple(sorted(path.parent.name for path in SHIPPED.glob(f"*/{model_tables.MANIFEST}")))


@cached(16)
def _shipped_files(name: str) -> dict[str, str]:
    """Digests of the files of a shipped predictor; none if there is no such predictor."""
    return dict(model_tables.read_predictor_manifest(SHIPPED / name)["files"]) if name in shipped_names() else {}


@cached(8)
def shipped_by_name(name: str) -> Predictor:
    """A shipped predictor, by its own name."""
    return Predictor.load(SHIPPED / name)


def teacher_of(name: str) -> Teacher:
    """A shipped predictor whose efficiencies are used for other devices."""
    if name not in shipped_names():
        raise PredictorError(f"{name!r:.80} must be a shipped predictor ({', '.join(shipped_names())})")
    loaded = shipped_by_name(name)
    return Teacher(name, str(loaded.manifest["digest"]), loaded.kernel)
