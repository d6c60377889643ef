"""Engine-neutral attention: check what a model needs, plan a batch, run its layers."""

from inkling_backend.attention.mixed import MixedRunner
from inkling_backend.attention.plans import DecodePlan, ExtendPlan
from inkling_backend.attention.runner import AttentionRunner
from inkling_backend.attention.spec import AttentionSpec, reasons_against, requirements
from inkling_backend.formats.layer_attention import LayerAttention

__all__ = [
    "AttentionRunner",
    "AttentionSpec",
    "DecodePlan",
    "ExtendPlan",
    "LayerAttention",
    "MixedRunner",
    "reasons_against",
    "requirements",
]
