"""Draw programs of what autograd lets a module do beside plain ops, and compare each with the plain module.

    timeout 700 .venv/bin/python -m benchmarks.drawn_gradients [--seconds 600] [--seed 0]

Hooks on tensors and modules, checkpoints, Functions of the user's, regions without gradients, gradients inside of the
forward pass and torch.func, among writes in place, buffers, dropout and norms. Output and options are those of
`benchmarks.in_place`.
"""

from __future__ import annotations

import copy
import linecache
import random
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from autopar import verify
from autopar.errors import AutoparError, first_sentence
from autopar.verification.plain import Plain
from autopar.verification.verify import descent
from benchmarks.in_place import search

# A mesh and the options of a step; over stages the model is two drawn blocks.
PLACES = (
    ("dp=2", {}), ("tp=2", {}), ("dp=2,tp=2", {}), ("dp=2", {"zero": 3}), ("dp=1", {"microbatches": 2}),
    ("pp=2", {"microbatches": 2}), ("dp=2", {"recompute": "full"}), ("fsdp=2", {}),
)  # fmt: skip
# {s}, {o}, {t}: tensors of 4 rows of 6, {f}: a function of one, {g}: what a hook makes of a gradient g.
GRADIENTS = (
    "g * 2", "g.clamp(-0.1, 0.1)", "None", "g * {o}.detach()", "g * {o}", "g @ self.k.weight", "g * self.n",
    "g.mul(3)", "note(self, g)", "note(self, g * 2)", "g.sign() * 0.01", "g - g.mean(-1, keepdim=True)",
    "g / (g.norm() + 1)", "F.dropout(g, 0.4)", "g.clone().add_(0.1)", "count(self, g)", "g + torch.randn_like(g)",
    "g.flip(0)", "g * 0", "bound(self, g)", "keep(self, g)",
)  # fmt: skip
FUNCTIONS = (
    "torch.tanh", "self.k", "self.norm", "self.weighted", "self.spectral", "self.hooked", "self.pre", "self.changed",
    "lambda a: F.dropout(a, 0.3) * 2", "lambda a: hook(a * 1, lambda g: {g})", "Two.apply", "Cube.apply",
    "lambda a: a * 1 + note(self, a)", "lambda a: (a * 1).mul_(2)", "lambda a: self.l(a).relu_()",
    "torch.no_grad()(self.k)", "lambda a: a.detach() * a", "lambda a: checkpoint({f}, a, use_reentrant=False)",
    "Once.apply", "Nothing.apply", "lambda a: checkpoint({f}, a, use_reentrant=True)",
    "lambda a: Scaled.apply(a, 3.0, self.n)", "Round.apply", "lambda a: slope({f}, a)",
    "lambda a: Marked.apply(a)[0]", "lambda a: Dirty.apply(a * 1)", "lambda a: a * torch.rand_like(a)",
    "lambda a: self.norm(self.k(a)).relu()", "lambda a: F.linear(a, self.l.weight, self.k.bias)",
    "lambda a: Opt.apply(a)[0]", "lambda a: Opt.apply(a)[1]",
)  # fmt: skip
VALUES = (
    "({f})({s})", "({f})({s})", "checkpoint({f}, {s}, use_reentrant=False)",
    "checkpoint({f}, {s}, use_reentrant=True)", "hook({s} * 1, lambda g: {g})", "hook({s}, lambda g: {g})",
    "slope({f}, {s})", "Pair.apply({s}, {o}, 2.0)[0]", "sum(Pair.apply({s}, {o}, 0.5))",
    "Pair.apply({s}, {o}, 0.5)[1]", "Scaled.apply({s}, 2.0, {o})", "{s} + ({s}.round() - {s}).detach()",
    "Rows.apply({s}, self.l.weight)", "checkpoint(lambda a, c: a * c + ({f})(a), {s}, {o}, use_reentrant=False)",
    "checkpoint(lambda a, c: ({f})(a * c), {s}, c={o}, use_reentrant=False)",
    "torch.func.grad(lambda a: a.pow(3).sum())({s})",
    "torch.func.vmap(torch.func.grad(lambda a: self.l(a).pow(3).sum()))({s})", "{s}.detach() * {o}", "{s} * {o}",
    "torch.func.functional_call(self.l, dict(weight=self.k.weight * 2, bias=self.l.bias), ({s},))", "{s}.clone()",
    "torch.func.vjp(lambda a: self.k(a).tanh(), {s})[1]({o})[0]", "torch.func.jvp(torch.sin, ({s},), ({o},))[1]",
    "leaf({s}) * 2", "torch.stack(Listed.apply(dict(s=2.0), {s}, {o})).sum(0)", "held({s}, lambda t: t * 2)",
    "{s} * self.t", "self.l({s})",
)  # fmt: skip
OTHERS = (
    "{s}.mul_(0.5)", "{s}[0] = 0.3", "{s}.tanh_()", "{s} += {o}", "{s}[1:].mul_(2)", "{s}.detach().mul_(0.9)",
    "hook({s}, lambda g: {g})", "handle = ({s} * 1).register_hook(lambda g: g * 9); handle.remove()",
    "self.t.add_({s}.detach().mean())", "self.t = self.t * 0.9 + {s}.detach().mean() * 0.1", "self.n += 1",
    "{s}.copy_({o})", "with torch.no_grad(): self.k.weight.mul_(0.99)", "with torch.no_grad(): {s}.mul_(0.9)",
    "Dirty.apply({s})", "with torch.no_grad(): {t} = ({f})({s})", "with torch.enable_grad(): {t} = {s} * 2",
    "{s}, {t} = {t}, {s}", "{s}.requires_grad and {s}.retain_grad()", "{s} = {s}.detach().requires_grad_()",
    "self.calls += 1", "{s}.detach_()",
    "torch.autograd.graph.register_multi_grad_hook([v for v in ({s}, {o}) if v.requires_grad], lambda gs: "
    "note(self, gs[0] if gs[0] is not None else self.t))",
    "{s}.grad_fn and {s}.grad_fn.register_hook(lambda gi, go: tuple(None if g is None else g * 2 for g in gi))",
)  # fmt: skip
HEAD = '''
def note(module, g):
    """Write into a buffer."""
    with torch.no_grad():
        module.t.mul_(0.9).add_(g.detach().mean() * 0.1)
    return g

def bound(module, g):
    module.t = module.t * 0.5 + g.detach().mean()
    return g

def keep(module, g):
    module.kept = g
    return g * 2

def count(module, g):
    module.calls += 1
    return g * module.calls

def hook(t, function):
    if t.requires_grad:
        t.register_hook(function)
    return t

def leaf(t):
    return t.detach().requires_grad_()

def slope(function, t):
    a = t if t.requires_grad else t.detach().requires_grad_()
    y = function(a)
    if not y.requires_grad:
        return y
    g, = torch.autograd.grad(y.sin().sum(), a, create_graph=True, allow_unused=True)
    return y if g is None else g

def held(t, pack):
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda s: s):
        return t * t

class Two(Function):
    @staticmethod
    def forward(ctx, a):
        ctx.save_for_backward(a)
        return a * 2
    @staticmethod
    def backward(ctx, g):
        a, = ctx.saved_tensors
        return g * a

class Cube(Function):
    @staticmethod
    def forward(a):
        return a ** 3
    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs, output)
    @staticmethod
    def backward(ctx, g):
        a, y = ctx.saved_tensors
        return g * a * a * 3 + 0 * y

class Once(Function):
    @staticmethod
    def forward(ctx, a):
        ctx.a = a
        return a.sin()
    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        return g.mul_(2) * ctx.a.cos()

class Nothing(Function):
    @staticmethod
    def forward(ctx, a):
        return a.clone()
    @staticmethod
    def backward(ctx, g):
        return None

class Round(Function):
    @staticmethod
    def forward(ctx, a):
        return (a * 4).round() / 4
    @staticmethod
    def backward(ctx, g):
        return g

class Opt(Function):
    @staticmethod
    def forward(ctx, a):
        ctx.set_materialize_grads(False)
        return a * 2, a * 3
    @staticmethod
    def backward(ctx, g, h):
        return (0 if g is None else g * 5) + (0 if h is None else h)

class Marked(Function):
    @staticmethod
    def forward(ctx, a):
        most = a.argmax(-1)
        ctx.mark_non_differentiable(most)
        ctx.most = most
        return a * 2, most
    @staticmethod
    def backward(ctx, g, _):
        return g.scatter_add(-1, ctx.most[:, None], g[:, :1])

class Dirty(Function):
    @staticmethod
    def forward(ctx, a):
        a.mul_(3)
        ctx.mark_dirty(a)
        return a
    @staticmethod
    def backward(ctx, g):
        return g * 7

class Scaled(Function):
    @staticmethod
    def forward(ctx, a, factor, other):
        ctx.save_for_backward(a, other)
        ctx.factor = factor
        return a * factor + other
    @staticmethod
    def backward(ctx, g):
        a, other = ctx.saved_tensors
        return g * ctx.factor * other, None, g * a if ctx.needs_input_grad[2] else None

class Pair(Function):
    @staticmethod
    def forward(ctx, a, b, factor):
        ctx.save_for_backward(a, b)
        ctx.factor = factor
        return a * b * factor, a + b
    @staticmethod
    def backward(ctx, g, h):
        a, b = ctx.saved_tensors
        need_a, need_b, _ = ctx.needs_input_grad
        return g * b + h if need_a else None, g * a * ctx.factor if need_b else None, None

class Rows(Function):
    @staticmethod
    def forward(ctx, a, w):
        ctx.save_for_backward(a, w)
        return a @ w.t()
    @staticmethod
    def backward(ctx, g):
        a, w = ctx.saved_tensors
        return g @ w if ctx.needs_input_grad[0] else None, (g.t() @ a).clamp(-1, 1)

class Listed(Function):
    @staticmethod
    def forward(ctx, options, *tensors):
        ctx.options = options
        return tuple(t * options["s"] for t in tensors)
    @staticmethod
    def backward(ctx, *gs):
        return (None, *(g * ctx.options["s"] * 2 for g in gs))

class Drawn(nn.Module):
    def __init__(self):
        super().__init__()
        self.l, self.k, self.norm = nn.Linear(6, 6), nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.weighted, self.spectral = weight_norm(nn.Linear(6, 6)), spectral_norm(nn.Linear(6, 6))
        self.hooked, self.pre, self.changed = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.hooked.register_full_backward_hook(lambda m, gi, go: tuple(None if g is None else g * 2 for g in gi))
        self.pre.register_full_backward_pre_hook(lambda m, go: (go[0].clamp(-0.1, 0.1),))
        self.changed.register_forward_hook(lambda m, args, out: hook(out * 2, lambda g: g * 3))
        self.register_buffer("t", torch.arange(6.0, dtype=torch.float64) / 5)
        self.register_buffer("n", torch.ones(()))
        self.calls = 0

    def forward(self, x):
        h, q, b = self.l(x), self.k(x) * 1, x * self.t
'''


