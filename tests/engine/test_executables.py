"""Equal programs of simulations made one after another are compiled once within `compiled_once`, and only there."""

import jax
import pytest
import toy
from flax import struct
from participants import arrays, assert_equal, same

import fedjax_pcdd as fp
from fedjax_pcdd import methods
from fedjax_pcdd.engine.executables import MOST, compiled, compiled_once
from fedjax_pcdd.methods.fedavg import FedAvg
from fedjax_pcdd.methods.fedprox import FedProx

global_values = {"factor": 1.0}


@struct.dataclass
class Scaled(FedAvg):
    """FedAvg whose loss reads a global, as one may write it in a notebook."""

    def loss(self, variables, batch, context):
        """Cross-entropy times the factor."""
        value, state = super().loss(variables, batch, context)
        return global_values["factor"] * value, state


@pytest.fixture(autouse=True)
def _tests_share_no_programs(monkeypatch):
    monkeypatch.setattr(toy, "shared", lambda simulated: simulated)
    monkeypatch.setattr(toy, "simulation", toy.simulation.__wrapped__)


def trained(**options):
    simulated = toy.simulation(**options)
    state, _ = toy.train(simulated, (0, 1))
    simulated.evaluate(state)
    return simulated.compilations, arrays(state)


@pytest.mark.thorough
def test_another_hyper_parameter_value_compiles_nothing_but_takes_effect():
    _, alone = trained(method=FedProx(mu=0.5), seed=1)
    with compiled_once():
        first = trained(method=FedProx(mu=0.1))
        second = trained(method=FedProx(mu=0.5), seed=1)
        other_method = trained(method=FedAvg())
    assert (first[0], second[0], other_method[0]) == (1, 0, 1)
    assert_equal(second[1], alone)
    assert not same(first[1], alone)


@pytest.mark.thorough
def test_groups_share_the_compiled_exchange_and_evaluation_too(monkeypatch):
    monkeypatch.setattr(toy, "groups", toy.groups.__wrapped__)

    def exchanged(**options):
        groups = toy.groups("fccl", **options)
        state, _ = groups.step(groups.start(), 0)
        return groups, arrays((state, groups.domain_correct(state), groups.public_logits(state)))

    _, alone = exchanged(seed=1)
    with compiled_once():
        (first, first_result), (second, second_result) = exchanged(), exchanged(seed=1)
    for name in ("_exchange", "_domains", "_logits", "_aggregates"):
        assert getattr(first, name) == getattr(second, name), name
    assert second._exchange._cache_size() == 1
    assert_equal(second_result, alone)
    assert not same(first_result, second_result)


@pytest.mark.thorough
def test_a_global_that_a_hook_reads_is_read_again_in_the_next_simulation(monkeypatch):
    _, before = trained(method=Scaled())
    monkeypatch.setitem(global_values, "factor", 0.5)
    count, after = trained(method=Scaled())
    assert count == 1
    assert not same(before, after)


def test_only_equal_and_hashable_functions_are_shared_and_not_all_are_kept():
    program = toy.simulation().program
    with compiled_once():
        first = compiled(lambda _, x: x, program)
        assert compiled(lambda _, x: x, program) is not first
        kept = [compiled(max, number) for number in range(MOST)]
        assert compiled(max, MOST - 1) is kept[-1]
        assert compiled(max, MOST) is not None
        assert compiled(max, 0) is not kept[0]
        assert compiled(max, ["a list"]) is not compiled(max, ["a list"])
    assert compiled(max, 1) is not compiled(max, 1)


@pytest.mark.thorough
def test_trials_with_validation_samples_are_compiled_once(tmp_path):
    options = {"rounds": 1, "local_epochs": 1, "validation": 0.2, "select_on": "validation", "fine_tune_epochs": 0}
    grid = {"dataset": "digits", "method": "fedprox", "mu": [0.1, 1.0], "lanes": 1, "min_samples": 10, **options}
    trials = fp.sweep(grid, folder=tmp_path)
    assert [trial["compilations"] for trial in trials.values()] == [1, 0]


def test_methods_that_jax_cannot_tell_apart_have_separate_programs():
    """To JAX the structures of two Flax dataclasses without traced fields are equal, whatever their classes."""
    first, second = FedAvg(), methods.get("solo")()
    assert jax.tree.structure(first) == jax.tree.structure(second)
    with compiled_once():
        simulations = [toy.simulation(method=method) for method in (first, second)]
    assert simulations[0].program != simulations[1].program
    assert simulations[0].round is not simulations[1].round
    assert [type(simulation.methods) for simulation in simulations] == [type(first), type(second)]
