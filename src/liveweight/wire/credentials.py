"""Credentials: the shared secret, where it lies, and the keys that follow from it.

Owns the secret file, the private directory of sockets and the derivation of keys.
Who is admitted with them is authenticator's (channels) and descriptor_server's.
"""

from __future__ import annotations

import errno
import hmac
import os
import secrets
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils import z85

from liveweight.errors import CredentialsUnsafe, Unavailable

SECRET_BYTES_MIN = 32
SECRET_BYTES_MAX = 4096


class Secret:
    """What both sides must hold. Immutable; never shown, compared in constant time, not to be pickled."""

    __slots__ = ("_value",)

    def __init__(self, value: bytes) -> None:
        if not SECRET_BYTES_MIN <= len(value) <= SECRET_BYTES_MAX:
            wanted = f"{SECRET_BYTES_MIN} to {SECRET_BYTES_MAX}"
            raise CredentialsUnsafe(f"a secret has {wanted} bytes, this one has {len(value)}")
        object.__setattr__(self, "_value", bytes(value))

    @classmethod
    def generate(cls) -> Secret:
        """A fresh one, of 32 random bytes in hexadecimal."""
        return cls(secrets.token_hex(32).encode())

    def derive(self, label: str, *parts: bytes) -> bytes:
        """32 bytes that only holders of the secret can compute, apart for each label and parts."""
        sizes = ",".join(str(len(part)) for part in parts)
        return hmac.digest(self._bytes, b"\0".join((f"{label}:{sizes}".encode(), *parts)), "sha256")

    @property
    def _bytes(self) -> bytes:
        value: bytes = object.__getattribute__(self, "_value")
        return value

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Secret does not change: {name}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and hmac.compare_digest(self._bytes, other._bytes)

    def __hash__(self) -> int:
        return hash(self.derive("liveweight hash"))

    def __repr__(self) -> str:
        return "Secret(…)"

    def __reduce__(self) -> str:
        raise TypeError("a Secret is not to be pickled: hand over the path of its file")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class KeyPair:
    """A CURVE key pair in Z85, as ZMQ takes it."""

    public: bytes
    private: bytes


def server_keys(secret: Secret) -> KeyPair:
    """The keys of every listener that holds the secret."""
    return _key_pair(secret.derive("liveweight curve server v1"))


def client_keys(secret: Secret) -> KeyPair:
    """The keys of every channel that holds the secret; a listener admits no other."""
    return _key_pair(secret.derive("liveweight curve client v1"))


def _key_pair(seed: bytes) -> KeyPair:
    private = z85.encode(seed)
    return KeyPair(public=zmq.curve_public(private), private=private)


def load_or_create_secret(path: Path) -> Secret:
    """The secret in that file, created when absent. Processes that race for it get the same one.

    Raises CredentialsUnsafe for a file that is a symbolic link, belongs to another user, that others can read or
    write, or that is too short; Unavailable when it can be neither read nor made.
    """
    try:
        with suppress(FileNotFoundError):
            return _read(path)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _create(path)
        return _read(path)
    except OSError as error:
        raise Unavailable(f"secret file {path}: {error.strerror}") from error


def _create(path: Path) -> None:
    """Publish a whole file or leave the one that another process published first."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(Secret.generate()._bytes + b"\n")
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink()


def _read(path: Path) -> Secret:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CredentialsUnsafe(f"{path} is a symbolic link") from error
        if error.errno == errno.ENXIO:
            raise CredentialsUnsafe(f"{path} is not a regular file") from error
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise CredentialsUnsafe(f"{path} is not a regular file")
        _check_private(path, status)
        return Secret(os.read(descriptor, SECRET_BYTES_MAX + 2).rstrip(b"\r\n"))
    finally:
        os.close(descriptor)


def _check_private(path: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise CredentialsUnsafe(f"{path} belongs to user {status.st_uid}, not to {os.geteuid()}")
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise CredentialsUnsafe(f"{path} has mode {stat.S_IMODE(status.st_mode):04o}: others could use it")


def socket_directory(path: Path) -> Path:
    """That directory, made if absent. Raises CredentialsUnsafe unless it is ours alone: no link, mode 0700."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except NotADirectoryError as error:
        raise CredentialsUnsafe(f"{path} is a symbolic link or no directory") from error
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EEXIST):
            raise CredentialsUnsafe(f"{path} is a symbolic link or no directory") from error
        raise Unavailable(f"socket directory {path}: {error.strerror}") from error
    try:
        _check_private(path, os.fstat(descriptor))
    finally:
        os.close(descriptor)
    return path
