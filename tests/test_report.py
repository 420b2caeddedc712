"""The picture of a run."""

import warnings

import PIL.Image
import pytest

from minivlmrl.rows import Row
from minivlmrl.run import report
from minivlmrl.run.evaluate import Answer, Evaluation
from minivlmrl.run.report import print_table, write_report
from minivlmrl.tasks.shapes import Shapes
from recipes.localisation import Localisation


def test_characters_that_the_font_does_not_have_are_drawn_without_a_warning(tmp_path):
    """A run in Chinese would end in hundreds of them."""
    pytest.importorskip("matplotlib", reason="extra missing: pip install matplotlib")
    (tmp_path / "metrics.jsonl").write_text('{"stage": "grpo", "step": 1, "reward": 0.5}\n')
    rows = [Row([{"role": "user", "content": "猫?"}], [PIL.Image.new("RGB", (8, 8))], {"solution": "猫が好き"})]
    results = {"start": Evaluation({}, [Answer("<answer>犬</answer>", 0.0, None)])}
    summary = {"chance": None, "start": {"sampled": 0.0, "greedy": 0.0}, "seconds": {}}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        write_report(tmp_path, summary, rows, results)
    assert (tmp_path / "report.png").stat().st_size > 0


def strip(rows, results):
    """The lower half of the report."""
    plt = pytest.importorskip("matplotlib.pyplot")
    figure = plt.figure()
    report._strip(figure, rows, results)
    plt.close(figure)
    return figure


def test_each_answer_is_under_its_own_row():
    rows = Shapes(6, "report")
    answers = [Answer(rows[i].completion, float(i not in (1, 5)), None) for i in range(6)]
    figure = strip(rows, {"start": Evaluation({}, answers)})
    for i, axis in enumerate(figure.axes):
        [said] = axis.texts
        assert axis.get_title() == rows[i].columns["solution"]
        assert said.get_text() == f"start\n{rows[i].columns['solution']}"
        assert said.get_color() == (report.WRONG if i in (1, 5) else report.RIGHT)
        assert not axis.lines  # no boxes


def test_the_table_says_on_how_many_rows(capsys):
    summary = {"chance": 0.25, "start": {"sampled": 0.5}, "seconds": {"sft": 1.0}}
    print_table(summary, "chance", 256)
    assert capsys.readouterr().out.splitlines()[1:3] == ["held-out 256  sampled", "chance          0.250    0.250"]
    print_table({"chance": None, "seconds": {"sft": 1.0}})  # nothing was evaluated
    assert capsys.readouterr().out == "training: sft 1.0 s\n"


def test_it_draws_true_and_answered_boxes():
    """In the picture of each row: black the truth, dotted the box before, dashed after, coloured by score."""

    def said(i, box, score):
        return Answer(f"<think>7 7 7 7</think><answer>{box}</answer>", score, (8, 8))

    rows = Localisation(3, "test")
    true = [" ".join(str(v // 7) for v in rows[i].columns["solution"]) for i in range(3)]
    before = [said(0, true[0], 1.0), said(1, "0 0 1 1", 0.1), said(2, "no box", 0.0)]
    after = [said(0, true[0], 1.0), said(1, true[1], 1.0), said(2, "0 0 8 8", 0.2)]
    results = {name: Evaluation({}, a) for name, a in (("start", before), ("after_sft", after))}
    axes = strip(rows, results).axes
    drawn = [
        [(line.get_color(), line.get_linestyle(), *corners(line)) for line in axis.lines] for axis in axes
    ]  # fmt: skip
    truth = [tuple(rows[i].columns["solution"]) for i in range(3)]
    assert drawn == [  # row 1 became right and comes first
        [("black", "-", *truth[1]), (report.WRONG, ":", 0, 0, 7, 7), (report.RIGHT, "--", *truth[1])],
        [("black", "-", *truth[0]), (report.RIGHT, ":", *truth[0]), (report.RIGHT, "--", *truth[0])],
        [("black", "-", *truth[2]), (report.WRONG, "--", 0, 0, 56, 56)],
    ]
    assert [axis.get_title() for axis in axes] == [rows[i].columns["problem"] for i in (1, 0, 2)]


def corners(line):
    """Edges of an outline; pixel 0 is drawn from -0.5 to 0.5."""
    x, y = ([value + 0.5 for value in values] for values in line.get_data())
    return min(x), min(y), max(x), max(y)


@pytest.mark.parametrize(
    ("solution", "count"), [([7, 14, 35, 42], 1), ([[7, 14, 35, 42], [0, 0, 7, 7]], 2), ("[7, 14, 35, 42]", 1)]
)
@pytest.mark.parametrize("column", ["problem", "prompt"])
def test_it_draws_solutions_and_prompts_in_every_form(solution, count, column):
    """Rewards read all of these; a row of one's own may ask by `prompt` instead of `problem`."""
    row = Localisation(1, "test")[0]
    row.columns = {column: "box the black circle", "solution": solution}
    results = {"start": Evaluation({}, [Answer("[14, 28, 70, 84]", 1.0, (112, 112))])}
    [axis] = strip([row], results).axes
    true = [line for line in axis.lines if line.get_color() == report.TRUE]
    assert [corners(line) for line in true] == [(7, 14, 35, 42), (0, 0, 7, 7)][:count]
    [answered] = [line for line in axis.lines if line.get_color() == report.RIGHT]
    assert corners(answered) == (7, 14, 35, 42)
    assert axis.get_title() == "box the black circle"
