"""Megatron-LM's settings by name, from command-line words, scripts, YAML files and NeMo's configurations."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from typing import Any

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.base.files import parse_json
from stepsight.dataset.configs.accelerate import DEEPSPEED_MARKS, read_deepspeed
from stepsight.dataset.configs.documents import facts, flat, read_source
from stepsight.dataset.configs.drafts import WHOLE, ConfigFile, Draft, Reading, Unknown
from stepsight.dataset.configs.key_table import rows_of
from stepsight.dataset.configs.megatron import read_megatron
from stepsight.dataset.configs.shell_scripts import ShellScript, read_script
from stepsight.dataset.configs.shell_words import UNKNOWN

_REFERENCE = re.compile(r"\$\{([.\w]+)\}")
_OF_MODEL = ("model.data.", "model.tokenizer.", "model.optim.", "model.nsys_profile.", "model.peft.")
_PROGRAMS = (("bert", "bert"), ("t5", "t5"), ("vision", "vit"), ("vit", "vit"))  # part of a program's name: family
# Variables by which scripts name the size of the cluster.
_VARIABLES = {
    "nodes": ("NNODES", "NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "devices_per_node": ("GPUS_PER_NODE", "NUM_GPUS_PER_NODE", "NPROC_PER_NODE", "GPU_PER_NODE"),
}
_MARKS = ("--num-layers", "--hidden-size")  # one of which a command has that trains a model
DEFAULT = "Megatron-LM's default"
_NUMBER = re.compile(r"-?\d")
_Found = tuple[str, Any, str, Any]  # name and value as the configuration writes them, and as ``megatron`` reads them


def read_words(file: ConfigFile, draft: Draft) -> None:
    """Fill a draft from a shell script, or a file of arguments."""
    read_megatron(reading_of(file, draft))


def reading_of(file: ConfigFile, draft: Draft, marks: Sequence[str] = _MARKS) -> Reading:
    """Settings of a shell script's command that has one of some options, or of a file of arguments."""
    text = read_source(file.path)
    if re.match(r"(?:[ \t]*(?:#[^\n]*)?\n)*[ \t]*--?[A-Za-z]", text):
        try:
            lines = re.sub(r"(?m)^[ \t]*#.*", "", text)  # a comment ends with its line, even after a backslash
            words = shlex.split(lines.replace("\\\n", " "), comments=True)
        except ValueError as error:
            raise JobError(f"a file of arguments must be words of a shell, got {error}") from None
        return _reading_of_words(draft, words)
    script = read_script(text, dict(file.given.variables), file.path.parent)
    for document in script.documents:  # DeepSpeed's JSON that a script writes for its command
        try:
            tables = parse_json(UNKNOWN.sub("null", document))
        except (ValueError, RecursionError):
            if any(f'"{mark}"' in document for mark in DEEPSPEED_MARKS):
                draft.ignore(f"a here-document that is not JSON: {script.variables.shown(' '.join(document.split()))}")
            continue
        if isinstance(tables, dict) and any(mark in tables for mark in DEEPSPEED_MARKS):
            read_deepspeed(ConfigFile(file.path, tables), draft)
    return _reading_of_script(script, draft, file.given.pick, marks)


def read_arguments(file: ConfigFile, draft: Draft) -> None:
    """Fill a draft from arguments by name; a false one is a flag that is not given."""
    found: list[_Found] = []
    for place, stated in flat(file.tables).items():
        flag = place.removeprefix("MODEL_ARGS.")
        name, value = (f":{place}", stated) if flag == place or stated is False else canonical(flag, stated)
        found.append((flag, stated, name, value[0] if isinstance(value, list) and len(value) == 1 else value))
    read_megatron(_reading(draft, found))


def read_yaml(file: ConfigFile, draft: Draft) -> None:
    """Fill a draft from Megatron-Core's YAML: the innermost name of each value counts, whatever its table."""
    rows = ((place, own, *(_adapters(place, own) or canonical(place.rpartition(".")[2], own)))
            for place, own in flat(file.tables).items())  # fmt: skip
    read_megatron(_reading(draft, rows))


def read_bridge(file: ConfigFile, draft: Draft) -> None:
    """Fill a draft from the tables of Megatron-Bridge's ``ConfigContainer.to_yaml``, which has Megatron-Core's names.

    The precision of ``mixed_precision`` also stands in other tables, of which it fills those that are open.
    """
    draft.framework = "nemo"
    read_yaml(
        ConfigFile(file.path, dict(sorted(file.tables.items(), key=lambda table: table[0] == "mixed_precision"))), draft
    )


