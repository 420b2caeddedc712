"""Test the parity assertions that users call in their own tests."""

import pytest
import torch

from minivlmrl.extras.parity.assertions import assert_split_invariant, assert_step_split_invariant
from minivlmrl.extras.parity.step import write
from minivlmrl.extras.parity.step_format import OPTIONS, PolicyOptions, term_arguments
from minivlmrl.losses import grpo, preference, sft

X, LENGTHS = torch.arange(24.0).view(6, 4), torch.tensor([4, 1, 3, 2, 4, 1])


def sums(rows):
    mask = torch.arange(4) < LENGTHS[rows, None]
    return (X[rows] * mask).sum(0), mask.sum()


def mean_over_tokens(parts):
    """Average the gradient over all tokens of the step, whatever the split into `parts`."""
    return {"w": sum(sums(rows)[0] for rows in parts) / LENGTHS.sum()}


def mean_of_means(parts):
    return {"w": sum(total / count for total, count in map(sums, parts)) / len(parts)}


@pytest.mark.parametrize("rows, gradients, expected", [
    (6, mean_of_means, "^micro-batches .* the gradient of w differs"),
    (6, lambda parts: {"w": torch.zeros(2)}, "all gradients are zero"),
    (6, lambda parts: {"a": torch.ones(2), "b": torch.tensor([1.0, torch.nan])},
     "the gradient of b differs from the gradient of the whole step by inf"),
    (6, lambda parts: {"abc"[i]: torch.ones(2) for i in range(len(parts))}, "b has a gradient either only"),
    (1, mean_over_tokens, "rows is 1, but at least 2 rows are needed"),
])  # fmt: skip
def test_gradients_that_depend_on_the_split_or_are_invalid_fail(rows, gradients, expected):
    assert_split_invariant(mean_over_tokens, 6)
    with pytest.raises(AssertionError, match=expected):
        assert_split_invariant(gradients, rows)
    assert_split_invariant(mean_of_means, 4, sizes=[1])


def test_options_equal_those_of_the_losses():
    losses = {"grpo": (grpo.grpo_loss, 7), "dpo": (preference.dpo_loss, 9), "sft": (sft.sft_loss, 1)}
    assert losses.keys() == OPTIONS.keys()
    for kind, (loss, number) in losses.items():
        ours = {name: x for name, x in vars(OPTIONS[kind]()).items() if name in loss.__kwdefaults__}
        if kind == "dpo":
            [ours["loss_type"]] = ours["loss_type"]  # DPO may combine several losses
        assert len(ours) == number and ours.items() <= loss.__kwdefaults__.items()
    for loss_type, term in grpo.TERMS.items():
        ours = term_arguments(PolicyOptions(loss_type=loss_type))
        assert ours == {name: x for name, x in (term.__kwdefaults__ or {}).items() if name in vars(PolicyOptions())}


def test_a_loss_is_replayed_on_the_micro_batches_of_a_recorded_step(tmp_path):
    mask = (torch.arange(4) < LENGTHS[:, None]).long()
    tensors = {"input_ids": mask, "completion_mask": mask, "per_token_logps": X / -24, "old_per_token_logps": X / -23}
    tensors["advantages"] = torch.tensor([1.0, -1.0, 0.5, 2.0, -2.0, 1.5])
    write(tmp_path, {"kind": "grpo", "loss": {"loss_type": "dapo", "epsilon_high": 0.3}}, tensors)
    assert_step_split_invariant(tmp_path, grpo.grpo_loss)

    def local(logps, advantages, mask, *, normalizer, **named):
        return grpo.grpo_loss(logps, advantages, mask, **named)

    with pytest.raises(AssertionError, match=r"micro-batches \[\[0, 2, 4\], .* differs from the gradient"):
        assert_step_split_invariant(tmp_path, local)
    write(tmp_path / "sft", {"kind": "sft"}, {name: tensors[name] for name in [*tensors][:3]})
    with pytest.raises(ValueError, match="only steps of kind grpo can be split"):
        assert_step_split_invariant(tmp_path / "sft", grpo.grpo_loss)
