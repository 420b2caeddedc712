"""Check that the audit imports minivlmrl only through minivlmrl_api.py, and uses all its names."""

import ast
from pathlib import Path

AUDIT = Path(__file__).parents[1]
API = AUDIT / "minivlmrl_audit" / "minivlmrl_api.py"


def imported(path: Path) -> list[tuple[str, list[str]]]:
    """List the modules that a file imports, also inside functions, with the imported names."""
    modules = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules += [(alias.name, []) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules.append((node.module or "", [alias.asname or alias.name for alias in node.names]))
    return modules


def test_only_minivlmrl_api_imports_minivlmrl_and_all_its_names_are_used():
    listed, used, elsewhere = set(), set(), []
    for path in [*AUDIT.glob("*.py"), *AUDIT.glob("minivlmrl_audit/*.py")]:
        for module, names in imported(path):
            if module == "minivlmrl_audit.minivlmrl_api":
                used.update(names)
            elif module.partition(".")[0] == "minivlmrl" and path == API:
                listed.update(names)
            elif module.partition(".")[0] == "minivlmrl":
                elsewhere.append(f"{path.name}: {module}")
    assert not elsewhere
    assert listed == used and listed
