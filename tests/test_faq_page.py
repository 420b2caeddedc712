"""docs/faq.md is what docs/faq.py writes of tests/test_faq.py, and its questions keep their form."""

import ast
import importlib.util
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
SPEC = importlib.util.spec_from_file_location("faq", DOCS / "faq.py")
faq = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(faq)
TESTS = [node for node in ast.parse(faq.SOURCE.read_text()).body if isinstance(node, ast.FunctionDef)]


def test_the_page_is_as_committed():
    """If this fails after a change of a question: python docs/faq.py."""
    assert (DOCS / "faq.md").read_text(encoding="utf-8") == faq.page()


@pytest.mark.parametrize("test", TESTS, ids=lambda test: test.name)
def test_a_question_is_short(test):
    """A question, an answer of at most five lines, at most 15 lines of code without fixtures."""
    question, empty, *answer = ast.get_docstring(test).splitlines()
    assert "?" in question and not empty and 1 <= len(answer) <= 5
    assert test.end_lineno - test.body[0].end_lineno < 15 and not test.args.args


def test_the_page_has_twelve_questions_or_more():
    assert len(TESTS) >= 12


def test_a_snippet_runs_alone():
    """What a reader pastes: the imports of the page, then the lines of one question."""
    blocks = faq.page().split("```python\n")[1:]
    imports, first, *_ = [block.split("```")[0] for block in blocks]
    names = {}
    exec(imports + "\n" + first, names)
    names["test_zero_loss"]()
