"""A format of one's own is read and written like those of the package."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from stepsight.cli import app
from stepsight.dataset.base.errors import JobError
from stepsight.dataset.configs.formats import read_configs, write_config
from stepsight.dataset.job.job import Job
from stepsight.registries import CONFIG_FORMATS, ConfigFile, ConfigFormat, ConfigText, Draft

KEYS = {"depth": "model.layers", "width": "model.hidden", "heads": "model.heads", "tokens": "model.seq_len"}


def fits(file: ConfigFile) -> bool:
    return file.path.suffix == ".mine"


def read(file: ConfigFile, draft: Draft) -> None:
    draft.assume("model.family", "gpt", "all models of mine are")
    draft.assume("model.vocab", 50257, "all models of mine have it")
    for line in file.path.read_text().splitlines():
        name, value = line.split()
        draft.map(KEYS[name], int(value), name)


def write(job: Job) -> ConfigText:
    return ConfigText(text=f"depth {job.model.layers}\nwidth {job.model.hidden}\n", suffix=".mine")


MINE = ConfigFormat(fits, read, write)


def test_a_format_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "run.mine"
    path.write_text("depth 4\nwidth 64\nheads 4\ntokens 128\n")
    with CONFIG_FORMATS.registered("mine", MINE):
        found = read_configs(path)
        assert (found.job.model.layers, found.sources["model.layers"], found.formats) == (4, "depth", ("mine",))
        assert write_config(found.job, "mine").text == "depth 4\nwidth 64\n"
        out = tmp_path / "job.toml"
        result = CliRunner().invoke(app, ["job", str(path), "--hardware", "h100-sxm-80gb", "--out", str(out)])
        assert result.exit_code == 0 and Job.from_file(out).model.hidden == 64


def test_a_format_with_a_mistake_is_refused() -> None:
    with pytest.raises(JobError, match="needs fits and read, or write"):
        ConfigFormat(read=read)
    with pytest.raises(JobError, match="fits of a configuration format must take 1"):
        ConfigFormat(lambda: True, read)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (ConfigFormat(fits, lambda file, draft: draft.map("model.depth", 4, "depth")), "format mine must map keys"),
        (ConfigFormat(fits, read, lambda job: "depth 4"), "mine must return a ConfigText, got 'depth 4'"),
    ],
)
def test_what_functions_of_a_format_return_is_checked(form: ConfigFormat, text: str, tmp_path: Path) -> None:
    (path := tmp_path / "run.mine").write_text("depth 4\nwidth 64\nheads 4\ntokens 128\n")
    with CONFIG_FORMATS.registered("mine", form), pytest.raises(JobError, match=text):
        write_config(read_configs(path).job, "mine")
    with pytest.raises(JobError, match="families of a configuration format must be a tuple of names, got 'gpt'"):
        ConfigFormat(fits, read, families="gpt")  # type: ignore[arg-type]
