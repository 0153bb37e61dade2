"""What `benchmarks.drawn_loops` draws: the lines of a loop with its models, losses, optimizers and changes."""

from __future__ import annotations

import random
from typing import Any

Place = tuple[int, str, dict[str, Any]]  # how many ranks, their mesh, and options

PLACES: tuple[Place, ...] = (
    (2, "dp=2", {"recompute": "full", "offload": "activations"}), (2, "dp=2", {"offload": "optimizer"}),
    (1, "dp=1", {}), (2, "dp=2", {}), (1, "dp=1", {"microbatches": 2}), (2, "tp=2", {}), (1, "dp=1", {}),
    (2, "dp=2", {"zero": 3}), (2, "dp=2", {"microbatches": 2}), (2, "fsdp=2", {}),
)  # fmt: skip
Line = tuple[str, str]  # where it stands (a, b: in the forward pass of these; head; loop) and its text

# -- what is drawn: {m}, {n}: a model and the other one, {o}, {p}: their optimizers, {l}: a layer, {v}: a number ------

BODIES = (
    "h = h * self.scale", "h = torch.tanh(h) if self.warm else h", "h = h - 0.3 * self.ema",
    "if self.training: self.ema.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)",
    "if self.training: self.ema = 0.9 * self.ema + 0.1 * h.detach().mean(0)", "self.calls += 1",
    "h = h / (1 + 0.1 * self.calls)", "h = h * self.weights[0] + self.weights[1]",
    "h = h + self.options['shift'] * self.table", "h = self.act(h)", "h = h + h @ self.queue.t() @ self.queue * 0.1",
    "self.enqueue(h.detach())", "h = h.detach() if self.frozen else h", "h = h + 0.1 * self.mid(h)",
    "h = self.mid(h.relu())", "h = h + self.slow(h)",
    "with torch.no_grad(): self.slow.weight.lerp_(self.mid.weight, 0.2)", "h = h * torch.ones(6)",
    "h = h + torch.zeros(()).add(self.scale)", "h = torch.where(self.calls > 3, h, h * 0.5)", "h = h[:, self.order]",
    "h = h + (torch.is_grad_enabled() + 1) * 0.1", "h = h * (2 if self.mid.weight.requires_grad else 1)",
    "for _ in range(self.depth): h = h + 0.1 * self.mid(h).sin()",
    "h = F.dropout(h, self.drop.p) if self.drop.p in (0, 1) else h",
    "h = h + self.extra if self.extra is not None else h", "h = h + self.memory.mean(0).detach()",
    "with torch.autocast('cpu', enabled=False): h = self.mid(h)",
    "with torch.autocast('cpu', torch.bfloat16): h = h + self.mid(h)", "self.seen = h",
    "h = h + self.blocks[self.depth % 3](h)", "for block in self.blocks[:self.depth]: h = h + 0.1 * block(h)",
    "h = self.heads[self.task](h)", "h = h * self.cfg.alpha + self.cfg.shifts[-1]", "h = h * self.rate",
    "h = h + sum(self.past) / 8", "h = checkpoint(self.mid, h, use_reentrant=False)",
    "h = checkpoint(lambda g: self.act(self.mid(g)) * self.scale, h, use_reentrant=False)",
    "h = h * torch.as_tensor(self.array)", "h = self.mid(h) if h.shape[0] > 4 else h", "h = h * len(self.past)",
    "h = h * (1 + self.kind.value)", "h = h + F.linear(h, self.mid.weight * self.mask)",
    "h = h + self.cache.setdefault('w', torch.ones(6, dtype=D))",
    "with torch.set_grad_enabled(self.warm): h = h + self.mid(h)",
)  # fmt: skip
NORMS = ("nn.BatchNorm1d(6)", "nn.LayerNorm(6)", "nn.Identity()")
LOSSES = (
    "F.mse_loss(m(x), y)", "F.mse_loss(m(x), y) + box.beta * m(x * 0.5).pow(2).mean()",
    "F.softplus(-{n}(m(x))).mean()", "F.softplus(-m(y)).mean() + F.softplus(m({n}(x).detach())).mean()",
    "F.mse_loss(m(x), t(x).detach()) + (m(x) - y).abs().mean()", "F.mse_loss(m(x), {n}(x)) + F.mse_loss(m(x), y)",
    "pairs(m(x), {n}(y))", "F.cross_entropy(m(x), y.argmax(-1), label_smoothing=box.smooth)",
    "getattr(F, box.kind)(m(x), y)",
    "F.mse_loss(m(x), y) + sum((p - q).pow(2).sum() for p, q in zip(m.parameters(), box.anchors))",
    "F.mse_loss(m(x), y) * box.factor + sum(m(r).mean() for r in box.replay)", "box.terms[box.at % 2](m(x), y)",
    "F.mse_loss(m(x), y) + 0.1 * m.head.weight.pow(2).sum()", "F.mse_loss(m.tail(m.trunk(x)), y)",
    "box.loss(m(x), y)", "F.mse_loss(m(x), y) if box.at < 3 else (m(x) - y).abs().mean()",
    "F.mse_loss({n}(m(x)), y) - box.beta * m(x).mean()", "F.mse_loss(m(x), y) + 0.1 * m.seen.pow(2).mean()",
    "F.mse_loss(m(x), y) + 0.1 * box.feats.get('h', y).mean()", "box.partial(m(x), y)",
    "F.mse_loss(m(x), y) + weighed(m)", "F.mse_loss(m(x), y) / max(box.past)",
    "F.mse_loss(torch.func.functional_call(m, {{'head.bias': box.bias}}, (x,)), y)",
    "torch.stack([f(m(x), y) for f in box.terms]) @ box.w", "F.mse_loss(m(x)[box.keep], y[box.keep])",
    "(F.mse_loss(m(x), torch.stack([t(x), {n}(x).detach()]).mean(0)), {{'out': m(x)}})",
)  # fmt: skip
OPTIMIZERS = ("SGD({}, lr=0.1)", "SGD({}, lr=0.1, momentum=0.9)", "Adam({}, lr=0.02, eps=1e-3)",
              "AdamW({}, lr=0.02, eps=1e-3)",
              "RMSprop({}, lr=0.01, eps=1e-2)", "Adagrad({}, lr=0.05, eps=1e-2)")  # fmt: skip
