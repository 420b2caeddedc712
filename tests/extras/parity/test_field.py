"""Test the verdicts on the losses of public projects: the command, the record and the page agree."""

import re
import subprocess
import sys
import zipfile

import pytest

from minivlmrl.extras.parity import command
from minivlmrl.extras.parity.command import main
from minivlmrl.extras.parity.field import LOSSES, PROJECTS, Project, Settings, read_functions
from tests.helpers.links import ROOT

PAGE = (ROOT / "docs" / "losses_of_the_field.md").read_text()
RECORDED = (ROOT / "tests" / "recorded" / "losses_of_the_field.txt").read_text()
ON_PYPI = [name for name, project in PROJECTS.items() if project.source.endswith(" on PyPI")]

LOSS = """
import a_package_that_does_not_exist

@a_package_that_does_not_exist.register("ppo")
def policy_loss(logps: a_package_that_does_not_exist.Logps, config):
    return config.get("factor") * helpers.total(logps)

class Trainer(a_package_that_does_not_exist.Trainer):
    def total(logps):
        return logps.sum()
"""


def test_functions_are_read_without_importing_their_package(tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "loss.py").write_text(LOSS)
    project = Project("theirs on PyPI", "1.0", "theirs/loss.py: policy_loss Trainer.total", {}, modules="helpers")
    theirs = read_functions(project, tmp_path)
    assert theirs.policy_loss(theirs.torch.ones(3), Settings(factor=2.0)) == 6.0
    with pytest.raises(ValueError, match=r"loss.py has no ppo; the table was made with theirs on PyPI 1.0"):
        read_functions(Project("theirs on PyPI", "1.0", "theirs/loss.py: ppo", {}), tmp_path)
    with pytest.raises(ValueError, match=r"has no file theirs/kl.py; give the folder of a clone or of an unpacked"):
        read_functions(Project("theirs on PyPI", "1.0", "theirs/kl.py: kl", {}), tmp_path)


def test_the_time_limit_of_a_project_may_be_zero(monkeypatch):
    limits = []
    monkeypatch.setattr(command, "judge_project", lambda name, path, seconds: limits.append(seconds) or {})
    monkeypatch.setattr(command, "section", lambda name, verdicts: "")
    assert main(["--project=verl", "--path=x", "--seconds=0"]) == 0
    assert limits == [0.0]


def test_the_command_takes_a_target_or_a_project(capsys):
    for words in ([], ["--project=verl"], ["my_loss.py:my_loss", "--project=verl", "--path=x"], ["x", "--path=x"]):
        with pytest.raises(SystemExit):
            main(words)
        assert "give a target, or --project and --path" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["my_loss.py:my_loss", "--json"])
    assert "--json prints the report about a recorded step" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["my_loss.py"])
    assert "my_loss.py is a file; name its function, too: my_loss.py:FUNCTION" in capsys.readouterr().err


@pytest.mark.parametrize("name", PROJECTS)
def test_the_table_has_the_recorded_findings_of_all_losses(name):
    """A cell of the first table has one letter for each finding, which the second table explains."""
    head, *rows = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| ")]
    explained = [row for row in rows if len(row) == 2]
    letters = {text.removeprefix("mistake: "): letter for letter, text in explained} | {"agrees": "agrees"}
    project = PROJECTS[name]
    section = f"\n{RECORDED}".split(f"\n### {name}\n")[1].split("\n### ")[0]
    assert f"{project.source}, {project.tried}; adapter " in section
    found = {}
    for line in re.findall(r"(?m)^\| (?!loss )(.+) \|$", section):
        loss, _, says = line.split(" | ")
        parts = re.split(r"(?:^|; )(?:design|mistake): ", says)
        found[loss] = ", ".join(letters[text] for text in parts if text)
    assert [*found] == [loss for losses in project.adapters.values() for loss in losses.split("; ")]
    assert {*found} <= {*LOSSES}
    [line] = [line for line in PAGE.splitlines() if line.startswith(f"| {name} {project.tried.split()[0]} |")]
    cells = [cell.strip() for cell in line.split("|")[2:-1]]
    assert {loss: cell for loss, cell in zip(head, cells, strict=True) if cell} == found


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_PYPI)
def test_the_page_is_what_a_downloaded_wheel_gives(name, tmp_path, capsys):
    project = PROJECTS[name]
    package = f"{project.source.removesuffix(' on PyPI')}=={project.tried}"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", tmp_path]
    done = subprocess.run([*pip, package], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"pip cannot download {package}: {done.stderr.strip().splitlines()[-1]}")
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path / "unpacked")
    main([f"--project={name}", f"--path={tmp_path / 'unpacked'}", "--seconds=inf"])
    assert capsys.readouterr().out in RECORDED + "\n"
