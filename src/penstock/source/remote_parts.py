"""What a source says about its network, by what it is made of."""

from penstock.core.transfers import Transfers

__all__ = ["RemoteParts", "is_remote_part"]


def is_remote_part(part: object) -> bool:
    """Return whether a source, or a remote folder, is read over a network."""
    return getattr(part, "is_remote", False) is True


class RemoteParts:
    """A source that is made of other sources, or reads from remote folders: it is remote if one of them is."""

    _parts: "tuple[object, ...]"
    """The other sources, or the remote folders."""

    @property
    def is_remote(self) -> bool:
        """Whether items come over a network."""
        return any(map(is_remote_part, self._parts))

    @property
    def reads_whole_chunks(self) -> bool:
        """Whether only whole chunks can be read, such as compressed ones: then items should come in windows."""
        return any(getattr(part, "reads_whole_chunks", False) is True for part in self._parts)

    @property
    def cache_bytes(self) -> int:
        """What is kept of remote items from one epoch to the next. Sources that have a cache usually share it."""
        kept = [getattr(part, "cache_bytes", 0) for part in filter(is_remote_part, self._parts)]
        return max((n_bytes for n_bytes in kept if isinstance(n_bytes, int)), default=0)

    def keep_share(self, share: float) -> None:
        """Say how much of the remote bytes stays in the cache folder, from one epoch to the next."""
        for part in filter(is_remote_part, self._parts):
            keep_share = getattr(part, "keep_share", None)
            if keep_share is not None:
                keep_share(share)

    @property
    def transfers(self) -> Transfers | None:
        """What was downloaded in this process so far; None if nothing is remote."""
        return Transfers.of(*filter(is_remote_part, self._parts))
