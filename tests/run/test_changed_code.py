"""Test that a resume names the code of the user that has changed."""

import sys

import pytest

from minivlmrl.config.import_utils import code_files, load_name
from minivlmrl.errors import USER_FILES

COUNT = """
calls = 0

def counts(completions, **columns):
    global calls
    calls += 1
    return [calls * SIGN + len(text) for text in completions]
"""
# {file: text}; a reward imports the other files at once, or in its first call
FILES = {
    "plain": {"rewards.py": COUNT.replace("SIGN", "1")},
    "below": {"my/mine.py": COUNT.replace("SIGN", "1")},
    "häufig": {"Belohnung für b.py": COUNT.replace("SIGN", "1")},
    "neighbor": {"rewards.py": "from signs import SIGN\n" + COUNT, "signs.py": "SIGN = 1\n"},
    "package": {"rewards.py": "from lib.signs import SIGN\n" + COUNT, "lib/signs.py": "SIGN = 1\n"},
    "late": {
        "rewards.py": COUNT.replace("    global", "    from late_signs import SIGN\n    global"),
        "late_signs.py": "SIGN = 1\n",
    },
}


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Return a function that writes files of code, and makes Python forget those that it has imported."""
    former = {*USER_FILES}
    USER_FILES.clear()
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.setattr("sys.dont_write_bytecode", True)

    def write(folder, files):
        for name, module in [*sys.modules.items()]:
            if str(getattr(module, "__file__", None)).startswith(str(tmp_path)) or name == "lib":
                del sys.modules[name]
        for name, text in files.items():
            path = tmp_path / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path / folder

    yield write
    USER_FILES.clear()
    USER_FILES.update(former)


@pytest.mark.parametrize("kind", FILES)
def test_changed_code_is_named_at_a_resume(run, plain, write, monkeypatch, capsys, kind):
    """The reward is named relative to the working folder, as README does."""
    reward, *others = FILES[kind]
    monkeypatch.chdir(write(kind, FILES[kind]))
    options = ["--stages=[grpo]", f"--rewards={{'{reward}:counts': 1.0}}", "--state_steps=1"]
    run(*options, "--grpo.max_steps=1")
    write(kind, FILES[kind])
    run(*options, "--grpo.max_steps=2", "--resume=auto")
    assert "code in" not in capsys.readouterr().out
    changed = others[0] if others else reward
    write(kind, {changed: FILES[kind][changed].replace("SIGN = 1", "SIGN = -1").replace("* 1", "* -1")})
    run(*options, "--grpo.max_steps=3", "--resume=auto")
    [line] = [line for line in capsys.readouterr().out.splitlines() if "code in" in line]
    assert line.startswith("changed since ") and line.endswith(f"was saved: code in {changed}")


def test_code_of_the_product_and_of_installed_packages_is_not_the_users(write, monkeypatch):
    folder = write("home", {"rewards.py": "import json\nimport torch\nfrom helper import F\n", "helper.py": "F = 1\n"})
    monkeypatch.chdir(folder)
    load_name("rewards.py:F")
    assert code_files() == {str(folder / "rewards.py"), str(folder / "helper.py")}
