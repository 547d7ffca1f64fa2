"""The studies by name: ``stepsight experiment NAME`` runs one of them."""

from __future__ import annotations

from collections.abc import Mapping

from stepsight.experiments.studies import (
    bench,
    context,
    distir,
    emulation,
    one_gpu,
    public_tables,
    recommendation,
    small_to_large,
    torch_agreement,
)
from stepsight.experiments.studies.study import Study

STUDIES: Mapping[str, Study] = {
    study.name: study
    for study in (
        *(bench.STUDY, context.STUDY, distir.STUDY, emulation.STUDY, one_gpu.STUDY, small_to_large.STUDY),
        *(public_tables.COLLECTIVES, public_tables.KERNELS),
        *(recommendation.LOOKUPS, recommendation.STEPS, recommendation.PLACEMENTS),
        *(torch_agreement.CAPTURE, torch_agreement.MEMORY),
    )
}
