"""Memory that was refused is asked for again, ever more rarely, and at once where it is another."""

from elastic.checkpoint.save.want import MOST, Want


def test_it_is_asked_again_ever_more_rarely() -> None:
    want, asked = Want(), []
    for save in range(150):
        if want.asks(4096):
            asked.append(save)
            want = want.refused(4096)
        else:
            want = want.passed()
    assert asked == [0, 2, 5, 10, 19, 36, 69, 102, 135]
    assert asked[-1] - asked[-2] == MOST + 1


def test_another_size_is_asked_for_at_once() -> None:
    want = Want().refused(4096).refused(4096)
    assert not want.asks(4096)
    assert want.asks(8192)
    assert want.refused(8192) == Want(bytes=8192, times=1, left=1)
