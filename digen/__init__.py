"""digen: post-train image and video diffusion models with reinforcement learning."""

import os

__version__ = "0.1.0"

SILENCED = ("ORT_DISABLE_TELEMETRY", "HF_HUB_DISABLE_TELEMETRY", "VLLM_NO_USAGE_STATS")
"""Environment variables by which libraries that report each use to their makers are asked not to."""

for _name in SILENCED:  # before any of them is imported
    os.environ.setdefault(_name, "1")
