"""``train``: from collections to a saved, tracked predictor."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from stepsight.dataset.base.errors import JobError, TraceError
from stepsight.dataset.base.files import digest, read_json
from stepsight.dataset.hardware.hardware import Fabric, Hardware, find_fabric, usual_fabric
from stepsight.training.collectives.collective_models import fit_collectives
from stepsight.training.intervals.published_errors import Intervals
from stepsight.training.kernels.kernel_models import fit_kernels
from stepsight.training.measured.host_steps import learn_host_calls
from stepsight.training.measured.imported_facts import (
    fit_host,
    fit_launches,
    launch_seconds,
    launches_alone,
    overlap_of,
    with_facts,
)
from stepsight.training.measured.imported_ops import ImportedSegments
from stepsight.training.measured.measured import (
    MeasuredRun,
    Profile,
    check_hardware,
    fill_from_traces,
    read_imported_runs,
    read_profiles,
    read_runs,
    runs_digest,
)
from stepsight.training.measured.stand_in_runs import predict_run
from stepsight.training.predictor.predictor import Predictor
from stepsight.training.regression.regressor import UNKNOWN
from stepsight.training.tracking.tracking import TrackedRun, begin_training, tracked

MIN_RUNS = 4  # fewer cannot be held back in turn


def train(
    collections: Sequence[str | Path],
    out: str | Path,
    *,
    hardware_name: str = "local-cpu",
    seed: int = 0,
    tracking_uri: str | None = None,
    progress: bool = True,
    roles: Sequence[str] = ("train",),
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

    Returns:
        The predictor, as ``Predictor.load(out)`` reads it.

    Raises:
        TraceError: If a folder is not a collection, or no collection holds measurements.
        PredictorError: If ``out`` exists and is no predictor.

    Example:
        >>> predictor = train(["runs/mine"], "runs/predictor", hardware_name="my-gpu")  # doctest: +SKIP
        >>> stepsight.predict("job.toml", predictor)  # doctest: +SKIP
    """
    folders, out = [Path(folder) for folder in collections], Path(out)
    uri, say = begin_training(out, tracking_uri, progress)
    say("reading event profiles and traces")
    runs = read_runs(folders, roles)
    imported = read_imported_runs(folders, hardware_name)
    profile = read_profiles(folders, _fabric(hardware_name, runs), imported)
    _check_measured(profile, runs, roles, folders)
    check_hardware(runs, hardware_name)
    device = next((str(run.manifest.fingerprint.get("device", "cpu")) for run in runs), profile.device or "cpu")
    hardware = with_imported(with_host(profile.hardware(hardware_name, device), runs), imported)
    with tracked(uri, f"train {hardware_name}") as run:
        predictor = _learn(profile, runs, imported, hardware, seed, say)
        tracking = {"mlflow_run_id": run.run_id, "mlflow_uri": uri}
        manifest = _manifest(predictor, profile, runs, folders, seed=seed, tracking=tracking)
        predictor = replace(predictor, manifest=manifest)
        predictor.save(out)
        say("tracking in MLflow")
        _track(run, predictor, out, folders)
    say(f"done: {out}")
    return Predictor.load(out)


def _check_measured(
    profile: Profile, runs: Sequence[MeasuredRun], roles: Sequence[str], folders: Sequence[Path]
) -> None:
    if not profile.ops and not any(run.segments for run in runs):
        raise TraceError(
            f"training needs event profiles or traces of runs with role {' or '.join(roles)}, "
            f"got none in {', '.join(map(str, folders))}"
        )


def _fabric(hardware_name: str, runs: Sequence[MeasuredRun]) -> Fabric | None:
    """The fabric of the measured collectives: the hardware's usual one, or that of the runs' jobs."""
    try:
        return find_fabric(usual_fabric(hardware_name))
    except JobError:  # the hardware has no known usual fabric
        stated = {run.manifest.job.fabric for run in runs}
        return stated.pop() if len(stated) == 1 else None


def with_host(hardware: Hardware, runs: Sequence[MeasuredRun]) -> Hardware:
    """Add the host time of the pipeline runtime to the hardware, if runs in boxes show it."""
    records = [
        (run.manifest.job, step)
        for run in runs
        if run.manifest.job.parallel.pp > 1 and (path := run.manifest.folder / "records.json").exists()
        for step in read_json(path)["steps"]
    ]
    host_action_s, host_message_s = fit_host(records)
    if not host_action_s and not host_message_s:
        return hardware
    return replace(hardware, host_action_s=host_action_s, host_message_s=host_message_s)


def with_imported(hardware: Hardware, imported: Sequence[ImportedSegments]) -> Hardware:
    """Add launches and overlap from imported traces of a GPU to the hardware, if they show them."""
    steps = [run.steps for run in imported if run.device != "cpu"]
    return with_facts(hardware, launch_seconds(steps), overlap_of(steps))


