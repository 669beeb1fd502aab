"""What ships with the package is whole, in range, and read as documented."""

from __future__ import annotations

import torch

from hora.datasets import digits


def test_digits_are_1500_and_297_images_with_labels() -> None:
    for dataset, count in zip(digits(), (1500, 297), strict=True):
        images, labels = dataset.tensors
        assert images.shape == (count, 1, 8, 8) and images.dtype == torch.float32
        assert labels.shape == (count,) and labels.dtype == torch.int64
        assert len(dataset) == count


def test_digits_use_the_whole_range_in_steps_of_a_sixteenth() -> None:
    images = torch.cat([dataset.tensors[0] for dataset in digits()])
    assert images.min() == 0 and images.max() == 1
    assert torch.equal(images * 16, (images * 16).round())


def test_digits_have_every_class_about_equally_often() -> None:
    train, test = (torch.bincount(dataset.tensors[1], minlength=10) for dataset in digits())
    assert (train + test).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert train.min() >= 140 and test.min() >= 25


def test_digits_are_the_pictures_that_everybody_knows() -> None:
    image, label = digits()[0][0]
    assert label == 0
    assert (image[0, 0] * 16).tolist() == [0, 0, 5, 13, 9, 1, 0, 0]
    assert (image[0, 7] * 16).tolist() == [0, 0, 6, 13, 10, 0, 0, 0]


def test_digits_tell_train_from_test() -> None:
    train, test = digits()
    seen = {tuple(image.flatten().tolist()) for image in train.tensors[0]}
    assert not seen & {tuple(image.flatten().tolist()) for image in test.tensors[0]}
