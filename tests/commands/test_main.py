"""Test that `minivlmrl` lists the commands and reports a mistake in one line."""

import importlib
import json
import os
import re
import subprocess
import sys

import pytest
import torch

from minivlmrl import __main__, errors
from minivlmrl.kernels.linear_log_softmax import linear_log_softmax
from minivlmrl.losses import grpo


def test_every_command_exists_and_has_a_description():
    for module, _, function in (target.partition(":") for target, _ in __main__.COMMANDS.values()):
        assert callable(getattr(importlib.import_module(module), function))
    assert all(sentence for _, sentence in __main__.COMMANDS.values())


ENVIRONMENT = {"GOMP_SPINCOUNT": "1000", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize(("own", "expected"), [
    ({}, ENVIRONMENT),
    ({"GOMP_SPINCOUNT": "7"}, ENVIRONMENT | {"GOMP_SPINCOUNT": "7"}),
    ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, {"GOMP_SPINCOUNT": "1000"}),
])  # fmt: skip
def test_environment_variables_of_torch_have_defaults(own, expected):
    requested = [*ENVIRONMENT, "PYTORCH_CUDA_ALLOC_CONF"]
    message = f"print(json.dumps([{{n: os.environ.get(n) for n in {requested}}}, 'torch' in sys.modules]))"
    clean = {name: value for name, value in os.environ.items() if name not in requested}
    for kernel in ("6.8.0-generic", "6.6.87.2-microsoft-standard-WSL2"):
        names = f"types.SimpleNamespace(release='{kernel}')"
        code = f"import json, os, sys, types; os.uname = lambda: {names}; import minivlmrl.__main__ as start; "
        code += f"start.main([]); {message}"
        printed = subprocess.check_output([sys.executable, "-c", code], env=clean | own, text=True)
        values, torch = json.loads(printed.splitlines()[-1])
        found = {name: value for name, value in values.items() if value}
        # in WSL, PYTORCH_ALLOC_CONF is not set, because the first allocation of an expandable segment could fail
        assert found | {"PYTORCH_ALLOC_CONF": None} == expected | own | {"PYTORCH_ALLOC_CONF": None}
        assert ("PYTORCH_ALLOC_CONF" in found) == ("PYTORCH_ALLOC_CONF" in expected and "WSL" not in kernel)
        assert not torch


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]], ids=str)
def test_the_list_of_commands(capsys, arguments):
    assert __main__.main(arguments) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: minivlmrl COMMAND") and all(f"\n  {tool} " in out for tool in __main__.COMMANDS)


@pytest.mark.parametrize("tool", ["chat", "memory", "parity"])
def test_commands_have_a_help_page(capsys, tool):
    with pytest.raises(SystemExit, match="0"):
        __main__.main([tool, "--help"])
    assert f"usage: minivlmrl {tool}" in capsys.readouterr().out


def test_a_mistake_is_one_line(capsys):
    assert __main__.main(["memoryd"]) == __main__.main(["memory", "--model", "nowhere"]) == 2
    assert __main__.main(["eval"]) == __main__.main(["run.yaml"]) == 2
    expected = "minivlmrl memoryd: this is not one of the commands; did you mean memory?\n"
    expected += "minivlmrl memory: nowhere: this folder does not exist"
    printed = capsys.readouterr().err
    assert printed.startswith(expected)
    expected = "minivlmrl eval: this is not one of the commands; did you mean evaluate?\n"
    assert printed.endswith(
        expected + "minivlmrl run.yaml: this is not one of the commands; write minivlmrl train run.yaml\n"
    )


def test_the_version_is_what_a_bug_report_asks_for(capsys):
    assert __main__.main(["--version"]) == 0
    pattern = r"minivlmrl \d+\.\d+\.\d+ \((commit \w+.*|not a clone)\), Python 3.*, torch 2\..*, device .+\n"
    assert re.fullmatch(pattern, capsys.readouterr().out)


def test_a_closed_stdout_is_no_error():
    done = subprocess.run(f"{sys.executable} -m minivlmrl | true", shell=True, capture_output=True, text=True)
    assert done.stderr == ""


def test_an_error_is_the_users_by_its_class():
    """An error of int() in our code is a bug, which needs a traceback; losses and kernels can only raise ValueError."""
    statements = {
        "raise RuntimeError('no')": False, "raise errors.UserError('no')": True,
        "raise ValueError('no')": False, "raise TypeError('no')": False,
        "with errors.error_context('rows.jsonl:3'): int('x')": True, "raise FloatingPointError('nan')": True,
        "grpo.check_known('loss_type', 'x', ['grpo'])": True, "linear_log_softmax(ones, ones, ones)": True,
    }  # fmt: skip
    names = {"errors": errors, "grpo": grpo, "linear_log_softmax": linear_log_softmax, "ones": torch.ones(2)}
    for statement, expected in statements.items():
        with pytest.raises((ValueError, TypeError, ArithmeticError, RuntimeError)) as raised:
            exec(statement, names)
        assert (errors.user_error_message(raised.value) is not None) == expected, statement


def test_messages_to_the_user_are_user_errors():
    """A ValueError would be shown with a traceback; only files that import nothing but torch may raise one."""
    files = [file for file in errors.PACKAGE.rglob("*.py") if file.parent.name not in ("losses", "kernels")]
    pattern = r"\bValueError\(|else ValueError|= ValueError"
    assert [file.name for file in files if re.search(pattern, file.read_text("utf-8"))] == ["kto.py"]
