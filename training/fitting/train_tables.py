"""``train`` on tables: a predictor of one device from its measured ops and collectives, without runs.

Also a calibration by a table of iteration times: constants by gradient through the simulator, the rest by similar jobs.
The logarithm of an iteration's time falls with that of a resource's factor by the part of the critical path that the
resource makes up: ``d log T / d log f_g = sum_{i in g} n_i t_i / T``, with ``n_i = dT / dt_i`` from the engine.  With
normal priors on the factors, and residuals that jobs share as far as they are alike, a few Gauss-Newton steps find
the most likely factors; what they leave is the residual's.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.errors import JobError, TableError
from stepsight.dataset.base.files import digest
from stepsight.dataset.hardware.hardware import canonical_hardware, find_fabric, roofline_seconds, usual_fabric
from stepsight.dataset.job.job import Job
from stepsight.dataset.tables import Measurements
from stepsight.simulator.iteration.simulate import simulate
from stepsight.training.collectives.collective_models import label_of
from stepsight.training.corrections.calibration import MOST_WIDTH, NAMES, RESOURCES, Calibration, Constants, resource_of
from stepsight.training.corrections.corrector import GaussianProcess, rows_by
from stepsight.training.corrections.intervals import NORMAL_WIDTH, conformal_quantile
from stepsight.training.corrections.residual import Columns, JobFeatures, Residual, covariance, most_likely
from stepsight.training.fitting import own_table
from stepsight.training.fitting.own_table import OwnTable, family_figures, shape_of
from stepsight.training.kernels.kernel_models import KernelModel, fit_kernels
from stepsight.training.kernels.transferred import AskedOps, Teacher, Transfer, fit_correction, name_of
from stepsight.training.predictor.predictor import Predictor, shipped_by_name, teacher_of
from stepsight.training.regression.regressor import Regressor
from stepsight.training.shipped.catalogue import RECIPES, recipe_for, teaching_names
from stepsight.training.shipped.from_tables import fit_links
from stepsight.training.tracking.tracking import begin_training, tracked

Array = NDArray[np.float64]
Say = Callable[[str], None]

ENOUGH = 2000  # fewest rows of a label for its own trees: B200 7.7 % against 8.5, L40S 9.4 against 12.5
FEWEST = 5  # fewest rows of a label and software for a correction


def fit_ops(own: OwnTable, teachers: Sequence[Teacher], like: str, *, seed: int, say: Say) -> KernelModel:
    """Fit a device's ops: by its own trees if it has many rows, else by other devices' predictors.

    ``teachers``: other devices' ops; none: everything is fitted from its own rows.  ``like``: name of the teacher whose
    efficiency is the first guess; empty: the mean of all.
    """
    names = np.array(own.labels(), dtype=object)
    counts = {name: int((names == name).sum()) for name in dict.fromkeys(names.tolist())}
    many = np.array([not teachers or counts[name] >= ENOUGH for name in names], dtype=np.bool_)
    kernel = KernelModel(own.hardware, Regressor({}, {}, {}, {}))
    if many.any():
        rows = own.ops.take(np.flatnonzero(many))
        say(f"trees: {len(rows)} ops of {', '.join(dict.fromkeys(names[many].tolist()))}")
        kernel = fit_kernels(
            rows.ops, 1, rows.seconds, own.hardware, variants=rows.variants, seed=seed, judged=not teachers
        )
    transfer = Transfer(own.hardware, tuple(teachers), like)
    groups = rows_by(name_of(name, variant) for name, variant in zip(names, own.ops.variants.tolist(), strict=True))
    posteriors = {}
    for name, index in groups.items():
        if not many[index[0]] and len(index) >= FEWEST:
            say(f"transfer: {len(index)} ops of {name}")  # of one label, in any precision
            rows, blocks = own.ops.take(index), []
            residuals = np.log(rows.seconds / [roofline_seconds(op, own.hardware) for op in rows.ops])
            precisions = rows_by(op.dtype for op in rows.ops)
            for of_one in precisions.values():
                base, columns = transfer.rows_of([rows.ops[place] for place in of_one])
                residuals[of_one] -= base
                blocks.append(columns)
            order = np.concatenate(list(precisions.values()))
            joined = {term: np.concatenate([block[term] for block in blocks]) for term in blocks[0]}
            asked = AskedOps([rows.ops[place] for place in order], joined, rows.seconds[order])
            posteriors[name] = fit_correction(asked, residuals[order], seed)
    return replace(
        kernel,
        derives=own.hardware.kind == "gpu",
        software=dict(own.software),
        transfer=replace(transfer, posteriors=posteriors) if teachers else None,
    )


FEWEST_TO_SPLIT = 25  # fewest rows for holding out a fifth of the shapes
FEWEST_OF_FAMILY = 10  # with fewer rows of a family, a warning


def train_tables(
    tables: Sequence[str | Path],
    out: str | Path,
    *,
    hardware: str = "",
    like: str = "",
    software: str = "",
    fabric: str = "",
    samples: int = 0,
    seed: int = 0,
    tracking_uri: str | None = None,
    progress: bool = True,
) -> Predictor:
    """Train a predictor of one device on tables of its ops and collectives, save it, and track it in MLflow.

    A fifth of the shapes is held out first and judges (``held_out`` in the manifest); what is saved is fitted to all
    rows. With ``samples`` only those are fitted, and all other rows judge.

    Args:
        tables: Files that ``stepsight import FORMAT PATH --out TABLE.parquet`` wrote.
        out: Folder of the predictor to write.
        hardware: Preset or file of the device's facts; empty: the tables' only device, which must be a preset.
        like: A predictor of the package, or its hardware, whose efficiency is the first guess; its facts count where
            none are known of the device. Empty: the mean of all.
        software: Pattern of the software to predict for; empty: what ran most rows of each family.
        fabric: Links of collectives whose rows name none that is known; empty: the hardware's usual ones.
        samples: Most shapes of each family of ops, and of each kind of collective, to learn from; 0: all.
        seed: Of everything random.
        tracking_uri: Of MLflow; by default an sqlite database beside ``out``.
        progress: Whether to report progress on stderr.

    Returns:
        The predictor, as ``Predictor.load(out)`` reads it.

    Raises:
        TableError: If the tables hold nothing to learn from, or several devices.
        PredictorError: If ``out`` is something else than a predictor, or ``like`` names none.

    Example:
        >>> predictor = train_tables(["gb200.parquet"], "gb200", like="b200-sxm")  # doctest: +SKIP
    """
    paths, out = [Path(path) for path in tables], Path(out)
    uri, say = begin_training(out, tracking_uri, progress)
    table, whole, alike = _read(paths, like, hardware=hardware, software=software, fabric=fabric)
    say(f"{whole.hardware.name}: {len(whole.ops)} ops, {len(whole.collectives)} collectives")
    used = whole.sample(samples, seed) if samples else whole
    with tracked(uri, f"train {whole.hardware.name}") as run:
        held_out: dict[str, Any] = {}
        if not samples and len(whole.ops) + len(whole.collectives) >= FEWEST_TO_SPLIT:
            kept, left = used.split(seed)
            say(f"holding out {len(left.ops)} ops and {len(left.collectives)} collectives, by shape")
            held_out = judge_own_table(fit_own_table(kept, alike, seed=seed, say=say), left)
        predictor = fit_own_table(used, alike, seed=seed, say=say)
        told = {"tables": [str(path.resolve()) for path in paths], "samples": samples, "seed": seed, "like": alike}
        told |= {"held_out": held_out, "mlflow_run_id": run.run_id, "mlflow_uri": uri, "warnings": few_rows(used)}
        predictor = replace(predictor, manifest={**_manifest(table, whole, used, software), **told})
        predictor.save(out)
        run.finish(predictor, out, partial(_compared, predictor, whole))
    say(f"done: {out}")
    return Predictor.load(out)


def _read(
    paths: Sequence[Path], like: str, *, hardware: str, software: str, fabric: str
) -> tuple[Measurements, OwnTable, str]:
    """Read all rows of some files, select those of the device, and name the shipped predictor that is ``like`` it."""
    alike = recipe_for(canonical_hardware(like)) if like else ""
    if like and not alike:
        known = ", ".join(f"{own} ({recipe.hardware})" for own, recipe in RECIPES.items())
        rule = f"--like must be a shipped predictor, or its hardware: {known}"
        raise TableError(f"{rule}; got {canonical_hardware(like)!r:.80}")
    table = Measurements.concat(Measurements.from_parquet(path) for path in paths)
    preset = RECIPES[alike].hardware if alike else ""
    device = own_table.find_own_hardware(table, hardware, preset)
    usual = fabric or _usual(hardware, device.name, preset)
    single = len(set(table.device) - {""}) == 1  # whatever its rows call the only device
    own = replace(table, device=(device.name,) * len(table)) if single else table
    return table, own_table.own_table(own, device, software, usual), alike


def fit_own_table(own: OwnTable, like: str = "", *, seed: int = 0, say: Say = lambda text: None) -> Predictor:
    """Fit a predictor to a device's rows, without saving it."""
    names = teaching_names()
    teachers = [teacher_of(name) for name in names] if own.hardware.kind == "gpu" else []
    kernel = fit_ops(own, teachers, like, seed=seed, say=say)
    usual = _usual(own.hardware.name)
    links = own.collectives.fabrics[0] if len(own.collectives) else find_fabric(usual) if usual else None

    def distance(lender: Predictor) -> float:
        there = find_fabric(usual_fabric(lender.hardware.name)).intra_node.bandwidth_bytes_per_s
        return 0.0 if links is None else abs(math.log(there / links.intra_node.bandwidth_bytes_per_s))

    lender = min((shipped_by_name(name) for name in ([like] if like else names)), key=distance)
    return Predictor(own.hardware, kernel, fit_links(own.collectives, seed=seed, lender=lender.collective))


