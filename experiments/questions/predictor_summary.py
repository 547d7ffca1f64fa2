"""The text of ``stepsight show`` about a predictor; its manifest (``--json``) has every source, ratio and digest."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from pathlib import Path

from stepsight.experiments.reports.text_table import Number, table
from stepsight.training.corrections.intervals import LARGE_LOG, job_class, published_widths
from stepsight.training.predictor.predictor import Predictor
from stepsight.training.regression.regressor import UNKNOWN
from stepsight.training.shipped.catalogue import RECIPES, facts_digest

USUAL_HFU = 0.5  # of the job whose interval stands for those of a device without published runs
Lines = Iterator[tuple[str, str]]  # a title, and what is told; an empty text is left out


def predictor_text(path: Path, predictor: Predictor) -> str:
    """Hardware, training data, errors, calibration and interval widths of a predictor."""
    manifest, doubts, doubt = predictor.manifest, predictor.doubts, ""
    if doubts is not None:
        half, kinds = doubts.halves.get("", 0.0), sum("/" not in name for name in doubts.halves) - 1
        usual = f"{100 * math.expm1(half):.0f} %"
        if half > LARGE_LOG:
            usual = f"a factor of {math.exp(half):.3g} (with few runs held back, the largest error of an op counts)"
        doubt = f"nine of ten ops within a run are off by at most {usual}; {kinds} kinds have an interval of their own"
    versions = ", ".join(f"{name} {version}" for name, version in manifest.get("versions", {}).items())
    when = f"{manifest['created']}, " if "created" in manifest else ""
    lines = [
        ("predictor", str(path)),
        *_learned(predictor),
        *_calibrated(predictor),
        ("interval", _interval(predictor)),
        ("doubt", doubt),
        ("made", f"{when}digest {manifest.get('digest', 'unknown')}, with {versions or 'unknown versions'}"),
    ]
    head = "\n".join(f"{name:<13}{text}" for name, text in lines if text)
    # Mean errors of signatures left out in turn, by family; families with too few measurements have none.
    rows = [
        [family, Number(100 * math.expm1(error)) if error < UNKNOWN else "-"]
        for errors in (predictor.kernel.regressor.errors, predictor.collective.errors)
        for family, error in errors.items()
    ]
    errors_table = table(["on their own, signatures left out in turn", "mean error %"], rows)
    return f"{head}\n{errors_table}\n(--json: every source, ratio and digest)"


def _learned(predictor: Predictor) -> Lines:
    """What the predictor is for, what it learned from, and its errors on what was held back."""
    manifest, recipe = predictor.manifest, RECIPES.get(predictor.manifest.get("name", ""))
    twins = f"; {', '.join(recipe.twins)} too, as rooflines differ" if recipe is not None and recipe.twins else ""
    yield "for", predictor.hardware.name + twins
    origin = f"{len(manifest.get('runs', []))} runs in {', '.join(manifest.get('collections', [])) or 'no collection'}"
    if "sources" in manifest:
        who = dict.fromkeys(name.split("/")[0] for name in manifest["sources"])
        origin = f"in {len(manifest['sources'])} files of {', '.join(who)}"
    counts = f"{manifest.get('num_ops', 0):,} ops and {manifest.get('num_collectives', 0):,} collectives on their own"
    yield "learned from", f"{counts}, {origin}"
    yield "measured", ", ".join(manifest.get("kinds_measured", sorted(predictor.kernel.regressor.physics)))
    if loan := manifest.get("lent", {}):
        yield "lent", f"by {', '.join(loan['devices'])}: {', '.join(loan['kinds'])} ({loan['how']})"
    corrections = predictor.corrections.items()
    yield "corrected", "; ".join(f"{name} ({', '.join(filter(None, of)) or 'all'})" for name, of in corrections)
    # The software whose kernels a job can select (``execution.kernels``), the default first.
    known = predictor.kernel.software or (recipe.kernels if recipe is not None else {})
    yield "kernels", "; ".join(f"{label} of {' or '.join(names)}" for label, names in known.items() if any(names))
    ships = predictor.context.name if predictor.context is not None else "none: ops take as long as on their own"
    if predictor.context is None and recipe is not None:
        ships += ", strengths 0: fewer traced runs of the device are public than holding some back takes"
    errors = ", ".join(f"{form} {error:.2f}" for form, error in predictor.context_facts["held_back"].items())
    yield "context", ships + (f"; errors on runs held back: {errors}" if errors else "")
    if (off := manifest.get("metrics", {}).get("mape_percent")) is not None:
        yield "held back", f"iterations of runs held back {off:.1f} % off on average"


def _calibrated(predictor: Predictor) -> Lines:
    """What corrects the predictor: published runs, calibration by runs, by collectives and by traces."""
    calibration, manifest = predictor.calibration, predictor.manifest
    if (found := calibration.published) is not None:
        changed = ", which have changed since: fit again (tools/shipped_data.py)" * (found.facts != facts_digest())
        runs = f"{len(found.runs)} runs of {len({run.source for run in found.runs})} sources"
        yield "published", f"{runs} correct jobs near them; facts {found.facts}{changed}"
    if calibration.residual is not None:
        factors = ", ".join(f"{name} x {factor:.3f}" for name, factor in calibration.constants.to_dict().items())
        shift = 100 * math.expm1(statistics.median(calibration.residual.logs))
        yield "calibrated", f"on {predictor.calibrated_on}, by {', '.join(map(repr, calibration.residual.software))}"
        yield "", f"durations: {factors}; iterations of jobs like those runs: {shift:+.1f} % in the middle"
        if evidence := (told := manifest.get("calibration", {})).get("evidence"):
            judged = f"judged by {evidence['by']} ({evidence['before']['used']})"
            yield "", f"{judged}: {_better(evidence)}; begun from {told['predictor']}"
    if told := manifest.get("calibrated_links", {}):
        measured = f"{told['fitted']} collectives of {told['software'] or 'unknown software'}"
        where = f"in {', '.join(told['tables'])} over {told['fabric']}; {told['evidence']['by']}"
        yield "links", f"calibrated on {measured} {where}: {_better(told['evidence'])}; begun from {told['predictor']}"
    if told := manifest.get("calibrated_traces", {}):
        text, kinds, lost = f"{len(told['runs'])} imported", told["kinds"], told["overlap"]
        text += f"; {len(kinds)} kinds corrected, ops left out: {_better(told['evidence']['all'])}" if kinds else ""
        text += f"; launches of {len(told['host_kinds_s'])} kinds" if told["host_kinds_s"] else ""
        text += "" if lost is None else f"; {100 * lost['share']:.0f} % of overlapped time lost"
        yield "traces", f"{text}; begun from {told['predictor']}"


def _better(evidence: dict[str, dict[str, float]]) -> str:
    return f"mean error {evidence['before']['mape']:.1f} % before, {evidence['after']['mape']:.1f} % after"


def _interval(predictor: Predictor) -> str:
    """The interval; that of a predictor from tables is wide where no published run judged its device."""
    own, calibration = predictor.intervals, predictor.calibration
    if predictor.kernel.derives and not own.num_runs:
        widths, like = published_widths(), job_class(False, True, predictor.hardware.name, USUAL_HFU)
        runs = f"{sum(map(len, widths.sources.values()))} published runs of {len(widths.sources)} sources"
        text = f"as errors on {runs}, those of jobs alike"
        if not widths.of_kind(like):
            low, high = (100 * math.expm1(sign * end) for sign, end in zip((-1, 1), widths.ends_of(like), strict=True))
            text = (
                f"wide by default, {low:.0f} % to {high:+.0f} % for a dense job with an HFU of "
                f"{100 * USUAL_HFU:.0f} %: no published run judged iterations on this device, so errors on {runs} on "
                "other devices are widened; `stepsight calibrate` on measured runs narrows it"
            )
    elif own.num_runs:
        low, high = (100 * math.expm1(sign * own.half_width_log) for sign in (-1, 1))
        text = f"{low:.1f} % to {high:+.1f} %, for {100 * own.coverage:.0f} %, by {own.num_runs} runs held back"
    else:
        text = f"a factor of {math.exp(own.half_width_log):.1f} each way: too few runs to hold some back"
    if calibration.residual is None:
        return text
    least = 100 * math.expm1(max(calibration.left_log, calibration.judged_log))
    return f"{text}; narrower for jobs like those calibrated on" + (f", {least:.1f} % up at least" if least else "")
