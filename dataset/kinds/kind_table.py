"""Tables of kinds by name, to which users add kinds of their own, and the numbers that stand for kinds in features."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Generic, Protocol, TypeVar

from stepsight.dataset.errors import StepsightError

_FIRST_BY_NAME, _MOST_BY_NAME = 1000, 100_000  # with a half between them, codes keep within seven digits


class _Kind(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def code(self) -> int: ...


K = TypeVar("K", bound=_Kind)


def code_of(name: str, code: int) -> int:
    """The code of a kind: its own, or for -1 one that follows from its name alone, whatever other kinds there are."""
    return code if code >= 0 else _FIRST_BY_NAME + zlib.crc32(name.encode()) % _MOST_BY_NAME


class KindTable(Generic[K]):
    """Kinds of one noun by name.

    Args:
        noun: What the kinds are, for messages: ``"op kind"``.
        built_in: Kinds of the package, which stay.
        names: Names of all kinds; tables that share it have no name in common.

    Attributes:
        by_name: The kinds, as they are at any time.
        version: Number of changes so far, by which others keep what they derive from the kinds.
    """

    def __init__(self, noun: str, built_in: Iterable[K], names: set[str]) -> None:
        self._noun = noun
        self._names = names
        self.version = 0
        self._kinds: dict[str, K] = {}
        self.by_name: Mapping[str, K] = MappingProxyType(self._kinds)
        for kind in sorted(built_in, key=lambda kind: kind.code):
            self.register(kind)
        self._built_in = frozenset(self._kinds)

    def register(self, kind: K) -> K:
        """Add a kind.

        Raises:
            StepsightError: If its name or its code is taken, or its name is no identifier.
        """
        if not kind.name.isidentifier():
            raise StepsightError(f"{self._noun}: a name must be an identifier, got {kind.name!r:.80}")
        if kind.name in self._names:
            raise StepsightError(f"{self._noun}: the name {kind.name!r} is taken: choose another one")
        for other in self._kinds.values():
            if other.code == kind.code:
                raise StepsightError(
                    f"{self._noun}: codes must differ, got {kind.code} for {other.name!r} and {kind.name!r}: "
                    "choose another code"
                )
        self._kinds[kind.name] = kind
        self._names.add(kind.name)
        self.version += 1
        return kind

    def unregister(self, name: str) -> None:
        """Remove a kind that a user registered.

        Raises:
            StepsightError: If there is none of that name, or it belongs to the package.
        """
        if name in self._built_in or name not in self._kinds:
            raise StepsightError(f"{self._noun}: only what was registered can be removed, got {name!r:.80}")
        del self._kinds[name]
        self._names.remove(name)
        self.version += 1

    @contextmanager
    def registered(self, kind: K) -> Iterator[K]:
        """Register a kind for the length of a ``with`` block, as tests do."""
        self.register(kind)
        try:
            yield kind
        finally:
            self.unregister(kind.name)
