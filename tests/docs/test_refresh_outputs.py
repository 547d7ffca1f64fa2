"""Outputs of commands on the pages can be written anew."""

from __future__ import annotations

import pytest

from tests.docs import refresh_outputs
from tests.docs.refresh_outputs import PAGES, ROOT


def test_every_page_with_an_output_is_renewed() -> None:
    """Except results, which state what was measured when."""
    renewed = {path for pattern in PAGES for path in ROOT.glob(pattern)}
    pages = [page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "results"]
    for page in (ROOT / "README.md", *pages):
        steps = refresh_outputs._STEP.findall(page.read_text())
        assert page in renewed or not any(refresh_outputs.is_quick(*step) for step in steps), page


@pytest.mark.parametrize(
    "shown", ["```console\n$ cat prices.toml\n{}$ ", '```toml title="prices.toml"\n{}```\n\n```console\n$ ']
)
def test_files_of_the_page_are_there(shown: str) -> None:
    """A command that reads one is renewed; the page shows the lines that it showed."""
    prices = "[price_per_device_hour]\nh100-sxm-80gb = 2.5\n"
    command = "stepsight predict examples/llama3-70b-fsdp-512.toml --tokens 15e12 --prices prices.toml\n"
    text = f"{shown.format(prices)}{command}...\ntraining   old\n```\n"
    lines = refresh_outputs.renewed(text).splitlines()
    assert lines[-3] == "..." and lines[-2].startswith("training   1.5e+13 tokens in ") and "cost" in lines[-2]
