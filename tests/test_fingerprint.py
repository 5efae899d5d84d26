"""What a fingerprint sees of weights, and what a glance at them does (rule R15)."""

from bisect import bisect_right
from itertools import accumulate

import pytest
import torch

from digen.weights.fingerprint import LINE, PLACES, fingerprint, glance


def test_any_single_changed_bit_changes_the_fingerprint() -> None:
    tensors = {"a": torch.randn(50, 7), "b": torch.randn(33).bfloat16(), "c": torch.randn(200, 300)}
    before = fingerprint(tensors)
    draw = torch.Generator().manual_seed(1)
    for name, tensor in tensors.items():
        bits = tensor.view({4: torch.int32, 2: torch.int16}[tensor.element_size()]).view(-1)
        for at in torch.randint(bits.numel(), (20,), generator=draw).tolist():
            bits[at] ^= 1
            assert fingerprint(tensors) != before, (name, at)
            bits[at] ^= 1
    assert fingerprint(tensors) == before


def test_signs_that_change_in_pairs_change_the_fingerprint_and_so_do_pieces_that_change_places() -> None:
    values = torch.randn(1 << 17)
    before, found = fingerprint({"a": values}), set()
    for changed in ((1, 3), (1, 70_001), (5, 6), range(1, 1 << 17, 2), range(1 << 17)):
        other = values.clone()
        other[list(changed)] *= -1
        found.add(fingerprint({"a": other}))
    found.add(fingerprint({"a": torch.cat([values[1 << 16 :], values[: 1 << 16]])}))
    assert len(found | {before}) == 7


def test_names_shapes_and_dtypes_and_places_count() -> None:
    one = {"a": torch.arange(6.0), "b": torch.arange(6.0) + 1}
    others = [
        {"a": one["b"], "b": one["a"]},
        {"a": one["a"], "c": one["b"]},
        {"a": one["a"].view(2, 3), "b": one["b"]},
        {"a": one["a"].view(torch.int32), "b": one["b"]},
        {"a": one["a"].flip(0), "b": one["b"]},
        {"a": one["a"]},
    ]
    assert len({fingerprint(tensors) for tensors in (one, *others)}) == 7
    assert fingerprint({"b": one["b"], "a": one["a"].clone()}) == fingerprint(one)


def large(seed: int = 0) -> dict[str, torch.Tensor]:
    """Of many sizes, one of them none; 24 MB."""
    draw = torch.Generator().manual_seed(seed)
    made = {"a": torch.randn(3_000_001, generator=draw), "b": torch.randn(1000, 3000, generator=draw)}
    made |= {"c": torch.randn(3, generator=draw), "d": torch.randn(1000, generator=draw), "e": torch.zeros(0, 7)}
    return made | {f"small-{k}": torch.randn(5 * k, generator=draw) for k in range(60)}


def test_a_glance_looks_at_every_so_many_lines_of_all_and_at_others_with_the_next_version() -> None:
    width, every = LINE // 4, 3
    sizes = [8_000, 0, 7, 300, 9_000, 1]
    sizes.append(every * PLACES * width - sum(sizes))
    tensors = {f"t{k}": torch.zeros(n, dtype=torch.int32) for k, n in enumerate(sizes)}
    ends = list(accumulate(sizes))
    for version in (4, 5, 6):
        before = glance(tensors, version)
        for line in range(0, every * PLACES, 5):
            at = bisect_right(ends, line * width)
            tensor, place = tensors[f"t{at}"], line * width - ends[at] + sizes[at]
            tensor[place] = 1
            assert (glance(tensors, version) != before) is (line % every == version % every)
            tensor[place] = 0


def test_a_glance_tells_other_weights_and_an_old_half_with_every_version() -> None:
    tensors, older = large(), large(seed=1)
    for version in (0, 1, 77, 1023, 1024, 3000):
        before = glance(tensors, version)
        assert glance(older, version) != before
        assert glance({name: t.clone() for name, t in tensors.items()}, version) == before
        for name, half in (("a", slice(1_500_000)), ("b", slice(1_500_000, None)), ("a", slice(2_900_000, None))):
            mixed = {n: t.clone() for n, t in tensors.items()}
            mixed[name].view(-1)[half] = older[name].view(-1)[half]
            assert glance(mixed, version) != before, (version, name)
    assert glance({}, 3) == glance({"e": torch.zeros(0)}, 3)


def test_a_glance_at_a_thousand_tensors_looks_at_no_more_than_at_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it costs is a number of places, so at most 2 % of a sync: see the tables of docs/transports.md."""
    cat, joined = torch.cat, []

    def counted(parts: list[torch.Tensor]) -> torch.Tensor:
        joined.append(len(parts))
        return cat(parts)

    monkeypatch.setattr(torch, "cat", counted)
    for tensors in ({"one": torch.zeros(400_000)}, {f"t{k}": torch.zeros(400) for k in range(1000)}):
        glance(tensors, 5)
        assert PLACES / 2 < max(joined) <= PLACES + 1
        joined.clear()


def test_both_sides_of_a_bfloat16_sync_come_to_the_same_fingerprints() -> None:
    trained = large()
    sent = {name: t.bfloat16() for name, t in trained.items()}
    loaded = {name: t.float() for name, t in sent.items()}
    assert fingerprint(sent) == fingerprint(trained, torch.bfloat16) == fingerprint(loaded, torch.bfloat16)
    assert glance(sent, 9) == glance(trained, 9, torch.bfloat16) == glance(loaded, 9, torch.bfloat16)
    assert fingerprint(trained) != fingerprint(loaded)
