"""Errors of a predictor on measured ops and collectives, by kind, software, size and ranks; and on a collection."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.errors import JobError, PredictorError, TableError, shorten
from stepsight.dataset.hardware.hardware import FABRICS, Fabric, find_fabric, find_hardware, usual_fabric
from stepsight.dataset.kinds.op import DTYPE_BYTES, Collective, Op
from stepsight.dataset.runs.run_folder import read_collection
from stepsight.dataset.tables import Measurements
from stepsight.experiments.evaluation.error_metrics import Errors, PredictorOf, errors, interval_score, share
from stepsight.experiments.reports.text_table import Number, table, table_of
from stepsight.simulator.durations.latency_model import RooflineLatency
from stepsight.training.collectives.between_nodes import link_doubts
from stepsight.training.collectives.collective_models import label_of
from stepsight.training.corrections.corrector import rows_by
from stepsight.training.fitting.own_table import family_figures, shape_of, trained_on
from stepsight.training.measured.planning import trained_names
from stepsight.training.prediction.prediction import predict
from stepsight.training.predictor.predictor import Predictor
from stepsight.training.shipped.catalogue import RECIPES
from stepsight.training.shipped.from_tables import products_alone

Array = NDArray[np.float64]
OnRows = Callable[[int, int], None]

AT_ONCE = 5000  # rows between two reports of progress

# Upper ends of classes, and their names.
SIZES = (
    (2**15, "< 32 KiB"),
    (2**20, "32 KiB to 1 MiB"),
    (2**25, "1 to 32 MiB"),
    (2**30, "32 MiB to 1 GiB"),
    (np.inf, ">= 1 GiB"),
)
RANKS = ((64, "<= 64 ranks"), (256, "65 to 256 ranks"), (np.inf, "> 256 ranks"))
TIMES = ((50e-6, "< 50 us"), (1e-3, "50 us to 1 ms"), (np.inf, ">= 1 ms"))


@dataclass(frozen=True, slots=True)
class TableErrors:
    """Errors of a predictor on a table."""

    # kind, class of sizes (of times, for ops), class of ranks (nothing for ops), and the errors of its rows
    groups: tuple[tuple[str, str, str, Errors], ...]
    overall: Errors  # errors of all rows that were judged
    skipped: dict[str, int]  # number of rows that were not judged, by reason
    # by family of ops with its precision, and by kind of collective: rows, mape, median, p90
    families: dict[str, dict[str, float | int | None]] = field(default_factory=dict)
    software: dict[str, dict[str, float | int | None]] = field(default_factory=dict)  # the same by what ran the rows
    doubts: tuple[str, ...] = ()  # what contradicts the links that were stated for all rows
    note: str = ""  # how else than by these rows it was judged; empty: it was not

    def to_dict(self) -> dict[str, Any]:
        return {
            "groups": [{"kind": k, "size": s, "ranks": r, **e.to_dict()} for k, s, r, e in self.groups],
            "families": self.families,
            "software": self.software,
            "overall": self.overall.to_dict(),
            "skipped": self.skipped,
            "doubts": list(self.doubts),
            "warnings": list(self.doubts),
            **({"note": self.note} if self.note else {}),
        }


def judge_table(
    measured: Measurements,
    predictor_of: PredictorOf,
    fabric: Fabric | None = None,
    on_rows: OnRows | None = None,
    *,
    software: str = "",
) -> TableErrors:
    """Compare a table of measurements with the predictions of its rows.

    Each row is asked of its predictor with the software that ran it.  Rows of other software are left out, unless the
    predictor knows none of a device's rows, or they are asked for: then they are predicted as what it predicts for.
    ``predictor_of`` has the predictor of a device (None: its facts answer), ``fabric`` the links of all collectives
    (None: the known fabric that a row names); ``software`` takes only rows whose software contains it, without case.
    """
    if software:
        kept = [index for index, name in enumerate(measured.software) if software.lower() in name.lower()]
        if not kept:
            names = "; ".join(sorted(set(measured.software)))
            rule = f"--software must be a part of the software of some rows ({names:.400})"
            raise TableError(f"{rule}, got {software!r:.80}")
        measured = measured.take(kept)
    measured, others, doubts = _of_its_devices(measured, predictor_of)
    measured, groups_of, found = _by_recipes(measured, predictor_of)
    doubts += found
    predicted, skipped = predict_table(measured, predictor_of, fabric, on_rows, groups_of)
    skipped = {**others, **skipped}
    known = np.flatnonzero(np.isfinite(predicted))
    if not len(known):
        if (held_out := _held_out(measured, predictor_of, skipped)) is not None:
            return held_out
        reasons = "; ".join(f"{count}: {why}" for why, count in skipped.items()) or "the table is empty"
        raise TableError(f"a table must have rows that can be predicted, got none ({reasons})")
    told, truth, works = predicted[known], measured.seconds[known], [measured.works[index] for index in known.tolist()]
    groups = rows_by(map(group_of, works, truth.tolist()))
    place = {name: place for classes in (SIZES, RANKS, TIMES) for place, (_, name) in enumerate(classes)}
    order = sorted(groups, key=lambda group: (group[0], place.get(group[2], -1), place[group[1]]))
    ran = [measured.software[index] or "not stated" for index in known.tolist()]
    sent = {index: work for index, work in enumerate(measured.works) if isinstance(work, Collective)}
    families = [  # of an op, with its precision where that has kernels of its own
        label_of(work)
        if isinstance(work, Collective)
        else work.family + f"/{work.dtype}" * (work.record.bound == "compute" and DTYPE_BYTES[work.dtype] != 2)
        for work in works
    ]
    return TableErrors(
        tuple([(*group, errors(told[groups[group]], truth[groups[group]])) for group in order]),
        errors(told, truth),
        skipped,
        family_figures(families, told, truth),
        family_figures(ran, told, truth),
        (*doubts, *(() if fabric is None else link_doubts([*sent.values()], fabric, measured.seconds[[*sent]]))),
    )


def _of_its_devices(
    measured: Measurements, predictor_of: PredictorOf
) -> tuple[Measurements, dict[str, int], list[str]]:
    """The rows of devices that their predictor serves, the number of others by reason, and a doubt of an only device:
    its rows may call it by another name than its facts.
    """
    served = {name: predictor.hardware.name for name in set(measured.device) if (predictor := predictor_of(name))}
    foreign = {name: serves for name, serves in served.items() if name not in ("", serves)}
    if not foreign or len({*measured.device} - {""}) == 1:
        return measured, {}, [f"the rows are of {name}, the predictor is for {own}" for name, own in foreign.items()]
    kept = [index for index, name in enumerate(measured.device) if name not in foreign]
    counts = Counter(f"the predictor is for {foreign[name]}: {name}" for name in measured.device if name in foreign)
    if not kept:
        raise TableError(f"a table must have rows that can be predicted, got none ({'; '.join(sorted(counts)):.400})")
    return measured.take(kept), dict(counts), []


def _by_recipes(measured: Measurements, predictor_of: PredictorOf) -> tuple[Measurements, list[str | int], list[str]]:
    """The rows as shipped predictors were trained on them, without the conversion of the input of products in 8 bits;
    and what ran each: a name, or an index among the predictor's patterns for software (-1: none of them matches).
    """
    ran: list[str | int] = list(measured.software)
    doubts, sources = [], {file.digest for file in measured.files.values()}
    for device in dict.fromkeys(measured.device):
        predictor = predictor_of(device)
        name_of = "" if predictor is None else predictor.manifest.get("name", "")
        if predictor is None or (recipe := RECIPES.get(name_of)) is None:
            continue
        if device == recipe.hardware:
            before, hardware = measured.seconds, find_hardware(device)
            assert hardware is not None
            measured = products_alone(measured, hardware)
            if changed := int((measured.seconds != before).sum()):
                doubts.append(f"{changed} products in 8 bits count without the conversion of their input")
        known = {str(file["digest"]) for file in predictor.manifest.get("sources", {}).values()}
        if sources & known:
            doubts.append(f"{name_of} was trained on {len(sources & known)} of the {len(sources)} files of these rows")
        found: dict[str, int] = {}
        for index, (work, where) in enumerate(zip(measured.works, measured.device, strict=True)):
            if isinstance(work, Op) and where == device:
                name = f"{measured.software[index]} {work.dtype}"
                if name not in found:
                    groups = enumerate(recipe.software)
                    found[name] = next((number for number, group in groups if re.search(group, name)), -1)
                ran[index] = found[name]
        if found and max(found.values()) < 0:  # none of them: all are predicted as what it predicts for
            ran = [0 if each == -1 else each for each in ran]
            doubts.append(f"{name_of} knows the software of no row on {device}: it predicts for the software it knows")
    return measured, ran, [*dict.fromkeys(doubts)]


def _held_out(measured: Measurements, predictor_of: PredictorOf, skipped: dict[str, int]) -> TableErrors | None:
    """Errors on shapes that were held out while a predictor was trained on every row; None if they are not known."""
    predictors = [predictor_of(device) for device in dict.fromkeys(measured.device)]
    manifest = predictors[0].manifest if len(predictors) == 1 and predictors[0] is not None else {}
    families = manifest.get("held_out", {})
    sources = {file["digest"] for file in manifest.get("sources", {}).values()}
    if not families or not {file.digest for file in measured.files.values()} <= sources:
        return None
    rows = [int(found["rows"]) for found in families.values()]
    mean = float(np.average([found["mape"] for found in families.values()], weights=rows))
    note = "the predictor was trained on all these shapes: errors are of a fifth of them, held out while it was trained"
    return TableErrors((), Errors(sum(rows), mape=mean), skipped, families, note=note)


def predict_table(
    measured: Measurements,
    predictor_of: PredictorOf,
    fabric: Fabric | None,
    on_rows: OnRows | None,
    ran: Sequence[str | int],
) -> tuple[Array, dict[str, int]]:
    """Predicted seconds of each row by what ran it (-1: unknown), NaN for none, and the number of those by reason."""
    predicted, reasons = np.full(len(measured), np.nan), _taught(measured, predictor_of)
    for index, own in enumerate(ran):
        if own == -1 and not reasons[index]:
            reasons[index] = f"software that the predictor does not know: {measured.software[index]}"
    skipped, kept = Counter[str](sorted(filter(None, reasons))), np.flatnonzero(reasons == "")
    are_ops = [isinstance(measured.works[index], Op) for index in kept.tolist()]
    batches = rows_by(
        (measured.device[index], "" if is_op else measured.fabric[index], is_op)
        for index, is_op in zip(kept.tolist(), are_ops, strict=True)
    )
    for (device, links, is_op), rows in batches.items():
        members = kept[rows].tolist()
        predictor, hardware = predictor_of(device), find_hardware(device) if device else None
        used = fabric if fabric is not None else _links(links, predictor)
        if predictor is None and hardware is None:
            skipped[f"no predictor and no facts of the device {device!r:.80}: name a predictor"] += len(members)
            continue
        if not is_op and used is None:
            skipped[f"no facts of the fabric {links!r:.80}: state its links with --fabric"] += len(members)
            continue
        for start in range(0, len(members), AT_ONCE):
            some = members[start : start + AT_ONCE]
            works: Any = [measured.works[index] for index in some]
            if predictor is None:
                assert hardware is not None
                facts = RooflineLatency(hardware, used or next(iter(FABRICS.values())))
                predicted[some] = facts.op_seconds(works) if is_op else facts.collective_seconds(works)
            elif is_op:
                predicted[some] = predictor.kernel.seconds(works, 1, [ran[index] for index in some])
            else:
                assert used is not None
                predicted[some] = predictor.collective.seconds(works, used)
            if on_rows is not None:
                on_rows(int(np.isfinite(predicted).sum()), len(kept))
    return predicted, dict(skipped)


def _taught(measured: Measurements, predictor_of: PredictorOf) -> NDArray[np.object_]:
    """By row, why it cannot judge: its predictor was trained on the shape, or its network fitted on it; else empty."""
    shapes, found = [shape_of(work) for work in measured.works], np.full(len(measured), "", dtype=object)
    for device, rows in rows_by(measured.device).items():
        predictor = predictor_of(device)
        manifest = {} if predictor is None else predictor.manifest
        record = manifest.get("calibrated_links", {})
        if record.get("fitted_shapes"):
            same = np.array([measured.files[name].digest in record["files"] for name in measured.source])
            same &= trained_on({"trained_shapes": record["fitted_shapes"]}, shapes) & (found == "")
            found[same] = "the predictor was calibrated on it"
        if manifest.get("trained_shapes"):
            known = trained_on(manifest, [shapes[index] for index in rows.tolist()])
            found[rows[known]] = "the predictor was trained on the shape"
    return found


def _links(named: str, predictor: Predictor | None) -> Fabric | None:
    """The known fabric of a name; for rows that name none, the usual one of the predictor's hardware."""
    found: Fabric | None = FABRICS.get(named)
    with suppress(JobError):
        return found if named or predictor is None else find_fabric(usual_fabric(predictor.hardware.name))
    return None


