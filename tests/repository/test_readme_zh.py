"""Check that README.zh-CN.md has the same commands, links, code names and numbers as README.md."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENGLISH, CHINESE = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh-CN.md"))


def found(pattern: str, page: str) -> list[str]:
    return re.findall(pattern, page, re.DOTALL)


def test_the_blocks_of_code_are_the_same():
    assert found(r"```(.*?)```", CHINESE) == found(r"```(.*?)```", ENGLISH)


def test_the_links_are_the_same():
    pattern = r"\]\((?!#|README)([^)]+)\)"
    assert set(found(pattern, CHINESE)) == set(found(pattern, ENGLISH))
    assert "[中文](README.zh-CN.md)" in ENGLISH.splitlines()[0] and "[English](README.md)" in CHINESE.splitlines()[0]


def test_the_numbers_are_the_same():
    """The numbers are equal; 0.74 million is written as 74 万 in Chinese."""
    pattern = r"(?<![\w.])\d+(?:[.,]\d+)*"
    assert set(found(pattern, ENGLISH)) - {"0.74"} == set(found(pattern, CHINESE)) - {"74"}


def test_the_names_of_code_are_the_same():
    assert set(found(r"`([^`\n]+)`", CHINESE)) == set(found(r"`([^`\n]+)`", ENGLISH))
