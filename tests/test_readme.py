"""README and docs are promises: links lead somewhere, commands and snippets run, numbers are those of the project."""

import contextlib
import itertools
import json
import math
import re
import shlex
import tomllib
from importlib import metadata
from pathlib import Path

import PIL.Image
import pytest
import yaml
from hub_configs import real_config
from packaging.requirements import Requirement

from benchmarks import house, learning
from minivlmrl import train
from minivlmrl.__main__ import TOOLS
from minivlmrl.__main__ import main as start
from minivlmrl.audit.parity import families
from minivlmrl.reward_functions import names
from minivlmrl.rewards import score
from minivlmrl.run.config import load_config
from minivlmrl.scale.checkpoint import random_model, save_model
from minivlmrl.scale.ranks import World
from minivlmrl.tasks import shapes

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
RESULTS = (ROOT / "docs" / "results.md").read_text()
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in [ROOT / "README.md", *ROOT.glob("docs/*.md")]}


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


COMMANDS = [line for text in PAGES.values() for block in blocks(text, "bash") for line in block.splitlines()]
IN_TEXT = [code for text in PAGES.values() for code in re.findall(r"`((?:python|torchrun) [^`]+)`", text)]


def rows_of(text: str, title: str) -> list[list[str]]:
    """Cells of the first table below a title, without its head."""
    section = text.split(f"## {title}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" |")] for line in lines[2:]]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    text = PAGES[page]
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"(?m)^\[\w+\]: (\S+)$", text)
    for target in targets:
        file, _, title = target.partition("#")
        path = (ROOT / page).parent / file if file else ROOT / page
        assert path.exists(), target
        if re.fullmatch(r"L\d+", title):  # a line of code
            assert re.search(r"^\s*(def|class|@)", path.read_text().splitlines()[int(title[1:]) - 1]), target
        elif title:
            titles = [line.lstrip("# ") for line in path.read_text().splitlines() if line.startswith("#")]
            assert title in [re.sub(r"[^\w -]", "", line).lower().replace(" ", "-") for line in titles], target
    assert all((ROOT / file).is_file() for file in re.findall(r"(?:recipes|benchmarks|tests)/\w+\.\w+", text))


def test_every_page_is_linked():
    assert [page for page in PAGES if page.startswith("docs/") and f"({page})" not in README] == []


def test_readme_is_short_and_begins_with_two_commands():
    run, tests, *_ = [line for block in blocks(README, "bash") for line in block.splitlines()]
    assert run.endswith("pip install -c constraints.txt -e '.[report]' && torchrun train.py")
    assert tests.endswith("pip install -c constraints.txt -e '.[test]' && pytest")
    assert README.splitlines().index("```bash") <= 20 and len(README.splitlines()) <= 180
    ci = (ROOT / ".ci" / "run").read_text()
    assert "-c constraints.txt -e '.[test]'" in ci and re.search(r"^pytest$", ci, re.MULTILINE)


@pytest.mark.parametrize("command", sorted({c for c in [*COMMANDS, *IN_TEXT] if re.search(r"train\.py|minivlmrl", c)}))
def test_commands_use_real_tools_recipes_and_options(command):
    words = [word for word in shlex.split(command) if word != "..."]
    if "minivlmrl" in words:
        tool = words[words.index("-m") + 2 :][:1]
        assert not tool or tool[0] in TOOLS or tool == ["TOOL"]
        if tool not in (["plan"], ["train"]):
            return
    recipes = [word for word in words if word.startswith("recipes/")] or ["recipes/shapes.yaml"]
    options = [word for word in words if re.match(r"--\w+(\.\w+)*=", word)]
    ours = [word for word in options if not re.match(r"--(nnodes|nproc|node_|master|rdzv|max-|shutdown|signals)", word)]
    load_config(ROOT / recipes[0], ours)


def test_numbers_of_the_default_run():
    """0.74 million weights, 96 demonstrations of which half are wrong, 256 held-out pictures, the table at the end."""
    recipe = yaml.safe_load((ROOT / "recipes" / "shapes.yaml").read_text())
    model, _ = random_model(ROOT / "recipes" / "shapes_model.json", shapes.tokenizer(), seed=0)
    assert f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} million" in README
    assert f"{recipe['data']['demonstrations']}\ndemonstrations" in README
    assert recipe["data"]["wrong_demonstrations"] == 0.5
    assert f"{recipe['data']['eval_rows']} held-out pictures" in README
    assert blocks(README, "text") == blocks(RESULTS, "text")


