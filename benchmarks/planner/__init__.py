"""Steps that the simulator foretells, beside the same steps run on this machine: `python -m benchmarks.planner`.

    timeout 2400 .venv/bin/python -m benchmarks.planner [--only "gpt tp=2"] [--seconds 120] [--machine mine.toml]

Three models (a GPT, a Llama, a convolutional one) on two Gloo ranks, each in some dozen ways: dp, tp or pp, ZeRO,
recomputation, micro-batches, sequence parallelism. The machine is the one that `autopar machine measure` writes. All
ways of a model, each in two processes of its own, take three steps each in turns, so that other work of the machine
meets all of them alike. The first of the three does not count: it finds nothing in the caches of the cores, as no step
of a training does. The median of the others counts, as `machine measure` takes that of batches. Predicted is
`Compiled.time` of the very programs that run, with the optimizer's step (a fused AdamW). Memory is `Compiled.memory`
beside what the process allocated, by torch's profiler: the tensors, and apart from them by how much the scratch memory
of torch's kernels (oneDNN's convolutions) and of Gloo (copies of its own) raises the peak. Of several steps the least
counts: two ranks and the threads of Gloo share the cores, and such a thread lets go of a buffer when it comes to run.

Printed are a line for each way, then the mean and the largest error of the step time, the regret (how much slower the
way with the least predicted time is than the fastest one, by measured times) and the largest error of memory.
"""
