"""`python -m minivlmrl`: the table of tools, and a mistake in one line for each of them."""

import importlib
import importlib.util
import os

import pytest

from minivlmrl import __main__ as start


def test_every_tool_exists_and_has_a_sentence():
    for module, _, function in (target.partition(":") for target, _ in start.TOOLS.values()):
        assert callable(getattr(importlib.import_module(module), function))
    assert all(sentence for _, sentence in start.TOOLS.values())


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_memory_of_a_card_grows_in_place_unless_the_user_says_otherwise(monkeypatch, name):
    """Blocks of steps of all lengths would leave holes between them."""
    for other in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(other, raising=False)
    importlib.reload(start)
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    monkeypatch.setenv(name, "backend:native")
    importlib.reload(start)
    assert {k: v for k, v in os.environ.items() if k.endswith("ALLOC_CONF")} == {name: "backend:native"}


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]], ids=str)
def test_the_table_of_tools(capsys, arguments):
    assert start.main(arguments) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: python -m minivlmrl TOOL") and all(f"\n  {tool} " in out for tool in start.TOOLS)


def test_an_unknown_tool_is_named(capsys):
    assert start.main(["pland"]) == 2
    assert "'pland' is not one of these tools" in capsys.readouterr().err


@pytest.mark.parametrize("tool", ["ask", "plan", "audit"])
def test_every_tool_has_a_help_page(capsys, tool):
    with pytest.raises(SystemExit, match="0"):
        start.main([tool, "--help"])
    assert f"usage: python -m minivlmrl {tool}" in capsys.readouterr().out


def test_a_mistake_is_one_line(capsys):
    assert start.main(["plan", "--model", "nowhere"]) == 2
    assert capsys.readouterr().err.startswith("python -m minivlmrl plan: nowhere: no such file or folder")


def test_the_audit_says_how_to_install_it_where_it_is_missing(capsys, monkeypatch):
    """Where it is there, it has a help page; tests/test_wheel.py installs it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert start.main(["audit", "step"]) == 2
    says = "it is a distribution of its own, minivlmrl-audit: pip install ./audit, in a clone"
    assert capsys.readouterr().err == f"python -m minivlmrl audit: {says}\n"
