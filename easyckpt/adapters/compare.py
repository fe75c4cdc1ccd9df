"""How far two snapshots differ, tensor by tensor; what the digests prove equal is not read."""

from __future__ import annotations

from typing import Any

import torch

from easyckpt.adapters.interchange import load_whole, tensors_of
from easyckpt.reader import Advance
from easyckpt.sources import Candidate
from easyckpt.target import Target, headers


def unlike(a: Target, one_a: Candidate, b: Target, one_b: Candidate) -> list[str]:
    """Names of tensors that the digests do not prove equal: other bytes, another cut, or there on one side only."""
    held_a, held_b = _digests(a, one_a), _digests(b, one_b)
    return sorted(name for name in {*held_a, *held_b} if held_a.get(name) != held_b.get(name))


def compare(
    a: Target, one_a: Candidate, b: Target, one_b: Candidate, names: list[str], advance: Advance | None = None
) -> list[dict[str, Any]]:
    """A row for each named tensor: its greatest absolute difference, or None with the reason where there is no number."""
    if not names:
        return []
    found_a = dict(tensors_of(load_whole(a, one_a, only=names, advance=advance)))
    found_b = dict(tensors_of(load_whole(b, one_b, only=names, advance=advance)))
    rows = []
    for name in sorted({*found_a, *found_b}):
        difference, why = _difference(found_a.get(name), found_b.get(name))
        rows.append({"tensor": name, "difference": difference, "why": why})
    return rows


def _digests(target: Target, candidate: Candidate) -> dict[str, set[tuple[object, ...]]]:
    """Of each tensor, which parts of it lie there and what proves them."""
    found: dict[str, set[tuple[object, ...]]] = {}
    for header in headers(target, candidate):
        for entry in header.tensors:
            part = (entry.dtype, entry.shape, entry.global_shape, entry.global_offsets, entry.digest)
            found.setdefault(entry.name, set()).add(part)
    return found


def _difference(a: torch.Tensor | None, b: torch.Tensor | None) -> tuple[float | None, str]:
    if a is None or b is None:
        return None, "only in B" if a is None else "only in A"
    if a.shape != b.shape or a.dtype != b.dtype:
        return None, f"{a.dtype}{list(a.shape)} against {b.dtype}{list(b.shape)}"
    if a.numel() == 0:
        return 0.0, ""
    if a.is_complex():
        return float((a - b).abs().max()), ""
    gap = (a.double() - b.double()).abs()
    same = a.double().isnan() & b.double().isnan()
    greatest = float(torch.where(same, 0.0, gap).nan_to_num(nan=float("inf")).max())
    return greatest, ""
