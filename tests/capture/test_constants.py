"""Values that hang on no input, which models read as Python numbers; and those that only look like it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from verified import verified

import autopar
from autopar.errors import CaptureError

TABLE = torch.tensor([1.0, 2.0])
Body = Callable[[Any, Tensor, Tensor], Tensor]


class Net(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body, self.linear = body, nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.scale = torch.tensor([1.0, 3.0])
        self.sizes = [torch.tensor(2), torch.tensor(3)]
        self.seen, self.kept = torch.zeros(()), [torch.zeros(())]
        self.cache: dict[str, Tensor] = {}
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, self.linear(x), x)


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def made(body: Body) -> Net:
    torch.manual_seed(1)
    return Net(body)


def rows() -> Tensor:
    torch.manual_seed(2)
    return torch.randn(12, 5, 8)


def dice(m: Any, h: Tensor, x: Tensor) -> Tensor:
    """MONAI's: the dims to sum over are a tensor first."""
    return h.sum(torch.arange(2, h.ndim).tolist())


def checked(m: Any, h: Tensor, x: Tensor) -> Tensor:
    """kornia's: what is given is a tensor, and checked."""
    sigma = torch.tensor([[1.5, 2.0]])
    if not bool((sigma > 0).all()):
        raise ValueError("sigma must be positive")
    return h * [int(s) for s in sigma[0]][1]


def gcd(m: Any, h: Tensor, x: Tensor) -> Tensor:
    """ConvTasNet's and DPRNN's: frames by sizes that are tensors."""
    frame = torch.arange(10).unfold(0, 4, int(torch.tensor(5).log2().ceil())).contiguous().view(-1)
    return h.new_zeros(int(frame.max()) + 1, 8).index_add(0, frame, h.reshape(-1, 8)[: len(frame)])


def schedule(m: Any, h: Tensor, x: Tensor) -> Tensor:
    for t in torch.linspace(0, 1, 3):
        h = h * (1 + float(t))
    return h * sum(torch.linspace(0, 1, 3).tolist())


def sizes(m: Any, h: Tensor, x: Tensor) -> Tensor:
    n = torch.ones(5).sum().long()
    return torch.zeros(n, 8) + h[:, :n] + h.reshape(-1)[:n].sum()


def compared(m: Any, h: Tensor, x: Tensor) -> Tensor:
    same = torch.equal(torch.arange(2), torch.tensor([0, 1])) and torch.allclose(torch.ones(2), torch.ones(2))
    return h * 2 if same and 1.0 in torch.ones(2) else h


def as_array(m: Any, h: Tensor, x: Tensor) -> Tensor:
    weights = np.hanning(torch.arange(8).numpy()[-1] + 3)[1:-1]
    return h * torch.from_numpy(weights).to(h.dtype) + np.asarray(torch.arange(3)).sum()


def places(m: Any, h: Tensor, x: Tensor) -> Tensor:
    """A constant mask has the same places in each step."""
    mask = torch.ones(8, 8).triu(1) > 0
    i, j = torch.nonzero(mask, as_tuple=True)
    pairs = h[..., None] * h[..., None, :]
    return pairs[..., mask] + pairs[..., i, j] + pairs[..., torch.where(mask)[0], 0]


