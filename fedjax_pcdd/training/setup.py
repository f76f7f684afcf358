"""`Setup`: all parts of a run, for one experiment or for several that share a program.

Letters: E experiments, K clients.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from time import perf_counter
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from fedjax_pcdd.data import augment
from fedjax_pcdd.data.availability import Availability
from fedjax_pcdd.data.federation import Federation
from fedjax_pcdd.engine.devices import TYPES, CompileClock, available_memory, count_devices, products, select_device
from fedjax_pcdd.engine.executables import forget
from fedjax_pcdd.engine.execution import Execution
from fedjax_pcdd.engine.planning import Experiment
from fedjax_pcdd.engine.program import State
from fedjax_pcdd.engine.simulation import Simulation
from fedjax_pcdd.engine.tuning import choose_lanes
from fedjax_pcdd.errors import Say, UserError
from fedjax_pcdd.methods import Method
from fedjax_pcdd.methods.checks import built
from fedjax_pcdd.methods.declared import check_declared, misspelt, not_called
from fedjax_pcdd.models import is_own
from fedjax_pcdd.models.classifier import Classifier
from fedjax_pcdd.models.convolution_table import Choices, as_json
from fedjax_pcdd.registry import located
from fedjax_pcdd.training import advice, build
from fedjax_pcdd.training.accuracies import Accuracies
from fedjax_pcdd.training.checkpoint import Pace
from fedjax_pcdd.training.config import RunConfig
from fedjax_pcdd.training.device_choices import convolutions_of
from fedjax_pcdd.training.fine_tuning import calibrated, check_calibration, from_global, from_last, global_models
from fedjax_pcdd.training.folder import RunFolder
from fedjax_pcdd.training.initial_weights import started_from
from fedjax_pcdd.training.inputs import digest_of, inputs_of
from fedjax_pcdd.training.loop import Callback, Run
from fedjax_pcdd.training.protocols import IN_WORDS, Protocol, needs_epochs, protocol_of
from fedjax_pcdd.training.trained_models import parts_of
from fedjax_pcdd.trees import select

Pair = tuple[RunConfig, Method]


class Given(NamedTuple):
    """Parts of a run that the user passes as objects, in place of those that the options describe."""

    federation: Federation | None = None
    model: Any = None  # a `Classifier` or what `models.build` takes; a list of these for participants
    pipeline: augment.Pipeline | None = None


NOTHING = Given()


class Setup:
    """Experiments that share a program, ready for training: clients of a partition, all with one architecture.

    Attributes:
      config: configuration of the first experiment; the others differ only in what may differ within a program.
      federations: clients' data of each experiment [E].
      simulation: the simulation with one lane, later the one that trains.
      methods: method of each experiment [E], as the simulation uses it.
      convolutions: forms of convolutions timed on the device, None for those of the packaged table.
      pace: of all experiments' checkpoints, where no other interval is asked for.
    """

    convolutions: Choices | None = None
    simulation: Any = None

    def __init__(self, pairs: Sequence[Pair], given: Given = NOTHING):
        """Build everything except the compiled programs; UserError for settings that cannot work."""
        self.clock, self.started, self.pace = CompileClock(), perf_counter(), Pace()
        select_device(pairs[0][0].device, pairs[0][0].devices)
        if isinstance(jnp.zeros(()), Tracer):
            raise UserError("a run cannot be made while JAX traces a function: call it outside of jax.jit.")
        self.pairs, self.given = self.completed(pairs), given
        self.config = self.pairs[0][0]
        if is_own(given.model or self.config.model or "mlp") or self.config.models:
            forget()
        self.federations = self.federate()
        self.simulation = self.make(1)
        self.methods: list[Method] = [select(self.simulation.methods, e) for e in range(len(pairs))]
        for e in range(len(pairs)):
            self._check(e)
        calibrates = self.config.calibrate == "ccvr"
        self._calibration = [check_calibration(self.simulation, e) if calibrates else [] for e in range(len(pairs))]

    @property
    def tunes(self) -> bool:
        """Whether PA is measured after every client has fine-tuned the global model."""
        return self.methods[0].traits().fine_tunes and self.config.fine_tune_epochs > 0

    @property
    def keeps_best(self) -> bool:
        """Whether the global variables with the best GA are needed at the end."""
        return self.tunes and self.methods[0].traits().global_model

    @property
    def protocol(self) -> Protocol:
        """The protocol of PA."""
        return protocol_of(self.config.pa_protocol, self.pairs[0][1].traits())

    @property
    def tests_epochs(self) -> bool:
        """Whether clients are tested before every local epoch; not if models are fine-tuned after training."""
        traits, config = self.pairs[0][1].traits(), self.config
        one_model = traits.global_model and config.bn != "local-layers"
        return needs_epochs(self.protocol) and not (traits.fine_tunes and one_model and config.fine_tune_epochs)

    @cached_property
    def _digest(self) -> str:
        """Digest of the data set, which all experiments share."""
        return digest_of(self.federations[0].dataset)

    def inputs(self, e: int, config: RunConfig, method: Method) -> dict[str, Any]:
        """The inputs of an experiment, as the user configured it; see `inputs_of`."""
        federation, simulation, model = self.federations[e], self.simulation, self.given.model
        public = simulation.data.public if isinstance(simulation, Simulation) else simulation.images
        images, labels = () if public is None else public, getattr(simulation, "public_labels", None)
        pipeline, availability = self._unusual_pipeline(), self._availability[e]
        return inputs_of(config, method, federation, self._digest, images, pipeline, labels, availability, model)

    def completed(self, pairs: Sequence[Pair]) -> Sequence[Pair]:
        """The experiments, with this kind of run's own defaults for options that were not given."""
        return pairs

    def federate(self) -> list[Federation]:
        """The clients' data of each experiment [E]."""
        if self.given.federation is not None:
            return [build.validated(self.config, self.given.federation)]
        dataset = build.load(self.config)
        return [build.federate(config, dataset) for config, _ in self.pairs]

    def make(self, lanes: int) -> Any:
        """The simulation with this number of lanes."""
        (config, method), federation = self.pairs[0], self.federations[0]
        private, plain = self.pipelines()
        experiments = [
            Experiment(data, m, build.local_training(c, m), c.seed, availability=available)
            for (c, m), data, available in zip(self.pairs, self.federations, self._availability, strict=True)
        ]
        given = self.given.model
        model = (config.model or build.default_model(federation.dataset)) if given is None else given
        if isinstance(model, list | tuple):
            raise UserError(f"{config.method} trains one model: give that, not several.")
        return Simulation(
            built(method, self.in_form(build.build_model(config, model, federation.dataset))), experiments,
            public=(self.public, plain) if method.traits().public else None,
            data=self.simulation and self.simulation.data, pipeline=private,
            cohort=config.cohort or federation.num_clients, **self._settings(),
            execution=replace(
                self._execution(lanes), devices=count_devices(config.devices), client_state=config.client_state,
                stream=self._stream,
            ),
        )  # fmt: skip

    @cached_property
    def public(self) -> np.ndarray:
        """Unlabelled public images [N, H, W, channels]."""
        return build.public_images(self.config, self.federations[0])

    @cached_property
    def _availability(self) -> list[Availability | None]:
        """Which clients are there in a round, of each experiment [E]."""
        pairs = zip(self.pairs, self.federations, strict=True)
        return [build.availability_of(config, federation.num_clients) for (config, _), federation in pairs]

    @cached_property
    def _stream(self) -> int | None:
        """Device memory in bytes for samples sent from the host; None if all samples are on the device."""
        config, dataset = self.config, self.federations[0].dataset
        share = int(min(available_memory(), 2**60) / 3)
        fits = dataset.x_train.nbytes + dataset.x_test.nbytes <= share
        if config.data == "device" or (config.data == "auto" and fits):
            return None
        return share if config.data_memory is None else config.data_memory * 10**6

    def pipelines(self) -> tuple[augment.Pipeline, augment.Pipeline]:
        """The pipelines of private and of public images."""
        config, federation = self.config, self.federations[0]
        dataset, shape, text = federation.dataset.name, federation.image_shape, federation.dataset.text
        private = self.given.pipeline
        if not private and augment.draws_once(dataset, config.augment) and len({c.seed for c, _ in self.pairs}) > 1:
            raise UserError(f"the augmentation of {dataset} depends on the seed: train these with `together=1`.")
        options = {"text": text, "own": config.augmentation, "seed": config.seed}
        private = private or augment.pipeline(dataset, config.augment, shape, **options)
        augment.check_own(private, shape, federation.dataset.x_train.dtype)
        if self.given.pipeline:
            return private, replace(private, crop="none", flip=False, rotate=0.0, own=None)
        return private, augment.pipeline(dataset, False, shape, text=text)

    def _unusual_pipeline(self) -> augment.Pipeline | None:
        """The pipeline that was given, or the private one if it is not customary for the option `dataset`; or None."""
        config, name = self.config, self.federations[0].dataset.name
        usual = config.task is not None or augment.customary(config.dataset) == augment.customary(name)
        return self.given.pipeline or (None if usual else self.pipelines()[0])

    def in_form(self, model: Classifier) -> Classifier:
        """The model with the configured precision and the chosen forms of convolutions."""
        precision = model.precision or products(self.config.precision)
        return model.clone(precision=precision, convolutions=self.convolutions)

    def _execution(self, lanes: int) -> Execution:
        """The execution settings that `Simulation` and `Groups` share."""
        return Execution(lanes=lanes, eval_batch=self.config.eval_batch, dtype=TYPES[self.config.precision])

    def _settings(self) -> dict[str, Any]:
        """The keyword arguments from the options that `Simulation` and `Groups` share."""
        config = self.config
        return {
            "rounds": config.rounds, "weights": config.weights, "tests_epochs": self.tests_epochs,
            "local_statistics": config.bn == "local", "local_layers": config.bn == "local-layers",
            "keeps_optimiser": config.optimizer_state == "kept",
        }  # fmt: skip

    def _check(self, e: int) -> None:
        cohort, clients = self.pairs[e][0].cohort, self.federations[e].num_clients
        if cohort is not None and cohort > clients:
            raise UserError(f"`cohort={cohort}` is more than the {clients} clients: choose a smaller one.")
        self._check_protocol(e)
        if self.tunes:
            tuner = self.simulation.tuning_method(e, self.config.fine_tune_epochs)
            check_declared(tuner)
            if not self.simulation.program.model.head and type(tuner).logits is Method.logits:
                raise UserError(
                    "this method's model has no head, without which the default fine_tuner cannot train it for PA: "
                    "override fine_tuner (often it returns self), or use `fine_tune_epochs=0`."
                )
        if not self.simulation.sizes[e].any():
            raise UserError("no client has any training samples: give them some.")
        if not (self.simulation.steps[e] > 0).any():
            raise UserError(
                "no client has enough samples for one batch: choose a smaller `batch_size` or `last_batch=keep`."
            )
        if not self.simulation.weights[e].any():
            hint = "lower `batch_size`, or choose other `weights` (or, of a method of your own, its weight)"
            raise UserError(f"all clients have weight 0 in the mean: {hint}.")

    def _check_protocol(self, e: int) -> None:
        """Raise UserError if PA of the best epochs cannot be measured."""
        config, traits = self.pairs[e][0], self.methods[e].traits()
        if not needs_epochs(self.protocol) or self.keeps_best:
            return
        may_be_absent = config.availability is not None or config.lost_share
        partial_participation = may_be_absent or config.cohort not in (None, self.federations[e].num_clients)
        if traits.personal_model == "server" and config.eval_every > 1 and partial_participation:
            raise UserError(
                f"`pa_protocol={self.protocol}` of this method looks at each client in the rounds in which it takes "
                "part: use `eval_every=1`."
            )

    def advice(self, e: int) -> list[str]:
        """Sentences about settings without effect, and the method's own advice about the settings."""
        (config, method), federation = self.pairs[e], self.federations[e]
        first = parts_of(self.simulation)[0].simulation
        model, shape = first.program.model, first.image_shape
        sentences = advice.unused(config, method.traits()) + advice.idle(method)
        sentences += advice.about_neck(config.neck, model) + advice.about_norms(config.bn, model, shape)
        sentences += advice.about_precision(config.precision, model, shape)
        sentences += advice.about_rounding(config.precision, federation.dataset)
        sentences += misspelt(method, Method) + not_called(method)
        sentences += advice.too_few(config, federation) + advice.twice(federation)
        sentences += advice.only_tested(federation.dataset)
        if method.traits().needs_public:
            sentences += advice.on_other_scale(federation.dataset)
        return sentences + self.simulation.advice[e] + self._calibration[e]

    def start(self) -> State:
        """The state before the first round, with a file's weights if one is named; UserError if they do not fit."""
        path = self.config.initial_weights
        return self.simulation.start() if path is None else started_from(self.simulation, located(str(path)))

    def settle(self, state: State, noted: Mapping[str, Any] | None, say: Say) -> None:
        """Make the simulation that trains, with its final number of lanes and forms of convolutions.

        Args:
          state: before the first round.
          noted: what `notes` returned when the run began; None for a new run, which follows the options or measures.
          say: called with what the user should know.
        """
        self.convolutions = convolutions_of(self.config, self.simulation, state, noted, say)
        lanes = noted["lanes"] if noted else self.config.lanes
        jobs = len(self.pairs) * (self.config.cohort or self.federations[0].num_clients)
        self.simulation = self.with_fastest_lanes(state, jobs) if lanes == "auto" else self._with_lanes(lanes)

    def _with_lanes(self, lanes: int) -> Any:
        return self.make(lanes) if lanes > 1 or self.convolutions else self.simulation

    def with_fastest_lanes(self, state: State, jobs: int) -> Any:
        """The simulation with the number of lanes that is measured to be fastest for this number of jobs."""
        return choose_lanes(self._with_lanes, state, jobs, self.config.rounds)

    def notes(self) -> dict[str, Any]:
        """The lanes and forms that were settled, for resolved.json, so that a resumed run computes the same numbers."""
        lanes = max(part.simulation.program.lanes for part in parts_of(self.simulation))  # of several architectures
        return {"lanes": lanes, "convolutions": as_json(self.convolutions) if self.convolutions else []}

    def prepared(self, state: State) -> State:
        """The state that the first round starts from."""
        return state

    def accuracies(self, e: int, **more: Any) -> Accuracies:
        """The callback that measures an experiment; `more` are further arguments of `Accuracies`."""
        config = self.pairs[e][0]
        rules = {"keeps_best": self.keeps_best, "select_on": config.chosen_on, "protocol": self.protocol}
        return Accuracies(config.method, every=config.eval_every, **rules, **more)

    def concluded(self, rounds: int, state: State, best: Any, results: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The results [E] plus fine-tuning and calibration after `rounds` rounds; `best` is used if `keeps_best`."""
        results = [result | {"pa_protocol": result["pa_protocol"] + IN_WORDS[self.protocol]} for result in results]
        changes = calibrated(self.simulation, state) if self.config.calibrate == "ccvr" else [{}] * len(results)
        if self.tunes:
            tuner = self.simulation.tuner(self.config.fine_tune_epochs, tests_epochs=needs_epochs(self.protocol))
            if self.keeps_best:
                last = global_models(self.simulation, state)
                tuned = from_global(tuner, best, last, rounds, results, self.protocol)
            else:
                tuned = from_last(tuner, state, rounds, self.protocol)
            changes = [calibration | tuning for calibration, tuning in zip(changes, tuned, strict=True)]
        return [result | change for result, change in zip(results, changes, strict=True)]

    def pictures(self, folder: RunFolder) -> list[Callback]:
        """Callbacks that write the files which only this kind of run has."""
        return []

    def more_results(self, run: Run) -> dict[str, Any]:
        """Entries of a summary besides accuracies and costs."""
        return {}
