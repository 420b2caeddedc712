"""Check benchmarks/expect.py, which tells whether the results of a run are in the expected band."""

import json

import pytest

from benchmarks import expect
from minivlmrl.config.import_utils import recipes_folder
from minivlmrl.config.loading import load_config
from tests.helpers.runs import summary


def test_the_band_decides(home, run, plain, tmp_path, capsys):
    """Compare a run with its recorded copy, in which one result was changed."""
    arguments = [str(home / "recipe.yaml"), f"--output_dir={tmp_path / 'run'}", "--stages=[sft]", "--sft.max_steps=1"]
    run(*arguments[2:])
    found = expect.results(summary(tmp_path / "run"))
    assert {"start", "after_sft"} == set(found)
    line = {"recipe": arguments[0], "overrides": arguments[2:], "seed": 0, "threads": 1}

    def compared(sampled: float, *other: str) -> tuple[int, list[str]]:
        found["after_sft"]["eval/accuracy_sampled"] = sampled
        expect.add_run(tmp_path / "expected.json", line | {"results": found})
        capsys.readouterr()
        code = expect.report(*expect.find([*arguments, *other], tmp_path / "expected.json"))
        return code, capsys.readouterr().out.splitlines()

    code, lines = compared(0.3, "--log_completions=0")  # two standard errors of 4 rows are 0.35
    assert code == 0 and len(lines) == 3
    assert lines[0] == "expect: after_sft eval/accuracy_sampled 0.000 is inside the band 0.000 to 0.646 of 1 runs"
    code, lines = compared(0.9)
    band = "the band 0.576 to 1.000 of 1 runs, 0 of which are below it too: try another seed"
    assert code == 1 and lines[0] == f"expect: after_sft eval/accuracy_sampled 0.000 is below {band}"
    assert len((tmp_path / "expected.json").read_text().splitlines()) == 3, "a run takes the place of its like"
    with pytest.raises(ValueError, match=r"no run of this recipe with these options; train with train.py instead$"):
        compared(0.9, "--sft.learning_rate=1e-5")


@pytest.mark.parametrize(("got", "position", "is_low"), [
    (0.81, "below", True),  # a regression, 10 points below nearly every run
    (0.742, "below", True),  # as low as the single bad run, so the message counts 1 run below the band
    (0.86, "inside", False),
    (0.99, "above", False),
])  # fmt: skip
def test_the_lowest_of_ten_runs_is_ignored_and_a_better_result_passes(got, position, is_low, capsys):
    """Without the lowest run, the band begins at 0.89 minus two standard errors, which are 0.039 for 256 rows."""
    values = [0.742, *[0.89, 0.92, 0.93] * 3]
    runs = [{"results": {"start": {}, "after_grpo": {"eval/accuracy_sampled": value}}} for value in values]
    runs.append({"results": {"start": {}, "after_grpo": {}}})  # a run with another reward
    assert expect.print_band({"after_grpo": {"eval/accuracy_sampled": got}}, runs, 256) == is_low
    out = capsys.readouterr().out
    assert f"{got:.3f} is {position} the band 0.851 to 0.969 of 10 runs" in out
    assert ("1 of which are below it too: try another seed" in out) == is_low
    assert ("better than expected, which is no failure" in out) == (position == "above")


def test_the_file_names_recipes_that_load():
    path = recipes_folder() / expect.FILE
    for run in json.loads(path.read_text()):
        stages = load_config(recipes_folder() / run["recipe"], run["overrides"]).stage_names
        assert list(run["results"]) == ["start", *(f"after_{stage}" for stage in stages)]
