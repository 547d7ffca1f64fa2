"""Shell scripts: variables, arrays, conditions and functions are followed, and nothing is run."""

from __future__ import annotations

import shlex
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
    assert "MISSING" in script.variables.unset
    assert script.variables.values["SIZE"] == "large"


def test_what_the_user_defines_wins() -> None:
    script = read_script("N=2\nrun --n $N --m $((N + 1))", {"N": "5"})
    assert script.commands == [["run", "--n", "5", "--m", "6"]]


def test_what_is_not_followed_is_listed() -> None:
    found = read_script("source env.sh; eval 'if'; run")
    assert found.unread == ["source env.sh: what it sets is not known", "eval if: not followed"]


def test_a_sourced_script_of_the_folder_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.sh").write_text("N=3\n")
    assert read_script(". `pwd`/config.sh\nrun --n $N", folder=tmp_path).commands == [["run", "--n", "3"]]


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("A='x y'; run $A \"$A\"", "x y 'x y'"),
        ("run ${A:-1} ${A-2} ${B:+3}", "1 2"),
        ("A=(1 2 3); run ${#A[@]} ${A[1]}", "3 2"),
        ("[ -f /etc/passwd ] && A=1; run --a $A", "--a"),
        ("A=1\nif ((A == 1)); then B=2; fi; run $B", "2"),
        ("A=0\n[[ $A == 1 || $A == 0 ]] || A=5; run $A", "0"),
        ("run a\\\nb", "ab"),
        ("run a \\\n  b", "a b"),
        # what sets variables
        ("L=4; ((L+=20)); ((L++)); let L*=2 M=3; run $L $M $((L -= 1)) $L", "50 3 49 49"),
        ("L=4; K=$((L++ * 0 + L)); run $L", "?"),
        ("L=4; unset L; run ${L:-8}", "8"),
        ("L=4; read -r L <<< 8; run $L", "?"),
        ("L=4; printf -v L %d 8; run $L", "?"),
        ("mapfile -t L < f; run ${L[0]}", "?"),
        ("while getopts n: o; do case $o in n) L=$OPTARG ;; esac; done; run $L", ""),
        ("declare -n R=L; L=4; R=8; run $L", "?"),
        ("declare -i L=2+3; L+=2; run $L", "7"),
        ("declare -A D=([a]=4); run ${D[a]}", "?"),
        ("L=(1 2); L[1]=5; L[2]=6; L+=(7); run ${L[*]} ${L[-1]}", "1 5 6 7 7"),
        (": ${L:=4} ${M=5}; run $L $M", "4 5"),
        ("L=4; eval L=8; eval 'M=$L'; run $L $M", "8 8"),
        ("L=4; trap 'L=8' EXIT; run $L", "4"),
        ("L=4; (L=8; run $L); L=$L; run $L", "4"),
        ("L=4; echo 8 | while read -r L; do :; done; run $L", "4"),
        ("L=4; L=8 run $L", "4"),
        ("L=4; L=8 true; run $L", "4"),
        ("f() { run $L $1; }; L=8 f 2", "8 2"),
        ("f() { local L=8; shift; M=$1; return; M=0; }; L=4; f 1 2; run $L $M $1", "4 2"),
        ("set -- 4 8; shift; run $1 $#", "8 1"),
        ("L=$(cat f)1; run 1$L", "?"),
        ('run `rm -rf /` "$(rm -rf /)" x', "? ? x"),
        ("A=248; run ${A:0:2} ${A%8} x", "? ? x"),
        # loops and conditions
        ("L=0; for i in 1 2 3; do L=$((L + i)); done; run $L", "6"),
        ("L=0; for i in {1..3}; do L=$((L + 1)); done; run $L", "?"),
        ("L=0; for ((i = 0; i < 3; i++)); do L=$((L + 1)); done; run $L", "?"),
        ("L=0; select x in 1 2; do L=$((L + 1)); done; run $L", "?"),
        ("L=0; while ((L < 3)); do ((L++)); done; run $L", "3"),
        ("L=0; until [ $L -ge 3 ]; do L=$((L + 1)); [ $L = 2 ] && break; done; run $L", "2"),
        ("L=0; for i in 1 2 3; do if [ $i = 2 ]; then continue; fi; L=$((L + i)); done; run $L", "4"),
        ("L=0; while true; do L=$((L + 1)); done; run $L", "?"),
        ("L=0; while read -r x; do L=8; done < f; run $L", "?"),
        ("L=4; grep -q x f && L=8; run $L", "?"),
        ("L=4; if grep -q x f; then L=8; fi; run $L", "4"),
        ("case $(hostname) in a*) L=4 ;; *) L=8 ;; esac; run $L", "8"),
    ],
)
def test_words(script: str, words: str) -> None:
    """What the shell would give to a command; ``?``: a value that the script does not tell."""
    found = read_script(script)
    run = next(each for each in reversed(found.commands) if each[0] == "run")
    assert ["?" if "(not known" in found.variables.shown(word) else word for word in run[1:]] == shlex.split(words)


