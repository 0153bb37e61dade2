"""What Inductor's Triton code has for a LOCAL graph: its kernels and the bytes that they move, on a machine without a
GPU. A yardstick for our own groups: products, attention and our opaque ops are calls in both, and count in neither.

python tests/support/inductor_count.py gpt llama t5    # a line of JSON a graph, in a process of its own: it puts stubs
                                                       # in place of the GPU
python tests/support/inductor_count.py --ours gpt llama t5    # our groups, beside what was measured of Inductor
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
H100 = {
    "name": "NVIDIA H100", "major": 9, "minor": 0, "multi_processor_count": 132, "warp_size": 32,
    "regs_per_multiprocessor": 65536,
    "max_threads_per_multi_processor": 2048, "total_memory": 80 << 30, "L2_cache_size": 50 << 20, "gcnArchName": "",
    "shared_memory_per_block_optin": 232448, "max_threads_per_block": 1024,
}  # fmt: skip


PASSES = (("forward", "F"), ("backward", "B"))
# (kernels, bytes) by Inductor of torch 2.13; tests/runtime/test_inductor_count.py measures them again.
OPAQUE = ("autopar.einsum", "autopar.attention", "autopar.embedding_backward", "autopar.checked")
MEASURED = {
    "gpt step": (26, 3_432_484_872),
    "gpt split": (35, 1_753_526_280),
    "gpt forward": (8, 1_879_355_400),
    "gpt backward": (19, 2_155_036_672),
    "llama step": (15, 3_865_260_040),
    "llama split": (46, 1_858_158_600),
    "llama forward": (6, 1_729_155_080),
    "llama backward": (9, 2_896_216_064),
    "t5 step": (22, 9_414_298_632),
    "t5 split": (33, 2_794_377_480),
    "t5 forward": (10, 3_376_492_552),
    "t5 backward": (15, 6_909_628_416),
}


@dataclass(frozen=True)
class Counted:
    """Of one graph. calls: the ops that are no Triton kernels, with how often each is called."""

    name: str
    kernels: int
    bytes_: int
    calls: dict[str, int]


def counted(*blocks: str) -> list[Counted]:
    """What Inductor makes of the graphs of some of `BLOCKS`, found in another process."""
    done = subprocess.run([sys.executable, __file__, *blocks], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return [Counted(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith("{")]


def graphs(block: str, **options: Any) -> Iterator[tuple[str, Any]]:
    """The LOCAL graphs of a block with its loss, at 2 rows of 4,096 tokens: the step as one, and a rank's where it is
    split; and forward and backward pass alone, as a step of micro-batches has them. options: of the step."""
    import autopar

    split = {"sequence_parallel": True}
    for name, mesh, rows, more in (
        ("step", "dp=1", 2, {}), ("split", "tp=4", 2, split), ("", "dp=1", 4, {"microbatches": 2}),
    ):  # fmt: skip
        model, loss_fn, batch = BLOCKS[block](rows)
        compiled = autopar.compile(model, mesh, loss_fn=loss_fn, batch=batch, **more, **options)
        if compiled.pipeline is None:
            yield f"{block} {name}", compiled.program
        else:
            yield from ((f"{block} {name}", compiled.pipeline.graphs[0, kind]) for name, kind in PASSES)


def ours(name: str, program: Any) -> Counted:
    """The same of the groups of a program, and of the calls that stand beside them: a kernel each. What a kernel reads
    of one value through several views is not more than that value."""
    from autopar.ir.ops.op_facts import is_fresh
    from autopar.ir.ops.ops import is_mesh_op
    from autopar.ir.program import is_getitem

    kernels, bytes_, calls = 0, 0, Counter()
    for node in program.calls():
        if is_getitem(node) or not is_fresh(node.target):
            continue
        if str(node.target).startswith(OPAQUE) or is_mesh_op(node.target):
            calls[str(node.target)] += 1
        else:
            kernels, bytes_ = kernels + 1, bytes_ + _moved(node, program.mesh)
    return Counted(name, kernels, bytes_, dict(calls))


def _moved(node: Any, mesh: Any) -> int:
    """The bytes of a call's operands and results."""
    from autopar.ir.ops.measure import local_bytes
    from autopar.ir.ops.storage import root_of

    read: dict[Any, int] = Counter()
    for operand in node.all_input_nodes:
        read[root_of(operand)] += local_bytes(operand, mesh)
    return local_bytes(node, mesh) + sum(min(size, local_bytes(source, mesh)) for source, size in read.items())