def _adapters(place: str, value: Any) -> tuple[str, Any] | None:
    """A setting of LoRA in NeMo's or Megatron-Bridge's files, its targets by a job's words; None: it is another one."""
    known = facts()["lora"]
    name = known["names"].get(place)
    if name in ("lora_targets", "adapter_targets") and isinstance(value, list):
        value = [target for word in value for target in known["targets"].get(word, str(word)).split()]
    return (name, value) if name else None


def _reading(draft: Draft, found: Iterable[_Found]) -> Reading:
    """Settings of a configuration; of those that ``megatron`` reads as the same one, the last one counts."""
    values, shown, stated = dict[str, Any](), dict[str, str](), dict[str, Any]()
    for words, own, read_as, value in found:
        name = f":{words}" if value is None else read_as
        if name in values and (shown[name], stated[name]) != (words, own):
            draft.ignore(f"{shown[name]} {stated[name]}: {words} {own} comes later")
        values[name], shown[name], stated[name] = value, words, own
    return Reading(draft, values, shown, DEFAULT, stated=stated)


def canonical(name: str, value: Any) -> tuple[str, Any]:
    """A setting's name and value as ``megatron`` reads them."""
    name = name.lstrip("-").replace("-", "_")
    names = facts()["megatron"]
    if name in names["switched_off"]:
        return names["switched_off"][name], not (value in (True, "true") or isinstance(value, Unknown))
    name = names["same"].get(name, name)
    # A number of nodes that is none is a word that the user fills in.
    return (f":{name}" if name in _VARIABLES and not re.fullmatch(r"\d+", str(value)) else name), value


def _reading_of_words(draft: Draft, words: Sequence[str], launcher: Sequence[str] = ()) -> Reading:
    """Settings from the words of a command: ``--name``, ``--name=value``, ``--name value value``.

    Those of a batch system (``launcher``) count where the command has none of the name; its other options are listed.
    """
    found: list[_Found] = []
    for flag, stated in _flags(launcher):
        name, digits = canonical(flag, 0)[0], re.findall(r"\d+", str(stated))
        name = {"N": "nodes", "gres": "devices_per_node"}.get(name, name)
        value = digits[-1] if digits and name == "devices_per_node" else stated
        known = name in _VARIABLES and re.fullmatch(r"\d+", str(value))
        found.append((f"#SBATCH {flag}", stated, name if known else f"#SBATCH {flag}", value))
    found += [(flag, value, *canonical(flag, value)) for flag, value in _flags(words)]
    return _reading(draft, found)


def _flags(words: Sequence[str]) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    flag, values = "", list[str]()
    for word in (*words, "--"):
        if isinstance(word, Unknown) and (values or not flag) and word[0] != "-" and not word.endswith(".py"):
            found.append((word, ""))  # it may stand for options
        elif word.startswith("-") and not _NUMBER.match(word) and len(word) > 1:
            if flag.strip("-"):
                found.append((flag, True if not values else values[0] if len(values) == 1 else values))
            flag, equals, value = word.partition("=")
            values = [type(word)(value)] if equals else []
        elif word.endswith(".py") or flag == "-m":  # the program: what stands before it is the launcher's
            found += [(flag, True if not values else values[0])] if flag not in ("", "-m") else []
            flag, values = "", []
        elif flag:
            values.append(word)
    return found


def launches(
    script: ShellScript, pick: str = "", marks: Sequence[str] = _MARKS
) -> tuple[dict[tuple[str, ...], list[tuple[int, int]]], int]:
    """The commands of a script that train a model, each with its places in the text, and the number of the one to read.

    Args:
        script: As it was read.
        pick: The number of a command, from 1; empty: the one with the most options.
        marks: Options one of which such a command has.

    Raises:
        JobError: If there is no such command.
    """
    found: dict[tuple[str, ...], list[tuple[int, int]]] = {}
    for words, place in zip(script.commands, script.places, strict=True):
        if {*marks} & {word.partition("=")[0] for word in words}:
            found.setdefault(tuple(words), []).append(place)
    if pick and not (WHOLE(pick) and 1 <= int(pick) <= len(found)):
        raise JobError(f"pick must be the number of a launch, from 1 to {len(found)}, got {pick!r:.80}")
    counts = list(map(_options, found))
    return found, int(pick) - 1 if pick else counts.index(max(counts, default=0)) if found else 0


def _options(words: Sequence[str]) -> int:
    return sum(word.startswith("--") for word in words)