@pytest.mark.parametrize(
    ("script", "count"),
    [
        ("run --a 1; exit; run --a 2", 1),
        ("f() { exit 0; }; run --a 1; f; run --a 2", 1),
        ("run --a 1; (exit); run --a 2", 2),
        ("if [ -z $1 ]; then exit; fi; run --a 1", 1),
        ("run --a 1; for i in 1 2; do run --a 2; exit; done; run --a 3", 2),
        ("run --a 1; [ $1 ] || exit 1; run --a 2", 2),
    ],
)
def test_exit_ends_a_script(script: str, count: int) -> None:
    """But for one that is part of a check which the run passes."""
    assert len(read_script(script).commands) == count


@pytest.mark.parametrize(
    ("script", "undecided"),
    [
        ("if [ -f x ]; then a; fi", "[ -f x ]"),
        ("if ((X > 3)); then a; fi", "((X > 3))"),
        ("if grep -q x f; then a; fi", "grep -q x f"),
        ("[[ -d x ]] && a", "[[ -d x ]]"),
        ("X=$(nproc); if [ $X -gt 4 ]; then a; fi", "[ $X -gt 4 ]"),
        ("case $(hostname) in a*) b ;; esac", "case (not known: $(hostname))"),
    ],
)
def test_conditions_that_are_not_known_are_listed(script: str, undecided: str) -> None:
    assert read_script(script).undecided == [undecided]


@pytest.mark.parametrize(
    "script", ["run 'open", 'run "$(x"', "if true; then run", "A=a\n" + "A=$A$A$A$A\n" * 12, "if a; then " * 60]
)
def test_a_broken_or_endless_script_is_refused(script: str) -> None:
    with pytest.raises(JobError, match="script"):
        read_script(script)


@pytest.mark.parametrize("before", ["H=($(hostnames))\nN=${#H[@]}", "H=$(cat hosts)\nN=${#H}"])
def test_the_length_of_what_is_not_known_is_not_known(before: str) -> None:
    (command,) = (
        words for words in read_script(f"{before}\ntorchrun --nnodes $N train.py").commands if "--nnodes" in words
    )
    assert not command[2].isdecimal()


def test_a_printf_without_words_is_a_command() -> None:
    assert ["run", "--n", "1"] in read_script("printf\nrun --n 1").commands


def test_words_that_a_command_prints_are_not_counted() -> None:
    script = read_script("set -- $(ls)\nif [ $# -eq 1 ]; then N=3; fi\nrun --n $N")
    assert script.commands[-1] == ["run", "--n"] and len(script.undecided) == 1


def test_a_word_that_grows_is_refused_with_its_length() -> None:
    long = "x" * 600_000
    with pytest.raises(JobError, match=r"at most 1048576 characters, got 1200000 in '\$A\$A'$"):
        read_script(f"A={long}\necho $A$A")
    with pytest.raises(JobError, match=r"at most 1048576 characters, got 1200000 in 'A'$"):
        read_script(f"A={long}\nA+={long}")
