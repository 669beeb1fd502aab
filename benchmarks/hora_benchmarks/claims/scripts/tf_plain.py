"""A convolutional net learns handwritten digits with TensorFlow in one process: what tf_parameter_server.py changes.

a$ python tf_plain.py digits.gz
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

    tf.random.set_seed(0)
    images, labels = digits(args.data)
    steps = -(-1500 // args.batch)
    train = tf.data.Dataset.from_tensor_slices((images[:1500], labels[:1500])).shuffle(1500).batch(args.batch)
    test = tf.data.Dataset.from_tensor_slices((images[1500:], labels[1500:])).batch(256)
    model = build()
    schedule = tf.keras.optimizers.schedules.CosineDecay(args.lr, args.epochs * steps)
    optimizer = tf.keras.optimizers.SGD(schedule, momentum=0.9)

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    for epoch in range(args.epochs):
        for x, y in train:
            step(x, y)

        right = 0
        for x, y in test:
            right += int(tf.reduce_sum(tf.cast(tf.argmax(model(x), 1) == y, tf.int32)))
        print(f"epoch {epoch}: test accuracy {right / 297:.1%}")

    tf.train.Checkpoint(model=model).write(args.save)


if __name__ == "__main__":
    main()
