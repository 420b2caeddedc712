"""Load modules from the folder extras/, which a copy of the package may lack."""

from importlib import import_module
from pathlib import Path
from typing import Any


def has_extras() -> bool:
    return Path(__file__).with_name("extras").joinpath("__init__.py").is_file()


def load_extra(target: str, user: str) -> Any:
    """Import a module or an object that the core knows only by name.

    Args:
        target: "package.module" or "package.module:name", most often in minivlmrl.extras.
        user: the command, option value or model type that needs the target; the error message names it.
    Raises:
        ValueError: the target is in the folder extras/, which has been deleted.
    """
    if target.startswith("minivlmrl.extras.") and not has_extras():
        raise ValueError(f"{user} needs minivlmrl/extras, which this copy lacks")
    module, _, name = target.partition(":")
    loaded = import_module(module)
    return getattr(loaded, name) if name else loaded
