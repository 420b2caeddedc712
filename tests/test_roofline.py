"""The roofline: its table, and what a step of ours spends besides products."""

import sys
from pathlib import Path

from minivlmrl.run.memory import Work

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import roofline
from sizes import config_of


def test_the_script_prints_a_table_and_a_step(capsys):
    roofline.main(["--model=toy", "--text=7", "--image=9", "--completion=8", "--prompts=2", "--cards=2", "--top=1"])
    output = capsys.readouterr().out
    assert output.count("| mm |") + output.count("| addmm |") >= 1
    assert "toy, 2 x h100: prefill" in output and "launches a layer of a decode step: " in output


def test_3b_computes_products_for_most_of_the_time():
    """Norms, rotary, activations and copies take .44 times as long as the products at most."""
    work = Work(prompts=2, num_generations=8, text_tokens=100, image_tokens=1000, completion_tokens=256)
    counts = roofline.phases(config_of("3b"), "h100", work)
    for phase in ("prefill", "scoring", "train"):
        seconds = counts[phase].total().seconds
        assert seconds <= 1.45 * (seconds - counts[phase].element_wise_seconds()), phase
