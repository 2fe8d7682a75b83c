"""How inputs of single samples become those of a batch."""

from types import SimpleNamespace

import torch

from covey.core.media import Media, unexpanded
from covey.core.model import image_inputs, media_inputs, placeholder_ids


def media(start, length, marks=(), **tensors):
    marked = {"kinds": torch.tensor(marks)} if marks else {}
    return Media(("image",), tensors, marked, start, length, (7,))


def test_inputs_are_concatenated_and_smaller_ones_padded():
    """Three tiles beside one: [1, 3] and [1, 1] become [2, 3] with zeros; sizes [n, 2] need nothing."""
    one = media(0, 2, tiles=torch.ones(1, 3), sizes=torch.tensor([[4, 5]]))
    two = media(1, 2, tiles=torch.full((1, 1), 2.0), sizes=torch.tensor([[6, 7], [8, 9]]))
    inputs = media_inputs([(one,), (), (two,)], 4, torch.device("cpu"))
    assert inputs["tiles"].tolist() == [[1, 1, 1], [2, 0, 0]]
    assert inputs["sizes"].tolist() == [[4, 5], [6, 7], [8, 9]]


def test_marks_stand_in_their_columns():
    rows = [(media(1, 2, (1, 0)),), (), (media(0, 1, (1,)), media(2, 2, (2, 2)))]
    marks = media_inputs(rows, 4, torch.device("cpu"))["kinds"]
    assert marks.tolist() == [[0, 1, 0, 0], [0, 0, 0, 0], [1, 0, 2, 2]]


def test_rows_of_text_have_no_inputs():
    assert media_inputs([(), ()], 3, torch.device("cpu")) == {}


def test_images_are_looked_for_only_where_there_are_images():
    """Token 9 stands for an image; at the end of the first row and in the second the policy wrote it."""
    embedding = torch.nn.Embedding(10, 2)
    model = SimpleNamespace(config=SimpleNamespace(image_token_id=9), get_input_embeddings=lambda: embedding)
    ids = torch.tensor([[1, 9, 9, 5, 9], [9, 2, 3, 9, 0]])
    with image_inputs(model, ids, [(media(1, 2),), ()], 4) as inputs:
        seen = inputs["input_ids"]
        assert seen.tolist() == [[1, 9, 9, 5, 4], [4, 2, 3, 4, 0]]
        assert torch.equal(embedding(seen), embedding.weight[ids])  # they are read as what they are
    assert torch.equal(embedding(seen), embedding.weight[seen])
    with image_inputs(model, ids[:1, :4], [(media(1, 2),)], 4) as inputs:
        assert inputs["input_ids"].tolist() == ids[:1, :4].tolist()


def test_servers_get_one_token_for_each_image():
    """Two stretches: [9 9] is written 7, [9 9 9] is written 7."""
    first, second = media(1, 2), media(4, 3)
    assert unexpanded([1, 9, 9, 2, 9, 9, 9, 3], [second, first]) == [1, 7, 2, 7, 3]


def test_what_stands_for_an_image_is_read_from_the_configuration():
    class Config:
        image_token_id, video_token_index, image_token_index = 5, 8, None

    assert placeholder_ids(Config()) == [5, 8] and placeholder_ids(object()) == []
