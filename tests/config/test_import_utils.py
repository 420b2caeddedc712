"""Test how objects are loaded by name, with or without options."""

import inspect
import json
import os
import pickle
from functools import partial
from typing import Annotated

import pytest
import torch
from children import exit_code, fork

from minivlmrl.config.import_utils import (
    PROCESS_SETTINGS,
    call_user_code,
    load_name,
    resolve_object,
    unchanged_process,
    with_options,
)
from minivlmrl.generation.sampler import ENGINES
from minivlmrl.run.optimizer import OPTIMIZERS


def test_a_module_and_a_file(tmp_path):
    """A file need not be on sys.path, and it is executed only once."""
    assert load_name("json:dumps") is json.dumps
    file = tmp_path / "own.py"
    file.write_text("import json\nWRITE = json.dumps\n\n\ndef double(x):\n    return 2 * x\n")
    assert load_name(f"{file}:WRITE") is json.dumps
    assert load_name(f"{file}:double")(4) == 8
    assert load_name(f"{file}:double") is load_name(f"{file}:double")
    assert pickle.loads(pickle.dumps(load_name(f"{file}:double"))) is load_name(f"{file}:double")
    assert inspect.getsource(load_name(f"{file}:double")).startswith("def double")


def test_registries_name_modules_of_the_package():
    """A file with the same name in the working folder must not be imported instead."""
    targets = [target for table in (ENGINES, OPTIMIZERS) for target in table.values() if isinstance(target, str)]
    assert len(targets) == 3 and all(target.startswith("minivlmrl.") for target in targets)


@pytest.mark.parametrize(("target", "cause"), [
    ("json:dumpz", "AttributeError"), ("jsonn:dumps", "ModuleNotFoundError"), ("gone.py:f", "FileNotFoundError"),
    ("FILE:other", "AttributeError"), ("no name", "ValueError"), ("json:dumpz", r".*\); did you mean dump\?$"),
])  # fmt: skip
def test_missing_objects_are_reported(tmp_path, target, cause):
    (tmp_path / "own.py").write_text("")
    target = target.replace("FILE", str(tmp_path / "own.py"))
    with pytest.raises(ValueError, match=rf"^{target} cannot be loaded \({cause}"):
        load_name(target)


def rows(data, seed, pairs: Annotated[int, ">= 1"] = 8, share: Annotated[float, "[0, 1]"] = 0.5, kind=None):
    return data, seed, pairs, share, kind


@pytest.mark.parametrize(("text", "expected"), [
    ("rows", (8, 0.5, None)), ("rows()", (8, 0.5, None)), ("rows(pairs=2, kind=['(m)'],)", (2, 0.5, ["(m)"])),
    (f"{__file__}:rows(share=1)", (8, 1.0, None)), (f"{__name__}:rows( )", (8, 0.5, None)),
])  # fmt: skip
def test_a_name_with_options(text, expected):
    """Options are Python literals for the parameters that have a default."""
    function, options = resolve_object("task", text, {"rows": rows})
    assert with_options(function, options)("data", 0) == ("data", 0, *expected)


@pytest.mark.parametrize(("text", "error"), [
    ("rows(2)", r"^task rows\(2\): the options must have the form name=value, name=value$"),
    ("rows(seed=1)", r"^there is no option 'seed'; the options are: pairs, share, kind$"),
    ("rows(pair=2)", r"^there is no option 'pair'; the options are: pairs, share, kind; did you mean pairs\?$"),
    ("rows(pairs=0)", "^pairs is 0, but it must be 1 or more$"),
    ("lines(pairs=2)", "^unknown task 'lines'; known names are: rows, file.py:name$"),
    ("row", "^unknown task 'row'; known names are: rows, file.py:name; did you mean rows\\?$"),
])  # fmt: skip
def test_invalid_options_are_refused(text, error):
    with pytest.raises(ValueError, match=error):
        with_options(*resolve_object("task", text, {"rows": rows}))


def set_on(owner, name, value):
    """Return a function that sets an attribute."""
    return partial(setattr, owner, name, value)


CHANGES = {  # setting -> (a change, the values in the message)
    "the number of threads": (lambda: torch.set_num_threads(3), "from [12] to 3"),
    "the default dtype": (lambda: torch.set_default_dtype(torch.float64), "from torch.float32 to torch.float64"),
    "the default device": (lambda: torch.set_default_device("meta"), "from cpu to meta"),
    "the grad mode": (lambda: torch.set_grad_enabled(False), "from True to False"),
    "autocast on the CPU": (lambda: torch.autocast("cpu").__enter__(), "from False to True"),
    "autocast on the GPU": (lambda: torch.set_autocast_enabled("cuda", True), "from False to True"),
    "the precision of products on the CPU": (set_on(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
                                             "from none to bf16"),
    "the precision of products on the GPU": (set_on(torch.backends.cuda.matmul, "allow_tf32", True),
                                             "from none to tf32"),
    "the deterministic mode": (lambda: torch.use_deterministic_algorithms(True), "from 0 to 2"),
    "the working directory": (lambda: os.chdir("/"), "from .+ to /"),
}  # fmt: skip


def test_every_setting_has_a_change():
    assert CHANGES.keys() == PROCESS_SETTINGS.keys()


@pytest.mark.parametrize("setting", sorted(CHANGES))
def test_code_that_changes_the_process_is_reported_in_one_sentence(setting):
    change, values = CHANGES[setting]

    def work():
        folder = os.getcwd()
        sentence = f"^f changed .*{setting} {values}, which affects the rest of the run; restore this before the code"
        with pytest.raises(ValueError, match=sentence):
            call_user_code("f", change)
        assert os.getcwd() == folder  # because the run saves a checkpoint before it ends
        with unchanged_process("f"):
            pass

    assert exit_code(fork(work)) == 0


@pytest.mark.parametrize("change", [
    lambda: torch.set_float32_matmul_precision("high"), set_on(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    set_on(torch.backends, "fp32_precision", "tf32"),
])  # fmt: skip
def test_matmul_precision_is_read_from_both_interfaces_of_torch(change):
    """After the new interface is used, torch's getters in the old interface raise errors."""

    def work():
        with pytest.raises(ValueError, match="changed the precision of products"):
            call_user_code("f", change)
        call_user_code("f", change)  # the setting can still be read

    assert exit_code(fork(work)) == 0
