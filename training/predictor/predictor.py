"""The saved predictor: the trained models of one hardware, in a folder of text and tensors.

::

    manifest.json       schema, hardware, provenance, rows of runs that were fitted, metrics, digests of all files
    hardware.json       measured facts
    kernel.json         physics, neighbours and supports of ops;        kernel.<family>.txt.gz  LightGBM
    collective.json     the same for collectives;                       collective.<label>.txt.gz
    gnn.json            shape of the context network, where there is one; gnn.safetensors    its weights
    context_table.json  instead of a network: a table of corrections in context
    intervals.json      held-back residuals, calibration

Loading reads numbers and never executes code, and refuses a folder with a file changed, missing or added.  Predictors
that come with the package lie in ``predictors``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepsight.dataset.base.caching import Memo, cached
from stepsight.dataset.base.errors import PredictorError
from stepsight.dataset.base.files import new_folder, set_aside, write_json
from stepsight.dataset.hardware.hardware import Fabric, Hardware, canonical_hardware, hardware_from_dict
from stepsight.dataset.hardware.hardware_facts import power_type
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.training.collectives.collective_models import CollectiveModel
from stepsight.training.corrections.calibration import Calibration
from stepsight.training.intervals.published_errors import Intervals
from stepsight.training.kernels.host_calls import HostCalls
from stepsight.training.kernels.kernel_models import KernelModel
from stepsight.training.kernels.transferred import Teacher
from stepsight.training.predictor.learned_latency import LearnedLatency
from stepsight.training.predictor.model_tables import (
    MANIFEST,
    SCHEMA,
    UNSEALED,
    changed_files,
    check_output,
    load_collective,
    load_host_calls,
    load_kernel,
    made,
    read_part,
    read_predictor_manifest,
    save_collective,
    save_host_calls,
    save_kernel,
    write_manifest,
)
from stepsight.training.predictor.software_used import kernels_asked

if TYPE_CHECKING:
    from stepsight.gnn.context_table import Context

MAX_LATENCIES = 128  # latency models in a predictor's cache


def _latencies() -> Memo[Any, LearnedLatency]:
    return Memo("predictor: latency models", MAX_LATENCIES)


SHIPPED = Path(__file__).parents[1] / "shipped" / "predictors"


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
    """

    hardware: Hardware
    kernel: KernelModel
    collective: CollectiveModel
    context: Context | None = None
    calibration: Calibration = field(default_factory=Calibration)
    intervals: Intervals = field(default_factory=Intervals)
    manifest: Mapping[str, Any] = field(default_factory=dict)
    host: HostCalls | None = None
    _bound: Memo[Any, LearnedLatency] = field(default_factory=_latencies, init=False, compare=False, repr=False)

    def __repr__(self) -> str:
        context = "with" if self.context is not None else "without"
        return f"Predictor({self.hardware.name}, {str(self.manifest.get('digest', ''))[:16]}, {context} context)"

    def latency(self, job: Job, *, alone: bool = False) -> LearnedLatency:
        """The latency model for the simulator, for the job's fabric and busy devices per node.

        Args:
            job: What to run.
            alone: Only one of its devices is there, and waits for no slower one.

        Raises:
            PredictorError: If the job runs on other hardware, or asks for kernels of software that nothing was measured
                with.
        """
        if job.hardware_name not in (self.hardware.name, canonical_hardware(self.hardware.name)):
            raise PredictorError(
                f"the predictor {self.manifest.get('name', self.hardware.name)} serves its own hardware: "
                f"cluster.hardware must be {self.hardware.name!r:.80}, "
                f"got {job.cluster.hardware!r:.80}"
            )
        busy = 1 if alone else min(job.cluster.devices_per_node, job.cluster.num_devices)
        devices = 1 if alone else job.cluster.num_devices
        software, calls = kernels_asked(self, job), job.execution.dispatch_calls
        return self.latency_on(job.fabric, busy, devices, job.batch.dtype, software, dispatch_calls=calls)

    def latency_on(
        self,
        fabric: Fabric,
        busy: int,
        num_devices: int,
        dtype: str = "bf16",
        software: str = "",
        *,
        dispatch_calls: float = 0.0,
    ) -> LearnedLatency:
        """Durations on any cluster of the predictor's devices.

        Args:
            fabric: The links.
            busy: Devices of a node that compute at once.
            num_devices: That move in step.
            dtype: Of most matrix products: decides how far the power limit lowers the clock.
            software: As in ``ExecutionSpec.kernels``; one that is not known is the one to predict for.
            dispatch_calls: As in ``ExecutionSpec``.
        """
        devices = num_devices if self.hardware.compute_spread else 1
        key = (busy, fabric, devices, power_type(dtype), software, dispatch_calls)
        known = self._bound.get(key)
        if known is None:
            self._bound[key] = known = LearnedLatency(
                self.hardware,
                self.kernel,
                self.collective,
                self.context,
                fabric=fabric,
                busy=busy,
                constants=self.calibration.constants,
                devices=devices,
                dtype=dtype,
                host=self.host.shared_by(busy) if self.host is not None else None,
                software=software,
                dispatch_calls=dispatch_calls,
            )
        return known

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

    def unsupported(self, works: Iterable[Op | Collective], fabric: Fabric) -> list[str]:
        """Ops, and collectives on a fabric, that lie outside the measured range, and why."""
        reasons = (
            self.kernel.unsupported(work) if isinstance(work, Op) else self.collective.unsupported(work, fabric)
            for work in works
        )
        return [reason for reason in reasons if reason]

    def save(self, folder: Path) -> None:
        """Write the folder completely or not at all; see ``check_output`` for what may be replaced."""
        check_output(folder)
        with new_folder(folder) as new:
            write_json(new / "hardware.json", self.hardware.to_dict())
            save_kernel(self.kernel, new)
            save_collective(self.collective, new)
            write_json(
                new / "intervals.json",
                {"intervals": self.intervals.to_dict(), "calibration": self.calibration.to_dict()},
            )
            if self.context is not None:
                self.context.save(new)
            if self.host is not None:
                save_host_calls(self.host, new)
            write_manifest(new, self.manifest, self.hardware.name)

    @classmethod
    def load(cls, folder: str | Path) -> Predictor:
        """Read a folder that ``save`` wrote, or a shipped predictor by its name.

        Raises:
            PredictorError: If it is no predictor, has another schema, or its files are not those that were saved.
        """
        folder = Path(folder)
        if not folder.exists() and folder.name in shipped_names():
            folder = SHIPPED / folder.name
        old = set_aside(folder)
        if old is not None:
            raise PredictorError(
                f"{folder} is missing: a command was killed while it replaced it; the old one is complete in {old}. "
                f"To restore it: mv {old} {folder}"
            )
        if not (folder / MANIFEST).is_file():
            raise PredictorError(
                "a predictor is a folder with manifest.json"
                f"{''.join(f', or {name}' for name in shipped_names())}, got {folder}"
            )
        manifest = read_predictor_manifest(folder)
        changed = changed_files(folder, manifest)
        refusal = PredictorError(
            f"{folder}: files must be those that were saved, got changed, missing or added {', '.join(changed)}"
        )
        if not all(name.endswith(".json") for name in changed):  # libraries may read only files that stepsight wrote
            raise refusal
        try:  # for a changed table, its own error is more helpful
            loaded = cls._parse(folder, manifest)
        except Exception as error:
            if changed and not isinstance(error, PredictorError):
                raise refusal from None
            raise
        if changed:
            raise refusal
        fitted = manifest.get("fitted_rows") or loaded.calibration.by_runs
        if manifest["schema"] == UNSEALED and fitted:
            raise PredictorError(
                f"{folder}: a predictor of schema {UNSEALED} does not tell which rows it was fitted on: "
                f"calibrate it again (schema {SCHEMA})"
            )
        return loaded

    @classmethod
    def _parse(cls, folder: Path, manifest: dict[str, Any]) -> Predictor:
        hardware = read_part(folder / "hardware.json", hardware_from_dict)
        if hardware.name != manifest["hardware"]:
            raise PredictorError(
                f"{folder}: manifest.json and hardware.json must name the same hardware, "
                f"got {manifest['hardware']!r:.80} and {hardware.name!r:.80}"
            )
        tables = read_part(folder / "intervals.json", dict)
        context = None
        if any((folder / name).exists() for name in ("gnn.json", "context_table.json")):
            from stepsight.gnn.context_table import load_context

            context = load_context(folder)
        return cls(
            hardware,
            load_kernel(folder, hardware, teacher_of),
            load_collective(folder),
            context,
            made(folder / "intervals.json", Calibration.from_dict, tables.get("calibration")),
            made(folder / "intervals.json", Intervals.from_dict, tables.get("intervals")),
            manifest,
            load_host_calls(folder),
        )


def shipped_names() -> tuple[str, ...]:
    """Names of the shipped predictors."""
    return tuple(sorted(path.parent.name for path in SHIPPED.glob(f"*/{MANIFEST}")))


@cached(16)
def _shipped_files(name: str) -> dict[str, str]:
    """Digests of the files of a shipped predictor; none if there is no such predictor."""
    return dict(read_predictor_manifest(SHIPPED / name)["files"]) if name in shipped_names() else {}


@cached(8)
def shipped_by_name(name: str) -> Predictor:
    """A shipped predictor, by its own name."""
    return Predictor.load(SHIPPED / name)


def teacher_of(name: str) -> Teacher:
    """A shipped predictor whose efficiencies are used for other devices.

    Raises:
        PredictorError: If none has that name.
    """
    if name not in shipped_names():
        raise PredictorError(f"{name!r:.80} must be a shipped predictor ({', '.join(shipped_names())})")
    loaded = shipped_by_name(name)
    return Teacher(name, str(loaded.manifest["digest"]), loaded.kernel)
