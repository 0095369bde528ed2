"""What every transport must do, for seven ranks; as a script it runs on MPI, or on links.

    mpirun --with-ft ulfm --oversubscribe -n 7 python transport_contract.py RESULT_FOLDER poll|sleep

`support.link_ranks` starts it on links, without mpirun. The last word is what a rank that waits
does. Ranks 1 to 5 die on the way, ranks 0 and 6 see the end. A rank at which something is wrong
raises; as a process it then kills itself and leaves no result.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ecrm.base.allocate import ReusableBuffer
from ecrm.run.gather import gather_results
from ecrm.transport.base import PeerFailure, Transport
from ecrm.transport.message import Part, Picked, Received, gathered, matrix
from ecrm.transport.mpi import CLOSE_SECONDS
from support.link_ranks import figures_of, transport_here

WORLD_SIZE = 7
SURVIVORS = (0, 6)
LARGE_BYTES = 64 << 20
SECONDS = 150

Die = Callable[[float], None]


def contract(transport: Transport, die: Die, large_bytes: int = LARGE_BYTES) -> dict[str, object]:
    """Run all of it. `die(seconds)` kills this rank, 0 at once, else while it goes on working."""
    assert transport.live == tuple(range(WORLD_SIZE))
    assert 0 <= transport.rank < WORLD_SIZE
    exchanges_any_tensors(transport)
    counts_what_others_are_given(transport)
    hands_out_own_memory(transport)
    refuses_strangers_and_bad_tensors(transport)
    shares(transport)
    agrees(transport)
    carries_large_messages(transport, large_bytes)
    lent, _lending = lends(transport)
    told = [interrupts_everybody_when_one_rank_shrinks(transport)]
    for doomed, seconds in (((1,), 0.0), ((2, 4), 0.0), ((5,), 0.005)):
        told.append(
            survives(
                transport, doomed, die, seconds, dies_in_recovery=3 if doomed == (5,) else None
            )
        )
    assert transport.live == SURVIVORS
    exchanges_any_tensors(transport)
    shares(transport)
    agrees(transport)
    assert all((numbers == sender + 100).all() for sender, numbers in lent.items()), (
        "what the dead have lent is gone"
    )
    return {"live": list(transport.live), "failures_seen": told}


def exchanges_any_tensors(transport: Transport) -> None:
    me, live = transport.rank, transport.live
    for turn in range(3):
        received = transport.exchange({to: letter(me, to, turn) for to in live if writes(me, to)})
        assert list(received) == [sender for sender in live if writes(sender, me)]
        for sender, tensors in received.items():
            check_equal(tensors, letter(sender, me, turn))
    greetings = transport.exchange({to: [(me, to), torch.tensor([to]), ()] for to in live})
    said = {
        sender: [head, tensor.tolist(), empty]
        for sender, (head, tensor, empty) in greetings.items()
    }
    assert said == {sender: [(sender, me), [me], ()] for sender in live}
    assert transport.exchange({}) == {}
    only_mine = transport.exchange({live[0]: [], me: [torch.tensor([me])]})
    assert list(only_mine) == [me] and only_mine[me][0].tolist() == [me]


def counts_what_others_are_given(transport: Transport) -> None:
    me, live, before = transport.rank, transport.live, transport.sent_bytes
    transport.exchange({rank: [torch.zeros(10, dtype=torch.uint8)] for rank in live})
    # count, dtype, length, and the bytes padded
    assert transport.sent_bytes - before == (len(live) - 1) * (3 * 8 + 16)
    transport.share([torch.zeros(me, dtype=torch.int64)])
    assert transport.sent_bytes - before == (len(live) - 1) * (3 * 8 + 16 + 3 * 8 + 8 * me)
    before = transport.sent_bytes
    transport.agree(True)
    transport.exchange({me: [torch.zeros(10)]})
    assert transport.sent_bytes == before


def writes(sender: int, to: int) -> bool:
    """Some pairs do not write; the last rank writes to itself alone; everybody writes to itself."""
    return sender == to or (sender != WORLD_SIZE - 1 and (sender + 2 * to) % 5 != 0)


def letter(sender: int, to: int, turn: int) -> list[torch.Tensor]:
    """Tensors of many dtypes, shapes and odd sizes.

    Some are longer than a packet, and one message in four is empty.
    """
    if (sender + to) % 4 == 3:
        return [torch.empty(0, 5)]
    generator = torch.Generator().manual_seed(1000 * turn + 10 * sender + to)
    length = int(torch.randint(0, 3000, (), generator=generator))
    numbers = torch.randn(length, 3, generator=generator)
    return [
        numbers,
        torch.empty(0, dtype=torch.int64),
        torch.tensor(float("nan")),
        torch.arange(sender + 1, dtype=torch.uint8),
        (numbers > 0)[:, 0].contiguous(),
        numbers.to(torch.bfloat16),
        numbers.to(torch.float16)[: length // 2],
        numbers.double(),
        torch.arange(length, dtype=torch.int16),
        torch.view_as_complex(numbers[:, :2].double().contiguous()),
        torch.randint(-(2**62), 2**62, (7,), generator=generator).requires_grad_(False),
        numbers.clone().requires_grad_(True),
    ]


def parcel(sender: int, to: int) -> tuple[list[Part], list[Received]]:
    """A message with heads and large tensors of every way to travel, and what should arrive.

    There are more large tensors than travel apart, slices at any byte, a length that is no multiple
    of 8, picked rows, a parameter, and small tensors between them.
    """
    large = torch.randint(
        0,
        256,
        (600_000,),
        dtype=torch.uint8,
        generator=torch.Generator().manual_seed(10 * sender + to),
    )
    picked = Picked(large.view(-1, 100), torch.arange(0, 6000, 3))
    sent = [
        (sender, to),
        large[4 : 4 + 131_076],
        large[7:200_007],
        torch.arange(200),
        picked,
        large.float().requires_grad_(True),
        large[:131_075],
        torch.arange(1000),
        (),
        *(large[step : step + 150_000] for step in range(4)),
        torch.tensor(1.5),
        (to,),
    ]
    return sent, [part.gathered().flatten() if isinstance(part, Picked) else part for part in sent]


def check_equal(received: list[Received], sent: list[Received]) -> None:
    for here, there in zip(received, sent, strict=True):
        if isinstance(there, tuple):
            assert here == there
            continue
        assert here.dtype == there.dtype
        assert here.shape == (there.numel(),) and not here.requires_grad
        assert bits(here) == bits(there.detach().reshape(-1))


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def hands_out_own_memory(transport: Transport) -> None:
    """What was received stays, whatever its sender, or this rank, does with anything afterwards."""
    me, live = transport.rank, transport.live
    mine = torch.full((20_000,), me)  # enough to be sent from where it lies
    by_exchange = transport.exchange({to: [mine, mine] for to in live})
    mine += 100
    by_share = transport.share([mine])
    mine += 100
    for sender in live:
        by_exchange[sender][1].zero_()  # two tensors from one call share no memory either
        by_share[sender][0] += 1
    transport.exchange({to: [torch.full((25_000,), -7)] for to in live})
    transport.share([torch.full((25_000,), -8)])
    for sender in live:
        assert (by_exchange[sender][0] == sender).all()
        assert (by_exchange[sender][1] == 0).all()
        assert (by_share[sender][0] == sender + 101).all()
    assert (mine == me + 200).all()


def refuses_strangers_and_bad_tensors(transport: Transport) -> None:
    """A refused call has not taken place: the next one is the same on all ranks."""
    for outgoing in (
        {WORLD_SIZE: [torch.ones(1)]},
        {-1: []},
        {transport.rank: [torch.ones(4, 4).t()]},
    ):
        try:
            transport.exchange(outgoing)
        except ValueError:
            continue
        raise AssertionError(f"accepted {outgoing}")


def shares(transport: Transport) -> None:
    me = transport.rank
    for words in (1, 40_000):
        received = transport.share([(me,), torch.full((words * (me + 1),), me, dtype=torch.int32)])
        assert list(received) == list(transport.live)
        for sender, (number, run) in received.items():
            assert number == (sender,)
            assert (
                run.dtype == torch.int32
                and len(run) == words * (sender + 1)
                and (run == sender).all()
            )
    first = transport.live[0]
    assert list(transport.share([torch.ones(1)] if me == first else [])) == [first]


def agrees(transport: Transport) -> None:
    assert transport.agree(True) is True
    assert transport.agree(transport.rank != transport.live[-1]) is False
    assert transport.agree(False) is False
    last = transport.rank == transport.live[-1]
    assert transport.agree_alike(True, 0) == (True, True)
    assert transport.agree_alike(True, 0b1010101010101) == (True, True)
    assert transport.agree_alike(not last, None) == (False, True)
    assert transport.agree_alike(True, 5 if last else None) == (True, True)
    several = len(transport.live) > 1
    assert transport.agree_alike(True, 5 if last else 4) == (True, not several)
    assert transport.agree_alike(True, 0 if last else 1 << 12) == (True, not several)
    assert transport.agree(True) is True


def carries_large_messages(transport: Transport, large_bytes: int) -> None:
    """Many kinds among all; one large tensor from each of two ranks to the other and to itself."""
    received = transport.exchange({to: parcel(transport.rank, to)[0] for to in transport.live})
    for sender, tensors in received.items():
        check_equal(tensors, parcel(sender, transport.rank)[1])
    if transport.rank < 2:
        mine = torch.arange(large_bytes // 8) * (transport.rank + 1)
        received = transport.exchange({0: [mine], 1: [mine, torch.ones(3)]})
        assert list(received) == [0, 1]
        for sender, tensors in received.items():
            assert torch.equal(tensors[0], torch.arange(large_bytes // 8) * (sender + 1))
    else:
        assert transport.exchange({}) == {}


def introduce(transport: Transport) -> list[int]:
    """Let ranks read each other's shared memory, as at the start of a run; returns the readers."""
    memory = transport.shared_memory
    if memory is None:
        return []
    offers = gather_results(transport, lambda: memory.offer("here"))
    del offers[transport.rank]
    accepted = gather_results(transport, lambda: memory.accept("here", offers))
    readers = sorted(rank for rank, read in accepted.items() if transport.rank in read)
    memory.share_with(readers)
    return readers