def test_the_band_of_the_default_run():
    """README's band is that of results.md over processors, where the runs of recipes/expected.json are."""
    shown = re.findall(r"\.\d{3}", " ".join(itertools.chain(*rows_of(RESULTS, "The default run"))))
    for run in json.loads((ROOT / "recipes" / "expected.json").read_text()):
        if (run["recipe"], run["overrides"], run["seed"]) == ("shapes.yaml", [], 0):
            assert f"{run['results']['after_grpo']['sampled']:.3f}".lstrip("0") in shown
    assert f"ends with {min(shown)} to {max(shown)} sampled" in README


def test_what_is_installed_is_pinned():
    """Also what dependencies bring along; PyTorch pins the packages of CUDA itself."""
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    pins = {name.replace("_", "-"): version for name, version in pins.items()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    waiting = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    found = {}
    while waiting:
        wanted = Requirement(waiting.pop())
        name = re.sub(r"[-_.]+", "-", wanted.name).lower()
        if name in found or name == "minivlmrl" or name.startswith(("nvidia", "cuda")):
            continue
        with contextlib.suppress(metadata.PackageNotFoundError):  # of another platform
            found[name] = metadata.version(name)
            waiting += [text for text in metadata.requires(name) or () if for_us(Requirement(text), wanted.extras)]
    assert {name: version for name, version in found.items() if pins.get(name) != version.partition("+")[0]} == {}


def for_us(requirement, extras):
    return requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in {"", *extras})


def test_versions_are_those_of_the_constraints():
    constraints = (ROOT / "constraints.txt").read_text()
    assert "transformers==5.23.0" in constraints and "transformers 5.23" in README
    assert "trl==1.16.0" in constraints and "TRL 1.16" in README
    assert "torch==2.13.0" in constraints and "torch 2.13.0" in RESULTS


def test_the_table_of_the_book():
    rows = rows_of(README, "The book")
    assert [row[0] for row in rows] == [f"[{name}.py](minivlmrl/{name}.py)" for name in house.READING_ORDER]
    lines = [math.ceil(count / 10) * 10 for count in house.book().values()]
    assert [int(row[1]) for row in rows] == lines, "`python tests/test_readme.py` writes them anew"
    assert all((ROOT / re.search(r"\((tests/test_\w+\.py)\)", row[3])[1]).is_file() for row in rows)


def test_functions_that_the_readme_names_exist():
    for name, file in re.findall(r"`([\w.]+)` in\s+\[[\w.]+\]\((minivlmrl/\w+\.py)\)", README):
        assert re.search(rf"(?:def|class) {name.split('.')[-1]}\b", (ROOT / file).read_text()), f"{name} in {file}"


def test_results_are_those_of_the_page():
    """docs/results.md has every number of the README's table, with its command and date."""
    for what, result, command in rows_of(README, "What it reaches"):
        assert command.strip("`") in RESULTS
        numbers = re.findall(r"[\d.]+", result)
        assert len(numbers) >= 3 and [number for number in numbers if number not in RESULTS] == [], what


def test_how_exact_is_what_the_tests_ask():
    """The tolerance or the number of cases of each row, in the test that the row names."""
    import test_checkpoint_table
    import test_generate

    rows = {row[3].partition("]")[0].strip("["): row for row in rows_of(README, "How exact")}
    assert len(rows) == 6 and all((ROOT / "tests" / name).is_file() for name in rows)
    assert f"{sum(map(len, families().values()))} cells" in rows["test_parity.py"][0]
    assert f"{len(test_generate.SETTINGS + test_generate.MORE_SETTINGS)} settings" in rows["test_generate.py"][0]
    assert float(rows["test_checkpoint_table.py"][2]) == test_checkpoint_table.TOLERANCE
    for name in ("test_logprobs.py", "test_ranks.py"):
        assert rows[name][2] == "1e-12" and "1e-12" in (ROOT / "tests" / name).read_text()


def test_every_run_of_the_learning_table_is_shown():
    shown = [row[0] for row in rows_of(RESULTS, "Every algorithm, three seeds")]
    assert shown == [entry.name for entry in learning.PLAN]
    assert {f"after_{stage}" for stage in train.ALGORITHMS} >= {"after_sft", "after_kto", "after_ppo"}


@pytest.mark.slow
def test_the_table_of_the_memory_plan(tmp_path, capsys):
    """docs/memory.md: its command with the model, GPUs and options of each row of its table."""
    page = PAGES["docs/memory.md"]
    [command] = [line for block in blocks(page, "bash") for line in block.splitlines()]
    rows = re.findall(r"\| (Qwen\S+), (\d+) GPUs(?:, `(\S+)`)? \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", page)
    assert len(rows) == 3
    for model, gpus, option, *expected in rows:
        (tmp_path / "config.json").write_text(json.dumps(real_config(model)))
        words = shlex.split(command.replace("FOLDER", str(tmp_path)).replace("--gpus 8", f"--gpus {gpus}"))[3:]
        assert start([*words, *filter(None, [option])]) == 0
        [total] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| all |")]
        assert re.findall(r"[\d.]+", total) == expected, model


