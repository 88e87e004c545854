"""Parts of a record that are worked out when they are first asked for, and then kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar, overload

Result = TypeVar("Result")


class once(Generic[Result]):  # noqa: N801 - it reads as a decorator, like `property`
    """A property whose value is computed at most once for each record.

    `functools.cached_property` of Python 3.11 takes a lock while it computes. A child forked while
    another thread grades would inherit it locked and wait forever. Here two threads may both
    compute a value, which is the same.
    """

    def __init__(self, compute: Callable[[Any], Result]) -> None:
        self._compute = compute
        self._name = compute.__name__
        self.__doc__ = compute.__doc__

    @overload
    def __get__(self, record: None, owner: type) -> Self: ...

    @overload
    def __get__(self, record: object, owner: type) -> Result: ...

    def __get__(self, record: object | None, owner: type) -> Self | Result:
        if record is None:
            return self
        value = self._compute(record)
        # Found there from now on, before this method is asked; a frozen record allows it.
        record.__dict__[self._name] = value
        return value
