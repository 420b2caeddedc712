"""Test that no sentence has two articles in a row or a word twice, which a rewrite by rule leaves behind."""

import re
import subprocess

import pytest

from tests.helpers.links import ROOT

TWICE = re.compile(
    r"\b(?:(?:a|an|the|its|their|this) (?:an|the|its|their|this|each|every)"
    r"|(the|of|in|to|and|for|with|is|are|that|from|by|be) \1)\b"
)
FILES = subprocess.run(["git", "ls-files", "*.md", "*.py"], cwd=ROOT, capture_output=True, text=True).stdout.split()


def faults(text):
    """Find faults across the lines of a paragraph or a comment."""
    joined = re.sub(r"\s*\n[ \t]*(?:# )?", " ", re.sub(r"```.*?```|`[^`\n]*`|\"[^\"\n]*\"", "-", text, flags=re.DOTALL))
    return [joined[max(0, found.start() - 40) : found.end() + 40] for found in TWICE.finditer(joined)]


@pytest.mark.parametrize(("text", "count"), [
    ("the each model family's norm", 1), ("only the their\nanswers' log-probabilities", 1), ("# of the\n# the row", 1),
    ("in each of the two, that is that", 0),
])  # fmt: skip
def test_faults_are_found(text, count):
    assert len(faults(text)) == count


def test_no_sentence_has_two_articles_or_a_word_twice():
    found = {
        name: faults((ROOT / name).read_text(encoding="utf-8"))
        for name in FILES
        if name != "tests/repository/test_english.py"
    }
    assert len(found) > 300 and not {name: texts for name, texts in found.items() if texts}
