"""Which class runs a stage."""

from dataclasses import fields

import pytest

from minivlmrl.config.options import GRPOOptions, RunConfig
from minivlmrl.trainers.grpo_family import Family, needs_family
from minivlmrl.trainers.grpo_stage import GRPOStage
from minivlmrl.trainers.registry import ALGORITHMS, find_algorithm

from stages import STAGES

NOT_IN_THE_BOOK = sorted({f.name for f in fields(GRPOOptions)} - {f.name for f in fields(GRPOOptions)})


class Run:
    """A recipe that has a section `grpo` alone."""

    def __init__(self, **options):
        self.grpo = GRPOOptions(**options)
        self.stages = []


def test_each_stage_has_a_class_of_its_name():
    assert set(ALGORITHMS) == set(STAGES)
    assert all(find_algorithm(name, Run()).stage == name for name in ALGORITHMS)
    for name, algorithm in ALGORITHMS.items():
        assert isinstance(getattr(RunConfig(), name), algorithm.config_type)
    known = r"dpo, grpo, ppo, reward_model, sft, file\.py:name"
    with pytest.raises(ValueError, match=rf"unknown stage 'tpo'; there are: {known}; did you mean ppo\?$"):
        find_algorithm("tpo", Run())


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_a_recipe_with_the_books_options_is_run_by_the_book(loss_type):
    options = {"loss_type": loss_type, "beta": 0.1, "importance_sampling_level": "sequence"}
    assert find_algorithm("grpo", Run(**options)) is GRPOStage


OTHERS = [{"loss_type": loss_type} for loss_type in ("bnpo", "luspo", "rloo", "cispo", "sapo", "vespo")]


@pytest.mark.parametrize("options", [*OTHERS, {"importance_sampling_level": "sequence_token"}], ids=str)
def test_other_losses_and_ratios_are_run_by_the_family(options):
    assert find_algorithm("grpo", Run(**options)) is Family


@pytest.mark.parametrize("name", NOT_IN_THE_BOOK)
def test_other_options_are_run_by_the_family(name):
    config = GRPOOptions()
    assert not needs_family(config)
    setattr(config, name, 0.7)
    assert needs_family(config)
