//! Breaks the network between hosts, which are network namespaces with an interface each; without
//! these the tests are skipped.
//!
//! Each test has two ranks on each of two hosts, in processes. A fault must delay what they do, or
//! end it in an error that names a rank of the other host, or the hub, which is on a third one.

use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Failed, Trial};
use peerlane_collectives::bootstrap::Secret;
use peerlane_collectives::bootstrap::environment::Environment;
use peerlane_collectives::bootstrap::tcp::{HubOptions, TcpBootstrap};
use peerlane_collectives::error::Error;
use peerlane_collectives::group::{Group, GroupOptions};
use peerlane_collectives::topology::Topology;
use peerlane_hal::{Deadline, Rank};
use peerlane_tests::processes::nodes::{Node, hub_address, nodes, open_network, start};
use peerlane_tests::processes::{Child, Parent, finish_all};
use peerlane_tests::{Failure, Outcome};

const RANKS: usize = 4;
/// The longest that a call waits in which the ranks meet the fault.
const TIMEOUT: Duration = Duration::from_secs(6);
/// The time in which every rank must return an error, for a machine that is busy.
const ERROR_WITHIN: Duration = Duration::from_secs(25);
/// The longest that the ranks of a test take.
const PATIENCE: Duration = Duration::from_secs(90);

/// What is done to the network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// Packets are late, and some are lost.
    DelayAndLoss,
    /// Packets are small.
    SmallPackets,
    /// The interface of a host goes down while the ranks work.
    LinkDown,
    /// Nothing that a host sends to the other one arrives, while the ranks work.
    OneDirection,
    /// Nothing that a host sends to the other one arrives, from the beginning.
    Firewall,
}

impl Fault {
    const ALL: [Self; 5] = [
        Self::DelayAndLoss,
        Self::SmallPackets,
        Self::LinkDown,
        Self::OneDirection,
        Self::Firewall,
    ];

    /// Returns whether the ranks end with an error.
    fn breaks(self) -> bool {
        !matches!(self, Self::DelayAndLoss | Self::SmallPackets)
    }

    fn is_from_the_beginning(self) -> bool {
        !matches!(self, Self::LinkDown | Self::OneDirection)
    }

    /// Returns the commands that cause the fault on a host, and those that end it.
    fn commands(self, host: &Node) -> [String; 2] {
        let inside = format!("ip netns exec {}", host.namespace);
        let undo = format!("{inside} tc qdisc del dev eth0 root");
        match self {
            Self::DelayAndLoss => {
                [format!("{inside} tc qdisc add dev eth0 root netem delay 5ms loss 1%"), undo]
            }
            Self::SmallPackets => [
                format!("{inside} ip link set eth0 mtu 1280"),
                format!("{inside} ip link set eth0 mtu 1500"),
            ],
            Self::LinkDown => {
                [format!("{inside} ip link set eth0 down"), format!("{inside} ip link set eth0 up")]
            }
            // The hub is at another address than the other host, and is reached.
            Self::OneDirection | Self::Firewall => [
                format!("{inside} ip route add blackhole 10.0.0.1/32"),
                format!("{inside} ip route del blackhole 10.0.0.1/32"),
            ],
        }
    }
}

fn main() -> ExitCode {
    if let Some(parent) = Parent::find() {
        return parent.exit_code(run_rank(&parent));
    }
    let mut arguments = Arguments::from_args();
    // The faults are on the same hosts.
    arguments.test_threads = Some(1);

    let hosts: Vec<Node> = nodes().into_iter().filter(|node| node.network == "ucx").collect();
    let skipped = hosts.len() < 2;
    if skipped {
        eprintln!(
            "not covered: hosts: two network namespaces are needed; run `cargo xtask test ucx`"
        );
    }
    let has_netem = skipped || shell("tc qdisc add dev lo root netem delay 1ms 2>/dev/null");
    let _ = shell("tc qdisc del dev lo root 2>/dev/null");
    if !has_netem {
        eprintln!("not covered: hosts::DelayAndLoss: the kernel has no netem, or there is no tc");
    }
    let trials = Fault::ALL.map(|fault| {
        let skipped = skipped || fault == Fault::DelayAndLoss && !has_netem;
        let hosts = hosts.clone();
        let run = move || run(fault, &hosts).map_err(Failed::from);
        Trial::test(format!("hosts::{fault:?}"), run).with_ignored_flag(skipped)
    });
    libtest_mimic::run(&arguments, trials.into()).exit_code()
}

/// Runs a line of commands; false if it fails.
fn shell(line: &str) -> bool {
    Command::new("sh").args(["-c", line]).status().is_ok_and(|status| status.success())
}

fn run(fault: Fault, hosts: &[Node]) -> Outcome {
    let [cause, end] = fault.commands(&hosts[1]);
    let begin = |what: &str| {
        let failed = || Failure::new(format!("`{what}` failed"));
        if shell(what) { Ok(()) } else { Err(failed()) }
    };
    if fault.is_from_the_beginning() {
        begin(&cause)?;
    }

    let outcome = run_ranks(fault, hosts, || begin(&cause));
    let _ = shell(&end);
    outcome
}

