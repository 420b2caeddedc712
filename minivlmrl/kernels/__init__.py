"""Make <repository>/kernels importable as `minivlmrl.kernels` in a source tree.

In an installed wheel, pyproject.toml maps kernels/ to minivlmrl.kernels.
"""

from pathlib import Path

__path__.append(str(Path(__file__).resolve().parents[2] / "kernels"))
