"""``train``: from collections to a saved, tracked predictor; predicted against measured times of held-out runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.errors import JobError, StepsightError, TraceError
from stepsight.dataset.base.files import digest, digest_files, read_json
from stepsight.dataset.hardware.hardware import Fabric, Hardware, find_fabric, usual_fabric
from stepsight.gnn.contexts import FORMS
from stepsight.training.collectives.collective_models import fit_collectives
from stepsight.training.kernels.kernel_models import fit_kernels
from stepsight.training.measured import imported_facts
from stepsight.training.measured import measured as training_data
from stepsight.training.measured.imported_ops import ImportedSegments, learn_host_calls
from stepsight.training.measured.measured import MeasuredRun, Profile
from stepsight.training.measured.planning import job_digest, predict_run, trained_names
from stepsight.training.predictor.predictor import Predictor
from stepsight.training.regression.regressor import UNKNOWN
from stepsight.training.tracking.tracking import begin_training, tracked

if TYPE_CHECKING:
    from stepsight.training.context.fit_context import Example


Array = NDArray[np.float64]
MIN_RUNS = 4  # fewer cannot be held back in turn
CONTEXT_FORMS = ("auto", *FORMS)


def train(
    collections: Sequence[str | Path],
    out: str | Path,
    *,
    hardware_name: str = "local-cpu",
    seed: int = 0,
    tracking_uri: str | None = None,
    progress: bool = True,
    roles: Sequence[str] = ("train",),
    context: str = "auto",
) -> Predictor:
    """Train a predictor on measured runs, save it, and record the training in MLflow.

    Args:
        collections: Folders that ``stepsight collect`` wrote.
        out: Folder of the predictor to write.
        hardware_name: Name that jobs give this hardware in ``[cluster] hardware``.
        seed: Random seed.
        tracking_uri: MLflow tracking URI; None: a SQLite database beside ``out``.
        progress: Whether to report progress on stderr.
        roles: Use only runs with these roles.
        context: What corrects ops in context: ``none``, ``table`` (by kind and phase), ``features`` (own
            ones as well), ``graph`` (messages as well), or ``auto``: as much of each as runs held back say.

    Returns:
        The predictor, as ``Predictor.load(out)`` reads it.

    Raises:
        TraceError: If a folder is not a collection, no collection holds measurements, or some are of another device.
        PredictorError: If ``out`` exists and is no predictor.
        StepsightError: If ``context`` is unknown, or ``seed`` negative.

    Example:
        >>> predictor = train(["runs/mine"], "runs/predictor", hardware_name="my-gpu")  # doctest: +SKIP
        >>> stepsight.predict("job.toml", predictor)  # doctest: +SKIP
    """
    if context not in CONTEXT_FORMS:
        raise StepsightError(f"context must be one of {', '.join(CONTEXT_FORMS)}, got {context!r:.80}")
    if seed < 0:
        raise StepsightError(f"seed must be a number >= 0, got {seed}")
    folders, out = [Path(folder) for folder in collections], Path(out)
    uri, say = begin_training(out, tracking_uri, progress)
    runs = training_data.read_runs(folders, roles)
    imported = training_data.read_imported_runs(folders, hardware_name)
    profile = training_data.read_profiles(folders, _fabric(hardware_name, runs), imported)
    if not profile.ops and not any(run.segments for run in runs):
        rule = f"training needs event profiles or traces of runs with role {' or '.join(roles)}"
        raise TraceError(f"{rule}, got none in {', '.join(map(str, folders))}")
    say("event profiles and traces are read")
    hardware = measured_hardware(hardware_name, profile, runs, imported)
    with tracked(uri, f"train {hardware_name}") as run:
        predictor = _learn(profile, runs, imported, hardware, (seed, context), say)
        tracking = {"mlflow_run_id": run.run_id, "mlflow_uri": uri}
        manifest = _manifest(predictor, profile, runs, folders, seed=seed, tracking=tracking)
        predictor = replace(predictor, manifest=manifest)
        predictor.save(out)
        say("tracking in MLflow")
        run.finish(predictor, out, partial(_compared, predictor, folders))
    say(f"done: {out}")
    return Predictor.load(out)


def _fabric(hardware_name: str, runs: Sequence[MeasuredRun]) -> Fabric | None:
    """The fabric of the measured collectives: the hardware's usual one, or that of the runs' jobs."""
    try:
        return find_fabric(usual_fabric(hardware_name))
    except JobError:  # the hardware has no known usual fabric
        stated = {run.manifest.job.fabric for run in runs}
        return stated.pop() if len(stated) == 1 else None


def measured_hardware(
    name: str, profile: Profile, runs: Sequence[MeasuredRun], imported: Sequence[ImportedSegments]
) -> Hardware:
    """Facts by event files, all of the hardware; costs of the pipeline by boxes; launches and overlap by GPU traces."""
    training_data.check_hardware(runs, name)
    device = next((str(run.manifest.fingerprint.get("device", "cpu")) for run in runs), profile.device or "cpu")
    hardware = profile.hardware(name, device)
    records = [
        (run.manifest.job, step)
        for run in runs
        if run.manifest.job.parallel.pp > 1 and (path := run.manifest.folder / "records.json").exists()
        for step in read_json(path)["steps"]
    ]
    host_action_s, host_message_s = imported_facts.fit_host(records)
    if host_action_s or host_message_s:
        hardware = replace(hardware, host_action_s=host_action_s, host_message_s=host_message_s)
    steps = [run.steps for run in imported if run.device != "cpu"]
    return imported_facts.with_facts(hardware, imported_facts.launch_seconds(steps), imported_facts.overlap_of(steps))


def _learn(
    profile: Profile,
    runs: list[MeasuredRun],
    imported: list[ImportedSegments],
    hardware: Hardware,
    settings: tuple[int, str],
    say: Callable[[str], None],
) -> Predictor:
    """Learn from measurements; ``settings``: the seed, and the form of the context network."""
    seed, form = settings
    from_traces = training_data.fill_from_traces(profile, runs)
    if from_traces:
        say(f"kinds known from traces alone: {', '.join(from_traces)}")
    say(f"regressors: {len(profile.ops)} ops, {len(profile.collectives)} collectives")
    kernel = fit_kernels(profile.ops, profile.op_busy, np.array(profile.op_seconds), hardware, seed=seed)
    collective = fit_collectives(profile.collectives, profile.fabrics, np.array(profile.collective_seconds), seed=seed)
    metrics: dict[str, float] = {
        f"alone_error_{family.replace('/', '_')}_percent": 100 * float(np.expm1(error))
        for model in (kernel.regressor, collective.regressor)
        for family, error in model.errors.items()
        if error < UNKNOWN  # too few rows of a family to leave any out
    }
    predictor = Predictor(hardware, kernel, collective, manifest={"metrics": metrics})
    predictor = _with_launches(predictor, profile, runs)
    steps = [run.host for run in imported if run.host is not None]
    if single := sum(step.ranks == 1 for step in steps):  # scripts whose calls the host runs
        say(f"calls that the host runs: scripts {single}, calls measured on their own {len(profile.calls)}")
        host = learn_host_calls(steps, profile.calls, seed)
        if factors := host.contention.factors:
            told = ", ".join(f"{name or 'all'} {factor:.2f}" for name, factor in sorted(factors.items()))
            say(f"calls beside other ranks of the host take times as long: {told} ({len(steps) - single} scripts)")
        predictor = replace(predictor, host=host)
    if not runs and len(imported) < MIN_RUNS:
        return predictor
    from stepsight.training.context.learn_context import learn_context

    return learn_context(predictor, runs, imported, seed, say, form)


def _with_launches(predictor: Predictor, profile: Profile, runs: Sequence[MeasuredRun]) -> Predictor:
    """Add the host's launch times to the predictor, if its device has launches."""
    from stepsight.training.context.fit_context import iteration_times

    timed = [run for run in runs if run.manifest.job.parallel.pp == 1]

    def having(kinds: dict[str, float]) -> Predictor:
        usual = float(np.median(list(kinds.values()))) if kinds else predictor.hardware.host_op_s
        return replace(predictor, hardware=replace(predictor.hardware, host_op_s=usual, host_kinds_s=kinds))

    launched = zip(profile.ops, profile.op_host_seconds, strict=True)
    kinds = imported_facts.fit_launches(timed, launched, lambda kinds: iteration_times(timed, having(kinds)))
    return having(kinds) if kinds else predictor


