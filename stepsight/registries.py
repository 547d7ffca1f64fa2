"""Registries for parts of your own, and the classes that a part consists of.

Register a part in Python, for the running process::

    from dataclasses import replace
    from stepsight.registries import HARDWARE
    HARDWARE.register("my-gpu", replace(HARDWARE["h100-sxm-80gb"], name="my-gpu", memory_bytes=96e9))

or let a package bring it by an entry point of the group, ``[project.entry-points."stepsight.hardware"]`` in its
``pyproject.toml``.

====================  ==============================  ==============================================
registry              entry points' group             a part is a
====================  ==============================  ==============================================
``HARDWARE``          ``stepsight.hardware``          ``Hardware``; a job can also name a file
``FABRICS``           ``stepsight.fabrics``           ``Fabric`` of two ``Link``; likewise
``FRAMEWORKS``        ``stepsight.frameworks``        ``Framework``, which is a profile; likewise
``FAMILIES``          ``stepsight.families``          ``Family`` of models, made of ``blocks``
``SCHEDULES``         ``stepsight.schedules``         ``ScheduleKind``, which makes a ``Schedule``
``OP_KINDS``          ``stepsight.op_kinds``          ``OpKind``
``COLLECTIVE_KINDS``  ``stepsight.collective_kinds``  ``CollectiveKind``
``TRACE_READERS``     ``stepsight.trace_readers``     function: path, ``Placement`` -> ``RankTrace``
``TABLE_READERS``     ``stepsight.table_readers``     ``Format``, which reads a file into ``Rows``
``CONFIG_FORMATS``    ``stepsight.config_formats``    ``ConfigFormat``, which reads and writes configurations
``LATENCIES``         ``stepsight.latencies``         function of ``Hardware`` and ``Fabric``: makes durations
``CONTEXTS``          ``stepsight.contexts``          function of a graph and seconds alone: seconds in context
====================  ==============================  ==============================================

``HARDWARE.names()`` lists all names, ``HARDWARE.unregister`` removes what was registered, and
``with HARDWARE.registered(name, part):`` does both for a block.  A part with a mistake is refused with a
``StepsightError``.  ``stepsight.testing`` has contracts that check parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepsight.dataset.base.registry import Registry as Registry
from stepsight.dataset.configs.drafts import ConfigFile as ConfigFile
from stepsight.dataset.configs.drafts import Draft as Draft
from stepsight.dataset.configs.formats import CONFIG_FORMATS as CONFIG_FORMATS
from stepsight.dataset.configs.formats import ConfigFormat as ConfigFormat
from stepsight.dataset.configs.key_table import ConfigText as ConfigText
from stepsight.dataset.graph.rank_trace import Placement as Placement
from stepsight.dataset.graph.rank_trace import RankTrace as RankTrace
from stepsight.dataset.hardware.hardware import FABRICS as FABRICS
from stepsight.dataset.hardware.hardware import HARDWARE as HARDWARE
from stepsight.dataset.hardware.hardware import Fabric as Fabric
from stepsight.dataset.hardware.hardware import Hardware as Hardware
from stepsight.dataset.hardware.hardware import Link as Link
from stepsight.dataset.job.frameworks import FRAMEWORKS as FRAMEWORKS
from stepsight.dataset.job.frameworks import Framework as Framework
from stepsight.dataset.job.schedules import SCHEDULES as SCHEDULES
from stepsight.dataset.job.schedules import Schedule as Schedule
from stepsight.dataset.job.schedules import ScheduleKind as ScheduleKind
from stepsight.dataset.job.schedules import loop_placement as loop_placement
from stepsight.dataset.job.schedules import v_placement as v_placement
from stepsight.dataset.job.specs import FAMILIES as FAMILIES
from stepsight.dataset.kinds import COLLECTIVE_KINDS as COLLECTIVE_KINDS
from stepsight.dataset.kinds import OP_KINDS as OP_KINDS
from stepsight.dataset.kinds import CollectiveKind as CollectiveKind
from stepsight.dataset.kinds import OpKind as OpKind
from stepsight.dataset.kinds.op import Collective as Collective
from stepsight.dataset.kinds.op import Op as Op
from stepsight.dataset.tables.formats import FORMATS
from stepsight.dataset.tables.formats import Format as Format
from stepsight.dataset.tables.measurements import Rows as Rows
from stepsight.dataset.traces.import_traces import TRACE_READERS as TRACE_READERS
from stepsight.gnn.contexts import CONTEXTS as CONTEXTS
from stepsight.simulator import blocks as blocks
from stepsight.simulator.blocks.family import Family as Family
from stepsight.simulator.durations.latency_model import LATENCIES as LATENCIES
from stepsight.simulator.durations.latency_model import GivenLatency as GivenLatency
from stepsight.simulator.durations.latency_model import LatencyModel as LatencyModel

TABLE_READERS = FORMATS

if not TYPE_CHECKING:  # type checkers take the imports above; ``help`` shows what is listed
    __all__ = sorted({name for name in globals() if name[0] != "_"} - {"FORMATS", "TYPE_CHECKING", "annotations"})
