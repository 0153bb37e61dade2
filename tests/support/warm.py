"""What only the first step of a process pays for, paid in the server from which ranks are forked.

torch and autopar load much at first use. Imported there before the first fork: all that `parallelize` needs, for each
rank would read it from its source; and a step of each kind is compiled, and run on the virtual mesh, which makes no
process group and no thread that a fork would lose.
"""

from __future__ import annotations

import models
import side_by_side  # noqa: F401  # what test modules import, so that no rank does
import torch
import torch._subclasses.schema_check_mode
import torch.distributed.checkpoint.state_dict
from processes import collect_rarely

import autopar
import autopar.api

torch.set_num_threads(1)
if (
    torch.version.cuda is None
):  # a build for CUDA starts autograd's threads at the first backward pass, which no fork has
    model, loss_fn, batch = models.mlp()
    for mesh, options in (("dp=2,tp=2", {"zero": 3}), ("pp=2", {"microbatches": 2})):
        report = autopar.verify(model, mesh, loss_fn=loss_fn, batch=batch, steps=1, **options)  # type: ignore[arg-type]
        assert report.ok, report
collect_rarely()  # here, too: a collection that begins as a rank starts would look at all of it, and copy it
