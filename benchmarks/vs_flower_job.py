"""The digits app of examples/flower_digits as a native federated job: same model, split, local SGD.

Batches of a client are full ones of 32 of a seeded order; the app takes the same ones where its `paired-with`
says so, else accuracies are near the app's, not equal.
``write_clients`` makes what the data owners register, as "digits-SEED".
"""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save_file

from atoll import Federated, Job, Optimizer, OptimizerName, Registered, TrainingSpec
from benchmarks.federated_mnist import Plain
from examples.flower_digits.flower_digits import task

ROUNDS = 5
HIDDEN = 128
LOCAL_EPOCHS = 2
LOCAL_STEPS = 0
LEARNING_RATE = 0.1
UPLINK = "off"
DOWNLINK = "off"
EVALUATE_EVERY = 1
HELD_OUT_SHARE = 0.02  # of a client's images, for its own evaluation; the app evaluates on what it trains on
SEED = 0


def write_clients(folder: Path, clients: int, seed: int = SEED) -> list[Path]:
    """One safetensors file a client, fields pixels and label."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for client in range(clients):
        pixels, label = task.partition(client, clients, 0.5, seed)
        paths.append(folder / f"client-{client}.safetensors")
        save_file({"pixels": pixels.contiguous(), "label": label.contiguous()}, paths[-1])
    return paths


def job() -> Job:
    """What Atoll trains, where the data is."""
    pixels, labels = task.held_out()
    return Job(
        module=Plain(task.make_model(SEED, HIDDEN)),
        example_inputs={"x": pixels[: task.BATCH], "y": labels[: task.BATCH]},
        data=Registered(f"digits-{SEED}", {"x": "pixels", "y": "label"}, held_out={"x": pixels, "y": labels}),
        training=TrainingSpec(
            steps=ROUNDS,
            n_micro=1,
            seed=SEED,
            optimizer=Optimizer(OptimizerName.SGD, lr=LEARNING_RATE),
            eval_every=1,
            eval_batches=task.HELD_OUT // task.BATCH,
        ),
        federated=Federated(
            "fedavg",
            local_epochs=LOCAL_EPOCHS,
            local_steps=LOCAL_STEPS,
            min_clients=2,
            evaluate_every=EVALUATE_EVERY,
            held_out=HELD_OUT_SHARE,
            uplink=UPLINK,
            downlink=DOWNLINK,
        ),
        metrics=("accuracy",),
        name="digits",
    )
