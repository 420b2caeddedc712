"""A GPU that is not there: tensors that say they are on cuda:0, with their numbers in host memory.

    with PretendCuda() as gpu:
        train_recipe([...])              # torch.cuda.is_available() is true in here
    gpu.waits                          # where the host waits for the card

What a card refuses is refused: an operation on tensors of both devices raises what CUDA raises. Where the host would
wait for a card is counted: item, tolist, nonzero, masks as indices, copies from and to it. Numbers are real, so what
depends on them (a loop until a stop token) goes as it would.

A `Pretend` is a wrapper subclass, as FakeTensor is: Python sees cuda:0, C++ sees the meta device, and the numbers are
in the CPU tensor `inside`. PretendCuda, a TorchDispatchMode, gets every operation below autograd, backwards included:
it checks the devices, counts, runs the operation on the CPU tensors and wraps the results. Uninitialised memory is NaN.
A CUDA graph is a list of operations: capturing writes nothing and refuses what the host would wait for, a replay runs
them on the same memory.

Not seen: kernels of 16-bit numbers, several cards, streams, pinned memory, Triton, how a GPU rounds, and the meta
device, which is the card here.
"""

import collections
import contextlib
import functools
import os
import sys
from unittest import mock

import torch
from links import ROOT
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

CUDA = torch.device("cuda", 0)
SOURCES = tuple(str(ROOT / name) for name in ("minivlmrl", "kernels", "benchmarks"))
aten = torch.ops.aten

COPIES = {aten.copy_.default, aten._to_copy.default}
# an index may be on the host: it is copied, and waited for
INDEXING = {"index", "index_put", "index_put_", "_unsafe_index", "_index_put_impl_"}
# not pointwise by their tags, but a number (a tensor without dimensions) may be on the host
TAKE_NUMBERS = {"where", "index_fill", "index_fill_", "_foreach_mul", "_foreach_mul_", "lerp", "lerp_", "fill_"}
# the shape of the result depends on numbers
WAITED_FOR = {
    "nonzero", "masked_select", "_unique2", "unique_consecutive", "unique_dim", "bincount", "equal", "is_nonzero",
    "_local_scalar_dense", "histc", "masked_scatter",
}  # fmt: skip
EMPTY = {"empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided"}


class DeviceMix(RuntimeError):
    """What CUDA raises as "Expected all tensors to be on the same device"."""


class Pretend(Tensor):
    """A tensor on cuda:0; `inside` is its twin on the CPU."""

    @staticmethod
    def __new__(cls, inside: Tensor, requires_grad: bool = False):
        form = {"strides": inside.stride(), "storage_offset": inside.storage_offset(), "dtype": inside.dtype}
        made = Tensor._make_wrapper_subclass(cls, inside.shape, **form, device="meta", requires_grad=requires_grad)
        made.inside = inside
        return made

    # Python reads these, C++ its own
    device, is_cuda, is_cpu, is_meta = (property(lambda self, value=x: value) for x in (CUDA, True, False, False))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return PretendCuda.current.run(func, args, kwargs or {})

    def to(self, *args, **kwargs):
        """Leave out the device if it is cuda: C++ would take it for another one, and copy."""
        named = [torch.device(x) for x in (*args, kwargs.pop("device", None)) if isinstance(x, str | torch.device)]
        args = tuple(x for x in args if not isinstance(x, str | torch.device))
        if named and named[0].type != "cuda":
            return super().to(named[0], *args, **kwargs)
        return super().to(*args, **kwargs) if args or kwargs else self

    def __getitem__(self, index):
        if isinstance(index, tuple) and [type(one) for one in index] == [Pretend, int]:
            # a view of a tensor from before inference mode is refused for wrappers
            return self.index_select(0, index[0])[:, index[1]]
        return super().__getitem__(lists_on_card(index))

    def tolist(self):
        return self.cpu().tolist()

    def new_tensor(self, data, *, dtype=None, device=CUDA, requires_grad=False):
        return torch.tensor(data, dtype=dtype or self.dtype, device=device, requires_grad=requires_grad)

    def numpy(self, *args, **kwargs):
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")

    __array__ = numpy

    def __reduce_ex__(self, protocol):  # torch.save copies to the host too
        return self.cpu().__reduce_ex__(protocol)

    def __repr__(self, **_):
        return f"Pretend({self.inside!r})"


def lists_on_card(index):
    """An index with its lists as tensors on the card; C++ would not fill them on the meta device."""
    if isinstance(index, tuple):
        return tuple(map(lists_on_card, index))
    return torch.tensor(index, device=CUDA) if isinstance(index, list) else index


class CardGenerator(torch.Generator):
    """A generator of the card, whose numbers come from the CPU."""

    def __new__(cls, device="cpu"):
        return super().__new__(cls, "cpu")


