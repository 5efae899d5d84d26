"""Counting the memory of tensors that are not there: models run on stand-ins, which have shapes and no values.

Invariant: what is counted is what the model's own code keeps alive, operation by operation, as torch's autograd,
autocast and activation checkpointing do it; nothing is derived from a formula for a model. Tensors that the code looks
at (masks, positions) are made on the CPU with their values, so that it goes the way it goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

_STAND_INS = FakeTensorMode(allow_non_fake_inputs=True)
"""Never entered: operations on stand-ins give stand-ins, those on true tensors true ones."""
_FLOAT32_ON_CUDA = ("layer_norm", "rms_norm", "group_norm", "rsqrt", "pow.Tensor_Scalar", "exp", "softmax.int")
"""Operations whose results autocast keeps in float32 on CUDA but not on a CPU (ATen/autocast_mode.h), of those that
diffusion models use."""


def stand_in(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor of which there is everything but the values."""
    with _STAND_INS:
        return torch.empty(tuple(shape), dtype=dtype)


def give_stand_ins(module: nn.Module) -> None:
    """Replace what is on the meta device by stand-ins, whose operations know a CPU's kernels and autocast."""
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            if isinstance(parameter, FakeTensor):
                continue
            value = stand_in(parameter.shape, parameter.dtype)
            setattr(part, name, nn.Parameter(value, requires_grad=parameter.requires_grad))
        for name, buffer in part.named_buffers(recurse=False):
            if buffer.is_meta and not isinstance(buffer, FakeTensor):
                part._buffers[name] = stand_in(buffer.shape, buffer.dtype)  # noqa: SLF001 - no setter keeps its kind


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of all storages that operations made while it was entered and that are still alive."""

    def __init__(self, there: Iterable[Tensor] = ()) -> None:
        """`there`: tensors that were made before, which are not counted."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._sizes: dict[int, tuple[int, object]] = {}
        self.now = self.peak = 0
        for tensor in there:
            self._note(tensor, 0)

    def __torch_dispatch__(self, operation: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor):
                self._note(tensor, tensor.untyped_storage().nbytes())
        return found

    def _note(self, tensor: Tensor, nbytes: int) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata  # noqa: SLF001 - its address, which is its identity while it lives
        if key in self._sizes:
            return

        def gone(_: object) -> None:
            self.now -= self._sizes.pop(key)[0]

        self._sizes[key] = nbytes, ref(storage, gone)
        self.now += nbytes
        self.peak = max(self.peak, self.now)


@contextmanager
def autocast_of_cuda() -> Iterator[None]:
    """Meanwhile autocast on a CPU keeps in float32 what it would keep so on CUDA."""
    with torch.library._scoped_library("aten", "IMPL") as library:  # noqa: SLF001 - the scope of the change
        for name in _FLOAT32_ON_CUDA:
            packet, _, overload = name.partition(".")
            operation = getattr(getattr(torch.ops.aten, packet), overload or "default")
            library.impl(name, partial(_in_float32, operation), "AutocastCPU")
        yield


def _in_float32(operation: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    args, kwargs = tree_map_only(Tensor, lambda t: t.float() if t.dtype == torch.bfloat16 else t, (args, kwargs))
    with torch.autocast("cpu", enabled=False):
        return operation(*args, **kwargs)


@contextmanager
def linear_of_zero3() -> Iterator[None]:
    """Meanwhile linear layers keep their inputs, also where weights are frozen, as DeepSpeed's do with ZeRO 3."""
    usual = functional.linear

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return cast("Tensor", _KeepingLinear.apply(x, weight, bias))  # type: ignore[no-untyped-call]

    functional.linear = linear  # type: ignore[assignment]
    try:
        yield
    finally:
        functional.linear = usual


class _KeepingLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        x, weight, bias = args
        ctx.save_for_backward(x, weight)
        output: Tensor = x.matmul(weight.t())
        return output if bias is None else output + bias

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,), (x, weight) = gradients, ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        rows = gradient.reshape(-1, gradient.shape[-1])
        return (
            gradient.matmul(weight.to(gradient.dtype)) if of_x else None,
            rows.t().matmul(x.reshape(-1, x.shape[-1]).to(rows.dtype)).to(weight.dtype) if of_weight else None,
            rows.sum(0).to(weight.dtype) if of_bias else None,
        )
