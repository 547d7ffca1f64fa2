"""What the page opens: only what lies in its folder."""

from pathlib import Path

import pytest

from stepsight.dataset.base.bounded import MOST_TABLES, read_file, reading_only
from stepsight.dataset.base.errors import StepsightError
from stepsight.dataset.job.job import Job
from stepsight.experiments.page.server import Workspace, job_link, linked_job

EXAMPLES = Path(__file__).parents[3] / "examples"
FOLDER = Workspace(EXAMPLES)


def test_a_link_holds_a_whole_job() -> None:
    for path in sorted(EXAMPLES.glob("*.toml")):
        job = Job.from_file(path)
        assert linked_job(FOLDER, job_link(job)) == job, path


@pytest.mark.parametrize("text", ["", "x", "a" * 40, job_link(Job.from_file(EXAMPLES / "gpt3-175b-1024.toml"))[:-9]])
def test_a_broken_link_is_refused(text: str) -> None:
    with pytest.raises(StepsightError, match="whole job"):
        linked_job(FOLDER, text)


def test_files_of_the_folder_are_offered_and_opened() -> None:
    names = FOLDER.names()
    assert "gpt3-175b-1024.toml" in names and "collection" in names
    assert isinstance(FOLDER.open("gpt3-175b-1024.toml")[0], Job)


@pytest.mark.parametrize("name", ["../README.md", "/etc/passwd", "link.toml"])
def test_a_file_outside_of_the_folder_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "link.toml").symlink_to(EXAMPLES / "gpt3-175b-1024.toml")
    with pytest.raises(StepsightError, match="must be in"):
        Workspace(tmp_path).open(name)


@pytest.mark.parametrize("name", ["", "a\0b", "x" * 300 + ".toml", "x/" * 3000, "\ud800.toml"], ids=ascii)
def test_a_name_that_no_file_can_have_is_the_users_mistake(name: str) -> None:
    """Whether it is typed, or dropped."""
    with pytest.raises(StepsightError, match="a path must have 1 to"):
        FOLDER.open(name)
    if "/" not in name and name:
        with pytest.raises(StepsightError, match="a path must have 1 to"):
            FOLDER.uploaded({name: b""})


def test_one_limit_bounds_every_dropped_file() -> None:
    for name in ("job.toml", "config.json", "run.sh"):
        with pytest.raises(StepsightError, match=r"at most 1\.05 MB"):
            FOLDER.uploaded({name: b" " * (MOST_TABLES + 1)})


def test_errors_name_files_as_the_user_does(tmp_path: Path) -> None:
    (tmp_path / "broken.toml").write_text("[model")
    (tmp_path / "large.toml").write_text("#" * (MOST_TABLES + 1))
    for name, why in (("broken.toml", "TOML"), ("large.toml", "at most"), ("absent.toml", "No such file")):
        with pytest.raises(StepsightError, match=why) as refused:
            Workspace(tmp_path).open(name)
        assert str(tmp_path) not in str(refused.value)


def test_readers_read_only_what_they_are_allowed_to(tmp_path: Path) -> None:
    """Also files that other files name."""
    (tmp_path / "own").write_text("own")
    with reading_only([tmp_path]):
        assert read_file(tmp_path / "own") == b"own"
        with pytest.raises(OSError, match="the folder that files are read from"):
            read_file(EXAMPLES / "runs.csv")
    assert read_file(EXAMPLES / "runs.csv")


def test_uploaded_files_are_one_run_and_keep_their_names() -> None:
    config = b'{"model_type": "llama", "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}'
    with pytest.raises(StepsightError, match=r"vocab"):
        FOLDER.uploaded({"config.json": config})
    with pytest.raises(StepsightError) as refused:
        FOLDER.uploaded({"../../broken.toml": b"[model"})
    assert str(refused.value).startswith("job file broken.toml is not valid")
