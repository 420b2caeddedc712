"""Make the files of <repository>/kernels importable as `minivlmrl.kernels.<name>` in a source tree.

An installed wheel has the folder kernels/ as `minivlmrl.kernels`, because pyproject.toml maps the names.
"""

from pathlib import Path

__path__.append(str(Path(__file__).resolve().parents[2] / "kernels"))
