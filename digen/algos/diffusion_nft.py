"""DiffusionNFT (arXiv 2509.16117): towards what good samples were noised from, away from what bad ones were.

Without further keys this is the recipe for SD3.5-medium with the OCR reward, with the policy that sampled in the place
of the old one (the recipe's decay of 0; a decaying average of policies is not offered). Advantages are by the group's
std: the batch's would have to be known before the loss, which is not proportional to the advantage. Meant to be run
without guidance; not for models that are distilled to few steps.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from digen.algos.advantages import GroupAdvantage
from digen.algos.base import Algorithm
from digen.algos.matching import Matching, NFTLoss
from digen.algos.steps import AllButLast, Steps


class DiffusionNFT(Algorithm):
    """No noise in sampling, all levels but the last, advantages by the group's std, a better and a worse policy."""

    name: Literal["diffusion-nft"] = "diffusion-nft"
    samples_per_prompt: Annotated[int, Field(ge=2)] = 24
    records: tuple[Literal["mean"], ...] = ("mean",)
    noise: Matching = Matching()
    steps: Steps = AllButLast()
    advantage: GroupAdvantage = GroupAdvantage(std="biased", eps=1e-4)
    loss: NFTLoss = NFTLoss()
