"""Broken engines that fault schedules must catch, each in its suite and within so many seeds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

import ecrm.engine.recovery as engine_recovery_module
import ecrm.engine.state as state_module
import ecrm.placement.view_change as recovery_module
import ecrm.protection.base as base_module
import ecrm.protection.coding.code as code_module
import ecrm.protection.replicate as replicate_module
from ecrm.base.errors import Unrecoverable
from ecrm.engine.computed import Computed
from ecrm.engine.lookup import Lookup
from ecrm.engine.reshape import Reshape
from ecrm.engine.step_log import StepLog
from ecrm.placement.assignment import spread_shards
from ecrm.placement.stripes import StripeShape
from ecrm.placement.view import View, mark_whole
from ecrm.placement.view_change import plan_recovery
from ecrm.protection.backup import BackupRows
from ecrm.protection.coding.gf256 import PRODUCT
from ecrm.protection.rebuild import Rebuild
from ecrm.protection.replicate import Held
from ecrm.protection.routing import ShardRequests
from ecrm.storage.hosted import HostedShard
from ecrm.storage.undo import UndoLog


@dataclass(frozen=True)
class Canary:
    """How an engine is broken, to be caught within `seeds` seeds.

    `damage(engine)` breaks each engine as it is made, `patch(monkeypatch)` the code of all.
    """

    seeds: int
    damage: Callable | None = None
    patch: Callable | None = None
    suite: str = "survivable"


def _no_parity_undo(engine):
    engine.state.protection.undo = lambda: None


def _no_row_undo(patch):
    right = HostedShard.undo

    def undo(self):
        self._log.clear()
        right(self)

    patch.setattr(HostedShard, "undo", undo)


def _changed_too_early(patch):
    right = UndoLog.clear

    def clear(self):
        if self._update is not None:
            self._update[1].zero_()  # which holders of its parity may still have to take back
        right(self)

    patch.setattr(UndoLog, "clear", clear)


def _rows_changed_too_early(patch):
    right = Lookup.receive_replies

    def take(self, came):
        right(self, came)
        for hosted in self._context.hosted.values():
            hosted._looked_up._memory.zero_()  # where others have not collected them yet

    patch.setattr(Lookup, "receive_replies", take)


def _gradients_changed_too_early(engine):
    """Where others have not summed them yet; there again for a step done again."""
    note, shrink, kept = engine.state.note_undo_bytes, engine.state.transport.shrink, []

    def noted():
        note()
        # else noted already
        there = [room._memory for room in engine._gradients.values() if room._memory.any()]
        kept[:] = [(memory, memory.clone()) for memory in there] or kept
        for memory in there:
            memory.zero_()

    def shrunk(admit=0):
        shrink(admit)
        for memory, was in kept:
            memory.copy_(was)
        kept.clear()

    engine.state.note_undo_bytes, engine.state.transport.shrink = noted, shrunk


def _no_dense_undo(engine):
    if engine.state.dense is not None:
        engine.state.dense.undo = lambda: None


def _notes_not_undone(patch):
    patch.setattr(StepLog, "undo", lambda self, step: None)


def _no_notes_for_new_holders(patch):
    patch.setattr(StepLog, "export", lambda self, before: [])


def _wrong_decode(engine):
    right = engine.state.protection.code.decode_matrix

    def wrong(present, wanted):
        matrix = np.array(right(present, wanted))
        matrix[0, 0] ^= 1
        return matrix

    engine.state.protection.code.decode_matrix = wrong


def _wrong_source(engine):
    class Shifted(type(engine.state.layouts[0])):
        def local_of_unit(self, stripes, unit):
            shift, rows = (
                (self.shape.k, self.data_rows_per_shard)
                if unit < self.shape.k
                else (self.shape.m, self.parity_rows_per_shard)
            )
            return (super().local_of_unit(stripes, unit) + shift) % max(rows, 1)

    engine.state.context.layouts = tuple(
        Shifted(layout.shape, layout.rows) for layout in engine.state.layouts
    )


def _some_zeros_are_enough(patch):
    """A probed row counts as zeros where some unit of its stripe was never updated."""
    patch.setattr(Rebuild, "_zeros", lambda self, probe, sent: (torch.stack(sent) == 0).any(dim=0))


def _unawaited_left_out(patch):
    """Rows of slots that have computed already are not brought back before they are updated."""
    patch.setattr(ShardRequests, "unawaited", lambda self: {})


def _computed_for_another_step(patch):
    """What slots computed is kept even after the engine has gone back beyond that step."""
    right = Computed.begin

    def begin(self, engine):
        if engine.step > self._step:
            right(self, engine)

    patch.setattr(Computed, "begin", begin)


def _marked_whole(patch):
    """A recovery that hands out lost shards as if they were whole."""

    def careless(view, dead, shape, replicas, *words):
        after = plan_recovery(view, dead, shape, replicas, *words)
        return mark_whole(after, set(after.rebuilding) - set(view.rebuilding))

    patch.setattr(engine_recovery_module, "plan_recovery", careless)


def _healthy_shard_moved(patch):
    """A recovery that swaps a lost shard with a healthy one."""

    def swapping(view, dead, shape, replicas, *words):
        after = plan_recovery(view, dead, shape, replicas, *words)
        healthy = [shard for shard in range(shape.shards) if shard not in after.rebuilding]
        if not after.rebuilding or not healthy:
            return after
        shards, a, b = list(after.shards), after.rebuilding[0], healthy[0]
        shards[a], shards[b] = shards[b], shards[a]
        return replace(after, shards=tuple(shards))

    patch.setattr(engine_recovery_module, "plan_recovery", swapping)


def _first_heir(patch):
    def adopted(view, gone, shape):
        hosts = (view.live[0] if host in gone else host for host in view.shards)
        return replace(view, shards=tuple(hosts))

    patch.setattr(recovery_module, "_adopted", adopted)
    patch.setattr(recovery_module, "least_conflicts", lambda view, movable, shape: view.shards)


def _back_past_the_commit(engine):
    right = engine.recovery._take_over

    def take_over():
        right()
        if engine.committed:
            state = engine.state
            state.committed, state.step = state.committed - 1, state.step - 1

    engine.recovery._take_over = take_over


def _own_view(engine):
    """A recovery after which the lowest rank sees holders of the dense replica in another order."""
    right = engine.recovery._take_over

    def take_over():
        right()
        if engine.rank == engine.view.live[0]:
            engine.state.view = replace(engine.view, dense=engine.view.dense[::-1])

    engine.recovery._take_over = take_over


def _no_backups(patch):
    patch.setattr(BackupRows, "put", lambda self, where, records: None)


def _wrong_copies(patch):
    patch.setattr(replicate_module, "Held", lambda rows, records: Held(rows, records ^ 1))


def _no_spares(patch):
    patch.setattr(View, "spares", ())


def _all_rebuild(patch):
    """A recovery after which every shard counts as rebuilding: nobody may die for a while."""

    def anxious(view, dead, shape, replicas, *words):
        after = plan_recovery(view, dead, shape, replicas, *words)
        return replace(after, rebuilding=tuple(range(shape.shards)))

    patch.setattr(engine_recovery_module, "plan_recovery", anxious)


def _dense_not_replaced(patch):
    def keep(view, replicas):
        return tuple(sorted({rank for rank in view.dense if rank in view.live} | set(view.slots)))

    right = recovery_module.dense_holders
    patch.setattr(
        recovery_module,
        "dense_holders",
        lambda view, replicas: (keep if view.epoch else right)(view, replicas),
    )


def _no_reshape(patch):
    patch.setattr(state_module, "plan_reshape", lambda *given: None)


def _reshape_moves_nothing(patch):
    patch.setattr(Reshape, "_outgoing", lambda self, space, window: {})


def _reshape_narrows(patch):
    """Laid out anew over k + m servers, however many are left."""
    right = state_module.plan_reshape

    def narrow(view, shape, *first):
        plan = right(view, shape, *first)
        if plan is None or plan[0].shards == plan[0].width:
            return plan
        fewer = StripeShape(plan[0].width, plan[0].k, plan[0].m)
        return fewer, replace(
            plan[1], shards=spread_shards(fewer, sorted({*view.shards, *view.spares}), view.domains)
        )

    patch.setattr(state_module, "plan_reshape", narrow)


def _promises_more(patch):
    right = base_module.failures_left
    patch.setattr(base_module, "failures_left", lambda *given: right(*given) + 1)


def _another_code(patch):
    """Another code that decodes as much: only its parity bytes differ from the documented ones."""
    right = code_module.make_coefficients
    patch.setattr(code_module, "make_coefficients", lambda k, m: PRODUCT[3][right(k, m)])


def _refuses_early(least_m):
    """The m-th loss is refused, where m is at least `least_m`."""

    def breaks(patch):
        right = StripeShape.check_recoverable

        def early(self, lost):
            right(replace(self, k=self.k + 1, m=self.m - 1) if self.m >= least_m else self, lost)

        patch.setattr(StripeShape, "check_recoverable", early)

    return breaks


def _says_nothing(patch):
    def silent(view, dead, shape, replicas, *words):
        try:
            return plan_recovery(view, dead, shape, replicas, *words)
        except Unrecoverable:
            raise Unrecoverable("somebody died") from None

    patch.setattr(engine_recovery_module, "plan_recovery", silent)


CANARIES = {
    "parity is not undone": Canary(40, damage=_no_parity_undo),
    "rows are not undone": Canary(20, patch=_no_row_undo),
    "shared deltas are changed too early": Canary(40, patch=_changed_too_early),
    "shared rows are changed too early": Canary(20, patch=_rows_changed_too_early),
    "shared gradients are changed too early": Canary(20, damage=_gradients_changed_too_early),
    "the dense replica is not undone": Canary(30, damage=_no_dense_undo),
    "notes are not undone": Canary(20, patch=_notes_not_undone),
    "new holders get no notes": Canary(20, patch=_no_notes_for_new_holders),
    "wrong decoding matrix": Canary(20, damage=_wrong_decode),
    "decoding reads other rows": Canary(10, damage=_wrong_source),
    "probed rows count as zeros where they are not": Canary(10, patch=_some_zeros_are_enough),
    "rows of slots that have computed stay lost": Canary(80, patch=_unawaited_left_out),
    "what was computed is used in another step": Canary(20, patch=_computed_for_another_step),
    "lost shards count as whole": Canary(10, patch=_marked_whole),
    "a healthy shard is moved": Canary(10, patch=_healthy_shard_moved),
    "the lowest rank inherits all": Canary(10, patch=_first_heir),
    "spares are passed over": Canary(60, patch=_no_spares),
    "all shards count as lost": Canary(10, patch=_all_rebuild),
    "dead holders of the dense replica are not replaced": Canary(10, patch=_dense_not_replaced),
    "never laid out anew": Canary(20, patch=_no_reshape),
    "laid out anew without rows": Canary(20, patch=_reshape_moves_nothing),
    "laid out anew over too few servers": Canary(80, patch=_reshape_narrows),
    "more deaths are promised": Canary(10, patch=_promises_more),
    "parity of another code": Canary(10, patch=_another_code),
    "a commit is taken back": Canary(10, damage=_back_past_the_commit),
    "ranks differ in their views": Canary(10, damage=_own_view),
    "replicate: backups are not written": Canary(30, patch=_no_backups),
    "replicate: trainers' copies are wrong": Canary(80, patch=_wrong_copies),
    "the m-th loss is refused, m >= 2": Canary(10, patch=_refuses_early(2)),
    "the m-th loss is refused before the fatal death": Canary(
        10, patch=_refuses_early(1), suite="fatal"
    ),
    "a refusal names nothing": Canary(10, patch=_says_nothing, suite="fatal"),
}
