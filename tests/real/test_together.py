"""Questions asked one at a time are answered together, each with its own answer, whatever happens to another."""

import asyncio

import pytest

from real.together import Together


class Answers:
    """Doubles numbers; the first batch waits until it is let go."""

    def __init__(self):
        self.batches: list[list[int]] = []
        self.go = asyncio.Event()

    async def __call__(self, asked):
        self.batches.append(asked)
        if len(self.batches) == 1:
            await self.go.wait()
        if 13 in asked and len(asked) > 1:
            raise ValueError("thirteen")
        return [2 * q for q in asked]


async def asked(questions, *, drop=()):
    answers = Answers()
    together = Together(answers)
    tasks = [asyncio.create_task(together.ask(q)) for q in questions]
    await asyncio.sleep(0)
    for i in drop:
        tasks[i].cancel()
    answers.go.set()
    return answers.batches, await asyncio.gather(*tasks, return_exceptions=True)


def test_what_comes_while_one_is_answered_is_the_next_batch():
    batches, found = asyncio.run(asked([1, 2, 3, 4]))
    assert batches == [[1], [2, 3, 4]] and found == [2, 4, 6, 8]


@pytest.mark.parametrize("drop", [0, 2])
def test_a_question_that_is_given_up_takes_no_other_with_it(drop):
    _, found = asyncio.run(asked([1, 2, 3, 4], drop=[drop]))
    assert isinstance(found.pop(drop), asyncio.CancelledError)
    assert found == [2 * q for i, q in enumerate([1, 2, 3, 4]) if i != drop]


def test_an_error_goes_to_the_one_whose_turn_it_was_and_the_others_ask_again():
    batches, found = asyncio.run(asked([1, 2, 13, 4]))
    assert isinstance(found[1], ValueError) and found[0] == 2
    assert batches[1] == [2, 13, 4] and batches[2] == [13, 4] and isinstance(found[2], ValueError)
    assert found[3] == 8