fn run_ranks(fault: Fault, hosts: &[Node], begin: impl FnOnce() -> Outcome) -> Outcome {
    let secret = Secret::random().map_err(unexpected)?;
    let hub = HubOptions::default().secret(secret.clone()).bind(&hub_address(), RANKS);
    let hub = hub.map_err(unexpected)?;
    let start = |rank: usize| {
        let values = [
            ("RANK", rank.to_string()),
            ("HUB", hub.address().to_string()),
            ("SECRET", secret.expose().to_owned()),
            ("BREAKS", fault.breaks().to_string()),
            ("OPENS", (fault != Fault::Firewall).to_string()),
        ];
        start(&hosts[rank / 2], &values)
    };
    let mut ranks: Vec<Child> = (0..RANKS).map(start).collect::<Outcome<_>>()?;
    let deadline = Deadline::after(PATIENCE);

    if !fault.is_from_the_beginning() {
        for rank in &mut ranks {
            rank.read_until("under way", deadline)?;
        }
        begin()?;
    }
    finish_all(&mut ranks, deadline)
}

fn run_rank(parent: &Parent) -> Outcome {
    let rank = Rank(parent.value("RANK")?);
    let breaks: bool = parent.value("BREAKS")?;
    let secret = Secret::new(&parent.value::<String>("SECRET")?).map_err(unexpected)?;
    let hub: String = parent.value("HUB")?;
    let environment = Environment { secret: Some(secret), ..Environment::at_hub(hub, rank, RANKS) };
    let bootstrap = TcpBootstrap::join(&environment, Deadline::after(PATIENCE));
    let bootstrap = bootstrap.map_err(unexpected)?;

    let begun = Instant::now();
    let opened = open(parent, rank, bootstrap);
    let (group, broken) = match opened {
        Ok(group) => (Some(group), None),
        Err(failure) => (None, Some(failure)),
    };
    let broken = match group {
        Some(group) => work(parent, rank, group, breaks)?,
        None => broken.map(|text| (text, begun.elapsed())),
    };
    match (breaks, broken) {
        (false, None) => {}
        (true, Some((text, took))) => {
            let other_host = if rank.0 < 2 { ["rank 2", "rank 3"] } else { ["rank 0", "rank 1"] };
            // The hub is on neither host.
            let names_other = other_host.iter().chain(&["the hub"]).any(|rank| text.contains(rank));
            if !names_other || took > ERROR_WITHIN {
                return Err(Failure::new(format!("after {took:?}: {text}")));
            }
            parent.print_line(format_args!("passed {text}"));
        }
        (_, broken) => return Err(Failure::new(format!("breaks is {breaks}: {broken:?}"))),
    }
    parent.print_line("done");
    Ok(())
}

fn open(parent: &Parent, rank: Rank, bootstrap: TcpBootstrap) -> Result<Group, String> {
    let text = |error: &dyn std::fmt::Display| error.to_string();
    let network = open_network(parent, rank, RANKS).map_err(|failure| text(&failure))?;
    let local = peerlane_host::Fabric::open(rank, RANKS).map_err(|error| text(&error))?;
    let topology = Topology::of_nodes(&[0, 0, 1, 1]).map_err(|error| text(&error))?;
    // Opening and preparing only meet the fault that is there from the beginning and breaks.
    let opens: bool = parent.value("OPENS").map_err(|failure| text(&failure))?;
    let timeout = if opens { PATIENCE } else { TIMEOUT };
    let options = GroupOptions::default().timeout(timeout).topology(topology);
    options.open_tiers(bootstrap, local, network).map_err(|error| text(&error))
}

/// Gathers and adds until an error, or a few times. Returns the text of the error, and how long the
/// call took.
fn work(
    parent: &Parent,
    rank: Rank,
    mut group: Group,
    breaks: bool,
) -> Outcome<Option<(String, Duration)>> {
    let (rounds, timeout) = if breaks { (u32::MAX, TIMEOUT) } else { (5, PATIENCE) };
    for len in [1000, 70_000] {
        let gather = group.all_gather::<u32>(len).timeout(timeout);
        let mut gather = gather.prepare().map_err(unexpected)?;
        let sum = group.all_reduce::<u32>(len).timeout(timeout);
        let mut sum = sum.prepare().map_err(unexpected)?;
        for round in 0..rounds {
            gather.input_mut().map_err(unexpected)?.fill(100 * round + rank.0);
            sum.input_mut().map_err(unexpected)?.fill(round + rank.0);
            let begun = Instant::now();
            if let Err(error) = gather.run().and_then(|()| sum.run()) {
                return Ok(Some((error.to_string(), begun.elapsed())));
            }

            let gathered = gather.output().map_err(unexpected)?;
            let blocks = (0..).zip(gathered.chunks(len));
            let wrong = blocks.filter(|(other, block)| {
                block.iter().any(|element| *element != 100 * round + other)
            });
            let added = sum.output().map_err(unexpected)?;
            let expected = 4 * round + 6;
            if wrong.count() > 0 || added.iter().any(|element| *element != expected) {
                return Err(Failure::new(format!("wrong elements in round {round} of {len}")));
            }
            if round == 3 {
                parent.print_line("under way");
            }
        }
    }
    group.close().map_err(unexpected)?;
    Ok(None)
}

fn unexpected(error: Error) -> Failure {
    Failure::new(format!("{error} ({})", error.kind()))
}
