"""The run's token file: one secret for each role, as `role=hex` lines, readable by the owner alone. Compared in constant time.

read     looks             operate  looks, stops, marks drills
member   the run's own programs: agents, controller, members; they look as well
"""

import hmac
import stat
from pathlib import Path
from typing import Final, Literal, get_args

import msgspec

Role = Literal["read", "operate", "member"]
ROLES: Final[tuple[Role, ...]] = get_args(Role)


_remembered: "dict[Path, Tokens]" = {}


class TokenFileError(Exception):
    """The token file cannot be used; the message says why and what to do."""


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """Secrets by role."""

    secrets: dict[Role, str] = {}
    """By role; without one, nobody is let in."""

    def role_of(self, authorization: str) -> Role | None:
        """The role whose secret an `Authorization: Bearer` header holds. Every secret is compared, whatever the first says."""
        scheme, _, given = authorization.partition(" ")
        found: Role | None = None
        for role, secret in self.secrets.items():
            if hmac.compare_digest(secret.encode(), given.strip().encode()) and scheme.lower() == "bearer":
                found = role
        return found

    def __repr__(self) -> str:
        return f"Tokens({', '.join(self.secrets)})"


def may(have: Role | None, needed: Role) -> bool:
    """Whether a role is enough. Everybody who has a secret may read."""
    return have is not None and (needed in (have, "read"))


def read_tokens(path: Path) -> Tokens:
    """What a server lets in by. Raises TokenFileError on a file that is absent, holds nothing, is damaged, or that others may read."""
    try:
        mode = path.stat().st_mode
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise TokenFileError(
            f"there is no token file {path}; `aimaster run` makes one (lines role=hex, mode 0600)"
        ) from error
    except OSError as error:
        raise TokenFileError(f"the token file {path} cannot be read: {error.strerror}") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise TokenFileError(
            f"the token file {path} may be read by others (mode {stat.S_IMODE(mode):04o}); chmod 600 {path}"
        )
    return parse_tokens(path, data)


def parse_tokens(path: Path, data: bytes) -> Tokens:
    """The content of a token file; raises TokenFileError."""
    remedy = f"delete {path} between two starts, and `aimaster run` makes a new one"
    if not data.strip():
        raise TokenFileError(f"the token file {path} is empty; {remedy}")
    secrets: dict[Role, str] = {}
    for line in data.decode("ascii", errors="replace").splitlines():
        role, equals, secret = line.strip().partition("=")
        name = next((known for known in ROLES if known == role), None)
        if name is None or not equals or len(secret) < 16 or not secret.isascii():
            raise TokenFileError(
                f"the token file {path} has a line that is not role=hex with a role of {', '.join(ROLES)}; {remedy}"
            )
        secrets[name] = secret
    return Tokens(secrets=secrets)


def secret_of(path: Path, role: Role) -> str:
    """What a client shows itself with: the secret as it was last read well, should the file be gone or damaged by now; else empty.

    Raises TokenFileError only on a damaged file that was never read well.
    """
    try:
        tokens = _remembered[path] = read_tokens(path)
    except TokenFileError:
        if path not in _remembered and path.exists():
            raise
        tokens = _remembered.get(path, Tokens())
    return tokens.secrets.get(role, "")
