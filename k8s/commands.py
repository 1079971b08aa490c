"""`elasticctl submit | ls | scale | suspend | resume | delete`: ElasticJobs, through the API server."""

import argparse
import asyncio
import json
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from elastic.k8s import following, listing, submission
from elastic.k8s.kernel.api import Api, Json
from elastic.k8s.kernel.errors import Absent, Forbidden, Unauthorized
from elastic.k8s.resources import ELASTICJOBS
from elastic.k8s.rules import violations
from elastic.k8s.submission import Nodes, Submission, Volume
from elastic.proto.errors import UsageError
from elastic.proto.verbs import Context, Output, count, forms, said

NOT_FOUND, TIMED_OUT, NOT_ALLOWED = 3, 4, 5
"""Exit codes, beside 0 done, 1 it could not be done or the job failed, 2 usage, 130 ^C."""
FORMS = ("table", "wide", "json", "yaml", "name")


# --- the verbs -----------------------------------------------------------------------------------


@forms(*FORMS)
def submit(context: Context, argv: Sequence[str]) -> int:
    """Start an ElasticJob on a Kubernetes cluster: from a file, or from a torchrun command."""
    flags, command = _split(argv)
    parser = _submit_parser()
    args = parser.parse_args(flags)
    bodies = _bodies(parser, args, command)

    async def work(api: Api) -> int:
        whole = [_placed(api, args, body) for body in bodies]
        created = [await _try(api, body) for body in whole]  # before any is made
        for n, body in enumerate(whole):
            if not args.dry_run:
                created[n] = await api.create(ELASTICJOBS, body["metadata"]["namespace"], body)
            _show_written(context.out, created[n], "created", dry_run=args.dry_run)
        if args.dry_run or not (args.wait or args.follow):
            return 0
        until = following.begun if args.wait else following.over
        codes = [
            await following.follow(api, item, context.out, args, until=until) for item in created
        ]
        return max(codes)

    return _run(context, args, work)


@forms(*FORMS)
def ls(context: Context, argv: Sequence[str]) -> int:
    """ElasticJobs of a Kubernetes cluster, as the server's columns have them."""
    parser = _parser("ls", ls)
    parser.add_argument("name", nargs="?", type=said, help="this one alone")
    parser.add_argument("-A", "--all-namespaces", action="store_true", help="of every namespace")
    parser.add_argument("-l", "--selector", default="", metavar="LABELS", help="with these labels")
    _add_follow(parser, "go on until the job is over; needs a NAME")
    args = parser.parse_args(argv)
    if args.follow and not args.name:
        parser.error("--follow follows one job: give its NAME")
    if args.name and (args.all_namespaces or args.selector):
        parser.error("a NAME is one job: give no -A and no -l beside it")

    async def work(api: Api) -> int:
        if args.follow:
            item = await _get(api, args.name, _space(api, args))
            return await following.follow(api, item, context.out, args, until=following.over)
        space = "" if args.all_namespaces else _space(api, args)
        await listing.show(api, context.out, space, name=args.name or "", selector=args.selector)
        return 0

    return _run(context, args, work)


@forms(*FORMS)
def scale(context: Context, argv: Sequence[str]) -> int:
    """Give an ElasticJob another number of worker pods, within its range."""
    parser = _parser("scale", scale)
    parser.add_argument("name", type=said, help="the job")
    parser.add_argument("nodes", type=count, help="worker pods that it should have")
    _add_write(parser, "until so many are ready")
    args = parser.parse_args(argv)

    def settled(item: Json) -> bool:
        return bool(item.get("status", {}).get("readyReplicas") == args.nodes)

    patch = {"spec": {"worker": {"replicas": args.nodes}}}
    return _edit(context, args, patch, f"scaled to {args.nodes}", settled, needs_pods=args.wait)


@forms(*FORMS)
def suspend(context: Context, argv: Sequence[str]) -> int:
    """Have an ElasticJob save what it has and give up its pods, until it is resumed."""
    return _set_suspend(
        context, argv, suspend, True, lambda item: following.is_true(item, "Suspended")
    )