# -- in the other process ---------------------------------------------------------------------------------------------


def stub_the_gpu() -> None:
    """Let Inductor find an H100. Nothing is launched on it."""
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    properties = SimpleNamespace(**H100)
    stub = SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0)
    stub.utils = SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": 232448})
    driver.set_active(stub)
    torch.cuda.get_device_properties = lambda *_: properties  # type: ignore[assignment]
    torch.cuda.get_device_capability = lambda *_: (9, 0)  # type: ignore[assignment]
    torch.cuda.current_device = lambda: 0
    torch.cuda.device_count = lambda: 1
    from torch._dynamo.device_interface import CudaInterface
    from torch._subclasses import fake_tensor

    fake_tensor.init_gpu_context = lambda device: None  # type: ignore[assignment]
    CudaInterface.is_available = staticmethod(lambda: True)  # type: ignore[method-assign]
    for name in ("get_device_properties", "current_device", "device_count"):
        setattr(CudaInterface, name, staticmethod(getattr(torch.cuda, name)))
    CudaInterface.Worker.get_device_properties = staticmethod(lambda *_: properties)  # type: ignore[method-assign]
    CudaInterface.Worker.current_device = staticmethod(lambda: 0)  # type: ignore[method-assign]
    from torch._inductor.fx_passes import joint_graph

    made = joint_graph.lazy_init  # the patterns that it looks for are traced on a device
    joint_graph.lazy_init = lambda *_: made(torch.device("cpu"))  # type: ignore[assignment]


