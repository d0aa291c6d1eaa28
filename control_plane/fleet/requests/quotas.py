"""Checks every account's quotas when a request is taken on, and counts what each account used.

In this module, and in error messages about quotas, "tenant" means the account that is charged (tenants.py).

Called for every request: `admit`, `start` with its first token, `end`. Keeps counts only; no I/O, and time comes from
the clock. tokens_per_minute and requests_per_minute are buckets that fill evenly and hold one minute's worth. A request
takes its prompt and all tokens that it may generate, and gives back at its end what it did not generate.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from control_plane.errors import FieldViolation, QuotaExceeded, QuotaTooSmall
from control_plane.fleet.tenants import TenantLimits, TenantTable
from control_plane.scheduler.types import Request

MAX_IDLE_TENANTS = 1024  # above this, idle accounts are forgotten: names come from outside and have no end
BUSY_RETRY_S = 1.0  # a guess: when a request of the tenant may have ended or started
_ROUNDING = 1e-6  # units of a bucket: what a clock's rounding may make a wait too short by


@dataclass(slots=True)
class Charge:
    """What one request was admitted for."""

    tenant: str
    num_input_tokens: int  # prompt, and tokens of a resumed stream
    num_reserved_tokens: int  # that it may generate, over all its completions
    is_queued: bool = True  # has no generated token yet


class _Bucket:
    """Units, tokens or requests, that fill up evenly to one minute's worth."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._level_s = clock()  # when the level was right

    @classmethod
    def of(cls, per_minute: int | None, clock: Callable[[], float]) -> _Bucket | None:
        """A full bucket; None without a limit."""
        return None if per_minute is None else cls(per_minute, clock)

    @property
    def num_left(self) -> float:
        now_s = self._clock()
        filled = self._level + (now_s - self._level_s) * self.per_minute / 60.0
        self._level, self._level_s = min(filled, float(self.per_minute)), now_s
        return self._level

    @property
    def is_full(self) -> bool:
        return self.num_left >= self.per_minute

    def add(self, number: int) -> None:
        """Put units in; a negative number takes them out."""
        self._level = min(self.num_left + number, float(self.per_minute))

    def wait_s(self, number: int) -> float:
        """How long until it has so many units; 0: it has them."""
        missing = number - self.num_left
        return missing * 60.0 / self.per_minute if missing > _ROUNDING else 0.0


@dataclass(slots=True)
class _Account:
    limits: TenantLimits
    tokens: _Bucket | None  # for tokens_per_minute
    requests: _Bucket | None  # for requests_per_minute
    num_requests: int = 0  # admitted and not ended
    num_queued_tokens: int = 0
    num_accepted: int = 0  # since the account was made, like those below
    num_rejected: int = 0
    num_input_tokens: int = 0
    num_generated_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantUse:
    """One tenant at one moment."""

    tenant: str
    limits: TenantLimits
    num_requests: int  # accepted and not ended
    num_queued_tokens: int  # prompt tokens of requests without a generated token
    tokens_left: int | None  # of tokens_per_minute; None without that quota
    requests_left: int | None  # of requests_per_minute; None without that quota
    num_accepted: int  # since the account was made, like those below
    num_rejected: int  # by a quota
    num_input_tokens: int  # of ended requests
    num_generated_tokens: int  # of ended requests


