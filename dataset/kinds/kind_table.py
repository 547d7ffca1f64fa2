"""Registries of kinds, and the codes of kinds in features."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from stepsight.dataset.base.errors import StepsightError
from stepsight.dataset.base.registry import Registry, instance_of

_FIRST_BY_NAME, _MOST_BY_NAME = 1000, 100_000  # with a half between them, codes keep within seven digits


class _Kind(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def code(self) -> int: ...


K = TypeVar("K", bound=_Kind)


def code_of(name: str, code: int) -> int:
    """The code of a kind: its own, or for -1 one derived from its name, independent of other kinds."""
    return code if code >= 0 else _FIRST_BY_NAME + zlib.crc32(name.encode()) % _MOST_BY_NAME


class KindTable(Registry[K]):
    """A registry of kinds of one noun, which are registered under their own names.

    Args:
        noun: What the kinds are, for messages: ``"op kind"``.
        built_in: Kinds of the package, which stay.
        group: The entry points' group.
        tables: All tables of kinds: no two kinds in them have the same name.
        check: Takes a kind that is to be added and this table; it raises ``StepsightError`` if they do not fit.
    """

    def __init__(
        self,
        noun: str,
        built_in: Iterable[K],
        group: str,
        tables: list[KindTable[Any]],
        check: Callable[[K, Mapping[str, K]], None] | None = None,
    ) -> None:
        kinds = sorted(built_in, key=lambda kind: kind.code)
        assert len({kind.code for kind in kinds}) == len({kind.name for kind in kinds}) == len(kinds), noun
        self._is_kind = instance_of(type(kinds[0]))
        self._check_beside = check
        self._tables = tables
        tables.append(self)
        named = {kind.name: kind for kind in kinds}
        super().__init__(noun, named, group=group, check=self._check_kind, error=StepsightError)

    def add(self, kind: K) -> K:
        """Register a kind.

        Raises:
            StepsightError: If its name or its code is taken.
        """
        return self.register(kind.name, kind)

    @contextmanager
    def added(self, kind: K) -> Iterator[K]:
        """Register a kind for the duration of a ``with`` block, as tests do."""
        with self.registered(kind.name, kind):
            yield kind

    def _check_kind(self, name: str, thing: Any) -> K:
        kind = self._is_kind(name, thing)
        if any(name in list(table) for table in self._tables):  # of other packages, only those that are loaded
            raise StepsightError("the name is taken: choose another name")
        for other in self.values():
            if other.code == kind.code:
                raise StepsightError(
                    f"codes must differ, got {kind.code} for {other.name!r} and {kind.name!r}: choose another code"
                )
        if self._check_beside is not None:
            self._check_beside(kind, self)
        return kind
