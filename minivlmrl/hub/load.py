"""Objects by name: "package.module:name" or "file.py:name"."""

import functools
import importlib
import runpy


@functools.cache
def load_name(target: str):
    """Import what a name says (ValueError: it cannot be; a user's file may raise anything)."""
    module, _, name = target.rpartition(":")
    try:
        if module.endswith(".py"):
            return runpy.run_path(module)[name]
        return getattr(importlib.import_module(module), name)
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        raise ValueError(f"{target}: it cannot be loaded ({cause})") from error
