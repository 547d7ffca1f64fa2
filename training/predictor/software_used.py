"""The software that a prediction stands for: the framework's profile, whose kernels, and what makes no difference."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from stepsight.dataset.base.codec import Saved
from stepsight.dataset.base.errors import JobError, PredictorError
from stepsight.dataset.job.frameworks import GENERIC, LIBRARIES, framework_in, release_month, version_numbers
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.training.kernels.kernel_models import KernelModel, label

ROWWISE = "a scale for each row"  # in names of software whose 8-bit products include a conversion
# NCCL's versions that the model of collectives describes (``choice_terms``), and those of measured tables.
OLDEST_NCCL = "2.18"
_TABLE = re.compile(r"/(sglang|trtllm|vllm|nccl)/([0-9][^/]*)/")
_TABLE_NAMES = {"TensorRT-LLM": "trtllm", "SGLang": "sglang", "vLLM": "vllm"}


class Asked(Protocol):
    """The parts of a predictor that name software."""

    @property
    def kernel(self) -> KernelModel: ...
    @property
    def manifest(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True, kw_only=True)
class SoftwareUsed(Saved):
    """The software that a prediction stands for."""

    profile: str = ""  # name of the framework's profile; empty: the job names no framework
    # whose kernels run the job's ops, by family of ops (gemm/fp8), where a predictor knows several
    kernels: Mapping[str, str] = field(default_factory=dict)
    nccl: tuple[str, ...] = ()  # versions that collectives were measured with
    unused: tuple[str, ...] = ()  # stated facts that do not change the prediction, each with the reason
    doubts: tuple[str, ...] = ()  # stated facts that the prediction does not stand for, so that it may be wrong

    def __str__(self) -> str:
        parts = [f"{family} by {name}" for family, name in self.kernels.items()]
        parts += [f"collectives measured with NCCL {', '.join(self.nccl)}"] if self.nccl else []
        return "; ".join([*parts, *self.unused]) or "no measured software answers"


def kernels_asked(predictor: Asked, job: Job) -> str:
    """The software whose kernels a job asks for, without its version (empty: the usual one), if it is known."""
    asked = job.execution.kernels
    if not asked:
        return ROWWISE if job.batch.fp8_scaling == "rowwise" else ""
    named = re.fullmatch(r"(.*\S) +v?([0-9][\w.]*)", asked)
    if named is None:
        predictor.kernel.check_software(asked)
        return asked
    predictor.kernel.check_software(named[1])
    known = {version for name, version in _measured(predictor) if _same(name, named[1])}
    if named[2] not in known:
        raise PredictorError(
            f"execution.kernels asks for a version that this predictor does not know: {named[1]:.80} was measured in "
            f"{' and '.join(sorted(known)) or 'an unknown version'}, got {asked!r:.80}; leave the version out"
        )
    return named[1]


def software_used(job: Job, predictor: Asked | None, works: Iterable[Op | Collective]) -> SoftwareUsed:
    """The software that a prediction of a job stands for; ``works``: its distinct ops and collectives."""
    execution = job.execution
    unused, doubts = [], []
    kernels: dict[str, str] = {}
    nccl: tuple[str, ...] = ()
    if predictor is not None:
        kernels = _kernels(predictor, job, works)
        nccl = tuple(sorted({version for name, version in _measured(predictor) if name == "nccl"}, key=version_numbers))
        asked = "" if not execution.kernels else kernels_asked(predictor, job).lower()
        others = [f"{family} by {name}" for family, name in kernels.items() if asked not in name.lower()]
        if others:
            doubts.append(f"kernels of {execution.kernels} were not measured for all ops: {', '.join(others)}")
    if execution.container and _profile(job) == "" and framework_in("", execution.container, execution.date) is GENERIC:
        unused.append(f"container {execution.container:.80}: no profile of a framework knows it")
    released = release_month(execution.container)
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
    return SoftwareUsed(profile=_profile(job), kernels=kernels, nccl=nccl, unused=tuple(unused), doubts=tuple(doubts))


def _kernels(predictor: Asked, job: Job, works: Iterable[Op | Collective]) -> dict[str, str]:
    model, asked = predictor.kernel, kernels_asked(predictor, job)
    ops = {label(op.family, op, model.hardware): op for op in works if isinstance(op, Op)}
    found = {}
    for family, names in model.software.items():
        if family in ops and any(names):
            name = names[model.variant(ops[family], asked)]
            versions = sorted({version for table, version in _measured(predictor) if _same(table, name)})
            found[family] = f"{name} {' and '.join(versions)}" if versions else name
    return found


def _measured(predictor: Asked) -> list[tuple[str, str]]:
    """Software and version of each table that a predictor learned from, as their paths state them."""
    return [found.groups() for name in predictor.manifest.get("sources", ()) if (found := _TABLE.search(name))]  # type: ignore[misc]


def _same(table: str, name: str) -> bool:
    """Whether a table's software is the one of a name such as ``SGLang (torch)``."""
    return any(word.lower() in name.lower() for word, short in _TABLE_NAMES.items() if short == table)


def _described(version: str, measured: tuple[str, ...]) -> bool:
    """Whether a version of NCCL lies between the oldest that is described and the newest that was measured."""
    if not measured:
        return True
    newest = version_numbers(measured[-1])[:2]
    return version_numbers(OLDEST_NCCL) <= version_numbers(version)[:2] <= newest


def _profile(job: Job) -> str:
    try:
        profile = job.profile
    except JobError:  # a file that is gone
        profile = None
    return "" if profile is None else profile.name
