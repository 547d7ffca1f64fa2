"""Tables of a framework's settings and the keys of a job that they state: one table reads and writes a format."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from fnmatch import fnmatchcase
from functools import partial
from importlib import resources
from math import isclose
from typing import Any

from stepsight.dataset.base.errors import JobError, shorten
from stepsight.dataset.configs.documents import facts
from stepsight.dataset.configs.drafts import WHOLE, Reading
from stepsight.dataset.job.job import Job
from stepsight.dataset.job.specs import MODELS, SECTIONS

DEFAULTS = {
    f"{section}.{item.name}": None if item.default is MISSING else item.default
    for section, spec in SECTIONS.items()
    for item in fields(spec)
}


@dataclass(frozen=True, kw_only=True)
class ConfigText:
    """A configuration that was written from a job."""

    text: str  # of the file
    suffix: str  # suffix for the file's name
    ignored: tuple[str, ...] = ()  # keys that the framework cannot express, as key = value
    notes: tuple[str, ...] = ()  # what the user must do besides


class JobView:
    """Values of a job by key (``model.layers``), and the settings of a configuration that a writer makes of them.

    Keys whose values the writer takes count as expressed; the others are listed.  Names of nested tables have dots;
    ``kind`` is that of the configuration, for the ``needs`` of rows.
    """

    def __init__(self, job: Job, kind: str = "") -> None:
        self.job, self.kind, self.settings = job, kind, dict[str, Any]()
        self._read, self._refused = set[str](), set[str]()

    def __getitem__(self, key: str) -> Any:
        self._read.add(key)
        return self._vocabulary()[0] if key == "model.vocab" else self.value(key)

    def value(self, key: str, _: str = "") -> Any:
        """The value of a key, or of a property (``job.num_micro_batches``), which does not count as expressed."""
        section, _, name = key.partition(".")
        return getattr(self.job if section == "job" else getattr(self.job, section), name) if name else self.kind

    def _vocabulary(self) -> tuple[int, int]:
        """The vocabulary, without padding if the job's tables or the model's name tell it, and the multiple that it is
        padded to; 1: nothing is to be said about padding.
        """
        model, (own, padded) = self.job.model, self.job.own_vocab
        size = own if own < padded == model.vocab else model.vocab
        try:
            profile = self.job.profile
        except JobError:  # a file that is gone
            profile = None
        multiple = 1 if profile is None else profile.vocab_multiple * self.job.parallel.tp
        if model.family == "vit" or model.vocab % multiple:
            return size, 1
        known = MODELS.get(model.name, {}).get("vocab", 0)
        if -(-known // multiple) * multiple == model.vocab:
            return known, multiple
        return size, multiple if size == model.vocab else 1

    def _notes(self) -> tuple[str, ...]:
        """Notes about a written vocabulary that the job's framework pads."""
        (size, multiple), job = self._vocabulary(), self.job
        pads, name = f"to a multiple of {multiple}, as {job.framework} does with tp {job.parallel.tp}", job.model.name
        if "model.vocab" not in self._read or multiple == 1:
            return ()
        if size != job.model.vocab:
            return (f"the vocabulary of {size} is that of {name}; the job's {job.model.vocab} is padded {pads}",)
        known = MODELS.get(name, {}).get("vocab") == size
        own = f"the vocabulary of {size} is padded {pads}: write the tokenizer's own size if that is smaller"
        return () if known else (own,)

    def expressed(self, *keys: str) -> None:
        """Mark keys as expressed because other keys imply them."""
        self._read.update(keys)

    def refuse(self, key: str, lost: object = True) -> None:
        """Mark a key as not expressed if it is lost, even if it was read or has its default."""
        self._refused |= {key} if lost else set()

    def put(self, prefix: str = "", /, **settings: Any) -> None:
        """Write settings, with the same prefix before their names."""
        self.settings.update({prefix + name: value for name, value in settings.items()})

    def write(self, rows: Iterable[Row]) -> None:
        """Write settings by a table, in its order; a value that the table does not have is listed as not expressed."""
        for row in rows:
            if row.only == "read" or not _counts(row.needs, self.value):
                continue  # a value without effect is listed as not expressed
            if row.write is not None:
                row.write(self)
            elif row.lost:
                self.refuse(row.key)
            elif row.constant is not None:
                self.settings[row.names[0]] = row.constant
            elif not row.names and row.only == "write":
                self.expressed(*row.key.split())
            elif row.names and not (row.omit and self[row.key] == DEFAULTS[row.key]):
                self.settings[row.names[0]] = _written(row, self)

    def tables(self) -> dict[str, Any]:
        """The settings as nested tables."""
        found: dict[str, Any] = {}
        for name, value in self.settings.items():
            *outer, inner = name.split(".")
            table = found
            for part in outer:
                table = table.setdefault(part, {})
            table[inner] = value
        return found

    def stage_layers(self) -> list[int]:
        """Layers of each part of the model: as stated, or even; the first parts take the remainder."""
        parallel, layers = self.job.parallel, self.job.model.total_layers
        return list(self["parallel.stage_layers"]) or even_stages(parallel.pp * parallel.virtual_stages, layers)

    def image(self) -> tuple[int, int]:
        """Sides of a patch and of a square image of three channels; what gives no square is not expressed."""
        patch, image = round((self["model.patch_dim"] / 3) ** 0.5), round(max(0, self["model.seq_len"] - 1) ** 0.5)
        self.refuse("model.patch_dim", 3 * patch**2 != self.job.model.patch_dim)
        self.refuse("model.seq_len", image**2 + 1 != self.job.model.seq_len)
        return patch, patch * image

    def text(self, text: str, suffix: str, *notes: str, sections: tuple[str, ...] = ()) -> ConfigText:
        """The written text, with the keys of some ``sections`` (of all) that it does not express.

        Keys that the writer did not ask for are left out if they have their default.
        """
        ignored = []
        for key, default in DEFAULTS.items():
            value = self.value(key)
            dropped = key not in self._read and key not in facts()["not_asked"]["keys"] and value != default
            if (dropped or key in self._refused) and key.startswith(sections or ""):
                ignored.append(f"{key} = {shorten(value, 80) or '(none)'}")
        return ConfigText(text=text, suffix=suffix, ignored=tuple(ignored), notes=(*notes, *self._notes()))


