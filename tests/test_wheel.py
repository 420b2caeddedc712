"""A wheel contains all that a run needs: it is built without a network and trained from in an empty folder.

An sdist contains all that the README speaks of, and what is installed is pinned.
"""

import contextlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder into which the wheel of this source tree is unpacked."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in ("minivlmrl", "kernels", "recipes"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = ["pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source]
    subprocess.run([sys.executable, "-m", *build], check=True)
    [wheel] = folder.glob("minivlmrl-*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    shutil.rmtree(source)
    return folder / "site"


def run(installed, folder, *arguments):
    """`python -m minivlmrl` with the wheel alone on the path, in a folder of its own."""
    environment = {"PYTHONPATH": str(installed), "PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "minivlmrl", *arguments]
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.slow
def test_recipes_train_from_the_wheel_alone(installed, tmp_path):
    """The default one, and one whose task lies beside it."""
    short = ["--sft.max_steps=1", "--grpo.max_steps=1", "--grpo.prompts_per_step=2", "--data.eval_rows=4"]
    assert "held-out" in run(installed, tmp_path, "train", *short)
    lines = (tmp_path / "runs" / "shapes" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["stage"] for line in lines] == ["sft", "grpo"]
    assert (tmp_path / "runs" / "shapes" / "checkpoint" / "model.safetensors").is_file()
    recipe = str(installed / "minivlmrl" / "recipes" / "localisation.yaml")
    small = ["--stages=[sft]", "--sft.max_steps=1", "--data.eval_rows=4", "--data.demonstrations=4"]
    assert "constant box" in run(installed, tmp_path, "train", recipe, *small)


@pytest.mark.slow
def test_the_wheel_has_every_module_recipe_and_kernel_and_the_console_script(installed):
    for folder, inside in (("minivlmrl", ""), ("kernels", "kernels"), ("recipes", "recipes")):
        for path in (ROOT / folder).rglob("*"):
            wanted = path.suffix in (".py", ".yaml", ".json", ".html", ".safetensors")
            if wanted and path != ROOT / "minivlmrl" / "kernels" / "__init__.py":  # points to kernels/ in a source tree
                assert (installed / "minivlmrl" / inside / path.relative_to(ROOT / folder)).is_file(), path
    [scripts] = installed.glob("*.dist-info/entry_points.txt")
    assert "minivlmrl = minivlmrl.__main__:main" in scripts.read_text()


@pytest.mark.slow
def test_an_sdist_has_the_tests_and_what_they_and_the_readme_need(tmp_path):
    folders = "minivlmrl", "kernels", "recipes", "tests", "benchmarks", "docs", "exercises"
    for name in folders:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "constraints.txt", "train.py"):
        shutil.copy(ROOT / name, tmp_path)
    expected = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    build = "import setuptools.build_meta as backend; backend.build_sdist('dist')"
    subprocess.run([sys.executable, "-c", build], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    [sdist] = tmp_path.glob("dist/*.tar.gz")
    with tarfile.open(sdist) as archive:
        assert expected <= {name.partition("/")[2] for name in archive.getnames()}


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
    if found["torch"].partition("+")[0] != pins["torch"]:  # without constraints.txt: other versions, no new names
        found = {name: pins.get(name) for name in found}
    assert {name: version for name, version in found.items() if pins.get(name) != str(version).partition("+")[0]} == {}


def for_us(requirement, extras):
    return requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in {"", *extras})
