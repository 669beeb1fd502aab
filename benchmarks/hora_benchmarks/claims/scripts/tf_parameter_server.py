"""The script of tf_plain.py under TensorFlow's ParameterServerStrategy, as its tutorial's custom loop advises.

The cluster and one's own place in it come from TF_CONFIG; workers and parameter servers only serve; the chief builds
the model on the servers and hands steps to whichever worker is free. Each worker reads all samples, in its own order.

CLUSTER='{"chief": ["a:2220"], "ps": ["a:2221"], "worker": ["a:2222", "b:2222"]}'
a$ TF_CONFIG='{"cluster": '$CLUSTER', "task": {"type": "ps", "index": 0}}' python tf_parameter_server.py digits.gz
a$ TF_CONFIG='{"cluster": '$CLUSTER', "task": {"type": "worker", "index": 0}}' python tf_parameter_server.py digits.gz
b$ TF_CONFIG='{"cluster": '$CLUSTER', "task": {"type": "worker", "index": 1}}' python tf_parameter_server.py digits.gz
a$ TF_CONFIG='{"cluster": '$CLUSTER', "task": {"type": "chief", "index": 0}}' python tf_parameter_server.py digits.gz
"""

import argparse
import gzip
import pathlib

import numpy as np
import tensorflow as tf  # type: ignore[import-untyped]


def digits(path: str) -> tuple[np.ndarray, np.ndarray]:
    raw = np.frombuffer(gzip.decompress(pathlib.Path(path).read_bytes()), np.uint8)
    return (raw[1797:].reshape(1797, 8, 8, 1) / 16).astype(np.float32), raw[:1797].astype(np.int64)


def build() -> tf.keras.Model:
    return tf.keras.Sequential(
        [
            tf.keras.Input((8, 8, 1)),
            tf.keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
            tf.keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            tf.keras.layers.MaxPool2D(2),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(10),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", help="digits.gz of hora.datasets")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--save", default="checkpoint")
    args = parser.parse_args()

    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type in ("worker", "ps"):
        tf.distribute.Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id, protocol="grpc").join()
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)

    tf.random.set_seed(0)
    images, labels = digits(args.data)
    steps = -(-1500 // args.batch)

    def read() -> tf.data.Dataset:
        train = tf.data.Dataset.from_tensor_slices((images[:1500], labels[:1500])).shuffle(1500).batch(args.batch)
        return train.repeat()

    iterator = iter(coordinator.create_per_worker_dataset(read))
    test = tf.data.Dataset.from_tensor_slices((images[1500:], labels[1500:])).batch(256)
    with strategy.scope():
        model = build()
        schedule = tf.keras.optimizers.schedules.CosineDecay(args.lr, args.epochs * steps)
        optimizer = tf.keras.optimizers.SGD(schedule, momentum=0.9)

    def replica_step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def step(iterator: tf.data.Iterator) -> tf.Tensor:
        x, y = next(iterator)
        return strategy.reduce("MEAN", strategy.run(replica_step, args=(x, y)), axis=None)

    for epoch in range(args.epochs):
        for _ in range(steps):
            coordinator.schedule(step, args=(iterator,))
        coordinator.join()

        right = 0
        for x, y in test:
            right += int(tf.reduce_sum(tf.cast(tf.argmax(model(x), 1) == y, tf.int32)))
        print(f"epoch {epoch}: test accuracy {right / 297:.1%}")

    tf.train.Checkpoint(model=model).write(args.save)


if __name__ == "__main__":
    main()
