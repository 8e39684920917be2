"""Update from disk: a safetensors file in memory (tmpfs), written whole, of which each rank reads its own part."""

from __future__ import annotations

from collections.abc import Sequence

from liveweight.lab.bench.peers.contender import PeerMethod, PeerShare, Rendezvous, Talk, Weights


class FileSender:
    """Writes the file anew, then signals the ranks."""

    def __init__(self, rendezvous: Rendezvous, weights: Weights) -> None:
        self._path, self._weights = rendezvous.directory / "weights.safetensors", weights

    def send(self, talks: Sequence[Talk]) -> None:
        """See PeerSender."""
        from safetensors.torch import save_file

        new = self._path.with_suffix(".new")
        save_file({name: tensor.detach() for name, tensor in self._weights.items()}, new)
        new.rename(self._path)
        for talk in talks:
            talk.send("written")

    def close(self) -> None:
        """See PeerSender."""
        self._path.unlink(missing_ok=True)


class FileReceiver:
    """Maps the file, and copies its parts."""

    def __init__(self, rendezvous: Rendezvous, share: PeerShare) -> None:
        self._path, self._specs, self._share = (
            rendezvous.directory / "weights.safetensors",
            rendezvous.specs,
            share,
        )

    def receive(self, talk: Talk) -> None:
        """See Receiver."""
        from safetensors import safe_open

        talk.recv()
        with safe_open(self._path, framework="pt") as file:
            for spec in self._specs:
                self._share.put(spec.name, file.get_slice(spec.name)[self._share.part(spec.name)])

    def close(self) -> None:
        """See Receiver."""


METHODS = (
    PeerMethod(
        name="files",
        stands_for="safetensors to tmpfs and load (update from disk)",
        group="apart",
        sender=FileSender,
        receiver=FileReceiver,
    ),
)
