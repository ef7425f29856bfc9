"""Reads the fields of a JSON body: the right type and range, or an error that names the field.

A field that is null counts as missing, as it does for the SDKs. Fields that nobody reads are
ignored. Nothing here knows which fields an API has.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from .errors import ApiError


class Fields:
    """A JSON object and where it is in the body ("", or "messages[0]")."""

    def __init__(self, values: Mapping[str, Any], where: str = "") -> None:
        self.values, self.where = values, where

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def path(self, name: str) -> str:
        """The field as an error names it."""
        return f"{self.where}.{name}" if self.where else name

    def error(self, name: str, must: str) -> ApiError:
        """The error that a field's value is not what it must be."""
        path, value = self.path(name), self.values.get(name)
        if value is None:
            return ApiError(400, f"{path} is missing: give {must}", param=path)
        return ApiError(400, f"{path} is {shown(value)}: it must be {must}", param=path)

    def raw(self, name: str, default: Any = None) -> Any:
        """The value as it is."""
        value = self.values.get(name)
        return default if value is None else value

    def text(self, name: str, default: str | None = None) -> str | None:
        """A text."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.error(name, "a string")
        return value

    def needed_text(self, name: str) -> str:
        """A text that must be there."""
        value = self.text(name)
        if value is None:
            raise self.error(name, "a string")
        return value

    def filled_text(self, name: str) -> str:
        """A text that must be there and not be empty."""
        value = self.needed_text(name)
        if not value:
            raise self.error(name, "a string of at least one character")
        return value

    def one_of(self, name: str, known: Collection[str], default: str) -> str:
        """One of some texts."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, str) or value not in known:
            raise self.error(name, "one of " + ", ".join(known))
        return value

    def flag(self, name: str, default: bool) -> bool:
        """true or false."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def integer(
        self, name: str, default: int | None, low: int = -(1 << 63), high: int = (1 << 64) - 1
    ) -> int | None:
        """A whole number in low..high; 3.0 is one."""
        value = self.values.get(name)
        if value is None:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not is_whole(value) or not low <= value <= high:
            raise self.error(name, _range("a whole number", low, high))
        return value

    def number(self, name: str, default: float | None, low: float, high: float) -> float | None:
        """A number in low..high."""
        value = self.values.get(name)
        if value is None:
            return default
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not low <= value <= high:  # NaN is in no range
            raise self.error(name, f"a number from {low:g} to {high:g}")
        return float(value)

    def texts(self, name: str, most: int = 64, longest: int = 1 << 30) -> tuple[str, ...]:
        """A text or a list of at most `most` texts, of at most `longest` characters each."""
        value = self.values.get(name)
        if value is None:
            return ()
        given = [value] if isinstance(value, str) else value
        if not isinstance(given, list) or not all(isinstance(t, str) for t in given):
            raise self.error(name, "a string or a list of strings")
        path, length = self.path(name), max(map(len, given), default=0)
        if len(given) > most:
            raise ApiError(400, f"{path} has {len(given)} strings: give at most {most}", param=path)
        if length > longest:
            told = f"{path} has a string of {length} characters: give at most {longest}"
            raise ApiError(400, told, param=path)
        return tuple(given)

    def object(self, name: str) -> Fields | None:
        """An object inside this one."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(name, "an object")
        return Fields(value, self.path(name))

    def items(self, name: str) -> Iterator[Fields]:
        """The objects of a list; none where it is missing."""
        value = self.values.get(name)
        if value is None:
            return
        if not isinstance(value, list):
            raise self.error(name, "a list of objects")
        for i, item in enumerate(value):
            path = f"{self.path(name)}[{i}]"
            if not isinstance(item, dict):
                told = f"{path} is {shown(item)}: it must be an object"
                raise ApiError(400, told, param=path)
            yield Fields(item, path)


def is_whole(value: Any) -> bool:
    """Whether a value of JSON is a whole number; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def shown(value: Any) -> str:
    """A value of JSON in a message."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    return repr(value) if len(repr(value)) <= 60 else f"{value!r:.57}..."


def _range(kind: str, low: int, high: int) -> str:
    if low == -(1 << 63):
        return kind
    return f"{kind} from {low} to {high}" if high < (1 << 63) else f"{kind}, {low} or more"