def even_stages(stages: int, layers: int, first: int = 0, last: int = 0) -> list[int]:
    """Layers of each stage where embedding and output count as some layers each."""
    even, rest = divmod(layers + first + last, max(1, stages))
    counts = [even + (stage < rest) for stage in range(stages)]
    counts[0] -= first
    counts[-1] -= last
    return counts


MOST_STAGES = 10_000
_REPEATED = re.compile(r"\(([^()]*)\)(?:\*(\d{1,9}))?|([A-Za-z|])\*(\d{1,9})")
OTHER = ...  # in a row's values: any other value of the setting
Convert = Callable[[Any], Any]
CLIP = (lambda norm: norm > 0, lambda clips: 1.0 if clips else 0.0)  # largest norm of gradients; 0: any
SEVERAL = (lambda number: int(number) if number > 1 else None, lambda number: number)  # a degree; 1 states nothing
OF_2_BYTES, OF_4_BYTES = (  # elements of a bucket, whose key has megabytes
    (
        lambda elements, size=size: float(f"{elements * size / 2**20:.6g}"),
        lambda mb, size=size: round(mb * 2**20 / size),
    )
    for size in (2, 4)
)
_CONVERSIONS = {"CLIP": CLIP, "SEVERAL": SEVERAL, "OF_2_BYTES": OF_2_BYTES, "OF_4_BYTES": OF_4_BYTES}


