"""The transport over MPI with User-Level Failure Mitigation (ULFM).

The MPI is Open MPI 5 under `mpirun --with-ft ulfm`.

The promises of MPI and the measurements (Open MPI 5.0.11, one host) decide the shape of this file:

- After a death the survivors see many different error classes, not only `ERR_PROC_FAILED`: every
  `MPI.Exception` inside a call counts as "a rank died", and `shrink` finds the dead.
- MPI may report success for data that never came. A small `MPI_Allgatherv` did on 19 of 24
  survivors; `MPI_Waitall` without statuses did on a revoked communicator, and then aborted the job
  ("Send error after request freed") in 4 of 8 runs of 8 ranks. Data therefore travels by `Isend`
  and `Irecv` only, with a separate wait per request: none of 972 survivors of a kill got a false
  success, with every word checked, and none of 140 with a test per request (`sleeps`). A receive
  must still show the right length and, in its head, the right stamp.
- `MPI_Comm_agree` is uniform: all survivors get the same value and the same error. An agreement
  also works on a revoked communicator, so a revoke does NOT drive a rank out of an agreement.
- `MPI_Comm_shrink` begins with an agreement on the same communicator. MPI would match a rank in
  shrink with a rank still in agree, and both ranks would go on with an answer to the wrong
  question. Every agreement here therefore carries bits for the purpose of the rank, and ranks enter
  `MPI_Comm_shrink` only after an agreement in which all ranks want to shrink.
- `MPI_Comm_iagree` in place of `MPI_Comm_agree`, tested at intervals, with memory freed on
  completion, crashed 3 of 7 training ranks (tried once). Only `close` uses `MPI_Comm_iagree`, as
  the last call, and keeps the memory.
- `MPI_Finalize` after a failure hung in 4 of 24 runs, so the process never calls `MPI_Finalize`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ecrm.base.errors import UsageError
from ecrm.transport.base import PeerFailure, ReceiveMemory, Revoked, new_memory
from ecrm.transport.membership import Admit
from ecrm.transport.packed import (
    KIND_NAMES,
    MOST_APART,
    PackedTransport,
    bits_of,
    meaning_of,
)

# More bits of an agreement; the library combines the bits of all live ranks with AND.
WORKING = 2  # this rank asks on behalf of its program
SHRINKING = 4  # this rank has left the program's calls and wants to shrink
SHRUNK = 8  # this rank's MPI_Comm_shrink succeeded

# The head of a message: the length in words, the stamp (number and kind of the call), the bytes of
# every tensor travelling apart (0: no more tensors), then payload. The head is short enough to
# travel eagerly, header included, through Open MPI's shared memory (4,096 bytes).
HEAD_WORDS = 480
HEAD_FIELDS = 2 + MOST_APART
HEAD_PAYLOAD = HEAD_WORDS - HEAD_FIELDS
NOTHING = np.empty(0, np.uint8)

LAUNCH_LINE = "mpirun --with-ft ulfm --oversubscribe -n RANKS ..."
CLOSE_SECONDS = 2.0

FIRST_PAUSE, PAUSE_GROWS, LONGEST_PAUSE = 20e-6, 1.5, 300e-6
"""The pauses of a rank that `sleeps` between two looks for a message.

The first pause in seconds, the growth from pause to pause, and the longest pause. The system adds
some time, 50 microseconds by default.
"""
TESTS_OF_A_LOOK = 8
"""Tests of a request in a single look.

Open MPI reads news of deaths from mpirun at one of eight calls (opal_progress.c).
"""

NOTICES_EVERY_MICROSECONDS = 100
"""Time between two looks of a waiting rank for a death reported by mpirun.

