"""Slices of a sequence under cp: the whole stands for them where nobody sees the dropped rows, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from shares import in_turns
from torch import Tensor, nn
from verified import verified

from autopar.api import compile
from autopar.capture import capture
from autopar.compiler.meshes import mesh_of
from autopar.ir.plan import Plan
from autopar.passes.lengths import sliced_rows
from autopar.passes.lengths.reslice import reslice
from autopar.passes.lengths.unslice import _Unslice, unslice

WORDS, WIDTH, BATCH, TIME = 20, 12, 4, 24
Loss = Callable[[Any, Tensor, Tensor], Any]
MESHES = ("cp=2", "cp=3", "dp=2,cp=2", "cp=2,tp=2")


class Words(nn.Module):
    """Tokens to hidden rows, each by itself, and those to logits. `more` is added to what is sliced: `last` in the last
    row."""

    def __init__(self, last: float = 0.0) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)
        self.more = nn.Buffer(torch.zeros(TIME, 1))
        self.more[-1] = last

    def hidden(self, tokens: Tensor) -> Tensor:
        return self.mix(self.embed(tokens)).tanh() + self.more

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.mix(self.embed(tokens)).tanh()) + self.more


def batch() -> tuple[Tensor, Tensor]:
    """Tokens and labels, some ignored, unevenly."""
    torch.manual_seed(0)
    x, y = torch.randint(WORDS, (BATCH, TIME)), torch.randint(WORDS, (BATCH, TIME))
    y[0, 2:7] = y[2, :20] = y[1, -1] = -100
    return x, y


def flat(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m(x)[:, :-1].flatten(0, 1), y[:, 1:].flatten())


def moved(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """As transformers wrote it for long."""
    logits = m(x)[..., :-1, :].contiguous()
    return F.cross_entropy(logits.view(-1, WORDS), y[..., 1:].contiguous().view(-1), reduction="sum")


def classes_second(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m(x)[:, :-1].transpose(1, 2), y[:, 1:], label_smoothing=0.1)


def weighted_classes(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    weight = torch.linspace(0.5, 2, WORDS, dtype=torch.float64)
    return F.cross_entropy(m(x)[:, :-1].transpose(1, 2), y[:, 1:], weight=weight)


def gathered(m: nn.Module, x: Tensor, _: Tensor) -> Tensor:
    found = F.log_softmax(m(x)[:, :-1], -1).gather(-1, x[:, 1:, None])
    return -found.mean()


def weighted(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Each token has a weight, of floats or integers."""
    losses = F.cross_entropy(m(x)[:, :-1].transpose(1, 2), x[:, 1:], reduction="none")
    weight = (y[:, 1:] >= 0) * torch.arange(1, TIME, dtype=torch.float64)
    return (losses * weight).sum() / weight.sum()