def _reading_of_script(script: ShellScript, draft: Draft, pick: str, marks: Sequence[str]) -> Reading:
    """Settings of the command of a script that trains a model.

    A script that only sets variables is read as one command of all words in them.

    Raises:
        JobError: If there is none.
    """
    found, number = launches(script, pick, marks)
    if len(found) > 1:
        draft.ignore(f"{len(found)} launches: number {number + 1} is read, --pick NUMBER reads another one")
    words = list([*found][number]) if found else max(script.commands, key=_options, default=[])
    if not {*marks} & {word.partition("=")[0] for word in words}:
        held = (value.split() if isinstance(value, str) else value for value in script.variables.values.values())
        longest = max(held, key=_options, default=[])
        if _options(longest) > _options(words):
            model = script.variables.values.get("HF_MODEL_CKPT") or script.variables.values.get("TOKENIZER_MODEL")
            words = [*longest, *(["--tokenizer-name-or-path", model] if model and isinstance(model, str) else [])]
    if not _options(words):
        raise JobError(f"a script must hold a command with options of Megatron-LM or a DLRM, as {marks[0]}, got none")
    stated = {canonical(flag, 0)[0] for flag, _ in _flags([*script.batch_options, *words])}
    for setting, names in _VARIABLES.items():  # where only the script's variables state the size of the cluster
        values = [str(script.variables.values.get(name, "")) for name in names]
        for value in [value for value in values if value.isdigit() and not stated & {setting, "gres", "N"}][:1]:
            words = [*words, f"--{setting}", value]
    for text in (*(f"condition taken as false: {condition}" for condition in script.undecided), *script.unread):
        if text not in draft.ignored:
            draft.ignore(text)
    for name in script.variables.unset:
        if any(name in word for word in ("SLURM_NNODES", "WORLD_SIZE", "NNODES", "NUM_LAYERS", "HIDDEN_SIZE")):
            draft.ignore(f"variable {name} is not set in the script")
    program = next((word for word in words if word.endswith(".py")), "")
    for family in [family for part, family in _PROGRAMS if part in program.rpartition("/")[2]][:1]:
        draft.assume("model.family", family, f"the program is {program}")
    shown = [Unknown(script.variables.shown(word)) if UNKNOWN.search(word) else word for word in words]
    return _reading_of_words(draft, shown, script.batch_options)


def read_nemo(file: ConfigFile, draft: Draft) -> None:
    """Fill a draft from a configuration."""
    everything = flat(file.tables)
    found: list[_Found] = []
    for key, value in everything.items():
        for _ in range(5):  # a value may refer to another one, as ${model.encoder_seq_length}
            named = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
            if named is not None:
                value = everything.get(key.rpartition(".")[0] + named[1] if named[1].startswith(".") else named[1])
        open_value = value in (None, "???") or "${" in (value if isinstance(value, str) else "")
        found.append((key, value, *((f":{key}", value) if open_value else _nemo_setting(key, value))))
    found += [(key, own, "group_query_attention", True) for key, own, name, _ in found if name == "num_query_groups"]
    draft.framework = "nemo"
    first, last = (rows_of("megatron", globals(), f"nemo_{place}") for place in ("first", "last"))
    read_megatron(_reading(draft, found), first, last)


def _nemo_setting(key: str, value: Any) -> tuple[str, Any]:
    """The name of a NeMo setting as ``megatron`` reads it; others keep theirs, after a colon."""
    if key == "trainer.precision":
        half = {"bf16": "bf16", "16": "fp16"}.get(str(value).split("-")[0], "")
        return (half, True) if half else (f":{key}", value)
    if adapters := _adapters(key, value):
        return adapters
    if key in facts()["nemo"]["names"]:
        return facts()["nemo"]["names"][key], value
    if key.startswith(("model.encoder.", "model.decoder.")):  # of T5, whose other sizes are those of the encoder
        side, _, name = key.removeprefix("model.").partition(".")
        name = f"{side}_num_layers" if name == "num_layers" else name if side == "encoder" else f":{key}"
        return name, value
    if key.startswith("model.tokenizer."):
        return f"tokenizer_{key.rpartition('.')[2]}", value
    if key.startswith("model.") and not key.startswith(_OF_MODEL):
        name, value = canonical(key.removeprefix("model."), value)
        if name == "fp8":
            return (name, "hybrid") if value is True else (f":{key}", value)
        return name, value
    return f":{key}", value


def _read_nemo_family(reading: Reading) -> None:
    name = f"{reading.word(':name')} {reading.word('run_name')}".lower()
    for part in ("bert", "t5"):
        if part in name or (part == "t5" and "decoder_num_layers" in reading):
            reading.draft.map("model.family", part, f"name {name}")
