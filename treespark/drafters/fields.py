"""Fields of a checkpoint's config.json, checked as they are read."""

from __future__ import annotations

from typing import Any


class Fields:
    """A configuration that names itself in errors.

    Args:
        values: The parsed JSON object.
        place: What errors call it.
    """

    def __init__(self, values: dict[str, Any], place: str) -> None:
        self.values, self.place = values, place

    def get(self, key: str, default: Any = None) -> Any:
        """Returns a field, or the default where it is absent or null."""
        value = self.values.get(key)
        return default if value is None else value

    def section(self, key: str) -> Fields:
        """Returns a nested object; an absent one is empty."""
        value = self.get(key, {})
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return Fields(value, f"{self.place}: {key}")

    def integer(self, key: str, default: int | None = None) -> int:
        """Returns a whole number, at least 0."""
        value = self._needed(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self.wrong(key, "a whole number")
        return value

    def number(self, key: str) -> float:
        """Returns a number above 0."""
        value = self._needed(key, None)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
            raise self.wrong(key, "a number above 0")
        return float(value)

    def integers(self, key: str) -> list[int]:
        """Returns a list of whole numbers."""
        value = self._needed(key, None)
        if not isinstance(value, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in value):
            raise self.wrong(key, "a list of whole numbers")
        return value

    def flag(self, key: str, default: bool | None = None) -> bool:
        """Returns true or false."""
        value = self._needed(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def only(self, **allowed: Any) -> None:
        """Checks that each field is absent or has the one value that is supported.

        Raises:
            ValueError: Otherwise.
        """
        for key, value in allowed.items():
            if self.get(key, value) != value:
                raise ValueError(f"{self.place}: {key} is {self.values[key]!r}; only {value!r} is supported.")

    def wrong(self, key: str, expected: str) -> ValueError:
        """The error for a field of another kind."""
        return ValueError(f"{self.place}: `{key}` is {self.values.get(key)!r}; expected {expected}.")

    def _needed(self, key: str, default: Any) -> Any:
        value = self.get(key, default)
        if value is None:
            raise ValueError(f"{self.place} has no `{key}`, which a drafter checkpoint needs.")
        return value
