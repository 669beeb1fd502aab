"""The commands of `hora bench`. Each imports only what it needs."""

from __future__ import annotations

import click

from hora.cli.options import ByteSizes, PositiveInt
from hora.runs import exit_codes


@click.group()
def bench() -> None:
    """The commands of `hora bench` besides `start`."""


@bench.command()
@click.option("-n", "size", type=PositiveInt(), default=2, help="How many ranks, e.g. -n 4. Without it: 2.")
@click.option(
    "--sizes",
    type=ByteSizes(),
    default="4K,64K,1M,16M,100M",
    help="Sizes in bytes, e.g. --sizes 4K,1M. Without it: 4K,64K,1M,16M,100M.",
)
@click.option(
    "--repeats", type=PositiveInt(), default=20, help="Measurements of each, e.g. --repeats 50. Without it: 20."
)
@click.option("--only", metavar="NAMES", help="Measure only these, e.g. --only auto,ring/shm,gloo.")
@click.option(
    "--json", "json_path", metavar="FILE", help="Also write the results as JSON lines, e.g. --json out.jsonl."
)
@click.option("--plot", "plot_path", metavar="FILE.png", help="Also draw them, e.g. --plot out.png.")
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
@click.option("-n", "size", type=PositiveInt(), default=2, help="How many ranks, e.g. -n 4. Without it: 2.")
@click.option(
    "--model",
    type=click.Choice(["mlp", "gpt", "cnn"]),
    default="mlp",
    help="What is trained, e.g. --model gpt. Without it: mlp.",
)
@click.option(
    "--steps", type=PositiveInt(), default=5, help="Steps of each in a round, e.g. --steps 10. Without it: 5."
)
@click.option(
    "--rounds", type=PositiveInt(), default=10, help="Rounds of all in turn, e.g. --rounds 20. Without it: 10."
)
@click.option("--only", metavar="NAMES", help="Measure only these, e.g. --only independent,ddp/gloo,shared.")
@click.option(
    "--all", "everything", is_flag=True, help="Measure every strategy, not only the telling ones, e.g. -n 4 --all."
)
@click.option(
    "--json", "json_path", metavar="FILE", help="Also write the results as JSON lines, e.g. --json out.jsonl."
)
@click.option("--plot", "plot_path", metavar="FILE.png", help="Also draw them, e.g. --plot out.png.")
def train(
    size: int,
    model: str,
    steps: int,
    rounds: int,
    only: str | None,
    everything: bool,
    json_path: str | None,
    plot_path: str | None,
) -> int:
    """A training step under every strategy, against plain PyTorch and DDP on Gloo.

    \b
      hora bench train -n 2 --model mlp --json out.jsonl
    """
    from hora_benchmarks.bench import train as training

    if only is not None and everything:
        raise click.UsageError("--only and --all contradict each other; give one of them")
    names = [name.strip() for name in only.split(",") if name.strip()] if only is not None else None
    try:
        those = training.choose(size, names, everything=everything)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    return training.main(those, model, steps, rounds, json_path, plot_path)


