"""One round of repair from copies: the first current copy counts, a stale copy never."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from ecrm.device.copies import on_device
from ecrm.protection.backup import BackupRows
from ecrm.protection.rebuild import Group, Probe, Rebuild


class CopyRebuild(Rebuild):
    """Repair over stripes of one data unit; a source tells for each row whether it is current.

    If only trainers had current copies of a row, a rebuilding head has just received the copies. On
    a backup the row then stays missing for the round: the head is a source only once whole.
    """

    def _sources(self, shard: int, unit: int) -> tuple[int, ...]:
        return tuple(self._whole(self._shape.residue_of_unit(shard, unit)))

    def _stale(self, shard: int, space: int, local: Tensor | slice) -> Tensor:
        return cast(BackupRows, self._parity[shard, space]).stale(local)

    def _read(self, shard: int, space: int, unit: int, local: Tensor) -> Tensor:
        """Records of one unit hosted here, uint8 [R, record bytes + 1].

        The extra last byte is 1 for a current record.
        """
        current = torch.ones(local.numel(), 1, dtype=torch.uint8)
        if unit:
            current[:, 0] = ~self._stale(shard, space, local)
        records = self._held(shard, space, unit, local)
        return torch.cat([records, on_device(records.device, current)], dim=1)

    def _probe(self, shard: int, space: int, unit: int, local: slice) -> Tensor:
        """Last bytes as for parity, but nonzero for a stale record: a stale zero proves nothing."""
        last = super()._probe(shard, space, unit, local)
        return last | on_device(last.device, self._stale(shard, space, local)) if unit else last

    def _zeros(self, probe: Probe, sent: list[Tensor]) -> Tensor:
        return (torch.stack(sent) == 0).any(dim=0)

    def _recovered(self, group: Group, sent: list[Tensor]) -> tuple[Tensor, Tensor]:
        units = torch.stack(sent)
        current = units[:, :, -1]
        known, chosen = current.bool().any(dim=0), current.argmax(dim=0)
        if not group.unit and not bool(known.all()):
            raise AssertionError(f"shard {group.shard}: no current copy of a row is left")
        records = units[chosen, torch.arange(group.local.numel()), :-1]
        return group.local[known], records[known].contiguous()