def lends(transport: Transport) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
    """Reads what others share and checks what this rank shares.

    Shared tensors lie in their owner's memory and show later changes. They stay for as long as this
    rank keeps them.
    """
    me, others = transport.rank, [rank for rank in transport.live if rank != transport.rank]
    # nobody in the simulation, where nobody needs to be
    assert introduce(transport) in ([], others)
    memory = transport.allocate_shared(400, 256, dtype=np.int32)
    assert memory.shape == (400, 256) and (memory == 0).all()
    memory += me
    before = transport.sent_bytes
    picked = Picked(memory, torch.tensor([me, 399]))
    received = transport.exchange(
        {rank: [(me,), memory[100:], torch.tensor([me]), picked] for rank in transport.live}
    )
    assert transport.sent_bytes - before >= len(others) * 302 * 1024
    for sender, (head, numbers, number, rows) in received.items():
        assert (
            head == (sender,)
            and number.tolist() == [sender]
            and (numbers == sender).all()
            and numbers.shape == (300 * 256,)
        )
        assert rows.source.shape == (400, 256) and rows.rows.tolist() == [sender, 399]
        assert (
            matrix(rows, 2)[0] is rows.source
            and (gathered(rows) == sender).all()
            and len(gathered(rows)) == 512
        )
    outgrows_a_room(transport)
    assert transport.agree(True)  # all have looked
    memory += 100
    assert transport.agree(True)
    assert list(received) == list(transport.live)
    lent = {sender: received[sender][1] for sender in others}
    assert all((numbers == sender + 100).all() for sender, numbers in lent.items())
    return lent, memory


