"""Exceptions: one class for each kind of error that programs handle differently."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class Error(Exception):
    """An error of Peerlane.

    `kind` is its kind, such as "peer lost". `rank` is the rank that the error is about, or None.
    """

    kind: str = "other"
    rank: int | None = None


class InvalidArgument(Error, ValueError):
    """An argument is invalid: a size, a range, a tensor, or a call at the wrong time."""

    kind = "invalid argument"


class Mismatch(Error, ValueError):
    """Values that must be equal on all ranks differ; `rank` names a rank."""

    kind = "mismatch"


class PeerLost(Error, ConnectionError):
    """A rank has ended or can no longer be reached; `rank` names it. The group has ended."""

    kind = "peer lost"


class Timeout(Error, TimeoutError):
    """A rank did not come before the deadline; `rank` names it. The group has ended."""

    kind = "timeout"


class Aborted(Error):
    """The group has ended, because a rank aborted it or closed it."""

    kind = "aborted"


class OutOfMemory(Error, MemoryError):
    """Memory, handles or file descriptors are exhausted."""

    kind = "out of memory"


class Unavailable(Error):
    """A device, driver, library or permission is missing; the text says what to install."""

    kind = "unavailable"


def names_call(called: Any) -> Any:
    """Adds the name of a function, or of the public method of a class, to the text of `InvalidArgument`."""
    if isinstance(called, type):
        for name, method in vars(called).copy().items():
            if callable(method) and not name.startswith("_"):
                setattr(called, name, _named(method))
        return called
    return _named(called)


def _named(function: Callable) -> Callable:
    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        try:
            return function(*arguments, **options)
        except InvalidArgument as error:
            # Of functions that call each other, the text names the one that the program has called.
            error._text = getattr(error, "_text", None) or str(error)
            error.args = (f"{function.__name__}: {error._text}",)
            raise

    return call


_CLASSES = {cls.kind: cls for cls in (InvalidArgument, Mismatch, PeerLost, Timeout, Aborted, OutOfMemory, Unavailable)}


def of_native(kind: str, text: str, rank: int | None) -> Error:
    """Returns the exception for an error of the native module."""
    error = _CLASSES.get(kind, Error)(text)
    error.kind, error.rank = kind, rank
    return error
