"""Draw programs of views, writes in place and places that tensors hold, and compare each with the plain module.

    timeout 700 .venv/bin/python -m benchmarks.in_place [--seconds 600] [--seed 0]

A line a program that is wrong or broken, with its source; then what refused how many. A program that plain PyTorch does
not run itself is left out. The number that a line begins with is the `--seed` of this one program (`--seconds 0`).
"""

from __future__ import annotations

import argparse
import copy
import linecache
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from autopar import verify
from autopar.errors import AutoparError, first_sentence

MESHES = ("dp=1", "dp=2", "tp=2")
# {s}, {o}: tensors that there are. {at}: a place that a tensor holds.
PLACES = ("{o}.flatten().argmax() % {s}.shape[0]", "({o} > 0).sum() % {s}.shape[0]",
          "({o} > 0).sum().item() % {s}.shape[0]")  # fmt: skip
VIEWS = (
    "{s}[0]", "{s}[1:]", "{s}[..., ::2]", "{s}.flatten()", "{s}.t()", "{s}.unsqueeze(0)", "{s}.detach()", "{s}[:, 1]",
    "{s}.narrow(0, 1, 2)", "{s}.reshape(-1)", "{s}.view(-1)[2:9]", "{s}.chunk(2, -1)[1]", "{s}.data", "{s}.diagonal()",
    "{s}.expand(2, *{s}.shape)[0]", "{s}.squeeze()", "{s}.transpose(0, -1)", "{s}.unbind(0)[1]", "{s}.view_as({s})",
    "{s}.split([1, {s}.shape[0] - 1])[1]", "{s}.permute(*reversed(range({s}.ndim)))", "{s}.movedim(0, -1)",
    "{s}.contiguous()", "{s}.to({s}.dtype)", "{s}[{at}]", "{s}.select(0, {at})",
)  # fmt: skip
VALUES = (
    "{s} * {o}.mean()", "torch.tanh({s})", "{s}.clone()", "{s} + {o}.sum().item() * 0.01",
    "{s} / ({o}.abs().max().item() + 1)", "torch.where({s} > 0, {s}, 0.1)", "torch.stack([{s}, {s}])", "{s}.cumsum(0)",
    "{s}.softmax(-1)", "torch.cat([{s}, {s}])", "self.k.weight.detach()[:2]",
    "copy.deepcopy({s}.detach().contiguous())", "{s}.new_zeros({s}.shape)",
    "{s}.index_select(0, {o}.flatten()[:2].abs().long() % {s}.shape[0])",
)  # fmt: skip
WRITES = (
    "{s}.mul_(0.5)", "{s}.add_(1)", "{s}[0] = 2", "{s}[..., -1] = {s}[..., 0] * 0.3", "{s}.zero_()", "{s}.tanh_()",
    "{s}.clamp_(-1, 1)", "{s}.copy_({o}.sum() * 0 + 0.7)", "{s}.add_({o}.mean())", "{s}[{s} < -0.5] = 0.1",
    "{s}.sub_({o}.detach().sum() * 0.01)", "{s}.masked_fill_({s} > 0.5, 0.25)", "{s}.fill_(0.3)", "{s} += 0.1",
    "{s} *= {o}.mean()", "{s}[1:] += {s}[:-1].clone()", "{s}.index_fill_(0, torch.tensor([0]), 0.5)",
    "{s}.index_add_(0, torch.tensor([1]), {s}[:1] * 2)", "{s}.lerp_({s} * 2, 0.3)", "{s}.flatten()[0] = 3",
    "{s}.addcmul_({s}.clone(), {s}.clone(), value=0.1)", "torch._foreach_mul_([{s}], 0.9)", "{s}.flip(0).add_(1)",
    "torch.add({s}, 1, out={s})", "{s}.sort().values.mul_(2)", "{s}[{at}] = 0.5", "{s}[{at}] += 1", "{s}[{at}].mul_(2)",
)  # fmt: skip
STATE = (
    "self.t = self.t + 1", "self.t.data = self.t.data * 0.5", "self.n += 1", "b = self.t", "self.t[self.n % 2] += 1",
    "self.t = {s}.detach().flatten()[:6].reshape(2, 3).clone()", "with torch.no_grad(): self.k.weight.mul_(0.99)",
)  # fmt: skip
HEAD = """class Drawn(nn.Module):
    def __init__(self):
        super().__init__()
        self.l, self.k = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("t", torch.arange(6.0, dtype=torch.float64).view(2, 3) / 5)
        self.register_buffer("n", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        h, q, b = self.l(x), self.k(x) * 1, self.t
"""


