"""Test what a run answers to the names of other projects and to removed options."""

import json
import re

import pytest

from minivlmrl.config.loading import load_config
from minivlmrl.config.options import RunConfig
from minivlmrl.config.parsing import options_of
from minivlmrl.extras.names import HERE, NOTHING, REMOVED
from tests.helpers.links import ROOT

PAGE = (ROOT / "docs" / "coming_from.md").read_text()
OPTIONS = {option.path for option in options_of(RunConfig)}
# names that the papers and projects behind minivlmrl print; a name that is removed from minivlmrl stays in this list
SOURCES = json.loads((ROOT / "tests" / "recorded" / "names_of_sources.json").read_text())


def said(name):
    with pytest.raises(ValueError) as error:
        load_config("shapes.yaml", [f"--{name}=1"])
    return str(error.value)


@pytest.mark.parametrize("name", SOURCES["options"])
def test_a_name_of_our_sources_is_an_option_or_is_answered(name):
    assert f"`{name}`" in PAGE
    if name not in OPTIONS:
        answers = "the name in minivlmrl is", "minivlmrl has no such option: ", "was removed. Instead: "
        assert any(answer in said(name) for answer in answers)


def test_columns_of_our_sources_are_on_the_page():
    assert all(f"`{name}`" in PAGE for name in SOURCES["columns"])


def test_every_removed_option_is_answered():
    """The recorded options are those that an earlier version had."""
    recorded = json.loads((ROOT / "tests" / "recorded" / "options.json").read_text())
    names = [name for names in REMOVED for name in names.split()]
    assert sorted(names) == sorted({*recorded} - OPTIONS)
    for name in names:
        assert "was removed. Instead: " in said(name) or name.rpartition(".")[2] in HERE


def test_answers_name_options():
    ours = {re.match(r"[\w.]+", name)[0].replace("STAGE", "grpo") for name in HERE.values()}
    assert ours <= OPTIONS and not HERE.keys() & NOTHING.keys() and not OPTIONS & {*HERE, *NOTHING}


def test_a_removed_option_is_found_by_its_last_part_unless_another_option_has_it():
    assert "reference.pattern was removed" in said("pattern")
    assert "kto.* was removed" in said("kto.beta")
    assert "the name in minivlmrl is --sft.learning_rate or" in said("learning_rate")
    assert "CUDA_VISIBLE_DEVICES=-1 the CPU" in said("device")
