"""Files that are no configuration, or that would cost too much to read, are refused in one clear line."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.configs.drafts import Given
from stepsight.dataset.configs.formats import read_configs

BOMB = "a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9)
)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.yaml", BOMB, "at most 100000 values"),
        ("a.yaml", "!!python/object/apply:os.system ['true']", "not valid YAML"),
        ("a.yaml", "- 1\n- 2\n", "must hold tables"),
        ("a.yaml", "a: " + "[" * 5000, "a.yaml"),
        ("a.yaml", "distributed_type: &x\n  y: *x\n", "deep"),
        ("a.json", '{"model_type": "whisper"}', "model_type must be one of"),
        ("a.json", '{"nothing": 1}', "must be a configuration of"),
        ("a.toml", '[model]\nname = "llama3"\nflavor = "9B"\n', r"model\.flavor must be one of"),
        ("a.toml", '[model]\nname = "llama9"\nflavor = "8B"\n', r"model\.name must be one of"),
        ("a.txt", "--num-layers twelve --hidden-size 64", "--num-layers must be a whole number"),
        ("a.txt", "--num-layers '12", "words of a shell"),
        ("a.sh", "echo hello", "options of Megatron-LM"),
        ("a.sh", "train --hybrid-layer-pattern MM*-", "state spaces"),
        ("a.py", "def f() -> Trainer.Config: pass\ndef g() -> Trainer.Config: pass", "pick one of f, g"),
        ("a.py", "def f(", "not valid Python"),
        ("a.py", "x = 1", "must hold functions that return a Trainer.Config, got none"),
        ("a.json", '{"zero_optimization": 3, "train_batch_size": 8}', "zero_optimization must be a table"),
        (
            "a.toml",
            '[model]\nname = "llama3"\nflavor = "8B"\n[activation_checkpoint]\nselective_ac_option = "ops"\n',
            "selective_ac_option must be op",
        ),
        ("a.json", '{"zero_optimization": true}', "zero_optimization must be a table"),
        ("a.json", '{"train_batch_size": 8, "fp16": {"enabled": true}, "bf16": {"enabled": true}}', "got both"),
        ("a.json", '{"model_type": "llama", "num_hidden_layers": true}', "num_hidden_layers must be a whole number"),
        ("a.yml", "model_name: llama9-1b\nper_device_batch_size: 1\n", "llama9-1b.yml must lie beside"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: str, words: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(JobError, match=words) as caught:
        _ = read_configs([tmp_path / name]).job
    assert len(str(caught.value)) < 2500 and "\n" not in str(caught.value)


TITAN = '[model]\nname = "llama3"\nflavor = "8B"\n'
NANOTRON = "model: {model_config: {is_llama_config: true}}\ntokens: {sequence_length: 8}\n"
LLAMA = '{"model_type": "llama", "hidden_size": 64, '
WORDS = "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 8 "


@pytest.mark.parametrize(
    ("name", "content", "key"),
    [
        ("a.toml", f"{TITAN}[training]\nseq_len = 0\n", "training.seq_len"),
        ("a.toml", f"{TITAN}[training]\nlocal_batch_size = 0\n", "training.local_batch_size"),
        ("a.toml", f"{TITAN}[training]\nglobal_batch_size = 0\n", "training.global_batch_size"),
        ("a.toml", f"{TITAN}[parallelism]\ndata_parallel_shard_degree = 0\n", "data_parallel_shard_degree"),
        ("a.toml", f"{TITAN}[parallelism]\ndata_parallel_replicate_degree = 0\n", "data_parallel_replicate_degree"),
        ("a.json", LLAMA + '"max_position_embeddings": 0}', "max_position_embeddings"),
        ("a.json", LLAMA + '"num_key_value_heads": 0}', "num_key_value_heads"),
        ("a.json", LLAMA + '"intermediate_size": 0}', "intermediate_size"),
        ("a.json", '{"train_batch_size": 8, "gradient_accumulation_steps": 0}', "gradient_accumulation_steps"),
        ("a.yaml", "distributed_type: FSDP\nnum_processes: 8\nnum_machines: 0\n", "num_machines"),
        ("a.yaml", f"{NANOTRON}parallelism: {{dp: 0}}\n", "parallelism.dp"),
        ("a.yml", "base_emb_dim: 64\nmax_target_length: 0\n", "max_target_length"),
        ("a.yml", "base_emb_dim: 64\nper_device_batch_size: 0\n", "per_device_batch_size"),
        ("a.txt", f"{WORDS}--ffn-hidden-size 0", "--ffn-hidden-size"),
        ("a.txt", f"{WORDS}--vocab-size 0", "--vocab-size"),
        ("a.txt", f"{WORDS}--nnodes 0", "--nnodes"),
    ],
)
def test_a_stated_0_becomes_no_default(tmp_path: Path, name: str, content: str, key: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(JobError, match=f"{key} must be a positive number.*, got 0$"):
        read_configs([tmp_path / name])


def test_blocks_of_no_layers_recompute_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text(f"{WORDS}--recompute-granularity full --recompute-method block --recompute-num-layers 0")
    assert read_configs([path]).job.parallel.recompute == "none"


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "no.yaml", tmp_path / "no.sh", tmp_path):
        with pytest.raises(JobError, match="cannot read configuration"):
            read_configs([path])


def test_a_file_that_is_too_long(tmp_path: Path) -> None:
    path = tmp_path / "long.sh"
    path.write_text("#" * (4 * 2**20 + 1))
    with pytest.raises(JobError, match="at most 4194304 characters"):
        read_configs([path])


def test_given_values_are_keys_of_a_job(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 8")
    assert read_configs([path], Given(values={"model.vocab": 100})).job.model.vocab == 128
    with pytest.raises(JobError, match=r"as model\.seq_len"):
        read_configs([path], Given(values={"model.vocabulary": 100}))


def test_blank_lines_before_a_script_take_no_time(tmp_path: Path) -> None:
    """The pattern that tells arguments from a script once took time in the power of their number."""
    (tmp_path / "run.sh").write_text("\n" * 300 + "# a comment\n" * 300 + "echo\n")
    with pytest.raises(JobError, match="options of Megatron-LM"):
        read_configs([tmp_path / "run.sh"])


@pytest.mark.parametrize("number", ["9" * 5000, "\u00b2"], ids=["long", "superscript"])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.txt", "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --num-experts 4 --moe-layer-freq {}"),
        ("a.txt", "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --step-batch-size-schedule 0:{}"),
        ("a.txt", "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --moe-layer-freq [1]*{} --num-experts 4"),
        ("a.sh", "dlrm_main.py --embedding_dim {} --num_embeddings_per_feature 9"),
        ("a.sh", "dlrm_main.py --embedding_dim 4 --num_embeddings_per_feature 9 --batch_size {} --dcn_num_layers {}"),
        ("a.toml", '# preset for {} H100 GPUs\n[model]\nflavor = "8B"\n[training]\nseq_len = 8\n'),
        ("a.toml", '[model]\nflavor = "8B"\n[activation_checkpoint]\nmode = "selective"\nselective_ac_option = "{}"\n'),
    ],
)
def test_digits_that_are_no_number(name: str, text: str, number: str, tmp_path: Path) -> None:
    """Each is refused or listed in short words: digits that Python does not take as a number, or too many of them."""
    (tmp_path / name).write_text(text.replace("{}", number))
    try:
        read_configs(tmp_path / name)
    except JobError as error:
        assert len(str(error)) < 1000


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.yml", f"base_emb_dim: 64\nbase_config: {'a' * 5000}.yml\n"),
        ("training.json", '{"output_dir": "a", "num_train_epochs": 1, "deepspeed": "' + "a" * 5000 + '.json"}'),
        ("launch.sh", f"source {'a' * 5000}.sh\npretrain --num-layers 2 --hidden-size 64\n"),
    ],
)
def test_a_name_that_is_too_long_is_no_file(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert read_configs([tmp_path / name]).ignored
