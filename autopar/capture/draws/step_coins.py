"""The coins of a step: joined into its program, or decided before it by the seed, which all ranks have.

A coin is the truth of a tensor that hangs on random numbers alone. What it comes up as at a step the counter-based
generator says from the seed and the number of the step, before anything of the step is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx

from autopar.capture.draws.joins import CoinJoin, CoinPlan, Sides
from autopar.capture.draws.trail import Trail
from autopar.capture.draws.uses import Uses
from autopar.capture.ops.canonical import filled, own_dtype
from autopar.capture.refusals.location import Line
from autopar.capture.trace.normalise import check_drawn_by_seed, is_mutable
from autopar.capture.trace.tracer import Tracer
from autopar.errors import CaptureError
from autopar.torch_compat import no_function_modes, on_data, storage_of

Tensor = torch.Tensor
_ANY = (0, 0)  # the seed where no step is meant
_VARIANTS = 8
_BY_HOST = (
    "{}: random tensors and numbers that Python computes with (of its own random, of numpy, or a float of a random "
    "tensor) decide together what a step does, which no rank knows before it. Draw all that decides it by torch and "
    "compute with tensors (torch.rand(1) > torch.rand(1)), or draw all of it by Python's random."
)
_ROUNDS = 4  # plans of a model, each with the coins decided that the one before could not join


class CoinFound(BaseException):
    """Ends a run that met coins of which nothing is planned yet. No error: a user's `except Exception` must not stop
    it."""


@dataclass(frozen=True, slots=True)
class StepCoins:
    """The coins of a captured step. way: what computes them from the seed. reads: what is taken out of each. sides: as
    the program has them; None for one that is joined, and for a float. uses: of parameters, where coins leave calls out
    and gradients are taken. joins: by coin."""

    way: fx.GraphModule
    reads: tuple[Callable[[Tensor], Any], ...]
    sides: tuple[Any, ...]
    lines: tuple[Line | None, ...]
    uses: Uses | None
    joins: Mapping[int, CoinJoin]

    @property
    def is_alone(self) -> bool:
        """Whether one of them decides which program runs."""
        return any(side is not None for side in self.sides)

    def now(self, seed: Tensor) -> list[Any]:
        """What the coins come up as; those behind one with another side than the program's are not known."""
        with torch.no_grad():
            return [read(coin) for read, coin in zip(self.reads, self.way(seed.cpu()), strict=True)]

    def fit(self, seed: Tensor) -> bool:
        """True for a step whose coins come up as the program has them."""
        if not self.is_alone:
            return True
        return all(side in (None, now) for side, now in zip(self.sides, self.now(seed), strict=True))

    @property
    def has_floats(self) -> bool:
        """Whether Python computes with some."""
        return float in self.reads

    def floats(self, seed: Tensor) -> dict[int, float]:
        """What those are that Python computes with."""
        now = self.now(seed) if self.has_floats else []
        return {coin: value for coin, value in enumerate(now) if self.reads[coin] is float}

    def skips(self, seed: Tensor) -> dict[int, int]:
        """The random ops that the plain module leaves out in a step, by how many there were before. The numbers of
        those behind are as in the program, which leaves out nothing."""
        joins = [join for join in self.joins.values() if join.draws]
        now = self.now(seed) if joins else []
        return {join.before: join.draws for join in joins if now[join.coin] != join.keeps}

    def left_out(self, seed: Tensor) -> frozenset[str]:
        """The parameters that a step does not use."""
        return frozenset() if self.uses is None else self.uses.unused(self.now(seed))

    def check(self, drawn: Sequence[Tensor]) -> None:
        """Raise CaptureError where tensors that the host draws in each step stand behind coins."""
        constants = [getattr(self.way, node.target) for node in self.way.graph.nodes if node.op == "get_attr"]
        if any(constant is tensor for constant in constants for tensor in drawn):
            raise CaptureError(_BY_HOST.format(_places(self.lines)))

    def notes(self) -> list[str]:
        """What is said of them."""
        joined = [self.lines[coin] for coin in self.joins]
        alone = [(line, side) for line, side in zip(self.lines, self.sides, strict=True) if side is not None]
        said = []
        if joined:
            said.append(
                f"{_places(joined)}: a random number decides whether calls are left out. One program makes all of "
                f"them, and takes their results or not; a parameter that a step leaves out has no gradient in it"
            )
        if alone:
            said.append(
                f"{_places([line for line, _ in alone])}: a random number decides which calls a step makes, which "
                f"cannot be one program: there is one for each way ({len(alone)} decisions), compiled when it is first "
                f"drawn"
            )
        return said


