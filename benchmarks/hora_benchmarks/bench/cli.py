"""The commands of `hora bench`. Each imports only what it needs."""

from __future__ import annotations

import re

import click

from hora.cli.options import PositiveInt
from hora.runs import exit_codes


class ByteSizes(click.ParamType):
    """Sizes in bytes as 4K,64K,1M: K, M and G count in steps of 1024."""

    name = "SIZES"
    message_names_option = True

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        if isinstance(value, list):
            return value
        sizes = []
        for part in str(value).split(","):
            match = re.fullmatch(r"(\d+)([KMG]?)B?", part.strip().upper())
            if match is None or int(match[1]) == 0:
                self.fail(f"--sizes takes sizes as 4K,64K,1M, not {part.strip()!r}", param, ctx)
            sizes.append(int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]])
        return sizes


@click.group()
def bench() -> None:
    """The commands of `hora bench` besides `start`."""


@bench.command()
@click.option("-n", "size", type=PositiveInt(), default=2, help="Number of ranks. E.g. -n 4. Default: 2.")
@click.option(
    "--sizes",
    type=ByteSizes(),
    default="4K,64K,1M,16M,100M",
    help="Sizes in bytes. E.g. --sizes 4K,1M. Default: 4K,64K,1M,16M,100M.",
)
@click.option("--repeats", type=PositiveInt(), default=20, help="Repeats of each. E.g. --repeats 50. Default: 20.")
@click.option("--only", metavar="NAMES", help="Measure only these. E.g. --only auto,ring/shm,gloo.")
@click.option(
    "--json", "json_path", metavar="FILE", help="Also write the results as JSON lines. E.g. --json out.jsonl."
)
@click.option("--plot", "plot_path", metavar="FILE.png", help="Also draw them. E.g. --plot out.png.")
def allreduce(
    size: int, sizes: list[int], repeats: int, only: str | None, json_path: str | None, plot_path: str | None
) -> int:
    """All-reduce: every algorithm and transport, against Gloo and Open MPI.

    \b
      hora bench allreduce -n 2 --sizes 4K,1M --json out.jsonl
    """
    from hora_benchmarks.bench.allreduce import main as measure

    names = [name.strip() for name in only.split(",") if name.strip()] if only else None
    try:
        return measure(size, sizes, repeats, json_path, plot_path, names)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


@bench.command()
@click.option("-n", "size", type=PositiveInt(), default=2, help="Number of ranks. E.g. -n 4. Default: 2.")
@click.option(
    "--model",
    type=click.Choice(["mlp", "gpt", "cnn", "gpt34m", "gpt236m"]),
    default="mlp",
    help="What is trained. E.g. --model gpt. Default: mlp.",
)
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    help="Where. On a GPU DDP goes through NCCL, and several ranks may share it. E.g. --device cuda. Default: cpu.",
)
@click.option("--steps", type=PositiveInt(), default=5, help="Steps of each in a round. E.g. --steps 10. Default: 5.")
@click.option("--rounds", type=PositiveInt(), default=10, help="Rounds of all in turn. E.g. --rounds 20. Default: 10.")
@click.option("--only", metavar="NAMES", help="Measure only these. E.g. --only independent,ddp/gloo,shared.")
@click.option(
    "--all", "everything", is_flag=True, help="Measure every strategy, not only the telling ones. E.g. -n 4 --all."
)
@click.option(
    "--json", "json_path", metavar="FILE", help="Also write the results as JSON lines. E.g. --json out.jsonl."
)
@click.option("--plot", "plot_path", metavar="FILE.png", help="Also draw them. E.g. --plot out.png.")
def train(
    size: int,
    model: str,
    device: str,
    steps: int,
    rounds: int,
    only: str | None,
    everything: bool,
    json_path: str | None,
    plot_path: str | None,
) -> int:
    """A training step under every strategy, against plain PyTorch and DDP on Gloo or NCCL.

    \b
      hora bench train -n 2 --model mlp --json out.jsonl
    """
    from hora_benchmarks.bench import train as training

    if only is not None and everything:
        raise click.UsageError("--only and --all contradict each other; give one of them")
    names = [name.strip() for name in only.split(",") if name.strip()] if only is not None else None
    try:
        those = training.choose(size, names, everything=everything, device=device)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    return training.main(those, model, steps, rounds, json_path, plot_path, device)


