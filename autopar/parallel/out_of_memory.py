"""Say of a step that runs out of memory what the rank holds, by the estimate of its program, and what would help."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from autopar.compiler.lowered import Lowered
from autopar.errors import AutoparError
from autopar.ir.ops.measure import human
from autopar.ir.options import StepOptions
from autopar.report.memory.estimate import memory_report
from autopar.report.memory.report import (
    ACTIVATIONS,
    COLLECTIVES,
    GRADIENTS,
    INPUTS,
    PARAMETERS,
    STATES,
    TEMPORARIES,
    MemoryReport,
)

_SAID = ("out of memory", "can't allocate memory", "not enough memory", "std::bad_alloc")  # by torch's allocators


@contextmanager
def explaining_memory(compiled: Lowered, rank: int, device: torch.device) -> Iterator[None]:
    """Note on an error of memory, which stays the one that torch raised, what the rank holds and what would help."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            with suppress(AutoparError, RuntimeError, MemoryError):  # there may be no memory for it either
                error.add_note(_told(memory_report(compiled, rank), compiled.plan.options, device))
        raise


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there is no more memory."""
    said = str(error).lower()
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(words in said for words in _SAID)


def _told(report: MemoryReport, options: StepOptions, device: torch.device) -> str:
    """The words: what the device says, the estimator's table, and what would help."""
    held = ""
    if device.type == "cuda":
        free, whole = torch.cuda.mem_get_info(device)
        held = f"{device} has {human(whole)}, {human(free)} of it free; torch's tensors have "
        held += f"{human(torch.cuda.memory_allocated(device))}.\n"
    help_ = "\n".join(f"  - {line}" for line in _advice(report, options))
    return (
        f"out of memory on rank {report.rank}. {held}The estimate of its program:\n{report}\nwhat would help:\n{help_}"
    )


def _advice(report: MemoryReport, options: StepOptions) -> Iterator[str]:
    """What would help against the largest categories at the peak, of what is not in use yet."""
    helps = {
        ACTIVATIONS: (
            (
                options.recompute in (None, "none"),
                'recompute="full" keeps one value a layer and computes the rest again',
            ),
            ((options.microbatches or 1) == 1, "microbatches=2 or more holds the values of a part of the batch"),
            (not options.offload, 'offload=["activations"] lets them wait in the host\'s memory'),
        ),
        TEMPORARIES: (
            (
                not options.chunked_loss,
                "chunked_loss=True computes logits over a large vocabulary some tokens at a time",
            ),
            ((options.microbatches or 1) == 1, "microbatches=2 or more holds the values of a part of the batch"),
        ),
        STATES: ((not options.zero, "zero=1 splits optimizer states over the data axes"),),
        GRADIENTS: (((options.zero or 0) < 2, "zero=2 splits gradients over the data axes as well"),),
        PARAMETERS: (
            ((options.zero or 0) < 3, "zero=3, or an axis fsdp, splits parameters over the data axes as well"),
        ),
        COLLECTIVES: ((not options.bucket_bytes, "a smaller bucket_bytes moves less at once"),),
        INPUTS: ((True, "a smaller batch of each rank: more ranks on dp, or fewer samples"),),
    }
    largest = sorted(report.categories, key=lambda name: -report.categories[name])[:3]
    found = [text for name in largest if report.categories[name] for is_new, text in helps[name] if is_new]
    yield from dict.fromkeys(found)
    yield "a larger axis tp, pp or fsdp splits the model over more ranks"
    yield 'memory="60GiB", or what the device has, lets autopar choose recomputation and offloading that fit'
