"""Make the files of <repository>/kernels importable as `minivlmrl.kernels.<name>` in a source tree.

An installed wheel does not need this file, because pyproject.toml maps `minivlmrl.kernels` to the folder kernels/. If a
wheel is built from an old build/ folder, it may contain this file, which is harmless.
"""

from pathlib import Path

__path__.append(str(Path(__file__).resolve().parents[2] / "kernels"))