def lines(dice: random.Random) -> Iterator[str]:
    """The body of a forward pass; every tensor of it has a share in the loss."""
    known = ["h", "b", "q", "x"]

    def filled(text: str) -> str:
        some, other = dice.choice(known), dice.choice(known)
        return text.replace("{at}", dice.choice(PLACES)).format(s=some, o=other)

    for number in range(dice.randint(4, 12)):
        kind = dice.choices(("view", "value", "write", "state", "swap"), (36, 18, 32, 7, 7))[0]
        if kind in ("view", "value"):
            yield f"v{number} = {filled(dice.choice(VIEWS if kind == 'view' else VALUES))}"
            known.append(f"v{number}")
        elif kind == "write":
            yield "with torch.no_grad(): " * (dice.random() < 0.3) + filled(dice.choice(WRITES))
        elif kind == "state":
            yield filled(dice.choice(STATE))
        else:
            yield "{0}, {1} = {1}, {0}".format(*dice.choices(known, k=2))
    shares = (f"({name}.double() * {i + 1}).sin().sum()" for i, name in enumerate(known))
    yield f"return {' + '.join(shares)}"


def made(number: int) -> tuple[nn.Module, str]:
    """The module of a number, and its source."""
    source = HEAD + "".join(f"        {line}\n" for line in lines(random.Random(number)))
    name = f"<drawn {number}>"
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name  # where errors look for lines
    found = {"torch": torch, "nn": nn, "copy": copy}
    exec(compile(source, name, "exec"), found)
    torch.manual_seed(0)
    return found["Drawn"]().double(), source  # type: ignore[operator]


def runs(model: nn.Module, x: Tensor) -> bool:
    """Whether plain PyTorch takes two steps, with gradients that are finite."""
    try:
        for _ in range(2):
            model(x.clone()).backward()
    except Exception:
        return False
    return all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)


def verdict(number: int) -> tuple[str, str]:
    """What became of a program: "plain" (PyTorch does not run it), ok, refused, WRONG or BROKEN; and what was said."""
    model, source = made(number)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
    if not runs(copy.deepcopy(model), x):
        return "plain", ""
    try:
        report = verify(model, MESHES[number % len(MESHES)], batch=x, steps=2)
    except AutoparError as refusal:
        return "refused", first_sentence(str(refusal).rpartition("This line has ")[2]).split("\n")[0]
    except Exception as broken:
        return "BROKEN", f"{type(broken).__name__}: {broken}\n{source}"
    return ("ok", "") if report.ok else ("WRONG", f"{report}\n{source}")


Judge = Callable[[int], tuple[str, str]]


def search(verdict: Judge, doc: str | None, **others: Judge) -> None:
    """Draw programs for some seconds, print those that are wrong, and end the process. doc: what is said of it. others:
    verdicts on other programs, by the option that asks for them."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    for name, other in others.items():
        parser.add_argument(f"--{name}", dest="verdict", action="store_const", const=other, default=verdict)
    asked = parser.parse_args()
    verdict = getattr(asked, "verdict", verdict)
    torch.set_num_threads(1)
    start, number, found, refused = time.monotonic(), asked.seed, Counter[str](), Counter[str]()
    while number == asked.seed or time.monotonic() - start < asked.seconds:
        kind, text = verdict(number)
        found[kind] += 1
        refused[text] += kind == "refused"
        if kind in ("WRONG", "BROKEN"):
            print(f"{number} {kind} {text}", flush=True)
        number += 1
    for text, count in refused.most_common():
        if count:
            print(f"{count:4} x refused: {text}")
    print(", ".join(f"{count} {kind}" for kind, count in found.most_common()), f"(seeds {asked.seed} to {number - 1})")
    sys.exit(bool(found["WRONG"] or found["BROKEN"]))


if __name__ == "__main__":
    search(verdict, __doc__)
