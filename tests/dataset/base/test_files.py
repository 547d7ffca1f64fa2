"""Files and folders are complete or absent."""

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stepsight.cli import storage_problem
from stepsight.dataset.base.errors import StepsightError
from stepsight.dataset.base.files import (
    check_output_file,
    digest_files,
    new_file,
    new_folder,
    set_aside,
    write_json,
    write_text,
)


def test_failed_write_leaves_nothing(tmp_path: Path) -> None:
    """NaN is refused, and neither the file nor a temporary one remains."""
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "a.json", {"x": float("nan")})
    with pytest.raises(RuntimeError), new_folder(tmp_path / "b") as folder:
        (folder / "half").write_text("x")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_names_the_file(tmp_path: Path) -> None:
    """The system's error says which file was to be written, as it does for one that cannot be opened."""
    full = errno.ENOSPC, os.strerror(errno.ENOSPC)
    with pytest.raises(OSError, match=r"No space left on device: '.*/a.json'"), new_file(tmp_path / "a.json"):
        raise OSError(*full)
    with pytest.raises(OSError, match=r"No space left on device: '.*/b'") as caught, new_folder(tmp_path / "b"):
        raise OSError(*full)
    assert storage_problem(caught.value) == f"cannot write: No space left on device: {tmp_path / 'b'}"


def test_new_folder_replaces(tmp_path: Path) -> None:
    """A finished folder takes the place of the old one; the digest follows the content."""
    digests = []
    for text in ("one", "two"):
        with new_folder(tmp_path / "b") as folder:
            (folder / "file").write_text(text)
        digests.append(digest_files([tmp_path / "b" / "file"]))
    assert digests[0] != digests[1]
    assert [p.name for p in tmp_path.iterdir()] == ["b"]


def test_an_old_folder_stays_until_the_new_one_stands(tmp_path: Path) -> None:
    """Where the new one cannot take its place, the old one is there as it was."""
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "file").write_text("old")
    with pytest.raises(FileNotFoundError), new_folder(tmp_path / "b") as folder:
        folder.rmdir()
    assert (tmp_path / "b" / "file").read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["b"]


@pytest.mark.parametrize("there", ["none", "old", "taken"])
def test_a_folder_that_another_process_writes_meanwhile_is_said(
    there: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What that process wrote stays, and nothing is left beside it."""
    path, rename = tmp_path / "b", Path.replace
    if there != "none":
        path.mkdir()
        (path / "file").write_text("old")

    def replace(self: Path, target: Path) -> Path:
        if there == "taken" and self == path:
            (path / "file").unlink()
            path.rmdir()
        elif target == path:
            path.mkdir()
            (path / "file").write_text("theirs")
        return rename(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(StepsightError, match="/b was written by another process meanwhile"), new_folder(path) as folder:
        (folder / "file").write_text("ours")
    assert [each.name for each in tmp_path.iterdir()] == ([] if there == "taken" else ["b"])
    assert there == "taken" or (path / "file").read_text() == "theirs"


def test_an_old_folder_that_cannot_come_back_is_kept_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk on which every rename but the first fails."""
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "file").write_text("old")
    rename, renamed = Path.replace, []

    def replace(self: Path, target: Path) -> Path:
        renamed.append(target)
        if len(renamed) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))
        return rename(self, target)

    with pytest.raises(OSError, match="No space left"), new_folder(tmp_path / "b"):
        monkeypatch.setattr(Path, "replace", replace)
    old = set_aside(tmp_path / "b")
    assert len(renamed) == 3 and old is not None and (old / "file").read_text() == "old"


KILLED = """
import os, pathlib, signal, sys
from stepsight.dataset.base.files import new_folder
rename = pathlib.Path.replace
def replace(self, target):
    rename(self, target)
    os.kill(os.getpid(), signal.SIGKILL)
with new_folder(pathlib.Path(sys.argv[1])) as folder:
    pathlib.Path.replace = replace
"""


def test_what_a_killed_replacement_set_aside_is_found(tmp_path: Path) -> None:
    """Killed between its two renames; a folder that is there, or never was, has nothing aside."""
    (tmp_path / "b[1]").mkdir()
    (tmp_path / "b[1]" / "file").write_text("old")
    assert set_aside(tmp_path / "b[1]") is None
    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path / "b[1]"], check=False)
    assert done.returncode == -signal.SIGKILL and not (tmp_path / "b[1]").exists()
    old = set_aside(tmp_path / "b[1]")
    assert old is not None and (old / "file").read_text() == "old"
    assert set_aside(tmp_path / "b1") is None and set_aside(tmp_path / "absent" / "b") is None
    old.rename(tmp_path / "b[1]")
    assert set_aside(tmp_path / "b[1]") is None


