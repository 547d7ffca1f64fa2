"""Charts: colours that can be told apart, values where they belong, and escaped names."""

import itertools
import re

import numpy as np
import pytest

from stepsight.experiments.page.charts import PALETTE, bars, lines, scatter, stacks, timeline_data

# What people with full deuteranopia and protanopia see, in linear RGB (Machado, Oliveira and Fernandes 2009).
SEEN = {
    "all": np.eye(3),
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
}


def lab(color: str, seen: object) -> np.ndarray:
    """Coordinates of CIE L*a*b*, in which distances are those that people see."""
    rgb = np.array([int(color[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ np.clip(np.array(seen) @ linear, 0, 1) / [0.9505, 1.0, 1.089]
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("sight", SEEN)
def test_colour_blind_people_can_tell_the_colours_apart(sight: str) -> None:
    colors = [lab(color, SEEN[sight]) for color in PALETTE]
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(colors, 2)) > 12


def test_bars_are_as_long_as_their_values_and_names_are_escaped() -> None:
    drawn = bars([("<b>", [(2.0, "two", "red")]), ("one", [(1.0, "one", "red")])])
    long, short = (float(width) for width in re.findall(r"width:([\d.]+)%", drawn))
    assert long == pytest.approx(2 * short, rel=0.01) and "<b>" not in drawn


def test_bars_and_stacks_lie_within_their_cells() -> None:
    """Also where all values are negative, or zero."""
    for drawn in (
        bars([("loss", [(-2.0, "-2", "red"), (1.0, "1", "red")]), ("more", [(-4.0, "-4", "red")])]),
        bars([("none", [(0.0, "0", "red")])]),
        stacks([(f"stage {at}", {"a": at, "b": 2.0}) for at in range(100)], [3.0] * 100, "GB"),
    ):
        places = re.findall(r"left:([\d.-]+)%;width:([\d.-]+)%", drawn)
        assert places and all(float(at) >= 0 and float(at) + float(wide) <= 100.01 for at, wide in places)


def test_lines_and_points_lie_within_the_picture() -> None:
    for drawn in (
        lines([("one", [(1, 1e-9), (64, 2e-9)])], "x", "y", log_x=True, limit=3e-9),
        lines([("flat", [(1, 0.0)])], "x", "y", steps=True),
        scatter([{"x": 1.0, "y": 1.0, "text": "<i>", "color": "red", "size": 5, "key": 0}], "x", "y", [(1.0, 1.0)]),
    ):
        high = float(re.findall(r'viewBox="0 0 960 (\d+)"', drawn)[0])
        numbers = re.findall(r' (?:x|cx|x1|x2)="(-?[\d.]+)"', drawn), re.findall(r' (?:y|cy|y1|y2)="(-?[\d.]+)"', drawn)
        assert all(0 <= float(x) <= 960 for x in numbers[0]) and all(-4 <= float(y) <= high for y in numbers[1])
        assert "nan" not in drawn and "<i>" not in drawn


def test_the_timeline_knows_what_an_action_waits_for() -> None:
    """Two stages: the second waits for the message of the first, and both are on the critical path."""
    names = [
        {"ph": "M", "name": kind, "pid": stage, "tid": thread, "args": {"name": kind}}
        for stage in (0, 1)
        for kind, thread in (("process_name", 0), ("thread_name", 0), ("thread_name", 1))
    ]
    spans = [("F0", 0, 0, 0.0, 5.0, "fwd"), ("F0 to stage 1", 0, 1, 5.0, 2.0, "pp"), ("F0", 1, 0, 7.0, 4.0, "fwd"),
             ("F1", 0, 0, 5.0, 1.0, "fwd")]  # fmt: skip
    events = [{"ph": "X", "name": n, "pid": p, "tid": t, "ts": ts, "dur": d, "cat": c} for n, p, t, ts, d, c in spans]
    arrow = [("s", 0, 0, 0.0), ("t", 0, 1, 5.0), ("f", 1, 0, 7.0)]
    events += [{"ph": phase, "id": 1, "pid": p, "tid": t, "ts": ts} for phase, p, t, ts in arrow]
    rows = timeline_data([*names, *events])["events"]
    by_place = {(row[0], row[1]): row for row in rows}
    message, second, other = by_place[1, 5.0], by_place[2, 7.0], by_place[0, 5.0]
    assert second[6] == 7.0 and rows[second[5]] == message
    assert [row[7] for row in (by_place[0, 0.0], message, second, other)] == [1, 1, 1, 0]
