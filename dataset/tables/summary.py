"""What a table of measurements holds, in counts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from stepsight.dataset.tables.measurements import Measurements


def summary(table: Measurements) -> dict[str, Any]:
    """Counts by kind, device, fabric, software and file; times in microseconds."""
    kinds = np.array([work.kind for work in table.works], str)
    microseconds = table.seconds * 1e6
    return {
        "rows": len(table),
        "kinds": {
            str(kind): {
                "rows": int((kinds == kind).sum()),
                "min_us": float(microseconds[kinds == kind].min()),
                "max_us": float(microseconds[kinds == kind].max()),
            }
            for kind in np.unique(kinds)
        },
        **{f"{name}s": dict(sorted(Counter(getattr(table, name)).items())) for name in ("device", "fabric")},
        "software": dict(sorted(Counter(table.software).items())),
        "files": {
            name: {"rows": count, "licence": table.files[name].licence, "digest": table.files[name].digest}
            for name, count in sorted((dict.fromkeys(table.files, 0) | Counter(table.source)).items())
        },
        "skipped": dict(sorted(table.skipped.items())),
    }


def summary_text(told: dict[str, Any]) -> str:
    """The summary as text for people."""
    lines = [f"{told['rows']} measurements from {len(told['files'])} files", ""]
    lines += [f"{'kind':<24}{'rows':>9}{'least':>17}{'most':>17}"]
    for kind, of in told["kinds"].items():
        lines.append(f"{kind:<24}{of['rows']:>9}{of['min_us']:>14.2f} us{of['max_us']:>14.2f} us")
    titles = {"devices": "device", "fabrics": "fabric", "software": "software", "skipped": "rows skipped, and why"}
    for key, title in titles.items():
        named = {name: count for name, count in told[key].items() if name}
        if named:
            lines += ["", title, *(f"{count:>9}  {name}" for name, count in named.items())]
    return "\n".join(lines)
