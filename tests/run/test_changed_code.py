"""Test that a resume names the code of the user that has changed."""

import sys

import pytest

from minivlmrl.errors import USER_FILES

CODE = """
calls = 0

def counts(completions, **columns):
    global calls
    calls += 1
    return [calls + len(text) for text in completions]
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Return a function that writes a file of code, and makes Python forget it."""
    former = {*USER_FILES}
    USER_FILES.clear()
    monkeypatch.chdir(tmp_path)

    def write(name, text):
        sys.modules.pop(str(tmp_path / name).removesuffix(".py"), None)
        (tmp_path / name).write_text(text)

    yield write
    USER_FILES.clear()
    USER_FILES.update(former)


def test_changed_code_is_named_at_a_resume(run, quick, write, capsys):
    """The reward is named relative to the working folder, as README does."""
    name = "Belohnung für b.py"
    options = ["--stages=[grpo]", f"--rewards={{'{name}:counts': 1.0}}", "--state_steps=1"]
    write(name, CODE)
    run(*options, "--grpo.max_steps=1")
    write(name, CODE)
    run(*options, "--grpo.max_steps=2", "--resume=auto")
    assert "code in" not in capsys.readouterr().out
    write(name, CODE.replace("calls + ", "-calls - "))
    run(*options, "--grpo.max_steps=3", "--resume=auto")
    assert f"code in {name} changed\n" in capsys.readouterr().out


def test_changed_code_that_a_reward_imports_is_named(run, quick, write, capsys):
    options = ["--stages=[grpo]", "--rewards={mine.py:counts: 1.0}", "--state_steps=1"]
    for step, sign in enumerate((1, -1), start=1):
        sys.modules.pop("signs_of_mine", None)
        write("signs_of_mine.py", f"SIGN = {sign}\n")
        write("mine.py", "from signs_of_mine import SIGN\n" + CODE.replace("calls + ", "SIGN * calls + "))
        run(*options, f"--grpo.max_steps={step}", "--resume=auto")
    code = [line for line in capsys.readouterr().out.splitlines() if "code in" in line]
    assert code == ["code in signs_of_mine.py changed"]
