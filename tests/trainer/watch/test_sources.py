import torch

from elastic.trainer.watch import sources


def test_each_source_has_the_sum_of_its_losses_and_its_tokens() -> None:
    losses = torch.tensor([[1.0, 3.0], [10.0, 99.0], [5.0, 7.0]])
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    found = sources.of_leaf(losses, mask, torch.tensor([0, 2, 0]), 3)
    assert found.tolist() == [[16.0, 4.0], [0.0, 0.0], [10.0, 1.0]]


def test_names_tell_sources_apart() -> None:
    paths = ["/data/wiki_text_document", "a/code", "b/code"]
    assert sources.names(paths) == ["wiki_text_document", "code-1", "code-2"]
