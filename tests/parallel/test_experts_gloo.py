"""Experts split over local Gloo processes: what users train, clip, save and take out, and what moves between ranks."""

from __future__ import annotations

import copy
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
import train_experts
from gpt import GPTConfig
from mixtures import Kind, Mixture, mixture_case, products
from processes import Ranks
from side_by_side import assert_same_state
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import autopar
from autopar.errors import AutoparError, BatchError, CompileError, PlanError
from autopar.ir.mesh import parse_mesh
from autopar.ir.ops.measure import PLACES
from autopar.ir.ops.ops import mesh_op_name
from autopar.ir.program import record
from autopar.report.memory.assumed_rows import RowCounts
from autopar.report.memory.estimate import memory_report
from autopar.runtime.collectives import rows_to_owners
from autopar.runtime.ranks import distributed
from benchmarks.memory import measure
from benchmarks.mixtures import AT_ONCE

pytestmark = pytest.mark.gloo

PLAIN, STEPS, LIMIT = Kind(), 2, 0.3
# (mesh, how rows are routed, options): ranks without rows, one expert a row, none but one rank's experts.
# Two blocks over ep and over stages; what is sent and read is counted by block.
TABLE: list[tuple[str, Kind, dict[str, Any]]] = [
    ("ep=2,cp=2", Kind(aux=True), {}),
    ("ep=4", Kind(chosen=3, blocks=1), {"recompute": "full"}),
    ("ep=4", Kind(chosen=1, skew=50, blocks=1), {}),  # all rows go to two experts, of one rank
    ("dp=2,ep=2", Kind(bias=True, shared=True, blocks=1), {"zero": 3}),
    ("fsdp=2,ep=2", Kind(chosen=3, experts=4, blocks=1), {"reshard_after_forward": False}),
    ("ep=2,tp=2", Kind(skew=-1, blocks=1), {"sequence_parallel": True}),
    ("dp=2,ep=2", Kind(way="loop", chosen=3, blocks=1), {"zero": 2}),
    ("pp=2,ep=2", Kind(), {"microbatches": 2, "schedule": "1f1b"}),
    ("dp=2,fsdp=2", Kind(aux=True, blocks=1), {"experts": "dp:fsdp"}),
    ("ep=4", Kind(chosen=8, blocks=1), {}),  # each token goes to all
    ("dp=2,ep=2", Kind(chosen=4, skew=50, blocks=1), {}),  # half of the rows to two experts of one rank
    ("dp=2,cp=2", Kind(chosen=3, blocks=1), {"experts": "cp"}),  # a rank's rows are a piece of each of its samples
]
# Bytes of a layer for each row that leaves, and for each token: four trips of tokens, two numbers and a place a row.
FOUR = (2 * 8 + 4, 4 * 12 * 8)
SENT = {
    1: (2 * 8 + 4, 5 * 12 * 8),  # computed again, which needs no way back
    2: (4 * 12 * 8, 0),  # one expert a token
    8: (2 * 12 * 8 + 4, 2 * 12 * 8),  # over four ranks weights would cost more than the two trips that they save
}


def _made(kind: Kind, mesh: str, options: dict[str, Any]) -> tuple[Any, torch.optim.Optimizer, tuple[Tensor, Tensor]]:
    module, batch = mixture_case(kind)
    model = autopar.parallelize(module.double(), mesh, machine=AT_ONCE, **options)
    model.prepare(*batch)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2), batch


def _train(model: Any, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor], steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        if isinstance(model, autopar.ParallelModule):
            loss = model.forward_backward(*batch)
        else:
            loss = model(*batch)
            loss.backward()
        losses += [loss.item(), float(nn.utils.clip_grad_norm_(model.parameters(), LIMIT))]
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _plain(kind: Kind) -> tuple[nn.Module, torch.optim.Optimizer, tuple[Tensor, Tensor]]:
    module, batch = mixture_case(kind)
    module = module.double()
    return module, torch.optim.AdamW(module.parameters(), lr=1e-2), batch


