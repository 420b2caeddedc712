"""Test the stage recipes/kto.py: KTO on answers that are labeled good or bad."""

import json

import pytest
from pytest import approx

from tests.helpers.links import ROOT
from tests.helpers.runs import metrics, write_lines

KTO = [f"--stages=[{ROOT}/recipes/kto.py:KTO]", "--kto.max_steps=20", "--kto.prompts_per_step=8"]


@pytest.mark.parametrize(("size", "ranks"), [(1, 1), (7, 1), (3, 2), (8, 8)])
def test_a_micro_batch_of_one_row_is_refused(run, user_data, quick, monkeypatch, size, ranks):
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    message = f"^kto: {8 // ranks} rows of a rank in micro-batches of {size} leave one with a single row, but the KL is"
    with pytest.raises(ValueError, match=message):
        run(*user_data, *KTO, f"--kto.micro_batch_size={size}")


@pytest.mark.parametrize("size", [8, 4])
def test_good_answers_become_more_likely_than_bad_ones(run, quick, user_data, rows, home, size):
    """While policy and reference are equal, each answer has the loss 0.5."""
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    labeled = [line | {"completion": line["chosen" if i % 2 else "rejected"], "label": i % 2 == 1}
               for i, line in enumerate(lines)]  # fmt: skip
    write_lines(home / "labeled.jsonl", labeled)
    options = [f"--kto.micro_batch_size={size}", "--kto.learning_rate=1e-3", f"--data.train_file={home}/labeled.jsonl"]
    first, *_, last = metrics(run(*user_data, *KTO, *options, "--data.eval_rows=0"))
    assert first["loss"] == approx(0.5, abs=1e-6) and first["kl"] == 0
    assert last["loss"] < 0.5 and last["rewards/chosen"] > last["rewards/rejected"]
