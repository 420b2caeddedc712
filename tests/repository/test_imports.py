"""Test that importing the package changes nothing outside, and which packages it needs."""

import json
import subprocess
import sys

from tests.helpers.links import ROOT


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


CHANGES = """
import ctypes, importlib, os, warnings
# libraries of others may change the environment and the filters, so they are imported first
import huggingface_hub, numpy, PIL.Image, safetensors.torch, tokenizers, torch, torch.distributed.fsdp
import torch.distributed.elastic.multiprocessing.errors

def fail(*_):
    raise AssertionError("a library of C is loaded")

ctypes.CDLL = fail
for name in CORE:
    before = dict(os.environ), list(warnings.filters)
    importlib.import_module(name)
    assert before == (dict(os.environ), warnings.filters), name
"""


def test_an_import_changes_no_environment_variable_and_no_warning_filter():
    files = [*(ROOT / "minivlmrl").rglob("*.py"), *(ROOT / "kernels").glob("*.py")]
    parts = [file.relative_to(ROOT).with_suffix("").parts for file in files]
    names = [".".join(["minivlmrl"] * (of[0] == "kernels") + [*of]).removesuffix(".__init__") for of in parts]
    core = [
        name for name in names if not name.startswith(("minivlmrl.extras.", "minivlmrl.monitor.", "minivlmrl.__main__"))
    ]
    run(f"CORE = {core}\n{CHANGES}")


def test_losses_and_parity_need_few_packages():
    """`pip install --no-deps` is enough for the losses, and parity also needs NumPy, PyYAML and safetensors."""
    blocked = ["PIL", "tokenizers", "huggingface_hub", "jinja2"]
    for names, missing in (("parity", blocked), ("grpo_loss, dpo_loss", [*blocked, "numpy", "yaml", "safetensors"])):
        run(f"import sys\nfor name in {missing}: sys.modules[name] = None\nfrom minivlmrl import {names}")


def test_the_hub_is_imported_only_for_a_repository(tmp_path):
    loaded = run("import json, sys, minivlmrl.run.loop; print(json.dumps(list(sys.modules)))")
    assert "huggingface_hub" not in json.loads(loaded.splitlines()[-1])
