"""Registries know built-in, registered and installed things, and help with unknown names."""

import sys
from pathlib import Path

import pytest

from stepsight.dataset.base.caching import clear_caches
from stepsight.dataset.base.errors import StepsightError, TableError
from stepsight.dataset.base.registry import Registry, instance_of

GROUP = "stepsight.fruits"


def _fruits() -> Registry[int]:
    return Registry("fruit", {"apple": 1, "pear": 2}, group=GROUP, check=instance_of(int), error=TableError)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Install packages with one module and entry points; forget them afterwards."""

    def install(name: str, points: str, code: str = "kiwi = 3\n") -> None:
        (tmp_path / f"{name}.py").write_text(code)
        info = tmp_path / f"{name}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[{GROUP}]\n{points}\n")
        clear_caches()

    monkeypatch.syspath_prepend(tmp_path)
    yield install
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(path.stem, None)
    clear_caches()


def test_a_registry_is_a_mapping() -> None:
    fruits = _fruits()
    assert dict(fruits) == {"apple": 1, "pear": 2} and len(fruits) == 2
    assert "apple" in fruits and "fig" not in fruits and 3 not in fruits
    assert fruits.get("pear") == 2 and fruits.get("fig", 7) == 7


def test_an_unknown_name_lists_the_known_ones_and_the_nearest() -> None:
    with pytest.raises(TableError, match=r"fruit must be one of apple, pear, got 'Aple' \(did you mean 'apple'\?\)"):
        _fruits()["Aple"]
    with pytest.raises(TableError, match=r"got 'xyz'$"):
        _fruits()["xyz"]


def test_users_register_and_unregister() -> None:
    fruits = _fruits()
    assert fruits.register("fig", 4) == 4 and fruits["fig"] == 4
    with pytest.raises(StepsightError, match="fruit 'fig' is registered already: choose another"):
        fruits.register("fig", 5)
    with pytest.raises(StepsightError, match="fruit 'apple' comes with stepsight"):
        fruits.register("apple", 5)
    with pytest.raises(StepsightError, match="fruit 'plum': it must be of type int, got 'purple'"):
        fruits.register("plum", "purple")
    with pytest.raises(StepsightError, match="printable"):
        fruits.register("", 5)
    fruits.unregister("fig")
    assert "fig" not in fruits
    for name in ("fig", "apple"):
        with pytest.raises(StepsightError, match="only what was registered can be removed"):
            fruits.unregister(name)


def test_register_decorates() -> None:
    makers: Registry[object] = Registry("maker", group=GROUP)

    @makers.register("twice")
    def twice(x: int) -> int:
        return 2 * x

    assert makers["twice"] is twice


def test_a_with_block_registers_for_its_length() -> None:
    fruits = _fruits()
    with pytest.raises(ZeroDivisionError), fruits.registered("fig", 4):
        assert fruits["fig"] == 4
        _ = 1 / 0
    assert "fig" not in fruits


def test_entry_points_load_when_they_are_asked_for(packages) -> None:
    packages("orchard", "kiwi = orchard:kiwi")
    fruits = _fruits()
    assert fruits["apple"] == 1 and fruits.names() == ("apple", "pear", "kiwi") and "kiwi" in fruits
    assert "orchard" not in sys.modules and list(fruits) == ["apple", "pear"]
    version = fruits.version
    assert fruits["kiwi"] == fruits.get("kiwi") == 3 and fruits.version > version
    assert list(fruits) == ["apple", "pear", "kiwi"]
    with pytest.raises(StepsightError, match="only what was registered can be removed"):
        fruits.unregister("kiwi")
    fruits._remove("kiwi")
    assert list(fruits) == ["apple", "pear"]


def test_all_packages_can_be_loaded(packages) -> None:
    packages("orchard", "kiwi = orchard:kiwi")
    fruits = _fruits()
    fruits.load()
    assert dict(fruits) == {"apple": 1, "pear": 2, "kiwi": 3}


def test_what_comes_with_the_package_may_be_made_when_it_is_needed() -> None:
    made: list[str] = []

    def make() -> dict[str, int]:
        made.append("fruits")
        return {"apple": 1}

    fruits = Registry("fruit", make, group=GROUP)
    assert not made
    assert fruits["apple"] == 1 and "apple" in fruits and dict(fruits.items()) == {"apple": 1} and len(fruits) == 1
    assert made == ["fruits"]
    with pytest.raises(StepsightError, match="comes with stepsight"):
        Registry("fruit", make, group=GROUP).register("apple", 2)
    with pytest.raises(TypeError):
        fruits["fig"] = 1  # type: ignore[index]


@pytest.mark.parametrize(
    ("points", "code", "said"),
    [
        ("kiwi = orchard:gone", "", "cannot load the entry point orchard:gone of package 'orchard': AttributeError"),
        ("kiwi = orchard:kiwi", "import no_such_module", "of package 'orchard': ModuleNotFoundError"),
        ("kiwi = orchard:kiwi", "kiwi = 'green'", "orchard:kiwi of package 'orchard': it must be of type int"),
    ],
)
def test_a_broken_entry_point_names_its_package(packages, points: str, code: str, said: str) -> None:
    packages("orchard", points, code)
    with pytest.raises(TableError, match=said):
        _fruits()["kiwi"]
    assert _fruits()["pear"] == 2


def test_two_packages_may_not_bring_the_same_name(packages) -> None:
    packages("orchard", "kiwi = orchard:kiwi")
    packages("garden", "kiwi = garden:kiwi")
    with pytest.raises(TableError, match="uninstall all except one"):
        _fruits()["kiwi"]


def test_a_built_in_thing_goes_before_an_entry_point(packages) -> None:
    packages("orchard", "pear = orchard:kiwi")
    assert _fruits()["pear"] == 2
