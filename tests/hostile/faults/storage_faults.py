"""Redis, the store and the adapters in them."""

from __future__ import annotations

import contextlib

from motet import Client, MotetError, NotFound

from tests.hostile.faults.moment import CONTROL_PLANE, HUNG_AFTER_S, REDIS, STORE, Moment, calls_of
from tests.hostile.faults.rig import STEADY, TURNING
from tests.hostile.faults.together import together


def redis_killed(moment: Moment) -> list[str]:
    rig = moment.rig
    with rig.hold(REDIS):
        process = rig.redis_process()
        if process is not None:
            process.kill()
        if rig.has_own_redis:
            rig.kill_redis()
            moment.pause(moment.draw.uniform(0.0, 1.5))
            rig.start_redis()
    return []


def redis_stopped(moment: Moment) -> list[str]:
    rig = moment.rig
    with rig.hold(REDIS):
        process = rig.redis_process()
        if process is not None:
            process.suspend()
            moment.pause(moment.draw.choice((0.5, 2.0, 3.5)))
            process.resume()
    return []


def redis_emptied(moment: Moment) -> list[str]:
    with moment.rig.hold(REDIS), moment.rig.redis_client() as connection:
        for _ in range(moment.draw.choice((1, 3))):
            connection.flushall()
            moment.pause(moment.draw.uniform(0.1, 0.8))
    return []


def redis_corrupted(moment: Moment) -> list[str]:
    """Values flipped, cut, exchanged, deleted, or of another type."""
    way = moment.draw.choice(("flip", "cut", "exchange", "delete", "retype"))
    with moment.rig.hold(REDIS), moment.rig.redis_client() as connection:
        keys = sorted(connection.scan_iter("motet:a:*"))
        values = {key: connection.get(key) for key in keys if connection.type(key) == b"string"}
        for index, key in enumerate(keys):
            value = values.get(key)
            if not isinstance(value, bytes) or not value:
                continue
            if way == "flip":
                place = moment.draw.randrange(len(value))
                connection.set(key, value[:place] + bytes([value[place] ^ 0x10]) + value[place + 1 :])
            elif way == "cut":
                connection.set(key, value[: len(value) // 2])
            elif way == "exchange":
                connection.set(key, values.get(keys[index - 1]) or b"")
            elif way == "delete" and moment.draw.random() < 0.5:
                connection.delete(key)
            elif way == "retype":
                connection.delete(key)
                connection.lpush(key, b"x")
    _load_again(moment)
    return []


def redis_slow(moment: Moment) -> list[str]:
    with moment.rig.hold(REDIS), moment.rig.redis_client() as connection:
        connection.execute_command("DEBUG", "SLEEP", str(moment.draw.choice((0.5, 2.0))))
    return []


def _load_again(moment: Moment) -> None:
    """Ask for every adapter, so that cold ones are read."""
    with calls_of(moment) as client:
        for name in STEADY:
            with contextlib.suppress(MotetError):
                client.generate([5, 6], adapter=name, max_tokens=1, timeout_s=20.0).result()


def store_away(moment: Moment) -> list[str]:
    """The directory is renamed, as by an unmounted volume. What was answered OK must be there after a restart."""
    rig, name = moment.rig, f"stored-{moment.number}"
    store = rig.store_dir()
    aside = store.with_name("store-aside")
    directory = rig.adapters.make(f"stored-{moment.number % 7}")
    was_taken = False
    with rig.hold(STORE, CONTROL_PLANE, REDIS):
        store.rename(aside)
        try:
            with calls_of(moment) as client, contextlib.suppress(MotetError):
                client.adapters.register(name, directory, timeout_s=5.0)
                was_taken = True
            moment.pause(moment.draw.uniform(0.0, 1.0))
        finally:
            if store.exists():  # made anew by the server: it lay below the mount point
                store.rename(store.with_name(f"store-lost-{moment.number}"))
            aside.rename(store)
        rig.system.control_plane.kill()
        rig.system.start_control_plane()
        is_there = name in rig.registered()
        delete_adapter(moment, rig.admin, name)
    if was_taken and not is_there:
        return ["a registration was answered OK while the store was away, and is lost after a restart"]
    return []


def adapter_turned(moment: Moment) -> list[str]:
    """Its active version moves to and fro, by activation and by registering the same bytes again."""
    rig = moment.rig
    digests = sorted(rig.digests[TURNING])
    with calls_of(moment) as client, rig.hold(STORE):
        for _ in range(moment.draw.randrange(3, 12)):
            with contextlib.suppress(MotetError):
                if moment.draw.random() < 0.7:
                    client.adapters.activate(TURNING, moment.draw.choice(digests))
                else:
                    directory = rig.adapters.directory_of(moment.draw.choice(digests))
                    client.adapters.register(TURNING, directory, timeout_s=10.0)
            moment.pause(moment.draw.uniform(0.0, 0.3))
    return []


def adapter_deleted(moment: Moment) -> list[str]:
    """A name of its own comes, is used, goes while it is used, and stays gone."""
    rig, name = moment.rig, f"fleeting-{moment.number}"
    directory = rig.adapters.make(f"fleeting-{moment.number % 5}")
    with calls_of(moment) as client, rig.hold(STORE):

        def ask() -> None:
            with contextlib.suppress(MotetError):  # it may be gone already, and other faults may be at work
                client.generate([7, 8, 9], adapter=name, max_tokens=40, ignore_eos=True, timeout_s=20.0).result()

        def delete() -> None:
            moment.pause(moment.draw.uniform(0.0, 0.3))
            delete_adapter(moment, client, name)

        try:
            client.adapters.register(name, directory, timeout_s=20.0)
        except MotetError:
            delete_adapter(moment, client, name)  # its response alone may be lost
            return []
        _, hung = together([delete, *[ask] * 4], HUNG_AFTER_S)
        try:
            client.generate([7, 8, 9], adapter=name, max_tokens=1, timeout_s=20.0).result()
        except MotetError:
            return hung
    return [*hung, f"adapter {name} serves after its deletion ended"]


def delete_adapter(moment: Moment, client: Client, name: str) -> None:
    """Delete an adapter, however often that takes; nothing where it is not there."""
    for _ in range(60):
        try:
            client.adapters.delete(name, timeout_s=30.0)
            return
        except NotFound:
            return
        except MotetError:
            moment.pause(0.5)
