"""All plans for a number of devices: sizes and order of axes, ZeRO, recomputation, micro-batches, schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, NamedTuple, TypeVar

from autopar.errors import divisors
from autopar.ir.mesh import CONTEXT, EXPERT, ULYSSES
from autopar.ir.ops.measure import human
from autopar.ir.options import DISK, STAGE, STAGE_AND_LAYERS
from autopar.passes.search.heads import head_splits
from autopar.planning.space.axis_orders import ORDER, orders
from autopar.planning.space.deal import Ranges
from autopar.planning.space.micro import HIGH
from autopar.planning.space.split import Split

T = TypeVar("T")
LAYERS = "layers"  # of the equal layers the first ones recompute more than the others, as few as memory allows
RECOMPUTE = ("none", "selective", "full", LAYERS)
# Policies of a whole stage, and that by which its second forward pass keeps what its gradients read. They are drawn
# where they are asked for: of plans whose micro-batches wait for one another.
BY_STAGE = {STAGE: "none", STAGE_AND_LAYERS: "full"}
ZERO = (0, 1, 2, 3)
# Of a pipeline, with the stages that each rank has: a few numbers of them where a schedule takes any.
PIPELINES = (
    ("1f1b", 1), *(("interleaved-1f1b", chunks) for chunks in (2, 3, 4)), ("zb-h1", 1), ("zb-h2", 1), ("zb-v", 2),
)  # fmt: skip
GPIPE = "gpipe"  # of models whose backward passes read what all forward passes add up to
PAIRED = "dualpipev"  # is tried on what was found (`report/emitted.py`)
MOST_ROWS = HIGH  # of a micro-batch on one rank, where a batch has not many more
SHORT = {
    "none": "", "selective": "selective", "full": "recompute", LAYERS: "",
    STAGE: "stage recomputed", STAGE_AND_LAYERS: "stage and layers recomputed",
}  # fmt: skip
RESHARD = "reshard_after_forward"
OFFLOAD, NOTHING, STATES, HOSTED, ACTIVATIONS = "offload", "none", "optimizer", "parameters", "activations"
ON_DISK = f"={DISK}"
# What may wait in the host's memory, or in files of the machine's disk, as `--offload` has it: activations, of which
# `memory=` decides how many; states; parameters with all that is behind them.
ALONE = (STATES, ACTIVATIONS, HOSTED)
TOGETHER = (f"{ACTIVATIONS},{STATES}", f"{ACTIVATIONS},{HOSTED}")
IN_FILES = (STATES + ON_DISK, HOSTED + ON_DISK)
OFFLOADS = (NOTHING, *ALONE, *TOGETHER, *IN_FILES)
DECIDES_ROWS = {"dp", "fsdp", CONTEXT, ULYSSES, "rows", "order"}


@dataclass(frozen=True, slots=True)
class Again:
    """Two policies of recomputation: `more` for some of a model's equal layers, `less` for all else. ranges: of these
    layers; none while it is not decided. layers: all equal ones. first: the path of the first of them."""

    first: str
    layers: int
    ranges: Ranges = ()
    more: str = "full"
    less: str = "none"

    @property
    def count(self) -> int:
        """The number of the layers that compute more again."""
        return sum(end - begin for begin, end in self.ranges)

    @property
    def policies(self) -> dict[str, str]:
        """The policies as `recompute=` has them: by pattern of modules."""
        stack, dot, number = self.first.rpartition(".")
        at = int(number)
        named = {f"{stack}{dot}{at + begin}-{at + end - 1}": self.more for begin, end in self.ranges}
        return {**named, "*": self.less}

    def __str__(self) -> str:
        others = f", {SHORT[self.less]} others" if SHORT[self.less] else ""
        return f"{SHORT[self.more]} {self.count or 'some'} of {self.layers} layers{others}"


class Candidate(NamedTuple):  # of which there are a million: made and hashed in a third of a dataclass's time
    """A plan. rows: of a micro-batch on one rank; with cp or ulysses of it their ranks, each of which has a part of
    every row. microbatches: of a step. sequence: activations lie split over tp. fsdp: states are split over it, and
    replicated over dp. order: of the axes, outermost first. chunks: stages of each rank of a pipeline. again: how many
    layers are, of recompute="layers". ep: ranks of dp, over which experts are split as well. experts: or the axes that
    are there, by the name of their group. reshard_after_forward:
    with zero=3, False gathers parameters once a step, as zero=2 does. offload: states, or parameters, that wait in the
    host's memory, or in files of a folder. memory: bytes that the compiler keeps to by activations in the host's memory
    and values computed again (`memory=`); 0 where none wait there. moved: the part of them that does, with `recompute`.
    """

    dp: int
    tp: int
    pp: int
    zero: int
    recompute: str
    rows: int
    microbatches: int
    schedule: str = "1f1b"
    sequence: bool = False
    fsdp: int = 1
    cp: int = 1
    order: tuple[str, ...] = ORDER
    chunks: int = 1
    again: Again | None = None
    reshard_after_forward: bool = True
    ulysses: int = 1
    ep: int = 1
    offload: str = NOTHING
    experts: str = ""
    folder: str = ""
    memory: int = 0
    moved: float = 0.0

    @property
    def waits(self) -> str:
        """What waits elsewhere, one of `OFFLOADS`."""
        waiting = [ACTIVATIONS] * bool(self.memory) + [self.offload] * (self.offload != NOTHING)
        return (",".join(waiting) or NOTHING) + ON_DISK * bool(self.folder)

    @property
    def is_ordered(self) -> bool:
        """True for a step whose order is that of a schedule: of a pipeline, or of pairs without one."""
        return self.pp > 1 or self.schedule == PAIRED

    @property
    def is_hosted(self) -> bool:
        """True if parameters wait in the host's memory, or in files, with gradients and states."""
        return self.offload == HOSTED

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """The axes with more than one rank, outermost first: the last ones lie within a node."""
        axes = _axes(self.order, (self.dp, self.fsdp, self.cp, self.ulysses, self.tp, self.pp))
        return axes if self.ep == 1 else tuple(_with_experts(axes, self.ep))

    @property
    def split(self) -> Split:
        """What decides, with rows and recomputation, what a micro-batch costs."""
        return Split.of(self.tp, self.sequence, self.cp, self.ulysses, self.axes)

    def ranks_of(self, is_summed: bool, has_pairs: bool) -> Split:
        """The split of its programs. is_summed, has_pairs: as of `Micros`."""
        split = self.split.summed(self.axes) if is_summed else self.split
        return split._replace(batch=self.rows * self.microbatches * split.data) if has_pairs else split

    @property
    def mesh(self) -> str:
        return ",".join(f"{axis}={size}" for axis, size in self.axes) or "dp=1"

    @property
    def context(self) -> int:
        """The ranks that have a part of each sequence."""
        return self.cp * self.ulysses

    @property
    def policies(self) -> tuple[str, str]:
        """The policies of most of the model, and of the layers that compute more again, "" if there are none."""
        if self.again is None:
            return self.recompute, ""
        return self.again.less, self.again.more if self.again.ranges else ""

    @property
    def ranges(self) -> Ranges:
        """The ranges of the layers that compute more again."""
        return self.again.ranges if self.again else ()

    @property
    def twin(self) -> Candidate | None:
        """The plan with the ranks of ulysses as ranks of cp; None if it has none, or they do not lie inside of cp."""
        if self.ulysses == 1:
            return None
        names = [axis for axis, _ in self.axes]
        if self.cp > 1 and names.index(CONTEXT) + 1 != names.index(ULYSSES):
            return None
        order = tuple(axis for axis in self.order if axis != CONTEXT)
        order = tuple(CONTEXT if axis == ULYSSES else axis for axis in order)
        return self._replace(cp=self.context, ulysses=1, order=(ULYSSES, *order))

    @property
    def adds(self) -> bool:
        """True if a micro-batch reads all gradients of those before it. With ZeRO-2 and 3 these are a rank's part of
        them, which takes no time here."""
        return self.microbatches > 1 and self.zero < 2

    @property
    def data(self) -> int:
        """The ranks over which gradients are sums."""
        return self.dp * self.fsdp * self.context

    @property
    def shards(self) -> int:
        """The ranks over which ZeRO splits states."""
        return (self.fsdp if self.fsdp > 1 else self.dp) * self.context if self.zero else 1

    @property
    def frozen_shards(self) -> int:
        """The ranks over which parameters lie split that are not trained."""
        return self.shards if self.zero == 3 else 1

    @property
    def gathers_again(self) -> bool:
        """True if parameters are gathered for each use, as `Plan.gathers_again` of a program."""
        return self.zero == 3 and self.reshard_after_forward

    @property
    def is_alone(self) -> bool:
        """True of a step that is one graph: all that it moves goes under its passes."""
        return self.pp == 1 and self.microbatches == 1

    @property
    def parts(self) -> int:
        """The parts of which a rank keeps one of each gradient, once it has moved."""
        return self.shards if self.zero >= 2 or self.is_alone else 1

    @property
    def size(self) -> int:
        """All ranks."""
        return self.data * self.tp * self.pp

    @property
    def halves(self) -> bool:
        """True if gradients of weights are computed apart from those of inputs."""
        return self.schedule.startswith("zb") or self.schedule == PAIRED

    def options(self) -> dict[str, Any]:
        """The options of `parallelize` beside the mesh."""
        options: dict[str, Any] = {"recompute": self.again.policies if self.again else self.recompute}
        if self.memory:
            options = {"memory": self.memory}
        if self.data > 1:
            options["zero"] = self.zero
        if not self.reshard_after_forward:
            options["reshard_after_forward"] = False
        if self.microbatches > 1:
            options["microbatches"] = self.microbatches
        if self.is_ordered:
            options["schedule"] = self.schedule
        if self.chunks > 1:
            options["chunks"] = self.chunks
        if self.tp > 1:
            options["sequence_parallel"] = self.sequence
        if self.offload != NOTHING:
            options["offload"] = {HOSTED: DISK} if self.folder and self.is_hosted else self.offload
        if self.folder:
            options["offload_dir"] = self.folder
        if self.experts:
            options["experts"] = self.experts
        return options

    @property
    def choices(self) -> int:
        """How many axes and options a user has to write for it."""
        defaults = {"recompute": "none", "zero": 0, "sequence_parallel": False, "schedule": "1f1b"}
        return len(self.axes) + sum(value != defaults.get(name) for name, value in self.options().items())

    def __str__(self) -> str:
        words = [self.mesh, f"zero={self.zero}" if self.data > 1 else "", "" if self.memory else SHORT[self.recompute]]
        words += ["" if self.reshard_after_forward else "gathered once"]
        words += [str(self.again or "")]
        words += ["whole sequences" if self.tp > 1 and not self.sequence else ""]
        words += [f"{self.microbatches} x {self.rows} rows", self.schedule if self.is_ordered else ""]
        words += [f"{self.chunks} chunks" if self.chunks > 2 else ""]
        words += [f"{self.offload} {'on disk' if self.folder else 'in host'}" if self.offload != NOTHING else ""]
        words += [f"memory={human(self.memory)}" if self.memory else ""]
        words += [f"experts over {self.experts}" if self.experts else ""]
        return " ".join(word for word in words if word)


