"""Compile single functions from another project's code, without importing its files.

A compiled function can use packages in IMPORTED, such as torch, and functions, classes and literal constants in the
project folder, which are compiled in the same way. Other code in the project folder does not run.
"""

import __future__

import ast
import builtins
import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

from minivlmrl.errors import UserError

IMPORTED = "torch numpy math functools itertools enum typing dataclasses collections contextlib jax mlx __future__"
DENIED = "open exec eval compile input breakpoint"  # built-ins that compiled functions cannot use
KEPT = ("torch.no_grad()", "torch.inference_mode()", "staticmethod", "classmethod")
DEFINITIONS = (ast.FunctionDef, ast.ClassDef)


class Unknown:
    """Stand-in for a name that the project does not define, such as a logger; calls with tensors raise UserError."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, name: str):
        return Unknown(f"{self._name}.{name}")

    def __bool__(self) -> bool:
        return False

    def __call__(self, *values, **named):
        if any(isinstance(getattr(x, "ndim", None), int) for x in (*values, *named.values())):
            raise UserError(f"{self._name} is not in the folder")
        return self


class Names(dict):
    """Global namespace of a Python file; definitions are compiled on first use."""

    def __init__(self, clone: "Clone", tree: ast.Module, path: str):
        super().__init__(__builtins__=clone.builtins)
        self.clone = clone
        self.tree = tree
        self.path = path
        self.statements = {}
        for node in reversed([*walk(tree.body)]):  # reversed: the first definition for a name counts
            self.statements.update(dict.fromkeys(bound_names(node), node))

    def __missing__(self, name: str):
        if name not in self.statements:
            if hasattr(builtins, name) and name not in DENIED.split():
                raise KeyError(name)
            self[name] = Unknown(name)
            return self[name]
        node = self.statements[name]
        module = ast.fix_missing_locations(ast.Module([alone(node) if isinstance(node, DEFINITIONS) else node], []))
        # optimize=1 removes asserts, for example about config types
        code = compile(module, self.path, "exec", __future__.annotations.compiler_flag, optimize=1)
        exec(code, self)
        return self.setdefault(name, Unknown(name))


class ImportedNames(SimpleNamespace):
    """Stand-in for an imported module; its attributes are looked up by name in all files of the project."""

    def __getattr__(self, name: str):
        found = [names for names in self.clone.files if isinstance(names.statements.get(name), DEFINITIONS)]
        if not found:
            return ImportedNames(clone=self.clone, path=f"{self.path}.{name}")
        tail = self.path.replace(".", "/")
        return max(found, key=lambda names: names.path.removesuffix(".py").endswith(tail))[name]

    def __call__(self, *values, **named):
        return Unknown(self.path)(*values, **named)


class Clone:
    """Python files in a folder, except tests."""

    def __init__(self, folder: Path):
        self.builtins = {name: x for name, x in vars(builtins).items() if name not in DENIED.split()}
        self.builtins["__import__"] = self.imported
        self.files = []
        for file in sorted(folder.rglob("*.py")):
            path = str(file.relative_to(folder))
            if re.search(r"(^|/)(tests?/|test_|\.)", path):
                continue
            with contextlib.suppress(SyntaxError, ValueError):  # skip files that this Python version cannot parse
                self.files.append(Names(self, ast.parse(file.read_text("utf-8")), path))

    def imported(self, name: str, names=None, local=None, fromlist=(), level: int = 0):
        if not level and name.split(".")[0] in IMPORTED.split():
            return __import__(name, names, local, fromlist, level)
        return ImportedNames(clone=self, path=name if fromlist else name.split(".")[0])


def walk(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Iterate over AST statements, including those inside `if` and `try`."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from walk(node.body + node.orelse)


def bound_names(node: ast.stmt) -> list[str]:
    """Return names that an AST statement defines: function, class, import or literal constant; [] for other code."""
    if isinstance(node, DEFINITIONS):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name.split(".")[0] for alias in node.names]
    if isinstance(node, ast.Assign) and is_literal(node.value):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return []


def is_literal(node: ast.expr | None) -> bool:
    try:
        ast.literal_eval(node or "None")
    except (ValueError, TypeError):
        return False
    return True


def parsed(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def alone(node: ast.stmt) -> ast.stmt:
    """Copy a function or class without annotations, most decorators and base classes, and non-literal defaults."""
    [node] = ast.parse(ast.unparse(node)).body
    for x in ast.walk(node):
        if isinstance(x, ast.arg):
            x.annotation = None
        if isinstance(x, ast.FunctionDef):
            x.returns = None
            decorators = [ast.unparse(y) for y in x.decorator_list]
            x.decorator_list = [parsed(y.replace("torch", "__import__('torch')")) for y in decorators if y in KEPT]
        if isinstance(x, ast.arguments):
            both: list[list] = [x.defaults, x.kw_defaults]
            for defaults in both:
                defaults[:] = [y if is_literal(y) else ast.Constant(None) for y in defaults]
    if isinstance(node, ast.ClassDef):
        is_data = any("dataclass" in ast.unparse(y) for y in node.decorator_list)
        node.decorator_list = [parsed("__import__('dataclasses').dataclass")] * is_data
        is_enum = any("Enum" in ast.unparse(y) for y in node.bases)
        node.bases = [parsed("__import__('enum').Enum")] * is_enum
        node.keywords = []
        node.body = [x for x in node.body if isinstance(x, ast.FunctionDef) or is_literal(getattr(x, "value", None))]
    return node
