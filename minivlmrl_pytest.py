"""Load the options of `pytest --pyargs minivlmrl.losses.parity`, and do nothing in other pytest runs.

pytest imports this module in every run if minivlmrl is installed, because pytest finds no conftest.py for a `--pyargs`
argument before it parses the command line. So this module imports neither minivlmrl nor torch.
"""

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config):
    """Load the plugin minivlmrl.commands.pytest_parity if the command line names minivlmrl.losses.parity."""
    arguments = early_config.known_args_namespace.file_or_dir
    if "minivlmrl.losses.parity" in [argument.partition("::")[0] for argument in arguments]:
        early_config.pluginmanager.import_plugin("minivlmrl.commands.pytest_parity")
