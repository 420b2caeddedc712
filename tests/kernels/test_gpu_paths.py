"""Compare the GPU paths of kernels/ on a simulated GPU with float64 on the CPU.

Operators that only CUDA has are replaced by their definition. The tests find wrong arguments, shapes, dtypes, masks and
factors, but no mistakes in the kernels of CUDA.
"""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from minivlmrl.kernels import dense_attention as dense_module
from minivlmrl.kernels import linear_log_softmax as logits_module
from minivlmrl.kernels import rms_norm as norm_module
from minivlmrl.kernels.backend import to_device
from minivlmrl.kernels.float32_matmul import float32_matmul
from minivlmrl.kernels.shared_prefix import PromptSlots, completion_attention
from minivlmrl.model.nf4 import BLOCK, pack_nf4, unpack_nf4
from tests.helpers.cuda_operators import CUDA_OPERATORS
from tests.helpers.pretend_cuda import CUDA, Pretend, PretendCuda

FLASH = "aten::_scaled_dot_product_flash_attention"
TOLERANCE = {torch.bfloat16: 1e-2, torch.float32: 1e-6}  # relative to the norm of the float64 result


@pytest.fixture
def calls(monkeypatch):
    """Return a list of the CUDA operators that are called, and assert that the operators get 16-bit tensors."""
    names = []

    def recorded(operator, function):
        def call(*args, **kwargs):
            assert args[1].element_size() == 2, f"{operator} got {args[1].dtype}"
            names.append(operator.name())
            return function(*args, **kwargs)

        return call

    for operator, function in CUDA_OPERATORS.items():
        monkeypatch.setitem(CUDA_OPERATORS, operator, recorded(operator, function))
    return names


@pytest.fixture(autouse=True)
def flash_attention_of_a_gpu(monkeypatch):
    """Support flash attention as an H100 does: for 16-bit tensors whose head dimension is a multiple of 8."""
    monkeypatch.setattr(dense_module, "SDPAParams", lambda q, *_: SimpleNamespace(query=q))
    can_use = lambda params: params.query.element_size() == 2 and params.query.shape[-1] % 8 == 0  # noqa: E731
    monkeypatch.setattr(dense_module, "can_use_flash_attention", can_use)


