"""Every setting of a configuration sets a key of the job, or is listed as ignored: none is dropped in silence."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from stepsight.cli import app
from stepsight.dataset.base.errors import JobError
from stepsight.dataset.configs import accelerate, huggingface, maxtext, megatron, nanotron, torchtitan
from stepsight.dataset.configs.documents import facts, flat
from stepsight.dataset.configs.drafts import ConfigFile, Draft, Reading
from stepsight.dataset.configs.formats import format_of, read_configs, write_config
from stepsight.dataset.configs.key_table import Row, read_rows, rows_of
from tests.dataset.configs import test_published as published

# Settings that the functions in a table ask for, besides the names in its rows.
_ASKED = re.compile(r'"([a-zA-Z][\w.]*_[\w.]*|[a-z]+\.[\w.]+)"')
_JOB_KEYS = ("run.", "model.", "parallel.", "batch.", "optimizer.", "cluster.", "execution.")


def names(module: Any, rows: tuple[Row, ...]) -> list[str]:
    """All settings that a format knows: the names in its rows, and in the text of its functions."""
    found = {name for row in rows for name in row.names}
    found |= {name for name in _ASKED.findall(Path(module.__file__).read_text()) if not name.startswith(_JOB_KEYS)}
    return sorted(name for name in found - {""} if not name.endswith("."))


def told(found: Mapping[str, Any]) -> str:
    return "\n".join([*found["sources"].values(), *found["reasons"].values(), *found["ignored"]])


def silent(settings: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Settings whose names, or the last parts of them, no source, reason or ignored text has."""
    text = told(found).replace("-", "_")
    last = {name: name.rpartition(".")[2].replace("-", "_") for name in settings}
    return [name for name, word in last.items() if not re.search(rf"(?<![a-zA-Z0-9]){re.escape(word)}(?!\w)", text)]


FORMATS: dict[str, tuple[str, Any]] = {
    "megatron": ("args.txt", published.DEEPSEEK),
    "megatron-arguments": ("args.yaml", published.MIXTRAL),
    "torchtitan": ("run.toml", published.TITAN),
    "nanotron": ("run.yaml", published.NANOTRON),
    "maxtext": ("run.yml", published.MAXTEXT),
    "nemo": ("run.yaml", published.NEMO),
    "megatron-bridge": ("run.yaml", published.BRIDGE),
    "megatron-yaml": ("core.yaml", "language_model: {num_layers: 2, hidden_size: 64, bias: true}\nseed: 1\n"),
    "accelerate": (
        "a.yaml",
        "distributed_type: FSDP\nfsdp_config: {fsdp_offload_params: true, x: 1}\n",
    ),
    "fsdp": ("f.json", '{"fsdp_sharding_strategy": "FULL_SHARD", "use_orig_params": true}'),
    "training-arguments": ("t.json", '{"output_dir": "x", "num_train_epochs": 3, "bf16": true, "optim": "adamw"}'),
    "huggingface": ("config.json", json.dumps(published.LLAMA)),
    "deepspeed": ("ds.json", json.dumps(published.ZERO3)),
}


