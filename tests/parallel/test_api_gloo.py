"""`autopar.parallelize` on local Gloo processes: the user's loop equals the plain one on every mesh."""

from __future__ import annotations

import copy
import hashlib
import logging
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from processes import Ranks
from side_by_side import adamw, assert_close, assert_same_state, case, momentum, plain_loss, train_both
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

import autopar

pytestmark = pytest.mark.gloo
MESH = "dp=2,tp=2"


def bits(tensors: dict[str, Tensor]) -> str:
    """One text for the values of whole tensors, to compare between processes."""
    text = hashlib.sha256()
    for name, value in tensors.items():
        text.update(f"{name} {list(value.shape)}".encode() + value.detach().contiguous().numpy().tobytes())
    return text.hexdigest()


# -- training -------------------------------------------------------------------------------------------------------


def _train(rank: int, name: str, mesh: str, options: dict[str, Any]) -> dict[str, str]:
    kinds = {"adamw": adamw, "momentum": momentum}
    model = train_both(name, mesh, kinds[options.pop("optimizer", "adamw")], **options)
    return {n: str(p.placements) for n, p in model.named_parameters(remove_duplicate=False)}


@pytest.mark.parametrize("name", ["nanogpt", "hf_llama", "conv", "frozen", "unused"])
def test_training_equals_the_plain_loop(four: Ranks, name: str) -> None:
    placements = four.run(_train, name, MESH, {"clip": 1e-3})
    assert all(p == placements[0] for p in placements)
    if name == "nanogpt":
        assert "_StridedShard" in placements[0]["h.0.c_attn.weight"]
    assert any("Shard" in p for p in placements[0].values()), placements[0]


def test_momentum_accumulation_and_schedule(four: Ranks) -> None:
    """With gradients that become zeros after a step; all other tests set them to None."""
    options = {"optimizer": "momentum", "steps": 3, "accumulate": 2, "set_to_none": False, "schedule": True}
    four.run(_train, "short_gpt", MESH, options)


def test_three_by_two(six: Ranks) -> None:
    six.run(_train, "short_gpt", "dp=3,tp=2", {"clip": 1e-3})


def test_layouts_by_pattern(four: Ranks) -> None:
    shard = {"blocks.*.up.weight": "[tp,-]", "blocks.*.q.weight": "[-,-]"}
    placements = four.run(_train, "gpt", MESH, {"shard": shard})[0]
    for i in (0, 1):
        assert placements[f"blocks.{i}.mlp.up.weight"] == "(Replicate(), Shard(dim=0))"
        assert placements[f"blocks.{i}.attn.q.weight"] == "(Replicate(), Replicate())"


# -- ways to say it -------------------------------------------------------------------------------------------------


def _ways(rank: int) -> list[float]:
    """However the mesh is written, and though the ranks' initial values differ: the loss is one."""
    plain, loss_fn, args, _ = case("mlp")
    named = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    assert str(autopar.compile(copy.deepcopy(plain), named, loss_fn=loss_fn, batch=args).mesh) == MESH
    losses = []
    for mesh in (MESH, "dp=-1,tp=2", {"dp": 2, "tp": -1}, autopar.Mesh((("dp", 2), ("tp", 2))), named):
        mine = copy.deepcopy(plain)
        if rank:
            nn.init.normal_(mine[0].weight)  # rank 0's values count
        losses.append(float(autopar.parallelize(mine, mesh, loss_fn=loss_fn, device="cpu").forward_backward(*args)))
    return losses