def group_of(work: Op | Collective, seconds: float) -> tuple[str, str, str]:
    """Kind, class of sizes (of times, for ops) and class of ranks (nothing for ops) of a row."""
    if isinstance(work, Op):
        return work.kind, _class(TIMES, seconds), ""
    ranks = "within a node" if work.num_nodes == 1 else _class(RANKS, work.group_size, closed=True)
    return work.kind, _class(SIZES, work.num_bytes), ranks


def _class(classes: Sequence[tuple[float, str]], value: float, *, closed: bool = False) -> str:
    return next(name for end, name in classes if value < end or (closed and value == end))


def table_errors_text(result: TableErrors) -> str:
    """The table as text."""
    header = ["kind", "ranks", "size", "rows", "mean error %", "median", "p90", "bias"]
    lines = [
        [kind, ranks, size, e.used, *(Number(x or 0.0) for x in (e.mape, e.median, e.p90, e.bias))]
        for kind, size, ranks, e in (*result.groups, ("all", "", "", result.overall))
    ]
    legend = "errors of |predicted / measured - 1|; ops are classed by their measured time, collectives by their bytes"
    tables = []
    for noun, rows in (("family", result.families), ("software", result.software)):
        named = [{"name": shorten(name, 80), **found} for name, found in rows.items()]
        titles = {noun: "name", "rows": "rows", "mean error %": "mape", "median": "median", "p90": "p90"}
        tables.append(table_of(named, titles))
    if result.note:
        return f"{tables[0]}\n\n{result.note}"
    notes = [f"doubt: {text}" for text in result.doubts]
    notes += [f"left out {count}: {why}" for why, count in result.skipped.items()]
    return "\n\n".join([*tables, table(header, lines), legend, *notes])