class PretendCuda(TorchDispatchMode):
    """Pretend that there is a card.

    Attributes:
        waits: (why, file, line number) -> how often the host waited.
    """

    current: "PretendCuda | None" = None

    def __init__(self):
        super().__init__()
        self.waits = collections.Counter()
        self.depth = 0
        self.capturing: Graph | None = None

    def __enter__(self):
        self.depth += 1  # `run` enters again for the body of a custom operation
        if self.depth == 1:
            self.patches = contextlib.ExitStack()
            for patch in environment():
                self.patches.enter_context(patch)
            torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=CUDA) then copies where we see it
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
        """One operation."""
        tensors = [x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)]
        card = [x for x in tensors if isinstance(x, Pretend)]
        host = [x for x in tensors if not isinstance(x, Pretend)]
        device = kwargs.get("device")
        to_card = bool(card) if device is None else torch.device(device).type in ("cuda", "meta")
        if is_composite(func):  # in inference mode they come whole: the parts are checked
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
        same = {id(x.inside): x for x in card}  # what is written in place comes back as itself
        wrap = lambda x: same[id(x)] if id(x) in same else Pretend(x)  # noqa: E731
        return tree_map(lambda x: wrap(x) if isinstance(x, Tensor) and not isinstance(x, Pretend) else x, result)

    def check(self, func, args, card, host):
        """CUDA's rules for operations on tensors of both devices."""
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
        """Does the host wait for it?"""
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
    """File and line of this project that an operation comes from."""
    frame = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(SOURCES):
        frame = frame.f_back
    return ("elsewhere", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)


@functools.cache
def is_composite(func) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def body_of(func):
    """The Python function of a custom operation, None if it is none."""
    definition = torch._library.custom_ops.OPDEFS.get(func._schema.name)
    return None if definition is None else definition._init_fn


def compute(func, args, kwargs):
    """One operation on host memory; uninitialised memory is NaN."""
    result = func(*args, **kwargs)
    if func.overloadpacket.__name__ in EMPTY and result.dtype != torch.bool:
        result.fill_(float("nan") if result.is_floating_point() else 99)
    return result


class Graph:
    """torch.cuda.CUDAGraph."""

    def __init__(self):
        self.operations = []
        self.before = []

    def record(self, func, args, kwargs):
        """Compute, as later operations want shapes, and remember what was there before."""
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
                if isinstance(old, Tensor) and address(old) not in given:  # neither a view nor written in place
                    old.copy_(new)


# what Python asks torch about the card
class NameTheCard(TorchFunctionMode):
    """Writes cuda:0 for cuda: C++ would ask the driver for the current card."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        def named(x):
            return CUDA if isinstance(x, str | torch.device) and str(x) == "cuda" else x

        if function is torch.tensor and isinstance(args[0], list):  # numbers on the card, one by one
            args = (tree_map(lambda x: x.item() if isinstance(x, Pretend) else x, args[0]), *args[1:])
        if function is not torch.device:
            args, kwargs = tuple(map(named, args)), {name: named(x) for name, x in (kwargs or {}).items()}
        return function(*args, **(kwargs or {}))


class Stream:
    """The only stream, and its events: nothing runs at the same time as anything else."""

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


def environment():
    """Patches: torch.cuda has a card."""
    stream = Stream()
    answers = {
        "_lazy_init": None, "is_available": True, "is_initialized": True, "device_count": 1, "current_device": 0,
        "set_device": None, "get_device_capability": (9, 0), "get_device_name": "no GPU", "_exchange_device": -1,
        "_maybe_exchange_device": -1, "synchronize": None, "empty_cache": None, "set_rng_state": None,
        "is_bf16_supported": True, "stream": stream, "current_stream": stream, "default_stream": stream,
        "memory_allocated": 0, "max_memory_allocated": 0, "reset_peak_memory_stats": None,
        "mem_get_info": (2**37, 2**37), "is_current_stream_capturing": False,  # a build for CUDA would ask the driver
    }  # fmt: skip
    for name, answer in answers.items():
        yield mock.patch.object(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    yield mock.patch.object(torch.accelerator, "current_stream", lambda *_: stream)  # optimizers ask, from torch 2.15
    classes = {"Stream": Stream, "Event": Stream, "CUDAGraph": Graph}
    for name, value in (classes | {"get_rng_state": lambda *_: torch.get_rng_state()}).items():
        yield mock.patch.object(torch.cuda, name, value)
    yield mock.patch.dict(os.environ, {"MINIVLMRL_KERNELS": "torch"})
    yield mock.patch.object(Tensor, "pin_memory", lambda x, *_: x)


def pretend(module: torch.nn.Module) -> torch.nn.Module:
    """Move a module that autograd has seen, which module.to(CUDA) refuses; tied parameters stay tied."""
    moved = {p: torch.nn.Parameter(Pretend(p.detach()), p.requires_grad) for p in module.parameters()}
    for owner in module.modules():
        owner._parameters.update({name: moved[p] for name, p in owner._parameters.items() if p is not None})
    return module
