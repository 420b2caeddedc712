"""docs/losses.md is complete and its links hold. `python tests/test_losses_page.py` writes its line numbers anew.

A link to a line has code as its text: that line or its beginning (`return torch.relu`), or the name of what is defined
there (`build_critic`). A link to a test file has the name of a test in it, a link to minivlmrl/audit/ the name of
a family of cells, a row of the table that `python -m minivlmrl parity` prints.
"""

import dataclasses
import inspect
import re
import sys
from pathlib import Path

import pytest

from minivlmrl import losses as policy
from minivlmrl.advantages import SCALES
from minivlmrl.algorithms import ppo_loss as ppo
from minivlmrl.algorithms import preference_losses as preference
from minivlmrl.algorithms import sft_loss as sft
from minivlmrl.audit.cells import families
from minivlmrl.run import config

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "losses.md"
FAMILIES = families()
COMMAND = "python tests/test_losses_page.py writes the line numbers anew"
LINK = re.compile(r"\[`([^`]+)`\](?:\(\.\./([\w./]+)(?:#L(\d+))?\)|\[(\w+)\])")  # [`text`](file#L1) or [`text`][name]
DEFINED = dict(re.findall(r"^\[(\w+)\]: \.\./([\w./]+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE))

FUNCTIONS = (
    policy.grpo_loss, policy.rollout_importance_ratio, preference.dpo_loss, preference.kto_loss,
    preference.reward_loss, sft.sft_loss, ppo.ppo_loss,
)  # fmt: skip
VALUES = {
    "LOSS_TYPES": policy.LOSS_TYPES,
    "IMPORTANCE_SAMPLING_LEVELS": policy.IMPORTANCE_SAMPLING_LEVELS,
    "KL_ESTIMATORS": policy.KL_ESTIMATORS,
    "CORRECTION_MODES": policy.CORRECTION_MODES,
    "DPO_LOSSES": preference.DPO_LOSSES,
    "F_DIVERGENCES": preference.F_DIVERGENCES,
    "KTO_LOSS_TYPES": preference.KTO_LOSS_TYPES,
    "SFT_LOSS_TYPES": sft.SFT_LOSS_TYPES,
    "SCALES": SCALES,
}
STAGES = (config.SFTConfig, config.DPOConfig, config.RewardModelConfig, config.GRPOConfig, config.PPOConfig)


def links():
    """(text, file, line or None) of every link whose text is code."""
    for text, file, line, name in LINK.findall(PAGE.read_text(encoding="utf-8")):
        yield text.replace(r"\|", "|"), file or DEFINED.get(name, f"[{name}]"), int(line) if line else None


def lines_of(text: str, file: str) -> list[int]:
    """Numbers of the lines that a link's text names: where it is defined, else what equals it, else begins with it."""
    lines = [line.strip() for line in (ROOT / file).read_text(encoding="utf-8").splitlines()]
    definition = re.compile(rf"(def|class) {re.escape(text)}\b|{re.escape(text)}(: [^=]+)? = ")
    for names in (definition.match, text.__eq__, lambda line: line.startswith(text)):
        found = [number for number, line in enumerate(lines, 1) if names(line)]
        if found:
            return found
    return []


def names() -> set[str]:
    """What stands in the page as code of its own."""
    return set(re.findall(r"`([^`\n]+)`", PAGE.read_text(encoding="utf-8")))


@pytest.mark.parametrize(("text", "file", "line"), sorted(set(links()), key=str))
def test_a_link_leads_to_what_it_says(text, file, line):
    assert (ROOT / file).is_file(), f"{file}: no such file"
    if line is not None:
        found = lines_of(text, file)
        assert found, f"no line of {file} begins with {text!r} or defines it: change the link's text"
        assert len(found) == 1, f"lines {found} of {file} begin with {text!r}: make the link's text longer"
        assert found == [line], f"{text!r} stands in line {found[0]} of {file}, the link says {line}: {COMMAND}"
    elif file.startswith("tests/"):
        assert re.search(rf"^def {text}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE), (
            f"{file}: no {text}"
        )
    elif file.startswith("minivlmrl/audit/"):
        assert text in FAMILIES, f"{text!r} is no family of cells"


def test_every_link_is_of_these_forms():
    """So that none is left unchecked: other links are whole files, and those exist."""
    page = PAGE.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)]+)\)", LINK.sub("", page)):
        assert "#L" not in target, f"{target}: a link to a line needs code as its text"
        assert target.startswith("#") or (PAGE.parent / target).exists(), target
    assert not re.findall(r"\btest_\w+\b(?!\.py)", LINK.sub("", page)), "a test is named without a link to its file"


@pytest.mark.parametrize("table", VALUES)
def test_every_value_is_explained(table):
    missing = set(VALUES[table]) - names()
    assert not missing, f"docs/losses.md says nothing about {missing}"


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_every_parameter_is_explained(function):
    parameters = inspect.signature(function).parameters.values()
    optional = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY or p.default is not p.empty}
    missing = optional - names()
    assert optional and not missing, f"docs/losses.md says nothing about {missing}"


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.__name__)
def test_every_option_of_a_stage_is_explained(stage):
    """But for those that all stages share, which are no part of a loss."""
    shared = {field.name for field in dataclasses.fields(config.StageConfig)}
    missing = {field.name for field in dataclasses.fields(stage)} - shared - names()
    assert not missing, f"docs/losses.md says nothing about {missing}"


def renumber():
    """Write the number of the line that each link's text names into the link; returns what could not be found."""
    wrong = []

    def renumbered(match: re.Match) -> str:
        text, file, line = match[1].replace(r"\|", "|"), match[2], match[3]
        if line is None:
            return match[0]
        found = lines_of(text, file) if (ROOT / file).is_file() else []
        if len(found) != 1:
            wrong.append(f"{file}: {text!r} names {len(found)} lines; change the link's text")
            return match[0]
        return match[0].replace(f"#L{line})", f"#L{found[0]})")

    PAGE.write_text(LINK.sub(renumbered, PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return wrong


if __name__ == "__main__":
    sys.exit("\n".join(renumber()) or 0)
