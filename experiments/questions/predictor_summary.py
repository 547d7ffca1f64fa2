"""The text of ``stepsight show`` about a predictor; its manifest (``--json``) has every source, ratio and digest."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepsight.experiments.reports.text_table import Number, table
from stepsight.training.corrections.intervals import job_class, published_widths
from stepsight.training.predictor.predictor import Predictor
from stepsight.training.regression.regressor import UNKNOWN
from stepsight.training.shipped.catalogue import RECIPES, Recipe, facts_digest

NODE = 8  # devices of the job whose interval stands for those of a device without published runs


def predictor_text(path: Path, predictor: Predictor) -> str:
    """Hardware, training data, errors, calibration and interval widths of a predictor."""
    manifest, corrections = predictor.manifest, predictor.corrections.items()
    recipe, off = RECIPES.get(manifest.get("name", "")), manifest.get("metrics", {}).get("mape_percent")
    twins = f"; {', '.join(recipe.twins)} too, as rooflines differ" if recipe is not None and recipe.twins else ""
    loan = manifest.get("lent", {})
    lent = f"by {', '.join(loan['devices'])}: {', '.join(loan['kinds'])} ({loan['how']})" if loan else ""
    lines = [
        ("predictor", str(path)),
        ("for", predictor.hardware.name + twins),
        ("learned from", _origin(manifest)),
        ("measured", ", ".join(manifest.get("kinds_measured", sorted(predictor.kernel.regressor.physics)))),
        ("lent", lent),
        ("corrected", "; ".join(f"{name} ({', '.join(filter(None, of)) or 'all'})" for name, of in corrections)),
        ("kernels", _kernels(predictor, recipe)),
        ("context", _context(predictor)),
        ("held back", "" if off is None else f"iterations of runs held back {off:.1f} % off on average"),
        ("published", _published(predictor)),
        *_calibration(predictor),
        ("links", _links(manifest.get("calibrated_links", {}))),
        ("traces", _traces(manifest.get("calibrated_traces", {}))),
        ("interval", _interval(predictor)),
        ("doubt", _doubt(predictor)),
        ("made", _made(manifest)),
    ]
    head = "\n".join(f"{name:<13}{text}" for name, text in lines if text)
    return f"{head}\n{_errors(predictor)}\n(--json: every source, ratio and digest)"


def _origin(manifest: Mapping[str, Any]) -> str:
    counts = f"{manifest.get('num_ops', 0):,} ops and {manifest.get('num_collectives', 0):,} collectives on their own"
    if "sources" in manifest:
        files = manifest["sources"]
        who = dict.fromkeys(name.split("/")[0] for name in files)
        return f"{counts}, in {len(files)} files of {', '.join(who)}"
    runs, folders = manifest.get("runs", []), manifest.get("collections", [])
    return f"{counts}, {len(runs)} runs in {', '.join(folders) or 'no collection'}"


def _kernels(predictor: Predictor, recipe: Recipe | None) -> str:
    """The software whose kernels a job can select (``execution.kernels``), the default first."""
    known = predictor.kernel.software or (recipe.kernels if recipe is not None else {})
    return "; ".join(f"{label} of {' or '.join(names)}" for label, names in known.items() if any(names))


def _context(predictor: Predictor) -> str:
    ships = predictor.context.name if predictor.context is not None else "none: ops take as long as on their own"
    if predictor.context is None and predictor.manifest.get("name", "") in RECIPES:
        ships += ", strengths 0: fewer traced runs of the device are public than holding some back takes"
    errors = [f"{form} {error:.2f}" for form, error in predictor.context_facts["held_back"].items()]
    return f"{ships}; errors on runs held back: {', '.join(errors)}" if errors else ships


def _published(predictor: Predictor) -> str:
    """The published runs that correct jobs near them, and whether they were predicted with today's facts."""
    found = predictor.calibration.published
    if found is None:
        return ""
    changed = "" if found.facts == facts_digest() else ", which have changed since: fit again (tools/shipped_data.py)"
    sources = len({run.source for run in found.runs})
    return f"{len(found.runs)} runs of {sources} sources correct jobs near them; facts {found.facts}{changed}"


