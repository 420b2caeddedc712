"""Test what a run answers to the names of other projects and to removed options."""

import json
import re

import pytest

from minivlmrl.config import loading, options, parsing
from minivlmrl.extras.names import read_table
from tests.helpers.links import ROOT

OPTIONS = {option.path for option in parsing.options_of(options.RunConfig)}
# names that the papers and projects behind minivlmrl print; a name that is removed from minivlmrl stays in this list
SOURCES = json.loads((ROOT / "tests" / "recorded" / "names_of_sources.json").read_text())
# the recorded options are those that an earlier version had
REMOVED = sorted({*json.loads((ROOT / "tests" / "recorded" / "options.json").read_text())} - OPTIONS)


def refusal(name):
    with pytest.raises(ValueError) as error:
        loading.load_config("shapes.yaml", [f"--{name}=1"])
    return str(error.value)


def test_every_name_of_the_table_is_answered_as_the_table_says():
    assert len(read_table()) > 300
    for name, rows in read_table().items():
        assert not {option for row in rows for option in row.options} - OPTIONS - {"rewards"}, name
        if name in {*OPTIONS, *vars(options.RunConfig())}:
            continue
        message = refusal(name)
        for row in rows:
            if row.project == "removed":
                assert f"{name} was removed. Instead: {row.note}" in message
            elif not row.options:
                assert "minivlmrl has no such option: " in message and row.note in message, name
            assert (
                all(f"--{option}" in message for option in row.options)
                and row.note.removeprefix("same").removeprefix("; ") in message
            )


@pytest.mark.parametrize("name", [*SOURCES["options"], *SOURCES["columns"], *SOURCES["words"]])
def test_a_name_of_our_sources_is_an_option_or_is_answered(name):
    assert name in OPTIONS or re.search("the name in minivlmrl is --|minivlmrl has no such option: ", refusal(name))


@pytest.mark.parametrize("name", REMOVED)
def test_every_removed_option_is_answered(name):
    assert re.search("was removed. Instead: |the name in minivlmrl is --|minivlmrl has no such option: ", refusal(name))


@pytest.mark.parametrize(("name", "answer"), [
    ("shuffle_rewards", "grpo.shuffle_rewards was removed. Instead: recipes/shuffled.py"),  # the last part
    ("kto.beta", "kto was removed. Instead: "),
    ("learning-rate", "unknown key learning-rate; the name in minivlmrl is --sft.learning_rate or --dpo.learning_rate"),
    ("sft.per_device_train_batch_size", "the name in minivlmrl is --sft.micro_batch_size (counts prompts"),
    ("kl_coef", "the name in minivlmrl is --ppo.kl_coef or --grpo.beta (weight of the KL in the loss"),
    ("grpo.kl_coef", "the name in minivlmrl is --grpo.beta (weight"),
    ("ppo.beta", "no such option in the section ppo; --dpo.beta and --grpo.beta belong to other stages"),
    ("actor_rollout_ref.rollout.n", "unknown key actor_rollout_ref.rollout.n; the name in minivlmrl is --grpo.num_ge"),
    ("model.name", "the name in minivlmrl is --model.path"),
    ("adapter.rank", "the name in minivlmrl is --adapter.r"),
    ("lora.r", "unknown key lora.r; the name in minivlmrl is --adapter.r"),
    ("device", "CUDA_VISIBLE_DEVICES=-1 the CPU"),
    ("config", "minivlmrl has no such option: the recipe is the first argument"),  # not model.config
])  # fmt: skip
def test_an_answer_fits_the_section_in_which_a_name_is_typed(name, answer):
    assert answer in refusal(name)


@pytest.mark.parametrize(
    "name", ["zzz", "grpo.zzz", "grpo.clip_range", "reference.name", "frame_rate", "model_card", "num_fewshot"]
)
def test_nothing_is_guessed_for_a_name_that_no_option_resembles(name):
    assert not re.search("did you mean|the name in", refusal(name)) and "known keys are " in refusal(name)
