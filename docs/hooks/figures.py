"""Draw the figures of the documentation from predictions: ``python docs/hooks/figures.py``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from stepsight import BatchSpec, ClusterSpec, Job, ModelSpec, ParallelSpec, predict

IMAGES = Path(__file__).parents[1] / "images"
SCHEDULES = (("gpipe", 1), ("1f1b", 1), ("1f1b", 2), ("zb-h1", 1))
COLORS = {"F": "#3b6fb5", "B": "#d9822b", "I": "#d9822b", "W": "#3a9b6c", "o": "#8a8f98"}
LEFT, WIDTH, ROW = 10, 780, 16
BOXES = {  # left, top, width, title and text of each step from traces to answers
    "traces": (10, 62, 125, "profiled steps", "one or two nodes"),
    "graphs": (160, 62, 165, "graph dataset", "ops, streams, dependencies"),
    "alone": (350, 14, 205, "LightGBM", "each op and collective alone"),
    "context": (350, 110, 205, "context network", "the graph: what neighbours change"),
    "simulator": (580, 62, 170, "critical-path simulator", "any job, any strategy"),
    "answer": (775, 62, 95, "predict(job)", "and search"),
}
ARROWS = (
    *(("traces", "graphs"), ("graphs", "alone"), ("graphs", "context"), ("alone", "simulator")),
    *(("context", "simulator"), ("simulator", "answer")),
)
WORTH = {  # errors of held-out runs without a context network, and with its parts: docs/results/context.md
    "LightGBM alone": 1.0,
    "+ a bias by kind and phase": 0.470,
    "+ own features": 0.373,
    "+ messages of neighbours": 0.375,
    "each as far as it helps": 0.355,
}
JOB = Job(
    model=ModelSpec(family="llama", layers=32, hidden=4096, heads=32, ffn=14336, vocab=32000, seq_len=4096),
    parallel=ParallelSpec(tp=8, pp=4, sequence_parallel=True),
    batch=BatchSpec(micro_batch=1, global_batch=8),
    cluster=ClusterSpec(hardware="h100-sxm-80gb", nodes=4, devices_per_node=8),
)


def main() -> None:
    """Write all figures."""
    IMAGES.mkdir(exist_ok=True)
    _write("schedules", *schedules())
    _write("learning", *learning())


def learning() -> tuple[float, float, list[str]]:
    """Draw how a predictor learns, from traces to answers, and what each part is worth; also its width and height."""
    parts = [
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#8a8f98"/></marker></defs>'
    ]
    height = 50
    for one, other in ARROWS:
        (x, y, width, *_), (to_x, to_y, *_) = BOXES[one], BOXES[other]
        line = f'x1="{x + width}" y1="{y + height / 2}" x2="{to_x - 1}" y2="{to_y + height / 2}"'
        parts.append(f'<line {line} stroke="#8a8f98" stroke-width="1.5" marker-end="url(#tip)"/>')
    for name, (x, y, width, title, text) in BOXES.items():
        color = COLORS["F"] if name in ("alone", "context") else "#666"
        middle = x + width / 2
        parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="none" stroke="{color}"/>'
            f'<text x="{middle}" y="{y + 21}" text-anchor="middle" fill="{color}" font-weight="bold">{title}</text>'
            f'<text x="{middle}" y="{y + 39}" text-anchor="middle" fill="#666" font-size="11">{text}</text>'
        )
    top = 200
    parts.append(
        f'<text x="10" y="{top - 8}" fill="#666">Error on held-out runs, in parts of the error without context</text>'
    )
    for name, value in WORTH.items():
        width = 520 * value
        parts.append(
            f'<text x="200" y="{top + 14}" text-anchor="end" fill="#666">{name}</text>'
            f'<rect x="210" y="{top + 3}" width="{width:.1f}" height="14" fill="{COLORS["F"]}"/>'
            f'<text x="{216 + width:.1f}" y="{top + 14}" fill="#666">{value:.3g}</text>'
        )
        top += 21
    return 880, top + 6, parts


def schedules() -> tuple[float, float, list[str]]:
    """Draw the predicted timelines of four schedules, on one scale; also their width and height."""
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
    return WIDTH + 2 * LEFT, top, parts


def _write(name: str, width: float, height: float, parts: list[str]) -> None:
    size = f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12"'
    text = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n' + "\n".join(parts) + "\n</svg>\n"
    (IMAGES / f"{name}.svg").write_text(text)


if __name__ == "__main__":
    main()
