"""Import modules from extras/ and monitor/, folders that users may delete."""

from importlib import import_module
from pathlib import Path
from typing import Any

from minivlmrl.errors import UserError


def has_folder(name: str) -> bool:
    return Path(__file__).with_name(name).joinpath("__init__.py").is_file()


def load_extra(target: str, user: str) -> Any:
    """Import an optional module, or an object in it, by name.

    Args:
        target: "package.module" or "package.module:name", usually in minivlmrl.extras or minivlmrl.monitor.
        user: what needs the module, such as "the command chat", for the error message.
    Raises:
        UserError: the module was deleted with its folder.
    """
    module, _, name = target.partition(":")
    folder = module.split(".")[1]
    if folder in ("extras", "monitor") and not has_folder(folder):
        raise UserError(f"{user} needs minivlmrl/{folder}, which this copy lacks")
    loaded = import_module(module)
    return getattr(loaded, name) if name else loaded