@cache
def _axes(order: tuple[str, ...], sizes: tuple[int, ...]) -> tuple[tuple[str, int], ...]:
    named = dict(zip(("dp", "fsdp", CONTEXT, ULYSSES, "tp", "pp"), sizes, strict=True))
    return tuple((axis, named[axis]) for axis in order if named[axis] > 1)


def _with_experts(axes: tuple[tuple[str, int], ...], ep: int) -> Iterator[tuple[str, int]]:
    """The axes of a mesh with some of the ranks of dp as an axis of experts, inside of it."""
    for axis, size in axes:
        if axis != "dp":
            yield axis, size
            continue
        if size > ep:
            yield axis, size // ep
        yield EXPERT, ep


@dataclass(frozen=True, slots=True)
class Model:
    """What of a model says which plans there are. layers: equal ones; 0 if it has none, and no pipeline is planned
    then. whole: why no plan splits sequences over cp; coupled: why none computes the rows of a batch some at a time.
    Both are empty where plans may. waits: as of `Micros`. first: the path of the first of the equal layers. heads: (of
    keys, queries that share one) of all attentions, where ulysses may split them. alone: True if it may be better
    without cp, which splits no heads then."""

    layers: int
    whole: str = ""
    coupled: str = ""
    first: str = ""
    heads: frozenset[tuple[int, int]] = frozenset()
    alone: bool = False
    waits: bool = False

    @property
    def again(self) -> Again | None:
        """None where no part of its layers could be computed again."""
        return Again(self.first, self.layers) if self.first and self.layers > 1 else None


