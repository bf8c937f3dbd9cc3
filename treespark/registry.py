"""The one registry: subclassing a registered base class is all it takes to add a loss, a tree policy or a drafter."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Iterable
from typing import Any, ClassVar

from typing_extensions import Self

_HOMES = ("treespark.losses", "treespark.policies", "treespark.drafters", "treespark.features")
_FORMATS = "treespark.export"  # a higher room than the drafters, which ask for it by name when a file is read


def unknown(kind: str, name: str, choices: Iterable[str]) -> ValueError:
    """Builds the error for a name that is not among `choices`, with the closest ones as suggestions."""
    choices = sorted(choices)
    by_lower = {choice.lower(): choice for choice in choices}
    close = [by_lower[match] for match in difflib.get_close_matches(name.lower(), by_lower, n=2, cutoff=0.6)]
    hint = f" Did you mean: {', '.join(close)}?" if close else ""
    return ValueError(f"Unknown {kind} '{name}'.{hint} Available: {', '.join(choices) or 'none'}.")


def not_imported(kind: str, path: str, reason: str) -> str:
    """The message for a dotted path that cannot be imported; a module that is not found may stand elsewhere."""
    where = " Start in the folder that holds its file, or name that folder in PYTHONPATH."
    hint = where if "No module" in reason else ""
    return f"The {kind} '{path}' cannot be imported: {reason.rstrip('.')}.{hint}"


def load_all() -> None:
    """Imports the rooms that hold what is built in, so that it is registered."""
    for home in _HOMES:
        importlib.import_module(home)


def load_formats() -> None:
    """Imports the room that holds the foreign checkpoint formats, so that they are registered."""
    importlib.import_module(_FORMATS)


class Registered:
    """Mixin that registers every concrete subclass of a base under its class name.

    A base declares itself with `class Base(Registered, ABC, kind="policy")`; from then on each non-abstract subclass,
    wherever it is defined, is found by `Base.get("ClassName")`.

    Raises:
        ValueError: When a subclass takes a name that a class of another module holds already.
    """

    kind: ClassVar[str]
    _classes: ClassVar[dict[str, type[Any]]]

    def __init_subclass__(cls, kind: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if kind is not None:
            cls.kind, cls._classes = kind, {}
            return
        name, other = cls.__name__, cls._classes.get(cls.__name__)
        if other is not None and other.__module__ != cls.__module__:
            raise ValueError(
                f"The {cls.kind} name '{name}' is taken by {other.__module__}.{other.__qualname__}; "
                f"rename {cls.__module__}.{cls.__qualname__}."
            )
        cls._classes[name] = cls

    @classmethod
    def available(cls) -> dict[str, type[Self]]:
        """Returns the registered concrete classes by name, sorted."""
        return {name: item for name, item in sorted(cls._classes.items()) if not inspect.isabstract(item)}

    @classmethod
    def get(cls, name: str) -> type[Self]:
        """Returns the class called `name`: a registered name, or the dotted path of a user's class.

        Raises:
            ValueError: For an unknown name (with suggestions) or a class that is not a subclass of this base.
        """
        if "." in name:
            module, _, attribute = name.rpartition(".")
            try:
                found: Any = getattr(importlib.import_module(module), attribute)
            except (ImportError, AttributeError) as error:
                raise ValueError(not_imported(cls.kind, name, str(error))) from error
            if not (isinstance(found, type) and issubclass(found, cls)):
                raise ValueError(f"'{name}' is not a {cls.kind}: expected a subclass of {cls.__name__}.")
            return found
        classes = cls.available()
        if name not in classes:
            raise unknown(cls.kind, name, classes)
        return classes[name]

    def config(self) -> dict[str, Any]:
        """Returns the class and its options, as `from_config` and YAML files take them.

        Every option of `__init__` is read from the attribute of the same name.
        """
        cls = type(self)
        ours = cls.__module__.partition(".")[0] == "treespark"
        options = [name for name in inspect.signature(cls).parameters if name not in ("args", "kwargs")]
        return {
            "class_path": cls.__name__ if ours else f"{cls.__module__}.{cls.__qualname__}",
            "init_args": {name: getattr(self, name) for name in options},
        }

    def __repr__(self) -> str:
        config = self.config()
        return f"{config['class_path']}({', '.join(f'{name}={item!r}' for name, item in config['init_args'].items())})"

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Builds an instance from what `config` returned.

        Raises:
            ValueError: For an unknown class, or options that the class does not have.
        """
        found = cls.get(config["class_path"])
        options = dict(config.get("init_args") or {})
        known = list(inspect.signature(found).parameters)
        for name in options:
            if name not in known:
                raise unknown(f"option of {found.__name__}", name, known)
        return found(**options)
