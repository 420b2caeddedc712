"""Pointer to <repository>/kernels, so that its files import as `minivlmrl.kernels.<name>` from a
source tree.

In an installed wheel this file is absent: pyproject.toml maps the package `minivlmrl.kernels` to
those files directly.
"""

from pathlib import Path

__path__ = [str(Path(__file__).resolve().parents[2] / "kernels")]
