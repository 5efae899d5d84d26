import torch
from branch_weighted import BranchWeighted, BranchWeightedGRPO

from digen.algos.base import LossInputs, Transition
from digen.algos.losses import ClippedLoss
from digen.testing.contract import AlgorithmContract


class TestBranchWeighted(AlgorithmContract):
    algorithm = BranchWeightedGRPO()


def test_a_row_counts_by_the_noise_of_its_step() -> None:
    std = torch.tensor([0.2, 0.4, 0.1])
    level = torch.full((3, 1), 0.5)
    inputs = LossInputs(
        new_log_prob=torch.zeros(3),
        old_log_prob=torch.zeros(3),
        advantage=torch.tensor([1.0, 1.0, -1.0]),
        mean=torch.zeros(3, 1),
        std=std[:, None],
        at=Transition(level, level - 0.1, level, level - 0.5),
    )
    loss = BranchWeighted(power=1.0)(inputs).loss
    torch.testing.assert_close(loss, torch.tensor([-1.0, -2.0, 0.5]))
    torch.testing.assert_close(BranchWeighted(power=0)(inputs).loss, ClippedLoss()(inputs).loss)