STEPS = (
    "{o}.zero_grad(); note(back({m}, *batch())); {o}.step()",
    "{o}.zero_grad(set_to_none=False); note(back({m}, *batch())); {o}.step()",
    "loss = value({m}, *batch()); {o}.zero_grad(); loss.backward(); note(loss); {o}.step()",
    "{o}.zero_grad(); [(value({m}, *batch()) / 3).backward() for _ in range(3)]; {o}.step()",
    "{o}.zero_grad(); [back({m}, *batch()) for _ in range(2)]; note(clip({m}.parameters(), 0.1)); {o}.step()",
    "oa.zero_grad(); ob.zero_grad(); (value(a, *batch()) + 2 * value(b, *batch())).backward(); oa.step(); ob.step()",
    "oa.zero_grad(); ob.zero_grad(); back(a, *batch()); back(b, *batch()); note(clip([*a.parameters(), "
    "*b.parameters()], 0.2)); oa.step(); ob.step()",
    "back({m}, *batch(4)); {o}.step()", "back({m}, *batch(2))", "{o}.step()",
    "back({m}, *batch()); {o}.step(); {o}.zero_grad()", "{o}.zero_grad()", "{n}.zero_grad(set_to_none=False)",
    "{n}.requires_grad_(False); {o}.zero_grad(); note(back({m}, *batch())); {o}.step(); {n}.requires_grad_(True)",
    "{n}.eval(); note(back({m}, *batch())); {o}.step(); {o}.zero_grad(); {n}.train()",
    "note(torch.autograd.grad(value({m}, *batch()), [p for p in {m}.parameters() if p.requires_grad], "
    "allow_unused=True))",
    "{o}.zero_grad(); (value({m}, *batch()) + 0.01 * sum(p.pow(2).sum() for p in {m}.parameters())).backward(); "
    "{o}.step()",
    "{o}.zero_grad(); scaler.scale(value({m}, *batch())).backward(); scaler.unscale_({o}); "
    "note(clip({m}.parameters(), 1.0)); scaler.step({o}); scaler.update()",
    "kept = value({m}, *batch())", "kept.backward()", "{o}.step(lambda: back({m}, *batch()))",
    "oj.zero_grad(); back(a, *batch()); back(b, *batch()); oj.step()",
    "x, y = batch(); x.requires_grad_(); back({m}, x, y); note(x.grad)",
    "with torch.enable_grad(): back({m}, *batch()); {o}.step(); {o}.zero_grad()",
    "back({m}, *batch(2)); back({m}, *batch(6)); {o}.step()",
    "with torch.autocast('cpu', torch.bfloat16): note(back({m}, *batch())); {o}.step()",
    "with torch.autocast('cpu', enabled=False): note(back({m}, *batch())); {o}.step()",
    "for i in range(3): {o}.zero_grad(); box.beta = i / 4; {m}.scale = 1 + i / 8; note(back({m}, *batch())); "
    "{o}.step()",
    "for i in range(3): back({m}, *batch()); i % 2 and ({o}.step(), {o}.zero_grad())", "{o}.step(); {o}.step()",
    "l1 = value(a, *batch()); l2 = value(b, *batch()); l2.backward(); l1.backward(); oa.step(); ob.step(); "
    "oa.zero_grad(); ob.zero_grad()",
    "torch.stack([value({m}, *batch()), value({m}, *batch())]).max().backward(); {o}.step()",
    "(value(a, *batch()) * value(b, *batch())).backward(); oa.step()",
    "loss = value({m}, *batch()); loss.backward(torch.tensor(2.0, dtype=D)); note(loss); {o}.step()",
    "loss = value({m}, *batch()); loss.backward(inputs=list({m}.head.parameters())); {o}.step()",
    "(value(a, *batch()).detach() * value(b, *batch())).backward(); ob.step()",
    "s = nn.Parameter(torch.tensor(0.1, dtype=D)); (value({m}, *batch()) * torch.exp(-s) + s).backward(); "
    "note(s.grad); {o}.step()",
    "x, y = batch(); back({m}, x, x); {o}.step()", "x, y = batch(); back({m}, t(x), y); {o}.step()",
    "x, y = batch(6); back({m}, x.t(), y.t()); {o}.step()", "x, y = batch(); back({m}, x[::2], y[1::2]); {o}.step()",
    "back({m}, *batch(7)); {o}.step()", "with torch.inference_mode(): x, y = batch()", "back({m}, x, y); {o}.step()",
    "x, y = batch()", "box.factor = 0.9 * box.factor + 0.1 * float(back({m}, *batch()))",
    "box.past.append(1 + back({m}, *batch()).item() / 10)", "with torch.inference_mode(): x = {m}(batch()[0])",
    "x = {m}(batch()[0]).detach(); y = {n}(x).detach()",
    "torch.autograd.set_detect_anomaly(True); back({m}, *batch()); torch.autograd.set_detect_anomaly(False)",
    "with torch.no_grad(): [p.sub_(0.1 * p.grad) for p in {m}.parameters() if p.grad is not None]",
    "for p in {m}.parameters(): p.grad is not None and p.data.add_(p.grad.data, alpha=-0.1)",
    "back({m}, *batch()); eps = [0.05 * p.grad / (p.grad.norm() + 1e-3) for p in {m}.head.parameters()]; "
    "torch._foreach_add_([p.data for p in {m}.head.parameters()], eps); {o}.zero_grad(); back({m}, *batch()); "
    "torch._foreach_sub_([p.data for p in {m}.head.parameters()], eps); {o}.step()",
    "ps = [p for p in {m}.parameters() if p.requires_grad]; g, h = (torch.autograd.grad(value({m}, *batch()), "
    "ps, allow_unused=True) for _ in range(2)); note([None if i is None else (i * j).sum() for i, j in zip(g, "
    "h)])",
    "ps = [p for p in {m}.parameters() if p.requires_grad]; gs = torch.autograd.grad(value({m}, *batch()), ps, "
    "allow_unused=True); [setattr(p, 'grad', g) for p, g in zip(ps, gs)]; {o}.step()",
    "gs = [None if p.grad is None else p.grad.clone() for p in {m}.parameters()]",
    "[setattr(p, 'grad', g) for p, g in zip({m}.parameters(), gs)]; {o}.step()",
    "old = [p.detach().clone() for p in {m}.parameters()]",
    "with torch.no_grad(): [p.copy_(q) for p, q in zip({m}.parameters(), old)]",
    "with torch.no_grad(): [p.lerp_(q, 0.5) for p, q in zip({m}.parameters(), old)]",
    "torch.nn.utils.clip_grad_value_({m}.parameters(), 0.01); {o}.step()",
    "note(torch.nn.utils.get_total_norm([p.grad for p in {m}.parameters() if p.grad is not None]))",
    "torch._foreach_mul_([p.grad for p in {m}.parameters() if p.grad is not None], 0.5)",
    "[p.grad.zero_() for p in {m}.parameters() if p.grad is not None]",
    "[p.grad.add_(0.01 * p.detach()) for p in {m}.parameters() if p.grad is not None]; {o}.step()",
    "{o}.zero_grad(); sum(value({m}, *batch()) for _ in range(2)).backward(); {o}.step()",
    "for p in {m}.parameters(): p.grad = None", "for p in {m}.parameters(): p.grad is not None and p.grad.mul_(0.5)",
)  # fmt: skip
LOOKS = (
    "{m}.eval(); note(float(value({m}, *batch()))); {m}.train()", "note({m}.head(batch()[0]).detach())",
    "with torch.no_grad(): note({m}.mid({n}.mid(batch()[0])))",
    "note({{k: v.shape for k, v in {m}.state_dict().items()}})",
    "note([n for n, p in {m}.named_parameters() if p.grad is None])", "with torch.no_grad(): note({m}(batch()[0]))",
    "{m}.eval(); note({m}(batch()[0]).detach()); {m}.train()", "with torch.inference_mode(): note({m}(batch(4)[0]))",
    "was = {m}.training; {m}.eval(); note({m}(batch(2)[0]).detach()); {m}.train(was)",
    "with torch.no_grad(), torch.autocast('cpu', torch.bfloat16): note({m}(batch()[0]))",
    "note({m}.head.weight.norm())", "with torch.no_grad(): note(F.mse_loss({m}(batch()[0]), batch()[1]))",
    "note(nn.utils.parameters_to_vector({m}.parameters()))", "with torch.no_grad(): note({n}({m}(batch()[0])))",
    "note({m}.trunk(batch()[0]).detach())",
    "with torch.no_grad(): note(sum(p.abs().sum() for p in {m}.parameters()).item())",
)  # fmt: skip
CHANGES = (
    "box.at += 1", "{m}.table = {m}.ema", "{m}.ema = {n}.ema", "{m}.memory = {m}.queue", "{m}.ema = {m}.table",
    "box.replay.append({m}.ema.expand(2, 6))", "note({m}.ema)", "{m}.queue = {n}.queue.clone()",
    "box.w = {m}.ema[:2]", "{m}.task = 'two'", "{m}.task = 'one'", "{m}.cfg.alpha = {v}",
    "{m}.cfg = SimpleNamespace(alpha={v}, shifts=[0.1])", "Net.rate = {v}", "{m}.rate = {v}", "{m}.past.append({v})",
    "{m}.array[0] = {v}", "{m}.array = {m}.array * 2", "{m}.kind = Kind.B", "{m}.mask[0] = 0",
    "{m}.mask = torch.rand(6, 6, generator=torch.Generator().manual_seed({i})) > 0.5",
    "{m}.cache['w'] = torch.full((6,), {v}, dtype=D)", "{m}.blocks[0].weight.requires_grad_(False)",
    "{m}.heads.one.eval()", "box.partial = functools.partial(F.huber_loss, delta={v} + 2)",
    "box.partial.keywords['delta'] = {v} + 2", "def weighed(m): return m.head.bias.pow(2).sum() * {v}",
    "box.w = torch.tensor([{v}, 1.0], dtype=D)", "box.w[{i}] = {v}", "box.keep = torch.tensor([0, 1])",
    "box.bias = torch.full((6,), {v}, dtype=D)", "box.bias = {m}.head.bias.detach().clone()",
    "hook = {m}.mid.register_forward_hook(lambda m, i, o: box.feats.update(h=o))", "box.past = [{v} + 2]",
    "{o}.param_groups[0]['lr'] = torch.tensor(0.05, dtype=D)", "{o}.param_groups[0]['lr'] = 0.3 * {v}",
    "sched_{m} = torch.optim.lr_scheduler.LambdaLR({o}, lambda e: 1 / (1 + e))",
    "{m}.trunk = lambda x, m={m}: m.first(x)", "Net.tail = lambda self, h: self.head(h) * {v}",
    "saved = {{k: v * 0.5 for k, v in saved.items()}}",
    "{m}.load_state_dict({{'head.bias': torch.zeros(6)}}, strict=False)",
    "{m}.apply(lambda m: isinstance(m, nn.Linear) and nn.init.constant_(m.bias, {v}))",
    "[m.eval() for m in {m}.modules() if isinstance(m, nn.BatchNorm1d)]",
    "{m}.zero_grad(); {m}.requires_grad_(False); {m}.head.requires_grad_(True)",
    "for n, p in {m}.named_parameters(): p.requires_grad = n.startswith('head')", "{m}.norm.reset_running_stats()",
    "{m}.norm.track_running_stats = False", "{m}.norm.eps = 0.1", "{m}.head.bias.data = {n}.head.bias.data.clone()",
    "{m}.head.weight.data, {n}.head.weight.data = {n}.head.weight.data.clone(), {m}.head.weight.data.clone()",
    "{m}.scale = {v}", "{m}.scale *= 1.1", "{m}.warm = not {m}.warm", "{m}.frozen = not {m}.frozen",
    "{m}.weights[{i}] = {v}", "{m}.options['shift'] = {v}", "{m}.table = {m}.table * 0.5", "{m}.table.add_(0.1)",
    "{m}.act = F.relu", "{m}.depth = {i} + 1", "{m}.drop.p = 0.0", "{m}.drop.p = 1.0",
    "{m}.extra = torch.full((6,), {v}, dtype=D)", "{m}.extra = None", "{m}.order = torch.arange(5, -1, -1)",
    "{m}.ema.zero_()", "{m}.ema = torch.full((6,), {v}, dtype=D)", "{m}.calls.fill_(7)", "{m}.queue.mul_(0.5)",
    "{m}.queue[{i}] = {v}", "{m}.at.zero_()", "{m}.memory = batch()[0]", "{m}.memory[0] = {v}",
    "sched_{m} = torch.optim.lr_scheduler.ReduceLROnPlateau({o}, patience=0)", "sched_{m}.step(1.0)",
    "sched_{m} = torch.optim.lr_scheduler.OneCycleLR({o}, 0.1, total_steps=20)",
    "with torch.no_grad(): [p.copy_(q) for p, q in zip({m}.parameters(), t.parameters())]",
    "with torch.no_grad(): [(p.copy_(q), q.copy_(c)) for p, q in zip({m}.parameters(), "
    "t.parameters()) for c in [whole(p).clone()]]",
    "box.beta = {v}", "box.beta += 0.1", "box.smooth = 0.1", "box.kind = 'smooth_l1_loss'", "box.kind = 'l1_loss'",
    "box.factor = {v}", "box.factor = torch.tensor({v}, dtype=D)", "box.replay.append(batch()[0])",
    "box.loss = nn.L1Loss()", "box.terms.reverse()", "box.anchors = [p.detach().clone() for p in {m}.parameters()]",
    "box.anchors = [0.5 * q for q in box.anchors]", "box.anchors = [whole(p).clone() for p in {m}.parameters()]",
    "box.loss.reduction = 'sum'", "{m}.train(not {m}.training)", "{m}.norm.eval()", "{m}.norm.train()",
    "{m}.requires_grad_(False)", "{m}.requires_grad_(True)", "{m}.{l}.requires_grad_(False)",
    "{m}.{l}.weight.requires_grad_(not {m}.{l}.weight.requires_grad)",
    "for i, p in enumerate({m}.parameters()): p.requires_grad_(i % 2 == {i})",
    "t.requires_grad_(not next(t.parameters()).requires_grad)", "{o}.param_groups[0]['lr'] *= 0.5",
    "for g in {o}.param_groups: g['weight_decay'] = 0.1", "sched_{m}.step()", "{o}.state.clear()",
    "sched_{m} = torch.optim.lr_scheduler.StepLR({o}, 1, 0.7)",
    "{o}.add_param_group({{'params': list({n}.parameters()), 'lr': 0.01}})", "{o}.param_groups[0]['params'].pop()",
    "{o} = torch.optim.SGD([{{'params': {m}.{l}.parameters()}}, {{'params': [{n}.{l}.weight], 'lr': 0.5}}], lr=0.1)",
    "{o} = torch.optim.Adam([p for p in {m}.parameters() if p.requires_grad], lr=0.01, eps=1e-3)",
    "saved = {{k: whole(v).clone() for k, v in {m}.state_dict().items()}}", "{m}.load_state_dict(saved)",
    "{n}.load_state_dict(saved)",
    "t.load_state_dict({{k: whole(v) for k, v in {m}.state_dict().items()}}, strict=False)",
    "states = copy.deepcopy({o}.state_dict())", "{o}.load_state_dict(states)",
    "with torch.no_grad(): [q.lerp_(whole(p), 0.3) for p, q in zip({m}.parameters(), t.parameters())]",
    "with torch.no_grad(): [q.mul_(0.7).add_(p.detach() * 0.3) for p, q in zip({m}.parameters(), {n}.parameters())]",
    "for p, q in zip({m}.parameters(), t.parameters()): q.data = 0.7 * q.data + 0.3 * whole(p.data)",
    "for p, q in zip({m}.parameters(), {n}.parameters()): q.data.copy_(p.data)",
    "hook = {m}.{l}.register_forward_hook(lambda m, i, o: o * 1.5)",
    "hook = {m}.register_forward_hook(lambda m, i, o: o + m.scale)", "hook.remove()",
    "hook = {m}.{l}.weight.register_hook(lambda g: g * 2)",
    "hook = {m}.{l}.register_full_backward_hook(lambda m, gi, go: tuple(g if g is None else 2 * g for g in gi))",
    "hook = {m}.register_forward_pre_hook(lambda m, i: (i[0] * box.beta,))",
    "hook = {o}.register_step_pre_hook(lambda o, a, k: clip(o.param_groups[0]['params'], 0.05))",
    "hook = {m}.{l}.bias.register_post_accumulate_grad_hook(lambda p: p.grad.clamp_(-0.01, 0.01))",
    "hook = t.head.register_forward_hook(lambda m, i, o: -o)", "nn.init.constant_({m}.{l}.bias, {v})",
    "with torch.no_grad(): {m}.{l}.weight.mul_({v})", "{m}.{l}.weight.data = {m}.{l}.weight.data * {v}",
    "{m}.{l}.weight.data.clamp_(-0.2, 0.2)", "torch.manual_seed(3); {m}.{l}.reset_parameters()",
    "nn.utils.vector_to_parameters(nn.utils.parameters_to_vector({m}.parameters()) * {v}, {m}.parameters())",
    "{m}.{l}.weight.grad = torch.ones(6, 6, dtype=D)", "torch.set_default_dtype(torch.float64)",
    "torch.set_default_dtype(torch.float32)", "t.head.weight.data.mul_({v})", "t.mid = nn.Linear(6, 6).to(D)",
    "t = copy.deepcopy(t)", "nn.utils.parametrizations.weight_norm(t.{l})",
    "t.{l}.weight = nn.Parameter(t.{l}.weight.detach() * {v}, False)", "a, b, oa, ob = b, a, ob, oa",
    "scaler = torch.amp.GradScaler('cpu', init_scale=2.0 ** {i})", "{m}.head.weight.data[0] = {v}",
    "with torch.no_grad(): {m}.{l}.weight[{i}].zero_()", "{m}.{l}.weight.grad = None",
    "{m}.tail = lambda h, m={m}: m.head(h) * 2", "{m}.register_buffer('ema', torch.ones(6, dtype=D))",
    "oj = torch.optim.SGD([*a.parameters(), *b.parameters()], lr=0.05, momentum=0.5)", "{m}.norm.momentum = {v} / 2",
)  # fmt: skip
HEAD = """
class Kind(enum.Enum):
    A, B = 1, 2

def weighed(m):
    return m.head.bias.pow(2).sum()

class Net(nn.Module):
    rate = 1.0

    def __init__(self, norm):
        super().__init__()
        self.first, self.mid, self.head, self.norm = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6), norm
        self.slow = nn.Linear(6, 6, bias=False).requires_grad_(False)
        self.drop, self.act = nn.Dropout(0.0), F.silu
        self.scale, self.warm, self.frozen, self.weights, self.depth = 1.5, False, False, [1.0, 0.5], 2
        self.options, self.table, self.extra = {"shift": 0.5}, torch.linspace(-1, 1, 6, dtype=D), None
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.heads = nn.ModuleDict({k: nn.Linear(6, 6) for k in ("one", "two")})
        self.task, self.cfg = "one", SimpleNamespace(alpha=0.7, shifts=[0.2])
        self.past, self.array = deque([1.0, 2.0], 4), np.ones(6)
        self.kind, self.cache, self.seen, self.mask = Kind.A, {}, torch.ones(6, dtype=D), torch.ones(6, 6)
        self.order, self.memory = torch.tensor([1, 0, 2, 3, 5, 4]), torch.ones(3, 6, dtype=D)
        self.register_buffer("ema", torch.zeros(6))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("queue", torch.eye(4, 6))
        self.register_buffer("at", torch.zeros((), dtype=torch.int64))

    def enqueue(self, rows):
        if self.training:
            self.queue[self.at] = rows.mean(0)
            self.at.add_(1).remainder_(4)

    def tail(self, h):
        return self.head(h)

    def forward(self, x):
        return self.tail(self.trunk(x))

def pairs(p, q):
    return (F.normalize(p, dim=-1) @ F.normalize(q, dim=-1).t() * 4).log_softmax(-1).diagonal().neg().mean()

box = SimpleNamespace(
    beta=0.2, smooth=0.0, kind="mse_loss", anchors=[], factor=1.0, replay=[], at=0, loss=nn.MSELoss(), feats={},
    terms=[F.mse_loss, F.l1_loss], past=[1.0], partial=functools.partial(F.huber_loss, delta=0.5), keep=slice(0, 2),
    w=torch.tensor([0.5, 0.2], dtype=D), bias=torch.zeros(6, dtype=D),
)
clip = nn.utils.clip_grad_norm_
"""