def outgrows_a_room(transport: Transport) -> None:
    """The system takes back shared memory that was given up, and not what came in its place."""
    room = ReusableBuffer(64, transport.allocate_shared)
    for number, rows in enumerate((10, 3, 400, 400, 2000, 1000)):
        there = room.of(rows)
        assert there.shape == (rows, 64)
        there[:] = transport.rank + number
        received = transport.exchange(
            {rank: [Picked(there, torch.arange(rows))] for rank in transport.live}
        )
        assert list(received) == list(transport.live)
        for sender, (came,) in received.items():
            assert len(gathered(came)) == 64 * rows and (gathered(came) == sender + number).all()
        assert transport.agree(True)  # all have looked


def interrupts_everybody_when_one_rank_shrinks(transport: Transport) -> str:
    """Nobody has died; others wait in an exchange or agree, or do not know yet that one is over."""
    live = transport.live
    told = "began"
    if transport.rank == 0:
        assert transport.agree(True)
    else:
        try:
            transport.agree(True)
            transport.exchange({})
            transport.agree(True)
            raise AssertionError("went on although rank 0 shrinks")
        except PeerFailure:
            told = "told"
    transport.shrink()
    assert transport.live == live
    agrees(transport)
    return told


def survives(
    transport: Transport,
    doomed: tuple[int, ...],
    die: Die,
    seconds: float,
    dies_in_recovery: int | None,
) -> str:
    """Work until the death of `doomed` is noticed, recover, and be as many fewer."""
    before = transport.live
    payload = torch.full((200_000,), transport.rank, dtype=torch.int32)
    try:
        transport.agree(True)  # nobody dies before all know that the last recovery is over
        if transport.rank in doomed:
            die(seconds)
        while True:
            received = transport.exchange({to: [payload] for to in before})
            assert all((tensors[0] == sender).all() for sender, tensors in received.items())
            assert len(received) == len(before)
            assert all(
                (tensors[0] == sender).all()
                for sender, tensors in transport.share([payload[:9]]).items()
            )
            assert transport.agree(True)
    except PeerFailure:
        if transport.rank in doomed or transport.rank == dies_in_recovery:
            die(0.0)
    gone = {*doomed, dies_in_recovery}
    expected = tuple(rank for rank in before if rank not in gone)
    turns = 0
    while not (recover(transport) and transport.live == expected):
        turns += 1
        assert set(expected) <= set(transport.live), (transport.live, expected)
        assert turns < 100
    return "survived"


