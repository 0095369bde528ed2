"""The protocol of commit, undo, recovery, membership and joins as a finite model.

Four ranks train some steps. Each rank holds a shard with data and parity; some ranks hold the dense
replica. A head decides on the members. Faults: ranks die at any instant, a link is cut for good
(between two ranks, or between a rank and the head), and a call fails although nobody died. A dead
rank may return: its new process waits, and joins right after a commit. It may return over a link
that is still cut; the link may be mended while an end is lost. A model has no bytes: the value of a
shard is the number of updates of the rows, so a calm run ends with the number of steps everywhere.
Any two of the four units of a stripe give back the other two.

A state is a `State` of small tuples. `Model.steps(state)` gives every possible next state with a
label; `Model.wrong(state)` the broken promise, if any. `Model.progress(state)` grows in every step,
so no run of the model goes on for ever. `MISTAKES` are wrong variants of the protocol.

Abstractions, all of which allow more behaviour than the code, never less:

- A rank that leaves a call has entered the next call at once. A death between two calls is a death
  in the next call, which may fail on every rank.
- A message of members and head is heard at any time after its cause, again and again: late,
  repeated and reordered messages of an epoch are steps of the model, lost messages are not taken.
- The head hears of a rank that waits to join at once. A rank that dies unheard has not returned.
- Any rank may learn late, or never, of ranks that wait.
- The lease of a rank ends before the head's patience with the rank: `head gives up` waits for the
  end of the rank. The lengths of both times are no part of the model, only their order is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

# A rank is in a call, or:
WANT, ENTER, DONE, DEAD, REFUSED = "want", "enter", "done", "dead", "refused"
ENDED = (DONE, DEAD, REFUSED)
# The calls of a step: requests and gradients; deltas; the agreement. Then those of a recovery: the
# ledgers, the agreement on the ledgers, the welcome of newcomers if there are any, the dense state,
# the agreement on the dense state. The last agreement ends the job.
FIRST, SECOND, AGREE = "first", "second", "agree"
LEDGER, LEDGER_AGREE, WELCOME = "ledger", "ledger agree", "welcome"
SPREAD, SPREAD_AGREE, FINISH = "spread", "spread agree", "finish"
AGREEMENTS = (AGREE, LEDGER_AGREE, SPREAD_AGREE, FINISH)
CALLS = (FIRST, SECOND, AGREE, LEDGER, LEDGER_AGREE, WELCOME, SPREAD, SPREAD_AGREE, FINISH)
NO, MAY, ASKS = range(3)
"""The wish of a rank for ranks that wait to join, as `ecrm.transport.membership.Admit`."""

WHOLE, MISSING, FRESH = 0, 1, 2
"""A shard has all rows, none on its new host, or rows decoded since the last commit."""
GARBAGE = 99


class Rank(NamedTuple):
    """A rank: its place in the program, its epoch, and what it knows.

    `calls` counts the calls entered in the epoch. `members` is a set of bits. `committed` are the
    steps not to be taken back, `commits` the commits: of steps, and of rounds of the rebuild alone.
    `newest` is the largest number of commits by the ledgers. `dense` are the updates of the dense
    replica, -1 without a replica, and `dense_log` the part to be undone. `rebuilding` are the
    shards of the view without all rows, a set of bits.

    `life` counts the processes of the rank before. A rank is `new` until a recovery is through.
    `newcomers` are the new ranks by the ledgers, a set of bits. `told` is whether the rank tells in
    its step of ranks that wait, `asks` whether it has been told, `admit` its wish.
    """

    at: str = FIRST
    epoch: int = 1
    members: int = 0
    calls: int = 1
    committed: int = 0
    commits: int = 0
    newest: int = 0
    dense: int = -1
    dense_log: int = 0
    rebuilding: int = 0
    life: int = 0
    new: bool = False
    newcomers: int = 0
    told: bool = False
    asks: bool = False
    admit: int = NO


class Shard(NamedTuple):
    """A shard on the rank `host`: updates of the rows and of the parity, with the logs of both."""

    host: int
    rows: int = 0
    rows_log: int = 0
    parity: int = 0
    parity_log: int = 0
    state: int = WHOLE


class Head(NamedTuple):
    """The head's knowledge of an epoch: sets of bits, as in `ecrm.transport.membership.Head`."""

    epoch: int = 1
    live: int = 0
    wanting: int = 0
    dead: int = 0
    fenced: int = 0
    left: int = 0
    waiting: int = 0


