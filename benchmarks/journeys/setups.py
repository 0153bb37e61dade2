"""How journeys begin: a model, a mesh, options and an optimizer that go together on paper."""

from __future__ import annotations

from tempfile import gettempdir
from typing import Any

from hypothesis import strategies as st

from benchmarks.journeys.meshes import MESHES, PLANNED, RARE, WHOLE_BATCH, axes_of, has_experts, meshes_for, options_on
from benchmarks.journeys.models import BLOCKS, TIME
from benchmarks.journeys.parts import ODD
from benchmarks.journeys.side import OPTIMIZERS

COMMON = ("dp=1", "dp=1", "dp=2", "tp=2", "fsdp=2", "pp=2", "cp=2", PLANNED[0])
SCHEDULES = ("gpipe", "1f1b", "zb-h1", "dualpipev")
SLICED = ("seq1f1b", "gpipe")
ATTENTION = ("auto", "gather", "ring", "ulysses")
CHUNKS = (True, "auto", 300)  # bytes of logits
LENGTHS = [TIME - TIME // 3, TIME // 3]  # of slices
OFTEN = ("dropout", "dropout")  # blocks that are drawn once more
HOSTED = ("parameters", ["parameters", "activations"])
OFFLOADS = ("activations", ["activations", "optimizer"])
SEQUENCES = ("gpt", "llama")  # heads with causal attention


@st.composite
def setups(draw: st.DrawFn, meshes: tuple[str, ...] = ()) -> dict[str, Any]:
    """A literal that `Side` reads. meshes: of which to draw."""
    kind = draw(st.integers(0, 19))
    mesh = draw(st.sampled_from(meshes or (COMMON if kind < 13 else (*MESHES, PLANNED[1]) if kind < 19 else RARE)))
    head = draw(st.sampled_from([*["regress"] * 6, *["tokens"] * 4, *["gpt"] * 4, "llama"]))
    options: dict[str, Any] = {}
    if {"dp", "fsdp", "cp"} & axes_of(mesh) and mesh != "dp=1":
        zero = draw(st.integers(0, 3))
        options |= {"zero": zero} if zero or "fsdp" in mesh else {}
    if "pp" in mesh:
        options |= {"microbatches": draw(st.sampled_from([2, 3])), "schedule": draw(st.sampled_from(SCHEDULES))}
    elif draw(st.integers(0, 5)) == 5:
        options["microbatches"] = 2
    if draw(st.integers(0, 4)) == 4:
        options["recompute"] = draw(st.sampled_from(["full", "selective", "stage", "stage+full"]))
    if draw(st.integers(0, 5)) == 5:
        options |= {
            "offload": draw(st.sampled_from((*OFFLOADS, *HOSTED))),
            "horizon": draw(st.sampled_from(["auto", 1])),
        }
    elif draw(st.integers(0, 7)) == 7:
        options |= {"offload": draw(st.sampled_from(["optimizer", {"optimizer": 0.5}, {"parameters": "disk"}]))}
        is_on_disk = draw(st.booleans()) or options["offload"] == {"parameters": "disk"}
        options |= {"offload_dir": gettempdir()} if is_on_disk else {}
    if "tp" in mesh and "tp=3" not in mesh and head == "gpt" and draw(st.booleans()):
        options["sequence_parallel"] = True
    if "pp" in mesh and head in SEQUENCES and draw(st.booleans()):
        options |= {"slices": draw(st.sampled_from([2, LENGTHS])), "schedule": draw(st.sampled_from(SLICED))}
    allowed = [name for name in BLOCKS if "microbatches" not in options or name not in WHOLE_BATCH]
    made: dict[str, Any] = {
        "mesh": mesh,
        "options": options_on(mesh, options),
        "head": head,
        "width": draw(st.sampled_from([6, 12] if "tp=3" in mesh else [6, 8, 12] if "tp" in mesh else [6, 8, 10])),
        "blocks": []
        if head in ("gpt", "llama")
        else draw(st.lists(st.sampled_from([*allowed, *OFTEN]), min_size=1, max_size=3)),
        "aux": draw(st.integers(0, 5)) == 5,
        "gan": head == "regress" and "pp" not in mesh and draw(st.integers(0, 7)) == 7,
        "optimizer": draw(st.sampled_from([None, *(name for name in OPTIMIZERS if name not in ("LBFGS", "Rprop"))])),
        "warm": draw(st.integers(0, 2)) > 0,  # a step before anything else
        "rows": draw(st.sampled_from([1, 2, 5, 6, 7, 11])),
    }
    if draw(st.integers(0, 7)) == 7 and head != "llama":
        made["options"]["precision"] = draw(st.sampled_from(["bf16", "fp16"]))
        made["optimizer"] = draw(st.sampled_from([None, "SGD"]))
        made["gan"] = False
    if draw(st.integers(0, 2)) == 2:  # what a script holds from before
        made["before"] = draw(st.sampled_from(["states", "gradients"]))
    if mesh == "dp=2" and "microbatches" not in options and draw(st.booleans()):
        _add_parts(draw, made)
    if "cp" in axes_of(mesh):
        made["options"]["attention"] = draw(st.sampled_from(ATTENTION))
    if head != "regress" and draw(st.integers(0, 2)) == 2:
        made["options"]["chunked_loss"] = draw(st.sampled_from(CHUNKS))
    if draw(st.integers(0, 2)) == 2:
        made["options"]["compile"] = "triton"  # groups, which a CPU runs call by call
    if "precision" not in made["options"] and head != "llama" and draw(st.integers(0, 4)) == 4:
        made |= {
            "dtype": draw(st.sampled_from(["float32", "float32", "bfloat16"])),
            "optimizer": draw(st.sampled_from([None, "SGD"])),
            "gan": False,
        }
    if "precision" in made["options"] or "dtype" in made:  # rounding sends rows to other experts
        made["blocks"] = [name for name in made["blocks"] if not name.startswith("experts")]
    axes = [axis for axis in ("dp", "fsdp", "cp") if axis in axes_of(mesh)]
    fitting = [one for one in meshes_for(made) if "ep" in axes_of(one)] if not meshes else []
    if fitting and draw(st.booleans()):
        made["mesh"] = draw(st.sampled_from(fitting))
    elif axes and has_experts(made) and draw(st.booleans()):
        made["options"]["experts"] = axes[-1]
    made["options"] = options_on(made["mesh"], made["options"])
    return made


def _add_parts(draw: st.DrawFn, made: dict[str, Any]) -> None:
    """Give each rank a part of the batch, and perhaps leaves of which samples are not in front."""
    options = made["options"]
    made["batch"] = draw(st.sampled_from(["local", "local", "local", "ddp"]))
    made["share"] = draw(st.sampled_from([0.5, 0.5, 0.625, 1.0]))  # of the rows, on rank 0
    if made["batch"] == "ddp":
        options.pop("zero", None)
        made["blocks"] = [name for name in made["blocks"] if name != "dropout"]  # whose masks are each rank's own
        made |= {"gan": False, "share": min(made["share"], 0.625), "rows": max(made["rows"], 2)}
    odd = draw(st.sampled_from([None, None, *ODD]))
    if odd is not None:
        made |= {"odd": odd, "gan": False}
    if made["batch"] == "local" and (odd is not None or draw(st.booleans())) and draw(st.integers(0, 3)):
        options["batch_dims"] = ODD[odd] if odd is not None else 0
