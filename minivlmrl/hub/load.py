"""Objects by name: "package.module:name" or "file.py:name"."""

import functools
import importlib
import runpy


@functools.cache
def load_name(target: str):
    """Import what a name says."""
    module, _, name = target.rpartition(":")
    if module.endswith(".py"):
        return runpy.run_path(module)[name]
    return getattr(importlib.import_module(module), name)
