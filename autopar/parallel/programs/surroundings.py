"""What stands around a step and looks into what torch runs: a compiled program shows it nothing."""

from __future__ import annotations

import torch

from autopar.errors import AutoparError
from autopar.torch_compat import function_mode, function_modes, in_transform, saved_tensor_hooks

_INSIDE = (
    "its step is a compiled program, which they cannot look into. Use them in the loss function, which becomes a part "
    "of the step, or on the plain module before autopar.parallelize; `with model.gathered() as plain:` has the weights "
    "of now."
)
_TRANSFORMED = f"a parallel model inside of torch.vmap, a transform of torch.func, or torch.jit.trace: {_INSIDE}"


def check_surroundings() -> None:
    """Raise AutoparError where transforms, function modes or hooks on what autograd saves would change a plain step.

    Those of torch that change no number, as `torch.device` and `save_on_cpu`, stand around a step as around none, and
    so does a function mode whose class says `only_watches = True`: it sees what the program calls.
    """
    if in_transform() or torch.jit.is_tracing():
        raise AutoparError(_TRANSFORMED)
    for depth in range(function_modes()):
        kind = type(function_mode(depth))
        if not _is_of_torch(kind) and getattr(kind, "only_watches", None) is not True:
            raise AutoparError(
                f"a parallel model inside of {kind.__qualname__}, a TorchFunctionMode: {_INSIDE} If it changes no "
                "result, say so in its class: only_watches = True."
            )
    for hook in saved_tensor_hooks() or ():
        if not _is_of_torch(hook):
            name = getattr(hook, "__qualname__", type(hook).__qualname__)
            raise AutoparError(
                f"a parallel model inside of torch.autograd.graph.saved_tensors_hooks, with {name}: {_INSIDE} Options "
                'for what a step keeps are recompute= and offload="activations".'
            )


def _is_of_torch(found: object) -> bool:
    return str(getattr(found, "__module__", "")).partition(".")[0] in ("torch", "autopar")
