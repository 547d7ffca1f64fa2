"""Pipeline schedules: found by name, read from tables, checked, and sorted into an order that can run.

What a schedule is, and which there are: ``dataset.job.schedules``.
"""

from stepsight.dataset.job.schedules import BACKWARD as BACKWARD
from stepsight.dataset.job.schedules import BACKWARD_INPUT as BACKWARD_INPUT
from stepsight.dataset.job.schedules import BACKWARD_WEIGHT as BACKWARD_WEIGHT
from stepsight.dataset.job.schedules import FORWARD as FORWARD
from stepsight.dataset.job.schedules import KIND_NAMES as KIND_NAMES
from stepsight.dataset.job.schedules import Schedule as Schedule
from stepsight.dataset.job.schedules import find_schedule as find_schedule
from stepsight.dataset.job.schedules import loop_placement as loop_placement
from stepsight.dataset.job.schedules import v_placement as v_placement
from stepsight.simulator.schedules.order import Order as Order
from stepsight.simulator.schedules.order import order_actions as order_actions
from stepsight.simulator.schedules.order import read_schedule as read_schedule
from stepsight.simulator.schedules.order import schedule_of as schedule_of
from stepsight.simulator.schedules.order import write_schedule as write_schedule
