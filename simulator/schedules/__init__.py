"""Pipeline schedules as data: for every stage the order in which it runs its actions.

One format for all: an array of rows ``(kind, micro_batch, chunk)`` per stage.  A chunk is one of the stage's virtual
stages; ``placement`` says which stage and chunk hold the model's n-th part.
"""

from stepsight.simulator.schedules.base import BACKWARD as BACKWARD
from stepsight.simulator.schedules.base import BACKWARD_INPUT as BACKWARD_INPUT
from stepsight.simulator.schedules.base import BACKWARD_WEIGHT as BACKWARD_WEIGHT
from stepsight.simulator.schedules.base import FORWARD as FORWARD
from stepsight.simulator.schedules.base import KIND_NAMES as KIND_NAMES
from stepsight.simulator.schedules.base import Schedule as Schedule
from stepsight.simulator.schedules.base import loop_placement as loop_placement
from stepsight.simulator.schedules.base import v_placement as v_placement
from stepsight.simulator.schedules.csv_table import read_schedule as read_schedule
from stepsight.simulator.schedules.csv_table import write_schedule as write_schedule
from stepsight.simulator.schedules.find import SCHEDULE_NAMES as SCHEDULE_NAMES
from stepsight.simulator.schedules.find import find_schedule as find_schedule
from stepsight.simulator.schedules.order import Order as Order
from stepsight.simulator.schedules.order import order_actions as order_actions
from stepsight.simulator.schedules.single import one_f_one_b as one_f_one_b
