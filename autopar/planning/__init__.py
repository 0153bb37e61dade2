"""Which plan is the fastest that fits a machine that is not here?"""

from autopar.planning.price.step_report import StepTime
from autopar.planning.price.step_time import step_time

__all__ = ["StepTime", "step_time"]
