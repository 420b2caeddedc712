"""Test the report page of a run in a browser, even with hostile text in the files of the run."""

import json
import re
import shutil
import subprocess

import pytest
from pytest import approx

from minivlmrl.config.loading import load_config
from minivlmrl.monitor import report
from minivlmrl.monitor.report import TEMPLATE, collect_run
from minivlmrl.run.callbacks import Callback, default_callbacks
from minivlmrl.run.loop import run_training
from tests.helpers.runs import LETTERS, metrics, write_lines

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run")
# the folder of a run that is trained once, and copied for each test
FOLDERS = []
WRITE_PAGE = report.write_page  # which `quick` replaces, so that most tests write no page

JUDGES = "--data.eval_rewards=[accuracy, format]"


@pytest.fixture
def trained(run, quick, varied_rollouts, tmp_path, tmp_path_factory, monkeypatch):
    """Return the folder of a run in which each step trains on one group of eight completions."""
    if not FOLDERS:
        options = "--log_completions=1", "--grpo.num_generations=8", "--grpo.prompts_per_step=1", "--grpo.max_steps=3"
        folder = run("--stages=[grpo]", *options, LETTERS, JUDGES)
        FOLDERS.append(folder.rename(tmp_path_factory.mktemp("page") / "run"))
    monkeypatch.setattr(report, "write_page", WRITE_PAGE)
    return shutil.copytree(FOLDERS[0], tmp_path / "run")


def browse(path, place, folder):
    """Open a page in a browser, run its script, and return the HTML without embedded data and places to break names."""
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine: apt install chromium")
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder / 'browser'}", "--dump-dom", f"file://{path}#{place}"]
    html = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    return html.partition('<script id="data"')[0].replace("<wbr>", "")


@pytest.mark.slow
def test_the_page_shows_completions_and_rewards_of_a_step(trained, tmp_path):
    """Completions are shown as text, even if they contain tags that end a script."""
    lines = metrics(trained, "completions.jsonl")
    evil = "</script><script>document.title = 'taken'</script><img src=x onerror=\"document.title='taken'\">"
    first, second, third = lines[1]["completions"][:3]
    lines[1]["prompt"] = first["tokens"][0][0] = evil
    for completion in lines[1]["completions"]:
        completion |= {"answer": None, "why": {}}
    first |= {"answer": "red square\n", "why": {"accuracy": "the answer is 'red square'"}}
    second |= {"answer": evil, "why": {evil: evil}}
    del third["answer"], third["why"]  # version 0.4 wrote neither answer nor why
    write_lines(trained / "completions.jsonl", lines)
    report.main([str(trained)])
    html = browse(trained / "report.html", "grpo/2/1", tmp_path)
    assert "<title>minivlmrl</title>" in html and html.count("&lt;/script&gt;") == 10
    assert '<output id="step">grpo 2</output>' in html  # the page counts steps from 1, as the terminal does
    answers = re.findall(r'<p class="why">answer: (.*?)</p>', html)
    assert len(answers) == 7 and answers.count("none") == 5 and '"red square\\n"' in answers
    assert "<p class=\"why\">accuracy: the answer is 'red square'</p>" in html
    rewards = [float(reward) for reward in re.findall(r'data-reward="([^"]*)"', html)]
    steps = metrics(trained)
    assert len(rewards) == 8 and sum(rewards) / 8 == approx(steps[1]["reward"])
    charts = re.findall(r'aria-label="(\S+) by step"', html)
    evaluated = {"eval/accuracy_sampled", "eval/accuracy_greedy", "eval/format_sampled"}
    assert sorted(charts) == sorted(steps[0].keys() - {"stage", "step"} | evaluated)
    assert re.search(r'<tr class="chance"><td>chance</td>(<td class="bar"[^>]*>0\.083</td>){2}<td></td>', html)
    head = html.partition("</table>")[0]
    assert re.findall(r"<th title.*?>(.*?)</th>", head) == ["accuracy_sampled", "accuracy_greedy", "format_sampled"]
    # the page shows one image next to the completions, and one image on a button
    assert html.count('src="data:image/webp;base64,') == 2
    assert "http" not in TEMPLATE.read_text()  # the page needs no network


