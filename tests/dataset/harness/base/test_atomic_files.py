"""Files and folders are complete or absent."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepsight.dataset.harness.base.atomic_files import new_folder, parse_json, read_json, write_json


def test_json_is_read_back_and_nan_is_refused(tmp_path: Path) -> None:
    write_json(tmp_path / "deep" / "a.json", {"b": [1, 2.5]})
    assert read_json(tmp_path / "deep" / "a.json") == {"b": [1, 2.5]}
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "b.json", float("nan"))
    assert [path.name for path in tmp_path.iterdir()] == ["deep"]


def test_folder_appears_whole_and_earlier_remains_are_dropped(tmp_path: Path) -> None:
    scratch, target = tmp_path / "scratch", tmp_path / "runs" / "a"
    scratch.mkdir()
    (scratch / "left_by_a_killed_process").touch()
    with new_folder(target, scratch):
        (scratch / "x").touch()
        assert not target.exists()
    assert [path.name for path in target.iterdir()] == ["x"]
    assert not scratch.exists()


def test_folder_of_a_failed_block_is_absent(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), new_folder(tmp_path / "a", tmp_path / "scratch"):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_a_key_twice_is_found_in_large_tables() -> None:
    keys = ", ".join(f'"{key}": 1' for key in [*range(50_000), 49_999])  # quadratic: half a minute
    with pytest.raises(ValueError, match="got '49999' twice"):
        parse_json(f"{{{keys}}}")