A survivor without the news holds up all other ranks. Open MPI's own 10,000 (mpi_event_tick_rate)
made `shrink` of 7 idle ranks on 2 cores take 4.5 to 10.8 ms; 100 makes `shrink` take 0.6 to 1.5 ms.
"""


class MpiTransport(PackedTransport):
    """Calls among the ranks of MPI_COMM_WORLD, later among the survivors of each `shrink`.

    Raises UsageError if MPI cannot survive a death: an MPI without ULFM, or more than one rank
    started without `--with-ft ulfm` (mpi4py would then quietly turn Shrink into Dup and Agree into
    Allreduce). A single rank needs no mpirun.

    Not thread safe: a single thread makes all calls. A waiting call holds no GIL.
    """

    def __init__(self) -> None:
        self._mpi = _started()
        self._world = self._mpi.COMM_WORLD
        self.rank = self._world.Get_rank()
        self._interrupted: list[object] = []
        super().__init__(self._world.Get_size())
        self._adopt(self._world)

    def agree_alike(self, flag: bool, word: int | None) -> tuple[bool, bool]:
        """As in `Transport`; survivors all return the same or all see `PeerFailure`."""
        try:
            answer = self._communicator.Agree(WORKING | bits_of(flag, word))
        except self._mpi.Exception as error:
            raise self._peer_failure("agree", error) from error
        if not answer & WORKING:
            raise Revoked("agree: another rank is recovering from a failure or has left")
        return meaning_of(answer)

    def shrink(self, admit: Admit = Admit.NO) -> None:
        """As in `Transport`; measured 2 to 25 ms for 7 training ranks on 2 cores.

        Survivors end only together: the new communicator is used only after an agreement that all
        ranks have it. Waits for live ranks still computing, without a bound; a hanging rank must be
        killed from outside.
        """
        old = self._communicator
        self._quietly(old.Revoke)
        while True:
            self._agree_while_shrinking(SHRINKING)
            shrunk = self._quietly(old.Shrink)
            if (
                self._agree_while_shrinking(SHRINKING | (SHRUNK if shrunk is not None else 0))
                & SHRUNK
            ):
                break
        # At most one call per communicator is interrupted; MPI no longer reaches memory of the
        # communicator before the last.
        self._interrupted = self._interrupted[-2:]
        self._adopt(shrunk)

    def close(self) -> None:
        """Tell the other ranks that this rank leaves on purpose; wait up to 2 s for their leave.

        Best effort, and the last call before `os._exit(0)`: the program must not return from main
        with MPI_Finalize, which hung in 4 of 24 runs after a failure. All 40 runs of
        tests/support/programs/transport_drill.py with 3 or 4 kills ended cleanly by `os._exit(0)`.
        Without the wait, ranks still inside their last call can take the first exit for a failure.
        The agreement here is non-blocking, tested until complete or until the time is up: this rank
        never hangs on ranks still working. Ranks still working get `PeerFailure` from their own
        agreement when this agreement answers, or see this process gone, and recover without this
        rank.
        """
        deadline = time.monotonic() + CLOSE_SECONDS
        bits = np.zeros(1, np.int32)
        self._interrupted.append(bits)
        try:
            request = self._communicator.Iagree(bits)
            while not request.Test() and time.monotonic() < deadline:
                time.sleep(0.001)
        except self._mpi.Exception:
            pass

    def _adopt(self, communicator: Any) -> None:
        communicator.Set_errhandler(self._mpi.ERRORS_RETURN)
        self._communicator = communicator
        self._call_number = 0
        group = communicator.Get_group()
        self.live = tuple(group.Translate_ranks(range(group.Get_size()), self._world.Get_group()))
        self._shared_memory.keep(self.live)

    def _deliver(
        self, kind: int, packed: list[np.ndarray], apart: list[list[np.ndarray]]
    ) -> dict[int, tuple[np.ndarray, list[np.ndarray]]]:
        self._call_number += 1
        delivery = Delivery(
            self._mpi,
            self._communicator,
            packed,
            apart,
            self._call_number,
            kind,
            self.sleeps,
            self.receive_memory,
        )
        try:
            received = delivery.run()
        except (self._mpi.Exception, PeerFailure) as error:
            self._interrupted.append(delivery)
            raise self._peer_failure(KIND_NAMES[kind], error) from error
        except BaseException:  # MPI still uses the memory
            self._interrupted.append(delivery)
            raise
        return {
            rank: (words.view(np.uint8), [memory.view(np.uint8) for memory in came])
            for rank, (words, came) in zip(self.live, received)
        }

    def _peer_failure(self, call: str, error: Exception) -> PeerFailure:
        revoked = (
            isinstance(error, self._mpi.Exception)
            and error.Get_error_class() == self._mpi.ERR_REVOKED
        )
        return (Revoked if revoked else PeerFailure)(f"{call}: {error}")

    def _quietly(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Return `method(*arguments)`, or `None` after an MPI error."""
        try:
            return method(*arguments)
        except self._mpi.Exception:
            return None

    def _agree_while_shrinking(self, bits: int) -> int:
        """Agree with `bits` until all ranks take part to shrink and no death is new.

        Live ranks repeat the loop in step because agreements are uniform, in value and in error. A
        rank still in the program's `agree` gets an answer without WORKING, raises `PeerFailure` and
        joins here in the next turn.
        """
        while True:
            # an acknowledged death is no error any more
            self._quietly(self._communicator.Ack_failed)
            answer: int | None = self._quietly(self._communicator.Agree, bits)
            if answer is not None and answer & SHRINKING:
                return answer


