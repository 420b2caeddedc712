"""Make the files of <repository>/kernels importable as `minivlmrl.kernels.<name>` in a source tree.

An installed wheel does not need this file, because pyproject.toml maps `minivlmrl.kernels` to the
folder. A wheel built from an old build/ folder may contain this file without harm.
"""

from pathlib import Path

__path__.append(str(Path(__file__).resolve().parents[2] / "kernels"))
