"""DiffusionNFT (arXiv 2509.16117): towards what good samples were noised from, away from what bad ones were.

Without further keys the policy that was trained samples, which is the published code's decay of type 0. With
`old_policy` an average of policies does, which follows the trained one more and more slowly: its types 1 and 2 are
`old_policy={rate: 0.001, most: 0.5}` and `old_policy={rate: 0.0075, after: 75, most: 0.999}`. Advantages are by the
group's std: the batch's would have to be known before the loss, which is not proportional to the advantage. Meant to be
run without guidance; not for models that are distilled to few steps.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from digen.algos.advantages import GroupAdvantage
from digen.algos.matching import Matching, NFTLoss
from digen.algos.old_policy import WithOldPolicy
from digen.algos.steps import AllButLast, Steps


class DiffusionNFT(WithOldPolicy):
    """No noise in sampling, all levels but the last, advantages by the group's std, a better and a worse policy."""

    name: Literal["diffusion-nft"] = "diffusion-nft"
    samples_per_prompt: Annotated[int, Field(ge=2)] = 24
    records: tuple[Literal["mean"], ...] = ("mean",)
    noise: Matching = Matching()
    steps: Steps = AllButLast()
    advantage: GroupAdvantage = GroupAdvantage(std="biased", eps=1e-4)
    loss: NFTLoss = NFTLoss()
