"""Test that losses in JAX and MLX are compared with TRL's, and that their mistakes are named."""

import math
import re
import sys

import pytest
import torch

from minivlmrl.extras.parity.calling import Arguments, loss_and_gradient
from minivlmrl.extras.parity.command import main
from minivlmrl.extras.parity.frameworks import as_torch
from minivlmrl.extras.parity.loss import check, judge
from tests.helpers.links import ROOT

PAGE = (ROOT / "docs" / "numerical_parity.md").read_text().partition("\n### In JAX or MLX\n")[2]
ONE_SHAPE = {"loss_type": "grpo", "importance_sampling_level": "token", "beta": 0.1, "use_bias_correction_kl": False}
ONE_SHAPE |= {"whole_step": True, "tokens": 27}


def numpy_of(framework):
    return pytest.importorskip({"jax": "jax.numpy", "mlx": "mlx.core"}[framework])


@pytest.mark.parametrize("framework", ["jax", "mlx"])
def test_a_framework_that_is_not_installed_is_named_before_the_file_imports_it(tmp_path, monkeypatch, framework):
    monkeypatch.setitem(sys.modules, framework, None)
    (tmp_path / "mine.py").write_text(f"import {framework}\nloss = {framework}.loss")
    with pytest.raises(ValueError, match=rf"needs the package {framework}; run pip install -e '\.\[{framework}\]'"):
        main([f"{tmp_path}/mine.py:loss", f"--framework={framework}"])


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
    tolerance = {"jax": 1e-12, "mlx": 1e-7}[framework]  # MLX converts Python's numbers, such as beta, to float32
    assert check(grpo(framework), tolerance, framework=framework, **ONE_SHAPE) > 1
    verdict = judge(grpo(framework, kl_sign=-1), framework=framework, **ONE_SHAPE)
    assert verdict.names[0] == "mistake: policy and reference are swapped in the KL"


def test_jax_keeps_its_default_dtype():
    jax = pytest.importorskip("jax")
    check(grpo("jax"), framework="jax", **ONE_SHAPE)
    assert jax.numpy.ones(1).dtype == "float32"


@pytest.mark.parametrize("decides", [False, True], ids=["scan", "a decision by numbers"])
def test_a_jax_loss_may_scan_or_decide_by_numbers(decides):
    jax = pytest.importorskip("jax")

    def loss(batch, options):
        if decides and batch["mask"].sum() > 5:
            return batch["per_token_logps"].sum()
        row = lambda total, x: (total + options["c"] * x.sum(), None)  # noqa: E731
        return jax.lax.scan(row, jax.numpy.zeros(()), batch["per_token_logps"])[0]

    loss_in_torch = as_torch(loss, "jax")
    for c in (2.0, 3.0):
        batch = {name: torch.rand(2, 3, dtype=torch.float64) for name in ("per_token_logps", "mask")}
        read = set()
        value, gradient = loss_and_gradient(loss_in_torch, batch, {"kind": "sft", "c": c}, read)
        assert math.isclose(value, c * batch["per_token_logps"].sum()) and gradient.eq(c).all()
        assert read == {"per_token_logps", "c"} | ({"mask"} if decides else set())


@pytest.mark.parametrize("framework", ["jax", "mlx"])
def test_the_gradient_is_scaled_by_that_of_later_operations(framework):
    numpy_of(framework)
    logps = torch.tensor([[1.0, 2.0]], dtype=torch.float64, requires_grad=True)
    loss = as_torch(lambda batch, options: (batch["per_token_logps"] ** 2).sum() * options["c"], framework)
    (3 * loss(Arguments({"per_token_logps": logps}, set()), Arguments({"c": 5.0}, set()))).backward()
    assert logps.grad.tolist() == [[30.0, 60.0]]


