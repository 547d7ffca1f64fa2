"""Texts of ``stepsight doctor``."""

from __future__ import annotations

from typing import Any

from stepsight.experiments.reports.text_table import table
from stepsight.training.predictor.prediction_views import seconds_text


def machine_text(told: dict[str, Any]) -> str:
    """The check of a machine as text."""
    libraries = [[name, row["version"] or "not installed", row["extra"]] for name, row in told["libraries"].items()]
    lines = [
        f"system     {told['system']}, {told['cores']} cores, {told['memory_bytes'] / 1e9:.1f} GB of memory",
        *(f"GPU        {', '.join(gpu.values())}" for gpu in told["gpus"]),
        *(f"link       {link['link']}: {link['rate']}" for link in told["links"]),
        f"quiet      {'no: ' + told['quiet'] if told['quiet'] else 'yes'}",
        "",
        table(
            ["what works here", "", "why not"],
            [[what, "no" if why else "yes", why] for what, why in told["can"].items()],
        ),
        "",
        table(["library", "version", "extra"], libraries),
    ]
    return "\n".join(lines)


def diagnosis_text(told: dict[str, Any]) -> str:
    """The causes of a slow run as text."""
    lines = [f"run {told['run']}: measured {seconds_text(told['measured_s'])}"]
    if told["predicted_s"] is not None:
        lines[0] += (
            f", predicted {seconds_text(told['predicted_s'])} "
            f"({seconds_text(told['low_s'])} to {seconds_text(told['high_s'])}): {told['slower_percent']:+.1f} %"
        )
    elif "why_not_predicted" in told:
        lines.append(f"not predicted: {told['why_not_predicted']}")
    cells = [
        [
            cause["cause"],
            "" if cause["share"] is None else f"{100 * cause['share']:.1f}",
            cause["evidence"],
            cause["advice"],
        ]
        for cause in told["causes"]
    ]
    if not cells:
        return "\n".join([*lines, "no cause of idle time, small messages, slow transport or throttling was found"])
    return "\n".join([*lines, "", table(["cause", "% of the steps", "evidence", "what to do"], cells)])
