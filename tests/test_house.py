"""The house: who may import whom, read from the source with ast."""

import ast
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# A file imports only from rows above its own, so the flow never turns back and no circle can close.
ROWS = [
    "kernels/backend kernels/dense_attention config data/boxes data/chat data/fetch data/frames data/sandbox "
    "data/tokenizer model/config model/layers model/replacing rollout/advantages rollout/rewards "
    "training/distributed training/losses/policy training/losses/preference training/losses/sft training/losses/ppo",
    "kernels/selective_log_softmax kernels/window_attention data/image data/template model/folder model/rope "
    "rollout/box_rewards rollout/sampler rollout/stop_strings training/metrics training/sharding training/signals",
    "kernels/linear_log_softmax kernels/aot data/video model/attention model/text model/vision model/weights "
    "training/optimizer",
    "data/media",
    "data/conversations data/processor",
    "data/sources model/batch",
    "data/shapes model/qwen2_5_vl",
    "data/localisation model/checkpoint model/logprobs rollout/generate training/reference",
    "data/datasets model/scalar",
    "rollout/rollout training/saving",
    "training/algorithms/algorithm",
    "training/algorithms/pairs training/algorithms/sft",
    "training/algorithms/buffer training/algorithms/dpo training/algorithms/reward_model training/report "
    "training/state",
    "training/algorithms/online training/states",
    "training/algorithms/grpo training/algorithms/ppo",
    "generate plan",
    "train parity/notes",
    "parity/compare",
    "parity/trl_oracle",
    "parity/policy_cells",
    "parity/preference_cells",
    "parity/cells",
    "parity/__main__",
]
ROW = {name: number for number, row in enumerate(ROWS) for name in row.split()}
PACKAGES = {
    "torch", "safetensors", "tokenizers", "PIL", "numpy", "triton", "yaml", "tqdm", "jinja2", "huggingface_hub",
}  # fmt: skip
# who may ask for more
EXTRAS = {
    "training/report": {"matplotlib"}, "parity/trl_oracle": {"trl", "transformers"}, "data/video": {"av"},
}  # fmt: skip


def sources():
    """Our files by the names of the table; __init__.py files are packages, not rooms."""
    files = {"train": ROOT / "train.py"}
    for folder, prefix in ((ROOT / "kernels", "kernels/"), (ROOT / "minivlmrl", "")):
        for file in folder.rglob("*.py"):
            if file.name != "__init__.py":
                files[prefix + str(file.relative_to(folder).with_suffix(""))] = file
    return files


FILES = sources()


def imports(file, top_only=False):
    """Full dotted names that a file imports, of `from a import b` both a and a.b."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    names = []
    for node in tree.body if top_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import; write the full name"
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


def ours(file):
    """Names in the table of the files of ours that a file imports."""
    dotted = {"train" if name == "train" else "minivlmrl." + name.replace("/", "."): name for name in FILES}
    return {dotted[name] for name in imports(file) if name in dotted}


def test_every_file_stands_in_the_table_and_the_table_in_the_house():
    assert set(FILES) == set(ROW)


@pytest.mark.parametrize("name", FILES)
def test_imports_come_from_rows_above(name):
    for imported in ours(FILES[name]):
        assert ROW[imported] < ROW[name], f"{name} (row {ROW[name]}) imports {imported} (row {ROW[imported]})"


@pytest.mark.parametrize("name", FILES)
def test_only_the_declared_packages_are_imported(name):
    found = {imported.partition(".")[0] for imported in imports(FILES[name])}
    allowed = PACKAGES | {"minivlmrl"} | set(sys.stdlib_module_names) | EXTRAS.get(name, set())
    assert found <= allowed, found - allowed


def test_extras_are_imported_inside_functions():
    """Without matplotlib a run ends well; without TRL or PyAV the error says what to install."""
    for file, extra in (("training/report", "matplotlib"), ("data/video", "av")):
        assert extra not in {name.partition(".")[0] for name in imports(FILES[file], top_only=True)}
    for name in FILES:
        assert "minivlmrl.parity.trl_oracle" not in imports(FILES[name], top_only=True), name


def test_parity_knows_losses_advantages_and_rewards_alone_and_nobody_knows_it():
    compared = {"rollout/advantages", "rollout/rewards"} | {
        name for name in FILES if name.startswith("training/losses/")
    }
    for name in FILES:
        inside = {imported for imported in ours(FILES[name]) if imported.startswith("parity/")}
        if name.startswith("parity/"):
            assert ours(FILES[name]) - inside <= compared, name
        else:
            assert not inside, name


LOSSES = [name for name in FILES if name.startswith("training/losses/")]


@pytest.mark.parametrize("name", LOSSES)
def test_losses_import_torch_alone(name):
    """Each file can be copied out; beside torch only what Python brings to type and count with."""
    found = {imported.partition(".")[0] for imported in imports(FILES[name])}
    assert found <= {"torch", "math", "dataclasses", "collections"}
    assert "torch" in found


def test_every_folder_of_ours_is_installed():
    """The wheel holds what pyproject.toml lists: a new folder has to be added there."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {file.parent.relative_to(ROOT) for file in (ROOT / "minivlmrl").rglob("*.py")}
    assert set(listed) == {".".join(folder.parts) for folder in folders}


def test_the_folder_kernels_is_no_package_of_its_own():
    """A top-level package `kernels` would shadow Hugging Face's, which transformers imports."""
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_package_files_import_nothing_of_ours():
    for file in (ROOT / "minivlmrl").rglob("__init__.py"):
        assert not ours(file), file
        assert {imported.partition(".")[0] for imported in imports(file)} <= {"pathlib"}, file


def test_tests_are_flat():
    """One folder without __init__.py: each file of tests stands for itself."""
    assert not list((ROOT / "tests").rglob("__init__.py"))
    assert not list((ROOT / "tests").glob("*/*.py"))