def _chosen(kind: Kind) -> list[list[int]]:
    """How many rows choose each expert, by layer, in a first step."""
    module, _, batch = _plain(kind)
    rows: list[list[int]] = []

    def look(mixture: Mixture, args: tuple[Tensor], _: Any) -> None:
        experts = torch.topk((mixture.router(args[0]) + mixture.skew).softmax(-1), kind.chosen).indices
        rows.append(experts.flatten().bincount(minlength=kind.experts).tolist())

    for mixture in module.mixed:
        mixture.register_forward_hook(look)
    module(*batch)
    return rows


def _leaving(kind: Kind, mesh: str, axis: str) -> Tensor:
    """The rows whose expert is on another rank, and to how many other ranks tokens go, each once; over all ranks and
    layers of a first step."""
    module, _, batch = _plain(kind)
    parsed, count = parse_mesh(mesh), torch.zeros(2, dtype=torch.int64)
    ranks, data = parsed[axis], {name: size for name, size in parsed.axes if name in ("dp", "fsdp", "ep")}
    parts = int(torch.tensor(list(data.values())).prod())

    def look(mixture: Mixture, args: tuple[Tensor], _: Any) -> None:
        scores = mixture.router(args[0]) + mixture.skew
        owners = torch.topk(scores.softmax(-1), kind.chosen).indices.flatten(0, 1) // (kind.experts // ranks)
        if axis == "cp":  # in order: the sequence has no two pieces a rank
            length = batch[0].shape[1]
            own = (torch.arange(length) // (length // ranks)).repeat(len(owners) // length)
        else:  # the axis ep is the last one of the batch
            own = (torch.arange(parts) % ranks).repeat_interleave(len(owners) // parts)
        to = F.one_hot(owners, ranks).amax(1)
        count[0] += (owners != own[:, None]).sum()
        count[1] += to.sum() - to.gather(1, own[:, None]).sum()

    for mixture in module.mixed:
        mixture.register_forward_hook(look)
    module(*batch)
    return count


def _trips(compiled: Any, blocks: int) -> tuple[int, int]:
    """The bytes that a program sends of each row that leaves, and of each token, in a layer."""
    graphs = compiled.pipeline.graphs.values() if compiled.pipeline else [compiled.program]
    found = [0, 0]
    for node in (node for graph in graphs for node in graph.calls()):
        if mesh_op_name(node.target) == "token_places":
            found[0] += 4
        elif mesh_op_name(node.target) in ("dispatch", "combine"):
            of_tokens = len(node.args) > PLACES and node.args[PLACES] is not None
            found[of_tokens] += record(node).type.shape[1] * record(node).type.dtype.itemsize
    return found[0] // blocks, found[1] // blocks


def _table(rank: int) -> list[tuple[list[float], int, int, tuple[int, int]]]:
    """For each row of the table what a step's loss and norm are, how many bytes this rank sent to others, how often its
    host read counts, and what the program says that it sends; all else is compared here."""
    found = []
    for mesh, kind, options in TABLE:
        model, optimizer, batch = _made(kind, mesh, options)
        plain, its, _ = _plain(kind)
        with pytest.MonkeyPatch.context() as patch:
            sent, reads = _watch(patch)
            first = model.forward_backward(*batch).item()
        last = model.last
        assert [list(layer.by_expert) for layer in last.experts] == _chosen(kind), (mesh, kind)
        assert list(last.imbalance) == [f"mixed.{block}" for block in range(kind.blocks)], mesh
        expected = plain(*batch)
        expected.backward()
        assert first == pytest.approx(expected.item(), rel=1e-10), (mesh, kind)
        for (name, mine), whole in zip(model.named_parameters(), plain.parameters(), strict=True):
            if mine.grad is not None:  # another stage's
                torch.testing.assert_close(mine.grad.full_tensor(), whole.grad, rtol=1e-10, atol=1e-12, msg=name)
        model.zero_grad()
        plain.zero_grad()
        losses, wanted = _train(model, optimizer, batch, STEPS), _train(plain, its, batch, STEPS)
        assert losses == pytest.approx(wanted, rel=1e-9), (mesh, kind)
        assert_same_state(model, plain, "weight")
        found.append((losses, sum(sent), len(reads), _trips(model.compiled, kind.blocks)))
    return found


def _watch(patch: pytest.MonkeyPatch) -> tuple[list[int], list[int]]:
    """The bytes that rows take to other ranks, and the reads of counts."""
    sent: list[int] = []
    reads: list[int] = []
    move, count = distributed.dist.all_to_all_single, rows_to_owners._counted

    def moved(out: Tensor, x: Tensor, *splits: Any, group: Any, **rest: Any) -> Any:
        if splits:
            mine = splits[1][torch.distributed.get_rank(group)]
            sent.append((x.shape[0] - mine) * x[:1].numel() * x.itemsize if x.shape[0] else 0)
        return move(out, x, *splits, group=group, **rest)

    def counted(*args: Any) -> Tensor:
        reads.append(1)
        return count(*args)

    patch.setattr(distributed.dist, "all_to_all_single", moved)
    patch.setattr(rows_to_owners, "_counted", counted)
    return sent, reads


def test_steps_are_those_of_one_device(four: Ranks) -> None:
    """Losses, norms, gradients, weights; bytes equal those of counted tokens, four trips each, and one more where they
    go again, with weights, their gradients and places of rows; on each rank of tp; one read a layer."""
    by_rank = four.run(_table, timeout=300)
    for number, (mesh, kind, options) in enumerate(TABLE):
        rows = [found[number] for found in by_rank]
        assert all(one[0] == rows[0][0] for one in rows), mesh
        copies = dict(parse_mesh(mesh).axes).get("tp", 1)
        sent = torch.tensor(rows[0][3]) * _leaving(kind, mesh, options.get("experts", "ep"))
        assert sum(one[1] for one in rows) == copies * sent.sum(), (mesh, kind)
        assert rows[0][3] == SENT.get(number, FOUR), (mesh, kind)
        if "pp" not in mesh:
            assert [one[2] for one in rows] == [kind.blocks] * 4, (mesh, kind)


def _imbalance(rank: int) -> list[Any]:
    """Of rows that all choose the experts of one of the ranks; then before any step."""
    found = []
    for mesh in ("ep=4", "ep=2,tp=2", "dp=2,ep=2"):
        model, _, batch = _made(Kind(chosen=1, skew=50), mesh, {})
        with pytest.raises(AutoparError, match=r"^last is of a step, and no step was taken yet: call"):
            _ = autopar.parallelize(mixture_case(PLAIN)[0], mesh).last
        model.prepare(*batch)
        with pytest.raises(AutoparError, match=r"^last is of a step, and no step was taken yet: call"):
            _ = model.last
        model.forward_backward(*batch)
        found += [(layer.imbalance, len(layer.by_rank), layer.axis) for layer in model.last.experts]
        assert model.last is model.last and str(model.last).startswith("mixed.0  imbalance over ep"), str(model.last)
    return found


def test_how_unlike_ranks_are_busy(four: Ranks) -> None:
    """48 rows, of one rank: over four, of two, and of two of which each dp coordinate has half."""
    found = four.run(_imbalance)
    assert found == [[(4.0, 4, "ep")] * 2 + [(2.0, 2, "ep")] * 2 + [(2.0, 4, "ep")] * 2] * 4


def _twice(rank: int) -> list[list[Tensor]]:
    """Weights after three steps, of two runs."""
    runs = []
    for _ in range(2):
        model, optimizer, batch = _made(Kind(chosen=3), "dp=2,ep=2", {"zero": 1})
        _train(model, optimizer, batch, 3)
        runs.append([parameter.to_local().clone() for parameter in model.parameters()])
    return runs


def test_two_runs_have_the_same_bits(four: Ranks) -> None:
    for first, second in four.run(_twice):
        assert all(map(torch.equal, first, second))


def _twenty(rank: int) -> list[list[float]]:
    """The losses of 20 steps of AdamW, on an axis of experts and on one of data."""
    found = []
    for mesh in ("ep=4", "dp=4"):
        model, optimizer, batch = _made(Kind(bias=True, aux=True, chosen=3, blocks=1), mesh, {})
        found.append(_train(model, optimizer, batch, 20)[::2])
    return found


def test_where_experts_lie_changes_no_loss_of_twenty_steps(four: Ranks) -> None:
    for by_expert, by_sample in four.run(_twenty, timeout=120):
        assert by_expert[-1] < by_expert[0] and by_expert == pytest.approx(by_sample, rel=0, abs=1e-12)


def _example(rank: int) -> None:
    """Three steps of the example beside the plain module, in a few letters."""
    torch.manual_seed(0)
    plain = train_experts.MixtureGPT(GPTConfig(vocabulary=128, context=8, width=16))
    model = autopar.parallelize(copy.deepcopy(plain), "dp=2,ep=2", loss_fn=train_experts.loss_fn)
    data = train_experts.job().data
    assert data is not None
    for step in range(3):
        x, y = (part[:4, :8] for part in data(step))
        expected = train_experts.loss_fn(plain, x, y)
        expected.backward()
        assert model.forward_backward(x, y).item() == pytest.approx(expected.item(), rel=1e-5), step
    for (name, mine), whole in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), whole.grad, rtol=1e-4, atol=1e-6, msg=name)
    layers = model.last.experts
    assert [layer.module for layer in layers] == ["blocks.0.mixture", "blocks.1.mixture"]
    assert all(sum(layer.by_expert) == 4 * 8 * train_experts.CHOSEN for layer in layers)


