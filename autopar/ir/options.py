"""The options of a training step: what each may be and what it means, for the API, `Job`, the command line and docs.

All of an option stands in this file: its entry in the docstring of `StepOptions`, its field, and its line in
`StepKeywords`. Passes read it as `plan.options.NAME`.

The command line reads it before anything is computed, so this file imports no torch: a dtype is looked up where it is
needed.
"""

from __future__ import annotations

import ast
import functools
import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, cast, get_args

from autopar.errors import AutoparError, BatchError, CompileError, LayoutError, PlanError, ScheduleError, one_of

if TYPE_CHECKING:
    from torch import dtype as Dtype

    from autopar.ir.layout import Layout
    from autopar.ir.schedule import Action, Costs
else:  # names in annotations, for what reads them when it runs (`typing.get_type_hints`)
    Dtype = Layout = Action = Costs = Any

STAGE, STAGE_AND_LAYERS = "stage", "stage+full"
BY_MODULE = ("none", "selective", "full")  # policies that a module may have by itself
RECOMPUTE = (*BY_MODULE, STAGE, STAGE_AND_LAYERS)
PRECISIONS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}  # our names of dtypes, and torch's
ATTENTION = ("auto", "gather", "ring", "ulysses")
STATISTICS = ("batch", "rank", "microbatch")
Compiler = Literal["auto", "executor", "inductor", "triton"]
COMPILERS: tuple[Compiler, ...] = get_args(Compiler)
Policy = str | int | float
Recompute = Policy | Mapping[str, Policy]
Shard = Mapping[str, "str | Layout"]
BatchDims = Any  # a dim, None, or a tuple, list or dict of these
OFFLOADED = ("activations", "optimizer", "parameters")  # what may wait in the host's memory
DISK = "disk"  # in place of a part: in files
Amount = int | float
Offload = str | Sequence[str] | Mapping[str, Amount | Sequence[str]] | None
Horizon = int | Literal["auto"]
Reshard = bool | Mapping[str, bool]
Memory = int | float | str | None
UNITS = {"": 1, "MB": 1e6, "GB": 1e9, "MiB": 2**20, "GiB": 2**30}
SequenceParallel = bool | Literal["auto"]
Slices = int | Sequence[int] | Literal["auto"]
# Of (stages, stages on a rank, micro-batches, costs): for each rank its actions, or their names.
UserSchedule = Callable[[int, int, int, "Costs"], Sequence[Sequence["Action | str"]]]
ScheduleLike = str | Path | UserSchedule

_ENTRY = re.compile(r"^([a-z_]+): (.*(?:\n {2}.*)*)", re.MULTILINE)  # "name: meaning", further lines indented
_SENTENCE_END = re.compile(r"\. (?=[\"A-Z])|\.$")


def read_dtype(text: Any) -> Any:
    """The dtype that `bf16`, `fp16` or `fp32` names; anything else as it is, which is refused then."""
    import torch

    name = PRECISIONS.get(str(text))
    return text if name is None else getattr(torch, name)


def _float32() -> Dtype:
    import torch

    return torch.float32


def read_stages(entries: Sequence[str]) -> tuple[str, ...]:
    """`a,b;c,d`, or several of these, as the modules of each stage."""
    return tuple(part.strip() for entry in entries for part in entry.split(";") if part.strip())


def read_recompute(text: str) -> Recompute:
    """`full`, `1000000`, `0.5` or `blocks.0-3=full,*=selective`."""
    if "=" not in text:
        return _number(text)
    pairs = (entry.partition("=") for entry in text.split(","))
    return {pattern.strip(): _number(policy) for pattern, _, policy in pairs}


def read_offload(text: str) -> Offload:
    """`activations`, `activations=0.5`, `optimizer=embed;blocks.0-7`, `parameters=disk`, or several with commas."""
    pairs = (entry.partition("=") for entry in text.split(","))
    read = {name.strip(): _number(amount) if equals else 1.0 for name, equals, amount in pairs}
    return {
        name: tuple(part.split(";")) if isinstance(part, str) and part != DISK else part for name, part in read.items()
    }


