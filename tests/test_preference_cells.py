"""Batches of the preference cells are telling, and every list of choices is whole."""

import pytest

from minivlmrl.algorithms import preference_losses as preference
from minivlmrl.audit.preference_cells import DIVERGENCES, LISTS, SMOOTHED, WEIGHTABLE, B, T, preference_batch


@pytest.mark.parametrize("seed", range(4))
def test_a_batch_has_pairs_of_answers_of_several_lengths(seed):
    batch = preference_batch(seed)
    assert all(value.shape == (B, 2, T) for value in batch.values())
    lengths = batch["mask"].sum(2)
    assert lengths.min() >= 1 and len(lengths.unique()) > 1
    assert batch["per_token_logps"].max() < 0 > batch["ref_per_token_logps"].max()


def test_the_choices_are_those_of_our_losses():
    assert {choice["f_divergence_type"] for choice in DIVERGENCES} | {"reverse_kl"} == set(preference.F_DIVERGENCES)
    assert {*SMOOTHED, *WEIGHTABLE, *(name for names, _ in LISTS for name in names)} <= set(preference.DPO_LOSSES)
