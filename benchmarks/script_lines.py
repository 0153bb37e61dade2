"""What `benchmarks.drawn_loops --scripts` draws: everyday training scripts, on every kind of mesh and batch."""

from __future__ import annotations

import random
from typing import Any

from benchmarks.loop_lines import NORMS, OPTIMIZERS, Line, Place

LOCAL: dict[str, Any] = {"batch": "local", "batch_dims": 0}
PIPELINE: dict[str, Any] = {"microbatches": 2, "schedule": "1f1b"}
SCRIPT_PLACES: tuple[Place, ...] = (
    (2, "dp=2", LOCAL), (2, "pp=2", PIPELINE), (2, "dp=2", {"zero": 1}), (2, "dp=2", {"batch": "ddp"}),
    (2, "fsdp=2", LOCAL), (2, "dp=2", {"zero": 2}), (2, "pp=2", {"microbatches": 2, "schedule": "zb-h1"}),
    (2, "tp=2", {}), (1, "dp=1", {}), (2, "dp=2", {"zero": 3, "offload": "optimizer"}), (2, "fsdp=2", {}),
    (2, "dp=2", LOCAL | {"zero": 2}), (2, "pp=2", {"microbatches": 4, "schedule": "interleaved-1f1b"}),
    (2, "dp=2", {"offload": "parameters", "zero": 3}), (2, "dp=2", {"batch": "ddp", "microbatches": 2}),
    (2, "tp=2", {"microbatches": 2}), (2, "pp=2", PIPELINE | {"recompute": "full", "offload": "activations"}),
    (2, "dp=2", LOCAL | {"microbatches": 2}), (2, "pp=2", {"microbatches": 2, "schedule": "gpipe"}),
    (1, "dp=1", {"offload": "optimizer"}), (2, "pp=2", PIPELINE | {"offload": "optimizer"}),
    (2, "dp=2", {"zero": 3, "microbatches": 2}),
)  # fmt: skip

# -- {m}: the model, {o}: its optimizer, {l}: a layer, {v}: a number, {i}: 0 or 1 --------------------------------------

