"""A CPU as a platform of vLLM-Omni 0.30's diffusion engine: what its entry points call. Heavy imports come later."""


def platform() -> str | None:
    """Where the platform is; None where there is a GPU, which the engine knows itself."""
    import torch

    return None if torch.cuda.is_available() else "digen_vllm_cpu.platform.CpuOmniPlatform"


def patch() -> None:
    """What has no other door: called in every worker process."""
    import torch

    if not torch.accelerator.is_available():
        from digen_vllm_cpu.patches import apply

        apply()
