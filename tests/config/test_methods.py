"""Check that a method sets its options, also beside others, and that its page exists."""

import pytest

from minivlmrl.config.loading import load_config
from minivlmrl.config.methods import METHODS
from tests.helpers.links import ROOT


@pytest.mark.parametrize("name", METHODS)
def test_a_method_sets_its_options(name):
    grpo = load_config("shapes.yaml", ["--grpo.epsilon_high=0.9", "--method", name]).grpo
    assert {option: getattr(grpo, option) for option in METHODS[name].options} == METHODS[name].options
    assert METHODS[name].page is None or (ROOT / "docs" / "papers" / f"{METHODS[name].page}.md").is_file()


def test_later_options_override_a_method():
    assert load_config("shapes.yaml", ["--method=cispo", "--grpo.epsilon_high=3.0"]).grpo.epsilon_high == 3.0


@pytest.mark.parametrize(("options", "message"), [
    (["--method=cisp"], r"--method is 'cisp', but it must be one of grpo, .*cispo"),
    (["--method"], "--method is '', but it must be one of grpo"),
    (["--grpo.loss_type=cispo"], r"epsilon_high is 0\.2, but for loss_type cispo .* at least 1; write 5\.0"),
])  # fmt: skip
def test_a_wrong_method_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        load_config("shapes.yaml", options)