class Delivery:
    """A message from each rank of a communicator to each rank, itself included.

    `packed`, and memory travelling `apart`, are by rank.

    The head of a message holds the message's length and as much of the message as fits; only a
    longer message has a tail, a second MPI message. MPI counts 8-byte words: 16 GiB from rank to
    rank. Memory travelling apart is an MPI message per tensor, of 4-byte words (8 GiB), sent from
    the tensor's place.

    Holds the requests and all memory used by MPI: after an error the library may go on using both,
    so the handler of the error keeps this object.
    """

    def __init__(
        self,
        mpi: Any,
        communicator: Any,
        packed: list[np.ndarray],
        apart: list[list[np.ndarray]],
        call_number: int,
        kind: int,
        sleeps: bool,
        receive_memory: ReceiveMemory = new_memory,
    ) -> None:
        self._mpi = mpi
        self._communicator = communicator
        self._sleeps, self._receive_memory = sleeps, receive_memory
        self._stamp = call_number * len(KIND_NAMES) + kind
        me = communicator.Get_rank()
        self._peers = [peer for peer in range(len(packed)) if peer != me]
        self._sending = [message.view(np.int64) for message in packed]
        self._heads_out = np.empty((len(packed), HEAD_WORDS), np.int64)
        self._apart = [[memory.view(np.int32) for memory in some] for some in apart]
        self._apart_in: list[list[np.ndarray]] = [[] for _ in packed]
        self._empty_head = np.array([0, self._stamp] + [0] * MOST_APART)
        self._heads_in = np.empty((len(packed), HEAD_WORDS), np.int64)
        self._heads_in[:, :HEAD_FIELDS] = 0
        self._received = [NOTHING.view(np.int64)] * len(packed)
        self._received[me] = self._sending[me]
        self._requests: list[Any] = []
        self._status = mpi.Status()

    def run(self) -> list[tuple[np.ndarray, list[np.ndarray]]]:
        """Return received messages, int64 words, and memory received apart, int32 words, by rank.

        Raises MPI.Exception or PeerFailure; RuntimeError if a rank made a different call.
        """
        heads = {peer: self._receive(self._heads_in[peer], peer) for peer in self._peers}
        for peer in self._peers:
            self._send(self._write_head(peer), peer)
            if len(self._sending[peer]) > HEAD_PAYLOAD:
                self._send(self._sending[peer][HEAD_PAYLOAD:], peer)
            for memory in self._apart[peer]:
                self._send(memory, peer)
        tails = {peer: self._read_head(peer, heads[peer]) for peer in self._peers}
        for peer, receives in tails.items():
            for words, receive in receives:
                if self._wait(
                    receive, self._mpi.INT64_T if words.itemsize == 8 else self._mpi.INT32_T
                ) != len(words):
                    raise PeerFailure(
                        f"half a message came from rank {peer} of {self._communicator.Get_size()}"
                    )
        for request in self._requests:
            self._complete(request)
        return list(zip(self._received, self._apart_in))

    def _write_head(self, peer: int) -> np.ndarray:
        words, head = self._sending[peer], self._heads_out[peer]
        if not words.size:
            return self._empty_head
        end = HEAD_FIELDS + min(len(words), HEAD_PAYLOAD)
        head[0] = len(words)
        head[1] = self._stamp
        head[2:HEAD_FIELDS] = 0
        head[2 : 2 + len(self._apart[peer])] = [memory.nbytes for memory in self._apart[peer]]
        head[HEAD_FIELDS:end] = words[:HEAD_PAYLOAD]
        return np.asarray(head[:end])

    def _read_head(self, peer: int, head: Any) -> Sequence[tuple[np.ndarray, Any]]:
        """Wait for the head and make room for the message.

        Returns the pending parts, as (words, pending receive).
        """
        words_in = self._wait(head, self._mpi.INT64_T)
        length, stamp, *apart = self._heads_in[peer, :HEAD_FIELDS].tolist()
        if stamp == 0 or words_in != HEAD_FIELDS + min(length, HEAD_PAYLOAD):
            raise PeerFailure(f"nothing came from rank {peer} of {self._communicator.Get_size()}")
        if stamp != self._stamp:
            self._refuse_mismatch(peer, stamp)
        if not length:
            return ()
        self._received[peer] = words = self._receive_memory(8 * length).view(np.int64)
        words[:HEAD_PAYLOAD] = self._heads_in[peer, HEAD_FIELDS:words_in]
        self._apart_in[peer] = [self._receive_memory(size).view(np.int32) for size in apart if size]
        coming = ([words[HEAD_PAYLOAD:]] if length > HEAD_PAYLOAD else []) + self._apart_in[peer]
        return [(memory, self._receive(memory, peer)) for memory in coming]

    def _send(self, words: np.ndarray, peer: int) -> None:
        self._requests.append(self._communicator.Isend(words, peer))

    def _receive(self, words: np.ndarray, peer: int) -> Any:
        request = self._communicator.Irecv(words, peer)
        self._requests.append(request)
        return request

    def _wait(self, receive: Any, word: Any) -> int:
        """Wait for a single request (see the top); return the words of MPI type `word`."""
        self._complete(receive)
        return int(self._status.Get_elements(word))

    def _complete(self, request: Any) -> None:
        """Wait for a single request; its status is then in `_status`."""
        if not self._sleeps:
            request.Wait(self._status)
            return
        pause = FIRST_PAUSE
        while not any(request.Test(self._status) for _ in range(TESTS_OF_A_LOOK)):
            time.sleep(pause)
            pause = min(PAUSE_GROWS * pause, LONGEST_PAUSE)

    def _refuse_mismatch(self, peer: int, stamp: int) -> None:
        (theirs, their_kind), (ours, kind) = (
            divmod(stamp, len(KIND_NAMES)),
            divmod(self._stamp, len(KIND_NAMES)),
        )
        raise RuntimeError(
            f"of {self._communicator.Get_size()} live ranks, number {peer} is in its call {theirs} "
            f"({KIND_NAMES[their_kind]}), number {self._communicator.Get_rank()} "
            f"in its call {ours} ({KIND_NAMES[kind]})"
        )


def _started() -> Any:
    """MPI, started. Raises UsageError for an MPI that cannot survive a death."""
    import mpi4py  # inside, since importing this module must not start MPI

    os.environ.setdefault("OMPI_MCA_mpi_event_tick_rate", str(NOTICES_EVERY_MICROSECONDS))
    mpi4py.rc.finalize = False
    from mpi4py import MPI

    _check_fault_tolerance(MPI)
    return MPI


def _check_fault_tolerance(MPI: Any) -> None:
    library = MPI.Get_library_version().split(",")[0].strip()
    if "Open MPI" not in library:
        raise UsageError(
            f"this MPI ({library}) cannot survive the death of a rank; use Open MPI 5 with ULFM"
        )
    if MPI.COMM_WORLD.Get_size() > 1 and os.environ.get("OMPI_MCA_mpi_ft_enable") not in (
        "1",
        "true",
    ):
        raise UsageError(
            f"mpirun was started without fault tolerance; start the run with: {LAUNCH_LINE}"
        )
