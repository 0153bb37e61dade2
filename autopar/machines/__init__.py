"""How long does a call, a collective, a message take on a machine: the one cost model, built-in machines, files?"""

from autopar.machines.files import (
    DEVICES,
    built_in,
    check_writable,
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
    "built_in",
    "check_writable",
    "machine_text",
    "named",
    "notes_of",
    "path_of",
    "read_machine",
    "write_machine",
]