@bench.command()
@click.option("-n", "size", type=PositiveInt(), default=2, help="Number of workers. E.g. -n 4. Default: 2.")
@click.option("--servers", type=PositiveInt(), default=1, help="Number of servers. E.g. --servers 2. Default: 1.")
@click.option(
    "--params",
    default="10M,100M",
    metavar="SIZES",
    help="Numbers of parameters. E.g. --params 1M,10M. Default: 10M,100M.",
)
@click.option("--rounds", type=PositiveInt(), default=10, help="Rounds of all in turn. E.g. --rounds 20. Default: 10.")
@click.option(
    "--optimizer",
    type=click.Choice(["sgd", "adamw"]),
    default="sgd",
    help="What Hora's servers do. E.g. --no-peers --optimizer adamw, where they are the bottleneck. The peers do sgd.",
)
@click.option("--no-peers", is_flag=True, help="Measure only Hora and the memory limit. E.g. -n 4 --no-peers.")
@click.option(
    "--install-peers",
    is_flag=True,
    help="Make an environment for each peer under ~/.cache/hora/peers and end. E.g. hora bench ps --install-peers.",
)
@click.option(
    "--json", "json_path", metavar="FILE", help="Also write the results as JSON lines. E.g. --json out.jsonl."
)
def ps(
    size: int,
    servers: int,
    params: str,
    rounds: int,
    optimizer: str,
    no_peers: bool,
    install_peers: bool,
    json_path: str | None,
) -> int:
    """Push-pull of a whole model, against Ray actors, TensorFlow and the memory limit.

    \b
      hora bench ps -n 2 --servers 1 --params 10M --json out.jsonl
    """
    import functools

    from hora_benchmarks.bench import ps as pushing
    from hora_benchmarks.bench import ps_hora, ps_peers, ps_table

    try:
        if install_peers:
            for peer in ps_peers.PACKAGES:
                ps_peers.install(peer)
            return exit_codes.OK
        sizes = [ps_table.params_of(part) for part in params.split(",")]
        peers = () if no_peers else pushing.PEERS
        ours = functools.partial(ps_hora.contestants, optimizer=optimizer)
        return pushing.main(size, servers, sizes, json_path, rounds, peers, ours)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


@bench.command()
@click.option("--seeds", type=PositiveInt(), default=3, help="Runs of each. E.g. --seeds 5. Default: 3.")
@click.option(
    "--json", "json_path", metavar="FILE", help="Also write the results as JSON lines. E.g. --json out.jsonl."
)
@click.option("--plot", "plot_path", metavar="FILE.png", help="Also draw them. E.g. --plot out.png.")
def staleness(seeds: int, json_path: str | None, plot_path: str | None) -> int:
    """What stale gradients cost under ps:mode=async, and what the corrections win back.

    \b
      hora bench staleness --plot staleness.png
    """
    from hora_benchmarks.bench.staleness import main as sweep

    return sweep(seeds, json_path, plot_path)


@bench.command()
@click.option("-n", "size", type=PositiveInt(), default=2, help="Number of workers. E.g. -n 4. Default: 2.")
@click.option(
    "--task",
    "tasks",
    type=click.Choice(["digits", "gpt"]),
    multiple=True,
    help="What is learnt; may be given again. E.g. --task digits. Default: both.",
)
@click.option("--seeds", type=PositiveInt(), help="Models of each. E.g. --seeds 5. Default: 3 for digits, 1 for gpt.")
@click.option("--sweep", is_flag=True, help="Try four learning rates for each strategy instead. E.g. --sweep.")
@click.option("--quick", is_flag=True, help="64 steps and one seed: only to see that it works. E.g. --quick.")
@click.option(
    "--json", "json_path", metavar="FILE", help="Also write the results as JSON lines. E.g. --json out.jsonl."
)
@click.option("--plot", "plot_path", metavar="FILE.png", help="Also draw the curves. E.g. --plot out.png.")
def quality(
    size: int,
    tasks: tuple[str, ...],
    seeds: int | None,
    sweep: bool,
    quick: bool,
    json_path: str | None,
    plot_path: str | None,
) -> int:
    """Quality of Local SGD and DiLoCo after as many samples as the ring, and the bytes they send.

    \b
      hora bench quality -n 2 --plot quality.png
    """
    from hora_benchmarks.bench.quality import main as measure

    if seeds is not None and (sweep or quick):
        raise click.UsageError("--sweep and --quick have one seed of their own; leave --seeds out")
    return measure(size, tasks or ("digits", "gpt"), json_path, plot_path, seeds=seeds, quick=quick, sweep=sweep)