def test_the_example_trains_as_on_one_device(four: Ranks) -> None:
    four.run(_example)


def _bounded(rank: int) -> list[str]:
    """Steps that a CUDA graph could record; then more rows than there is room for, and fewer again."""
    kind, texts = Kind(chosen=2), []
    for mesh, options in (("ep=4", {}), ("dp=2,ep=2", {"zero": 2}), ("ep=2,tp=2", {}), ("pp=2,ep=2", {})):
        graphs: Any = "dry-run" if "pp" not in mesh else False
        model, optimizer, batch = _made(kind, mesh, {"expert_rows": 4.0, "cuda_graphs": graphs, **options})
        plain, its, _ = _plain(kind)
        with pytest.MonkeyPatch.context() as patch:
            _, reads = _watch(patch)
            assert _train(model, optimizer, batch, 3) == pytest.approx(_train(plain, its, batch, 3), rel=1e-9), mesh
        assert not reads and [list(layer.by_expert) for layer in model.last.experts], mesh
        assert sum(model.last.experts[0].by_expert) == 8 * 6 * 2
        assert_same_state(model, plain, "weight")
    for graphs in (False, "dry-run"):
        model, optimizer, batch = _made(Kind(), "ep=4", {"expert_rows": 3.8, "cuda_graphs": graphs})
        plain, its, _ = _plain(Kind())
        for skewed in (False, False, True, False):
            for mixture, other in zip(model.mixed, plain.mixed, strict=True):
                with torch.no_grad():
                    mixture.skew.copy_(other.skew.copy_(torch.tensor([9.0 * skewed] * 2 + [0.0] * 6)))
            if not skewed:
                assert _train(model, optimizer, batch, 1) == pytest.approx(_train(plain, its, batch, 1), rel=1e-9)
                continue
            with pytest.raises(BatchError) as error:
                model.forward_backward(*batch)
            texts.append(str(error.value))
            assert all(parameter.grad is None for parameter in model.parameters())
            with pytest.raises(BatchError):
                model.eval()(*batch)
            model.train()
    with pytest.raises(CompileError, match=r"or bound the rows of experts: expert_rows=1.25\.$"):
        _made(kind, "ep=4", {"cuda_graphs": "dry-run"})[0].forward_backward(*batch)
    return texts


