"""Test a report page's data, which contain only files from the run's folder."""

import re

import pytest

from minivlmrl.diagnostics import report
from tests.helpers.runs import write_lines


def test_a_page_has_a_limited_number_of_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "STEPS", 3)
    monkeypatch.setattr(report, "PROMPTS", 2)
    (tmp_path / "metrics.jsonl").write_text('{"stage": "grpo", "step": 0, "reward": 1.0}\n{"stage": "gr')
    lines = [{"stage": "grpo", "step": step, "images": []} for step in range(8) for _ in "abc"]
    write_lines(tmp_path / "completions.jsonl", lines)
    shown = report.collect_run(tmp_path)
    assert [line["step"] for line in shown["completions"]] == [1, 1, 4, 4, 7, 7, 8, 8]
    # the run is still writing the last line
    assert len(shown["metrics"]) == 1 and shown["summary"] is None


def test_a_folder_from_somebody_else_cannot_embed_other_files(tmp_path):
    """Other files on this machine are not embedded, and text is refused instead of a number."""
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "link.webp").symlink_to(tmp_path / "secret.txt")
    line, evil = {"stage": "grpo", "step": 0, "images": []}, "<img src=x onerror=alert(1)>"
    for change, message in (
        *(({"images": [path]}, "is not an image in the folder images/ of the run") for path in (
            "secret.txt", "images/../secret.txt", "images/link.webp", str(tmp_path / "secret.txt"), "images/gone.webp",
        )),
        *(({name: evil}, f"completions.jsonl:1: {name} is '<img src=x") for name in ("step", "row")),
        ({"completions": [{"reward": evil}]}, "it must be of type float"),
        ({"truth": [[evil]]}, "it must be of type float"),
        ({"images": None}, "images is None, but it must be of type list"),
    ):  # fmt: skip
        write_lines(tmp_path / "completions.jsonl", [line | change])
        with pytest.raises(ValueError, match=re.escape(message)):
            report.write_page([tmp_path], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_nan_in_metrics_keeps_the_page_readable(tmp_path):
    """Older runs may have written NaN, which browsers cannot parse."""
    (tmp_path / "metrics.jsonl").write_text('{"stage": "grpo", "step": 0, "loss": NaN}\n')
    report.write_page([tmp_path], tmp_path / "report.html")
    assert '"loss": null' in (tmp_path / "report.html").read_text()


def test_a_long_stage_has_a_bounded_number_of_points(tmp_path, monkeypatch):
    """A point is a mean over some steps; for the length range it has the extremes. A short stage has every step."""
    monkeypatch.setattr(report, "POINTS", 3)
    short = [{"stage": "sft", "step": i, "loss": float(i)} for i in range(3)]
    lines = [
        {"stage": "grpo", "step": i, "reward": float(i), "kl": None if i else 1.0, "completions/min_length": i,
         "completions/max_length": i}
        for i in range(11)
    ]  # fmt: skip
    write_lines(tmp_path / "metrics.jsonl", short + lines)
    write_lines(tmp_path / "evaluations.jsonl", [{"stage": "grpo", "step": 11, "eval/loss": 1.0}])
    shown = report.collect_run(tmp_path)
    assert shown["steps_per_point"] == {"sft": 1, "grpo": 4}
    assert shown["metrics"][:3] == [line | {"step": line["step"] + 1} for line in short]
    names = "step", "reward", "kl", "completions/min_length", "completions/max_length"
    points = [[line[name] for name in names] for line in shown["metrics"][3:]]
    assert points == [[4, 1.5, 1.0, 0, 3], [8, 5.5, None, 4, 7], [11, 9.0, None, 8, 10]]
    assert shown["evaluations"] == [{"step": 14, "eval/loss": 1.0}]