@dataclass(slots=True)
class Coins:
    """The coins of one capture. seed: of the step that is meant. trail: of the run that goes on."""

    seed: tuple[int, int] = _ANY
    variant: int = 0  # which of the other floats are taken, by which it is seen what hangs on them; 0: the step's own
    plan: CoinPlan = field(default_factory=lambda: CoinPlan({}, frozenset()))
    is_final: bool = False  # the plan is
    is_sought: bool = False  # a run met coins
    trail: Trail | None = None
    decided: dict[int, Any] = field(default_factory=dict)
    others: dict[int, list[float]] = field(default_factory=dict)  # of coins that are floats, those of other steps
    _tracer: Tracer | None = None
    _pending: dict[int, CoinJoin] = field(default_factory=dict)  # by segment
    _inputs: dict[int, Tensor] = field(default_factory=dict)
    _rounds: int = 0

    def start(self, inputs: dict[int, Tensor], tracer: Tracer | None = None, sides: Sides | None = None) -> None:
        """A run begins. inputs: by the ids of tensors, what calls take in their place. tracer: of a trace. sides: those
        of a run that is compared with others."""
        self._tracer, self._inputs, self._pending = tracer, inputs, {}
        if not self.is_sought:
            return
        if tracer is not None:
            self.decided, self.others = {}, {}
        self.trail = Trail(self._side if sides is None else partial(_given, sides))
        if sides is None and self.is_final:
            self._pending = {join.coin + 1: join for join in self.plan.joins.values()}
            pairs = [pair for join in self._pending.values() for pair in join.pairs]
            self.trail.wanted = {place for pair in pairs for place in pair}

    def take(self, tensor: Tensor, line: Line | None, read: Callable[[Any], Any]) -> Any:
        """What `read` takes out of a coin. Raises CoinFound for the first of all."""
        if self.trail is None:
            raise CoinFound
        return self.trail.coin(tensor, line, read)

    def join(self, where: Callable[..., Tensor]) -> None:
        """Choose between the sides of a coin, if all is computed that one of them leaves out. where: torch's."""
        trail = self.trail
        if not self._pending or trail is None or trail.is_idle:
            return
        segment, number = trail.at
        join = self._pending.get(segment)
        if join is None or number < join.end:
            return
        del self._pending[segment]
        with trail.idle():
            coin = trail.coins[join.coin].reshape(())
            coin = coin if coin.dtype == torch.bool else coin != 0
            for v, u in join.pairs:
                kept, instead = trail.found[v], trail.found[u]
                instead = self._inputs.get(id(instead), instead)
                sides = (kept, instead) if join.keeps else (instead, kept)
                joined = self._inputs[id(kept)] = where(coin, *sides)
                trail.joined(joined, v)

    def left(self, results: Sequence[Any]) -> list[Any]:
        """What a run gives, with the sides of its coins joined. Raises CoinFound if the plan is not made yet."""
        if self.trail is None:
            return list(results)
        self.join(torch.where)
        self.trail.leave(results)
        if self._tracer is not None and not self.is_final:
            raise CoinFound
        return [self.joined(item) for item in results]

    def joined(self, item: Any) -> Any:
        """What is used in place of a tensor."""
        return self._inputs.get(id(item), item) if self.trail is not None and isinstance(item, Tensor) else item

    def look(self, planned: Callable[[Sides], CoinPlan]) -> None:
        """CoinPlan what to do about the coins that a trace met. planned: the plan, if these are decided."""
        if not self.is_sought:
            self.is_sought = True
            return
        self._rounds += 1
        self.plan = planned(self.decided) if self._rounds < _ROUNDS else CoinPlan({}, frozenset())
        self.is_final = not self.plan.joins or self.plan.alone == frozenset(self.decided)

    def planned(self) -> Callable[[], Coins]:
        """Makes coins of the same plan, for another run."""
        seed, plan, decided, is_final, is_sought = self.seed, self.plan, self.decided, self.is_final, self.is_sought
        return lambda: Coins(seed, plan=plan, is_final=is_final, is_sought=is_sought, decided=dict(decided))

    def dismiss(self) -> None:
        """Forget the tensors of the capture, which is over."""
        self.trail, self._tracer, self._inputs, self._pending = None, None, {}, {}

    def _side(self, coin: int, tensor: Tensor, read: Callable[[Any], Any]) -> Any:
        """Take the planned side; of a coin that decides programs, the one that comes up with the seed."""
        is_alone = coin in self.plan.alone or (self.is_final and not self.plan.joins) or read is not bool
        if not is_alone:
            return self.plan.side(coin)
        if coin not in self.decided and self._tracer is not None:
            way = _way(self._tracer, [tensor]).forward  # called itself, a module with constants were another model
            with on_data(), no_function_modes():
                self.decided[coin] = read(way(torch.tensor(self.seed, device="cpu"))[0])
                if read is float:
                    first, second = self.seed
                    seeds = ((first, second + step) for step in range(1, _VARIANTS + 1))
                    self.others[coin] = [read(way(torch.tensor(seed, device="cpu"))[0]) for seed in seeds]
        if self.variant and coin in self.others:
            return self.others[coin][self.variant % _VARIANTS]
        return self.decided.get(coin, read(0))

    def of_step(self, names: Sequence[str | None]) -> StepCoins | None:
        """The coins of the step that was traced last; None if there are none. names: of the trained parameters among
        the inputs, by their numbers."""
        if self.trail is None or self._tracer is None or not self.trail.coins:
            return None
        joins, trail = self.plan.joins, self.trail
        sides = tuple(
            None if coin in joins or read is float else side
            for coin, (side, read) in enumerate(zip(trail.sides, trail.reads, strict=True))
        )
        has_unused = bool(names) and any(join.pairs for join in joins.values())
        uses = Uses.of(trail, joins, names) if has_unused else None
        way = _way(self._tracer, trail.coins)
        return StepCoins(way, tuple(trail.reads), sides, tuple(trail.lines), uses, joins)


