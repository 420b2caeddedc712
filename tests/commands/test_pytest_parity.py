"""Check `pytest --pyargs minivlmrl.losses.parity`: its cases, its errors, and the page about it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from minivlmrl.losses.parity import cases

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "numerical_parity.md").read_text(encoding="utf-8")
FUNCTIONS = """
import minivlmrl


def right(batch, options):
    loss = minivlmrl.sft_loss(batch["per_token_logps"], batch["mask"], loss_type=options.pop("loss_type"))
    return loss + 0 * batch.popitem()[1].sum()


def double(batch, options):
    mask = batch["mask"].clone()
    batch["mask"].mul_(2)
    return 2 * right(batch | {"mask": mask}, options)


def one(batch):
    pass


def fails(batch, options):
    return batch["colour"]


def number(batch, options):
    return 1.0


three = 3
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a user's functions, and settings that would hide or break another package's tests."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "losses.py").write_text(FUNCTIONS)
    settings = "[pytest]\npython_files = check_*.py\npython_functions = check\nfilterwarnings = error\ntestpaths = no\n"
    (folder / "pytest.ini").write_text(settings + "addopts = --strict-config --strict-markers --doctest-modules\n")
    fixture = "import pytest\n\n\n@pytest.fixture(autouse=True)\ndef fixture():\n    raise RuntimeError\n"
    (folder / "conftest.py").write_text(fixture)
    return folder


