"""The controls of a job: a slider or a row of choices for each field, where what breaks a rule is greyed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from html import escape
from itertools import groupby
from typing import Any

from nicegui import ui
from nicegui.element import Element
from nicegui.events import GenericEventArguments

from stepsight.dataset.job.job import Job
from stepsight.experiments.questions.job_facts import Field, broken_rules, fields_of, value_of
from stepsight.experiments.reports.text_table import shown, words

DRAG_S = 0.04  # between two answers while a slider moves
PAUSE_S = 0.002  # in which the places of a slider arrive that it was at during the last answer
_VALUE = "(e) => emit(e.target.value)"
_CHOSEN = """(e) => {
  if (e.target.dataset.value === undefined || (e.key && e.key !== "Enter" && e.key !== " ")) return;
  e.preventDefault(); emit(e.target.dataset.value);
}"""
OnChange = Callable[[Field, str], None]


def html(content: str = "", tag: str = "div") -> ui.html:
    """An element of text that this package has escaped."""
    return ui.html(content, sanitize=False, tag=tag)


def section(name: str) -> ui.element:
    """A section with its title, that a link leads to."""
    made = ui.element("section").props(f"id=section-{name.lower()}")
    with made:
        html(escape(name), "h2")
    return made


def button(text: str, test_id: str, on_click: Callable[..., Any]) -> ui.html:
    """A button for keyboard and pointer."""
    return html(escape(text), "button").classes("chip").props(f"data-testid={test_id}").on("click", on_click)


def text_input(test_id: str, label: str, on_change: Callable[[str], Any] = str, **props: Any) -> Element:
    """An input line with its label."""
    with ui.element("div").classes("field"):
        html(f"<span>{escape(label)}</span>", "label").props(f"for={test_id}")
        made = ui.element("input").props(f"id={test_id} data-testid={test_id}")
        made.props.update({"type": "text", "aria-label": label, **props})
        made.on("change", lambda e: on_change(str(e.args)), js_handler=_VALUE)
    return made


def on_choice(element: Element, choose: Callable[[str], Any]) -> None:
    """Call with the ``data-value`` of what is clicked, or chosen by keyboard, within an element."""
    element.on("click", lambda e: choose(str(e.args)), js_handler=_CHOSEN)
    element.on("keydown", lambda e: choose(str(e.args)), js_handler=_CHOSEN)


class Controls:
    """The fields of a job."""

    def __init__(self, job: Job, on_change: OnChange) -> None:
        self.fields = fields_of(job)
        self._on_change = on_change
        self._dragged: GenericEventArguments | None = None
        self._sliders: dict[str, Element] = {}
        self._numbers: dict[str, Element] = {}
        self._chips: dict[str, dict[Any, ui.html]] = {}
        for group, fields in groupby(self.fields, key=lambda field: field.group):
            html(escape(group), "h2")
            for field in fields:
                self._add(field)
        self.show(job)

    def _add(self, field: Field) -> None:
        label, change = words(field.key), self._on_change
        with ui.element("div").classes("field"):
            with ui.element("label"):
                html(escape(label), "span")
                if field.is_number:
                    number = ui.element("input").props(f"type=number min=0 step=any data-testid={field.test_id}-value")
                    number.props["aria-label"] = label
                    number.on("change", lambda e: change(field, str(e.args)), js_handler=_VALUE)
                    self._numbers[field.key] = number
            if field.is_number:
                slider = ui.element("input").props(f"type=range min=0 max={len(field.values) - 1} step=1")
                slider.props.update({"data-testid": field.test_id, "aria-label": label})

                async def dragged(event: GenericEventArguments) -> None:
                    self._dragged = event
                    await asyncio.sleep(PAUSE_S)
                    if self._dragged is not event:  # a later place of the slider has arrived
                        return
                    at = int(event.args)
                    with slider.props.suspend_updates():  # the browser has moved it already
                        slider.props["value"] = at
                    change(field, str(field.values[at]))

                slider.on("input", dragged, throttle=DRAG_S, js_handler=_VALUE)
                self._sliders[field.key] = slider
            row = ui.element("div").classes("chips").props(f"role=group data-testid={field.test_id}-choices")
            with row:
                self._chips[field.key] = {value: self._chip(field, value) for value in field.values}
            on_choice(row, lambda text: change(field, text))

    def _chip(self, field: Field, value: Any) -> ui.html:
        chip = html(escape(f"{value:.4g}" if isinstance(value, float) else shown(value)), "button").classes("chip")
        chip.props["data-value"] = str(value)
        chip.props["tabindex"] = "-1" if field.is_number else "0"  # the slider has a number's values
        return chip

    def show(self, job: Job) -> None:
        """Let all controls show the values of a job."""
        for field in self.fields:
            value = value_of(job, field.key)
            if field.key in self._sliders:
                slider, number = self._sliders[field.key], self._numbers[field.key]
                _set(slider, **{"value": field.nearest(value), "aria-valuetext": shown(value)})
                _set(number, value=f"{value:.6g}" if isinstance(value, float) else str(value))
            for each, chip in self._chips[field.key].items():
                chip.classes(add="chosen") if each == value else chip.classes(remove="chosen")
                _set(chip, **{"aria-pressed": "true" if each == value else "false"})

    def show_rules(self, job: Job) -> None:
        """Grey the values that break a rule; the rule is their tooltip."""
        for field in self.fields:
            rules = broken_rules(job, field)
            for value, chip in self._chips[field.key].items():
                rule = rules.get(value)
                chip.classes(add="illegal") if rule else chip.classes(remove="illegal")
                _set(chip, **{"title": rule, "aria-disabled": "true" if rule else None})


def _set(element: Element, **props: Any) -> None:
    """Set what has changed: all else would be sent to the browser again."""
    for name, value in props.items():
        if element.props.get(name) != value:
            element.props.set_optional(name, value)