def lines(dice: random.Random) -> Iterator[str]:
    """The body of a forward pass; every tensor of it has a share in the result."""
    known = ["h", "b", "q", "x"]

    def filled(text: str, depth: int = 0) -> str:
        functions = FUNCTIONS if depth < 2 else [f for f in FUNCTIONS if "{f}" not in f and "{g}" not in f]
        while "{f}" in text:
            text = text.replace("{f}", filled(dice.choice(functions), depth + 1), 1)
        while "{g}" in text:
            text = text.replace("{g}", dice.choice(GRADIENTS), 1)
        for name in ("{s}", "{o}", "{t}"):
            text = text.replace(name, dice.choice(known))
        return text

    for number in range(dice.randint(3, 8)):
        if dice.random() < 0.65:
            yield f"v{number} = {filled(dice.choice(VALUES))}"
            known.append(f"v{number}")
        else:
            yield filled(dice.choice(OTHERS))
    shares = (f"({name} * {i + 1}).sin()" for i, name in enumerate(known))
    yield f"return {' + '.join(shares)}"


def block(number: int, drop: frozenset[int] = frozenset()) -> tuple[nn.Module, str]:
    """The module of a number, and the lines of its forward pass. drop: those to leave out, to find what matters."""
    body = [line for i, line in enumerate(lines(random.Random(number))) if i not in drop]
    source = HEAD + "".join(f"        {line}\n" for line in body)
    name = f"<drawn {number}>"
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name  # where errors look for lines
    found = {
        "torch": torch, "nn": nn, "F": nn.functional, "checkpoint": torch.utils.checkpoint.checkpoint,
        "Function": torch.autograd.Function, "once_differentiable": torch.autograd.function.once_differentiable,
        "weight_norm": nn.utils.parametrizations.weight_norm, "spectral_norm": nn.utils.parametrizations.spectral_norm,
    }  # fmt: skip
    exec(compile(source, name, "exec"), found)
    torch.manual_seed(0)
    return found["Drawn"]().double(), "".join(f"    {line}\n" for line in body)  # type: ignore[operator]


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """The loss of a drawn model."""
    result: Tensor = model(x).sin().sum() / 10
    return result