@bench.command()
@click.option("-n", "size", type=PositiveInt(), default=4, help="Number of workers. E.g. -n 2. Default: 4.")
@click.option(
    "--rates",
    default="100mbit,1gbit",
    metavar="RATES",
    help="How fast each worker's link is, both ways. E.g. --rates 50mbit. Default: 100mbit,1gbit.",
)
@click.option(
    "--model",
    type=click.Choice(["mlp", "gpt", "cnn"]),
    default="mlp",
    help="What is trained. E.g. --model gpt. Default: mlp.",
)
@click.option("--repeats", type=PositiveInt(), default=3, help="Repeats of each. E.g. --repeats 5. Default: 3.")
@click.option(
    "--only",
    metavar="NAMES",
    help='Measure only these, any strategy among them. E.g. --only "no communication,ring,diloco:every=64,wire=int8".',
)
@click.option(
    "--all", "everything", is_flag=True, help="Measure further strategies and options too. E.g. --rates 100mbit --all."
)
@click.option(
    "--json", "json_path", metavar="FILE", help="Also write the results as JSON lines. E.g. --json out.jsonl."
)
@click.option("--plot", "plot_path", metavar="FILE.png", help="Also draw them. E.g. --plot out.png.")
def local(
    size: int,
    rates: str,
    model: str,
    repeats: int,
    only: str | None,
    everything: bool,
    json_path: str | None,
    plot_path: str | None,
) -> int:
    """Samples/s and bytes over slow links: ring, Local SGD, DiLoCo, DDP on Gloo.

    As root the workers run in network namespaces with links that the kernel slows down; otherwise Hora's transport
    limits its own rate, and the table says so.

    \b
      hora bench local --rates 100mbit --json out.jsonl --plot out.png
    """
    from hora_benchmarks.bench import links
    from hora_benchmarks.bench import local as rounds

    if only is not None and everything:
        raise click.UsageError("--only and --all contradict each other; give one of them")
    wanted = rounds.names(only) if only is not None else rounds.DEFAULT + (rounds.FURTHER if everything else ())
    speeds = [part.strip() for part in rates.split(",")]
    try:
        those = [rounds.contestant(name) for name in dict.fromkeys(wanted)]
        for speed in speeds:
            links.bits_per_s(speed)
        return rounds.main(size, those, speeds, model, repeats, json_path, plot_path)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


