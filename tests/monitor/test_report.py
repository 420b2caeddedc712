"""Test the data of report pages, which may contain only files in the folder of the run."""

import json
import re
from pathlib import Path

import pytest

from minivlmrl.errors import user_error_message
from minivlmrl.monitor import report
from tests.helpers.runs import write_lines

STEP = {"stage": "grpo", "step": 0}
COMPLETION = {
    "rewards": {"accuracy": 1.0}, "reward": 1.0, "advantage": 0.5, "boxes": [[0, 0, 1, 1]], "pictures": [],
    "tokens": [["a", -0.1], ["b", None]], "turns": [{"tokens": 2}], "why": {"accuracy": "equal"},
}  # fmt: skip
LINE = STEP | {"images": [], "row": 0, "truth": [[0, 0, 1, 1]], "completions": [COMPLETION]}
NAMED = [  # (file, content, error message)
    ("metrics.jsonl", b"{}\n", "metrics.jsonl:1: stage is missing"),
    ("timings.jsonl", b"\xff\n", "timings.jsonl:1: the text is not valid JSON"),
    ("warnings.jsonl", b"[]\n", "warnings.jsonl:1: the file is [], but it must be an object with names and values"),
    ("evaluations.jsonl", b'{"stage": "sft", "step": 0}\n{"stage": "sft", "step": "<img>"}\n',
     "evaluations.jsonl:2: step is '<img>', but it must be of type int"),
    ("completions.jsonl", b"[" * 10**5 + b"\n", "completions.jsonl:1: the text is not valid JSON"),
    ("summary.json", b"null", "summary.json: the content is None, but it must be a JSON object"),
    ("metrics.jsonl", b'{"stage": "sft", "step": 0, "loss": [1]}\n',
     "metrics.jsonl:1: loss is [1], but it must be a number"),
    ("timings.jsonl",
     b'{"stage": "sft", "step": 0, "step_time": 1, "tokens_per_second": 1, "phases": {"update": null}}\n',
     "timings.jsonl:1: phases.update is None, but it must be of type float"),
    ("warnings.jsonl", b'{"stage": "sft", "step": 0}\n', "warnings.jsonl:1: warning is missing"),
    ("evaluations.jsonl", b'{"stage": "sft", "step": 0, "eval/loss": "x"}\n',
     "evaluations.jsonl:1: eval/loss is 'x', but it must be a number"),
    ("completions.jsonl", b'{"stage": "sft", "step": 0, "images": [], "completions": [1]}\n',
     "completions.jsonl:1: completions is 1, but it must be an object with names and values"),
    ("summary.json", b'{"chance": 2}', "summary.json: chance is 2.0, but it must be in [0, 1]"),
    ("summary.json", b'{"start": {"eval/accuracy": true}}', "summary.json: start: eval/accuracy is True, but it must"),
    ("config.yaml", "# café".encode("latin-1"), "config.yaml: 'utf-8' codec can't decode"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "expected"), NAMED, ids=[expected.split(",")[0] for *_, expected in NAMED])
def test_a_damaged_file_is_named(tmp_path, name, content, expected):
    write_lines(tmp_path / "metrics.jsonl", [])
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path}/{expected}")) as raised:
        report.collect_run(tmp_path)
    assert user_error_message(raised.value)


def test_healthy_values_are_those_of_the_documentation():
    shown = re.search(r"const HEALTH = (\{.*?\});", report.TEMPLATE.read_text(), re.DOTALL)[1]
    table = Path("docs/metrics.md").read_text().partition("## Online stages")[2].partition("## Offline stages")[0]
    for name, value in json.loads(shown).items():
        [healthy] = [line.split("|")[3] for line in table.splitlines() if line.startswith(f"| `{name}`")]
        assert all(word in healthy for word in re.findall(r"[0-9][0-9.e-]*|near|slowly|steady", value)), (name, healthy)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((0.4, 0.93), "+0.530 in sft (more than noise)."),
        ((0.0, 0.5, 0.4), "+0.500 in sft (more than noise), -0.100 in grpo (more than noise)."),
        ((0.5, 0.56), "+0.060 in sft (can be noise)."),  # 2 standard errors are 0.088
        ((0.0, 0.015), "+0.015 in sft (can be noise)."),  # 4 of 256 right answers
    ],
    ids=["risen", "fallen", "noise", "near 0"],
)
def test_each_stage_is_compared_with_noise(values, expected):
    names = ["start", "after_sft", "after_grpo"][: len(values)]
    results = {name: {"eval/accuracy_sampled": value} for name, value in zip(names, values, strict=True)}
    summary = {"chance": 0.1} | results | {"seconds": {"grpo": 9.0}}
    text = report.describe_change(summary, 256)
    assert text == f"accuracy_sampled on 256 held-out rows changed by {expected}"
    missing = {"start": {}, "after_dpo": {"eval/accuracy_sampled": None}}
    assert report.describe_change(missing, 256) is None and report.describe_change({**results, **missing}, 256) is None
    assert report.describe_change(summary, 0) is None and report.describe_change({"chance": 0.1}, 256) is None