@pytest.fixture
def check(folder, monkeypatch, capsys):
    """Run pytest in this process and in the user's folder; return (exit status, stdout, stderr)."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def check(*arguments):
        options = [
            "-p",
            "minivlmrl_pytest",
            "-p",
            "no:cacheprovider",
            "-W",
            "ignore::pytest.PytestAssertRewriteWarning",
        ]
        status = pytest.main([*options, "--pyargs", "minivlmrl.losses.parity", *arguments])
        return int(status), *capsys.readouterr()

    return check


def test_each_case_is_a_test_that_can_be_run_again_by_its_id(check):
    status, out, _ = check("--loss=losses.py:right", "--kind=sft", "-v")
    names = re.findall(r"(\S+) PASSED", out)
    assert status == 0 and [name.partition("::")[2] for name in names] == [
        f"sft{number}[loss_type={loss_type}]"
        for number, loss_type in ((79, "nll"), (80, "dft"), (109, "nll"), (110, "dft"))
    ]
    status = pytest.main(["-p", "minivlmrl_pytest", "--pyargs", names[1], "--loss=losses.py:right", "--kind=sft"])
    assert status == 0


def test_only_selects_cases(check):
    status, out, _ = check("--loss=losses.py:right", "--kind=sft", "--only", "loss_type=dft", "--collect-only", "-q")
    assert status == 0 and re.findall(r"::(\w+)\[", out) == ["sft80", "sft110"]
    arguments = "--only=whole_step=false", "--only=loss_type=dapo", "--only=beta=0", "--collect-only", "-q"
    status, out, _ = check("--loss=losses.py:right", *arguments)
    assert status == 0 and re.findall(r"::(\w+)\[", out) == ["grpo44", "grpo46", "grpo82", "grpo83", "grpo91", "grpo92"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "--loss is missing; it must name your loss function: --loss=my_file.py:my_loss"),
        (["--loss=right"], "--loss is 'right', but it must name your loss function: --loss=my_file.py:my_loss"),
        (["--loss=no.py:right"], "--loss=no.py:right: there is no file FOLDER/no.py"),
        (
            ["--loss=losses.py:rihgt"],
            "--loss=losses.py:rihgt cannot be loaded (AttributeError: module 'FOLDER/losses' has no attribute 'rihgt')"
            "; did you mean right?",
        ),
        (
            ["--loss=losses.py:three"],
            "--loss=losses.py:three is of type int, but it must be a function (batch, options) -> scalar loss",
        ),
        (
            ["--loss=losses.py:one"],
            "--loss=losses.py:one has the arguments (batch), but it must be a function (batch, options) -> scalar loss",
        ),
        (
            ["--loss=losses.py:right", "--kind=ppo"],
            "No recorded case has the options {'kind': 'ppo'}; choose from {'kind': ['grpo', 'dpo', 'sft']}",
        ),
        (
            ["--loss=losses.py:right", "--kind=sft", "--only", "loss_type=dapo"],
            "No recorded case has the options {'kind': 'sft', 'loss_type': 'dapo'}; "
            "choose from {'kind': ['sft'], 'loss_type': ['nll', 'dft']}",
        ),
        (
            ["--loss=losses.py:right", "--only", "loss_type"],
            "--only is 'loss_type', but it must be NAME=VALUE, such as loss_type=dapo",
        ),
    ],
)
def test_a_wrong_option_is_one_sentence(check, folder, arguments, message):
    status, out, err = check(*arguments)
    assert (status, out, err.strip()) == (4, "", f"ERROR: {message}".replace("FOLDER", str(folder)))


@pytest.mark.parametrize(
    "name, message",
    [
        ("fails", "losses.py:fails raised KeyError: 'colour' in FOLDER/losses.py:21"),
        ("number", "my_loss returned 1.0, but it must return a tensor of shape ()"),
    ],
)
def test_a_function_that_fails_is_one_sentence(check, folder, name, message):
    status, out, _ = check(f"--loss=losses.py:{name}", "--kind=sft", "-q")
    assert status == 1 and out.count(f"\n{message}\n".replace("FOLDER", str(folder))) == 4
    assert "Traceback" not in out and "mistakes" not in out


def test_the_summary_names_mistakes_of_the_recorded_tensors(check, monkeypatch):
    """The function may change its arguments, so it gets copies of the tensors."""

    def known_mistakes(steps):
        return [f"{len(steps)} cases, a mask of {max(batch['mask'].max() for batch, *_ in steps)}"]

    monkeypatch.setattr("minivlmrl.losses.parity.known_mistakes", known_mistakes)
    status, out, _ = check("--loss=losses.py:double", "--kind=sft", "-q")
    assert status == 1 and re.search(r"= mistakes in losses.py:double =+\n4 cases, a mask of 1.0\n", out), out


def test_a_file_may_import_modules_of_its_folder(check, folder):
    (folder / "deep").mkdir()
    (folder / "deep" / "loss.py").write_text("from functions_beside import right\n")
    (folder / "deep" / "functions_beside.py").write_text(FUNCTIONS)
    assert check("--loss=deep/loss.py:right", "--kind=sft")[0] == 0


def run(folder, *arguments):
    """Run Python in a folder, with this clone's code."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "audit")]), "COLUMNS": "80"}
    done = subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def test_the_page_shows_the_output(tmp_path):
    """The page's command, with the page's loss, prints the page's text."""
    pytest.importorskip("minivlmrl_audit")
    code, command, printed = re.findall(r"```(?:python|bash|text)\n([^`]*)```", PAGE)[1:]
    (tmp_path / "my_file.py").write_text(code)
    pytest_, *arguments = command.replace("\\\n", "").split()
    status, out, err = run(tmp_path, "-m", pytest_, "-p", "minivlmrl_pytest", *arguments)
    assert (status, err) == (1, "") and out.partition(" in ")[0] == printed.partition(" in ")[0], out


def test_other_runs_of_pytest_do_not_change(tmp_path):
    """The module that pytest loads in every run imports neither torch nor minivlmrl, and adds no option."""
    code = "import sys, minivlmrl_pytest; assert not {'torch', 'minivlmrl'} & {*sys.modules}"
    assert run(tmp_path, "-c", code) == (0, "", "")
    status, _, err = run(tmp_path, "-m", "pytest", "-p", "minivlmrl_pytest", "--loss=losses.py:right", ".")
    assert status == 4 and "unrecognized arguments: --loss=losses.py:right" in err


def test_the_page_names_the_number_of_cases():
    named = dict(re.findall(r"`(\w+)` \((?:the default, )?(\d+)", PAGE))
    assert named == {kind: str(len([*cases(kind=kind)])) for kind in ("grpo", "dpo", "sft")}
