"""Loops over experts that take the rows of each by torch.where(mask), and add them back."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from shares import in_turns
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from verified import Once, verified

from autopar.api import compile
from autopar.capture import capture
from autopar.capture.step_kind import StepKind
from autopar.errors import CaptureError
from autopar.ir.program import record

WIDTH, EXPERTS, CHOSEN = 12, 4, 2
Step = Callable[..., Any]


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 24), nn.Linear(WIDTH, 24, bias=False)
        self.down = nn.Linear(24, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Mixture(nn.Module):
    """`step` computes one expert, as a library writes it; it may give a term of the loss. by: the mask of an expert is
    [chosen, tokens] or [tokens, chosen]."""

    def __init__(self, step: Step, by: str = "chosen") -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.step, self.by = step, by

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, WIDTH)
        weights, chosen = torch.topk(self.router(rows).softmax(-1), CHOSEN)
        out = torch.zeros_like(rows)
        mask = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
        loss = 0.0
        for e, expert in enumerate(self.experts):
            which, token = torch.where(mask[e]) if self.by == "chosen" else reversed(torch.where(chosen == e))
            more = self.step(expert, rows, weights, which, token, out)
            loss = loss if more is None else loss + more
        return (out + rows).square().mean() + loss


def made(step: Step, by: str = "chosen") -> tuple[nn.Module, tuple[Tensor]]:
    torch.manual_seed(0)
    return Mixture(step, by), (torch.randn(6, 5, WIDTH),)


# --- as libraries write it


def mixtral(expert: nn.Module, rows: Tensor, weights: Tensor, which: Tensor, token: Tensor, out: Tensor) -> None:
    """transformers before 5, and all that came of it."""
    if token.shape[0] == 0:
        return
    current = rows[None, token].reshape(-1, WIDTH)
    out.index_add_(0, token, (expert(current) * weights[token, which, None]).to(rows.dtype))


def tutorial(expert: nn.Module, rows: Tensor, weights: Tensor, which: Tensor, token: Tensor, out: Tensor) -> None:
    out[token] += weights[token, which].unsqueeze(-1) * expert(rows[token])


def selected(expert: nn.Module, rows: Tensor, weights: Tensor, which: Tensor, token: Tensor, out: Tensor) -> None:
    if token.numel() > 0:
        out.index_add_(0, token, expert(rows.index_select(0, token)), alpha=0.5)


def divided(expert: nn.Module, rows: Tensor, weights: Tensor, which: Tensor, token: Tensor, out: Tensor) -> None:
    """By what is zero in rows of other experts: these must not make a gradient of nothing."""
    mine = F.layer_norm(rows[token], (WIDTH,)) + (rows[token].abs() + 1).log()
    out.index_add_(0, token, mine.softmax(-1) * weights[token, which][:, None] / (expert(rows[token]) * 8))


def in_place(expert: nn.Module, rows: Tensor, weights: Tensor, which: Tensor, token: Tensor, out: Tensor) -> None:
    """What is taken is a copy: to write into it changes no row of the tensor."""
    mine = rows[token]
    mine *= 2
    y = expert(mine)
    y.mul_(weights[token, which, None])
    out[token] += y
    out[token] *= 0.5


def normed(expert: nn.Module, rows: Tensor, weights: Tensor, which: Tensor, token: Tensor, out: Tensor) -> None:
    """RMSNorm as transformers spells it, of parts of the width too."""
    y = expert(rows[token])
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
    parts = y.unflatten(-1, (3, 4))
    y = (parts * (parts.sum(dim=-1, keepdim=True) + parts.sum((1, 2))[:, None, None])).flatten(1)
    out.index_add_(0, token, y * weights[token, which].unsqueeze(-1))


def counted(expert: nn.Module, rows: Tensor, weights: Tensor, which: Tensor, token: Tensor, out: Tensor) -> None:
    """Padding adds nothing, whatever is added."""
    out.index_add_(0, token, torch.ones_like(rows[token]))
    out.index_add_(0, token, expert(rows[token]))


LIBRARIES = {
    "counted": counted,
    "normed": normed,
    "in place": in_place,
    "mixtral": mixtral,
    "tutorial": tutorial,
    "selected": selected,
    "divided": divided,
}


WRITTEN = list(itertools.product(LIBRARIES, ("chosen", "tokens")))


@pytest.mark.parametrize(("written", "meshes"), list(in_turns(WRITTEN, ("dp=2,tp=2", "dp=3", "dp=2,tp=3"), 3)))
def test_the_numbers_are_those_of_one_device(written: tuple[str, str], meshes: tuple[str, ...]) -> None:
    name, by = written
    module, batch = made(LIBRARIES[name], by)
    once = Once.of(module, None, batch)
    for mesh in meshes:
        once.right(mesh)
    once.right("dp=2", microbatches=3)


def test_one_mask_for_the_rows_of_each_expert() -> None:
    """A mask with a dim, as top-1 routing has it, by nonzero."""

    class Switch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(WIDTH, EXPERTS)
            self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

        def forward(self, x: Tensor) -> Tensor:
            weight, best = self.router(x).softmax(-1).max(-1)
            out = torch.zeros_like(x)
            for e, expert in enumerate(self.experts):
                (token,) = (best == e).nonzero(as_tuple=True)
                out[token] = expert(x[token]) * weight[token][:, None]
            return (out + x).square().mean()

    torch.manual_seed(0)
    batch = (torch.randn(12, WIDTH),)
    verified(Switch(), ("dp=2,tp=2", "dp=3", "dp=2,tp=3"), None, batch)
    verified(Switch(), ("dp=2",), None, batch, microbatches=3)


def test_an_expert_without_rows() -> None:
    """All tokens to two experts: the others have none, and no gradient but zeros."""
    module, batch = made(mixtral)
    with torch.no_grad():
        module.router.weight.zero_()
        module.router.weight[:2] = 1.0
    verified(module, ("dp=2,tp=2", "dp=3"), None, batch)


def test_rows_stay_on_their_ranks_and_products_are_by_expert() -> None:
    found = compile(*made(mixtral)[:1], "dp=2,tp=2", batch=made(mixtral)[1])
    assert not [row for row in found.collectives if row.op in ("all_gather", "all_to_all")]
    products = [node for node in found.program.calls() if record(node).flops and "experts" in record(node).module]
    assert products and all("expert_mm" in str(node.target) for node in products)


def test_rows_are_written_as_they_are_read() -> None:
    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            y, out = self.up(x), torch.zeros_like(x)
            (token,) = torch.where(x[:, 0] > 0)
            out[token] += y[token]
            out[token] *= 2
            kept = y[token]
            kept += 1
            out.index_add_(0, token, kept, alpha=3)
            return (out + y).square().mean()

    torch.manual_seed(0)
    verified(Written(), ("dp=2,tp=2", "dp=3"), None, (torch.randn(12, WIDTH),))


class Again(nn.Module):
    """A mixture that is computed again in the backward pass; reentrant: by an autograd function of torch."""

    def __init__(self, mixture: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.mixture, self.before, self.reentrant = mixture, nn.Linear(WIDTH, WIDTH), reentrant

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.mixture, self.before(x), use_reentrant=self.reentrant)


def computed_again(expert: nn.Module, rows: Tensor, weights: Tensor, which: Tensor, token: Tensor, out: Tensor) -> None:
    """An expert alone: its rows are known from the forward pass."""
    y = checkpoint(expert, rows[token].abs().log(), use_reentrant=False)
    out.index_add_(0, token, y * weights[token, which, None])


@pytest.mark.parametrize(
    "module",
    [Again(Mixture(mixtral), False), Again(Mixture(divided), True), Mixture(computed_again)],
    ids=["whole", "reentrant", "expert"],
)
def test_what_a_checkpoint_computes_again_sees_no_padding_either(module: nn.Module) -> None:
    torch.manual_seed(0)
    verified(module, ("dp=2",), None, (torch.randn(6, 5, WIDTH),))


# --- what must be refused: where padding would be seen, or its number


def through(change: Callable[[Tensor], Tensor]) -> Step:
    def step(expert: nn.Module, rows: Tensor, weights: Tensor, which: Tensor, token: Tensor, out: Tensor) -> None:
        out.index_add_(0, token, change(expert(rows[token])))

    return step


def beside(term: Callable[[Tensor, Tensor], Tensor]) -> Step:
    def step(expert: nn.Module, rows: Tensor, weights: Tensor, which: Tensor, token: Tensor, out: Tensor) -> Any:
        y = expert(rows[token])
        out.index_add_(0, token, y)
        return term(y, token)

    return step


def capped(expert: nn.Module, rows: Tensor, weights: Tensor, which: Tensor, token: Tensor, out: Tensor) -> None:
    """A capacity: only the first three rows."""
    token = token[:3]
    out.index_add_(0, token, expert(rows[token]))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y * 2 + y.mean()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 2


REFUSED: dict[str, tuple[Step, str]] = {
    "transposed": (through(lambda y: y.T.softmax(-1).T), "here softmax.. does not: it takes the rows together"),
    "divided by their number": (through(lambda y: y / y.shape[0]), "how many rows a mask selects"),
    "a branch on their number": (through(lambda y: y * 2 if len(y) > 20 else y), "how many rows a mask selects"),
    "a capacity": (capped, "here getitem"),
    "batch norm": (through(lambda y: F.batch_norm(y, None, None, training=True)), "here batch_norm"),
    "noise": (through(lambda y: F.alpha_dropout(y, 0.5, True)), "here alpha_dropout"),
    "a softmax over rows": (through(lambda y: y.softmax(0)), "here softmax"),
    "parts of the rows": (through(lambda y: torch.cat(y.split(6), 0)), "here split"),
    "sorted": (through(lambda y: y.sort(0)[0]), "here sort"),
    "a product between rows": (through(lambda y: y @ (y.transpose(0, 1) @ y)), "here matmul.. does not: it adds"),
    "a function of one's own": (through(Doubled.apply), "by row"),
    "their number in the loss": (beside(lambda y, token: y.new_ones(()) * len(token)), "here new_ones"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_sees_the_padding_is_refused(name: str) -> None:
    step, said = REFUSED[name]
    module, batch = made(step)
    with pytest.raises(CaptureError, match=said):
        capture(module.double(), None, tuple(x.double() for x in batch), {})


def test_rows_that_leave_the_model_are_refused() -> None:
    class Leaving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.up(x)
            (token,) = torch.where(x[:, 0] > 0)
            return y.mean(), y[token]

    with pytest.raises(CaptureError, match="here what the model returns does not"):
        capture(Leaving(), None, (torch.randn(6, WIDTH),), {}, kind=StepKind.OUTPUT)