def judge_collection(path: Path, predictor: Predictor | str | None = None) -> dict[str, Any]:
    """Compare the measured runs of a collection with predictions; runs that trained the predictor are left out. Runs
    that the predictor cannot speak for are ``apart``, by reason: runs with compiled kernels where it was taught none,
    and runs that take most of their time in what was never measured.
    """
    rows, skipped = list[dict[str, Any]](), Counter[str]()
    manifest = predictor.manifest if isinstance(predictor, Predictor) else {}
    found_runs = read_collection(path)
    trained = trained_names(manifest, found_runs)
    for run in found_runs:
        if not run.whole or run.name in trained:
            skipped["the predictor was trained on it" if run.whole else "it stands for a part of a job"] += 1
            continue
        try:
            found, measured = predict(run.job, predictor), run.iteration_time_s
        except (JobError, PredictorError) as error:
            skipped[str(error)] += 1
            continue
        other = COMPILED if run.compiled and not manifest.get("compiled") else OUTSIDE if found.extrapolated else ""
        times = {"measured_s": measured, "predicted_s": found.iteration_time_s, "low_s": found.low_s}
        row = {"run": run.name, "job": run.job.name, "role": run.role, **times, "high_s": found.high_s}
        row |= {"outside_percent": 100 * found.unsupported_share, "extrapolated": found.extrapolated, "apart": other}
        rows.append({**row, "error_percent": 100 * (found.iteration_time_s / measured - 1), "fits": found.memory.fits})
    if not rows:
        reasons = "; ".join(f"{count} x {why}" for why, count in skipped.items()) or "it has no runs"
        raise TableError(f"a collection must have measured runs that can be judged, got none in {path}: {reasons}")
    groups = {name: _run_figures([row for row in rows if row["apart"] == name]) for name in ("", COMPILED, OUTSIDE)}
    overall, apart = groups.pop(""), {name: figures for name, figures in groups.items() if figures["used"]}
    large = [row["run"] for row in rows if not row["fits"]]
    far = [row["run"] for row in rows if row["extrapolated"]]
    warnings = [f"runs that ran are said not to fit in memory: {', '.join(large)}"] if large else []
    warnings += [f"extrapolated, mostly outside of what was measured: {', '.join(far)}"] if far else []
    titles = {"run": "run", "role": "role", "measured ms": "measured_s", "predicted ms": "predicted_s"}
    titles |= {"from ms": "low_s", "to ms": "high_s", "error %": "error_percent", "outside %": "outside_percent"}
    lines = [table_of(rows, titles), *([_run_words(overall)] if overall["used"] else [])]
    lines += [f"apart, {name} ({of['used']} runs): {_run_words(of)}" for name, of in apart.items()]
    lines += [f"warning: {text}" for text in warnings]
    lines += [f"left out {count}: {why}" for why, count in skipped.items()]
    shared = {name: overall[name] for name in ("interval_score", "said_not_to_fit")}
    told = {"runs": rows, "overall": overall, "apart": apart, **shared, "skipped": dict(skipped), "warnings": warnings}
    return {**told, "text": "\n".join(lines)}


COMPILED, OUTSIDE = "compiled kernels that taught nothing", "mostly outside of what was measured"


def _run_figures(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    outside = [row["outside_percent"] for row in rows]
    return {
        **errors([row["predicted_s"] for row in rows], [row["measured_s"] for row in rows]).to_dict(),
        "coverage": share([row["low_s"] <= row["measured_s"] <= row["high_s"] for row in rows]),
        "interval_score": interval_score([SimpleNamespace(**row) for row in rows]),
        "said_not_to_fit": sum(not row["fits"] for row in rows),
        "outside_percent": sum(outside) / len(outside) if outside else None,
    }


def _run_words(of: dict[str, Any]) -> str:
    return (
        f"mean error {of['mape']:.1f} %, max {of['max']:.1f} %, {of['coverage']:.0f} % of the runs lie in their "
        f"intervals, interval score {of['interval_score']:.2f}, {of['outside_percent']:.0f} % of the predicted time "
        "lies outside of what was measured"
    )
