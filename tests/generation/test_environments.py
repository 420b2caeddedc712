"""Test the functions that call agents/, and that a run without tools does not import agents/."""

import subprocess
import sys

import pytest

from minivlmrl.config.options import RunConfig, SamplingOptions
from minivlmrl.generation.environments import check_environment

IMPORT_ALL = """
import importlib, pkgutil, sys
import minivlmrl
below = "generation trainers run commands rewards model data losses distributed tasks config kernels".split()
for folder in below:
    package = importlib.import_module(f"minivlmrl.{folder}")
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
print([name for name in sys.modules if name.startswith("minivlmrl.extras.agents")])
"""


def test_modules_below_agents_do_not_import_it():
    """Modules import agents/ only inside functions, so importing all other modules does not load it."""
    result = subprocess.run([sys.executable, "-c", IMPORT_ALL], capture_output=True, text=True)
    assert result.stdout == "[]\n", result.stderr


def test_a_reward_that_reads_the_environment_needs_one():
    run = RunConfig(rewards={"environment": 1.0}, sampling=SamplingOptions())
    with pytest.raises(ValueError, match=r"but sampling.environment \(None\) does not have"):
        check_environment(run)
    check_environment(RunConfig(rewards={"format": 1.0}, sampling=SamplingOptions()))
