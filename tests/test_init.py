"""Test the public names of the package, and that importing the package does not import torch."""

import re
import subprocess
import sys

import pytest
import torch

import minivlmrl
from tests.helpers.links import ROOT

PAGE = (ROOT / "docs" / "library.md").read_text()
NAMES = [name for name in minivlmrl.__all__ if name != "__version__"]


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_is_the_object_of_its_module(name):
    value = getattr(minivlmrl, name)
    assert (value.__name__ if name != "parity" else "parity") == name and name in dir(minivlmrl)
    assert value.__module__ == minivlmrl.MODULES[name] if name != "parity" else value.check


def test_names_are_imported_in_a_fresh_process_and_torch_only_with_them():
    code = "import sys, minivlmrl; minivlmrl.__version__; dir(minivlmrl); assert 'torch' not in sys.modules; "
    code += f"from minivlmrl import *; {'; '.join(NAMES)}; from minivlmrl import {', '.join(NAMES)}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"^module 'minivlmrl' has no attribute 'gpro_loss'$"):
        minivlmrl.gpro_loss  # noqa: B018
    assert not hasattr(minivlmrl, "gpro_loss")


def test_the_page_lists_all_public_names():
    assert sorted(re.findall(r"(?m)^\| `(\w+)` \| \S", PAGE)) == sorted(minivlmrl.__all__)


def test_the_example_of_the_page():
    example, *_ = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    space = {}
    exec(example, space)
    assert space["loss"].item() == pytest.approx(0.0, abs=1e-6)
    gradient = space["logps"].grad
    assert (gradient[0, :3] < 0).all() and (gradient[1, :2] > 0).all() and gradient[1, 2] == 0
    assert torch.equal(gradient.isfinite(), torch.ones(2, 3).bool())