SCRIPT_BODIES = (
    "h = h * self.scale", "h = torch.tanh(h) if self.warm else h", "h = h + 0.1 * self.mid(h)", "h = self.act(h)",
    "h = h.detach() if self.frozen else h", "h = self.mid(h.relu())", "h = h + self.slow(h)",
    "h = h + self.options['shift'] * self.table", "h = h + (torch.is_grad_enabled() + 1) * 0.1",
    "for block in self.blocks[:self.depth]: h = h + 0.1 * block(h)", "h = self.heads[self.task](h)",
    "h = checkpoint(self.mid, h, use_reentrant=False)", "h = h * (2 if self.mid.weight.requires_grad else 1)",
    "h = h + F.linear(h, self.mid.weight * self.mask)", "h = h + self.extra if self.extra is not None else h",
    "h = h + h @ self.queue.t() @ self.queue * 0.1", "h = h - 0.3 * self.ema", "h = self.blocks[1](h).sin() + h",
)  # fmt: skip
WRITING_BODIES = (  # buffers, which the ranks of batch="ddp" and micro-batches have each of their own
    "if self.training: self.ema.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)", "self.calls += 1",
    "self.enqueue(h.detach())", "with torch.no_grad(): self.slow.weight.lerp_(self.mid.weight, 0.2)",
)  # fmt: skip
INNER = "[p for p in m.parameters() if p.requires_grad]"
SCRIPT_LOSSES = (
    "F.mse_loss(m(x), y)", "(m(x) - y).abs().mean()", "F.mse_loss(m(x), y)", "fallible(m(x), y)",
    "F.cross_entropy(m(x), y if y.ndim == 1 else y.argmax(-1))", "F.mse_loss(m(x), t(x).detach())",
    "F.cross_entropy(m(x), y if y.ndim == 1 else y.argmax(-1))",
    "(F.mse_loss(m(x), y), {{'out': m(x).mean()}})", "F.mse_loss(m(x), y, reduction='sum') / 10",
    "F.mse_loss(m(x), y) + 0.1 * (lambda z: torch.autograd.grad(m(z).sum(), z, create_graph=True)[0])("
    "x.detach().clone().requires_grad_()).norm(dim=-1).sub(1).pow(2).mean()",
    "(lambda e: e + 0.1 * sum(g.pow(2).sum() for g in torch.autograd.grad(e, " + INNER + ", create_graph=True, "
    "allow_unused=True) if g is not None))(F.mse_loss(m(x), y))",
    "maml(m, x, y)", "maml(m, x, y, 2)", "F.mse_loss(m(x), y) + 0.01 * hutchinson(m, x)",
    "F.mse_loss(m(x), y) + 0.1 * torch.func.jacrev(m)(x[:2]).pow(2).mean()",
    "F.mse_loss(m(perturbed(m, x, y)), y)", "F.mse_loss(m(x), y) + 0.1 * sum(p.abs().sum() for p in m.parameters())",
    "F.mse_loss(m(x), y) + 0.1 * sum(p.pow(2).mean() for p in m.parameters() if p.requires_grad and p.ndim > 1)",
)  # fmt: skip
STEP = "{o}.zero_grad(); note(back({m}, *batch())); {o}.step()"
SCRIPT_STEPS = (
    STEP, STEP, STEP, "for _ in range(3): {o}.zero_grad(); back({m}, *batch()); {o}.step()",
    "{o}.zero_grad(); loss = value({m}, *batch()); loss.backward(); note(loss); {o}.step()",
    "for i in range(4): (value({m}, *batch()) / 2).backward(); i % 2 and ({o}.step(), {o}.zero_grad())",
    "{o}.zero_grad(); [back({m}, *batch(n)) for n in (8, 5, 3)]; {o}.step()",
    "for n in (8, 8, 6, 1): {o}.zero_grad(); note(back({m}, *batch(n))); {o}.step()",
    "for n in (7, 8, 2): {o}.zero_grad(); value({m}, *batch(n)).backward(); {o}.step()",
    "{o}.zero_grad(set_to_none=False); back({m}, *batch()); {o}.step(); {o}.zero_grad(set_to_none=False)",
    "back({m}, *batch()); note(clip({m}.parameters(), 0.1)); {o}.step(); {o}.zero_grad()",
    "back({m}, *batch()); note(clip({m}.parameters(), 0.1, norm_type=float('inf'))); {o}.step(); {o}.zero_grad()",
    "back({m}, *batch()); note(clip({m}.parameters(), 0.1, norm_type=1, foreach=False)); {o}.step(); {o}.zero_grad()",
    "back({m}, *batch()); note(clip({m}.parameters(), 0.1, error_if_nonfinite=True)); {o}.step(); {o}.zero_grad()",
    "back({m}, *batch()); torch.nn.utils.clip_grad_value_({m}.parameters(), 0.01); {o}.step()",
    "back({m}, *batch()); n = torch.nn.utils.get_total_norm([p.grad for p in {m}.parameters() if p.grad is not None]);"
    " torch.nn.utils.clip_grads_with_norm_({m}.parameters(), 0.1, n); note(n); {o}.step(); {o}.zero_grad()",
    "for g in {o}.param_groups: back({m}, *batch()); clip(g['params'], 0.05)",
    "scaler = torch.amp.GradScaler('cpu', init_scale=8.0, growth_interval=2)",
    "{o}.zero_grad(); scaler.scale(value({m}, *batch())).backward(); scaler.step({o}); scaler.update(); "
    "note(scaler.get_scale())",
    "{o}.zero_grad(); scaler.scale(value({m}, *batch())).backward(); scaler.unscale_({o}); "
    "note(clip({m}.parameters(), 0.5)); scaler.step({o}); scaler.update(); note(scaler.get_scale())",
    "{o}.zero_grad(); scaler.scale(value({m}, *batch()) * float('inf')).backward(); scaler.step({o}); "
    "scaler.update(); note(scaler.get_scale()); {o}.zero_grad()",
    "{o}.zero_grad(); [scaler.scale(value({m}, *batch()) / 2).backward() for _ in range(2)]; scaler.step({o}); "
    "scaler.update()",
    "{o}.zero_grad(); gs = torch.autograd.grad(value({m}, *batch()), trained({m}), allow_unused=True); "
    "[p.data.sub_(0.1 * g) for p, g in zip(trained({m}), gs) if g is not None]",
    "gs = torch.autograd.grad(value({m}, *batch()), trained({m}), allow_unused=True); "
    "hs = torch.autograd.grad(value({m}, *batch()), trained({m}), allow_unused=True); "
    "[setattr(p, 'grad', projected(g, h)) for p, g, h in zip(trained({m}), gs, hs)]; {o}.step()",
    "back({m}, *batch()); [p.grad.add_(0.01 * torch.sign(p.detach())) for p in held({m})]; {o}.step(); {o}.zero_grad()",
    "back({m}, *batch()); [p.grad.sub_(p.grad.mean(dim=1, keepdim=True)) for p in held({m}) if p.ndim > 1]; {o}.step()",
    "back({m}, *batch()); agc({m}); {o}.step(); {o}.zero_grad()",
    "back({m}, *batch()); [p.grad.div_(p.grad.norm() + 1e-3) for p in held({m})]; {o}.step()",
    "back({m}, *batch()); [p.grad.nan_to_num_() for p in held({m})]; {m}.{l}.weight.grad[{i}] = 0; {o}.step()",
    "back({m}, *batch()); {m}.{l}.weight.grad[:, {i}:3] *= 0.5; {o}.step(); {o}.zero_grad()",
    "back({m}, *batch()); [p.grad.data.clamp_(-0.02, 0.02) for p in held({m})]; {o}.step(); {o}.zero_grad()",
    "back({m}, *batch()); [setattr(p, 'grad', p.grad * 0.5) for p in held({m})]; {o}.step(); {o}.zero_grad()",
    "back({m}, *batch()); [setattr(p, 'grad', p.grad / (p.grad.abs() + 1e-3)) for p in held({m})]; {o}.step()",
    "back({m}, *batch()); torch.manual_seed({i}); [p.grad.add_(torch.randn_like(p.grad), alpha=0.01) for p in "
    "held({m})]; {o}.step(); {o}.zero_grad()",
    "back({m}, *batch()); [setattr(p, 'grad', None) for p in held({m}) if p.ndim == 1]; {o}.step(); {o}.zero_grad()",
    "back({m}, *batch()); big = [p.grad.abs().max().item() for p in held({m})]; note(big); {o}.step()",
    "back({m}, *batch()); note(torch.cat([p.grad.flatten() for p in held({m})]).norm()); {o}.step()",
    "back({m}, *batch()); note([(p.grad.norm() / (p.norm() + 1e-3)).item() for p in held({m})]); {o}.step()",
    "back({m}, *batch()); note(torch.stack([p.grad.norm() for p in held({m})]).norm()); {o}.step(); {o}.zero_grad()",
    "back({m}, *batch()); note(sum(float((p.grad ** 2).sum()) for p in held({m}))); {o}.step(); {o}.zero_grad()",
    "note({o}.step(lambda: ({o}.zero_grad(), back({m}, *batch()))[1]))",
    "x, y = batch(); note({o}.step(lambda: closure({m}, {o}, x, y)))",
    "lb = torch.optim.LBFGS(trained({m}), lr=0.1, max_iter=3, history_size=3); x, y = batch(); "
    "lb.step(lambda: closure({m}, lb, x, y))",
    "x, y = batch(); lb = torch.optim.LBFGS(trained({m}), max_iter=2, line_search_fn='strong_wolfe'); "
    "lb.step(lambda: closure({m}, lb, x, y))",
    "sam = SAM(trained({m}), {o}); x, y = batch(); {o}.zero_grad(); back({m}, x, y); sam.first(); {o}.zero_grad(); "
    "back({m}, x, y); sam.second(); {o}.step()",
    "slow = [p.detach().clone() for p in {m}.parameters()]; [(back({m}, *batch()), {o}.step(), {o}.zero_grad()) for _ "
    "in range(2)]; lookahead({m}, slow)",
    "free = Free(trained({m}), 0.1)", "free.train(); free.zero_grad(); back({m}, *batch()); free.step()",
    "free.eval(); {m}.eval(); note(mine({m}(batch()[0]))); {m}.train(); free.train()",
    "attempt({m}, batch()[0], labels(9)); {o}.zero_grad()",
    "{o}.zero_grad(); note(back({m}, batch()[0], labels(3))); {o}.step()",
    "{o}.zero_grad(); note(back({m}, batch()[0], labels(-100))); {o}.step()",
    "box.fails = True; attempt({m}, *batch()); box.fails = False",
    "attempt({m}, batch()[0][:, :4], batch()[1])",
    "x, y = batch(); x.requires_grad_(); back({m}, x, y); g = together(x.grad); note(g / g.abs().max()); {o}.step()",
    "x, y = batch(); x.requires_grad_(); g, = torch.autograd.grad(value({m}, x, y), x); {o}.zero_grad(); "
    "back({m}, (x + 0.1 * g.sign()).detach(), y); {o}.step()",
    "x, y = batch(); d = torch.zeros_like(x, requires_grad=True); back({m}, x + d, y); {o}.zero_grad(); "
    "back({m}, x + 0.1 * d.grad.sign(), y); {o}.step()",
    "x, y = batch(); lam = 0.3; (lam * value({m}, x, y) + (1 - lam) * value({m}, x, y.flip(-1))).backward(); "
    "{o}.step()",
    "{o}.zero_grad(); loss = value({m}, *batch()); l2 = 0.01 * sum(p.pow(2).sum() for p in {m}.parameters()); "
    "(loss + l2).backward(); note(loss + l2); {o}.step()",
    "with no_sync({m}): back({m}, *batch())\nback({m}, *batch()); {o}.step(); {o}.zero_grad()",
    "loss = value({m}, *batch()); loss.item() < 1e3 and loss.backward(); {o}.step(); {o}.zero_grad()",
    "loss = value({m}, *batch()); del loss; back({m}, *batch()); {o}.step(); {o}.zero_grad()",
    "loss = value({m}, *batch()); {o}.step(); {o}.zero_grad(); loss.backward()",
    "losses = [value({m}, *batch()) for _ in range(3)]; torch.stack(losses).mean().backward(); {o}.step()",
    "l1, l2 = value({m}, *batch()), value({m}, *batch()); (l1 * torch.softmax(torch.stack([l1, l2]).detach(), 0)[0] "
    "+ l2).backward(); {o}.step()", "{o}.step()", "{o}.zero_grad()", "{m}.zero_grad()", "{m}.zero_grad(False)",
    "torch.autograd.backward([value({m}, *batch()), value({m}, *batch())]); {o}.step()",
    "loss = value({m}, *batch()); loss.backward(retain_graph=False); {o}.step(); {o}.zero_grad()",
    "with torch.autocast('cpu', torch.bfloat16, enabled=False): back({m}, *batch()); {o}.step(); {o}.zero_grad()",
    "total = 0.0\nfor _ in range(2): total += back({m}, *batch()).item(); {o}.step(); {o}.zero_grad()\nnote(total)",
    "handles = [p.register_post_accumulate_grad_hook(lambda p: (p.data.sub_(0.1 * p.grad), setattr(p, 'grad', None)))"
    " for p in trained({m})]; back({m}, *batch()); [h.remove() for h in handles]",
    "handles = [p.register_hook(lambda g: g.clamp(-0.02, 0.02)) for p in trained({m})]; back({m}, *batch()); "
    "[h.remove() for h in handles]; {o}.step()",
)  # fmt: skip
SCRIPT_LOOKS = (
    "{m}.eval(); note(float(value({m}, *batch()))); {m}.train()",
    "{m}.eval()\nwith torch.no_grad(): note(float(value({m}, *batch())))\n{m}.train()",
    "{m}.eval()\nwith torch.inference_mode(): note(mine({m}(batch()[0])))\n{m}.train()",
    "{m}.eval()\nwith torch.no_grad(): note([mine({m}(batch(n)[0]), n) for n in (8, 6, 2)])\n{m}.train()",
    "with torch.no_grad(): note(mine({m}(batch(6)[0]), 6))", "note({m}.head.weight.norm())",
    "{m}.eval()\nwith torch.inference_mode(): note(F.mse_loss(together({m}(batch()[0])), whole_batch()[1]))\n"
    "{m}.train()",
    "note([n for n, p in {m}.named_parameters() if p.grad is None])", "note({o}.param_groups[0]['lr'])",
    "with torch.no_grad(): note([p.abs().mean().item() for p in {m}.parameters()])",
    "with torch.no_grad(): note(torch.histc({m}.{l}.weight.detach(), 5, -1, 1))",
    "note(sum(p.numel() for p in {m}.parameters() if p.requires_grad))",
    "note({{k: whole(v) for k, v in {m}.state_dict().items()}})",
    "with gathered({m}) as plain: note({{k: v.detach().clone() for k, v in plain.state_dict().items()}})",
    "{m}.eval()\nwith gathered({m}) as plain: note(plain(whole_batch()[0]).detach())\n{m}.train()",
    "note(torch.linalg.matrix_norm({m}.{l}.weight.detach(), 2))",
    "with torch.no_grad(): note(torch.linalg.svdvals(whole({m}.{l}.weight)))",
    "with ema.applied(): note(mine({m}(batch()[0]).detach()))", "note(ema_of(ema))",
)  # fmt: skip
SCRIPT_CHANGES = (
    "ema = EMA({m}, 0.9); ema.update()", "ema.update()", "[p.data.clamp_(-0.1, 0.1) for p in {m}.parameters()]",
    "with torch.no_grad(): {m}.{l}.weight.div_({m}.{l}.weight.norm(dim=1, keepdim=True))",
    "with torch.no_grad(): {m}.{l}.weight.div_(torch.linalg.matrix_norm({m}.{l}.weight, 2))",
    "u, s, v = torch.linalg.svd(whole({m}.{l}.weight))\n"
    "with torch.no_grad(): {m}.{l}.weight.copy_(u * s.clamp(max=1) @ v)",
    "with torch.no_grad(): {m}.{l}.weight.renorm_(2, 0, 0.5)", "nn.init.orthogonal_({m}.{l}.weight)",
    "nn.init.kaiming_uniform_({m}.{l}.weight, nonlinearity='relu'); nn.init.zeros_({m}.{l}.bias)",
    "{m}.{l}.reset_parameters()", "nn.init.trunc_normal_({m}.{l}.weight, std=0.1)", "nn.init.eye_({m}.{l}.weight)",
    "with torch.no_grad(): {m}.{l}.weight[{m}.{l}.weight.abs() < 0.1] = 0",
    "with torch.no_grad(): {m}.{l}.weight.masked_fill_({m}.{l}.weight.abs() < 0.1, 0.0)",
    "with torch.no_grad(): w = {m}.{l}.weight; w.mul_(w.abs() >= whole(w).abs().flatten().kthvalue(12).values)",
    "lora = (torch.ones(6, 2, dtype=D) / 10, torch.ones(2, 6, dtype=D) / 10)",
    "with torch.no_grad(): {m}.{l}.weight.add_(lora[0] @ lora[1])", "{m}.{l}.weight.data -= lora[0] @ lora[1]",
    "with torch.no_grad(): {m}.{l}.weight.copy_(torch.nn.functional.softshrink({m}.{l}.weight, 0.05))",
    "with torch.no_grad(): [p.mul_(0.8).add_(torch.randn_like(p), alpha=0.01) for p in {m}.parameters()]",
    "with torch.no_grad(): [p.add_(q, alpha=0.1) for p, q in zip({m}.parameters(), t.parameters())]",
    "with torch.no_grad(): {m}.{l}.weight.copy_(whole({m}.{l}.weight).t())", "{m}.{l}.weight.data.t_()",
    "with torch.no_grad(): {m}.{l}.weight[[0, 1]] = {m}.{l}.weight[[1, 0]]",
    "with torch.no_grad(): {m}.{l}.weight[:, {i}].fill_({v}); {m}.{l}.bias[{i}] += {v}",
    "with gathered({m}, write=True) as plain: plain.{l}.weight.data.mul_({v})",
    "with gathered({m}, write=True) as plain: plain.head.reset_parameters()",
    "saved = {{k: whole(v).clone() for k, v in {m}.state_dict().items()}}; states = copy.deepcopy({o}.state_dict())",
    "{m}.load_state_dict(saved); {o}.load_state_dict(states)", "save({m}, {o}, 1)", "load({m}, {o})",
    "back({m}, *batch()); save({m}, {o}, 2); {o}.step()", "{m}.load_state_dict(t.state_dict())",
    "file = io.BytesIO(); torch.save({{k: whole(v) for k, v in {m}.state_dict().items()}}, file); file.seek(0); "
    "{m}.load_state_dict(torch.load(file))",
    "{o} = torch.optim.SGD({m}.parameters(), lr=0.05, momentum=0.9, nesterov=True)",
    "{o} = torch.optim.AdamW([{{'params': [p for p in {m}.parameters() if p.ndim > 1], 'weight_decay': 0.1}}, "
    "{{'params': [p for p in {m}.parameters() if p.ndim < 2], 'weight_decay': 0.0}}], lr=0.02, eps=1e-3)",
    "{o} = torch.optim.Adam(trained({m}), lr=0.02, eps=1e-3, foreach=False, amsgrad=True)",
    "{o} = torch.optim.Adam(trained({m}), lr=0.02, eps=1e-3, fused=True)",
    "{o} = torch.optim.AdamW(trained({m}), lr=torch.tensor(0.02), eps=1e-3, foreach=False, maximize=True)",
    "{o} = torch.optim.NAdam(trained({m}), lr=0.02, eps=1e-3)",
    "{o} = torch.optim.RAdam(trained({m}), lr=0.02, eps=1e-3)",
    "{o} = torch.optim.Adamax(trained({m}), lr=0.02, eps=1e-3)", "{o} = Lion(trained({m}), 0.01)",
    "{o} = torch.optim.Adadelta(trained({m}), eps=1e-3)", "{o} = torch.optim.ASGD(trained({m}), lr=0.05)",
    "{o} = torch.optim.SGD({m}.head.parameters(), lr=0.05); "
    "{o}.add_param_group({{'params': {m}.mid.parameters(), 'lr': 0.01}})",
    "{o}.add_param_group({{'params': [extra_p], 'lr': 0.01}})", "extra_p = nn.Parameter(torch.ones(6, dtype=D))",
    "{m}.{l}.requires_grad_(False)", "{m}.{l}.requires_grad_(True)", "{m}.requires_grad_(True)",
    "[p.requires_grad_(n.startswith('head')) for n, p in {m}.named_parameters()]",
    "[p.requires_grad_(p.ndim > 1) for p in {m}.parameters()]", "{m}.first.bias.requires_grad = False",
    "sched = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts({o}, 2)",
    "sched = torch.optim.lr_scheduler.OneCycleLR({o}, max_lr=0.1, total_steps=50)",
    "sched = torch.optim.lr_scheduler.SequentialLR({o}, [torch.optim.lr_scheduler.LinearLR({o}, 0.1, total_iters=2), "
    "torch.optim.lr_scheduler.ExponentialLR({o}, 0.9)], [2])",
    "sched = torch.optim.lr_scheduler.MultiplicativeLR({o}, lambda e: 0.9)", "sched.step()",
    "sched.step()", "for g in {o}.param_groups: g['lr'] = {v} / 10", "{o}.param_groups[0]['weight_decay'] = 0.1",
    "sched_state = copy.deepcopy(sched.state_dict())", "sched.load_state_dict(sched_state)",
    "swa = torch.optim.swa_utils.SWALR({o}, 0.05, 2)", "swa.step()", "{m}.scale = {v}", "{m}.warm = not {m}.warm",
    "{m}.frozen = not {m}.frozen", "{m}.depth = {i} + 1", "{m}.task = 'two'",
    "{m}.extra = torch.full((6,), {v}, dtype=D)",
    "{m}.ema.add_(0.1)", "{m}.mask[{i}] = 0", "{m}.eval()", "{m}.train()", "{m}.act = F.relu", "{o}.state.clear()",
    "[s['exp_avg'].mul_(0.5) for s in {o}.state.values() if 'exp_avg' in s]",
    "[{o}.state.pop(p, None) for p in {m}.{l}.parameters()]",
    "[s.update(momentum_buffer=s['momentum_buffer'] * 0.5) for s in {o}.state.values() if s.get('momentum_buffer') is "
    "not None]", "with torch.no_grad(): [q.lerp_(whole(p), 0.3) for p, q in zip({m}.parameters(), t.parameters())]",
    "vec = nn.utils.parameters_to_vector({m}.parameters()).detach().clone()",
    "nn.utils.vector_to_parameters(vec, {m}.parameters())",
    "start = [p.detach().clone() for p in {m}.parameters()]",
    "with torch.no_grad(): [p.copy_(p0 + 0.5 * (p - p0)) for p, p0 in zip({m}.parameters(), start)]",
    "torch._foreach_lerp_(start, [p.detach() for p in {m}.parameters()], 0.5)",
    "torch.optim.swa_utils.update_bn([batch()[0] for _ in range(2)], {m}) if {m}.norm.__class__ is "
    "nn.BatchNorm1d and not parted else None",
)  # fmt: skip
HELPERS = '''
import contextlib, io, os

def trained(m):
    return [p for p in m.parameters() if p.requires_grad]

def held(m):
    return [p for p in m.parameters() if p.grad is not None]

def fallible(out, y):
    if box.fails:
        raise ValueError("as asked")
    return F.mse_loss(out, y)

def attempt(m, *args):
    plain = [] if hasattr(m, 'training_loss') else [*m.buffers(), *m.parameters()]
    was = [(b, b.detach().clone()) for b in plain]
    try:
        back(m, *args)
    except Exception as error:
        if "cannot be computed one after another" in str(error) or "does not divide" in str(error):
            raise  # what this model and mesh never take
        note("failed")
        with torch.no_grad():
            [b.copy_(c) for b, c in was]  # those of a parallel model are as they were

def maml(m, x, y, steps=1):
    ps = {n: p for n, p in m.named_parameters() if p.requires_grad}
    for _ in range(steps):
        loss = F.mse_loss(torch.func.functional_call(m, ps, (x,)), y)
        gs = torch.autograd.grad(loss, list(ps.values()), create_graph=True, allow_unused=True)
        ps = {n: p if g is None else p - 0.1 * g for (n, p), g in zip(ps.items(), gs)}
    return F.mse_loss(torch.func.functional_call(m, ps, (x * 0.5,)), y)

def hutchinson(m, x):
    z = x.detach().clone().requires_grad_()
    g, = torch.autograd.grad(m(z).pow(2).sum(), z, create_graph=True)
    h, = torch.autograd.grad((g * torch.ones_like(g)).sum(), z, create_graph=True)
    return h.mean()

def perturbed(m, x, y):
    z = x.detach().clone().requires_grad_()
    g, = torch.autograd.grad(F.mse_loss(m(z), y), z)
    return (x + 0.1 * g.sign()).detach()

def projected(g, h):
    if g is None:
        return None
    dot = (g * h).sum()
    return g - h * (dot.clamp(max=0) / (h.pow(2).sum() + 1e-3))

def agc(m):
    for p in held(m):
        if p.ndim > 1:
            limit = 0.01 * p.detach().norm(dim=1, keepdim=True).clamp(min=1e-3)
            n = p.grad.norm(dim=1, keepdim=True)
            p.grad.copy_(torch.where(n > limit, p.grad * (limit / n.clamp(min=1e-6)), p.grad))

def closure(m, o, x, y):
    o.zero_grad()
    loss = value(m, x, y)
    loss.backward()
    return loss

def no_sync(m):
    return m.no_sync() if hasattr(m, "no_sync") else contextlib.nullcontext()

def lookahead(m, slow):
    with torch.no_grad():
        for p, s in zip(m.parameters(), slow):
            s.add_(p - s, alpha=0.5)
            p.copy_(s)

class SAM:
    def __init__(self, ps, o):
        self.ps, self.old = ps, {}

    @torch.no_grad()
    def first(self):
        norm = torch.stack([p.grad.norm() for p in self.ps if p.grad is not None]).norm()
        for p in self.ps:
            if p.grad is not None:
                self.old[p] = p.data.clone()
                p.add_(p.grad * (0.05 / (norm + 1e-6)))

    @torch.no_grad()
    def second(self):
        for p, old in self.old.items():
            p.data = old

class Lion(torch.optim.Optimizer):
    def __init__(self, ps, lr):
        super().__init__(ps, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for g in self.param_groups:
            for p in g["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state["m"] = torch.zeros_like(p)
                    p.mul_(1 - g["lr"] * 0.1)
                    u = (state["m"] * 0.9 + p.grad * 0.1)
                    p.add_(u / (u.abs() + 1e-3), alpha=-g["lr"])
                    state["m"].lerp_(p.grad, 0.01)
        return loss

class Free(torch.optim.Optimizer):
    """Schedule-free SGD: y is trained, x is looked at."""

    def __init__(self, ps, lr):
        super().__init__(ps, {"lr": lr, "k": 0, "trains": True})

    @torch.no_grad()
    def turn(self, to):
        for g in self.param_groups:
            for p in g["params"]:
                if "z" in self.state[p] and g["trains"] is not to:
                    p.lerp_(self.state[p]["z"], 1 - 0.9 if to else 1 - 1 / 0.9)
            g["trains"] = to

    def train(self):
        self.turn(True)

    def eval(self):
        self.turn(False)

    @torch.no_grad()
    def step(self):
        for g in self.param_groups:
            ck = 1 / (g["k"] + 1)
            for p in g["params"]:
                if p.grad is None:
                    continue
                if "z" not in self.state[p]:
                    self.state[p]["z"] = p.detach().clone()
                z = self.state[p]["z"]
                p.lerp_(z, ck)
                p.add_(p.grad, alpha=g["lr"] * (0.9 * (1 - ck) - 1))
                z.sub_(p.grad, alpha=g["lr"])
            g["k"] += 1

box.fails = False
'''


