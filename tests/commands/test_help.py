"""Test `train.py --help`, which lists every option with its type, default and description."""

import pytest

from minivlmrl.commands import help as page
from minivlmrl.config.loading import load_config
from minivlmrl.config.options import RunConfig
from minivlmrl.config.parsing import options_of


def test_every_option_is_listed_once_with_a_description(capsys):
    page.print_options()
    out = capsys.readouterr().out
    for option in options_of(RunConfig):
        assert out.count(f"  --{option.path}=") == 1, option.path
        assert page.comments_of(option.declared_in)[option.name], f"{option.path} has no comment that explains it"
    assert "  --data.video={}\n" in out and out.startswith("usage: minivlmrl train")


def test_one_section(capsys):
    page.print_options("sampling")
    out = capsys.readouterr().out
    assert "  --sampling.top_k=0\n        int" in out and "including ties with the k-th" in out
    assert "--grpo." not in out and "--seed" not in out


def test_the_section_of_a_stage_in_a_file(tmp_path, capsys):
    stage = "from minivlmrl.trainers.sft import SFTTrainer\n\n\nclass Again(SFTTrainer):\n    stage = 'again'\n"
    (tmp_path / "again.py").write_text(stage)
    (tmp_path / "again.yaml").write_text("stages: ['again.py:Again']\n")
    page.print_options(str(tmp_path / "again.yaml"), "again")
    assert "  --again.max_steps=100\n        int" in capsys.readouterr().out
    page.print_options(str(tmp_path / "again.yaml"))
    assert "  --again.max_steps=100\n" in capsys.readouterr().out


def test_an_unknown_section_is_refused():
    message = r"--help grop: unknown section 'grop'; the sections are run, model, .*grpo"
    with pytest.raises(ValueError, match=message):
        page.print_options("grop")


def test_the_printed_defaults_are_the_defaults(tmp_path, capsys):
    page.print_options()
    options = [line.strip() for line in capsys.readouterr().out.splitlines() if line.startswith("  --")]
    (tmp_path / "empty.yaml").write_text("{}")
    assert load_config(tmp_path / "empty.yaml", options) == RunConfig()
