"""Say how to correct invalid YAML."""

import re

from minivlmrl.errors import truncate

# matches a name and a value without ": " between them, as in `seed = 7` or `seed:7`
NO_COLON = re.compile(r"""\s*([A-Za-z_][\w.]*)(?:\s*=\s*|:(?![\s/]))([^\s=:/][^=:]*?)\s*(?:#.*)?""")
CURES = {  # {part in a parser message: what to type}
    "None": "write a name, a colon, a space and a value, as in seed: 7",  # valid YAML, but only one string
    "'\\t'": "use spaces instead of the tab",
    "mapping values are not allowed": "write the value in quotes, or begin the names of a section in the same column",
    "sequence entries are not allowed": "write a list in brackets, as in stages: [sft, grpo]",
    "expected ',' or": "close the bracket, with a comma between two items",
    "found '<stream end>'": "close the bracket, with a comma between two items",
    "expected the node content": "remove one of the commas",
    "end of stream": "close the quote",
    "could not find expected ':'": "write a colon and a space after the name, as in seed: 7",
    "unknown escape": "write the value in single quotes, which keep backslashes",
    "that cannot start": "write the value in quotes",
    "but found ']'": "remove one of the closing brackets",
    "but found '}'": "remove one of the closing brackets",
    "expected <block end>": "begin the names of a section in the same column",
    "must be in": "write the value in quotes",  # for an invalid date such as 2024-13-45
}


def yaml_cure(text: str, error: Exception | None = None) -> str:
    """Name the wrong line in a YAML text and what to write instead, such as "line 1: write `seed: 7`".

    Args:
        error: the parser's exception; None for valid YAML with only one string.
    """
    lines = text.splitlines() or [""]
    problem = str(getattr(error, "problem", None) or error).partition("\n")[0]
    mark = getattr(error, "problem_mark", None)
    last = first = min(mark.line, len(lines) - 1) if mark else 0
    # for an unclosed quote or bracket, report the line where it was opened
    opened = getattr(error, "context_mark", None)
    if opened and re.search("quoted|simple key|flow", str(getattr(error, "context", None))):
        first = opened.line
    for number in range(max(first - 1, 0), last + 1):
        loose = NO_COLON.fullmatch(lines[number])
        if loose:
            return f"line {number + 1}: write `{loose[1]}: {loose[2]}`"
    cure = next((cure for part, cure in CURES.items() if part in problem), problem)
    return f"line {first + 1}, {truncate(lines[first].strip(), 60)}: {cure}"
