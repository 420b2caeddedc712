"""Define the model folder of the built-in task for all tests of minimal.py."""

import pytest

import minimal


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    minimal.make_folder(folder)
    return folder
