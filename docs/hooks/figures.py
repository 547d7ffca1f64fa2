"""Draw the figures of the documentation from predictions: ``python docs/hooks/figures.py``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from stepsight import BatchSpec, ClusterSpec, Job, ModelSpec, ParallelSpec, predict

IMAGES = Path(__file__).parents[1] / "images"
SCHEDULES = (("gpipe", 1), ("1f1b", 1), ("1f1b", 2), ("zb-h1", 1))
COLORS = {"F": "#3b6fb5", "B": "#d9822b", "I": "#d9822b", "W": "#3a9b6c", "o": "#8a8f98"}
LEFT, WIDTH, ROW = 10, 780, 16
JOB = Job(
    model=ModelSpec(family="llama", layers=32, hidden=4096, heads=32, ffn=14336, vocab=32000, seq_len=4096),
    parallel=ParallelSpec(tp=8, pp=4, sequence_parallel=True),
    batch=BatchSpec(micro_batch=1, global_batch=8),
    cluster=ClusterSpec(hardware="h100-sxm-80gb", nodes=4, devices_per_node=8),
)


def main() -> None:
    """Write ``schedules.svg``: the predicted timelines of four schedules, on one scale."""
    found = []
    for schedule, chunks in SCHEDULES:
        parallel = replace(JOB.parallel, schedule=schedule, virtual_stages=chunks)
        found.append((f"{schedule} x{chunks}" if chunks > 1 else schedule, predict(replace(JOB, parallel=parallel))))
    longest = max(prediction.iteration_time_s for _, prediction in found)
    parts, top = [], 0
    for name, prediction in found:
        bubble = 100 * prediction.breakdown["bubble"] / prediction.iteration_time_s
        title = f"{name}: {1e3 * prediction.iteration_time_s:.0f} ms, bubble {bubble:.0f} %"
        parts.append(f'<text x="{LEFT}" y="{top + 14}" fill="#666">{title}</text>')
        for event in prediction.timeline("segment")["traceEvents"]:
            if event["ph"] != "X" or event["cat"] in ("pp", "dp"):
                continue
            x, width = LEFT + WIDTH * event["ts"] / 1e6 / longest, WIDTH * event["dur"] / 1e6 / longest
            y = top + 20 + ROW * event["pid"]
            color = COLORS.get(event["name"][0], COLORS["o"])
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{max(width - 0.5, 0.5):.1f}" height="{ROW - 2}" fill="{color}"/>'
            )
        top += 20 + ROW * JOB.parallel.pp + 10
    size = f'viewBox="0 0 {WIDTH + 2 * LEFT} {top}" font-family="sans-serif" font-size="12"'
    IMAGES.mkdir(exist_ok=True)
    (IMAGES / "schedules.svg").write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n' + "\n".join(parts) + "\n</svg>\n"
    )


if __name__ == "__main__":
    main()
