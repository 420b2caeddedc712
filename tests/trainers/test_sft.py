"""Test SFT on tiny models."""

import math

import pytest
import torch

from minivlmrl.data.processor import encode_completion
from minivlmrl.distributed.process_group import World
from minivlmrl.tasks.shapes import Shapes
from minivlmrl.trainers import sft as file
from tests.helpers.stages import Rows


class Second(World):
    """Simulate the second of two ranks, which checks rows 1 and 3 for answers and sums only its own values."""

    def gather_objects(self, value):
        return [[0, 2], value]

    def sum(self, *values):
        return list(values)


@pytest.mark.parametrize("loss_type", ["nll", "dft"])
def test_the_loss_of_held_out_rows_is_a_mean_over_their_tokens(stage, monkeypatch, loss_type):
    """Token t gets the log-probability -(t % 7 + 1) / 4, and one row in four has no completion."""
    run = stage("sft", "--sft.micro_batch_size=2", f"--sft.loss_type={loss_type}")
    rows = Rows(Shapes(4, "x")[i] for i in range(4))
    rows[1].completion = None
    rows[3].completion += " and more"
    monkeypatch.setattr(file, "per_token_logps", lambda policy, group: (-(group.completion_ids % 7 + 1) / 4, None))
    ids = [encode_completion(run.trainer.processor, rows[i].messages, rows[i].completion).ids for i in (0, 2, 3)]

    def mean(ids):
        losses = [(t % 7 + 1) / 4 for row in ids for t in row.tolist()]
        return sum(loss * (math.exp(-loss) if loss_type == "dft" else 1) for loss in losses) / len(losses)

    assert run.trainer.evaluate(rows) == {"eval/loss": pytest.approx(mean(ids), rel=1e-12)}
    assert run.trainer.evaluate(Rows([rows[1]])) == {}
    run.trainer.world = Second(1, 2, torch.device("cpu"))  # rank 1 scores row 2, and row 0, which only rank 0 counts
    assert run.trainer.evaluate(rows)["eval/loss"] == pytest.approx(mean(ids[1:2]), rel=1e-12)
