"""Simulate a GPU: tensors report cuda:0, but their data is on the CPU.

    with PretendCuda() as gpu:
        train_recipe([...])              # torch.cuda.is_available() is True in here
    gpu.waits                          # where the CPU would wait for the GPU

Operations that mix tensors on both devices raise CUDA's error. Waits for the GPU are counted: item, tolist, nonzero,
masks as indices, copies between CPU and GPU. Numbers are real, so code that depends on values, such as a loop until a
stop token, runs as on a GPU.

`Pretend` is a Tensor wrapper subclass, like FakeTensor: Python sees cuda:0, C++ the meta device, and the data is in the
CPU tensor `inside`. The TorchDispatchMode PretendCuda receives all operations below autograd, also in backward: it
checks devices, counts waits, runs the operation on the CPU tensors and wraps the results. Uninitialized memory is NaN.
A CUDA graph is a list of operations: capturing changes no data and rejects operations with waits; a replay runs them on
the same memory.

CUDA-only operators are in cuda_operators.py. Not simulated: several GPUs, streams, pinned memory, Triton, GPU rounding,
and the meta device, which stands for the GPU here. torch.backends.cuda answers as on a CPU, so a test that needs flash
attention must replace can_use_flash_attention.
"""

import collections
import contextlib
import functools
import itertools
import os
import sys
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from tests.helpers.cuda_operators import CUDA_OPERATORS
from tests.helpers.links import ROOT

CUDA = torch.device("cuda", 0)
SOURCES = tuple(str(ROOT / name) for name in ("minivlmrl", "kernels", "benchmarks"))
aten = torch.ops.aten

COPIES = {aten.copy_.default, aten._to_copy.default}
# an index may be on the CPU, which then waits for its copy
INDEXING = {"index", "index_put", "index_put_", "_unsafe_index", "_index_put_impl_"}
# operations without the tag `pointwise` that accept a number on the CPU (a tensor without dimensions)
TAKE_NUMBERS = {"where", "index_fill", "index_fill_", "_foreach_mul", "_foreach_mul_", "lerp", "lerp_", "fill_"}
# the CPU waits, because the result's shape depends on the data
WAITED_FOR = {
    "nonzero", "masked_select", "_unique2", "unique_consecutive", "unique_dim", "bincount", "equal", "is_nonzero",
    "_local_scalar_dense", "histc", "masked_scatter",
}  # fmt: skip
EMPTY = {"empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided"}


class DeviceMix(RuntimeError):
    """CUDA's error "Expected all tensors to be on the same device..."."""


class Pretend(Tensor):
    """Tensor that reports device cuda:0, with its data in the CPU tensor `inside`."""

    @staticmethod
    def __new__(cls, inside: Tensor, requires_grad: bool = False):
        form = {"strides": inside.stride(), "storage_offset": inside.storage_offset(), "dtype": inside.dtype}
        made = Tensor._make_wrapper_subclass(cls, inside.shape, **form, device="meta", requires_grad=requires_grad)
        made.inside = inside
        return made

    # seen by Python code; C++ code sees the meta device
    device, is_cuda, is_cpu, is_meta = (property(lambda self, value=x: value) for x in (CUDA, True, False, False))

    @property
    def data(self) -> Tensor:
        return Tensor.data.__get__(self)

    @data.setter
    def data(self, value: Tensor):  # adapters' reference exchanges the data of two parameters
        Tensor.data.__set__(self, value)
        self.inside = value.inside

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return PretendCuda.current.run(func, args, kwargs or {})

    def to(self, *args, **kwargs):
        """Drop device cuda from the arguments: C++ would take it for another device and copy the tensor."""
        named = [torch.device(x) for x in (*args, kwargs.pop("device", None)) if isinstance(x, str | torch.device)]
        args = tuple(x for x in args if not isinstance(x, str | torch.device))
        if named and named[0].type != "cuda":
            return super().to(named[0], *args, **kwargs)
        return super().to(*args, **kwargs) if args or kwargs else self

    def __getitem__(self, index):
        if isinstance(index, tuple) and [type(one) for one in index] == [Pretend, int]:
            # a view fails if the wrapped tensor was created before inference mode
            return self.index_select(0, index[0])[:, index[1]]
        return super().__getitem__(lists_on_card(index))

    def tolist(self):
        return self.cpu().tolist()

    def new_tensor(self, data, *, dtype=None, device=CUDA, requires_grad=False):
        return torch.tensor(data, dtype=dtype or self.dtype, device=device, requires_grad=requires_grad)

    def numpy(self, *args, **kwargs):
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")

    __array__ = numpy

    def __format__(self, form):
        return self.cpu().__format__(form)

    def __reduce_ex__(self, protocol):  # torch.save also copies to the CPU
        return self.cpu().__reduce_ex__(protocol)

    def __repr__(self, **_):
        return f"Pretend({self.inside!r})"


def lists_on_card(index):
    """Convert lists in an index to GPU tensors: on the meta device, C++ would not fill them."""
    if isinstance(index, tuple):
        return tuple(map(lists_on_card, index))
    return torch.tensor(index, device=CUDA) if isinstance(index, list) else index