def _learn(
    profile: Profile,
    runs: list[MeasuredRun],
    imported: list[ImportedSegments],
    hardware: Hardware,
    seed: int,
    say: Callable[[str], None],
) -> Predictor:
    from_traces = fill_from_traces(profile, runs)
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
    predictor = _with_launches(Predictor(hardware, kernel, collective, manifest={"metrics": metrics}), profile, runs)
    predictor = _with_host_calls(predictor, imported, profile, seed, say)
    if not runs and len(imported) < MIN_RUNS:
        return predictor
    from stepsight.training.context.learn_context import learn_context

    return learn_context(predictor, runs, imported, seed, say)


def _with_host_calls(
    predictor: Predictor, imported: Sequence[ImportedSegments], profile: Profile, seed: int, say: Callable[[str], None]
) -> Predictor:
    """Add the durations of framework calls on a host to the predictor, if scripts that ran on it were collected."""
    steps = [run.host for run in imported if run.host is not None]
    single = sum(step.ranks == 1 for step in steps)
    if not single:
        return predictor
    say(f"calls that the host runs: scripts {single}, calls measured on their own {len(profile.calls)}")
    host = learn_host_calls(steps, profile.calls, seed)
    if host.contention.factors:
        told = ", ".join(f"{name or 'all'} {factor:.2f}" for name, factor in sorted(host.contention.factors.items()))
        say(f"calls beside other ranks of the host take times as long: {told} ({len(steps) - single} scripts)")
    return replace(predictor, host=host)


def _with_launches(predictor: Predictor, profile: Profile, runs: Sequence[MeasuredRun]) -> Predictor:
    """Add the host's launch times to the predictor, if its device has launches."""
    from stepsight.training.context.examples import iteration_times

    timed = [run for run in runs if run.manifest.job.parallel.pp == 1]

    def having(kinds: dict[str, float]) -> Predictor:
        usual = float(np.median(list(kinds.values()))) if kinds else predictor.hardware.host_op_s
        return replace(predictor, hardware=replace(predictor.hardware, host_op_s=usual, host_kinds_s=kinds))

    alone = launches_alone(profile.ops, profile.op_host_seconds)
    kinds = fit_launches(timed, alone, lambda kinds: iteration_times(timed, having(kinds)))
    return having(kinds) if kinds else predictor


def _mape(predicted: Any, measured: Any) -> float:
    return 100 * float(np.mean(np.abs(predicted / measured - 1)))


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
    data = {"events": profile.digest, "runs": runs_digest(runs) if runs else ""}
    return {
        "digest": digest(*data.values(), str(seed), version("stepsight")),
        "data_digests": data,
        "collections": [str(path.resolve()) for path in collections],
        "runs": [run.manifest.name for run in runs],
        "num_ops": len(profile.ops),
        "num_collectives": len(profile.collectives),
        "fingerprint": dict(runs[0].manifest.fingerprint) if runs else {},
        "versions": {name: version(name) for name in ("stepsight", "lightgbm", "torch", "torch-geometric", "numpy")},
        "seed": seed,
        "metrics": predictor.manifest["metrics"],
        "context_model": predictor.manifest.get("context_model", {}),
        **tracking,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _compared(predictor: Predictor, folders: Sequence[Path]) -> Callable[[Predictor], tuple[float, float] | None]:
    """Compare a predictor with the champion: on held-out runs, else on the same runs held out in turn."""

    def compare(champion: Predictor) -> tuple[float, float] | None:
        whole = [run for run in read_runs(folders, ("heldout",)) if run.manifest.whole]
        trained = {*predictor.manifest["runs"], *champion.manifest.get("runs", ())}
        if whole and not trained & {run.manifest.name for run in whole}:
            measured = np.array([run.manifest.iteration_time_s for run in whole])
            own, its = (
                _mape(np.array([predict_run(run.manifest, p).iteration_time_s for run in whole]), measured)
                for p in (predictor, champion)
            )
            return own, its
        same = champion.manifest.get("data_digests", {}).get("runs") == predictor.manifest["data_digests"]["runs"] != ""
        errors = [p.manifest.get("metrics", {}).get("mape_percent") for p in (predictor, champion)]
        return (errors[0], errors[1]) if same and None not in errors else None

    return compare


def _track(run: TrackedRun, predictor: Predictor, out: Path, folders: Sequence[Path]) -> None:
    manifest = predictor.manifest
    params = {
        "num_ops": manifest["num_ops"],
        "num_collectives": manifest["num_collectives"],
        "num_runs": len(manifest["runs"]),
        "context_model": manifest["context_model"].get("ships", "none"),
        "families_with_trees": " ".join(sorted(predictor.kernel.regressor.trees)) or "none",
        "interval_coverage": predictor.intervals.coverage if predictor.intervals != Intervals() else 0.0,
    }
    metrics = {key.replace("@", "_"): value for key, value in manifest["metrics"].items()}
    data = {name: value for name, value in manifest["data_digests"].items() if value}
    run.finish(predictor, out, params, metrics, data, _compared(predictor, folders))
