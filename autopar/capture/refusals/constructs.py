"""What users write that a capture cannot take, by its name in their terms, and what to write instead."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar.torch_compat import PACK_PADDED, has_hooks

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Construct:
    """What it is called, and what to do instead."""

    name: str
    instead: str


# For what a module does at its first call alone: it sets itself up by its first batch.
FIRST_CALL = "If only the first call does this, run the plain module once on a batch before it is compiled: model(x)."
# How a loss function is called, which is not that of a criterion.
CALLED = (
    "loss_fn is called with the model itself, loss_fn(model, *batch), and gives the loss: "
    "loss_fn=lambda model, x, y: F.cross_entropy(model(x), y)."
)
UNCALLED = (
    "Without a loss_fn the module itself is called, model(*batch), and gives the loss. Of a module that gives outputs: "
    "loss_fn=lambda model, x, y: F.cross_entropy(model(x), y)."
)
_WHERE = "Compute both sides and choose by element, e.g. torch.where(condition, a, b)"
_LATER = "Return the tensor and read its value after the step"

# A tensor as a condition, by what the user's line looks like; the first that fits.
BRANCHES: tuple[tuple[re.Pattern[str], Construct], ...] = tuple(
    (re.compile(pattern), construct)
    for pattern, construct in (
        (r"^(el)?if\b", Construct(
            "an `if` on a tensor", f"{_WHERE}; or decide before the step and pass a Python bool.")),
        (r"^while\b", Construct(
            "a `while` on a tensor",
            "Run a fixed number of rounds and keep the value where it is done: x = torch.where(done, x, step(x)).")),
        (r"^assert\b", Construct(
            "an `assert` on a tensor", "Check the batch before the step, or the result after it, and drop this line.")),
        (r"\bif\b.+\belse\b", Construct("a conditional expression on a tensor", f"{_WHERE}.")),
        (r"\b(and|or|not)\b", Construct(
            "`and`, `or` or `not` on a tensor", "Use &, | and ~, which work by element and stay tensors.")),
        (r"\bin\b", Construct("`in` on a tensor", "Use (x == value).any(), which stays a tensor, with torch.where.")),
        (r"", Construct("bool() of a tensor", f"{_WHERE}, and multiply by a mask with x * (y > 0).")),
    )
)  # fmt: skip

_NUMPY = Construct(
    "a way to numpy (.numpy(), np.asarray)",
    "Use the torch function of the same name, or do it to the batch beforehand.",
)
_NUMBER = Construct(
    "{} of a tensor",
    "Leave it a tensor: sums, products and comparisons work alike, torch.exp(t) is math.exp(t), and what .item() gives "
    "may be in arithmetic (n ** 0.5, max(n, 1)). A value for a log is read after the step; one "
    "that is known before it is passed in as a Python number.",
)
INTEGER = Construct(
    "a tensor as a Python integer (int(), range, an index or a size)",
    "Pass the number in as a Python int (each value compiles a program of its own), or use a fixed size and a mask; "
    "as a factor or a term leave it a tensor, x.sum().long(); to look a value up, keep the list as a tensor: "
    "table[index]; where it says only at which place rows begin, queue[:, i : i + 8], read it by .item().",
)
_EQUAL = Construct("{}, which gives a Python bool", f"{_WHERE}, with (a == b).all() or torch.isclose(a, b).all().")
_MASKED = "Keep the size: x * mask, x.masked_fill(~mask, 0) or torch.where; a mean is (x * mask).sum() / mask.sum()."

# Functions that take a value out of a tensor, by the call that failed.
READS: Mapping[Any, Construct] = {
    Tensor.item: Construct(".item()", _NUMBER.instead),
    Tensor.__float__: Construct(_NUMBER.name.format("float()"), _NUMBER.instead),
    Tensor.__complex__: Construct(_NUMBER.name.format("complex()"), _NUMBER.instead),
    **dict.fromkeys((Tensor.__int__, Tensor.__index__), INTEGER),
    **dict.fromkeys((Tensor.numpy, Tensor.__array__), _NUMPY),
    Tensor.__getitem__: Construct(
        "a slice whose length a tensor decides",
        "Use bounds that are so many rows apart, x[i : i + 8], or Python integers, or keep all rows and mask the rest.",
    ),
    **dict.fromkeys((torch.allclose, Tensor.allclose), Construct(_EQUAL.name.format("allclose"), _EQUAL.instead)),
    **dict.fromkeys((torch.equal, Tensor.equal), Construct(_EQUAL.name.format("torch.equal"), _EQUAL.instead)),
    Tensor.__format__: Construct("the text of a tensor (f-string, format)", f"{_LATER}; or print x.shape."),
    Tensor.__contains__: BRANCHES[-2][1],
}

# Torch calls .item() for it.
TOLIST = Construct(
    ".tolist()", f"{_NUMBER.instead} All counts of a tensor may be the sizes of split(): x.split(counts.tolist())."
)

# Functions whose result has as many elements as the data say, by the call that failed.
SIZES: Mapping[Any, Construct] = {
    Tensor.__getitem__: Construct(
        "an index by a boolean mask (x[mask])", _MASKED
    ),
    Tensor.__setitem__: Construct(
        "rows that are written by a boolean mask (x[mask] = rows)",
        "Compute all rows and choose by element: torch.where(mask, rows, x)."
    ),
    **dict.fromkeys((torch.masked_select, Tensor.masked_select), Construct(
        "masked_select", _MASKED)),
    **dict.fromkeys((torch.nonzero, Tensor.nonzero, torch.argwhere, Tensor.argwhere), Construct(
        "nonzero()", "Work with the mask itself: x * mask, or topk(k) for a number of places that is fixed. Places by "
        "which rows are taken and put back may be torch.where(mask).")),
    torch.where: Construct(
        "torch.where(condition) with one argument", "Give it all three: torch.where(condition, a, b)."),
    **dict.fromkeys(
        (torch.unique, Tensor.unique, torch.unique_consecutive, Tensor.unique_consecutive),
        Construct("unique()", "Do it to the batch beforehand, and pad to a fixed size; or torch.sort keeps the size. A "
        "loop over experts goes through all, for e in range(experts), of which torch.bincount(chosen, "
        "minlength=experts) counts the rows.")),
    **dict.fromkeys((torch.repeat_interleave, Tensor.repeat_interleave), Construct(
        "repeat_interleave with a tensor of repeats",
        "Pass output_size= as a Python integer, repeat by one Python integer, or expand the batch beforehand.")),
    PACK_PADDED: Construct(
        "the rows of a packed sequence (pack_padded_sequence), as many as the lengths say",
        "Give the packed sequence to torch's recurrent layers and to pad_packed_sequence: of a loss by its padded "
        "result with a mask, or F.cross_entropy(..., ignore_index=...)."),
    torch.split: Construct(
        "rows that counts of the data cut (split() or a slice)",
        "Take those of an expert by rows, place = torch.where(chosen == e)."
    ),
    torch.linalg.lstsq: Construct(
        "linalg.lstsq, which has residuals if the matrix has full rank",
        "Of full rank it is torch.linalg.pinv(a) @ b, or torch.linalg.solve(a.mT @ a, a.mT @ b)."),
    **dict.fromkeys((torch.bincount, Tensor.bincount), Construct(
        "bincount without minlength", "Give it a fixed number of classes: torch.bincount(index, minlength=n).")),
}  # fmt: skip

LENGTH = Construct(
    "pad_packed_sequence, whose result is as long as the longest sequence, and none is as long as the padded batch",
    "Say how long it is: pad_packed_sequence(packed, total_length=x.shape[1]); or pad batches to the longest sequence.",
)

OTHER_READ = Construct(
    "a call that reads data",
    "A branch, loop or size that reads data cannot be compiled once for all batches. "
    "Use torch.where or a mask, or pass the value in as a Python number.",
)

CLASSES = Construct(
    "one_hot with a number of classes that is a tensor",
    "Give it a Python number, F.one_hot(index, n), or cut it to one at once: F.one_hot(index, count)[..., :n].",
)
_OWN_BACKWARD = Construct(
    "a backward pass of your own (.backward())",
    "Only return the loss: autopar runs the backward pass, and the optimizer's step and zero_grad() come after it. "
    "For a gradient that is part of the loss use autograd.grad(..., create_graph=True).",
)
COLLECTIVE = Construct(
    "a call of torch.distributed inside the model",
    "Write the model for one device and leave the call out: autopar puts in the collectives.",
)
SPARSE = Construct(
    "a sparse tensor",
    "Use a dense one (a.to_dense(), beforehand), or keep its indices and its values: the product a @ x of a matrix is "
    "x.new_zeros(rows, x.shape[1]).index_add(0, row, value[:, None] * x[column]).",
)
_QUANTIZED = Construct(
    "a quantized tensor", "Train in floating point; round with a straight-through gradient to imitate it."
)


def _all_of(owner: Any, beginning: str) -> list[Any]:
    """The functions whose names begin so."""
    return [
        getattr(owner, name) for name in dir(owner) if name.startswith(beginning) and callable(getattr(owner, name))
    ]


# Functions that no step may call.
REFUSED: Mapping[Any, Construct] = {
    **dict.fromkeys((Tensor.backward, torch.autograd.backward), _OWN_BACKWARD),
    **dict.fromkeys((*_all_of(Tensor, "to_sparse"), *_all_of(torch, "sparse_")), SPARSE),
    **dict.fromkeys(_all_of(torch, "quantize_per_"), _QUANTIZED),
}  # fmt: skip
DATA_FORM = Construct(
    "an assignment to .data of another form ({} becomes {})",
    f"A program is compiled for one form. Make the tensor of that form before parallelize. {FIRST_CALL}",
)
DATA_SHARED = Construct(
    "an assignment to .data of what is in the memory of a parameter, a buffer or the batch",
    "The two would share it from then on, which on ranks no two tensors do: give it a copy, "
    "x.data = y.detach().clone(), or copy the values, x.data.copy_(y).",
)
DATA_LEFT = Construct(
    "a tensor that lay in the memory of x, or of y, before x.data = y",
    "On one device such an assignment changes what shares memory with what; in a program x has a copy of y from then "
    "on. Take what is used later as a copy before: .clone().",
)
DATA_USED = Construct(
    "an assignment to .data of a tensor that the backward pass may need as it was",
    "Whether gradients then see the old values or the new ones hangs on what torch kept. Assign before the first use "
    "in the step, or copy the values, x.data.copy_(y), of which gradients see the new ones.",
)
FORM_IN_PLACE = Construct(
    "a change of form, in place, of a view at a place that a tensor holds",
    "Use the form without the underscore: x[i].unsqueeze(0) in place of x[i].unsqueeze_(0).",
)
STRIDES_OF_VIEW = Construct(
    "as_strided of a view at a place that a tensor holds",
    "It counts through memory that is not there in a program. Use slices, unfold or reshape.",
)
MEMORY_ADDRESS = Construct(
    "the memory of a tensor (data_ptr(), storage(), untyped_storage(), is_set_to()), which is another one at each step",
    "Whether two arguments are one tensor, `x is y` tells; what else depends on it is passed in as a Python value.",
)
WRITES_COUNTED = Construct(
    "the number of writes to a tensor (x._version), which a program does not count",
    "Count in Python: a number in an attribute of the model, or one that is passed in.",
)
STRIDES_OF_BATCH = Construct(
    "as_strided, with an offset, of a tensor of the batch that begins within a larger memory",
    "It counts from the beginning of that memory, of which a step has the tensor alone. Leave the offset out, or give "
    "the step a tensor in memory of its own: x.clone().",
)
ALIASES = Construct(
    "copy.deepcopy of tensors that share memory (a tensor and a view of it)",
    "Copy each by itself: x.detach().clone().",
)

SEEDED = Construct(
    "a random op after the random state of torch was set (torch.manual_seed, set_rng_state)",
    "Random ops draw anew at each step, by the seed= given to autopar: leave the seeding out, or draw the numbers once "
    "in __init__ and keep them as a buffer.",
)

DENSE = (
    "an embedding with sparse=True at {}:{}: the gradient of its table is dense (torch.optim.SparseAdam takes no dense "
    "one: take torch.optim.Adam)"
)

# What has an effect once, at the capture, and not in a step.
NOTED: Mapping[Any, str] = {
    Tensor.__repr__: "a tensor is printed at {}: at the capture only, and without its values; "
    "print the loss after the step",
}

# Other failures, by the text of the exception.
FAILURES: tuple[tuple[re.Pattern[str], Construct], ...] = tuple(
    (re.compile(pattern), construct)
    for pattern, construct in (
        (r"BatchArray", Construct(
            "a numpy array of the batch that is not made a tensor first",
            "numpy does not run in a step: write x = torch.as_tensor(x) (in place of torch.from_numpy) and go on with "
            "torch's functions, or make tensors of the batch beforehand.")),
        (r"Can't pickle local object 'WeakValueDictionary", Construct(
            "a tensor that is pickled (pickle.dump, torch.save, a cache on disk)",
            "A tensor of a capture has no values to write: do it before the step, or after it, and delete the file "
            f"that this line began. {FIRST_CALL}")),
        (r"a leaf Variable that requires grad|a view of a leaf Variable that requires grad", Construct(
            "a parameter that is changed in place, and would get a gradient through that",
            "torch refuses it, too. A change that lasts is made under torch.no_grad(); for one that does not, compute "
            "a new tensor (w = self.weight * 2) and use that.")),
        (r"unsupported format string passed to .*Tensor", READS[Tensor.__format__]),
        (r"modified by an inplace operation", Construct(
            "an in-place change of a tensor that the backward pass of this line needs",
            "Use the form without the underscore: y = x + 1 instead of x.add_(1).")),
        (r"backward through the graph a second time", Construct(
            "a part of a graph whose backward pass has been run already",
            "Where autograd.grad is a part of the loss, give it create_graph=True; else detach() what it shares.")),
        (r"Default process group has not been initialized", COLLECTIVE),
        (r"overrid\w* the setup_context staticmethod|Batching rule not implemented|functorch|vmap", Construct(
            "torch.vmap or torch.func",
            "Write the batch dim out (broadcasting, einsum), and gradients as autograd.grad(..., create_graph=True).")),
        (r"shape_env must not be None|[Nn]ested ?[Tt]ensor", Construct(
            "a nested tensor", "Pad to one length and pass a mask.")),
        (r"SparseCPU|SparseCUDA|sparse_", SPARSE),
        (r"Quantized|qint8|quint8", _QUANTIZED),
        (r"dynamo-optimized function", Construct(
            "a module or function that torch.compile made", "Leave torch.compile out of what autopar compiles.")),
        (r"Expected all tensors to be on the same device|found (at least )?two (different )?devices", Construct(
            "tensors on several devices",
            "Make new tensors on that of their operands, e.g. torch.ones(4, device=x.device), and leave .to() out: "
            "autopar places the model.")),
        (r"not linked with support for cuda|Torch not compiled with CUDA|No CUDA GPUs", Construct(
            "a device that is not here", "Leave .cuda() and .to(device) out: autopar places the model and the batch.")),
        (r"maximum recursion depth", Construct(
            "a recursion that does not end", "It calls itself without a last case.")),
        (r"'(async_)?generator' object", Construct(
            "a generator (a forward with `yield`)", "Return a list or a tuple of the results.")),
    )
)  # fmt: skip

# Where numbers come from that are others in each run, by the text of the line that made or used them.
UNSTEADY: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"\b(np|numpy)\.random|default_rng|\brng\b", "a numpy generator"),
        (r"\brandom\.", "Python's random module"),
        (r"\btime\.|perf_counter|datetime", "the clock"),
        (r"\buuid|urandom|secrets\.", "the operating system's random numbers"),
    )
)

Wrapper = tuple[Callable[[Any], bool], Construct]


def _named(*names: str) -> Callable[[Any], bool]:
    return lambda module: any(c.__name__ in names and c.__module__.startswith("torch.") for c in type(module).__mro__)


_BARE = "Give autopar the plain module ({}); it makes the parallel program itself."

# Modules that are wrapped in something of torch's that a capture cannot look into.
WRAPPERS: tuple[Wrapper, ...] = (
    (_named("DistributedDataParallel", "DataParallel"), Construct("wrapped in {}", _BARE.format("its .module"))),
    (_named("FullyShardedDataParallel", "FSDPModule"), Construct("wrapped in {}", _BARE.format("before fully_shard"))),
    (_named("OptimizedModule"), Construct(
        "compiled by torch.compile", _BARE.format("its ._orig_mod, or leave torch.compile out"))),
    (_named("TracedModule", "TopLevelTracedModule", "RecursiveScriptModule", "ScriptModule"), Construct(
        "a {} of torch.jit", _BARE.format("as it was before torch.jit"))),
)  # fmt: skip

# The same of parameters.
LAZY: Wrapper = (torch.nn.parameter.is_lazy, Construct(
    "has no shape yet (a lazy module)", "Run the plain module once on a batch before it is compiled."))  # fmt: skip
# A parallel module's own parameters are DTensors, whose hooks it runs.
HOOKED: Wrapper = (lambda parameter: has_hooks(parameter) and not isinstance(parameter, DTensor), Construct(
    "has a gradient hook, which a compiled step would not run",
    "The steps of autopar.parallelize run it; here register it later, or change .grad between forward_backward and "
    "optimizer.step(), or scale the parameter's use in the model."))  # fmt: skip