@dataclass(frozen=True, slots=True)
class Row:
    """A key of a job, and the settings of a framework that state it.

    A row that is only written and has no settings says that others express its keys.
    """

    key: str = ""  # of the job, as parallel.tp
    names: tuple[str, ...] = ()  # the settings; the first that has a value is read, and the first is written
    # values of the setting (without regard to case, * is any text; True and False of a flag), and those of the key that
    # they mean (None: the setting states nothing then).  What none of them means is written as the first, and listed.
    # Two functions: how the setting's number becomes the key's value, and back; a value that does not come back is
    # listed.  None: the setting has the key's own values.
    values: Mapping[Any, Any] | tuple[Convert, Convert] | None = None
    # what the framework takes, which is assumed where no setting has a value; None: nothing is assumed
    default: Any = None
    # without which the row means nothing: a degree or a number of experts, above 1 (parallel.tp), or one of some values
    # (model.family=t5, model.family!=t5|vit, kind=deepseek*), or those of a setting (@fp16=true, @encoder=none where
    # it is not stated); several have blanks between them
    needs: str = ""
    why: str = ""  # the default is assumed; empty: it is the framework's
    refuse: str = ""  # why there is no job if the settings have a value
    ignore: str = ""  # what becomes of the settings' value, which is listed as ignored
    read: Callable[[Reading], None] | None = None  # reads the settings in place of the rule above
    write: Callable[[JobView], None] | None = None  # writes the settings in place of the rule above
    only: str = ""  # "read" or "write" if the row has one direction
    omit: bool = False  # whether a value that is the key's default is not written
    constant: Any = None  # what is written, whatever the key's value
    lost: bool = False  # whether the key is listed as not expressed


def rows_of(framework: str, functions: Mapping[str, Any], group: str = "rows") -> tuple[Row, ...]:
    """Rows of a framework's TOML, which stands beside this file.

    Where a row's values are a name, that is one of ``functions``, as is ``_read_x`` or ``_write_x`` for ``own = "x"``.
    Of values, ``"nothing"`` is None, ``*`` is any other value, and ``true`` and ``false`` are those of a flag.
    """
    text = resources.files("stepsight.dataset.configs").joinpath(f"{framework}.toml").read_text("utf-8")
    own = {"_read_shared_experts": read_shared_experts, "_read_expert_layers": read_expert_layers}
    known = {**_CONVERSIONS, **own, **functions}
    return tuple(_row(known, **told) for told in tomllib.loads(text)[group])


def _row(
    functions: Mapping[str, Any], names: str | Iterable[str] = (), own: str = "", values: Any = None, **told: Any
) -> Row:
    if isinstance(values, str):
        values = functions[values]
    elif values is not None:
        words = {"true": True, "false": False, "*": OTHER}
        values = {words.get(word, word): None if meant == "nothing" else meant for word, meant in values.items()}
    own_functions = {way: functions[f"_{way}_{own}"] for way in ("read", "write") if f"_{way}_{own}" in functions}
    if own and not own_functions:
        raise KeyError(own)
    names = (names,) if isinstance(names, str) else tuple(names)
    return Row(**told, names=names, values=values, **own_functions)


def read_rows(rows: Iterable[Row], reading: Reading) -> None:
    """Read settings by a table, in its order; those that set nothing are listed as ignored."""
    for row in rows:
        if row.only != "write":
            reading.names = row.names
            reading.settle(partial(_read_row, row), row.key)
    reading.ignore_rest()


