"""Pointer to <repository>/kernels: its files import as `minivlmrl.kernels.<name>` in a source tree.

An installed wheel lacks this file, or has it from an old build/ beside those files: pyproject.toml
maps `minivlmrl.kernels` to them.
"""

from pathlib import Path

__path__.append(str(Path(__file__).resolve().parents[2] / "kernels"))