def _calibration(predictor: Predictor) -> list[tuple[str, str]]:
    """Runs of the calibration, its changes, and the improvement."""
    calibration, told = predictor.calibration, predictor.manifest.get("calibration", {})
    if calibration.residual is None:
        return []
    factors = ", ".join(f"{name} x {factor:.3f}" for name, factor in calibration.constants.to_dict().items())
    shift = 100 * math.expm1(statistics.median(calibration.residual.logs))
    lines = [
        ("calibrated", f"on {predictor.calibrated_on}, by {', '.join(map(repr, calibration.residual.software))}"),
        ("", f"durations: {factors}; iterations of jobs like those runs: {shift:+.1f} % in the middle"),
    ]
    if "evidence" in told:
        before, after = (told["evidence"][key] for key in ("before", "after"))
        judged = f"judged by {told['evidence']['by']} ({before['used']}): mean error"
        text = f"{judged} {before['mape']:.1f} % before, {after['mape']:.1f} % after; begun from {told['predictor']}"
        lines.append(("", text))
    return lines


def _links(told: Mapping[str, Any]) -> str:
    if not told:
        return ""
    evidence, tables = told["evidence"], ", ".join(told["tables"])
    before, after = (evidence[key]["mape"] for key in ("before", "after"))
    return (
        f"calibrated on {told['fitted']} collectives of {told['software'] or 'unknown software'} in {tables} over "
        f"{told['fabric']}; {evidence['by']}: mean error {before:.1f} % before, {after:.1f} % after; begun from "
        f"{told['predictor']}"
    )


def _traces(told: Mapping[str, Any]) -> str:
    if not told:
        return ""
    all_ops, kinds = told["evidence"]["all"], told["kinds"]
    before, after = (all_ops[key]["mape"] for key in ("before", "after"))
    text = f"{len(told['runs'])} imported"
    if kinds:
        text += f"; {len(kinds)} kinds corrected, ops left out {before:.1f} % off before, {after:.1f} % after"
    if told["host_kinds_s"]:
        text += f"; launches of {len(told['host_kinds_s'])} kinds"
    if told["overlap"] is not None:
        text += f"; {100 * told['overlap']['share']:.0f} % of overlapped time lost"
    return f"{text}; begun from {told['predictor']}"


def _interval(predictor: Predictor) -> str:
    own = predictor.intervals
    if predictor.kernel.derives and not own.num_runs:
        text = _by_published_runs(predictor.hardware.name)
    elif own.num_runs:
        low, high = (100 * math.expm1(sign * own.half_width_log) for sign in (-1, 1))
        text = f"{low:.1f} % to {high:+.1f} %, for {100 * own.coverage:.0f} %, by {own.num_runs} runs held back"
    else:
        text = f"a factor of {math.exp(own.half_width_log):.1f} each way: too few runs to hold some back"
    calibration = predictor.calibration
    if calibration.residual is None:
        return text
    least = 100 * math.expm1(max(calibration.left_log, calibration.judged_log))
    bound = f", {least:.1f} % up at least" if least else ""
    return f"{text}; narrower for jobs like those calibrated on{bound}"


def _doubt(predictor: Predictor) -> str:
    """Intervals of single ops and collectives."""
    if predictor.doubts is None:
        return ""
    usual = 100 * math.expm1(predictor.doubts.halves.get("", 0.0))
    kinds = sum("/" not in name for name in predictor.doubts.halves) - 1
    return f"nine of ten ops within a run are off by at most {usual:.0f} %; {kinds} kinds have an interval of their own"


def _by_published_runs(hardware: str) -> str:
    """The interval of a predictor from tables: wide where no published run judged iterations on its device."""
    widths = published_widths()
    runs = f"{sum(map(len, widths.sources.values()))} published runs of {len(widths.sources)} sources"
    like = job_class(False, False, True, hardware, NODE)
    if widths.on_chip(like):
        return f"as errors on {runs}, those of jobs alike"
    factor = math.exp(widths.half_width_of(like, 0.0))
    return (
        f"wide by default, a factor of {factor:.1f} each way for a dense 16-bit job on {NODE} devices: no published "
        f"run judged iterations on this device, so errors on {runs} on other devices are widened; "
        "`stepsight calibrate` on measured runs narrows it"
    )


def _made(manifest: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in manifest.get("versions", {}).items())
    when = f"{manifest['created']}, " if "created" in manifest else ""
    return f"{when}digest {manifest.get('digest', 'unknown')}, with {versions or 'unknown versions'}"


def _errors(predictor: Predictor) -> str:
    """Mean errors of signatures left out in turn, by family; families with too few measurements have none."""
    rows = [
        [family, Number(100 * math.expm1(error)) if error < UNKNOWN else "-"]
        for errors in (predictor.kernel.regressor.errors, predictor.collective.errors)
        for family, error in errors.items()
    ]
    return table(["on their own, signatures left out in turn", "mean error %"], rows)
