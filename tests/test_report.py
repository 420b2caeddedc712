"""The picture of a run."""

import warnings

import PIL.Image
import pytest

from minivlmrl.rows import Row
from minivlmrl.run.evaluate import Answer, Evaluation
from minivlmrl.tools.report import write_report


def test_characters_that_the_font_does_not_have_are_drawn_without_a_warning(tmp_path):
    """A run in Chinese would end in hundreds of them."""
    pytest.importorskip("matplotlib", reason="extra missing: pip install matplotlib")
    (tmp_path / "metrics.jsonl").write_text('{"stage": "grpo", "step": 1, "reward": 0.5}\n')
    rows = [Row([{"role": "user", "content": "猫?"}], [PIL.Image.new("RGB", (8, 8))], {"solution": "猫が好き"})]
    results = {"start": Evaluation(0.0, 0.0, 0.0, [Answer("<answer>犬</answer>", 0.0, None)])}
    summary = {"chance": None, "start": {"sampled": 0.0, "greedy": 0.0}, "seconds": {}}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        write_report(tmp_path, summary, rows, results)
    assert (tmp_path / "report.png").stat().st_size > 0
