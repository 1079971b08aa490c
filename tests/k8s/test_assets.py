"""Where the API server comes from."""

from pathlib import Path

import pytest

from scripts.kubernetes import assets
from scripts.kubernetes.server import reach


def test_a_named_folder_is_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(tmp_path))
    (tmp_path / "etcd").touch()
    with pytest.raises(assets.Unavailable, match=r"has no kube-apiserver$"):
        assets.build()
    (tmp_path / "kube-apiserver").touch()
    assert assets.build() == assets.find() == assets.Assets(
        etcd=tmp_path / "etcd", apiserver=tmp_path / "kube-apiserver"
    )  # fmt: skip


def test_an_empty_cache_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBEBUILDER_ASSETS", raising=False)
    with pytest.raises(assets.Unavailable, match="`make kubernetes` builds one"):
        assets.find(tmp_path)


def test_what_is_in_the_cache_is_not_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBEBUILDER_ASSETS", raising=False)
    monkeypatch.setenv("PATH", "")  # a build would find no apt-get
    with pytest.raises(assets.Unavailable, match="no apt-get"):
        assets.build(tmp_path)
    for name in ("etcd", "kube-apiserver"):
        (tmp_path / name).touch()
    assert assets.build(tmp_path).etcd == tmp_path / "etcd"


def test_none_is_built_where_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CI", "1")
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(tmp_path))  # has none: a failure in CI
    monkeypatch.setenv("KUBECONFIG", "/a/config")
    assets.main()
    assert capsys.readouterr().out.strip().endswith("KUBECONFIG names a server: /a/config")
    with reach(tmp_path) as server:
        assert (server.kubeconfig, server.pids) == (Path("/a/config"), ())


def test_source_archives_of_a_list() -> None:
    text = "# deb no\ndeb http://x/debian bookworm main\ndeb http://x/other stable main\n"
    assert assets.source_entries(text, deb822=False) == "deb-src http://x/debian bookworm main\n"


def test_source_archives_of_stanzas() -> None:
    text = (
        "Types: deb\n# a comment\nURIs: http://x/debian\nSuites: bookworm\nComponents: main\n\n"
        "Types: deb\nURIs: http://x/other\nSuites: stable\n"
    )
    wanted = "Types: deb-src\nURIs: http://x/debian\nSuites: bookworm\nComponents: main\n"
    assert assets.source_entries(text, deb822=True) == wanted
