"""How long does a call, a collective, a message take on a machine: the one cost model, built-in machines, files?"""

from autopar.machines.files import (
    DEVICES,
    MachineLike,
    built_in,
    check_writable,
    machine_like,
    machine_text,
    named,
    notes_of,
    path_of,
    read_machine,
    write_machine,
)
from autopar.machines.model import Machine

__all__ = [
    "DEVICES",
    "Machine",
    "MachineLike",
    "built_in",
    "check_writable",
    "machine_like",
    "machine_text",
    "named",
    "notes_of",
    "path_of",
    "read_machine",
    "write_machine",
]