@pytest.mark.slow
def test_recipe_warnings_and_results_come_first(trained, tmp_path):
    """The page opens at a step whose advantages are not all 0."""
    lines = metrics(trained, "completions.jsonl")
    for i, line in enumerate(lines):
        for reward, completion in enumerate(line["completions"]):
            completion |= {"reward": float(reward), "advantage": reward - 3.5 if i == 1 else 0.0}
    write_lines(trained / "completions.jsonl", lines)
    step = {"stage": "grpo", "step": 2}
    write_lines(trained / "warnings.jsonl", [step | {"warning": "all <groups> earn the same"}])
    evaluation = {"stage": "grpo", "step": 3, "eval/accuracy_sampled": 0.25, "eval/accuracy_greedy": 0.5}
    write_lines(trained / "evaluations.jsonl", [evaluation])
    sft = [{"stage": "sft", "step": i, "loss": 1.0} for i in range(7)]
    write_lines(trained / "metrics.jsonl", sft + metrics(trained))
    at_the_end = {"step": 10, "eval/accuracy_sampled": 0.25, "eval/accuracy_greedy": 0.5}
    assert collect_run(trained)["evaluations"] == [at_the_end]
    report.main([str(trained)])
    html = browse(trained / "report.html", "", tmp_path)
    assert html.index("grpo step 3: all &lt;groups&gt; earn the same") < html.index("Curves")
    assert re.search(r"grpo: 3 steps in \d+ s; at most [\d.]+ GiB", html)
    assert "<summary>recipe.yaml; evaluated on 4 rows</summary>" in html
    assert "  config: model.json\n" in html and "  max_steps: 3\n" in html
    assert '<output id="step">grpo 2</output>' in html and "nothing to learn" not in html
    assert re.findall(r'data-reward="([^"]*)"', html) == list("76543210")  # the best completion comes first


@pytest.mark.slow
def test_the_page_of_two_runs_opens_at_a_common_stage(trained, tmp_path):
    """If 1 of 4 answers is right, the mean plus two standard errors is 1/4 + 2 (3/64)^1/2 = 0.683."""
    other = shutil.copytree(trained, tmp_path / "other")
    dpo = [{"stage": "dpo", "step": i, "loss": 1.0} for i in range(2)]
    write_lines(other / "metrics.jsonl", metrics(other) + dpo)
    line = {"stage": "grpo", "eval/accuracy_sampled": 0.25}
    write_lines(trained / "evaluations.jsonl", [line | {"step": 3 * i, "eval/loss": 1 + i / 1e6} for i in range(2)])
    report.main([str(trained), str(other), "--out", str(tmp_path / "ab.html")])
    html = browse(tmp_path / "ab.html", "", tmp_path)
    charts = {text.partition('"')[0]: text for text in html.split('aria-label="')}
    # the page opens at grpo, because only one run has dpo
    assert "reward by step" in charts
    sampled, flat = charts["eval/accuracy_sampled by step"], charts["eval/loss by step"]
    assert '<path class="error" d="M46.0 112.0L46.0 46.4"></path>' in sampled and ">1</text>" in sampled
    assert 'd="M46.0 64.0L294.0 64.0"' in flat and "error" not in flat


@pytest.fixture
def watched(home, tmp_path, monkeypatch):
    """Return a function that trains three steps of 61 seconds each, and calls `look` before each step."""
    now = [0]
    monkeypatch.setattr(report, "clock", lambda: now[0])

    class Look(Callback):
        def on_step_begin(self, *_):
            now[0] += 61
            now[1]()

    def watched(look, *options):
        now[1:] = [look]
        options = "--stages=[sft]", f"--output_dir={tmp_path / 'run'}", "--resume=never", *options
        config = load_config(home / "recipe.yaml", options)
        run_training(config, [*default_callbacks(config), Look()])

    return watched


def shown(path):
    return [(run["reload"], len(run["metrics"])) for run in data_of(path)]


def data_of(path):
    return json.loads(path.read_text().partition('type="application/json">')[2].partition("</script>")[0])


def test_the_page_is_updated_until_the_run_ends(watched, tmp_path, capsys):
    report, loaded_pages = tmp_path / "run" / "report.html", []
    watched(lambda: loaded_pages.extend(shown(report)))
    assert loaded_pages == [(60, 0), (60, 1), (60, 2)] and shown(report) == [(0, 3)]
    assert data_of(report)[0]["summary"] == json.loads((report.parent / "summary.json").read_text())
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("device: CPU (threads: ")
    assert f"output: {report.parent}; open report.html there in a browser" in printed
    with pytest.raises(ZeroDivisionError):  # the page of a failed run does not reload either
        watched(lambda: len(shown(report)) / (shown(report)[0][1] < 2))
    assert shown(report) == [(0, 2)]


def test_folders_without_a_run_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has no metrics\.jsonl; pass the output_dir of a run"):
        report.main([str(tmp_path)])
    with pytest.raises(ValueError, match="one or two runs, but 3 were given"):
        report.main(["a", "b", "c"])
