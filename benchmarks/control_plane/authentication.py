"""What it costs to find out who makes a call: `python -m benchmarks.control_plane.authentication`.

Prints CPU time of the thread per check: of API keys (valid, wrong secret, unknown id) in a file of many, of
certificates, and of tokens that are verified or found in the cache. Exits with 1 if a key misses its target.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from joserfc import jwt
from joserfc.jwk import ECKey, Key, OKPKey, RSAKey
from joserfc.jws import JWSRegistry

from control_plane.access.authentication.api_keys import ApiKeys
from control_plane.access.authentication.certificates import ClientIdentities
from control_plane.access.authentication.grants import Grant
from control_plane.access.authentication.jwks import JwksFile
from control_plane.access.authentication.jwt import JsonWebTokens, TokenRules
from control_plane.access.authentication.key_file import change_keys, new_key
from control_plane.access.authenticator import Authenticator, Method, Presented
from control_plane.access.principal import Role
from control_plane.errors import Unauthenticated

TARGET_US = 20.0  # of one API key, whatever becomes of it
BATCHES = 50
ISSUER, AUDIENCE = "https://id.example", "motet"


class _Registry(JWSRegistry):
    """Signs with EdDSA without a warning of its name."""

    def get_alg(self, name: str):  # type: ignore[no-untyped-def]  # the package exports no name for it
        return self.algorithms[name]


def measure_us(act: Callable[[], object], per_batch: int) -> tuple[float, float]:
    """Median and highest of the batches, microseconds of CPU time for one act."""
    act()
    times = []
    for _ in range(BATCHES):
        start_ns = time.thread_time_ns()
        for _ in range(per_batch):
            act()
        times.append((time.thread_time_ns() - start_ns) / per_batch / 1e3)
    return statistics.median(times), max(times)


def check(methods: list[Method], presented: Presented) -> Callable[[], None]:
    """One check by the methods, which may refuse."""
    authenticator = Authenticator(methods)

    def act() -> None:
        with contextlib.suppress(Unauthenticated):
            authenticator.principal(presented)

    return act


def key_checks(directory: Path, num_keys: int) -> dict[str, Callable[[], None]]:
    """Checks of API keys in a file of `num_keys`."""
    grant = Grant(tenants=("acme",), roles=(Role.INFER,), adapters=("acme.*",))
    made = [new_key(set(), grant, expires_s=time.time() + 86_400) for _ in range(num_keys)]
    change_keys(directory / "keys.json", lambda _: tuple(entry for entry, _ in made), may_create=True)
    methods: list[Method] = [ApiKeys(directory / "keys.json")]
    key = made[num_keys // 2][1]
    return {
        "valid": check(methods, Presented(token=key)),
        "wrong secret": check(methods, Presented(token=key[:-1] + ("0" if key[-1] != "0" else "1"))),
        "unknown id": check(methods, Presented(token=f"motet_unknown{key[15:]}")),
        "of 4096 characters": check(methods, Presented(token=key + "x" * (4096 - len(key)))),
    }


def certificate_check(directory: Path, num_names: int) -> Callable[[], None]:
    """The check of a certificate with two names, one of them listed."""
    grant = {"tenants": ["acme"], "roles": ["infer"]}
    names = [f"spiffe://example.org/{number}" for number in range(num_names)]
    (directory / "identities.json").write_text(json.dumps(dict.fromkeys(names, grant)))
    identities = ClientIdentities(directory / "identities.json")
    return check([identities], Presented(identities=("a.example.org", names[0])))


def token_checks(directory: Path) -> dict[str, tuple[Callable[[], None], Callable[[], None]]]:
    """By algorithm: the check of a token that was not seen before, and of one that was."""
    keys: dict[str, Key] = {
        "EdDSA": OKPKey.generate_key("Ed25519", {"kid": "EdDSA"}),
        "ES256": ECKey.generate_key("P-256", {"kid": "ES256"}),
        "RS256": RSAKey.generate_key(2048, {"kid": "RS256"}),
    }
    entries = [key.as_dict(private=False) for key in keys.values()]
    (directory / "jwks.json").write_text(json.dumps({"keys": entries}))
    source, rules = JwksFile(directory / "jwks.json"), TokenRules(issuer=ISSUER, audience=AUDIENCE)
    claims = {"iss": ISSUER, "aud": AUDIENCE, "exp": int(time.time()) + 86_400, "tenant": "acme", "roles": ["infer"]}
    checks = {}
    for name, key in keys.items():
        text = jwt.encode({"alg": name, "kid": name}, {**claims, "sub": name}, key, registry=_Registry())
        presented = Presented(token=text)
        checks[name] = (
            check([JsonWebTokens(rules, source, max_cached=0)], presented),
            check([JsonWebTokens(rules, source)], presented),
        )
    return checks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--keys", type=int, default=1000, help="API keys, and names of certificates (default: 1000)")
    arguments = parser.parse_args()
    worst_us = 0.0
    print(f"{'check':<32}{'median us':>10}{'highest':>10}")
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        for name, act in key_checks(directory, arguments.keys).items():
            median_us, highest_us = measure_us(act, 2000)
            worst_us = max(worst_us, median_us)
            print(f"{'API key, ' + name:<32}{median_us:>10.2f}{highest_us:>10.2f}")
        median_us, highest_us = measure_us(certificate_check(directory, arguments.keys), 2000)
        print(f"{'certificate':<32}{median_us:>10.2f}{highest_us:>10.2f}")
        for name, (first, again) in token_checks(directory).items():
            for what, act, per_batch in (("first time", first, 20), ("cached", again, 2000)):
                median_us, highest_us = measure_us(act, per_batch)
                print(f"{f'token, {name}, {what}':<32}{median_us:>10.2f}{highest_us:>10.2f}")
    print(f"target: an API key in at most {TARGET_US:g} us; {'missed' if worst_us > TARGET_US else 'reached'}")
    return int(worst_us > TARGET_US)


if __name__ == "__main__":
    sys.exit(main())
