"""The machines that plans are made for: the cost model, those that are built in, and those of files."""

from autopar.machines.files import (
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