@pytest.mark.parametrize("name", FORMATS)
def test_published_files(name: str, tmp_path: Path) -> None:
    """``stepsight job FILE --json`` tells what each setting of a published file became."""
    file, text = FORMATS[name]
    path = tmp_path / file
    path.write_text(text)
    result = CliRunner().invoke(app, ["job", str(path), "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert {"mapped", "assumed", "ignored"} <= set(found) and found["formats"] == [name]
    assert not set(found["mapped"]) & set(found["assumed"])
    assert not any(text in found["sources"].values() for text in found["ignored"])
    match path.suffix:
        case ".txt":
            settings: Mapping[str, Any] = dict.fromkeys(re.findall(r"--([\w-]+)", text))
        case ".toml":
            settings = flat(tomllib.loads(text))
        case ".json":
            settings = flat(json.loads(text))
        case _:
            settings = flat(yaml.safe_load(text))
    assert silent({key: value for key, value in settings.items() if not key.startswith("ENV.")}, found) == []


ROWS = {
    "megatron": (megatron, megatron.ROWS),
    "torchtitan": (torchtitan, torchtitan.ROWS),
    "nanotron": (nanotron, nanotron.ROWS),
    "maxtext": (maxtext, maxtext.ROWS),
    "huggingface": (huggingface, huggingface.ROWS),
    "deepspeed": (accelerate, rows_of("accelerate", vars(accelerate), "deepspeed")),
    "training-arguments": (accelerate, rows_of("accelerate", vars(accelerate), "training")),
    "accelerate": (accelerate, rows_of("accelerate", vars(accelerate))),
}
_WORDS = {"model_type": "llama", "parallelism.pipeline_parallel_schedule": "1F1B", "decoder_block": "llama2"}
_WORDS |= {"hybrid_layer_pattern": None, "hybrid_override_pattern": None, "hybrid_attention_ratio": None}
_WORDS |= {f"{place}.pipeline_parallel_schedule": "1F1B" for place in ("experimental", "training")}
_WORDS |= {"model.model_config.is_mamba_config": 0, "fp16": 0, "fp16.enabled": 0}


@pytest.mark.parametrize("value", [0, 1, 2])
@pytest.mark.parametrize("name", ROWS)
def test_all_settings_that_a_format_knows(name: str, value: int) -> None:
    """Each number for all settings at once: those that have no effect beside the others are listed too."""
    settings = {key: _WORDS.get(key, value) for key in (*names(*ROWS[name]), "no_setting_of_any")}
    draft, defaults = Draft(), facts()["maxtext"]["base"] if name == "maxtext" else {}
    known = {key: number for key, number in settings.items() if number is not None}
    refused = 0
    while True:
        try:
            read_rows(ROWS[name][1], Reading(draft := Draft(), known, defaults=defaults))
            break
        except JobError as error:
            refused += 1
            key = max((key for key in known if key.rpartition(".")[2] in str(error)), key=len)
            del known[key]
    assert refused < len(settings) / 3
    assert silent(known, {"sources": draft.sources, "reasons": draft.reasons, "ignored": draft.ignored}) == []


SCHEMAS = {
    name: words.split() for name, words in tomllib.loads(Path(__file__).with_name("schemas.toml").read_text()).items()
}
_CORE = SCHEMAS.pop("megatron-core")
SCHEMAS["megatron-yaml"] = [f"language_model.{name}" for name in _CORE]
SCHEMAS["nemo"] = [f"model.{name}" for name in _CORE]
SCHEMAS["megatron-bridge"] += [f"model.{name}" for name in _CORE]
_WITHOUT_JOB = ("hybrid-layer-pattern", "hybrid-override-pattern", "hybrid-attention-ratio")  # of Mamba, refused
_BASES: dict[str, dict[str, Any]] = {
    "megatron": {"num-layers": 2, **dict.fromkeys(_WITHOUT_JOB)},
    "megatron-yaml": {"language_model.num_layers": 2},
    "megatron-bridge": {"model.num_layers": 2, "train.train_iters": 1},
    "nemo": {"trainer.precision": "bf16", "model.hidden_size": 64},
    "torchtitan": flat(tomllib.loads(published.TITAN)),
    "nanotron": flat(yaml.safe_load(published.NANOTRON)),
    "maxtext": {"decoder_block": "llama2"},
    "accelerate": {"distributed_type": "FSDP", "num_processes": 8},
    "huggingface": {"model_type": "llama"},
}


def write_settings(path: Path, settings: Mapping[str, Any]) -> None:
    """A file of settings: words of a command line, or tables for names with dots."""
    tables: dict[str, Any] = {}
    for name, value in settings.items():
        *outer, inner = name.split(".")
        table = tables
        for part in outer:
            table = table.setdefault(part, {})
        table[inner] = value
    match path.suffix:
        case ".txt":
            path.write_text("".join(f"--{name} {value}\n" for name, value in settings.items()))
        case ".toml":
            sections = {f"[{name}]": value for name, value in settings.items()}
            path.write_text("".join(f"{name[1:-1]} = {json.dumps(value)}\n" for name, value in sections.items()))
        case _:
            path.write_text(json.dumps(tables))


@pytest.mark.parametrize("value", [1, 2])
@pytest.mark.parametrize("name", SCHEMAS)
def test_all_settings_of_a_framework(name: str, value: int, tmp_path: Path) -> None:
    """Every key of the framework's own schema in one file: each sets a key of the job or is listed.

    A value that the framework does not allow is refused; the key is left out then.
    """
    base = _BASES.get(name, {})
    settings = {key: value for key in SCHEMAS[name]} | base
    settings = {key: value for key, value in settings.items() if value is not None}
    tables = {".".join(key.split(".")[:depth]) for key in settings for depth in range(1, key.count(".") + 1)}
    settings = {key: value for key, value in settings.items() if key not in tables}
    path, refused = tmp_path / f"run{Path(FORMATS[name][0]).suffix}", []
    while True:
        write_settings(path, settings)
        file, draft = ConfigFile.open(path), Draft()
        named, form = format_of(file)
        assert named == name and form is not None and form.read is not None
        try:
            form.read(file, draft)
            break
        except JobError as error:
            words = [key for key in settings if re.search(rf"(?<![\w-]){key.rpartition('.')[2]}(?![\w-])", str(error))]
            refused.append(max(words, key=len))
            del settings[refused[-1]]
    assert len(refused) <= 5 + len(settings) / 20, refused
    assert silent(settings, {"sources": draft.sources, "reasons": draft.reasons, "ignored": draft.ignored}) == []


def test_settings_that_others_override(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text("#SBATCH --nodes=4 --time=1\ntorchrun --nnodes 2 train.py --num-layers 2 --bf16 --num-layers 4\n")
    ignored = read_configs(path).ignored
    assert any("#SBATCH --nodes 4: --nnodes 2 comes later" in text for text in ignored)
    assert any("--num-layers 2: --num-layers 4 comes later" in text for text in ignored)
    assert "#SBATCH --time 1" in ignored


def test_flushes_of_a_pipeline(tmp_path: Path) -> None:
    """Eight flushes of eight micro-batches take longer than one flush of 64."""
    path = tmp_path / "run.toml"
    text = '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 8\nglobal_batch_size = 128\n'
    path.write_text(f"{text}[parallelism]\npipeline_parallel_degree = 4\ndata_parallel_shard_degree = 2\n")
    found = read_configs(path)
    assert found.job.batch.flushes == 8 and "training.local_batch_size 8" in found.reasons["batch.flushes"]
    assert "local_batch_size = 8\n" in write_config(found.job, "torchtitan").text
    run = "base_emb_dim: 64\nici_pipeline_parallelism: 2\nper_device_batch_size: 4\ngradient_accumulation_steps: 3\n"
    (tmp_path / "run.yml").write_text(run)
    job = read_configs(tmp_path / "run.yml").job
    assert job.batch.flushes == 3 and "gradient_accumulation_steps: 3\n" in write_config(job, "maxtext").text


def test_a_pattern_that_is_none_is_told(tmp_path: Path) -> None:
    """Layers with experts are not guessed from words that are no list of zeros and ones."""
    path = tmp_path / "args.txt"
    path.write_text("--num-layers 4 --num-experts 8 --moe-layer-freq [3]*2+[1]*2\n")
    found = read_configs(path)
    assert "model.moe_every" not in found.mapped and any("--moe-layer-freq [3]*2" in text for text in found.ignored)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nemo", "  cpu_offloading_num_layers: ${sum:${.num_layers},-1}\n"),
        ("nemo", "  data_prefix: ???\n"),
        ("nemo", "  restore_from_path: null\n"),
        ("nemo", "  tokenizer: {sentencepiece: {}}\n"),
        ("nanotron", "profiler: null\n"),
        ("nanotron", "data_stages:\n- {name: 1}\n- {data: null}\n"),
        ("maxtext", "vllm_hf_overrides: {}\n"),
        ("megatron-arguments", "save: null\n"),
        ("megatron-bridge", "rerun: {mode: null}\n"),
    ],
)
def test_settings_without_a_value_are_listed(name: str, words: str, tmp_path: Path) -> None:
    """Empty settings, empty tables, and references to other files' values set nothing, and are ignored by name."""
    file, text = FORMATS[name]
    path = tmp_path / file
    path.write_text(text)
    without = read_configs(path)
    path.write_text(text.rstrip("\n") + "\n" + words)
    found = read_configs(path)
    assert found.job == without.job
    listed = " ".join(set(found.ignored) - set(without.ignored))
    assert all(re.search(rf"\b{key}\b", listed) for key in re.findall(r"\w+(?=:)", words))
