"""AP-06 on the real side: tool calls that run at once, and those that may wait for a slot."""

from __future__ import annotations

import asyncio

from real.slots import Slots


def test_ap_06_a_full_queue_refuses_at_once_and_a_freed_place_is_taken() -> None:
    async def go() -> list[str]:
        slots, log = Slots(1, 1), list[str]()
        release = asyncio.Event()

        async def call(name: str) -> None:
            async with slots.one_of_few() as got:
                log.append(f"{name} {'runs' if got else 'refused'}")
                if got:
                    await release.wait()

        tasks = [asyncio.create_task(call(name)) for name in "abc"]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        release.set()
        await asyncio.gather(*tasks)
        await call("d")
        return log

    assert asyncio.run(go()) == ["a runs", "c refused", "b runs", "d runs"]


def test_without_a_limit_of_the_queue_everybody_waits() -> None:
    async def go() -> int:
        slots, done = Slots(2), 0

        async def call() -> None:
            nonlocal done
            async with slots.one_of_few() as got:
                await asyncio.sleep(0)
                done += got

        await asyncio.gather(*(call() for _ in range(50)))
        return done

    assert asyncio.run(go()) == 50
