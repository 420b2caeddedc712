"""Check that the wheel built from the sdist works without the clone, and that versions are pinned as pages say."""

import contextlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from importlib import metadata

import pytest
import yaml
from packaging.metadata import Metadata
from packaging.requirements import Requirement

import minivlmrl
from tests.helpers.links import ROOT, rows_of

LINES = re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
PINS = dict(LINES)
TOOLS = """
import glob, json, sys
from minivlmrl.__main__ import main
from minivlmrl.config.loading import load_config
from minivlmrl.commands import train
from minivlmrl.rewards.registry import held_out_rewards

model, picture = ["--model", "runs/shapes/checkpoint"], glob.glob("runs/shapes/images/*.webp")[0]
zoom = load_config("zoom.yaml")
assert zoom.data.eval_rewards[1] == held_out_rewards(zoom)[1].name == "recipes/zoom.py:looks", zoom.data
assert main(["memory", *model]) == 0
assert main(["chat", *model, "--image", picture, "--prompt", "What?", "--sampling.max_new_tokens=2"]) == 0
assert main(["check", "zoom.yaml"]) == 0
assert train.train_recipe(["zoom.yaml", "--stages=[sft]", "--sft.max_steps=1", "--data.eval_rows=4"]) == 0
small = ["--sft.max_steps=1", "--sft.prompts_per_step=4", "--sampling.max_new_tokens=4", "--log_completions=1"]
train_recipe = train.train_recipe
train.train_recipe = lambda arguments: train_recipe([*arguments, *small])
for path in sys.argv[1:]:
    space = {"__name__": "__main__"}
    for cell in json.load(open(path, encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            code = "".join(cell["source"]).replace("512, 64, 100  #", "16, 4, 1  #")
            code = code.replace('"depth": 32', '"depth": 2').replace('layers": 28', 'layers": 2')
            exec(code.replace("240, 60  #", "30, 3  #"), space)
"""


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """Return a folder with a copy of every file that git tracks."""
    if not (ROOT / ".git").exists():
        pytest.skip("no clone: git does not say what belongs to it")
    folder = tmp_path_factory.mktemp("clone")
    for name in files():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


def files():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.split("\0") if (ROOT / name).is_file()]


