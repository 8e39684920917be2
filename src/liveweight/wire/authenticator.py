"""The authenticator: admits only clients that hold the secret to a listener.

Owns the ZAP handler of one private ZMQ context, and its thread. CURVE is the proof: libzmq accepts no client that does not
own the keys that it presents; the authenticator says which keys are admitted.
"""

from __future__ import annotations

import hmac
from contextlib import ExitStack
from threading import Thread

import zmq
from zmq.utils import z85

from liveweight.wire.sockets import Context, make, signals_held, terminate

DOMAIN = b"liveweight"
_ADDRESS = "inproc://zeromq.zap.01"
_VERSION = b"1.0"
_FIELDS = 9
"""Router's peer, empty, version, request, domain, address, identity, mechanism, the client's public key."""


class Authenticator:
    """Answers libzmq's requests whether to admit a client. Its thread ends when the context does."""

    def __init__(self, context: Context, admitted: bytes) -> None:
        """`admitted` is the public key, in Z85, of the clients to admit."""
        self._context = context
        self._admitted = z85.decode(admitted)
        self._thread = Thread(target=self._run, name="liveweight-authenticator", daemon=True)
        with signals_held(), ExitStack() as acquired:
            self._socket = make(context, zmq.ROUTER)
            acquired.callback(self._socket.close)
            self._socket.linger = 0
            self._socket.bind(_ADDRESS)
            self._thread.start()
            acquired.pop_all()  # now the thread's to close

    def close(self) -> None:
        """Terminate the context, whose other sockets must be closed, and wait for the thread, which that ends."""
        terminate(self._context)
        self._thread.join()

    def _run(self) -> None:
        try:
            while True:
                self._answer(self._socket.recv_multipart())
        except zmq.ContextTerminated:
            self._socket.close()

    def _answer(self, request: list[bytes]) -> None:
        if len(request) < _FIELDS or request[2] != _VERSION:
            return
        peer, empty, version, number, domain, _, _, mechanism, key, *rest = request
        known = mechanism == b"CURVE" and domain == DOMAIN and not rest
        admitted = known and hmac.compare_digest(key, self._admitted)
        status, text = (b"200", b"OK") if admitted else (b"400", b"not a holder of the secret")
        self._socket.send_multipart([peer, empty, version, number, status, text, b"", b""])