class CardGenerator(torch.Generator):
    """The simulated GPU's random generator, which computes on the CPU."""

    def __new__(cls, device="cpu"):
        return super().__new__(cls, "cpu")


class PretendCuda(TorchDispatchMode):
    """Simulate a GPU inside a `with` block; `waits` counts CPU waits by (reason, file, line number)."""

    current: "PretendCuda | None" = None

    def __init__(self):
        super().__init__()
        self.waits = collections.Counter()
        self.depth = 0
        self.capturing: Graph | None = None

    def __enter__(self):
        self.depth += 1  # `run` enters the mode again for a custom operation's body
        if self.depth == 1:
            self.patches = contextlib.ExitStack()
            for patch in environment():
                self.patches.enter_context(patch)
            torch._C._set_only_lift_cpu_tensors(True)  # makes the copy in torch.tensor(..., device=CUDA) visible here
            self.patches.callback(torch._C._set_only_lift_cpu_tensors, False)
            self.patches.enter_context(NameTheCard())
            self.patches.enter_context(mock.patch.object(torch, "Generator", CardGenerator))
            self.patches.enter_context(torch.autograd.set_multithreading_enabled(False))
            PretendCuda.current = self
        return super().__enter__()

    def __exit__(self, *error):
        self.depth -= 1
        if self.depth == 0:
            self.patches.close()
            PretendCuda.current = None
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.run(func, args, kwargs or {})

    def run(self, func, args, kwargs):
        """Run one operation: check devices, count waits, compute on the CPU, wrap the results."""
        tensors = [x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)]
        card = [x for x in tensors if isinstance(x, Pretend)]
        host = [x for x in tensors if not isinstance(x, Pretend)]
        device = kwargs.get("device")
        to_card = bool(card) if device is None else torch.device(device).type in ("cuda", "meta")
        if is_composite(func):  # inference mode does not decompose these operations
            with self:
                return func.decompose(*args, **kwargs)
        if not card and not to_card:
            return func(*args, **kwargs)
        self.check(func, args, card, host)
        if (body := body_of(func)) is not None:
            with self:
                return body(*args, **kwargs)
        self.count(func, args, kwargs, to_card)
        if device is not None:
            kwargs = kwargs | {"device": torch.device("cpu")}
        args, kwargs = tree_map(lambda x: x.inside if isinstance(x, Pretend) else x, (args, kwargs))
        result = self.capturing.record(func, args, kwargs) if self.capturing else compute(func, args, kwargs)
        if not to_card:
            return result
        same = {id(x.inside): x for x in card}  # in-place operations return their argument
        wrap = lambda x: same[id(x)] if id(x) in same else Pretend(x)  # noqa: E731
        return tree_map(lambda x: wrap(x) if isinstance(x, Tensor) and not isinstance(x, Pretend) else x, result)

    def check(self, func, args, card, host):
        """Raise DeviceMix if CUDA would reject tensors on both devices."""
        name = func.overloadpacket.__name__
        if not card or not host or func in COPIES:
            return
        if name in INDEXING and isinstance(args[0], Pretend):
            host = [x for x in args[2:] if isinstance(x, Tensor) and not isinstance(x, Pretend)]  # values, not indices
        if all(x.dim() == 0 for x in host) and (
            name in TAKE_NUMBERS or name in INDEXING or torch.Tag.pointwise in func.tags
        ):
            return
        shapes = [f"cuda:0 {tuple(x.shape)}" for x in card] + [f"cpu {tuple(x.shape)}" for x in host]
        raise DeviceMix(f"Expected all tensors to be on the same device, but found {', '.join(shapes)} ({func})")

    def count(self, func, args, kwargs, to_card):
        """Count an operation for which the CPU would wait; during graph capture, raise RuntimeError."""
        name = func.overloadpacket.__name__
        reasons = []
        if func in COPIES:
            source = args[1] if name == "copy_" else args[0]
            target = isinstance(args[0], Pretend) if name == "copy_" else to_card
            if isinstance(source, Pretend) != target and not kwargs.get("non_blocking"):
                reasons.append("to the card" if target else "from the card")
        elif name in WAITED_FOR or (func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None):
            reasons.append(name)
        elif name in INDEXING:
            for index in (x for x in args[1] if x is not None):
                if not isinstance(index, Pretend) or index.dtype in (torch.bool, torch.uint8):
                    reasons.append("mask as index" if isinstance(index, Pretend) else "index on the host")
        place = source_line()
        if self.capturing:
            if reasons:
                raise RuntimeError(f"operation not permitted when stream is capturing: {reasons} ({func}, {place})")
            return
        self.waits.update((reason, *place) for reason in reasons)


def source_line() -> tuple[str, int]:
    """Return file and line of the innermost project function that called the operation."""
    frame = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(SOURCES):
        frame = frame.f_back
    return ("elsewhere", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)