def masked(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    mask = (y != -100).long()[:, 1:]
    losses = F.cross_entropy(m(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten(), reduction="none")
    return (losses.view(BATCH, -1) * mask).sum() / mask.sum().clamp(min=1)


def before_the_head(m: Words, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.head(m.norm(m.hidden(x)[:, :-1])).flatten(0, 1), y[:, 1:].flatten())


def normalised(m: Words, x: Tensor, y: Tensor) -> Tensor:
    """The gradients of the norm's weights are sums over the rows of a slice."""
    return (m.norm(m.hidden(x)[:, :-1]) * m.mix.bias).square().sum()


def behind(m: Words, x: Tensor, _: Tensor) -> Tensor:
    """Rows from one on: without the first token."""
    return m.norm(m.hidden(x)[:, 1:]).mean(1).square().sum()


def inside(m: Words, x: Tensor, _: Tensor) -> Tensor:
    return F.smooth_l1_loss(m.head(m.hidden(x)[:, 1:-1]), F.one_hot(x[:, 1:-1], WORDS).double())


def three_times(m: Words, x: Tensor, y: Tensor) -> Tensor:
    """Two slices of their own lengths, and one of them for two losses."""
    short, logits = m.hidden(x)[:, :-2], m(x)[:, :-1]
    two = F.cross_entropy(m.head(short).flatten(0, 1), y[:, 2:].flatten())
    return two + F.cross_entropy(logits.flatten(0, 1), y[:, 1:].flatten()) + logits.logsumexp(-1).square().mean()


def predictive(m: Words, x: Tensor, _: Tensor) -> Tensor:
    """What follows is computed of the batch alone, and is no label."""
    after = F.one_hot(x, WORDS).double().cumsum(1)[:, 1:]
    return (m(x)[:, :-1] - after).square().mean()


def preferred(m: Words, x: Tensor, y: Tensor) -> Tensor:
    """As DPO does (trl): the first rows of the batch are preferred to the others."""
    labels, logits = y[:, 1:].clone(), m(x)[:, :-1]
    counts = labels != -100
    labels[labels == -100] = 0
    each = logits.log_softmax(-1).gather(2, labels.unsqueeze(2)).squeeze(2)
    score = (each * counts).sum(-1) / counts.sum(-1)
    return -F.logsigmoid(score[:2] - score[2:]).mean()


def distilled(m: Words, x: Tensor, y: Tensor) -> Tensor:
    """Two slices that belong together."""
    student, teacher = m(x)[:, :-1].reshape(-1, WORDS), m.head(m.hidden(x))[:, :-1].reshape(-1, WORDS)
    counts = (y[:, 1:] != -100).reshape(-1)
    each = F.kl_div(student.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="none").sum(-1)
    return (each * counts).sum() / counts.sum()


def clipped(m: Words, x: Tensor, y: Tensor) -> Tensor:
    """As PPO does: probabilities now and before, and advantages that are computed of the batch."""
    now = m(x)[:, :-1].log_softmax(-1).gather(-1, x[:, 1:, None]).squeeze(-1)
    ratio = (now - torch.linspace(-3, -2, TIME - 1, dtype=torch.float64)).exp()
    gain = y[:, 1:].double().flip(1).cumsum(1) / 50
    return -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()


def measured(m: Words, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """A metric beside the loss."""
    logits = m(x)[:, :-1]
    return F.cross_entropy(logits.transpose(1, 2), y[:, 1:]), (logits.argmax(-1) == y[:, 1:]).double().mean()


def also_embedded(m: Words, x: Tensor, _: Tensor) -> Tensor:
    """The labels are looked up in a table, too: there nothing is ignored."""
    after = x[:, 1:]
    hidden = m.hidden(x)[:, :-1] + m.embed(after)
    return F.cross_entropy(m.head(hidden).flatten(0, 1), after.flatten())


def hard(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The largest losses: a look along all rows, at a number of each."""
    losses = F.cross_entropy(m(x)[:, :-1].flatten(0, 1), y[:, 1:].flatten(), reduction="none")
    return losses.topk(7).values.mean()


def squares(x: Tensor) -> Tensor:
    return torch.eye(3, dtype=x.dtype) + 0.1 * x[..., :9].unflatten(-1, (3, 3))


UNSLICED: dict[str, Loss] = {
    each.__name__: each  # type: ignore[attr-defined]
    for each in (
        flat, moved, classes_second, weighted_classes, gathered, weighted, masked, before_the_head, normalised, behind,
        inside, three_times, predictive, preferred, distilled, clipped, measured, also_embedded,
        hard,
    )
}  # fmt: skip

# Where somebody sees the rows, or how many there are.
OTHERS: dict[str, Loss] = {
    "a row each": lambda m, x, _: (m(x)[:, 1:] - m(x)[:, :-1]).square().mean(),
    "a running sum": lambda m, x, _: m(x)[:, :-1].cumsum(1).square().mean(),
    "shifted": lambda m, x, _: (F.pad(m(x)[:, :-1], (0, 0, 1, 0)) * m(x)).square().mean(),
    "the largest": lambda m, x, _: m(x)[:, :-1].amax(1).square().mean(),
    "a softmax along": lambda m, x, _: (m(x)[:, :-1].softmax(1) * m(x)[:, :-1]).square().mean(),
    "drawn": lambda m, x, _: F.dropout(m(x)[:, :-1], 0.3).square().mean(),
    "solved": lambda m, x, _: torch.linalg.inv(squares(m.hidden(x))[:, :-1]).square().mean(),
    "half": lambda m, x, _: m(x)[:, :12].square().mean(),
    "of the channels": lambda m, x, _: m(x)[..., :-1].square().mean(),
}


# What a note says of these.
SEEN: dict[str, tuple[str, ...]] = {
    "a row each": ("slice_backward",),
    "a running sum": ("cumsum",),
    "the largest": ("amax at",),
    "shifted": ("constant_pad_nd at",),  # `shifts` comes before, and knows it
    "a softmax along": ("_softmax at",),
    "drawn": ("dropout at test_unslice.py", "it draws a number for each place"),
    "solved": ("it may refuse a row that the model has not",),
}


def spelled(take: Callable[[Tensor], Tensor], start: int = 1, stop: int = TIME) -> Loss:
    """The loss of most rows of the logits, however they are taken."""

    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(take(m(x)).flatten(0, 1), y[:, start:stop].flatten())

    return loss


LAST = TIME - 1
SPELLINGS: dict[str, Loss] = {
    "narrow": spelled(lambda x: x.narrow(1, 0, LAST)),
    "split": spelled(lambda x: x.split([LAST, 1], 1)[0]),
    "tensor_split": spelled(lambda x: x.tensor_split([LAST], 1)[0]),
    "split behind": spelled(lambda x: x.split([1, LAST], 1)[1]),
    "index": spelled(lambda x: x[:, torch.arange(LAST)]),
    "index behind": spelled(lambda x: x[:, torch.arange(1, TIME)]),
    "index inside": spelled(lambda x: x[:, torch.arange(1, LAST)], 1, LAST),
    "index by a list": spelled(lambda x: x[:, list(range(LAST))]),
    "index of the first dim": spelled(lambda x: x.transpose(0, 1)[torch.arange(LAST)].transpose(0, 1)),
    "index_select": spelled(lambda x: x.index_select(1, torch.arange(LAST))),
    "mask": spelled(lambda x: x[:, torch.arange(TIME) < LAST]),
    "mask behind": spelled(lambda x: x[:, torch.arange(TIME) > 0]),
    "pad": spelled(lambda x: F.pad(x, (0, 0, 0, -1))),
    "pad inside": spelled(lambda x: F.pad(x, (0, 0, -1, -1)), 1, LAST),
    "unbind and stack": spelled(lambda x: torch.stack(x.unbind(1)[:-1], 1)),
    "rows one by one": spelled(lambda x: torch.cat(x.split(1, 1)[1:], 1)),
    "reshaped": spelled(lambda x: x.unflatten(-1, (4, 5))[:, :-1].flatten(2)),
    "as_strided": spelled(lambda x: torch.as_strided(x, (BATCH, LAST, WORDS), (TIME * WORDS, WORDS, 1))),
}


@pytest.mark.parametrize(("name", "meshes"), list(in_turns(SPELLINGS, ("cp=2", "cp=2,tp=2"))))
def test_however_the_rows_are_taken_they_are_a_slice(name: str, meshes: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    for _, compiled in verified(Words(), meshes, SPELLINGS[name], batch(), steps=1):
        moved = [row for row in compiled.collectives if row.op in ("all_gather", "all_to_all", "reduce_scatter")]
        assert moved == [] and not [note for note in compiled.notes if "sequence" in note]


def test_parts_of_a_weight_keep_their_split() -> None:
    """The parts of one product are no lengths."""

    def parts(m: Words, x: Tensor, _: Tensor) -> Tensor:
        first, second = m.hidden(x).split([WIDTH - 4, 4], -1)
        return first.square().mean() + second.square().mean()

    program, plan = capture(Words(), parts, batch(), {}).program, Plan(mesh_of("cp=2,tp=2"), {})
    assert reslice(program, plan) is program


@pytest.mark.parametrize(("name", "meshes"), list(in_turns([*UNSLICED, *OTHERS], MESHES)))
def test_the_numbers_are_those_of_one_device(name: str, meshes: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    verified(Words(), meshes, (UNSLICED | OTHERS)[name], batch())


@pytest.mark.parametrize("name", UNSLICED)
def test_every_product_is_divided_and_no_activation_is_gathered(name: str) -> None:
    found = compile(Words().double(), "cp=2", loss_fn=UNSLICED[name], batch=batch())
    assert found.notes == ()
    gathered = [row for row in found.collectives if row.op in ("all_gather", "all_to_all", "reduce_scatter")]
    if name == "hard":  # a number a row
        assert sum(row.bytes for row in gathered) <= 3 * BATCH * TIME * 8
    else:
        assert gathered == []


@pytest.mark.parametrize("name", OTHERS)
def test_what_shows_the_rows_stays(name: str) -> None:
    program, plan = capture(Words(), OTHERS[name], batch(), {}).program, Plan(mesh_of("cp=2"), {})
    assert reslice(program, plan) is program
    found = unslice(program, plan)
    assert found.graph is program.graph
    assert [why for note in found.notes for why in SEEN.get(name, ()) if why in note] == list(SEEN.get(name, ()))
    assert bool(found.notes) == (name in SEEN)


def test_a_note_says_what_is_gathered_and_why() -> None:
    note = compile(Words().double(), "cp=2", loss_fn=OTHERS["a running sum"], batch=batch()).notes[0]
    line = note.split(":")[2].split(" ")[0]
    assert note == (
        f"axis 'cp': test_unslice.py:{line} takes 23 of 24 rows of a sequence, which are gathered, since the whole "
        f"cannot stand for them (cumsum at test_unslice.py:{line}: it takes the rows together)"
    )


@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "cp=1", "dp=4", "cp=5"])
def test_without_cp_nothing_changes(mesh: str) -> None:
    """cp=5 divides neither length."""
    program = capture(Words(), flat, batch(), {}).program
    assert unslice(program, Plan(mesh_of(mesh), {})) is program


INFINITE = (flat, gathered, weighted, masked, before_the_head, normalised, behind, inside, three_times)


def infinite(loss: Loss, last: float) -> Words:
    """A model of which the row that is dropped, the first one for `behind`, holds no number; one device is unharmed."""
    torch.manual_seed(0)
    model = Words(last).double()
    if loss is behind:
        model.more = nn.Buffer(model.more.flip(0))
    loss(model, *batch()).backward()
    assert all(grad.isfinite().all() for p in model.parameters() if (grad := p.grad) is not None)
    model.zero_grad()
    return model


@pytest.mark.parametrize("loss", INFINITE)
@pytest.mark.parametrize("last", [float("inf"), float("nan")])
def test_no_infinity_of_a_dropped_row_is_seen(loss: Loss, last: float) -> None:
    verified(infinite(loss, last), ("cp=2", "dp=2,cp=2"), loss, batch())


@pytest.mark.parametrize("name", ["flat", "before_the_head", "three_times"])
def test_sequence_parallelism_stages_and_micro_batches(name: str) -> None:
    torch.manual_seed(0)
    verified(Words(), ("cp=2,tp=2",), UNSLICED[name], batch(), sequence_parallel=True)
    verified(Words(), ("cp=2,pp=2", "dp=2,cp=2"), UNSLICED[name], batch(), microbatches=2)


def test_rows_that_are_not_chosen_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test the tester: dropped rows that are not set to zero, or multiplied by it."""
    monkeypatch.setattr(_Unslice, "_filled", lambda self, node, fill, user, name="": self._long(node, user))
    for loss in (gathered, behind, inside):
        with pytest.raises(AssertionError):
            verified(Words(), ("cp=2",), loss, batch())
    for loss in (flat, before_the_head):  # zeros by their labels, but 0 * inf is none
        verified(Words(), ("cp=2",), loss, batch())
        with pytest.raises(AssertionError):
            verified(infinite(loss, float("inf")), ("cp=2",), loss, batch())


def test_labels_that_count_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test the tester: labels padded with a word, and the sums left alone."""
    monkeypatch.setattr(sliced_rows.SlicedRows, "_fill", lambda self, value: None if self.is_whole(value[0]) else 0)
    monkeypatch.setattr(sliced_rows.SlicedRows, "must_be_zero", lambda *_: [])
    with pytest.raises(AssertionError):
        verified(Words(), ("cp=2",), flat, batch())
