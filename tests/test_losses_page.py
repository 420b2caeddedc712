"""The pages of the losses are complete, and their links hold: docs/policy_gradients.md, preferences.md, ppo.md.

A link to code has the name of a function as its text, a link to a test file the name of a test, a link to
minivlmrl/audit/ the name of a family of cells: a row of the table that `python -m minivlmrl parity` prints.
"""

import dataclasses
import inspect
import re
import typing

import pytest
from links import LINK, ROOT, links, names

from minivlmrl import losses
from minivlmrl.algorithms import policy_losses, ppo_loss, preference_losses, sft_loss
from minivlmrl.audit.parity import families
from minivlmrl.run.config import RunConfig
from minivlmrl.run.optimizer import TrainingConfig
from minivlmrl.sampling.pieces import PiecesConfig
from minivlmrl.train import ALGORITHMS

PAGES = [ROOT / "docs" / name for name in ("policy_gradients.md", "preferences.md", "ppo.md")]
TEXT = "\n".join(page.read_text() for page in PAGES)
CODE = {code.rpartition(".")[2] for code in re.findall(r"`([^`\n]+)`", TEXT)}  # options and functions in the text
MODULES = (losses, policy_losses, preference_losses, sft_loss, ppo_loss)
OPTIONS = [  # dataclasses of options and inputs
    value
    for module in MODULES
    for value in vars(module).values()
    if dataclasses.is_dataclass(value) and value.__module__ == module.__name__
]
FUNCTIONS = [losses.grpo_loss, policy_losses.policy_loss, policy_losses.rollout_importance_ratio]
FUNCTIONS += [preference_losses.dpo_loss, preference_losses.kto_loss, preference_losses.reward_loss]
FUNCTIONS += [sft_loss.sft_loss, ppo_loss.ppo_loss]
TABLES = [losses.LOSSES, losses.AVERAGES, policy_losses.AVERAGES, policy_losses.CORRECTION_MODES]
TABLES += [preference_losses.DPO_LOSSES]
# of stages in general, no part of a loss
SHARED = {field.name for options in (TrainingConfig, PiecesConfig) for field in dataclasses.fields(options)}


def choices(hint) -> set[str]:
    """Texts of the Literals in an annotation."""
    if typing.get_origin(hint) is typing.Literal:
        return {text for text in typing.get_args(hint) if isinstance(text, str)}
    return {text for part in typing.get_args(hint) for text in choices(part)}


def unexplained(options) -> set[str]:
    """Optional fields of a dataclass, and texts that they take, of which the pages say nothing."""
    given = {field.name for field in dataclasses.fields(options) if field.default is not dataclasses.MISSING}
    hints = {name: hint for name, hint in typing.get_type_hints(options).items() if name in given - SHARED}
    return ({*hints} | {text for hint in hints.values() for text in choices(hint)}) - CODE


@pytest.mark.parametrize(("page", "name", "file"), [(p.name, *link) for p in PAGES for link in sorted(set(links(p)))])
def test_a_link_leads_to_what_it_says(page, name, file):
    assert file.is_file(), f"{page}: {file} does not exist"
    found = set(families()) if file.parent.name == "audit" else names(file)
    assert name in found, f"{page}: {file.relative_to(ROOT)} has no {name}"


def test_tests_are_named_with_a_link():
    assert re.findall(r"\btest_\w+\b(?!\.py)", LINK.sub("", TEXT)) == []


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: options.__name__)
def test_every_option_of_a_loss_is_explained(options):
    assert unexplained(options) == set()


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_every_parameter_is_explained(function):
    parameters = inspect.signature(function).parameters.values()
    optional = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY or p.default is not p.empty}
    assert optional - CODE == set()


@pytest.mark.parametrize("stage", [name for name in ALGORITHMS if name != "grpo family"])
def test_every_option_of_a_stage_is_explained(stage):
    assert unexplained(typing.get_type_hints(RunConfig)[stage]) == set()


def test_every_name_of_a_table_is_explained():
    assert {name for table in TABLES for name in table} - CODE == set()