@bench.command()
@click.option(
    "--hosts-sim", "num_hosts", type=PositiveInt(), default=4, help="Number of hosts. E.g. --hosts-sim 2. Default: 4."
)
@click.option(
    "--rate",
    default="1gbit",
    metavar="RATE",
    help="How fast each host's link is, both ways. E.g. --rate 100mbit. Default: 1gbit.",
)
@click.option(
    "--sizes",
    type=ByteSizes(),
    default="25M,100M",
    help="What is all-reduced. E.g. --sizes 1M,25M. Default: 25M,100M.",
)
@click.option("--rounds", type=PositiveInt(), default=7, help="Rounds of all in turn. E.g. --rounds 11. Default: 7.")
@click.option(
    "--parts",
    metavar="NAMES",
    help="Only these of allreduce, train, ps and picture. E.g. --parts ps. Default: the first three.",
)
@click.option(
    "--picture",
    "picture_path",
    metavar="FILE.png",
    help="Also measure and draw the star's and the ring's time over 2 to 16 hosts. E.g. --picture star-ring.png.",
)
@click.option("--quick", is_flag=True, help="Little data and one round: only to see that it works. E.g. --quick.")
@click.option(
    "--json", "json_path", metavar="FILE", help="Also write the results as JSON lines. E.g. --json out.jsonl."
)
@click.option("--plot", "plot_path", metavar="FILE.png", help="Also draw them. E.g. --plot out.png.")
def hosts(
    num_hosts: int,
    rate: str,
    sizes: list[int],
    rounds: int,
    parts: str | None,
    picture_path: str | None,
    quick: bool,
    json_path: str | None,
    plot_path: str | None,
) -> int:
    """All-reduce, training and servers over slow hosts, against Gloo and Open MPI.

    The hosts are network namespaces on this machine with links that the kernel slows down; that needs root. Each
    result is compared with the time that the links alone would take.

    \b
      hora bench hosts --hosts-sim 4 --rate 1gbit --json out.jsonl --plot out.png
      hora bench hosts --parts picture --picture star-ring.png
    """
    from hora_benchmarks.bench import hosts as over_hosts

    names = [name.strip() for name in parts.split(",") if name.strip()] if parts is not None else None
    try:
        plan = over_hosts.Plan(hosts=num_hosts, rate=rate, sizes=sizes, rounds=rounds)
        chosen = over_hosts.choose(names, picture=picture_path is not None)
        plan = over_hosts.quick(plan) if quick else plan
        return over_hosts.main(plan, chosen, json_path, plot_path, picture_path)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


@bench.command()
@click.option("-n", "size", type=PositiveInt(), default=2, help="Number of workers. E.g. -n 4. Default: 2.")
@click.option(
    "--strategy",
    default="auto",
    metavar="TEXT",
    help="How they train. E.g. --strategy local:every=8. Default: auto.",
)
@click.option("--seconds", type=float, default=8.0, help="How long each run counts. E.g. --seconds 20. Default: 8.")
@click.option("--repeats", type=PositiveInt(), default=3, help="Runs of each kind. E.g. --repeats 5. Default: 3.")
@click.option(
    "--only", metavar="NAMES", help='Measure only these kinds besides "off". E.g. --only idle, --only "idle,json × 8".'
)
@click.option(
    "--json", "json_path", metavar="FILE", help="Also write the results as JSON lines. E.g. --json out.jsonl."
)
def serve(size: int, strategy: str, seconds: float, repeats: int, only: str | None, json_path: str | None) -> int:
    """Predictions per second during and after training, and what they cost it.

    \b
      hora bench serve --seconds 8 --json out.jsonl
    """
    from hora.strategies import parse
    from hora_benchmarks.bench import serve as serving

    names = [name.strip() for name in only.split(",") if name.strip()] if only is not None else None
    if not seconds > 0:
        raise click.UsageError(f"--seconds takes a number of seconds above 0, not {seconds:g}")
    try:
        kinds = serving.choose(names)
        return serving.main(kinds, size, parse(strategy).spell(), seconds, repeats, json_path)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


@bench.command()
@click.option("-n", "size", type=PositiveInt(), default=2, help="Number of workers. E.g. -n 4. Default: 2.")
@click.option(
    "--model",
    type=click.Choice(["mlp", "gpt", "both"]),
    default="both",
    help="What is trained. E.g. --model mlp. Default: both.",
)
@click.option("--rounds", type=PositiveInt(), help="Rounds of both in turn. E.g. --rounds 60. Default: 30, gpt 16.")
@click.option(
    "--records",
    type=PositiveInt(),
    help="How many records the watcher gets. E.g. --records 100000. Default: 1000000.",
)
@click.option(
    "--json", "json_path", metavar="FILE", help="Also write the results as JSON lines. E.g. --json out.jsonl."
)
def observe(size: int, model: str, rounds: int | None, records: int | None, json_path: str | None) -> int:
    """What monitoring costs: samples/s with panel, dashboard, trace and the rest, and without.

    \b
      hora bench observe --model mlp --json out.jsonl
    """
    from hora_benchmarks.bench.observe import main as measure

    return measure(size, ["mlp", "gpt"] if model == "both" else [model], rounds, records, json_path)
