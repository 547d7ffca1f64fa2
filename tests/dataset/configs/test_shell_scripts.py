"""Shell scripts: variables, arrays, conditions and functions are followed, and nothing is run."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.configs.shell_scripts import read_script

SCRIPT = r"""
#!/bin/bash
#SBATCH --nodes=4 --gres=gpu:8   # of the cluster
TP=${1:-8}; PP=$((TP * 2))
LAYERS=$(( PP*6 ))
MODEL_ARGS=(
    --num-layers $LAYERS   # a comment
    "--name two words" '--literal $TP'
)
if [ "$PP" -gt 8 ] && [[ -n "${TP}" ]]; then MODEL_ARGS+=(--deep); else MODEL_ARGS+=(--shallow); fi
case $TP in 4|8) EXTRA="--even 1" ;; *) EXTRA="--odd" ;; esac
launch() { torchrun --nproc_per_node $1 train.py "${MODEL_ARGS[@]}" $EXTRA ${MISSING} 2>&1 | tee log; }
for size in small large; do SIZE=$size; done
touch /tmp/must-not-exist-$$
launch 8
bash -c "other --x 1 --y ${TP}"
cat <<EOT > ds.json
{"stage": ${TP}}
EOT
"""


def test_a_script_is_followed_to_its_commands() -> None:
    script = read_script(SCRIPT)
    command = next(words for words in script.commands if words[0] == "torchrun")
    assert command == [
        *("torchrun", "--nproc_per_node", "8", "train.py", "--num-layers", "96"),
        *("--name", "two", "words", "--literal", "$TP", "--deep", "--even", "1"),
    ]
    assert ["bash", "-c", "other", "--x", "1", "--y", "8"] in script.commands
    assert script.documents == ['{"stage": 8}']
    assert script.batch_options == ["--nodes=4", "--gres=gpu:8"]
    assert "MISSING" in script.unset
    assert script.variables["SIZE"] == "small"


def test_what_the_user_defines_wins() -> None:
    script = read_script("N=2\nrun --n $N --m $((N + 1))", {"N": "5"})
    assert script.commands == [["run", "--n", "5", "--m", "6"]]


def test_a_sourced_script_of_the_folder_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.sh").write_text("N=3\n")
    assert read_script(". `pwd`/config.sh\nrun --n $N", folder=tmp_path).commands == [["run", "--n", "3"]]


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("A='x y'; run $A \"$A\"", ["run", "x", "y", "x y"]),
        ("run ${A:-1} ${A-2} ${B:+3}", ["run", "1", "2"]),
        ("A=(1 2 3); run ${#A[@]} ${A[1]}", ["run", "3", "2"]),
        ("[ -f /etc/passwd ] && A=1; run --a $A", ["run", "--a"]),
        ("A=1\nif ((A == 1)); then B=2; fi; run $B", ["run", "2"]),
        ("A=0\n[[ $A == 1 || $A == 0 ]] || A=5; run $A", ["run", "0"]),
        ("run `rm -rf /` $(rm -rf /) x", ["run", "x"]),
        ("A=248; run ${A:0:2} ${A%8} x", ["run", "x"]),  # unknown, and told as not set
        ("run a\\\nb", ["run", "ab"]),
        ("run a \\\n  b", ["run", "a", "b"]),
    ],
)
def test_words(script: str, words: list[str]) -> None:
    assert read_script(script).commands[-1] == words


@pytest.mark.parametrize(
    "script", ["run 'open", 'run "$(x"', "if true; then run", "A=a\n" + "A=$A$A$A$A\n" * 12, "if a; then " * 60]
)
def test_a_broken_or_endless_script_is_refused(script: str) -> None:
    with pytest.raises(JobError, match="script"):
        read_script(script)
