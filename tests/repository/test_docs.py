"""Check README and docs/: links have a target, commands and snippets run, and numbers and pages are up to date."""

import dataclasses
import itertools
import json
import re
import shlex
import subprocess
import sys
import typing
import xml.etree.ElementTree

import PIL.Image
import pytest

from docs.scripts import it_learns, look, make_pages, notebooks, results
from minivlmrl.__main__ import COMMANDS as COMMAND_NAMES
from minivlmrl.commands.train import train_recipe
from minivlmrl.config.loading import load_config
from minivlmrl.config.options import RunConfig, TrainingOptions
from minivlmrl.distributed.saving import save_model
from minivlmrl.losses.preference import DPO_LOSSES
from minivlmrl.model.build import random_model
from minivlmrl.rewards.registry import REWARDS, get_reward
from minivlmrl.rewards.text import find_answer
from minivlmrl.tasks import shapes
from minivlmrl.trainers.registry import TRAINERS
from tests.helpers.draws import ids_of
from tests.helpers.links import ROOT, blocks, links, missing, names, rows_of
from tests.helpers.runs import metrics
from tests.parity.test_families import FAMILIES

NUMBER = re.compile(r"[+-]?\d+(?:\.\d+)?")
PATTERNS = "README.md", ".github/*.md", "docs/**/*.md"
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text() for name in PATTERNS for path in ROOT.glob(name)}
OTHER_SITES = re.compile(
    r"https://(arxiv\.org/abs|img\.shields\.io/badge|docs\.nvidia\.com/deploy|github\.com/[\w-]+/[\w-]+/(actions|issues|pull))/"
)
OWN_SITE = "https://github.com/minivlmrl/minivlmrl/blob/main/"
NAMED = "README.md", "docs/results.md", "docs/rewards.md", "docs/data.md"
README, RESULTS, REWARDS_PAGE, DATA = (PAGES[name] for name in NAMED)
CHINESE = (ROOT / "README.zh-CN.md").read_text(encoding="utf-8")


def commands(text: str) -> list[str]:
    """Return the commands in bash code blocks; a backslash at the end joins a line with the next line."""
    return [line for block in blocks(text, "bash") for line in block.replace("\\\n", " ").splitlines()]


COMMANDS = [line for text in PAGES.values() for line in commands(text)]
COMMANDS += [code for text in PAGES.values() for code in re.findall(r"`((?:python|torchrun) [^`]+)`", text)]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    text = PAGES[page]
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)  # code such as f["x"](y) is no link
    assert not re.search(r"(?m)^#+\d", prose), "a line that begins with an issue number becomes a title"
    for target in re.findall(r"\]\(([^)\s]+)\)", prose) + re.findall(r"(?m)^\[\w+\]: (\S+)$", text):
        if OTHER_SITES.match(target):
            continue
        file, _, title = target.partition("#")
        path = (ROOT / page).parent / file if file else ROOT / page
        if file.startswith(OWN_SITE):  # the page of a wheel has no files beside it
            path = ROOT / file.removeprefix(OWN_SITE)
        assert path.exists(), target
        if path.suffix == ".py" and title:
            line = path.read_text().splitlines()[int(title.removeprefix("L")) - 1]
            assert re.search(r"(def|class) \w+|@", line), f"{target}: run python -m docs.scripts.make_pages"
        elif title:
            titles = [line.lstrip("# ") for line in path.read_text().splitlines() if line.startswith("#")]
            assert title in [re.sub(r"[^\w -]", "", line).lower().replace(" ", "-") for line in titles], target
    removed = r"(?<![0-9a-f]:)"  # `git show COMMIT:FILE` names a removed file
    named = set(re.findall(removed + r"(?<!tests/)(?:recipes|benchmarks|tests|docs/scripts)/\w+\.\w+", text))
    if page != "docs/changelog.md":  # the changelog also names removed files
        assert [file for file in sorted(named) if not (ROOT / file).is_file()] == []
    cells = {name for name, file in links(ROOT / page) if file.parent.name == "parity"} & FAMILIES.keys()
    assert [line for line in missing(ROOT / page) if line.partition(": no ")[2] not in cells] == []