def sdist(folder, output):
    build = f"import setuptools.build_meta as backend; print(backend.build_sdist({str(output)!r}))"
    done = subprocess.run([sys.executable, "-c", build], cwd=folder, check=True, capture_output=True, text=True)
    return output / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(clone, tmp_path_factory):
    dist = tmp_path_factory.mktemp("dist")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", dist, sdist(clone, dist)], check=True)
    [made] = dist.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """Return the Python of an environment that has the library and its dependencies, but not the clone."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder)
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "here.pth").write_text("\n".join({sysconfig.get_path(kind) for kind in ("purelib", "platlib")}))
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*pip, "--ignore-installed", wheel], check=True)
    return python


def run(python, folder, *arguments):
    """Run Python in a folder with an empty PYTHONPATH, and return (exit status, output)."""
    environment = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "-1"}
    done = subprocess.run([python, *arguments], cwd=folder, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_what_is_installed_trains_asks_and_checks(python, tmp_path):
    short = "--sft.max_steps=1", "--grpo.max_steps=2", "--grpo.prompts_per_step=2", "--data.eval_rows=4"
    status, out = run(python, tmp_path, "-m", "minivlmrl", "train", *short)
    assert status == 0 and "held-out" in out, out
    lines = (tmp_path / "runs" / "shapes" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["stage"] for line in lines] == ["sft", "grpo", "grpo"]
    assert (tmp_path / "runs" / "shapes" / "report.html").is_file()
    # rows and reward of a user, as in README
    reward = "def brevity(completions, **columns): return [float(len(text) < 100) for text in completions]"
    (tmp_path / "my_rewards.py").write_text(reward)
    images = sorted((tmp_path / "runs" / "shapes").glob("images/*.webp"))[:2]
    rows = [{"image": str(image), "problem": "How many cats are there?", "solution": "2"} for image in images]
    for name in ("train.jsonl", "eval.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = "--model.path=runs/shapes/checkpoint", "--data.train_file=train.jsonl", "--data.eval_file=eval.jsonl"
    rewards = "--rewards={accuracy: 1.0, my_rewards.py:brevity: 0.2}"
    few = "--grpo.max_steps=1", "--grpo.prompts_per_step=2", "--sampling.max_new_tokens=8"
    status, out = run(python, tmp_path, "-m", "minivlmrl", "train", "own_data.yaml", *own, rewards, *few)
    assert status == 0 and "rows of grpo: 2 with 1 image" in out and "brevity=" in out, out
    shutil.copy(ROOT / "minimal.py", tmp_path)  # the first notebook needs only minimal.py
    status, out = run(python, tmp_path, "-c", TOOLS, *map(str, (ROOT / "docs").glob("*.ipynb")))
    message = "1 GPU of 80 GB, was cut off after 2 tokens, No problems were found, looks, grpo step 1 of 1"
    message = [*message.split(", "), "right: start"]
    assert status == 0 and [text for text in message if text not in out] == [], out


@pytest.mark.slow
def test_the_workflow_on_the_page_is_red_for_its_wrong_loss(python, tmp_path):
    page = (ROOT / "docs" / "numerical_parity.md").read_text(encoding="utf-8")
    code, printed, workflow = (re.findall(rf"```{name}\n([^`]*)```", page)[0] for name in ("python", "text", "yaml"))
    (tmp_path / "my_loss.py").write_text(code)
    *_, step = yaml.safe_load(workflow)["jobs"]["loss"]["steps"]
    status, out = run(python, tmp_path, "-m", *step["run"].split())
    assert status == 1 and printed in out, out


@pytest.mark.slow
def test_what_is_installed_has_every_module_recipe_and_kernel_and_the_console_script(python):
    [packages] = python.parents[1].glob("lib/python*/site-packages")
    for folder, inside in (("minivlmrl", ""), ("kernels", "kernels"), ("recipes", "recipes")):
        for path in (path for path in map(ROOT.joinpath, files()) if ROOT / folder in path.parents):
            wanted = path.suffix in (".py", ".typed", ".yaml", ".json", ".html", ".jinja", ".safetensors")
            wanted &= path != ROOT / "minivlmrl" / "kernels" / "__init__.py"  # points to kernels/ in a clone
            wanted |= path.suffix == ".csv" or path.match("vectors/README.md")
            found = packages / "minivlmrl" / inside / path.relative_to(ROOT / folder)
            assert found.is_file() == wanted, path
    assert (python.parent / "minivlmrl").is_file()


@pytest.mark.slow
def test_the_wheel_passes_the_checks_of_an_index(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        [written] = [archive.read(name) for name in names if name.endswith(".dist-info/METADATA")]
    about = Metadata.from_email(written, validate=True)
    assert about.description_content_type == "text/markdown" and about.license_expression == "MIT"
    assert {name.partition("/")[0] for name in names} == {"minivlmrl", f"minivlmrl-{about.version}.dist-info"}
    assert f"minivlmrl-{about.version}.dist-info/licenses/LICENSE" in names
    assert str(about.version) == minivlmrl.__version__


@pytest.mark.slow
def test_an_sdist_has_the_tests_and_what_they_and_the_readme_need(clone, tmp_path):
    with tarfile.open(sdist(clone, tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert [name for name in files() if name not in names] == []


def test_the_page_of_the_package_has_absolute_links_to_files_of_the_repository():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    targets = re.findall(r"\]\((.*?)\)", (ROOT / project["readme"]).read_text())
    before = f"{project['urls']['Source']}/blob/main/"
    files = [target.removeprefix(before).partition("#")[0] for target in targets if target.startswith(before)]
    assert len(files) > 5 and all((ROOT / file).is_file() for file in files)
    assert all(target.startswith("https://") for target in targets)


def test_all_files_name_the_same_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    newest = re.search(r"(?m)^## (.*)$", (ROOT / "docs" / "changelog.md").read_text())[1]
    assert newest == f"{minivlmrl.__version__} ({citation.get('date-released', 'unreleased')})"
    assert citation["version"] == minivlmrl.__version__
    [author] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["authors"]
    assert [author] == citation["authors"]


def test_what_is_installed_is_pinned():
    """Indirect dependencies are also pinned, except for CUDA packages, which PyTorch pins itself."""
    assert len(PINS) == len(LINES)
    pins = {name.replace("_", "-"): version for name, version in PINS.items()}
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert settings["build-system"]["requires"] == [f"setuptools=={pins['setuptools']}"]  # --constraint misses it
    project = settings["project"]
    waiting = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    found = {}
    while waiting:
        wanted = Requirement(waiting.pop())
        name = re.sub(r"[-_.]+", "-", wanted.name).lower()
        if name in found or name == "minivlmrl" or name.startswith(("nvidia", "cuda")):
            continue
        with contextlib.suppress(metadata.PackageNotFoundError):  # a package for another platform
            found[name] = metadata.version(name)
            for text in metadata.requires(name) or ():
                marker = Requirement(text).marker
                if marker is None or any(marker.evaluate({"extra": extra}) for extra in {"", *wanted.extras}):
                    waiting.append(text)
    if found["torch"].partition("+")[0] != pins["torch"]:  # without constraints.txt, only compare names
        found = {name: pins.get(name) for name in found}
    assert {name: version for name, version in found.items() if pins.get(name) != str(version).partition("+")[0]} == {}


RESULTS = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")


def test_the_workflow_runs_the_versions_of_the_page():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    versions = [text.rpartition(" ")[2] for text in project["classifiers"] if "Python :: 3." in text]
    lines = workflow["jobs"]["run"]["strategy"]["matrix"]["include"]
    assert {line["python"] for line in lines if not line.get("optional")} == {*versions}
    cells = " ".join(row[0] for row in rows_of(RESULTS, "What ran where"))
    assert {*re.findall(r"\b3\.1\d\b", cells)} == {*versions}
    pairs = re.findall(r"torch (2\.\S+) with Triton (3\.\S+)", cells.replace(",", ""))
    tried = {(line.get("torch", PINS["torch"]), line.get("triton", PINS["triton"])) for line in lines}
    assert {*pairs} == tried and len(pairs) == 3
    assert f"torch>={min(pairs)[0].removesuffix('.0')}" in project["dependencies"]


def test_versions_of_other_projects_are_pinned_or_recorded():
    recorded = {path.stem for path in (ROOT / "tests" / "recorded").glob("*.json")}
    for project, versions in rows_of(RESULTS, "Versions of other projects"):
        numbers = re.findall(r"\d+(?:\.\d+)+", versions)
        assert numbers
        for number in numbers:
            if "(recorded)" in versions:
                assert any(name.endswith(f"{project}_{number}") for name in recorded), (project, number)
            else:
                assert PINS[project] == number