def scripted(number: int, lengths: tuple[int, int] = (6, 16)) -> list[Line]:
    """The lines of a script. lengths: from how many to how many are drawn."""
    dice = random.Random(10**6 + number)
    _, _, options = SCRIPT_PLACES[number % len(SCRIPT_PLACES)]
    is_short = "precision" in options
    is_parted = "microbatches" in options or options.get("batch") == "ddp"
    found: list[Line] = [("head", f"D = torch.{'float32' if is_short else 'float64'}")]
    found.append(("head", f"parted, share = {is_parted}, {dice.choice((0.5, 0.5 if is_parted else 0.625))}"))
    bodies = SCRIPT_BODIES if is_parted else (*SCRIPT_BODIES, *WRITING_BODIES)
    losses = [each for each in SCRIPT_LOSSES if not (is_short and "grad" in each)]
    for name in "ab":
        found.append(("head", f"norm_{name} = {dice.choice(NORMS[is_parted:])}"))
        found += [(name, dice.choice(bodies)) for _ in range(dice.randint(1, 4))]
        found.append(("head", f"loss_{name} = lambda m, x, y: {dice.choice(losses).format()}"))
    where = "make" if dice.random() < 0.3 else "loop"
    for m in "ab":
        found.append((where, f"o{m} = torch.optim.{dice.choice(OPTIMIZERS).format(f'{m}.parameters()')}"))
    pools = (SCRIPT_STEPS, SCRIPT_CHANGES, SCRIPT_LOOKS)
    found.append(("loop", "first = {k: whole(v).clone() for k, v in a.state_dict().items()}"))
    for at in range(dice.randint(*lengths)):
        if at % 8 == 7:  # so that nothing grows for long
            found.append(("loop", "a.load_state_dict(first)"))
        m = "aaaaaaab"[dice.randrange(8)]
        text = dice.choice(dice.choices(pools, (50, 38, 12))[0])
        layer, value = dice.choice(("first", "mid", "head")), dice.choice(("0.5", "2.0", "-1.0", "0.25"))
        found.append(("loop", text.format(m=m, o=f"o{m}", l=layer, v=value, i=dice.choice("01"))))
    return found