def _manifest(
    predictor: Predictor,
    profile: Profile,
    runs: list[MeasuredRun],
    collections: Sequence[Path],
    *,
    seed: int,
    tracking: Mapping[str, str],
) -> dict[str, Any]:
    """What the predictor was trained on; ``tracking`` names the MLflow run."""
    digests = [digest_files([p for p in run.manifest.folder.iterdir() if p.is_file()]) for run in runs]
    data = {"events": profile.digest, "runs": digest(*digests) if runs else ""}
    context = predictor.manifest.get("context", {})  # empty where no run teaches it
    return {
        "digest": digest(*data.values(), str(seed), str(context.get("asked")), version("stepsight")),
        "data_digests": data,
        "collections": [str(path.resolve()) for path in collections],
        "runs": [run.manifest.name for run in runs],
        "jobs": sorted({job_digest(run.job, run.compiled) for run in (run.manifest for run in runs) if run.whole}),
        "compiled": any(run.manifest.compiled for run in runs),
        "num_ops": len(profile.ops),
        "num_collectives": len(profile.collectives),
        "fingerprint": dict(runs[0].manifest.fingerprint) if runs else {},
        "versions": {name: version(name) for name in ("stepsight", "lightgbm", "torch", "torch-geometric", "numpy")},
        "seed": seed,
        "metrics": predictor.manifest["metrics"],
        "context": context,
        **tracking,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _compared(predictor: Predictor, folders: Sequence[Path], champion: Predictor) -> tuple[float, float] | None:
    """Errors of a predictor and of the champion on held-out runs, else on the same runs held out in turn."""
    whole = [run for run in training_data.read_runs(folders, ("heldout",)) if run.whole]
    manifests = [run.manifest for run in whole]
    if whole and not any(trained_names(each.manifest, manifests) for each in (predictor, champion)):
        measured = np.array([run.manifest.iteration_time_s for run in whole])
        own, its = (
            mape(np.array([predict_run(run.manifest, p).iteration_time_s for run in whole]), measured)
            for p in (predictor, champion)
        )
        return own, its
    same = champion.manifest.get("data_digests", {}).get("runs") == predictor.manifest["data_digests"]["runs"] != ""
    errors = [p.manifest.get("metrics", {}).get("mape_percent") for p in (predictor, champion)]
    return (errors[0], errors[1]) if same and None not in errors else None


@dataclass(frozen=True)
class HeldoutEvaluation:
    """Errors and coverage of a predictor on held-out runs."""

    # one per run: run, job, measured_s, spread_percent, repeat_percent, num_steps, predicted_s, low_s, high_s,
    # error_percent, predicted_without_gnn_s, unsupported, and the run's own op_error_regressor and op_error_with_gnn
    rows: list[dict[str, Any]]
    mape: float  # mean absolute error of the iteration time, percent
    floor: float  # mean of repeat_percent: the error that measuring the runs again would have, percent
    mape_without_gnn: float  # the same by regressors alone, percent
    spearman: float  # rank correlation of predicted and measured iteration times
    coverage: float  # percent of the runs that their interval holds
    op_error_regressor: float  # time-weighted error of ops in context by regressors alone, percent; 0 without traces
    op_error_with_gnn: float  # the same with the context model that ships, whichever it is


def evaluate_heldout(predictor: Predictor, collection: Path, *, role: str = "heldout") -> HeldoutEvaluation:
    """Predict every run of a role and compare the prediction with the measured time.

    Emulated pipeline stages judge only ops, because their iterations are not iterations of a job.  Raises
    ``TraceError`` if the collection has no such run to judge iterations by, or one of them trained the predictor, and
    ``PredictorError`` if a run was on other hardware.
    """
    runs = training_data.read_runs([collection], (role,))
    if not any(run.manifest.whole for run in runs):
        got = f"{len(runs)} that stand in for stages" if runs else "none"
        raise TraceError(f"evaluation needs runs with role {role!r:.80}, got {got} in {collection}")
    trained = trained_names(predictor.manifest, [run.manifest for run in runs])
    known = {Path(str(path)).resolve() for path in predictor.manifest.get("collections", ())}
    if trained and role != "train" and collection.resolve() in known:
        raise TraceError(f"runs that trained a predictor cannot judge it, got {', '.join(sorted(trained))}")
    examples: list[Example] = []
    if any(run.segments for run in runs):
        from stepsight.training.context.fit_context import make_examples

        examples = make_examples(runs, predictor)
    rows = []
    for run in (run.manifest for run in runs if run.whole):
        prediction = predict_run(run, predictor)
        measured_s, steps = run.iteration_time_s, np.array(run.step_seconds)
        by_regressor, with_gnn = _op_errors([each for each in examples if each.run == run.name], predictor)
        rows.append(
            {
                "run": run.name,
                "job": run.job.name,
                "measured_s": measured_s,
                "spread_percent": 100 * float(np.std(steps) / measured_s),
                "repeat_percent": 100 * repeat_error(run.rounds),
                "num_steps": len(steps),
                "predicted_s": prediction.iteration_time_s,
                "low_s": prediction.low_s,
                "high_s": prediction.high_s,
                "error_percent": 100 * (prediction.iteration_time_s / measured_s - 1),
                "predicted_without_gnn_s": predict_run(run, predictor.without_context).iteration_time_s,
                "unsupported": len(prediction.unsupported),
                "op_error_regressor": by_regressor,
                "op_error_with_gnn": with_gnn,
            }
        )
    names = ("measured_s", "predicted_s", "predicted_without_gnn_s", "low_s", "high_s")
    measured, predicted, alone, low, high = np.array([[row[name] for name in names] for row in rows]).T
    return HeldoutEvaluation(
        rows,
        mape(predicted, measured),
        float(np.mean([row["repeat_percent"] for row in rows])),
        mape(alone, measured),
        spearman(predicted, measured),
        100.0 * float(np.mean((low <= measured) & (measured <= high))),
        *_op_errors(examples, predictor),
    )


def repeat_error(rounds: Sequence[Sequence[float]]) -> float:
    """Mean distance of a round's median from that of all other rounds; of one round, steps count as rounds."""
    parts = [np.array(steps) for steps in (rounds if len(rounds) > 1 else [[step] for step in rounds[0]])]
    if len(parts) < 2:
        return 0.0
    others = [np.median(np.concatenate(parts[:at] + parts[at + 1 :])) for at in range(len(parts))]
    return float(np.mean([abs(np.median(part) / other - 1) for part, other in zip(parts, others, strict=True)]))


def _op_errors(examples: list[Example], predictor: Predictor) -> tuple[float, float]:
    """Errors of ops in context by regressors alone, and with the context model; 0 without examples."""
    if not examples:
        return 0.0, 0.0
    from stepsight.training.context.fit_context import op_error

    alone = op_error(examples, None)
    return alone, op_error(examples, predictor.context)


def mape(predicted: Array, measured: Array) -> float:
    return 100.0 * float(np.mean(np.abs(predicted / measured - 1)))


def spearman(one: Array, two: Array) -> float:
    """Rank correlation, ties ranked by their mean; 1 for fewer than two values."""
    if len(one) < 2:
        return 1.0
    ranks: list[Array] = []
    for values in (one, two):
        _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
        ranks.append(np.asarray(np.cumsum(counts) - (counts - 1) / 2)[inverse])
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1]) if min(each.std() for each in ranks) > 0 else 0.0