def test_no_link_and_no_file_becomes_a_folder(tmp_path: Path) -> None:
    """Not even a link to a folder, whose target would stay behind."""
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    (tmp_path / "nowhere").symlink_to(tmp_path / "absent")
    (tmp_path / "file").write_text("old")
    for name in ("link", "nowhere", "file"):
        with (
            pytest.raises(StepsightError, match="a new folder or an existing one of the same kind"),
            new_folder(tmp_path / name),
        ):
            pass
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "old"


def test_an_output_is_checked_before_the_work(tmp_path: Path) -> None:
    """What cannot be written is known at once, and asking leaves nothing behind."""
    (tmp_path / "file").write_text("old")
    check_output_file(tmp_path / "new" / "deep" / "a.json", made=True)
    check_output_file(tmp_path / "file")
    for path in (tmp_path / "file" / "a.json", Path("/proc/a/b.json")):
        with pytest.raises(StepsightError, match=r"^an output file needs a folder that is there, got [^\n]*$"):
            check_output_file(path)
        with pytest.raises(StepsightError, match=r"^an output needs a folder that can be written to, got [^\n]*$"):
            check_output_file(path, made=True)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_only_plain_files_are_replaced(tmp_path: Path) -> None:
    """A pipe or a folder stays what it is; a link is written through."""
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "."):
        with pytest.raises(StepsightError, match="plain file"):
            write_text(tmp_path / name, "x")
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target").read_text() == "new"


def test_what_a_killed_writer_of_a_folder_left_is_removed(tmp_path: Path) -> None:
    """Only if it is not locked: another process may still write there."""
    code = "import os, pathlib, sys\nfrom stepsight.dataset.base.files import new_folder\n"
    code += "with new_folder(pathlib.Path(sys.argv[1])) as made:\n    (made / 'x').write_text('x')\n    os._exit(9)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "made")], check=False)
    (left,) = tmp_path.iterdir()
    os.utime(left, (0, 0))
    with new_folder(tmp_path / "made") as first:
        assert not left.exists() and not [*first.iterdir()]
        os.utime(first, (0, 0))
        with new_folder(tmp_path / "made"):
            assert first.exists()
        shutil.rmtree(tmp_path / "made")
    assert [path.name for path in tmp_path.iterdir()] == ["made"] and not [*(tmp_path / "made").iterdir()]


@pytest.mark.parametrize("name", ["made.json", "a[1]"])
def test_what_a_killed_writer_of_a_file_left_is_removed(name: str, tmp_path: Path) -> None:
    """Not what a living process writes, nor a file of the user's whose name begins alike."""
    code = "import os, pathlib, sys\nfrom stepsight.dataset.base.files import new_file\n"
    code += "with new_file(pathlib.Path(sys.argv[1])) as made:\n    made.write_text('half')\n    os._exit(9)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / name)], check=False)
    (left,) = tmp_path.iterdir()
    own = [tmp_path / f".{name}.original", tmp_path / f".{name}.d"]
    own[0].write_text("mine")
    own[1].mkdir()
    for path in (left, *own):
        os.utime(path, (0, 0))
    with new_file(tmp_path / name) as first:
        assert not left.exists()
        os.utime(first, (0, 0))
        write_text(tmp_path / name, "second")
        first.write_text("first")
    assert (tmp_path / name).read_text() == "first"
    assert sorted(tmp_path.iterdir()) == sorted([*own, tmp_path / name])


def test_the_old_folder_of_a_killed_writer_is_removed_once_a_new_one_stands(tmp_path: Path) -> None:
    """Until then it is the only copy."""
    aside = tmp_path / ".made.12345678.tmp"
    (aside / "made").mkdir(parents=True)
    os.utime(aside, (0, 0))
    with new_folder(tmp_path / "made"):
        assert set_aside(tmp_path / "made") == aside / "made"
    with new_folder(tmp_path / "made"):
        assert not aside.exists()


def test_a_link_to_itself_is_no_place_for_a_file(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "link")
    with pytest.raises(StepsightError, match="a new or plain file"):
        write_text(tmp_path / "link", "x")
    assert (tmp_path / "link").is_symlink()
