"""What users hold of a parallel model gives one device's numbers in any function of torch, or says that it cannot.

The op database of torch is in test_tensors_opinfo.py.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from processes import Ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.errors import AutoparError, RankError
from autopar.ir.layout import parse_layout
from autopar.ir.mesh import parse_mesh
from autopar.parallel.tensors.parameter import ParameterTensor
from autopar.parallel.weights.distribute import Distributor
from autopar.torch_compat import SUBCLASSED_DTENSORS

pytestmark = pytest.mark.gloo
LAYOUTS = (
    ("[-]", (12,)),
    ("[tp:dp]", (12,)),
    ("[dp:tp]", (12,)),
    ("[dp]", (7,)),  # uneven: 4 and 3
    ("[3:tp,-]", (12, 3)),
    ("[3:tp:dp,-]", (12, 3)),
    ("[dp,tp]", (4, 6)),
    ("[-,tp]", (3, 4)),
    ("[dp,-]", (5, 3)),
)


def distributor(mesh: str = "dp=2,tp=2") -> Distributor:
    parsed = parse_mesh(mesh)
    return Distributor(parsed, init_device_mesh("cpu", parsed.shape, mesh_dim_names=parsed.names), lambda what: None)


def held(where: Distributor) -> list[tuple[str, nn.Parameter, Tensor]]:
    """A parameter of each layout, and the plain one with the same value."""
    found = []
    for at, (text, shape) in enumerate(LAYOUTS):
        value = torch.randn(shape, generator=torch.Generator().manual_seed(at), dtype=torch.float64)
        found.append((text, where.parameter(value.clone().requires_grad_(), parse_layout(text)), value))
    return found


# -- reductions and what is computed of them ------------------------------------------------------------------------


def _numbers(rank: int) -> None:
    for text, p, w in held(distributor()):
        with torch.no_grad():
            pairs = {
                "sum": (p.pow(2).sum().item(), w.pow(2).sum().item()),
                "max": (float(p.abs().max()), float(w.abs().max())),
                "min": (p.min().item(), w.min().item()),
                "mean": (p.mean().item(), w.mean().item()),
                "std": (p.std().item(), w.std().item()),
                "norm": (p.norm().item(), w.norm().item()),
                "norm 1": (p.norm(1).item(), w.norm(1).item()),
                "norm 0": (torch.linalg.vector_norm(p, 0).item(), torch.linalg.vector_norm(w, 0).item()),
                "prod": (p.prod().item(), w.prod().item()),
                "any": (bool((p > 1).any()), bool((w > 1).any())),
                "all": (bool((p > -9).all()), True),
                "count": (p.count_nonzero().item(), w.count_nonzero().item()),
                "argmax": (int(p.argmax()), int(w.argmax())),
                "median": (p.median().item(), w.median().item()),
                "compared": (bool(p.norm() > w.norm() / 2), True),
                "text": (float(f"{p.grad_fn or p.norm():.3f}"), float(f"{w.norm():.3f}")),
                "dot": (torch.dot(p.flatten(), p.flatten()).item(), torch.dot(w.flatten(), w.flatten()).item()),
            }
        for what, (got, wanted) in pairs.items():
            assert got == pytest.approx(wanted, rel=1e-12), (text, what, got, wanted)
        assert p.tolist() == w.tolist() and torch.equal(p.full_tensor(), w), text
        assert torch.equal((p > 0).full_tensor(), w > 0)
        other = p.detach().clone()
        assert torch.equal(other, p.detach()), text
        other.view(-1)[-1] += 1
        assert not torch.equal(other, p.detach()), (text, "a rank whose part is the same says so, too")
        z, plain = p.detach() * (1 + 2j), w * (1 + 2j)
        for order in (2.0, 1.0, float("inf"), 0.0):
            norms = [torch.linalg.vector_norm(each, order).item() for each in (z, plain)]
            assert norms[0] == pytest.approx(norms[1], rel=1e-12), (text, "complex", order, norms)
        nan = p.detach().clone()
        nan.view(-1)[-1] = float("nan")
        assert nan.max().isnan() and nan.sum().isnan() and not bool(nan.isfinite().all()), text


def test_reductions_are_over_all_ranks(four: Ranks) -> None:
    four.run(_numbers)


def _loop(module: nn.Module, start: dict[str, Tensor]) -> None:
    """A hand-written clip, decay, noise, moving average and comparison, as in many a training script."""
    parameters = list(module.parameters())
    total = sum(p.grad.pow(2).sum().item() for p in parameters) ** 0.5
    norm = torch.sqrt(sum((p.grad.detach() ** 2).sum() for p in parameters))
    assert float(norm) == pytest.approx(total, rel=1e-12)
    with torch.no_grad():
        for p in parameters:
            if total > 0.1:
                p.grad.mul_(0.1 / (total + 1e-6))
            p.grad.clamp_(-p.abs().max(), p.abs().max())
            scale = 1.0 if p.norm() == 0 else (p.norm() / p.grad.norm().clamp(min=1e-3)).clamp(max=2)  # as LARS
            p.sub_(p.grad * scale, alpha=0.1)
            p.mul_(1 - 0.01).add_(torch.randn_like(p), alpha=1e-3)
            p.data = torch.where(p.data.abs() < 1e-3, torch.zeros_like(p), p.data)
        for name, p in module.named_parameters():
            start[name].mul_(0.9).add_(p.detach(), alpha=0.1)


def _by_hand(rank: int, mesh: str, zero: int) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 5)).double()

    x, y = torch.randn(8, 6).double(), torch.randn(8, 5).double()
    loss = lambda model, x, y: nn.functional.mse_loss(model(x), y)  # noqa: E731
    plain, model = build(), autopar.parallelize(build(), mesh, loss_fn=loss, zero=zero)
    model.prepare(x, y)
    averages = [{n: p.detach().clone() for n, p in m.named_parameters()} for m in (model, plain)]
    for step in range(3):
        loss(plain, x, y).backward()
        model.forward_backward(x, y)
        for m, average in zip((model, plain), averages, strict=True):
            torch.manual_seed(step)
            _loop(m, average)
            m.zero_grad()
    whole = model.full_state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(averages[0][name].full_tensor(), averages[1][name], rtol=1e-10, atol=1e-12)
        assert rank or torch.allclose(whole[name], value, rtol=1e-10, atol=1e-12), name


@pytest.mark.parametrize(("mesh", "zero"), [("dp=2,tp=2", 3), ("dp=2,pp=2", 1), ("dp=4", 0)])
def test_a_hand_written_loop(four: Ranks, mesh: str, zero: int) -> None:
    four.run(_by_hand, mesh, zero)


# -- views, writes, random numbers ----------------------------------------------------------------------------------


def _writes(rank: int) -> None:
    for text, p, w in held(distributor()):
        with torch.no_grad():
            for t in (p, w):
                t[0] = 1
                t.data[-1].fill_(3)
                t.view(-1)[2:4] *= 5
                t.flatten()[0]  # no write
                t.unsqueeze(0).chunk(1)[0].add_(1)
                t[torch.tensor([1, 2])] = 7
                t.masked_fill_(t > 6, 6.5)
                if t.ndim == 2:
                    t.t()[1].zero_()
                    t.fill_diagonal_(4)
                    t.triu_()
                    nn.init.orthogonal_(t, generator=torch.Generator().manual_seed(3))
        assert torch.equal(p.full_tensor(), w), (text, p.full_tensor(), w)
        row = p.detach()[0]
        with torch.no_grad():
            p.add_(1)
        assert torch.equal(row.full_tensor(), (w + 1)[0]), "a view shows what is written later"
        copied = copy.deepcopy(p)
        p.data = p.data * 2
        assert torch.equal(p.full_tensor(), 2 * (w + 1)) and torch.equal(copied.full_tensor(), w + 1)
        loss = (p[0] * p.t() if p.ndim == 1 else p @ p.t()).sum()
        v = (2 * (w + 1)).requires_grad_()
        (v[0] * v.t() if v.ndim == 1 else v @ v.t()).sum().backward()
        loss.backward()
        torch.testing.assert_close(p.grad.full_tensor(), v.grad)


def test_writes_through_views_land(four: Ranks) -> None:
    four.run(_writes)


FILLS = (
    lambda t: nn.init.normal_(t),
    lambda t: nn.init.trunc_normal_(t),
    lambda t: t.add_(torch.randn_like(t)),
    lambda t: t.uniform_(-1, 1),
    lambda t: t.copy_(nn.functional.dropout(t, 0.5)),
    lambda t: t.bernoulli_(0.5).exponential_(),
    lambda t: t.copy_(torch.bernoulli(t.sigmoid())),
    lambda t: t[0].normal_(),
    lambda t: t.normal_(generator=torch.Generator().manual_seed(5)),
    lambda t: t.mul_(torch.rand_like(t, dtype=torch.float32)),
)


def _random(rank: int, owner: int | None) -> None:
    where = distributor("pp=2,tp=2" if owner is not None else "dp=2,tp=2")
    layouts = (("[tp,-]", (4, 3)), ("[]", ()), ("[-]", (5,))) if owner is not None else LAYOUTS
    for text, shape in layouts:
        value = torch.rand(shape, generator=torch.Generator().manual_seed(1))
        for at, fill in enumerate(FILLS):
            if not shape and at in (7,):
                continue
            p, w = where.parameter(value.clone(), parse_layout(text), owner), value.clone()
            for seed in (0, rank):  # alike on all ranks, or not
                torch.manual_seed(0)
                fill(w)
                after = torch.get_rng_state()
                torch.manual_seed(seed)
                mine = torch.get_rng_state()
                with torch.no_grad():
                    fill(p)
                assert torch.equal(p.full_tensor(), w), (text, at)
                assert torch.equal(torch.get_rng_state(), after if seed == 0 else mine), (text, at)


@pytest.mark.parametrize("owner", [None, 1])
def test_random_functions_draw_what_one_device_draws(four: Ranks, owner: int | None) -> None:
    four.run(_random, owner)


def _refused(rank: int) -> None:
    for text, p, w in held(distributor())[1:]:
        whole = p.detach()
        for name, call in {
            "data = ": lambda: setattr(p, "data", w[:1]),  # noqa: B023
            "numpy": whole.numpy,
            "data_ptr": whole.data_ptr,
            "resize_": lambda: whole.resize_(2),  # noqa: B023
            "set_": lambda: whole.set_(w),  # noqa: B023
            "share_memory_": whole.share_memory_,
            "gradients those of the whole batch, already: leave": lambda: dist.all_reduce(whole),  # noqa: B023
        }.items():
            if name.startswith("gradients") and not SUBCLASSED_DTENSORS:
                continue  # torch itself has to refuse it there
            with pytest.raises(AutoparError, match=name):
                call()
        mine = torch.full_like(w, rank)
        with torch.no_grad(), pytest.raises(RankError, match="rank 1, 2, 3 has other values than rank 0"):
            p.mul_(mine)
        assert torch.equal(p.full_tensor(), w), text


def test_what_cannot_be_right_is_refused(four: Ranks) -> None:
    four.run(_refused)


def _lists(rank: int) -> None:
    """What optimizers and clipping do on a GPU: lists, of tensors that lie alike or not."""
    where = distributor()
    ours, plain = zip(*[(p.detach(), w.clone()) for _, p, w in held(where)], strict=True)
    other = [where.split(w * 2, parse_layout(str([*["-"] * w.ndim]).replace("'", "").replace(" ", ""))) for w in plain]
    twice = [w * 2 for w in plain]
    for a, b in ((list(ours), list(plain)),):
        mixed, same = (other, twice)
        torch._foreach_add_(a, mixed, alpha=0.5)
        torch._foreach_add_(b, same, alpha=0.5)
        torch._foreach_mul_(a, torch.tensor(0.5))
        torch._foreach_mul_(b, torch.tensor(0.5))
        torch._foreach_lerp_(mixed, a, 0.3)
        torch._foreach_lerp_(same, b, 0.3)
        torch._foreach_add_(a, [w.clone() for w in twice])  # whole and plain: each rank takes its part of them
        torch._foreach_add_(b, [w.clone() for w in twice])
        for order in (2, 1, float("inf"), 3):
            for x, y in zip(torch._foreach_norm(a, order), torch._foreach_norm(b, order), strict=True):
                torch.testing.assert_close(x.full_tensor(), y)
        for op in (torch._foreach_sqrt, torch._foreach_abs, torch._foreach_neg, torch._foreach_max):
            for x, y in zip(op(a), op(b), strict=True):
                torch.testing.assert_close(x.full_tensor(), y, equal_nan=True)
        for x, y in zip([*a, *mixed], [*b, *same], strict=True):
            torch.testing.assert_close(x.full_tensor(), y)
        assert all(type(x) is ParameterTensor for x in [*a, *mixed])
    found, factor = torch.zeros(1), torch.tensor(0.5)
    bad = [where.split(torch.tensor([0.0] * 11 + [float("inf")]), parse_layout("[tp:dp]"))]
    torch._amp_foreach_non_finite_check_and_unscale_(bad, found, factor)
    assert found.item() == 1


def test_lists_of_tensors_that_lie_anyhow(four: Ranks) -> None:
    four.run(_lists)
