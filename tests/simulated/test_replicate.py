"""Replication: copies that trainers hold count, and hot rows are not sent twice."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from ecrm.placement.tables import Table
from ecrm.protection.backup import BackupRows
from ecrm.protection.parity import ParityRows
from ecrm.protection.replicate import ReplicateProtection
from ecrm.testing.simulate.schedule import draw
from ecrm.testing.simulate.simulation import Failed, run_schedule
from ecrm.testing.simulate.workload import Workload
from support.seeds import some_and_more


def _drawn(count: int) -> list:
    drawn = (draw(seed, "survivable") for seed in range(10_000))
    return [
        schedule
        for schedule, _ in zip(
            (s for s in drawn if s.workload.protection == "replicate"), range(count), strict=False
        )
    ]


def test_a_backup_is_overwritten_and_taken_back():
    backup = BackupRows(10, 4, missing=False)
    first, second = (
        torch.full((2, 4), 7, dtype=torch.uint8),
        torch.full((2, 4), 9, dtype=torch.uint8),
    )
    backup.put(torch.tensor([1, 3]), first)
    backup.committed()
    backup.put(torch.tensor([3, 5]), second)
    backup.put(torch.tensor([3, 5]), first)
    backup.passed_over(torch.tensor([1, 5]))
    assert (
        backup.stale(torch.tensor([1, 3, 5])).tolist() == [True, False, True]
        and backup.log_bytes > 0
    )
    backup.undo()
    assert backup.records[[1, 3, 5]].tolist() == [[7] * 4, [7] * 4, [0] * 4]
    assert not backup.stale(torch.arange(10)).any()


@pytest.mark.parametrize("seeds", some_and_more(13, 40))
def test_schedules_survive_what_is_promised_with_enough_copies_at_every_commit(seeds):
    schedules = _drawn(seeds.stop)[seeds.start :]
    assert {s.workload.m for s in schedules} == {1, 2, 3}
    assert sum(run_schedule(schedule).deaths for schedule in schedules) > len(seeds)


@pytest.mark.parametrize("seeds", some_and_more(8, 24))
def test_heads_and_links_die_together_with_their_rows_at_trainers(seeds):
    """Both shards of a pair are rebuilt at once.

    The budget reaches the backups as soon as any background row comes.
    """
    died = 0
    for seed in seeds:
        rng = random.Random(seed)
        m = 2 + seed % 2
        workload = Workload(
            seed=seed,
            tables=(Table("a", 40, 4), Table("b", 17, 8)),
            slots=4,
            trainers=4,
            servers=m + 1 + rng.choice((0, 1, 3)),
            spares=2,
            steps=8,
            ids_per_slot=12,
            protection="replicate",
            k=1,
            m=m,
            rebuild_rows_per_step=1000,
            layout=rng.choice(("dedicated", "colocated")),
        )
        base = draw(seed, "survivable")
        schedule = replace(
            base,
            workload=workload,
            deaths=4,
            call_death=0.006,
            phase_death=0.01,
            cascade=0.05,
            together=0.8,
        )
        died += run_schedule(schedule).deaths
    assert died > 1.5 * len(seeds)


@pytest.mark.parametrize(
    "broken",
    [
        "tails are not kept",
        "too many may die",
        "trainers are not asked first",
        pytest.param("stale backups are used", marks=pytest.mark.drill),
    ],
)
def test_a_broken_protection_is_caught(monkeypatch, broken):
    if broken == "tails are not kept":
        monkeypatch.setattr(ReplicateProtection, "retain", lambda self, asked, replies: None)
    elif broken == "stale backups are used":
        monkeypatch.setattr(
            BackupRows, "stale", lambda self, rows: torch.zeros_like(self._stale[rows])
        )
    elif broken == "too many may die":
        monkeypatch.setattr(ReplicateProtection, "check_losses", lambda self, *losses: None)
        monkeypatch.setattr(
            "ecrm.testing.simulate.promise._too_many_since_commit", lambda engine, gone, m: False
        )
    else:
        monkeypatch.setattr(ReplicateProtection, "adopt", _thinks_all_is_delivered)
    with pytest.raises(Failed):
        for schedule in _drawn(150):
            if broken != "stale backups are used" or schedule.workload.m > 1:
                run_schedule(schedule)


_adopt = ReplicateProtection.adopt


def _thinks_all_is_delivered(self, view, missing=True):
    _adopt(self, view, missing)
    self._delivered = True


def test_rows_that_others_ask_for_next_are_not_sent_to_backups(monkeypatch):
    sent = {"replicate": 0, "chain": 0}
    put, apply = BackupRows.put, ParityRows.apply

    def counting_put(self, rows, records):
        sent["replicate"] += rows.numel()
        put(self, rows, records)

    def counting_apply(self, rows, coefficient, deltas):
        sent["chain"] += rows.numel()
        apply(self, rows, coefficient, deltas)

    monkeypatch.setattr(BackupRows, "put", counting_put)
    monkeypatch.setattr(ParityRows, "apply", counting_apply)
    schedule = next(
        s
        for s in _drawn(500)
        if s.workload.slots >= 3 and s.workload.look_ahead and s.workload.commit_interval == 1
    )
    for name in sent:
        workload = replace(schedule.workload, protection=name, steps=12, ids_per_slot=12, spares=0)
        run_schedule(replace(schedule, deaths=0, workload=workload))
    assert 0 < sent["replicate"] < 0.7 * sent["chain"]


@pytest.mark.drill
def test_where_failure_domains_are_few_every_backup_is_current(monkeypatch):
    """Two copies on one host used to count as two.

    The schedules that gave such clusters pass now, and the old way of counting still fails.
    """
    right = ReplicateProtection._spread

    def by_rank(self, shard, space, rows, askers, view, outgoing):
        right(
            self,
            shard,
            space,
            rows,
            askers,
            replace(view, domains=tuple(range(len(view.domains)))),
            outgoing,
        )

    told = []
    for schedule in (s for s in _drawn(60) if s.workload.domains):
        run_schedule(schedule)
        with monkeypatch.context() as patch:
            patch.setattr(ReplicateProtection, "_spread", by_rank)
            try:
                run_schedule(schedule)
            except Failed as error:
                told.append(error.caught and "and not in all its backups" in str(error))
    assert told and all(told)