def judge_own_table(predictor: Predictor, rows: OwnTable) -> dict[str, Any]:
    """Errors of a predictor on rows of its device, by family."""
    software = [rows.software[name][variant] for name, variant in zip(rows.labels(), rows.ops.variants, strict=True)]
    predicted = predictor.kernel.seconds(rows.ops.ops, 1, software)
    links = rows.collectives
    pairs = zip(links.collectives, links.fabrics, strict=True)
    timed = [float(predictor.collective.seconds([work], fabric)[0]) for work, fabric in pairs]
    names = [*rows.labels(), *map(label_of, links.collectives)]
    return family_figures(names, np.append(predicted, timed), np.append(rows.ops.seconds, links.seconds))


def few_rows(used: OwnTable) -> list[str]:
    """Warnings about families of which there are few rows."""
    counts = Counter([*used.labels(), *map(label_of, used.collectives.collectives)])
    few = [f"{name} ({count})" for name, count in sorted(counts.items()) if count < FEWEST_OF_FAMILY]
    told = "other sizes follow hardware facts and other devices, and no error is known"
    told += f"; measure at least {FEWEST_OF_FAMILY} sizes of each"
    return [f"few rows teach {', '.join(few)}: {told}"] if few else []


def _usual(*hardware: str) -> str:
    """The usual fabric of the first of some presets or files that has one; empty if none has."""
    for name in filter(None, hardware):
        with suppress(JobError):
            return usual_fabric(name)
    return ""


