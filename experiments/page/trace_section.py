"""The section of the page about traced runs and captured scripts."""

from __future__ import annotations

from html import escape
from typing import Any

from nicegui import run, ui

from stepsight.experiments.page import views
from stepsight.experiments.page.controls import button, html, section
from stepsight.experiments.page.words import words
from stepsight.experiments.questions.traced_runs import ReplayedRun
from stepsight.experiments.questions.what_if import changed_run
from stepsight.experiments.tasks.settings import TraceChanges
from stepsight.simulator.replay.causes import breakdown
from stepsight.simulator.replay.changes import COMMUNICATION
from stepsight.training.corrections.intervals import seconds_text
from stepsight.training.prediction.captured_prediction import CapturedPrediction

MOST_KINDS = 3  # of ops, that have a slider
_STEPS = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0)  # times as fast


class TraceSection:
    """Shows where the time of a traced run went, and what changes would gain."""

    def __init__(self) -> None:
        self._content, self._faster, self._switches = "", dict[str, float](), dict[str, Any]()
        with section("Traces"):
            html("<p>Open a collection, a run folder or a captured script above.</p>")
            self._view = html().props("data-testid=trace")
            self._sliders = ui.element("div").classes("controls").props("data-testid=what-if")
            self._changed = html().props("data-testid=what-if-answer aria-live=polite")

    def view(self) -> str:
        """The run as HTML; empty if none is open."""
        return self._content

    def show(self, found: ReplayedRun | CapturedPrediction) -> None:
        """Show a traced run with its what-if sliders, or the prediction of a captured script."""
        self._sliders.clear()
        self._changed.content = ""
        if isinstance(found, CapturedPrediction):
            told = found.to_dict()
            self._content = f"<h1>{escape(told['job'])}</h1>{views.answer(told)}{views.said(told)}{views.time(told)}"
        else:
            split = breakdown(found.graphs).to_dict()
            self._content = views.trace_view(found.to_dict(), split)
            self._add_sliders(found, [*list(split["kinds"])[:MOST_KINDS], COMMUNICATION])
        self._view.content = self._content

    def _add_sliders(self, found: ReplayedRun, kinds: list[str]) -> None:
        self._faster, self._switches = {}, {}
        with self._sliders:
            html("What if", "h2")
            for kind in dict.fromkeys(kinds):
                with ui.element("div").classes("field"):
                    label = html(f"{escape(words(kind))}: as traced", "label")
                    slider = ui.element("input").props(f"type=range min=0 max={len(_STEPS) - 1} value=2 step=1")
                    slider.props.update({"aria-label": words(kind), "data-testid": f"faster-{kind}"})

                async def moved(event: Any, kind: str = kind, label: ui.html = label) -> None:
                    factor = _STEPS[int(event.args)]
                    self._faster[kind] = factor
                    label.content = f"{escape(words(kind))}: {factor:g} times as fast"
                    await self._answer(found)

                slider.on("input", moved, throttle=0.2, js_handler="(e) => emit(e.target.value)")
            with ui.element("div").classes("chips"):
                for name in ("no_host", "remove_straggler"):
                    button(words(name), name.replace("_", "-"), lambda name=name: self._switch(found, name))

    async def _switch(self, found: ReplayedRun, name: str) -> None:
        self._switches[name] = not self._switches.get(name, False)
        await self._answer(found)

    async def _answer(self, found: ReplayedRun) -> None:
        """Replay the step with all changes."""
        faster = {kind: factor for kind, factor in self._faster.items() if factor != 1.0}
        asked = TraceChanges(faster=faster, **self._switches)
        if not faster and not any(self._switches.values()):
            self._changed.content = ""
            return
        told = await run.io_bound(changed_run, found, asked)
        if told is not None:
            rows = [
                [each["change"], seconds_text(each["step_s"]), f"{each['speedup']:.2f}"] for each in told["changes"]
            ]
            rows.append(["all of them", seconds_text(told["changed_s"]), f"{told['speedup']:.2f}"])
            self._changed.content = views.html_table(["change", "step", "speed-up"], rows)
