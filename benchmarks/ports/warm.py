"""Import what every script needs, once, before ranks are forked. `OPS` lives as long as a rank."""

from importlib import import_module
from importlib.util import find_spec

from benchmarks.libraries.measure import declare_torchvision_ops

OPS = declare_torchvision_ops()
if find_spec("transformers"):
    import_module("transformers.models.llama.modeling_llama")