def _manifest(table: Measurements, whole: OwnTable, used: OwnTable, software: str) -> dict[str, Any]:
    """Description of the training data; ``train_tables`` adds its settings."""
    digests = [file.digest for file in table.files.values()]
    shapes = own_table.pack_shapes(used.shapes())
    return {
        "digest": digest(*digests, shapes, software, version("stepsight")),
        "sources": {name: {"digest": f.digest, "licence": f.licence} for name, f in table.files.items()},
        "skipped": dict(whole.skipped),
        "num_ops": len(used.ops),
        "num_collectives": len(used.collectives),
        "software": {name: list(names) for name, names in used.software.items()},
        "collective_library": used.library,
        "kinds_measured": sorted({op.kind for op in used.ops.ops}),
        "collectives_measured": sorted({label_of(work) for work in used.collectives.collectives}),
        "trained_shapes": shapes,
        "fitted_rows": [],
        "versions": {name: version(name) for name in ("stepsight", "lightgbm", "numpy")},
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "metrics": {},
    }


def _compared(predictor: Predictor, whole: OwnTable, champion: Predictor) -> tuple[float, float] | None:
    """Errors of a predictor and of the champion on rows that taught neither, else on the same held-out shapes."""
    unseen = []
    for works in (whole.ops.ops, whole.collectives.collectives):
        shapes = [shape_of(work) for work in works]
        ours, theirs = (own_table.trained_on(each.manifest, shapes) for each in (predictor, champion))
        unseen.append(~(ours | theirs))
    rows = whole.take(*map(np.flatnonzero, unseen))
    own, its = predictor.manifest, champion.manifest
    if len(rows.ops) + len(rows.collectives) >= FEWEST_TO_SPLIT and "trained_shapes" in its:
        return _mean(judge_own_table(predictor, rows)), _mean(judge_own_table(champion, rows))
    same = all(own[key] == its.get(key) for key in ("sources", "seed")) and own["held_out"] and its.get("held_out")
    return (_mean(own["held_out"]), _mean(its["held_out"])) if same else None