@pytest.mark.parametrize("framework", ["torch", "jax", "mlx"])
def test_only_what_a_loss_uses_counts_as_read(framework):
    """The conversion to arrays of another framework reads nothing."""
    if framework != "torch":
        numpy_of(framework)
    batch = {name: torch.ones(1, 2, dtype=torch.float64) for name in ("per_token_logps", "old_per_token_logps", "mask")}
    for reads, loss in (
        ({"per_token_logps", "beta"}, lambda b, o: (b["per_token_logps"] * o["beta"]).sum()),
        ({*batch, "beta"}, lambda b, o: ({**b}["mask"] * b["per_token_logps"] * o.get("beta")).sum()),
        ({*batch}, lambda b, o: sum((x * b["per_token_logps"]).sum() for _, x in b.items())),
    ):
        read = set()
        loss_and_gradient(as_torch(loss, framework), batch, {"kind": "grpo", "beta": 2.0}, read)
        assert read == reads


@pytest.mark.parametrize("framework", ["jax", "mlx"])
def test_a_loss_that_returns_no_scalar_is_refused(framework):
    numpy_of(framework)
    for value in (lambda mask: mask, lambda mask: (mask.sum(), 1), lambda mask: {"loss": mask.sum()}):
        with pytest.raises(ValueError, match=r"(?s)my_loss returned .* a tensor of shape \(\)") as caught:
            judge(lambda batch, options, value=value: value(batch["mask"]), framework=framework)
        assert "my_loss got a batch of kind=grpo" in caught.value.__notes__[-1]


@pytest.mark.parametrize("framework", ["jax", "mlx"])
def test_a_loss_like_grpo_loss_may_be_of_another_framework(framework):
    batch_loss = grpo(framework)

    def loss(logps, advantages, mask, *, old_per_token_logps, ref_per_token_logps, **options):
        names = ("per_token_logps", "advantages", "mask", "old_per_token_logps", "ref_per_token_logps")
        batch = dict(zip(names, (logps, advantages, mask, old_per_token_logps, ref_per_token_logps), strict=True))
        return batch_loss(batch, options), {}

    assert check(loss, {"jax": 1e-12, "mlx": 1e-7}[framework], framework=framework, **ONE_SHAPE) > 1


def test_a_framework_is_missing(monkeypatch):
    for name in ("jax", "mlx"):
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.setitem(sys.modules, f"{name}.core", None)
        with pytest.raises(ValueError, match=rf"^--framework={name} needs the package {name}; run pip install -e '"):
            check(print, framework=name)


@pytest.mark.parametrize("option", ["--framework=jax", "--tolerance=1e-5"])
def test_options_of_a_loss_are_refused_for_a_step(option, capsys):
    with pytest.raises(SystemExit):
        main(["a_folder", option])
    assert f"{option.partition('=')[0]} is an option for a loss function, FILE.py:FUNCTION" in capsys.readouterr().err


def test_the_command_refuses_half_a_target_and_options_without_effect(capsys):
    for words, expected in (
        (["my_loss.py:my_loss", "--json"], "--json and --seconds are options for a recorded step"),
        (["my_loss.py:my_loss", "--seconds=0"], "the search in a loss has no limit"),
        (["my_loss.py"], "my_loss.py is a file; also name its function: my_loss.py:FUNCTION"),
        ([str(ROOT / "recipes"), "--seconds=9"], "--json and --seconds are options for a recorded step"),
        ([f"{ROOT / 'recipes'}:loss", "--only", "kind=dpo"], "--only is an option for a loss function"),
    ):
        with pytest.raises(SystemExit):
            main(words)
        assert expected in capsys.readouterr().err


def test_the_tolerance_of_the_command(tmp_path, capsys):
    (tmp_path / "my_loss.py").write_text("def loss(batch, options):\n    return batch['per_token_logps'].sum()\n")
    words = [f"{tmp_path}/my_loss.py:loss", "--only", "kind=sft"]
    assert [main(words), main([*words, "--tolerance=inf"])] == [1, 0]
    assert "cases agree with TRL" in capsys.readouterr().out


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
