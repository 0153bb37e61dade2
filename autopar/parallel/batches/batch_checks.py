"""Batch signatures, and the checks that all ranks were given the same batch."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from typing import Any, NoReturn

import torch
from torch import nn

from autopar.capture.inputs import tables
from autopar.capture.inputs.batch_dims import Dims
from autopar.capture.inputs.containers import Form, Node, Parts
from autopar.capture.inputs.leaves import attributes_of, key_of, text_of
from autopar.capture.python.spots import Numbers
from autopar.capture.python.stand_in import is_number
from autopar.errors import RankError
from autopar.parallel.agree.agreement import Agreement
from autopar.parallel.batches.digests import Digests
from autopar.parallel.batches.local_batch import Portion
from autopar.runtime.kernels import host

ALL = -1  # dims


def describe(parts: Parts, dims: Dims | None = None) -> list[str]:
    """`argument 0 [12, 8] torch.int64` for each leaf of a batch, `argument 1 float`; other values as they print. dims:
    where samples are counted, if ranks may have unlike numbers of them: `argument 0 [*, 8] torch.int64`; ALL: all."""
    dims = dims or (None,) * len(parts.leaves)
    return [f"{path} {_shown(leaf, dim)}" for path, leaf, dim in zip(parts.paths, parts.leaves, dims, strict=True)]


def _shown(leaf: Any, samples: int | None) -> str:
    if isinstance(leaf, torch.Tensor):
        sizes = ", ".join("*" if samples in (dim, ALL) else str(size) for dim, size in enumerate(leaf.shape))
        return f"[{sizes}] {leaf.dtype}{' nn.Parameter' * (type(leaf) is nn.Parameter)}"
    return type(leaf).__name__ if is_number(leaf) else text_of(leaf)


def numbers_of(parts: Parts) -> Numbers:
    """The Python numbers among the arguments of a call, by leaf, and what its tensors carry as attributes. They are
    guarded like anything that a step reads in Python, and so numbers become inputs of its program where they change
    from call to call."""
    found: Numbers = {}
    for i, (path, leaf) in enumerate(zip(parts.paths, parts.leaves, strict=True)):
        if is_number(leaf):
            found[i, path] = leaf
        elif isinstance(leaf, torch.Tensor) and vars(leaf):
            found.update(((i, f"{path}.{name}", name), value) for name, value in attributes_of(leaf).items())
    return found


def signature_of(parts: Parts) -> Hashable:
    """What a program is compiled for, of the arguments of a call: where tensors stand, their shapes, dtypes and which
    are parameters, the classes of numbers (`numbers_of`) and the other Python values beside them."""
    return parts.form, tuple(map(_kind, parts.leaves))


def _kind(leaf: Any) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.dtype, type(leaf) is nn.Parameter
    return type(leaf).__name__ if is_number(leaf) else key_of(leaf)


def signature_lines(model: nn.Module, parts: Parts, dims: Dims | None = None) -> list[str]:
    """All that decides which program a call runs: what ranks must agree on. dims: as of `describe`."""
    evaluated = [name or "the root" for name, module in tables.named_modules(model) if not module.training]
    frozen = [name for name, parameter in tables.named_parameters(model) if not parameter.requires_grad]
    return [
        f"arguments {_call_text(parts.form)}",
        *describe(parts, dims),
        f"in eval mode: {', '.join(evaluated) or 'nothing'}",
        f"frozen: {', '.join(frozen) or 'nothing'}",
    ]


def _call_text(form: Form) -> str:
    """`(*, {'x': *}, mask=*)`: a call with a star for each leaf."""
    assert isinstance(form, Node)
    args, kwargs = form.children
    assert isinstance(args, Node) and isinstance(kwargs, Node) and kwargs.keys is not None
    named = (f"{name}={value}" for name, value in zip(kwargs.keys.values, kwargs.children, strict=True))
    return f"({', '.join([*map(str, args.children), *named])})"


def in_order(kwargs: Mapping[str, Any], function: Callable[..., Any]) -> dict[str, Any]:
    """Keyword arguments in the order of the function's parameters: any order is the same call. Those that it takes as
    `**kwargs` keep theirs, which it can see."""
    if len(kwargs) < 2:
        return dict(kwargs)
    with suppress(TypeError, ValueError):  # no signature
        named = [name for name in inspect.signature(function).parameters if name in kwargs]
        return {name: kwargs[name] for name in dict.fromkeys((*named, *kwargs))}
    return dict(kwargs)


def off_host(parts: Parts) -> list[str]:
    """The paths of tensors that are compared one call later (see `Digests`)."""
    return [parts.paths[leaf] for leaf, tensor in parts.tensors() if not host.on_host(tensor)]


def tell_apart(agreement: Agreement, parts: Parts, digests: Digests, portion: Portion | None, step: int) -> None:
    """Raise RankError with the names of what differs between ranks that should hold the same data, and do not."""
    own = {path: _digest(leaf) for path, leaf in zip(parts.paths, parts.leaves, strict=True)}
    when, part = f"at step {step}", digests.part
    advice = 'Pass the same whole batch on every rank, or batch="local" if each rank loads a part of its own.'
    if digests.is_local:
        whose = f"ranks of one {' and '.join(part)} coordinate" if part else "ranks"
        advice = f'With batch="local", {whose} pass the same part.'
    agreement.tell_apart({**own, **_named(digests.late)}, str(part), when, advice)
    if portion is not None:
        shared = {parts.paths[i]: _value(parts.leaves[i]) for i in portion.shared(parts)}
        _tell_shared_apart(agreement, {**shared, **_named(digests.late_shared)}, when)


def _named(late: Mapping[str, int]) -> dict[str, str]:
    """Digests of data that are there no longer, by name."""
    return {f"{path} of the call before": f"values with the digest {number:x}" for path, number in late.items()}


def _tell_shared_apart(agreement: Agreement, values: Mapping[str, str], when: str) -> NoReturn:
    """Raise RankError for what is no rank's own part and differs between ranks: with both values."""
    everyone: list[dict[str, str]] = agreement.everyone("batch", dict(values))
    faults, names = [], dict[str, None]()
    for rank, found in enumerate(everyone):
        for name, value in found.items():
            if value != everyone[0][name]:
                names[name] = None
                faults.append(f"  rank {rank} has {value} in {name}, and rank 0 has {everyone[0][name]}")
    told = " and ".join(names)
    raise RankError(
        f"ranks were given different data {when}:\n" + "\n".join(faults) + f"\nNo dim of {told} counts samples: all "
        f"ranks share it, and the loss is that of the whole batch. Pass the same value on every rank (of a count the "
        f"sum over ranks, by dist.all_reduce), or compute it in loss_fn of what each rank passes its own part of. If a "
        f"dim of it does count samples, say so: batch_dims=."
    )


def _value(tensor: Any) -> str:
    """The values of a small tensor; of others a digest."""
    if tensor.numel() <= _SHOWN and tensor.device.type != "meta":
        return str(tensor.tolist())
    return f"values with the digest {_digest(tensor)[:8]}"


_SHOWN = 4
PADDED = (
    'With batch="local" each rank passes rows of its own: as many as it has, and all else alike. Pad what differs in '
    "another dim to one length on all ranks (such as the longest: dist.all_reduce of it with ReduceOp.MAX), with what "
    "the loss ignores; give numbers and flags the same value on every rank, and a count the sum over ranks. If another "
    "dim counts samples, say so: batch_dims=."
)


def _digest(tensor: Any) -> str:
    if not isinstance(tensor, torch.Tensor) or tensor.device.type == "meta":
        return ""
    values = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()
