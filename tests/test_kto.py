"""KTO on tiny models: its KL, its metrics and what it is trained on."""

import pytest
import torch

from minivlmrl.batch import pack
from minivlmrl.data.turns import encode_completion
from minivlmrl.logprobs import per_token_logps
from minivlmrl.objectives.preference_losses import KTOLoss, kto_kl, kto_loss
from minivlmrl.tasks.shapes import Shapes


class Labels(Shapes):
    """Row i has a good answer where i is even, a bad one elsewhere, of different lengths."""

    def __getitem__(self, index):
        row = super().__getitem__(index)
        row.completion = (row.chosen if index % 2 == 0 else row.rejected) + " so" * index
        row.columns["label"] = index % 2 == 0
        return row


@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
def test_a_step_by_hand(stage, loss_type):
    """After three steps: the KL is of each prompt with the answer of the row before, the first with the last one's."""
    run = stage("kto", f"--kto.loss_type={loss_type}", "--kto.undesirable_weight=0.5", rows=Labels(8, "rows"))
    run.go(3)
    rows = [run.batches.dataset[i] for i in peek(run)]
    encoded = [(row.prompt(run.algorithm.processor), answer(run, row)) for row in rows]
    answers = [ids for _, ids in encoded]

    @torch.no_grad()
    def logps(model, shift):
        shifted = answers[shift:] + answers[:shift]
        batch = pack([prompt for prompt, _ in encoded], [[ids] for ids in shifted], run.model.config)
        return batch.pad(per_token_logps(model, batch)[0]), batch.completion_mask

    (own, mask), (others, others_mask) = logps(run.model, 0), logps(run.model, -1)
    (ref, _), (others_ref, _) = (logps(run.algorithm.reference.model, shift) for shift in (0, -1))
    kl = kto_kl(others, others_ref, others_mask)
    labels = torch.tensor([row.columns["label"] for row in rows])
    options = KTOLoss(loss_type, undesirable_weight=0.5)
    loss, metrics = kto_loss(own, mask, labels, options, ref_per_token_logps=ref, kl=kl)
    [line] = run.go()
    assert line["loss"] == pytest.approx(loss.item(), rel=1e-9)
    for name, value in metrics.items():
        assert line[name] == pytest.approx(value.item(), rel=1e-6, abs=1e-9), name


def peek(run):
    """Row numbers of the next step."""
    return [number for number, _ in run.batches.coming]


def answer(run, row):
    return encode_completion(run.algorithm.processor, row.messages, row.completion).ids


def test_a_step_of_one_row_is_refused(stage):
    with pytest.raises(ValueError, match=r"kto\.prompts_per_step is 1, it must be 2 or more"):
        stage("kto", "--kto.prompts_per_step=1")
    stage("kto", "--kto.prompts_per_step=1", "--kto.loss_type=apo_zero_unpaired", rows=Labels(8, "rows")).go()