class Cut(NamedTuple):
    """A cut link: the ends (the head is HEAD), the epoch, and the calls sent before the cut."""

    one: int
    other: int
    epoch: int
    calls: tuple[int, int]


HEAD = 9


class State(NamedTuple):
    """The whole system. `kinds` are the calls of the newest epoch, `history`, in order.

    `left` are the faults that may still happen: deaths, cuts, calls that fail alone, and returns of
    dead ranks.
    """

    ranks: tuple[Rank, ...]
    shards: tuple[Shard, ...]
    head: Head
    cut: Cut | None
    left: tuple[int, int, int, int]
    kinds: tuple[str, ...] = (FIRST,)
    history: int = 1
    wrong: str = ""


MISTAKES = {
    "rows are not undone": "a recovery undoes the parity and the dense replica, and not the rows",
    "parity is not undone": "a recovery undoes the rows, and not the parity",
    "undo forgets to empty the log": "a second death in a recovery undoes the step twice",
    "commit before the agreement": "a rank commits once it has all deltas",
    "a missed commit is undone": "a rank undoes a step although the ledgers have a newer commit",
    "the oldest commit counts": "all ranks go back to the oldest commit of the ledgers",
    "an agreement waits for nobody": "once a rank has died, an agreement is over for the others",
    "roles by hearsay": "a rank hands over roles by the deaths it knows of, not by the members",
    "rows decoded in an undone step stay": "rows recovered since the commit outlive the undo",
    "units of an uncommitted step": "rows are decoded from units that the step has changed",
    "the head does not wait for a fenced rank": "the next epoch begins while a fenced rank lives",
    "the head is less patient than the lease": "a silent rank is given up before its lease ends",
    "the next epoch begins without some": "the next epoch begins once the first rank wants it",
    "both ends of a cut are fenced": "the head gives up both hosts that do not hear each other",
    "nobody is fenced": "the head takes no notice of ranks that do not hear each other",
    "a leave is not told": "the head waits for a rank that has left with the job done",
    "no revocation": "the head tells nobody that a rank wants the next epoch",
    "a death is not told": "neither the head nor a rank in a call learns of a death",
    "a number returns in the epoch of its death": "a rank may join in the place of its own death",
    "ranks join in a broken recovery": "every shrink admits ranks that wait",
    "a newcomer has a replica of its own": "the first dense replica of a newcomer counts",
    "a late death counts again": "a late word of a death counts for the next process of the rank",
}


