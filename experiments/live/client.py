"""Asks a running server for sums, and gives thumbs to the answers: late, and out of order. Needs `pip install openai`.

python experiments/live/client.py [--address http://127.0.0.1:8000] [--seconds 240] [--clients 4] [--latest 3]
"""

import argparse
import heapq
import itertools
import random
import threading
import time

import openai

GIVERS = 16  # thumbs that are given at one time
MOST_WAITING = 600  # thumbs: a client that asks waits while there are more


class Thumbs:
    """Thumbs that wait until somebody gives them; the order is that of when, not that of the answers."""

    def __init__(self, client: openai.OpenAI, latest: float):
        """Gives thumbs up to `latest` seconds after their answers."""
        self._client, self._latest = client, latest
        self._waiting, self._numbers, self._lock = [], itertools.count(), threading.Lock()
        self.given = 0

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def later(self, thumb: dict) -> None:
        """Has a thumb given, some time."""
        with self._lock:
            when = time.monotonic() + random.uniform(0, self._latest)
            heapq.heappush(self._waiting, (when, next(self._numbers), thumb))

    def give(self, ended: threading.Event) -> None:
        """Gives all that there are, until there will be no more."""
        while not ended.is_set() or self._waiting:
            with self._lock:
                is_due = self._waiting and self._waiting[0][0] <= time.monotonic()
                thumb = heapq.heappop(self._waiting)[2] if is_due else None
            if thumb is None:
                time.sleep(0.02)
                continue
            try:
                self._client.post("/feedback", body=thumb, cast_to=object)
                self.given += 1
            except openai.APIConnectionError:  # the server was stopped: a thumb can be given again
                self.later(thumb)


def ask(client: openai.OpenAI, model: str, thumbs: Thumbs, until: float, scores: list[tuple[float, float]]) -> None:
    """Asks for one sum after another, eight answers each."""
    while time.monotonic() < until:
        if len(thumbs) > MOST_WAITING:
            time.sleep(0.05)
            continue
        a, b = random.randint(1, 20), random.randint(1, 20)
        try:
            reply = client.completions.create(model=model, prompt=f"{a}+{b}=", n=8, max_tokens=6)
        except openai.APIConnectionError:
            time.sleep(1)
            continue
        for choice in reply.choices:
            is_right = choice.text == str(a + b)
            thumbs.later({"id": reply.id, "index": choice.index, "reward": float(is_right), "accurate": is_right})
            scores.append((time.monotonic(), is_right))


def main() -> None:
    """Reads the arguments, asks, and says every ten seconds how right the answers were."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", default="http://127.0.0.1:8000")
    parser.add_argument("--seconds", type=float, default=240, help="after which it ends")
    parser.add_argument("--clients", type=int, default=4, help="that ask at one time")
    parser.add_argument("--latest", type=float, default=3, help="seconds after which an answer has its thumb")
    given = parser.parse_args()
    client = openai.OpenAI(base_url=f"{given.address}/v1", api_key="none")
    (model,) = client.models.list().data
    thumbs, scores, ended = Thumbs(client, given.latest), [], threading.Event()
    arguments = client, model.id, thumbs, time.monotonic() + given.seconds, scores
    givers = [threading.Thread(target=thumbs.give, args=(ended,)) for _ in range(GIVERS)]
    askers = [threading.Thread(target=ask, args=arguments) for _ in range(given.clients)]
    for thread in (*givers, *askers):
        thread.start()
    while any(asker.is_alive() for asker in askers):
        time.sleep(10)
        last = [is_right for when, is_right in scores.copy() if when > time.monotonic() - 10]
        share = sum(last) / max(len(last), 1)
        print(f"{len(scores)} answers, {thumbs.given} thumbs; right in the last ten seconds: {share:.2f}", flush=True)
    ended.set()
    for giver in givers:
        giver.join()


if __name__ == "__main__":
    main()
