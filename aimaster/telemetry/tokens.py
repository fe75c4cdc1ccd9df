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


class TokenFileError(Exception):
    """The token file cannot be used; the message says why and what to do."""


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """Secrets by role."""

    secrets: dict[Role, str] = {}
    """Empty: no token was made for this run, and loopback is the only guard."""

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
    """Read a token file; an absent one gives no tokens. Raises TokenFileError on one that others may read or that is malformed."""
    try:
        mode = path.stat().st_mode
        text = path.read_text(encoding="ascii")
    except FileNotFoundError:
        return Tokens()
    except (OSError, UnicodeDecodeError) as error:
        raise TokenFileError(f"the token file {path} cannot be read: {error}") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise TokenFileError(
            f"the token file {path} may be read by others (mode {stat.S_IMODE(mode):04o}); chmod 600 {path}"
        )
    secrets: dict[Role, str] = {}
    for line in text.splitlines():
        role, equals, secret = line.strip().partition("=")
        name = next((known for known in ROLES if known == role), None)
        if name is None or not equals or len(secret) < 16:
            raise TokenFileError(
                f"the token file {path} has a line that is not role=hex with a role of {', '.join(ROLES)}"
            )
        secrets[name] = secret
    return Tokens(secrets=secrets)
