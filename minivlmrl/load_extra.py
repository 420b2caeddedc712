"""Import modules from extras/, a folder that users may delete."""

from importlib import import_module
from pathlib import Path
from typing import Any

from minivlmrl.errors import UserError


def has_extras() -> bool:
    return Path(__file__).with_name("extras").joinpath("__init__.py").is_file()


def load_extra(target: str, user: str) -> Any:
    """Import an optional module or object by name.

    Args:
        target: "package.module" or "package.module:name", usually in minivlmrl.extras.
        user: what needs the module, such as "the command chat", for the error message.
    Raises:
        UserError: the module was deleted with extras/.
    """
    if target.startswith("minivlmrl.extras.") and not has_extras():
        raise UserError(f"{user} needs minivlmrl/extras, which this copy lacks")
    module, _, name = target.partition(":")
    loaded = import_module(module)
    return getattr(loaded, name) if name else loaded