# ---- the snippets --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A folder with what the README writes: train.jsonl, an image beside it, my_rewards.py; and a tiny model."""
    folder = tmp_path_factory.mktemp("own")
    [line] = blocks(README, "json")
    (folder / "train.jsonl").write_text(line)
    (folder / "eval.jsonl").write_text(line)
    PIL.Image.new("RGB", (80, 60), "red").save(folder / "cat.jpg")
    (folder / "my_rewards.py").write_text(next(code for code in blocks(README, "python") if "def brevity" in code))
    values = json.loads((ROOT / "recipes" / "shapes_model.json").read_text())
    (folder / "model.json").write_text(json.dumps(values))
    model, processor = random_model(folder / "model.json", shapes.tokenizer(), seed=0)
    save_model(folder / "model", model, processor, World(0, 1, model.lm_head.weight.device))
    return folder


def test_your_own_data_and_your_own_reward(own, tmp_path, monkeypatch):
    [command] = [c for c in COMMANDS if "my_rewards.py" in c and c in README]
    monkeypatch.chdir(own)
    words = shlex.split(command.replace("FOLDER", "model"))[2:]
    small = ["--grpo.max_steps=1", "--grpo.prompts_per_step=1", "--sampling.max_new_tokens=4", "--num_threads=1"]
    code = train.main([str(ROOT / words[0]), *words[1:], *small, f"--output_dir={tmp_path}"])
    [line] = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert code == 0 and line["rewards/my_rewards.py:brevity/mean"] == 1.0 and line["rewards/accuracy/mean"] == 0.0


@pytest.mark.parametrize("page", ["README.md", "docs/data.md"])
def test_the_same_in_a_notebook(own, tmp_path, monkeypatch, page):
    [code] = [code for code in blocks(PAGES[page], "python") if "tools.notebook" in code]
    monkeypatch.chdir(own)
    monkeypatch.syspath_prepend(own)
    small = {"grpo": {"max_steps": 1, "prompts_per_step": 1}, "sampling": {"max_new_tokens": 4}, "num_threads": 1}
    more = "".join(f", {name}={value!r}" for name, value in {**small, "output_dir": str(tmp_path)}.items())
    exec(code.replace('"FOLDER"}', '"model"}' + more), {})
    [line] = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert line["rewards/brevity/mean"] == 1.0 and line["rewards/accuracy/mean"] == 0.0
    del names.REWARDS["brevity"]


def test_a_task_of_your_own(own, tmp_path, monkeypatch):
    """docs/tasks.md: its file and its command, a few steps of it."""
    [code], [command] = (blocks(PAGES["docs/tasks.md"], language) for language in ("python", "bash"))
    (tmp_path / "dots.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command.strip())[2:]
    small = ["--data.eval_rows=8", "--num_threads=1", *(f"--{stage}.max_steps=2" for stage in ("sft", "grpo"))]
    assert train.main([str(ROOT / words[0]), *words[1:], *small]) == 0
    summary = json.loads((tmp_path / "runs" / "dots" / "summary.json").read_text())
    assert summary["chance"] == 0.25 and {"after_sft", "after_grpo"} <= set(summary)


def test_the_table_of_rewards():
    """docs/rewards.md has every reward, and its examples earn 1."""
    rows = rows_of(PAGES["docs/rewards.md"], "By name")
    named = {row[0].strip("`") for row in rows}
    assert set(names.REWARDS) - {"acc_0_5", "giou", "box_format"} == named
    examples = {row[0].strip("`"): re.findall("`([^`]+)`", row[3]) for row in rows if row[3]}
    assert len(examples) == len(rows) - 4
    for name, (answer, *solution) in examples.items():
        columns = {"solution": solution} if solution else {}
        sizes = {"image_sizes": [(9, 9)], "answer_extents": [(9, 9)]}
        assert score([name], [answer], columns | sizes, "whole").item() == 1, name
        assert names.required_columns([name]) == (["solution"] if solution else []), name


def test_a_loss_alone():
    [code] = [code for code in blocks(README, "python") if "grpo_loss" in code]
    names = {}
    exec(code, names)
    assert names["loss"].item() == -0.5 and names["logps"].grad.tolist() == [[-0.25, -0.25]]


if __name__ == "__main__":
    for name, count in house.book().items():
        README = re.sub(rf"(\| \[{name}\.py\]\(\S+\) \|) \d+ ", rf"\1 {math.ceil(count / 10) * 10} ", README)
    (ROOT / "README.md").write_text(README)
