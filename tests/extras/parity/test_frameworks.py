"""Test that losses in JAX and MLX are compared with TRL's, and that their mistakes are named."""

import re
import sys

import pytest

from minivlmrl.extras.parity.command import main
from minivlmrl.extras.parity.loss import check, judge
from tests.helpers.links import ROOT

PAGE = (ROOT / "docs" / "numerical_parity.md").read_text().partition("\n## In JAX or MLX\n")[2]
ONE_SHAPE = {"loss_type": "grpo", "importance_sampling_level": "token", "beta": 0.1, "use_bias_correction_kl": False}
ONE_SHAPE |= {"whole_step": True, "tokens": 27}


def numpy_of(framework):
    return pytest.importorskip({"jax": "jax.numpy", "mlx": "mlx.core"}[framework])


@pytest.mark.parametrize("framework", ["jax", "mlx"])
def test_a_framework_that_is_not_installed_is_named_before_the_file_imports_it(tmp_path, monkeypatch, framework):
    monkeypatch.setitem(sys.modules, framework, None)
    (tmp_path / "mine.py").write_text(f"import {framework}\nloss = {framework}.loss")
    monkeypatch.setitem(sys.modules, f"{framework}.core", None)
    message = f"--framework={framework} needs the package {framework}; run pip install -e '.[{framework}]'"
    with pytest.raises(ValueError, match=re.escape(message)):
        main([f"{tmp_path}/mine.py:loss", f"--framework={framework}"])
    with pytest.raises(ValueError, match=re.escape(message)):
        check(print, framework=framework)


def grpo(framework, kl_sign=1):
    np = numpy_of(framework)

    def loss(batch, options):
        ratio = np.exp(batch["per_token_logps"] - batch["old_per_token_logps"])
        clipped = np.clip(ratio, 1 - options["epsilon_low"], 1 + options["epsilon_high"])
        A = batch["advantages"][:, None]
        d = kl_sign * (batch["ref_per_token_logps"] - batch["per_token_logps"])
        kl = np.expm1(d) - d
        per_token = options["beta"] * kl - np.minimum(ratio * A, clipped * A)
        mask = batch["mask"]
        return ((per_token * mask).sum(1) / np.maximum(mask.sum(1), 1)).mean()

    return loss


@pytest.mark.parametrize("framework", ["jax", "mlx"])
def test_a_right_loss_agrees_and_a_mistake_is_named(framework):
    tolerance = {"jax": 1e-12, "mlx": 1e-6}[framework]  # MLX converts Python's numbers, such as beta, to float32
    assert check(grpo(framework), tolerance, framework=framework, **ONE_SHAPE) > 1
    verdict = judge(grpo(framework, kl_sign=-1), framework=framework, **ONE_SHAPE)
    assert verdict.names[0] == "mistake: policy and reference are swapped in the KL"
    assert framework != "jax" or numpy_of("jax").ones(1).dtype == "float32"  # the user's default stays


@pytest.mark.parametrize("framework", ["jax", "mlx"])
def test_a_loss_that_returns_no_scalar_is_refused(framework):
    numpy_of(framework)
    for value in (lambda mask: mask, lambda mask: [mask.sum()], lambda mask: {"objective": mask.sum()}):
        with pytest.raises(ValueError, match=r"(?s)my_loss returned .* of shape \(\)") as caught:
            judge(lambda batch, options, value=value: value(batch["mask"]), framework=framework)
        assert "my_loss got a batch of kind=grpo: per_token_logps (16, 6), mask (16, 6)" in caught.value.__notes__[-1]


@pytest.mark.parametrize("target", ["my_loss.py", "recipes"])
def test_the_command_refuses_a_target_without_a_function(target):
    with pytest.raises(ValueError, match=f"{target} is not FILE.py:FUNCTION. .* commit 9091b662"):
        main([target])


def test_the_tolerance_of_the_command(tmp_path, capsys):
    (tmp_path / "my_loss.py").write_text("def loss(batch, options):\n    return batch['per_token_logps'].sum()\n")
    words = [f"{tmp_path}/my_loss.py:loss", "--only", "kind=sft"]
    assert [main(words), main([*words, "--tolerance=inf"])] == [1, 0]
    assert "all 6 cases of loss_type=nll agree with TRL" in capsys.readouterr().out


@pytest.mark.slow
def test_the_page_shows_what_the_command_prints(tmp_path, monkeypatch, capsys):
    numpy_of("jax")
    code, command = re.findall(r"```(?:python|bash)\n([^`]*)```", PAGE)[:2]
    (tmp_path / "jax_loss.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    words = command.removeprefix("minivlmrl parity ").split()
    assert "--framework=jax" in words
    assert main(words) == 1
    [mistake] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("mistake: ")]
    assert f"`{mistake}`" in PAGE
