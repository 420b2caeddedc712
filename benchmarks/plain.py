"""How densely Python code is written: its tokens, the lines that pack, long functions. Standard library alone.

A token is one of Python's grammar: a name, number, operator, keyword or text. Free are docstrings, comments, empty
lines, imports, annotations, trailing commas and line breaks: nothing is gained by leaving them out. An f-string is one
token and those of its expressions; "a b c".split() is a token for each word.
"""

import ast
import io
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache

FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
DOCUMENTED = ast.Module | ast.ClassDef | FUNCTIONS
COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
IMPORTS = ast.Import | ast.ImportFrom
PLAIN_VALUES = ast.Name | ast.Constant | ast.Attribute
LAYOUT = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}


@cache  # a file counts in several parts
def code_tokens(source: str) -> list[tuple[int, str]]:
    """List the tokens of a source text that count, each (row, text)."""
    tree = ast.parse(source)
    free = free_spans(tree, source)
    tokens = []
    after_free = True
    for token in grammar_tokens(source):
        row = token.start[0]
        if any(start <= token.start and token.end <= end for start, end in free.get(row, [])):
            if not after_free and tokens[-1][1] in (":", "->"):
                tokens.pop()  # the sign before an annotation or a docstring
            after_free = True
            continue
        if token.string in ")]}" and not after_free and tokens[-1][1] == ",":
            is_tuple_of_one = len(tokens) > 2 and tokens[-3][1] == "("
            if not is_tuple_of_one:
                tokens.pop()
        tokens.append((row, token.string))
        after_free = False
    return tokens + hidden_tokens(tree)


def grammar_tokens(source: str) -> Iterator[tokenize.TokenInfo]:
    """Yield the tokens of a text, an f-string as one: since Python 3.12 it comes in pieces."""
    f_string_depth = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind = tokenize.tok_name[token.type]
        if kind == "FSTRING_START":
            f_string_depth += 1
            is_inside = f_string_depth > 1
        else:
            is_inside = f_string_depth > 0
        if kind == "FSTRING_END":
            f_string_depth -= 1
        if token.type not in LAYOUT and not is_inside:
            yield token


def free_spans(tree: ast.Module, source: str) -> dict[int, list]:
    """Collect (start, end) of docstrings, imports and annotations, for each row that they touch."""
    free_nodes = []
    for node in ast.walk(tree):
        if is_documented(node):
            free_nodes.append(node.body[0])
        if isinstance(node, IMPORTS):
            free_nodes.append(node)
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation:
            free_nodes.append(node.annotation)
        if isinstance(node, FUNCTIONS) and node.returns:
            free_nodes.append(node.returns)
    lines = source.splitlines()
    spans = {}
    for node in free_nodes:
        start = (node.lineno, character(lines, node.lineno, node.col_offset))
        end = (node.end_lineno, character(lines, node.end_lineno, node.end_col_offset))
        for row in range(node.lineno, node.end_lineno + 1):
            spans.setdefault(row, []).append((start, end))
    return spans


def character(lines: list[str], row: int, byte_offset: int) -> int:
    """Turn an offset in bytes of UTF-8, as ast counts, into one in characters, as tokenize does."""
    return len(lines[row - 1].encode()[:byte_offset].decode())


def hidden_tokens(tree: ast.Module) -> list[tuple[int, str]]:
    """List the tokens inside f-strings, and the words of texts that are split at once."""
    tokens = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FormattedValue):
            expression = ast.unparse(node.value)
            tokens += [(node.lineno, token.string) for token in grammar_tokens(expression)]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "split":
            text = node.func.value
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                tokens += [(node.lineno, word) for word in text.value.split()[1:]]
    return tokens


def is_documented(node: ast.AST) -> bool:
    """Say whether a node begins with a docstring."""
    return isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None


@cache  # a file counts in several parts
def function_tokens(source: str) -> dict[str, int]:
    """Count the tokens in the body of each function, nested ones included: {"Sampler.generate": 120}."""
    tokens_of_row = Counter(row for row, _ in code_tokens(source))
    counts = {}

    def visit(node: ast.AST, prefix: str):
        for child in ast.iter_child_nodes(node):
            name = prefix
            if isinstance(child, FUNCTIONS | ast.ClassDef):
                name = f"{prefix}{child.name}."
            if isinstance(child, FUNCTIONS):
                rows = range(child.body[0].lineno, child.end_lineno + 1)
                counts[name.rstrip(".")] = sum(tokens_of_row[row] for row in rows)
            visit(child, name)

    visit(ast.parse(source), "")
    return counts


@cache  # a file counts in several parts
def packings(source: str) -> list[tuple[int, str]]:
    """List the lines that pack several things into one, each (row, what to write instead)."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if packs_values(node):
            found.append((node.lineno, "several values are computed in one assignment: write one a line"))
        if adds_literal(node):
            found.append((node.lineno, "a literal is added to another: write one"))
        if multiplies_text_by_condition(node):
            found.append((node.lineno, "a text times a condition: write an if"))
        if isinstance(node, ast.Call) and any(map(is_starred_literal, node.args)):
            found.append((node.lineno, "a star before a tuple: write the arguments"))
        if has_walrus(node):
            found.append((node.lineno, "a walrus in a comprehension: write a loop"))
    return sorted(found)


def packs_values(node: ast.AST) -> bool:
    """Say whether `a, b = x, y` computes anything, or sets more than three; a swap does not count."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    if not isinstance(node.targets[0], ast.Tuple):
        return False
    values = node.value.elts
    targets = {ast.unparse(target) for target in node.targets[0].elts}
    read = {ast.unparse(inner) for inner in ast.walk(node.value) if isinstance(inner, PLAIN_VALUES)}
    is_swap = bool(targets & read)
    return not is_swap and (len(values) > 3 or not all(isinstance(value, PLAIN_VALUES) for value in values))


def adds_literal(node: ast.AST) -> bool:
    """Say whether a node is `names |= {...}`."""
    is_union = isinstance(node, ast.AugAssign) and isinstance(node.op, ast.BitOr)
    return is_union and isinstance(node.value, ast.Dict | ast.Set)


def multiplies_text_by_condition(node: ast.AST) -> bool:
    """Say whether a node is `"text" * (a == b)`, on either side."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
        return False
    pairs = [(node.left, node.right), (node.right, node.left)]
    return any(is_text(text) and isinstance(times, ast.Compare | ast.BoolOp) for text, times in pairs)


def is_text(node: ast.AST) -> bool:
    """Say whether a node is a literal text or an f-string."""
    is_literal = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return is_literal or isinstance(node, ast.JoinedStr)


def is_starred_literal(node: ast.AST) -> bool:
    """Say whether an argument is `*(a, b)`, which only joins arguments in a line."""
    return isinstance(node, ast.Starred) and isinstance(node.value, ast.Tuple | ast.List)


def has_walrus(node: ast.AST) -> bool:
    """Say whether a comprehension sets a variable on its way."""
    is_comprehension = isinstance(node, COMPREHENSIONS)
    return is_comprehension and any(isinstance(inner, ast.NamedExpr) for inner in ast.walk(node))


@cache  # a file counts in several parts
def variable_names(source: str) -> list[str]:
    """List the variables that are assigned, once for each assignment."""
    names = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)]
    return [name.id for name in names if isinstance(name.ctx, ast.Store) and name.id != "_"]