def _local_batch(rank: int) -> None:
    plain, loss_fn, args, _ = case("short_gpt")
    model = autopar.parallelize(copy.deepcopy(plain), MESH, loss_fn=loss_fn, batch="local")
    part = [tensor.chunk(2)[rank // 2] for tensor in args]
    want = loss_fn(plain, *args)
    want.backward()
    torch.testing.assert_close(model.forward_backward(*part), want.detach(), rtol=1e-11, atol=0)
    whole = model.full_gradients()
    if rank == 0:
        assert_close(whole, {n: p.grad for n, p in plain.named_parameters()}, "gradient of a local batch")
    whole = plain(args[0]).detach()
    torch.testing.assert_close(model(part[0]), whole.chunk(2)[rank // 2], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(model(part[0], whole=True), whole, rtol=1e-10, atol=1e-12)


def test_every_way_to_write_a_mesh(four: Ranks) -> None:
    plain, loss_fn, args, _ = case("mlp")
    want = float(loss_fn(plain, *args).detach())
    for losses in four.run(_ways):
        assert losses == pytest.approx([want] * 5, rel=1e-12)


def test_a_local_batch_equals_the_global_one(four: Ranks) -> None:
    """Ignored labels are spread unevenly: the parts' own means would be wrong."""
    four.run(_local_batch)


def _made(rank: int) -> tuple[str, str]:
    torch.manual_seed(rank)

    @autopar.parallelize(MESH, loss_fn=models.token_loss, seed=3)
    def build() -> nn.Module:
        return models.GPT(models.GPTConfig(40, 8, layers=1, heads=4, width=32))

    with torch.device("meta"):
        bare = models.GPT(models.GPTConfig(40, 8, layers=1, heads=4, width=32))
    on_meta = autopar.parallelize(bare, MESH, loss_fn=models.token_loss, seed=3)
    found = []
    for model in (build(), on_meta):
        torch.manual_seed(0)
        model.forward_backward(models.tokens(), models.labels())
        assert model.tokens.weight is model.head.weight
        found.append(bits({n: p.full_tensor() for n, p in model.named_parameters()}))
    return found[0], found[1]


def test_one_seed_gives_one_model_on_every_rank(four: Ranks) -> None:
    found = four.run(_made)
    assert len(set(found)) == 1 and found[0][0] != found[0][1]


class _Many(nn.Module):
    """Many small values of all kinds, and a large one between them."""

    def __init__(self) -> None:
        super().__init__()
        kinds = (torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.complex128)
        self.small = nn.ParameterList(torch.randn(3, at + 1, dtype=kinds[at % 5]) for at in range(40))
        self.large = nn.Parameter(torch.randn(300, 300))
        self.scale = nn.Parameter(torch.randn(()), requires_grad=False)
        self.strided = nn.Parameter(torch.randn(5, 3).T)
        self.none = nn.Parameter(torch.randn(0, 3))
        self.mask, self.count = nn.Buffer(torch.randn(7) > 0), nn.Buffer(torch.randint(99, (3,)))


def _sent(rank: int) -> str:
    torch.manual_seed(rank)
    model, sent, send = _Many(), [], dist.broadcast
    dist.broadcast = lambda tensor, **how: (sent.append(tensor.nbytes), send(tensor, **how))[1]
    try:
        parallel: Any = autopar.parallelize(model, "dp=2", loss_fn=lambda model, x: model.large.sum())
    finally:
        dist.broadcast = send
    assert len(sent) < 5, f"{len(sent)} messages for what goes into two"
    assert not any(part.requires_grad for part in (parallel.scale, parallel.mask)) and parallel.small[0].requires_grad
    values = {n: p.full_tensor() for n, p in parallel.named_parameters()} | dict(parallel.named_buffers())
    memory = {value.untyped_storage().data_ptr() for value in values.values() if value.numel()}
    assert len(memory) == sum(value.numel() > 0 for value in values.values()), "each has memory of its own"
    return bits({n: v.detach().reshape(-1).view(torch.uint8) for n, v in values.items()})


def test_small_values_are_sent_together(two: Ranks) -> None:
    """Red where each is sent alone: 80 layers had 1,285 messages, and 8 ranks on 2 cores took a second longer."""
    first, second = two.run(_sent)
    assert first == second


# -- parameters, checkpoints ----------------------------------------------------------------------------------------


def _early_optimizer(rank: int, name: str) -> None:
    """An optimizer from before the first step, with states; then parameters take their layouts."""
    plain, loss_fn, args, _ = case(name)
    model = autopar.parallelize(copy.deepcopy(plain), MESH, loss_fn=loss_fn)
    held = list(model.parameters())
    pair = [(m, adamw(m.parameters())) for m in (model, plain)]
    assert all(isinstance(p, DTensor) for p in held)
    for m, optimizer in pair:  # states that a checkpoint brought
        for i, p in enumerate(m.parameters()):
            noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(i), dtype=p.dtype)
            state = {"exp_avg": noise * 1e-2, "exp_avg_sq": noise**2 * 1e-4, "step": torch.tensor(3.0)}
            if m is model:
                for key in ("exp_avg", "exp_avg_sq"):
                    state[key] = distribute_tensor(state[key], p.device_mesh, p.placements)
            optimizer.state[p] = state
    for _ in range(2):
        model.forward_backward(*args)
        loss_fn(plain, *args).backward()
        for _, optimizer in pair:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_state(model, plain, "weight")
    assert all(a is b for a, b in zip(held, model.parameters(), strict=True))
    assert any(p.to_local().numel() < p.numel() for p in held)


def test_an_optimizer_with_states_from_before_the_layouts(four: Ranks) -> None:
    """Of plain, strided and tied parameters."""
    four.run(_early_optimizer, "nanogpt")


def _save(rank: int, folder: str) -> str:
    plain, loss_fn, args, _ = case("nanogpt")
    model = autopar.parallelize(plain, MESH, loss_fn=loss_fn)
    model.forward_backward(*args)
    adamw(model.parameters()).step()
    dcp.save(model.state_dict(), checkpoint_id=f"{folder}/a")
    return bits(model.full_state_dict())


def _load(rank: int, folder: str, step_first: bool) -> tuple[str, float]:
    plain, loss_fn, args, _ = case("nanogpt")
    model = autopar.parallelize(plain, "tp=4", loss_fn=loss_fn)
    if step_first:
        model.forward_backward(*args)
    state = model.state_dict()
    dcp.load(state, checkpoint_id=f"{folder}/a")
    model.load_state_dict(state)
    assert model.wte.weight is model.lm_head.weight
    text, loss = bits(model.full_state_dict()), float(model.forward_backward(*args).detach())
    dcp.save(model.state_dict(), checkpoint_id=f"{folder}/b{int(step_first)}")
    return text, loss


def test_a_checkpoint_goes_from_mesh_to_mesh(four: Ranks, tmp_path: Path) -> None:
    """Into a model that has taken a step, with layouts of its own, and into one that has not."""
    saved = four.run(_save, str(tmp_path))
    plain, loss_fn, args, _ = case("nanogpt")
    model = autopar.parallelize(plain, "dp=1", loss_fn=loss_fn)
    for step_first in (False, True):
        loaded = four.run(_load, str(tmp_path), step_first)
        assert loaded[0][0] == saved[0]
        state = model.state_dict()
        dcp.load(state, checkpoint_id=f"{tmp_path}/b{int(step_first)}")
        model.load_state_dict(state)
        assert bits(model.full_state_dict()) == saved[0]
        loss = float(model.forward_backward(*args).detach())
        assert [each for _, each in loaded] == pytest.approx([loss] * 4, rel=1e-10)
    dist.destroy_process_group()


def _load_plain(rank: int) -> None:
    """Whole tensors of the plain module, into fused and tied parameters that have their layouts."""
    plain, loss_fn, args, _ = case("nanogpt")
    model = autopar.parallelize(copy.deepcopy(plain), MESH, loss_fn=loss_fn)
    model.forward_backward(*args)
    with torch.no_grad():
        for i, parameter in enumerate(plain.parameters()):
            parameter += torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i))
    model.load_state_dict(plain.state_dict())
    assert_same_state(model, plain, "weight")
    torch.testing.assert_close(model.forward_backward(*args), plain_loss(plain, loss_fn, args, {}).detach())


def test_a_plain_checkpoint_loads(four: Ranks) -> None:
    four.run(_load_plain)


# -- forward, dropout -----------------------------------------------------------------------------------------------


def _forward(rank: int, name: str) -> None:
    plain, loss_fn, args, _ = case(name)
    model = autopar.parallelize(copy.deepcopy(plain), MESH, loss_fn=loss_fn)
    for step in range(3):
        for training in (False, True):
            got, want = model.train(training)(args[0]), plain.train(training)(args[0]).detach()
            assert type(got) is Tensor and got.requires_grad, "as on one device"
            torch.testing.assert_close(got.detach(), want, rtol=1e-9, atol=1e-11)
        if step == 0:
            model.forward_backward(*args)
            plain_loss(plain, loss_fn, args, {})
    assert_same_state(model, plain, "buffer")


@pytest.mark.parametrize("name", ["short_gpt", "conv"])
def test_forward_is_whole_on_every_rank_in_both_modes(four: Ranks, name: str) -> None:
    four.run(_forward, name)


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 8)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(self.dropout(torch.relu(self.up(self.dropout(x))))))


