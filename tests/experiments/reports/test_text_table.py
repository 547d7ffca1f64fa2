"""Tables line up."""

from stepsight.experiments.reports.text_table import Number, table


def test_columns_line_up() -> None:
    """Words go to the left, numbers to the right, with their decimals."""
    text = table(["name", "ms"], [["a", Number(1.25, 1)], ["longer", Number(10, 1)]])
    assert text.splitlines() == ["name      ms", "------  ----", "a        1.2", "longer  10.0"]


def test_huge_numbers_have_an_exponent() -> None:
    """Nobody reads three hundred digits."""
    assert str(Number(-1e300)) == "-1e+300" and str(Number(123456.78, 1)) == "123456.8"
