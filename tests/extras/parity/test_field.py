"""Test the verdicts on the losses of public projects: the command, the record and the page agree."""

import re
import subprocess
import sys
import zipfile

import pytest
import torch

from docs.scripts.field import PROJECTS, __main__
from docs.scripts.field.reading import LOSSES, Project, Settings, as_loss, read_functions
from minivlmrl.extras.parity.calling import Arguments
from minivlmrl.extras.parity.frameworks import as_torch
from tests.helpers.links import ROOT

PAGE = (ROOT / "docs" / "losses_of_the_field.md").read_text()
RECORDED = (ROOT / "tests" / "recorded" / "losses_of_the_field.txt").read_text()

LOSS = """
import a_package_that_does_not_exist

@a_package_that_does_not_exist.register("ppo")
def policy_loss(logps: a_package_that_does_not_exist.Logps, config):
    return config.get("factor") * helpers.total(logps)

class Trainer(a_package_that_does_not_exist.Trainer):
    @torch.no_grad()
    def total(logps):
        return logps.sum()
"""


def test_functions_are_read_without_importing_their_package(tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "loss.py").write_text(LOSS)
    project = Project("theirs on PyPI", "1.0", "theirs/loss.py: policy_loss Trainer.total", {}, modules="helpers")
    theirs = read_functions(project, tmp_path)
    loss = theirs.policy_loss(theirs.torch.ones(3, requires_grad=True), Settings(factor=2.0))
    assert loss == 6.0 and not loss.requires_grad  # the decorator changes the gradient, as in Liger's VESPO
    with pytest.raises(ValueError, match=r"loss.py has no ppo; the table was made with theirs on PyPI 1.0"):
        read_functions(Project("theirs on PyPI", "1.0", "theirs/loss.py: ppo", {}), tmp_path)
    with pytest.raises(ValueError, match=r"has no file theirs/kl.py; give the folder of a clone or of an unpacked"):
        read_functions(Project("theirs on PyPI", "1.0", "theirs/kl.py: kl", {}), tmp_path)


STEP = """
def train(batches):
    for x in batches:
        with timer():
            loss = 0
            y = x * factor
            if y > 3:
                loss = y
            else:
                loss = -y
        print(loss)
"""


def test_a_part_of_a_function_is_read(tmp_path):
    (tmp_path / "train.py").write_text(STEP)
    theirs = read_functions(Project("theirs on PyPI", "1.0", "train.py: train[y:loss]", {}), tmp_path)
    assert theirs.train(x=2, factor=2).loss == 4
    assert vars(theirs.train(x=1, factor=2)).items() >= {"x": 1, "y": 2, "loss": -2}.items()
    with pytest.raises(ValueError, match=r"train.py has no train\[y:kl\]; the table was made with theirs on PyPI 1.0"):
        read_functions(Project("theirs on PyPI", "1.0", "train.py: train[y:kl]", {}), tmp_path)


@pytest.mark.parametrize("framework", ["jax", "mlx"])
def test_a_loss_of_another_framework_is_read(framework, tmp_path):
    """The adapter of a project gets arrays of the project's framework, also advantages for each token."""
    pytest.importorskip(framework)
    xp = {"jax": "jnp", "mlx": "mx"}[framework]
    (tmp_path / "loss.py").write_text(f"def loss(x, advantages):\n    return {xp}.exp(x * advantages).sum()\n")
    theirs = read_functions(Project("theirs on PyPI", "1.0", "loss.py: loss", {}, framework=framework), tmp_path)
    loss = as_torch(as_loss(lambda theirs, b, o: theirs.loss(b.logps, b.advantages), theirs), framework)
    x = torch.ones(1, 2, dtype=torch.float64, requires_grad=True)
    batch = Arguments({"per_token_logps": x, "mask": torch.ones(1, 2), "advantages": torch.zeros(1)}, set())
    assert loss(batch, Arguments({}, set())).item() == 2


