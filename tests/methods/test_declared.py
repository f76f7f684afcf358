"""A class that cannot work is refused before anything is traced, in one sentence that names it."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

import fedjax_pcdd as fp
from fedjax_pcdd import methods, models
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods import METHODS
from fedjax_pcdd.methods.checks import built
from fedjax_pcdd.methods.declared import check_declared, misspelt
from fedjax_pcdd.methods.method import Method, Traits, hyperparameter


@struct.dataclass
class Misspelt(Method):
    def penality(self, variables, outputs, batch, context):
        return 0.0

    def own_helper(self):
        return 0.0


def test_a_misspelt_hook_is_reported_with_the_likely_name():
    assert misspelt(Misspelt(), Method) == ["Misspelt.penality is not a hook: did you mean penalty?"]


def of_class(**attributes):
    """A method with these functions and fields."""
    kinds = {name: type(value.default) for name, value in attributes.items() if isinstance(value, dataclasses.Field)}
    return struct.dataclass(type("Mine", (Method,), attributes | {"__annotations__": kinds}))()


WRONGLY_DECLARED = {
    "too few arguments": (
        {"penalty": lambda self, variables, outputs, batch: 0.0},
        r"Mine.penalty must be callable as def penalty(self, variables, outputs, batch, context): define it so, or",
    ),
    "no scope": (
        {"logits": lambda self, model, variables, images, server, client, facts: images},
        "Mine.logits must be callable as def logits(self, model, variables, images, server, client=(), facts=None, *, "
        "scope='generic'): define",
    ),
    "a property": (
        {"traits": property(lambda self: Traits())},
        "Mine.traits must be callable as def traits(self): define",
    ),
    "a number": ({"aggregate": 3}, "Mine.aggregate must be callable as def aggregate(self, server, message, weights"),
    "no traits": ({"traits": lambda self: None}, "Mine.traits must return a Traits, not NoneType."),
    "a flag for a pass": ({"traits": lambda self: Traits(summary=True)}, "Mine.traits gives summary=True, which must"),
    "an unknown model": (
        {"traits": lambda self: Traits(personal_model="servr")},
        "Mine.traits gives personal_model='servr', which must be Literal['local', 'server'].",
    ),
    "a name for names": (
        {"traits": lambda self: Traits(recorded="drift")},
        "Mine.traits gives recorded='drift', which must be tuple[str, ...].",
    ),
    "a number for a name": ({"traits": lambda self: Traits(apart=(1,))}, "Mine.traits gives apart=(1,), which must be"),
    "a flag for a number": ({"traits": lambda self: Traits(more_epochs=True)}, "which must be int."),
    "a static function": (
        {"penalty": staticmethod(lambda self, variables, outputs, batch, context: 0.0)},
        "Mine.penalty must be callable as def penalty(self, variables, outputs, batch, context): define it so, or",
    ),
    "a wrapper": (
        {"penalty": functools.wraps(Method.penalty)(lambda self, outputs: 0.0)},
        "Mine.penalty must be callable as def penalty(self",
    ),
    "a field": ({"penalty": hyperparameter(0.1, help="")}, "outputs, batch, context): define it so, or rename it."),
    "a trait of a traced number": (
        {"n": hyperparameter(2, help="n"), "traits": lambda self: Traits(more_epochs=self.n)},
        "Mine.traits depends on a field that is traced: declare it by fp.hyperparameter(..., static=True).",
    ),
    "a trait by a branch": (
        {"n": hyperparameter(2, help="n"), "traits": lambda self: Traits(more_epochs=1 if self.n else 2)},
        "Mine.traits depends on a field that is traced",
    ),
    "a comparison as it is made": (
        {"n": hyperparameter(2, help="n"), "__post_init__": lambda self: int(self.n < 0)},
        "Mine.__post_init__ depends on a field that is traced: declare it by fp.hyperparameter(..., static=True), or "
        "give it bounds there.",
    ),
    "an unknown need": (
        {"n": hyperparameter(2, help="n", needs={"adpat": (1,)})},
        "Mine.n needs 'adpat', which is none of its fields.",
    ),
    "a traced path": ({"path": hyperparameter(Path(), help="")}, "Mine.path is a PosixPath, which cannot be traced"),
    "a traced text": ({"kind": hyperparameter("a", help="kind")}, "Mine.kind is a text, which cannot be traced"),
}


@pytest.mark.parametrize("mistake", WRONGLY_DECLARED)
def test_a_class_that_cannot_work_is_refused_before_anything_is_traced(mistake):
    attributes, sentence = WRONGLY_DECLARED[mistake]
    with pytest.raises(UserError) as raised:
        check_declared(of_class(**attributes))
    assert sentence in str(raised.value)


def test_a_class_is_declared_correctly_with_more_arguments_static_texts_and_numbers_of_numpy():
    attributes = {
        "penalty": lambda self, *arguments: 0.0,
        "regulariser": staticmethod(lambda params, context: 0.0),
        "aggregate": functools.partialmethod(lambda self, rate, server, message, weights, context: server, 0.1),
        "kind": hyperparameter("a", help="kind", static=True),
        "traits": lambda self: Traits(epochs=np.int64(3), clip=1, resumed=["head"], fine_tunes=np.bool_(False)),
        "further": functools.wraps(Method.penalty)(lambda self, *arguments: 0.0),
        "layers": hyperparameter((np.zeros(2), jax.random.key(0), None, True), help="anything numeric"),
    }
    check_declared(of_class(**attributes))


PLAIN = models.build("mlp", num_classes=4, image_shape=(5, 5, 1))


@pytest.mark.parametrize(
    "build",
    [
        lambda self, model: model.clone(neck=1, neck_width=self.width),
        lambda self, model: model.clone(neck=1, neck_width=int(self.width)),
        lambda self, model: model.clone(neck=1 if self.width > 2 else 0),
    ],
    ids=["the number", "a copy", "a branch"],
)
def test_a_model_that_depends_on_a_traced_number_is_refused(build):
    method = of_class(width=hyperparameter(3, help="width"), build=build)
    with pytest.raises(UserError) as raised:
        built(method, PLAIN)
    sentence = "Mine.build depends on a field that is traced: declare it by fp.hyperparameter(..., static=True)."
    assert str(raised.value) == sentence


def test_a_model_without_a_hash_is_refused_for_what_it_is():
    method = of_class(build=lambda self, model: model.clone(neck=np.ones(2)))
    with pytest.raises(UserError, match=r"Mine\.build gives a model with a field that cannot be hashed: give numbers"):
        built(method, PLAIN)


def test_a_model_may_depend_on_static_numbers_also_by_arrays():
    def build(self, model):
        return model.clone(neck=1, neck_width=int(jnp.ceil(self.width * 1.5)))

    fields = {"width": hyperparameter(3, help="width", static=True), "rate": hyperparameter(1.0, help="rate")}
    assert built(of_class(build=build, **fields), PLAIN) == PLAIN.clone(neck=1, neck_width=5)


@pytest.mark.parametrize("name", METHODS)
def test_every_registered_method_builds_its_model_from_static_fields(name):
    built(METHODS[name](), PLAIN)


@pytest.mark.parametrize("name", METHODS)
def test_every_registered_method_is_declared_correctly(name):
    check_declared(METHODS[name]())


@pytest.mark.parametrize(
    ("penalty", "advice"),
    [
        (
            lambda self, variables, outputs, *_: 1.0 if self.on else 0.0,
            "declare a hyper-parameter by fp.hyperparameter(..., static=True)",
        ),
        (lambda self, variables, outputs, *_: np.sum(np.asarray(outputs.logits)), "use those functions of jax.numpy"),
        (lambda self, variables, outputs, batch, _: outputs.logits[batch.mask > 0].sum(), "weight them by jnp.where"),
    ],
)
def test_code_that_cannot_be_traced_gets_advice_beside_the_error_of_jax(penalty, advice):
    method = of_class(on=hyperparameter(True, help="flag"), penalty=penalty)
    federation = fp.partition(fp.load_dataset("digits"), "iid", clients=3)
    with pytest.raises((jax.errors.JAXTypeError, jax.errors.JAXIndexError)) as raised:
        fp.simulate(federation, method, model="mlp", rounds=1, lanes=1)
    assert any(advice in note for note in raised.value.__notes__)


FEW = """
from flax import struct
import fedjax_pcdd as fp

@struct.dataclass
class Few(fp.FedProx):
    def penalty(self, variables, outputs, batch):
        return 0.0
"""


@pytest.mark.parametrize("suffix", ["", "+prototypes", "+avgm", "+sam"])
def test_a_hook_behind_a_suffix_is_checked_too(tmp_path, suffix):
    (tmp_path / "few.py").write_text(FEW)
    method = methods.get(f"{tmp_path / 'few.py'}:Few{suffix}")()
    with pytest.raises(UserError, match=r"Few.*\.penalty must be callable as def penalty\(self, variables, outputs"):
        check_declared(method)


def test_hooks_of_participants_are_checked_too():
    @struct.dataclass
    class Agreeing(METHODS["fedmd"]):
        def agree(self):
            return 0.0

    with pytest.raises(UserError, match=r"Agreeing\.agree must be callable as def agree\(self, "):
        check_declared(Agreeing())


@pytest.mark.parametrize("name", METHODS)
def test_no_registered_method_misspells_a_hook(name):
    assert misspelt(METHODS[name](), Method) == []
