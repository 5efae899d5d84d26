"""digen: post-train image and video diffusion models with reinforcement learning."""

__version__ = "0.1.0"
