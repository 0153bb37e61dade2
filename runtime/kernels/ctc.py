"""`autopar::ctc_loss` and its backward, each sample by itself (Graves et al. 2006): torch's kernels.

torch keeps what the forward pass found for each place of a target, in a tensor as wide as the longest target is: a size
that is data. It is found again in the backward pass, which costs what the forward pass does, little beside a model.
"""

from __future__ import annotations

import torch

from autopar.runtime.kernels.kernel import Kernel

aten = torch.ops.aten


def ctc_loss(
    x: torch.Tensor, targets: torch.Tensor, lengths: torch.Tensor, target_lengths: torch.Tensor, blank: int
) -> torch.Tensor:
    """x [t,n,c], targets [n,s], lengths [n] -> [n]"""
    found: torch.Tensor = aten._ctc_loss(x, targets, lengths.tolist(), target_lengths.tolist(), blank)[0]
    return found


def ctc_loss_backward(
    grad: torch.Tensor, x: torch.Tensor, targets: torch.Tensor, lengths: torch.Tensor, target_lengths: torch.Tensor,
    blank: int, zero_infinity: bool,
) -> torch.Tensor:  # fmt: skip
    """grad [n] -> [t,n,c]"""
    counts = lengths.tolist(), target_lengths.tolist()
    loss, alpha = aten._ctc_loss(x, targets, *counts, blank, zero_infinity)
    found: torch.Tensor = aten._ctc_loss_backward(grad, x, targets, *counts, loss, alpha, blank, zero_infinity)
    return found


# Opaque to a compiler: their sizes are data.
KERNELS = {"ctc_loss": Kernel(ctc_loss), "ctc_loss_backward": Kernel(ctc_loss_backward)}