@pytest.mark.parametrize("command", sorted({c for c in COMMANDS if re.search(r"train\.py|minivlmrl", c)}))
def test_commands_use_real_tools_recipes_and_options(command):
    words = [word for word in shlex.split(command) if word != "..."]
    if words[0] == "pytest":  # test_wheel.py runs the command
        return
    if "minivlmrl" in words:  # `minivlmrl COMMAND`, or `python -m minivlmrl COMMAND`
        tool = words[words.index("minivlmrl") + 1 :][:1]
        assert not tool or tool[0] in COMMAND_NAMES or tool == ["COMMAND"]
        if tool not in (["memory"], ["train"]):
            return
    recipes = [word for word in words if word.startswith("recipes/")] or ["recipes/shapes.yaml"]
    options = [word for word in words if re.match(r"--\w+(\.\w+)*=", word)]
    ours = [word for word in options if not re.match(r"--(nnodes|nproc|node_|master|rdzv|max-|shutdown|signals)", word)]
    load_config(ROOT / recipes[0], [word.replace("$seed", "0") for word in ours])


def test_commands_of_scripts_have_files_and_flags_that_exist():
    found = 0
    for command in COMMANDS:
        if match := re.match(r"(?:python|torchrun) (?:-m (docs[\w.]+)|((benchmarks|recipes)/\w+\.py))", command):
            path = ROOT / (match[2] or match[1].replace(".", "/"))
            path = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
            assert path.is_file(), command
            flags = re.findall(r" (--\w+)(?=[= ]|$)", command)
            code = path.read_text()
            code += (ROOT / "benchmarks" / "common.py").read_text() if "common.study_options" in code else ""
            assert [flag for flag in flags if f'"{flag}"' not in code] == [], command
            found += 1
    assert found > 8


def test_the_reading_list_names_what_its_files_define():
    rows = re.findall(r"^\| \[[\w./]+\]\(\.\./([\w./]+)\).*\| `([\w.]+)` \|$", PAGES["docs/developer_guide.md"], re.M)
    assert len(rows) > 10 and [(file, name) for file, name in rows if name not in names(ROOT / file)] == []


def test_the_band_of_the_default_run():
    shown = re.findall(r"\.\d{3}", " ".join(itertools.chain(*rows_of(RESULTS, "The default run"))))
    for run in json.loads((ROOT / "recipes" / "expected.json").read_text())["runs"]:
        if (run["recipe"], run["overrides"], run["seed"]) == ("shapes.yaml", [], 0):
            assert f"{run['results']['after_grpo']['eval/accuracy_sampled']:.3f}".lstrip("0") in shown
    assert f"between 0{min(shown)} and 0{max(shown)} on" in " ".join(README.split())


@pytest.mark.parametrize("page", ["docs/results.md", "docs/it_learns.md", "docs/look.md"])
def test_each_measured_number_is_in_a_log(page):
    """Tables that make_pages writes are as committed; other numbers are in a log, or the table says "log not kept"."""
    values = set()
    for file in [ROOT / "recipes" / "expected.json", *(ROOT / "docs" / "curves").glob("*.json")]:
        values |= {f"{float(x):.3f}".lstrip("0") for x in re.findall(r"(?<=[\s\[])\d*\.\d+", file.read_text())}
    written = [*results.TABLES, *it_learns.TABLES, *look.TABLES]
    tables = re.findall(r"(?m)^\|(.*)\n\|[-|]+\n((?:\|.*\n)+)", PAGES[page])
    for heading, rows in tables:
        if heading.split("|")[0].strip() in written or "log not kept" in heading or "version" in heading:
            continue
        for row in rows.splitlines():
            numbers = re.findall(r"(?<![\w.])\d*\.\d+(?![\w.])", row.partition("](")[0])
            logged = all(number.lstrip("0") in values for number in numbers)
            assert logged or "log not kept" in row or "torch" in row or "Python" in row, row


def test_the_prose_of_look_has_the_numbers_of_its_tables():
    """test_a_page_is_as_committed compares the tables with docs/curves."""
    lines = PAGES["docs/look.md"].splitlines()
    prose, tables = (" ".join(x for x in lines if x.startswith("|") == is_table) for is_table in (False, True))
    number = re.compile(r"\d\.\d{2,}")
    assert len(number.findall(prose)) > 4
    only_prose = {x for x in number.findall(prose) if x not in number.findall(tables)}
    # million parameters, most frequent sum in 64 rows, evaluations in the middle of runs
    assert only_prose == {"3.88", "0.172", "0.677", "0.865"}


