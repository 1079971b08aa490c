"""etcd and a real kube-apiserver for the tests and the demo: `make kubernetes`.

`KUBEBUILDER_ASSETS` names a folder that has both, `KUBECONFIG` a server that runs already. Without
these they are made once, into ~/.cache/elastic/kubernetes: etcd is Debian's package, unpacked;
kube-apiserver is built from Debian's own source package (about 5 minutes on two cores; needs root,
for the compiler). Debian's release 1.20 has RBAC, structural schemas, server-side apply and dry run;
it has no CEL.
"""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

RECIPE = 3
"""Raised with a change of the build, so that no older one's server is used."""
CACHE = Path.home() / ".cache" / "elastic" / "kubernetes" / str(RECIPE)
_EMPTY_IS_NONE = " || reflect.DeepEqual(reflect.Zero(reflect.TypeOf(data)), reflect.ValueOf(data))"
TOOLS = ("golang-go", "dpkg-dev", "rsync", "jq", "make", "gcc", "libc6-dev")
"""Packages that the build needs; what they bring is left installed."""


class Unavailable(Exception):
    """No API server can be had here; the message says why and what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Assets:
    """The two programs."""

    etcd: Path
    """Of 3.4 or newer."""
    apiserver: Path
    """kube-apiserver."""


def find(cache: Path = CACHE) -> Assets:
    """What is there already; raises Unavailable where it must be built first."""
    named = os.environ.get("KUBEBUILDER_ASSETS")
    folder = Path(named) if named else cache
    assets = Assets(etcd=folder / "etcd", apiserver=folder / "kube-apiserver")
    missing = [path.name for path in (assets.etcd, assets.apiserver) if not path.is_file()]
    if missing and named:
        raise Unavailable(f"KUBEBUILDER_ASSETS={named} has no {' and no '.join(missing)}")
    if missing:
        raise Unavailable(
            "no kube-apiserver: `make kubernetes` builds one (about 5 minutes, once), "
            "or KUBEBUILDER_ASSETS names a folder with etcd and kube-apiserver"
        )
    return assets


def build(cache: Path = CACHE) -> Assets:
    """`find`, and what it does not find is made; callers at the same time build once."""
    if os.environ.get("KUBEBUILDER_ASSETS"):
        return find()
    cache.mkdir(parents=True, exist_ok=True)
    with _locked(cache / "lock"):
        try:
            return find(cache)
        except Unavailable:
            with tempfile.TemporaryDirectory(dir=cache, prefix="build-") as folder:
                _Build(Path(folder)).into(cache)
            return find(cache)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class _Build:
    """One build, in a folder that goes away with it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._log = folder.parent / "build.log"
        self._log.unlink(missing_ok=True)

    def into(self, cache: Path) -> None:
        """Both programs, each put in place whole."""
        if not shutil.which("apt-get"):
            raise Unavailable(
                "no kube-apiserver, and no apt-get to get one: set KUBEBUILDER_ASSETS"
            )
        options = self._sources()
        self._tools()
        self._run("apt-get", *options, "-qq", "update")
        for path in (self._etcd(), self._apiserver(options)):
            os.replace(path, cache / path.name)

    def _sources(self) -> list[str]:
        """Options that have apt read this machine's Debian archives for sources, apart from
        what the machine itself is set to read."""
        parts = self._folder / "apt" / "sources.d"
        parts.mkdir(parents=True)
        (self._folder / "apt" / "lists").mkdir()
        system = Path("/etc/apt")
        for number, path in enumerate(
            [system / "sources.list", *sorted((system / "sources.list.d").glob("*"))]
        ):
            if path.suffix in (".list", ".sources") and path.is_file():
                text = source_entries(path.read_text(), deb822=path.suffix == ".sources")
                (parts / f"{number}{path.suffix}").write_text(text)
        return [
            f"-oDir::Etc::SourceParts={parts}",
            "-oDir::Etc::SourceList=/dev/null",
            f"-oDir::State::Lists={self._folder / 'apt' / 'lists'}",
        ]

    def _tools(self) -> None:
        query = ["dpkg-query", "-W", "-f", "${db:Status-Abbrev}\n", *TOOLS]
        known = subprocess.run(query, capture_output=True, text=True, check=False).stdout
        if known.split() == ["ii"] * len(TOOLS):
            return
        if os.geteuid():
            raise Unavailable(
                f"building kube-apiserver needs root, or {', '.join(TOOLS)} installed"
            )
        self._run("apt-get", "-qq", "update")
        self._run("apt-get", "-qq", "-y", "--no-install-recommends", "install", *TOOLS)

    def _etcd(self) -> Path:
        """Unpacked and not installed: its package would start a server of its own."""
        lists = Path("/var/lib/apt/lists")
        if not any(lists.glob("*_Packages*")):
            self._run("apt-get", "-qq", "update")
        self._run("apt-get", "-qq", "download", "etcd-server")
        (package,) = self._folder.glob("etcd-server_*.deb")
        self._run("dpkg-deb", "-x", package.name, "etcd-server")
        return self._folder / "etcd-server" / "usr" / "bin" / "etcd"

    def _apiserver(self, options: list[str]) -> Path:
        self._run("apt-get", *options, "-qq", "--download-only", "source", "kubernetes")
        (description,) = self._folder.glob("kubernetes_*.dsc")
        self._run("dpkg-source", "-x", description.name, "tree")
        tree = self._folder / "tree"
        link = self._folder / "go" / "src" / "k8s.io" / "kubernetes"
        link.parent.mkdir(parents=True)
        link.symlink_to(tree)
        environ = {
            "GOPATH": str(self._folder / "go"),
            "GOCACHE": str(self._folder / "go-cache"),
            "GOFLAGS": "",
            "GO111MODULE": "off",  # all that it needs is in its vendor folder
            "PATH": f"/usr/lib/go/bin:{os.environ['PATH']}",  # Debian's, whatever else is there
        }
        self._mend(tree)
        # Its OpenAPI is generated first, so a plain `go build` does not do.
        self._run("make", "WHAT=cmd/kube-apiserver", cwd=link, environ=environ)
        return tree / "_output" / "local" / "go" / "bin" / "kube-apiserver"

    def _mend(self, tree: Path) -> None:
        """Two things that Go did otherwise before 1.18. reflect2 1.0.1 walks maps so, and a server that
        Debian's Go builds dies at a custom resource; Debian has 1.0.2, too. And the check of types meant
        nil alone by a comparison that finds an empty text to be none now."""
        self._run("apt-get", "-qq", "download", "golang-github-modern-go-reflect2-dev")
        (package,) = self._folder.glob("golang-github-modern-go-reflect2-dev_*.deb")
        self._run("dpkg-deb", "-x", package.name, "reflect2")
        inside = Path("github.com/modern-go/reflect2")
        vendored = tree / "vendor" / inside
        shutil.rmtree(vendored)
        source = self._folder / "reflect2" / "usr/share/gocode/src" / inside
        shutil.copytree(source, vendored, ignore=shutil.ignore_patterns("*_test.go", "test"))
        types = tree / "vendor/k8s.io/kube-openapi/pkg/validation/validate/type.go"
        text, odd = types.read_text(), _EMPTY_IS_NONE
        if text.count(odd) != 1:
            raise Unavailable(
                f"{types.name} is not as it was: what it takes for null is to be read"
            )
        types.write_text(text.replace(odd, ""))

    def _run(
        self, *command: str, cwd: Path | None = None, environ: dict[str, str] | None = None
    ) -> None:
        """A step; what it says goes to build.log, its end to the message where it fails."""
        everything = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
        everything |= environ or {}
        if cwd:
            everything["PWD"] = str(cwd)  # so that make sees the path within GOPATH
        with self._log.open("ab") as log:
            done = subprocess.run(
                command,
                cwd=cwd or self._folder,
                env=everything,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                check=False,
            )
        if done.returncode:
            lines = self._log.read_text(errors="replace").splitlines()[-5:]
            raise Unavailable(
                f"`{' '.join(command[:4])}` failed ({self._log}): {' | '.join(lines)}"
            )


def source_entries(text: str, *, deb822: bool) -> str:
    """An apt sources file's Debian archives, as archives of source packages."""
    if not deb822:
        lines = [line for line in text.splitlines() if line.startswith("deb ") and "debian" in line]
        return "".join(f"deb-src{line.removeprefix('deb')}\n" for line in lines)
    stanzas = []
    for stanza in text.split("\n\n"):
        lines = [line for line in stanza.splitlines() if not line.startswith("#")]
        if any(line.lower().startswith("uris:") and "debian" in line for line in lines):
            types = [line for line in lines if not line.lower().startswith("types:")]
            stanzas.append("\n".join(["Types: deb-src", *types]) + "\n")
    return "\n".join(stanzas)


def main() -> None:
    """Make them, at a low priority; where they cannot be had: a word, and in CI a failure."""
    if named := os.environ.get("KUBECONFIG"):
        print(f"kubernetes: none is built, since KUBECONFIG names a server: {named}")
        return
    os.nice(19)
    try:
        assets = build()
    except Unavailable as error:
        print(f"kubernetes: {error}", file=sys.stderr)
        raise SystemExit(1 if os.environ.get("CI") else 0) from error
    print(f"kubernetes: {assets.apiserver}")


if __name__ == "__main__":
    main()