@cache
def _shared(context: int, tp: int, model: Model) -> tuple[tuple[int, int], ...]:
    """The sizes of cp and ulysses that are so many ranks together, without those that heads do not allow."""
    most = context if model.alone else context // 2
    sizes = [
        n for n in range(2, most + 1) if context % n == 0 and all(n in head_splits(*heads, tp) for heads in model.heads)
    ]
    return tuple((context // n, n) for n in sizes) if model.heads else ()


@dataclass(frozen=True, slots=True)
class Space:
    """What there is to choose from. batch: rows of a step. node: devices of one. fixed: sizes of axes and options that
    are decided (`fixed.py`). limit: bytes that a rank may hold. folder: on the machine's disk. among: candidates of the
    space where nothing waits elsewhere: if they are said, no others are drawn here, where states or activations do."""

    gpus: int
    batch: int
    node: int
    model: Model
    fixed: Mapping[str, Any]
    limit: float = math.inf
    folder: str = ""
    among: Sequence[Candidate] | None = None

    def candidates(self) -> Iterator[Candidate]:
        """All of them, in no order that means anything."""
        for one in self.drawn():
            yield one
            yield from self.shared(one)

    def drawn(self) -> Iterator[Candidate]:
        """All but those that `shared` makes of these.

        A plan with zero=3 has `reshard_after_forward=False` only where that is decided: the compiler emits the programs
        of zero=2 then, which are there already.

        A part of several rows is in no plan: where each of g ranks of cp has a part of g rows, it could as well have
        one of them whole, as a rank of dp, with the same work, the same memory, and no collective within a row.
        """
        if self.among is not None:
            offload, memory = self._offload, self._memory
            allowed = (one for one in self.among if one.recompute != LAYERS or not memory)
            yield from (one._replace(offload=offload, memory=memory) for one in allowed)
            return
        asked: Sequence[str] = self.fixed.get("order", ())
        for sizes in self._sizes():
            for order in orders(sizes, self.node, asked):
                yield from self._with(sizes, order)

    def shared(self, candidate: Candidate) -> Iterator[Candidate]:
        """The same plan with a part of its ranks of cp on ulysses, inside of cp."""
        for cp, ulysses in self.parts(candidate):
            outer = [axis for axis in candidate.order if axis != ULYSSES]
            at = outer.index(CONTEXT) + 1
            yield candidate._replace(cp=cp, ulysses=ulysses, order=(*outer[:at], ULYSSES, *outer[at:]))

    def parts(self, candidate: Candidate) -> Sequence[tuple[int, int]]:
        """The sizes of cp and ulysses of those that `shared` makes.

        Without cp, ulysses moves what cp moves, or more: cp splits heads too where that moves fewer bytes. Only where
        `attention=` keeps cp from doing so (`Model.alone`) there are plans with ulysses alone.
        """
        if candidate.cp == 1 or candidate.ulysses > 1 or self._is_decided:
            return ()
        return _shared(candidate.cp, candidate.tp, self.model)

    @property
    def _is_decided(self) -> bool:
        """True if a person says what cp or ulysses is."""
        return not {CONTEXT, ULYSSES}.isdisjoint(self.fixed) or ULYSSES in self.fixed.get("order", ())

    def _context(self, left: int, tp: int) -> Iterator[tuple[int, int]]:
        """The sizes of cp and ulysses that are drawn, of so many ranks."""
        for context in [1] if self.model.whole else divisors(left, left):
            pairs = [(context, 1), *(_shared(context, tp, self.model) if self._is_decided else ())]
            if ULYSSES in self.fixed:  # if the heads cannot be split so, the compiler says why
                pairs = [(context // ulysses, ulysses) for ulysses in divisors(context, context)]
            yield from (pair for pair in pairs if self._may(CONTEXT, pair[0]) and self._may(ULYSSES, pair[1]))

    def _sizes(self) -> Iterator[dict[str, int]]:
        stages = 1 if self.model.coupled else max(self.model.layers, 1)
        for tp in self._open("tp", divisors(self.gpus, 2 * self.node)):
            for pp in self._open("pp", divisors(self.gpus // tp, stages)):
                left = self.gpus // tp // pp
                for cp, ulysses in self._context(left, tp):
                    own = left // cp // ulysses
                    for fsdp in self._open("fsdp", divisors(own, own)):
                        dp = own // fsdp
                        is_new = fsdp == 1 or dp > 1  # of fsdp alone nothing else comes than of dp alone
                        if is_new and self.batch % (dp * fsdp) == 0 and self._may("dp", dp):
                            yield {"pp": pp, "dp": dp, "fsdp": fsdp, CONTEXT: cp, ULYSSES: ulysses, "tp": tp}

    def _with(self, sizes: Mapping[str, int], order: tuple[str, ...]) -> Iterator[Candidate]:
        own = self.batch // sizes["dp"] // sizes["fsdp"]
        context = sizes[CONTEXT] * sizes[ULYSSES]
        is_split = sizes["dp"] * context > 1
        zero = ZERO[1:] if sizes["fsdp"] > 1 else ZERO if is_split else ZERO[:1]
        reshard, offload, memory = self._may(RESHARD, True), self._offload, self._memory
        folder = self.folder if self._waits.endswith(ON_DISK) else ""
        if offload == HOSTED:  # gradients of several micro-batches would add up on the device
            zero = (3,) if is_split else (0,)
        pipelines = self._pipelines(sizes["pp"])
        of_axes = list(
            product(
                self._open("zero", zero if reshard else set(zero) & {3}),
                self._open("recompute", self._policies(sizes["pp"], memory)),
                self._open("sequence", (True, False) if sizes["tp"] > 1 else (False,)),
            )
        )
        for rows in self._open("rows", self._rows(own)):
            if not self._may("microbatches", own // rows) or not self._is_best(rows, context):
                continue
            for schedule, chunks in pipelines:
                is_whole = sizes["pp"] > 1 or own // rows == 1
                if self._fills(sizes["pp"], own // rows, schedule, chunks) and (offload != HOSTED or is_whole):
                    for zero_, recompute, sequence in of_axes:
                        if recompute in BY_STAGE and sizes["pp"] == 1 and own == rows:
                            continue  # nothing lies between the passes
                        yield Candidate(
                            sizes["dp"], sizes["tp"], sizes["pp"], zero_, recompute, rows, own // rows, schedule,
                            sequence, sizes["fsdp"], sizes[CONTEXT], order, chunks,
                            self.model.again if recompute == LAYERS else None, reshard, sizes[ULYSSES], 1, offload,
                            "", folder, memory,
                        )  # fmt: skip

    def _pipelines(self, pp: int) -> Sequence[tuple[str, int]]:
        """The schedules, and the stages that each rank has, that the model can take; GPipe's is no other's choice."""
        if self.model.waits or (pp > 1 and self.fixed.get("schedule") == GPIPE):
            return [(GPIPE, 1)]
        return PIPELINES if pp > 1 else PIPELINES[:1]

    @property
    def _waits(self) -> str:
        return str(self.fixed.get(OFFLOAD, NOTHING))

    @property
    def _offload(self) -> str:
        """The states, or parameters, that wait elsewhere."""
        return next((what for what in (STATES, HOSTED) if what in self._waits), NOTHING)

    @property
    def _memory(self) -> int:
        """The limit that activations keep to; 0 if none of them wait elsewhere."""
        return int(self.limit) if ACTIVATIONS in self._waits and math.isfinite(self.limit) else 0

    def _policies(self, pp: int, memory: int) -> Sequence[str]:
        policies = RECOMPUTE if self._may_mix(pp) and not memory else RECOMPUTE[:-1]
        return (*policies, *BY_STAGE) if self.fixed.get("recompute") in BY_STAGE else policies

    def _may_mix(self, pp: int) -> bool:
        """True if a part of the layers may be computed again. Of pipelines that is drawn where it is asked for; of the
        fastest ones it is tried in the end (`search._refine`)."""
        return self.model.again is not None and (pp == 1 or self.fixed.get("recompute") == LAYERS)

    def _open(self, name: str, choices: Iterable[T]) -> list[T]:
        """The choices that what is fixed allows."""
        return [choice for choice in choices if self._may(name, choice)]

    def _may(self, name: str, value: Any) -> bool:
        return bool(self.fixed.get(name, value) == value)

    def _rows(self, own: int) -> list[int]:
        """The rows of a micro-batch, of those of a rank: as many as one of all devices has, if that is more."""
        return [own] if self.model.coupled else divisors(own, max(MOST_ROWS, self.batch // self.gpus))

    def _is_best(self, rows: int, context: int) -> bool:
        return math.gcd(rows, context) == 1 or not DECIDES_ROWS.isdisjoint(self.fixed)

    def _fills(self, pp: int, microbatches: int, schedule: str, chunks: int) -> bool:
        """True if this schedule is not excluded, and a pipeline has what it needs for each of its ranks."""
        if not self._may("schedule", schedule) or not self._may("chunks", chunks):
            return False
        if pp == 1:
            return True
        if chunks > 1 and pp * chunks > self.model.layers:
            return False
        if schedule == "interleaved-1f1b" and microbatches % pp:
            return False
        return microbatches >= pp
