"""The command line: answers on stdout, mistakes in one line with exit code 2, nothing written."""

import json
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from stepsight.cli import VERBS, app, main
from stepsight.dataset.tables.measurements import Measurements
from stepsight.experiments.demo.demo import sized_job
from stepsight.experiments.tasks.settings import CollectSettings
from tests.dataset.run_folders import write_events, write_run

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "gpt3-175b-1024.toml"
WITHOUT_FILES = ("page", "plan-profile", "demo", "doctor", "experiment")  # verbs whose examples need none
BOXED = ROOT / "examples" / "box-gpt-pp4.toml"


def run(*arguments: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stepsight", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False)


def test_predict_json_and_timeline(tmp_path: Path) -> None:
    """``predict --json`` prints one object; the timeline has events of every stage."""
    timeline = tmp_path / "timeline.json"
    done = run("predict", EXAMPLE, "--json", "--timeline", timeline, "--level", "segment")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["low_s"] <= answer["iteration_time_s"] <= answer["high_s"]
    assert sum(answer["breakdown"].values()) == pytest.approx(answer["iteration_time_s"])
    assert "shipped predictor a100-sxm for" in answer["source"]
    assert (answer["hardware"], answer["framework"]) == ("a100-sxm-80gb", "")
    named = json.loads(run("predict", EXAMPLE, "--json", "--framework", "megatron-core").stdout)
    assert named["framework"] == "megatron-core"
    events = json.loads(timeline.read_text())["traceEvents"]
    assert len({event["pid"] for event in events if event["ph"] == "X"}) == 16


def test_other_hardware_has_its_usual_fabric_and_says_so() -> None:
    words = ("predict", ROOT / "examples" / "deepseek-v3-2048.toml", "--hardware", "b200-sxm-180gb")
    done = run(*words)
    assert (
        "fabric dgx-b200" in done.stdout and "the usual fabric of b200-sxm-180gb replaces the job's own" in done.stderr
    )
    done = run(*words, "--set", "cluster.fabric=dgx-h100")
    assert "fabric dgx-h100" in done.stdout and "replaces" not in done.stderr


def test_predict_writes_over_nothing_but_its_own(tmp_path: Path) -> None:
    """Neither the job that it reads, nor what else is there; a timeline of before it replaces."""
    job, other, timeline = tmp_path / "job.toml", tmp_path / "manifest.json", tmp_path / "timeline.json"
    job.write_text(EXAMPLE.read_text())
    other.write_text("{}")
    for option, wanted, rule in (
        ("--timeline", job, "--timeline ends in .json"),
        ("--timeline", other, "refuses to overwrite a file of another type"),
        ("--schedule", job, "--schedule ends in .csv"),
    ):
        refused = run("predict", job, option, wanted)
        assert refused.returncode == 2 and rule in refused.stderr
    assert job.read_text() == EXAMPLE.read_text() and other.read_text() == "{}"
    for _ in range(2):
        assert run("predict", job, "--timeline", timeline).returncode == 0


def test_search_and_show(tmp_path: Path) -> None:
    """``search`` writes a plot and its best strategy fits; ``show`` describes a job file."""
    plot = tmp_path / "search.png"
    done = run("search", EXAMPLE, "--trials", 30, "--sampler", "random", "--plot", plot, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["best"]["fits"] and plot.stat().st_size > 1000
    table, strategies = tmp_path / "strategies.csv", ("--space", tmp_path / "space.toml", "--robust", "interval")
    (tmp_path / "space.toml").write_text('schedules = ["1f1b"]\nmicro_batches = [1]\n')
    told = json.loads(run("search", EXAMPLE, *strategies, "--workers", 2, "--csv", table, "--json").stdout)
    keys = {"best", "evaluated", "legal", "own", "top", "gap_percent", "front", "rivals"}
    assert keys <= set(told) and told["gap_percent"] == 0 and told["front"][0]["fits"]
    assert len(table.read_text().splitlines()) == told["evaluated"] + (told["own"]["fits"] and 1) + 1
    shown = run("show", EXAMPLE)
    assert "gpt3-175b" in shown.stdout and shown.returncode == 0


def test_without_a_checkout_an_experiment_says_where_it_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The wheel has no studies: one line says what to do."""
    studies = "stepsight.experiments.studies"

    class Absent:
        """Finds no studies, wherever this package is installed."""

        @staticmethod
        def find_spec(name: str, *_: object) -> None:
            if name == studies:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    for loaded in [name for name in sys.modules if name.startswith(studies)]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setattr(sys, "meta_path", [Absent, *sys.meta_path])
    for name in ("memory", "x"):
        monkeypatch.setattr(sys, "argv", ["stepsight", "experiment", name, "--help"])
        with pytest.raises(SystemExit) as ended:
            main()
        told = capsys.readouterr().err
        assert (
            ended.value.code == 2
            and told.startswith("error: experiments run from a checkout of stepsight")
            and told.count("\n") == 1
        )


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (["capture", "--world-size", "1", "--out", "cap", "s.py"], "environment: install what provides it here"),
        (["predict", str(EXAMPLE), "--latency", "abacus_xyz:make"], "in the current folder or in an installed package"),
    ],
)
def test_a_module_that_is_not_there_is_no_advice_to_install_its_name(
    asked: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A package of that name may be anybody's."""
    (tmp_path / "s.py").write_text("import abacus_xyz")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["stepsight", *asked])
    with pytest.raises(SystemExit):
        main()
    error = capsys.readouterr().err
    assert error.endswith(f"{told}\n") and "abacus_xyz" in error and "pip install" not in error


@pytest.mark.parametrize(("rejected", "code"), [([], 0), (["a"], 2)])
def test_a_rejected_run_is_an_exit_code(
    rejected: list[str], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``collect --box`` fails where a run was too busy; in a box one step warms up and none is profiled."""
    asked: dict[str, Any] = {}

    def collect_jobs(_: object, __: object, settings: CollectSettings, **options: Any) -> dict[str, Any]:
        asked.update(options, counts=settings.counts(options["box"] is not None))
        return {"rejected": rejected, "text": "done"}

    monkeypatch.setattr("stepsight.experiments.tasks.collecting.collect_jobs", collect_jobs)
    monkeypatch.setattr(
        sys, "argv", ["stepsight", "collect", str(BOXED), "--box", "4x1@200mbit", "--out", "c", "--json"]
    )
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == code
    assert json.loads(capsys.readouterr().out)["rejected"] == rejected
    assert (asked["counts"]["warmup"], asked["counts"]["profile_steps"], asked["box"].num_ranks) == (1, 0, 4)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("predict", "bad.toml"), "tp * pp * dp must equal the number of devices"),
        (("predict", "absent.toml"), "cannot read job file"),
        (("predict", "empty.json"), "is not valid JSON"),
        (("predict", EXAMPLE, "--predictor", "."), "predictor"),
        (("predict", EXAMPLE, "--level", "atom"), "--level must be segment or op"),
        (("predict", EXAMPLE, "--level", "op"), "--level sets the detail of a timeline"),
        (("search", "bad.toml"), "must equal"),
        (("search", EXAMPLE, "--sampler", "magic"), "sampler"),
        (("search", EXAMPLE, "--study", "s"), "state storage with the study"),
        (("search", EXAMPLE, "--storage", "s9.db", "--study", "s"), "write sqlite:///s9.db"),
        (("search", EXAMPLE, "--nodes", "1;2"), "--nodes must be whole numbers"),
        (("search", EXAMPLE, "--nodes", ""), "--nodes must be whole numbers, separated by commas, got ''"),
        (("search", EXAMPLE, "--robust", "best"), "robust must be one of interval, regret"),
        (("search", EXAMPLE, "--out", EXAMPLE), "--out must not be a file that is read"),
        (("search", EXAMPLE, "--space", "huge"), "a space must be usual, wide"),
        (("search", EXAMPLE, "--objective", "cost"), "price of a100-sxm-80gb is not known"),
        (("search", EXAMPLE, "--plot", "notes.txt/a.png"), "needs a folder that is there"),
        (("search", EXAMPLE, "--plot", "folder.png"), "new or plain file"),
        (("predict", EXAMPLE, "--timeline", "/proc/timeline.json"), "needs a folder that can be written to"),
        (("predict", "newline.json"), r"unknown table [a\nb]"),
        (("predict", EXAMPLE, "--bogus"), "No such option"),
        (("predict", ""), "a path must have 1 to"),
        (("collect", EXAMPLE, "--out", ""), "a path must have 1 to"),
        (("collect", EXAMPLE, "--out", "notes.txt"), "needs a folder that can be written to"),
        (("train", "folder.png", "--out", "notes.txt"), "written to a new or empty folder"),
        (("train", "folder.png", "--out", "notes.txt/p"), "needs a folder that can be written to"),
        (("show", "nowhere"), "existing file"),
        (("show", "."), "no collection"),
        (("train", "nowhere", "--out", "p"), "nowhere"),
        (("collect", "bad.toml", "--out", "c"), "must equal"),
        (("collect", EXAMPLE, "--out", "c"), "got"),
        (("collect", "plan.json", "--rounds", 5, "--out", "c"), "--rounds is for job files"),
        (("collect", BOXED, "--box", "4x1", "--out", "c"), "as in 4x1@200mbit"),
        (("collect", BOXED, "--box", "8x1@200mbit", "--out", "c"), "must equal the number of devices"),
        (("collect", BOXED, "--box", "absent.toml", "--out", "c"), "cannot read box"),
        (("collect", EXAMPLE, "--box", "4x1@200mbit", "--out", "c"), "must equal"),
    ],
)
def test_mistakes(
    arguments: tuple[object, ...],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A mistake is one line on stderr, exit code 2, no traceback, nothing written."""
    (tmp_path / "bad.toml").write_text(EXAMPLE.read_text().replace("tp = 8", "tp = 7"))
    (tmp_path / "empty.json").write_text("")
    (tmp_path / "plan.json").write_text("{}")
    (tmp_path / "newline.json").write_text('{"a\\nb": {}}')
    (tmp_path / "notes.txt").write_text("precious")
    (tmp_path / "folder.png").mkdir()
    before = sorted(tmp_path.iterdir())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["stepsight", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert ended.value.code == 2 and text in err and err.count("error: ") == 1
    assert err.strip().splitlines()[-1].startswith("error: ")
    assert sorted(tmp_path.iterdir()) == before and out == ""


def test_an_interrupted_collection_says_how_to_go_on(tmp_path: Path) -> None:
    """Ctrl-C of ``collect`` (as SIGTERM) ends the workers; one line says what to do."""
    job = tmp_path / "job.json"
    job.write_text(sized_job(("gpt", 1, 32, 2, 2, 64, 64, 16), {}).to_json())
    command = [sys.executable, "-m", "stepsight", "collect", job, "--out", tmp_path / "c", "--steps", "100000"]
    with subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 120
        while not (tmp_path / "c" / "fingerprint.json").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        process.terminate()
        last = process.communicate(timeout=60)[1].splitlines()[-1]
    assert process.returncode == 130
    assert last == "interrupted: completed runs are kept; run the same command again to continue"


def test_measurements_as_a_table(tmp_path: Path) -> None:
    """``show --table`` writes what a collection holds; of anything else it is a mistake."""
    write_run(tmp_path / "c", 2)
    write_events(tmp_path / "c")
    done = run("show", tmp_path / "c", "--table", tmp_path / "ops.parquet", "--json")
    assert json.loads(done.stdout)["measurements"] == len(Measurements.from_parquet(tmp_path / "ops.parquet")) == 18
    for path, table, says in ((EXAMPLE, "ops.parquet", "must be a folder"), ("c", "ops.csv", "ends in .parquet")):
        done = run("show", path, "--table", table, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, "") and says in done.stderr


def test_a_search_on_one_number_of_nodes(tmp_path: Path) -> None:
    """It is of the job there; a strategy that does not divide the devices is not shown as another one."""
    (tmp_path / "job.toml").write_text(EXAMPLE.read_text())
    words = ("search", tmp_path / "job.toml", "--hardware", "h100-sxm-80gb", "--trials", "3", "--json")
    told = json.loads(run(*words, "--nodes", "3").stdout)
    assert told["plans"] == [] and told["own"] is None and {row["devices"] for row in told["top"]} == {24}
    assert "the job's own strategy does not run on 3 nodes: " in told["notes"][0] and "tp" in told["notes"][0]
    text = run(*words[:-1], "--nodes", "3").stdout
    assert "the job itself" not in text and told["notes"][0] in text and all(each in text for each in told["warnings"])
    own = json.loads(run(*words, "--nodes", "32").stdout)["own"]
    assert own["devices"] == 256 and own["hardware"] == "h100-sxm-80gb"
    assert [row["nodes"] for row in json.loads(run(*words, "--nodes", "32,64").stdout)["plans"]]


def test_version() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"stepsight {version('stepsight')}\n", "")


def test_every_verb_teaches() -> None:
    """Help lists the verbs by task; each verb has a help text and ``--json``, but studies have their own."""
    shown = CliRunner().invoke(app, ["--help"]).stdout
    assert all(f"{task}:\n" in shown for task in VERBS)
    group: Any = get_command(app)
    assert len(group.commands) == 1 + sum(map(len, VERBS.values()))
    for name, verb in group.commands.items():
        assert verb.help and f"  {name} " in shown
        examples = [line.split() for line in verb.help.splitlines() if line.startswith(f"    stepsight {name}")]
        files = [word for words in examples for word in words if word.startswith("examples/")]
        assert examples and (files or name in WITHOUT_FILES), f"{name} needs an example on files of the checkout"
        assert all(list(ROOT.glob(file)) for file in files), files
        assert name == "experiment" or any("--json" in parameter.opts for parameter in verb.params)


@pytest.mark.parametrize("name", ["calibrate", "emulate"])
def test_the_first_example_of_help_works_in_a_checkout(name: str, tmp_path: Path) -> None:
    """Without a GPU, and whatever else its help tells."""
    group: Any = get_command(app)
    first = next(line for line in group.commands[name].help.splitlines() if line.startswith(f"    stepsight {name}"))
    words = [str(ROOT / word) if word.startswith("examples/") else word for word in first.split()[1:]]
    done = run(*words, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout, done.stderr


def test_another_release_of_the_software_is_asked_about(capsys: pytest.CaptureFixture[str]) -> None:
    """By its date or its container; an older one is slower."""
    asked = ["predict", str(EXAMPLE), "-p", "roofline", "--framework", "nemo"]
    app([*asked, "--json", "--date", "2024-11"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["software"]["change"]["log_factor"] > 0
    app([*asked, "--container", "nvcr.io/nvidia/nemo:26.06"], standalone_mode=False)
    assert "profile nemo-2026-06 instead of nemo" in capsys.readouterr().out


def test_search_takes_the_files_of_one_run(tmp_path: Path) -> None:
    """A DeepSpeed JSON beside the model's config.json, as ``predict`` takes them; two jobs are refused."""
    zero, model = tmp_path / "ds.json", tmp_path / "config.json"
    zero.write_text(json.dumps({"train_batch_size": 16, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}))
    sizes = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 32000}
    more = {"intermediate_size": 1408, "max_position_embeddings": 512, "model_type": "llama"}
    model.write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **sizes, **more}))
    options = ("--hardware", "h100-sxm-80gb", "--nodes", 1, "--trials", 5, "--json")
    assert json.loads(run("search", zero, model, *options).stdout)["best"]["fits"]
    refused = run("search", EXAMPLE, EXAMPLE)
    assert refused.returncode == 2 and "one job is asked about, got 2" in refused.stderr
