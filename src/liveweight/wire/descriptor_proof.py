"""The proof on the descriptor socket: each side shows the other that it holds the secret.

Owns the bytes of that exchange up to the token. Pure: the sockets are descriptors's and descriptor_server's.

    server  MAGIC, its nonce
    client  its nonce, HMAC(secret, "client", both nonces)
    server  ADMITTED, HMAC(secret, "server", both nonces)      or REFUSED, and the end
"""

from __future__ import annotations

import hmac
import secrets

from liveweight.wire.credentials import Secret

MAGIC = b"LWFD\x01"
NONCE_BYTES = 32
MAC_BYTES = 32
ADMITTED, REFUSED = b"\x01", b"\x00"


def nonce() -> bytes:
    """A fresh one; never used twice."""
    return secrets.token_bytes(NONCE_BYTES)


def of_client(secret: Secret, server_nonce: bytes, client_nonce: bytes) -> bytes:
    """What a client answers to the server's nonce."""
    return secret.derive("liveweight descriptors client v1", server_nonce, client_nonce)


def of_server(secret: Secret, server_nonce: bytes, client_nonce: bytes) -> bytes:
    """What a server answers to the client's nonce."""
    return secret.derive("liveweight descriptors server v1", server_nonce, client_nonce)


def equal(shown: bytes, expected: bytes) -> bool:
    """Compare two proofs in constant time."""
    return hmac.compare_digest(shown, expected)
