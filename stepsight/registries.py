"""Registries for parts of your own, and the classes that a part consists of.

Register a part in Python, for the running process::

    from dataclasses import replace
    from stepsight.registries import HARDWARE
    HARDWARE.register("my-gpu", replace(HARDWARE["h100-sxm-80gb"], name="my-gpu", memory_bytes=96e9))

or let a package bring it to every process that has the package installed (``pyproject.toml`` of the package)::

    [project.entry-points."stepsight.hardware"]
    my-gpu = "my_package:my_gpu"

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
``with HARDWARE.registered(name, part):`` does both for the length of a block.  A part with a mistake is refused with a
``StepsightError`` when it is made, registered or used.  ``stepsight.testing`` has contracts that check kinds, schedules
and readers.
"""

from __future__ import annotations

from stepsight.dataset.base.registry import Registry
from stepsight.dataset.configs.drafts import ConfigFile, Draft
from stepsight.dataset.configs.formats import CONFIG_FORMATS, ConfigFormat
from stepsight.dataset.configs.key_table import ConfigText
from stepsight.dataset.graph.rank_trace import Placement, RankTrace
from stepsight.dataset.hardware.hardware import FABRICS, HARDWARE, Fabric, Hardware, Link
from stepsight.dataset.job.frameworks import FRAMEWORKS, Framework
from stepsight.dataset.job.schedules import SCHEDULES, Schedule, ScheduleKind, loop_placement, v_placement
from stepsight.dataset.job.specs import FAMILIES
from stepsight.dataset.kinds import COLLECTIVE_KINDS, OP_KINDS, CollectiveKind, OpKind
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.dataset.tables.formats import FORMATS as TABLE_READERS
from stepsight.dataset.tables.formats import Format
from stepsight.dataset.tables.measurements import Rows
from stepsight.dataset.traces.import_traces import TRACE_READERS
from stepsight.simulator import blocks
from stepsight.simulator.blocks.family import Family
from stepsight.simulator.durations.latency_model import LATENCIES, GivenLatency, LatencyModel
from stepsight.training.predictor.own_context import CONTEXTS

__all__ = [
    "COLLECTIVE_KINDS",
    "CONFIG_FORMATS",
    "CONTEXTS",
    "FABRICS",
    "FAMILIES",
    "FRAMEWORKS",
    "HARDWARE",
    "LATENCIES",
    "OP_KINDS",
    "SCHEDULES",
    "TABLE_READERS",
    "TRACE_READERS",
    "Collective",
    "CollectiveKind",
    "ConfigFile",
    "ConfigFormat",
    "ConfigText",
    "Draft",
    "Fabric",
    "Family",
    "Format",
    "Framework",
    "GivenLatency",
    "Hardware",
    "LatencyModel",
    "Link",
    "Op",
    "OpKind",
    "Placement",
    "RankTrace",
    "Registry",
    "Rows",
    "Schedule",
    "ScheduleKind",
    "blocks",
    "loop_placement",
    "v_placement",
]