def _dropout(rank: int, mesh: str) -> list[float]:
    torch.manual_seed(7)
    model = autopar.parallelize(Dropping().double(), mesh, loss_fn=models.square_loss, seed=11)
    x, y = torch.randn(12, 16).double(), torch.randn(12, 8).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    torch.manual_seed(rank)  # the global generator plays no part
    for _ in range(3):
        losses.append(float(model.forward_backward(x, y)))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_dropout_is_the_same_on_every_mesh(four: Ranks, two: Ranks) -> None:
    want = _dropout(0, "dp=1")
    dist.destroy_process_group()
    assert len(set(want)) == 3
    for ranks, mesh in ((two, "dp=2"), (two, "tp=2"), (four, MESH)):
        for losses in ranks.run(_dropout, mesh):
            assert losses == pytest.approx(want, rel=1e-11), mesh


def _shapes(rank: int) -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("autopar").addHandler(handler)
    plain, loss_fn, (x, y), _ = case("mlp")
    model = autopar.parallelize(copy.deepcopy(plain), "dp=2", loss_fn=loss_fn)
    for rows in (12, 8, 12, 8):
        want = loss_fn(plain, x[:rows], y[:rows]).detach()
        torch.testing.assert_close(model.forward_backward(x[:rows], y[:rows]), want, rtol=1e-11, atol=0)
    logging.getLogger("autopar").removeHandler(handler)
    return said


def test_a_new_shape_compiles_again_and_says_so(two: Ranks) -> None:
    first, *others = two.run(_shapes)
    assert [text.split(" (")[0] for text in first] == ["new input signature"]
    assert others == [[]], "rank 0 alone says so"
