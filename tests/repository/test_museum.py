"""Check the museum of mistakes: parity says what the page says about changed lines of minimal.py."""

import pytest
import torch

import minimal
from docs.scripts.museum import EXHIBITS, changed
from minivlmrl.extras.parity import depends, judge

GRPO = {"loss_type": "grpo", "importance_sampling_level": "token"}


@pytest.mark.parametrize("exhibit", EXHIBITS, ids=lambda exhibit: exhibit.title)
def test_each_exhibit_runs_and_parity_says_what_the_page_says(exhibit, tmp_path):
    names = changed(exhibit)
    if exhibit.found_by == "`minivlmrl parity`":
        has_ratio = "beta *" not in exhibit.wrong  # the wrong KL is not multiplied by the ratio
        assert exhibit.says in str(judge(names["grpo_loss"], **GRPO, use_bias_correction_kl=has_ratio))
    elif "depends" in exhibit.found_by:
        assert exhibit.says in " ".join(faults(names, tmp_path))


def faults(names, folder):
    """Check the log-probabilities of answers in minimal.py."""
    torch.manual_seed(0)
    names["make_folder"](folder)
    model = names["load"](folder)
    with torch.no_grad():
        prompt = names["make_prompt"](model, names["draw_row"]())
    ids = torch.randint(0, 12, (2, 5))
    return depends(
        lambda ids: names["log_probabilities"](model, prompt, ids), ids, torch.ones_like(ids), tolerance=1e-4
    )


def test_parity_says_nothing_about_minimal(tmp_path):
    assert judge(minimal.grpo_loss, **GRPO).agrees
    assert "next token" not in " ".join(faults(vars(minimal), tmp_path))
