"""How the two ends of a pair find and trust each other: counters and proofs in a TCPStore (layer T).

    worker                                             server
    generation = add("pair/<rank>", 1)
    set(".../hello", magic, rank, generation, HMAC)
    add("pair/announced", 1)  ---------------------->  sees the counter move; checks the proof
    get(".../answer")  <-----------------------------  set(".../answer", Reply)
    group(...)  <----------------------------------->  group(...)
    get(".../left"), when the pair has ended  <------  set(".../left", why), if the others go on without the worker
"""

from __future__ import annotations

import hmac
import struct
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from lightning_hetero.transport.sockets import WireError

__all__ = ["CONNECT_S", "COUNTER", "check_hello", "check_token", "client", "group", "hello", "put"]

CONNECT_S = 20.0  # between two processes that have both said that they will
_HELLO = struct.Struct("<8sIiq32s")
_MAGIC, _FORMAT = b"lhpairs\0", 1
COUNTER = "pair/announced"


def hello(rank: int, generation: int, token: bytes) -> bytes:
    claim = _HELLO.pack(_MAGIC, _FORMAT, rank, generation, bytes(32))
    return _HELLO.pack(_MAGIC, _FORMAT, rank, generation, hmac.digest(token, claim, "sha256"))


def check_hello(data: bytes, rank: int, generation: int, token: bytes) -> None:
    if len(data) != _HELLO.size or data[:8] != _MAGIC:
        raise WireError("the peer does not speak this protocol")
    if (version := _HELLO.unpack(data)[1]) != _FORMAT:
        raise WireError(f"the peer speaks format {version}, this side {_FORMAT}: two installed versions?")
    if not hmac.compare_digest(data, hello(rank, generation, token)):
        raise WireError("the token is wrong: the peer is of another run")


def check_token(token: bytes) -> bytes:
    if not isinstance(token, bytes) or len(token) < 16:
        raise ValueError("token must be at least 16 random bytes which all processes of the run were given")
    return token


def client(host: str, port: int, timeout_s: float) -> TCPStore:
    timeout = timedelta(seconds=timeout_s)
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)


def group(store: TCPStore, rank: int, generation: int, own: int) -> ProcessGroupGloo:
    prefix = PrefixStore(f"pair/{rank}/{generation}", store)
    return ProcessGroupGloo(prefix, own, 2, timedelta(seconds=CONNECT_S))


def put(store: TCPStore, key: str, value: bytes) -> None:
    """Sets a key to bytes, which torch's stubs do not know of."""
    setter: Any = store.set
    setter(key, value)
