"""links: messages outlive connections, greetings are proved, both backends write the same bytes."""

from __future__ import annotations

import ctypes
import hashlib
import hmac
from random import Random
from typing import Any

import pytest
import torch

from ecrm.kernels import native
from ecrm.kernels.links import UP, Identity, Settings, Step, reference
from ecrm.kernels.links.reference import FRAME
from support.link_network import KINDS, RUN, SECRET, LinkNetwork, received


@pytest.fixture(params=sorted(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("size", [0, 1, 55, 56, 63, 64, 65, 119, 1000])
@pytest.mark.parametrize("secret", [b"", b"key", bytes(range(64)), bytes(range(200))])
def test_hmac_is_the_one_of_python(size: int, secret: bytes) -> None:
    text = Random(size).randbytes(size)
    out = torch.empty(32, dtype=torch.uint8)
    native.library().ecrm_hmac(secret, len(secret), text, size, out.data_ptr())
    assert bytes(out.tolist()) == hmac.new(secret, text, hashlib.sha256).digest()


def send_all(network: LinkNetwork, sizes: list[int]) -> list[list[bytes]]:
    """Give both ends messages of these sizes; return the messages by sender."""
    messages = []
    for rank, end in enumerate(network.ends):
        messages.append([Random(17 * n + rank).randbytes(size) for n, size in enumerate(sizes)])
        for message in messages[-1]:
            assert end.send(message)
    return messages


def arrive(network: LinkNetwork, messages: list[list[bytes]], seconds: float = 60.0) -> None:
    """Wait for all messages; assert that each has come once, in order."""
    came: list[list[bytes]] = [[], []]

    def all_came() -> bool:
        for rank, end in enumerate(network.ends):
            came[1 - rank] += received(end)
        return all(len(have) >= len(want) for have, want in zip(came, messages))

    network.run(all_came, seconds)
    assert came == messages
    network.run(lambda: all(end.acked == end.sent for end in network.ends), seconds)
    assert [end.kept_bytes for end in network.ends] == [0, 0]
    assert [received(end) for end in network.ends] == [[], []]


SIZES = [0, 5, 1, 300, 0, 70_000, 17, 20_000]


def test_messages_arrive_once_and_in_order(kind: str) -> None:
    network = LinkNetwork(kind)
    arrive(network, send_all(network, SIZES))
    assert [end.losses for end in network.ends] == [0, 0]
    assert network.connections == 1


def test_messages_arrive_although_the_connection_is_reset_at_any_byte(kind: str) -> None:
    """The first connection is reset after n bytes, for every n; `reached` counts the resets."""
    reached = 0
    for n in range(1, 600):
        network = LinkNetwork(kind, chunk=lambda: 37)
        network.reset_at = lambda connection: n if connection == 1 else None
        arrive(network, send_all(network, [3, 0, 40]))
        reached += network.connections > 1
    assert reached == 599


@pytest.mark.parametrize("seed", range(5))
def test_the_reference_writes_the_same_bytes_as_the_cpu(seed: int) -> None:
    """Random sizes, chunks, delays and resets."""

    def trace(kind: str) -> tuple[list[tuple[int, bytes]], int]:
        draw = Random(seed)
        network = LinkNetwork(
            kind, delay=lambda end: draw.random() / 100, chunk=lambda: draw.randrange(1, 30_000)
        )
        limits = [draw.randrange(1, 200_000) for _ in range(20)]
        network.reset_at = lambda n: limits[n - 1] if n <= len(limits) else None
        arrive(network, send_all(network, [draw.randrange(80_000) for _ in range(30)]))
        return network.trace, sum(end.losses for end in network.ends)

    expected, losses = trace("reference")
    assert trace("cpu") == (expected, losses)
    assert losses > 5


def test_a_long_message_goes_on_from_the_bytes_that_have_come(kind: str) -> None:
    network = LinkNetwork(kind, chunk=lambda: 10_000)
    network.reset_at = lambda connection: 100_000
    messages = [[Random(1).randbytes(1_000_000)], []]
    assert network.ends[0].send(messages[0][0])
    arrive(network, messages)
    assert network.connections > 9
    assert network.carried < 1_050_000


def test_an_idle_link_stays_up(kind: str) -> None:
    network = LinkNetwork(kind, delay=lambda end: 0.05)
    network.pass_time(60.0)
    assert network.up() and [end.losses for end in network.ends] == [0, 0]


def test_a_slow_link_stays_up(kind: str) -> None:
    """A hundredth of a second for each 100 bytes: the message takes 10 s."""
    network = LinkNetwork(kind, chunk=lambda: 100)
    network.run(network.up)
    clock = [network.now]

    def delay(end: int) -> float:
        if end == 1:
            return 0.0
        clock[0] = max(clock[0], network.now) + 0.01
        return clock[0] - network.now

    network.delay = delay
    messages = [[Random(1).randbytes(100_000)], []]
    assert network.ends[0].send(messages[0][0])
    arrive(network, messages)
    assert [end.losses for end in network.ends] == [0, 0]
    assert network.now > 9


@pytest.mark.parametrize("cut", [{0}, {1}, {0, 1}])
def test_a_cut_takes_both_ends_down_and_is_over_when_it_is_mended(kind: str, cut: set[int]) -> None:
    network = LinkNetwork(kind, delay=lambda end: 0.001)
    network.run(network.up)
    network.pass_time(0.01)
    network.cut = cut
    messages = send_all(network, [100, 2000])
    network.pass_time(2.5)
    assert all(end.state != UP for end in network.ends)
    assert all(1.4 < end.down(network.now) < 2.6 for end in network.ends)
    network.cut = set()
    mended = network.now
    arrive(network, messages)
    assert network.now - mended < 1.2
    assert all(end.down(network.now) == 0 for end in network.ends)


def test_the_time_without_a_connection_counts_from_the_last_byte(kind: str) -> None:
    """Not from the end of the connection, which comes a silence later."""
    end = accepting(kind)
    assert end.came(5.0, FRAME.pack(2, 0, 0, 0, 0)) and end.down(5.5) == 0
    end.broke(6.0)
    assert end.down(6.5) == 1.5


def test_connections_that_carry_no_frame_count_as_none(kind: str) -> None:
    """As behind a router that loses long frames: each greeting passes, and no message does."""
    network = LinkNetwork(kind, delay=lambda end: 0.001)
    network.run(network.up)
    network.pass_time(1.0)
    assert [end.down(network.now) for end in network.ends] == [0, 0]
    network.longest = 1000
    assert network.ends[0].send(bytes(2000))
    began = network.now
    network.pass_time(5.0)
    assert network.connections > 3, "connections are made again and again"
    assert network.ends[1].down(network.now) > 3.5
    network.longest = None
    network.run(lambda: network.ends[0].acked == 1, 3.0)
    assert network.now - began < 8 and network.ends[1].down(network.now) == 0


def test_a_lost_connection_request_is_soon_repeated_and_a_slow_network_has_its_time(
    kind: str,
) -> None:
    network = LinkNetwork(kind, Settings(greet=0.8), delay=lambda end: 0.0)
    network.cut = {0, 1}
    network.pass_time(0.1)
    network.cut, began = set(), network.now
    network.run(network.up)
    assert network.now - began < 0.2, "a quarter of 0.8 s for a first try"
    slow = LinkNetwork(kind, Settings(greet=0.8), delay=lambda end: 0.15)
    slow.run(slow.up)  # a round trip of 0.3 s, and the proof
    assert slow.connections == 2, "0.2 s were too short, 0.4 s not"
    slow.reset()
    slow.run(slow.up)
    assert slow.connections == 3


def test_memory_of_messages_without_acknowledgement_is_bounded(kind: str) -> None:
    network = LinkNetwork(kind, Settings(window=10_000))
    first = network.ends[0]
    assert first.send(bytes(50_000)) == 1  # a longer message than the window, alone
    assert first.send(b"x") == 0
    network.run(lambda: first.acked == 1)
    sent = 0
    while first.send(bytes(36)):
        sent += 1
    assert sent == 100 and first.kept_bytes == 10_000
    network.run(lambda: first.kept_bytes == 0)
    assert first.send(bytes(36)) == 102


def test_a_lent_message_is_sent_from_where_it_lies(kind: str) -> None:
    network = LinkNetwork(kind, Settings(window=10_000), chunk=lambda: 10_000)
    network.reset_at = lambda connection: 30_000 if connection == 1 else None
    first, memory = network.ends[0], ctypes.create_string_buffer(50_000)
    assert first.lend(memory) == 1 and first.lent and first.kept_bytes == 0
    assert first.send(b"copied") == 2
    memory[0:3] = b"new"
    network.run(lambda: not first.lent)
    assert received(network.ends[1])[0] == memory.raw and network.connections == 2


def test_no_acknowledgement_is_told_of_a_message_that_is_being_written(kind: str) -> None:
    """The peer has the message from the connection before: it may not go while it is written."""
    end = KINDS[kind].Link(Identity(RUN, SECRET, 1), 0, Settings())
    end.begin_epoch(0.0, 1)
    end.send(bytes(1000))
    assert end.adopt(0.0, 1, 0)
    assert len(end.gather(100)) == 100
    end.wrote(0.0, 100)
    assert end.came(0.0, FRAME.pack(2, 0, 0, 0, 1))
    assert end.acked == 0 and end.kept_bytes > 0
    end.wrote(0.0, len(end.gather(10_000)))
    assert end.acked == 1 and end.kept_bytes == 0


def accepting(kind: str) -> Any:
    """An end with a connection, that has sent its first frame."""
    end = KINDS[kind].Link(Identity(RUN, SECRET, 1), 0, Settings())
    end.begin_epoch(0.0, 1)
    assert end.adopt(0.0, 1, 0)
    assert end.gather(100) == FRAME.pack(2, 0, 0, 0, 0)
    end.wrote(0.0, FRAME.size)
    return end


def test_the_rest_of_a_message_that_has_come_is_skipped(kind: str) -> None:
    """The sender goes on from a byte that was told before the message was complete."""
    end = accepting(kind)
    assert end.came(0.0, FRAME.pack(1, 1, 10, 0, 0) + b"0123456789")
    again = FRAME.pack(1, 1, 10, 4, 0) + b"456789" + FRAME.pack(1, 1, 10, 10, 0)
    assert end.came(0.0, again + FRAME.pack(1, 2, 3, 0, 0) + b"new")
    assert received(end) == [b"0123456789", b"new"]


def test_bytes_that_come_twice_count_once(kind: str) -> None:
    end = accepting(kind)
    assert end.came(0.0, FRAME.pack(1, 1, 10, 0, 0) + b"012345")
    assert end.adopt(0.0, 1, 0)
    assert end.partial == 6
    assert end.came(0.0, FRAME.pack(1, 1, 10, 3, 0) + b"345")
    assert received(end) == [] and end.partial == 6
    assert end.came(0.0, b"6789")
    assert received(end) == [b"0123456789"]


def test_an_acknowledgement_that_is_asked_for_is_said_once(kind: str) -> None:
    """A short message alone is acknowledged by the next beat; a rank that leaves asks before."""
    end = accepting(kind)
    end.acknowledge_all()
    assert end.gather(100) == b""  # nothing has come
    assert end.came(0.0, FRAME.pack(1, 1, 3, 0, 0) + b"new")
    assert end.gather(100) == b""
    end.acknowledge_all()
    assert end.gather(100) == FRAME.pack(2, 0, 0, 0, 1)
    end.wrote(0.0, FRAME.size)
    end.acknowledge_all()
    assert end.gather(100) == b""


def test_a_connection_without_bytes_is_given_up_also_long_after_its_time(kind: str) -> None:
    end = accepting(kind)
    silence = Settings().silence
    assert end.tick(0.99 * silence)
    assert not end.tick(silence) and not end.tick(1.5 * silence)


def test_messages_that_have_to_be_written_again_are_counted(kind: str) -> None:
    end = accepting(kind)
    for message in (b"first", b"second", b"third"):
        end.send(message)
    end.wrote(0.0, len(end.gather(FRAME.size + 5)))
    end.wrote(0.0, len(end.gather(FRAME.size + 6)))
    assert (end.losses, end.resent) == (0, 0)
    end.broke(0.0)
    assert (end.losses, end.resent) == (1, 2)


def test_a_peer_that_forgets_what_it_has_acknowledged_is_refused(kind: str) -> None:
    end = accepting(kind)
    end.send(b"mine")
    end.wrote(0.0, len(end.gather(1000)))
    assert end.came(0.0, FRAME.pack(2, 0, 0, 0, 1)) and end.acked == 1
    assert not end.adopt(0.0, 1, 0)


BAD_FRAMES = {
    "a kind that there is not": (3, 0, 0, 0, 0),
    "an acknowledgement of more than was sent": (2, 0, 0, 0, 2),
    "an acknowledgement with bytes": (2, 0, 1, 0, 0),
    "a number too large": (1, 2, 1, 0, 0),
    "the number 0": (1, 0, 1, 0, 0),
    "a beginning that never came": (1, 1, 10, 5, 0),
    "an offset beyond the end": (1, 1, 10, 11, 0),
    "a size that nobody sends": (1, 1, 1 << 41, 0, 0),
}


@pytest.mark.parametrize("frame", BAD_FRAMES.values(), ids=BAD_FRAMES)
def test_a_frame_that_contradicts_the_link_closes_the_connection(
    kind: str, frame: tuple[int, ...]
) -> None:
    end = KINDS[kind].Link(Identity(RUN, SECRET, 1), 0, Settings())
    end.begin_epoch(0.0, 1)
    end.send(b"mine")
    assert end.adopt(0.0, 1, 0)
    assert end.came(0.0, FRAME.pack(2, 0, 0, 0, 0))
    assert not end.came(0.0, FRAME.pack(*frame))
    assert end.take() is None


@pytest.mark.parametrize("expected, partial", [(0, 0), (3, 0), (1, 5), (2, 1)])
def test_a_greeting_that_contradicts_the_link_is_refused(
    kind: str, expected: int, partial: int
) -> None:
    """One message of 4 bytes was sent: nobody can expect the third, or have 5 bytes of it."""
    end = KINDS[kind].Link(Identity(RUN, SECRET, 1), 0, Settings())
    end.begin_epoch(0.0, 1)
    end.send(b"mine")
    assert not end.adopt(0.0, expected, partial)


def greeting(kind: str, me: Identity, peer: int, epoch: int = 1) -> bytes:
    """The first bytes of a dialling rank."""
    end = KINDS[kind].Link(me, peer, Settings())
    end.begin_epoch(0.0, epoch)
    end.dialling(0.0)
    end.dialled(0.0, bytes(16))
    return end.gather(1000)


def test_a_stranger_is_refused_whatever_it_says(kind: str) -> None:
    me = Identity(RUN, SECRET, 1)
    right = greeting(kind, Identity(RUN, SECRET, 0), 1)
    reception = KINDS[kind].Reception(me)
    assert reception.wanted == len(right) and reception.came(right[:50]) == Step.MORE
    assert reception.came(right[50:]) == Step.ASKS
    wrong = [
        greeting(kind, Identity(b"another run ....", SECRET, 0), 1),
        greeting(kind, Identity(RUN, SECRET, 0), 2),  # for another rank
        greeting(kind, Identity(RUN, SECRET, 2), 3)[:28] + (1).to_bytes(4, "little") + right[32:],
        Random(1).randbytes(len(right)),
    ]
    for bad in wrong:
        assert KINDS[kind].Reception(me).came(bad) == Step.REFUSED
    # every byte of the greeting counts, once the proof has come
    for secret, flipped in ((b"wrong", None), *((SECRET, byte) for byte in range(len(right)))):
        said = bytearray(right)
        if flipped is not None:
            said[flipped] ^= 1
        reception = KINDS[kind].Reception(me)
        if reception.came(bytes(said)) == Step.ASKS:
            answer = reception.answer(1, 1, 0, bytes(16))
            proof = reference.proof(secret, b"d", right, answer[:-32])
            assert reception.came(proof) == Step.REFUSED
    reception = KINDS[kind].Reception(me)
    assert reception.came(right) == Step.ASKS
    answer = reception.answer(1, 1, 0, bytes(16))
    assert reception.came(reference.proof(SECRET, b"d", right, answer[:-32])) == Step.PROVED


def test_a_greeting_that_is_replayed_has_no_effect(kind: str) -> None:
    network = LinkNetwork(kind)
    network.run(network.up)
    said = b"".join(data for end, data in network.trace if end == 0)
    first, proof = said[:72], said[72:104]
    reception = network.kind.Reception(Identity(RUN, SECRET, 1))
    assert reception.came(first) == Step.ASKS
    reception.answer(1, 1, 0, b"another nonce ..")
    assert reception.came(proof) == Step.REFUSED
    again = network.kind.Reception(Identity(RUN, SECRET, 1))
    assert again.came(first) == Step.ASKS
    again.answer(1, 1, 0, (1001).to_bytes(16, "big"))
    assert again.came(proof) == Step.PROVED  # the same nonce twice: the nonce is all that protects


@pytest.mark.parametrize("byte", [0, 8, 24, 28, 32, 40, 48, 56, 72, 103])
def test_a_dialling_rank_refuses_an_answer_with_any_other_byte(kind: str, byte: int) -> None:
    me, peer = Identity(RUN, SECRET, 0), Identity(RUN, SECRET, 1)
    for flip in (0, 1):
        end = KINDS[kind].Link(me, 1, Settings())
        end.begin_epoch(0.0, 1)
        end.dialling(0.0)
        end.dialled(0.0, bytes(16))
        reception = KINDS[kind].Reception(peer)
        reception.came(end.gather(1000))
        answer = bytearray(reception.answer(1, 1, 0, bytes(16)))
        answer[byte] ^= flip
        end.wrote(0.0, 72)
        assert end.came(0.0, bytes(answer)) == (flip == 0)
        assert (end.state == UP) == (flip == 0)


@pytest.mark.parametrize("byte", [0, 8, 24, 28, 32])
def test_a_dialling_rank_refuses_another_run_rank_or_epoch_with_a_right_proof(
    kind: str, byte: int
) -> None:
    for flip in (0, 1):
        end = KINDS[kind].Link(Identity(RUN, SECRET, 0), 1, Settings())
        end.begin_epoch(0.0, 1)
        end.dialling(0.0)
        end.dialled(0.0, bytes(16))
        mine = end.gather(1000)
        end.wrote(0.0, len(mine))
        reception = KINDS[kind].Reception(Identity(RUN, SECRET, 1))
        reception.came(mine)
        theirs = bytearray(reception.answer(1, 1, 0, bytes(16))[:-32])
        theirs[byte] ^= flip
        answer = bytes(theirs) + reference.proof(SECRET, b"a", mine, bytes(theirs))
        assert end.came(0.0, answer) == (flip == 0)


def test_a_new_epoch_drops_everything_and_refuses_the_old_one(kind: str) -> None:
    network = LinkNetwork(kind)
    network.run(network.up)
    send_all(network, [10, 20])
    network.begin_epoch(0, 2)
    network.pass_time(1.0)
    assert [end.state == UP for end in network.ends] == [False, False]
    assert received(network.ends[0]) == [] and network.ends[0].sent == 0
    network.begin_epoch(1, 2)
    arrive(network, send_all(network, [7]))
    assert [end.expected for end in network.ends] == [2, 2]


def through_an_epoch(kind: str, seed: int, resets: bool) -> tuple[LinkNetwork, list[bool]]:
    """Both ends send in epoch 1, begin epoch 2 at different times, and send what must arrive."""
    draw = Random(seed)
    network = LinkNetwork(
        kind, delay=lambda end: draw.random() / 100, chunk=lambda: draw.randrange(1, 9_000)
    )
    limits = [draw.randrange(1, 40_000) for _ in range(4 if resets else 0)]
    network.reset_at = lambda n: limits[n - 1] if n <= len(limits) else None
    network.run(network.up)
    send_all(network, [draw.randrange(20_000) for _ in range(3)])
    network.turns(draw.randrange(10))
    first = draw.randrange(2)
    stayed = [network.begin_epoch(first, 2, keeps=True)]
    early = [draw.randbytes(draw.randrange(20_000)) for _ in range(2)]
    for message in early:
        network.ends[first].send(message)
    network.pass_time(draw.random() / 20)
    network.turns(draw.randrange(3))
    stayed.append(network.begin_epoch(1 - first, 2, keeps=True))
    late = [draw.randbytes(draw.randrange(20_000)) for _ in range(2)]
    for message in late:
        network.ends[1 - first].send(message)
    came: list[list[bytes]] = [[], []]

    def arrived() -> bool:
        for end in (0, 1):
            came[end] += received(network.ends[end])
        return len(came[first]) >= 2 and len(came[1 - first]) >= 2

    network.run(arrived)
    network.run(lambda: all(end.acked == end.sent == 2 for end in network.ends))
    assert (came[1 - first], came[first]) == (early, late)
    return network, stayed


def test_messages_of_an_epoch_arrive_whenever_its_ends_begin_the_epoch(kind: str) -> None:
    """Over the connection that is there, unless a message was half written."""
    one = 0
    for seed in range(40):
        network, stayed = through_an_epoch(kind, seed, resets=False)
        # an end that begins anew closes the connection of the other end as well
        assert (network.connections == 1) == all(stayed), seed
        one += all(stayed)
    assert 10 < one < 40, "both outcomes were there"


def test_messages_of_an_epoch_arrive_although_connections_are_reset_meanwhile(kind: str) -> None:
    resets = 0
    for seed in range(40):
        resets += through_an_epoch(kind, seed, resets=True)[0].connections > 1
    assert resets > 25


@pytest.mark.parametrize("seed", range(10))
def test_the_reference_writes_the_same_bytes_as_the_cpu_through_an_epoch(seed: int) -> None:
    of_reference, of_cpu = (
        through_an_epoch(kind, seed, resets=seed % 2 == 0) for kind in ("reference", "cpu")
    )
    assert of_cpu[0].trace == of_reference[0].trace and of_cpu[1] == of_reference[1]


def test_an_epoch_cannot_begin_again_over_a_connection(kind: str) -> None:
    network = LinkNetwork(kind)
    network.run(network.up)
    end = network.ends[1]
    assert end.came(0.0, reference.FRAME.pack(reference.EPOCH, 5, 0, 0, 0))
    assert not end.came(0.0, reference.FRAME.pack(reference.EPOCH, 5, 0, 0, 0))
    other = LinkNetwork(kind)
    other.run(other.up)
    assert not other.ends[1].came(0.0, reference.FRAME.pack(reference.EPOCH, 5, 1, 0, 0))


def test_a_link_without_a_connection_has_none_to_keep(kind: str) -> None:
    network = LinkNetwork(kind)
    assert not network.ends[0].begin_epoch(0.0, 2, True)


def test_a_rank_that_gets_no_answer_dials_again_with_growing_pauses(kind: str) -> None:
    network = LinkNetwork(kind)
    end = network.ends[0]
    pauses = []
    for _ in range(7):
        end.dialling(network.now)
        end.broke(network.now)
        assert not end.wants_dial(network.now)
        pauses.append(round(end.next() - network.now, 4))
        network.now = end.next()
        assert end.wants_dial(network.now)
    assert pauses == [0.002, 0.004, 0.008, 0.016, 0.032, 0.05, 0.05]


def test_a_run_has_sixteen_bytes() -> None:
    with pytest.raises(ValueError, match="run has 3 bytes, needed: 16"):
        Identity(b"run", SECRET, 0)