def read_slices(text: str) -> int | tuple[int, ...] | str:
    """`4`, the positions of each slice: `1024,512,512`, or `auto`."""
    with suppress(ValueError):
        lengths = tuple(map(int, text.split(",")))
        return lengths if len(lengths) > 1 else lengths[0]
    return text


def read_dims(text: str) -> Any:
    """`1`, `(1, None)` or `{'x': 0}`; other text as it is, which is refused then."""
    with suppress(ValueError, SyntaxError):
        return ast.literal_eval(text)
    return text


def _number(text: str) -> Policy:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text.strip()


@dataclass(frozen=True, slots=True)
class Flag:
    """How the command line has an option. kind: of what it is given, of which `read` makes the value. more: what its
    help says behind the option's meaning."""

    kind: Any = bool
    metavar: str | None = None
    read: Callable[[Any], Any] = lambda value: value
    more: str = ""


@dataclass(frozen=True, slots=True)
class Valid:
    """What an option may be: a value that `allows` takes. Else `error` says to `write` something else.
    parts: of the option, that are checked one by one."""

    allows: Callable[[Any], bool]
    write: str
    error: type[AutoparError] = PlanError
    parts: Callable[[Any], Iterable[Any]] = lambda value: (value,)

    def check(self, name: str, value: Any) -> None:
        """Raise the error for the first part of a value that is not allowed."""
        for part in self.parts(value):
            if not self.allows(part):
                raise self.error(f"{name}={part!r}: write {self.write}.")


LONGEST_S = 10**9  # that a rank waits for another
TIMEOUT = Valid(
    lambda seconds: seconds is None or (type(seconds) in (int, float) and 1 <= seconds <= LONGEST_S),
    f"the seconds that a rank waits for the others, 1 to {LONGEST_S:,}, or None for as long as torch's backend does",
    AutoparError,
)


def option(default: Any, valid: Valid | None = None, flag: Flag | None = None) -> Any:
    """A field of `StepOptions`; without a flag it is none of the command line's. default: of a dtype what gives it."""
    metadata = {"valid": valid, "flag": flag}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_list(value: Any) -> bool:
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return is_list and all(isinstance(entry, str) for entry in value)


def _are_dims(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_are_dims, value.values()))
    if isinstance(value, (tuple, list)):
        return all(map(_are_dims, value))
    return value is None or (isinstance(value, int) and not isinstance(value, bool))