class TenantQuotas:
    """Accounts of all tenants, made as they come."""

    def __init__(self, table: TenantTable, clock: Callable[[], float]) -> None:
        self._table = table
        self._clock = clock
        self._accounts: dict[str, _Account] = {}
        self._max_accounts = MAX_IDLE_TENANTS  # number of accounts at which idle accounts are forgotten
        self.num_queued_tokens = 0  # prompt tokens of requests without a generated token, of all tenants

    def admit(self, request: Request) -> Charge:
        """Charge a request to its tenant.

        Raises QuotaExceeded where the tenant has to wait, QuotaTooSmall where the request alone exceeds a quota.
        """
        num_input = len(request.prompt_token_ids) + len(request.generated_token_ids)
        num_reserved = request.num_indices * request.max_tokens - len(request.generated_token_ids)
        self.check(request.account, num_input, num_reserved)
        account = self._account(request.account)
        account.num_requests += 1
        account.num_accepted += 1
        account.num_queued_tokens += num_input
        self.num_queued_tokens += num_input
        if account.tokens is not None:
            account.tokens.add(-num_input - num_reserved)
        if account.requests is not None:
            account.requests.add(-1)
        return Charge(request.account, num_input, num_reserved)

    def check(self, tenant: str, num_input_tokens: int, num_reserved_tokens: int) -> None:
        """Raise what `admit` would raise now for a request with these numbers of tokens, and count it as refused."""
        account = self._account(tenant)
        num_tokens = num_input_tokens + num_reserved_tokens
        self._check_alone(tenant, account.limits, num_input_tokens, num_tokens)
        try:
            self._check_with_others(tenant, account, num_input_tokens, num_tokens)
        except QuotaExceeded:
            account.num_rejected += 1
            raise

    def queued_tokens_by_tenant(self) -> dict[str, int]:
        """Prompt tokens of requests without a generated token, for every tenant that has some. Looks at all tenants."""
        return {tenant: n for tenant, account in self._accounts.items() if (n := account.num_queued_tokens) > 0}

    def start(self, charge: Charge) -> None:
        """The request has its first generated token. Called once."""
        assert charge.is_queued, f"a request of tenant {charge.tenant} starts twice"
        charge.is_queued = False
        self._accounts[charge.tenant].num_queued_tokens -= charge.num_input_tokens
        self.num_queued_tokens -= charge.num_input_tokens

    def end(self, charge: Charge, num_generated: int) -> None:
        """The request is over, with this many tokens generated over all its completions or beams. Called once."""
        account = self._accounts[charge.tenant]
        if charge.is_queued:
            self.start(charge)
        account.num_requests -= 1
        account.num_input_tokens += charge.num_input_tokens
        account.num_generated_tokens += num_generated
        if account.tokens is not None:
            account.tokens.add(charge.num_reserved_tokens - num_generated)

    def withdraw(self, charge: Charge) -> None:
        """The request was not taken on after all: undo `admit`."""
        account = self._accounts[charge.tenant]
        account.num_accepted -= 1
        account.num_input_tokens -= charge.num_input_tokens
        if account.tokens is not None:
            account.tokens.add(charge.num_input_tokens)
        if account.requests is not None:
            account.requests.add(1)
        self.end(charge, 0)

    @property
    def num_tenants(self) -> int:
        """Tenants that have an account: those that sent requests lately."""
        return len(self._accounts)

    def busiest(self, count: int) -> list[TenantUse]:
        """The tenants with most unfinished requests, of equal ones those with most tokens; by name."""
        return [_use(*item) for item in sorted(heapq.nlargest(count, self._accounts.items(), key=_busyness))]

    def use_of(self, tenant: str) -> TenantUse:
        """One tenant, also where it has no account yet. Makes none."""
        return _use(tenant, self._accounts.get(tenant) or self._new_account(tenant))

    def _check_alone(self, tenant: str, limits: TenantLimits, num_input: int, num_tokens: int) -> None:
        def refuse(field: str, what: str, quota: str, limit: int | None) -> None:
            next_step = "shorten the prompt" if field == "input" else "lower max_tokens or the number of completions"
            raise QuotaTooSmall(
                FieldViolation(field, f"{what}, more than {quota} {limit} of tenant {tenant} ever allows; {next_step}")
            )

        if limits.max_queued_tokens is not None and num_input > limits.max_queued_tokens:
            refuse("input", f"{num_input} tokens", "max_queued_tokens", limits.max_queued_tokens)
        if limits.tokens_per_minute is not None and num_tokens > limits.tokens_per_minute:
            field = "input" if num_input >= limits.tokens_per_minute else "stopping.max_tokens"
            refuse(field, f"up to {num_tokens} tokens in all", "tokens_per_minute", limits.tokens_per_minute)

    def _check_with_others(self, tenant: str, account: _Account, num_input: int, num_tokens: int) -> None:
        def refuse(what: str, quota: str, limit: int, retry_after_s: float) -> None:
            raise QuotaExceeded(
                f"tenant {tenant}: {what}; {quota} is {limit}; try again in {retry_after_s:.1f} s",
                tenant=tenant,
                quota=quota,
                limit=limit,
                retry_after_s=retry_after_s,
            )

        limits = account.limits
        limit = limits.max_running_requests
        if limit is not None and account.num_requests >= limit:
            refuse(f"{account.num_requests} requests have not ended", "max_running_requests", limit, BUSY_RETRY_S)
        limit = limits.max_queued_tokens
        if limit is not None and account.num_queued_tokens + num_input > limit:
            what = f"{account.num_queued_tokens} prompt tokens are queued and this request has {num_input} more"
            refuse(what, "max_queued_tokens", limit, BUSY_RETRY_S)
        self._check_buckets(account, num_tokens, refuse)

    @staticmethod
    def _check_buckets(account: _Account, num_tokens: int, refuse: Callable[[str, str, int, float], None]) -> None:
        """If both buckets lack something, the one that takes longer to fill says when to try again."""
        waits = []
        if account.tokens is not None and (wait_s := account.tokens.wait_s(num_tokens)) > 0:
            what = f"the request may use {num_tokens} tokens and {int(account.tokens.num_left)} are left"
            waits.append((wait_s, what, "tokens_per_minute", account.tokens.per_minute))
        if account.requests is not None and (wait_s := account.requests.wait_s(1)) > 0:
            what = "no request is left of this minute's"
            waits.append((wait_s, what, "requests_per_minute", account.requests.per_minute))
        if waits:
            wait_s, what, quota, limit = max(waits)
            refuse(what, quota, limit, wait_s)

    def _account(self, tenant: str) -> _Account:
        account = self._accounts.get(tenant)
        if account is None:
            if len(self._accounts) >= self._max_accounts:
                self._forget_idle()
            account = self._accounts[tenant] = self._new_account(tenant)
        return account

    def _new_account(self, tenant: str) -> _Account:
        limits = self._table.limits_of(tenant)
        tokens = _Bucket.of(limits.tokens_per_minute, self._clock)
        return _Account(limits, tokens, _Bucket.of(limits.requests_per_minute, self._clock))

    def _forget_idle(self) -> None:
        """Drop the accounts whose state a new account would have, too. Their counts so far are lost."""
        for tenant, account in list(self._accounts.items()):
            buckets = (account.tokens, account.requests)
            if account.num_requests == 0 and all(bucket is None or bucket.is_full for bucket in buckets):
                del self._accounts[tenant]
        # Look again only once the accounts have doubled: then a new name costs the same however many there are.
        self._max_accounts = max(MAX_IDLE_TENANTS, 2 * len(self._accounts))


def _use(tenant: str, account: _Account) -> TenantUse:
    return TenantUse(
        tenant=tenant,
        limits=account.limits,
        num_requests=account.num_requests,
        num_queued_tokens=account.num_queued_tokens,
        tokens_left=None if account.tokens is None else int(account.tokens.num_left),
        requests_left=None if account.requests is None else int(account.requests.num_left),
        num_accepted=account.num_accepted,
        num_rejected=account.num_rejected,
        num_input_tokens=account.num_input_tokens,
        num_generated_tokens=account.num_generated_tokens,
    )


def _busyness(item: tuple[str, _Account]) -> tuple[int, int]:
    account = item[1]
    return account.num_requests, account.num_input_tokens + account.num_generated_tokens