@functools.cache
def is_composite(func) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def body_of(func):
    """Return the Python function behind a custom operation, None for others."""
    definition = torch._library.custom_ops.OPDEFS.get(func._schema.name)
    return None if definition is None else definition._init_fn


def compute(func, args, kwargs):
    result = CUDA_OPERATORS.get(func, func)(*args, **kwargs)
    if func.overloadpacket.__name__ in EMPTY and result.dtype != torch.bool:
        result.fill_(float("nan") if result.is_floating_point() else 99)
    return result


class Graph:
    """Simulated torch.cuda.CUDAGraph: a list of recorded operations."""

    def __init__(self):
        self.operations = []
        self.before = []

    def record(self, func, args, kwargs):
        """Record and compute an operation; save old values of tensors that it changes."""
        arguments = func._schema.arguments
        given = dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
        written = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
        changed = [given[name] for name in written & given.keys()]
        self.before += [(x, x.clone()) for x in tree_iter(changed) if isinstance(x, Tensor)]
        result = compute(func, args, kwargs)
        self.operations.append((func, args, kwargs, result))
        return result

    def capture_begin(self, **_):
        PretendCuda.current.capturing = self

    def capture_end(self):
        PretendCuda.current.capturing = None
        for x, value in reversed(self.before):
            x.copy_(value)
        self.before.clear()

    def replay(self):
        address = lambda x: x.untyped_storage().data_ptr()  # noqa: E731
        for func, args, kwargs, result in self.operations:
            given = {address(x) for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)}
            again = compute(func, args, kwargs)
            for old, new in zip(tree_iter(result), tree_iter(again), strict=True):
                if isinstance(old, Tensor) and address(old) not in given:  # neither a view nor an in-place result
                    old.copy_(new)


# replacements for functions that tell Python code about the GPU
class NameTheCard(TorchFunctionMode):
    """Replace device cuda by cuda:0: C++ would ask the driver for the current device."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        def named(x):
            return CUDA if isinstance(x, str | torch.device) and str(x) == "cuda" else x

        if function is torch.tensor and isinstance(args[0], list):  # the list may contain GPU numbers
            args = (tree_map(lambda x: x.item() if isinstance(x, Pretend) else x, args[0]), *args[1:])
        if function is not torch.device:
            args, kwargs = tuple(map(named, args)), {name: named(x) for name, x in (kwargs or {}).items()}
        return function(*args, **(kwargs or {}))


class Stream:
    """The only stream and event; methods do nothing, because nothing runs concurrently."""

    device = CUDA
    device_type = 1
    device_index = 0
    stream_id = 0
    priority = 0
    __init__ = record_stream = wait_event = wait_stream = wait = synchronize = lambda self, *_, **__: None
    record = record_event = __enter__ = lambda self, *_: self
    query = lambda self: True  # noqa: E731
    is_capturing = lambda self: False  # noqa: E731
    __exit__ = lambda self, *_: None  # noqa: E731


class Event(Stream):
    """Event whose clock advances by one second per recorded event."""

    seconds = itertools.count()

    def record(self, *_):
        self.time = next(Event.seconds)
        return self

    def elapsed_time(self, end: "Event") -> float:
        return 1000.0 * (end.time - self.time)


def environment():
    """Yield patches that make torch.cuda report one GPU."""
    stream = Stream()
    answers = {
        "_lazy_init": None, "is_available": True, "is_initialized": True, "device_count": 1, "current_device": 0,
        "set_device": None, "get_device_capability": (9, 0), "get_device_name": "no GPU",
        "get_arch_list": ["sm_90"], "_exchange_device": -1,
        "_maybe_exchange_device": -1, "synchronize": None, "empty_cache": None, "set_rng_state": None,
        "is_bf16_supported": True, "stream": stream, "current_stream": stream, "default_stream": stream,
        "memory_allocated": 0, "memory_reserved": 0, "max_memory_allocated": 0, "reset_peak_memory_stats": None,
        "mem_get_info": (2**37, 2**37), "is_current_stream_capturing": False,  # torch with CUDA asks the driver
    }  # fmt: skip
    for name, answer in answers.items():
        yield mock.patch.object(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    yield mock.patch.object(torch.accelerator, "current_stream", lambda *_: stream)  # for optimizers since torch 2.15
    classes = {"Stream": Stream, "Event": Event, "CUDAGraph": Graph}
    for name, value in (classes | {"get_rng_state": lambda *_: torch.get_rng_state()}).items():
        yield mock.patch.object(torch.cuda, name, value)
    yield mock.patch.dict(os.environ, {"MINIVLMRL_KERNELS": "torch"})
    yield mock.patch.object(Tensor, "pin_memory", lambda x, *_: x)


def pretend(module: torch.nn.Module) -> torch.nn.Module:
    """Move a module and its tied parameters to the GPU; module.to(CUDA) fails once autograd has used parameters."""
    moved = {p: torch.nn.Parameter(Pretend(p.detach()), p.requires_grad) for p in module.parameters()}
    for owner in module.modules():
        owner._parameters.update({name: moved[p] for name, p in owner._parameters.items() if p is not None})
    return module
