"""Parse lists and other values that are written as strings."""

import ast
import json
import re

from minivlmrl.config.types import Plain

LIST = re.compile(r"""\s*\[\s*(\{\s*)?['"]""")  # start of a JSON or Python list with objects or strings


def literal_list(text: str) -> list | None:
    """Parse a JSON or Python list with objects or strings; return None for other strings."""
    value = parse_literal(text) if LIST.match(text) else None
    return value if isinstance(value, list) else None


def parse_literal(text: str) -> Plain:
    """Parse JSON or a Python literal; return None if neither."""
    for parse in (json.loads, ast.literal_eval):
        try:
            return parse(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    return None