@dataclass(frozen=True)
class Model:
    """The protocol with bounds on faults, and with one of MISTAKES at most."""

    steps_to_train: int = 1
    deaths: int = 2
    cuts: int = 1
    failures: int = 0
    ranks: int = 4
    survives: int = 2
    returns: int = 0
    spares: int = 0
    mistake: str = ""

    def start(self) -> State:
        everybody = (1 << self.ranks) - 1
        holders = self.survives + 1
        return State(
            tuple(
                Rank(members=everybody, dense=0 if rank < holders else -1)
                for rank in range(self.ranks)
            ),
            tuple(Shard(rank) for rank in range(self.ranks - self.spares)),
            Head(live=everybody),
            None,
            (self.deaths, self.cuts, self.failures, self.returns),
        )

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        """Every next state, with a label of the rank and the act."""
        if not state.wrong:
            for label, after in self._acts(state):
                yield label, self._settled(after)

    def _acts(self, state: State) -> Iterator[tuple[str, State]]:
        for rank, this in enumerate(state.ranks):
            if this.at in ENDED:
                continue
            yield from self._faults(state, rank)
            if this.at not in (WANT, ENTER):
                if self._completes(state, rank):
                    yield f"{rank} completes {this.at}", self._after_call(state, rank)
                    if this.at == FIRST and self._may_tell(state, rank):
                        told = self._with(state, rank, told=True)
                        yield f"{rank} completes {this.at} and tells", self._after_call(told, rank)
                if self._may_fail(state, rank):
                    yield f"{rank} fails {this.at}", self._failed(state, rank)
                elif state.left[2]:
                    failed = self._failed(state, rank)._replace(left=_less(state.left, 2))
                    yield f"{rank} fails alone {this.at}", failed
        yield from self._returns(state)
        yield from self._cuts(state)
        if state.left[3] and self._has_lost_an_end(state):
            yield "the cut is mended", state._replace(cut=None)
        yield from self._head(state)

    def progress(self, state: State) -> int:
        """A number that every step makes larger."""
        ranks = sum(
            200_000 * rank.life + 100_000
            if rank.at == DEAD
            else 200_000 * rank.life
            + 2000 * rank.epoch
            + 10 * rank.calls
            + (1000 if rank.at not in CALLS else 0)
            for rank in state.ranks
        )
        head = state.head
        known = (head.wanting, head.dead, head.fenced, head.left)
        bits = sum(each.bit_count() for each in known)
        mended = state.cut is None and state.left[1] < self.cuts
        return ranks + 100 * head.epoch + bits - 10 * sum(state.left) + mended

    # Faults.

    def _faults(self, state: State, rank: int) -> Iterator[tuple[str, State]]:
        if state.left[0]:
            dead = self._with(state, rank, at=DEAD)
            yield f"{rank} dies", dead._replace(left=_less(state.left, 0))
        cut = state.cut
        if state.head.fenced >> rank & 1:
            yield f"{rank} is fenced", self._with(state, rank, at=DEAD)
        elif cut and cut.other == HEAD and rank == cut.one:
            yield f"{rank} ends with its lease", self._with(state, rank, at=DEAD)

    def _returns(self, state: State) -> Iterator[tuple[str, State]]:
        """A new process of a dead rank waits to join, and the head has heard of it."""
        if not state.left[3]:
            return
        at_once = self.mistake == "a number returns in the epoch of its death"
        for rank, this in enumerate(state.ranks):
            bit = 1 << rank
            known = not state.head.live & bit or (at_once and state.head.dead & bit)
            unheard = self._is_cut(state, rank)
            if this.at != DEAD or not known or state.head.waiting & bit or unheard:
                continue
            own = 0 if self.mistake == "a newcomer has a replica of its own" else -1
            new = Rank(ENTER, 0, calls=0, commits=-1, dense=own, life=this.life + 1, new=True)
            ranks = (*state.ranks[:rank], new, *state.ranks[rank + 1 :])
            # whoever takes the number for the rank before takes its rows for whole
            shards = tuple(
                Shard(rank, GARBAGE, 0, GARBAGE) if shard.host == rank else shard
                for shard in state.shards
            )
            head = state.head._replace(waiting=state.head.waiting | bit)
            left = _less(state.left, 3)
            yield (
                f"{rank} returns",
                state._replace(ranks=ranks, shards=shards, head=head, left=left),
            )

    def _may_tell(self, state: State, rank: int) -> bool:
        """Whether a rank may tell all ranks, in this step, of ranks that wait."""
        members = state.ranks[rank].members
        said = any(this.told for mate, this in enumerate(state.ranks) if members >> mate & 1)
        return bool(state.head.waiting & ~members) and not said

    def _failed(self, state: State, rank: int) -> State:
        """A call of a rank has failed: the rank wants the next epoch."""
        admit = MAY if state.ranks[rank].at == AGREE else NO
        if self.mistake == "ranks join in a broken recovery":
            admit = ASKS
        return self._with(state, rank, at=WANT, admit=admit)

    def _cuts(self, state: State) -> Iterator[tuple[str, State]]:
        if not state.left[1]:
            return
        left = _less(state.left, 1)
        away = (DEAD, DONE, ENTER)
        alive = [rank for rank, this in enumerate(state.ranks) if this.at not in away]
        for one in alive:
            for other in [*alive, HEAD]:
                if one < other:
                    calls = tuple(state.ranks[end].calls for end in (one, other) if end != HEAD)
                    cut = Cut(one, other, state.ranks[one].epoch, (*calls, 0)[:2])
                    yield f"cut {one} {other}", state._replace(cut=cut, left=left)

    def _has_lost_an_end(self, state: State) -> bool:
        """Whether a rank at an end of the cut link is dead, and no member."""
        cut = state.cut
        return cut is not None and any(
            state.ranks[end].at == DEAD and not state.head.live >> end & 1
            for end in (cut.one, cut.other)
            if end != HEAD
        )

    # Calls.

    def _completes(self, state: State, rank: int) -> bool:
        """Whether a rank can have everything that its call needs."""
        this, died = state.ranks[rank], any(each.at == DEAD for each in state.ranks)
        for mate, other in enumerate(state.ranks):
            if not this.members >> mate & 1 or mate == rank:
                continue
            entered = other.calls if other.epoch == this.epoch else 0
            if self.mistake == "an agreement waits for nobody" and this.at in AGREEMENTS and died:
                continue
            cut = state.cut
            if cut and {cut.one, cut.other} == {rank, mate} and this.at not in AGREEMENTS:
                # on several ways an agreement goes around a cut
                before = cut.calls[0 if mate == cut.one else 1]
                entered = min(entered, before) if cut.epoch == this.epoch else 0
            if entered < this.calls:
                return False
        return True

    def _may_fail(self, state: State, rank: int) -> bool:
        """Whether a rank may have heard of a death, or of a wish for the next epoch."""
        this, head = state.ranks[rank], state.head
        dead = any(
            other.at in (DEAD, ENTER)
            for mate, other in enumerate(state.ranks)
            if this.members >> mate & 1
        )
        told = head.epoch > this.epoch or bool(head.wanting | head.fenced)
        if self.mistake == "a death is not told":
            dead = False
        if self.mistake == "no revocation":
            told = False
        return dead or told

    def _after_call(self, state: State, rank: int) -> State:
        """A rank has completed its call, acts, and enters the next call."""
        this = state.ranks[rank]
        if this.at == FIRST:
            return self._enter(self._update(state, rank), rank, SECOND)
        if this.at == SECOND:
            state = self._protect(state, rank)
            told = any(
                mate.told for other, mate in enumerate(state.ranks) if this.members >> other & 1
            )
            state = self._with(state, rank, asks=told)
            if self.mistake == "commit before the agreement":
                state = self._commit(state, rank)
            return self._enter(state, rank, AGREE)
        if this.at == AGREE:
            if self.mistake != "commit before the agreement":
                state = self._commit(state, rank)
            if this.asks:
                return self._with(state, rank, at=WANT, admit=ASKS)
            return self._next_step(state, rank)
        if this.at == LEDGER:
            members = [
                (mate, other) for mate, other in enumerate(state.ranks) if this.members >> mate & 1
            ]
            known = [other.commits for _, other in members if not other.new]
            choice = min if self.mistake == "the oldest commit counts" else max
            newest = choice(known, default=-1)
            newcomers = sum(1 << mate for mate, other in members if other.new)
            learned = self._with(state, rank, newest=newest, newcomers=newcomers)
            return self._enter(learned, rank, LEDGER_AGREE)
        if this.at == LEDGER_AGREE and this.newcomers:
            if this.newest < 0:
                return self._with(state, rank, at=REFUSED)
            return self._enter(state, rank, WELCOME)
        if this.at == WELCOME:
            return self._recover(self._welcomed(state, rank), rank)
        if this.at == LEDGER_AGREE:
            return self._recover(state, rank)
        if this.at == SPREAD:
            return self._enter(state, rank, SPREAD_AGREE)
        if this.at == SPREAD_AGREE:
            through = self._with(self._take_dense(state, rank), rank, new=False)
            return self._next_step(through, rank)
        assert this.at == FINISH
        return self._with(state, rank, at=DONE)

    def _enter(self, state: State, rank: int, call: str) -> State:
        """A rank enters a call; ranks of an epoch must make the same calls."""
        this = state.ranks[rank]
        state = self._with(state, rank, at=call, calls=this.calls + 1)
        if this.epoch < state.history:
            return state
        kinds = state.kinds
        if this.epoch > state.history:
            kinds = ()
        if this.calls < len(kinds):
            if kinds[this.calls] != call:
                return state._replace(wrong=f"rank {rank} calls {call}, others differ")
            return state
        return state._replace(kinds=(*kinds, call), history=this.epoch)

    def _next_step(self, state: State, rank: int) -> State:
        this = state.ranks[rank]
        over = this.committed >= self.steps_to_train and not this.rebuilding
        state = self._with(state, rank, told=False, asks=False)
        return self._enter(state, rank, FINISH if over else FIRST)

    # Rows, parity, the dense replica.

    def _update(self, state: State, rank: int) -> State:
        """Decode the lost rows, then update the rows of this rank's shards."""
        done = state.ranks[rank].committed >= self.steps_to_train  # only a rebuild is left
        shards = list(state.shards)
        for number, shard in enumerate(state.shards):
            if shard.host != rank:
                continue
            if shard.state == MISSING:
                value = self._decoded(state, number)
                shard = Shard(rank, value, 0, value, 0, FRESH)
            more = 0 if done else 1
            shards[number] = shard._replace(rows=shard.rows + more, rows_log=more)
        return state._replace(shards=tuple(shards))

    def _decoded(self, state: State, lost: int) -> int:
        """A lost unit from the other units, sent before the step changed them."""
        units = set()
        for number, shard in enumerate(state.shards):
            if number != lost and shard.state == WHOLE:
                if self.mistake == "units of an uncommitted step":
                    units |= {shard.rows, shard.parity}
                else:
                    units |= {shard.rows - shard.rows_log, shard.parity - shard.parity_log}
        return units.pop() if len(units) == 1 else GARBAGE

    def _protect(self, state: State, rank: int) -> State:
        """Update the parity and the dense replica of this rank."""
        this = state.ranks[rank]
        more = 0 if this.committed >= self.steps_to_train else 1
        shards = tuple(
            shard._replace(parity=shard.parity + more, parity_log=more)
            if shard.host == rank
            else shard
            for shard in state.shards
        )
        state = state._replace(shards=shards)
        if this.dense < 0:
            return state
        return self._with(state, rank, dense=this.dense + more, dense_log=more)

    def _commit(self, state: State, rank: int) -> State:
        this = state.ranks[rank]
        shards = tuple(
            shard._replace(
                rows_log=0, parity_log=0, state=WHOLE if shard.state == FRESH else shard.state
            )
            if shard.host == rank
            else shard
            for shard in state.shards
        )
        state = self._with(
            state,
            rank,
            committed=min(this.committed + 1, self.steps_to_train),
            commits=this.commits + 1,
            dense_log=0,
            rebuilding=0,
        )
        return state._replace(shards=shards)

    def _undo(self, state: State, rank: int) -> State:
        this, shards = state.ranks[rank], list(state.shards)
        for number, shard in enumerate(shards):
            if shard.host != rank:
                continue
            if shard.state == FRESH:
                if self.mistake != "rows decoded in an undone step stay":
                    shards[number] = Shard(rank, state=MISSING)
                    continue
                shard = shard._replace(state=WHOLE)
            rows, parity = shard.rows - shard.rows_log, shard.parity - shard.parity_log
            rows_log = parity_log = 0
            if self.mistake == "rows are not undone":
                rows = shard.rows
            if self.mistake == "parity is not undone":
                parity = shard.parity
            if self.mistake == "undo forgets to empty the log":
                rows_log, parity_log = shard.rows_log, shard.parity_log
            shards[number] = shard._replace(
                rows=rows, rows_log=rows_log, parity=parity, parity_log=parity_log
            )
        state = self._with(state, rank, dense=this.dense - this.dense_log, dense_log=0)
        return state._replace(shards=tuple(shards))

    # Recovery.

    def _welcomed(self, state: State, rank: int) -> State:
        """A newcomer knows now what every rank knows at the newest commit."""
        this = state.ranks[rank]
        if not this.new:
            return state
        known = [
            other
            for mate, other in enumerate(state.ranks)
            if this.members >> mate & 1 and not other.new and other.commits == this.newest
        ]
        teller = known[0] if known else Rank()
        return self._with(
            state,
            rank,
            committed=teller.committed,
            commits=teller.commits,
            rebuilding=teller.rebuilding,
        )

    def _recover(self, state: State, rank: int) -> State:
        """After the agreement on the ledgers: back to the commit, and the roles handed over."""
        this = state.ranks[rank]
        if this.newest > this.commits and self.mistake != "a missed commit is undone":
            state = self._commit(state, rank)
        else:
            state = self._undo(state, rank)
            if this.newest < this.commits:  # by a mistake alone
                state = self._with(state, rank, commits=this.newest, committed=this.newest)
        lost = self._lost(state, rank)
        holders = self._holders(state, this.members)
        if len(lost) > self.survives or not holders:
            return self._with(state, rank, at=REFUSED)
        state = self._take_over(
            self._with(state, rank, rebuilding=sum(1 << each for each in lost)), rank, lost
        )
        if set(self._due(this.members)) <= set(holders) and not this.newcomers:
            return self._next_step(state, rank)
        return self._enter(state, rank, SPREAD)

    def _lost(self, state: State, rank: int) -> list[int]:
        """Shards without rows, by the view: lost with their host, or not whole yet."""
        this = state.ranks[rank]
        return [
            number
            for number, shard in enumerate(state.shards)
            if not this.members >> shard.host & 1
            or shard.state == MISSING
            or (shard.state == FRESH and this.rebuilding >> number & 1)
        ]

    def _take_over(self, state: State, rank: int, lost: list[int]) -> State:
        """Host the lost shards that fall to this rank: in turn to the members."""
        members = [mate for mate in range(self.ranks) if state.ranks[rank].members >> mate & 1]
        if self.mistake == "roles by hearsay":
            members = [mate for mate in members if state.ranks[mate].at != DEAD]
        heirs = members
        if self.spares:  # members without a whole shard come first
            busy = {shard.host for number, shard in enumerate(state.shards) if number not in lost}
            heirs = [mate for mate in members if mate not in busy] or members
        shards = list(state.shards)
        for number in lost:
            host = shards[number].host
            if host not in members and heirs[number % len(heirs)] == rank:
                shards[number] = Shard(rank, state=MISSING)
        return state._replace(shards=tuple(shards))

    def _due(self, members: int) -> list[int]:
        """The ranks that should hold the dense replica."""
        return [rank for rank in range(self.ranks) if members >> rank & 1][: self.survives + 1]

    def _holders(self, state: State, members: int) -> list[int]:
        """The holders of the dense replica as of the ledgers.

        A holder of the present epoch without an agreement yet is none.
        """
        return [
            rank for rank, this in enumerate(state.ranks) if members >> rank & 1 and this.dense >= 0
        ]

    def _take_dense(self, state: State, rank: int) -> State:
        """Take the dense state of a holder, unless this rank has a replica, or is to have none."""
        this = state.ranks[rank]
        if this.dense >= 0 or rank not in self._due(this.members):
            return state
        sender = state.ranks[min(self._holders(state, this.members))]
        return self._with(state, rank, dense=sender.dense - sender.dense_log, dense_log=0)

    # The members and the head.

    def _settled(self, state: State) -> State:
        """Let every message be heard whose time makes no difference to the promises.

        A wish heard later, or never because the rank dies, is a rank that dies in its call. The
        same holds for the next epoch heard later. A death of a rank that does not want the next
        epoch is known in any case before the epoch.
        """
        while True:
            head = state.head
            for rank, this in enumerate(state.ranks):
                bit = 1 << rank
                if not head.live & bit:
                    continue
                cut = self._is_cut(state, rank)
                wants = this.at == WANT and not cut
                if (wants or this.at == ENTER) and this.epoch < head.epoch:
                    began = self._with(
                        state,
                        rank,
                        epoch=head.epoch,
                        members=head.live,
                        calls=0,
                        admit=NO,
                        told=False,
                        asks=False,
                        newcomers=0,
                    )
                    state = self._enter(began, rank, LEDGER)
                elif wants and not head.wanting & bit:
                    state = self._advanced(state, head._replace(wanting=head.wanting | bit))
                elif self._is_known_dead(state, rank) and not head.wanting & bit:
                    state = self._knows_dead(state, rank)
                elif self._leaves(this) and not (head.left | head.fenced) & bit and not cut:
                    state = self._advanced(state, head._replace(left=head.left | bit))
                else:
                    continue
                break
            else:
                return state

    def _leaves(self, this: Rank) -> bool:
        """Whether the head may hear a rank leave."""
        return this.at in (DONE, REFUSED) and self.mistake != "a leave is not told"

    def _is_known_dead(self, state: State, rank: int) -> bool:
        """Whether the head may find a rank dead, and has not yet."""
        this, head, bit = state.ranks[rank], state.head, 1 << rank
        told = this.at == DEAD and self.mistake != "a death is not told"
        if self.mistake == "a late death counts again" and this.life and this.at not in ENDED:
            told = True
        silent = this.at in ENDED and (bool(head.fenced & bit) or self._is_cut(state, rank))
        return (told or silent) and not (head.dead | head.left) & bit

    def _knows_dead(self, state: State, rank: int) -> State:
        head, bit = state.head, 1 << rank
        return self._advanced(state, head._replace(dead=head.dead | bit, fenced=head.fenced | bit))

    def _head(self, state: State) -> Iterator[tuple[str, State]]:
        head, cut = state.head, state.cut
        for rank, this in enumerate(state.ranks):
            bit = 1 << rank
            if not head.live & bit:
                continue
            impatient = self.mistake == "the head is less patient than the lease"
            if self._is_known_dead(state, rank) or (
                impatient and self._is_cut(state, rank) and not (head.dead | head.left) & bit
            ):
                yield f"head knows {rank} dead", self._knows_dead(state, rank)
        if cut and cut.other != HEAD and self.mistake != "nobody is fenced":
            ends = 1 << cut.one | 1 << cut.other
            parted = (head.live & ~head.fenced & ~head.left & ends) == ends
            # ranks that have left need no connection
            if parted and not any(
                state.ranks[end].at in (DONE, REFUSED) for end in (cut.one, cut.other)
            ):
                both = self.mistake == "both ends of a cut are fenced"
                # a rank that has come back, else the last
                last = max((state.ranks[end].life, end) for end in (cut.one, cut.other))[1]
                found = head._replace(fenced=head.fenced | (ends if both else 1 << last))
                yield f"head fences {last}", self._advanced(state, found)

    def _is_cut(self, state: State, rank: int) -> bool:
        """Whether the link of a rank to the head is cut."""
        return state.cut is not None and state.cut.other == HEAD and state.cut.one == rank

    def _advanced(self, state: State, head: Head) -> State:
        """The head begins the next epoch, if it can."""
        waits = head.fenced & ~head.dead
        if self.mistake == "the head does not wait for a fenced rank":
            waits = 0
        staying = head.live & ~head.fenced & ~head.left
        if self.mistake == "the next epoch begins without some":
            staying &= head.wanting
        if not head.wanting or waits or staying & ~head.wanting:
            return state._replace(head=head)
        wishes = {this.admit for rank, this in enumerate(state.ranks) if staying >> rank & 1}
        newcomers = 0
        if NO not in wishes and ASKS in wishes:
            newcomers = head.waiting & ~staying
        # forget what can make no difference any more: of ranks that have died, and of their links
        ranks = tuple(
            Rank(DEAD, life=this.life) if this.at == DEAD and not staying >> rank & 1 else this
            for rank, this in enumerate(state.ranks)
        )
        shards = tuple(
            Shard(shard.host, state=MISSING)
            if ranks[shard.host].at == DEAD and not staying >> shard.host & 1
            else shard
            for shard in state.shards
        )
        cut = state.cut
        if cut:  # no call of an earlier epoch is under way
            cut = cut._replace(epoch=0, calls=(0, 0))
            ends = (end for end in (cut.one, cut.other) if end != HEAD)
            if not state.left[3] and any(ranks[end].at == DEAD for end in ends):
                cut = None
        head = Head(head.epoch + 1, staying | newcomers, waiting=head.waiting & ~newcomers)
        return state._replace(ranks=ranks, shards=shards, cut=cut, head=head)

    # Promises.

    def wrong(self, state: State) -> str:
        """The promise that a state breaks, in words, or ""."""
        if state.wrong:
            return state.wrong
        living = [
            (rank, this)
            for rank, this in enumerate(state.ranks)
            if this.at not in (DEAD, DONE, REFUSED, ENTER)
        ]
        for rank, this in living:
            if this.epoch < state.head.epoch and not state.head.live >> rank & 1:
                return f"rank {rank} of epoch {this.epoch} lives beside epoch {state.head.epoch}"
        # ranks in the calls of a step of the newest epoch have recovered
        stepping = [
            (rank, this)
            for rank, this in living
            if this.at in (FIRST, SECOND, AGREE, FINISH) and this.epoch == state.history
        ]
        for rank, this in stepping:
            for number, shard in enumerate(state.shards):
                if shard.host == rank and shard.state != MISSING:
                    if shard.rows - shard.rows_log != this.committed:
                        return f"rows of shard {number} are not those of commit {this.committed}"
                    if shard.parity - shard.parity_log != this.committed:
                        return f"parity of shard {number} is not that of commit {this.committed}"
            if this.at in (SECOND, AGREE):  # all members have taken over
                for number, shard in enumerate(state.shards):
                    if not this.members >> shard.host & 1:
                        return f"shard {number} has no host among the members"
            if this.dense >= 0 and this.dense - this.dense_log != this.committed:
                return f"the dense replica of rank {rank} is not that of commit {this.committed}"
        lost = sum((this.at == DEAD) + this.life for this in state.ranks)
        cut_off = lost - (self.deaths - state.left[0])
        again = self.returns - state.left[3]
        if state.cut:
            ends = (end for end in (state.cut.one, state.cut.other) if end != HEAD)
            again = sum(state.ranks[end].life for end in ends)
        if cut_off > (self.cuts - state.left[1]) * (1 + again):
            return "a cut costs more than one rank, and one for each return of an end"
        commits = {this.committed for _, this in stepping}
        if commits and max(commits) - min(commits) > 1:
            return f"ranks of an epoch stand at commits {sorted(commits)}"
        for rank, this in enumerate(state.ranks):
            if this.at == REFUSED and self._refused_too_early(state):
                return f"rank {rank} refuses to go on, though enough is left"
            if this.at == DONE and this.committed != self.steps_to_train:
                return f"rank {rank} is done at commit {this.committed}"
        return ""

    def wrong_step(self, before: State, after: State) -> str:
        """The promise that a step breaks, in words, or ""."""
        for rank, (was, this) in enumerate(zip(before.ranks, after.ranks, strict=True)):
            if this.at != DEAD and not this.new and this.committed < was.committed:
                return f"rank {rank} takes commit {was.committed} back"
        return ""

    def ended(self, state: State) -> bool:
        """Whether a state without a next state is a proper end."""
        return all(this.at in (*ENDED, ENTER) for this in state.ranks)

    def _refused_too_early(self, state: State) -> bool:
        """A refusal needs more ends of ranks than are survived, or a job that is done."""
        gone = sum(this.at in (DEAD, ENTER) or this.new for this in state.ranks)
        return gone <= self.survives and not any(this.at == DONE for this in state.ranks)

    @staticmethod
    def _with(state: State, rank: int, **changes: object) -> State:
        ranks = list(state.ranks)
        ranks[rank] = ranks[rank]._replace(**changes)
        return state._replace(ranks=tuple(ranks))


def _less(left: tuple[int, ...], place: int) -> Any:
    """The faults left after one of a kind."""
    return tuple(count - (each == place) for each, count in enumerate(left))