def _is_factor(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= 1


def _is_slices(value: Any) -> bool:
    is_list = isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0
    return value == "auto" or _is_count(value) or (is_list and all(map(_is_count, value)))


def _is_policy(value: Any) -> bool:
    if isinstance(value, (bool, str)):
        return value in BY_MODULE
    return isinstance(value, (int, float)) and 0 <= value <= (1 if isinstance(value, float) else math.inf)


def _policies(value: Any) -> Iterable[Any]:
    """The policies that modules have by themselves."""
    if isinstance(value, Mapping):
        return value.values()
    return () if value in (STAGE, STAGE_AND_LAYERS) else (value,)


def read_bytes(text: str) -> int | None:
    """`60GiB`, `70 GB` or `1000` as bytes; None if it is none of these."""
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([A-Za-z]*)", text)
    return None if match is None or match[2] not in UNITS else int(float(match[1]) * UNITS[match[2]])


def _is_memory(value: Any) -> bool:
    if isinstance(value, float):
        return 0 < value <= 1
    found = read_bytes(value) if isinstance(value, str) else value
    return _is_count(found)


def _is_offload(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(name in OFFLOADED and _is_amount(name, amount) for name, amount in value.items())
    names = (value,) if isinstance(value, str) else value
    return isinstance(names, Sequence) and len(names) > 0 and all(name in OFFLOADED for name in names)


def _is_amount(name: str, amount: Any) -> bool:
    if name == "optimizer" and _is_list(amount):
        return len(amount) > 0
    if name == "parameters" and amount == DISK:
        return True
    is_number = isinstance(amount, float) or (name == "activations" and isinstance(amount, int))
    is_whole = name != "parameters" or amount == 1.0
    return is_number and not isinstance(amount, bool) and _is_policy(amount) and is_whole


def _name_of(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))


_COUNT = "a number of 1 or more"


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """How a training step is computed: keyword arguments of `parallelize`, `compile`, `verify` and `Job`, and options
    of the command line, which are made of these fields.

    shard: layouts by parameter pattern, e.g. `{"blocks.*.up.weight": "[tp,-]"}`, as constraints on the search.
    batch_dims: the dim of each tensor of the batch that counts samples, by argument: `1`, `(0, 1)` or
      `{"x": 0, "ids": 1, "scale": None}`. A dim is for every tensor of the argument, or of the batch; of a container
      it may be again a tuple or dict. None: it has no samples, and all ranks share it. By default it is dim 0 of the
      tensors that have as many there as the first, and with batch="local" what cannot be mistaken
      (docs/local_batches.md).
    sequence_parallel: split norms, dropout and residuals over tp on the sequence. Reduce-scatter and all-gather then
      stand in place of all-reduce (arXiv 2205.05198). "auto" does so where the model allows it and where it is
      simulated as faster (`passes/costs/streams.py`); a note says so.
    specialize: take values that the model reads from tensors (`int(t)`, `.item()`, sizes) from the first batch of each
      signature. Each step is checked to have the same; if not, another program is compiled for its values, up to 8.
      Needs batch="global".
    microbatches: parts of a rank's batch that are computed one after another. Loss, gradients and masks stay those
      of the whole batch. Without pp: accumulation of gradients, 1 by default; with it up to four for each stage.
    slices: pieces of every sequence that a pipeline computes one after another, as it does micro-batches: attention
      reads the keys and values that earlier slices left on the stage (TeraPipe, arXiv 2102.07988). It must be causal,
      and the schedule seq1f1b or gpipe, or one of your own. Their lengths are such that the pipeline does not wait for
      the last ones, which attend to more; a list says them: `[1024, 512, 512]`. "auto" compiles 1, 2, 4 and 8 of them,
      and takes what ends a step soonest by the simulation of the schedule.
    batch_statistics: the samples of which BatchNorm in training takes mean and variance: the whole "batch", as on one
      device, those of a data "rank", or those of a "microbatch" of a rank, as other trainers do. With "microbatch"
      BatchNorm goes with micro-batches, pipelines and all schedules; docs/pipelines.md tells the running statistics.
    schedule: of a pipeline (an axis pp): gpipe, 1f1b, interleaved-1f1b, zb-h1, zb-h2, zb-v, dualpipev, seq1f1b, or a
      CSV file of actions such as 0F0. In Python also a function, see docs/pipelines.md. (arXiv 1811.06965 for gpipe,
      2104.04473 for 1f1b and interleaved-1f1b, 2406.03488 for seq1f1b, 2412.19437 for dualpipev, 2401.10241 for the
      others.)
    stages: modules of the stages. A list, a stage an entry, e.g. `["embed, blocks.0-3", "blocks.4-7, head"]`; by
      default the cut with the fastest slowest stage.
    chunks: stages on each rank.
    stage_memory: bytes that a stage may hold.
    zero: split optimizer states (1), and gradients (2), and parameters (3) over a data axis (arXiv 1910.02054). If
      there is cp, over it too. With "dp=2,fsdp=4" they are split over fsdp and replicated over dp; an axis fsdp means
      zero=3 if nothing else is said. Parameters are DTensors of the parts: any element-wise optimizer works.
    reshard_after_forward: drop what zero=3 gathered after its use, and gather it again in the backward pass. False
      keeps it until then. Or those by pattern of modules, `{"blocks.12-23": False}`: the first that fits, True else.
    recompute: what the backward pass computes again instead of keeping it: none, selective (arXiv 2205.05198), full,
      the bytes that a rank may keep (an int), or their part of what "none" keeps (a float). Or those by pattern of
      modules, e.g. `{"blocks.0-3": "full", "*": "selective"}`. "stage" keeps of a micro-batch only what enters its
      stage, and computes its whole forward pass again (arXiv 1811.06965); "stage+full" then each layer once more.
    offload: what waits in the host's memory: "activations" for the backward pass, "optimizer" (states), "parameters"
      with gradients and states; or a list of them. States are on the device while their parameters step. Parameters
      come a layer before it computes, and the optimizer steps on the host. Or the parts that wait, of activations also
      bytes, of states also patterns of modules: `{"activations": 0.5, "optimizer": ["embed", "blocks.0-7"]}`. Where
      recompute= is a number, it is the budget of both: each value is kept, computed again or moved, whichever takes the
      least time (arXiv 2104.07857).
    offload_dir: a folder of this node's disk: optimizer states that wait lie in files there, not in the host's memory.
      So they do with offload="parameters", and with `{"parameters": "disk"}` parameters and gradients as well. The
      files have no names, so nothing is left of a run however it ends.
    horizon: layers by which activations, or parameters, are back before they are read: more hide slower copies, fewer
      need less memory. "auto" begins each copy as late as hides it, by two layers at most, and of parameters by one.
    memory: bytes that a rank's device may hold at its peak (an int, or text as "60GiB"), parameters, gradients and
      states of AdamW counted; or their part of what the step holds without this option (a float). Of the steps that
      keep to it the fastest is taken, by the simulation of each: values are computed again (`recompute`), moved
      (`offload`), and layers that zero=3 gathered stay (`reshard_after_forward`), as many of each as is worth it.
    precision: to compute in: bf16 or fp16, with parameters and norms, softmax and loss in fp32. None as the model is.
    reduce_dtype: of the sums of gradients over ranks and micro-batches.
    bucket_bytes: of gradients or parameters that move together. None leaves it to the sizes of the model.
    attention: what an axis cp does where attention looks along the whole sequence. "gather": keys and values are
      gathered (arXiv 2407.21783). "ring": they go round in pieces, under the products of the pieces before (arXiv
      2310.01889). "ulysses": heads are split in place of the sequence (arXiv 2309.14509). "auto" takes for each
      attention what moves fewer bytes, and a ring in place of a gather where its products hide it.
    experts: the axis over which experts are split, where the mesh has none for them alone: "dp", "fsdp" or "cp", or
      several joined, "dp:cp". Rows then go to the rank of their expert, as over an axis ep (which needs no option).
    expert_rows: how many times the mean rows may go from a rank to the experts of another one, such as 1.25: messages
      are padded to this bound, and no number of rows is read by the host (`cuda_graphs` needs that). More are an
      error before weights change, never dropped rows. None: as many as there are.
    chunked_loss: compute the logits of a vocabulary, their loss and its gradients some tokens at a time, so that the
      logits never exist as a whole (arXiv 2410.10989). "auto" does so where they are large; a number is the bytes that
      the logits of a chunk may take on a rank.
    compile: run the programs as code that a compiler writes: inductor for each graph as a whole, collectives included,
      or triton for groups of ops between products and collectives. On the executor they run op by op; auto is triton on
      a GPU that Triton compiles for, and executor elsewhere.
    """

    shard: Shard | None = option(None)
    batch_dims: BatchDims = option(
        None,
        Valid(
            _are_dims, 'a dim, or a tuple or dict of dims by argument: (1, 1) or {"x": 0, "scale": None}', BatchError
        ),
        Flag(str, "DIM|(DIM,...)|{'NAME':DIM,...}", read_dims),
    )
    sequence_parallel: SequenceParallel = option(
        False, Valid(lambda value: value in (True, False, "auto"), 'True, False or "auto"'), Flag()
    )
    specialize: bool = option(False, flag=Flag())
    microbatches: int | None = option(None, Valid(_is_count, _COUNT, BatchError), Flag(int, "N"))
    slices: Slices = option(
        1,
        Valid(_is_slices, f'{_COUNT}, the positions of each: [1024, 512], or "auto"', BatchError),
        Flag(str, "N|N,N,...|auto", read_slices),
    )
    batch_statistics: str = option(
        "batch", Valid(lambda value: value in STATISTICS, one_of(STATISTICS)), Flag(str, "|".join(STATISTICS))
    )
    schedule: ScheduleLike = option("1f1b", flag=Flag(str, "NAME|FILE.csv"))
    chunks: int | None = option(None, Valid(_is_count, _COUNT, ScheduleError), Flag(int, "V"))
    stages: Sequence[str] | None = option(
        None,
        Valid(_is_list, 'a list of modules, a stage an entry: ["blocks.0-3", "blocks.4-7"]', LayoutError),
        Flag(list[str], '"a,b;c,d"', read_stages, "';' between stages; or once for each stage"),
    )
    stage_memory: int | None = option(None, Valid(_is_count, _COUNT, ScheduleError), Flag(int, "BYTES"))
    zero: int | None = option(
        None,
        Valid(
            lambda value: not isinstance(value, bool) and value in (0, 1, 2, 3),
            "0, 1 (optimizer states are split), 2 (and gradients) or 3 (and parameters)",
        ),
        Flag(int, "0-3"),
    )
    reshard_after_forward: Reshard = option(
        True,
        Valid(
            lambda value: isinstance(value, bool), 'True or False, or those by pattern: {"blocks.12-23": False}',
            parts=lambda value: value.values() if isinstance(value, Mapping) else (value,),
        ),
        Flag(),
    )  # fmt: skip
    recompute: Recompute = option(
        "none",
        Valid(
            _is_policy,
            f"{one_of(BY_MODULE)}, a number of bytes (an int), or the part of what 'none' saves that may be saved "
            f"(a float from 0.0 to 1.0); or, for all modules together, {one_of((STAGE, STAGE_AND_LAYERS))}",
            parts=_policies,
        ),
        Flag(str, "none|selective|full|stage|stage+full|BYTES|PART|MODULE=...,MODULE=...", read_recompute),
    )
    offload: Offload = option(
        None,
        Valid(
            _is_offload,
            f'{one_of(OFFLOADED)}, a list of them, or parts from 0.0 to 1.0: {{"activations": 0.5}} '
            '(parameters: 1.0 or "disk"; optimizer: also a list of patterns of modules)',
        ),
        Flag(str, "WHAT|WHAT=PART,...", read_offload),
    )
    offload_dir: str | Path | None = option(
        None,
        Valid(lambda value: isinstance(value, (str, Path)) and str(value) != "", "the path of a folder, or None"),
        Flag(str, "DIR"),
    )
    horizon: Horizon = option(
        "auto",
        Valid(lambda value: value == "auto" or _is_count(value), f'{_COUNT} of layers, or "auto"'),
        Flag(str, "LAYERS|auto", _number),
    )
    memory: Memory = option(
        None,
        Valid(
            lambda value: _is_memory(value),
            'bytes of 1 or more (an int, or text as "60GiB"), or a part of what the step holds without it (a float '
            "above 0.0, up to 1.0)",
        ),
        Flag(str, "60GiB|PART", _number),
    )
    precision: str | None = option(
        None,
        Valid(lambda value: value in PRECISIONS, f"{one_of(PRECISIONS)}, or None to compute as the model is"),
        Flag(str, "bf16|fp16|fp32"),
    )
    reduce_dtype: Dtype = option(
        _float32,
        Valid(lambda value: value in map(read_dtype, PRECISIONS), "torch.float32, torch.bfloat16 or torch.float16"),
        Flag(str, "fp32|bf16|fp16", read_dtype),
    )
    bucket_bytes: int | None = option(
        None, Valid(_is_count, "a number of bytes, 1 or more, or None"), Flag(int, "BYTES")
    )
    attention: str = option(
        "auto", Valid(lambda value: value in ATTENTION, one_of(ATTENTION)), Flag(str, "|".join(ATTENTION))
    )
    experts: str | None = option(
        None,
        Valid(lambda value: value is None or isinstance(value, str), "an axis of the mesh, several joined, or None"),
        Flag(str, "AXIS|AXIS:AXIS"),
    )
    expert_rows: float | None = option(
        None, Valid(_is_factor, "a factor of the mean rows, 1.0 or more, as 1.25; or None"), Flag(float, "FACTOR")
    )
    chunked_loss: bool | int | Literal["auto"] = option(
        False,
        Valid(
            lambda value: value in ("auto", True, False) or _is_count(value),
            'True, False, "auto", or the bytes of a chunk',
        ),
        Flag(str, "true|auto|BYTES", lambda text: {"true": True}.get(text.lower(), _number(text))),
    )
    compile: Compiler = option(
        "auto",
        Valid(lambda value: value in COMPILERS, one_of(COMPILERS), CompileError),
        Flag(str, "|".join(COMPILERS)),
    )

    def __post_init__(self) -> None:
        for each in fields(StepOptions):
            check_option(each.name, getattr(self, each.name))

    @property
    def step(self) -> StepKeywords:
        """These options alone, as keyword arguments of `autopar.parallelize` and others."""
        return cast(StepKeywords, {each.name: getattr(self, each.name) for each in fields(StepOptions)})

    @property
    def lines(self) -> list[str]:
        """The options as text, a line each. A function is told by its name: its address is another on each rank."""
        named = {name: _name_of(value) if callable(value) else value for name, value in self.step.items()}
        return [f"{name}={value}" for name, value in named.items()]

    @property
    def offloaded(self) -> Mapping[str, Any]:
        """How much of what waits in the host's memory: a part (a float), bytes (an int), or what patterns name; of
        parameters `DISK` where they lie in files."""
        wanted = (self.offload,) if isinstance(self.offload, str) else self.offload or ()
        return wanted if isinstance(wanted, Mapping) else dict.fromkeys(wanted, 1.0)

    @property
    def files(self) -> Path | None:
        """The folder in whose files parameters and gradients lie; None where these are in memory."""
        return Path(self.offload_dir or ".") if self.offloaded.get("parameters") == DISK else None

    @property
    def low_dtype(self) -> Dtype | None:
        """The short float in which products are computed; None if they are as in the model."""
        return read_dtype(self.precision) if self.precision in ("bf16", "fp16") else None

    @property
    def sums_dtype(self) -> Dtype | None:
        """The shortest dtype in which gradients may be summed; None if they are as they come."""
        return None if self.low_dtype is None and self.reduce_dtype == _float32() else self.reduce_dtype


# What a plan decides, each as it is where no plan says otherwise.
PLANNED: Mapping[str, Any] = {
    name: StepOptions.__dataclass_fields__[name].default
    for name in (
        "microbatches", "slices", "schedule", "chunks", "zero", "reshard_after_forward", "recompute",
        "sequence_parallel", "stage_memory", "offload", "offload_dir", "horizon",
    )
}  # fmt: skip


class StepKeywords(TypedDict, total=False):
    """The fields of `StepOptions` again: type checkers read no TypedDict off a dataclass. A test compares them."""

    shard: Shard | None
    batch_dims: BatchDims
    sequence_parallel: SequenceParallel
    specialize: bool
    microbatches: int | None
    slices: Slices
    batch_statistics: str
    schedule: ScheduleLike
    stages: Sequence[str] | None
    chunks: int | None
    stage_memory: int | None
    zero: int | None
    reshard_after_forward: Reshard
    recompute: Recompute
    offload: Offload
    offload_dir: str | Path | None
    horizon: Horizon
    memory: Memory
    precision: str | None
    reduce_dtype: Dtype
    bucket_bytes: int | None
    attention: str
    experts: str | None
    expert_rows: float | None
    chunked_loss: bool | int | Literal["auto"]
    compile: Compiler


def check_option(name: str, value: Any) -> None:
    """Raise the error for a value that an option cannot have."""
    each = StepOptions.__dataclass_fields__[name]
    valid = each.metadata["valid"]
    if valid is not None and not (value is None and each.default is None):
        valid.check(name, value)


@functools.cache
def option_texts() -> Mapping[str, str]:
    """What each option means, by name: its entry in the docstring. Empty where Python runs without docstrings."""
    entries = _ENTRY.findall(inspect.cleandoc(StepOptions.__doc__ or ""))
    return {name: re.sub(r"\s+", " ", text) for name, text in entries}


def flag_name(name: str) -> str:
    """How the command line spells an option; what is True by default is turned off: `--no-reshard-after-forward`."""
    is_on = StepOptions.__dataclass_fields__[name].default is True
    return f"--{'no-' * is_on}{name.replace('_', '-')}"


def short_text(name: str) -> str:
    """The first sentence of what an option means, for the help of the command line."""
    return _SENTENCE_END.split(option_texts().get(name, ""))[0]
