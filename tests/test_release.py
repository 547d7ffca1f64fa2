"""What a release needs: one version everywhere, a citation, and links that lead somewhere."""

import re
from pathlib import Path

import pytest
import yaml

from stepsight import __version__

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")


def test_one_version() -> None:
    """The package, pyproject.toml and the citation state the same version."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == __version__ and citation["cff-version"] == "1.2.0"
    assert f'version = "{__version__}"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("page", PAGES)
def test_links_to_files_are_there(page: str) -> None:
    """``make docs`` checks the links of the site; these are those of the repository's own pages."""
    targets = re.findall(r"\]\((?!https?:)([^)#…]+)", (ROOT / page).read_text())
    assert [target for target in targets if not (ROOT / target).exists()] == []


@pytest.mark.parametrize("page", [*PAGES, *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("docs/**/*.md"))])
def test_examples_that_are_named_are_there(page: str) -> None:
    named = set(re.findall(r"examples/[\w./-]+\.(?:toml|py|csv)", (ROOT / page).read_text()))
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_the_readme_repeats_the_figures_of_the_results() -> None:
    """Runs, mean error and regret of its table are those of docs/results/published-runs.md."""
    page = (ROOT / "docs" / "results" / "published-runs.md").read_text()
    errors, choices = (part.splitlines() for part in page.split("## What choosing by predictions costs"))
    table = (ROOT / "README.md").read_text().partition("| published runs | runs |")[2].partition("\n\n")[0]
    for row in table.splitlines()[2:]:
        name, runs, error, regret, chance = (cell.strip() for cell in row.split("|")[1:6])
        word = name.split()[0].rstrip(",")
        chosen = next(line for line in choices if line.startswith(f"| {word}"))
        assert [cell.strip() for cell in chosen.split("|")][3:5] == [regret, chance], name
        if word == "all":
            assert f"All {runs} runs: mean error {error} %" in page
        else:
            told = [cell.strip() for cell in next(line for line in errors if line.startswith(f"| {word}")).split("|")]
            assert (told[2], told[3].split()[0]) == (runs, error), name
