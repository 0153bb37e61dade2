"""What does each rank of a pipeline run, in order?

a name, a function or a table -> parse_schedule -> with_transfers -> check_schedule -> the runtime, or simulate
"""

from autopar.ir.schedule import Orders
from autopar.passes.schedules.check import check_schedule
from autopar.passes.schedules.orders import SCHEDULES, Entry, apart, forward_only, in_halves
from autopar.passes.schedules.parse_schedule import Schedule, check_schedule_name, parse_schedule
from autopar.passes.schedules.simulate import in_flight, simulate, turns_between
from autopar.passes.schedules.span import Walk
from autopar.passes.schedules.transfers import with_transfers

__all__ = [
    "SCHEDULES",
    "Entry",
    "Orders",
    "Schedule",
    "Walk",
    "apart",
    "check_schedule",
    "check_schedule_name",
    "forward_only",
    "in_flight",
    "in_halves",
    "parse_schedule",
    "simulate",
    "turns_between",
    "with_transfers",
]
