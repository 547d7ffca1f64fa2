"""The studies by name: ``stepsight experiment NAME`` runs one of them."""

from __future__ import annotations

from stepsight.experiments.studies import (
    bench,
    context,
    distir,
    one_gpu,
    public_tables,
    recommendation,
    small_to_large,
    torch_agreement,
)
from stepsight.experiments.studies.study import Study

_MODULES = (bench, context, distir, one_gpu, public_tables, recommendation, small_to_large, torch_agreement)
STUDIES = {study.name: study for module in _MODULES for study in vars(module).values() if isinstance(study, Study)}