def test_the_command_checks_laws_and_trl_numbers(tmp_path, monkeypatch, capsys):
    def adapter(theirs, b, o):
        return theirs.grpo_loss(b.logps, b.mask, b.advantages)

    code = "def grpo_loss(logps, mask, advantages):\n    return -(logps * advantages).sum() / mask.sum()\n"
    (tmp_path / "loss.py").write_text(code)
    project = Project("theirs on PyPI", "1.0", "loss.py: grpo_loss", {adapter: "BNPO"})
    monkeypatch.setitem(PROJECTS, "theirs", project)
    __main__.main(["theirs", str(tmp_path), "--laws"])
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("| BNPO | ") and "broken: masked tokens are trained. Smallest batch: mask [[1, 0]]" in line
    __main__.main(["theirs", str(tmp_path)])
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("| BNPO | 0 of 7 | ") and "| broken: masked tokens are trained. Smallest batch: " in line


def letters() -> dict[str, str]:
    """Return the letter of each finding, as in the page's second table; only mistakes and laws are called so there."""
    rows = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| ")]
    explained = [row for row in rows if len(row) == 2 and len(row[0]) == 1]
    return {expected: letter for letter, text in explained for expected in text.split("; ")}


def recorded_losses(name: str) -> dict[str, tuple[str, str]]:
    """Return the findings for each loss of a project: what the comparison says, and which laws are broken."""
    section = f"\n{RECORDED}".split(f"\n### {name}\n")[1].split("\n### ")[0]
    assert f"{PROJECTS[name].source}, {PROJECTS[name].tried}; adapter " in section
    rows = [line.strip("|").split("|") for line in section.splitlines() if re.match(r"\| (?!loss )", line)]
    return {loss.strip(): (expected.strip(), broken.strip()) for loss, _, expected, _, broken in rows}


@pytest.mark.parametrize("name", PROJECTS)
def test_the_table_has_the_recorded_findings_of_all_losses(name):
    """A cell of the first table has one letter for each finding, which the second table explains.

    Broken laws are findings where the comparison has not named any difference, as in the output of `minivlmrl parity`.
    """
    of_letters = letters()
    found = {}
    for loss, (expected, broken) in recorded_losses(name).items():
        if expected in ("agrees", "no name"):
            laws = [law.split(". Smallest batch")[0] for law in re.split("(?:^|; )broken: ", broken) if law]
            parts = [f"broken law: {law}" for law in laws]
        else:
            parts = [part.removeprefix("design: ") for part in re.split("; (?=design|mistake)", expected)]
        cells = ["agrees"] * (expected == "agrees") + [of_letters[part] for part in parts]
        assert cells, f"{name}, {loss}: neither the comparison nor a law says what is wrong"
        found[loss] = ", ".join(cells)
    project = PROJECTS[name]
    assert [*found] == [loss for computed in project.adapters.values() for loss in computed.split("; ")]
    assert {*found} <= {*LOSSES}
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if line.startswith("| ")]
    [(*cells, others)] = [cells for names, *cells in rows if f"{name} {project.tried.split()[0]}" in names.split("; ")]
    *losses, _ = next(line for line in PAGE.splitlines() if line.startswith("| | GRPO")).strip("| ").split(" | ")
    shown = {loss: cell for loss, cell in zip(losses, cells, strict=True) if cell}
    assert shown | dict(cell.split(": ") for cell in others.split("; ") if cell) == found


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, x in PROJECTS.items() if x.source.endswith(" on PyPI")])
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
    __main__.main([name, str(tmp_path / "unpacked")])
    assert capsys.readouterr().out in RECORDED + "\n"


def test_the_numbers_of_losses_on_the_pages():
    losses = [found for name in PROJECTS for found in recorded_losses(name).values()]
    broken = sum(bool(laws) for _, laws in losses)
    assert (
        f"The table has {len(losses)} losses" in PAGE and f"Of the {len(losses)} losses, {broken} break a law" in PAGE
    )
    page = (ROOT / "docs" / "numerical_parity.md").read_text()
    text = f"Of the {len(losses)} [losses of {len(PROJECTS)} projects](losses_of_the_field.md), {broken} break a law."
    assert text in page
