"""Planted bugs of rotary_kv_write."""

from __future__ import annotations

from dataclasses import replace

import torch

from fastlayers.attention.rotary_kv_write.torch import TorchRotaryKVWrite


class _OtherPairing(TorchRotaryKVWrite):
    def __init__(self, cfg):  # type: ignore[no-untyped-def]
        super().__init__(replace(cfg, interleaved_in=not cfg.interleaved_in))


class _Turning(TorchRotaryKVWrite):
    """Turns by :meth:`turn`, which a mutant replaces."""

    def __init__(self, cfg):  # type: ignore[no-untyped-def]
        super().__init__(cfg)
        self.right, self.rotary.rotate = self.rotary.rotate, self.turn  # type: ignore[method-assign]


class _OtherDirection(_Turning):
    def turn(self, x, c, s):  # type: ignore[no-untyped-def]
        return self.right(x, c, -s)


class _KeysNotTurned(_Turning):
    def turn(self, x, c, s):  # type: ignore[no-untyped-def]
        return self.right(x, c, s) if x.shape[1] == self.cfg.num_heads else x


class _StalePositions(TorchRotaryKVWrite):
    def __call__(self, q, k, v, cos, sin, positions, keys, values, loc, *norms):  # type: ignore[no-untyped-def]
        return super().__call__(q, k, v, cos, sin, positions - 1, keys, values, loc, *norms)


class _NextSlot(TorchRotaryKVWrite):
    def __call__(self, q, k, v, cos, sin, positions, keys, values, loc, *norms):  # type: ignore[no-untyped-def]
        slots = keys.shape[0] * keys.shape[1]
        return super().__call__(q, k, v, cos, sin, positions, keys, values, (loc + 1) % slots, *norms)


class _KeysNotNormed(TorchRotaryKVWrite):
    def __call__(self, q, k, v, cos, sin, positions, keys, values, loc, q_weight=None, k_weight=None, out=None):  # type: ignore[no-untyped-def]
        return super().__call__(q, k, v, cos, sin, positions, keys, values, loc, q_weight, None, out)


class _SwappedNorms(TorchRotaryKVWrite):
    def __call__(self, q, k, v, cos, sin, positions, keys, values, loc, q_weight=None, k_weight=None, out=None):  # type: ignore[no-untyped-def]
        return super().__call__(q, k, v, cos, sin, positions, keys, values, loc, k_weight, q_weight, out)


class _OneAxis(TorchRotaryKVWrite):
    def __call__(self, q, k, v, cos, sin, positions, *rest):  # type: ignore[no-untyped-def]
        return super().__call__(q, k, v, cos, sin, positions[0] if positions.dim() == 2 else positions, *rest)


class _AxesInTurn(TorchRotaryKVWrite):
    def __init__(self, cfg):  # type: ignore[no-untyped-def]
        super().__init__(replace(cfg, mrope_interleaved=not cfg.mrope_interleaved))


class _OutNotWritten(TorchRotaryKVWrite):
    def __call__(self, *given):  # type: ignore[no-untyped-def]
        return super().__call__(*given[:11])


class _OutIsContiguous(TorchRotaryKVWrite):
    """Takes the rows that it writes for next to each other."""

    def __call__(self, *given):  # type: ignore[no-untyped-def]
        q = super().__call__(*given[:11])
        if len(given) > 11:
            given[11].as_strided(q.shape, q.stride(), given[11].storage_offset()).copy_(q)
        return q


class _TurnedInModelDtype(_Turning):
    def turn(self, x, c, s):  # type: ignore[no-untyped-def]
        return self.right(x, c.to(torch.bfloat16).float(), s.to(torch.bfloat16).float())


MUTANTS = {
    "other_pairing": _OtherPairing,
    "other_direction": _OtherDirection,
    "keys_not_turned": _KeysNotTurned,
    "stale_positions": _StalePositions,
    "next_slot": _NextSlot,
    "keys_not_normed": _KeysNotNormed,
    "swapped_norms": _SwappedNorms,
    "turned_in_bf16": _TurnedInModelDtype,
    "one_axis": _OneAxis,
    "axes_in_turn": _AxesInTurn,
    "out_not_written": _OutNotWritten,
    "out_is_contiguous": _OutIsContiguous,
}