def _given(sides: Sides, coin: int, _: Tensor, read: Callable[[Any], Any]) -> Any:
    return sides.get(coin, read(0))


def _way(tracer: Tracer, coins: Sequence[Tensor]) -> fx.GraphModule:
    """What computes coins from the seed, on the host. Raises CaptureError for one that is drawn otherwise."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    seed = graph.placeholder("seed")
    wanted = [node for node in map(tracer.node_of, coins) if node is not None]
    needed = _needed(tracer, wanted)
    for node in tracer.graph.nodes:
        if node not in needed:
            continue
        if node.op == "placeholder":
            copies[node] = seed
            continue
        check_drawn_by_seed(node)
        call = _filled(node)
        if call is None:
            copied = copies[node] = graph.node_copy(node, copies.__getitem__)
            copied.kwargs = {**copied.kwargs, **own_dtype(node)}
        else:
            copied = copies[node] = graph.call_function(call[0], call[1], {**call[2], "device": "cpu"})
        copied.meta.clear()  # it would hold tensors of the trace
        if "device" in copied.kwargs:
            copied.kwargs = {**copied.kwargs, "device": "cpu"}
    graph.output(tuple(map(copies.__getitem__, wanted)))
    return fx.GraphModule(tracer.root, graph)


def _needed(tracer: Tracer, wanted: list[fx.Node]) -> set[fx.Node]:
    """The nodes behind some others, with those that write into their memory."""
    order = {node: at for at, node in enumerate(tracer.graph.nodes)}
    last = max(map(order.__getitem__, wanted), default=0)
    writers = [node for node in order if is_mutable(node) and order[node] <= last]
    needed, pending = set[fx.Node](), list(wanted)
    while pending:
        while pending:
            node = pending.pop()
            if node not in needed:
                needed.add(node)
                pending += () if _filled(node) else node.all_input_nodes
        memories = {_memory(node) for node in needed} - {None}
        pending = [node for node in writers if node not in needed and _memory(node) in memories]
    return needed


def _filled(node: fx.Node) -> Any:
    """A call that asks a tensor for its form alone, without that tensor."""
    return filled(node) if node.op == "call_function" else None


def _memory(node: fx.Node) -> int | None:
    value = node.meta.get("val")
    return storage_of(value) if isinstance(value, Tensor) else None


def _places(lines: Sequence[Line | None]) -> str:
    return ", ".join(dict.fromkeys(f"{line[0]}:{line[1]}" if line else "an unknown line" for line in lines))
