"""Checks of arguments. Each error says the name, the value and what was expected."""

from __future__ import annotations

import math
import operator
from typing import Any

from peerlane._errors import InvalidArgument

# The largest number of bytes or elements of an object.
WHOLE_MAX = (1 << 63) - 1
# The largest number of a file descriptor.
DESCRIPTOR_MAX = (1 << 31) - 1
_SHOWN_CHARS_MAX = 200
# From here on, the library has no such time.
_SECONDS_END = 1 << 63


def shown(value: Any) -> str:
    """Returns the beginning of the text of a value."""
    try:
        text = repr(value)
    except Exception:  # such as for an integer of more than 4300 digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN_CHARS_MAX else text[:_SHOWN_CHARS_MAX] + "…"


def whole(name: str, value: Any, least: int = 0, most: int = WHOLE_MAX) -> int:
    """Returns an argument that is a whole number. Floating-point numbers are refused, even without a fraction."""
    try:
        number = operator.index(value)
    except Exception:
        number = None
    if number is None or not least <= number <= most:
        bound = f" to {most}" if number is not None and number > most else ""
        raise InvalidArgument(f"{name} is {shown(value)}, expected a whole number from {least}{bound}")
    return number


def flag(name: str, value: Any) -> bool:
    """Returns an argument that is True or False."""
    if value is not True and value is not False:
        raise InvalidArgument(f"{name} is {shown(value)}, expected True or False")
    return value


def file_number(name: str, file: Any) -> Any:
    """Returns the descriptor of an argument that has one by `fileno()`, and other arguments as they are."""
    if not hasattr(file, "fileno"):
        return file
    try:
        return file.fileno()
    except Exception as error:  # such as of a file that was closed
        raise InvalidArgument(f"{name} is {shown(file)}, expected an open file or its descriptor: {error}") from error


def wholes(name: str, values: Any, count: int | None = None) -> list[int]:
    """Returns an argument that is a list of whole numbers from 0, of which there are `count` if it is given."""
    expected = "a list of whole numbers" if count is None else f"{count} numbers, one for each rank"
    try:
        # Bytes are numbers, but a mistake; sets and dictionaries have no order that is equal on all ranks.
        listed = None if isinstance(values, (bytes, bytearray, dict, set, frozenset)) else list(values)
    except Exception:
        listed = None
    if listed is None or (count is not None and len(listed) != count):
        raise InvalidArgument(f"{name} is {shown(values if listed is None else listed)}, expected {expected}")
    return [whole(name, value) for value in listed]


def limit(name: str, value: Any) -> float:
    """Returns an argument that is the limit of a wait in seconds. After a deadline it is zero or negative, and the wait looks once."""
    try:
        number = float(value)
    except Exception:
        number = math.nan
    if isinstance(value, str) or not -math.inf < number < _SECONDS_END:
        raise InvalidArgument(f"{name} is {shown(value)}, expected a finite number of seconds below 2^63")
    return number