@forms(*FORMS)
def resume(context: Context, argv: Sequence[str]) -> int:
    """Have a suspended ElasticJob go on where it was."""
    return _set_suspend(context, argv, resume, False, following.begun)


@forms(*FORMS)
def delete(context: Context, argv: Sequence[str]) -> int:
    """Delete ElasticJobs: each saves what it has, then its pods go."""
    parser = _parser("delete", delete)
    parser.add_argument("names", nargs="+", type=said, metavar="name", help="the jobs")
    _add_write(parser, "until they are gone")
    args = parser.parse_args(argv)

    async def work(api: Api) -> int:
        found = [await _get(api, name, _space(api, args)) for name in args.names]
        for item in found:
            metadata = item["metadata"]
            await api.delete(
                ELASTICJOBS,
                metadata["namespace"],
                metadata["name"],
                uid=metadata["uid"],
                dry_run=args.dry_run,
            )
            _show_written(context.out, item, "deleted", dry_run=args.dry_run)
        if args.wait and not args.dry_run:
            for item in found:
                await following.gone(api, item, args.timeout)
        return 0

    return _run(context, args, work)


# --- arguments -----------------------------------------------------------------------------------


def _submit_parser() -> argparse.ArgumentParser:
    parser = _parser("submit", submit)
    parser.usage = "elasticctl submit (-f FILE | --image IMAGE [flags] -- torchrun ...)"
    add = parser.add_argument
    add("-f", "--file", metavar="FILE", help="ElasticJobs in YAML or JSON; - is standard input")
    add("--name", type=said, help="the job's name (made from the script's)")
    add("--image", default="", help="what the pods run")
    add("--nodes", default="1", metavar="N|MIN:MAX", help="worker pods (1)")
    add("--node-unit", type=count, default=1, metavar="N", help="only multiples of N pods (1)")
    add("--spares", type=count, default=0, metavar="N", help="hot spares beside them (0)")
    add("--gpus", type=count, default=0, metavar="N", help="GPUs of each pod (0)")
    add(
        "--gpu-resource",
        type=said,
        default=submission.GPU,
        metavar="NAME",
        help=f"({submission.GPU})",
    )
    add("--cpus", default="", metavar="QUANTITY", help="CPUs that each pod requests")
    add("--memory", default="", metavar="QUANTITY", help="memory of each pod: request and limit")
    add("--nproc-per-node", default="", metavar="N|auto|gpu|cpu", help="ranks of each pod (auto)")
    add("--priority", type=said, metavar="CLASS", help="the pods' priority class")
    add("--gang", choices=("Kueue", "Volcano", "Coscheduling"), help="who places the pods together")
    add("--queue", type=said, metavar="NAME", help="its queue, of Kueue or Volcano")
    add("--env", action="append", default=[], metavar="NAME=VALUE", help="for the script")
    add("--volume", action="append", default=[], metavar="SOURCE:/PATH[:ro]",
        help="a PersistentVolumeClaim, or a path on the nodes, at this path")  # fmt: skip
    add("--workdir", default="", metavar="DIR", help="where the command runs")
    add("--suspended", action="store_true", help="made, but not started: resume does that")
    _add_write(parser, "until it trains")
    _add_follow(parser, "say what happens until the job is over; ^C leaves it running")
    return parser


def _parser(name: str, verb: Any) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"elasticctl {name}", description=verb.__doc__, allow_abbrev=False
    )
    where = parser.add_argument_group("the cluster")
    where.add_argument("--kubeconfig", type=said, metavar="FILE", help="(as kubectl finds it)")
    where.add_argument(
        "--context", type=said, metavar="NAME", help="of the kubeconfig (its current one)"
    )
    where.add_argument("-n", "--namespace", type=said, help="(the context's)")
    return parser


def _add_write(parser: argparse.ArgumentParser, until: str) -> None:
    parser.add_argument(
        "--dry-run", action="store_true", help="have the server check it, and write nothing"
    )
    parser.add_argument("--wait", action="store_true", help=f"come back no sooner than {until}")
    parser.add_argument(
        "--timeout", type=_seconds, metavar="SECONDS", help="of --wait and --follow (none)"
    )


