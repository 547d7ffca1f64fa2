"""Registries: named things that come with the package, that users register, or that other packages bring.

A registry knows a thing from one of three places: the package itself, ``register``, or an entry point of an installed
package in the registry's group (``[project.entry-points."stepsight.schedules"]``).  Entry points are searched only for
a name that is not known otherwise, or when all names are listed; an entry point's code runs only when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from threading import RLock
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast, overload

from stepsight.dataset.caching import Memo, cached, clear_caches
from stepsight.dataset.errors import JobError, StepsightError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")
Own = TypeVar("Own")


class Registry(Mapping[str, T], Generic[T]):
    """A mapping from names to things of one kind, to which users and other packages add.

    ``registry[name]`` raises ``error`` for an unknown name, with the known ones; ``in`` and ``get`` do not.

    Args:
        noun: What the things are, for messages: ``"hardware"``.
        built_in: What comes with the package, or what returns it when it is first needed; it cannot be replaced.
        group: The entry points' group: ``"stepsight.hardware"``.
        check: Takes a name and what was registered or loaded under it, and returns the thing; it raises ``error`` if
            it is none.
        error: Raised for unknown, taken and broken names.
        more: What else a user may write where a name is expected, for messages: ``"a .toml file"``.
    """

    def __init__(
        self,
        noun: str,
        built_in: Mapping[str, T] | Callable[[], Mapping[str, T]] = MappingProxyType({}),
        *,
        group: str,
        check: Callable[[str, Any], T] | None = None,
        error: type[StepsightError] = JobError,
        more: str = "",
    ) -> None:
        self.noun = noun
        self.group = group
        self._given = built_in
        self._registered: dict[str, T] = {}
        self._loaded: Memo[str, T] = Memo(f"{group}: loaded entry points", 4096)
        self._check = check
        self._error = error
        self._more = more
        self._lock = RLock()

    @cached_property
    def _built_in(self) -> dict[str, T]:
        return dict(self._given() if callable(self._given) else self._given)

    @overload
    def register(self, name: str) -> Callable[[Own], Own]: ...
    @overload
    def register(self, name: str, thing: Own) -> Own: ...

    def register(self, name: str, thing: Any = None) -> Any:
        """Add a thing; without one, return a decorator that adds what it decorates.

        Returns:
            The thing as it was given.

        Raises:
            StepsightError: If the name is taken or not a name, or the thing is not of the registry's kind.
        """
        if thing is None:
            return lambda decorated: self.register(name, decorated)
        if not isinstance(name, str) or not name.strip() or not name.isprintable():
            raise self._error(f"{self.noun}: a name must be a printable string, got {name!r:.80}")
        with self._lock:
            if name in self._built_in or name in self._registered:
                origin = "comes with stepsight" if name in self._built_in else "is registered already"
                raise self._error(f"{self.noun} {name!r:.80} {origin}: choose another name")
            self._registered[name] = self._checked(name, thing, "")
        clear_caches()
        return thing

    def unregister(self, name: str) -> None:
        """Remove a thing that was registered.

        Raises:
            StepsightError: If nothing was registered under that name.
        """
        with self._lock:
            if name not in self._registered:
                raise self._error(f"{self.noun} {name!r:.80} was not registered, so it cannot be removed")
            del self._registered[name]
        clear_caches()

    @contextmanager
    def registered(self, name: str, thing: T) -> Iterator[T]:
        """Register a thing for the length of a ``with`` block, as tests do."""
        self.register(name, thing)
        try:
            yield thing
        finally:
            self.unregister(name)

    def __getitem__(self, name: str) -> T:
        found = self._here(name)
        if found is not None:
            return found[0]
        if name in _entry_points(self.group):
            return self._load(name)
        raise self._error(self.unknown(name))

    def get(self, name: str, default: Any = None) -> Any:
        """The thing of that name, or ``default``."""
        if name not in self:
            return default
        return self[name]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and (self._here(name) is not None or name in _entry_points(self.group))

    def __iter__(self) -> Iterator[str]:
        own = {**self._built_in, **self._registered}
        return iter(dict.fromkeys((*own, *_entry_points(self.group))))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"<{self.noun} registry: {', '.join(self)}>"

    def unknown(self, name: object) -> str:
        """The message for a name that is not known: the rule, the value, and the nearest known name."""
        from difflib import get_close_matches

        names = list(self)
        rule = f"{self.noun} must be one of {', '.join(names)}{f', or {self._more}' if self._more else ''}"
        near = get_close_matches(str(name).lower(), names, 1)
        return f"{rule}, got {name!r:.80}{f' (did you mean {near[0]!r:.80}?)' if near else ''}"

    def _here(self, name: str) -> tuple[T] | None:
        """The thing, if no entry point is needed for it."""
        for things in (self._built_in, self._registered):
            if name in things:
                return (things[name],)
        return None

    def _load(self, name: str) -> T:
        """The thing of an entry point, loaded once."""
        with self._lock:
            known = self._loaded.get(name)
            if known is not None:
                return known
            points = _entry_points(self.group)[name]
            origin = " and ".join(f"{point.value} of package {_package(point)}" for point in points)
            if len(points) > 1:
                raise self._error(f"{self.noun} {name!r:.80} is brought by {origin}: uninstall all but one of them")
            try:
                thing = points[0].load()
            except Exception as error:
                raise self._error(
                    f"{self.noun} {name!r:.80}: cannot load the entry point {origin} ({type(error).__name__}: {error})"
                ) from error
            self._loaded[name] = checked = self._checked(name, thing, f" (entry point {origin})")
            return checked

    def _checked(self, name: str, thing: Any, origin: str) -> T:
        if self._check is None:
            return cast(T, thing)
        try:
            return self._check(name, thing)
        except StepsightError as error:
            raise self._error(f"{self.noun} {name!r:.80}{origin}: {error}") from None


@cached(64)
def _entry_points(group: str) -> Mapping[str, tuple[EntryPoint, ...]]:
    """Entry points of a group by name; more than one where packages bring the same name."""
    from importlib.metadata import entry_points  # slow to import, and seldom needed

    found: dict[str, tuple[EntryPoint, ...]] = {}
    for point in entry_points(group=group):
        if point not in found.get(point.name, ()):
            found[point.name] = (*found.get(point.name, ()), point)
    return found


def _package(point: EntryPoint) -> str:
    return repr(point.dist.name) if point.dist is not None else "that is not named"


def instance_of(kind: type[T]) -> Callable[[str, Any], T]:
    """A check for ``Registry``: what is registered must be an instance of a class."""

    def check(name: str, thing: Any) -> T:
        if not isinstance(thing, kind):
            raise StepsightError(f"must be of type {kind.__name__}, got {thing!r:.80}")
        return thing

    return check
