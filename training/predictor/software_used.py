"""The software that a prediction stands for: the framework's profile, whose kernels, what another release changes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.base.files import IF_SET, Saved
from stepsight.dataset.job.frameworks import GENERIC, LIBRARIES, framework_in, release_month, version_numbers
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.training.corrections.releases import drift_of, months_of, months_taught, rate_of, stated_month
from stepsight.training.kernels.kernel_models import label
from stepsight.training.predictor.predictor import Predictor

# NCCL's versions that the model of collectives describes (``choice_terms``), and those of measured tables.
OLDEST_NCCL = "2.18"

P = TypeVar("P", bound=Any)  # a prediction
# Nine pairs of ten of dated runs (``releases``) differ by less than this for the square root of the months between
# them, beside the drift.
SPREAD_LOG = 0.05


@dataclass(frozen=True, kw_only=True)
class SoftwareUsed(Saved):
    """The software that a prediction stands for."""

    profile: str = ""  # name of the framework's profile; empty: the job names no framework
    # whose kernels run the job's ops, by family of ops (gemm/fp8), where a predictor knows several
    kernels: Mapping[str, str] = field(default_factory=dict)
    nccl: tuple[str, ...] = ()  # versions that collectives were measured with
    unused: tuple[str, ...] = ()  # stated facts that do not change the prediction, each with the reason
    doubts: tuple[str, ...] = ()  # stated facts that the prediction does not stand for, so that it may be wrong
    release: str = field(default="", metadata=IF_SET)  # and by how much it changes the time; empty: it does not

    def __str__(self) -> str:
        parts = [f"{family} by {name}" for family, name in self.kernels.items()]
        parts += [f"collectives measured with NCCL {', '.join(self.nccl)}"] if self.nccl else []
        return "; ".join([*parts, *self.unused]) or "no measured software answers"


def software_used(job: Job, predictor: Predictor | None, works: Iterable[Op | Collective]) -> SoftwareUsed:
    """The software that a prediction of a job stands for; ``works``: its distinct ops and collectives."""
    execution = job.execution
    unused, doubts = [], []
    kernels: dict[str, str] = {}
    nccl: tuple[str, ...] = ()
    if predictor is not None:
        model, asked = predictor.kernel, predictor.kernels_asked(job)
        ops = {label(op.family, op, model.hardware): op for op in works if isinstance(op, Op)}
        for family, names in model.software.items():
            if family in ops and any(names):
                name = names[model.variant(ops[family], asked)]
                versions = sorted(predictor.measured_versions(name))
                kernels[family] = f"{name} {' and '.join(versions)}" if versions else name
        nccl = tuple(sorted(predictor.measured_versions("NCCL"), key=version_numbers))
        asked = asked.lower() if execution.kernels else ""
        others = [f"{family} by {name}" for family, name in kernels.items() if asked not in name.lower()]
        if others:
            doubts.append(f"kernels of {execution.kernels} were not measured for all ops: {', '.join(others)}")
    if execution.container and _profile(job) == "" and framework_in("", execution.container, execution.date) is GENERIC:
        unused.append(f"container {execution.container:.80}: no profile of a framework knows it")
    released = release_month(execution.container)
    if _is_other_image(job):
        counts = f"only its month, {released}, counts" if released else "it changes nothing"
        doubts.append(f"container {execution.container:.80} is no known image of {_profile(job)}: {counts}")
    if execution.date and execution.date[:7] < released[: len(execution.date)]:
        doubts.append(
            f"execution.date is {execution.date}, before the release of container {execution.container:.80} "
            f"({released}): the date chooses the profile; leave it out, or state when the container ran"
        )
    if execution.nccl and not _described(execution.nccl, nccl):
        doubts.append(
            f"collectives are predicted as NCCL {OLDEST_NCCL} to {nccl[-1]} runs them: execution.nccl is "
            f"{execution.nccl}, which may choose other algorithms"
        )
    for name in LIBRARIES:
        stated = getattr(execution, name)
        if stated and not (name == "nccl" and (stated in nccl or not _described(stated, nccl))):
            unused.append(f"{name} {stated} does not change the answer: no table compares its versions")
    log = drift_of(job) if predictor is not None and predictor.calibration.dated else 0.0
    drift = f"{stated_month(job)}, {100 * math.expm1(log):+.1f} % by the drift of dated runs"
    release = f"{drift} (the profile holds for {rate_of(job)[1]})" if log else ""
    told = SoftwareUsed(profile=_profile(job), kernels=kernels, nccl=nccl, release=release)
    return replace(told, unused=tuple(unused), doubts=tuple(doubts))


def _described(version: str, measured: tuple[str, ...]) -> bool:
    """Whether a version of NCCL lies between the oldest that is described and the newest that was measured."""
    if not measured:
        return True
    newest = version_numbers(measured[-1])[:2]
    return version_numbers(OLDEST_NCCL) <= version_numbers(version)[:2] <= newest


def _is_other_image(job: Job) -> bool:
    """Whether the image of a job's container has a name without a word of the job's profile, as ``pytorch`` of NeMo."""
    image = re.split("[:@]", job.execution.container.lower().rsplit("/", 1)[-1])[0]
    known = {*re.findall("[a-z]+", " ".join(job.profile.words))} if _profile(job) and job.profile else set()
    return bool(image and known) and not known.intersection(re.findall("[a-z]+", image.replace("container", "")))


def _profile(job: Job) -> str:
    try:
        profile = job.profile
    except JobError:  # a file that is gone
        profile = None
    return "" if profile is None else profile.name


@dataclass(frozen=True)
class SoftwareChange:
    """The drift from one release to another: its factor in log units, half of its 90 % interval, and a text."""

    log_factor: float = 0.0
    doubt_log: float = 0.0
    text: str = ""


def with_change(prediction: P, change: SoftwareChange | None) -> P:
    """A prediction of a job with the drift to another release of its software; None: as it is."""
    if change is None:
        return prediction
    counted = prediction.predictor is not None and prediction.predictor.calibration.dated  # the job states the release
    seconds = prediction.iteration_time_s * (1.0 if counted else math.exp(change.log_factor))
    changed: P = replace(prediction, iteration_time_s=seconds, change=change)
    return changed


def software_stated(date: str, container: str) -> dict[str, Any]:
    """Keys of a job with other software, if any is named; a container replaces the date of the job."""
    boxed = {"execution.container": container} if container else {}
    return {"execution.date": date, **boxed} if date or boxed else {}


def software_change(usual: Job, asked: Job) -> SoftwareChange:
    """The drift between the software that a job states and the one that is asked about."""
    before, after = (_profile(job) for job in (usual, asked))
    if not after:
        return SoftwareChange(text="the job names no framework, so another release changes nothing")
    (rate_log, held), until = rate_of(asked), stated_month(asked)
    since = stated_month(usual) or held
    if not since or not until:
        which = "the job states no date" if until else "no month is known of the container"
        return SoftwareChange(text=f"{which}, so nothing but the profile of {after} counts: no drift is known from it")
    months, within = months_of(until) - months_of(since), months_taught(since, until)
    doubt = math.hypot(SPREAD_LOG * math.sqrt(abs(months)), rate_log * (abs(months) - abs(within)))
    name = f"{after} of {until} instead of {since}"
    name += "" if before == after else f": profile {after} instead of {before or 'none'}"
    percent = f"{100 * math.expm1(rate_log * within):+.1f} % by the drift of pairs of dated runs"
    found = percent if rate_log else f"no pairs of dated runs of {after}, so the time stays"
    return SoftwareChange(rate_log * within, doubt, f"{name}: {found}")
