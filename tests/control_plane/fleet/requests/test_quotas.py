"""What tenants may use: the file's entries, and the accounts that hold requests to them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import event, given, strategies as st

from control_plane.errors import QuotaExceeded, QuotaTooSmall
from control_plane.fleet.requests.quotas import MAX_IDLE_TENANTS, TenantQuotas
from control_plane.fleet.tenants import InvalidTenants, TenantLimits, TenantTable, parse_tenants
from control_plane.scheduler.types import BeamSearch, Request, RequestId
from tests.fakes.fleet_rig import FakeClock


def make_quotas(**limits: Any) -> tuple[TenantQuotas, FakeClock]:
    clock = FakeClock()
    return TenantQuotas(TenantTable({"a": TenantLimits(**limits)}), clock), clock


def request(num_prompt: int = 10, max_tokens: int = 20, **fields: Any) -> Request:
    return Request(RequestId(1), (5,) * num_prompt, max_tokens, tenant=fields.pop("tenant", "a"), **fields)


def refused(quotas: TenantQuotas, work: Request) -> QuotaExceeded:
    with pytest.raises(QuotaExceeded) as caught:
        quotas.admit(work)
    return caught.value


def test_requests_at_once_are_bounded_per_tenant() -> None:
    quotas, _ = make_quotas(max_running_requests=2)
    first, _second = quotas.admit(request()), quotas.admit(request())
    error = refused(quotas, request())
    assert (error.tenant, error.quota, error.limit) == ("a", "max_running_requests", 2)
    assert all(part in str(error) for part in ("tenant a", "max_running_requests is 2", "2 requests"))
    quotas.admit(request(tenant="b"))  # the others have no such limit
    quotas.end(first, 3)
    quotas.admit(request())
    use = {entry.tenant: entry for entry in quotas.busiest(9)}
    assert (use["a"].num_requests, use["a"].num_accepted, use["a"].num_rejected) == (2, 3, 1)
    assert (use["a"].num_input_tokens, use["a"].num_generated_tokens) == (10, 3)
    assert (use["b"].num_requests, use["b"].num_rejected) == (1, 0)


@pytest.mark.parametrize(
    ("tenant", "trusts_names", "account"),
    [
        ("a", False, "a"),
        ("invented", False, "ipv4:10.0.0.7"),
        ("default", False, "ipv4:10.0.0.7"),
        ("a", True, "a"),
        ("invented", True, "invented"),
        ("default", True, "default"),
    ],
)
def test_a_tenant_without_an_entry_is_counted_by_the_clients_host(
    tenant: str, trusts_names: bool, account: str
) -> None:
    """The entry `default` gives limits to such an account, it does not make one."""
    own, others = TenantLimits(weight=2.0), TenantLimits(weight=3.0)
    table = replace(parse_tenants({"a": {"weight": 2.0}, "default": {"weight": 3.0}}), trusts_names=trusts_names)
    assert table.account_of(tenant, "ipv4:10.0.0.7") == account
    assert table.limits_of(account) == (own if account == "a" else others)


@pytest.mark.parametrize("tenant", ["a", "without-entry", "default"])
def test_a_tenant_of_an_authenticated_caller_has_an_account_of_its_own(tenant: str) -> None:
    """A credential fixes the tenant, so that nobody gains a fresh quota by a name."""
    table = parse_tenants({"a": {"weight": 2.0}})
    assert table.account_of(tenant, "ipv4:10.0.0.7", is_authenticated=True) == tenant


def test_invented_tenants_of_one_host_have_one_quota() -> None:
    quotas = TenantQuotas(TenantTable(default=TenantLimits(max_running_requests=2)), FakeClock())
    for number in range(2):
        quotas.admit(request(tenant=f"invented {number}", charged_to="ipv4:10.0.0.7"))
    error = refused(quotas, request(tenant="invented 3", charged_to="ipv4:10.0.0.7"))
    assert (error.tenant, error.quota, error.limit) == ("ipv4:10.0.0.7", "max_running_requests", 2)
    quotas.admit(request(tenant="invented 3", charged_to="ipv4:10.0.0.8"))
    assert [use.tenant for use in quotas.busiest(9)] == ["ipv4:10.0.0.7", "ipv4:10.0.0.8"]


def test_queued_tokens_are_those_of_requests_without_a_generated_token() -> None:
    quotas, _ = make_quotas(max_queued_tokens=25)
    first, second = quotas.admit(request(10)), quotas.admit(request(10))
    assert refused(quotas, request(6)).quota == "max_queued_tokens"
    assert quotas.num_queued_tokens == 20 and quotas.queued_tokens_by_tenant() == {"a": 20}
    quotas.start(first)
    third = quotas.admit(request(15))
    assert refused(quotas, request(1)).quota == "max_queued_tokens"
    quotas.end(third, 0)  # it ended before its first token
    for charge in (first, second):
        quotas.end(charge, 20)
    assert quotas.busiest(9)[0].num_queued_tokens == quotas.num_queued_tokens == 0
    with pytest.raises(QuotaTooSmall, match=r"input: 26 tokens, more than max_queued_tokens 25 of tenant a"):
        quotas.admit(request(26))


def test_tokens_per_minute_are_reserved_given_back_and_refilled() -> None:
    quotas, clock = make_quotas(tokens_per_minute=60)
    first = quotas.admit(request(10, 20))
    quotas.admit(request(10, 20))
    error = refused(quotas, request(10, 2))
    assert error.quota == "tokens_per_minute" and error.retry_after_s == pytest.approx(12.0)
    clock.advance(5)
    assert refused(quotas, request(10, 2)).retry_after_s == pytest.approx(7.0)
    quotas.end(first, 8)  # gives 12 of 20 back
    assert quotas.busiest(9)[0].tokens_left == 17
    quotas.admit(request(10, 7))
    clock.advance(3600)
    assert quotas.busiest(9)[0].tokens_left == 60  # one minute's worth is kept, no more
    with pytest.raises(QuotaTooSmall, match=r"stopping.max_tokens: up to 61 tokens in all"):
        quotas.admit(request(10, 51))
    with pytest.raises(QuotaTooSmall, match=r"^input: "):
        quotas.admit(request(60, 1))


@pytest.mark.parametrize(
    ("fields", "num_tokens"),
    [({"num_samples": 3}, 10 + 60), ({"beam": BeamSearch(4)}, 10 + 80), ({"generated_token_ids": (1, 2)}, 30)],
)
def test_every_completion_is_reserved(fields: dict[str, Any], num_tokens: int) -> None:
    quotas, _ = make_quotas(tokens_per_minute=100)
    quotas.admit(request(10, 20, **fields))
    assert quotas.busiest(9)[0].tokens_left == 100 - num_tokens


def test_requests_per_minute_fill_up_evenly_and_are_not_given_back() -> None:
    quotas, clock = make_quotas(requests_per_minute=4)
    for _ in range(4):
        quotas.end(quotas.admit(request()), 0)
    error = refused(quotas, request())
    assert (error.tenant, error.quota, error.limit) == ("a", "requests_per_minute", 4)
    assert error.retry_after_s == pytest.approx(15.0) and "requests_per_minute is 4" in str(error)
    clock.advance(10)
    assert refused(quotas, request()).retry_after_s == pytest.approx(5.0)
    clock.advance(5)
    quotas.admit(request())
    assert quotas.busiest(9)[0].requests_left == 0 and quotas.busiest(9)[0].num_rejected == 2
    quotas.admit(request(tenant="b"))  # the others have no such limit
    clock.advance(3600)
    assert quotas.busiest(9)[0].requests_left == 4  # one minute's worth is kept, no more


@given(
    requests_per_minute=st.integers(1, 100_000),
    tokens_per_minute=st.integers(30, 10_000_000),
    began_s=st.floats(0, 1e7),
    pauses_s=st.lists(st.floats(0, 30), min_size=1, max_size=8),
)
def test_the_next_request_fits_at_the_time_that_the_refusal_names(
    requests_per_minute: int, tokens_per_minute: int, began_s: float, pauses_s: list[float]
) -> None:
    """Whatever was used before, and whichever of the two quotas refuses."""
    clock = FakeClock()
    clock.advance(began_s)
    limits = TenantLimits(requests_per_minute=requests_per_minute, tokens_per_minute=tokens_per_minute)
    quotas = TenantQuotas(TenantTable({"a": limits}), clock)
    num_refused = 0
    for pause_s in pauses_s:
        try:
            while quotas.admit(request()):
                if quotas.use_of("a").num_accepted > 200:
                    break
        except QuotaExceeded as error:
            num_refused += 1
            assert error.retry_after_s > 0
            clock.advance(error.retry_after_s)
            quotas.admit(request())
        clock.advance(pause_s)
    event(f"{num_refused > 0}")


def test_the_use_of_a_tenant_that_sent_nothing_is_its_grant_and_makes_no_account() -> None:
    quotas, _ = make_quotas(requests_per_minute=4, tokens_per_minute=60)
    use = quotas.use_of("a")
    assert (use.tenant, use.requests_left, use.tokens_left, use.num_accepted) == ("a", 4, 60, 0)
    assert quotas.num_tenants == 0
    quotas.admit(request(10, 20))
    assert (quotas.use_of("a").requests_left, quotas.use_of("a").tokens_left) == (3, 30)


def test_request_that_no_worker_takes_is_not_charged() -> None:
    quotas, _ = make_quotas(max_running_requests=1, max_queued_tokens=10, tokens_per_minute=30, requests_per_minute=2)
    quotas.withdraw(quotas.admit(request()))
    use = quotas.busiest(9)[0]
    assert (use.num_requests, use.num_queued_tokens, use.tokens_left, use.requests_left) == (0, 0, 30, 2)
    assert (use.num_accepted, use.num_input_tokens) == (0, 0)


def test_idle_tenants_are_forgotten_beyond_a_bound_and_debts_are_not() -> None:
    clock = FakeClock()
    quotas = TenantQuotas(TenantTable(default=TenantLimits(tokens_per_minute=30)), clock)
    running = quotas.admit(request(tenant="runs"))
    quotas.end(quotas.admit(request(tenant="owes")), 20)
    for number in range(MAX_IDLE_TENANTS - 2):
        quotas.withdraw(quotas.admit(request(tenant=f"t{number}")))
    assert quotas.num_tenants == MAX_IDLE_TENANTS
    quotas.admit(request(tenant="one.more"))
    assert [entry.tenant for entry in quotas.busiest(9)] == ["one.more", "owes", "runs"]
    assert refused(quotas, request(tenant="owes")).quota == "tokens_per_minute"
    quotas.end(running, 20)


def test_a_new_tenant_costs_the_same_however_many_owe_tokens() -> None:
    num_reads = 0

    def clock() -> float:
        nonlocal num_reads
        num_reads += 1
        return 0.0

    quotas = TenantQuotas(TenantTable(default=TenantLimits(tokens_per_minute=30)), clock)
    num_tenants = 3 * MAX_IDLE_TENANTS
    for number in range(num_tenants):
        quotas.end(quotas.admit(request(tenant=f"t{number}")), 20)
    assert num_reads <= 10 * num_tenants, "every new name looks at all accounts"


def test_entries_of_the_file() -> None:
    table = parse_tenants(
        json.loads('{"default": {"max_running_requests": 4}, "team-a": {"weight": 2.5, "tokens_per_minute": 600}}')
    )
    assert table.limits_of("team-a") == TenantLimits(weight=2.5, tokens_per_minute=600)
    assert table.limits_of("default") == table.limits_of("anyone") == TenantLimits(max_running_requests=4)
    assert parse_tenants({}).limits_of("anyone") == TenantLimits()


def test_names_are_reserved_in_a_tenants_entry() -> None:
    table = parse_tenants({"acme": {"name_prefixes": ["acme.", "a-"], "weight": 2.0}, "labs": {"name_prefixes": []}})
    assert table.name_prefixes.reserved("acme.poet") == ("acme.", "acme")
    assert table.name_prefixes.reserved("labs.poet") is None
    assert table.limits_of("acme") == TenantLimits(weight=2.0)


@pytest.mark.parametrize(
    ("document", "names"),
    [
        ("[]", ["list"]),
        ('{"A": {}}', ["'A'"]),
        ('{"a": 3}', ["a", "3"]),
        ('{"a": {"wieght": 1}}', ["a.wieght", "unknown", "weight", "tokens_per_minute"]),
        ('{"a": {"weight": 0}}', ["a.weight", "0"]),
        ('{"a": {"weight": NaN}}', ["a.weight", "nan"]),
        ('{"a": {"weight": true}}', ["a.weight", "True"]),
        ('{"a": {"weight": Infinity}}', ["a.weight", "inf"]),
        ('{"a": {"max_running_requests": 0}}', ["a.max_running_requests", "0"]),
        ('{"a": {"max_queued_tokens": 1.5}}', ["a.max_queued_tokens", "1.5"]),
        ('{"a": {"tokens_per_minute": "9"}}', ["a.tokens_per_minute", "'9'"]),
        ('{"a": {"requests_per_minute": 0}}', ["a.requests_per_minute", "0"]),
        ('{"a": {"tokens_per_minute": null}}', ["a.tokens_per_minute", "None"]),
        ('{"a": {"name_prefixes": "x-"}}', ["a.name_prefixes", "'x-'", "list"]),
        ('{"a": {"name_prefixes": [1]}}', ["a.name_prefixes", "[1]"]),
        ('{"a": {"name_prefixes": ["X"]}}', ["a.name_prefixes", "'X'", "not the beginning of an adapter id"]),
        ('{"a": {"name_prefixes": ["x"]}, "b": {"name_prefixes": ["x-"]}}', ["b.name_prefixes", "reserved for a"]),
        ('{"default": {"name_prefixes": ["x-"]}}', ["default.name_prefixes", "every tenant without"]),
        ('{"a": {"x": 1}}', ["a.x", "unknown", "name_prefixes"]),
    ],
)
def test_bad_entry_is_refused_by_name(document: str, names: list[str]) -> None:
    with pytest.raises(InvalidTenants) as caught:
        parse_tenants(json.loads(document))
    assert all(name in str(caught.value) for name in names)


def test_the_busiest_tenants_are_reported_and_the_others_counted() -> None:
    quotas, _ = make_quotas()
    for number in range(20):
        quotas.end(quotas.admit(request(tenant=f"t{number:02}")), num_generated=number)
    charge = quotas.admit(request(tenant="t03"))
    assert [use.tenant for use in quotas.busiest(3)] == ["t03", "t18", "t19"] and quotas.num_tenants == 20
    quotas.end(charge, 0)
    assert [use.tenant for use in quotas.busiest(2)] == ["t18", "t19"]
