"""Noise belongs to a sample's identity (rule R8)."""

import subprocess
import sys

import torch

from digen.backends.noise import EVALUATION, INITIAL, draw, seed_of

SHAPE = (16, 4)
IDENTITIES = [(prompt, sample) for prompt in (0, 1, 7) for sample in range(4)]


def test_p42_a_samples_noise_does_not_depend_on_its_batch() -> None:
    together = draw(5, 2, IDENTITIES, 3, SHAPE)
    alone = torch.cat([draw(5, 2, [identity], 3, SHAPE) for identity in reversed(IDENTITIES)]).flip(0)
    assert torch.equal(together, alone)


def test_p42_another_process_draws_the_same_bits() -> None:
    code = "from digen.backends.noise import draw; print(draw(5, 2, [(7, 3)], 1, (16, 4)).numpy().tobytes().hex())"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert bytes.fromhex(out) == draw(5, 2, [(7, 3)], 1, SHAPE).numpy().tobytes()


def test_every_part_of_the_identity_changes_the_noise() -> None:
    base = (5, 2, 7, 3, 1)
    changed = [(*base[:i], base[i] + 1, *base[i + 1 :]) for i in range(5)]
    seeds = {seed_of(*identity) for identity in [base, *changed]}
    assert len(seeds) == 6
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_all_samples_of_a_step_differ_pairwise_at_the_start_and_at_every_step() -> None:
    rows = torch.cat([draw(5, 2, IDENTITIES, stream, SHAPE) for stream in (INITIAL, 0, 1)]).flatten(1)
    assert len({tuple(row.tolist()) for row in rows}) == len(rows)
    correlation = torch.corrcoef(rows) - torch.eye(len(rows))
    assert correlation.abs().max() < 0.6


def test_the_noise_is_standard_normal() -> None:
    values = draw(0, EVALUATION, [(k, 0) for k in range(64)], INITIAL, (32, 32)).double()
    assert abs(float(values.mean())) < 0.02
    assert abs(float(values.std()) - 1) < 0.02
    assert abs(float((values**4).mean()) - 3) < 0.1
