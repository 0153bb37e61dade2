"""What a module does at its first call alone, how often a model is run for its reads, and `one_hot` by a tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from shares import pairs
from torch import Tensor, nn

from autopar import compile as compiled
from autopar import verify
from autopar.capture.python.attributes import Attributes
from autopar.capture.refusals.constructs import FIRST_CALL
from autopar.capture.refusals.user_lines import lines_that_change
from autopar.errors import CaptureError

RAN: list[int] = []  # one for each time that a model ran


def squares(model: nn.Module, *batch: Tensor) -> Tensor:
    return model(*batch).square().mean()


def data(*sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(1))


# --- one_hot with a number of classes that is a tensor


class Positions(nn.Module):
    """mixture-of-experts: places beyond the capacity have no class, so that as many classes are made as there are
    places, and cut."""

    def __init__(self, capacity: int, form: str) -> None:
        super().__init__()
        self.inner, self.out, self.capacity, self.form = nn.Linear(8, 8), nn.Linear(capacity, 4), capacity, form

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        y, size = self.inner(x), self.capacity
        classes: Any = max(index.max() + 1, size)  # type: ignore[call-overload]
        if self.form == "by keyword":
            taken = F.one_hot(index, num_classes=classes)[..., :size]
        elif self.form == "dims written out":
            taken = F.one_hot(index, classes)[:, :, 0:size]
        elif self.form == "of a part":
            taken = F.one_hot(index[:, 0], classes)[:, :size].unsqueeze(1)
        else:
            taken = F.one_hot(index, classes)[..., :size]
        return self.out(taken.to(y.dtype)) * y.sum(-1, keepdim=True)


@pytest.mark.parametrize(
    ("form", "beyond", "options"),
    list(
        pairs(
            ("cut", "by keyword", "dims written out", "of a part"), (True, False),
            ({"mesh": "dp=2,tp=2"}, {"mesh": "pp=2,dp=2", "microbatches": 2}),
        )
    ),
    ids=str,
)  # fmt: skip
def test_classes_that_are_cut_are_those_of_one_device(form: str, beyond: bool, options: Any) -> None:
    """Any two of these come together; all three in `make test-all`."""
    torch.manual_seed(0)
    index = torch.arange(12 * 3).reshape(12, 3) % (7 if beyond else 4)
    report = verify(Positions(5, form), loss_fn=squares, batch=(data(12, 3, 8), index), **options)
    assert report.ok and report.max_error < 1e-10, str(report)


@pytest.mark.parametrize(
    "use", [lambda taken, n: taken.float(), lambda taken, n: taken[0], lambda taken, n: taken[..., :n + 0 * n],
            lambda taken, n: torch.sum(taken, -1), lambda taken, n: taken[..., 1:3]],
)  # fmt: skip
def test_classes_that_are_not_cut_are_refused_at_the_line_that_made_them(use: Any) -> None:
    class Uncut(Positions):
        def forward(self, x: Tensor, index: Tensor) -> Tensor:
            count = index.max() + 1
            taken = F.one_hot(index, count)  # type: ignore[arg-type]
            return self.inner(x) * use(taken, count).sum()

    with pytest.raises(CaptureError) as caught:
        compiled(Uncut(5, ""), "dp=2", loss_fn=squares, batch=(data(12, 3, 8), torch.ones(12, 3, dtype=torch.int64)))
    assert "taken = F.one_hot(index, count)" in str(caught.value)
    assert (
        "This line has one_hot with a number of classes that is a tensor. Give it a Python number, "
        "F.one_hot(index, n), or cut it to one at once: F.one_hot(index, count)[..., :n]." in str(caught.value)
    )


# --- modules that their first call sets up


class SetUp(nn.Module):
    """ActNorm, variational strategies, checks of the first labels: set up by the first batch, each in its own way."""

    done: Tensor

    def __init__(self, way: str) -> None:
        super().__init__()
        self.inner, self.scale, self.way, self.is_done = nn.Linear(8, 8), nn.Parameter(torch.ones(8)), way, False
        self.register_buffer("done", torch.tensor(way not in ("data", "copied", "number")))

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if self.way == "data" and not self.done:
            self.scale.data = 1 / y.detach().std(0)
            self.done.fill_(True)
        if self.way == "copied" and not self.done.item():
            with torch.no_grad():
                self.scale.copy_(1 / y.std(0))
            self.done.fill_(True)
        if self.way == "number" and not bool(self.done):
            self.scale.data.copy_(1 / y.detach().std(0))
            self.done.fill_(True)
        if self.way == "python" and not self.is_done:
            y, self.is_done = y.clamp(-10, 10), True
        if (y.detach() > 1e6).any():  # a branch behind the flag: its other side changes nothing of that
            y = y * 0.5
        return y * self.scale


@pytest.mark.parametrize("way", ["data", "copied", "number"])
def test_a_first_step_sets_up_what_a_buffer_says_is_not(way: str) -> None:
    """The step that finds the flag down writes the parameter; those behind it are another program."""
    torch.manual_seed(0)
    model = SetUp(way)
    report = verify(model, "dp=2,tp=2", loss_fn=squares, batch=data(12, 8), steps=3)
    assert report.ok and report.max_error < 1e-10, str(report)
    assert not model.done and model.scale.equal(torch.ones(8)), "verify changed the user's module"


def test_a_first_call_is_refused_with_the_way_out_which_works() -> None:
    torch.manual_seed(0)
    model, x = SetUp("python"), data(12, 8)
    with pytest.raises(CaptureError) as caught:
        verify(model, "dp=2", loss_fn=squares, batch=x)
    assert str(caught.value).replace("\n(torch says", "(torch says").partition("(torch says")[0].endswith(FIRST_CALL)
    model(x)
    report = verify(model, "dp=2,tp=2", loss_fn=squares, batch=x)
    assert report.ok and report.max_error < 1e-10, str(report)


def test_where_all_sides_fail_the_likeliest_is_told() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.inner(x)
            for _ in range(3):
                if not (y > 100).any():
                    return y * float(y.mean().exp())
            raise ValueError("not after three tries")

    with pytest.raises(CaptureError, match=r"has float\(\) of a tensor"):
        compiled(Fails(), "dp=2", loss_fn=squares, batch=data(12, 8))


# --- values that are read


class Reading(nn.Module):
    """encodec: each layer asks buffers for its sizes; and some ask for them in other ways."""

    def __init__(self, reads: int, kind: str) -> None:
        super().__init__()
        self.inner, self.kind = nn.Linear(8, 8), kind
        for i in range(reads):
            self.register_buffer(f"size_{i}", torch.tensor([i % 3 + 1, 2]))

    def forward(self, x: Tensor) -> Tensor:
        RAN.append(1)
        for size in self.buffers():
            if self.kind == "of a batch":
                size = (x[0, :2] > 0).long() + size
            if self.kind == "written before":
                size = size.clone()
                size.add_(1)
            last = size * 1
            x = F.pad(x, (0, int(last[0])))[:, : x.shape[1]] * int(last.sum())
            if self.kind == "written after":
                part = last[:1]
                x = x + int(part)
                last.mul_(2)
                x = x + int(part)
        return self.inner(x)


@pytest.mark.parametrize("kind", ["of buffers", "of a batch", "written before", "written after"])
def test_values_that_are_read_are_those_of_one_device(kind: str) -> None:
    torch.manual_seed(0)
    report = verify(Reading(4, kind), "dp=2", loss_fn=squares, batch=data(12, 8), specialize=True)
    assert report.ok and report.max_error < 1e-10, str(report)


def test_a_model_with_many_reads_is_not_run_once_for_each() -> None:
    runs = []
    for reads in (2, 40):
        RAN.clear()
        found = compiled(Reading(reads, "of buffers"), "dp=2", loss_fn=squares, batch=data(12, 8), specialize=True)
        assert [out.kind for out in found.program.outputs].count("guard") == 2 * reads
        runs.append(len(RAN))
    assert runs[0] == runs[1] <= 4, runs


def test_what_was_written_into_since_is_read_anew() -> None:
    found = compiled(Reading(1, "written after"), "dp=2", loss_fn=squares, batch=data(12, 8), specialize=True)
    taken = [note.partition(" is taken as ")[2].partition(",")[0] for note in found.notes if "is taken as" in note]
    assert taken == ["1", "3", "1", "2"]


@pytest.mark.parametrize("options", [{}, {"specialize": True}], ids=str)
def test_nothing_of_the_users_is_written_into(options: Any) -> None:
    class Counts(nn.Module):
        count: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))

        def forward(self, x: Tensor) -> Tensor:
            self.count.add_(1)
            x.mul_(2)
            if self.count > 3:
                return self.inner(x) * 2
            return self.inner(x) if (x[0] == x[0]).all() else x

    model, x = Counts(), data(12, 8)
    report = verify(model, "dp=2", loss_fn=squares, batch=x, steps=5, **options)
    assert report.ok and model.count == 0 and torch.equal(x, data(12, 8)), str(report)
    compiled(model, "dp=2", loss_fn=squares, batch=x, **options)
    assert model.count == 0 and torch.equal(x, data(12, 8))


# --- the line of a change


def test_lines_of_several_changes_are_found_in_one_run() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen, self.inner = 0, nn.Linear(2, 2)
            self.kept: dict[str, Any] = {"a": [1], "b": 2}

        def forward(self) -> None:
            RAN.append(1)
            self.seen += 1
            self.kept["a"].append(2)
            self.kept["b"] = 3
            self.inner.weight = nn.Parameter(torch.ones(2, 2))

    model = Counts()
    attributes = Attributes(model)
    model()
    names = [change.name for change in attributes.changes()]
    assert sorted(names) == ["inner.weight", "kept['a']", "kept['b']", "seen"]
    attributes.restore()
    RAN.clear()
    first = Counts.forward.__code__.co_firstlineno + 2
    lines = lines_that_change(model, [attributes.watch(name) for name in names])
    assert {name: line[1] - first for name, line in zip(names, lines, strict=True) if line} == {
        "seen": 0, "kept['a']": 1, "kept['b']": 2, "inner.weight": 3,
    }  # fmt: skip
    assert len(RAN) == 1 and all(attributes.watch(name)() for name in names)


# --- buffers that each step makes anew


class Spiking(nn.Module):
    """snnTorch: membranes lie in a buffer that no checkpoint holds, of as many rows as the batch, with their graph.

    kind: "reset" before they are read, in each step; only in the "first" one; or a "persistent" buffer."""

    mem: Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.kind = nn.Linear(8, 8), kind
        self.register_buffer("mem", torch.zeros(0), persistent=kind == "persistent")

    def forward(self, x: Tensor) -> Tensor:
        if self.kind != "first":
            self.mem = torch.zeros_like(self.mem)
        for t in range(x.shape[1]):
            current = self.inner(x[:, t])
            if self.mem.shape != current.shape:
                self.mem = torch.zeros_like(current)
            self.mem = 0.9 * self.mem + current
        return torch.tanh(self.mem)


@pytest.mark.parametrize(
    "options", [{"mesh": "dp=2,tp=2"}, {"mesh": "dp=2", "microbatches": 3}, {"mesh": "pp=2,dp=2", "microbatches": 2}]
)
def test_a_buffer_that_each_step_makes_anew(options: dict[str, Any]) -> None:
    report = verify(Spiking("reset"), loss_fn=squares, batch=(data(12, 3, 8),), steps=3, **options)
    assert report.ok and report.max_error < 1e-10, report


def test_it_is_left_as_it_was_with_a_note() -> None:
    notes = compiled(Spiking("reset"), "dp=2", loss_fn=squares, batch=(data(12, 3, 8),)).notes
    assert "buffer 'mem' is made anew in each step before it is read: a compiled step leaves it as it was" in notes


@pytest.mark.parametrize("kind", ["first", "persistent"])
def test_one_that_the_next_step_reads_or_a_checkpoint_holds_is_refused(kind: str) -> None:
    with pytest.raises(CaptureError, match=r"a buffer 'mem' of another form \(\[0\] of float32 before the step"):
        compiled(Spiking(kind), "dp=2", loss_fn=squares, batch=(data(12, 3, 8),))
