"""Check that a model and a device can compute in mixed precision."""

from __future__ import annotations

import torch

from autopar.errors import PlanError
from autopar.ir.options import StepOptions
from autopar.ir.program import Program, record

_OTHER = (torch.float16, torch.bfloat16, torch.float64)


def check_parameters(program: Program, options: StepOptions) -> None:
    """Raise PlanError for a trained parameter that is no fp32 master weight.

    A precision promises those: with bf16 weights an update below a 256th of a weight is lost, and the precision would
    hide it. What is not trained may be in any dtype.
    """
    if options.precision is None:
        return
    trained = {out.name for out in program.outputs if out.kind == "gradient"}
    wrong = [
        f"'{entry.name}' ({record(node).type.dtype})"
        for node, entry in program.entries
        if entry.name in trained and record(node).type.dtype in _OTHER
    ]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise PlanError(
            f'precision="{options.precision}" keeps parameters in torch.float32 and casts them for each step, but '
            f"{len(wrong)} of {len(trained)} trained parameters are not: {', '.join(wrong[:3])}{more}. Call "
            f"model.float() before autopar, or leave precision out: the model is then computed as it is, with its "
            f"updates rounded to its own dtype."
        )


def check_device(options: StepOptions, device: torch.device) -> None:
    """Raise PlanError for a precision in which a device cannot compute products."""
    dtype = options.low_dtype
    if dtype is None:
        return
    reason = "it has no such instructions"
    if device.type == "cuda":
        lacks = dtype is torch.bfloat16 and not torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        lacks = False
        try:
            a = torch.ones((1, 1, 4, 4), dtype=dtype, device=device)
            torch.matmul(a, a)
            torch.nn.functional.conv2d(a, a)
        except (RuntimeError, NotImplementedError) as error:
            lacks, reason = True, str(error).splitlines()[0]
    if lacks:
        others = {"bf16": '"fp16" or "fp32"', "fp16": '"bf16" or "fp32"'}[str(options.precision)]
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
        raise PlanError(f'precision="{options.precision}" cannot be computed on {name}: {reason}. Write {others}.')
