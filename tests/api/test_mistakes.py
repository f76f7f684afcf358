"""Mistakes of newcomers in Python: each gives one sentence that names what is wrong, before anything runs."""

from dataclasses import dataclass

import jax
import numpy as np
import pytest
from flax import struct

import fedjax_pcdd as fp
from fedjax_pcdd.testing import check_method

X, Y = np.zeros((60, 6, 6, 1), np.uint8), np.arange(60) % 3
DATA = fp.from_arrays(X, Y, X, Y)
FEDERATION = fp.partition(DATA, "iid", clients=3)
NAN = np.where(np.arange(60)[:, None, None, None] == 3, np.nan, X)


def partition(*lists):
    return fp.Federation(DATA, fp.Partition(list(lists), list(lists)))


def simulate(**options):
    defaults = {"model": "mlp", "rounds": 1, "local_epochs": 1, "lanes": 1, "fine_tune_epochs": 0}
    return fp.simulate(FEDERATION, **{**defaults, **options})


class Rows(list):
    """Rows of a Hugging Face data set."""

    features = ("image", "label")


@struct.dataclass
class Builds(fp.Method):
    def build(self, model):
        """Returns None."""


@struct.dataclass
class Loses(fp.Method):
    def loss(self, variables, batch, context):
        """Returns None."""


@struct.dataclass
class Generic(fp.Method):
    def generic_variables(self, server):
        """Returns None."""


@struct.dataclass
class Personal(fp.Method):
    def personal_variables(self, server, client):
        """Returns None."""


@dataclass(frozen=True)
class Plain(fp.Method):
    """A standard dataclass, which JAX does not know."""


@struct.dataclass
class Tunes(fp.Method):
    def fine_tuner(self, setting, epochs):
        """Returns None."""


@struct.dataclass
class Advises(fp.Method):
    def configure(self, setting, hyper):
        """Returns advice that is a text."""
        return self, "be careful"


@struct.dataclass
class Worded(fp.Method):
    words: str = "many"


@struct.dataclass
class TunesByWords(fp.Method):
    def fine_tuner(self, setting, epochs):
        """Returns a method that cannot be traced."""
        return Worded()


@struct.dataclass
class Rules(fp.ServerOptimised):
    server_lr: float = 1.0

    def server_rule(self):
        """Returns a number in place of a transformation."""
        return 3


@struct.dataclass
class Evaluates(fp.Method):
    def local_update(self, evaluate, step_on, variables, batch, context):
        """Returns a gradient in place of a step."""
        return evaluate(variables)


class Deaf(fp.Callback):
    def on_round(self, run):
        """Takes no report."""


