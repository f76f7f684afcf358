"""Protocols of PA: which of a client's models in a round counts, and how much of that choice is made on test data.

a(k, e) is the accuracy of client k on its own tests after e epochs of a round (or of fine-tuning), e = 0
being the received shared part joined with the client's own. A client that does not take part keeps its last value.

    last        mean over k of a(k, E); nothing is chosen
    received    the shared part as aggregated at the end of the round, joined with the client's own
    best_epoch  mean over k of max over e of a(k, e); chosen client by client
    best_mean   max over e of the mean over k of a(k, e); chosen once for all

So best_epoch >= best_mean >= last if all clients take part. Otherwise, in a method whose PA is measured between
rounds, `last` is newer than the other two for absent clients. Letters: n clients that trained, E epochs, C classes.
"""

import math
from operator import mul
from typing import Literal

import numpy as np

from fedjax_pcdd.engine.schedule import Jobs
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods.method import Traits

Protocol = Literal["last", "received", "best_epoch", "best_mean"]
IN_WORDS: dict[Protocol, str] = {
    "last": "",
    "received": ", of the model as received",
    "best_epoch": ", best epoch of each client, chosen on its tests",
    "best_mean": ", epoch with the best mean over clients, chosen on their tests",
}


def needs_epochs(protocol: Protocol | None) -> bool:
    """Whether clients have to be tested before every epoch."""
    return protocol in ("best_epoch", "best_mean")


def protocol_of(asked: Protocol | None, traits: Traits) -> Protocol:
    """The protocol asked for, else that of the method's own option, else `last`; UserError if these two contradict."""
    if asked and traits.protocol and asked != traits.protocol:
        raise UserError(f"`pa_protocol={asked}` and a `pa_model` that means {traits.protocol} contradict: drop one.")
    return asked or traits.protocol or "last"


def by_epoch(jobs: Jobs, before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Correct answers [n, E + 1, C] after 0 to E epochs; a client with fewer epochs keeps its last ones.

    Args:
      jobs: what each client did, fields [n].
      before: [n, E, C] correct answers before each epoch; E = 0 if nothing was tested.
      after: [n, C] correct answers at the end.
    """
    epochs = jobs.steps // np.maximum(jobs.epoch_steps, 1)
    done = np.arange(before.shape[1]) >= epochs[:, None]
    return np.concatenate([np.where(done[:, :, None], after[:, None], before), after[:, None]], axis=1)


def rules(correct: np.ndarray, tests: np.ndarray) -> dict[Protocol, np.ndarray]:
    """Correct answers [n, C] of the model that counts, under `last` and the protocols that choose an epoch.

    An epoch is chosen by its share of correct answers on the tests; of equal ones, the earliest.

    Args:
      correct: [n, E + 1, C] from `by_epoch`, test samples before validation samples; E = 0 gives `last` only.
      tests: [n, C'] test samples of each class; a client without any has no influence.
    """
    last: dict[Protocol, np.ndarray] = {"last": correct[:, -1]}
    if correct.shape[1] == 1:
        return last
    answers = correct[:, :, : tests.shape[1]].sum(axis=2)
    own_epochs, common_epoch = answers.argmax(axis=1), _best_epoch(answers, tests.sum(axis=1))
    return {**last, "best_epoch": correct[np.arange(len(correct)), own_epochs], "best_mean": correct[:, common_epoch]}


def _best_epoch(correct: np.ndarray, tests: np.ndarray) -> int:
    """The first of the epochs [n, E + 1] with the best mean share; compared in integers, so that ties are ties."""
    sizes = [size for size in tests.tolist() if size]
    denominator = math.lcm(*sizes)
    weights = [denominator // size for size in sizes]
    sums = [sum(map(mul, counts, weights)) for counts in correct[tests > 0].T.tolist()]
    return sums.index(max(sums))