def recover(transport: Transport) -> bool:
    """Shrink, and check that all survivors have one `live`; False if somebody died meanwhile."""
    transport.shrink()
    try:
        for _turn in range(3):
            lives = transport.share([torch.tensor(transport.live)])
            assert list(lives) == list(transport.live)
            assert all(tuple(tensors[0].tolist()) == transport.live for tensors in lives.values())
        return transport.agree(True)
    except PeerFailure:
        return False


def leaves_one_by_one(transport: Transport) -> dict[str, object]:
    """The last rank leaves in bounded time; the other, which computes, finds out and goes on."""
    first, _last = transport.live
    if transport.rank == first:
        time.sleep(CLOSE_SECONDS + 1)
        try:
            transport.agree(True)
            raise AssertionError("agreed with a rank that has left")
        except PeerFailure:
            transport.shrink()
        assert transport.live == (first,) and transport.agree(True)
    started = time.monotonic()
    transport.close()
    return {"close_seconds": time.monotonic() - started}


def kill_this_process(seconds: float) -> None:
    if seconds:
        threading.Timer(seconds, kill_this_process, (0.0,)).start()
    else:
        os.kill(os.getpid(), signal.SIGKILL)


def waits(transport: Transport, sleeps: bool) -> float:
    """The share of half a second that this rank is busy while it waits for rank 0, which sleeps."""
    transport.sleeps = sleeps
    transport.share([])
    began, busy = time.monotonic(), time.process_time()
    if transport.rank == 0:
        time.sleep(0.5)
    transport.share([])
    return (time.process_time() - busy) / (time.monotonic() - began)


def main() -> None:
    signal.alarm(SECONDS)  # nobody is left behind whatever happens
    torch.set_num_threads(1)
    transport = transport_here()
    try:
        busy = {how: waits(transport, sleeps=how == "sleep") for how in ("poll", "sleep")}
        transport.sleeps = sys.argv[2] == "sleep"
        result = contract(transport, kill_this_process) | {"busy": busy}
        result |= figures_of(transport)
        result |= leaves_one_by_one(transport)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        kill_this_process(0.0)
    Path(sys.argv[1], f"{transport.rank}.json").write_text(json.dumps(result))
    os._exit(0)


if __name__ == "__main__":
    main()