def random(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def assert_equals_cpu(function, inputs):
    """Compare values and gradients on the simulated GPU with float64 on the CPU, and return the simulated GPU."""
    exact = [x.double().requires_grad_() for x in inputs]
    expected = function(*exact)
    upstream = random(*expected.shape, seed=9, dtype=inputs[0].dtype)
    pairs = [expected, *torch.autograd.grad(expected, exact, upstream.double())]
    with PretendCuda() as gpu:
        given = [Pretend(x.clone()).requires_grad_() for x in inputs]
        out = function(*given)
        assert out.device == CUDA
        found = [out, *torch.autograd.grad(out, given, Pretend(upstream).to(out.dtype))]
        found = [x.detach().cpu() for x in found]
    for ours, theirs in zip(found, pairs, strict=True):
        assert (ours.double() - theirs).norm() <= TOLERANCE[inputs[0].dtype] * theirs.norm()
    return gpu


@pytest.mark.parametrize(("L", "T"), [(9, 9), (4, 11)])
@pytest.mark.parametrize(("dtype", "D"), [(torch.bfloat16, 16), (torch.bfloat16, 12), (torch.float32, 16)], ids=str)
def test_dense_attention(calls, dtype, D, L, T):
    inputs = [random(2, heads, length, D, seed=heads, dtype=dtype) for heads, length in ((6, L), (3, T), (3, T))]
    assert_equals_cpu(lambda q, k, v: dense_module.dense_attention(q, k, v, is_causal=True), inputs)
    assert (calls == [FLASH, f"{FLASH}_backward"]) == (dtype == torch.bfloat16 and D == 16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_completion_attention(calls, dtype):
    """Two calls of flash attention make a copy of the prompt keys unnecessary, but need 16-bit tensors."""
    shapes = (5, 4, 6, 16), (5, 2, 6, 16), (5, 2, 6, 16), (2, 2, 9, 16), (2, 2, 9, 16)
    inputs = [random(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes)]

    def attend(q, *keys):
        return completion_attention(q, *keys, PromptSlots(torch.tensor([0, 0, 0, 1, 1]), 2, q.device))

    assert_equals_cpu(attend, inputs)
    assert calls == (2 * [FLASH] + 2 * [f"{FLASH}_backward"] if dtype == torch.bfloat16 else [])


@pytest.mark.parametrize(("shape", "given"), [((), False), ((), True), ((2, 3), False)], ids=str)
def test_products_with_float32_results(calls, shape, given):
    a, b = random(*shape, 5, 16), random(*shape, 16, 7, seed=1)
    with PretendCuda():
        out = torch.empty(5, 7, device=CUDA) if given else None
        found = float32_matmul(Pretend(a), Pretend(b), out)
        assert found.dtype == torch.float32 and (found is out or not given)
        torch.testing.assert_close(found.cpu().double(), a.double() @ b.double(), atol=0, rtol=1e-5)
    assert calls == ["aten::bmm.dtype" if shape else "aten::mm.dtype_out" if given else "aten::mm.dtype"]


def test_linear_log_softmax(calls, monkeypatch):
    """The host does not count rows with a gradient, because counting would wait for the GPU."""
    monkeypatch.setattr(logits_module, "GPU_ROWS", 2)
    ids = torch.tensor([3, 0, 11, 30, 7])

    def score(hidden, weight):
        there = to_device(ids, hidden.device)
        return logits_module.linear_log_softmax(hidden, weight, there, 0.7)[0] * (there > 5)

    gpu = assert_equals_cpu(score, [random(5, 8), random(31, 8, seed=1)])
    assert calls == 3 * ["aten::mm.dtype_out"] + 3 * ["aten::mm.dtype_out", *2 * ["aten::addmm.dtype_out"]]
    assert not [reason for reason, *_ in gpu.waits if reason != "from the card"]


def test_rms_norm(monkeypatch):
    """A GPU computes torch's fused RMSNorm, and a CPU the formula of this project."""
    devices = []
    original = norm_module._normalize
    monkeypatch.setattr(norm_module, "_normalize", lambda x, *rest: (devices.append(x.device), original(x, *rest))[1])
    norm = norm_module.RMSNorm(16, eps=1e-3)
    assert_equals_cpu(
        lambda x, weight: torch.func.functional_call(norm, {"weight": weight}, x), [random(5, 16), random(16, seed=1)]
    )
    assert devices == [torch.device("cpu")]


def test_rows_are_gathered_by_an_index(monkeypatch):
    """On a GPU, rows are not gathered by F.embedding, whose backward pass can be wrong there."""
    used = []
    monkeypatch.setattr(F, "embedding", lambda *x, original=F.embedding: (used.append(x[1].device), original(*x))[1])
    index = torch.tensor([[2, 0], [2, 2]])
    assert_equals_cpu(lambda x: dense_module.gather_rows(x, to_device(index, x.device)), [random(4, 3)])
    assert used == [torch.device("cpu")]


def test_nf4_is_unpacked_in_one_piece(monkeypatch):
    pieces, original = set(), Tensor.take
    monkeypatch.setattr(Tensor, "take", lambda x, i: (pieces.add((i.device.type, len(i))), original(x, i))[1])
    packed = pack_nf4(random(4100, BLOCK, dtype=torch.float32))
    with PretendCuda():
        found = unpack_nf4(**{name: Pretend(x) for name, x in packed.items()}, dtype=torch.bfloat16).cpu()
    assert torch.equal(found, unpack_nf4(**packed, dtype=torch.bfloat16))
    assert pieces == {("cuda", 4100), ("cpu", 4096), ("cpu", 4)}


def test_copies_to_the_gpu_are_pinned(monkeypatch):
    """The host does not wait for a copy from pinned memory."""
    x, pinned = torch.arange(3), []
    with PretendCuda() as gpu, monkeypatch.context() as patch:
        patch.setattr(Tensor, "pin_memory", lambda x: (pinned.append(x), x)[1])
        there = to_device(x, CUDA)
        assert there.device == CUDA and to_device(there, CUDA) is there
        assert [one is x for one in pinned] == [True] and not gpu.waits


def test_memory_that_cannot_be_pinned_is_copied_without(monkeypatch):
    """WSL can pin little memory, so a failure there says nothing about the memory of the GPU."""

    def pin_memory(x):
        raise RuntimeError("CUDA error: out of memory")

    with PretendCuda(), monkeypatch.context() as patch:
        patch.setattr(Tensor, "pin_memory", pin_memory)
        with pytest.warns(UserWarning, match=r"slower, because the host could not pin memory \(CUDA error: out of"):
            assert to_device(torch.arange(3), CUDA).cpu().tolist() == [0, 1, 2]