def test_numbers_of_the_readme_are_on_its_pages():
    number = re.compile(r"\d*\.?\d+(?:e-\d+)?")
    for row in rows_of(README, "What was measured"):
        [page] = re.findall(r"\((docs/[\w/]+\.md)\)", row[-1])
        found = {digits.lstrip("0") for digits in number.findall(PAGES[page])}
        results = {digits.lstrip("0") for cell in row[1:-1] for digits in number.findall(cell)}
        assert results, row
        assert results - found == set(), row


def test_the_page_shows_the_gradients_that_its_program_prints(capsys):
    page = PAGES["docs/policy_gradients.md"]
    exec(blocks(page, "python")[0], {})
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 4
    for name, short, long in map(str.split, printed):
        assert f"| `{name}` | {short} | {long} |" in page


def test_the_promises_of_the_readme():
    """Both READMEs have a command that trains and one that runs the tests; the English one quotes minimal.py."""
    quoted = blocks(README, "python")[0]
    assert quoted.startswith("def grpo(") and quoted in (ROOT / "minimal.py").read_text()
    [pattern] = re.findall(r'grep -E "(.+)" README.md', (ROOT / ".ci" / "run").read_text())
    for found in map(commands, (README, CHINESE)):
        assert "python train.py" in found and len([line for line in found if re.match(pattern, line)]) == 1
    [torch_version] = re.findall("pip install (torch==[^ ]+) ", README)
    assert torch_version in (ROOT / "constraints.txt").read_text().splitlines()


