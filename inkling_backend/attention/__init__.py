"""Engine-neutral attention: check what a model needs, plan a batch, run its layers."""

from inkling_backend.attention.plans import DecodePlan, ExtendPlan
from inkling_backend.attention.runner import AttentionRunner
from inkling_backend.attention.spec import AttentionSpec, reasons_against, requirements

__all__ = [
    "AttentionRunner",
    "AttentionSpec",
    "DecodePlan",
    "ExtendPlan",
    "reasons_against",
    "requirements",
]
