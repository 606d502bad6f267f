"""Where the server listens: an address and a port, or a Unix socket; with TLS or without."""

from __future__ import annotations

import ipaddress
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

from samewise.errors import BadParameter, MachineError


@dataclass(frozen=True, kw_only=True, slots=True)
class Listen:
    """Where the server listens: address and port (0: any free one), or a Unix socket; with TLS or without."""

    host: str = "127.0.0.1"
    port: int = 8000
    unix_socket: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise BadParameter(f"port={self.port}: give 0 (any) to 65535", param="port")
        if self.key is not None and self.certificate is None:
            raise BadParameter("ssl_keyfile needs ssl_certfile; give both, or neither", param="ssl_keyfile")
        for param, file in (("ssl_certfile", self.certificate), ("ssl_keyfile", self.key)):
            if file is not None and not file.is_file():
                raise BadParameter(f"{str(file)!r} is not a file; give a PEM file", param=param)
        if self.certificate is not None:
            import ssl  # here: the command line reads this module's defaults at every start

            try:
                ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
                    self.certificate, self.key
                )
            except (ssl.SSLError, OSError) as error:
                raise BadParameter(
                    f"ssl_certfile={str(self.certificate)!r} cannot be used: {error}", param="ssl_certfile"
                ) from error

    def open(self) -> socket.socket:
        """The listening socket; MachineError if it cannot be opened."""
        if self.unix_socket is not None:
            return _open_unix(self.unix_socket)
        try:
            family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
            listening = socket.create_server((self.host, self.port), family=family, backlog=2048)
        except OSError as error:
            raise MachineError(
                f"cannot listen on {self.host} port {self.port}: {error.strerror or error}; "
                "choose another --host or --port"
            ) from error
        # Inherited by connections. asyncio sets it only on sockets opened with the number of the protocol;
        # without it the second part of an answer waits 40 ms for the client's acknowledgement of the first.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listening

    def file_id(self) -> tuple[int, int] | None:
        """Device and inode of the Unix socket's file; None: there is none."""
        try:
            status = None if self.unix_socket is None else self.unix_socket.lstat()
        except OSError:
            return None
        return None if status is None else (status.st_dev, status.st_ino)

    @property
    def is_local(self) -> bool:
        """Whether only programs on this machine can connect."""
        if self.unix_socket is not None or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:  # a name
            return False

    def address(self, listening: socket.socket) -> str:
        """The URL for clients."""
        if self.unix_socket is not None:
            return f"unix:{self.unix_socket}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.certificate else 'http'}://{host}:{listening.getsockname()[1]}"


def _open_unix(path: Path) -> socket.socket:
    """A socket at a path. A socket that no server listens on is replaced; any other file is an error."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists():
            if not stat.S_ISSOCK(path.stat().st_mode):
                raise MachineError(f"{str(path)!r} is there already and not a socket; choose another path")
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
                if other.connect_ex(str(path)) == 0:
                    raise MachineError(f"another server listens on {str(path)!r}; choose another path")
            path.unlink()
        listening.bind(str(path))
        listening.listen(2048)
    except OSError as error:
        listening.close()
        raise MachineError(f"cannot listen on {str(path)!r}: {error.strerror or error}") from error
    except MachineError:
        listening.close()
        raise
    return listening


__all__ = ["Listen"]