CLASS = """
class Net_{name}(Net):
    def trunk(self, x):
        h = self.norm(self.first(x))
{body}        return h

"""
IMPORTS = (
    "import enum, functools; import numpy as np; from collections import deque; from types import SimpleNamespace; "
    "import torch.nn.utils.prune; from torch.utils.checkpoint import checkpoint; "
)


def drawn(number: int) -> list[Line]:
    """The lines of a loop."""
    dice = random.Random(number)
    dtype = "float32" if dice.random() < 0.2 else "float64"
    is_parted = "microbatches" in PLACES[number % len(PLACES)][2]
    found: list[Line] = [("head", f"D = torch.{dtype}")]
    for name in "ab":
        norms = NORMS[is_parted:]
        found.append(("head", f"norm_{name} = {dice.choice(norms)}"))
        found += [(name, dice.choice(BODIES)) for _ in range(dice.randint(1, 5))]
    found += [("head", f"loss_{m} = lambda m, x, y: {dice.choice(LOSSES).format(n=n)}") for m, n in ("ab", "ba")]
    if dice.random() < 0.05:
        found.append(("make", dice.choice(("b.first = a.first", "t.head = a.head", "t.mid.weight = a.head.weight"))))
    where = "make" if dice.random() < 0.15 else "loop"
    for m in "ab":
        found.append((where, f"o{m} = torch.optim.{dice.choice(OPTIMIZERS).format(f'{m}.parameters()')}"))
    found.append(("loop", "oj = torch.optim.SGD([*a.parameters(), *b.parameters()], lr=0.05, momentum=0.5)"))
    found.append(("loop", "scaler = torch.amp.GradScaler('cpu', init_scale=8.0)"))
    pools = (STEPS, CHANGES, LOOKS)
    for _ in range(dice.randint(5, 14)):
        m, n = dice.choice(("ab", "ab", "ba"))
        text = dice.choice(dice.choices(pools, (50, 38, 12))[0])
        layer, value = dice.choice(("first", "mid", "head")), dice.choice(("0.5", "2.0", "-1.0", "0.25"))
        found.append(("loop", text.format(m=m, n=n, o=f"o{m}", p=f"o{n}", l=layer, v=value, i=dice.choice("01"))))
    return found


def head(lines: list[Line]) -> str:
    """The source of the models and losses."""
    source = lines[0][1] + HEAD
    for name in "ab":
        body = "".join(f"        {text}\n" for where, text in lines if where == name)
        source += CLASS.format(name=name, body=body)
    return source + "".join(f"{text}\n" for where, text in lines[1:] if where == "head")
