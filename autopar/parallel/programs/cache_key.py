"""Tell what a program depends on but what the model's code reads: versions, options, the batch, the model's structure.

What the code reads is told once it is known which code ran (`autopar.capture.python.read_digests.py`).
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from types import FunctionType
from typing import Any

import torch

import autopar
from autopar.capture.inputs.containers import Form, Leaf, Node, Parts, SeenAgain
from autopar.capture.inputs.leaves import attributes_of
from autopar.capture.python.read_digests import Unclear, code_digest, described, digest
from autopar.custom_ops.registry import CUSTOM_OPS
from autopar.settings import Settings, variables

_LIBRARIES = ("numpy", "scipy", "networkx", "sympy", "triton")  # what captures, searches and kernels are made with
_PREFIXES = ("TORCH", "PYTORCH", "AUTOPAR_EXACT", "TRITON_INTERPRET")


@functools.cache
def own_source() -> str:
    """The digest of autopar's own source, and of the libraries and the Python that it runs with."""
    root = Path(os.path.abspath(autopar.__file__)).parent
    found = hashlib.sha256()
    for top in (root, root.parent / "passes", root.parent / "runtime"):
        for path in sorted(top.rglob("*.py")):
            found.update(digest(str(path.relative_to(top)), hashlib.sha256(path.read_bytes()).hexdigest()).encode())
    return digest(found.hexdigest(), platform.python_version(), torch.__version__, str(torch.version.git_version),
                  *(f"{name} {_version(name)}" for name in _LIBRARIES))  # fmt: skip


def _flags() -> tuple[Any, ...]:
    """What torch is told to compute with, as far as a program may follow from it."""
    cuda, backends = torch.backends.cuda, torch.backends
    attention = (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled())
    libraries = (backends.mkldnn.enabled, backends.cudnn.enabled, backends.cudnn.deterministic)  # type: ignore[attr-defined]
    precision = (torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled())
    return (
        attention,
        libraries,
        precision,
        torch.is_grad_enabled(),
        torch.get_default_device(),
        torch.cuda.is_available(),
    )


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"


def _replaced(classes: Iterable[type]) -> str:
    """A function of torch that somebody replaced in this process, whose versions say nothing of it; "" if none is."""
    spaces = (torch, torch.Tensor, torch.nn.functional, torch.linalg, torch.special, torch.fft)
    for space in spaces:
        for name, value in vars(space).items():
            if not name.startswith("_") and _is_anothers(value):  # a module has names of Python's, too
                return f"{space.__name__}.{name}"
    for kind in sorted({base for each in classes for base in each.__mro__ if _is_torchs(base)}, key=_named):
        names = [name for name, value in vars(kind).items() if _is_anothers(value)]
        source = inspect.getsource(sys.modules[kind.__module__]) if names else ""
        for name in names:
            if re.search(rf"^    (def {name}\(|{name}\b[^=\n]*= )", source, re.M):  # what is added, torch does not call
                return f"{kind.__name__}.{name}"
    return ""


def _is_torchs(kind: type) -> bool:
    return kind.__module__.startswith("torch.nn")


def _is_anothers(value: Any) -> bool:
    """True for a function that is not of torch's source."""
    if isinstance(value, functools.partial):
        return True
    folder = os.path.dirname(torch.__file__)
    return isinstance(value, FunctionType) and not value.__code__.co_filename.startswith((folder, "<"))


def key_of_step(
    wanted: Mapping[str, Any], parts: Parts, entries: Any, modules: Iterable[tuple[str, Any]], loss_fn: Any
) -> str:
    """The digest of what decides a program beside the code of the model. Raises Unclear.

    wanted: the options of the step and of this call, by name. parts: of the whole batch. entries, modules: the model's
    tensors and modules. loss_fn: of a training step.
    """
    modules = list(modules)
    if name := _replaced({type(module) for _, module in modules}):
        raise Unclear(f"'{name}', which was replaced in this process")
    lines = [own_source(), *(f"{name}={described(value)}" for name, value in sorted(wanted.items()))]
    lines += [described(_flags()), described(variables(_PREFIXES)), described(Settings.read().exact)]
    lines += [str(one) for one in CUSTOM_OPS.rules.values()]
    lines += [_form(parts.form), *map(_leaf, parts.leaves)]
    lines += [f"{entry.kind} {entry.names} {_tensor(tensor)}" for entry, tensor in entries]
    lines += [f"{path} {_named(type(module))} {module.training}" for path, module in modules]
    code = code_digest(loss_fn.__code__) if isinstance(loss_fn, FunctionType) else ""
    lines.append(f"loss {_named(loss_fn if isinstance(loss_fn, FunctionType) else type(loss_fn))} {code}")
    return digest(*lines)


def _named(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def _leaf(leaf: Any) -> str:
    if not isinstance(leaf, torch.Tensor):
        return described(leaf)
    if attributes_of(leaf):
        raise Unclear("attributes of a tensor of the batch")
    return _tensor(leaf)


def _tensor(tensor: torch.Tensor) -> str:
    if tensor.layout is not torch.strided:
        raise Unclear(f"a tensor of layout {tensor.layout}")
    kind = "Tensor" if type(tensor) is torch.Tensor else _named(type(tensor))
    shape, stride = tuple(tensor.shape), tensor.stride()
    return f"{kind} {shape} {stride} {tensor.dtype} {tensor.device.type} {tensor.requires_grad}"


def _form(form: Form) -> str:
    """The form of a batch, with the classes of its containers."""
    match form:
        case Leaf():
            return f"leaf {form.is_tensor} {form.array}"
        case SeenAgain():
            return f"again {form.number}"
        case Node():
            factory, spec = form.factory, "" if form.spec is None else str(form.spec)
            if " at 0x" in spec:
                raise Unclear(f"a batch in a {form.kind.__qualname__}")
            keys = "" if form.keys is None else described(form.keys.values)
            made = "" if factory is None else _named(factory)
            children = ", ".join(map(_form, form.children))
            return f"{_named(form.kind)} {keys} {form.attributes} {spec} {made} ({children})"