def _read_row(row: Row, reading: Reading) -> None:
    names = reading.names
    if not _counts(row.needs, reading.asked):
        return
    if row.read:
        row.read(reading)
        return
    if row.refuse or row.ignore:
        found = reading.find(*names)
        if found and row.refuse:
            raise JobError(f"{row.refuse}, got {reading.written(found)}")
        if found:
            reading.ignore(f"{reading.written(found)}: {row.ignore}")
        return
    if row.values is None:
        value = reading.typed(row.key, *names)
    elif isinstance(row.values, tuple):
        number = reading.number(*names, whole=False)
        value = None if number is None else row.values[0](number)
    elif True in row.values:
        flag = reading.flag(*names)
        value = None if flag is None else row.values.get(flag)
    else:
        word = reading.word(*names)
        known = [item for item in row.values.items() if fnmatchcase(word.lower(), str(item[0]).lower())]
        value = known[0][1] if known else row.values.get(OTHER) if word else None
        if word and not known and OTHER not in row.values:
            fallback = row.default or DEFAULTS[row.key]
            if fallback:
                reading.assume(row.key, fallback, f"a job has no {reading.source(*names)} {word}")
            return
    if value is not None:
        reading.map(row.key, value, *names)
    elif row.default is not None:
        reading.assume(row.key, row.default, row.why)


def _written(row: Row, view: JobView) -> Any:
    value, default = view[row.key], DEFAULTS.get(row.key)
    if row.values is None:
        return value
    if isinstance(row.values, tuple):
        written = row.values[1](value)
        back = value if written is None else row.values[0](written)
        view.refuse(row.key, value not in (default, back) and not isclose(value, back or 0, rel_tol=0.01))
        return written
    pairs = reversed(list(row.values.items()))
    words = {default if meant is None else meant: word for word, meant in pairs if word is not OTHER}
    view.refuse(row.key, value not in words)
    return words.get(value, next(iter(row.values)))


def repeated(text: str) -> str:
    """A text with its repetitions written out, as ``(ab)*2`` and ``a*3``; empty if that is too long."""
    while (found := _REPEATED.search(text)) is not None:
        what, count = found[1] if found[1] is not None else found[3], int(found[2] or found[4] or 1)
        if count * len(what) > MOST_STAGES or len(text) > MOST_STAGES:
            return ""
        text = text[: found.start()] + what * count + text[found.end() :]
    return text


def read_expert_layers(reading: Reading) -> None:
    """Which layers have experts: every n-th one, or a pattern of zeros and ones, as ``[0]*3+[1]*58``."""
    frequency = reading.take(*reading.names)
    text = frequency if isinstance(frequency, str) else repr(frequency)
    if frequency is None or text.strip() in ("0", "1"):
        return
    if WHOLE(text.strip()):
        reading.map("model.moe_every", int(text))
        return
    plain = re.sub(r"[\s,'\"+]", "", text).replace("[", "(").replace("]", ")")
    layers = repeated(plain) if re.fullmatch(r"[01()*\d]*", plain) else ""
    if re.fullmatch("0*1+|0+", layers):
        reading.map("model.dense_layers", layers.count("0"))
        return
    periods = {("0" * at + "1").ljust(n, "0") * len(layers): n for n in range(2, 9) for at in range(n)}
    if every := next((n for period, n in periods.items() if layers and period.startswith(layers)), 0):
        reading.map("model.moe_every", every)
    else:
        reading.ignore(
            f"{reading.source(*reading.names)} {text}: a job has dense layers first, or experts in every n-th layer"
        )


def read_shared_experts(reading: Reading) -> None:
    """Read the inner size of all shared experts; without a whole number of them, the nearest one is assumed."""
    size, inner = reading.number(*reading.names), reading.get("model.expert_ffn") or reading.get("model.ffn")
    if size and inner:
        record = reading.draft.assume if size % inner else reading.draft.map
        words = f"{reading.source(*reading.names)} {size} is {size / inner:.3g} experts of {inner}"
        record("model.shared_experts", max(1, round(size / inner)), words)


def _counts(needs: str, get: Callable[[str, str], Any]) -> bool:
    for need in needs.split():
        key, equals, wanted = need.partition("=")
        value = get(key.rstrip("!"), wanted)
        same = any(fnmatchcase(str(value).lower(), one) for one in wanted.split("|"))
        if not (same != key.endswith("!") if equals else isinstance(value, int) and value > 1):
            return False
    return True