def named(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h * len(f"{torch.tensor(2.5):.1f}")


def written(m: Any, h: Tensor, x: Tensor) -> Tensor:
    """In place and by a view, before and after a tensor that was computed from it."""
    table = torch.zeros(3)
    before = table + 1
    table[1:].fill_(2)
    table.mul_(2)
    row = torch.empty(2, dtype=h.dtype)
    torch.add(table[1:], 1, out=row)
    return h * before.sum().item() * table.sum().item() if table[0] == 0 else h


def overwritten(m: Any, h: Tensor, x: Tensor) -> Tensor:
    """The list and the array change after the tensor was made of them."""
    numbers, array = [2, 3], np.array([2.0, 3.0])
    first, second = torch.tensor(numbers), torch.tensor(array)
    numbers[0], array[0] = 7, 7.0
    return h * first[0].item() * float(second[0])


def of_a_global(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h * TABLE.tolist()[1] * float(TABLE[0] + m.scale[1]) * int(m.sizes[1] + 1)


def cached(m: Any, h: Tensor, x: Tensor) -> Tensor:
    if "sizes" not in m.cache:
        m.cache["sizes"] = torch.arange(3)
    return h * int(m.cache["sizes"][2])


def in_checkpoint(m: Any, h: Tensor, x: Tensor) -> Tensor:
    run = lambda h: (h * torch.arange(3).tolist()[2]).tanh()  # noqa: E731
    found: Tensor = torch.utils.checkpoint.checkpoint(run, h, use_reentrant=False)
    return found


BODIES = [dice, checked, gcd, schedule, sizes, compared, as_array, places, named, written, overwritten, of_a_global,
          cached, in_checkpoint]  # fmt: skip


@pytest.mark.parametrize("body", BODIES)
def test_a_value_that_hangs_on_no_input_is_known(body: Body) -> None:
    verified(made(body), ["dp=2,tp=2", "dp=3"], loss_fn, (rows(),))


@pytest.mark.parametrize("body", [dice, schedule, written])
def test_with_microbatches(body: Body) -> None:
    verified(made(body), ["dp=2", "pp=2"], loss_fn, (rows(),), microbatches=2)


def test_without_a_guard_a_note_or_a_permission() -> None:
    for body in (dice, checked, places):
        found = autopar.compile(made(body), "dp=2", loss_fn=loss_fn, batch=(rows(),))
        assert not found.notes and {out.kind for out in found.program.outputs} == {"loss", "gradient", "buffer"}


def test_the_plain_model_is_as_it_was() -> None:
    model = made(of_a_global)
    before = [TABLE.clone(), model.scale.clone(), *(t.clone() for t in model.sizes)]
    autopar.compile(model, "dp=2", loss_fn=loss_fn, batch=(rows(),))
    assert all(map(torch.equal, before, [TABLE, model.scale, *model.sizes]))


# -- what does hang on something ------------------------------------------------------------------------------------


def by_input(m: Any, h: Tensor, x: Tensor) -> Tensor:
    table = torch.zeros(3)
    table[0] = x.sum()
    return h * 2 if table.sum() > 0 else h


def by_a_view(m: Any, h: Tensor, x: Tensor) -> Tensor:
    table = torch.zeros(3)
    table[1:].view(2, 1).add_(x.sum())
    return h * table.tolist()[1]


def by_a_base(m: Any, h: Tensor, x: Tensor) -> Tensor:
    table = torch.zeros(3)
    row = table[1:]
    table.copy_(x[0, 0, :3])
    return h * float(row[0])


def by_data(m: Any, h: Tensor, x: Tensor) -> Tensor:
    table = torch.zeros(3)
    table.data.fill_(x.sum())
    return h * float(table[0])


def by_out(m: Any, h: Tensor, x: Tensor) -> Tensor:
    table = torch.zeros(())
    torch.sum(x, (0, 1, 2), out=table)
    return h * float(table)


def by_inference(m: Any, h: Tensor, x: Tensor) -> Tensor:
    """Tensors of inference mode count no writes."""
    with torch.inference_mode():
        table = torch.zeros(3)
        table[0] = x.sum()
        table[1:].add_(x.sum())
        return h * 2 if table.sum() > 0 else h


def by_set(m: Any, h: Tensor, x: Tensor) -> Tensor:
    table, other = torch.zeros(3), torch.ones(3)
    with torch.no_grad():
        other.copy_(x[0, 0, :3])
        table.set_(other)
    return h * 2 if table.sum() > 0 else h


def by_swap(m: Any, h: Tensor, x: Tensor) -> Tensor:
    table = torch.zeros(3)
    table.data = x[0, 0, :3].detach()
    return h * 2 if table.sum() > 0 else h


def by_chunks(m: Any, h: Tensor, x: Tensor) -> Tensor:
    """A write through one of several results, in a list."""
    parts = torch.zeros(4).chunk(2)
    torch._foreach_add_(list(parts), [x.sum(), x.mean()])
    return h * 2 if parts[0].sum() > 0 else h


def by_function(m: Any, h: Tensor, x: Tensor) -> Tensor:
    class Fill(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, table: Tensor, x: Tensor) -> Tensor:
            ctx.mark_dirty(table)
            return table.fill_(x.sum())

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0], None

    table = torch.zeros(3)
    Fill.apply(table, x)
    return h * 2 if table.sum() > 0 else h


def by_weight(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h * 2 if (torch.ones(8) * m.linear.weight).sum() > 0 else h


def by_buffer(m: Any, h: Tensor, x: Tensor) -> Tensor:
    m.count += 1
    return h * 2 if m.count > 1 else h


def by_chance(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h * (torch.rand(3) + 1).tolist()[0]


def by_other_chance(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h * (torch.poisson(torch.ones(3)) + 1).tolist()[0]


def by_initialisation(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h * nn.init.xavier_uniform_(torch.zeros(3, 3)).tolist()[0][0]


def by_memory(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h * 2 if torch.empty(3).sum() > 0 else h


def by_clock(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h * 2 if torch.tensor([time.perf_counter()])[0] > 0 else h


@pytest.mark.parametrize(
    "body",
    [by_swap, by_a_base, by_data, by_out, by_memory, by_clock],
)
def test_a_value_that_hangs_on_something_is_refused(body: Body) -> None:
    with pytest.raises(CaptureError) as caught:
        autopar.compile(made(body), "dp=2", loss_fn=loss_fn, batch=(rows(),))
    lines = range(body.__code__.co_firstlineno, body.__code__.co_firstlineno + 16)
    assert any(f"{__file__}:{line}\n" in str(caught.value) for line in lines), caught.value


@pytest.mark.parametrize("body", [by_a_view, by_chance, by_initialisation])
def test_numbers_of_a_list_stay_tensors(body: Body) -> None:
    """What they hang on is looked at in each step."""
    report = autopar.verify(made(body), "dp=2", loss_fn=loss_fn, batch=(rows(),))
    assert report.ok, report


def test_a_list_of_draws_that_are_not_ours_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"'aten.poisson.default' at test_constants\.py"):
        autopar.compile(made(by_other_chance), "dp=2", loss_fn=loss_fn, batch=(rows(),))


@pytest.mark.parametrize("body", [by_inference, by_set, by_chunks, by_function, by_input, by_weight, by_buffer])
def test_the_truth_of_what_hangs_on_something_is_guarded(body: Body) -> None:
    compiled = autopar.compile(made(body), "dp=2", loss_fn=loss_fn, batch=(rows(),))
    assert [out.kind for _, out in compiled.program.leaving].count("guard") == 1
    if body is not by_inference:  # in which the plain module has no gradients either
        report = autopar.verify(made(body), "dp=2", loss_fn=loss_fn, batch=(rows(),))
        assert report.ok, report


def counts(m: Any, h: Tensor, x: Tensor) -> Tensor:
    m.seen = m.seen + 1
    return h * 2 if m.seen > 100 else h


def counts_in_a_list(m: Any, h: Tensor, x: Tensor) -> Tensor:
    m.kept[0] = m.kept[0] + 1
    return h * 2 if m.kept[0] > 100 else h


def counts_in_place(m: Any, h: Tensor, x: Tensor) -> Tensor:
    m.cache.setdefault("n", torch.zeros(3))
    m.cache["n"] += 1
    return h * 2 if m.cache["n"].sum() > 100 else h


def counts_a_number(m: Any, h: Tensor, x: Tensor) -> Tensor:
    m.calls += 1
    return h * 2 if torch.tensor([m.calls]).sum() > 100 else h


def counts_outside(m: Any, h: Tensor, x: Tensor) -> Tensor:
    m.sizes[0].add_(1)
    return h * 2 if m.sizes[0] > 100 else h


@pytest.mark.parametrize("body", [counts, counts_in_a_list, counts_in_place, counts_a_number, counts_outside])
def test_what_counts_the_steps_is_refused_though_no_branch_changes_yet(body: Body) -> None:
    model = made(body)
    with pytest.raises(CaptureError) as caught:
        autopar.compile(model, "dp=2", loss_fn=loss_fn, batch=(rows(),))
    lines = range(body.__code__.co_firstlineno, body.__code__.co_firstlineno + 5)
    assert any(f"{__file__}:{line}\n" in str(caught.value) for line in lines), caught.value
    assert float(model.seen) == float(model.kept[0]) == 0 and not model.cache


def test_an_array_of_a_tensor_is_read_only() -> None:
    """numpy would write where the program does not see it."""

    def body(m: Any, h: Tensor, x: Tensor) -> Tensor:
        table = torch.zeros(3)
        table.numpy()[0] = 5
        return h * table.sum()

    with pytest.raises(CaptureError, match="read-only"):
        autopar.compile(made(body), "dp=2", loss_fn=loss_fn, batch=(rows(),))