def test_rows_that_are_bounded_are_read_by_no_host(four: Ranks) -> None:
    """The rows of a step that has too many change nothing: the next one goes on as if there had been none."""
    (texts, *others) = four.run(_bounded, timeout=200)
    assert all(other == texts for other in others) and texts[0] == texts[1]
    assert re.sub(r"py:\d+", "py:N", texts[0]) == (
        "24 rows go from part 0 of the batch to the experts of part 0 on axis 'ep', and there is room for 23: 6 go to "
        "each on average. expert_rows=4 would do for these, or leave it out where the host may read how many there "
        "are. It is at mixtures.py:N in mixed.0. No gradient was added, and no weight was changed."
    )


def _any_batch(rank: int) -> None:
    """Batches that ep divides and others, by turns: experts stay where they are. Then each rank's own part of a batch,
    and parts that each rank takes for all."""
    kind = Kind(bias=True, blocks=1)
    for mesh, options in (("dp=2,ep=2", {}), ("ep=2,tp=2", {"zero": 2})):
        model, optimizer, batch = _made(kind, mesh, options)
        plain, its, _ = _plain(kind)
        for rows in (8, 5, 8):
            part = (batch[0][:rows], batch[1][:rows])
            assert _train(model, optimizer, part, 1) == pytest.approx(_train(plain, its, part, 1), rel=1e-9), (
                mesh,
                rows,
            )
        with torch.no_grad():
            for rows in (8, 3):
                part = (batch[0][:rows], batch[1][:rows])
                assert float(model.eval()(*part)) == pytest.approx(float(plain.eval()(*part)), rel=1e-9), (mesh, rows)
        assert_same_state(model, plain, "weight")
    module, batch = mixture_case(kind)
    model = autopar.parallelize(module.double(), "dp=2,ep=2", batch="local")
    plain, _, _ = _plain(kind)
    mine = tuple(tensor[2 * rank : 2 * rank + 2] for tensor in batch)
    assert model.forward_backward(*mine).item() == pytest.approx(plain(*batch).item(), rel=1e-10)
    model = autopar.parallelize(mixture_case(kind)[0], "ep=4", batch="ddp")
    with pytest.raises(PlanError) as error:
        model.forward_backward(*mine)
    assert str(error.value) == (
        "batch=\"ddp\" computes each rank's batch apart, and on mesh 'ep=4' rows go to the experts of other ranks. "
        'Use batch="local", whose means are over the rows of all ranks, or dp in place of ep.'
    )


