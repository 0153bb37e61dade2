"""`with model.gathered()`: the plain module for a while, on every rank or on one, written back if asked."""

from __future__ import annotations

import copy
import gc
import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import Ranks
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError

pytestmark = pytest.mark.gloo


class Net(nn.Module):
    """With ties, an LSTM (which holds its weights in a list too), a list of parameters, buffers, a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.recurrent = nn.Embedding(12, 8), nn.LSTM(8, 8, batch_first=True)
        self.norm, self.inner, self.head = nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 12, bias=False)
        self.head.weight = self.tokens.weight
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.listed = [self.inner.weight]
        self.inner.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.recurrent(self.tokens(x))[0]
        h = self.norm(h.flatten(0, 1)).view_as(h)
        return self.head(torch.tanh(self.inner(h)) * self.scale)  # type: ignore[no-any-return]

    def generate(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = torch.cat([x, self(x)[:, -1].argmax(-1, keepdim=True)], 1)
        return x


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


def _x() -> Tensor:
    return torch.randint(0, 12, (4, 5), generator=torch.Generator().manual_seed(1))


def _pair(mesh: str, **options: Any) -> tuple[Net, Any]:
    torch.manual_seed(0)
    plain = Net().double().eval()
    return plain, autopar.parallelize(copy.deepcopy(plain), mesh, loss_fn=_loss, **options)


def _whole(model: Any) -> dict[str, Tensor]:
    return {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in model.state_dict().items()}


def _assert_same(model: Any, plain: nn.Module) -> None:
    """The values, and that programs and lists hold the very tensors of the model."""
    torch.testing.assert_close(_whole(model), dict(plain.state_dict()), rtol=0, atol=0)
    assert model.listed[0] is model.inner.weight and model.head.weight is model.tokens.weight
    features = torch.ones(2, 3, 8, dtype=torch.float64)  # the LSTM keeps its weights in a list too
    torch.testing.assert_close(
        model.recurrent(features)[0].full_tensor(), plain.recurrent(features)[0], rtol=1e-9, atol=0
    )
    torch.testing.assert_close(model(_x()), plain(_x()).detach(), rtol=1e-9, atol=1e-9)


def _change(plain: Any) -> None:
    """In place, through views and `.data`, by another object, through a tie, and of buffers."""
    with torch.no_grad():
        plain.inner.weight.mul_(2)
        plain.tokens.weight[1] = 3.0
        plain.norm.running_mean += 1
    plain.recurrent.weight_hh_l0.data = plain.recurrent.weight_hh_l0.data + 0.5
    plain.scale = nn.Parameter(torch.tensor(1.5).double())


def _reads(plain: nn.Module, model: Any, rank: int | None) -> None:
    model.scale.tag = "an attribute"
    ids = {name: id(parameter) for name, parameter in model.named_parameters()}
    with model.gathered(rank=rank) as whole:
        assert (whole is None) == (rank not in (None, dist.get_rank()))
        if whole is not None:
            assert whole is model.original and type(whole) is Net
            assert {type(p) for p in whole.parameters()} == {nn.Parameter}
            assert whole.scale.tag == "an attribute"
            assert whole.head.weight is whole.tokens.weight and whole.listed[0] is whole.inner.weight
            assert [p.requires_grad for p in whole.parameters()] == [p.requires_grad for p in plain.parameters()]
            torch.testing.assert_close(dict(whole.state_dict()), dict(plain.state_dict()), rtol=0, atol=0)
            assert torch.equal(whole.generate(_x()), plain.generate(_x()))  # type: ignore[operator]
            assert whole.inner.weight.numpy(force=True).shape == (8, 8)
        if rank is None:
            refused = (
                lambda: model(_x()), lambda: model.forward_backward(_x()), model.full_state_dict, model.full_gradients,
                model.check_replicas, lambda: model.gathered().__enter__(), lambda: model.prepare(_x()),
            )  # fmt: skip
            for call in refused:
                with pytest.raises(AutoparError) as caught:
                    call()
                assert str(caught.value) == (
                    "a parallel model is plain inside of `with model.gathered() as plain`: call `plain` there, and the "
                    "parallel model behind the block."
                )
    assert ids == {name: id(parameter) for name, parameter in model.named_parameters()}
    _assert_same(model, plain)


def _writes(plain: nn.Module, model: Any, rank: int | None) -> None:
    with model.gathered(rank=rank, write=True) as whole:
        if whole is not None:
            _change(whole)
            if rank is None and dist.get_rank() == 1:
                whole.scale.data.zero_()  # rank 0's values count
    _change(plain)
    _assert_same(model, plain)
    torch.testing.assert_close(model.forward_backward(_x()).detach(), _loss(plain, _x()).detach(), rtol=1e-9, atol=0)


def _fails(plain: nn.Module, model: Any) -> list[str]:
    """What is said on this rank. Nothing is written."""
    said = []
    for write in (False, True):
        try:
            with model.gathered(write=write) as whole:
                _change(whole)
                if not write or dist.get_rank() == 1:
                    raise ValueError("a mistake in the block")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
        _assert_same(model, plain)
    try:
        with model.gathered(write=True) as whole:
            _change(whole)
            whole.inner.bias = nn.Parameter(torch.ones(3))
            del whole.scale
    except AutoparError as error:
        said.append(str(error))
    _assert_same(model, plain)
    return said


def _all(rank: int, mesh: str, options: dict[str, Any]) -> list[str]:
    plain, model = _pair(mesh, **options)
    _reads(plain, model, dist.get_world_size() - 1)
    model.forward_backward(_x())  # parameters are placed
    _reads(plain, model, None)
    for one in (None, 0):
        _writes(plain, model, one)
    return _fails(plain, model)


@pytest.mark.parametrize(
    ("mesh", "options"), [("tp=2", {}), ("dp=2", {"zero": 1}), ("pp=2", {"microbatches": 2})], ids=lambda it: str(it)
)
def test_on_two_ranks(two: Ranks, mesh: str, options: dict[str, Any]) -> None:
    first, second = two.run(_all, mesh, options)
    assert first[0] == second[0] == second[1] == "ValueError: a mistake in the block"
    assert first[1] == (
        "RankError: the block of gathered() failed on some ranks, not on this one:\n"
        "  rank 1: ValueError: a mistake in the block"
    )
    removed, shape = "'scale', which was removed", "'inner.bias', which has the shape [3] now and had [8]"
    assert first[2] == second[2] == f"gathered(write=True) cannot write {removed}; {shape}. Nothing was written."


def _disagrees(rank: int) -> str:
    _, model = _pair("dp=2")
    with pytest.raises(AutoparError) as caught, model.gathered(rank=rank):
        pass
    return str(caught.value)


def test_ranks_that_ask_for_different_things_are_told(two: Ranks) -> None:
    for said in two.run(_disagrees):
        assert "rank 1 has 'rank=1' where the others have 'rank=0'" in said


def _leaves(rank: int) -> None:
    """A whole value of 32 MB is there inside of the block only."""
    model: Any = autopar.parallelize(nn.Linear(4096, 2048, bias=False), "tp=2", loss_fn=_loss)
    model.forward_backward(torch.ones(2, 4096))

    def large() -> int:
        gc.collect()
        plain = (each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter))
        return sum(tensor.numel() == 1 << 23 for tensor in plain)

    with model.gathered(write=True):
        assert large() == 1
    assert large() == 0


def test_no_memory_is_left(two: Ranks) -> None:
    two.run(_leaves)


def test_a_note_names_what_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    plain, model = _pair("dp=1")
    with caplog.at_level(logging.WARNING, "autopar"), model.gathered() as whole:
        _change(whole)
    _assert_same(model, plain)
    notes = [record.getMessage() for record in caplog.records if "gathered" in record.getMessage()]
    assert notes == [
        "changes inside of `with model.gathered()` are gone behind it (scale, tokens.weight, "
        "recurrent.weight_hh_l0 and 2 more): gathered(write=True) keeps them"
    ]
    dist.destroy_process_group()


def test_a_rank_that_is_not_there_is_refused() -> None:
    _, model = _pair("dp=1")
    with pytest.raises(AutoparError) as caught, model.gathered(rank=3):
        pass
    assert str(caught.value) == "gathered(rank=3): there is no such rank. Give one of 0 to 0, or None for all."
    dist.destroy_process_group()
