"""Test how functions and classes are loaded by name, with or without options."""

import functools
import inspect
import json
import pickle
import sys
from typing import Annotated

import pytest
import torch

from minivlmrl.config.import_utils import find_stage, load_name, resolve_object, with_arguments, with_options
from minivlmrl.errors import user_error_message


def test_a_module_and_a_file(tmp_path):
    """A Python file is executed only once, and its folder need not be on sys.path."""
    assert load_name("json:dumps") is json.dumps
    file = tmp_path / "own.py"
    file.write_text("import json\nWRITE = json.dumps\n\n\ndef double(x):\n    return 2 * x\n")
    assert load_name(f"{file}:WRITE") is json.dumps
    assert load_name(f"{file}:double")(4) == 8
    assert load_name(f"{file}:double") is load_name(f"{file}:double")
    assert pickle.loads(pickle.dumps(load_name(f"{file}:double"))) is load_name(f"{file}:double")
    assert inspect.getsource(load_name(f"{file}:double")).startswith("def double")


def test_a_file_can_import_its_neighbor(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "neighbor_of_own.py").write_text("VALUE = 3\n")
    (tmp_path / "own.py").write_text("from neighbor_of_own import VALUE\n")
    assert load_name(f"{tmp_path / 'own.py'}:VALUE") == 3


@pytest.mark.parametrize(("target", "message"), [
    ("json:dumpz", "^json defines no 'dumpz'; did you mean dump or dumps\\?$"),
    ("FILE:crsh", "own.py defines no 'crsh'; did you m"),
    ("jsonn:dumps", "^there is no module jsonn; install its package, or write file.py:name$"),
    ("json.none:dumps", "^there is no module json.none; install"), ("FILE:zzz", "own.py defines no 'zzz'$"),
])  # fmt: skip
def test_a_missing_object_is_one_line(tmp_path, target, message):
    (tmp_path / "own.py").write_text("crash = 1")
    with pytest.raises(ValueError, match=message) as raised:
        load_name(target.replace("FILE", str(tmp_path / "own.py")))
    assert user_error_message(raised.value)


def test_a_missing_import_in_a_users_file_keeps_its_traceback(tmp_path, monkeypatch):
    (tmp_path / "imports_nothing.py").write_text("import jsonn\n")
    monkeypatch.syspath_prepend(tmp_path)
    for target in (f"{tmp_path}/imports_nothing.py:f", "imports_nothing:f"):
        with pytest.raises(ModuleNotFoundError) as raised:
            load_name(target)
        assert user_error_message(raised.value) is None


def rows(data, seed, pairs: Annotated[int, ">= 1"] = 8, share: Annotated[float, "[0, 1]"] = 0.5, kind=None):
    return data, seed, pairs, share, kind


@pytest.mark.parametrize(("text", "expected"), [
    ("rows", (8, 0.5, None)), ("rows()", (8, 0.5, None)), ("rows(pairs=2, kind=['(m)'],)", (2, 0.5, ["(m)"])),
    (f"{__file__}:rows(share=1)", (8, 1.0, None)), (f"{__name__}:rows( )", (8, 0.5, None)),
])  # fmt: skip
def test_a_name_with_options(text, expected):
    function, options = resolve_object("task", text, {"rows": rows})
    assert with_options(function, options)("data", 0) == ("data", 0, *expected)


@pytest.mark.parametrize(("text", "error"), [
    ("rows(2)", r"^task rows\(2\): the options must have the form name=value, name=value$"),
    ("rows(seed=1)", r"^there is no option 'seed'; the options are: pairs, share, kind$"),
    ("rows(pair=2)", r"^there is no option 'pair'; the options are: pairs, share, kind; did you mean pairs\?$"),
    ("rows(pairs=0)", "^pairs is 0, but it must be >= 1$"),
    ("lines(pairs=2)", "^unknown task 'lines'; known names are: rows, file.py:name$"),
    ("row", "^unknown task 'row'; known names are: rows, file.py:name; did you mean rows\\?$"),
])  # fmt: skip
def test_invalid_options_are_refused(text, error):
    with pytest.raises(ValueError, match=error):
        with_options(*resolve_object("task", text, {"rows": rows}))


RUN_VALUES = {"beta": 0.3, "loss_type": "grpo", "normalizer": 7}  # what a run passes by name


def star(*args, **kwargs):
    return kwargs


def named(logps, advantages, mask, beta, normalizer=None):
    return {"beta": beta, "normalizer": normalizer}


@functools.wraps(named)
def around_named(*args, **kwargs):
    return named(*args, **kwargs)


class Star:
    def __call__(self, *args, **kwargs):
        return kwargs

    def method(self, *args, **kwargs):
        return kwargs


class Module(torch.nn.Module):
    def forward(self, logps, advantages, mask, beta):
        return {"beta": beta}


@pytest.mark.parametrize(("function", "received"), [
    (star, "beta loss_type normalizer"), (functools.partial(star), "beta loss_type normalizer"),
    (functools.partial(star, loss_type="dapo"), "beta normalizer loss_type=dapo"),
    (functools.wraps(star)(lambda *args, **kwargs: star(*args, **kwargs)), "beta loss_type normalizer"),
    (Star(), "beta loss_type normalizer"), (Star().method, "beta loss_type normalizer"),
    (lambda logps, *args, **kwargs: kwargs, "beta loss_type normalizer"),
    (lambda logps, *args, beta: {"beta": beta}, "beta"),
    (lambda logps, advantages, mask, /, beta: {"beta": beta}, "beta"),
    (named, "beta normalizer"), (functools.partial(named, beta=1), "normalizer beta=1"),
    (around_named, "beta normalizer"), (functools.lru_cache(named), "beta normalizer"), (Module(), "beta"),
])  # fmt: skip
def test_each_form_of_a_users_function_gets_the_arguments_that_it_takes(function, received):
    words = [word.partition("=") for word in received.split()]
    expected = {name: value if sign else RUN_VALUES[name] for name, sign, value in words}
    call = with_arguments(function, ["per_token_logps", "advantages", "mask"], [*RUN_VALUES], {})
    assert {name: str(x) for name, x in call(0, 0, 0, **RUN_VALUES).items()} == {k: str(x) for k, x in expected.items()}


def test_a_stage_is_a_subclass_of_a_trainer():
    for name in ("named", "Star"):
        with pytest.raises(ValueError, match=f"^stages: .*:{name} is <.*, but it must be a subclass"):
            find_stage(f"{__file__}:{name}")
