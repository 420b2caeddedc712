"""Test a report page's data, which contain only files from the run's folder."""

import copy
import json
import re

import pytest

from minivlmrl.diagnostics import report
from minivlmrl.errors import mistake
from tests.helpers.runs import write_lines

STEP = {"stage": "grpo", "step": 0}
COMPLETION = {
    "rewards": {"accuracy": 1.0}, "reward": 1.0, "advantage": 0.5, "boxes": [[0, 0, 1, 1]], "pictures": [],
    "tokens": [["a", -0.1], ["b", None]], "turns": [{"tokens": 2}], "why": {"accuracy": "equal"},
}  # fmt: skip
LINE = STEP | {"images": [], "row": 0, "truth": [[0, 0, 1, 1]], "completions": [COMPLETION]}
MEMORY = {f"{kind}_memory_gib": 1.0 for kind in ("peak", "allocated", "reserved", "free")}
TIMES = {"seconds": 2.0, "step_time": 1.0, "phases": {"forward": 1.0}, "tokens_per_second": 9.0, "mfu": 0.5}
RUN = {  # the files of a run that a page shows
    "metrics.jsonl": STEP | {"loss": 1.0, "completions/min_length": 3},
    "timings.jsonl": STEP | TIMES | MEMORY,
    "evaluations.jsonl": STEP | {"eval/loss": 1.0},
    "warnings.jsonl": STEP | {"warning": "all equal"},
    "completions.jsonl": LINE,
    "summary.json": {"chance": 0.1, "start": {"eval/loss": 1.0}, "seconds": {"grpo": 2.0}},
}
WRONG = [None, True, -1, 2**70, 1e308, "", "x\0", "\ud800", [], {}, [[]], {"a": {}}]


def damaged(value):
    """Yield copies of a JSON value in which one value inside is replaced or missing."""
    for key in value if isinstance(value, dict) else range(len(value)):
        changed = [*([wrong] for wrong in WRONG), []]
        if isinstance(value[key], dict | list):
            changed += [[inside] for inside in damaged(value[key])]
        for replacement in changed:
            other = copy.copy(value)
            if replacement:
                other[key] = replacement[0]
            else:
                del other[key]
            yield other


@pytest.mark.parametrize("name", RUN)
def test_a_damaged_file_is_shown_or_named(tmp_path, name):
    for file, line in RUN.items():
        write_lines(tmp_path / file, [line])
    report.write_page([tmp_path], tmp_path / "report.html")
    texts = [f"{json.dumps(value)}\n".encode() for value in damaged(RUN[name])]
    refused = 0
    for text in (*texts, b"", b"\xff", b"[]\n", b"null\n", b"[" * 10**5 + b"\n", b"9" * 5000 + b"\n", b"{}\n"):
        (tmp_path / name).write_bytes(text)
        try:
            report.write_page([tmp_path], tmp_path / "report.html")
        except ValueError as error:
            assert mistake(error), error  # not a traceback
            assert str(error).startswith(str(tmp_path / name))
            refused += 1
    assert refused > 20


NAMED = [  # file, changed values (... is removed), what is said
    ("timings.jsonl", {"step_time": ...}, "timings.jsonl:1: step_time is missing"),
    (
        "timings.jsonl",
        {"tokens_per_second": None},
        "timings.jsonl:1: tokens_per_second is None, but it must be of type",
    ),
    ("timings.jsonl", {"phases": {"forward": "1"}}, "timings.jsonl:1: phases.forward is '1'"),
    ("metrics.jsonl", {"loss": "low"}, "metrics.jsonl:1: loss is 'low', but it must be of type float"),
    ("evaluations.jsonl", {"eval/loss": []}, "evaluations.jsonl:1: eval/loss is []"),
    ("warnings.jsonl", {"warning": ...}, "warnings.jsonl:1: warning is missing"),
    ("completions.jsonl", {"completions": ...}, "completions.jsonl:1: completions is missing"),
    ("completions.jsonl", {"images": ["a\0b"]}, "completions.jsonl: "),
    ("summary.json", {"chance": {}}, "summary.json: chance is {}, but it must be of type float"),
    ("summary.json", {"start": {"eval/loss": "x"}}, "summary.json: start.eval/loss is 'x'"),
]


@pytest.mark.parametrize(("name", "change", "says"), NAMED)
def test_the_file_and_the_field_are_named(tmp_path, name, change, says):
    write_lines(tmp_path / "metrics.jsonl", [])
    line = {key: value for key, value in (RUN[name] | change).items() if value is not ...}
    write_lines(tmp_path / name, [line])
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path}/{says}")):
        report.collect_run(tmp_path)


def test_a_config_in_another_encoding_is_named(tmp_path):
    write_lines(tmp_path / "metrics.jsonl", [])
    (tmp_path / "config.yaml").write_bytes("seed: ä".encode("utf-16"))
    with pytest.raises(ValueError, match=r"config\.yaml: 'utf-8' codec can't decode"):
        report.collect_run(tmp_path)


def test_a_page_has_a_limited_number_of_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "STEPS", 3)
    monkeypatch.setattr(report, "PROMPTS", 2)
    (tmp_path / "metrics.jsonl").write_text('{"stage": "grpo", "step": 0, "reward": 1.0}\n{"stage": "gr')
    lines = [LINE | {"step": step} for step in range(8) for _ in "abc"]
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
    evil = "<img src=x onerror=alert(1)>"
    for change, message in (
        *(({"images": [path]}, "is not an image in the folder images/ of the run") for path in (
            "secret.txt", "images/../secret.txt", "images/link.webp", str(tmp_path / "secret.txt"), "images/gone.webp",
        )),
        *(({name: evil}, f"completions.jsonl:1: {name} is '<img src=x") for name in ("step", "row")),
        ({"completions": [COMPLETION | {"reward": evil}]}, "it must be of type float"),
        ({"truth": [[evil]]}, "it must be of type float"),
        ({"images": None}, "images is None, but it must be of type list"),
    ):  # fmt: skip
        write_lines(tmp_path / "completions.jsonl", [LINE | change])
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
