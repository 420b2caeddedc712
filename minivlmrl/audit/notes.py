"""What is known to be different in other versions of TRL than 1.16: the table is notes.yaml."""

import re
from pathlib import Path

import yaml

NOTES = yaml.safe_load((Path(__file__).parent / "notes.yaml").read_text(encoding="utf-8"))


def known(title: str, version: str) -> list[str]:
    """What is known to be different in a version for a cell ("family: options"), or for a family by its name."""
    here = numbers(version)
    found = [note for note in NOTES if re.search(note[0], title)]
    return [text for _, since, below, text in found if numbers(since) <= here < numbers(below)]


def numbers(version: str) -> tuple[int, ...]:
    """Numbers that compare as versions do: 1.16.0.dev0 is (1, 16, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