def _add_follow(parser: argparse.ArgumentParser, words: str) -> None:
    parser.add_argument("--follow", action="store_true", help=words)
    if not any(action.dest == "timeout" for action in parser._actions):
        parser.add_argument(
            "--timeout", type=_seconds, metavar="SECONDS", help="of --follow (none)"
        )


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return seconds


def _split(argv: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """What stands before `--`, and the command behind it."""
    words = list(argv)
    if "--" not in words:
        return words, ()
    at = words.index("--")
    return words[:at], tuple(words[at + 1 :])


def _bodies(
    parser: argparse.ArgumentParser, args: argparse.Namespace, command: tuple[str, ...]
) -> list[Json]:
    """The ElasticJobs that are meant, without a namespace where none is said."""
    if args.wait and args.follow:
        parser.error("--wait comes back once the job trains, --follow once it is over: give one")
    if args.file is not None:
        if command or args.image or args.name:
            parser.error("-f FILE says all of a job: give no --name, --image or command beside it")
        bodies = _read(args.file)
    elif not command or not args.image:
        parser.error("say what to run: -f FILE, or --image IMAGE ... -- torchrun ... script.py")
    else:
        try:
            bodies = [submission.manifest(_submission(args, command), "")]
        except UsageError as error:
            parser.error(str(error))
    if args.wait and any((body.get("spec") or {}).get("suspend") for body in bodies):
        parser.error("a suspended job does not train before it is resumed: leave --wait out")
    return bodies


def _submission(args: argparse.Namespace, command: tuple[str, ...]) -> Submission:
    return Submission(
        name=args.name or "",
        image=args.image,
        command=command,
        nodes=Nodes.read(args.nodes),
        gpus=args.gpus,
        gpu_resource=args.gpu_resource,
        cpus=args.cpus and submission.quantity("--cpus", args.cpus),
        memory=args.memory and submission.quantity("--memory", args.memory),
        nproc_per_node=args.nproc_per_node,
        node_unit=args.node_unit,
        spares=args.spares,
        priority=args.priority or "",
        gang=args.gang or "",
        queue=args.queue or "",
        env=submission.variables(args.env),
        volumes=tuple(Volume.read(text) for text in args.volume),
        workdir=args.workdir,
        suspended=args.suspended,
    )


def _read(file: str) -> list[Json]:
    """ElasticJobs of a file. Raises UsageError."""
    import yaml

    class Loader(yaml.SafeLoader):
        """As JSON has it: a day is a text. And of two values of one key none is meant more than the other."""

        def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
            node = super().compose_mapping_node(anchor)
            keys = Counter((key.tag, key.value) for key, _ in node.value if key.id == "scalar")
            for (_, key), times in keys.items():
                if times > 1:
                    raise yaml.MarkedYAMLError(
                        problem=f"{key} is there {times} times: write it once",
                        problem_mark=node.start_mark,
                    )
            return node

    Loader.yaml_implicit_resolvers = {
        first: [one for one in some if not one[0].endswith(":timestamp")]
        for first, some in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    text = sys.stdin.read() if file == "-" else Path(file).read_text(errors="replace")
    try:
        found = [body for body in yaml.load_all(text, Loader) if body is not None]
        json.dumps(found, allow_nan=False)
    except yaml.YAMLError as error:
        raise UsageError(f"{file} is no YAML: {' '.join(str(error).split())}") from error
    except (TypeError, ValueError) as error:
        raise UsageError(f"{file} holds what JSON has not: {error}") from error
    except RecursionError:
        raise UsageError(f"{file} is no ElasticJob: its brackets are nested too deep") from None
    for body in found:
        kind = (body.get("apiVersion"), body.get("kind")) if isinstance(body, dict) else None
        if kind != (ELASTICJOBS.api_version, ELASTICJOBS.kind):
            raise UsageError(
                f"{file} holds something that is no ElasticJob of {ELASTICJOBS.api_version}: "
                "`kubectl apply -f` takes other kinds"
            )
        metadata = body.get("metadata")
        if not isinstance(metadata, dict) or not _is_name(metadata.get("name")):
            raise UsageError(f"{file}: an ElasticJob needs metadata.name")
        if not _is_name(metadata.get("namespace", "default")):
            raise UsageError(f"{file}: metadata.namespace is no name: write one, or leave it out")
        if not isinstance(body.get("spec"), dict):
            raise UsageError(f"{file}: an ElasticJob needs a spec")
    if not found:
        raise UsageError(f"{file} is empty")
    return found


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and value != ""


# --- calls ---------------------------------------------------------------------------------------


def _run(context: Context, args: argparse.Namespace, work: Callable[[Api], Awaitable[int]]) -> int:
    """Work with a cluster, its errors as exit codes."""

    async def main() -> int:
        async with await Api.connect(kubeconfig=args.kubeconfig, context=args.context) as api:
            return await work(api)

    try:
        return asyncio.run(main())
    except Absent as error:
        context.out.note(str(error))
        return NOT_FOUND
    except (Forbidden, Unauthorized) as error:
        context.out.note(str(error))
        return NOT_ALLOWED
    except TimeoutError:
        context.out.note(
            f"it is not so after {args.timeout:g} s: `elasticctl ls` says how far it is"
        )
        return TIMED_OUT


def _space(api: Api, args: argparse.Namespace) -> str:
    return str(args.namespace or api.namespace)


async def _get(api: Api, name: str, namespace: str) -> Json:
    return await api.get(ELASTICJOBS, namespace, name)


def _placed(api: Api, args: argparse.Namespace, body: Json) -> Json:
    """The object whole, in its namespace. UsageError where it says another than --namespace, as with kubectl."""
    own = body["metadata"].get("namespace")
    if own and args.namespace not in (None, own):
        raise UsageError(
            f"{body['metadata']['name']} is of namespace {own}: give --namespace {own}, or leave it out"
        )
    namespace = args.namespace or own or api.namespace
    return {
        **body,
        "apiVersion": ELASTICJOBS.api_version,
        "kind": ELASTICJOBS.kind,
        "metadata": {**body["metadata"], "namespace": namespace},
    }


async def _try(api: Api, whole: Json) -> Json:
    """What the server would make of it. A field that it would drop without a word is refused, and what the operator
    would refuse: not every server evaluates its rules."""
    metadata = whole["metadata"]
    tried = await api.create(ELASTICJOBS, metadata["namespace"], whole, dry_run=True)
    if unknown := submission.lost(whole["spec"], tried.get("spec"), "spec"):
        raise UsageError(f"an ElasticJob has no field {', '.join(sorted(unknown))}")
    if refused := violations(metadata["name"], tried["spec"]):
        raise UsageError("; ".join(refused))
    return tried


def _set_suspend(
    context: Context,
    argv: Sequence[str],
    verb: Any,
    value: bool,
    settled: Callable[[Json], bool],
) -> int:
    parser = _parser(verb.__name__, verb)
    parser.add_argument("name", type=said, help="the job")
    _add_write(parser, "until its pods are gone" if value else "until it trains")
    args = parser.parse_args(argv)
    done = "suspended" if value else "resumed"
    return _edit(context, args, {"spec": {"suspend": value}}, done, settled)


def _edit(
    context: Context,
    args: argparse.Namespace,
    patch: Json,
    done: str,
    settled: Callable[[Json], bool],
    *,
    needs_pods: bool = False,
) -> int:
    async def work(api: Api) -> int:
        if needs_pods and (await _get(api, args.name, _space(api, args)))["spec"].get("suspend"):
            raise UsageError(f"{args.name} is suspended and has no pods: leave --wait out")
        item = await api.merge(
            ELASTICJOBS, _space(api, args), args.name, patch, dry_run=args.dry_run
        )
        _show_written(context.out, item, done, dry_run=args.dry_run)
        if args.wait and not args.dry_run:
            return await following.follow(
                api, item, context.out, args, until=settled, silently=True
            )
        return 0

    return _run(context, args, work)


def _show_written(out: Output, item: Json, done: str, *, dry_run: bool) -> None:
    if out.form in ("table", "wide"):
        out.text(f"{listing.full_name(item)} {done}{' (dry run)' if dry_run else ''}")
    else:
        listing.write(out, item)
