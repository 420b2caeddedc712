"""Remove full-width characters, Markdown, LaTeX, quotes and code fences from answers, and parse JSON in them."""

import contextlib
import json
import re
from functools import partial

from minivlmrl.config.types import Plain
from minivlmrl.json_files import parse_json, unique_keys

# map full-width and typographic characters to ASCII
PLAIN_SIGNS = {0xFF01 + i: 0x21 + i for i in range(94)} | str.maketrans("。｡、−–‐‑‘’“”\u3000", "..,----''\"\" ")
COMMANDS = "boxed fbox text textbf textit textrm textsf texttt mathbf mathit mathrm mathsf mathtt"  # LaTeX
# (start, end) of markup around an answer; ** before *, because ** begins with *
WRAPPERS = (
    *[(f"\\{name}{{", "}") for name in COMMANDS.split()],
    ("\\(", "\\)"), ("\\[", "\\]"), ("$$", "$$"), ("$", "$"), ("<answer>", "</answer>"),
    ("```", "```"), ("**", "**"), ("__", "__"), ("*", "*"), ("_", "_"), ("`", "`"),
    ('"', '"'), ("'", "'"), ("“", "”"), ("「", "」"),
)  # fmt: skip
FENCED = re.compile(r"```(?:json|text|plaintext|python|markdown|latex)?\s(.*)```", re.DOTALL | re.IGNORECASE)
LEAD = re.compile(
    r"[*_]*(?:the |my )?(?:(?:correct|final|best|right) )*(?:answer|option|choice)[*_]*\s*"
    r"(?:is\b\s*:?|[:：=])[*_]*|答案\s*(?:是|为|[:：])\s*[:：]?|选择?(?=\s*[a-z(])",
    re.IGNORECASE,
)
# quoted string, possibly without its closing quote
QUOTED = re.compile(r"""("(?:[^"\\]|\\.)*"?)|'((?:[^'\\]|\\.)*)'?""", re.DOTALL)
LIST = re.compile(r"""\s*\[\s*(\{\s*)?['"]""")  # start of a JSON or Python list with objects or strings


def unwrap(text: str) -> str:
    """Remove markup and introductory words from an answer: "The answer is: $\\boxed{3}$." becomes "3"."""
    for _ in range(6):
        before = text
        text = text.strip().removesuffix(".").strip()
        if match := FENCED.fullmatch(text):
            text = match[1].strip()
        for start, end in WRAPPERS:
            inside = text[len(start) : -len(end)]
            if text == start + inside + end and inside and (start != end or end not in inside):
                text = inside.strip()
                break
        if match := LEAD.match(text):
            text = text[match.end() :].strip()
        if text == before:
            break
    return text


def read_json(text: str, **options) -> Plain:
    """Parse an answer in JSON, or a Python literal with single quotes, possibly inside markup.

    Args:
        options: keyword arguments for json.loads.
    Raises:
        UserError: not JSON, or a repeated key.
    """
    decode = partial(json.loads, object_pairs_hook=unique_keys, **options)
    text = unwrap(text)
    try:
        return parse_json(text, decode)
    except ValueError:
        return parse_json(QUOTED.sub(_double_quoted, text.translate(PLAIN_SIGNS)), decode)


def _double_quoted(match: re.Match) -> str:
    if match[1]:
        return match[1]
    return '"' + match[2].replace("\\'", "'").replace('"', '\\"') + '"'


def parse_literal(text: str) -> Plain:
    """Parse JSON, or a Python list or dict with single quotes; return None for other strings."""
    with contextlib.suppress(ValueError):
        return read_json(text)
    return None


def literal_list(text: str) -> list | None:
    """Parse a JSON or Python list of objects or strings; return None for other strings."""
    value = parse_literal(text) if LIST.match(text) else None
    return value if isinstance(value, list) else None
