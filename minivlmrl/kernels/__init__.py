"""Pointer to <repository>/kernels: its files import as `minivlmrl.kernels.<name>` in a source tree.

An installed wheel lacks this file: pyproject.toml maps `minivlmrl.kernels` to those files.
"""

from pathlib import Path

__path__ = [str(Path(__file__).resolve().parents[2] / "kernels")]