def plainly(model: nn.Module, x: Tensor) -> list[Tensor] | None:
    """What two steps of plain PyTorch leave; None if it does not take them, with gradients that are finite."""
    optimizer = descent(model.parameters())
    try:
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(model, x.clone()).backward()
            optimizer.step()
    except Exception:
        return None
    found = [*model.parameters(), *model.buffers()]
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    is_finite = all(bool(t.isfinite().all()) for t in (*found, *grads))
    return [t.detach() for t in found] if is_finite else None


def verdict(number: int, drop: frozenset[int] = frozenset()) -> tuple[str, str]:
    """What became of a program: as `benchmarks.in_place.verdict` says."""
    mesh, options = PLACES[number % len(PLACES)]
    model, source = block(number, drop)
    if mesh == "pp=2":
        model = nn.Sequential(model, block(number)[0])
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
    want = plainly(copy.deepcopy(model), x)
    if want is None:
        return "plain", ""
    source = f"{mesh} {options}\n{source}"
    try:
        report = verify(copy.deepcopy(model), mesh, loss_fn=loss_of, batch=x, steps=2, **options)
    except AutoparError as refusal:
        return "refused", first_sentence(str(refusal).rpartition("This line has ")[2]).split("\n")[0]
    except Exception as broken:
        return "BROKEN", f"{type(broken).__name__}: {broken}\n{source}"
    if not report.ok:
        return "WRONG", f"{report}\n{source}"
    if not any(word in source for word in ("dropout", "rand")):
        plain = Plain(copy.deepcopy(model), loss_of, descent)
        for _ in range(2):
            plain.step((x.clone(),), {}, torch.tensor([0, 0]))
        got = [*plain.model.parameters(), *plain.model.buffers()]
        if not all(torch.allclose(a, b, rtol=1e-7, atol=1e-10) for a, b in zip(got, want, strict=True)):
            return "WRONG", f"verify's plain module is not plain\n{source}"
    return "ok", ""


if __name__ == "__main__":
    search(verdict, __doc__)
