"""`python -m minivlmrl`: the table of tools, and a mistake in one line for each of them."""

import importlib

import pytest

from minivlmrl import __main__ as start


def test_every_tool_exists_and_has_a_sentence():
    for module, _, function in (target.partition(":") for target, _ in start.TOOLS.values()):
        assert callable(getattr(importlib.import_module(module), function))
    assert all(sentence for _, sentence in start.TOOLS.values())


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