@bench.command()
@click.option("-n", "size", type=PositiveInt(), default=2, help="How many workers, e.g. -n 4. Without it: 2.")
@click.option("--servers", type=PositiveInt(), default=1, help="How many servers, e.g. --servers 2. Without it: 1.")
@click.option(
    "--params",
    default="10M,100M",
    metavar="SIZES",
    help="Numbers of parameters, e.g. --params 1M,10M. Without it: 10M,100M.",
)
@click.option(
    "--rounds", type=PositiveInt(), default=10, help="Rounds of all in turn, e.g. --rounds 20. Without it: 10."
)
@click.option(
    "--optimizer",
    type=click.Choice(["sgd", "adamw"]),
    default="sgd",
    help="What Hora's servers do, e.g. --no-peers --optimizer adamw, where they are the bottleneck. The peers do sgd.",
)
@click.option("--no-peers", is_flag=True, help="Measure only Hora and the memory limit, e.g. -n 4 --no-peers.")
@click.option(
    "--install-peers",
    is_flag=True,
    help="Make an environment for each peer under ~/.cache/hora/peers and end, e.g. hora bench ps --install-peers.",
)
@click.option(
    "--json", "json_path", metavar="FILE", help="Also write the results as JSON lines, e.g. --json out.jsonl."
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
@click.option("--seeds", type=PositiveInt(), default=3, help="Runs of each, e.g. --seeds 5. Without it: 3.")
@click.option(
    "--json", "json_path", metavar="FILE", help="Also write the results as JSON lines, e.g. --json out.jsonl."
)
@click.option("--plot", "plot_path", metavar="FILE.png", help="Also draw them, e.g. --plot out.png.")
def staleness(seeds: int, json_path: str | None, plot_path: str | None) -> int:
    """What stale gradients cost under ps:mode=async, and what the corrections win back.

    \b
      hora bench staleness --plot staleness.png
    """
    from hora_benchmarks.bench.staleness import main as sweep

    return sweep(seeds, json_path, plot_path)


@bench.command()
@click.option("-n", "size", type=PositiveInt(), default=2, help="How many workers, e.g. -n 4. Without it: 2.")
@click.option(
    "--task",
    "tasks",
    type=click.Choice(["digits", "gpt"]),
    multiple=True,
    help="What is learnt; may be given again, e.g. --task digits. Without it: both.",
)
@click.option(
    "--seeds", type=PositiveInt(), help="Models of each, e.g. --seeds 5. Without it: 3 for digits, 1 for gpt."
)
@click.option("--sweep", is_flag=True, help="Try four learning rates for each strategy instead, e.g. --sweep.")
@click.option("--quick", is_flag=True, help="64 steps and one seed: only to see that it works, e.g. --quick.")
@click.option(
    "--json", "json_path", metavar="FILE", help="Also write the results as JSON lines, e.g. --json out.jsonl."
)
@click.option("--plot", "plot_path", metavar="FILE.png", help="Also draw the curves, e.g. --plot out.png.")
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
@click.option("-n", "size", type=PositiveInt(), default=4, help="How many workers, e.g. -n 2. Without it: 4.")
@click.option(
    "--rates",
    default="100mbit,1gbit",
    metavar="RATES",
    help="How fast each worker's link is, both ways, e.g. --rates 50mbit. Without it: 100mbit,1gbit.",
)
@click.option(
    "--model",
    type=click.Choice(["mlp", "gpt", "cnn"]),
    default="mlp",
    help="What is trained, e.g. --model gpt. Without it: mlp.",
)
@click.option("--repeats", type=PositiveInt(), default=3, help="Measurements of each, e.g. --repeats 5. Without it: 3.")
@click.option(
    "--only",
    metavar="NAMES",
    help='Measure only these, any strategy among them, e.g. --only "no communication,ring,diloco:every=64,wire=int8".',
)
@click.option(
    "--all", "everything", is_flag=True, help="Measure further strategies and options too, e.g. --rates 100mbit --all."
)
@click.option(
    "--json", "json_path", metavar="FILE", help="Also write the results as JSON lines, e.g. --json out.jsonl."
)
@click.option("--plot", "plot_path", metavar="FILE.png", help="Also draw them, e.g. --plot out.png.")
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
    "--hosts-sim", "num_hosts", type=PositiveInt(), default=4, help="How many hosts, e.g. --hosts-sim 2. Without it: 4."
)
@click.option(
    "--rate",
    default="1gbit",
    metavar="RATE",
    help="How fast each host's link is, both ways, e.g. --rate 100mbit. Without it: 1gbit.",
)
@click.option(
    "--sizes",
    type=ByteSizes(),
    default="25M,100M",
    help="What is all-reduced, e.g. --sizes 1M,25M. Without it: 25M,100M.",
)
@click.option("--rounds", type=PositiveInt(), default=7, help="Rounds of all in turn, e.g. --rounds 11. Without it: 7.")
@click.option(
    "--parts",
    metavar="NAMES",
    help="Only these of allreduce, train, ps and picture, e.g. --parts ps. Without it: the first three.",
)
@click.option(
    "--picture",
    "picture_path",
    metavar="FILE.png",
    help="Also measure and draw the star's and the ring's time over 2 to 16 hosts, e.g. --picture star-ring.png.",
)
@click.option("--quick", is_flag=True, help="Little data and one round: only to see that it works, e.g. --quick.")
@click.option(
    "--json", "json_path", metavar="FILE", help="Also write the results as JSON lines, e.g. --json out.jsonl."
)
@click.option("--plot", "plot_path", metavar="FILE.png", help="Also draw them, e.g. --plot out.png.")
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
@click.option("-n", "size", type=PositiveInt(), default=2, help="How many workers, e.g. -n 4. Without it: 2.")
@click.option(
    "--strategy",
    default="auto",
    metavar="TEXT",
    help="How they train, e.g. --strategy local:every=8. Without it: auto.",
)
@click.option("--seconds", type=float, default=8.0, help="How long each run counts, e.g. --seconds 20. Without it: 8.")
@click.option("--repeats", type=PositiveInt(), default=3, help="Runs of each kind, e.g. --repeats 5. Without it: 3.")
@click.option(
    "--only", metavar="NAMES", help='Measure only these kinds besides "off", e.g. --only idle, --only "idle,json × 8".'
)
@click.option(
    "--json", "json_path", metavar="FILE", help="Also write the results as JSON lines, e.g. --json out.jsonl."
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
@click.option("-n", "size", type=PositiveInt(), default=2, help="How many workers, e.g. -n 4. Without it: 2.")
@click.option(
    "--model",
    type=click.Choice(["mlp", "gpt", "both"]),
    default="both",
    help="What is trained, e.g. --model mlp. Without it: both.",
)
@click.option("--rounds", type=PositiveInt(), help="Rounds of both in turn, e.g. --rounds 60. Without it: 30, gpt 16.")
@click.option(
    "--records",
    type=PositiveInt(),
    help="How many records the watcher gets, e.g. --records 100000. Without it: 1000000.",
)
@click.option(
    "--json", "json_path", metavar="FILE", help="Also write the results as JSON lines, e.g. --json out.jsonl."
)
def observe(size: int, model: str, rounds: int | None, records: int | None, json_path: str | None) -> int:
    """What monitoring costs: samples/s with panel, dashboard, trace and the rest, and without.

    \b
      hora bench observe --model mlp --json out.jsonl
    """
    from hora_benchmarks.bench.observe import main as measure

    return measure(size, ["mlp", "gpt"] if model == "both" else [model], rounds, records, json_path)
