"""Registries: named things that come with the package, that users register, or that other packages bring.

A registry knows a thing from one of three places: the package itself, ``register``, or an entry point of an installed
package in the registry's group (``[project.entry-points."stepsight.schedules"]``).  Installed packages are searched
only for a name that is not known otherwise, and to list all names; an entry point's code runs when its name is asked
for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from threading import RLock
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

from stepsight.dataset.base.caching import cached, clear_caches
from stepsight.dataset.base.errors import JobError, StepsightError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")
Own = TypeVar("Own")


class Registry(Mapping[str, T]):
    """A mapping from names to things of one kind, to which users and other packages add.

    ``registry[name]`` raises ``error`` for an unknown, taken or broken name, with the known ones; ``in`` and ``get`` do
    not.  Iterating goes over what is known without searching installed packages; ``names`` searches them.  ``version``
    counts changes, by which others keep what they derive from the things.
    """

    def __init__(
        self,
        noun: str,  # what the things are, for messages: ``"hardware"``
        built_in: Mapping[str, T] | Callable[[], Mapping[str, T]] = MappingProxyType({}),  # cannot be removed
        *,
        group: str,  # of entry points: ``"stepsight.hardware"``
        check: Callable[[str, Any], T] | None = None,  # of a name and a thing; returns the thing, or raises
        error: type[StepsightError] = JobError,
        more: str = "",  # what else a user may write where a name is expected, for messages: ``"a .toml file"``
    ) -> None:
        self.noun, self.group, self.version = noun, group, 0
        self._built_in, self._check, self._error, self._more = built_in, check, error, more
        self._added: dict[str, str] = {}  # name -> "" of what was registered, else the package that brings it
        self._lock = RLock()

    @cached_property
    def known(self) -> dict[str, T]:
        """The same things: quicker to ask than the registry, in loops over ops."""
        with self._lock:
            built_in = self._built_in() if callable(self._built_in) else self._built_in
            return self.__dict__.setdefault("known", _Things(self._find, built_in))  # type: ignore[no-any-return]

    def fill(self, built_in: Mapping[str, T]) -> None:
        """Set what comes with the package, where only the names were given before."""
        self.known.update(built_in)

    @overload
    def register(self, name: str) -> Callable[[Own], Own]: ...
    @overload
    def register(self, name: str, thing: Own) -> Own: ...

    def register(self, name: str, thing: Any = None) -> Any:
        """Add a thing and return it; without one, return a decorator that adds what it decorates."""
        if thing is None:
            return lambda decorated: self.register(name, decorated)
        if not isinstance(name, str) or not name.strip() or not name.isprintable():
            raise self._error(f"{self.noun}: a name must be a printable string, got {name!r:.80}")
        with self._lock:
            if name in self.known:
                origin = "is registered already" if name in self._added else "comes with stepsight"
                raise self._error(f"{self.noun} {name!r:.80} {origin}: choose another name")
            try:
                self._add(name, thing, "")
            except StepsightError as error:
                raise self._error(f"{self.noun} {name!r}: {error}") from None
        return thing

    def unregister(self, name: str) -> None:
        """Remove a thing that was registered, and empty all caches, since they may hold what it did."""
        with self._lock:
            if self._added.get(name) != "":
                raise self._error(f"{self.noun}: only what was registered can be removed, got {name!r:.80}")
            self._remove(name)

    @contextmanager
    def registered(self, name: str, thing: T) -> Iterator[T]:
        """Register a thing for the length of a ``with`` block, as tests do."""
        self.register(name, thing)
        try:
            yield thing
        finally:
            self.unregister(name)

    def names(self) -> tuple[str, ...]:
        """All names, including those of installed packages."""
        return tuple(dict.fromkeys((*self, *_entry_points(self.group))))

    def load(self) -> None:
        """Load the entry points of all installed packages, so that iterating goes over their things too."""
        for name in self.names():
            self[name]

    def unknown(self, name: object) -> str:
        """The message for a name that is not known: the rule, the value, and the nearest known name."""
        names = self.names()
        known = [", ".join(names)] if names else []
        rule = f"{self.noun} must be {'one of ' if names else ''}{', or '.join([*known, *filter(None, [self._more])])}"
        return f"{rule}, got {name!r:.80}{did_you_mean(name, names)}"

    def __getitem__(self, name: str) -> T:
        return self.known[name]

    def _find(self, name: str) -> T:
        """A thing that is not loaded yet."""
        with self._lock:
            if isinstance(name, str) and name in _entry_points(self.group):
                return self.known[name] if name in self.known else self._load(name)
        raise self._error(self.unknown(name))

    def get(self, name: str, default: Any = None) -> Any:
        """The thing of that name, or ``default``."""
        if name not in self:
            return default
        return self[name]

    def __contains__(self, name: object) -> bool:
        return name in self.known or (isinstance(name, str) and name in _entry_points(self.group))

    def __iter__(self) -> Iterator[str]:
        return iter(self.known)

    def __len__(self) -> int:
        return len(self.known)

    def __repr__(self) -> str:
        return f"<{self.noun} registry: {', '.join(self)}>"

    def _add(self, name: str, thing: Any, package: str) -> T:
        checked = cast(T, thing) if self._check is None else self._check(name, thing)
        self.known[name], self._added[name] = checked, package
        self.version += 1
        return checked

    def _remove(self, name: str) -> None:
        del self._added[name]
        del self.known[name]
        self.version += 1
        clear_caches()

    def _load(self, name: str) -> T:
        """The thing of an entry point."""
        points = _entry_points(self.group)[name]
        named = [(of.value, repr(of.dist.name) if of.dist is not None else "that is not named") for of in points]
        origin = " and ".join(f"{value} of package {package}" for value, package in named)
        if len(points) > 1:
            raise self._error(f"{self.noun} {name!r} is brought by {origin}: uninstall all except one")
        try:
            return self._add(name, points[0].load(), origin)
        except Exception as error:
            told = str(error) if isinstance(error, StepsightError) else f"{type(error).__name__}: {error}"
            raise self._error(f"{self.noun} {name!r}: cannot load the entry point {origin}: {told}") from error


class _Things(dict[str, T]):
    """A dictionary that asks for what it lacks."""

    def __init__(self, find: Callable[[str], T], things: Mapping[str, T]) -> None:
        super().__init__(things)
        self._find = find

    def __missing__(self, name: str) -> T:
        return self._find(name)


@cached(64)
def _entry_points(group: str) -> Mapping[str, tuple[EntryPoint, ...]]:
    """Entry points of a group by name; more than one where packages bring the same name."""
    from importlib.metadata import entry_points  # slow to import, and seldom needed

    found: dict[str, tuple[EntryPoint, ...]] = {}
    for point in entry_points(group=group):
        if point not in found.get(point.name, ()):
            found[point.name] = (*found.get(point.name, ()), point)
    return found


def did_you_mean(name: object, names: Iterable[object], most: int = 1) -> str:
    """`` (did you mean 'x'?)`` with the nearest of some names; empty if none is near."""
    from difflib import get_close_matches  # slow to import, and seldom needed

    near = get_close_matches(str(name).lower(), [other for other in names if isinstance(other, str) and other], most)
    return f" (did you mean {' or '.join(map(repr, near))}?)" if near else ""


def check_takes(
    what: str, function: Any, arguments: Sequence[str], error: type[StepsightError] = StepsightError
) -> Any:
    """Return a value if it is a function of so many positional arguments; ``what`` says which, for messages."""
    from inspect import signature  # slow to import

    if not callable(function):
        raise error(f"{what} must be a function of {', '.join(arguments)}, got {function!r:.80}")
    try:
        takes = signature(function)
    except (TypeError, ValueError):  # some functions in C have none
        return function
    try:
        takes.bind(*arguments)
    except TypeError:
        raise error(f"{what} must take {len(arguments)} ({', '.join(arguments)}), got {takes}") from None
    return function


def instance_of(kind: type[T]) -> Callable[[str, Any], T]:
    """A check for ``Registry``: what is registered is an instance of a class, under its own name if it has one."""

    def check(name: str, thing: Any) -> T:
        if not isinstance(thing, kind):
            raise StepsightError(f"it must be of type {kind.__name__}, got {thing!r:.80}")
        own = getattr(thing, "name", name)
        if own != name:
            raise StepsightError(f"it must be registered under its own name, {own!r:.80}")
        return thing

    return check