def count(name: str, program: Any) -> Counted:
    """What Inductor writes for a LOCAL graph, traced as `compile="inductor"` does it."""
    import torch
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    from autopar.ir.ops.measure import local_type
    from autopar.runtime.compilers.functional import FunctionalCollectives
    from autopar.runtime.compilers.rank_trace import RankTrace
    from autopar.runtime.ranks.process_groups import Group

    cpu, gpu, written = torch.device("cpu"), torch.device("cuda", 0), []

    def on_gpu(x: Any) -> Any:
        with fake_mode:
            return FakeTensor(fake_mode, torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta"), gpu)

    fake_mode = FakeTensorMode(shape_env=ShapeEnv())
    with fake_mode, torch.no_grad():
        types = [local_type(node, program.mesh) for node in program.placeholders]
        inputs = [torch.empty(type_.shape, dtype=type_.dtype) for type_ in types]
        mesh = program.mesh
        groups = {axis: Group(SimpleNamespace(group_name=axis), size, None) for axis, size in mesh.axes}  # type: ignore[arg-type]
        trace = RankTrace(program, FunctionalCollectives(mesh, mesh.coord(0), groups), cpu)
        graph = make_fx(trace.run)(*inputs)
    for node in graph.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": gpu}
    graph.recompile()
    moved = [on_gpu(x) for x in inputs]

    def write(inner: Any, examples: Any, **_: Any) -> Callable[..., Any]:
        written.append(code_of(inner, examples))
        return lambda *_: ()

    with fake_mode, torch.no_grad(), config.patch(enable_autograd_cache=False):
        # Constants are folded by computing them, on the device; as they stand they cost no kernel either.
        compile_fx(graph, moved, inner_compile=write, config_patches={"joint_graph_constant_folding": False})
    (code,) = written
    return read(name, code)


def code_of(graph: Any, examples: Any) -> str:
    """The code that Inductor writes for a graph, compiled by nobody."""
    from torch._inductor import config
    from torch._inductor.compile_fx import (
        _recursive_post_grad_passes,
        record_original_output_strides,
        view_to_reshape,
    )
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    record_original_output_strides(graph)
    view_to_reshape(graph)
    with V.set_fake_mode(examples[0].fake_mode), config.patch(profile_bandwidth=True, profile_bandwidth_regex=""):
        _recursive_post_grad_passes(graph, is_inference=True)
        lowering = GraphLowering(
            graph, example_inputs=examples, shape_env=examples[0].fake_mode.shape_env, is_inference=True
        )
        with V.set_graph_handler(lowering), V.set_debug_handler(DebugContext()):
            lowering.run(*examples)
            code, _ = lowering.codegen()
    return code.value


def read(name: str, code: str) -> Counted:
    """The kernels that a wrapper calls, their bytes, and its other calls."""
    sizes = {}
    for kernel, body in re.findall(r"^(\w+) = async_compile\.triton\('\w+', '''(.*?)'''", code, re.M | re.S):
        sizes[kernel] = float(re.search(r"'kernel_num_gb': ([\d.e+-]+)", body)[1])  # type: ignore[index]
    calls = re.findall(r"^ +(triton_\w+)\.run\(", code, re.M)
    others = re.findall(r"^ +(?:\w+ = )?(extern_kernels\.\w+|torch\.ops\.[\w.]+)\(", code, re.M)
    return Counted(name, len(calls), round(1e9 * sum(sizes[kernel] for kernel in calls)), dict(Counter(others)))


def gpt_block(rows: int) -> Any:
    import torch
    from gpt import Block, GPTConfig

    config = GPTConfig(layers=1, heads=32, width=4096)
    return _on_meta(lambda: Block(config)), _loss, (torch.empty(rows, 4096, 4096, dtype=torch.bfloat16, device="meta"),)


def llama_block(rows: int) -> Any:
    import torch
    from models import LlamaBlock

    x = torch.empty(rows, 4096, 4096, dtype=torch.bfloat16, device="meta")
    angles = torch.empty(4096, 128, dtype=torch.bfloat16, device="meta")
    return _on_meta(lambda: LlamaBlock(4096, 32, 32, 11008)), _loss, (x, angles, angles)


def t5_block(rows: int) -> Any:
    """Its kind of norm and of MLP, and a bias of the scores that is learned by distance: attention is products."""
    import torch
    from transformers.models.t5.configuration_t5 import T5Config
    from transformers.models.t5.modeling_t5 import T5Block

    config = T5Config(d_model=1024, d_kv=64, d_ff=2816, num_heads=16, feed_forward_proj="gated-gelu", dropout_rate=0.0)
    x = torch.empty(rows, 4096, 1024, dtype=torch.bfloat16, device="meta")
    return _on_meta(lambda: T5Block(config, has_relative_attention_bias=True)), _first, (x,)


def _first(model: Any, x: Any) -> Any:
    return model(x)[0].float().square().mean()


def _loss(model: Any, *inputs: Any) -> Any:
    return model(*inputs).float().square().mean()


def _on_meta(make: Callable[[], Any]) -> Any:
    import torch

    with torch.device("meta"):
        return make().bfloat16()


BLOCKS = {"gpt": gpt_block, "llama": llama_block, "t5": t5_block}


def main(blocks: list[str]) -> None:
    """Print what Inductor makes of some blocks; behind "--ours" what our groups make of them, beside the table."""
    if blocks[:1] == ["--ours"]:
        for block in blocks[1:]:
            for name, program in graphs(block, compile="triton"):
                mine, (kernels, bytes_) = ours(name, program), MEASURED[name]
                print(f"{name:15} ours {mine.kernels:3} kernels {mine.bytes_ / 1e9:6.3f} GB   "
                      f"Inductor {kernels:3} {bytes_ / 1e9:6.3f}")  # fmt: skip
        return
    stub_the_gpu()
    for block in blocks:
        for name, program in graphs(block):
            print(json.dumps(asdict(count(name, program))), flush=True)


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "examples"), str(Path(__file__).parent)]
    main(sys.argv[1:])