def test_batches_of_any_size_and_of_each_rank(four: Ranks) -> None:
    four.run(_any_batch, timeout=200)


class Told(nn.Module):
    """The batch tells the experts, and a bias is looked up by them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.bias = nn.Parameter(torch.randn(4, 6, 6)), nn.Parameter(torch.randn(4, 6))

    def forward(self, x: Tensor, experts: Tensor) -> Tensor:
        order = torch.argsort(experts, stable=True)
        ends = torch.histc(experts[order].float(), 4, 0, 3).cumsum(0, dtype=torch.int32)
        y = torch.nn.functional.grouped_mm(x[order], self.up, offs=ends) + self.bias[experts[order]]
        return torch.zeros_like(x).index_add(0, order, y).square().mean()


def _out_of_range(rank: int) -> list[str]:
    class Wrong(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.randn(4, 6, 6))

        def forward(self, x: Tensor, experts: Tensor) -> Tensor:
            order = torch.argsort(experts, stable=True)
            ends = torch.searchsorted(experts[order], torch.arange(4), right=True).to(torch.int32)
            y: Tensor = torch.nn.functional.grouped_mm(x[order], self.up, offs=ends)
            return torch.zeros_like(x).index_add(0, order, y).square().mean()

    texts = []
    for module, wrong in ((Wrong(), 9), (Told(), 9), (Told(), -2)):
        model = autopar.parallelize(module, "ep=4")
        x, experts = torch.randn(8, 6), torch.arange(8) % 4
        model.forward_backward(x, experts)
        experts[5] = wrong
        with pytest.raises(BatchError) as error:
            model.forward_backward(x, experts)
        experts[5] = 1
        model.forward_backward(x, experts)  # nothing is left over of it
        texts.append(re.sub(r"py:\d+", "py:N", str(error.value)))
    return texts


def _save(rank: int, mesh: str, zero: int, folder: str) -> list[float]:
    model, optimizer, batch = _made(Kind(bias=True, blocks=1), mesh, {"zero": zero})
    losses = _train(model, optimizer, batch, 2)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder)
    return losses


def _resume(rank: int, mesh: str, zero: int, folder: str) -> list[float]:
    model, optimizer, batch = _made(Kind(bias=True, blocks=1), mesh, {"zero": zero})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    return _train(model, optimizer, batch, 2)


def _on_one_device(folder: str, saves: bool) -> list[float]:
    """Two steps before a checkpoint of the plain module, or behind the one that is in a folder."""
    plain, optimizer, batch = _plain(Kind(bias=True, blocks=1))
    losses = _train(plain, optimizer, batch, 2) if saves else []
    state = {"model": plain.state_dict(), "optimizer": get_optimizer_state_dict(plain, optimizer)}
    if saves:
        dcp.save(state, checkpoint_id=folder, no_dist=True)
        return losses
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    plain.load_state_dict(state["model"])
    set_optimizer_state_dict(plain, optimizer, state["optimizer"])
    return _train(plain, optimizer, batch, 2)


def test_checkpoints_go_to_any_mesh_and_back(four: Ranks, tmp_path: Path) -> None:
    plain, optimizer, batch = _plain(Kind(bias=True, blocks=1))
    straight = _train(plain, optimizer, batch, 4)
    for source, zero, targets in (
        ("ep=4", 0, (("dp=4", 3), ("ep=2,tp=2", 0), ("one device", 0))),
        ("dp=2,ep=2", 3, (("ep=4", 0),)),
        ("one device", 0, (("ep=4", 1),)),
    ):
        folder, is_one = str(tmp_path / source), source == "one device"
        before = _on_one_device(folder, True) if is_one else four.run(_save, source, zero, folder)[0]
        for mesh, stage in targets:
            is_one = mesh == "one device"
            after = _on_one_device(folder, False) if is_one else four.run(_resume, mesh, stage, folder)[0]
            assert [*before, *after] == pytest.approx(straight, rel=1e-9), (source, mesh, stage)


def test_an_expert_that_does_not_exist_is_an_error_on_all_ranks(four: Ranks) -> None:
    """Before a row moves: whose rows they are goes with the counts, so that no rank waits for one that gave up."""
    texts = four.run(_out_of_range)
    assert (
        texts
        == [
            [
                f"expert {expert} is out of range: there are 4, so an index is 0 to 3, and 1 of the rows that rank "
                f"{part} on their axis sends, part {part} of the batch, are of others. Correct the router. "
                f"It is at test_experts_gloo.py:N."
                for expert, part in ((9, 2), (9, 2), (-2, 2))
            ]
        ]
        * 4
    )


class Balanced(nn.Module):
    """The mixture of DeepSeek-V3 (arXiv 2412.19437, section 2.1.2): a bias that no gradient sees decides who is chosen,
    and is moved by what each expert got."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, 4)
        self.up, self.down = (nn.Parameter(torch.randn(4, 6, 6) * 0.4) for _ in range(2))
        self.bias, self.load = nn.Buffer(torch.zeros(4)), nn.Buffer(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).sigmoid()
        experts = torch.topk(scores + self.bias, 2).indices
        with torch.no_grad():
            self.load.add_(nn.functional.one_hot(experts, 4).sum((0, 1)))
        weights, flat = scores.gather(-1, experts), experts.flatten()
        order = flat.argsort(stable=True)
        ends = torch.bincount(flat, minlength=4).cumsum(0).to(torch.int32)
        y = products(torch.tanh(products(x[order // 2], self.up, ends)), self.down, ends)
        y = y * weights.flatten()[order][:, None]
        return (torch.zeros_like(x).index_add(0, order // 2, y) - x).square().mean()


def _balance(model: nn.Module) -> None:
    """What a user does after each step."""
    buffers = dict(model.named_buffers())
    with torch.no_grad():
        buffers["bias"].add_(torch.sign(buffers["load"].mean() - buffers["load"]), alpha=0.05)
        buffers["load"].zero_()


def _balancing(rank: int) -> list[list[float]]:
    torch.manual_seed(5)
    plain = Balanced().double()
    with torch.no_grad():
        plain.router.bias.copy_(torch.tensor([2.0, 0.5, 0.0, -1.0]))
    batch = torch.randn(16, 6, dtype=torch.float64) * torch.linspace(0.5, 2, 16)[:, None]
    models = [plain, *(autopar.parallelize(copy.deepcopy(plain), "dp=2,ep=2", microbatches=m) for m in (1, 2))]
    found = []
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        numbers: list[float] = []
        for _ in range(5):
            if isinstance(model, autopar.ParallelModule):
                loss = model.forward_backward(batch)
            else:
                loss = model(batch)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            numbers += [loss.item(), *dict(model.named_buffers())["load"].tolist()]
            _balance(model)
        found.append([*numbers, *dict(model.named_buffers())["bias"].tolist()])
    return found


def test_a_bias_that_balances_is_moved_by_what_all_ranks_count(four: Ranks) -> None:
    for plain, *others in four.run(_balancing, timeout=120):
        assert sum(plain[1:5]) == 32 and len(set(plain[-4:])) > 2, "it moves, and not all alike"
        for other in others:
            assert other == pytest.approx(plain, rel=1e-10)


def _held(rank: int) -> list[tuple[int, int, int | None]]:
    """What a rank holds in a step, measured, estimated for the rows that came, and at worst (of the first and the last
    rank, which differ on every axis)."""
    found = []
    for mesh, blocks, options in (("ep=2,tp=2", 1, {}), ("pp=2,ep=2", 2, {"schedule": "1f1b"})):
        model, _, batch = _made(Kind(skew=1, width=64, blocks=blocks), mesh, options)
        held = []
        for _ in range(3):  # a thread of Gloo may let go of a buffer late
            held.append(measure(model, None, *batch).step)
            model.zero_grad()
        (running,) = model.programs
        counted = {record(node).module: counts.tolist() for node, counts in running.runner.routed}
        counts = RowCounts(running.compiled.plan.layout_mesh, running.compiled.mesh.coord(rank), counted=counted)
        optimizers = partial(torch.optim.SGD, lr=0.1)
        report = memory_report(running.compiled, rank, optimizers, "cpu", counts)
        assert report.worst is None
        worst = model.compiled.memory(rank, optimizers, "cpu").worst if rank in (0, 3) else None
        found.append((min(held), report.step, worst))
    return found


def test_memory_is_that_of_the_rows_that_come(four: Ranks) -> None:
    """To the byte, but for micro-batches, of which each has its own rows; and never more than in the worst case."""
    for row, exact in zip(zip(*four.run(_held, timeout=200), strict=True), (0.0, 0.02), strict=True):
        assert [estimated for _, estimated, _ in row] == pytest.approx([held for held, _, _ in row], rel=exact, abs=0)
        assert all(worst is not None and worst >= estimated for _, estimated, worst in row[::3])
