"""The controls of a job: a slider or a row of choices for each field, where what breaks a rule is greyed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
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
VALUE = "(e) => emit(e.target.value)"
_CHOSEN = """(e) => {
  if (e.target.dataset.value === undefined || (e.key && e.key !== "Enter" && e.key !== " ")) return;
  e.preventDefault(); emit(e.target.dataset.value);
}"""


def html(content: str = "", tag: str = "div") -> ui.html:
    """An element of text that this package has escaped."""
    return ui.html(content, sanitize=False, tag=tag)


def section(name: str) -> ui.element:
    """A section with its title, that a link leads to."""
    made = ui.element("section").props(f"id=section-{name.lower()}")
    with made:
        html(escape(name), "h2")
    return made


def chips() -> ui.element:
    """A row of buttons, which is not printed."""
    return ui.element("div").classes("chips controls")


def button(text: str, test_id: str, on_click: Callable[..., Any]) -> ui.html:
    """A button for keyboard and pointer."""
    return html(escape(text), "button").classes("chip").props(f"data-testid={test_id}").on("click", on_click)


def text_input(test_id: str, label: str, on_change: Callable[[str], Any] = str, **props: Any) -> Element:
    """An input line with its label."""
    with ui.element("div").classes("field"):
        html(f"<span>{escape(label)}</span>", "label").props(f"for={test_id}")
        made = ui.element("input").props(f"id={test_id} data-testid={test_id}")
        made.props.update({"type": "text", "aria-label": label, **props})
        made.on("change", lambda e: on_change(str(e.args)), js_handler=VALUE)
    return made


def slider(test_id: str, label: str, num_values: int) -> Element:
    """A slider over the numbers of values."""
    made = ui.element("input").props(f"type=range min=0 max={num_values - 1} step=1")
    made.props.update({"data-testid": test_id, "aria-label": label})
    return made


def on_choice(element: Element, choose: Callable[[str], Any]) -> None:
    """Call with the ``data-value`` of what is clicked, or chosen by keyboard, within an element."""
    for event in ("click", "keydown"):
        element.on(event, lambda e: choose(str(e.args)), js_handler=_CHOSEN)


class Controls:
    """The fields of a job; ``on_change`` gets a field and the text of its new value."""

    def __init__(self, job: Job, on_change: Callable[[Field, str], None]) -> None:
        self.fields, self._change = fields_of(job), on_change
        self._dragged: GenericEventArguments | None = None
        self._numbers: dict[str, tuple[Element, Element]] = {}  # slider and input line of each number
        self._chips: dict[str, dict[Any, ui.html]] = {}
        for group, fields in groupby(self.fields, key=lambda field: field.group):
            html(escape(group), "h2")
            for field in fields:
                with ui.element("div").classes("field"):
                    if field.is_number:
                        self._add_number(field)
                    else:
                        html(f"<span>{escape(words(field.key))}</span>", "label")
                    row = ui.element("div").classes("chips").props(f"role=group data-testid={field.test_id}-choices")
                    with row:
                        self._chips[field.key] = {value: self._chip(field, value) for value in field.values}
                    on_choice(row, partial(on_change, field))
        self.show(job)

    def _add_number(self, field: Field) -> None:
        label = words(field.key)
        with ui.element("label"):
            html(escape(label), "span")
            number = ui.element("input").props(f"type=number min=0 step=any data-testid={field.test_id}-value")
            number.props["aria-label"] = label
            number.on("change", lambda e: self._change(field, str(e.args)), js_handler=VALUE)
        made = slider(field.test_id, label, len(field.values))

        async def dragged(event: GenericEventArguments) -> None:
            self._dragged = event
            await asyncio.sleep(PAUSE_S)
            if self._dragged is event:  # no later place of the slider has arrived
                at = int(event.args)
                with made.props.suspend_updates():  # the browser has moved it already
                    made.props["value"] = at
                self._change(field, str(field.values[at]))

        made.on("input", dragged, throttle=DRAG_S, js_handler=VALUE)
        self._numbers[field.key] = made, number

    def _chip(self, field: Field, value: Any) -> ui.html:
        chip = html(escape(f"{value:.4g}" if isinstance(value, float) else shown(value)), "button").classes("chip")
        chip.props["data-value"] = str(value)
        chip.props["tabindex"] = "-1" if field.is_number else "0"  # the slider has a number's values
        return chip

    def show(self, job: Job) -> None:
        """Let all controls show the values of a job."""
        for field in self.fields:
            value = value_of(job, field.key)
            if field.is_number:
                made, number = self._numbers[field.key]
                _set(made, **{"value": field.nearest(value), "aria-valuetext": shown(value)})
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