def _mean(figures: Mapping[str, Any]) -> float:
    """Mean error in percent over the rows of all families."""
    return float(np.average([f["mape"] for f in figures.values()], weights=[f["rows"] for f in figures.values()]))


STEPS = 3  # steps of Gauss-Newton; times are nearly linear in factors
FEWEST_GROUPS = 4  # groups of runs, each of one kind of job: fewer do not tell resources apart
MIN_ROWS = 10  # fewest runs for an estimate of their errors


@dataclass(frozen=True, slots=True)
class TimedJob:
    """A job and its measured iteration time."""

    job: Job
    seconds: float  # measured
    software: str = ""  # what ran it, in the words of who measured

    @property
    def like(self) -> JobFeatures:
        return JobFeatures.of(self.job, self.software)


@dataclass(frozen=True)
class CalibrationFit:
    """A calibrated predictor with what the calibration was fitted on."""

    predictor: Predictor  # the predictor with its calibration
    # log(measured / predicted) of every row before calibration, with the covariance that the fit assumed.  Rows left
    # out of it are predicted to first order in the factors, and without their bounds.
    process: GaussianProcess


def fit_calibration(predictor: Predictor, rows: Sequence[TimedJob]) -> CalibrationFit:
    """Fit factors of resources and a residual, which replace the predictor's; its scale and its published runs stay.

    Fewer than ``FEWEST_GROUPS`` groups of runs give one factor for each iteration alone, that of the residual.
    """
    assert rows
    own = predictor.calibration
    start = Calibration(own.scale, published=own.published, dated=own.dated)
    likes = [row.like for row in rows]
    shared = covariance(Columns.of(likes), Columns.of(likes))
    measured = np.log([row.seconds / start.factor(row.job) for row in rows])
    several = len({(like.place, like.labels) for like in likes}) >= FEWEST_GROUPS
    prior = np.diag([each.prior_std_log**2 for each in RESOURCES.values()]) * several
    constants, first = Constants(), np.zeros(0)
    for step in range(STEPS if several else 1):
        logs, parts = _simulate(predictor, constants, rows)
        by_constants = parts @ prior @ parts.T
        left = measured - logs + parts @ np.array(constants.logs)  # without any correction
        if step == 0:
            first = left
            spread, noise = most_likely(left, shared, by_constants)
        believed = spread**2 * shared + noise**2 * np.eye(len(rows))
        total = believed + by_constants
        constants = Constants.within(prior @ parts.T @ GaussianProcess(total, left).weights)
    logs, _ = _simulate(predictor, constants, rows)
    residual = Residual(tuple(likes), tuple((measured - logs).tolist()), spread, noise)
    process = GaussianProcess(total, first)
    off, stds = process.left_out([row.job for row in rows])
    width = conformal_quantile(np.abs(off / stds).tolist(), too_few=2 * NORMAL_WIDTH)
    width = min(max(NORMAL_WIDTH, width), MOST_WIDTH)  # of COVERAGE of jobs left out in turn, in deviations
    left_log = off_by(measured - logs - residual.log_factor(likes))
    calibration = replace(start, constants=constants, residual=residual, width=width, left_log=left_log)
    return CalibrationFit(replace(predictor, calibration=calibration), process)


def off_by(logs: Array) -> float:
    """The ``COVERAGE`` quantile of errors, from ``log(measured / predicted)`` of some runs; 0 if there are too few."""
    return conformal_quantile(np.abs(logs).tolist()) if len(logs) >= MIN_ROWS else 0.0


def _simulate(predictor: Predictor, constants: Constants, rows: Sequence[TimedJob]) -> tuple[Array, Array]:
    """Log-seconds of every row, and the parts of its critical path by resource, ``(rows, len(NAMES))``."""
    with_them = replace(predictor, calibration=Calibration(constants=constants))
    logs, parts = np.zeros(len(rows)), np.zeros((len(rows), len(NAMES)))
    known: dict[Job, tuple[float, Array]] = {}
    for index, row in enumerate(rows):
        if row.job not in known:
            simulation = simulate(row.job, with_them.latency(row.job))
            seconds = simulation.work_counts * simulation.work_seconds / simulation.iteration_time_s
            own = np.zeros(len(NAMES))
            np.add.at(own, [resource_of(work) for work in simulation.lowered.all_works], seconds)
            known[row.job] = math.log(simulation.iteration_time_s), own
        logs[index], parts[index] = known[row.job]
    return logs, parts