def test_a_page_has_a_limited_number_of_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "STEPS", 3)
    monkeypatch.setattr(report, "PROMPTS", 2)
    (tmp_path / "metrics.jsonl").write_text('{"stage": "grpo", "step": 0, "reward": 1.0}\n{"stage": "gr')
    write_lines(tmp_path / "completions.jsonl", [LINE | {"step": step} for step in range(8) for _ in "abc"])
    shown = report.collect_run(tmp_path)
    assert [line["step"] for line in shown["completions"]] == [1, 1, 4, 4, 7, 7, 8, 8]
    # the run is still writing the last line of the metrics
    assert len(shown["metrics"]) == 1 and shown["summary"] is None


def test_a_page_shows_no_folder_of_the_machine(tmp_path):
    """Neither the recipe nor the place of a row, a warning or the name of a reward contains one."""
    reward = "/home/ann/own rewards/my.py:f"
    (tmp_path / "config.yaml").write_text(f"data: {{train_file: /data/ann/rows.jsonl}}\nrewards:\n  {reward}: 1.0\n")
    write_lines(tmp_path / "metrics.jsonl", [STEP | {f"rewards/{reward}/mean": 1.0}])
    write_lines(tmp_path / "warnings.jsonl", [STEP | {"warning": "see /tmp/x/runs/completions.jsonl, and a/b"}])
    write_lines(tmp_path / "completions.jsonl", [LINE | {"where": "/data/ann/eval.jsonl:3"}])
    report.write_page([tmp_path], tmp_path / "report.html")
    [data] = re.findall(r'type="application/json">(.*?)</script>', (tmp_path / "report.html").read_text())
    assert not re.search("/data|/tmp|/home|ann/", data)
    shown = json.loads(data)[0]
    assert shown["completions"][0]["where"] == "eval.jsonl:3" and "train_file: rows.jsonl" in shown["config"]
    assert shown["warnings"][0]["warning"] == "see completions.jsonl, and a/b"


def test_a_folder_from_somebody_else_cannot_embed_other_files(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "link.webp").symlink_to(tmp_path / "secret.txt")
    for path in (
        "secret.txt", "images/../secret.txt", "images/link.webp", str(tmp_path / "secret.txt"), "images/gone.webp",
    ):  # fmt: skip
        write_lines(tmp_path / "completions.jsonl", [LINE | {"images": [path]}])
        with pytest.raises(ValueError, match=r"is not an image in the run's folder images/|link\.webp is a link"):
            report.write_page([tmp_path], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("name", [
    "config.yaml", "metrics.jsonl", "timings.jsonl", "evaluations.jsonl", "warnings.jsonl", "completions.jsonl",
    "summary.json", "images",
])  # fmt: skip
def test_a_link_to_a_file_outside_the_run_is_refused(tmp_path, name):
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text("")
    write_lines(run / "completions.jsonl", [LINE | {"images": ["images/a.webp"]}])
    (tmp_path / "secret").mkdir()
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match=f"{name} is a link to .*, outside its folder. Replace the link"):
        report.collect_run(run)


def test_a_page_does_not_write_through_a_link(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "report.html.partial").symlink_to(tmp_path / "precious")
    report.write_page([tmp_path], tmp_path / "report.html")
    assert (tmp_path / "precious").read_text() == "mine" and not (tmp_path / "report.html").is_symlink()


def test_a_long_stage_has_a_bounded_number_of_points(tmp_path, monkeypatch):
    """A point of a curve is a mean over several steps; minimum and maximum lengths stay extremes."""
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
