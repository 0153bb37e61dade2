"""Plain modules in a loss function, as `verify` uses them: each side has values of its own, and the user's stay."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from autopar.capture.capture import state_of
from autopar.capture.inputs.partners import Partner
from autopar.verification.dtypes import cast
from autopar.verification.judge.comparison import Values


class Borrowed:
    """What the partners of one side hold: put into the user's modules for a step, and taken out again."""

    def __init__(self, partners: tuple[Partner, ...], dtype: torch.dtype) -> None:
        modules = {partner.name: partner.traced for partner in partners}
        found = [
            (entry, tensor) for entry, tensor in state_of(nn.Module(), modules).entries if entry.kind != "constant"
        ]
        self.tensors = {entry.name: tensor for entry, tensor in found}
        self.kinds = {entry.name: "weight" if entry.kind == "parameter" else "buffer" for entry, _ in found}
        self.values = {name: cast(tensor.detach().clone(), dtype) for name, tensor in self.tensors.items()}

    @contextmanager
    def used(self, values: Values) -> Iterator[None]:
        """Run a step in the context; `values` is given the gradients, weights and buffers that it leaves."""
        saved = {name: (tensor.data, tensor.grad) for name, tensor in self.tensors.items()}
        for name, tensor in self.tensors.items():
            tensor.grad, tensor.data = None, self.values[name]
        try:
            yield
            for name, tensor in self.tensors.items():
                self.values[name] = tensor.data
                if tensor.grad is not None:
                    values["gradient", name] = tensor.grad.clone()
                values[self.kinds[name], name] = tensor.detach().clone()
        finally:
            for name, (data, grad) in saved.items():
                self.tensors[name].data = data
                self.tensors[name].grad = grad

    def take_buffers(self, other: Borrowed) -> None:
        """Take the buffers of another side."""
        for name in self.tensors:
            if self.kinds[name] == "buffer":
                self.values[name] = other.values[name].clone()