MISTAKES = {
    "a method that is no dataclass of Flax": (Plain, "Plain is a dataclass, but not one of Flax: write @flax.struct"),
    "a method that tunes by none": (
        lambda: simulate(method=Tunes(), fine_tune_epochs=1),
        "Tunes.fine_tuner must return a Method, not NoneType",
    ),
    "a method that tunes by words": (
        lambda: simulate(method=TunesByWords(), fine_tune_epochs=1, rounds=10**6),
        "Worded.words is a text, which cannot be traced",
    ),
    "advice that is a text": (lambda: simulate(method=Advises()), "configure must return a tuple (a Method, a list)"),
    "a run that is traced": (
        lambda: jax.jit(lambda x: simulate().ga[0] + x)(1.0),
        "a run cannot be made while JAX traces a function: call it outside of jax.jit",
    ),
    "a rule that is none": (lambda: simulate(method=Rules()), "Rules.server_rule must return a GradientTransformation"),
    "a gradient in place of a step": (
        lambda: simulate(method=Evaluates()),
        "local_update must return a tuple (anything, a Mapping, a Step), not Evaluated",
    ),
    "a callback that takes no report": (
        lambda: simulate(callbacks=[Deaf()]),
        "Deaf.on_round must be callable as def on_round(self, run, report)",
    ),
    "a column by number": (lambda: fp.from_huggingface(Rows([]), image=3), "a column is given by its name, not as 3"),
    "a side in words": (lambda: fp.from_folder(".", side="8"), "side takes a number of pixels of at least 1, not '8'"),
    "a negative side": (lambda: fp.from_folder(".", side=-3), "side takes a number of pixels of at least 1, not -3"),
    "no images": (lambda: fp.from_torch([]), "there are no images: name a data set that has some"),
    "labels of nobody": (
        lambda: fp.from_torch([(X[0], -1), (X[0], 1)]),
        "labels must be integers from 0, not from -1: leave out",
    ),
    "an option of the command line": (lambda: simulate(track="angles"), "'track': it is for the command line and fp"),
    "misspelt bounds": (lambda: fp.search({"lr": (0.01, 0.3, "lgo")}), "lr=0.01:0.3:lgo has bounds and something else"),
    "no contract of a name": (lambda: check_method("fedavg"), "check_method takes a method or its class, as fp.FedPr"),
    "no contract of nothing": (lambda: check_method(None), "check_method takes a method or its class, as fp.FedProx"),
    "a misspelt hyper-parameter": (lambda: check_method(fp.FedProx, nu=1), "no hyper-parameter 'nu': choose one of"),
    "a hyper-parameter in words": (lambda: check_method(fp.FedProx, mu="a"), "mu takes a number, not 'a'"),
    "a hyper-parameter below": (lambda: check_method(fp.FedProx, mu=-3), "mu must be at least 0"),
    "numbers that are not finite": (
        lambda: fp.from_arrays(NAN, Y, X / 255, Y),
        "x_train holds numbers that are not finite as float32 in 1 of 60 samples, first in sample 3: replace",
    ),
    "numbers beyond float32": (lambda: fp.from_arrays(X + 1e300, Y, X / 255, Y), "x_train holds numbers beyond the ra"),
    "masked images": (lambda: fp.from_arrays(np.ma.masked_equal(X, 0), Y, X, Y), "x_train has masked entries"),
    "masked labels": (lambda: fp.from_arrays(X, Y, X, np.ma.masked_equal(Y, 2)), "y_test has masked entries"),
    "a hand-made data set with gaps": (
        lambda: fp.Dataset("own", NAN.astype(np.float32), Y, NAN.astype(np.float32), Y, 3),
        "x_train holds numbers that are not finite",
    ),
    "a name by number": (lambda: fp.from_arrays(X, Y, X, Y, name=3), "name of a data set must be a text, not 3"),
    "a name for too few classes": (
        lambda: fp.from_arrays(X, Y, X, Y, class_names=["a"]),
        "class_names must name 3 classes, not 1",
    ),
    "no tests": (
        lambda: fp.simulate(
            fp.Federation(fp.Dataset("own", X, Y, X[:0], Y[:0], 3), fp.Partition([[0], [1]], [[], []]))
        ),
        "data set 'own' has no test samples",
    ),
    "samples to train on and to choose by": (
        lambda: fp.Federation(DATA, fp.Partition([[0, 1], [2]], [[0], [1]]), [[3], [1]]),
        "sample 1 is in a validation and in a training list",
    ),
    "too few validation lists": (
        lambda: fp.Federation(DATA, fp.Partition([[0], [2]], [[0], [1]]), [[3]]),
        "2 clients need as many validation lists, not 1",
    ),
    "validation in words": (
        lambda: fp.Federation(DATA, fp.Partition([[0], [2]], [[0], [1]]), "few"),
        "2 clients need as many validation lists, not 'few'",
    ),
    "no samples": (lambda: fp.from_arrays(X[:0], Y[:0], X, Y), "x_train holds no samples"),
    "samples of several sizes": (lambda: fp.from_arrays([[1], [1, 2]], [0, 1], X, Y % 2), "x_train holds samples of s"),
    "labels as numbers with a point": (lambda: fp.from_arrays(X, Y + 0.5, X, Y), "leave out samples whose label is no"),
    "labels beyond integers": (lambda: fp.from_arrays(X, Y + 1e300, X, Y), "y_train must be one integer"),
    "labels one-hot": (lambda: fp.from_arrays(X, np.eye(3)[Y], X, Y), "[60, 3]: if it is one-hot, take .argmax(1)"),
    "labels in a column": (lambda: fp.from_arrays(X, Y[:, None], X, Y), "not int64 [60, 1]: take .ravel() of it"),
    "labels of truth": (lambda: fp.from_arrays(X, Y > 1, X, Y), "not bool [60]: take .astype(int) of it"),
    "labels in words": (
        lambda: fp.from_arrays(X, np.array(list("abc"))[Y], X, Y),
        "<U1 [60]: number all labels, of training and test samples, by np.unique(y, return_inverse=True)[1]",
    ),
    "negative labels": (lambda: fp.from_arrays(X, Y - 1, X, Y), "int64 [60] from -1"),
    "numbers in place of labels": (lambda: fp.from_arrays(X, Y * 10**9, X, Y), "a label is 2000000000"),
    "no name of a data set": (lambda: fp.load_dataset(3), "name takes the name of a data set"),
    "no folder of a data set": (lambda: fp.load_dataset("cifar10", 3), "data_dir takes a path, not 3"),
    "no data set of Hugging Face": (lambda: fp.from_huggingface("mnist"), "from_huggingface takes what"),
    "samples by name": (lambda: fp.from_torch({"a": 1}), "from_torch takes data sets"),
    "a single number": (lambda: fp.from_torch(np.array(3)), "from_torch takes data sets"),
    "no data set of torchvision": (lambda: fp.from_torch(3), "from_torch takes data sets"),
    "samples without labels": (lambda: fp.from_torch([1, 2], [3]), "from_torch takes samples that are an image and it"),
    "no path": (lambda: fp.from_folder(None), "path takes a path, not None"),
    "no folder to write": (lambda: fp.write_federation(None, []), "path takes a path, not None"),
    "a folder of a null byte": (lambda: fp.write_federation("a\0b", []), "path takes a path, not 'a\\x00b'"),
    "a sweep by numbers": (lambda: fp.sweep({3: 1}), "grid takes options by their names, not 3"),
    "a search by numbers": (lambda: fp.search({3: 1}), "takes options by their names, not 3"),
    "metrics in an array": (lambda: simulate(metrics=np.arange(3)), "metrics takes a dictionary of functions"),
    "a method that builds nothing": (
        lambda: simulate(method=Builds()),
        "Builds.build must return a Module, not NoneType",
    ),
    "a method without a loss": (
        lambda: simulate(method=Loses()),
        "Loses.loss must return a tuple (anything, a Mapping)",
    ),
    "a method without a model": (
        lambda: simulate(method=Generic()),
        "Generic.generic_variables must return variables of a model",
    ),
    "a method without own models": (
        lambda: simulate(method=Personal(), fine_tune_epochs=0),
        "Personal.personal_variables must return variables of a model",
    ),
    "no clients to write": (lambda: fp.write_federation("w", None), "clients takes the samples"),
    "a client of numbers": (lambda: fp.write_federation("w", [1]), "client 0 must be (x_train"),
    "arrays in place of a data set": (lambda: fp.partition(X), "dataset takes an fp.Dataset"),
    "a kind of partition by number": (lambda: fp.partition(DATA, 3), "kind takes a name"),
    "clients in words": (lambda: fp.partition(DATA, "iid", clients="three"), "clients takes an integer"),
    "half a client": (lambda: fp.partition(DATA, "iid", clients=2.5), "clients takes an integer or none, not '2.5'"),
    "beta in words": (lambda: fp.partition(DATA, beta="x"), "beta takes a number"),
    "a seed in words": (lambda: fp.partition(DATA, "iid", seed="a"), "seed takes an integer"),
    "no partition": (lambda: fp.Federation(DATA, None), "fp.Federation takes an fp.Partition"),
    "no data set": (lambda: fp.Federation(3, fp.Partition([], [])), "fp.Federation takes a data set"),
    "positions with a point": (lambda: partition(np.array([0.5])), "the training list of client 0 must be integers"),
    "a switch that is a share": (lambda: fp.Pipeline(flip=0.5), "flip takes True or False, not 0.5."),
    "codes by a word": (lambda: fp.Pipeline(codes="no"), "codes takes True or False, not 'no'."),
    "constants in words": (lambda: fp.Pipeline(mean="a"), "mean takes a number for each channel"),
    "a division by nothing": (lambda: fp.Pipeline(std=(0.0,)), "std must be above 0"),
    "constants that are not finite": (lambda: fp.Pipeline(mean=(float("nan"),)), "mean must be finite numbers"),
    "an infinite divisor": (lambda: fp.Pipeline(std=(float("inf"),)), "std must be finite numbers"),
    "constants of more channels": (
        lambda: simulate(pipeline=fp.Pipeline(mean=(0.0,) * 3, std=(1.0,) * 3)),
        "mean of the pipeline is for 3 channels but the images have 1",
    ),
    "patience in words": (lambda: fp.EarlyStopping("pa", patience="x"), "early stopping takes a whole number"),
    "a callback without arguments": (lambda: simulate(callbacks=[lambda: True]), "callbacks takes functions of two"),
    "metrics of nothing": (lambda: simulate(metrics={"a": lambda: 1.0}), "metric 'a' must be a function of the run"),
    "true in other words": (lambda: simulate(method=fp.FedAvgM(server_nesterov="yes")), "server_nesterov takes true"),
    "no number of a method": (lambda: simulate(method=fp.FedProx(mu="much")), "mu takes a number, not 'much'"),
    "half a class": (lambda: fp.from_arrays(X, Y, X, Y, num_classes=4.5), "num_classes must be an integer from 1"),
    "half a class by hand": (lambda: fp.Dataset("own", X, Y, X, Y, 4.5), "num_classes must be an integer from 1"),
    "classes in words": (lambda: fp.Dataset("own", X, Y, X, Y, "4"), "num_classes must be an integer from 1, not '4'"),
    "no class": (lambda: fp.from_arrays(X, Y, X, Y, num_classes=0), "num_classes must be an integer from 1, not 0"),
    "names by number": (lambda: fp.from_arrays(X, Y, X, Y, class_names=5), "class_names must be a list of names"),
    "a pair that is none": (lambda: fp.from_arrays(X, Y, X, Y, groups=3), "groups must be a pair"),
    "groups without numbers": (lambda: fp.from_arrays(X, Y, X, Y, groups=([None] * 60, Y)), "must be a number or name"),
    "no test lists": (lambda: fp.Federation(DATA, fp.Partition([Y], None)), "as many test lists as training lists"),
    "no samples of anybody": (
        lambda: fp.simulate(fp.Federation(DATA, fp.Partition([[], []], [[0], [1]])), "fedavg", model="mlp"),
        "no client has any training samples",
    ),
    "an augmentation by no name": (lambda: simulate(augmentation="cut"), "name a file and an object, as FILE.py:NAME"),
    "an augmentation by a function": (
        lambda: simulate(augmentation=len),
        "not a builtin_function_or_method: register it by `@fp.register_augmentation`, and give its name.",
    ),
    "public images by an array": (
        lambda: simulate(method="feddf", public=np.zeros((9, 8, 8, 1))),
        "public takes names and numbers, not an ndarray: register a function that returns it by `@fp.reg",
    ),
    "a rate by a function": (lambda: simulate(lr=len), "lr takes names and numbers, not a builtin_fu"),
    "an augmentation that is not wanted": (
        lambda: simulate(augmentation="mine.py:cut", augment=False),
        "augmentation=mine.py:cut needs augment, which is off",
    ),
    "too few to validate": (lambda: simulate(validation=0.001), "validation=0.001 keeps no sample of any client"),
    "metrics by number": (lambda: simulate(metrics={1: lambda run: 1.0}), "metrics takes a dictionary"),
    "a folder by number": (lambda: simulate(run_dir=3), "run_dir takes a path, not 3"),
    "resume with a folder": (lambda: simulate(resume="runs"), "resume takes True or False, not 'runs': the folder is"),
    "resume without a folder": (lambda: simulate(resume=True), "resume continues the run of a folder: name it as run_"),
    "a bar in words": (lambda: simulate(progress="no"), "progress takes True or False, not 'no'"),
    "a bar of a resumed run": (lambda: fp.resume("runs", progress="no"), "progress takes True or False, not 'no'"),
    "a bar of a sweep": (lambda: fp.sweep({"seed": [0, 1]}, progress=1), "progress takes True or False, not 1"),
    "a bar of a search": (lambda: fp.search({"lr": (0.1, 1)}, progress=None), "progress takes True or False, not None"),
    "a callback of two": (lambda: simulate(callback=lambda run, report: None), "callback takes a function of one argu"),
    "a label by number": (lambda: simulate(label=3), "label takes a text, not 3"),
    "a class that is no model": (lambda: simulate(model=int), "is neither a Flax module nor"),
    "a list without models": (lambda: simulate(method="fedmd", model=[]), "model takes at least one architecture"),
    "models by objects": (lambda: simulate(models=[int, "mlp"]), "models takes names and numbers, not the class int"),
    "an empty list": (lambda: simulate(lr_steps=[]), "lr_steps takes at least one value: drop the empty list"),
    "more rounds than a float holds": (lambda: simulate(rounds=10**400), "rounds must be at least 1 and at"),
    "several rates": (lambda: simulate(lr=[0.1, 0.2]), "lr takes a number, not '0.1,0.2': several values are for a s"),
    "no folder of a run": (lambda: fp.load_run(3), "folder takes a path, not 3"),
    "no folder to resume": (lambda: fp.resume(None), "folder takes a path, not None"),
    "a norm that is no name": (lambda: fp.build_model("mlp", DATA, norm=1), "norm takes 'batch' or 'group', not 1."),
    "a model for no data": (lambda: fp.build_model("mlp", 3), "data takes a data set or a federation"),
    "no history": (lambda: fp.plot([]), "histories takes at least one history"),
    "a table of words": (lambda: fp.table("x"), "histories takes at least one history"),
    "a grid in words": (lambda: fp.sweep("fedavg"), "grid takes a dictionary of options"),
    "a sweep of objects": (lambda: fp.sweep({"method": fp.FedAvg()}), "not a FedAvg: give its name, and"),
    "a sweep over an array": (lambda: fp.sweep({"mu": np.ones(2)}), "in a sweep, not an ndarray: write"),
    "a function as a partition": (lambda: fp.partition(fp.load_dataset("digits"), lambda y: []), "register it by"),
    "a sweep in a run's folder": (lambda: fp.sweep({"run_dir": "x"}), "run_dir is for one run"),
    "a sweep of nothing together": (lambda: fp.sweep({"lr": 1}, together=0), "together must be at least 1"),
    "a space in words": (lambda: fp.search("x"), "space takes a dictionary of options"),
    "an unknown measure": (lambda: fp.search({"lr": (0.1, 1)}, metric="acc"), "metric takes ga or pa, not 'acc'"),
    "trials in words": (lambda: fp.search({"lr": (0.1, 1)}, trials="x"), "trials takes an integer"),
    "a number as a method": (lambda: fp.register_method("three")(3), "3 cannot be a method"),
    "a decorator without a name": (lambda: fp.register_method(fp.FedAvg), "a method is registered by a name"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence(mistake, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call, message = MISTAKES[mistake]
    with pytest.raises(fp.UserError) as caught:
        call()
    assert message in str(caught.value)
    assert str(caught.value).endswith(".")
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def history():
    return simulate()


@pytest.mark.parametrize(
    ("images", "client", "message"),
    [
        (X[:3, :4], None, "images takes at least one image as those of the data set, [n, 6, 6, 1], not uint8 [3, 4,"),
        (X[:0], None, "images takes at least one image"),
        (X + 2.0, None, "images takes the data set's integers from 0 to 255, or these scaled to [0, 1]"),
        (-1 - X.astype(int), None, "images takes integers from 0 to 255, as in the data set, or scaled numbers"),
        (X - 0.5, None, "images takes the data set's integers from 0 to 255, or these scaled to [0, 1]"),
        (NAN, None, "images takes the data set's integers from 0 to 255, or these scaled to [0, 1]"),
        ("x", None, "images takes at least one image"),
        (X[:3], 3, "there is no client 3: choose one in [0, 3)."),
        (X[:3], "a", "there is no client a: choose one in [0, 3)."),
    ],
)
def test_outputs_refuses_invalid_images_and_unknown_clients(history, images, client, message):
    with pytest.raises(fp.UserError) as caught:
        history.outputs(images, client)
    assert message in str(caught.value)


@pytest.mark.thorough
@pytest.mark.parametrize("value", ["x", None, np.zeros(3)])
def test_a_metric_must_return_one_number(value):
    with pytest.raises(fp.UserError, match="metrics 'a' must give one number"):
        simulate(metrics={"a": lambda run: value})


def test_plots_refuse_anything_but_axes_and_names_of_curves(history):
    with pytest.raises(fp.UserError, match="ax takes axes of matplotlib, not 3"):
        history.plot(3)
    with pytest.raises(fp.UserError, match="what takes the name of a curve, or several in a list, not 3"):
        fp.plot(history, 3)


def test_plot_and_table_take_a_single_history_without_a_list(history):
    assert len(fp.plot(history, "ga").axes) == 1
    assert fp.table(history) == fp.table([history])
    assert fp.table(history)[0]["pa_protocol"] == "during training"


@pytest.mark.thorough
def test_load_run_refuses_an_unknown_argument_and_an_invalid_federation(tmp_path):
    simulate(run_dir=tmp_path / "run")
    with pytest.raises(fp.UserError, match="load_run takes no argument 'modle': did you mean 'model'"):
        fp.load_run(tmp_path / "run", modle="mlp")
    with pytest.raises(fp.UserError, match=r"federation takes what fp\.partition returns, not 3"):
        fp.load_run(tmp_path / "run", federation=3)


def test_attribute_errors_let_python_suggest_the_right_name():
    with pytest.raises(AttributeError) as caught:
        fp.FedAvgg  # noqa: B018
    assert (caught.value.name, caught.value.obj) == ("FedAvgg", fp)


def test_a_misplaced_argument_is_refused_with_the_place_where_it_belongs(tmp_path):
    with pytest.raises(fp.UserError, match=r"takes no argument 'mu': give it to the method, as FedProx\(mu=0.1\)"):
        simulate(method=fp.FedProx(), mu=0.1)
    with pytest.raises(fp.UserError, match=r"takes no argument 'clients': give it to fp\.partition"):
        simulate(clients=5)
    (tmp_path / "file.yaml").write_text("")
    with pytest.raises(fp.UserError, match=r"file\.yaml is a file"):
        fp.load_run(tmp_path / "file.yaml")


def test_too_few_labels_are_refused_with_their_number():
    with pytest.raises(
        fp.UserError, match=r"y_train must have a label for each of the 5 entries of x_train, not \[4\]"
    ):
        fp.from_arrays(np.zeros((5, 2, 2)), np.zeros(4, int), np.zeros((1, 2, 2)), np.zeros(1, int))


def test_labels_that_begin_at_one_give_a_warning():
    with pytest.warns(UserWarning, match=r"the labels lack 1 of 4 classes \(0\): number all labels from 0"):
        assert fp.from_arrays(X, Y + 1, X, Y + 1).num_classes == 4


def test_labels_with_gaps_give_a_warning_unless_num_classes_is_given():
    with pytest.warns(UserWarning, match=r"the labels lack 1 of 4 classes \(1\)"):
        fp.from_arrays(X, Y + (Y > 0), X, Y * 0)
    with pytest.warns(UserWarning, match=r"the labels lack 198 of 201 classes \(1, 2, 3, \.\.\.\)"):
        assert fp.from_arrays(X, 100 * Y, X, 100 * Y).num_classes == 201
    assert fp.from_arrays(X, 100 * Y, X, 100 * Y, num_classes=201).num_classes == 201


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("pcdd", {"beta": 0.5}, "beta=0.5 has no effect with kind=pcdd."),
        ("dirichlet", {"classes_per_client": 3}, "classes_per_client=3 has no effect with kind=dirichlet."),
        ("iid", {"min_samples": 2}, "min_samples=2 has no effect with kind=iid."),
    ],
)
def test_partition_warns_of_options_without_effect(kind, options, message):
    with pytest.warns(UserWarning, match=f"^{message}$"):
        fp.partition(DATA, kind, clients=2, **{"min_samples": 1 if kind == "dirichlet" else 10, **options})


def test_a_run_in_which_no_client_has_a_weight_is_refused():
    federation = fp.partition(DATA, "iid", clients=2)
    size = int(federation.sizes.max()) + 1
    with pytest.raises(fp.UserError, match="all clients have weight 0 in the mean: lower batch_size, or choose other"):
        fp.simulate(federation, "fedavg", weights="batches", batch_size=size, rounds=1, model="mlp")
