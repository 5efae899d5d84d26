"""The generator `vllm-omni` with its engine's worker in a process of its own, as it is on every GPU but the first."""

from digen.backends.generation.vllm_omni import VllmOmniGenerator


class Generator(VllmOmniGenerator):
    in_process = False