def test_the_index_lists_all_recipes_and_pages():
    index = PAGES["docs/README.md"]
    recipes = {path.name for path in (ROOT / "recipes").glob("*.yaml")}
    assert set(re.findall(r"recipes/([\w.]+\.yaml)", index.partition("## Recipes")[2])) == recipes
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").glob("**/*.md")}
    papers = {f"papers/{page}" for page in re.findall(r"\((\w+\.md)\)", PAGES["docs/papers/README.md"])}
    assert pages - set(re.findall(r"\((\S+\.md)\)", index)) - papers == {"README.md"}


LOSS_PAGES = "\n".join(PAGES[f"docs/{page}.md"] for page in ("policy_gradients", "preferences"))
CODE = {code.rpartition(".")[2] for code in re.findall(r"`([^`\n]+)`", LOSS_PAGES)}
STAGES = [typing.get_type_hints(RunConfig)[name] for name in TRAINERS]
SHARED = {"max_tokens_per_micro_batch", *(field.name for field in dataclasses.fields(TrainingOptions))}


def choices(hint) -> set[str]:
    """Return the strings of all Literals in a type annotation."""
    if typing.get_origin(hint) is typing.Literal:
        return {text for text in typing.get_args(hint) if isinstance(text, str)}
    return {text for part in typing.get_args(hint) for text in choices(part)}


@pytest.mark.parametrize("options", STAGES, ids=lambda options: options.__name__)
def test_every_option_of_a_stage_is_explained(options):
    hints = {name: hint for name, hint in typing.get_type_hints(options).items() if name not in SHARED}
    names = {*hints, *DPO_LOSSES, *(text for hint in hints.values() for text in choices(hint))}
    missing = ", ".join(sorted(names - CODE))
    assert not missing, f"docs/policy_gradients.md or docs/preferences.md must explain: {missing}"


def test_every_metric_is_explained(run, quick):
    """docs/metrics.md contains the full name of each metric, or the part after its group; NAME stands for a reward."""
    folder = run("--stages=[sft, dpo, reward_model, grpo, ppo]", "--grpo.beta=0.1", "--ppo.kl_coef=0.1")
    logged = {name for line in metrics(folder) for name in line} - {"stage", "step"}
    # the page explains minimum and maximum as `min_...` and `max_...`
    logged -= {f"completions/{of}_terminated_length" for of in ("min", "max")}
    short = {re.sub(r"^rewards/(format|accuracy)/", "rewards/NAME/", name) for name in logged}
    page = PAGES["docs/metrics.md"]
    assert len(logged) > 30
    assert {n for n in short if f"`{n}`" not in page and f"`{n.partition('/')[2] or n}`" not in page} == set()


def test_the_table_of_rewards():
    pytest.importorskip("math_verify", reason="extra missing: pip install math-verify")
    rows = rows_of(REWARDS_PAGE, "By name")
    named = {row[0].strip("`") for row in rows}
    assert set(REWARDS) - {"acc_0_5", "box_format"} == named
    examples = {row[0].strip("`"): re.findall("`([^`]+)`", row[3]) for row in rows if row[3]}
    assert len(examples) == len(rows) - 2
    for name, (answer, *solution) in examples.items():
        columns = {"solution": solution} if solution else {}
        sizes = {"image_sizes": [(9, 9)], "answer_extents": [(9, 9)]}
        texts = {"completions": [answer], "answer_texts": [find_answer(answer, "whole")]}
        assert get_reward(name)(**texts, **columns, **sizes) == [1], name
        assert get_reward(name).columns == ({"solution"} if solution else set()), name


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """Return a folder with a tiny model and the files that README writes: train.jsonl, an image and my_rewards.py."""
    folder = tmp_path_factory.mktemp("own")
    [line] = re.findall(r"`(\{\"image\".*?\})`", README)
    (folder / "train.jsonl").write_text(line)
    (folder / "eval.jsonl").write_text(line)
    PIL.Image.new("RGB", (80, 60), "red").save(folder / "cat.jpg")
    (folder / "my_rewards.py").write_text(next(code for code in blocks(README, "python") if "def last_word" in code))
    model, processor = random_model(ROOT / "recipes" / "shapes_model.json", shapes.tokenizer(), seed=0)
    save_model(folder / "model", model, processor)
    return folder


def test_your_own_data_and_your_own_reward(own, tmp_path, monkeypatch):
    [command] = [c for c in commands(README) if "my_rewards.py" in c]
    monkeypatch.chdir(own)
    words = shlex.split(command.replace("FOLDER", "model"))[2:]
    small = ["--grpo.max_steps=1", "--grpo.prompts_per_step=1", "--sampling.max_new_tokens=4", "--num_threads=1"]
    code = train_recipe([str(ROOT / words[0]), *words[1:], *small, f"--output_dir={tmp_path}"])
    [line] = metrics(tmp_path)
    assert code == 0 and 0 <= line["rewards/my_rewards.py:last_word/mean"] <= 1 and line["rewards/accuracy/mean"] == 0.0


def test_a_minute_on_your_cpu(own, tmp_path, monkeypatch):
    [command] = [c for c in commands(DATA) if "=runs/shapes/checkpoint " in c]
    [row] = [block for block in blocks(DATA, "json") if "completion" in block]
    for name in ("train", "eval"):
        (own / f"{name}.jsonl").write_text(row)
    monkeypatch.chdir(own)
    words = shlex.split(command.replace("runs/shapes/checkpoint", "model"))[2:]
    small = [f"--{part}.{name}=1" for part in ("sft", "grpo") for name in ("max_steps", "prompts_per_step")]
    small += ["--grpo.micro_batch_size=1", "--grpo.warmup_steps=0"]
    assert train_recipe([str(ROOT / words[0]), *words[1:], *small, "--num_threads=1", f"--output_dir={tmp_path}"]) == 0
    assert [line["stage"] for line in metrics(tmp_path)] == ["sft", "grpo"]


def test_the_training_loop_of_the_page(own, monkeypatch):
    [code] = [code for code in blocks(DATA, "python") if "grpo.steps" in code]
    monkeypatch.chdir(own)
    monkeypatch.syspath_prepend(own)
    note = "    steps.append((step.rollout, grpo.policy.lm_head.weight.sum().item()))\n    optimizer.step()"
    space = {"steps": []}
    exec(code.replace('"FOLDER"', '"model"').replace("    optimizer.step()", note), space)
    assert space["metrics"]["entropy"].item() >= 0  # 0 if all rewards are equal, so that no token is trained
    rollouts, weights = zip(*space["steps"], strict=True)
    first, second, third = (ids_of([[s.completion for s in group] for group in rollout.groups]) for rollout in rollouts)
    assert first != second != third
    assert all(rollout.rewards.shape == (80, 2) for rollout in rollouts)
    assert len(set(weights)) == 3


@pytest.mark.parametrize("name", ["first_hour.ipynb", pytest.param("photographs.ipynb", marks=pytest.mark.slow)])
def test_a_notebook_is_stored_with_the_outputs_of_its_cells(name):
    """Cells before the first training print the stored outputs; test_wheel.py runs the other cells."""
    stored = json.loads((make_pages.DOCS / name).read_text())
    cells = [cell for cell in stored["cells"] if cell["cell_type"] == "code"]
    outputs = [cell["outputs"] for cell in cells]
    for number, cell in enumerate(cells, start=1):
        assert cell["execution_count"] == number
        cell |= {"execution_count": None, "outputs": []}
    first = next(i for i, cell in enumerate(cells) if re.search(r"train(_recipe)?\(", "".join(cell["source"])))
    for number, found in enumerate(notebooks.run_cells(cells[:first])):
        for output in found:
            output.update({"execution_count": number + 1} if output["output_type"] == "execute_result" else {})
        assert found == outputs[number], "".join(cells[number]["source"])
    assert all(outputs[first:]) and str(outputs[first:]).count("image/png") >= 1
    if name == "first_hour.ipynb":
        assert stored["metadata"]["minimal.py"] == notebooks.code_hash(), "run python -m docs.scripts.notebooks"
    assert not re.search(r"/tmp|/home|/root|/work", str(outputs))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["first_hour.ipynb", "photographs.ipynb"])
def test_all_outputs_of_a_notebook_are_of_this_code(name):
    stored = (make_pages.DOCS / name).read_text(encoding="utf-8")
    assert notebooks.with_outputs(stored) == stored


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * name.startswith("walkthrough")) for name in make_pages.PAGES]
)
def test_a_page_is_as_committed(name):
    """If the test fails, run python -m docs.scripts.make_pages. Another processor may round last decimals otherwise."""
    text = make_pages.PAGES[name]()
    committed = (make_pages.DOCS / name).read_text(encoding="utf-8")
    assert NUMBER.sub("0", text) == NUMBER.sub("0", committed)
    for mine, theirs in zip(NUMBER.findall(text), NUMBER.findall(committed), strict=True):
        decimals = max(len(number.partition(".")[2]) for number in (mine, theirs))
        off = 1.01 * 10**-decimals if decimals or name.endswith(".svg") else 0  # integers in a picture are also rounded
        assert float(mine) == pytest.approx(float(theirs), rel=0, abs=off)
    assert not name.endswith(".svg") or xml.etree.ElementTree.fromstring(text).tag.endswith("svg")


@pytest.mark.parametrize(("pattern", "written_differently"), [
    (r"```(.*?)```", set()),
    (r"`([^`\n]+)`", set()),
    (r"\]\((?!#|README)([^)]+)\)", set()),
    (r"(?<![\w.])\d+(?:[.,]\d+)*", {"0.74", "74"}),  # 0.74 million is 74 万
], ids=["blocks of code", "names of code", "links", "numbers"])  # fmt: skip
def test_the_chinese_readme_agrees_with_the_english_one(pattern, written_differently):
    english, chinese = ({*re.findall(pattern, text, re.DOTALL)} for text in (README, CHINESE))
    assert english ^ chinese == written_differently and len(english) > 3


@pytest.mark.slow
def test_the_site_is_built_and_no_link_of_it_is_dead(tmp_path):
    pytest.importorskip("material", reason="extra missing: pip install -e '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", ROOT / "docs/site/mkdocs.yml", "-d", tmp_path]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert "excluded from the built site" not in built.stderr, built.stderr
    # the search of the site works without a server
    assert 'src="site/worker.js"' in (menu := (tmp_path / "index.html").read_text()) and "unpkg" not in menu
    formulas = (tmp_path / "policy_gradients.html").read_text()
    # formulas need no network
    assert "<math" in formulas and not re.search(r'arithmatex">\s*\\|<script[^>]*"https?:', formulas)
    file = (tmp_path / "code" / "minivlmrl" / "losses" / "grpo.py.html").read_text()
    assert re.search(r"File \d+ of \d+ of the reading list", file) and 'tests/losses/test_grpo.py.html"' in file
    found = json.loads((tmp_path / "search" / "search_index.json").read_text())["docs"]
    boosts = {entry["location"]: entry.get("boost", 1) for entry in found}
    # the search finds the page of an option before code, and no list of a folder
    assert boosts["policy_gradients.html"] > boosts["code/minivlmrl/losses/grpo.py.html"] == 1
    assert "code/minivlmrl/data.html" not in boosts


@pytest.mark.parametrize("page", PAGES)
def test_imports_of_snippets_are_up_to_date(page):
    if page == "docs/changelog.md":  # the changelog contains old names
        return
    for code in blocks(PAGES[page], "python"):
        for line in re.findall(r"(?m)^ *((?:from|import) minivlmrl\b(?!_).*)", code):
            exec(line)
