"""Texts about configurations of training frameworks that were read or written."""

from __future__ import annotations

from stepsight.dataset.configs.config_job import ConfigJob
from stepsight.dataset.configs.key_table import ConfigText
from stepsight.experiments.reports.text_table import table


def config_text(read: ConfigJob) -> str:
    """The job, and tables of what was mapped and assumed."""
    mapped = [(key, _shown(value), read.sources.get(key, "")) for key, value in read.mapped.items()]
    assumed = [(key, _shown(value), read.reasons.get(key, "")) for key, value in read.assumed.items()]
    if read.read is None:
        parts = [f"job     not whole: no configuration states {', '.join(read.missing)}"]
    else:
        parts = [f"job     {read.job.name} on {read.job.cluster.num_devices} x {read.job.cluster.hardware}"]
    parts[0] += f"\nformat  {', '.join(read.formats)}"
    if mapped:
        parts.append(table(("mapped", "value", "from"), mapped))
    if assumed:
        parts.append(table(("assumed", "value", "because"), assumed))
    if read.ignored:
        parts.append("ignored\n" + "\n".join(f"  {text}" for text in read.ignored))
    return "\n\n".join(parts)


def written_text(written: ConfigText, name: str) -> str:
    """What a written configuration does not express, and what remains to be done."""
    lines = [f"# {note}" for note in written.notes]
    lines += [f"# not expressed by {name}: {text}" for text in written.ignored]
    return "\n".join(lines) or f"# {name} expresses all of the job"


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
