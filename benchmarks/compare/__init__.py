"""Training steps of ours beside those of what people write by hand, in one call, interleaved.

    timeout 900 .venv/bin/python -m benchmarks.compare [--steps 20] [--seconds 60] [--only 'llama tp=2']

A GPT and a Llama (4 layers, width 256, 128 tokens, batch 16, vocabulary 8192, one thread a rank) and AdamW; a step is
forward, backward, optimizer.step and zero_grad. On 2 Gloo ranks dp=2 beside DistributedDataParallel, and tp=2 beside
DTensor's parallelize_module, without and with its loss_parallel, and sequence parallelism beside the plan of PyTorch's
tutorial; on one rank ours beside eager. With `compile="inductor"` ours stands beside torch.compile of the same, on one
rank and, with DistributedDataParallel, on two. offload="parameters" stands beside FSDP2's CPUOffloadPolicy, and
offload="activations" beside torch.autograd.graph.save_on_cpu, which copies out (pin_memory=True): on a CPU both tiers
are one memory, and a copy back is none for the peers; on a GPU memory is that of the device. pp=2 (1F1B, 8
micro-batches, with 4 ranks dp=2 too) stands beside torch.distributed.pipelining, whose stages are cut by hand: at the
half of the blocks, and after the third of four, since the head weighs more than two. With a GPU: one rank over NCCL
beside eager and torch.compile.

cp=2 and cp=4, one sequence of 2,048 or 8,192 tokens, stand beside
zigzag ring attention and Ulysses written by hand on torch's flash kernel (context.py), and beside our tp=2 with
sequence parallelism.

All sides live in the same processes and take turns, and whose turn is first goes round, so that what else the machine
does meets all alike. A ratio is the median of the ratios of simultaneous steps: of the slowest rank's wall time, and of
the CPU time of all ranks. Memory is measured in fresh processes, one side each: the peak of the resident set of the
largest rank, and in brackets how much of it came after the imports; that of a compiling side holds the compiler.
"""
