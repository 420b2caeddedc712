"""Batches of the preference cells are telling, and every list of choices is whole."""

import pytest
from parity.compare import questions
from parity.preference_cells import T, preference_batch

from minivlmrl.algorithms import preference_losses as preference


@pytest.mark.parametrize("seed", range(4))
def test_a_batch_has_pairs_of_answers_of_several_lengths(seed):
    batch = preference_batch(seed)
    assert all(value.shape == (3, 2, T) for value in batch.values())
    lengths = batch["mask"].sum(2)
    assert lengths.min() >= 1 and len(lengths.unique()) > 1
    assert batch["per_token_logps"].max() < 0 > batch["ref_per_token_logps"].max()


def test_the_choices_are_those_of_our_losses():
    """Each option of families.yaml is tried with every loss that takes it; TRL refuses some weights."""
    of = {name: set() for name in ("loss_type", "f_divergence_type", "ld_alpha")}
    for question in questions("dpo"):
        for name in of.keys() & question.options.keys():
            of[name].add(str(question.options["loss_type"]))
    kinds = {question.options.get("f_divergence_type", "reverse_kl") for question in questions("dpo")}
    assert kinds == set(preference.F_DIVERGENCES) and of["f_divergence_type"] == set(preference.F_LOSSES)
    assert set(preference.DPO_LOSSES) == of["ld_alpha"] <= of["loss_type"]
